"""What a garden saves beside its network, and how it takes that back."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter
from torch import Tensor

from esper.garden import processes
from esper.garden.description import describe_garden, find_differences
from esper.kasmina.optimizer_saving import OptimizerSnapshot, Tensors, restore_optimizer
from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import SaveError, complain
from esper.leyline.stages import SeedStage
from esper.runtime.ledger import Ledger
from esper.storage.store import require_plain
from esper.tamiyo.policies import Policy
from esper.tamiyo.policy_names import Chooser, TrainedPolicy
from esper.telemetry.events import from_record, to_record

if TYPE_CHECKING:
    from esper.garden.garden import Garden


@dataclass
class SavedMeter:
    """Types of what `LossMeter.state` returns."""

    total: float | None
    steps: NonNegativeInt


@dataclass
class Kept:
    """The types of what `describe` returns, by which a save is checked."""

    epoch: NonNegativeInt
    is_pruned: bool
    higher_is_better: bool | None
    run: str | None
    policy: str
    policy_digest: str | None
    memory: Any
    by_hand: list[str]
    history: list[dict[str, Any]]
    ledger: Ledger
    examples: dict[Literal["training", "shadow"], NonNegativeInt]
    loss_meter: SavedMeter
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    prices: HostFlops | None
    description: dict[str, Any]


def name_policy(policy: Chooser, built: Policy | None = None) -> str:
    """What a save calls a policy; the brackets tell a function from a rule of the same name.

    A lambda has no name. It is called after the class of the policy that it `built`, which stays
    the same where lines of its file move.
    """
    if isinstance(policy, str | Path):
        return str(policy)
    if isinstance(policy, TrainedPolicy):
        return policy.text
    while isinstance(policy, partial):
        policy = policy.func
    name: str = getattr(policy, "__name__", type(policy).__name__)
    if name == "<lambda>" and built is not None:
        name = type(getattr(built, "rule", built)).__name__
    return f"{name}()"


def digest_policy(policy: Chooser) -> str | None:
    """The sha256 of a policy's file; None where it is not from a file."""
    return policy.digest if isinstance(policy, TrainedPolicy) else None


def describe(garden: "Garden") -> dict[str, Any]:
    """All that is saved of a garden beside its network, as plain data."""
    prices = garden.books.prices
    return {
        "epoch": garden.epoch,
        "is_pruned": garden.is_pruned,
        "higher_is_better": garden.higher_is_better,
        "run": garden.run,
        "policy": garden.policy_name,
        "policy_digest": garden.policy_digest,
        "memory": _as_plain(garden.memory),
        "by_hand": sorted(garden.by_hand),
        "history": [to_record(event) for event in garden.history],
        "ledger": asdict(garden.ledger),
        "examples": garden.model.examples,
        "loss_meter": garden.loss_meter.state(),
        "decay": None if garden.average is None else garden.average.decay,
        "prices": None if prices is None else asdict(prices),
        "description": describe_garden(garden.model, garden.policy_name, garden.higher_is_better),
    }


def prices_of(extra: dict[str, Any]) -> HostFlops | None:
    """What one example costs in the saved host; None where it could not be counted."""
    prices = extra["prices"]
    return None if prices is None else HostFlops(**prices)


def check(extra: dict[str, Any]) -> None:
    """Refuse facts that `take` could not read, before anything has changed."""
    for name in ("prices", "description", "policy_digest"):
        if name not in extra:
            raise SaveError(
                f"the save has no {name!r}: an older version of Esper wrote it. Load it with that "
                f"version, or grow again."
            )
    # from Python values, strict validation would take no dict for a ledger
    TypeAdapter(Kept).validate_json(json.dumps(extra), strict=True)
    for record in extra["history"]:
        # an event with a value of another type can be built, but not be put into words
        str(from_record(record))


def refuse_other(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a save of a garden that is described differently; the first difference is named."""
    for difference in find_differences(saved, here):
        raise SaveError(
            f"the save is of another garden: {difference.place} is {difference.one} in the save "
            f"and {difference.other} here. Grow with the same model, blueprints and options, or "
            f"use another save."
        )


def check_for(garden: "Garden", extra: dict[str, Any]) -> None:
    """Refuse facts that `take` could not read, or that belong to another garden than this one."""
    check(extra)
    refuse_changed(extra, garden.policy_name, garden.policy_digest)
    if not is_by_policy_of(extra, garden):
        raise SaveError(
            f"the save was grown by {extra['policy']}; this garden's policy is "
            f"{garden.policy_name}."
        )
    saved = extra["description"]
    here = describe_garden(garden.model, garden.policy_name, garden.higher_is_better)
    # a garden keeps its own settings and limits
    names = ("features", "parameters", "higher_is_better")
    refuse_other(*({name: whole.get(name) for name in names} for whole in (saved, here)))
    if garden.average is not None and extra["decay"] not in (None, garden.average.decay):
        raise SaveError(
            f"the save has an average of decay {extra['decay']}, this garden one of "
            f"{garden.average.decay}."
        )


def refuse_changed(extra: dict[str, Any], name: str, digest: str | None) -> None:
    """Refuse to continue with a policy's file that has changed since the save."""
    before = extra["policy_digest"]
    if extra["policy"] == name and None not in (before, digest) and before != digest:
        raise SaveError(
            f"the save was grown by {name} with the checksum {before[:12]}; that file has "
            f"{str(digest)[:12]} now. Pass the file that it was (policy=...), or another policy."
        )


def is_by_policy_of(extra: dict[str, Any], garden: "Garden") -> bool:
    """Whether the policy of a garden made the save; its file may have moved since."""
    digest = garden.policy_digest
    if digest is not None:
        return bool(extra["policy_digest"] == digest)
    return extra["policy_digest"] is None and bool(extra["policy"] == garden.policy_name)


def take(
    garden: "Garden",
    optimizer: OptimizerSnapshot | None,
    average: Tensors | None,
    extra: dict[str, Any],
) -> None:
    """Give a garden whose network was rebuilt all else that was saved."""
    garden.epoch = extra["epoch"]
    garden.is_pruned = extra["is_pruned"]
    garden.run = extra["run"]
    garden.books.prices = prices_of(extra)
    garden.books.ledger = TypeAdapter(Ledger).validate_python(extra["ledger"])
    garden.pending_optimizer = optimizer
    # what another policy remembers means nothing to this one
    saved = extra["memory"] if is_by_policy_of(extra, garden) else None
    garden.memory = _from_plain(saved)
    if garden.memory is None and extra["memory"] is not None and processes.is_first():
        complain(
            f"the save was grown by {extra['policy']}; {garden.policy_name} starts without its "
            f"memory."
        )
    garden.questions = []
    garden.choices = []
    garden.by_hand = set(extra["by_hand"])
    if extra["policy"] != garden.policy_name and getattr(garden.policy, "keeps_measured", False):
        _leave_undecided(garden, extra["policy"])
    garden.history = [from_record(record) for record in extra["history"]]
    garden.model.examples |= extra["examples"]
    for slot in garden.model.ordered_slots:
        slot.set_plain(passes=1)  # in what was trained before, nobody knows any more
    garden.loss_meter.load(extra["loss_meter"])
    settle_optimizer(garden)
    if average is not None:
        garden.ema(extra["decay"]).restore(average)
    elif garden.average is not None:
        garden.average.restore({})  # it begins with the weights of the save
        garden.average.update()


_NETWORK = "state of a network"


def _as_plain(memory: Any) -> Any:
    """What a policy remembers as plain data; of a network it is a pair of tensors."""
    if isinstance(memory, tuple) and all(isinstance(part, Tensor) for part in memory):
        return {_NETWORK: [part.tolist() for part in memory]}
    return require_plain(memory)


def _from_plain(memory: Any) -> Any:
    """What a policy remembered."""
    if isinstance(memory, dict) and memory.keys() == {_NETWORK}:
        return tuple(torch.tensor(part) for part in memory[_NETWORK])
    return memory


def _leave_undecided(garden: "Garden", saved_policy: str) -> None:
    """Except seeds that the saved policy had measured and did not decide from a standing order.

    A rule with such an order keeps what it measures in the same decision, so these are not its own.
    """
    left: list[str] = []
    for slot in garden.model.ordered_slots:
        state = slot.state
        is_undecided = state.stage is SeedStage.PROBATIONARY and state.contribution is not None
        if is_undecided and slot.slot_id not in garden.by_hand:
            garden.by_hand.add(slot.slot_id)
            left.append(f'{state.blueprint_id} with garden.keep("{slot.slot_id}")')
    if left and processes.is_first():
        complain(
            f"{saved_policy} left seeds undecided, and {garden.policy_name} keeps none of them by "
            f"itself. Keep {', '.join(left)}, or remove it with garden.cull(...)."
        )


def settle_optimizer(garden: "Garden") -> None:
    """Give a state that waits for an optimiser to the one that is attached."""
    link = garden.model.link
    if garden.pending_optimizer is None or link is None:
        return
    restore_optimizer(garden.model, link, garden.pending_optimizer)
    garden.pending_optimizer = None
