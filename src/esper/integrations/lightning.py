"""Growing under Lightning: `Trainer(callbacks=[GrowthCallback(garden, evaluate)])`."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from esper.garden import Evaluate, Garden
from esper.integrations import require
from esper.leyline.errors import SaveError, SettingError

require("lightning")
from lightning import Callback, LightningModule, Trainer  # noqa: E402

KEY = "esper"
"""of the garden in a checkpoint: its files, as bytes"""


class GrowthCallback(Callback):
    """Steps the garden after every epoch, or after every so many optimiser steps, and keeps it in the checkpoint.

    The module calls `garden.model`, and `garden.attach(optimizer)` in its `configure_optimizers`.
    """

    def __init__(self, garden: Garden, evaluate: Evaluate, every: int | None = None):
        if every is not None and every < 1:
            raise SettingError(f"every must be at least 1 or None for once per epoch, got {every!r}.")
        self.garden, self.evaluate, self.every, self._done = garden, evaluate, every, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning calls a callback's own `on_load_checkpoint` when the weights are loaded: too late."""
        before: Callable[[dict[str, Any]], None] = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            self._restore(checkpoint)
            before(checkpoint)

        pl_module.on_load_checkpoint = on_load_checkpoint  # of this module only

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._done = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.every is not None and trainer.global_step // self.every > self._done // self.every:
            self._step(trainer)
        self._done = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every is None:
            self._step(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            files = sorted(self.garden.save(folder).iterdir())
            checkpoint[KEY] = {p.name: torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.uint8) for p in files}

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        if KEY not in checkpoint:
            raise SaveError(f"this checkpoint holds no garden: it has {', '.join(checkpoint)}. Use one of a garden.")
        with TemporaryDirectory() as folder:
            for name, content in checkpoint[KEY].items():
                Path(folder, name).write_bytes(content.cpu().numpy().tobytes())
            self.garden.restore(folder)

    def _step(self, trainer: Trainer) -> None:
        for event in self.garden.step(self.evaluate):
            if trainer.is_global_zero:
                print(event)
