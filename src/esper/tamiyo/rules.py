"""Rules of thumb and controls, each for one host.

A rule reads the reports, masks and signals of its host. Every tie is broken by a written rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, SHAM, BlueprintCost
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_FOSSILIZE, OP_GERMINATE, ActionSpace, Choice
from esper.leyline.registry import registering
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Reports, RulePolicy
from esper.tamiyo.scripts import ScriptedOp, has_waited, script_of
from esper.tamiyo.shortage import add_losses, lacks_data
from esper.tamiyo.signals import Signals
from esper.telemetry.events import Event

Memory = dict[str, Any]
RuleType = TypeVar("RuleType")


class Place(NamedTuple):
    """Where something may be planted and what: indices of the action space."""

    slot: int
    blueprint: int


@dataclass(frozen=True, order=True)
class PricedBlend:
    """What a seed costs with a blend, and the blend by its index in the action space."""

    price: int
    index: int


@dataclass(frozen=True)
class HostFacts:
    """What a rule may know of the network before it starts: actions, their prices, the room.

    `esper.grow` hands it to a policy that is given as a function.

    >>> import torch, esper
    >>> from esper.tamiyo.policy_names import make_policy
    >>> def careful(facts: esper.HostFacts):
    ...     print(facts.host_params, "parameters, room for", facts.most_room)
    ...     return make_policy("heuristic" if facts.most_room > 100 else "never", facts)
    >>> host = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> garden = esper.grow(
    ...     host, slots=["1"], example=torch.zeros(4, 8), policy=careful, budget=2.0
    ... )
    178 parameters, room for 178
    """

    space: ActionSpace
    costs: Mapping[tuple[str, str, str], int]
    """parameters of a seed by slot, blueprint and blend"""
    host_params: int
    budget: int | None = None
    horizon: int | None = None  # decisions in this episode, if known
    number: int = 0  # tells hosts apart where a rule draws lots
    prices: Mapping[str, Mapping[tuple[str, bool], BlueprintCost]] = field(default_factory=dict)
    """by slot what its seeds cost, FLOPs included; the bool is whether the blend has a gate"""

    @property
    def most_room(self) -> int:
        """Parameters that may be added to the bare host; without a budget as many as it has."""
        if self.budget is None:
            return self.host_params
        return self.budget - self.host_params

    def cheapest_blend(self, slot: int, blueprint: int) -> PricedBlend:
        """Price and index of the blend that adds least; ties go to the first in the space."""
        slot_id = self.space.slots.slot_ids[slot]
        name = str(self.space.blueprint_ids[blueprint])
        return min(
            PricedBlend(self.costs[slot_id, name, blend], index)
            for index, blend in enumerate(self.space.blends)
        )

    def work(self, slot: int, blueprint: int) -> int:
        """FLOPs of the seed that `plant` plants; its parameters where FLOPs were not counted."""
        cheapest = self.cheapest_blend(slot, blueprint)
        name = str(self.space.blueprint_ids[blueprint])
        has_gate = self.space.blends[cheapest.index] == "gated"
        prices_of_slot = self.prices.get(self.space.slots.slot_ids[slot], {})
        counted = prices_of_slot.get((name, has_gate))
        return cheapest.price if counted is None else counted.flops

    def plant(self, slot: int, blueprint: int) -> Choice:
        """The action that germinates this blueprint in this slot with the cheapest blend."""
        return OP_GERMINATE, slot, blueprint, self.cheapest_blend(slot, blueprint).index


def _legal_places(masks: Masks) -> list[Place]:
    """What may be germinated now, in order."""
    places: list[Place] = []
    if not masks["op"][OP_GERMINATE]:
        return places
    for slot in np.flatnonzero(masks["slot"][OP_GERMINATE]):
        for blueprint in np.flatnonzero(masks["blueprint"][slot]):
            places.append(Place(int(slot), int(blueprint)))
    return places


def _count_idle(masks: Masks, memory: Memory) -> Memory:
    """The memory with the number of decisions so far at which nothing could be done."""
    is_idle = not masks["op"][1:].any() and not memory.get("is_again")
    return {**memory, "idle": memory.get("idle", 0) + is_idle}


# -- the host alone --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Never:
    """The host alone: the control that every kind of growth must beat."""

    facts: HostFacts | None = None

    def choose(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Choice, Memory]:
        """Wait."""
        return WAIT, memory


# -- planting by the calendar ----------------------------------------------------------------------

Epochs = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
"""Decisions at which to plant, from 0 on. Decisions at which nothing can be done, as after a
rollback, do not count.
"""
Places = Annotated[tuple[Annotated[str, Field(pattern=r"^\w+\.\w+$")], ...], Field(min_length=1)]
"""Slot and blueprint of each planting, as in r0c1.norm."""
_USUAL_EPOCHS = (1, 2, 3)
_USUAL_SHARE = 0.75
Part = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def _require_within(epochs: Epochs, horizon: int | None) -> None:
    """Refuse epochs of the user's at which nothing is decided any more; the usual ones may be."""
    late = [epoch for epoch in epochs if horizon is not None and epoch >= horizon]
    if late and tuple(epochs) != _USUAL_EPOCHS:
        raise SettingError(
            f"epochs has {late[0]}, and the decisions of this episode are 0 to "
            f"{(horizon or 0) - 1}. Name earlier epochs, or train longer."
        )


@dataclass(frozen=True)
class Schedule:
    """Plants at fixed epochs, slots in turn, the named blueprint or the first that fits.

    With `places` it is a whole plan: to each epoch its slot and blueprint, planted then or as soon
    as that is possible. Several may have the same epoch. Those of one slot form a queue: the next
    is planted when the one before is kept.
    """

    facts: HostFacts
    epochs: Epochs = _USUAL_EPOCHS
    blueprint_id: str | None = None
    places: Places | None = None

    def __post_init__(self) -> None:
        _require_within(self.epochs, self.facts.horizon)
        if self.blueprint_id is not None:
            self.facts.space.blueprint_index(self.blueprint_id)
            self._require_room(self.blueprint_id)
        if self.places is None:
            return
        if len(self.places) != len(self.epochs):
            raise SettingError(
                f"a schedule has {len(self.epochs)} epochs and {len(self.places)} "
                f"places; give as many."
            )
        for text in self.places:
            self._place_of(text)

    @property
    def is_plan(self) -> bool:
        """Whether it may want several ops in one decision."""
        return self.places is not None

    def _require_room(self, blueprint_id: str) -> None:
        """Refuse a blueprint that the budget has no room for in any slot: nothing would grow."""
        facts = self.facts
        costs = facts.costs.items()
        least = min((cost for (_, name, _), cost in costs if name == blueprint_id), default=0)
        if facts.budget is not None and least > facts.most_room:
            raise SettingError(
                f"a schedule plants {blueprint_id}, which needs {least:,} parameters, and the "
                f"budget leaves {facts.most_room:,}. Raise the budget to at least "
                f"{facts.host_params + least:,}, or name a smaller blueprint."
            )

    def _place_of(self, text: str) -> Place:
        slot_id, blueprint_id = text.split(".")
        space = self.facts.space
        return Place(space.slots.index_for_slot_id(slot_id), space.blueprint_index(blueprint_id))

    def choose(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Choice, Memory]:
        """Plant if it is time and something is legal; the slot after the last one comes first."""
        memory = _count_idle(masks, memory)
        legal = _legal_places(masks)
        if self.places is not None:
            return self._follow_plan(self.places, legal, memory)
        names = self.facts.space.blueprint_ids
        wanted = [place for place in legal if self.blueprint_id in (None, names[place.blueprint])]
        is_time = memory["epoch"] - memory["idle"] in self.epochs
        if not wanted or not is_time:
            return WAIT, memory
        turn = memory.get("turn", 0)
        slots = self.facts.space.slots.num_slots
        slot, blueprint = min(
            wanted, key=lambda place: ((place.slot - turn) % slots, place.blueprint)
        )
        return self.facts.plant(slot, blueprint), {**memory, "turn": slot + 1}

    def _follow_plan(
        self, places: Places, legal: Sequence[Place], memory: Memory
    ) -> tuple[Choice, Memory]:
        """Plant the first place of the plan whose time has come and whose slot is open.

        Each slot keeps its order.
        """
        now = memory["epoch"] - memory["idle"]
        done = list(memory.get("done", []))
        waiting_slots: set[int] = set()
        by_epoch = sorted(range(len(self.epochs)), key=lambda number: (self.epochs[number], number))
        for number in by_epoch:
            if number in done:
                continue
            place = self._place_of(places[number])
            is_due = self.epochs[number] <= now and place.slot not in waiting_slots
            if is_due and place in legal:
                choice = self.facts.plant(place.slot, place.blueprint)
                return choice, {**memory, "done": [*done, number]}
            waiting_slots.add(place.slot)
        return WAIT, memory


@dataclass(frozen=True)
class Random:
    """Plants at the schedule's epochs; place, blueprint and blend are drawn evenly."""

    facts: HostFacts
    epochs: Epochs = _USUAL_EPOCHS
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        _require_within(self.epochs, self.facts.horizon)

    def choose(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Choice, Memory]:
        """Draw from what is legal, if it is time."""
        memory = _count_idle(masks, memory)
        places = _legal_places(masks)
        is_time = memory["epoch"] - memory["idle"] in self.epochs
        if not is_time or not places:
            return WAIT, memory
        generator = np.random.default_rng(
            [self.seed, self.facts.number, memory["host"], memory["epoch"]]
        )
        slot, blueprint = places[generator.integers(len(places))]
        blend = int(generator.choice(np.flatnonzero(masks["blend"])))
        return (OP_GERMINATE, slot, blueprint, blend), memory


# -- growth without capacity -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sham:
    """All the events of growing without its capacity: a script played with the sham blueprint."""

    facts: HostFacts
    script: Sequence[ScriptedOp]
    """as `script_of` makes it from an arm's events"""
    keeps_measured: bool = True
    """the standing order, if the arm had it too"""
    is_plan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        names = self.facts.space.blueprint_ids
        if SHAM not in names:
            raise UnknownNameError("blueprint", SHAM, filter(None, names), "Add it for this arm.")

    def choose(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Choice, Memory]:
        """The next op of the script that is due and possible."""
        done = memory.get("done", 0)
        while done < len(self.script):
            due = self.script[done]
            if due.decision > memory["epoch"]:
                break
            done += 1
            if not (masks["op"][due.op] and masks["slot"][due.op, due.slot]):
                continue  # the arm's seed ended by itself, and so did ours
            blueprint = self.facts.space.blueprint_index(SHAM) if due.op == OP_GERMINATE else 0
            return (due.op, due.slot, blueprint, 0), {**memory, "done": done}
        return WAIT, {**memory, "done": done}


def replay(events: Sequence[Event]) -> Callable[[HostFacts], RulePolicy]:
    """A policy that repeats an arm's events with the sham blueprint.

    It is built for one host's facts, as `esper.grow(policy=...)` wants it.
    """

    def build(facts: HostFacts) -> RulePolicy:
        script = script_of(events, facts.space)
        return RulePolicy(Sham(facts, script, keeps_measured=not has_waited(events)))

    return build


def plain_sham(facts: HostFacts) -> Sham:
    """All the events of growing without its capacity, with a script of its own.

    One seed per slot, planted and kept one after the other.
    """
    script: list[ScriptedOp] = []
    for slot in range(facts.space.slots.num_slots):
        script.append(ScriptedOp(3 * slot + 1, OP_GERMINATE, slot))
        script.append(ScriptedOp(3 * slot + 3, OP_FOSSILIZE, slot))
    return Sham(facts, script)


# -- the rule of thumb -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Heuristic:
    """Plant what computes most, where least has grown, one seed per decision, if data suffice.

    It waits while data are missing: the training loss falls, and the held-out loss has fallen less
    than `held_out_part` as far (see `lacks_data`). Every seed that was measured is kept.

    Of the seeds that take at most `share` of the room left, those in the slots with the fewest
    fossils count, and of these the one with the most FLOPs on an example is planted; as a slot's
    first seed one that mixes positions, if there is one: in a text, attention before an MLP. Ties:
    more parameters, the later slot, the first listed. A slot with `copies` fossils is not copied
    again: on the task code, a network that was doubled once, early, did better than one that
    continued to grow. Where the episode's length is known, only its first part is for planting: a
    seed needs time and a high learning rate.

    A `share` that is given is a limit: what takes more is not planted, and one that is too small
    for every seed is refused. Without one it is three quarters, or else the smallest seed.
    """

    facts: HostFacts
    share: Part | None = None
    planting_part: Part = 0.4  # part of a known episode in which to plant
    copies: Annotated[int, Field(ge=0)] = 1
    held_out_part: Share = 0.3  # 0: plants whatever the losses say, as in 0.2.0

    def __post_init__(self) -> None:
        costs = self.facts.costs.items()
        least = min((cost for (_, name, _), cost in costs if name != SHAM), default=0)
        room = self.facts.most_room
        if self.share is not None and least > self.share * room > 0:
            raise SettingError(
                f"share of heuristic is {self.share:g}, at most {int(self.share * room):,} of the "
                f"{room:,} parameters that may be added, and the smallest seed has {least:,}. Give "
                f"a larger share or budget, or no share."
            )

    def choose(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Choice, Memory]:
        """Plant the best of the legal places, while it is early enough and data suffice."""
        memory = {**memory, "losses": add_losses(memory.get("losses", []), signals)}
        candidates, _ = self.weigh(masks, reports, memory, signals)
        if not candidates:
            return WAIT, memory
        best = max(candidates, key=self._rank)
        return self.facts.plant(best.slot, best.blueprint), memory

    def weigh(
        self, masks: Masks, reports: Reports, memory: Memory, signals: Signals
    ) -> tuple[Sequence[Place], str]:
        """Return what may be planted, the largest of it first to be, and which test decides it."""
        if lacks_data(memory["losses"], signals.guessing, self.held_out_part):
            return [], "data are missing"
        fossils = [reports[slot_id].fossil_count for slot_id in self.facts.space.slots.slot_ids]
        places = [place for place in _legal_places(masks) if self._is_wanted(place, fossils)]
        if not places:
            return [], "no slot may take a seed now"
        if self._is_late(memory["epoch"]):
            return [], f"only the first {self.planting_part:.0%} of the epochs are for planting"
        fitting = self._fitting(places, reports)
        if not fitting:
            return [], f"every seed takes more than {self.share:.0%} of the room that is left"
        fewest = min(fossils[place.slot] for place in fitting)
        candidates = [place for place in fitting if fossils[place.slot] == fewest]
        mixing = [place for place in candidates if self._mixes_positions(place, reports)]
        if fewest == 0 and mixing:
            return mixing, "as a slot's first seed one that mixes positions is taken"
        return candidates, f"the slots with the fewest fossils, {fewest}, come first"

    def _is_late(self, epoch: int) -> bool:
        horizon = self.facts.horizon
        return horizon is not None and epoch >= self.planting_part * horizon

    def _is_wanted(self, place: Place, fossils: Sequence[int]) -> bool:
        """Whether a blueprint is no sham, and no copy in a slot that has enough fossils."""
        name = self.facts.space.blueprint_ids[place.blueprint]
        if name in (COPY, COPY_ZERO):
            return fossils[place.slot] < self.copies
        return name != SHAM

    def _rank(self, place: Place) -> tuple[int, int, int, int]:
        """What is larger is planted first: FLOPs, parameters, the later slot, the first listed."""
        work = self.facts.work(place.slot, place.blueprint)
        params = self.facts.cheapest_blend(place.slot, place.blueprint).price
        return work, params, place.slot, -place.blueprint

    def _mixes_positions(self, place: Place, reports: Reports) -> bool:
        """A copy is taken to, as the blocks of a text do; a vector has no positions."""
        name = str(self.facts.space.blueprint_ids[place.blueprint])
        kind = reports[self.facts.space.slots.slot_ids[place.slot]].kind
        if kind == "vector":
            return False
        return name in (COPY, COPY_ZERO) or REGISTRY.get(kind, name).traits.spatial > 0

    def _fitting(self, places: Sequence[Place], reports: Reports) -> Sequence[Place]:
        """Places of seeds that take at most `share` of the room left.

        Without a `share` the smallest's, if no seed takes at most three quarters.
        """
        facts = self.facts
        room = facts.most_room
        if facts.budget is not None:
            metrics = [report.metrics for report in reports.values()]
            seed_params = sum(metric.seed_param_count for metric in metrics)
            room = facts.budget - (metrics[0].host_param_count + seed_params)
        prices = {
            place: facts.cheapest_blend(place.slot, place.blueprint).price for place in places
        }
        most = room * (_USUAL_SHARE if self.share is None else self.share)
        fitting = [place for place in places if prices[place] <= most]
        if self.share is not None:
            return fitting
        return fitting or [min(places, key=prices.__getitem__)]


# -- all rules by name -----------------------------------------------------------------------------

RULES: dict[str, Callable[..., Any]] = {
    "never": Never,
    "schedule": Schedule,
    "random": Random,
    "heuristic": Heuristic,
    "sham": plain_sham,
}
"""Policies by name, as `esper.grow(policy=...)` and the command line know them."""

_RESERVED = ("never", "sham", "search", "all", "start", "oracle", "pretrained")
_enter_rule = registering(RULES, "rule", reserved=_RESERVED)
"""The reserved names have a meaning of their own."""


def rule(name: str, *, replace: bool = False) -> Callable[[RuleType], RuleType]:
    """Register a rule of your own under a name, as a decorator.

    It stands on a frozen dataclass whose first field is `facts`, followed by the rule's settings,
    or on a function of `facts` and settings that builds one. A name that is taken is refused
    unless you say `replace`. What a rule planted is kept once it was measured, unless the rule has
    `keeps_measured = False` and returns FOSSILIZE itself.

    >>> from dataclasses import dataclass
    >>> import torch, esper
    >>> @esper.rule("patient")
    ... @dataclass(frozen=True)
    ... class Patient:
    ...     facts: esper.HostFacts
    ...     years: int = 1
    ...     def choose(self, masks, reports, memory, signals):
    ...         return (0, 0, 0, 0), memory  # op 0 is WAIT
    >>> host = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> garden = esper.grow(
    ...     host, slots=["1"], example=torch.zeros(4, 8), policy="patient:years=3"
    ... )
    >>> garden.policy.rule.years
    3
    """
    register: Callable[[RuleType], RuleType] = _enter_rule(name, replace=replace)
    return register
