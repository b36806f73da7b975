"""The one place where a host's epoch is played:

train, measure, decide, act, tick. What happened is told as events.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import FossilVerdict
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import IllegalActionError
from esper.leyline.factored_actions import OP_GERMINATE, OP_WAIT, ActionSpace, Choice, look_up
from esper.leyline.legality import GrowthView
from esper.leyline.reports import SeedStateReport
from esper.leyline.settings import SlotChange
from esper.runtime.host import EpochReading
from esper.runtime.ledger import Charge, Ledger
from esper.runtime.population import Population
from esper.runtime.tasks.task import Task
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import EpochSignals, SignalTracker
from esper.telemetry import events
from esper.telemetry.events import Event, LedgerClosed, finite


class Episodes:
    """The episodes of a population's hosts, side by side.

    `train`, then `act` and `tick` make one epoch.
    """

    def __init__(self, population: Population, first: int = 0):
        self.population = population
        self.first = first  # in events, where other processes have hosts too
        self.trackers = [self._tracker() for _ in population.runs]
        self.views: list[GrowthView] = []  # every host as it was last measured or restored

    def _tracker(self) -> SignalTracker:
        guessing = -math.log(self.population.task.chance)
        return SignalTracker(self.population.runs[0].model.slot_config, loss_scale=guessing)

    def begin(self, host: int, seed: int) -> None:
        self.population.reset(host, seed)
        self.trackers[host] = self._tracker()

    def train(self) -> list[list[Event]]:
        """Train every host for an epoch and measure it; one that broke is rolled back, one whose
        rate fell pruned.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Let devices train and measure an epoch of every host; until `finish` nothing happens to
        these hosts.
        """
        self.population.start_epoch(then_evaluate=True)

    def finish(self) -> list[list[Event]]:
        """What became of the epoch that was started."""
        self.population.finish_epoch()
        happened: list[list[Event]] = [[] for _ in self.population.runs]
        for rollback in self.population.evaluate():
            number, epoch = self._place(rollback.host)
            happened[rollback.host].append(events.HostRolledBack(number, epoch, rollback.reason))
            happened[rollback.host] += tell_changes(number, epoch, rollback.changes)
        # of a host that was rolled back nothing was measured as it is now: it is pruned an epoch
        # later
        judged = [[] if told else self.population.prune(host) for host, told in enumerate(happened)]
        if (compiled := self.population.take_compiled())[0]:
            happened[0].append(events.BlocksCompiled(*self._place(0), *compiled))
        self.views = self.population.views()
        for host, (run, view) in enumerate(zip(self.population.runs, self.views, strict=True)):
            reading, progress = run.reading, self.population.progress(host)
            assert reading is not None
            self.trackers[host].update(
                epoch_signals(run.task, progress, reading, view), view.reports
            )
            measured = events.HostEpoch(
                *self._place(host),
                held_out_loss=finite(reading.held_out_loss),
                params=run.model.total_params,
                train_loss=finite(reading.train_loss),
                held_out_accuracy=finite(reading.held_out_accuracy),
                flops=run.ledger.flops,
                steps=run.plan.steps,
                share=progress,
            )
            happened[host] += [measured, *tell_seeds(*self._place(host), view.reports)]
            happened[host] += tell_fossils(*self._place(host), judged[host])
        return [
            name_modules(run.model, own)
            for run, own in zip(self.population.runs, happened, strict=True)
        ]

    def look_again(self) -> None:
        """Take hosts that were restored as they stand now."""
        self.views = self.population.views()
        for tracker, view in zip(self.trackers, self.views, strict=True):
            tracker.reports = dict(view.reports)

    def act(self, host: int, choice: Choice) -> list[Event]:
        """Carry out one decision; what is not possible now is refused, told, and counts as WAIT."""
        run = self.population.runs[host]
        told = act(
            partial(self.population.apply, host), run.model.space, choice, *self._place(host)
        )
        return name_modules(run.model, told)

    def tick(self) -> list[list[Event]]:
        """Stages and ramps of every host take their step."""
        ticked = enumerate(zip(self.population.runs, self.population.tick(), strict=True))
        return [
            name_modules(run.model, tell_changes(*self._place(host), own))
            for host, (run, own) in ticked
        ]

    def charge_policy(self, hosts: Collection[int], flops: int, seconds: float) -> None:
        """Charge a decision about each of these hosts; `seconds` is what all of them took
        together.
        """
        for host in hosts:
            charge = Charge("policy", 1, flops)
            self.population.runs[host].ledger.settle([charge], seconds / len(hosts))
        self.population.mark_charged()

    def close(self, host: int) -> LedgerClosed:
        run = self.population.runs[host]
        return close_ledger(self.first + host, run.seed, run.ledger)

    def _place(self, host: int) -> tuple[int, int]:
        """Number and epoch of a host, as events have them."""
        return self.first + host, self.population.runs[host].epoch


def close_ledger(host: int, seed: int, ledger: Ledger) -> LedgerClosed:
    """What an episode has cost, without the phases that it did not have; a compiled copy's examples
    nobody counts.
    """
    flops = {name: cost.flops for name, cost in ledger.phases.items() if cost.examples}
    examples = {name: cost.examples for name, cost in ledger.phases.items() if cost.examples}
    seconds = {
        name: cost.seconds for name, cost in ledger.phases.items() if cost.examples or cost.seconds
    }
    return LedgerClosed(host, seed, ledger.peak_params, flops, examples, seconds)


def act(
    carry_out: Callable[[Choice], list[SlotChange]],
    space: ActionSpace,
    choice: Choice,
    host: int,
    epoch: int,
) -> list[Event]:
    """One decision about one network, carried out by `carry_out` or refused; WAIT is no event."""
    op, (name, slot, *planted) = choice[0], look_up(space, *choice)
    if op == OP_WAIT:
        return []
    try:
        changes = carry_out(choice)
    except IllegalActionError as problem:
        return [events.ActionRefused(host, epoch, name, slot, str(problem))]
    blueprint, blend = planted if op == OP_GERMINATE else (None, None)
    return [
        events.ActionTaken(host, epoch, name, slot, blueprint, blend),
        *tell_changes(host, epoch, changes),
    ]


def name_modules(model: MorphogeneticModel, told: Iterable[Any]) -> list[Event]:
    """Events with the names that the host has for the places of its slots."""
    return [
        replace(e, module=model.slot_config.modules[e.slot]) if hasattr(e, "slot") else e
        for e in told
    ]


def tell_changes(host: int, epoch: int, changes: Iterable[SlotChange]) -> list[Event]:
    """The verdicts that were new and the move itself, slot by slot."""
    told: list[Event] = []
    for change in changes:
        before, after = change.before, change.after
        told += [
            events.GateJudged(
                host, epoch, change.slot_id, g.name, g.measured, g.needed, g.verdict.value, g.reason
            )
            for g in after.gates
            if g not in before.gates
        ]
        blueprint, stages = (
            after.blueprint_id or before.blueprint_id,
            (before.stage.name, after.stage.name),
        )
        told.append(
            events.StageChanged(host, epoch, change.slot_id, *stages, blueprint, after.alpha)
        )
    return told


def tell_seeds(
    host: int, epoch: int, reports: Mapping[str, SeedStateReport]
) -> list[events.SeedMeasured]:
    """Every live seed as it stands after an epoch."""
    told = []
    for slot_id, report in reports.items():
        if report.is_live:
            own = report.metrics
            seed = (
                slot_id,
                report.stage.name,
                report.blueprint_id,
                report.alpha,
                report.seed_age_epochs,
            )
            gain = (
                finite(own.counterfactual_contribution),
                finite(own.counterfactual_standard_error),
            )
            told.append(events.SeedMeasured(host, epoch, *seed, own.seed_param_count, *gain))
    return told


def tell_fossils(
    host: int, epoch: int, verdicts: Iterable[FossilVerdict]
) -> list[events.FossilJudged]:
    """What late pruning found, fossil by fossil."""
    told = []
    for verdict in verdicts:
        gain = verdict.contribution
        mean, error = (None, None) if gain is None else (gain.mean, gain.standard_error)
        place = host, epoch, verdict.slot_id, verdict.blueprint_id
        told.append(events.FossilJudged(*place, mean, error, verdict.is_kept))
    return told


def epoch_signals(
    task: Task, progress: float, reading: EpochReading, view: GrowthView
) -> EpochSignals:
    """A host's readings as policies look at them, with this share of the episode over."""
    budget = view.budget or view.params_used
    seeds = view.max_seeds or max(view.seeds_used, view.space.slots.num_slots)
    return EpochSignals(
        progress=progress,
        lr_share=reading.lr / task.lr,
        train_loss=finite(reading.train_loss),
        held_out_loss=finite(reading.held_out_loss),
        train_accuracy=finite(reading.train_accuracy),
        held_out_accuracy=finite(reading.held_out_accuracy),
        params_share=view.params_used / budget,
        seeds_share=view.seeds_used / seeds,
    )


def facts_of(model: MorphogeneticModel, epochs: int | None, number: int = 0) -> HostFacts:
    """What a rule may know of a network; `epochs` is the length of its episode, if known."""
    prices = {slot_id: model.slot(slot_id).prices for slot_id in model.slot_config.slot_ids}
    return HostFacts(
        model.space, model.costs, model.host_params, model.budget, epochs, number, prices
    )


def decision_flops(network: nn.Module | None) -> int:
    """What one decision costs:

    a multiplication and an addition for each weight; a rule, without network, is free.
    """
    return 0 if network is None else 2 * count_parameters(network)
