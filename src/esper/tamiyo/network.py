"""The recurrent policy: observation -> LSTM -> one masked head per choice, and a value.

It does not learn. Shapes: N hosts, T steps, R = N x T rows, D features.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.errors import CheckpointMismatchError, UnknownNameError
from esper.leyline.factored_actions import (
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    OP_FOSSILIZE,
    OP_WAIT,
)
from esper.tamiyo.distributions import (
    MaskedCategorical,
    at_least_single,
    masked_log_softmax,
    normalised_entropy,
    require_choices,
)
from esper.tamiyo.heads import Head, HeadSpec, mask_cases, reach_cases
from esper.tamiyo.normalising import Pool, RunningMeanStd
from esper.tamiyo.recurrence import Hidden, run_sequences

PerHead = dict[str, Tensor]
MaskSet = Mapping[str, Tensor]


class Decision(NamedTuple):
    """What the network chose; every tensor is [N] for one step, [N, T] for several."""

    choices: PerHead  # 0 where a head is unused
    log_probs: PerHead
    values: Tensor
    hidden: Hidden


class Evaluation(NamedTuple):
    """What the network says now about decisions made earlier; every tensor is [N, T]."""

    log_probs: PerHead
    values: Tensor
    entropy: PerHead  # expected over the earlier choices, normalised to 0 .. 1
    hidden: Hidden


class RecurrentActorCritic(nn.Module):
    """A policy for any specification of heads.

    Batch first: states are [N, T, D], or [N, D] for one step. A chained head's features are the
    LSTM's output plus an embedding of each earlier choice. The sum passes a layer before the
    logits, so what a choice means may depend on the state.
    """

    def __init__(
        self, state_dim: int, spec: HeadSpec, *, hidden_dim: int = 128, head_dim: int = 64
    ):
        super().__init__()
        self.state_dim = state_dim
        self.spec = spec
        self.hidden_dim = hidden_dim
        self.head_dim = head_dim
        self.observation_stats = RunningMeanStd(state_dim)
        self.return_stats = RunningMeanStd(1)
        self.encoder = nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.Tanh())
        self.lstm = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.policy_heads = nn.ModuleDict()
        for head in spec.heads:
            self.policy_heads[head.name] = _perceptron(hidden_dim, head_dim, head.size)
        self.embeddings = nn.ModuleDict()  # of the choices that later heads see
        for head in spec.heads[:-1] if spec.chained else ():
            self.embeddings[head.name] = nn.Embedding(head.size, hidden_dim)
        self.value_head = _perceptron(hidden_dim, head_dim, 1)
        self._initialise()

    def _initialise(self) -> None:
        """Orthogonal weights; a fresh policy is close to even, and values every state alike.

        A random value would be noise in the first advantages, larger than rewards that are rare.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        for perceptron in (*self.policy_heads.values(), self.value_head):
            nn.init.orthogonal_(_layers(perceptron).last.weight, 0.01)

    @property
    def max_entropies(self) -> dict[str, float]:
        """Largest entropy of each head in nats, at least 1: a scale for reports."""
        return {head.name: max(math.log(head.size), 1.0) for head in self.spec.heads}

    def get_initial_hidden(self, count: int, device: torch.device | None = None) -> Hidden:
        """The state in which `count` episodes begin, where the weights are or on `device`."""
        weight = _layers(self.value_head).last.weight
        zeros = weight.new_zeros(1, count, self.hidden_dim, device=device)
        return zeros, zeros.clone()

    def look(self, states: Tensor, hidden: Hidden) -> Tensor:
        """Values [N] of one more step [N, D].

        The caller continues with the state from before.
        """
        features, _ = self._features(states[:, None], hidden, None)
        return self._values(features[:, 0])

    def follow(self, states: Tensor, hidden: Hidden, starts: Tensor | None = None) -> Hidden:
        """The state after some steps [N, T, D]; `starts` is as in `run_sequences`."""
        _, after = self._features(states, hidden, starts)
        return after

    def _features(
        self, states: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool = True
    ) -> tuple[Tensor, Hidden]:
        """What the heads read, [N, T, H], and the state after the last step."""
        encoded = self.encoder(self.observation_stats.normalise(states))
        remembered, hidden = run_sequences(
            self.lstm, encoded, hidden, starts, needs_state=needs_state
        )
        return encoded + remembered, hidden

    def _values(self, features: Tensor) -> Tensor:
        """Expected returns in the environment's own units."""
        scaled = at_least_single(self.value_head(features))
        mean = self.return_stats.mean.to(scaled.dtype)
        std = self.return_stats.std.to(scaled.dtype)
        return (scaled * std + mean).squeeze(-1)

    def _masks_by_head(
        self, masks: MaskSet | None, single_masks: Mapping[str, Tensor | None]
    ) -> MaskSet:
        """All masks that there are; a name that no head has is refused."""
        if not single_masks:
            return masks or {}
        known = {f"{name}_mask": name for name in self.spec.names}
        by_head = dict(masks or {})
        for argument, mask in single_masks.items():
            if argument not in known:
                raise UnknownNameError("argument", argument, [*known])
            if mask is not None:
                by_head[known[argument]] = mask
        return by_head

    def _case(
        self, index: int, features: Tensor, masks: MaskSet, choices: PerHead
    ) -> MaskedCategorical:
        """One head in one case: that of the choices made so far.

        `_cases` has all cases, whatever might have been chosen.
        """
        head = self.spec.heads[index]
        layers = _layers(self.policy_heads[head.name])
        inner = layers.first(features)
        mask = masks.get(head.name)
        for earlier in self.spec.earlier(index):
            inner = inner + F.embedding(choices[earlier.name], self._shift(layers.first, earlier))
        if mask is not None and head.mask_by is not None and mask.dim() != features.dim():
            # of the mask's rows the one that the earlier choice selects
            row = choices[head.mask_by][..., None, None]
            row = row.expand(*mask.shape[:-2], 1, mask.shape[-1])
            mask = mask.gather(-2, row).squeeze(-2)
        return MaskedCategorical(layers.last(layers.activation(inner)), mask, head=head.name)

    def _shift(self, first: nn.Linear, earlier: Head) -> Tensor:
        """What each choice of an earlier head adds in a head's first layer: [choices, width]."""
        return F.linear(cast(nn.Embedding, self.embeddings[earlier.name]).weight, first.weight)

    def _is_used(self, head: Head, choices: PerHead) -> Tensor | None:
        """Where the first choice has a use for this head; None is everywhere."""
        if head.used_by is None:
            return None
        first = self.spec.heads[0]
        op = choices[first.name]
        uses = [choice in head.used_by for choice in range(first.size)]
        return torch.tensor(uses, device=op.device)[op]

    def get_action(
        self,
        states: Tensor,
        hidden: Hidden | None = None,
        masks: MaskSet | None = None,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        **single_masks: Tensor | None,
    ) -> Decision:
        """Decide for N hosts, head by head.

        It draws with the `generator`, or by `noise`: even draws, [N, heads, widest head].

        Args:
            states: what is seen, [N, D] for one step, [N, T, D] for several.
            hidden: the state before the first step; None: episodes begin here.
            masks: what is possible, by head; a head without a mask has all choices.
            deterministic: take the likeliest choice instead of drawing one.
            generator: where draws come from.
            noise: the draws themselves.
            single_masks: masks of single heads by argument, such as `slot_mask`.
        """
        masks = self._masks_by_head(masks, single_masks)
        is_step = states.dim() == 2
        if is_step:
            states = states[:, None]
        if hidden is None:
            hidden = self.get_initial_hidden(len(states))
        features, hidden = self._features(states, hidden, None)
        if is_step:
            features = features[:, 0]
        first = self.spec.heads[0]
        choices: PerHead = {}
        log_probs: PerHead = {}
        for index, head in enumerate(self.spec.heads):
            used = self._is_used(head, choices)
            # with noise of its own, a head that no host uses takes no draws from others
            if used is not None and noise is not None and not bool(used.any()):
                choices[head.name] = torch.zeros_like(choices[first.name])
                log_probs[head.name] = torch.zeros_like(log_probs[first.name])
                continue
            drawn = self._case(index, features, masks, choices)
            if deterministic:
                choice = drawn.mode()
            else:
                noise_of_head = None if noise is None else noise[..., index, : head.size]
                choice = drawn.sample(generator, noise_of_head)
            log_prob = drawn.log_prob(choice)
            if used is not None:
                choice = torch.where(used, choice, 0)
                log_prob = torch.where(used, log_prob, 0)
            choices[head.name] = choice
            log_probs[head.name] = log_prob
        return Decision(
            choices=choices, log_probs=log_probs, values=self._values(features), hidden=hidden
        )

    def _cases(self, index: int, features: Tensor, masks: MaskSet) -> tuple[Tensor, Tensor | None]:
        """A head's log-probabilities [R, cases ..., size] and mask.

        Sums in the order of `_case`, for equal bits.
        """
        head = self.spec.heads[index]
        layers = _layers(self.policy_heads[head.name])
        inner = layers.first(features)  # [R, width]
        for axis, earlier in enumerate(self.spec.earlier(index)):
            shift = self._shift(layers.first, earlier)
            if axis == 0:
                shift = shift[list(self.spec.uses(head))]
            inner = inner.unsqueeze(-2) + shift  # [R, earlier cases ..., choices, width]
        mask = mask_cases(self.spec, index, masks.get(head.name))
        return masked_log_softmax(layers.last(layers.activation(inner)), mask), mask

    def evaluate_actions(
        self,
        states: Tensor,
        actions: PerHead,
        masks: MaskSet | None = None,
        hidden: Hidden | None = None,
        starts: Tensor | None = None,
        needs_state: bool = True,
        **single_masks: Tensor | None,
    ) -> Evaluation:
        """Judge stored decisions [N, T] under the present weights.

        A mask that allows nothing where earlier choices may lead is refused, as in `get_action`.

        Args:
            states: what was seen, [N, T, D].
            actions: what was chosen, by head.
            masks: what was possible, by head.
            hidden: what the rows began with; None: episodes begin with them.
            starts: where episodes begin, as in `run_sequences`.
            needs_state: whether the state after the rows is asked for, as in `run_sequences`.
            single_masks: masks of single heads by argument, such as `slot_mask`.
        """
        masks = self._masks_by_head(masks, single_masks)
        if hidden is None:
            hidden = self.get_initial_hidden(len(states))
        features, hidden = self._features(states, hidden, starts, needs_state)
        shape = features.shape[:-1]
        rows = features.flatten(0, 1)
        flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
        choices = {name: action.flatten() for name, action in actions.items()}
        certain = at_least_single(rows.new_ones(len(rows)))
        probs: list[Tensor] = []
        log_probs: PerHead = {}
        entropy: PerHead = {}
        for index, head in enumerate(self.spec.heads):
            cases, mask = self._cases(index, rows, flat)
            reach = reach_cases(self.spec, index, certain, probs)
            if mask is not None:
                possible = mask.any(-1) | (reach == 0)
                require_choices(possible.view(*shape, -1), head.name, row="row")
            probs.append(cases.detach().exp())
            log_probs[head.name] = self._taken(index, cases, choices).view(shape)
            uncertain = normalised_entropy(cases, mask)
            entropy[head.name] = (reach * uncertain).view(len(rows), -1).sum(1).view(shape)
        return Evaluation(
            log_probs=log_probs, values=self._values(features), entropy=entropy, hidden=hidden
        )

    def _taken(self, index: int, cases: Tensor, choices: PerHead) -> Tensor:
        """Log-probability of the stored choice in the case of the stored earlier choices.

        It is 0 where the head is not used.
        """
        head = self.spec.heads[index]
        uses = list(self.spec.uses(head))
        case = torch.zeros_like(choices[head.name])  # number of the case in each row
        for axis, earlier in enumerate(self.spec.earlier(index)):
            choice = choices[earlier.name]
            if axis == 0:
                position = torch.zeros(earlier.size, dtype=torch.long, device=choice.device)
                position[uses] = torch.arange(len(uses), device=choice.device)
                choice = position[choice]
            case = case * earlier.size + choice
        entry = case * head.size + choices[head.name]
        log_prob = cases.flatten(1).gather(1, entry[:, None]).squeeze(1)
        used = self._is_used(head, choices)
        return log_prob if used is None else torch.where(used, log_prob, 0)

    @torch.no_grad()
    def update_return_stats(self, returns: Tensor, pool: Pool = lambda values: values) -> None:
        """Take in the returns of a rollout.

        The last layer is rescaled so that no value changes by it.
        """
        old_mean = self.return_stats.mean.clone()
        old_std = self.return_stats.std.clone()
        self.return_stats.update(returns.reshape(-1, 1), pool)
        std = self.return_stats.std
        last = _layers(self.value_head).last
        last.weight.copy_(last.weight * (old_std / std))
        last.bias.copy_((last.bias * old_std + old_mean - self.return_stats.mean) / std)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights.

        Those of another shape are refused before anything changes, with the reason and the way out.
        """
        mismatches = []
        for name, value in self.state_dict().items():
            here = tuple(value.shape)
            there = tuple(state_dict[name].shape) if name in state_dict else here
            if there != here:
                mismatches.append(f"{name} is {there} in the weights and {here} here")
        if mismatches:
            raise CheckpointMismatchError(
                f"size mismatch: {'; '.join(mismatches)}. A policy fits one number of slots, list "
                "of blueprints, layout and width (hidden_dim, head_dim) only; build it for those, "
                "or train a new one (docs/checkpoints.md)."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


class FactoredRecurrentActorCritic(RecurrentActorCritic):
    """The growth policy: op -> slot -> blueprint -> blend.

    Each is conditioned on and masked by the choices before it.
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

    @torch.no_grad()
    def lean_to_wait(self, probability: float) -> None:
        """Before anything is learnt, wait this likely rather than plant, and rather than cull.

        What was measured is kept as likely as the policy waits. A seed that stays undecided is left
        out at the end, when its host depends on it: a policy that mostly waits there learns first
        that planting harms.
        """
        bias = _layers(self.policy_heads["op"]).last.bias
        bias[[OP_WAIT, OP_FOSSILIZE]] = math.log(probability / (1 - probability))

    @property
    def slot_head(self) -> nn.Sequential:
        """The head that chooses a slot."""
        return cast(nn.Sequential, self.policy_heads["slot"])

    @property
    def num_slots(self) -> int:
        """How many slots it chooses among."""
        return _layers(self.slot_head).last.out_features

    def describe(self) -> str:
        """One line on what it chooses and how large it is."""
        sizes = {head.name: head.size for head in self.spec.heads} | {"slot": self.num_slots}
        choices = ", ".join(f"{name} of {size}" for name, size in sizes.items())
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


class _Layers(NamedTuple):
    """The parts of a `_perceptron`."""

    first: nn.Linear
    activation: nn.Tanh
    last: nn.Linear


def _layers(perceptron: nn.Module) -> _Layers:
    first, activation, last = cast(Any, perceptron)
    return _Layers(first, activation, last)


def _perceptron(width: int, inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, out))
