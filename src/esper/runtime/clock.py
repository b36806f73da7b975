"""Compute as the clock:

an episode is a budget of FLOPs, each decision an equal share of it. Plans; runs nothing.
"""

from esper.kasmina.pricing import HostFlops
from esper.kasmina.pruning import find_judged
from esper.leyline.errors import SettingError
from esper.runtime.batches import whole_steps
from esper.runtime.charges import (
    evaluation_charges,
    network_flops,
    score_charges,
    sum_charges,
    training_charges,
)
from esper.runtime.host import HostRun
from esper.runtime.splits import Split
from esper.runtime.tasks.task import Task


class ComputeClock:
    """The budget of a task's episodes in FLOPs, and how many steps of it each decision has.

    Late pruning is set aside first, for the fossils there are. A decision may then use what is due
    by its end: its own share, and what those before it have left. It is always measured; training
    has the rest, in whole steps. So a larger network sees fewer examples. A budget that measuring
    would use up is refused, at the latest when it does.
    """

    def __init__(self, task: Task, flops: HostFlops, split: Split):
        self.task, self.flops = task, flops
        steps, size = whole_steps(task.epoch_examples or len(split), task.batch)
        unit = task.epochs * steps * size * flops.learnt
        if task.reference is not None:
            build, examples = task.reference
            unit = examples * HostFlops.of_task(build, split.example(), is_cut=False).learnt
        self.budget = round(task.compute * unit)
        self.most_steps = 2 * self.budget // (task.epochs * size * flops.learnt) + 8
        """more than any decision has:

        no network is cheaper than the bare host; the rest is carried over
        """

    def __str__(self) -> str:
        each, decisions = self.budget / self.task.epochs, self.task.epochs
        return (
            f"compute {self.task.compute:g}: {self.budget:.4g} FLOPs, {decisions} "
            f"decisions of {each:.4g}"
        )

    def due(self, decision: int, reserve: int = 0) -> int:
        """FLOPs that may be used by the end of a decision; the first is number 0."""
        return (self.budget - reserve) * (decision + 1) // self.task.epochs

    def plan(self, run: HostRun) -> None:
        """Set the number of steps and the rate of each for the decision that comes next."""
        run.pays_for_measuring = True
        fixed, reserve = (
            sum_charges(score_charges(run, self.flops) + evaluation_charges(run, self.flops)),
            self._pruning(run),
        )
        is_tight = (
            run.epoch == 0 and not run.is_static and self.task.budget * fixed > self.due(0)
        )  # once it has grown
        if run.is_static:  # its one measurement is set aside from the start
            fixed, reserve, run.pays_for_measuring = (
                0,
                reserve + fixed,
                run.epoch + 1 >= self.task.epochs,
            )
        step, used = sum_charges(training_charges(run, self.flops, run.plan.size)), run.ledger.flops
        left = self.due(run.epoch, reserve) - used - fixed
        run.plan.steps = min(max(0, left) // step, run.plan.most)
        if is_tight or (not run.plan.steps and (run.epoch == 0 or used + fixed > self.budget)):
            given = (
                f"{self.budget:.4g} FLOPs, {self.due(0):.4g} for each of "
                f"{self.task.epochs} decisions"
            )
            needed = (
                f"one step takes {step:.4g} and its measurement {fixed:.4g}, more once it has grown"
            )
            what = (
                f"compute {self.task.compute:g} is {given}, but in decision "
                f"{run.epoch + 1} {needed}"
            )
            raise SettingError(f"{what}. Raise compute, or lower epochs, held_out or batch.")
        whole = max(
            1, self.budget - reserve - fixed
        )  # the plan ends with the last step, not with what follows it
        run.rates = [
            self.task.rate_at((used + (number + 0.5) * step) / whole)
            for number in range(run.plan.steps)
        ]

    def _pruning(self, run: HostRun) -> int:
        """What late pruning is still going to cost, at most."""
        if run.is_pruned or not run.model.settings.prunes:
            return 0
        passes = len(judged) + 1 if (judged := find_judged(run.model)) else 0
        return passes * len(run.splits.validation) * network_flops(run.model, self.flops)
