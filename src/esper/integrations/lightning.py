"""Growing under Lightning:

`Trainer(callbacks=[GrowthCallback(garden, evaluate)])`, in one process or with DDP.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from esper.integrations import GARDEN, UNAWARE, Stepper, require
from esper.leyline.errors import SaveError, SettingError

require("lightning")
from lightning import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402


class GrowthCallback(Stepper, Callback):
    """Steps the garden, and keeps it in every checkpoint. Structure is restored before Lightning
    loads the weights.

    The module calls `garden.model`, and `garden.attach(optimizer)` in its `configure_optimizers`.
    """

    saved: dict[str, Any] | None = None  # files of the garden that the trainer resumes from
    done = 0  # optimiser steps at the end of the last batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise SettingError(f"{type(trainer.strategy).__name__} {UNAWARE}")
        kinds = [
            kind.__name__ for other in vars(trainer)["callbacks"] for kind in type(other).__mro__
        ]
        for kind in [kind for kind in kinds if kind.endswith("WeightAveraging")]:
            raise SettingError(
                f"{kind} would leave out seeds that are planted later; use garden.ema(decay)."
            )
        names = [name for name, part in pl_module.named_modules() if part is self.garden.model]
        if not names:
            raise SettingError(
                f"{type(pl_module).__name__} has no garden.model; write self.net = "
                f"garden.model in it."
            )
        before, self.saved = pl_module.on_load_checkpoint, None

        def leave_slots_alone() -> None:
            own = vars(self.garden.model)["_ddp_params_and_buffers_to_ignore"]
            vars(pl_module)["_ddp_params_and_buffers_to_ignore"] = [
                f"{names[0]}.{name}" for name in own
            ]

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            if GARDEN not in checkpoint:
                raise SaveError(
                    f"this checkpoint has no garden, only {', '.join(checkpoint)}. "
                    f"Use one of a garden."
                )
            self.saved = checkpoint[GARDEN]
            if stage != "fit":
                self.garden.record(
                    None
                )  # the run is told as it was, not up to the checkpoint that is looked at
            self._restore()
            leave_slots_alone()
            before(checkpoint)

        leave_slots_alone()
        # Lightning calls a callback's own `on_load_checkpoint` when the weights are loaded: too
        # late
        vars(pl_module)["on_load_checkpoint"] = on_load_checkpoint

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.done = trainer.global_step
        if self.saved is not None:
            link, rates = (
                self.garden.model.link,
                [(g, g["lr"]) for o in trainer.optimizers for g in o.param_groups],
            )
            # Lightning has loaded the optimiser's state by position; here it is by name
            self._restore()
            if link is not None and any(
                group["lr"] != rate for group, rate in rates
            ):  # a rate finder chose them
                for group, rate in rates:
                    group["lr"] = rate
                link.peak_rate = link.rate
            self.saved = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        before, self.done = self.done, trainer.global_step
        if (
            trainer.is_last_batch
            if self.every is None
            else self.done // self.every > before // self.every
        ):
            # before validation, so that a checkpoint's score is that of the network in it
            self.step()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        with TemporaryDirectory() as folder:
            files = sorted(
                self.garden.save(folder).iterdir()
            )  # of several processes the first one writes
            checkpoint[GARDEN] = {
                f.name: torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8)
                for f in files
            }

    def _restore(self) -> None:
        with TemporaryDirectory() as folder:
            for name, content in (self.saved or {}).items():
                Path(folder, name).write_bytes(content.cpu().numpy().tobytes())
            self.garden.restore(folder)
