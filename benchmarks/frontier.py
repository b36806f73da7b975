"""Does growing pay? Held-out loss against compute: networks of every fixed depth beside grown ones.

    nvidia-cuda-mps-control -d  # on a GPU, so that processes share it well
    F="python benchmarks/frontier.py --again --device cuda:0 --out WORK"  # and --workers 5 --minutes 9, but for seconds
    $F --stage tune --rates 0.125 0.25 0.5 1 2
    $F --stage tune --depths 1 2 3 4 6 --rates 1 1.5 2
    $F --stage tune --depths 4 5 --rates 0.7 --plans 2-4@30
    $F --stage tune --depths 5 --rates 1 1.5 --plans "3-5@30 last"
    $F --stage tune --depths 4 5 --rates 1 --plans "3-5@30 last" --seeds 3 --warmup 4
    $F --stage plans --seeds 1
    $F --stage plans --seeds 2 --skip 1 --arms 2-4@15 2-4@30 2-4-6@20,50 "3-5@30 last" "3-5@50 last" 3-6@30 "4-5@50 end"
    $F --stage static --depths 2 3 8 --seeds 1
    $F --stage static --depths 4 5 6 --seeds 5
    $F --stage static --depths 3 --rates 1.5 --seeds 5
    $F --stage static --depths 1 --rates 1.5 --seeds 1
    $F --stage grown --seeds 1 --arms 2-4-8@30,70{," copy_zero"," random_block_zero"} 2-8@30 2-8@50 4-8@50
    $F --stage grown --arms heuristic --computes 0.6 --seeds 5
    $F --stage grown --arms heuristic --computes 1 --seeds 3
    $F --stage grown --plans "3-5@30 last" --arms "3-5@30 last" --seeds 5
    $F --stage grown --plans "3-5@30 last" --arms "3-5@30 copy_zero last" "3-5@30 random_block_zero last" --seeds 2
    $F --stage why --plans "3-5@30 last" --arms "tiled 3-5 last" --seeds 4
    $F --stage why --plans "3-5@30 last" --arms "3-5@30 copy_elsewhere last" --seeds 3
    $F --stage static --depths 4 5 --computes 0.6 1 --seeds 10 --skip 5
    $F --stage static --depths 3 --rates 1.5 --computes 0.6 1 --seeds 10 --skip 5
    $F --stage grown --plans "3-5@30 last" 2-4@15 --arms "3-5@30 last" 2-4@15 --computes 0.6 1 --seeds 10 --skip 5
    $F --stage why --plans "3-5@30 last" --arms "3-5@30 last decay=0.4" "3-5@30 last decay=0.1" --seeds 2
    $F --stage why --depths 4 --arms "static 4 decay=0.4" "static 4 decay=0.1" --seeds 2
    $F --stage why --depths 3 --rates 1.5 --arms "static 3 decay=0.4 rate=1.5" "static 3 decay=0.1 rate=1.5" --seeds 2
    $F --stage grown --plans "3-5@30 last" --arms "3-5@30 last ramp=1" "3-5@30 last ramp=3" --seeds 2
    $F --stage seconds --depths 2 3 4 5 6 8 --plans "3-5@30 last" 2-4@15 --computes 0.12 --seeds 1
    $F --stage tune --task code_large --depths 4 --plans "3-5@30 last" --rates 0.25 0.5 1 --computes 0.3
    $F --stage large --depths 3 4 6 --plans "3-5@30 last" --rates 0.5 --computes 0.3 --seeds 2
    $F --stage large --depths 8 12 --plans "4-6@30 last" --rates 0.5 --computes 0.3 --seeds 1
    resnet="$F --task cifar10_resnet --data-root DATA"
    $resnet --stage tune --depths 2 4 --plans 2-4@30 --rates 0.25 0.5 1 2 --computes 0.6
    $resnet --stage static --depths 2 3 4 6 --computes 0.6 1 --seeds 2
    $resnet --stage grown --plans 2-6@30 2-4@30 --arms 2-6@30 2-4@30 --seeds 2
    $resnet --stage static --depths 3 4 --computes 0.6 --seeds 2 --rates 0.5
    $resnet --stage grown --plans 2-4@30 --arms "2-4@30 rate=0.5" --computes 0.6 1 --seeds 2 --rates 0.5
    $resnet --stage static --depths 3 4 --computes 1 --seeds 2 --rates 0.5
    $resnet --stage grown --arms "heuristic rate=0.5" --computes 0.6 1 --seeds 1 --rates 0.5
    $resnet --stage seconds --depths 2 3 4 6 --plans 2-4@30 --computes 0.12 --seeds 1
    $F --report --publish

1.0 of compute is the deepest network on 3,000 steps of 64 x 256 bytes (`code`), or on 40 passes
over the images (`cifar10_resnet`). Every arm has the product's compute clock, its ledger and its
learning-rate plan: constant, with the last fifth of the budget falling to zero. A static depth is
one trunk with a decay forked off for each compute; grown arms are schedules that `esper run` takes
too. `--stage tune` has seeds of its own, and so has `--stage plans`, which chooses a plan; the
others are for what is claimed. Seconds are honest where one job has the machine to itself: that is
`--stage seconds`. Each job leaves one file in --out. A job that is there or in
benchmarks/results/frontier.json is not run again; `--again` leaves that file aside. `--list` says
what would run and how long it may take; with `--minutes` no job is begun that would not end in
time. `--report` writes tables, JSON and figures of all these jobs to OUT/report, or with
`--publish` to the project's own folders, in place of what is there.
"""

import argparse
import datetime
import gc
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_arms import FIRST_SEED, Job, jobs_of, settings_of, setups
from frontier_jobs import load_splits, run_job
from frontier_report import report
from hardware import hardware

from esper.runtime.splits import Splits
from esper.simic.team import code_digest
from esper.storage.files import write_durably

COMMITTED = Path(__file__).parent / "results" / "frontier.json"
"""The committed report; it holds the jobs that it was made from."""
STAGES = ("tune", "plans", "static", "grown", "why", "large", "seconds")
LOADING, START = 30.0, 8.0
"""Seconds that a process takes to load and compile, and a job to be built, captured and scored."""
_loaded: dict[str, Splits] = {}
"""Data by setup, once for all jobs of a process."""


def read_options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[])
    parser.add_argument(
        "--task", nargs="+", choices=("code", "code_large", "cifar10_resnet"), default=["code"]
    )
    parser.add_argument(
        "--seeds", type=int, help="host seeds; 1 to tune or time, 2 to choose a plan, else 5"
    )
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first seeds")
    parser.add_argument(
        "--depths", nargs="+", type=int, help="only static networks of so many blocks"
    )
    parser.add_argument("--computes", nargs="+", type=float)
    parser.add_argument("--arms", nargs="+", help="only arms of these names, as --list has them")
    parser.add_argument(
        "--plans", nargs="+", help="plans in place of the four, as --stage plans --list has them"
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, help="times the task's learning rate; 1, or four to tune"
    )
    parser.add_argument(
        "--warmup", type=float, default=1.0, help="times the warm-up that every run has"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="begin no job that would end later")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", choices=("off", "bf16"), help="bf16 on a GPU, else off")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of finished jobs")
    parser.add_argument("--list", action="store_true", help="say what would run, and leave")
    parser.add_argument(
        "--again", action="store_true", help="run, and report, without the committed jobs"
    )
    parser.add_argument(
        "--report", action="store_true", help="tables, JSON and figures, in OUT/report"
    )
    parser.add_argument(
        "--publish", action="store_true", help="replace the committed report and its figures"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="everything in small, to see whether it works"
    )
    options = parser.parse_args(given)
    options.amp = options.amp or ("bf16" if options.device.startswith("cuda") else "off")
    options.again = options.again or options.smoke
    if options.smoke and not options.stage:
        options.stage, options.task, options.seeds = (
            list(STAGES),
            ["code", "cifar10_resnet"],
            options.seeds or 1,
        )
    if not options.stage and not options.report:
        parser.error("name a --stage, or ask for the --report of what is there")
    if "seconds" in options.stage and options.workers > 1:
        parser.error(
            "--stage seconds times one job that has the machine to itself; leave --workers out"
        )
    return options


def chosen_jobs(options: argparse.Namespace) -> list[Job]:
    """What was asked for, stage by stage."""
    known, found = setups(options.smoke), list[Job]()
    for stage in options.stage:
        count = options.seeds or {"tune": 1, "plans": 2, "seconds": 1}.get(stage, 5)
        for name in ["code_large"] if stage == "large" else options.task:
            if name in known:
                setup = (
                    replace(known[name], plans=tuple(options.plans))
                    if options.plans
                    else known[name]
                )
                asked = (options.computes, options.depths, options.rates)
                seeds = range(options.skip, count)
                found += jobs_of(setup, stage, seeds, *asked, is_smoke=options.smoke)
    found = [replace(job, arm=replace(job.arm, warmup=options.warmup)) for job in found]
    if not options.arms:
        return found
    if unknown := set(options.arms) - {job.arm.name for job in found}:
        names = ", ".join(dict.fromkeys(job.arm.name for job in found))
        raise SystemExit(f"no arm is called {', '.join(sorted(unknown))}; there are: {names}")
    return [job for job in found if job.arm.name in options.arms]


def path_of(out: Path, job: Job) -> Path:
    return out / f"{job.key}.json"


def finished_jobs(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Records of finished jobs by key: the committed ones, and those of --out."""
    found: dict[str, dict[str, Any]] = {}
    if not options.again:
        found |= json.loads(COMMITTED.read_text(encoding="utf-8"))["jobs"]
    for path in options.out.glob("*.json"):
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def is_done(finished: Mapping[str, Mapping[str, Any]], job: Job) -> bool:
    """Whether the job is among the finished ones; one of other settings is an error."""
    if job.key not in finished:
        return False
    known = finished[job.key]["settings"]
    wanted = json.loads(json.dumps(settings_of(setups(job.is_smoke)[job.setup], job)))
    if differing := [key for key in wanted if known.get(key) != wanted[key]]:
        raise SystemExit(
            f"{job.key} was run with other settings ({', '.join(differing)}); choose another "
            "--out, and --again if it is a committed job."
        )
    return True


def paces_of(options: argparse.Namespace) -> dict[str, float]:
    """Seconds for 1.0 of compute by setup: as long as finished jobs took, else a guess for one H200."""
    found = {}
    finished = finished_jobs(options).values()
    for name, setup in setups(options.smoke).items():
        known = [
            max(1.0, record["wall"] - START) / record["units"] * options.workers / record["workers"]
            for record in finished
            if record["settings"]["setup"] == name
        ]
        found[name] = (
            statistics.median(known)
            if len(known) >= 4
            else setup.seconds * max(options.workers, 2) / 4
        )
    return found


def estimate(job: Job, paces: Mapping[str, float]) -> float:
    """Seconds that a job may take."""
    return START + job.units * paces[job.setup]


def work(job: Job, options: argparse.Namespace) -> str:
    """Run one job and write its file."""
    torch.set_num_threads(1)
    setup = setups(job.is_smoke)[job.setup]
    is_first = job.setup not in _loaded
    if is_first:
        _loaded[job.setup] = load_splits(setup, options.data_root)
    splits = _loaded[job.setup]
    known = {
        record["corpus"]
        for record in finished_jobs(options).values()
        if record["settings"]["setup"] == job.setup
    }
    if others := known - {splits.corpus}:
        raise SystemExit(
            f"finished jobs are on {others.pop()}, but here is {splits.corpus}; choose another "
            "--out, and --again to leave the committed jobs aside."
        )
    # a process's first job compiles and wakes the device: not to be timed
    if is_first and job.stage == "seconds":
        run_job(setup, job, splits, options.device, options.amp)
    record = run_job(setup, job, splits, options.device, options.amp) | {
        "units": job.units,
        "workers": options.workers,
        "corpus": splits.corpus,
        "code": code_digest(),
        "amp": options.amp,
        "hardware": hardware(options.device),
        "date": datetime.date.today().isoformat(),
    }
    write_durably(path_of(options.out, job), (json.dumps(record, indent=1) + "\n").encode())
    gc.collect()
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    losses = ", ".join(f"{row['loss']:.4f} at {row['compute']:g}" for row in record["rows"])
    return f"{job.key}: {losses} ({record['wall']:.0f} s)"


def play_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> int:
    """Run jobs side by side as far as time allows; how many failed."""
    started, left, failed = time.monotonic(), list(jobs), 0
    running: dict[Future[str], Job] = {}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        while left or running:
            paces, spent = paces_of(options), max(LOADING, time.monotonic() - started)
            for job in list(left):
                if options.minutes and spent + estimate(job, paces) > 60 * options.minutes:
                    continue
                running[pool.submit(work, job, options)] = job
                left.remove(job)
                if len(running) == options.workers:
                    break
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    print(future.result(), flush=True)
                except Exception:
                    failed += 1
                    print(
                        f"{job.key} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True
                    )
    if left:
        print(
            f"{len(left)} jobs did not fit into {options.minutes:g} minutes; call again to go on",
            flush=True,
        )
    return failed


def show_list(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Jobs that would run, with their arms, compute and seconds."""
    total, paces = 0.0, paces_of(options)
    for job in jobs:
        seconds = estimate(job, paces)
        total += seconds
        computes = " ".join(f"{compute:g}" for compute in job.computes)
        print(
            f"{seconds:5.0f} s  {job.units:.2f}  {job.setup} {job.stage}, seed "
            f"{job.seed}: {job.arm.name} at {computes}"
        )
    seconds = LOADING + total / options.workers if jobs else 0.0
    print(
        f"{len(jobs)} jobs, {sum(job.units for job in jobs):.1f} of compute, about "
        f"{seconds:.0f} s in all"
    )


def main(given: Sequence[str] | None = None) -> int:
    options = read_options(given)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = chosen_jobs(options)
    finished = finished_jobs(options)
    missing = [job for job in jobs if not is_done(finished, job)]
    if options.list:
        show_list(missing, options)
        return 0
    failed = play_jobs(missing, options) if missing else 0
    if options.report or options.smoke:
        results = None if options.publish else options.out / "report"
        report(str(__doc__).splitlines()[0], finished_jobs(options), results, FIRST_SEED)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
