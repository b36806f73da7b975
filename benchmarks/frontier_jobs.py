"""How `frontier.py` plays a job: networks of fixed depth and grown ones on a budget of compute.

A job of fixed depth is one trunk at a constant rate; for each compute a decay is forked from it.
Its row has the FLOPs and seconds of trunk and decay together, as if it had been run alone. Every
other job is one episode, as `esper compare` plays it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from frontier_arms import Job, Setup, places_of, policy_of, read_plan, settings_of, task_of

from esper.episodes import Episodes
from esper.kasmina.slot import count_parameters
from esper.runtime.clock import ComputeClock
from esper.runtime.population import FinalScore, Population
from esper.runtime.splits import SealedSplit, Splits
from esper.telemetry.events import ActionTaken, Event, HostRolledBack
from esper.trials.arms import Entry, make_decider, run_entries


def load_splits(setup: Setup, root: Any) -> Splits:
    """The task's data; of the test split as much as final networks are scored on."""
    splits = setup.task.load(root)
    test = splits.test.open_for_final_report()
    return replace(splits, test=SealedSplit(test.first(min(setup.tested, len(test)))))


def play(setup: Setup, job: Job, splits: Splits, device: str, amp: str) -> list[dict[str, Any]]:
    """The rows of a job: one for each compute."""
    populate = partial(Population, devices=(device,), amp=amp, splits=splits)
    if job.arm.is_static:
        return list(_play_forks(setup, job, populate))
    return [_play_episode(setup, job, compute, populate) for compute in job.computes]


def _play_forks(
    setup: Setup, job: Job, populate: Callable[..., Population]
) -> Iterator[dict[str, Any]]:
    tasks = [task_of(setup, job.arm, compute) for compute in sorted(job.computes)]
    population = populate(
        tasks[-1], [job.seed]
    )  # the largest budget has the most steps per decision
    episodes, run = Episodes(population), population.runs[0]
    make_decider(episodes, 0, "never")
    events: list[Event] = []
    for task in tasks:
        clock = ComputeClock(task, run.flops, run.splits.train)
        run.home = replace(run.home, clock=clock)
        # the decision in which the trunk stands by this budget: the first that still has a step to
        # take
        run.epoch = task.epochs * run.ledger.flops // clock.budget
        while run.epoch and not _has_steps(clock, run):
            run.epoch += 1
        while run.epoch < round((1 - task.decay) * task.epochs):
            events += episodes.train()[0]
        trunk, told = population.snapshot(), len(events)
        while run.epoch < task.epochs:
            events += episodes.train()[0]
        score = population.final_scores()[0]
        population.shared.is_over = False  # this fork's episode is over, and the trunk's is not
        yield _row(task.compute, population, score, events)
        del events[told:]
        population.restore(trunk)


def _has_steps(clock: ComputeClock, run: Any) -> bool:
    clock.plan(run)
    return run.plan.steps > 0


def _play_episode(
    setup: Setup, job: Job, compute: float, populate: Callable[..., Population]
) -> dict[str, Any]:
    arm, task, kept = job.arm, task_of(setup, job.arm, compute), list[Population]()

    def keep(*given: Any) -> Population:
        kept.append(populate(*given))
        return kept[-1]

    built_in: tuple[tuple[str, str, str], ...] = ()
    if arm.shape.startswith("tiled "):
        before, after = map(int, arm.shape.removeprefix("tiled ").split("-"))
        built_in = tuple(
            (slot, arm.kind or setup.kind, "linear")
            for slot in places_of(setup, arm, before, after)
        )
    entry = Entry(arm.name, job.seed, policy_of(setup, arm), built_in=built_in)
    (run,) = run_entries(task, [entry], keep)
    result = run.result
    score = FinalScore(
        result.test_accuracy, result.test_loss, result.validation_accuracy, 0, run.network
    )
    plantings = [
        event for event in run.events if isinstance(event, ActionTaken) and event.op == "GERMINATE"
    ]
    row = _row(compute, kept[0], score, run.events)
    planned = (
        sum(len(places_of(setup, arm, *sizes)) for _, *sizes in read_plan(arm.shape))
        if "@" in arm.shape
        else None
    )
    return row | {
        "planted": dict(Counter(str(event.epoch) for event in plantings)),
        "kept": result.fossilized,
        "culled": result.culled,
        "off_plan": int(planned not in (None, len(plantings))),
    }


def _row(
    compute: float, population: Population, score: FinalScore, events: Sequence[Event]
) -> dict[str, Any]:
    """What an episode came to and what it cost; seconds are without compiling."""
    run = population.runs[0]
    clock = run.clock
    assert clock is not None
    costs = run.ledger.phases.values()
    return {
        "compute": compute,
        "used": run.ledger.flops / clock.budget * compute,
        "loss": score.loss,
        "error": 1.0 - score.accuracy,
        "flops": run.ledger.flops,
        "seconds": sum(cost.seconds for cost in costs),
        "examples": run.ledger.phases["training"].examples,
        "params": count_parameters(score.network),
        "rolled_back": sum(isinstance(event, HostRolledBack) for event in events),
    }


def run_job(setup: Setup, job: Job, splits: Splits, device: str, amp: str) -> dict[str, Any]:
    """A job's record, without where and when it was run."""
    started = time.perf_counter()
    rows = play(setup, job, splits, device, amp)
    return {
        "settings": settings_of(setup, job),
        "rows": rows,
        "wall": time.perf_counter() - started,
    }
