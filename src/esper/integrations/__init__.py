"""Growing inside other people's training loops: transformers, Lightning, accelerate.

Each module needs its framework and is imported by its own name. Only what a framework does
differently comes in; what a garden measures, decides or saves stays in `garden`.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from esper.garden.depth_schedule import DepthSchedule
from esper.garden.garden import Garden
from esper.garden.measuring import Evaluate
from esper.garden.processes import is_first
from esper.leyline.errors import EsperError, SaveError, SettingError
from esper.storage.files import write_files
from esper.telemetry.events import HostEpoch

GARDEN = "garden"
"""Folder of the garden inside a framework's own checkpoint."""

DEPTH = "depth.json"
"""File of a depth schedule inside a framework's own checkpoint."""

UNAWARE = (
    "would not know of seeds planted later. Use one process or DDP; what has to be "
    "sharded is garden.harvest()."
)
"""Why whatever shards a network is refused."""

UNSHARDED = "would not know of new layers. Use one device or DDP, or esper.DepthSchedule in a loop."
"""Why a strategy that shards a network cannot deepen it."""


def require(framework: str) -> None:
    """Refuse in one line if a framework is missing, with how to get it."""
    try:
        import_module(framework)
    except ImportError as problem:
        raise SettingError(
            f"esper.integrations.{framework} needs {framework} ({problem}); pip "
            f"install {framework}."
        ) from problem


def write_depth(folder: str | Path, depth: DepthSchedule) -> None:
    """Write a depth schedule beside what a framework saves."""
    text = json.dumps(depth.state_dict())
    write_files(Path(folder), {DEPTH: text.encode()})


def restore_depth(folder: str | Path, depth: DepthSchedule) -> None:
    """Give a network the depth that it had when a framework saved it."""
    path = Path(folder, DEPTH)
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError as problem:
        raise SaveError(f"{folder} has no {DEPTH}. Use a checkpoint of this schedule.") from problem
    except ValueError as problem:
        raise SaveError(f"{path} is damaged: {problem}. Use another checkpoint.") from problem
    depth.load_state_dict(state)


def pack(folder: Path) -> dict[str, torch.Tensor]:
    """The files of a folder as tensors of bytes, to lie in a framework's own checkpoint."""
    return {
        file.name: torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        for file in sorted(folder.iterdir())
    }


def unpack(files: Any, folder: Path) -> None:
    """Write what `pack` made into a folder; anything else is refused before a byte is written.

    A checkpoint may come from anybody: a name in it must not lead out of the folder.
    """
    contents = files if isinstance(files, Mapping) else {GARDEN: files}
    for name, content in contents.items():
        if not _has_bytes(content):
            raise SaveError(
                f"the checkpoint's garden has {str(name)!r} as a {type(content).__name__} instead "
                f"of bytes. Use a checkpoint that Esper's callback wrote."
            )
    write_files(folder, {name: part.cpu().numpy().tobytes() for name, part in contents.items()})


def _has_bytes(content: Any) -> bool:
    """Whether this is a tensor whose memory holds bytes."""
    is_dense = isinstance(content, torch.Tensor) and content.layout is torch.strided
    return is_dense and content.dtype == torch.uint8 and not content.is_meta


def read_growth(garden: Garden) -> dict[str, float]:
    """What a framework's loggers show of a garden after its last step, as far as it is known.

    The measurement is that of the step; the network is as it stands now.
    """
    model = garden.model
    epochs = [event for event in garden.history if isinstance(event, HostEpoch)]
    last = epochs[-1]
    numbers: dict[str, float | None] = {
        "growth/held_out_loss": last.held_out_loss,
        "growth/held_out_score": last.held_out_score,
        "growth/params": model.total_params,
        "growth/live_seeds": model.active_seeds,
        "growth/fossils": model.fossilized_seeds,
        "growth/flops": garden.books.network_flops(model),
    }
    return {name: float(number) for name, number in numbers.items() if number is not None}


class Stepper:
    """Steps a garden, prints what happens and logs it; the callbacks of frameworks say when.

    `every` is after how many optimiser steps; None is once per epoch.
    """

    def __init__(self, garden: Garden, evaluate: Evaluate, every: int | None = None):
        if every is not None and (every < 1 or every % 1):
            raise SettingError(
                f"every must be whole, at least 1, or None for once per epoch, got {every!r}."
            )
        self.garden = garden
        self.evaluate = evaluate
        self.every = every

    def step(self) -> None:
        """Step the garden with the epoch's training loss; of several processes the first prints."""
        for event in self.garden.step(self.evaluate, self.garden.loss_meter.take()):
            if is_first():
                print(event)
        self.log_growth(read_growth(self.garden))

    def log_growth(self, growth: dict[str, float]) -> None:
        """Pass numbers about growth to the framework's own loggers.

        It is not called `log`: Lightning puts its module's `log` into every callback.
        """
        raise NotImplementedError

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print what growing was worth; Trainer and Lightning call it by this name."""
        try:
            text = str(self.garden.report(self.evaluate))
        except EsperError as problem:
            # training is over, and what it made must not be lost for a report
            text = f"what growing was worth could not be measured: {problem}"
        if is_first():
            print(text)
