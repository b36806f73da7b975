"""In words, what a policy read of one network and what it preferred, and by how much.

A network's answer is computed again from what it was asked; a rule says which of its tests decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import OP_GERMINATE, OP_NAMES, ActionSpace, Choice, look_up
from esper.tamiyo.heads import SLOT_OPS
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import Masks
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.policies import NetworkPolicy, Policy, Reports, RulePolicy
from esper.tamiyo.readings import Sight, observe, without
from esper.tamiyo.rules import Heuristic
from esper.tamiyo.shortage import add_losses
from esper.tamiyo.signals import Signals

MOST_READINGS = 4
"""Readings that are named, the strongest first."""

MOST_CHOICES = 3
"""Slots and blueprints that are named."""

_HOST = {
    "epochs": "epochs so far",
    "grown": "size over the bare host's",
    "live_share": "share of slots with a live seed",
    "fossils": "fossils",
    "slots": "number of slots",
    "share_left": "share of the training that is left",
    "rate": "learning rate over its peak",
    "learnt": "part by which the held-out loss has fallen",
    "standing": "where the held-out loss stands between its start and its best",
    "standing_1_ago": "where the held-out loss stood 1 epoch ago",
    "standing_2_ago": "where the held-out loss stood 2 epochs ago",
    "standing_3_ago": "where the held-out loss stood 3 epochs ago",
    "standing_4_ago": "where the held-out loss stood 4 epochs ago",
    "slope_in_errors": "slope of the held-out loss in standard errors",
    "slope": "slope of the held-out loss",
    "since_best": "epochs since the best held-out loss",
    "train_learnt": "part by which the training loss has fallen",
    "train_slope": "slope of the training loss",
    "gap": "gap between held-out and training loss",
    "gap_share": "gap between held-out and training loss as a share of both",
    "score": "where the score stands between its start and its best",
    "score_slope_in_errors": "slope of the score in standard errors",
    "params_share": "share of the budget that is used",
    "room": "room that the budget leaves",
    "seeds_share": "share of the seeds that are used",
}
_SLOT = {
    "place": "place in the network",
    "fossils": "fossils",
    "epochs_in_stage": "epochs in its stage",
    "seed_age": "age of its seed",
    "alpha": "alpha of its seed",
    "relative_size": "size of its seed",
    "depth": "depth of its seed",
    "contribution_in_errors": "contribution of its seed in standard errors",
    "contribution": "contribution of its seed",
    "gradient_ratio": "gradients of its seed over the host's",
    "score_ratio": "greedy score over the slots' mean",
    "cheapest": "price of its cheapest seed",
    "mean_price": "mean price of its seeds",
    "cheapest_of_room": "price of its cheapest seed as a share of the room",
    "mean_of_room": "mean price of its seeds as a share of the room",
}
_BLUEPRINT = {
    "spatial": "how it mixes positions",
    "attention_like": "how it attends",
    "normalising": "how it normalises",
    "depth": "its depth",
    "size": "its size",
    "work": "its FLOPs",
}
_PAIR = {"size": "size", "work": "FLOPs", "size_of_room": "size as a share of the room"}

_ABSENT = {
    "standing": "held-out losses",
    "score": "scores",
    "train_learnt": "training losses",
    "share_left": "how much of the training is left",
    "rate": "the learning rate",
    "room": "a budget",
}


@dataclass(frozen=True)
class Question:
    """What a policy was asked about one network, and its answer."""

    masks: Masks
    reports: Reports
    memory: Any
    """what it remembered before"""
    signals: Signals
    sight: Sight | None
    """what a network read; None for rules"""
    answer: Choice


def explain(policy: Policy, question: Question) -> list[str]:
    """Return the reasons of an answer, a sentence each; none where the policy has none to give."""
    if isinstance(policy, NetworkPolicy) and isinstance(
        policy.network, FactoredRecurrentActorCritic
    ):
        return _explain_network(policy, policy.network, question)
    if isinstance(policy, RulePolicy) and isinstance(policy.rule, Heuristic):
        return _explain_heuristic(policy.rule, question)
    return []


def describe_choice(choice: Choice, space: ActionSpace) -> str:
    """Return what is done, as `WAIT` or `GERMINATE mlp (linear) in r0c0 (layer1)`."""
    op, slot, blueprint, blend = look_up(space, *choice)
    if choice[0] not in SLOT_OPS:
        return op
    what = f" {blueprint} ({blend})" if choice[0] == OP_GERMINATE else ""
    return f"{op}{what} in {_name_slot(slot, space)}"


def _name_slot(slot_id: str, space: ActionSpace) -> str:
    module = space.slots.modules.get(slot_id)
    return slot_id if module is None else f"{slot_id} ({module})"


# -- rules -----------------------------------------------------------------------------------------


def _explain_heuristic(rule: Heuristic, question: Question) -> list[str]:
    memory = (question.memory or [{"epoch": 0, "host": 0}])[0]
    losses = add_losses(memory.get("losses", []), question.signals)
    masks = {head: mask[0] for head, mask in question.masks.items()}
    memory = {**memory, "losses": losses}
    candidates, test = rule.weigh(masks, question.reports, memory, question.signals)
    lines = [f"What decided it: {test}."]
    if candidates:
        count = f"{len(candidates)} candidate{'' if len(candidates) == 1 else 's'}"
        lines = [f"No test held it back: {test}, and the largest of {count} is planted."]
    if losses:
        guessing = question.signals.guessing
        start = "is not known" if guessing is None else f"is {guessing:.3g}"
        train, held_out = losses[-1]
        lines.append(
            f"It read the training loss {train:.3g} and the held-out loss {held_out:.3g}; the loss "
            f"of guessing {start}."
        )
    elif rule.held_out_part:
        lines.append(
            "It read no training and held-out losses together, so it cannot see whether data are "
            "missing; pass train_loss=... to step."
        )
    return lines


# -- networks --------------------------------------------------------------------------------------


def _explain_network(
    policy: NetworkPolicy, network: FactoredRecurrentActorCritic, question: Question
) -> list[str]:
    """What a network preferred, what weighed most in it, and what it could not read."""
    layout = policy.layout
    sight = question.sight
    assert sight is not None, "a network was asked"
    space = sight.view.space
    observation = observe([sight], layout, [policy.lacking])
    states = torch.as_tensor(observation, device=policy.device)[:, None].requires_grad_()
    masks = {
        head: torch.as_tensor(mask, device=policy.device)[:, None]
        for head, mask in question.masks.items()
    }
    with torch.enable_grad():
        case = _Case(network, states, question, masks)
        influence = case.influence()
    lines = [case.describe_ops(), *case.describe_heads(space)]
    weighed = _strongest(layout, space, observation[0], influence)
    if weighed:
        lines.append(
            f"What weighed most in that, for (+) or against (−) {OP_NAMES[question.answer[0]]}: "
            + "; ".join(weighed)
            + "."
        )
    absent = _absent(without(sight, policy.lacking), layout, observation[0])
    if absent:
        lines.append(f"Absent: {', '.join(absent)}.")
    return lines


class _Case:
    """What a network says to one observation [1, 1, F]."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        states: Tensor,
        question: Question,
        masks: dict[str, Tensor],
    ):
        self.network = network
        self.states = states
        self.answer = question.answer
        self.masks = masks
        memory = question.memory
        if memory is not None:
            memory = (memory[0].to(states.device), memory[1].to(states.device))
        self.outputs = network(states, memory, masks)
        self.ops = self.outputs["op_logits"].log_softmax(-1)[0, 0]

    def describe_ops(self) -> str:
        """How likely each op was; those that were impossible are named last."""
        chances = self.ops.exp().tolist()
        allowed = self.masks["op"][0, 0].tolist()
        known = sorted(
            (op for op in range(len(chances)) if allowed[op]), key=lambda op: -chances[op]
        )
        line = ", ".join(f"{OP_NAMES[op]} {chances[op]:.1%}" for op in known)
        closed = [OP_NAMES[op] for op in range(len(chances)) if not allowed[op]]
        return f"It preferred: {line}" + (f"; impossible: {', '.join(closed)}." if closed else ".")

    def describe_heads(self, space: ActionSpace) -> list[str]:
        """How likely slots and blueprints were, where the op that was likeliest needs them."""
        if int(self.ops.argmax()) != self.answer[0] or self.answer[0] not in SLOT_OPS:
            return []
        slots = [_name_slot(slot_id, space) for slot_id in space.slots.slot_ids]
        lines = [f"Of the slots: {self._rank('slot', slots)}."]
        if self.answer[0] == OP_GERMINATE:
            names = [str(name) for name in space.blueprint_ids]
            lines.append(f"Of the blueprints: {self._rank('blueprint', names)}.")
        return lines

    def _rank(self, head: str, names: Sequence[str]) -> str:
        chances = self.outputs[f"{head}_logits"].softmax(-1)[0, 0].tolist()
        known = [index for index in range(len(names)) if chances[index] > 0]
        best = sorted(known, key=lambda index: -chances[index])[:MOST_CHOICES]
        return ", ".join(f"{names[index]} {chances[index]:.1%}" for index in best)

    def influence(self) -> Tensor:
        """By how much each number moves the log-probability of the op, [F], to first order.

        It is compared with a host at which the number is as usual, that is at its running mean.
        """
        (slopes,) = torch.autograd.grad(self.ops[self.answer[0]], self.states, retain_graph=True)
        seen = self.network.observation_stats.normalised(self.states)
        normal = torch.cat([part.reshape(-1) for part in seen])
        (steepness,) = torch.autograd.grad(normal.sum(), self.states)
        steepness = steepness.reshape(-1)
        usual = torch.where(steepness > 0, normal.detach() / steepness.clamp(min=1e-8), 0.0)
        return slopes.reshape(-1) * usual


def _strongest(
    layout: ObservationLayout, space: ActionSpace, row: np.ndarray, influence: Tensor
) -> list[str]:
    """The numbers that weigh most, in words."""
    words = _words(layout, space)
    order = influence.abs().argsort(descending=True).tolist()
    lines: list[str] = []
    for index in order:
        if len(lines) == MOST_READINGS or float(influence[index].abs()) < 1e-6:
            break
        if words[index] is not None:
            sign = "+" if influence[index] > 0 else "−"
            amount = abs(float(influence[index]))
            lines.append(f"{words[index]} {float(row[index]):.2f} ({sign}{amount:.2f})")
    return lines


def _words(layout: ObservationLayout, space: ActionSpace) -> list[str | None]:
    """What each number of an observation is, in words; None for flags and switches."""
    words: list[str | None] = []
    words += [_HOST.get(name) for name in layout.base.names]
    slots = [_name_slot(slot_id, space) for slot_id in space.slots.slot_ids]
    for slot in slots:
        words += [_of(_SLOT.get(name), slot) for name in layout.slot.names]
    for blueprint in space.blueprint_ids:
        words += [_of(_BLUEPRINT.get(name), str(blueprint)) for name in layout.blueprint.names]
    for slot in slots:
        for blueprint in space.blueprint_ids:
            place = f"{blueprint} in {slot}"
            words += [_of(_PAIR.get(name), place) for name in layout.pair.names]
    return words


def _of(words: str | None, what: str) -> str | None:
    return None if words is None else f"{what}: {words}"


def _absent(sight: Sight, layout: ObservationLayout, row: np.ndarray) -> list[str]:
    """What the policy could not read, in words."""
    names = layout.base.names
    absent = [words for name, words in _ABSENT.items() if not row[names.index(f"has_{name}")]]
    if sight.guessing is None:
        absent.append("the loss of guessing")
    if not sight.has_telemetry:
        absent.append("gradients and greedy scores of slots")
    return absent
