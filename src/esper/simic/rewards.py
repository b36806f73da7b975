"""What a decision earned: a few small named terms, each with one sign.

A family is a choice of terms and weights.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from esper.leyline.errors import MeasurementError, SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE
from esper.leyline.registry import enter

BOUND = 5.0
"""losses beyond the twin's count up to this many units, so that a broken host does not drown
everything else
"""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One host's epoch, as far as rewards may know it.

    The twin is the same host, never grown. Accuracies and losses are held-out; `_before` is after
    the epoch before. What a reward term reads of it:

    >>> import esper
    >>> facts = esper.StepFacts(
    ...     accuracy=0.9, accuracy_before=0.8, twin_accuracy=0.7, twin_accuracy_before=0.7,
    ...     loss=0.3, loss_before=0.5, twin_loss=0.6, twin_loss_before=0.6, loss_unit=1.0,
    ...     op=0, params_share=0.5, flops_share=0.25, kept_share=1.0, is_last=True,
    ... )
    >>> round(facts.accuracy - facts.twin_accuracy, 6)
    0.2
    >>> facts.is_lost
    False
    """

    accuracy: float
    accuracy_before: float
    twin_accuracy: float
    twin_accuracy_before: float
    loss: float
    loss_before: float
    twin_loss: float
    twin_loss_before: float
    loss_unit: float
    """the task's typical change: how far the twin's held-out loss falls in its episode"""
    op: int
    """what was done, after the legality rule"""
    params_share: float
    """parameters added, of the host's own"""
    flops_share: float
    """forward FLOPs added, of the host's own"""
    kept_share: float
    """fossils' part of the parameters added; 0 where there are none"""
    is_last: bool
    is_rolled_back: bool = False
    is_lost: bool = False
    """whether the governor gave the host up"""


def accuracy_beyond_twin(facts: StepFacts) -> float:
    """Accuracy won this epoch beyond what the twin won.

    Over an episode it adds up to the final lead.
    """
    lead = facts.accuracy - facts.twin_accuracy
    lead_before = facts.accuracy_before - facts.twin_accuracy_before
    return lead - lead_before


def loss_beyond_twin(facts: StepFacts) -> float:
    """The same in held-out loss, in units of the task's typical change."""
    lead = _lead(facts.loss, facts.twin_loss, facts.loss_unit)
    lead_before = _lead(facts.loss_before, facts.twin_loss_before, facts.loss_unit)
    return lead - lead_before


def _lead(loss: float, twin_loss: float, unit: float) -> float:
    lead = (twin_loss - loss) / unit
    # in this order of comparisons NaN is the worst lead there is
    return min(BOUND, max(-BOUND, lead))


def rent(facts: StepFacts) -> float:
    """The price of size for one epoch: parameters and FLOPs alike."""
    return -0.5 * (facts.params_share + facts.flops_share)


def churn(facts: StepFacts) -> float:
    """The price of a germination or a cull, so that going round in circles never pays."""
    return -1.0 if facts.op in (OP_GERMINATE, OP_CULL) else 0.0


def lasting_accuracy(facts: StepFacts) -> float:
    """At an episode's end, the lead over the twin as far as it rests on fossils.

    The lead of a host that is given up does not last.
    """
    if not facts.is_last or facts.is_lost:
        return 0.0
    return facts.kept_share * max(0.0, facts.accuracy - facts.twin_accuracy)


def lasting_loss(facts: StepFacts) -> float:
    """The same in held-out loss, in units of the task's typical change."""
    if not facts.is_last or facts.is_lost:
        return 0.0
    return facts.kept_share * max(0.0, _lead(facts.loss, facts.twin_loss, facts.loss_unit))


def breakdown(facts: StepFacts) -> float:
    """A rollback by the governor; ten times as bad when it gives the host up."""
    if facts.is_lost:
        return -10.0
    return -1.0 if facts.is_rolled_back else 0.0


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
    """Enter a function of `StepFacts` under its own name; a decorator.

    It is paid where a family gives it a weight. It must return a finite number.

    >>> import esper
    >>> @esper.reward_term
    ... def smallness_of_an_example(facts):
    ...     return -facts.params_share
    >>> esper.reward_family("example_of_a_term", {"smallness_of_an_example": 0.5})

    Args:
        term: the function; its name is the term's.
        replace: whether it may take the place of a term of that name.
    """
    return enter(TERMS, f"reward term {term.__name__!r}", term.__name__, term, replace)


def reward_family(name: str, weights: Mapping[str, float], *, replace: bool = False) -> None:
    """Enter a choice of terms and their weights, for `--reward-family`.

    >>> import esper
    >>> esper.reward_family("example_of_a_family", {"accuracy_beyond_twin": 10.0, "rent": 0.1})
    >>> esper.reward_family("example_of_a_mistake", {"rents": 0.1})
    Traceback (most recent call last):
    ...
    esper.leyline.errors.UnknownNameError: unknown reward term 'rents'. Did you mean 'rent'? ...

    Args:
        name: what `--reward-family` and `TrainingConfig.reward.family` call it.
        weights: terms by name; a weight is 0 or more.
        replace: whether it may take the place of a family of that name.
    """
    enter(FAMILIES, f"reward family {name!r}", name, check_weights(weights), replace)


def weights_of(family: str, changed: Mapping[str, float] | None = None) -> dict[str, float]:
    """The weights of a family with some of them changed; a term that it lacks is refused."""
    if family not in FAMILIES:
        raise UnknownNameError(
            "reward family", family, FAMILIES, "One of your own: esper --import FILE."
        )
    return {**FAMILIES[family], **check_weights(changed or {}, family)}


def check_weights(weights: Mapping[str, float], family: str | None = None) -> dict[str, float]:
    """The same weights, if every term is known and none turns a price into a prize.

    With a family, its terms are those that are known.
    """
    known: Collection[str] = TERMS
    kind = "reward term"
    if family is not None:
        known = FAMILIES[family]
        kind = f"reward term of family {family!r}"
    for name, weight in weights.items():
        if name not in known:
            raise UnknownNameError(kind, name, known)
        if not 0 <= weight < math.inf:
            raise SettingError(
                f"the weight of reward term {name!r} is {weight}; it must be 0 or more, and finite."
            )
    return dict(weights)


def reward_parts(facts: StepFacts, weights: Mapping[str, float]) -> dict[str, float]:
    """Each term's share. Their sum, in this order, is the reward."""
    parts = {name: weight * TERMS[name](facts) for name, weight in weights.items()}
    for name, part in parts.items():
        if not math.isfinite(part):
            raise MeasurementError(
                f"reward term {name!r} is {part}; it must be finite. It was given {facts}."
            )
    return parts
