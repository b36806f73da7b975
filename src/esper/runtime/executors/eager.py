"""Steps in Python, on any device: the reference that other executors must equal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.runtime.batches import shared_batches
from esper.runtime.counterfactuals import greedy_scores, measure
from esper.runtime.host import HostRun
from esper.runtime.splits import Split


class EagerExecutor:
    """Runs step by step in Python, with one gather for all hosts that share their examples.

    Every other executor must equal it bit for bit.
    """

    def train(self, runs: Sequence[HostRun], *, then_measure: bool = False) -> list[Tensor]:
        """Train every host for one epoch; returns the greedy scores of its slots, on the device.

        The scores are of before the first step. They and the hosts' sums may be read after `wait`.
        `then_measure` promises that these very hosts are measured on their validation splits
        before anything else happens to them.
        """
        for run in runs:
            run.begin_epoch()
        scores = [greedy_scores(run) for run in runs]
        together: dict[tuple[torch.device, int, int], list[HostRun]] = {}
        for run in runs:
            # hosts of a family have their own examples, others share those of their device
            key = (run.device, id(run.plan.split), run.plan.size)
            together.setdefault(key, []).append(run)
        for members in together.values():
            _train_together(members)
        return scores

    def wait(self, runs: Sequence[HostRun]) -> None:
        """Let all later work on the device come after the last training of these hosts."""

    def settle(self, runs: Sequence[HostRun]) -> None:
        """Let all later work on the device come after everything that these hosts were given.

        A measurement that was promised and not taken is dropped.
        """

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        """Measure each host on its split, as `counterfactuals.measure` does."""
        return [measure(run, split) for run, split in zip(runs, splits, strict=True)]

    def begin_episode(self, run: HostRun) -> None:
        """Know that a host is newborn, in the tensors of the one before."""


def _train_together(runs: Sequence[HostRun]) -> None:
    """One epoch of hosts that share their examples; some may have fewer steps than others."""
    batches = shared_batches([run.plan for run in runs])
    for step, (inputs, targets) in enumerate(batches):
        training = [run for run in runs if step < run.plan.steps]
        for index, run in enumerate(training):
            run.learn(inputs[index], targets[index])
