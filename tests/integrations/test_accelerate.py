"""accelerate's own save_state and load_state around a growing network."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from esper.integrations.accelerate import join
from esper.leyline.errors import SettingError
from esper.leyline.lifecycle import StageLengths
from user_models import CNN, grow_cnn, losses_of, random_images

accelerate = pytest.importorskip("accelerate")
IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
PLAN = {0: (1, 0, 1, 0), 1: (1, 1, 2, 0), 4: (1, 0, 3, 0)}
EPOCHS = 7


class Loop:
    """A loop as accelerate's manual has it."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.garden = grow_cnn(
            PLAN, host=CNN(), attach=False, scale=0.5, max_seeds=4, lengths=StageLengths(ramp=2)
        )
        optimizer = torch.optim.AdamW(self.garden.parameters(), lr=1e-2)
        self.garden.attach(optimizer)
        self.average = self.garden.ema(0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            self.garden.model, optimizer, schedule
        )
        join(self.accelerator, self.garden)

    def train(self, epochs, folder=None):
        for epoch in epochs:
            self.model.train()
            for images in IMAGES.split(16):
                self.optimizer.zero_grad()
                self.accelerator.backward(losses_of(self.model, images).mean())
                self.optimizer.step()
            self.schedule.step()
            self.garden.step(lambda: losses_of(self.garden.model, HELD_OUT))
            if folder is not None:
                self.accelerator.save_state(str(folder / str(epoch)))
        return self

    def state(self):
        with self.average.applied():
            averaged = {
                f"average {name}": value.clone()
                for name, value in self.garden.model.state_dict().items()
            }
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return {**self.garden.model.state_dict(), **averaged, "rates": rates}


@pytest.mark.parametrize("stop", range(EPOCHS - 1))
def test_a_loaded_state_goes_on_as_the_uninterrupted_one(stop, tmp_path, whole):
    folder, expected, history = whole
    loop = Loop(seed=99)
    loop.accelerator.load_state(str(folder / str(stop)))
    found = loop.train(range(stop + 1, EPOCHS)).state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert loop.garden.history == history


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, saved after every epoch."""
    folder = tmp_path_factory.mktemp("states")
    loop = Loop(seed=0).train(range(EPOCHS), folder)
    assert loop.garden.model.fossilized_seeds
    return folder, loop.state(), loop.garden.history


def test_a_loop_goes_back_to_an_earlier_structure(tmp_path, whole):
    """Forth and back in one garden: what has grown since leaves network and optimiser."""
    folder, expected, _ = whole
    loop = Loop(seed=99).train(range(EPOCHS))
    loop.accelerator.load_state(str(folder / "0"))
    assert loop.garden.model.active_seeds + loop.garden.model.fossilized_seeds == 1
    held = [id(p) for group in loop.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in loop.garden.parameters())
    found = loop.train(range(1, EPOCHS)).state()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_state_has_what_grew_in_every_slot_and_nobody_is_warned(tmp_path, caplog):
    loop = Loop(seed=0).train(range(2), tmp_path)
    found = load_file(tmp_path / "1" / "model.safetensors")
    assert found.keys() == loop.garden.model.state_dict().keys()
    assert len([name for name in found if "grew here" in name]) == 2
    assert "shared tensor" not in caplog.text


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_what_shards_a_model_is_refused(kind):
    sharding = SimpleNamespace(distributed_type=accelerate.DistributedType(kind))
    with pytest.raises(SettingError, match=rf"{kind} .*garden\.harvest"):
        join(sharding, grow_cnn(PLAN))
