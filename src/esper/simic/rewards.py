"""What a decision earned: a few small named terms.

A family is a choice of terms and weights. Most terms have one sign; `contribution` pays seeds that
help and charges those that harm, slot by slot.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from esper.leyline.errors import MeasurementError, SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE
from esper.leyline.registry import enter

BOUND = 5.0
"""losses beyond the twin's, and what a slot contributes, count up to this many units, so that a
broken host does not drown everything else
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

    Where the environment fills them in, `contributions` say what each slot is worth:

    >>> dict(facts.contributions)
    {}
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
    """fossils' part of the parameters added to the network that was measured; 0 where there are
    none, and 1 at an episode's end, where undecided seeds are off"""
    is_last: bool
    is_rolled_back: bool = False
    is_lost: bool = False
    """whether the governor gave the host up"""
    contributions: Mapping[str, float] = field(default_factory=dict)
    """by slot, how much held-out loss its fossils and its seed on probation save by their last
    readings: without them minus with them, in `loss_unit`, clipped at `BOUND`"""
    contributions_before: Mapping[str, float] = field(default_factory=dict)
    lead: float = 0.0
    """held-out loss below the twin's, in `loss_unit`, clipped at `BOUND`; where the host was rolled
    back, that of the epoch before, unless its episode ended and what is left was measured"""
    lead_before: float = 0.0
    gamma: float = 0.99
    """the discount of the run"""


def accuracy_beyond_twin(facts: StepFacts) -> float:
    """Accuracy won this epoch beyond what the twin won.

    Over an episode it adds up to the final lead.
    """
    lead = facts.accuracy - facts.twin_accuracy
    lead_before = facts.accuracy_before - facts.twin_accuracy_before
    return lead - lead_before


def loss_beyond_twin(facts: StepFacts) -> float:
    """The same in held-out loss, in units of the task's typical change."""
    lead = in_units(facts.twin_loss - facts.loss, facts.loss_unit)
    lead_before = in_units(facts.twin_loss_before - facts.loss_before, facts.loss_unit)
    return lead - lead_before


def in_units(saved: float, unit: float) -> float:
    """A loss that is saved, in units of the task's typical change and clipped at `BOUND`.

    >>> in_units(0.3, 0.2), in_units(-9.0, 0.2), in_units(float("nan"), 0.2)
    (1.4999999999999998, -5.0, -5.0)
    """
    # in this order of comparisons NaN is the worst there is
    return min(BOUND, max(-BOUND, saved / unit))


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
    return facts.kept_share * max(0.0, in_units(facts.twin_loss - facts.loss, facts.loss_unit))


@dataclass(frozen=True, slots=True)
class Pays:
    """What the network as it stands is worth to its policy: by slot, and as a whole."""

    by_slot: Mapping[str, float]
    harm: float
    """0 or less: how far the network is behind its twin beyond what slots are charged for"""

    @property
    def total(self) -> float:
        """All of it; never more than the lead."""
        return sum(self.by_slot.values()) + self.harm


def share_out(contributions: Mapping[str, float], lead: float) -> Pays:
    """Share the lead out among the slots that help, and charge those that harm.

    A slot that helps is paid what it contributes, scaled down where all of them together claim more
    than the network is ahead: seeds that lean on each other cannot earn more than was gained. A
    slot that harms is charged in full. A network behind its twin pays for the whole lag.

    >>> share_out({"r0c0": 1.0, "r0c1": 3.0}, lead=2.0)
    Pays(by_slot={'r0c0': 0.5, 'r0c1': 1.5}, harm=0.0)
    >>> share_out({"r0c0": 1.0, "r0c1": -0.5}, lead=-2.0)
    Pays(by_slot={'r0c0': 0.0, 'r0c1': -0.5}, harm=-1.5)
    """
    claimed = sum(worth for worth in contributions.values() if worth > 0)
    paid_share = min(1.0, max(0.0, lead) / claimed) if claimed else 0.0
    by_slot: dict[str, float] = {}
    for slot_id, worth in contributions.items():
        by_slot[slot_id] = worth * paid_share if worth > 0 else worth
    charged = sum(pay for pay in by_slot.values() if pay < 0)
    return Pays(by_slot=by_slot, harm=min(0.0, lead - charged))


def _pays_of(facts: StepFacts) -> tuple[Pays, Pays]:
    """What the network is worth now and was before."""
    # the lead of a host that is given up does not last
    lead = min(0.0, facts.lead) if facts.is_lost else facts.lead
    now = share_out(facts.contributions, lead)
    return now, share_out(facts.contributions_before, facts.lead_before)


def _change(now: float, before: float, facts: StepFacts) -> float:
    """What is paid for a worth that changes: its discounted change, at the end all that is left.

    Changes on the way only bring forward what the end pays.
    """
    return now - before if facts.is_last else facts.gamma * now - before


def contribution(facts: StepFacts) -> dict[str, float]:
    """What each slot's seeds are measured to contribute, as far as the network is ahead for it."""
    now, before = _pays_of(facts)
    earned: dict[str, float] = {}
    for slot_id, pay in now.by_slot.items():
        earned[slot_id] = _change(pay, before.by_slot.get(slot_id, 0.0), facts)
    return earned


def harm(facts: StepFacts) -> float:
    """The change of what a network pays that is behind its twin, beyond its slots' charges."""
    now, before = _pays_of(facts)
    return _change(now.harm, before.harm, facts)


def breakdown(facts: StepFacts) -> float:
    """A rollback by the governor; ten times as bad when it gives the host up."""
    if facts.is_lost:
        return -10.0
    return -1.0 if facts.is_rolled_back else 0.0


Term = Callable[[StepFacts], float | Mapping[str, float]]
"""What a term returns: a number, or one for each slot."""
TERMS: dict[str, Term] = {
    term.__name__: term
    for term in (
        contribution,
        harm,
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
        "contribution": 10.0,
        "harm": 10.0,
        "rent": 0.003,
        "churn": 0.01,
        "breakdown": 0.1,
    },
    "lead": {
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

    It is paid where a family gives it a weight. It must return a finite number, or one for each
    slot by slot id, as `contribution` does: these are parts of their own, `NAME:SLOT`.

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
    """Each term's share, by slot where the term says so. Their sum, in this order, is the reward.

    >>> facts = StepFacts(
    ...     accuracy=0.9, accuracy_before=0.8, twin_accuracy=0.7, twin_accuracy_before=0.7,
    ...     loss=0.3, loss_before=0.5, twin_loss=0.6, twin_loss_before=0.6, loss_unit=0.25,
    ...     op=0, params_share=0.5, flops_share=0.5, kept_share=1.0, is_last=True,
    ...     contributions={"r0c0": 1.0}, lead=1.2,
    ... )
    >>> reward_parts(facts, FAMILIES["contribution"])
    {'contribution:r0c0': 10.0, 'harm': 0.0, 'rent': -0.0015, 'churn': 0.0, 'breakdown': 0.0}
    """
    parts: dict[str, float] = {}
    for name, weight in weights.items():
        earned = TERMS[name](facts)
        if isinstance(earned, Mapping):
            parts |= {f"{name}:{slot_id}": weight * part for slot_id, part in earned.items()}
        else:
            parts[name] = weight * earned
    for name, part in parts.items():
        if not math.isfinite(part):
            raise MeasurementError(
                f"reward term {name!r} is {part}; it must be finite. It was given {facts}."
            )
    return parts
