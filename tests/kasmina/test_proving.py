"""A harvest and an export compute what the garden does, or copies run where they grew."""

import copy
import warnings

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError

VECTORS = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """A residual layer."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, features):
        return features + torch.tanh(self.mix(features))


class Stack(nn.Module):
    """Four layers in a loop, which a copy may join."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(8, 3)

    def forward(self, features):
        for number, layer in enumerate(self.layers):
            features = self.after(number, layer, features)
        return self.leave(features)

    def after(self, number, layer, features):
        return layer(features)


class SkipToTheMiddle(Stack):
    def forward(self, features):
        skipped = features
        for number, layer in enumerate(self.layers):
            features = layer(features)
            if number == len(self.layers) // 2:
                features = 2 * features + skipped
        return self.leave(features)


class Pairs(Stack):
    def forward(self, features):
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=False):
            features = second(2 * first(features))
        return self.leave(features)


class UShaped(Stack):
    def forward(self, features):
        depth = len(self.layers)
        kept = []
        for number, layer in enumerate(self.layers):
            if number >= (depth + 1) // 2 and kept:
                features = features + kept.pop()
            features = layer(features)
            if number < depth // 2:
                kept.append(features)
        return self.leave(features)


class TapWhileTraining(Stack):
    def after(self, number, layer, features):
        grown = layer(features)
        return 1.5 * grown if self.training and number == 2 else grown


class DepthByBatch(Stack):
    def after(self, number, layer, features):
        return layer(features) if number < len(features) // 4 else features


class ShowsEveryLayer(Stack):
    """Hands out, without names, what every layer gives."""

    def forward(self, features):
        seen = []
        for layer in self.layers:
            features = layer(features)
            seen.append(features)
        return self.leave(features), seen


class NamesEveryLayer(ShowsEveryLayer):
    def forward(self, features):
        logits, seen = super().forward(features)
        return {"logits": logits, "hidden_states": seen}


class Whimsical(Stack):
    """It never gives the same twice."""

    calls = 0

    def forward(self, features):
        self.calls += 1
        return super().forward(features) + self.calls


def grown(host, slots=("layers.1",), plant_by_hand=False):
    """A garden that kept a copy behind each of these layers."""
    torch.manual_seed(0)
    garden = esper.grow(
        host(),
        slots=list(slots),
        example=VECTORS,
        blueprints=["copy"],
        policy="never",
        settings=esper.GrowthSettings(prunes=False),
    )
    if plant_by_hand:
        garden.model.build_in("r0c0", "copy")
    else:
        train(garden, plants=True)
    return garden


def train(garden, plants=False):
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    garden.attach(optimizer)

    def losses():
        return garden.model(VECTORS).square().mean(1)

    slot_ids = garden.model.slot_config.slot_ids if plants else ()
    for slot_id in slot_ids:
        garden.plant(slot_id, "copy")
    for _ in range(5):
        optimizer.zero_grad()
        losses().mean().backward()
        optimizer.step()
        garden.step(losses)
    for slot_id in slot_ids:
        garden.keep(slot_id)


def require_equal(network, garden):
    for count in (1, 3, 8, 16):
        for is_training in (True, False):
            with torch.no_grad():
                ours = network.train(is_training)(VECTORS[:count])
                theirs = garden.model.train(is_training)(VECTORS[:count])
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


DEPEND_ON_DEPTH = [SkipToTheMiddle, Pairs, UShaped, TapWhileTraining, DepthByBatch]


@pytest.mark.parametrize("host", DEPEND_ON_DEPTH)
def test_a_copy_that_would_change_the_network_as_a_member_runs_where_it_grew(host, tmp_path):
    garden = grown(host)
    network = garden.harvest()
    assert len(network.layers) == 4
    require_equal(network, garden)


def test_outputs_of_every_layer_stay_as_many_where_nothing_but_their_number_names_them():
    network = grown(ShowsEveryLayer, plant_by_hand=True).harvest()
    assert (len(network.layers), len(network(VECTORS)[1])) == (4, 4)
    network = grown(NamesEveryLayer, plant_by_hand=True).harvest()
    assert (len(network.layers), len(network(VECTORS)["hidden_states"])) == (5, 5)


@pytest.mark.parametrize("host", [Stack, *DEPEND_ON_DEPTH])
def test_an_export_computes_what_the_garden_does(host, tmp_path):
    garden = grown(host)
    folder = garden.export(tmp_path / "exported")
    scope = {"__name__": "grown", "__file__": str(folder / "grown.py")}
    exec((folder / "grown.py").read_text(), scope)
    network = scope["graft"](host())
    assert len(network.layers) == (5 if host is Stack else 4)
    require_equal(network, garden)


def test_where_one_copy_may_join_its_list_and_another_may_not_each_gets_its_place():
    class Both(Stack):
        """Layers in a loop, and a list in which one number matters."""

        def __init__(self):
            super().__init__()
            self.others = nn.ModuleList(Block() for _ in range(2))

        def forward(self, features):
            features = self.others[0](features)
            for number, other in enumerate(self.others[1:], start=1):
                features = number * other(features)
            return super().forward(features)

    garden = grown(Both, slots=("others.1", "layers.0", "layers.3"))
    network = garden.harvest()
    assert (len(network.layers), len(network.others)) == (6, 2)
    require_equal(network, garden)


def test_a_loaded_garden_takes_the_first_batch_that_it_sees_as_the_example(tmp_path):
    folder = grown(Stack).save(tmp_path / "saved")
    unseen = esper.load(folder, Stack())
    with pytest.warns(UserWarning, match=r"no batch shows .* garden\.model\(batch\)"):
        network = unseen.harvest()
    assert len(network.layers) == 4
    require_equal(network, unseen)
    assert len(unseen.harvest().layers) == 5  # a batch ran through it by now


def test_a_host_that_never_gives_the_same_twice_is_harvested_where_it_grew():
    garden = grown(Whimsical)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(garden.harvest().layers) == 4


def test_proving_changes_nothing():
    garden = grown(Stack)
    garden.model.train().host.layers[0].eval()
    modes = [module.training for module in garden.model.modules()]
    state = copy.deepcopy(garden.model.state_dict())
    torch.manual_seed(5)
    garden.harvest()
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in garden.model.modules()] == modes
    for name, value in garden.model.state_dict().items():
        assert torch.equal(value, state[name])


class Forgetful(nn.Linear):
    """A layer whose copies have weights of their own."""

    def __deepcopy__(self, memo):
        twin = Forgetful(self.in_features, self.out_features)
        memo[id(self)] = twin
        return twin


class Misleading(Stack):
    def __init__(self):
        super().__init__()
        self.leave = Forgetful(8, 3)


def test_a_harvest_that_computes_something_else_is_refused():
    with pytest.raises(HostError, match=r"would not compute .* differs by up to"):
        grown(Misleading).harvest()


# -- modules that are not what they were when growing began -----------------------------------------


def test_a_module_that_is_replaced_after_growing_began_is_an_error_that_names_it():
    garden = grown(Stack)
    garden.model.host.layers[1] = Block()
    for act in (garden.harvest, lambda: train(garden)):
        with pytest.raises(HostError, match=r"another Block stands at 'layers\.1' .* r0c0"):
            act()


def test_a_layer_that_is_compiled_by_itself_goes_on_growing_and_is_harvested():
    torch._dynamo.reset()
    garden = grown(Stack)
    other = grown(Stack)
    garden.model.host.layers[1] = torch.compile(garden.model.host.layers[1], backend="eager")
    train(garden)
    train(other)
    network = garden.harvest()
    assert torch.equal(network.eval()(VECTORS), other.harvest().eval()(VECTORS))
    assert torch.equal(network(VECTORS), garden.model.eval()(VECTORS))


# -- batches that hold more than dense tensors ------------------------------------------------------


class Mixing(Block):
    """Mixes rows by a matrix before it works on each."""

    def forward(self, features, neighbours):
        return super().forward(neighbours @ features)


class Graph(Stack):
    """The matrix comes with every batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(4))

    def forward(self, features, neighbours):
        for layer in self.layers:
            features = layer(features, neighbours)
        return self.leave(features)


class Ragged(Stack):
    """Reads what comes in rows of several lengths."""

    def forward(self, features, ragged):
        return super().forward(features) + ragged.to_padded_tensor(0.0).mean()


RING = torch.eye(16).roll(1, 0)
NOT_DENSE = {
    "sparse_coo": (Graph, RING.to_sparse),
    "sparse_csr": (Graph, RING.to_sparse_csr),
    "nested": (Ragged, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
}


@pytest.mark.filterwarnings("ignore:(Sparse CSR|The PyTorch API of nested)")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_batch_may_hold_tensors_that_are_not_dense(kind, tmp_path):
    host, build = NOT_DENSE[kind]
    batch = (VECTORS, build())
    deepened = host()
    esper.deepen(deepened, to=8, layers="layers", example=batch)
    assert len(deepened.layers) == 8

    garden = esper.grow(host(), slots=["layers.1"], example=batch, blueprints=["copy", "mlp"])
    garden.model.build_in("r0c0", "copy")
    garden.export(tmp_path / "exported")
    network = garden.harvest()
    assert len(network.layers) == 5
    with torch.no_grad():
        assert torch.equal(network.eval()(*batch), garden.model.eval()(*batch))


class Halving(Stack):
    """Writes into the batch that it is called with."""

    def forward(self, features):
        return super().forward(features.mul_(0.5))


def test_proving_leaves_the_batch_as_it_is():
    garden = esper.grow(Halving(), slots=["layers.1"], example=VECTORS.clone(), blueprints=["copy"])
    garden.model.build_in("r0c0", "copy")
    before = garden.model.sample.args[0].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = garden.harvest()
    assert torch.equal(garden.model.sample.args[0], before)
    with torch.no_grad():
        ours, theirs = network(VECTORS.clone()), garden.model(VECTORS.clone())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
