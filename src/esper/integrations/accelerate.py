"""Growing with accelerate: `save_state` and `load_state` include a garden or a depth schedule."""

from pathlib import Path

from esper.garden.depth_schedule import DepthSchedule
from esper.garden.garden import Garden
from esper.integrations import GARDEN, UNAWARE, require, restore_depth, write_depth
from esper.leyline.errors import SettingError

require("accelerate")
from accelerate import Accelerator  # noqa: E402


def refuse_sharding(accelerator: Accelerator) -> None:
    """Refuse an accelerator that spreads one network over several processes."""
    kind = accelerator.distributed_type.value
    if kind.partition("_")[0] not in ("NO", "MULTI"):
        raise SettingError(f"{kind} {UNAWARE}")


def join(accelerator: Accelerator, garden: Garden) -> None:
    """Save the garden in every state that accelerate saves, and restore it from there.

    It is restored before accelerate loads a state. Call `garden.attach(optimizer)` and
    `accelerator.prepare(garden.model, optimizer, ...)` as always, both before `load_state`:
    accelerate then finds the network and the parameter groups that it saved.
    """
    refuse_sharding(accelerator)
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: garden.save(Path(folder, GARDEN))
    )
    accelerator.register_load_state_pre_hook(
        lambda models, folder: garden.restore(Path(folder, GARDEN))
    )


def join_depth(accelerator: Accelerator, depth: DepthSchedule) -> None:
    """Save a depth schedule in every state that accelerate saves, and restore it from there.

    The network gets its depth before accelerate loads the weights. Create the schedule with what
    `accelerator.prepare` returned, then call this, then `load_state`.
    """

    def save(models: object, weights: object, folder: str) -> None:
        if accelerator.is_main_process:
            write_depth(folder, depth)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda models, folder: restore_depth(folder, depth))
