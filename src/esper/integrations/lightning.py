"""Growing under Lightning, in one process or with DDP.

`Trainer(callbacks=[GrowthCallback(garden, evaluate)])` is all that a script adds.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from esper.integrations import GARDEN, UNAWARE, Stepper, pack, require, unpack
from esper.leyline.errors import SaveError, SettingError

require("lightning")
from lightning import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

_LEFT_TO_GARDEN = "_ddp_params_and_buffers_to_ignore"  # DDP reads it off the module that it wraps


class GrowthCallback(Stepper, Callback):
    """Steps the garden, and keeps it in every checkpoint.

    Structure is restored before Lightning loads the weights. The module calls `garden.model`, and
    `garden.attach(optimizer)` in its `configure_optimizers`.

    `saved` holds the files of the garden that the trainer resumes from, `done` the number of
    optimiser steps at the end of the last batch.
    """

    saved: dict[str, Any] | None = None
    done = 0
    trainer: Trainer

    def log_growth(self, growth: dict[str, float]) -> None:
        """Log growth at once: Lightning would drop it between two of its own logged steps."""
        for logger in self.trainer.loggers:
            logger.log_metrics(growth, step=self.trainer.global_step)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot follow a growing network, and restore structure before weights."""
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise SettingError(f"{type(trainer.strategy).__name__} {UNAWARE}")
        _refuse_averaging(trainer)
        names = [name for name, part in pl_module.named_modules() if part is self.garden.model]
        if not names:
            raise SettingError(
                f"{type(pl_module).__name__} has no garden.model; write self.net = "
                f"garden.model in it."
            )
        load_before = pl_module.on_load_checkpoint
        self.saved = None

        def leave_slots_alone() -> None:
            ignored = vars(self.garden.model)[_LEFT_TO_GARDEN]
            vars(pl_module)[_LEFT_TO_GARDEN] = [f"{names[0]}.{name}" for name in ignored]

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            if GARDEN not in checkpoint:
                raise SaveError(
                    f"this checkpoint has no garden, only {', '.join(checkpoint)}. "
                    f"Use one of a garden."
                )
            self.saved = checkpoint[GARDEN]
            if stage != "fit":
                # the run folder keeps the full history, not that of the checkpoint looked at
                self.garden.record(None)
            self._restore()
            leave_slots_alone()
            load_before(checkpoint)

        leave_slots_alone()
        # Lightning calls a callback's own `on_load_checkpoint` when the weights are loaded: too
        # late
        vars(pl_module)["on_load_checkpoint"] = on_load_checkpoint

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own way to load a checkpoint back."""
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the garden's optimiser state over Lightning's, which is by position."""
        self.done = trainer.global_step
        if self.saved is None:
            return
        link = self.garden.model.link
        rates: list[tuple[dict[str, Any], float]] = []
        for optimizer in trainer.optimizers:
            rates += [(group, group["lr"]) for group in optimizer.param_groups]
        self._restore()
        # rates that differ now were chosen by a rate finder, and stay
        if link is not None and any(group["lr"] != rate for group, rate in rates):
            for group, rate in rates:
                group["lr"] = rate
            link.peak_rate = link.rate
        self.saved = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Step where an epoch, or `every` optimiser steps, are over.

        That is before validation, so that a checkpoint's score is that of the network in it.
        """
        self.trainer = trainer
        before = self.done
        self.done = trainer.global_step
        # a batch that the module skipped, by returning None, has no outputs
        if pl_module.automatic_optimization and outputs:
            # a share of its step's loss, where several batches make one step
            self.garden.loss_meter.add(outputs["loss"])
            self.garden.loss_meter.steps += self.done - before
        if self.every is None:
            is_due = trainer.is_last_batch
        else:
            is_due = self.done // self.every > before // self.every
        if is_due:
            self.step()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the files of the garden into a checkpoint."""
        with TemporaryDirectory() as folder:
            # of several processes the first one writes
            checkpoint[GARDEN] = pack(self.garden.save(folder))

    def _restore(self) -> None:
        """Restore the garden from the files that came with a checkpoint."""
        with TemporaryDirectory() as folder:
            unpack(self.saved or {}, Path(folder))
            self.garden.restore(folder)


def _refuse_averaging(trainer: Trainer) -> None:
    """Refuse Lightning's own average of weights."""
    for callback in vars(trainer)["callbacks"]:
        for kind in type(callback).__mro__:
            if kind.__name__.endswith("WeightAveraging"):
                raise SettingError(
                    f"{kind.__name__} would leave out seeds that are planted later; use "
                    f"garden.ema(decay)."
                )
