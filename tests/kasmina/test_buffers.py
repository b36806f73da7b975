"""Buffers: those that no state dict has are saved, and a look at a model leaves all as they were."""

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.buffers import read_buffers, write_buffers
from esper.leyline.errors import SaveError
from user_models import losses_of, random_vectors

VECTORS = random_vectors()


class Remembering(nn.Module):
    """Writes to its buffers in evaluation too, and makes two of them as it runs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(6), persistent=False)

    def forward(self, vectors):
        self.seen += 1
        self.mean = vectors.mean(0)
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(len(vectors)), persistent=False)
        return self.last(self.first(vectors) * self.wide + self.seen)


def grow(host, **options):
    return esper.grow(host, slots="first", example=VECTORS, policy="never", **options)


def test_buffers_that_are_not_persistent_are_saved(tmp_path):
    garden = grow(Remembering())
    for _ in range(3):
        garden.model(VECTORS)
    garden.model.host.table[0] = 7.0
    expected = read_buffers(garden.model)
    assert sorted(expected) == ["host.mean", "host.seen", "host.table"]
    garden.save(tmp_path)
    assert (tmp_path / "garden-buffers.safetensors").exists()
    loaded = esper.load(tmp_path, Remembering())
    for found in (read_buffers(loaded.model), read_buffers(garden.model)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(loaded.model(VECTORS), garden.model(VECTORS))
    held = garden.model.host.seen
    garden.restore(tmp_path)
    assert garden.model.host.seen is held
    assert float(held) == 3.0
    assert not [name for name in loaded.model.state_dict() if "seen" in name]


def test_a_save_without_such_buffers_replaces_one_with_them(tmp_path):
    grow(Remembering()).save(tmp_path)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    esper.grow(plain, slots="0", example=VECTORS, policy="never").save(tmp_path)
    assert not list(tmp_path.glob("garden-buffers*"))


def test_a_copy_in_a_slot_keeps_such_buffers_of_its_own(tmp_path):
    class Block(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, vectors):
            self.seen += 1
            return super().forward(vectors)

    def build():
        return nn.Sequential(Block(), nn.Linear(6, 3))

    garden = esper.grow(
        build(), slots="0", example=VECTORS, blueprints=["copy"], policy="schedule:epochs=0"
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.step(lambda: losses_of(garden.model, VECTORS))
    losses_of(garden.model, VECTORS).mean().backward()
    expected = read_buffers(garden.model)
    assert len(expected) == 2
    found = read_buffers(esper.load(garden.save(tmp_path), build()).model)
    assert expected == found


def test_a_buffer_of_another_shape_is_replaced():
    model = Remembering()
    write_buffers(model, {"seen": torch.ones(4), "wide": torch.full((6,), 2.0)})
    assert model.seen.shape == (4,)
    assert model.wide.tolist() == [2.0] * 6


def test_a_buffer_of_a_module_that_is_not_there_is_refused(tmp_path):
    class Outer(nn.Sequential):
        def __init__(self, inner):
            super().__init__(nn.Linear(6, 6), nn.Linear(6, 3))
            if inner:
                self.inner = nn.Module()
                self.inner.register_buffer("own", torch.ones(2), persistent=False)

        def forward(self, vectors):
            return self[1](self[0](vectors))

    esper.grow(Outer(True), slots="0", example=VECTORS, policy="never").save(tmp_path)
    with pytest.raises(SaveError, match=r"does not fit together .*inner"):
        esper.load(tmp_path, Outer(False))


@pytest.mark.parametrize("look", [esper.inspect, grow], ids=["inspect", "grow"])
def test_buffers_written_in_evaluation_are_left_as_they_were(look):
    model = Remembering().eval()
    if look is grow:
        grow(model)
    else:
        esper.inspect(model, VECTORS)
    assert float(model.seen) == 0.0
    assert model.mean is None
