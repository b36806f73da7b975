"""A GPU that is full ends a command in one line that names the knob, wherever it happens."""

import pytest
import torch

from esper.leyline.errors import DeviceError
from esper.runtime.population import Population
from esper.simic.environment import GrowthVectorEnv
from simic.tiny_runs import tiny, train
from trials import grown_runs, test_comparing


def is_full(*arguments, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


PLACES = [(Population, "apply"), (Population, "tick"), (Population, "evaluate"), (Population, "train_epoch")]
COMMANDS = {
    "ppo": lambda out: train(tiny(out)),
    "grow": lambda out: grown_runs.grow(grown_runs.configured(out, policy="schedule:epochs=0")),
    "compare": lambda out: test_comparing.compare(test_comparing.configured(out, policies=["schedule:epochs=0"])),
}


@pytest.mark.parametrize("place", [*PLACES, (GrowthVectorEnv, "reset")], ids=lambda place: place[1])
@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_one_error_that_says_what_to_lower(command, place, tmp_path, monkeypatch):
    if place[0] is GrowthVectorEnv and command != "ppo":
        pytest.skip("has no environment")
    monkeypatch.setattr(*place, is_full)
    with pytest.raises(DeviceError, match=r"out of GPU memory\. Lower the number of hosts"):
        COMMANDS[command](tmp_path / "run")
