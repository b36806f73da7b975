"""One epoch of hosts in a population: train, measure, decide, act, tick; what happens are events.

There are two loops. `Episodes` plays hosts of a population, whose executors train and measure them.
A `Garden` sits in a loop of the user's own and measures with the user's `evaluate`. Both take from
here how a policy is asked about one network (`decide`), how its choice is carried out (`act`), and
the events that say so.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import FossilVerdict
from esper.leyline.errors import IllegalActionError, SettingError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
    Choice,
    FactoredAction,
    look_up,
)
from esper.leyline.legality import GrowthView, refuse
from esper.leyline.reports import SeedStateReport
from esper.leyline.settings import SlotChange
from esper.runtime.host import EpochReading
from esper.runtime.ledger import Charge, close_ledger
from esper.runtime.population import Population
from esper.runtime.tasks.task import Task
from esper.tamiyo.masks import Masks, compute_batch_masks, only_waiting
from esper.tamiyo.policies import WAIT, Actions, NetworkPolicy, Policy, Reports
from esper.tamiyo.readings import Sight, observe
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import EpochSignals, Signals, SignalTracker
from esper.tamiyo.widening import narrow
from esper.telemetry import events
from esper.telemetry.events import Event, LedgerClosed, finite

Ask = Callable[[Masks, Sequence[Reports], Any, Sequence[Signals]], tuple[Actions, Any]]
"""How a policy is asked: masks, reports, memory and signals of one network, as a batch of one."""


@dataclass(frozen=True)
class Decision:
    """What a policy wants done to one network."""

    choice: Choice
    """indices of op, slot, blueprint and blend"""
    memory: Any
    """what the policy remembers from now on"""
    view: GrowthView
    """the network about which it was asked"""


def decide(
    policy: Policy,
    view: GrowthView,
    memory: Any,
    signals: Signals,
    *,
    look: Callable[[], GrowthView],
    ask: Ask | None = None,
    may_act: bool = True,
    by_hand: Collection[str] = (),
) -> Iterator[Decision]:
    """Ask a policy about one network, and yield what it wants, until it wants no more.

    Most policies want one thing. A plan may want several ops in one epoch: once you have carried
    one out, it is asked again about the network as it is then, until it waits. The standing order
    of a rule (`keeps_measured`) comes last: its measured seeds are fossilized in the same decision,
    also where the policy itself may not act.

    Args:
        policy: whom to ask.
        view: the network as it stands.
        memory: what the policy remembers of it; None at the start.
        signals: what was measured after the last epoch.
        look: returns the view after an op, which may have changed the network.
        ask: asks the policy, where there is more to it than calling `decide` without observation.
        may_act: whether the policy may do anything to the network now; if not, it waits.
        by_hand: slots whose seed the user planted, for which no standing order holds.
    """
    ask = ask or partial(policy.decide, None)
    decided = set(by_hand)  # no standing order holds there
    while True:
        masks = compute_batch_masks([view])
        if not may_act:
            masks = only_waiting(masks)
        actions, memory = ask(masks, [view.reports], memory, [signals])
        op, slot, blueprint, blend = (int(index) for index in np.asarray(actions)[0])
        choice = (op, slot, blueprint, blend) if may_act else WAIT
        yield Decision(choice, memory, view)
        if choice[0] == OP_WAIT:
            break
        if op in (OP_CULL, OP_FOSSILIZE):
            decided.add(view.space.slots.slot_ids[slot])
        if not getattr(policy, "is_plan", False):
            break
        memory = policy.ask_again(memory)  # type: ignore[attr-defined]  # plans have it
        view = look()
    if getattr(policy, "keeps_measured", False):
        for choice in keepable(view, decided):
            yield Decision(choice, memory, view)


def ask_policy(policy: Policy, look: Callable[[], Sight]) -> Ask:
    """How a policy is asked about a network: with an observation of what `look` shows, if needed.

    Rules read masks, reports and signals.
    """
    if not isinstance(policy, NetworkPolicy):
        return partial(policy.decide, None)
    return partial(policy.decide, observe([look()], policy.layout, [policy.lacking]))


def keepable(view: GrowthView, but: Collection[str] = ()) -> list[Choice]:
    """FOSSILIZE for every seed that may be kept now: it is on probation and was measured.

    Slots that are named by `but` are passed over.
    """
    choices: list[Choice] = []
    for index, slot_id in enumerate(view.space.slots.slot_ids):
        if slot_id in but:
            continue
        if refuse(OP_FOSSILIZE, slot_id, None, view.space.blends[0], view) is None:
            choices.append((OP_FOSSILIZE, index, 0, 0))
    return choices


class Episodes:
    """The episodes of a population's hosts, side by side.

    `train`, then `act` and `tick` make one epoch. In events the hosts are numbered from `first` on:
    other processes have hosts too. `views` are the hosts as they were last measured or restored.
    """

    def __init__(self, population: Population, first: int = 0):
        self.population = population
        self.first = first
        self.trackers = [self._tracker(host) for host in range(len(population.runs))]
        self.views: list[GrowthView] = []
        self.facts = [self._facts(host) for host in range(len(population.runs))]
        self._unannounced = set(range(len(population.runs)))  # no event says what they have drawn

    def _facts(self, host: int) -> HostFacts:
        run = self.population.runs[host]
        return facts_of(run.model, run.task.epochs, run.seed)

    def _tracker(self, host: int) -> SignalTracker:
        run = self.population.runs[host]
        return SignalTracker(run.model.slot_config, loss_scale=-math.log(run.task.chance))

    def begin(self, host: int, seed: int) -> None:
        """Begin the next episode of a host, with this random seed."""
        self.population.reset(host, seed)
        self.trackers[host] = self._tracker(host)
        self.facts[host] = self._facts(host)
        self._unannounced.add(host)

    def sight(self, host: int, view: GrowthView | None = None) -> Sight:
        """What is read of a host as it was last measured, or as `view` shows it."""
        tracker = self.trackers[host]
        if tracker.tracked is None:
            raise SettingError("nothing was measured of this host yet; train an epoch first.")
        return Sight(
            tracked=tracker.tracked,
            view=view or self.views[host],
            facts=self.facts[host],
            guessing=tracker.loss_scale,
        )

    def train(self) -> list[list[Event]]:
        """Train every host for an epoch and measure it.

        One that broke is rolled back; one whose rate fell is pruned.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Let devices train and measure an epoch of every host.

        Until `finish` nothing else may happen to these hosts.
        """
        self.population.start_epoch(then_evaluate=True)

    def finish(self) -> list[list[Event]]:
        """What became of the epoch that was started."""
        self.population.finish_epoch()
        happened = [self._announce(host) for host in range(len(self.population.runs))]
        for rollback in self.population.evaluate():
            number, epoch = self._numbers(rollback.host)
            happened[rollback.host].append(
                events.HostRolledBack(host=number, epoch=epoch, reason=rollback.reason)
            )
            happened[rollback.host] += report_changes(number, epoch, rollback.changes)
        verdicts: list[list[FossilVerdict]] = []
        for host, of_host in enumerate(happened):
            # of a host that was rolled back nothing was measured as it is now: it is pruned an
            # epoch later
            was_rolled_back = any(isinstance(event, events.HostRolledBack) for event in of_host)
            verdicts.append([] if was_rolled_back else self.population.prune(host))
        shapes, seconds = self.population.take_compiled()
        if shapes:
            number, epoch = self._numbers(0)
            happened[0].append(
                events.BlocksCompiled(host=number, epoch=epoch, shapes=shapes, seconds=seconds)
            )
        self.views = self.population.views()
        for host, of_host in enumerate(happened):
            number, epoch = self._numbers(host)
            of_host.append(self._measured(host))
            of_host += report_seeds(number, epoch, self.views[host].reports)
            of_host += report_fossils(number, epoch, verdicts[host])
        return [
            name_modules(run.model, of_host)
            for run, of_host in zip(self.population.runs, happened, strict=True)
        ]

    def _announce(self, host: int) -> list[Event]:
        """What a host has drawn whose episode has just begun, if hosts of its task differ."""
        variation = self.population.runs[host].variation
        if host not in self._unannounced or variation is None:
            return []
        self._unannounced.discard(host)
        number, epoch = self._numbers(host)
        return [
            events.HostBegan(
                host=number,
                epoch=epoch,
                seed=self.population.runs[host].seed,
                variation=variation.number,
                drawn=variation.drawn,
            )
        ]

    def _measured(self, host: int) -> events.HostEpoch:
        """What the epoch came to, which the host's tracker takes up as well."""
        run = self.population.runs[host]
        view = self.views[host]
        reading = run.reading
        assert reading is not None
        signals = epoch_signals(run.task, run.progress, reading, view)
        self.trackers[host].update(signals, view.reports)
        number, epoch = self._numbers(host)
        return events.HostEpoch(
            host=number,
            epoch=epoch,
            held_out_loss=finite(reading.held_out_loss),
            params=run.model.total_params,
            train_loss=finite(reading.train_loss),
            held_out_accuracy=finite(reading.held_out_accuracy),
            flops=run.ledger.flops,
            steps=run.plan.steps,
            share=run.progress,
        )

    def measure_remains(self, host: int) -> list[events.RemainsMeasured]:
        """Measure what the end of an episode leaves of a host: nothing where it did not grow."""
        remains = self.population.measure_remains(host)
        if remains is None:
            return []
        contributions: dict[str, float] = {}
        for position, gain in remains.contributions.items():
            if gain is not None:
                before = contributions.get(position.slot_id, 0.0)
                contributions[position.slot_id] = before + gain.mean
        number, epoch = self._numbers(host)
        return [
            events.RemainsMeasured(
                host=number,
                epoch=epoch,
                held_out_loss=finite(remains.loss),
                held_out_accuracy=finite(remains.accuracy),
                left_out=list(remains.left_out),
                contributions=contributions,
                flops=self.population.runs[host].ledger.flops,
            )
        ]

    def look_again(self) -> None:
        """Take hosts that were restored as they stand now."""
        self._unannounced.clear()
        self.views = self.population.views()
        for tracker, view in zip(self.trackers, self.views, strict=True):
            tracker.reports = dict(view.reports)

    def act(self, host: int, choice: Choice, space: ActionSpace | None = None) -> list[Event]:
        """Carry out one decision, in indices of `space` or else of the host's own space.

        What is not possible now is refused, which is an event too, and counts as WAIT.
        """
        model = self.population.runs[host].model
        number, epoch = self._numbers(host)
        space = space or model.space
        choice_of_host = narrow(choice, space, model.space)
        if choice_of_host is None:
            op, slot, *_ = look_up(space, *choice)
            reason = f"this host has no slot {slot}."
            return [events.ActionRefused(host=number, epoch=epoch, op=op, slot=slot, reason=reason)]
        carry_out = partial(self.population.apply, host)
        happened = act(carry_out, model.space, choice_of_host, number, epoch)
        return name_modules(model, happened)

    def tick(self) -> list[list[Event]]:
        """Stages and ramps of every host take their step."""
        ticked: list[list[Event]] = []
        for host, changes in enumerate(self.population.tick()):
            happened = report_changes(*self._numbers(host), changes)
            ticked.append(name_modules(self.population.runs[host].model, happened))
        return ticked

    def charge_policy(self, hosts: Collection[int], flops: int, seconds: float) -> None:
        """Charge a decision about each of these hosts; all of them took `seconds` together."""
        for host in hosts:
            charge = Charge("policy", 1, flops)
            self.population.runs[host].ledger.settle([charge], seconds / len(hosts))
        self.population.mark_charged()

    def close(self, host: int) -> LedgerClosed:
        """What the episode of a host has cost."""
        run = self.population.runs[host]
        return close_ledger(self.first + host, run.seed, run.ledger)

    def _numbers(self, host: int) -> tuple[int, int]:
        """Number and epoch of a host, as events have them."""
        return self.first + host, self.population.runs[host].epoch


def act(
    carry_out: Callable[[Choice], list[SlotChange]],
    space: ActionSpace,
    choice: Choice,
    host: int,
    epoch: int,
) -> list[Event]:
    """One decision about one network, carried out by `carry_out` or refused; WAIT is no event."""
    op, slot, blueprint, blend = choice
    if op == OP_WAIT:
        look_up(space, *choice)  # what it waits with must exist too
        return []
    try:
        changes = carry_out(choice)
    except IllegalActionError as problem:
        action = FactoredAction.from_indices(slot, blueprint, blend, op, space=space)
        refused = events.ActionRefused(
            host=host,
            epoch=epoch,
            op=action.op.name,
            slot=action.slot_id,
            reason=str(problem),
        )
        return [refused]
    return report_action(space, choice, changes, host, epoch)


def report_action(
    space: ActionSpace, choice: Choice, changes: Iterable[SlotChange], host: int, epoch: int
) -> list[Event]:
    """An op that was carried out, and what it changed."""
    name, slot, blueprint, blend = look_up(space, *choice)
    is_planted = choice[0] == OP_GERMINATE
    moved = list(changes)
    if not is_planted:
        blueprint = moved[0].before.blueprint_id if moved else None
    taken = events.ActionTaken(
        host=host,
        epoch=epoch,
        op=name,
        slot=slot,
        blueprint=blueprint,
        blend=blend if is_planted else None,
    )
    return [taken, *report_changes(host, epoch, moved)]


def name_modules(model: MorphogeneticModel, happened: Iterable[Any]) -> list[Event]:
    """Events with the names of the host's modules that their slots sit on."""
    modules = model.slot_config.modules
    return [
        replace(event, module=modules[event.slot]) if hasattr(event, "slot") else event
        for event in happened
    ]


def report_changes(host: int, epoch: int, changes: Iterable[SlotChange]) -> list[Event]:
    """The verdicts that were new and the move itself, slot by slot."""
    happened: list[Event] = []
    for change in changes:
        before = change.before
        after = change.after
        for gate in after.gates:
            if gate not in before.gates:
                judged = events.GateJudged(
                    host=host,
                    epoch=epoch,
                    slot=change.slot_id,
                    gate=gate.name,
                    measured=gate.measured,
                    needed=gate.needed,
                    verdict=gate.verdict.value,
                    reason=gate.reason,
                )
                happened.append(judged)
        moved = events.StageChanged(
            host=host,
            epoch=epoch,
            slot=change.slot_id,
            before=before.stage.name,
            after=after.stage.name,
            blueprint=after.blueprint_id or before.blueprint_id,
            alpha=after.alpha,
        )
        happened.append(moved)
    return happened


def report_seeds(
    host: int, epoch: int, reports: Mapping[str, SeedStateReport]
) -> list[events.SeedMeasured]:
    """Every live seed as it stands after an epoch."""
    return [
        events.SeedMeasured(
            host=host,
            epoch=epoch,
            slot=slot_id,
            stage=report.stage.name,
            blueprint=report.blueprint_id,
            alpha=report.alpha,
            age=report.seed_age_epochs,
            params=report.metrics.seed_param_count,
            contribution=finite(report.metrics.counterfactual_contribution),
            standard_error=finite(report.metrics.counterfactual_standard_error),
        )
        for slot_id, report in reports.items()
        if report.is_live
    ]


def report_fossils(
    host: int, epoch: int, verdicts: Iterable[FossilVerdict]
) -> list[events.FossilJudged]:
    """What late pruning found, fossil by fossil."""
    return [
        events.FossilJudged(
            host=host,
            epoch=epoch,
            slot=verdict.slot_id,
            blueprint=verdict.blueprint_id,
            contribution=None if verdict.contribution is None else verdict.contribution.mean,
            standard_error=(
                None if verdict.contribution is None else verdict.contribution.standard_error
            ),
            is_kept=verdict.is_kept,
        )
        for verdict in verdicts
    ]


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
    return HostFacts(
        space=model.space,
        costs=model.costs,
        host_params=model.host_params,
        budget=model.budget,
        horizon=epochs,
        number=number,
        prices={slot_id: model.slot(slot_id).prices for slot_id in model.slot_config.slot_ids},
    )


def decision_flops(policy: Policy) -> int:
    """FLOPs of one decision about one host; a rule has no network, and is free."""
    return policy.network.decision_flops if isinstance(policy, NetworkPolicy) else 0
