"""Compute as the clock: an episode is a budget of FLOPs, each decision an equal share of it. Plans; runs nothing."""

from esper.kasmina.pruning import find_judged
from esper.leyline.errors import SettingError
from esper.runtime import ledger
from esper.runtime.batches import whole_steps
from esper.runtime.counterfactuals import SCORE_EXAMPLES, incubated_slots, measured_slots
from esper.runtime.host import HostRun
from esper.runtime.ledger import BACKWARD, Charge, HostFlops
from esper.runtime.splits import Split
from esper.runtime.tasks import Task


def training_charges(run: HostRun, flops: HostFlops, examples: int) -> list[Charge]:
    """What it costs to learn from examples with the network as it stands."""
    charges = [("training", examples, ledger.learning_flops(run.model, flops))]
    if incubated := incubated_slots(run):
        # the host is frozen in the shadow pass: gradients go back to the first of these seeds and to no weight of it
        passes = ledger.network_flops(run.model, flops) + ledger.ablation_flops(
            run.model, flops, incubated[0].slot_id
        )
        seeds = sum(ledger.incubation_flops(slot) for slot in incubated)
        charges.append(("shadow", examples, passes + (1 + BACKWARD) * seeds))
    return charges


def score_charges(run: HostRun, flops: HostFlops) -> list[Charge]:
    """What the greedy scores of an epoch cost."""
    if not run.pays_for_measuring:
        return []
    return [
        (
            "score",
            min(SCORE_EXAMPLES, run.plan.most * run.plan.size),
            ledger.score_flops(run.model, flops),
        )
    ]


def evaluation_charges(run: HostRun, flops: HostFlops) -> list[Charge]:
    """What held-out losses and the evidence about seeds cost."""
    if not run.pays_for_measuring:
        return []
    count, whole = len(run.splits.validation), ledger.network_flops(run.model, flops)
    ablated = [
        ledger.ablation_flops(run.model, flops, slot.slot_id) for slot in measured_slots(run)
    ]
    charges = [("validation", count, whole), *(("counterfactual", count, cost) for cost in ablated)]
    return charges + [
        ("shadow", count, whole + ledger.incubation_flops(slot)) for slot in incubated_slots(run)
    ]


def _sum(charges: list[Charge]) -> int:
    return sum(examples * flops for _, examples, flops in charges)


class ComputeClock:
    """The budget of a task's episodes in FLOPs, and how many steps of it each decision has.

    Late pruning is set aside first, for the fossils there are. A decision may then use what is due by its end: its own
    share, and what those before it have left. It is always measured; training has the rest, in whole steps. So a larger
    network sees fewer examples. A budget that measuring would use up is refused, at the latest when it does.
    """

    def __init__(self, task: Task, flops: HostFlops, split: Split):
        self.task, self.flops = task, flops
        steps, size = whole_steps(task.epoch_examples or len(split), task.batch)
        unit = task.epochs * steps * size * flops.learnt
        if task.reference is not None:
            build, examples = task.reference
            unit = examples * HostFlops.of_task(build, split, is_cut=False).learnt
        self.budget = round(task.compute * unit)
        self.most_steps = 2 * self.budget // (task.epochs * size * flops.learnt) + 8
        """more than any decision has: no network is cheaper than the bare host; the rest is carried over"""

    def __str__(self) -> str:
        each, decisions = self.budget / self.task.epochs, self.task.epochs
        return f"compute {self.task.compute:g}: {self.budget:.4g} FLOPs, {decisions} decisions of {each:.4g}"

    def due(self, decision: int, reserve: int = 0) -> int:
        """FLOPs that may be used by the end of a decision; the first is number 0."""
        return (self.budget - reserve) * (decision + 1) // self.task.epochs

    def plan(self, run: HostRun) -> None:
        """Set the number of steps and the rate of each for the decision that comes next."""
        run.pays_for_measuring = True
        fixed, reserve = (
            _sum(score_charges(run, self.flops) + evaluation_charges(run, self.flops)),
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
        step, used = _sum(training_charges(run, self.flops, run.plan.size)), run.ledger.flops
        left = self.due(run.epoch, reserve) - used - fixed
        run.plan.steps = min(max(0, left) // step, run.plan.most)
        if is_tight or (not run.plan.steps and (run.epoch == 0 or used + fixed > self.budget)):
            given = f"{self.budget:.4g} FLOPs, {self.due(0):.4g} for each of {self.task.epochs} decisions"
            needed = (
                f"one step takes {step:.4g} and its measurement {fixed:.4g}, more once it has grown"
            )
            what = f"compute {self.task.compute:g} is {given}, but in decision {run.epoch + 1} {needed}"
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
        return passes * len(run.splits.validation) * ledger.network_flops(run.model, self.flops)
