"""Tensors that safetensors does not know, and state that is no tensor: saved, harvested, exported."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import esper
from esper.kasmina.packing import pack, unpack
from esper.leyline.errors import HostError, SaveError
from user_models import made_up

VECTORS = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, vectors):
        return self.leave(self.middle(self.change(self.enter(vectors))))

    def change(self, features):
        return features


class LongComplex(Host):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def change(self, features):
        return features + (features.to(self.turn.dtype) @ self.turn).real.float()


class Sparse(Host):
    layout = torch.sparse_coo

    def __init__(self):
        super().__init__()
        graph = torch.eye(8) + torch.diag(torch.rand(7), 1)
        self.register_buffer("graph", graph.to_sparse(layout=self.layout))

    def change(self, features):
        return torch.sparse.mm(self.graph, features.t()).t()


class SparseRows(Sparse):
    layout = torch.sparse_csr


class Quantised(Host):
    def __init__(self):
        super().__init__()
        weight = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 3, torch.qint8)
        self.register_buffer("weight", weight)

    def change(self, features):
        return features @ self.weight.dequantize()


class TiedAcross(Host):
    """Two layers with one weight, one way and the other."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)
        self.back.weight = nn.Parameter(self.there.weight.t())

    def change(self, features):
        return self.back(self.there(features))


class ExtraState(Host):
    """State of its own that is no parameter and no buffer."""

    factor, shift = 1.0, ()

    def change(self, features):
        return self.factor * features + sum(self.shift)

    def get_extra_state(self):
        return {"factor": self.factor, "shift": self.shift}

    def set_extra_state(self, state):
        self.factor, self.shift = state["factor"], state["shift"]


class Described(Host):
    """Says in its state how it was built, as models of neuraloperator do."""

    def __init__(self, size=4):
        super().__init__()
        self.size = size

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state["_metadata"] = {"size": self.size, "act": nn.functional.gelu, "like": torch.ones(2)}
        return state

    def load_state_dict(self, state, **how):
        return super().load_state_dict({k: v for k, v in state.items() if k != "_metadata"}, **how)


class Parametrised(Host):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.middle)


class Dense(Host):
    """A layer that gets a list, as in a densely connected network."""

    class Layer(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.mix = nn.Linear(8 * count, 8)

        def forward(self, features):
            return self.mix(torch.cat(features, 1))

    def __init__(self):
        super().__init__()
        self.first, self.middle = self.Layer(1), self.Layer(2)

    def forward(self, vectors):
        features = [self.enter(vectors)]
        features.append(self.first(features))
        return self.leave(self.middle(features))


def grown(host, blueprint_id="mlp"):
    torch.manual_seed(0)
    garden = esper.grow(
        host(), slots="middle", example=VECTORS, blueprints=[blueprint_id], policy="never"
    )
    garden.attach(torch.optim.Adam(garden.parameters(), lr=0.01))
    garden.model.build_in("r0c0", blueprint_id)
    for parameter in garden.model.slots.parameters():
        nn.init.normal_(parameter, std=0.3)
    garden.model(VECTORS).square().sum().backward()
    garden.model.link.optimizer.step()
    garden.step(made_up(garden))
    return garden


def exported(garden, folder, host):
    folder = garden.export(folder)
    scope = {"__name__": "grown", "__file__": str(folder / "grown.py")}
    exec((folder / "grown.py").read_text(), scope)
    return scope["graft"](host)


HOSTS = [LongComplex, Sparse, SparseRows, Quantised, TiedAcross, ExtraState, Described]
HOSTS += [Parametrised, Dense]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("blueprint_id", ["mlp", "copy"])
def test_a_network_with_odd_state_is_saved_harvested_and_exported(host, blueprint_id, tmp_path):
    if host is Dense and blueprint_id == "copy":
        with pytest.raises(esper.EsperError, match="its input has shape list"):
            grown(host, blueprint_id)
        return
    garden = grown(host, blueprint_id)
    if host is ExtraState:
        garden.model.host.factor, garden.model.host.shift = 2.5, (torch.ones(8), 0.5)
    expected = garden.model(VECTORS)
    torch.manual_seed(9)
    loaded = esper.load(garden.save(tmp_path / "saved"), host())
    assert torch.equal(loaded.model(VECTORS), expected)
    assert torch.equal(garden.harvest()(VECTORS), expected)
    assert torch.equal(exported(garden, tmp_path / "exported", host())(VECTORS), expected)


def test_a_garden_with_long_complex_weights_resumes_to_the_bit(tmp_path):
    garden = grown(LongComplex)
    loaded = esper.load(garden.save(tmp_path), LongComplex())
    loaded.attach(torch.optim.Adam(loaded.parameters(), lr=0.01))
    for copied in (garden, loaded):
        copied.model.zero_grad()
        copied.model(VECTORS).square().sum().backward()
        copied.model.link.optimizer.step()
    assert torch.equal(garden.model(VECTORS), loaded.model(VECTORS))


def test_weights_that_are_views_of_one_memory_stay_so_in_a_harvest():
    network = grown(TiedAcross).harvest()
    with torch.no_grad():
        network.there.weight.fill_(0.0)
    assert not network.back.weight.any()


def test_extra_state_that_is_no_plain_data_is_refused_by_name(tmp_path):
    garden = grown(ExtraState)
    garden.model.host.factor = object()
    with pytest.raises(
        SaveError, match=r"ExtraState cannot be saved: host\._extra_state holds a obj"
    ):
        garden.save(tmp_path / "saved")
    garden.model.host.factor = 1.0
    garden.model.host.shift = (torch.nn.Linear(1, 1),)
    garden.model.host.change = lambda features: features
    with pytest.raises(HostError, match="cannot be exported: _extra_state holds a Linear"):
        garden.export(tmp_path / "exported")


def test_a_network_that_describes_itself_otherwise_is_not_the_saved_one(tmp_path):
    garden = grown(Described)
    with pytest.raises(SaveError, match="_metadata is another one"):
        esper.load(garden.save(tmp_path / "saved"), Described(size=5))
    with pytest.raises(ValueError, match="_metadata is another one"):
        exported(garden, tmp_path / "exported", Described(size=5))


def tensors():
    torch.manual_seed(3)
    weight, wide = torch.randn(3, 4), torch.randn(4, 4)
    scales, zeros = torch.rand(3) + 0.1, torch.arange(3)
    return {
        "complex128": torch.randn(2, dtype=torch.complex128),
        "sparse_coo": wide.relu().to_sparse(),
        "sparse_csr": wide.to_sparse_csr(),
        "sparse_csc": wide.to_sparse_csc(),
        "sparse_bsr": wide.to_sparse_bsr((2, 2)),
        "sparse_bsc": wide.to_sparse_bsc((2, 2)),
        "qint8": torch.quantize_per_tensor(weight, 0.1, 3, torch.qint8),
        "qint32": torch.quantize_per_tensor(weight, 1e-9, 3, torch.qint32),
        "by channel": torch.quantize_per_channel(weight, scales, zeros, 0, torch.quint8),
        "weight": weight,
        "transposed": weight.t(),
        "part": weight[1:],
        "empty": torch.empty(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bfloat16": weight.bfloat16(),
    }


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_comes_back_from_safetensors_as_it_was(name, tmp_path):
    wanted = tensors()
    save_file(pack(wanted), tmp_path / "tensors.safetensors")
    tensor = unpack(load_file(tmp_path / "tensors.safetensors"))[name]
    other = wanted[name]
    assert (tensor.dtype, tensor.layout, tensor.shape) == (other.dtype, other.layout, other.shape)
    if other.is_quantized:
        assert torch.equal(tensor.int_repr(), other.int_repr())
        tensor, other = tensor.dequantize(), other.dequantize()
    if other.layout is not torch.strided:
        tensor, other = tensor.to_dense(), other.to_dense()
    assert torch.equal(tensor, other)
