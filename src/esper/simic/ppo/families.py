"""Rewards of several families of hosts, made alike: none drowns the others.

Each family has one number, the deviation of its discounted returns so far, and its rewards are
divided by it.
"""

from collections.abc import Mapping, Sequence

import torch
from pydantic import TypeAdapter
from torch import Tensor

from esper.simic.ppo.rollout import Rollout, gae, normalise_advantages
from esper.tamiyo.normalising import Pool, RunningMeanStd

_LEAST_VARIANCE = 1e-8
"""Returns that vary less do not vary."""

Saved = dict[str, tuple[float, float, float]]
"""Mean, variance and number of each family's returns."""


class FamilyReturns:
    """The discounted returns of each family so far; without families rewards stay as they are.

    Every process has the same numbers: `pool` adds up what all of them have.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names = tuple(names)
        self.stats = [RunningMeanStd() for _ in self.names]

    def begin(self, rollout: Rollout, gamma: float, pool: Pool) -> set[int]:
        """Measure families that were never measured; returns their numbers."""
        fresh = set()
        for family, stats in enumerate(self.stats):
            if not bool(stats.count > 0):
                fresh.add(family)
        self.update(rollout, gamma, pool, set(range(len(self.stats))) - fresh)
        return fresh

    def update(self, rollout: Rollout, gamma: float, pool: Pool, but: set[int]) -> None:
        """Take in the returns of a rollout; families whose numbers are in `but` stay."""
        if len(but) == len(self.stats):
            return
        nothing = torch.zeros_like(rollout.rewards)
        returns = gae(
            rollout.rewards, nothing, nothing, rollout.terminated, rollout.ended, gamma, 1.0
        )
        is_known = rollout.valid & returns.isfinite()
        for family, stats in enumerate(self.stats):
            if family not in but:
                of_family = returns[is_known & rollout.is_of(family)]
                stats.to(of_family.device).update(of_family[:, None], pool)

    def scales(self, rollout: Rollout) -> Tensor | None:
        """What the rewards of each row are divided by, [N]; None: by nothing."""
        if not self.stats:
            return None
        by_family = [
            stats.std.item() if float(stats.var) > _LEAST_VARIANCE else 1.0 for stats in self.stats
        ]
        return torch.tensor(by_family).to(rollout.rewards)[rollout.families]

    def normalise(self, advantages: Tensor, rollout: Rollout, pool: Pool) -> Tensor:
        """Advantages with mean 0 and deviation 1 over each family's valid steps, 0 elsewhere."""
        normal = torch.zeros_like(advantages)
        for family in range(max(len(self.stats), 1)):
            steps = rollout.valid & rollout.is_of(family)
            normal = torch.where(steps, normalise_advantages(advantages, steps, pool), normal)
        return normal

    def state(self) -> Saved:
        """All numbers as plain data, from which `load` brings back every bit."""
        return {
            name: (stats.mean.item(), stats.var.item(), stats.count.item())
            for name, stats in zip(self.names, self.stats, strict=True)
        }

    def load(self, saved: Mapping[str, object]) -> None:
        """Take back what `state` gave; other families than those here are refused."""
        known = TypeAdapter(Saved).validate_python(saved)
        if known.keys() != set(self.names):
            raise ValueError(f"it learned on {', '.join(known)}, not on {', '.join(self.names)}")
        for name, stats in zip(self.names, self.stats, strict=True):
            mean, variance, count = known[name]
            stats.mean.fill_(mean)
            stats.var.fill_(variance)
            stats.count.fill_(count)
