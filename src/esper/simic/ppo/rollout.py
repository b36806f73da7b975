"""What happened in N environments over T steps, in tensors that are allocated once.

Advantages are computed here from what is stored; nothing learns.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import PerHead
from esper.tamiyo.normalising import Pool
from esper.tamiyo.recurrence import Hidden


@dataclass(frozen=True)
class Rows:
    """Some pieces of a rollout, batch first: [R, T, ...]."""

    states: Tensor
    choices: PerHead
    log_probs: Tensor  # [R, T, heads]
    values: Tensor
    valid: Tensor
    starts: Tensor
    masks: dict[str, Tensor]
    hidden: Hidden  # before the first step of each piece


class Targets(NamedTuple):
    """What the policy and the value learn towards, [T, N], in the units of the rewards."""

    advantages: Tensor
    returns: Tensor


class Moments(NamedTuple):
    """Mean, variance and number of some values on all processes."""

    mean: Tensor
    variance: Tensor
    size: int


class Rollout:
    """Storage for T steps of N environments. It holds numbers, and no graph that made them.

    A row is one environment; `starts` marks steps at which a new episode begins in it. A filler
    step (the reset that some environments spend a step on) is not `valid`: no loss, statistic or
    advantage looks at it.

    The learner takes each row in at most `pieces` parts, numbered along the first row, then along
    the second.

    Args:
        steps: T.
        count: N.
        state_dim: numbers in one observation.
        spec: the heads of an action.
        mask_shapes: shape of each head's mask in one environment.
        like: a tensor whose type and device the storage has.
        first: number of the first row among the rows of all processes.
        total: rows of all processes; None: there are no others.
        pieces: most parts of a row.
        families: for each row the number of the family that it is of; by default all are of one.
    """

    def __init__(
        self,
        steps: int,
        count: int,
        state_dim: int,
        spec: HeadSpec,
        mask_shapes: Mapping[str, tuple[int, ...]],
        *,
        like: Tensor | None = None,
        first: int = 0,
        total: int | None = None,
        pieces: int = 1,
        families: Sequence[int] | None = None,
    ):
        self.spec = spec
        self.families = [0] * count if families is None else [*families]
        assert len(self.families) == count, "each row is of one family"
        self.steps = steps
        self.count = count
        self.first = first
        self.total = total or count
        self.piece = -(-steps // pieces)  # steps of a piece; the last one of a row may be shorter
        self.per_row = -(-steps // self.piece)
        like = torch.zeros(()) if like is None else like
        false = like.bool()
        shape = (steps, count)
        heads = len(spec.heads)
        self.states = like.new_zeros(*shape, state_dim)
        self.choices = like.new_zeros(*shape, heads, dtype=torch.long)
        self.log_probs = like.new_zeros(*shape, heads)
        self.values = like.new_zeros(shape)
        self.rewards = like.new_zeros(shape)
        self.after_values = like.new_zeros(shape)
        self.final_values = like.new_full(shape, torch.nan)
        self.terminated = false.new_zeros(shape)
        self.truncated = false.new_zeros(shape)
        self.valid = false.new_zeros(shape)
        self.starts = false.new_zeros(shape)
        self.masks = {name: false.new_zeros(*shape, *sizes) for name, sizes in mask_shapes.items()}
        self.hidden: Hidden  # set by begin
        self.end_hidden: Hidden  # set by begin, filled by finish

    def begin(self, hidden: Hidden) -> None:
        """Start over with the state that each row has before its first step."""
        # NaN, so that a piece whose state is not kept is noticed
        memory, cell = (torch.full_like(state, torch.nan) for state in hidden)
        self.hidden = (
            memory.repeat_interleave(self.per_row, 1),
            cell.repeat_interleave(self.per_row, 1),
        )
        self.end_hidden = (memory, cell)
        self.length = 0
        self.keep_state(hidden)

    def part(self, start: int, count: int) -> "Rollout":
        """Some of the rows, to be filled by themselves between `begin` and the end."""
        part = copy.copy(self)
        rows = slice(start, start + count)
        pieces = slice(start * self.per_row, (start + count) * self.per_row)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(part, name, value[:, rows])
        part.masks = {name: mask[:, rows] for name, mask in self.masks.items()}
        part.hidden = (self.hidden[0][:, pieces], self.hidden[1][:, pieces])
        part.end_hidden = (self.end_hidden[0][:, rows], self.end_hidden[1][:, rows])
        part.families = self.families[rows]
        part.count = count
        part.first = self.first + start
        return part

    def keep_state(self, hidden: Hidden) -> None:
        """Keep the state before the next step if a piece begins there."""
        number, steps_inside = divmod(self.length, self.piece)
        if steps_inside == 0:
            for kept, now in zip(self.hidden, hidden, strict=True):
                kept[:, number :: self.per_row] = now.detach()

    def add_decision(
        self,
        states: Tensor,
        masks: Mapping[str, Tensor],
        choices: PerHead,
        log_probs: PerHead,
        values: Tensor,
        valid: Tensor,
        starts: Tensor,
    ) -> None:
        """Copy in what was seen and chosen at this step.

        The caller may change its arrays afterwards.
        """
        step = self.length
        self.states[step] = states.detach()
        for name, stored in self.masks.items():
            stored[step] = masks[name]
        for index, name in enumerate(self.spec.names):
            self.choices[step, :, index] = choices[name]
            self.log_probs[step, :, index] = log_probs[name].detach()
        self.values[step] = values.detach()
        self.valid[step] = valid
        self.starts[step] = starts

    def add_outcome(
        self, rewards: Tensor, terminated: Tensor, truncated: Tensor, finals: Tensor | None = None
    ) -> None:
        """Close the step.

        `finals` are values of truncated episodes that the next step no longer shows, else NaN.
        """
        step = self.length
        self.rewards[step] = rewards.detach()
        self.terminated[step] = terminated
        self.truncated[step] = truncated & ~terminated
        self.final_values[step] = torch.nan if finals is None else finals.detach()
        self.length += 1

    def repeat_last_step(self) -> None:
        """Store the step before once more, as one that is not valid.

        It stands for the rest of rows whose environments have shorter episodes than others.
        """
        step = self.length
        stored = (self.states, self.choices, self.log_probs, self.values, *self.masks.values())
        for numbers in stored:
            numbers[step] = numbers[step - 1]
        self.rewards[step] = 0.0
        self.final_values[step] = torch.nan
        for flags in (self.terminated, self.truncated, self.valid, self.starts):
            flags[step] = False
        self.length += 1

    def finish(self, values: Tensor, hidden: Hidden) -> None:
        """Close the rollout: values of the observations it broke off at, the state before them."""
        for kept, now in zip(self.end_hidden, hidden, strict=True):
            kept[:] = now.detach()
        assert self.length == self.steps, f"{self.length} of {self.steps} steps were stored"
        following = torch.cat([self.values[1:], values.detach()[None]])
        self.after_values[:] = torch.where(self.final_values.isnan(), following, self.final_values)
        # at a filler step numbers may be anything, and NaN times 0 is NaN
        for numbers in (self.states, self.log_probs, self.values, self.rewards):
            numbers[~self.valid] = 0.0

    @property
    def ended(self) -> Tensor:
        """Steps after which no trace of advantages continues, [T, N]."""
        return self.terminated | self.truncated

    def is_of(self, family: int) -> Tensor:
        """Which rows are of this family, [N]."""
        return torch.tensor(self.families, device=self.rewards.device) == family

    def targets(self, gamma: float, lam: float, scales: Tensor | None = None) -> Targets:
        """Advantages and returns, of rewards divided by `scales` [N].

        Advantages are 0 at filler steps.
        """
        rewards = self.rewards if scales is None else self.rewards / scales
        estimates = gae(
            rewards, self.values, self.after_values, self.terminated, self.ended, gamma, lam
        )
        advantages = torch.where(self.valid, estimates, 0.0)
        return Targets(advantages=advantages, returns=advantages + self.values)

    def begins(self, index: Tensor) -> Tensor:
        """The first step of each of these pieces."""
        return index % self.per_row * self.piece

    def cut(self, stored: Tensor, index: Tensor) -> Tensor:
        """These pieces of numbers [T, N, ...], batch first.

        A short last piece repeats its last step.
        """
        steps = self.begins(index) + torch.arange(self.piece, device=index.device)[:, None]
        return stored[steps.clamp(max=self.steps - 1), index // self.per_row].transpose(0, 1)

    def rows(self, index: Tensor) -> Rows:
        """These pieces; the steps that a short one repeats are not valid."""
        choices = self.cut(self.choices, index)
        lengths = (self.steps - self.begins(index)).clamp(max=self.piece)
        is_inside = torch.arange(self.piece, device=index.device) < lengths[:, None]
        return Rows(
            states=self.cut(self.states, index),
            choices={name: choices[..., head] for head, name in enumerate(self.spec.names)},
            log_probs=self.cut(self.log_probs, index),
            values=self.cut(self.values, index),
            valid=self.cut(self.valid, index) & is_inside,
            starts=self.cut(self.starts, index),
            masks={name: self.cut(mask, index) for name, mask in self.masks.items()},
            hidden=(self.hidden[0][:, index], self.hidden[1][:, index]),
        )


def gae(
    rewards: Tensor,
    values: Tensor,
    after_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates [T, N].

    An end that is not a termination bootstraps; no trace crosses any end.
    """
    continues = (~ended).to(rewards)
    errors = rewards + gamma * torch.where(terminated, 0.0, after_values) - values
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        carried = errors[step] + gamma * lam * continues[step] * carried
        advantages[step] = carried
    return advantages


def normalise_advantages(
    advantages: Tensor, valid: Tensor, pool: Pool = lambda values: values
) -> Tensor:
    """Advantages with mean 0 and deviation 1 over the valid steps of all processes.

    They are 0 elsewhere, and everywhere if fewer than two steps are valid.
    """
    moments = _moments(advantages[valid], pool)
    if moments.size < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages - moments.mean) / (moments.variance.sqrt() + 1e-8)
    return torch.where(valid, scaled, 0.0)


def explained_variance(
    values: Tensor, returns: Tensor, valid: Tensor, pool: Pool = lambda values: values
) -> float:
    """Share of the returns' variance that the values knew; NaN where the returns do not vary."""
    spread = float(_moments(returns[valid], pool).variance)
    missed = float(_moments((returns - values)[valid], pool).variance)
    return 1.0 - missed / spread if spread > 0 else float("nan")


def _moments(numbers: Tensor, pool: Pool) -> Moments:
    """Of no numbers, mean and variance are 0."""
    count = int(pool(torch.tensor(len(numbers), device=numbers.device)))
    divisor = max(count, 1)
    mean = pool(numbers.sum()) / divisor
    variance = pool((numbers - mean).square().sum()) / divisor
    return Moments(mean=mean, variance=variance, size=count)
