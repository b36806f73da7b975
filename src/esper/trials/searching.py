"""`search` and `oracle` in a comparison:

the best plan that some episodes find on their own hosts; all of one seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np
from pydantic import Field

from esper.kasmina.model import MorphogeneticModel
from esper.runtime.config import MOST_HOSTS
from esper.tamiyo import policy_names
from esper.tamiyo.policy_names import parse
from esper.tamiyo.rules import HostFacts

Plan = tuple[tuple[int, str], ...]  # (decision, slot.blueprint), sorted
Play = Callable[
    [Sequence[tuple[str, int]]], Sequence[float]
]  # (plan, number of the host) -> validation accuracies


@dataclass(frozen=True)
class Search:
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
        return range(self.seed, self.seed + self.hosts)


def read_search(arm: str) -> Search | None:
    """The search that an arm like "search:episodes=100:plans=16" stands for, if it is one."""
    policy = parse(arm)
    if not isinstance(policy, policy_names.Search):
        return None
    return Search(**policy.settings(Search))


def write_plan(plan: Plan) -> str:
    """A plan as the policy that plays it."""
    if not plan:
        return "never"
    epochs, places = ("+".join(map(str, column)) for column in zip(*plan, strict=True))
    return f"schedule:epochs={epochs}:places={places}"


class Searching:
    """A search as far as it has come. The same draws and scores give the same plan."""

    def __init__(self, search: Search, facts: HostFacts, play: Play):
        self.search, self.play, self.draws = search, play, Draws(facts, search.seed)
        self.scores: dict[Plan, list[float]] = {}  # what each plan has reached, host by host

    def find(self) -> tuple[str, list[float]]:
        """The best plan as a policy, and its validation accuracies."""
        width, before = min(self.search.plans, max(2, self.search.episodes // 4)), -1
        while (
            left := self._left()
        ) and left != before:  # equal: every plan that can be drawn has been tried
            before, parents = left, self._ranked()[: max(1, width // 4)]
            plans = dict.fromkeys(parents)
            for attempt in range(20 * width):
                if len(plans) < width:
                    is_fresh = attempt % 4 == 0 or not parents
                    plans[
                        self.draws.mutate(() if is_fresh else parents[attempt % len(parents)])
                    ] = None
            hosts, alive = 1, self._extend(list(plans), 1)
            while len(alive) > 1 and hosts < self.search.hosts:
                hosts = min(2 * hosts, self.search.hosts)
                alive = self._extend(alive[: (len(alive) + 1) // 2], hosts)
        best = self._ranked()[0]
        return write_plan(best), self.scores[best]

    def _left(self) -> int:
        return self.search.episodes - sum(map(len, self.scores.values()))

    def _ranked(self) -> list[Plan]:
        return sorted(
            self.scores, key=lambda plan: (-len(self.scores[plan]), -np.mean(self.scores[plan]))
        )

    def _extend(self, plans: Sequence[Plan], hosts: int) -> list[Plan]:
        """Play each plan on its first `hosts` hosts, as far as episodes last; those for which they
        did, best first.
        """
        whole, missing = list[Plan](), list[tuple[Plan, int]]()
        for plan in plans:
            needed = [(plan, host) for host in range(len(self.scores.get(plan, ())), hosts)]
            if len(missing) + len(needed) <= self._left():
                whole, missing = [*whole, plan], missing + needed
        played = self.play([(write_plan(plan), host) for plan, host in missing])
        for (plan, _), score in zip(missing, played, strict=True):
            self.scores.setdefault(plan, []).append(score)
        return sorted(whole, key=lambda plan: -sum(self.scores[plan][:hosts]))


class Draws:
    """Random plans and changes to plans, none of which costs more than there is room for."""

    def __init__(self, facts: HostFacts, seed: int):
        self.random, self.epochs = np.random.default_rng(seed), facts.horizon or 2
        self.room, self.most = facts.most_room, 2 * facts.space.slots.num_slots + 2
        self.prices: dict[str, int] = {}
        for (slot, name, _), price in facts.costs.items():
            if name != "sham":
                self.prices[f"{slot}.{name}"] = min(price, self.prices.get(f"{slot}.{name}", price))

    def mutate(self, plan: Plan) -> Plan:
        """One or two plantings more, fewer, elsewhere or at another time; of nothing, a fresh
        plan.
        """
        parts = list(plan)
        for _ in range(self.random.integers(1, 3 if plan else self.most + 1)):
            kind = (
                str(self.random.choice(["more", "fewer", "elsewhere", "moved"]))
                if plan and parts
                else "more"
            )
            decision, place = (
                (0, "") if kind == "more" else parts.pop(self.random.integers(len(parts)))
            )
            if kind == "moved":
                parts.append(
                    (
                        min(max(decision + int(self.random.integers(-3, 4)), 0), self.epochs - 2),
                        place,
                    )
                )
            elif kind != "fewer":
                room = self.room - sum(self.prices[place] for _, place in parts)
                fitting = [place for place, price in self.prices.items() if price <= room]
                drawn = int(
                    self.random.integers(max(1, 3 * self.epochs // 5))
                )  # later seeds have little time to learn
                if fitting:
                    parts.append(
                        (
                            decision if kind == "elsewhere" else drawn,
                            str(self.random.choice(fitting)),
                        )
                    )
        return tuple(sorted(parts))


def placements_of(model: MorphogeneticModel, epochs: int) -> dict[str, str]:
    """A plan for every (slot, blueprint, start) whose seed fits and can be paid for; it is kept as
    soon as may be.
    """
    starts = sorted(
        {0, epochs // 4, epochs // 2}
    )  # decisions: the first, after a quarter, after half of the episode
    room = math.inf if model.budget is None else model.budget - model.host_params
    payable = {tuple(place) for (*place, _), price in model.costs.items() if price <= room}
    tried = [
        at
        for at in product(model.space.slots.slot_ids, model.space.blueprint_ids, starts)
        if at[:2] in payable
    ]
    return {
        f"{slot} {name} @{start}": write_plan(((start, f"{slot}.{name}"),))
        for slot, name, start in tried
    }
