"""`search` and `oracle` in a comparison: the plans that they try.

A search looks for the best plan that a number of episodes finds on hosts of its own. The oracle
tries every single planting. How plans are played is in `comparison`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from esper.kasmina.blueprints import SHAM
from esper.kasmina.model import MorphogeneticModel
from esper.runtime.config import MOST_HOSTS
from esper.tamiyo import policy_names
from esper.tamiyo.policy_names import NEVER, parse
from esper.tamiyo.rules import HostFacts


class Step(NamedTuple):
    """One planting of a plan."""

    decision: int
    place: str  # slot and blueprint, as in r0c1.norm


Plan = tuple[Step, ...]
"""What to plant when, sorted."""


class PlanOnHost(NamedTuple):
    """An episode that a search wants played."""

    policy: str  # the plan, as `write_plan` writes it
    host: int  # number of the search's host, from 0 on


class FoundPlan(NamedTuple):
    """The best plan of a search."""

    policy: str  # the plan, as `write_plan` writes it
    scores: list[float]  # its validation accuracies, host by host


Play = Callable[[Sequence[PlanOnHost]], Sequence[float]]
"""Plays episodes and returns their validation accuracies."""


@dataclass(frozen=True)
class SearchSettings:
    """Evolutionary successive halving over plans.

    A generation has `plans` of them: random draws at first, then the best so far, mutations of
    those, and a quarter of fresh draws. All are played on one host, the better half on two, of
    these the better half on four, up to `hosts`. Plans are compared on the same hosts only, and no
    plan is played twice on one. Generations follow until `episodes` are spent. The plan with the
    best mean on the most hosts is the result; ties go to the one that was found first. `seed` is
    the first host's; no host of the comparison may be among them.
    """

    episodes: Annotated[int, Field(ge=2, le=10**6)] = 250
    plans: Annotated[int, Field(ge=2, le=10**5)] = 32
    hosts: Annotated[int, Field(ge=1, le=MOST_HOSTS)] = 8
    seed: Annotated[int, Field(ge=0, le=2**128)] = 1_000_000

    @property
    def host_seeds(self) -> range:
        """The random seeds of the search's hosts."""
        return range(self.seed, self.seed + self.hosts)


def read_search(arm: str) -> SearchSettings | None:
    """The search that an arm like "search:episodes=100:plans=16" stands for, if it is one."""
    policy = parse(arm)
    if not isinstance(policy, policy_names.Search):
        return None
    return SearchSettings(**policy.settings(SearchSettings))


def write_plan(plan: Plan) -> str:
    """A plan as the policy that plays it."""
    if not plan:
        return NEVER
    epochs = "+".join(str(step.decision) for step in plan)
    places = "+".join(step.place for step in plan)
    return f"schedule:epochs={epochs}:places={places}"


class Searching:
    """A search as far as it has come. The same draws and scores give the same plan."""

    def __init__(self, settings: SearchSettings, facts: HostFacts, play: Play):
        self.settings = settings
        self.play = play
        self.draws = Draws(facts, settings.seed)
        self.scores: dict[Plan, list[float]] = {}  # what each plan has reached, host by host

    def find(self) -> FoundPlan:
        """Spend the episodes; the best plan."""
        settings = self.settings
        width = min(settings.plans, max(2, settings.episodes // 4))
        left = self._episodes_left()
        left_before = -1
        while left and left != left_before:  # equal: every plan that can be drawn has been tried
            plans = self._next_generation(width)
            hosts = 1
            survivors = self._extend(plans, hosts)
            while len(survivors) > 1 and hosts < settings.hosts:
                hosts = min(2 * hosts, settings.hosts)
                better_half = survivors[: (len(survivors) + 1) // 2]
                survivors = self._extend(better_half, hosts)
            left_before = left
            left = self._episodes_left()
        best = self._ranked()[0]
        return FoundPlan(policy=write_plan(best), scores=self.scores[best])

    def _next_generation(self, width: int) -> list[Plan]:
        """The best quarter so far, mutations of it, and fresh draws; `width` plans if it can."""
        parents = self._ranked()[: max(1, width // 4)]
        plans = dict.fromkeys(parents)
        for attempt in range(20 * width):
            if len(plans) >= width:
                break
            is_fresh = attempt % 4 == 0 or not parents
            start = () if is_fresh else parents[attempt % len(parents)]
            plans[self.draws.mutate(start)] = None
        return list(plans)

    def _episodes_left(self) -> int:
        return self.settings.episodes - sum(map(len, self.scores.values()))

    def _ranked(self) -> list[Plan]:
        """Those played on the most hosts first, of these the best on average."""

        def rank(plan: Plan) -> tuple[int, float]:
            scores = self.scores[plan]
            return -len(scores), -float(np.mean(scores))

        return sorted(self.scores, key=rank)

    def _extend(self, plans: Sequence[Plan], hosts: int) -> list[Plan]:
        """Play each plan on its first `hosts` hosts, as far as episodes last.

        Returns the plans for which they did, best first.
        """
        extended: list[Plan] = []
        missing: list[PlanOnHost] = []
        owners: list[Plan] = []  # the plan of each missing episode
        for plan in plans:
            played = len(self.scores.get(plan, ()))
            policy = write_plan(plan)
            needed = [PlanOnHost(policy, host) for host in range(played, hosts)]
            if len(missing) + len(needed) <= self._episodes_left():
                extended.append(plan)
                missing += needed
                owners += [plan] * len(needed)
        for plan, score in zip(owners, self.play(missing), strict=True):
            self.scores.setdefault(plan, []).append(score)
        return sorted(extended, key=lambda plan: -sum(self.scores[plan][:hosts]))


class Draws:
    """Random plans and changes to plans, none of which costs more than there is room for."""

    def __init__(self, facts: HostFacts, seed: int):
        self.random = np.random.default_rng(seed)
        self.epochs = facts.horizon or 2
        self.room = facts.most_room
        self.most_steps = 2 * facts.space.slots.num_slots + 2
        self.prices: dict[str, int] = {}  # of the cheapest blend, by place
        for (slot, blueprint, _), price in facts.costs.items():
            if blueprint != SHAM:
                place = f"{slot}.{blueprint}"
                self.prices[place] = min(price, self.prices.get(place, price))

    def mutate(self, plan: Plan) -> Plan:
        """One or two plantings more, fewer, elsewhere or at another time; of (), a fresh plan."""
        steps = list(plan)
        for _ in range(self.random.integers(1, 3 if plan else self.most_steps + 1)):
            kind = "more"
            if plan and steps:
                kind = str(self.random.choice(["more", "fewer", "elsewhere", "moved"]))
            if kind == "more":
                self._plant(steps, None)
                continue
            taken = steps.pop(self.random.integers(len(steps)))
            if kind == "moved":
                decision = taken.decision + int(self.random.integers(-3, 4))
                latest = self.epochs - 2
                steps.append(Step(min(max(decision, 0), latest), taken.place))
            elif kind == "elsewhere":
                self._plant(steps, taken.decision)
        return tuple(sorted(steps))

    def _plant(self, steps: list[Step], decision: int | None) -> None:
        """Add a planting that there is room for, if there is one; without `decision` it is early.

        A decision is drawn even where one is given or nothing fits: every call draws alike.
        """
        room = self.room - sum(self.prices[step.place] for step in steps)
        payable = [place for place, price in self.prices.items() if price <= room]
        # later seeds have little time to learn
        drawn = int(self.random.integers(max(1, 3 * self.epochs // 5)))
        if payable:
            place = str(self.random.choice(payable))
            steps.append(Step(drawn if decision is None else decision, place))


def placements_of(model: MorphogeneticModel, epochs: int) -> dict[str, str]:
    """A plan for every slot, blueprint and start whose seed fits and can be paid for.

    Plans are policies, by their names. A seed is kept as soon as may be.
    """
    # decisions: the first, after a quarter, after half of the episode
    starts = sorted({0, epochs // 4, epochs // 2})
    room = math.inf if model.budget is None else model.budget - model.host_params
    payable = {(slot, name) for (slot, name, _), price in model.costs.items() if price <= room}
    plans = {}
    slots = model.space.slots.slot_ids
    for slot, blueprint, start in product(slots, model.space.blueprint_ids, starts):
        if (slot, blueprint) in payable:
            step = Step(decision=start, place=f"{slot}.{blueprint}")
            plans[f"{slot} {blueprint} @{start}"] = write_plan((step,))
    return plans
