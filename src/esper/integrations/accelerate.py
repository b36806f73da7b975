"""Growing with accelerate: `join(accelerator, garden)`, then `save_state` and `load_state` know of the garden."""

from pathlib import Path

from esper.garden import Garden
from esper.integrations import GARDEN, require

require("accelerate")
from accelerate import Accelerator  # noqa: E402


def join(accelerator: Accelerator, garden: Garden) -> None:
    """Save the garden in every state that accelerate saves, and restore it before accelerate loads one.

    Call `garden.attach(optimizer)` and `accelerator.prepare(garden.model, optimizer, ...)` as always, both before
    `load_state`: accelerate then finds the network and the parameter groups that it saved.
    """
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: garden.save(Path(folder, GARDEN)))
    accelerator.register_load_state_pre_hook(lambda models, folder: garden.restore(Path(folder, GARDEN)))
