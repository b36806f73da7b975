"""What happened in N environments over T steps, in tensors that are allocated once; and advantages.

No learning.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import Hidden, PerHead
from esper.tamiyo.normalising import Pool


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
    hidden: Hidden


class Rollout:
    """Storage for T steps of N environments.

    A row is one environment; `starts` marks steps at which a new episode begins in it. A filler
    step (the reset that some environments spend a step on) is not `valid`: no loss, statistic or
    advantage looks at it.

    Each row is learned from in at most `pieces` parts, numbered along the first row, then along the
    second.
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
        place: tuple[int, int] | None = None,
        pieces: int = 1,
    ):
        self.spec, self.steps, self.count = spec, steps, count
        self.piece = -(-steps // pieces)  # steps of a piece; the last one of a row may be shorter
        self.per_row = -(-steps // self.piece)
        self.first, self.total = place or (
            0,
            count,
        )  # where these rows stand among those of all processes
        heads, shape, like = (
            len(spec.heads),
            (steps, count),
            torch.zeros(()) if like is None else like,
        )
        self.states = like.new_zeros(*shape, state_dim)
        self.choices = like.new_zeros(*shape, heads, dtype=torch.long)
        self.log_probs = like.new_zeros(*shape, heads)
        self.values, self.rewards, self.after_values = (like.new_zeros(shape) for _ in range(3))
        self.final_values = like.new_full(shape, torch.nan)
        false = like.bool()
        self.terminated, self.truncated, self.valid, self.starts = (
            false.new_zeros(shape) for _ in range(4)
        )
        self.masks = {name: false.new_zeros(*shape, *sizes) for name, sizes in mask_shapes.items()}
        self.hidden: Hidden  # from begin on
        self.end_hidden: Hidden  # right from finish on

    def begin(self, hidden: Hidden) -> None:
        """Start over with the state that each row has before its first step."""
        # NaN, so that a state which nobody keeps is noticed
        empty = (
            torch.full_like(state, torch.nan).repeat_interleave(self.per_row, 1) for state in hidden
        )
        self.hidden = (next(empty), next(empty))
        self.end_hidden = (
            torch.full_like(hidden[0], torch.nan),
            torch.full_like(hidden[1], torch.nan),
        )
        self.length = 0
        self.keep_state(hidden)

    def part(self, start: int, count: int) -> "Rollout":
        """Some of the rows, to be stored into by themselves between `begin` and the end."""
        part, own = copy.copy(self), slice(start, start + count)
        pieces = slice(start * self.per_row, (start + count) * self.per_row)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(part, name, value[:, own])
        part.masks = {name: mask[:, own] for name, mask in self.masks.items()}
        part.hidden = (self.hidden[0][:, pieces], self.hidden[1][:, pieces])
        part.end_hidden = (self.end_hidden[0][:, own], self.end_hidden[1][:, own])
        part.count, part.first = count, self.first + start
        return part

    def keep_state(self, hidden: Hidden) -> None:
        """Keep the state before the next step if a piece begins there."""
        number, inside = divmod(self.length, self.piece)
        if not inside:
            for kept, now in zip(self.hidden, hidden, strict=True):
                kept[:, number :: self.per_row] = now

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
        """Copy in what was seen and chosen at this step; the caller's arrays may change
        afterwards.
        """
        step = self.length
        self.states[step] = states
        for name, stored in self.masks.items():
            stored[step] = masks[name]
        for index, name in enumerate(self.spec.names):
            self.choices[step, :, index] = choices[name]
            self.log_probs[step, :, index] = log_probs[name]
        self.values[step], self.valid[step], self.starts[step] = values, valid, starts

    def add_outcome(
        self, rewards: Tensor, terminated: Tensor, truncated: Tensor, finals: Tensor | None = None
    ) -> None:
        """Close the step.

        `finals`: values of truncated episodes that the next step no longer shows, else NaN.
        """
        step = self.length
        self.rewards[step], self.terminated[step], self.truncated[step] = (
            rewards,
            terminated,
            truncated & ~terminated,
        )
        self.final_values[step] = torch.nan if finals is None else finals
        self.length += 1

    def finish(self, values: Tensor, hidden: Hidden) -> None:
        """Close the rollout with the values of the observations that it broke off at and the state
        before them.
        """
        for kept, now in zip(self.end_hidden, hidden, strict=True):
            kept[:] = now
        assert self.length == self.steps, f"{self.length} of {self.steps} steps were stored"
        following = torch.cat([self.values[1:], values[None]])
        self.after_values[:] = torch.where(self.final_values.isnan(), following, self.final_values)
        for numbers in (self.states, self.log_probs, self.values, self.rewards):
            numbers[~self.valid] = (
                0.0  # at a filler step they may be anything, and NaN times 0 is NaN
            )

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    def advantages(self, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """Advantages and returns [T, N], in the rewards' units; 0 at filler steps."""
        found = gae(
            self.rewards, self.values, self.after_values, self.terminated, self.ended, gamma, lam
        )
        found = torch.where(self.valid, found, 0.0)
        return found, found + self.values

    def begins(self, index: Tensor) -> Tensor:
        """The first step of each of these pieces."""
        return index % self.per_row * self.piece

    def cut(self, stored: Tensor, index: Tensor) -> Tensor:
        """These pieces of numbers [T, N, ...], batch first.

        A short last piece goes on with its last step.
        """
        steps = self.begins(index) + torch.arange(self.piece, device=index.device)[:, None]
        return stored[steps.clamp(max=self.steps - 1), index // self.per_row].transpose(0, 1)

    def rows(self, index: Tensor) -> Rows:
        """Pieces, which are whole rows where these are not cut.

        What a short one goes on with is not valid.
        """
        choices, valid = self.cut(self.choices, index), self.cut(self.valid, index)
        lengths = (self.steps - self.begins(index)).clamp(max=self.piece)
        return Rows(
            **{
                name: self.cut(getattr(self, name), index)
                for name in ("states", "log_probs", "values", "starts")
            },
            choices={name: choices[..., place] for place, name in enumerate(self.spec.names)},
            valid=valid & (torch.arange(self.piece, device=index.device) < lengths[:, None]),
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
    goes_on = (~ended).to(rewards)
    errors = rewards + gamma * torch.where(terminated, 0.0, after_values) - values
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        carried = errors[step] + gamma * lam * goes_on[step] * carried
        advantages[step] = carried
    return advantages


def normalise_advantages(
    advantages: Tensor, valid: Tensor, pool: Pool = lambda values: values
) -> Tensor:
    """Mean 0 and deviation 1 over valid steps of all processes; zeros elsewhere, and if fewer than
    two are valid.
    """
    mean, variance, count = _moments(advantages[valid], pool)
    if count < 2:
        return torch.zeros_like(advantages)
    return torch.where(valid, (advantages - mean) / (variance.sqrt() + 1e-8), 0.0)


def explained_variance(
    values: Tensor, returns: Tensor, valid: Tensor, pool: Pool = lambda values: values
) -> float:
    """Share of the returns' variance that the values knew; NaN where the returns do not vary."""
    spread, missed = (float(_moments(each[valid], pool)[1]) for each in (returns, returns - values))
    return 1.0 - missed / spread if spread > 0 else float("nan")


def _moments(chosen: Tensor, pool: Pool) -> tuple[Tensor, Tensor, int]:
    """Mean, variance and number over all processes; no values have mean and variance 0."""
    count = int(pool(torch.tensor(len(chosen), device=chosen.device)))
    mean = pool(chosen.sum()) / max(count, 1)
    return mean, pool((chosen - mean).square().sum()) / max(count, 1), count
