"""A GPU that is full ends a command in one line that names the knob, wherever it happens."""

from itertools import product

import pytest
import torch

from esper.leyline.errors import DeviceError
from esper.runtime.population import Population
from esper.simic.environment import GrowthVectorEnv
from simic.tiny_runs import tiny, train
from trials import grown_runs, test_comparison


def is_full(*arguments, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


PLACES = [
    (Population, "apply"),
    (Population, "tick"),
    (Population, "evaluate"),
    (Population, "start_epoch"),
    (Population, "finish_epoch"),
]
COMMANDS = {
    "ppo": lambda out: train(tiny(out)),
    "grow": lambda out: grown_runs.grow(grown_runs.configured(out, policy="schedule:epochs=0")),
    "compare": lambda out: test_comparison.compare(
        test_comparison.configured(out, policies=["schedule:epochs=0"])
    ),
}


@pytest.mark.parametrize(
    ("command", "place"),
    [*product(COMMANDS, PLACES), ("ppo", (GrowthVectorEnv, "reset_wait"))],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_it_is_one_error_that_says_what_to_lower(command, place, tmp_path, monkeypatch):
    monkeypatch.setattr(*place, is_full)
    with pytest.raises(DeviceError, match=r"GPU memory.*hosts"):
        COMMANDS[command](tmp_path / "run")
