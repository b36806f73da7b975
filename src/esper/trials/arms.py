"""One arm of a comparison: a policy's whole episode on a set of host seeds.

It goes from the first epoch to the harvested networks.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.episodes import Episodes, ask_policy, decide, decision_flops, keepable
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import has_gate
from esper.leyline.errors import IllegalActionError, SettingError
from esper.leyline.factored_actions import OP_WAIT, Choice
from esper.leyline.legality import GrowthView
from esper.runtime.host import HostRun
from esper.runtime.population import FinalScore, Population, memory_errors
from esper.runtime.tasks.families import Variation
from esper.runtime.tasks.task import Task
from esper.storage.runfolder import label_policies
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import Actions, Policy, Reports
from esper.tamiyo.policy_names import Rule, build_policy, parse
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import Signals, SignalTracker
from esper.telemetry.events import ActionRefused, ArmFinished, Event, HostRolledBack, StageChanged

Populate = Callable[[Task, Sequence[int]], Population]
"""Makes the hosts of a task, one for each random seed."""

Watch = Callable[[int, Sequence[Event]], None]
"""Is called after every epoch, with its number and what happened in it."""

Say = Callable[[str], None]
"""Is called with a line for people."""


class Planting(NamedTuple):
    """Something that grew: where, what, and how it is blended in."""

    slot: str
    blueprint: str
    blend: str


class Stopped(Exception):  # noqa: N818  # it reports no mistake
    """The user asked to stop.

    `epochs` epochs of a run, or the finished arms of a comparison, are saved.
    """

    def __init__(self, epochs: int = 0):
        self.epochs = epochs


@dataclass(frozen=True)
class Entry:
    """One host of a comparison: where it starts and what decides about it."""

    arm: str
    seed: int
    policy: str | Callable[[HostFacts], Policy]
    built_in: tuple[Planting, ...] = ()  # what is part of the network from its first step on
    # a trained host to continue from; None is a fresh one
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class ArmRun:
    """What one entry left behind."""

    result: ArmFinished
    events: tuple[Event, ...]
    network: nn.Module
    peak_params: int
    architecture: tuple[Planting, ...]  # fossils, in the order of slots
    variation: Variation | None = None  # what a host that differs from others has drawn


@memory_errors()
def run_entries(
    task: Task,
    entries: Sequence[Entry],
    populate: Populate = Population,
    *,
    watch: Watch = lambda epoch, events: None,
    say: Say = lambda line: None,
) -> list[ArmRun]:
    """Whole episodes side by side in one population, each under its own policy."""
    started = time.perf_counter()
    population = populate(task, [entry.seed for entry in entries])
    for host, entry in enumerate(entries):
        prepare_host(population, host, entry)
    start_params = [run.model.total_params for run in population.runs]
    episodes = Episodes(population)
    deciders = [
        make_decider(episodes, host, entry.policy, entry.arm) for host, entry in enumerate(entries)
    ]
    events: list[list[Event]] = [[] for _ in entries]
    for epoch in range(task.epochs):
        happened = play_epoch(episodes, deciders)
        watch(epoch, list(chain.from_iterable(happened)))
        for events_of_host, new_events in zip(events, happened, strict=True):
            events_of_host.extend(new_events)
    for arm in dict.fromkeys(entry.arm for entry in entries):
        runs = [
            run for run, entry in zip(population.runs, entries, strict=True) if entry.arm == arm
        ]
        for line in describe_undecided(arm, runs):
            say(line)
    finals = population.final_scores()
    seconds = (time.perf_counter() - started) / len(entries)
    arm_runs = []
    for host, entry in enumerate(entries):
        run = population.runs[host]
        final = finals[host]
        stages = Counter(event.after for event in events[host] if isinstance(event, StageChanged))
        result = arm_result(
            entry.arm, run, final, stages, start_params=start_params[host], seconds=seconds
        )
        arm_run = ArmRun(
            result=result,
            events=tuple(events[host]),
            network=final.network,
            peak_params=run.ledger.peak_params,
            architecture=architecture_of(run.model),
            variation=run.variation,
        )
        arm_runs.append(arm_run)
    return arm_runs


def arm_result(
    arm: str,
    run: HostRun,
    final: FinalScore,
    stages: Mapping[str, int],
    *,
    start_params: int,
    seconds: float,
) -> ArmFinished:
    """What one episode came to; `stages` counts how often each stage began.

    A seed that is not there any more counts as culled.
    """
    germinated = stages.get("GERMINATED", 0)
    kept = sum(len(slot.fossils) - slot.built_in for slot in run.slots)
    growing = sum(slot.seed is not None for slot in run.slots)
    return ArmFinished(
        arm=arm,
        seed=run.seed,
        epochs=run.task.epochs,
        start_params=start_params,
        final_params=final.params,
        validation_accuracy=final.validation_accuracy,
        test_accuracy=final.accuracy,
        test_loss=final.loss,
        flops=run.ledger.flops,
        seconds=seconds,
        germinated=germinated,
        fossilized=kept,
        culled=germinated - kept - growing,
    )


def prepare_host(population: Population, host: int, entry: Entry) -> None:
    """Give a fresh host the weights and the fossils that it starts with."""
    run = population.runs[host]
    if entry.weights is not None:
        run.model.host.load_state_dict(dict(entry.weights))
    for slot_id, blueprint, blend in entry.built_in:
        run.model.build_in(slot_id, blueprint, blend)
    run.prime()
    run.ledger.peak_params = run.model.total_params
    population.governors[host].keep()


def describe_undecided(arm: str, runs: Sequence[HostRun]) -> list[str]:
    """A line that names what an arm left on probation, host by host, if there is anything.

    The final networks are without it. No line names seeds that were planted too late to be judged.
    """
    undecided: list[str] = []
    for run in runs:
        for choice in keepable(run.model.view()):
            slot_id = run.model.slot_config.slot_ids[choice[1]]
            state = run.model.slot(slot_id).state
            assert state.contribution is not None
            undecided.append(
                f"{state.blueprint_id} in {slot_id} of random seed {run.seed} "
                f"({state.contribution.mean:+.2g})"
            )
    if not undecided:
        return []
    label = label_policies([arm])[arm]
    return [f"{label} left undecided, so the final networks are without: {', '.join(undecided)}"]


def architecture_of(model: MorphogeneticModel) -> tuple[Planting, ...]:
    """What was grown for good, slot by slot."""
    plantings = []
    for slot_id in model.slot_config.slot_ids:
        slot = model.slot(slot_id)
        for name, fossil in zip(slot.fossil_names, slot.fossils, strict=True):
            blend = "gated" if has_gate(fossil) else "linear"
            plantings.append(Planting(slot=slot_id, blueprint=name, blend=blend))
    return tuple(plantings)


class Decider:
    """One host's policy, what it remembers, and what it sees.

    `arm` names it in errors.
    """

    def __init__(self, policy: Policy, episodes: Episodes, host: int, arm: str = "?"):
        self.policy = policy
        self.episodes = episodes
        self.host = host
        self.arm = arm
        self.memory: Any = None
        # around every decision: what is wrong with a restored memory may show late
        self.recalled: Callable[[], AbstractContextManager[None]] = nullcontext
        self.flops = decision_flops(policy)

    @property
    def tracker(self) -> SignalTracker:
        """What follows its host."""
        return self.episodes.trackers[self.host]

    def decide(
        self, view: GrowthView, look: Callable[[], GrowthView], may_act: bool
    ) -> Iterator[Choice]:
        """What is to be done to the host, op by op; act on each before taking the next.

        Where the policy may not act, it is a rule's standing order at most. `look` returns the
        host's view after an op.
        """
        decisions = decide(
            self.policy,
            view,
            self.memory,
            self.tracker.signals,
            look=look,
            ask=partial(self._ask, view),
            may_act=may_act,
        )
        for decision in decisions:
            self.memory = decision.memory
            if decision.choice[0] != OP_WAIT:
                yield decision.choice

    def _ask(
        self,
        view: GrowthView,
        masks: Masks,
        reports: Sequence[Reports],
        memory: Any,
        signals: Sequence[Signals],
    ) -> tuple[Actions, Any]:
        """Ask the policy, with an observation if it reads one."""
        ask = ask_policy(self.policy, partial(self.episodes.sight, self.host, view))
        with self.recalled():
            return ask(masks, reports, memory, signals)


def make_decider(
    episodes: Episodes, host: int, policy: str | Callable[[HostFacts], Policy], arm: str = ""
) -> Decider:
    """The policy of one host, by name or built for its facts, with nothing remembered yet.

    `arm` names it in errors; by default that is the name of the policy.
    """
    run = episodes.population.runs[host]
    name = parse(policy) if isinstance(policy, str) else None
    run.is_static = isinstance(name, Rule) and name.is_static
    built = build_policy(policy, episodes.facts[host])
    if not getattr(built, "keeps_measured", False):
        episodes.population.expect_undecided([host])
    return Decider(built, episodes, host, arm or str(policy))


def play_epoch(episodes: Episodes, deciders: Sequence[Decider]) -> list[list[Event]]:
    """One epoch of every host: train, measure, decide, act, tick; what happened to each."""
    happened = episodes.train()
    act_on_epoch(episodes, deciders, happened)
    return happened


def carry_out(episodes: Episodes, host: int, arm: str, choice: Choice) -> list[Event]:
    """Act for an arm.

    What the masks did not allow is its policy's mistake: it must not count as waiting.
    """
    reasons: list[str] = []
    happened: list[Event] = []
    try:
        happened = episodes.act(host, choice)
        reasons += [event.reason for event in happened if isinstance(event, ActionRefused)]
    except SettingError as problem:  # outside the space
        reasons.append(str(problem))
    if reasons:
        run = episodes.population.runs[host]
        raise IllegalActionError(
            f"arm {arm!r}, host {host} (random seed {run.seed}), epoch {run.epoch}: "
            f"{choice} is not possible: {reasons[0]} Choose what the masks allow."
        )
    return happened


def act_on_epoch(
    episodes: Episodes, deciders: Sequence[Decider], happened: list[list[Event]]
) -> None:
    """Decide, act and tick after an epoch that was measured.

    What happens is added to each host's events.
    """
    for host, (decider, view) in enumerate(zip(deciders, episodes.views, strict=True)):
        run = episodes.population.runs[host]
        # what is planted after the last epoch would never be trained
        is_last = run.epoch >= episodes.population.task.epochs
        # of a host that was rolled back nothing was measured as it is now
        was_rolled_back = any(isinstance(event, HostRolledBack) for event in happened[host])
        may_act = not is_last and not was_rolled_back
        started = time.perf_counter()
        for choice in decider.decide(view, run.model.view, may_act):
            happened[host] += carry_out(episodes, host, decider.arm, choice)
        seconds = time.perf_counter() - started
        episodes.charge_policy([host], 0 if is_last else decider.flops, seconds)
    for events, ticked in zip(happened, episodes.tick(), strict=True):
        events += ticked
