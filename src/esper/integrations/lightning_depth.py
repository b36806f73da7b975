"""Getting deeper under Lightning: `Trainer(callbacks=[DepthCallback(...)])`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from esper.garden.depth_schedule import DepthSchedule
from esper.integrations import UNSHARDED, require
from esper.leyline.errors import SaveError, SettingError

require("lightning")
from lightning import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

KEY = "depth"
"""where a checkpoint of Lightning's has the schedule"""


class DepthCallback(Callback):
    """Steps a depth schedule after every optimiser step, and keeps it in every checkpoint.

    On resume the network gets its depth before Lightning loads the weights. `done` is the number of
    optimiser steps at the last batch, `waiting` the tokens seen since the last step.
    """

    done = 0
    waiting = 0

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str,
        to: int,
        total: int,
        tokens: int,
        plan: Mapping[int, float] | None = None,
    ):
        """Plan the depth of `model`, which the Lightning module trains.

        Args:
            model: the network inside the module.
            layers: name of its list of layers, as in "blocks".
            to: how many layers it ends with.
            total: tokens of the whole run, over all processes.
            tokens: tokens of one batch, over all processes.
            plan: shares of `total` by depth; without it the law decides.
        """
        self.depth = DepthSchedule(model, None, layers=layers, to=to, total=total, plan=plan)
        self.tokens = tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the module give its network the right depth before it loads weights."""
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise SettingError(f"{type(trainer.strategy).__name__} {UNSHARDED}")
        load_before = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            if KEY not in checkpoint:
                raise SaveError(
                    f"this checkpoint has no depth schedule, only {', '.join(checkpoint)}. Use one "
                    f"that this callback wrote."
                )
            self.depth.load_state_dict(checkpoint[KEY])
            load_before(checkpoint)

        # Lightning calls a callback's own `on_load_checkpoint` when weights are loaded: too late
        vars(pl_module)["on_load_checkpoint"] = on_load_checkpoint

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own way to load a checkpoint back."""
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the optimisers that the module made."""
        self.done = trainer.global_step
        self.depth.attach(trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count the tokens of a batch; a step of the schedule follows a step of an optimiser."""
        self.waiting += self.tokens
        if trainer.global_step > self.done:
            self.done = trainer.global_step
            waiting, self.waiting = self.waiting, 0
            self.depth.step(tokens=waiting)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the schedule into a checkpoint."""
        checkpoint[KEY] = self.depth.state_dict()
