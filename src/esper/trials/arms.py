"""One arm of a comparison:

a policy's whole episode on a set of host seeds, from first epoch to harvested networks.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from esper.episodes import Episodes, decision_flops, facts_of
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import has_gate
from esper.leyline.errors import IllegalActionError, SettingError
from esper.leyline.factored_actions import OP_WAIT, Choice
from esper.leyline.legality import GrowthView
from esper.runtime.host import HostRun
from esper.runtime.population import FinalScore, Population, memory_errors
from esper.runtime.tasks.task import Task
from esper.tamiyo.masks import compute_batch_masks, only_waiting
from esper.tamiyo.observation import observe
from esper.tamiyo.policies import NetworkPolicy, Policy
from esper.tamiyo.policy_names import make_policy
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import SignalTracker
from esper.telemetry.events import ActionRefused, ArmFinished, Event, HostRolledBack, StageChanged

Planting = tuple[str, str, str]  # (slot, blueprint, blend)
Populate = Callable[[Task, Sequence[int]], Population]
Watch = Callable[[int, Sequence[Event]], None]  # is given an epoch and what happened in it
Say = Callable[[str], None]  # is given a line for people


class Stopped(Exception):  # noqa: N818  # nobody made a mistake
    """Somebody asked to stop; `epochs` epochs of a run, or the finished arms of a comparison, are
    saved.
    """

    def __init__(self, epochs: int = 0):
        self.epochs = epochs


@dataclass(frozen=True)
class Entry:
    """One host of a comparison: where it starts and who decides about it."""

    arm: str
    seed: int
    policy: str | Callable[[HostFacts], Policy]
    built_in: tuple[Planting, ...] = ()  # what is part of the network from its first step on
    weights: Mapping[str, Tensor] | None = None  # a trained host to go on from; None is a fresh one


@dataclass(frozen=True)
class ArmRun:
    result: ArmFinished
    events: tuple[Event, ...]
    network: nn.Module
    peak_params: int
    architecture: tuple[Planting, ...]  # fossils, in the order of slots


@memory_errors()
def run_entries(
    task: Task,
    entries: Sequence[Entry],
    populate: Populate = Population,
    *,
    watch: Watch = lambda epoch, events: None,
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
        watch(epoch, [event for of_host in happened for event in of_host])
        for own, new in zip(events, happened, strict=True):
            own.extend(new)
    finals = population.final_scores()
    seconds = (time.perf_counter() - started) / len(entries)
    runs = []
    for entry, run, own, start, final in zip(
        entries, population.runs, events, start_params, finals, strict=True
    ):
        stages = Counter(event.after for event in own if isinstance(event, StageChanged))
        result = arm_result(entry.arm, run, final, stages, start_params=start, seconds=seconds)
        runs.append(
            ArmRun(
                result,
                tuple(own),
                final.network,
                run.ledger.peak_params,
                architecture_of(run.model),
            )
        )
    return runs


def arm_result(
    arm: str,
    run: HostRun,
    final: FinalScore,
    stages: Mapping[str, int],
    *,
    start_params: int,
    seconds: float,
) -> ArmFinished:
    """What one episode came to; `stages` counts how often each began.

    What is not there any more counts as culled.
    """
    kept = sum(len(slot.fossils) - slot.built_in for slot in run.slots)
    here = kept + sum(slot.seed is not None for slot in run.slots)
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
        germinated=stages.get("GERMINATED", 0),
        fossilized=kept,
        culled=stages.get("GERMINATED", 0) - here,
    )


def prepare_host(population: Population, host: int, entry: Entry) -> None:
    """Give a fresh host the weights and the fossils that it starts with."""
    run = population.runs[host]
    if entry.weights is not None:
        run.model.host.load_state_dict(dict(entry.weights))
    for planting in entry.built_in:
        run.model.build_in(*planting)
    run.prime()
    run.ledger.peak_params = run.model.total_params
    population.governors[host].keep()


def architecture_of(model: MorphogeneticModel) -> tuple[Planting, ...]:
    """What was grown for good, slot by slot."""
    slots = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids]
    grown = [
        (slot.slot_id, *each)
        for slot in slots
        for each in zip(slot.fossil_names, slot.fossils, strict=True)
    ]
    return tuple(
        (slot_id, name, "gated" if has_gate(fossil) else "linear")
        for slot_id, name, fossil in grown
    )


class Decider:
    """One host's policy, what it remembers, and what it sees."""

    def __init__(self, policy: Policy, tracker: SignalTracker, arm: str = "?"):
        self.policy, self.tracker, self.arm = policy, tracker, arm
        self.memory: Any = None
        self.recalled: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # what is wrong with it may show late
        )
        self.is_plan = getattr(
            policy, "is_plan", False
        )  # whether it may want several ops in one decision
        self.flops = decision_flops(policy.network if isinstance(policy, NetworkPolicy) else None)

    def decide(self, view: GrowthView, may_act: bool, is_again: bool = False) -> Choice:
        """The raw indices of this host's next action; WAIT where it may not act, or `is_again` and
        nothing is left.
        """
        policy, masks = self.policy, compute_batch_masks([view])
        masks = masks if may_act else only_waiting(masks)
        observation = (
            observe([self.tracker], policy.reads_telemetry)
            if isinstance(policy, NetworkPolicy)
            else None
        )
        with self.recalled():
            memory = policy.ask_again(self.memory) if is_again else self.memory  # type: ignore[attr-defined]  # of plans
            actions, self.memory = policy.decide(observation, masks, [view.reports], memory)
        op, slot, blueprint, blend = (int(index) for index in actions[0])
        return op, slot, blueprint, blend


def make_decider(
    episodes: Episodes, host: int, arm: str | Callable[[HostFacts], Policy], name: str = ""
) -> Decider:
    """The policy of one host, by name or built for its facts, with nothing remembered yet; `name`
    is for errors.
    """
    run = episodes.population.runs[host]
    facts = facts_of(run.model, run.task.epochs, run.seed)
    policy = make_policy(arm, facts) if isinstance(arm, str) else arm(facts)
    run.is_static = arm == "never"
    return Decider(policy, episodes.trackers[host], name or str(arm))


def play_epoch(episodes: Episodes, deciders: Sequence[Decider]) -> list[list[Event]]:
    """Train, measure, decide, act, tick: one epoch of every host, told as events."""
    happened = episodes.train()
    act_on_epoch(episodes, deciders, happened)
    return happened


def carry_out(episodes: Episodes, host: int, arm: str, choice: Choice) -> list[Event]:
    """Act for an arm.

    What the masks did not allow is its policy's mistake: it must not count as waiting.
    """
    run, happened, reason = episodes.population.runs[host], list[Event](), ""
    try:
        happened = episodes.act(host, choice)
    except SettingError as problem:  # outside the space
        reason = str(problem)
    if reason := reason or next(
        (event.reason for event in happened if isinstance(event, ActionRefused)), ""
    ):
        where = f"arm {arm!r}, host {host} (random seed {run.seed}), epoch {run.epoch}"
        raise IllegalActionError(
            f"{where}: {choice} is not possible: {reason} Choose what the masks allow."
        )
    return happened


def act_on_epoch(
    episodes: Episodes, deciders: Sequence[Decider], happened: list[list[Event]]
) -> None:
    """Decide, act and tick after an epoch that was measured; what happens is added to each host's
    events.
    """
    for host, (decider, view) in enumerate(zip(deciders, episodes.views, strict=True)):
        is_last = (
            episodes.population.runs[host].epoch >= episodes.population.task.epochs
        )  # nobody would train it
        # of a host that was rolled back nothing was measured as it is now
        may_act = not is_last and not any(
            isinstance(event, HostRolledBack) for event in happened[host]
        )
        started = time.perf_counter()
        choice = decider.decide(view, may_act)
        while may_act and choice[0] != OP_WAIT:
            happened[host] += carry_out(episodes, host, decider.arm, choice)
            if not decider.is_plan:
                break
            choice = decider.decide(
                episodes.population.runs[host].model.view(), may_act, is_again=True
            )
        episodes.charge_policy(
            [host], 0 if is_last else decider.flops, time.perf_counter() - started
        )
    for events, ticked in zip(happened, episodes.tick(), strict=True):
        events += ticked
