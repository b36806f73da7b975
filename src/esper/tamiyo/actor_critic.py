"""How a network decides and is judged, head by head, whatever it is made of.

It does not learn. Shapes: N hosts, T steps, R = N x T rows, D features.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from esper.leyline.errors import CheckpointMismatchError, UnknownNameError
from esper.tamiyo.distributions import (
    MaskedCategorical,
    at_least_single,
    masked_log_softmax,
    normalised_entropy,
    require_choices,
)
from esper.tamiyo.heads import Head, HeadSpec, mask_cases, reach_cases, rows_of
from esper.tamiyo.normalising import Pool, RunningMeanStd
from esper.tamiyo.recurrence import Hidden

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


class ActorCritic(nn.Module):
    """A recurrent policy and its value, for any specification of heads.

    Batch first: states are [N, T, D], or [N, D] for one step. What the heads read is a tensor or a
    tuple of tensors; their first axes are those of the states.
    """

    spec: HeadSpec
    state_dim: int
    hidden_dim: int
    head_dim: int
    memory_width: int
    """of each of both parts of the state"""
    policy_heads: nn.ModuleDict
    value_head: nn.Sequential
    observation_stats: RunningMeanStd
    return_stats: RunningMeanStd

    @abstractmethod
    def _features(
        self, states: Tensor, hidden: Hidden, starts: Tensor | None, needs_state: bool = True
    ) -> tuple[Any, Hidden]:
        """What the heads read of each step, and the state after the last step."""

    @abstractmethod
    def _whole(self, features: Any) -> Tensor:
        """What the value reads, [..., H]."""

    @abstractmethod
    def _case_logits(self, index: int, features: Any, choices: PerHead) -> Tensor:
        """One head's logits in one case, that of the choices made so far: [..., size]."""

    @abstractmethod
    def _cases_logits(self, index: int, features: Any) -> Tensor:
        """One head's logits in all cases, whatever might have been chosen: [R, cases ..., size]."""

    @property
    @abstractmethod
    def decision_flops(self) -> int:
        """FLOPs of one decision: a multiplication and an addition for each product."""

    @property
    @abstractmethod
    def judging_flops(self) -> int:
        """FLOPs of judging a stored decision: each head is asked in every case."""

    @property
    def max_entropies(self) -> dict[str, float]:
        """Largest entropy of each head in nats, at least 1: a scale for reports."""
        return {head.name: max(math.log(head.size), 1.0) for head in self.spec.heads}

    def get_initial_hidden(self, count: int, device: torch.device | None = None) -> Hidden:
        """The state in which `count` episodes begin, where the weights are or on `device`."""
        weight = layers_of(self.value_head).last.weight
        zeros = weight.new_zeros(1, count, self.memory_width, device=device)
        return zeros, zeros.clone()

    def look(self, states: Tensor, hidden: Hidden) -> Tensor:
        """Values [N] of one more step [N, D].

        The caller continues with the state from before.
        """
        features, _ = self._features(states[:, None], hidden, None)
        return self._values(features)[:, 0]

    def follow(self, states: Tensor, hidden: Hidden, starts: Tensor | None = None) -> Hidden:
        """The state after some steps [N, T, D]; `starts` is as in `run_sequences`."""
        _, after = self._features(states, hidden, starts)
        return after

    def _values(self, features: Any) -> Tensor:
        """Expected returns in the environment's own units."""
        scaled = at_least_single(self.value_head(self._whole(features)))
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
        self, index: int, features: Any, masks: MaskSet, choices: PerHead
    ) -> MaskedCategorical:
        """One head in one case: that of the choices made so far.

        `_cases` has all cases, whatever might have been chosen.
        """
        head = self.spec.heads[index]
        logits = self._case_logits(index, features, choices)
        mask = masks.get(head.name)
        if mask is not None and head.mask_by is not None and mask.dim() != logits.dim():
            # of the mask's rows the one that the earlier choice selects
            row = choices[head.mask_by][..., None, None]
            row = row.expand(*mask.shape[:-2], 1, mask.shape[-1])
            mask = mask.gather(-2, row).squeeze(-2)
        return MaskedCategorical(logits, mask, head=head.name)

    def _is_used(self, head: Head, choices: PerHead) -> Tensor | None:
        """Where the first choice has a use for this head; None is everywhere."""
        if head.used_by is None:
            return None
        first = self.spec.heads[0]
        op = choices[first.name]
        used_by = rows_of(head.used_by)
        if isinstance(used_by, slice):
            return (op >= used_by.start) & (op < used_by.stop)
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
            features = over(features, _first_step)
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

    def _cases(self, index: int, features: Any, masks: MaskSet) -> tuple[Tensor, Tensor | None]:
        """A head's log-probabilities [R, cases ..., size] and mask."""
        mask = mask_cases(self.spec, index, masks.get(self.spec.heads[index].name))
        return masked_log_softmax(self._cases_logits(index, features), mask), mask

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
        shape = states.shape[:-1]
        rows = over(features, _flat)
        flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
        choices = {name: action.flatten() for name, action in actions.items()}
        count = len(states) * states.shape[1]
        certain = at_least_single(states.new_ones(count))
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
            entropy[head.name] = (reach * uncertain).view(count, -1).sum(1).view(shape)
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
            if axis == 0 and isinstance(rows_of(uses), slice):
                choice = (choice - uses[0]).clamp(0, len(uses) - 1)
            elif axis == 0:
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
        last = layers_of(self.value_head).last
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
                f"size mismatch: {'; '.join(mismatches)}. Weights fit one list of features and "
                "one width (hidden_dim, head_dim) only; build the policy for those, or train a new "
                "one (docs/checkpoints.md)."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


class Layers(NamedTuple):
    """The parts of a `perceptron`."""

    first: nn.Linear
    activation: nn.Tanh
    last: nn.Linear


def layers_of(perceptron: nn.Module) -> Layers:
    """The parts of what `perceptron` made."""
    first, activation, last = cast(Any, perceptron)
    return Layers(first, activation, last)


def perceptron(width: int, inner: int, out: int) -> nn.Sequential:
    """Two layers with a hyperbolic tangent between them."""
    return nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, out))


def over(features: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What the heads read, with a change made to each of its tensors."""
    if isinstance(features, Tensor):
        return change(features)
    return type(features)(*map(change, features))


def _first_step(values: Tensor) -> Tensor:
    return values[:, 0]


def _flat(values: Tensor) -> Tensor:
    return values.flatten(0, 1)


@torch.no_grad()
def initialise(network: nn.Module, ends: Iterable[nn.Linear]) -> None:
    """Orthogonal weights; layers that are `ends` begin close to 0.

    So a fresh policy is close to even, and values every state alike. A random value would be noise
    in the first advantages, larger than rewards that are rare.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, nn.LSTM):
            for name, parameter in module.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)
    for end in ends:
        nn.init.orthogonal_(end.weight, 0.01)
