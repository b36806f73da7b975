"""The networks that decide: a plain one for foreign problems, and one that reads sets for growth.

Shapes: N hosts, T steps, R = N x T rows, H wide, S slots, K blueprints.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import (
    BLEND_IDS,
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    OP_FOSSILIZE,
    OP_WAIT,
)
from esper.tamiyo.actor_critic import (
    ActorCritic,
    Decision,
    Evaluation,
    MaskSet,
    PerHead,
    initialise,
    layers_of,
    perceptron,
)
from esper.tamiyo.attention import TokenAttention, pool_slots
from esper.tamiyo.heads import Head, HeadSpec, count_cases
from esper.tamiyo.layout import AnyLayout, PlainLayout
from esper.tamiyo.normalising import RunningMeanStd, TokenMeanStd
from esper.tamiyo.pointers import (
    BlendPointer,
    BlueprintPointer,
    Pointer,
    Questions,
    SlotPointer,
)
from esper.tamiyo.recurrence import Hidden, run_sequences

__all__ = [
    "ActorCritic",
    "Decision",
    "Evaluation",
    "FactoredRecurrentActorCritic",
    "MaskSet",
    "PerHead",
    "RecurrentActorCritic",
]


class RecurrentActorCritic(ActorCritic):
    """A policy for any specification of heads: observation -> LSTM -> one head per choice.

    A chained head's features are the LSTM's output plus an embedding of each earlier choice. The
    sum passes a layer before the logits, so what a choice means may depend on the state.
    """

    def __init__(
        self, state_dim: int, spec: HeadSpec, *, hidden_dim: int = 128, head_dim: int = 64
    ):
        super().__init__()
        self.state_dim = state_dim
        self.spec = spec
        self.hidden_dim = hidden_dim
        self.head_dim = head_dim
        self.memory_width = hidden_dim
        self.observation_stats = RunningMeanStd(state_dim)
        self.return_stats = RunningMeanStd(1)
        self.encoder = nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.Tanh())
        self.lstm = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.policy_heads = nn.ModuleDict()
        for head in spec.heads:
            self.policy_heads[head.name] = perceptron(hidden_dim, head_dim, head.size)
        self.embeddings = nn.ModuleDict()  # of the choices that later heads see
        for head in spec.heads[:-1] if spec.chained else ():
            self.embeddings[head.name] = nn.Embedding(head.size, hidden_dim)
        self.value_head = perceptron(hidden_dim, head_dim, 1)
        ends = (*self.policy_heads.values(), self.value_head)
        initialise(self, [layers_of(end).last for end in ends])

    @property
    def decision_flops(self) -> int:
        """FLOPs of one decision: a multiplication and an addition for each weight."""
        return 2 * sum(parameter.numel() for parameter in self.parameters())

    @property
    def judging_flops(self) -> int:
        """FLOPs of judging a stored decision: each head is asked in every case."""
        repeated = 0
        for index, head in enumerate(self.spec.heads):
            last = layers_of(self.policy_heads[head.name]).last
            repeated += (count_cases(self.spec, index) - 1) * 2 * last.weight.numel()
        return self.decision_flops + repeated

    def _features(
        self, states: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool = True
    ) -> tuple[Tensor, Hidden]:
        encoded = self.encoder(self.observation_stats.normalise(states))
        remembered, hidden = run_sequences(
            self.lstm, encoded, hidden, starts, needs_state=needs_state
        )
        return encoded + remembered, hidden

    def _whole(self, features: Tensor) -> Tensor:
        return features

    def _case_logits(self, index: int, features: Tensor, choices: PerHead) -> Tensor:
        layers = layers_of(self.policy_heads[self.spec.heads[index].name])
        inner = layers.first(features)
        for earlier in self.spec.earlier(index):
            inner = inner + F.embedding(choices[earlier.name], self._shift(layers.first, earlier))
        return layers.last(layers.activation(inner))

    def _cases_logits(self, index: int, features: Tensor) -> Tensor:
        """Sums in the order of `_case_logits`, for equal bits."""
        head = self.spec.heads[index]
        layers = layers_of(self.policy_heads[head.name])
        inner = layers.first(features)  # [R, width]
        for axis, earlier in enumerate(self.spec.earlier(index)):
            shift = self._shift(layers.first, earlier)
            if axis == 0:
                shift = shift[list(self.spec.uses(head))]
            inner = inner.unsqueeze(-2) + shift  # [R, earlier cases ..., choices, width]
        return layers.last(layers.activation(inner))

    def _shift(self, first: nn.Linear, earlier: Head) -> Tensor:
        """What each choice of an earlier head adds in a head's first layer: [choices, width]."""
        return F.linear(cast(nn.Embedding, self.embeddings[earlier.name]).weight, first.weight)


class Features(NamedTuple):
    """What the heads of the growth policy read; the first axes are those of the states."""

    whole: Tensor  # [..., H]
    slots: Tensor  # [..., S, D], as the pointer at slots asks
    blueprint_slots: Tensor  # the same, as the pointer at blueprints asks
    blend_slots: Tensor  # the same, as the pointer at blends asks
    blueprints: Tensor  # [..., K, D], as the pointer at blueprints asks
    blend_blueprints: Tensor  # the same, as the pointer at blends asks
    pairs: Tensor  # [..., S, K, P]


class FactoredRecurrentActorCritic(ActorCritic):
    """The growth policy: op -> slot -> blueprint -> blend, for any slots and blueprints.

    The host and each slot are tokens that look at each other. One recurrent cell remembers the
    host, another one each slot. Slots and blueprints are pointed at: their number is in no weight,
    and blueprints are known by how they are described. A permutation of slots permutes the answer.

    Args:
        state_dim: numbers in one observation.
        num_slots: S.
        num_blueprints: K; the first one is none.
        num_blends: how many of the built-in blends there are, where they are not named.
        hidden_dim: H.
        head_dim: width inside a head.
        layout: what the numbers are; by default they are anybody's own, and slots and blueprints
            are told apart by their numbers alone.
        blends: names of the blends.
    """

    observation_stats: TokenMeanStd

    def __init__(
        self,
        state_dim: int,
        num_slots: int,
        *,
        num_blueprints: int = NUM_BLUEPRINTS,
        num_blends: int = NUM_BLENDS,
        hidden_dim: int = 64,
        head_dim: int = 32,
        layout: AnyLayout | None = None,
        blends: Sequence[str] | None = None,
    ):
        super().__init__()
        layout = layout or PlainLayout(state_dim, num_slots, num_blueprints)
        self.hidden_dim = hidden_dim
        self.head_dim = head_dim
        self.return_stats = RunningMeanStd(1)
        self.observation_stats = TokenMeanStd(layout)
        self.encoder = nn.Linear(layout.base.width, hidden_dim)
        self.slot_encoder = nn.Linear(layout.slot.width, hidden_dim)
        self.attention = TokenAttention(hidden_dim)
        self.lstm = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.slot_lstm = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.pool = nn.Linear(2 * hidden_dim, hidden_dim)
        self.policy_heads = nn.ModuleDict()
        self._take_space(layout, BLEND_IDS[:num_blends] if blends is None else tuple(blends))
        self.questions = Questions(hidden_dim, head_dim, layout.blueprint.width)
        self.policy_heads["op"] = perceptron(hidden_dim, head_dim, self.spec.heads[0].size)
        self.policy_heads["slot"] = SlotPointer(head_dim)
        self.policy_heads["blueprint"] = BlueprintPointer(head_dim, layout.pair.width)
        self.policy_heads["blend"] = BlendPointer(head_dim)
        self.value_head = perceptron(hidden_dim, head_dim, 1)
        ends = [layers_of(self.policy_heads["op"]).last, layers_of(self.value_head).last]
        for head in [*self.policy_heads.values()][1:]:
            ends += cast(Pointer, head).ends
        initialise(self, ends)

    def _take_space(self, layout: AnyLayout, blends: tuple[str, ...]) -> None:
        """Stand for a host of this layout with these blends."""
        unknown = [blend for blend in blends if blend not in BLEND_IDS]
        if unknown or not blends:
            raise SettingError(
                f"blends are {list(blends)}; a policy knows some or all of {', '.join(BLEND_IDS)}."
            )
        self.layout = layout
        self.blends = blends
        self.blend_columns = [BLEND_IDS.index(blend) for blend in blends]
        self.state_dim = layout.width
        self.memory_width = (1 + layout.num_slots) * self.hidden_dim
        self.spec = HeadSpec.growth(layout.num_slots, layout.num_blueprints, len(blends))

    def for_space(self, layout: AnyLayout, blends: Sequence[str]) -> Self:
        """The same weights, shared, for a host with other slots, blueprints or blends."""
        if (layout, tuple(blends)) == (self.layout, self.blends):
            return self
        for kind in ("base", "slot", "blueprint", "pair"):
            if getattr(layout, kind) != getattr(self.layout, kind):
                raise SettingError(
                    f"the {kind} features of this policy are others than those here; build it for "
                    f"an ObservationLayout, or train a new one (docs/checkpoints.md)."
                )
        other = copy.copy(self)
        other._modules = dict(self._modules)
        stats = copy.copy(self.observation_stats)
        stats.layout = layout
        other.observation_stats = stats
        other._take_space(layout, tuple(blends))
        return other

    @property
    def num_slots(self) -> int:
        """How many slots it chooses among."""
        return self.layout.num_slots

    @property
    def decision_flops(self) -> int:
        """FLOPs of one decision: a multiplication and an addition for each product."""
        slots = self.layout.num_slots
        tokens = 1 + slots
        width = self.hidden_dim
        products = self.encoder.weight.numel() + slots * self.slot_encoder.weight.numel()
        products += self.attention.products(tokens) + tokens * 8 * width * width
        products += self.pool.weight.numel()
        for end in (self.policy_heads["op"], self.value_head):
            layers = layers_of(end)
            products += layers.first.weight.numel() + layers.last.weight.numel()
        for head in [*self.policy_heads.values()][1:]:
            products += cast(Pointer, head).products(slots, self.layout.num_blueprints)
        products += self.questions.products(slots, self.layout.num_blueprints)
        return 2 * products

    @property
    def judging_flops(self) -> int:
        """FLOPs of judging a stored decision: it looks at all cases to decide, too."""
        return self.decision_flops

    @torch.no_grad()
    def lean_to_wait(self, probability: float) -> None:
        """Before anything is learnt, wait this likely rather than plant, and rather than cull.

        What was measured is kept as likely as the policy waits. A seed that stays undecided is left
        out at the end, when its host depends on it: a policy that mostly waits there learns first
        that planting harms.
        """
        bias = layers_of(self.policy_heads["op"]).last.bias
        bias[[OP_WAIT, OP_FOSSILIZE]] = math.log(probability / (1 - probability))

    def describe(self) -> str:
        """One line on what it chooses and how large it is."""
        choices = ", ".join(f"{head.name} of {head.size}" for head in self.spec.heads)
        scales = ", ".join(f"{scale:.2f}" for scale in self.max_entropies.values())
        params = sum(parameter.numel() for parameter in self.parameters())
        return f"policy: {choices}; entropy scales {scales} nats; {params:,} parameters"

    def forward(
        self,
        states: Tensor,
        hidden: Hidden | None = None,
        masks: MaskSet | None = None,
        **single_masks: Tensor | None,
    ) -> dict[str, Any]:
        """Masked logits of each head, where the heads before it chose what was likeliest."""
        masks = self._masks_by_head(masks, single_masks)
        if hidden is None:
            hidden = self.get_initial_hidden(len(states))
        features, hidden = self._features(states, hidden, None)
        choices: PerHead = {}
        outputs: dict[str, Any] = {}
        for index, head in enumerate(self.spec.heads):
            case = self._case(index, features, masks, choices)
            choices[head.name] = case.mode()
            outputs[f"{head.name}_logits"] = case.logits
        return {**outputs, "value": self._values(features), "hidden": hidden}

    # -- what the heads read -----------------------------------------------------------------------

    def _features(
        self, states: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool = True
    ) -> tuple[Features, Hidden]:
        seen = self.observation_stats.normalised(states)
        present = seen.slots[..., len(self.layout.slot.numbers) + len(self.layout.slot.optional)]
        is_there = present > 0
        encoded = self.encoder(seen.base).unsqueeze(-2)
        tokens = torch.tanh(torch.cat([encoded, self.slot_encoder(seen.slots)], -2))
        tokens = tokens + self.attention(tokens, is_there)
        whole, slots, hidden = self._remember(tokens, hidden, starts, needs_state)
        whole = whole + torch.tanh(self.pool(pool_slots(slots, is_there)))
        slots, blueprint_slots, blend_slots = self.questions.ask_slots(whole, slots)
        blueprints, blend_blueprints = self.questions.ask_blueprints(seen.blueprints)
        features = Features(
            whole=whole,
            slots=slots,
            blueprint_slots=blueprint_slots,
            blend_slots=blend_slots,
            blueprints=blueprints,
            blend_blueprints=blend_blueprints,
            pairs=seen.pairs,
        )
        return features, hidden

    def _remember(
        self, tokens: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool
    ) -> tuple[Tensor, Tensor, Hidden]:
        """The host [N, T, H] and the slots [N, T, S, H] with what is remembered of them."""
        count, steps, number, width = tokens.shape
        number -= 1
        first, slots = tokens.split([1, number], 2)
        whole = first.squeeze(2)
        of_whole = (hidden[0][..., :width].contiguous(), hidden[1][..., :width].contiguous())
        of_slots = (
            hidden[0][..., width:].reshape(1, count * number, width),
            hidden[1][..., width:].reshape(1, count * number, width),
        )
        remembered, of_whole = run_sequences(
            self.lstm, whole, of_whole, starts, needs_state=needs_state
        )
        rows = slots.transpose(1, 2).reshape(count * number, steps, width)
        slot_starts = None if starts is None else starts.repeat_interleave(number, 0)
        by_slot, of_slots = run_sequences(
            self.slot_lstm, rows, of_slots, slot_starts, needs_state=needs_state
        )
        by_slot = by_slot.reshape(count, number, steps, width).transpose(1, 2)
        after_h, after_c = (
            torch.cat([one, other.reshape(1, count, number * width)], -1)
            for one, other in zip(of_whole, of_slots, strict=True)
        )
        return whole + remembered, slots + by_slot, (after_h, after_c)

    def _whole(self, features: Features) -> Tensor:
        return features.whole

    # -- heads -------------------------------------------------------------------------------------

    def _cases_logits(self, index: int, features: Features) -> Tensor:
        logits = self._all_logits(index, features)
        # cases of slots come after that of the only op that needs a blueprint
        return logits if index < 2 else logits.unsqueeze(1)

    def _case_logits(self, index: int, features: Features, choices: PerHead) -> Tensor:
        """Of all cases the one that was chosen: they are cheap, and equal bits matter."""
        logits = self._all_logits(index, features)
        if index == 0:
            return logits
        if index == 1:
            uses = self.spec.uses(self.spec.heads[1])
            case = (choices["op"] - uses[0]).clamp(min=0)
        else:
            case = choices["slot"]
        if index == 3:
            logits = logits.flatten(-3, -2)
            case = case * self.layout.num_blueprints + choices["blueprint"]
        rows = case[..., None, None].expand(*case.shape, 1, logits.shape[-1])
        return logits.gather(-2, rows).squeeze(-2)

    def _all_logits(self, index: int, features: Features) -> Tensor:
        """Logits of a head in all cases: [..., ops, S], [..., S, K] or [..., S, K, blends]."""
        head = self.policy_heads[self.spec.heads[index].name]
        if index == 0:
            return head(features.whole)
        if index == 1:
            return head(features.slots)
        if index == 2:
            return head(features.blueprint_slots, features.blueprints, features.pairs)
        logits = head(features.blend_slots, features.blend_blueprints)
        return logits if self.blends == BLEND_IDS else logits[..., self.blend_columns]
