"""The recurrent policy:

observation -> LSTM -> one masked head per choice, and a value. It does not learn.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from esper.leyline.errors import CheckpointMismatchError, SettingError
from esper.leyline.factored_actions import NUM_BLENDS, NUM_BLUEPRINTS, OP_WAIT
from esper.tamiyo.distributions import (
    MaskedCategorical,
    at_least_single,
    masked_log_softmax,
    normalised_entropy,
)
from esper.tamiyo.heads import Head, HeadSpec, mask_cases, reach_cases
from esper.tamiyo.normalising import Pool, RunningMeanStd

Hidden = tuple[Tensor, Tensor]  # h and c, each [1, N, H]
PerHead = dict[str, Tensor]
MaskSet = Mapping[str, Tensor]


class Evaluation(NamedTuple):
    """What the network says now about decisions made earlier; every tensor is [N, T]."""

    log_probs: PerHead
    values: Tensor
    entropy: PerHead  # expected over the earlier choices, normalised to 0 .. 1
    hidden: Hidden


class RecurrentActorCritic(nn.Module):
    """A policy for any specification of heads. Batch first: states [N, T, D], or [N, D] for one
    step.

    A chained head's features are the LSTM's output plus an embedding of each earlier choice. The
    sum passes a layer before the logits, so what a choice means may depend on the state.
    """

    def __init__(
        self, state_dim: int, spec: HeadSpec, *, hidden_dim: int = 128, head_dim: int = 64
    ):
        super().__init__()
        self.state_dim, self.spec, self.hidden_dim, self.head_dim = (
            state_dim,
            spec,
            hidden_dim,
            head_dim,
        )
        self.observation_stats = RunningMeanStd(state_dim)
        self.return_stats = RunningMeanStd(1)
        self.encoder = nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.Tanh())
        self.lstm = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.policy_heads = nn.ModuleDict(
            {h.name: _perceptron(hidden_dim, head_dim, h.size) for h in spec.heads}
        )
        earlier = spec.heads[:-1] if spec.chained else ()
        self.embeddings = nn.ModuleDict(
            {head.name: nn.Embedding(head.size, hidden_dim) for head in earlier}
        )
        self.value_head = _perceptron(hidden_dim, head_dim, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
        for name, parameter in self.lstm.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
        for head in self.policy_heads.values():
            nn.init.orthogonal_(_layers(head)[2].weight, 0.01)  # a fresh policy is close to even
        nn.init.orthogonal_(_layers(self.value_head)[2].weight, 1.0)

    @property
    def max_entropies(self) -> dict[str, float]:
        """Largest entropy of each head in nats, at least 1: a scale for reports."""
        return {head.name: max(math.log(head.size), 1.0) for head in self.spec.heads}

    def get_initial_hidden(self, count: int) -> Hidden:
        """The state in which `count` episodes begin."""
        zeros = _layers(self.value_head)[2].weight.new_zeros(1, count, self.hidden_dim)
        return zeros, zeros.clone()

    def look(self, states: Tensor, hidden: Hidden) -> Tensor:
        """Values [N] of one more step [N, D]; whoever goes on does so with the state from
        before.
        """
        return self._values(self._features(states[:, None], hidden, None)[0][:, 0])

    def follow(self, states: Tensor, hidden: Hidden, starts: Tensor | None = None) -> Hidden:
        return self._features(states, hidden, starts)[1]

    def _features(
        self, states: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool = True
    ) -> tuple[Tensor, Hidden]:
        encoded = self.encoder(self.observation_stats.normalise(states))
        remembered, hidden = run_sequences(
            self.lstm, encoded, hidden, starts, needs_state=needs_state
        )
        return encoded + remembered, hidden

    def _values(self, features: Tensor) -> Tensor:
        """Expected returns in the environment's own units."""
        found = at_least_single(self.value_head(features))
        mean, std = self.return_stats.mean.to(found.dtype), self.return_stats.std.to(found.dtype)
        return (found * std + mean).squeeze(-1)

    def _case(
        self, place: int, features: Tensor, masks: MaskSet, choices: PerHead
    ) -> MaskedCategorical:
        """One head in one case:

        the choices made so far. `_cases` has all cases, whatever might have been chosen.
        """
        head = self.spec.heads[place]
        first, activation, last = _layers(self.policy_heads[head.name])
        inner, mask = first(features), masks.get(head.name)
        for earlier in self.spec.earlier(place):
            inner = inner + F.embedding(choices[earlier.name], self._shift(first, earlier))
        if mask is not None and head.mask_by is not None and mask.dim() != features.dim():
            index = choices[head.mask_by][..., None, None].expand(
                *mask.shape[:-2], 1, mask.shape[-1]
            )
            mask = mask.gather(-2, index).squeeze(-2)
        return MaskedCategorical(last(activation(inner)), mask, head=head.name)

    def _shift(self, first: nn.Linear, earlier: Head) -> Tensor:
        """What each choice of an earlier head adds in a head's first layer: [choices, width]."""
        return F.linear(cast(nn.Embedding, self.embeddings[earlier.name]).weight, first.weight)

    def _is_used(self, head: Head, choices: PerHead) -> Tensor | None:
        """Where the first choice has a use for this head; None is everywhere."""
        if head.used_by is None:
            return None
        op = choices[self.spec.heads[0].name]
        return torch.tensor(
            [choice in head.used_by for choice in range(self.spec.heads[0].size)], device=op.device
        )[op]

    def choose(
        self,
        states: Tensor,
        hidden: Hidden | None,
        masks: MaskSet,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> tuple[PerHead, PerHead, Tensor, Hidden]:
        """Actions (0 where unused), log-probabilities, values, state; even draws:

        `noise` [N, heads, widest head].
        """
        is_step = states.dim() == 2
        states = states[:, None] if is_step else states
        hidden = self.get_initial_hidden(len(states)) if hidden is None else hidden
        features, hidden = self._features(states, hidden, None)
        features = features[:, 0] if is_step else features
        choices, log_probs = PerHead(), PerHead()
        for place, head in enumerate(self.spec.heads):
            used = self._is_used(head, choices)
            if (
                used is not None and noise is not None and not bool(used.any())
            ):  # nor does it take draws from others
                choice, log_prob = (
                    torch.zeros_like(found[self.spec.names[0]]) for found in (choices, log_probs)
                )
            else:
                drawn = self._case(place, features, masks, choices)
                own = None if noise is None else noise[..., place, : head.size]
                choice = drawn.mode() if deterministic else drawn.sample(generator, own)
                log_prob = drawn.log_prob(choice)
                if used is not None:
                    choice, log_prob = torch.where(used, choice, 0), torch.where(used, log_prob, 0)
            choices[head.name], log_probs[head.name] = choice, log_prob
        return choices, log_probs, self._values(features), hidden

    def _cases(self, place: int, features: Tensor, masks: MaskSet) -> tuple[Tensor, Tensor | None]:
        """A head's log-probabilities [R, cases ..., size] and mask.

        Sums in the order of `_case`, for equal bits.
        """
        head = self.spec.heads[place]
        first, activation, last = _layers(self.policy_heads[head.name])
        inner = first(features)  # [R, width]
        for axis, earlier in enumerate(self.spec.earlier(place)):
            shift = self._shift(first, earlier)
            inner = inner.unsqueeze(-2) + (
                shift[list(self.spec.uses(head))] if axis == 0 else shift
            )
        mask = mask_cases(self.spec, place, masks.get(head.name))
        return masked_log_softmax(last(activation(inner)), mask), mask

    def evaluate(
        self,
        states: Tensor,
        actions: PerHead,
        masks: MaskSet,
        hidden: Hidden,
        starts: Tensor | None = None,
        needs_state: bool = True,
    ) -> Evaluation:
        """Judge stored decisions [N, T] under the present weights; `starts`, `needs_state` as in
        `run_sequences`.
        """
        if hidden is None:
            raise SettingError(
                "evaluating needs the state that rows began with: stored, or get_initial_hidden(N)."
            )
        features, hidden = self._features(states, hidden, starts, needs_state)
        shape = features.shape[:-1]
        rows = features.flatten(0, 1)
        flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
        choices = {name: action.flatten() for name, action in actions.items()}
        certain, probs = at_least_single(rows.new_ones(len(rows))), list[Tensor]()
        log_probs, entropy = PerHead(), PerHead()
        for place, head in enumerate(self.spec.heads):
            cases, mask = self._cases(place, rows, flat)
            reach = reach_cases(self.spec, place, certain, probs)
            probs.append(cases.detach().exp())
            log_probs[head.name] = self._taken(place, cases, choices).view(shape)
            uncertain = normalised_entropy(cases, mask)
            entropy[head.name] = (reach * uncertain).view(len(rows), -1).sum(1).view(shape)
        return Evaluation(log_probs, self._values(features), entropy, hidden)

    def _taken(self, place: int, cases: Tensor, choices: PerHead) -> Tensor:
        """Log-probability of the stored choice in the case of the stored earlier choices; 0 where
        it is not used.
        """
        head = self.spec.heads[place]
        uses, index = list(self.spec.uses(head)), torch.zeros_like(choices[head.name])
        for axis, other in enumerate(self.spec.earlier(place)):
            choice = choices[other.name]
            if axis == 0:
                position = torch.zeros(other.size, dtype=torch.long, device=choice.device)
                position[uses] = torch.arange(len(uses), device=choice.device)
                choice = position[choice]
            index = index * other.size + choice
        found = (
            cases.flatten(1).gather(1, (index * head.size + choices[head.name])[:, None]).squeeze(1)
        )
        used = self._is_used(head, choices)
        return found if used is None else torch.where(used, found, 0)

    @torch.no_grad()
    def update_return_stats(self, returns: Tensor, pool: Pool = lambda values: values) -> None:
        """Take in the returns of a rollout; the last layer is rescaled so that no value changes by
        it.
        """
        old_mean, old_std = self.return_stats.mean.clone(), self.return_stats.std.clone()
        self.return_stats.update(returns.reshape(-1, 1), pool)
        last, std = _layers(self.value_head)[2], self.return_stats.std
        last.weight.copy_(last.weight * (old_std / std))
        last.bias.copy_((last.bias * old_std + old_mean - self.return_stats.mean) / std)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights.

        Those of another shape are refused before anything changes, with the reason and the way out.
        """
        here = {
            name: tuple(own.shape) for name, own in self.state_dict().items() if name in state_dict
        }
        there = {name: tuple(state_dict[name].shape) for name in here}
        if lines := [
            f"{n} is {there[n]} in the weights and {here[n]} here"
            for n in here
            if there[n] != here[n]
        ]:
            raise CheckpointMismatchError(
                f"size mismatch: {'; '.join(lines)}. A policy fits one number of "
                f"slots, list of blueprints, layout and "
                "width (hidden_dim, head_dim) only; build it for those, or train a "
                "new one (docs/checkpoints.md)."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


class FactoredRecurrentActorCritic(RecurrentActorCritic):
    """The growth policy:

    op -> slot -> blueprint -> blend, each conditioned on and masked by the choices before it.
    """

    def __init__(
        self,
        state_dim: int,
        num_slots: int,
        *,
        num_blueprints: int = NUM_BLUEPRINTS,
        num_blends: int = NUM_BLENDS,
        hidden_dim: int = 128,
        head_dim: int = 64,
    ):
        spec = HeadSpec.growth(num_slots, num_blueprints, num_blends)
        super().__init__(state_dim, spec, hidden_dim=hidden_dim, head_dim=head_dim)
        self.num_slots = num_slots

    @torch.no_grad()
    def lean_to_wait(self, probability: float) -> None:
        """Make the first op this likely where every op is possible and nothing has been learnt."""
        bias = _layers(self.policy_heads["op"])[2].bias
        bias[OP_WAIT] = math.log(probability / (1 - probability) * (len(bias) - 1))

    @property
    def slot_head(self) -> nn.Module:
        return self.policy_heads["slot"]

    def forward(
        self,
        states: Tensor,
        hidden: Hidden | None = None,
        slot_mask: Tensor | None = None,
        blueprint_mask: Tensor | None = None,
        blend_mask: Tensor | None = None,
        op_mask: Tensor | None = None,
    ) -> dict[str, Any]:
        """Masked logits of each head, in the case that the likeliest choice was made in the heads
        before it.
        """
        hidden = self.get_initial_hidden(len(states)) if hidden is None else hidden
        masks = _named(op_mask, slot_mask, blueprint_mask, blend_mask)
        features, hidden = self._features(states, hidden, None)
        choices: PerHead = {}
        said: dict[str, Any] = {}
        for place, head in enumerate(self.spec.heads):
            drawn = self._case(place, features, masks, choices)
            choices[head.name] = drawn.mode()
            said[f"{head.name}_logits"] = drawn.logits
        return {**said, "value": self._values(features), "hidden": hidden}

    def get_action(
        self,
        states: Tensor,
        hidden: Hidden | None = None,
        slot_mask: Tensor | None = None,
        blueprint_mask: Tensor | None = None,
        blend_mask: Tensor | None = None,
        op_mask: Tensor | None = None,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[PerHead, PerHead, Tensor, Hidden]:
        """Draw, or take the likeliest of, each head in turn."""
        masks = _named(op_mask, slot_mask, blueprint_mask, blend_mask)
        return self.choose(states, hidden, masks, deterministic, generator)

    def evaluate_actions(
        self,
        states: Tensor,
        actions: PerHead,
        slot_mask: Tensor | None = None,
        blueprint_mask: Tensor | None = None,
        blend_mask: Tensor | None = None,
        op_mask: Tensor | None = None,
        hidden: Hidden | None = None,
    ) -> tuple[PerHead, Tensor, PerHead, Hidden]:
        """Log-probabilities, values and entropies of stored decisions; `hidden` is what the rows
        began with.
        """
        masks = _named(op_mask, slot_mask, blueprint_mask, blend_mask)
        return self.evaluate(states, actions, masks, hidden)  # type: ignore[arg-type]  # None is refused there


def _named(
    op: Tensor | None, slot: Tensor | None, blueprint: Tensor | None, blend: Tensor | None
) -> dict[str, Tensor]:
    given = {"op": op, "slot": slot, "blueprint": blueprint, "blend": blend}
    return {name: mask for name, mask in given.items() if mask is not None}


def _layers(perceptron: nn.Module) -> tuple[nn.Linear, nn.Tanh, nn.Linear]:
    return cast(Any, tuple(cast(nn.Sequential, perceptron)))


def _perceptron(width: int, inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, out))


def run_sequences(
    lstm: nn.LSTM,
    inputs: Tensor,
    hidden: Hidden,
    starts: Tensor | None,
    *,
    needs_state: bool = True,
) -> tuple[Tensor, Hidden]:
    """Outputs [N, T, H] and the state after the last step. The state is zero wherever `starts` [N,
    T] is true.

    Where episodes begin within rows, the state after the last step carries no gradient; finding it
    costs a pass, which `needs_state=False` spares: it is NaN then.
    """
    if starts is None or not bool(starts.any()):
        return lstm(inputs, hidden)
    count, steps = starts.shape
    begins = starts.clone()
    begins[:, 0] = True
    piece = begins.flatten().cumsum(0) - 1  # which piece each step belongs to
    first = begins.flatten().nonzero().squeeze(1)
    lengths = torch.cat([first[1:], first.new_tensor([count * steps])]) - first
    within = torch.arange(count * steps, device=starts.device) - first[piece]
    padded = inputs.new_zeros(len(first), int(lengths.max()), inputs.shape[-1])
    padded = padded.index_put((piece, within), inputs.flatten(0, 1))
    # only a piece that goes on from before has a past
    keeps = ((first % steps == 0) & ~starts.flatten()[first])[None, :, None]
    past = tuple(torch.where(keeps, state[:, first // steps], 0.0).contiguous() for state in hidden)
    # padded, not packed: going back through a packed sequence costs the square of its length on a
    # CPU
    outputs = lstm(padded, past)[0][piece, within].view(count, steps, -1)
    if not needs_state:
        return outputs, (
            torch.full_like(hidden[0], torch.nan),
            torch.full_like(hidden[1], torch.nan),
        )
    last = piece.view(count, steps)[:, -1]
    with torch.no_grad():
        packed = pack_padded_sequence(
            padded[last], lengths[last].cpu(), batch_first=True, enforce_sorted=False
        )
        after = lstm(packed, (past[0][:, last], past[1][:, last]))[1]
    return outputs, after
