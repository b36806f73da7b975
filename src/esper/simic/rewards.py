"""What a decision earned:

a few small named terms, each with one sign. A family is a choice of terms and weights.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from esper.leyline.errors import MeasurementError, SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE
from esper.leyline.registry import enter

# Losses beyond the twin's count up to this many units, so that a broken host cannot drown
# everything else.
BOUND = 5.0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One host's epoch, as far as rewards may know it. The twin is the same host, never grown."""

    accuracy: float
    accuracy_before: float
    twin_accuracy: float
    twin_accuracy_before: float
    loss: float
    loss_before: float
    twin_loss: float
    twin_loss_before: float
    loss_unit: (
        float  # the task's typical change: how far the twin's held-out loss falls in its episode
    )
    op: int  # what was done, after the legality rule
    params_share: float  # parameters added, of the host's own
    flops_share: float  # forward FLOPs added, of the host's own
    kept_share: float  # fossils' part of the parameters added; 0 where there are none
    is_last: bool
    is_rolled_back: bool = False
    is_lost: bool = False  # the governor gave the host up


def accuracy_beyond_twin(facts: StepFacts) -> float:
    """Accuracy won this epoch beyond what the twin won.

    Over an episode it adds up to the final lead.
    """
    return (facts.accuracy - facts.twin_accuracy) - (
        facts.accuracy_before - facts.twin_accuracy_before
    )


def loss_beyond_twin(facts: StepFacts) -> float:
    """The same in held-out loss, in units of the task's typical change."""
    unit = facts.loss_unit
    return _lead(facts.loss, facts.twin_loss, unit) - _lead(
        facts.loss_before, facts.twin_loss_before, unit
    )


def _lead(loss: float, twin_loss: float, unit: float) -> float:
    return min(
        BOUND, max(-BOUND, (twin_loss - loss) / unit)
    )  # in this order NaN is the worst there is


def rent(facts: StepFacts) -> float:
    """The price of size for one epoch: parameters and FLOPs alike."""
    return -0.5 * (facts.params_share + facts.flops_share)


def churn(facts: StepFacts) -> float:
    """Every germination and every cull costs the same, so that going round in circles never
    pays.
    """
    return -1.0 if facts.op in (OP_GERMINATE, OP_CULL) else 0.0


def lasting_accuracy(facts: StepFacts) -> float:
    """At an episode's end:

    the lead over the twin, as far as it rests on fossils. What is given up does not last.
    """
    lead = facts.accuracy - facts.twin_accuracy
    return facts.kept_share * max(0.0, lead) if facts.is_last and not facts.is_lost else 0.0


def lasting_loss(facts: StepFacts) -> float:
    """The same in held-out loss, in units of the task's typical change."""
    lead = _lead(facts.loss, facts.twin_loss, facts.loss_unit)
    return facts.kept_share * max(0.0, lead) if facts.is_last and not facts.is_lost else 0.0


def breakdown(facts: StepFacts) -> float:
    """A rollback by the governor; ten times as bad when it gives the host up."""
    return -10.0 if facts.is_lost else -1.0 if facts.is_rolled_back else 0.0


Term = Callable[[StepFacts], float]
TERMS: dict[str, Term] = {
    term.__name__: term
    for term in (
        accuracy_beyond_twin,
        loss_beyond_twin,
        rent,
        churn,
        lasting_accuracy,
        lasting_loss,
        breakdown,
    )
}
FAMILIES: dict[str, dict[str, float]] = {
    "contribution": {
        "accuracy_beyond_twin": 10.0,
        "lasting_accuracy": 10.0,
        "rent": 0.003,
        "churn": 0.01,
        "breakdown": 0.1,
    },
    "loss": {
        "loss_beyond_twin": 1.0,
        "lasting_loss": 1.0,
        "rent": 0.01,
        "churn": 0.02,
        "breakdown": 0.1,
    },
    # size and going round in circles are paid for in steps: host and twin have used the same FLOPs
    # at every decision
    "compute": {"loss_beyond_twin": 1.0, "lasting_loss": 1.0, "breakdown": 0.1},
}


def reward_term(term: Term, *, replace: bool = False) -> Term:
    """Enter a function of `StepFacts` under its own name; it is paid where a family gives it a
    weight. A decorator.
    """
    return enter(TERMS, f"reward term {term.__name__!r}", term.__name__, term, replace)


def reward_family(name: str, weights: Mapping[str, float], *, replace: bool = False) -> None:
    """Enter a choice of terms and their weights, for `--reward-family`."""
    enter(FAMILIES, f"reward family {name!r}", name, check_weights(weights), replace)


def weights_of(family: str, changed: Mapping[str, float] | None = None) -> dict[str, float]:
    """The weights of a family with some of them changed; a term that it does not have is
    refused.
    """
    if family not in FAMILIES:
        raise UnknownNameError(
            "reward family", family, FAMILIES, "One of your own: esper --import FILE."
        )
    return {**FAMILIES[family], **check_weights(changed or {}, family)}


def check_weights(weights: Mapping[str, float], family: str | None = None) -> dict[str, float]:
    """The same weights, if every term is known, of the family too, and none would turn a price into
    a prize.
    """
    known: Collection[str] = TERMS if family is None else FAMILIES[family]
    for name, weight in weights.items():
        if name not in known:
            raise UnknownNameError(
                f"reward term{f' of family {family!r}' if family else ''}", name, known
            )
        if not 0 <= weight < math.inf:
            raise SettingError(
                f"the weight of reward term {name!r} is {weight}; it must be 0 or more, and finite."
            )
    return dict(weights)


def reward_parts(facts: StepFacts, weights: Mapping[str, float]) -> dict[str, float]:
    """Each term's share. Their sum, in this order, is the reward."""
    parts = {name: weight * TERMS[name](facts) for name, weight in weights.items()}
    for name in [name for name, part in parts.items() if not math.isfinite(part)]:
        raise MeasurementError(
            f"reward term {name!r} is {parts[name]}; it must be finite. It was given {facts}."
        )
    return parts
