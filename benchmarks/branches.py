"""Finishing forked episodes: any number of branches side by side, each from its moment, by its script."""

import copy
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from averaging import gains_of, losses_of
from torch import Tensor, nn

from esper.kasmina.harvesting import harvest
from esper.kasmina.randomness import mix_seed
from esper.kasmina.slot import SlotContents
from esper.leyline.lifecycle import SeedState
from esper.runtime.batches import ExampleStream
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from esper.runtime.splits import Split, Splits
from esper.runtime.tasks.task import Task

LOW_RATE = 0.1
"""Share of the peak rate from which on a seed is measured again."""
PLANT, KEEP, CULL = "plant", "keep", "cull"


@dataclass(frozen=True)
class Step:
    """One thing that happened to one seed, by whoever's hand. A seed goes by the number of its birth in the episode."""

    epoch: int
    op: str
    slot: str
    birth: int
    blueprint: str = ""
    blend: str = ""


@dataclass
class Moment:
    """A host between measuring and deciding, so that any number of branches can go on from it."""

    host: int
    seed: int
    epoch: int
    state: dict[str, Any]
    fossils: dict[str, list[int]]
    """births of each slot's fossils, in order"""
    live: dict[str, int]
    placed: Tensor
    """rows of the epoch that it has just trained on"""


@dataclass
class Branch:
    """One way to finish an episode. Equal ones are run once."""

    moment: Moment
    script: tuple[Step, ...]
    order: int
    asked: set[tuple[str, int]] = field(default_factory=set)
    """seeds to be measured again when the rate has fallen"""
    later: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    """births that are fossils at the end"""
    rolled_back: bool = False


def copied_slots(slots: Sequence[SlotContents]) -> list[SlotContents]:
    """The part of a snapshot that holds modules, with copies in their place."""
    return [
        replace(
            contents,
            fossils=tuple(copy.deepcopy(fossil) for fossil in contents.fossils),
            seed=copy.deepcopy(contents.seed),
        )
        for contents in slots
    ]


def t_value(gains: Tensor) -> float:
    """Mean in standard errors; 0 where nothing differs."""
    error = float(gains.std() / math.sqrt(len(gains)))
    return float(gains.mean()) / error if error > 0 else 0.0


def final_losses(run: HostRun, whole: Split) -> dict[str, float]:
    """The harvested network on all held-out examples and on the test split."""
    network = harvest(run.model)
    found = {}
    for name, split in (("validation", whole), ("test", run.splits.test.open_for_final_report())):
        losses, correct = losses_of(run, network, split)
        found |= {f"{name}_loss": float(losses.mean()), f"{name}_accuracy": float(correct.mean())}
    return found


def find_module(
    run: HostRun,
    slot_id: str,
    birth: int,
    fossils: Mapping[str, list[int]],
    live: Mapping[str, int],
) -> nn.Module:
    """The live seed or fossil of this birth."""
    slot = run.model.slot(slot_id)
    if birth in fossils[slot_id]:
        return slot.fossils[fossils[slot_id].index(birth)]
    assert live[slot_id] == birth
    assert slot.seed is not None
    return slot.seed


class _Finisher:
    """One branch in its host: knows which seed is which, and what is still to happen."""

    def __init__(self, branch: Branch, population: Population, number: int):
        self.branch, self.population = branch, population
        self.run, self.governor = population.runs[number], population.governors[number]
        moment, run = branch.moment, self.run
        run.restore({**moment.state, "slots": copied_slots(moment.state["slots"])})
        self.governor.load(moment.state["governor"])
        if branch.order:
            run.plan.stream = ExampleStream(
                len(run.splits.train), mix_seed(run.seed, 2, branch.order)
            )
        # what ended by itself is in the script; nothing else may end, and what was planted then has
        # room now
        lengths = replace(run.model.settings.lengths, probation=10**9)
        run.model.settings = replace(run.model.settings, lengths=lengths)
        run.model.budget = None
        self.fossils = {slot_id: list(births) for slot_id, births in moment.fossils.items()}
        self.live = dict(moment.live)

    def act(self) -> None:
        """What the script has for this epoch, then the tick."""
        if self.branch.rolled_back:
            return
        for step in self.branch.script:
            if step.epoch == self.run.epoch:
                self._carry_out(step)
        self.run.prime()
        self.run.model.tick()

    def _carry_out(self, step: Step) -> None:
        model = self.run.model
        slot, births = model.slot(step.slot), self.fossils[step.slot]
        if step.op == PLANT:
            model.germinate_seed(step.slot, step.blueprint, step.blend)
            self.live[step.slot] = step.birth
        elif step.birth in births:
            assert step.op == CULL  # a fossil
            number = births.index(step.birth)
            gone = slot.fossils[number]
            slot.fossils = nn.ModuleList(fossil for fossil in slot.fossils if fossil is not gone)
            del slot.fossil_names[number], births[number]
            assert self.run.link is not None
            self.run.link.release(gone.parameters())
        else:
            assert self.live.pop(step.slot) == step.birth
            if step.op == KEEP:
                model.fossilize_seed(step.slot)
                births.append(step.birth)
            else:
                model.cull_seed(step.slot, at_any_age=True)
            slot.assign(
                SeedState()
            )  # no embargo: what the episode planted here later comes at the same time

    def measure(self, whole: Split) -> None:
        """What has to be measured after this epoch."""
        branch, run = self.branch, self.run
        rates = [
            run.task.rate(epoch) <= LOW_RATE * run.task.lr
            for epoch in (run.epoch - 2, run.epoch - 1)
        ]
        if rates == [False, True] and not branch.rolled_back:
            for slot_id, birth in branch.asked:
                module = find_module(run, slot_id, birth, self.fossils, self.live)
                gains = gains_of(run, run.model.slot(slot_id), module, run.splits.validation)
                branch.later[slot_id, birth] = float(gains.mean()), t_value(gains)
        if self.is_over:
            self.act()
            branch.final = final_losses(run, whole)
            branch.kept = {birth for births in self.fossils.values() for birth in births}

    @property
    def is_over(self) -> bool:
        return self.run.epoch >= self.run.task.epochs


def finish_branches(
    task: Task,
    branches: Sequence[Branch],
    device: str,
    splits: Splits,
    *,
    at_once: int,
    tell: Callable[[str], None],
) -> None:
    """Play every branch to its end, those with most epochs left first."""
    waiting = sorted(branches, key=lambda branch: branch.moment.epoch)
    for start in range(0, len(waiting), at_once):
        _finish_together(task, waiting[start : start + at_once], device, splits)
        tell(f"{min(start + at_once, len(waiting))} of {len(waiting)} branches")
        gc.collect()


def _finish_together(task: Task, branches: Sequence[Branch], device: str, splits: Splits) -> None:
    population = Population(
        task, [branch.moment.seed for branch in branches], (device,), splits=splits
    )
    whole = splits.validation.to(population.runs[0].device)
    going = [_Finisher(branch, population, number) for number, branch in enumerate(branches)]
    for finisher in going:
        finisher.act()
    while going:
        population.train_epoch()
        for rollback in population.evaluate():
            going[rollback.host].branch.rolled_back = True
        for finisher in going:
            finisher.measure(whole)
        going = [finisher for finisher in going if not finisher.is_over]
        population.runs = [finisher.run for finisher in going]
        population.governors = [finisher.governor for finisher in going]
        for finisher in going:
            finisher.act()
