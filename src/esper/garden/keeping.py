"""What a garden keeps beside its network:

facts to be saved, and back; its history as a run folder; averages.
"""

import json
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimizer_saving import OptimizerSnapshot, Tensors, restore_optimizer
from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import SaveError, SettingError, is_number
from esper.runtime.ledger import Ledger
from esper.storage import runfolder
from esper.storage.files import write_durably
from esper.storage.store import require_plain
from esper.telemetry.curve_export import TrackerName, TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import from_record, to_record

if TYPE_CHECKING:
    from esper.garden.garden import Garden


@dataclass
class Kept:  # the types of what `describe` tells
    epoch: NonNegativeInt
    is_pruned: bool
    higher_is_better: bool | None
    flops: NonNegativeInt | None
    run: str | None
    policy: str
    memory: Any
    history: list[dict[str, Any]]
    ledger: Ledger
    examples: dict[Literal["training", "shadow"], NonNegativeInt]
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    prices: HostFlops | None = None


def describe(garden: "Garden") -> dict[str, Any]:
    return {
        name: getattr(garden, name)
        for name in ("epoch", "is_pruned", "higher_is_better", "flops", "run")
    } | {
        "policy": garden.policy_name,
        "memory": require_plain(garden.memory),
        "history": [to_record(event) for event in garden.history],
        "ledger": asdict(garden.ledger),
        "examples": garden.model.examples,
        "decay": garden.average and garden.average.decay,
        "prices": None if garden.prices is None else asdict(garden.prices),
    }


def prices_of(extra: dict[str, Any]) -> HostFlops | None:
    """What the saved host costs; a save of an older version knows its forward pass only."""
    if extra.get("prices") is not None:
        return HostFlops(**extra["prices"])
    whole = extra["flops"]
    return None if whole is None else HostFlops(whole, learnt=3 * whole)


def check(extra: dict[str, Any], garden: "Garden | None" = None) -> None:
    """Fail on facts that `take` could not read, or that `garden` may not have, before anything has
    changed.
    """
    TypeAdapter(Kept).validate_json(
        json.dumps(extra), strict=True
    )  # in Python, strict takes no dict for a ledger
    [
        str(from_record(record)) for record in extra["history"]
    ]  # what is of another type cannot be told
    if garden is not None and extra["policy"] != garden.policy_name:
        raise SaveError(
            f"the save was grown by {extra['policy']}; this garden's policy is "
            f"{garden.policy_name}."
        )
    if (
        garden is not None
        and garden.average is not None
        and extra["decay"] not in (None, own := garden.average.decay)
    ):
        raise SaveError(
            f"the save has an average of decay {extra['decay']}, this garden one of {own}."
        )


def take(
    garden: "Garden",
    optimizer: OptimizerSnapshot | None,
    average: Tensors | None,
    extra: dict[str, Any],
) -> None:
    """Give a garden whose network was rebuilt all else that was saved."""
    garden.epoch, garden.is_pruned, garden.run = extra["epoch"], extra["is_pruned"], extra["run"]
    garden.prices, garden.pending_optimizer = prices_of(extra), optimizer
    garden.ledger = TypeAdapter(Ledger).validate_python(extra["ledger"])
    garden.memory = (
        extra["memory"] if extra["policy"] == garden.policy_name else None
    )  # another's means nothing to it
    garden.history = [from_record(record) for record in extra["history"]]
    garden.model.examples |= extra["examples"]
    settle_optimizer(garden)
    if average is not None:
        garden.ema(extra["decay"]).restore(average)
    elif garden.average is not None:
        garden.average.restore({})  # it begins with the weights of the save
        garden.average.update()


def settle_optimizer(garden: "Garden") -> None:
    """A state that waits for an optimiser goes into the one that is attached."""
    if garden.pending_optimizer is not None and garden.model.link is not None:
        restore_optimizer(garden.model, garden.model.link, garden.pending_optimizer)
        garden.pending_optimizer = None


class Recorder:
    """Writes a garden's events until it is closed, or the process ends.

    The folder holds its history, no more.
    """

    def __init__(self, garden: "Garden", folder: Path, track: Sequence[TrackerName]):
        require_trackers(track)
        self.folder, self.track = folder, track
        with ExitStack() as held:
            held.enter_context(runfolder.only_writer(folder))
            is_known = (
                garden.run is not None and runfolder.read_start(folder).get("run") == garden.run
            )
            if not is_known:
                runfolder.require_fresh(folder)
            self.run = garden.run if is_known else secrets.token_hex(8)
            config = _describe_start(garden) | {"run": self.run}
            # what a garden has lost in memory, as an earlier save was loaded, the folder of its run
            # loses too
            past = [
                json.dumps(to_record(event), allow_nan=False) + "\n"
                for event in garden.history
                if is_known
            ]
            with runfolder.begun(folder, config):
                write_durably(folder / runfolder.EVENTS, "".join(past).encode())
            self.sink = held.enter_context(
                TrackingSink(folder / runfolder.EVENTS, TelemetryConfig(), track, config)
            )
            self.close = weakref.finalize(self, held.pop_all().close)
        for event in [] if is_known else garden.history:
            self.sink.write(event)


def _describe_start(garden: "Garden") -> dict[str, Any]:
    """What a run is started with, as far as `esper.grow` knows."""
    model, settings = garden.model, asdict(garden.model.settings)
    task = {"name": type(model.host).__name__, "epochs": settings["epochs"]}
    limits = {
        "budget": model.budget,
        "max_seeds": model.max_seeds,
        "blueprints": list(model.space.blueprint_ids[1:]),
    }
    known = {
        "command": runfolder.GARDEN_COMMAND,
        "task": task,
        "hosts": 1,
        "policy": garden.policy_name,
    }
    return {**known, "slots": dict(model.slot_config.modules), **limits, "settings": settings}


class Average:
    """An exponential moving average of every parameter of a growing network.

    A seed's average begins when it is planted, stays with it when it is kept, and goes when it
    goes. Buffers are not averaged. Evidence is always about the weights themselves.
    """

    def __init__(self, model: MorphogeneticModel, decay: float):
        if not is_number(decay) or not 0.0 < decay < 1.0:
            raise SettingError(
                f"decay must lie between 0 and 1, got {decay!r}; 0.999 averages about 1,000 steps."
            )
        self.model, self.decay, self.is_applied = model, float(decay), False
        self._values: dict[nn.Parameter, Tensor] = {}
        self._moved: set[torch.optim.Optimizer] = (
            set()
        )  # those that have stepped since the last update
        self.update()
        self._is_new = True

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step the weights may still have changed, as DDP makes those of all
        processes equal.
        """
        refuse_applied(self)
        if self._is_new:
            self._values = {}
        if self._is_new or optimizer in self._moved:  # the others step less often
            self.update()

    def end_step(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """An update belongs to a step of all `count` optimisers."""
        self._moved.add(optimizer)
        if len(self._moved) == count:
            self.update()

    def update(self) -> None:
        """Move towards the weights as they are; the garden does so after each step of the
        optimiser.
        """
        self._is_new, fresh = False, {}
        self._moved.clear()
        for parameter in self.model.parameters():
            # half precision would lose small steps, and the average would silently stand still
            now = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            before = self._values.get(parameter)
            fresh[parameter] = (
                now.clone() if before is None else before.to(now).lerp_(now, 1.0 - self.decay)
            )
        self._values = fresh

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network with its averaged weights, to evaluate, harvest or export; all else is
        refused meanwhile.
        """
        kept = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        was_applied, self.is_applied = self.is_applied, True
        try:
            for parameter, value in kept:
                parameter.detach().copy_(self._values.get(parameter, value))
            yield
        finally:
            self.is_applied = was_applied
            for parameter, value in kept:
                parameter.detach().copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; what was planted after the last step has none yet."""
        return {
            name: self._values[p].contiguous()
            for name, p in self.model.named_parameters()
            if p in self._values
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = {
            p: tensors[name].to(p.device)
            for name, p in self.model.named_parameters()
            if name in tensors
        }
        self._is_new = False


def refuse_applied(average: Average | None) -> None:
    if average is not None and average.is_applied:
        raise SettingError(
            "inside ema.applied() the weights are averages: train, step, save and restore after it."
        )
