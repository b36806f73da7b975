"""Numbers for TensorBoard and Weights & Biases, taken from events on their way to disk.

A tracker that fails does not stop training. A resumed run tracks its last step again: TensorBoard
forgets what it has from that step on; for Weights & Biases it is another run of the same name and
group, since an offline one cannot be resumed. Where your script has a run of Weights & Biases open,
curves go into that one, and it stays open.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from esper.leyline.errors import UnknownNameError, complain
from esper.leyline.extras import needs
from esper.storage.runfolder import TENSORBOARD
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import ArmFinished, Event, HostEpoch, RoundFinished
from esper.telemetry.sink import Sink

TrackerName = Literal["tensorboard", "wandb"]

# They say which event it is, and make no curve.
_LABELS = {"round", "host", "epoch", "epochs", "seed", "first_worst"}


class Scalars(NamedTuple):
    """One point of each curve that an event has a number for."""

    step: int
    values: dict[str, float]  # curve -> number
    axis: str
    """what a step is: an epoch or a round"""


def scalars_of(event: Event) -> Scalars | None:
    """The numbers of an event by curve; None where it is not tracked."""
    match event:
        case RoundFinished():
            return Scalars(event.round, _numbers(asdict(event), "round"), "round")
        case HostEpoch(round=None):
            return Scalars(event.epoch, _numbers(asdict(event), f"host-{event.host}"), "epoch")
        case ArmFinished():
            numbers = _numbers(asdict(event), f"result/seed-{event.seed}")
            return Scalars(event.epochs, numbers, "epoch")
        case _:
            return None


def _numbers(fields: Mapping[str, Any], group: str) -> dict[str, float]:
    """All numbers in an event's fields, by the names of their curves; curves of a group."""
    numbers: dict[str, float] = {}
    for name, value in fields.items():
        if name in _LABELS:
            continue
        if isinstance(value, dict):
            numbers |= _numbers(value, name if group == "round" else f"{group}/{name}")
        elif isinstance(value, int | float):
            numbers[f"{group}/{name}"] = float(value)
    return numbers


class Tracker(NamedTuple):
    """An opened tracker: how to log the numbers of one event, and how to end it."""

    log: Callable[[Scalars], None]
    close: Callable[[], None]


def _open_tensorboard(run: Path, config: Mapping[str, Any], step: int) -> Tracker:
    """Event files in `tensorboard` of the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    file = SummaryWriter(str(run / TENSORBOARD), purge_step=step)

    def log(scalars: Scalars) -> None:
        for name, value in scalars.values.items():
            file.add_scalar(name, value, scalars.step)
        file.flush()

    return Tracker(log, file.close)


def _open_wandb(run: Path, config: Mapping[str, Any], step: int) -> Tracker:
    """A run in `wandb` of the run folder, to be sent with `wandb sync`; or the run that is open.

    WANDB_MODE=online sends it at once. Every curve is drawn over its own epochs or rounds: the step
    of wandb itself only counts calls, because it drops whatever goes back.
    """
    import wandb

    opened: Any = getattr(wandb, "run", None)
    is_mine = opened is None
    if is_mine:
        name = run.resolve().name
        mode = os.environ.get("WANDB_MODE", "offline")
        opened = wandb.init(mode=mode, dir=str(run), name=name, group=name, config=dict(config))
    defined: set[str] = set()

    def log(scalars: Scalars) -> None:
        for name in scalars.values.keys() - defined:
            opened.define_metric(name, step_metric=scalars.axis)
            defined.add(name)
        opened.log({**scalars.values, scalars.axis: scalars.step})

    return Tracker(log, opened.finish if is_mine else lambda: None)


TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
"""How to open each tracker, by its name."""


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Refuse a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS)
        with needs("track", f"tracking with {name}"):
            import_module(name)


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
        """Append an event, and log its numbers."""
        super().write(event)
        scalars = scalars_of(event) if self._trackers else None
        if scalars is None:
            return
        for name, tracker in tuple(self._trackers.items()):
            with self._giving_up_on(name):
                if tracker is None:
                    tracker = TRACKERS[name](self.folder, self._config, scalars.step)
                    self._trackers[name] = tracker
                tracker.log(scalars)

    @contextmanager
    def _giving_up_on(self, name: TrackerName) -> Iterator[None]:
        """Whatever fails inside is shown, and the tracker is not used again."""
        try:
            yield
        except Exception as problem:
            self._trackers.pop(name)
            complain(
                f"{name} failed ({str(problem).strip() or type(problem).__name__}). "
                "Training continues without it."
            )

    def __exit__(self, *problem: object) -> None:
        for name, tracker in tuple(self._trackers.items()):
            if tracker is not None:
                with self._giving_up_on(name):
                    tracker.close()
        super().__exit__(*problem)
