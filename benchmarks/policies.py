"""Policies taught under open-ended probation, and what they are worth on hosts they never saw.

    F="python benchmarks/policies.py --keep runs/policies --workers 16 --minutes 8"
    $F teach                    # again until it says that nothing is left
    $F judge
    $F report --out benchmarks/results/policies.json
    $F show --lessons shuffled_3

Every job leaves its result in --keep, and what is there is not made again. A policy is taught in a
run folder of `esper ppo`, which is resumed; with `--minutes` it stops in time. `teach` and `judge`
take `--list`, which says what is left. A policy is judged after its last round, against:

- the rule (heuristic) and the host left alone (never),
- drawn: the policy draws its choices, as it did while it learned, in place of the likeliest,
- plan: its own usual actions, without reading anything,
- keeps all: it plants, everything measured is kept,
- blinded: it sees other hosts' means in place of what was measured.

`pairs_N` and `shuffled_N` (`policies_tasks.py`) ask what credit by slot is worth: rewards of the
family `contribution` against `lead` at 3 and at 8 slots. `curves` says it by the trainings alone,
which need no judging. Host seeds that choose plans and means never judge.
`show` plays the first judged host again on which the policy culled a seed that was measured to harm
and kept one that was measured to help, and leaves that run in KEEP/shown for `esper report`.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from policies_jobs import (
    CHUNK,
    JUDGING,
    LESSONS,
    RULES,
    Pupil,
    choose,
    judge,
    keep_json,
    path_of_choice,
    path_of_judgement,
    teach,
)
from policies_report import report, report_curves, show_run
from records import add_options, claim

Job = tuple[str, Callable[[], str]]
"""What it is called, and the work."""
LEAST_PIECE = 20.0
"""Seconds below which no piece of a lesson is begun."""


def main() -> None:
    options = read_options()
    if options.stage == "report":
        claim(options)
        report(pupils_of(options), options)
        return
    if options.stage == "curves":
        claim(options)
        report_curves(pupils_of(options), options)
        return
    if options.stage == "show":
        show_run(pupils_of(options), options)
        return
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else None
    stages = [teaching] if options.stage == "teach" else [choosing, judging]
    for stage in stages:
        jobs = list(stage(options, deadline))
        if options.list:
            print("\n".join(name for name, _ in jobs))
        else:
            run(jobs, options.workers, deadline)
    left = [name for stage in stages for name, _ in stage(options, deadline)]
    print(f"{len(left)} left" if left else "nothing is left")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("teach", "judge", "report", "curves", "show"))
    parser.add_argument("--lessons", nargs="+", choices=LESSONS, default=list(LESSONS))
    parser.add_argument("--families", nargs="+", help="of rewards, instead of the lesson's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the training")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--hosts", type=int, default=len(JUDGING), help="judging seeds to play")
    parser.add_argument("--rounds", type=int, help="fewer rounds of teaching, to try the script")
    parser.add_argument("--keep", type=Path, default=Path("runs/policies"))
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="stop in time, and begin nothing late")
    parser.add_argument("--list", action="store_true", help="say what is left and leave")
    add_options(parser)
    return parser.parse_args()


def pupils_of(options: argparse.Namespace) -> list[Pupil]:
    """The policies that are asked for; those that take longest come first."""
    return [
        Pupil(lesson, family, seed)
        for lesson in options.lessons
        for seed in options.seeds
        for family in options.families or LESSONS[lesson].families
    ]


def teaching(options: argparse.Namespace, deadline: float | None) -> Iterator[Job]:
    """A piece of each training that is not over."""
    for pupil in pupils_of(options):
        if not pupil.is_taught(options.keep):
            yield pupil.name, partial(teach, pupil, options.keep, options.rounds, deadline)


def choosing(options: argparse.Namespace, deadline: float | None) -> Iterator[Job]:
    """Plans and means, of which arms are made, of the policies whose training is over."""
    for pupil in pupils_of(options):
        path = path_of_choice(pupil, options.keep)
        if pupil.is_taught(options.keep) and not path.is_file():
            yield str(path), partial(keep_json, path, partial(choose, pupil, options.keep))


def judging(options: argparse.Namespace, deadline: float | None) -> Iterator[Job]:
    """Every arm on every chunk of judging seeds; a rule's are the same for all policies."""
    begun: set[Path] = set()
    seeds = JUDGING[: options.hosts]
    for pupil in pupils_of(options):
        if not pupil.is_taught(options.keep):
            continue
        for arm in options.arms or LESSONS[pupil.lesson].arms:
            for start in range(0, len(seeds), CHUNK):
                chunk = seeds[start : start + CHUNK]
                path = path_of_judgement(pupil, arm, chunk.start, options.keep)
                is_there = path.is_file() or path in begun
                is_ready = arm in RULES or path_of_choice(pupil, options.keep).is_file()
                if is_there or not is_ready:
                    continue
                begun.add(path)
                work = partial(judge, pupil, arm, chunk, options.keep)
                yield str(path), partial(keep_json, path, work)


def run(jobs: Sequence[Job], workers: int, deadline: float | None) -> None:
    """Do the jobs, several at a time where there are workers; none begins late."""
    if workers == 1:
        for _, work in jobs:
            print(in_time(work, deadline), flush=True)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(in_time, work, deadline) for _, work in jobs]
        for done in as_completed(pending):
            print(done.result(), flush=True)


def in_time(work: Callable[[], str], deadline: float | None) -> str:
    """Do a job, unless it would begin late; clocks of processes of one machine agree."""
    if deadline is not None and deadline - time.monotonic() < LEAST_PIECE:
        return "no time is left"
    return work()


if __name__ == "__main__":
    sys.exit(main())
