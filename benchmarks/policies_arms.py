"""The arms that `policies.py` judges a taught policy against, each made from that policy.

`Recorder` is the policy itself, with notes. `KeepsAll` plants as the policy does and keeps
everything. `Blinded` sees other hosts' means in place of what was measured on its own. `Replays`
repeats the policy's usual actions as a plan that reads nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT, Choice
from esper.tamiyo.layout import SLOT_ROW, ObservationLayout
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Actions, NetworkPolicy, RulePolicy

Row = NDArray[np.float32]

MEASURED_OF_HOST = (
    "learnt",
    "standing",
    *(f"standing_{ago}_ago" for ago in range(1, 5)),
    "slope_in_errors",
    "slope",
    "since_best",
    "train_learnt",
    "train_slope",
    "gap",
    "gap_share",
    "score",
    "score_slope_in_errors",
)
"""Numbers of the host that somebody had to measure; its plan and its growth decide the others."""
MEASURED_OF_SLOT = ("contribution_in_errors", "contribution", "gradient_ratio", "score_ratio")
"""Numbers of a slot that somebody had to measure; its stage, ages and blueprint are no secret."""
STATE_OF_SLOT = (
    "fossils",
    "epochs_in_stage",
    "seed_age",
    "alpha",
    "relative_size",
    "depth",
    "has_contribution",
    *SLOT_ROW.switches,
)
"""What a slot's means are told apart by: where its seed stands and what it is."""
FEWEST = 3
"""Readings below which a mean is taken of a coarser group."""


class Episode(NamedTuple):
    """What a policy saw and did on one host, decision by decision."""

    seen: list[Row]
    done: list[Choice]


# -- the policy itself -----------------------------------------------------------------------------


class Recorder(NetworkPolicy):
    """The taught policy with notes; on the side, a `shadow` is asked the same.

    The shadow sees the same episode and does nothing: `agreed` has, for each keep and each cull,
    whether it would have done it as well.
    """

    def __init__(self, taught: NetworkPolicy, shadow: NetworkPolicy | None = None):
        super().__init__(taught.network, lacking=taught.lacking)
        self.shadow = shadow
        self.shadow_memory: Any = None
        self.episode = Episode([], [])
        self.agreed: list[bool] = []

    def decide(
        self,
        observation: Row | None,
        masks: Masks,
        reports: object,
        memory: Any,
        signals: object = None,
    ) -> tuple[Actions, Any]:
        actions, memory = super().decide(observation, masks, reports, memory)
        assert observation is not None
        choice = choice_of(actions)
        self.episode.seen.append(observation[0])
        self.episode.done.append(choice)
        if self.shadow is not None:
            asked, self.shadow_memory = self.shadow.decide(
                observation, masks, reports, self.shadow_memory
            )
            if choice[0] in (OP_CULL, OP_FOSSILIZE):
                self.agreed.append(choice_of(asked)[:2] == choice[:2])
        return actions, memory


def choice_of(actions: Actions) -> Choice:
    """The only row of an answer about one host."""
    op, slot, blueprint, blend = (int(index) for index in actions[0])
    return op, slot, blueprint, blend


class KeepsAll(NetworkPolicy):
    """Plants as the taught policy does and keeps all that is measured; its culls count as waiting."""

    keeps_measured = True

    def __init__(self, taught: NetworkPolicy):
        super().__init__(taught.network, lacking=taught.lacking)

    def decide(
        self,
        observation: Row | None,
        masks: Masks,
        reports: object,
        memory: Any,
        signals: object = None,
    ) -> tuple[Actions, Any]:
        actions, memory = super().decide(observation, masks, reports, memory)
        actions[actions[:, 0] == OP_CULL] = WAIT
        return actions, memory


# -- blinded to measurements -----------------------------------------------------------------------


class Means:
    """What hosts of other seeds measured, in the mean over those that stood alike.

    Features of the host are told apart by how much of the episode is over. Features of a slot are
    told apart by that and by the slot's state, or, where fewer than `FEWEST` were seen like that,
    by the state alone, and then by whether it holds a seed that was measured.
    """

    def __init__(self, layout: ObservationLayout, seen: Sequence[Row]):
        self.place = {name: index for index, name in enumerate(layout.names)}
        self.slots = [f"slot{number}" for number in range(layout.num_slots)]
        self.sums: dict[Any, list[Any]] = {}
        for row in seen:
            for columns, groups in self._groups(row):
                for group in groups:
                    total = self.sums.setdefault(group, [0, 0.0])
                    total[0] += 1
                    total[1] = total[1] + row[columns].astype(np.float64)

    def blind(self, row: Row) -> Row:
        """The same observation with means in place of measurements."""
        blinded = row.copy()
        for columns, groups in self._groups(row):
            known = [group for group in groups if group in self.sums]
            # the last group is of slots in any state: better few that stood alike
            many = [
                group for group in known if self.sums[group][0] >= FEWEST and group != groups[-1]
            ]
            count, total = self.sums[(many or known)[0]]
            blinded[columns] = total / count
        return blinded

    def _groups(self, row: Row) -> Iterator[tuple[list[int], list[Any]]]:
        """Columns that are replaced together, and their groups from the finest to the coarsest."""
        progress = self._values(row, ["host.share_left"])
        host = [self.place[f"host.{name}"] for name in MEASURED_OF_HOST]
        yield host, [("host", progress), ("host",)]
        for slot in self.slots:
            columns = [self.place[f"{slot}.{name}"] for name in MEASURED_OF_SLOT]
            state = self._values(row, [f"{slot}.{name}" for name in STATE_OF_SLOT])
            coarse = self._values(row, [f"{slot}.dormant", f"{slot}.has_contribution"])
            yield columns, [(slot, progress, state), (slot, state), (slot, coarse), (slot,)]

    def _values(self, row: Row, names: Sequence[str]) -> tuple[float, ...]:
        """Values that tell groups apart."""
        return tuple(round(float(row[self.place[name]]), 4) for name in names)


class Blinded(NetworkPolicy):
    """The taught policy with other hosts' means in place of everything that was measured."""

    def __init__(self, taught: NetworkPolicy, means: Means):
        super().__init__(taught.network, lacking=taught.lacking)
        self.means = means

    def decide(
        self,
        observation: Row | None,
        masks: Masks,
        reports: object,
        memory: Any,
        signals: object = None,
    ) -> tuple[Actions, Any]:
        assert observation is not None
        blinded = np.stack([self.means.blind(row) for row in observation])
        return super().decide(blinded, masks, reports, memory)


# -- its usual actions as a plan -------------------------------------------------------------------

Script = tuple[tuple[int, Choice], ...]
"""Decisions from which on an op is due, and the op."""


@dataclass(frozen=True)
class Replays:
    """Repeats a script, one op per decision, each as soon as it is due and possible.

    Ops of one slot keep their order. It keeps and culls what the script says and nothing else.
    """

    script: Script
    keeps_measured: ClassVar[bool] = False

    def choose(
        self, masks: Masks, reports: object, memory: dict[str, Any], signals: object
    ) -> tuple[Choice, dict[str, Any]]:
        done = memory.get("done", [])
        behind: set[int] = set()
        for number, (due, choice) in enumerate(self.script):
            slot = choice[1]
            if number in done or slot in behind:
                continue
            if due <= memory["epoch"] and is_possible(masks, choice):
                return choice, {**memory, "done": [*done, number]}
            behind.add(slot)
        return WAIT, memory


def replays(script: Script) -> RulePolicy:
    """A script as a policy."""
    return RulePolicy(Replays(script))


def is_possible(masks: Masks, choice: Choice) -> bool:
    """Whether masks of one host let a choice through."""
    op, slot, blueprint, blend = choice
    if not (masks["op"][op] and masks["slot"][op, slot]):
        return False
    if op != OP_GERMINATE:
        return True
    return bool(masks["blueprint"][slot, blueprint] and masks["blend"][blend])


def by_decision(episodes: Sequence[Episode]) -> Script:
    """At each decision what most hosts did then; ties go to what the first of them did."""
    script: list[tuple[int, Choice]] = []
    for number, choices in enumerate(zip(*(episode.done for episode in episodes), strict=True)):
        ((choice, _),) = Counter(choices).most_common(1)
        if choice[0] != OP_WAIT:
            script.append((number, choice))
    return tuple(script)


def by_turn(episodes: Sequence[Episode]) -> Script:
    """What most hosts did as their first op, as their second and so on, each at its usual time.

    There are as many ops as a host does in the median.
    """
    acted = [
        [(number, choice) for number, choice in enumerate(episode.done) if choice[0] != OP_WAIT]
        for episode in episodes
    ]
    script: list[tuple[int, Choice]] = []
    for turn in range(median_low(len(ops) for ops in acted)):
        ops = [of_host[turn] for of_host in acted if len(of_host) > turn]
        ((choice, _),) = Counter(choice for _, choice in ops).most_common(1)
        script.append((median_low(number for number, other in ops if other == choice), choice))
    return tuple(sorted(script, key=lambda due_op: due_op[0]))


def by_sequence(episodes: Sequence[Episode]) -> Script:
    """The ops that most hosts did in this order, each at its usual time among these hosts."""
    acted = [
        [(number, choice) for number, choice in enumerate(episode.done) if choice[0] != OP_WAIT]
        for episode in episodes
    ]
    orders = [tuple(choice for _, choice in ops) for ops in acted]
    ((usual, _),) = Counter(orders).most_common(1)
    alike = [ops for ops, order in zip(acted, orders, strict=True) if order == usual]
    script: list[tuple[int, Choice]] = []
    for turn, choice in enumerate(usual):
        script.append((median_low(ops[turn][0] for ops in alike), choice))
    return tuple(script)


PLANS = {"by_decision": by_decision, "by_turn": by_turn, "by_sequence": by_sequence}
"""Ways to read a plan off a policy; validation on the choosing seeds picks one."""
