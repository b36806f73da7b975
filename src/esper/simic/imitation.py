"""A rule as the policy's first teacher: it says at every step what it would do.

It decides about the first rounds itself, and about later ones less and less (DAgger): so the policy
comes to where its own decisions lead, remembers these, and still learns what the rule would do.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from esper.episodes import facts_of, keepable
from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
    Choice,
)
from esper.runtime.population import Population
from esper.runtime.tasks.families import shallowest
from esper.runtime.tasks.task import Task
from esper.simic.config import ImitationConfig
from esper.simic.environment import GrowthVectorEnv
from esper.simic.team import Team
from esper.tamiyo.heads import SLOT_OPS
from esper.tamiyo.masks import Masks, compute_batch_masks
from esper.tamiyo.policies import WAIT, Actions
from esper.tamiyo.policy_names import make_policy

_BY_THE_RULE = 1 / 3
"""part of the rounds in which the rule decides alone"""


class Agreement(NamedTuple):
    """Shares of a rule's decisions that the policy would have made likewise, at its likeliest."""

    all: float
    acts: float | None
    """of those in which the rule does something; None where it only waited"""


@dataclass
class Lesson:
    """One round in which the policy learns what a rule would do.

    Attributes:
        policy: name of the rule.
        share: chance of each decision to be the policy's own.
        counts: decisions, those alike, acts of the rule, those alike.
    """

    policy: str
    share: float
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, config: ImitationConfig, number: int) -> Self | None:
        """Return the lesson of a round; None after the last one."""
        if number >= config.rounds:
            return None
        alone = math.ceil(config.rounds * _BY_THE_RULE)
        share = max(0, number + 1 - alone) / max(config.rounds - alone, 1)
        return cls(policy=config.policy, share=share, counts=np.zeros(4, np.int64))

    def agreement(self, team: Team) -> Agreement:
        """Return how often the policy agreed, on all ranks."""
        counts = np.sum(team.gather(self.counts.tolist()), 0)
        decisions, alike, acts, acts_alike = counts.tolist()
        return Agreement(all=alike / max(decisions, 1), acts=acts_alike / acts if acts else None)


class Teacher:
    """A rule that is asked about each host of an environment, at every step of a round.

    The environment takes one op per decision and knows no standing order: where a rule has one,
    what may be kept is kept first, one seed per decision.
    """

    def __init__(self, lesson: Lesson, env: GrowthVectorEnv, steps: int, first_episode: int):
        self.lesson = lesson
        self.env = env
        self.rules = [make_policy(lesson.policy, facts) for facts in env.episodes.facts]
        self.memory: list[Any] = [None] * env.num_envs
        draws = []
        for host in range(env.num_envs):  # they belong to the episode, whichever rank plays it
            draw = np.random.default_rng(mix_seed(env.seed, 14, first_episode + host))
            draws.append(draw.random(steps))
        self.draws = np.stack(draws, 1)

    def correct(self, step: int, likeliest: Actions, is_playing: NDArray[np.bool_]) -> "Correction":
        """Return what the rule would do at this step, and what is done.

        Args:
            step: number of the decision.
            likeliest: what the policy would do, [N, 4].
            is_playing: hosts whose episode is not over.
        """
        wanted = np.zeros_like(likeliest)
        for host in np.flatnonzero(is_playing).tolist():
            wanted[host] = self._answer(host)
        alike = (likeliest == wanted).all(1) & is_playing
        acts = (wanted[:, 0] != OP_WAIT) & is_playing
        self.lesson.counts += [is_playing.sum(), alike.sum(), acts.sum(), (alike & acts).sum()]
        is_own = self.draws[step] < self.lesson.share
        return Correction(wanted=wanted, done=np.where(is_own[:, None], likeliest, wanted))

    def _answer(self, host: int) -> Choice:
        """What the rule would do to a host now, in the indices of the environment."""
        rule = self.rules[host]
        view = self.env.episodes.views[host]
        masks = compute_batch_masks([view])
        actions, self.memory[host] = rule.decide(
            None,
            masks,
            [view.reports],
            self.memory[host],
            [self.env.episodes.trackers[host].signals],
        )
        op, slot, blueprint, blend = actions[0].tolist()
        choice: Choice = (op, slot, blueprint, blend)
        if rule.keeps_measured:
            slot_ids = view.space.slots.slot_ids
            decided = {slot_ids[slot]} if op in (OP_CULL, OP_FOSSILIZE) else set()
            choice = (*keepable(view, decided), choice)[0]
        if not _is_open(choice, masks):  # an episode refuses it, and the policy cannot learn it
            return WAIT
        return _in_space(choice, view.space, self.env.space)


class Correction(NamedTuple):
    """Decisions about N hosts, [N, 4]."""

    wanted: Actions
    """by the rule: what the policy learns"""
    done: Actions


def require_teacher(name: str, task: Task, seed: int, **population: Any) -> None:
    """Refuse a rule that does not fit every host of a task, or that cannot be imitated."""
    hosts = Population(shallowest(task), [seed], **population)
    rule = make_policy(name, facts_of(hosts.runs[0].model, task.epochs))
    if rule.is_plan:
        raise SettingError(
            f"imitation.policy is {name}, which may want several ops in one decision; the policy "
            "has one. Name another rule, such as heuristic."
        )


def _is_open(choice: Choice, masks: Masks) -> bool:
    """Whether the masks of one host allow a choice."""
    op, slot, blueprint, blend = choice
    is_open = masks["op"][0, op]
    if op in SLOT_OPS:
        is_open &= masks["slot"][0, op, slot]
    if op == OP_GERMINATE:
        is_open &= masks["blueprint"][0, slot, blueprint] & masks["blend"][0, blend]
    return bool(is_open)


def _in_space(choice: Choice, own: ActionSpace, space: ActionSpace) -> Choice:
    """A choice of a host in the space of an environment whose other hosts may have more slots."""
    op, slot, blueprint, blend = choice
    if op == OP_WAIT:
        return WAIT
    return op, space.slots.index_for_slot_id(own.slots.slot_ids[slot]), blueprint, blend
