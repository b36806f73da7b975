"""What a garden knows beside its network, as plain facts to be saved, and back."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter

from esper.kasmina.saving import OptimizerSnapshot, Tensors, restore_optimizer
from esper.runtime.ledger import Ledger
from esper.telemetry.events import from_record, to_record
from esper.telemetry.store import require_plain

if TYPE_CHECKING:
    from esper.garden import Garden


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


def describe(garden: "Garden") -> dict[str, Any]:
    same = "epoch", "is_pruned", "higher_is_better", "flops", "run"
    return {name: getattr(garden, name) for name in same} | {
        "policy": garden.policy_name,
        "memory": require_plain(garden.memory),
        "history": [to_record(event) for event in garden.history],
        "ledger": asdict(garden.ledger),
        "examples": garden.model.examples,
        "decay": garden.average and garden.average.decay,
    }


def check(extra: dict[str, Any]) -> None:
    """Fail on facts that `take` could not read, before anything has changed."""
    TypeAdapter(Kept).validate_json(json.dumps(extra), strict=True)  # in Python, strict takes no dict for a ledger
    [str(from_record(record)) for record in extra["history"]]  # what is of another type cannot be told


def take(garden: "Garden", optimizer: OptimizerSnapshot | None, average: Tensors | None, extra: dict[str, Any]) -> None:
    """Give a garden whose network was rebuilt all else that was saved."""
    garden.epoch, garden.is_pruned, garden.run = extra["epoch"], extra["is_pruned"], extra["run"]
    garden.flops, garden.pending_optimizer = extra["flops"], optimizer
    garden.ledger = TypeAdapter(Ledger).validate_python(extra["ledger"])
    garden.memory = extra["memory"] if extra["policy"] == garden.policy_name else None  # another's means nothing to it
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
