"""Compute as the clock: an episode is a budget of FLOPs, each decision an equal share of it.

It plans epochs and runs nothing.
"""

from dataclasses import dataclass

from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import SettingError
from esper.runtime.batches import whole_steps
from esper.runtime.charges import (
    closing_passes,
    evaluation_charges,
    most_seed_charges,
    network_flops,
    score_charges,
    sum_charges,
    training_charges,
)
from esper.runtime.host import HostRun
from esper.runtime.splits import Split
from esper.runtime.tasks.task import Task


@dataclass(frozen=True)
class _Prices:
    """FLOPs that decide how many steps a host's next decision has."""

    used: int  # by this episode so far
    step: int  # of one training step
    fixed: int  # of measuring at the end of the decision
    reserve: int  # set aside for what comes at the end of the episode


class ComputeClock:
    """The budget of a task's episodes in FLOPs, and how many steps of it each decision has.

    Late pruning is set aside first, for the fossils there are, and with `measures_left` the
    measurement of what an episode leaves. A decision may then use what is due by its end: its own
    share, and what those before it have left. It is always measured; training has what remains, in
    whole steps. So a larger network sees fewer examples. A budget that measuring would use up is
    refused, at the latest when it does.
    """

    def __init__(self, task: Task, flops: HostFlops, split: Split):
        self.task = task
        self.flops = flops
        # whether an episode ends with a measurement without its undecided seeds
        self.measures_left = False
        steps = whole_steps(task.epoch_examples or len(split), task.batch)
        unit = task.epochs * steps.number * steps.size * flops.learnt
        if task.reference is not None:
            build, examples = task.reference
            unit = examples * HostFlops.of_task(build, split.example(), is_cut=False).learnt
        self.budget = round(task.compute * unit)
        # More than any decision has: no network is cheaper than the bare host. What a decision
        # could use beyond that is carried over.
        self.most_steps = 2 * self.budget // (task.epochs * steps.size * flops.learnt) + 8

    def __str__(self) -> str:
        share = self.budget / self.task.epochs
        return (
            f"compute {self.task.compute:g}: {self.budget:.4g} FLOPs, {self.task.epochs} "
            f"decisions of {share:.4g}"
        )

    def due(self, decision: int, reserve: int = 0) -> int:
        """FLOPs that may be used by the end of a decision; the first is number 0."""
        return (self.budget - reserve) * (decision + 1) // self.task.epochs

    def plan(self, run: HostRun) -> None:
        """Set the number of steps and the rate of each for the decision that comes next."""
        prices = self._price(run)
        left = self.due(run.epoch, prices.reserve) - prices.used - prices.fixed
        run.plan.steps = min(max(0, left) // prices.step, run.plan.most)
        self._refuse_too_little(run, prices)
        # the plan ends with the last step, not with what follows it
        whole = max(1, self.budget - prices.reserve - prices.fixed)
        run.rates = []
        for number in range(run.plan.steps):
            middle = prices.used + (number + 0.5) * prices.step
            run.rates.append(self.task.rate_at(middle / whole))

    def _price(self, run: HostRun) -> _Prices:
        """Price a host's next decision, and note whether the host pays for being measured."""
        run.pays_for_measuring = True
        measuring = score_charges(run, self.flops) + evaluation_charges(run, self.flops)
        fixed = sum_charges(measuring)
        closing = closing_passes(run, measures_left=self.measures_left)
        whole = network_flops(run.model, self.flops)
        reserve = closing * len(run.splits.validation) * whole
        if run.is_static:
            # its one measurement is set aside from the start
            reserve += fixed
            fixed = 0
            run.pays_for_measuring = run.epoch + 1 >= self.task.epochs
        step = sum_charges(training_charges(run, self.flops, run.plan.size))
        return _Prices(used=run.ledger.flops, step=step, fixed=fixed, reserve=reserve)

    def _refuse_too_little(self, run: HostRun, prices: _Prices) -> None:
        """Raise an error where the budget leaves nothing to train with."""
        is_first = run.epoch == 0
        # measuring costs more once a host has grown to its most parameters; where seeds may stay
        # undecided, every slot that can hold one may be measured in every decision
        seeds = 0
        if run.leaves_undecided:
            seeds = sum_charges(most_seed_charges(run, self.flops))
        most_fixed = prices.fixed if run.is_static else self.task.budget * (prices.fixed + seeds)
        is_tight = is_first and most_fixed > self.due(0)
        is_used_up = prices.used + prices.fixed > self.budget
        has_no_step = run.plan.steps == 0 and (is_first or is_used_up)
        if not is_tight and not has_no_step:
            return
        raise SettingError(
            f"compute {self.task.compute:g} is {self.budget:.4g} FLOPs, {self.due(0):.4g} for each "
            f"of {self.task.epochs} decisions, but in decision {run.epoch + 1} one step takes "
            f"{prices.step:.4g} and its measurement {prices.fixed:.4g}, up to {most_fixed:.4g} "
            "once it has grown. Raise compute, or lower epochs, held_out, budget or batch."
        )
