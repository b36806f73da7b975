"""Rules of thumb and controls. Each reads reports and masks of one host; every tie is broken by a written rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, SHAM, BlueprintCost
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, ActionSpace, Choice
from esper.leyline.own import read_settings, registering
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Reports, RulePolicy
from esper.telemetry.events import ActionTaken, Event, StageChanged

Memory = dict[str, Any]
Place = tuple[int, int]  # slot and blueprint


@dataclass(frozen=True)
class HostFacts:
    """What a rule may know of the network before it starts: the actions, their prices, the room there is."""

    space: ActionSpace
    costs: Mapping[tuple[str, str, str], int]
    host_params: int
    budget: int | None = None
    horizon: int | None = None  # decisions in this episode, if known
    number: int = 0  # tells hosts apart where a rule draws lots
    prices: Mapping[str, Mapping[tuple[str, bool], BlueprintCost]] = field(default_factory=dict)
    """by slot what its seeds cost, FLOPs included; the bool is whether the blend has a gate"""

    @property
    def most_room(self) -> int:
        """Parameters that may be added to the bare host; without a budget as many as it has itself."""
        return self.host_params if self.budget is None else self.budget - self.host_params

    def cheapest_blend(self, slot: int, blueprint: int) -> tuple[int, int]:
        """Price and number of the blend that adds least; ties go to the first in the space."""
        key = self.space.slots.slot_ids[slot], str(self.space.blueprint_ids[blueprint])
        return min(
            (self.costs[(*key, blend)], number) for number, blend in enumerate(self.space.blends)
        )

    def work(self, slot: int, blueprint: int) -> int:
        """FLOPs of the seed that `plant` plants; its parameters where nobody counted FLOPs."""
        price, blend = self.cheapest_blend(slot, blueprint)
        key = str(self.space.blueprint_ids[blueprint]), self.space.blends[blend] == "gated"
        counted = self.prices.get(self.space.slots.slot_ids[slot], {}).get(key)
        return price if counted is None else counted.flops

    def plant(self, slot: int, blueprint: int) -> Choice:
        return OP_GERMINATE, slot, blueprint, self.cheapest_blend(slot, blueprint)[1]


def _legal_places(masks: Masks) -> list[Place]:
    """What may be germinated now, in order."""
    if not masks["op"][OP_GERMINATE]:
        return []
    slots = np.flatnonzero(masks["slot"][OP_GERMINATE])
    return [(int(s), int(b)) for s in slots for b in np.flatnonzero(masks["blueprint"][s])]


@dataclass(frozen=True)
class Never:
    """The host alone: the control that every kind of growth must beat."""

    facts: HostFacts | None = None

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        return WAIT, memory


Epochs = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
"""Decisions at which to plant, from 0 on; those at which nothing can be done, as after a rollback, do not count."""
Places = Annotated[tuple[Annotated[str, Field(pattern=r"^\w+\.\w+$")], ...], Field(min_length=1)]
"""Slot and blueprint of each planting, as in r0c1.norm."""
Part = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Schedule:
    """Plants at fixed epochs, slots in turn, the named blueprint or the first that fits.

    With `places` it is a whole plan: to each epoch its slot and blueprint, planted then or as soon as that is possible.
    Several may have the same epoch. Those of one slot form a queue: the next is planted when the one before is kept.
    """

    facts: HostFacts
    epochs: Epochs = (1, 2, 3)
    blueprint_id: str | None = None
    places: Places | None = None

    def __post_init__(self) -> None:
        if self.blueprint_id is not None:
            self.facts.space.blueprint_index(self.blueprint_id)
        if self.places is not None and len(self.places) != len(self.epochs):
            raise SettingError(
                f"a schedule has {len(self.epochs)} epochs and {len(self.places)} places; give as many."
            )
        list(map(self._look_up, self.places or ()))

    @property
    def is_plan(self) -> bool:
        return self.places is not None

    def _look_up(self, place: str) -> Place:
        slot, blueprint = place.split(".")
        return self.facts.space.slots.index_for_slot_id(slot), self.facts.space.blueprint_index(
            blueprint
        )

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        memory, legal = _count_idle(masks, memory), _legal_places(masks)
        if self.places is not None:
            return self._go_on(self.places, legal, memory)
        places = [
            (s, b)
            for s, b in legal
            if self.blueprint_id in (None, self.facts.space.blueprint_ids[b])
        ]
        if not places or memory["epoch"] - memory["idle"] not in self.epochs:
            return WAIT, memory
        turn, slots = memory.get("turn", 0), self.facts.space.slots.num_slots
        slot, blueprint = min(places, key=lambda place: ((place[0] - turn) % slots, place[1]))
        return self.facts.plant(slot, blueprint), {**memory, "turn": slot + 1}

    def _go_on(
        self, places: Places, legal: Sequence[Place], memory: Memory
    ) -> tuple[Choice, Memory]:
        """The first planting of the plan whose time has come and whose slot is open; each slot keeps its order."""
        done, waiting = list(memory.get("done", [])), set[int]()
        for number, epoch in sorted(enumerate(self.epochs), key=lambda entry: (entry[1], entry[0])):
            slot, blueprint = self._look_up(places[number])
            is_next = (
                number not in done
                and slot not in waiting
                and epoch <= memory["epoch"] - memory["idle"]
            )
            if is_next and (slot, blueprint) in legal:
                return self.facts.plant(slot, blueprint), {**memory, "done": [*done, number]}
            waiting |= set() if number in done else {slot}
        return WAIT, memory


@dataclass(frozen=True)
class Random:
    """Plants at the schedule's epochs, place, blueprint and blend drawn evenly from what is legal."""

    facts: HostFacts
    epochs: Epochs = (1, 2, 3)
    seed: Annotated[int, Field(ge=0)] = 0

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        memory, places = _count_idle(masks, memory), _legal_places(masks)
        if memory["epoch"] - memory["idle"] not in self.epochs or not places:
            return WAIT, memory
        draw = np.random.default_rng(
            [self.seed, self.facts.number, memory["host"], memory["epoch"]]
        )
        slot, blueprint = places[draw.integers(len(places))]
        return (
            OP_GERMINATE,
            slot,
            blueprint,
            int(draw.choice(np.flatnonzero(masks["blend"]))),
        ), memory


def _count_idle(masks: Masks, memory: Memory) -> Memory:
    is_idle = not masks["op"][1:].any() and not memory.get("is_again")
    return {**memory, "idle": memory.get("idle", 0) + is_idle}


@dataclass(frozen=True)
class Sham:
    """All the events of growing without its capacity: another arm's events replayed with the sham blueprint."""

    facts: HostFacts
    script: Sequence[
        tuple[int, int, int]
    ]  # (decision, op, slot), as `script_of` makes it from an arm's events
    is_plan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if "sham" not in (names := self.facts.space.blueprint_ids):
            raise UnknownNameError("blueprint", "sham", filter(None, names), "Add it for this arm.")

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        done = memory.get("done", 0)
        while done < len(self.script) and self.script[done][0] <= memory["epoch"]:
            _, op, slot = self.script[done]
            done += 1
            if not (masks["op"][op] and masks["slot"][op, slot]):
                continue  # the arm's seed ended by itself, and so did ours
            blueprint = self.facts.space.blueprint_index("sham") if op == OP_GERMINATE else 0
            return (op, slot, blueprint, 0), {**memory, "done": done}
        return WAIT, {**memory, "done": done}


def script_of(events: Sequence[Event], space: ActionSpace) -> list[tuple[int, int, int]]:
    """The ops that happened in an arm, ends by themselves included, as a script for `Sham`."""
    ops = {
        "GERMINATE": OP_GERMINATE,
        "GERMINATED": OP_GERMINATE,
        "FOSSILIZED": OP_FOSSILIZE,
        "CULLED": OP_CULL,
    }
    happened = [event for event in events if isinstance(event, StageChanged | ActionTaken)]
    named = [
        (event, ops.get(event.after if isinstance(event, StageChanged) else event.op))
        for event in happened
    ]
    # the first decision, number 0, comes after epoch 1
    steps = [
        (e.epoch - 1, op, space.slots.index_for_slot_id(e.slot))
        for e, op in named
        if op is not None
    ]
    return sorted(dict.fromkeys(steps), key=lambda step: (step[0], step[1] == OP_GERMINATE))


@dataclass(frozen=True)
class Heuristic:
    """Plant what computes most, where least has grown, one seed per decision. What becomes of a seed is mechanical.

    Of the seeds that take at most `share` of the room left (if none does: of the smallest alone), those in the slots
    with the fewest fossils count, and of these the one with the most FLOPs on an example is planted; as a slot's first
    seed one that mixes positions, if there is one: in a text, attention before an MLP. Ties: more parameters, the later
    slot, the first listed. A slot with `copies` fossils is not copied again: on the task code, a network that was
    doubled once, early, did better than one that grew on. Where the episode's length is known, only its first part is
    for planting: a seed needs time and a high learning rate.
    """

    facts: HostFacts
    share: Part = 0.75
    planting_part: Part = 0.4  # part of a known episode in which to plant
    copies: Annotated[int, Field(ge=0)] = 1

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        facts, names = self.facts, self.facts.space.blueprint_ids
        fossils = [reports[slot_id].fossil_count for slot_id in facts.space.slots.slot_ids]
        spent = [{SHAM, COPY, COPY_ZERO} if count >= self.copies else {SHAM} for count in fossils]
        places = [
            (slot, blueprint)
            for slot, blueprint in _legal_places(masks)
            if names[blueprint] not in spent[slot]
        ]
        is_late = (
            facts.horizon is not None and memory["epoch"] >= self.planting_part * facts.horizon
        )
        if is_late or not places:
            return WAIT, memory
        fitting = self._fitting(places, reports)
        fewest = min(fossils[slot] for slot, _ in fitting)
        first = [place for place in fitting if fossils[place[0]] == fewest]
        mixing = (
            [] if fewest else [place for place in first if self._mixes_positions(*place, reports)]
        )
        most = max(
            mixing or first,
            key=lambda p: (facts.work(*p), facts.cheapest_blend(*p)[0], p[0], -p[1]),
        )
        return facts.plant(*most), memory

    def _mixes_positions(self, slot: int, blueprint: int, reports: Reports) -> bool:
        """A copy is taken to, as the blocks of a text do; a vector has no positions."""
        name, kind = (
            self.facts.space.blueprint_ids[blueprint],
            reports[self.facts.space.slots.slot_ids[slot]].kind,
        )
        return kind != "vector" and (
            name in (COPY, COPY_ZERO) or REGISTRY.get(kind, str(name)).traits.spatial > 0
        )

    def _fitting(self, places: Sequence[Place], reports: Reports) -> Sequence[Place]:
        """Places of seeds that take at most `share` of the room left, or else that of the smallest."""
        facts, metrics = self.facts, [report.metrics for report in reports.values()]
        used = metrics[0].host_param_count + sum(each.seed_param_count for each in metrics)
        room = facts.most_room if facts.budget is None else facts.budget - used
        prices = {place: facts.cheapest_blend(*place)[0] for place in places}
        fitting = [place for place in places if prices[place] <= self.share * room]
        return fitting or [min(places, key=prices.__getitem__)]


def plain_sham(facts: HostFacts) -> Sham:
    """All the events of growing without its capacity: one seed per slot, planted and kept one after the other."""
    slots = range(facts.space.slots.num_slots)
    return Sham(
        facts,
        [
            step
            for s in slots
            for step in ((3 * s + 1, OP_GERMINATE, s), (3 * s + 3, OP_FOSSILIZE, s))
        ],
    )


RULES: dict[str, Callable[..., Any]] = {
    "never": Never,
    "schedule": Schedule,
    "random": Random,
    "heuristic": Heuristic,
    "sham": plain_sham,
}
"""Policies by name, as `esper.grow(policy=...)` and the command line know them."""
rule = registering(
    RULES, "rule", reserved=("never", "sham", "search", "all", "start", "oracle")
)  # of comparisons


def is_rule(name: str) -> bool:
    """Whether this names a rule, rather than a file."""
    return name.partition(":")[0] in RULES


def read_rule(name: str) -> tuple[str, dict[str, Any]]:
    """Rule and checked settings of "heuristic", "heuristic:share=0.5:planting_part=0.8" or "schedule:epochs=1+5+9"."""
    rule, *parts = name.split(":")
    if rule not in RULES:
        raise UnknownNameError("policy", name, RULES, "A rule of your own: esper --import FILE.")
    return rule, read_settings(rule, parts, RULES[rule])


def replay(events: Sequence[Event]) -> Callable[[HostFacts], RulePolicy]:
    """A policy for `esper.grow(policy=...)` that goes through another arm's events with the sham blueprint."""
    return lambda facts: RulePolicy(Sham(facts, script_of(events, facts.space)))


def make_policy(name: str, facts: HostFacts) -> RulePolicy:
    """The named policy for one network; settings that its name does not give have their defaults."""
    rule, settings = read_rule(name)
    if not facts.costs:
        raise SettingError(
            "a policy needs a price list; build `HostFacts` from a MorphogeneticModel's view."
        )
    made: Any = (
        RULES[rule](facts, **settings) if "facts" in signature(RULES[rule]).parameters else None
    )
    if not hasattr(made, "choose"):
        raise SettingError(
            f"rule {rule} is no dataclass with facts first and a method choose(masks, reports, memory)."
        )
    return RulePolicy(made)
