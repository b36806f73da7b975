"""Numbers for TensorBoard and Weights & Biases, taken from events on their way to disk. Their
failures stop nobody.

A resumed run tracks its last step again. TensorBoard is told to forget what it has from that step
on; for Weights & Biases it is another run of the same name and group, since an offline one cannot
be resumed.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from esper.leyline.errors import SettingError, UnknownNameError, complain
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import ArmFinished, Event, HostEpoch, RoundFinished
from esper.telemetry.sink import Sink

TrackerName = Literal["tensorboard", "wandb"]
_LABELS = {
    "round",
    "host",
    "epoch",
    "epochs",
    "seed",
    "first_worst",
}  # They say which event it is, and make no curve.


def scalars_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """The step of an event and its numbers by name; None where it is not tracked."""
    match event:
        case RoundFinished():
            step, place = event.round, "round"
        case HostEpoch(round=None):
            step, place = event.epoch, f"host-{event.host}"
        case ArmFinished():
            step, place = event.epochs, f"result/seed-{event.seed}"
        case _:
            return None
    return step, dict(_numbers(asdict(event), place))


def _numbers(values: Mapping[str, Any], place: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict) and name not in _LABELS:
            yield from _numbers(value, name if place == "round" else f"{place}/{name}")
        elif isinstance(value, int | float) and name not in _LABELS:
            yield f"{place}/{name}", float(value)


class Tracker(NamedTuple):
    """What one tracker is told a step with, and ended with."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def _open_tensorboard(run: Path, config: Mapping[str, Any], step: int) -> Tracker:
    """Event files in `tensorboard` of the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    file = SummaryWriter(str(run / "tensorboard"), purge_step=step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            file.add_scalar(name, value, step)
        file.flush()

    return Tracker(log, file.close)


def _open_wandb(run: Path, config: Mapping[str, Any], step: int) -> Tracker:
    """A run in `wandb` of the run folder, to be sent with `wandb sync`; WANDB_MODE=online sends it
    at once.
    """
    import wandb

    name, mode = run.resolve().name, os.environ.get("WANDB_MODE", "offline")
    opened = wandb.init(mode=mode, dir=str(run), name=name, group=name, config=dict(config))
    return Tracker(lambda step, values: opened.log(dict(values), step=step), opened.finish)


TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}


def require_trackers(names: Sequence[TrackerName]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS)
        try:
            import_module(name)
        except ImportError as missing:
            raise SettingError(
                f"tracking with {name} needs its package: pip install 'esper-lite[track]'"
            ) from missing


class TrackingSink(Sink):
    """Passes numbers to trackers as well, whatever the level of the records on disk."""

    def __init__(
        self,
        path: Path,
        telemetry: TelemetryConfig,
        names: Sequence[TrackerName],
        config: Mapping[str, Any],
    ):
        super().__init__(path, telemetry)
        self._config = config
        # each opens with the first number, so that a refused start leaves nothing, and notes the
        # configuration
        self._trackers: dict[TrackerName, Tracker | None] = dict.fromkeys(names)

    def write(self, event: Event) -> None:
        super().write(event)
        if self._trackers and (found := scalars_of(event)):
            for name, tracker in tuple(self._trackers.items()):
                with self._giving_up_on(name):
                    self._trackers[name] = tracker = tracker or TRACKERS[name](
                        self.folder, self._config, found[0]
                    )
                    tracker.log(*found)

    @contextmanager
    def _giving_up_on(self, name: TrackerName) -> Iterator[None]:
        """Whatever fails inside is told, and the tracker is not asked again."""
        try:
            yield
        except Exception as problem:
            self._trackers.pop(name)
            complain(
                f"{name} failed ({str(problem).strip() or type(problem).__name__}). "
                f"Training goes on without it."
            )

    def __exit__(self, *problem: object) -> None:
        for name, tracker in tuple(self._trackers.items()):
            if tracker is not None:
                with self._giving_up_on(name):
                    tracker.close()
        super().__exit__(*problem)
