"""Episodes that are forked: one branch keeps a seed for good, the other culls it, both finish with the same data."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from averaging import WINDOWS, AveragedRun, fresh_statistics, gradients_of, losses_of, without
from branches import (
    CULL,
    KEEP,
    PLANT,
    Branch,
    Moment,
    Step,
    copied_slots,
    final_losses,
    find_module,
    t_value,
)
from torch import Tensor, nn

from esper.episodes import Episodes
from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot, count_parameters
from esper.leyline.factored_actions import OP_FOSSILIZE, OP_GERMINATE, Choice
from esper.leyline.stages import SeedStage
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from esper.runtime.splits import Splits
from esper.runtime.tasks.task import Task
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Reports, RulePolicy
from esper.tamiyo.rules import HostFacts, Memory
from esper.telemetry.events import ActionTaken, Event, HostRolledBack, StageChanged
from esper.trials.arms import act_on_epoch, make_decider

POINTS = {"early": (0.1, 0.2, 0.3), "middle": (0.42, 0.5, 0.6), "late": (0.8, 0.9)}
"""Shares of the episode after which it may be forked. In its last fifth the rate is at most 0.35 of its peak."""


@dataclass
class Fork:
    """One seed at one moment: what predictors say of it and, later, what came of it."""

    moment: Moment
    point: str
    slot: str
    birth: int
    facts: dict[str, Any]
    predictors: dict[str, float | None] = field(default_factory=dict)
    keep: tuple[Step, ...] = ()
    cull: tuple[Step, ...] = ()
    orders: list[tuple[Branch, Branch]] = field(default_factory=list)
    """kept and culled, for each order of data; the first is the episode's own"""


@dataclass(frozen=True)
class KeptPlan:
    """Plants large seeds and others drawn by lot, at most two at a time, and keeps each at the first legal moment.

    Large is the most FLOPs among blueprints with between 25 % of the host's parameters and 60 % of the room left; ties
    go to more parameters. Every other planting, on average, is any place that is legal.
    """

    facts: HostFacts
    flops: dict[tuple[int, int], int]
    planting_part: float = 0.8

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        if masks["op"][OP_FOSSILIZE]:
            return (OP_FOSSILIZE, int(np.flatnonzero(masks["slot"][OP_FOSSILIZE])[0]), 0, 0), memory
        assert self.facts.horizon is not None
        is_late = memory["epoch"] >= self.planting_part * self.facts.horizon
        if (
            is_late
            or not masks["op"][OP_GERMINATE]
            or sum(report.is_live for report in reports.values()) >= 2
        ):
            return WAIT, memory
        draw = np.random.default_rng([7, self.facts.number, memory["epoch"]])
        slots = np.flatnonzero(masks["slot"][OP_GERMINATE])
        legal = [(int(s), int(b)) for s in slots for b in np.flatnonzero(masks["blueprint"][s])]
        metrics = [report.metrics for report in reports.values()]
        used = metrics[0].host_param_count + sum(each.seed_param_count for each in metrics)
        room = (self.facts.budget or 2 * used) - used
        price = {place: self.facts.cheapest_blend(*place)[0] for place in legal}
        large = [
            place for place in legal if self.facts.host_params / 4 <= price[place] <= 0.6 * room
        ]
        if large and draw.random() < 0.5:
            chosen = max(large, key=lambda place: (self.flops[place], price[place], place))
        else:
            chosen = legal[draw.integers(len(legal))]
        return self.facts.plant(*chosen), memory


def flops_of(model: MorphogeneticModel) -> dict[tuple[int, int], int]:
    """FLOPs of every blueprint that fits, by slot and blueprint."""
    found = {}
    for slot_id, blueprint, _ in model.costs:
        slot = model.slot(slot_id)
        place = model.space.slots.index_for_slot_id(slot_id), model.space.blueprint_index(blueprint)
        found[place] = REGISTRY.get(slot.kind, blueprint).cost(slot.feature_shape).flops
    return found


def point_of(task: Task) -> dict[int, str]:
    """Number of epochs trained -> the point of the episode that it belongs to."""
    found = {
        max(1, round(share * task.epochs)): point
        for point, shares in POINTS.items()
        for share in shares
    }
    return {epoch: point for epoch, point in found.items() if epoch < task.epochs}


class Recorder:
    """Plays one part's episodes and remembers what happened to which seed, and the moments at which to fork."""

    def __init__(self, task: Task, seeds: Sequence[int], device: str, splits: Splits):
        task = replace(task, prunes=False)  # branches have their own ends
        self.task, self.device, self.splits = task, device, splits
        self.population = Population(task, seeds, (device,), splits=splits)
        AveragedRun.adopt(self.population)
        self.whole = splits.validation.to(self.population.runs[0].device)
        self.scripts: list[list[Step]] = [[] for _ in seeds]
        self.births = [0] * len(seeds)
        self.fossils: list[dict[str, list[int]]] = [
            {s.slot_id: [] for s in run.slots} for run in self.population.runs
        ]
        self.live: list[dict[str, int]] = [{} for _ in seeds]
        self.broken: set[int] = set()
        """hosts that were rolled back: their recorded ops cannot be replayed"""
        self.policies = ["plan" if number % 2 else "heuristic" for number in range(len(seeds))]
        self.finals: list[dict[str, float]] = []
        self.measured_apart = 0.0
        """largest difference between a contribution as measured here and as the episode measured it on probation"""

    def play(self) -> list[Fork]:
        """Whole episodes; returns every fork that could be made."""
        episodes = Episodes(self.population)
        deciders = []
        for host, (run, name) in enumerate(zip(self.population.runs, self.policies, strict=True)):
            flops = flops_of(run.model)
            plan = lambda facts, flops=flops: RulePolicy(KeptPlan(facts, flops))  # noqa: E731
            deciders.append(make_decider(episodes, host, plan if name == "plan" else name))
        points, forks = point_of(self.task), []
        for _ in range(self.task.epochs):
            happened = episodes.train()
            for host, run in enumerate(self.population.runs):
                if any(isinstance(event, HostRolledBack) for event in happened[host]):
                    self.broken.add(host)
                if run.epoch in points and host not in self.broken:
                    forks += self._forks(host, points[run.epoch])
            act_on_epoch(episodes, deciders, happened)
            for host, events in enumerate(happened):
                self._record(host, events)
        self.finals = [final_losses(run, self.whole) for run in self.population.runs]
        forks = [fork for fork in forks if fork.moment.host not in self.broken]
        for fork in forks:
            fork.keep, fork.cull = self._scripts(fork)
        return forks

    def _record(self, host: int, events: Sequence[Event]) -> None:
        blends = {e.slot: e.blend for e in events if isinstance(e, ActionTaken)}
        live, script = self.live[host], self.scripts[host]
        for event in events:
            if not isinstance(event, StageChanged):
                continue
            if event.after == "GERMINATED":
                live[event.slot] = self.births[host]
                self.births[host] += 1
                planted = str(event.blueprint), str(blends[event.slot])
                script.append(Step(event.epoch, PLANT, event.slot, live[event.slot], *planted))
            elif event.after in ("FOSSILIZED", "CULLED"):
                birth, op = live.pop(event.slot), KEEP if event.after == "FOSSILIZED" else CULL
                script.append(Step(event.epoch, op, event.slot, birth))
                if op == KEEP:
                    self.fossils[host][event.slot].append(birth)

    def _forks(self, host: int, point: str) -> list[Fork]:
        """What can be forked here: live seeds that take part in the output, and fossils."""
        run = self.population.runs[host]
        assert isinstance(run, AveragedRun)
        found: list[tuple[SeedSlot, nn.Module, int]] = []
        for slot in run.slots:
            fossils = zip(slot.fossils, self.fossils[host][slot.slot_id], strict=True)
            found += [(slot, module, birth) for module, birth in fossils]
            if slot.seed is not None and slot.is_in_output and slot.state.alpha > 0:
                found.append((slot, slot.seed, self.live[host][slot.slot_id]))
        if not found:
            return []
        snapshot = {**run.snapshot(), "governor": self.population.governors[host].state()}
        snapshot["slots"] = copied_slots(snapshot["slots"])
        fossils_now = {slot_id: list(births) for slot_id, births in self.fossils[host].items()}
        moment = Moment(
            host,
            run.seed,
            run.epoch,
            snapshot,
            fossils_now,
            dict(self.live[host]),
            run.plan.placed.clone(),
        )
        return [
            Fork(moment, point, slot.slot_id, birth, self._facts(run, slot, module))
            for slot, module, birth in found
        ]

    def _facts(self, run: HostRun, slot: SeedSlot, module: nn.Module) -> dict[str, Any]:
        is_live = module is slot.seed
        number = (
            None
            if is_live
            else next(n for n, fossil in enumerate(slot.fossils) if fossil is module)
        )
        wait = 0
        if (
            is_live and slot.state.stage is SeedStage.BLENDING
        ):  # what is left of its ramp, and an epoch of probation
            wait = self.task.lengths.ramp - slot.state.epochs_in_stage + 1
        return {
            "kind": "live" if is_live else "fossil",
            "wait": wait,
            "stage": slot.state.stage.name if is_live else "FOSSIL",
            "blueprint": slot.state.blueprint_id if number is None else slot.fossil_names[number],
            "alpha": slot.state.alpha if is_live else 1.0,
            "rate_share": self.task.rate(run.epoch - 1) / self.task.lr,
        }

    def predict(self, forks: Sequence[Fork]) -> None:
        """Let every predictor say of each fork what it would have said then; the hosts go back to those moments."""
        for moment in {id(fork.moment): fork.moment for fork in forks}.values():
            run = self.population.runs[moment.host]
            assert isinstance(run, AveragedRun)
            run.restore({**moment.state, "slots": copied_slots(moment.state["slots"])})
            run.plan.placed.copy_(moment.placed)
            own = [fork for fork in forks if fork.moment is moment]
            modules = [
                find_module(run, fork.slot, fork.birth, moment.fossils, moment.live) for fork in own
            ]
            for fork, module in zip(own, modules, strict=True):
                fork.predictors |= _readings(run, fork, module)
            has_statistics = any(
                isinstance(m, nn.modules.batchnorm._BatchNorm) for m in run.model.modules()
            )
            for name, number in {
                "moment": None,
                **{f"average_{w:g}": n for n, w in enumerate(WINDOWS)},
            }.items():
                with nullcontext() if number is None else run.averaged(number):
                    self._contribute(run, own, modules, name, is_fresh=False)
                    if has_statistics:
                        self._contribute(run, own, modules, f"{name}_fresh", is_fresh=True)

    def _contribute(
        self,
        run: HostRun,
        forks: Sequence[Fork],
        modules: Sequence[nn.Module],
        name: str,
        *,
        is_fresh: bool,
    ) -> None:
        """Contributions at the weights of now; fresh ones have batch-norm statistics of their own, seed on and off."""

        def losses() -> Tensor:
            with fresh_statistics(run) if is_fresh else nullcontext():
                return losses_of(run, run.model, self.whole)[0]

        count, with_all = len(run.splits.validation), losses()
        for fork, module in zip(forks, modules, strict=True):
            slot = run.model.slot(fork.slot)
            with without(slot, module):
                gains = losses() - with_all
            found = {name: float(gains[:count].mean()), f"{name}_t": t_value(gains[:count])}
            if count < len(gains):
                found[f"{name}_whole"] = float(gains.mean())
            told = slot.state.contribution
            if name == "moment" and module is slot.seed and told is not None:
                self.measured_apart = max(self.measured_apart, abs(told.mean - found[name]))
            fork.predictors |= found

    def _scripts(self, fork: Fork) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """What happens from the fork on where the seed is kept, and where it is culled."""
        epoch, recorded = fork.moment.epoch, self.scripts[fork.moment.host]
        after = [step for step in recorded if step.epoch >= epoch]
        others = [step for step in after if step.birth != fork.birth]
        cull = (Step(epoch, CULL, fork.slot, fork.birth), *others)
        if fork.facts["kind"] == "fossil":
            return tuple(after), cull
        keep = Step(epoch + fork.facts["wait"], KEEP, fork.slot, fork.birth)
        if [step for step in after if step.birth == fork.birth] == [keep]:
            return tuple(after), cull
        place = sum(step.epoch < keep.epoch for step in others)
        return (*others[:place], keep, *others[place:]), cull


def _readings(run: HostRun, fork: Fork, module: nn.Module) -> dict[str, float | None]:
    """What is known without switching anything off."""
    slot = run.model.slot(fork.slot)
    gradient, ratio = gradients_of(run, module)
    return {
        "greedy": slot.greedy_score,
        "gradient": gradient,
        "gradient_ratio": ratio,
        "gradient_reading": slot.gradient_norm if module is slot.seed else None,
        "params": float(count_parameters(module)),
    }
