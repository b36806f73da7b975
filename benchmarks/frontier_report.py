"""What `frontier.py` found.

The frontier of static depths in hindsight, and how far grown networks lie below it.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from frontier_arms import WARMUP
from frontier_figure import draw_figure, is_plain
from scipy.stats import t

ROOT = Path(__file__).parent.parent
METRICS = {"code": ("loss",), "code_large": ("loss",), "cifar10_resnet": ("error", "loss")}
"""What a setup is judged by, the first above all: nats, or the share of wrong answers."""
SIGMAS, LEAST_SAVING, FEWEST = 2.0, 0.15, 5
COLD = 5.0
"""A timed job that spends so many times the median on anything but training is the first of its process."""
BAD_START = 0.01
"""Nats above its depth's median at which a start is said to have gone wrong; set after the losses had been seen."""
GOAL = (0.6, 0.8, 1.0)
"""Computes at two of which the goal asks for a lead."""
NO_CHOICE = "no plan was chosen on seeds of their own: the best in hindsight flatters growing"
Rows = Mapping[int, Mapping[str, Any]]
"""Host seed -> row."""
Cells = Mapping[tuple[str, float], Rows]
"""Arm and compute."""


@dataclass(frozen=True)
class Best:
    """The static network that was best at one compute, and what it had on each seed."""

    compute: float
    arm: str
    used: float
    values: Mapping[int, float]
    rivals: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())


def describe(values: Sequence[float]) -> dict[str, Any]:
    """Mean and its standard error; one value has none."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "error": error, "count": len(values)}


def collect(
    records: Sequence[Mapping[str, Any]], role: str
) -> dict[tuple[str, float], dict[int, dict[str, Any]]]:
    """All rows of a role; jobs that were there to be timed are left out."""
    found: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for record in records:
        known = record["settings"]
        if known["role"] == role and known["stage"] != "seconds":
            for row in record["rows"]:
                found.setdefault((known["arm"], row["compute"]), {})[known["seed"]] = row
    return found


def find_frontier(cells: Cells, static: Sequence[str], metric: str) -> list[Best]:
    """At each compute the static arm with the lowest mean, of those with the most seeds. An arm with fewer that lies
    lower on the seeds it has is a rival: it must be run on the others before anything is claimed."""
    found = []
    for compute in sorted({compute for _, compute in cells}):
        arms = {
            arm: values_of(cells[arm, compute], metric) for arm in static if (arm, compute) in cells
        }
        most = max(map(len, arms.values()), default=0)
        means = {
            arm: statistics.fmean(values.values())
            for arm, values in arms.items()
            if len(values) == most
        }
        if not means:
            continue
        best = min(means, key=lambda name: (means[name], name))
        lower = {arm: pair(values, arms[best]) for arm, values in arms.items() if arm not in means}
        rivals = tuple(
            arm for arm, against in lower.items() if against is None or against["mean"] < 0
        )
        used = statistics.fmean(row["used"] for row in cells[best, compute].values())
        found.append(Best(compute, best, used, arms[best], rivals))
    return found


def best_by_seed(
    cells: Cells, static: Sequence[str], compute: float, metric: str
) -> dict[int, float]:
    """On each seed what its own best static arm had, of all that were run on it: a choice made in hindsight."""
    found: dict[int, float] = {}
    for arm in static:
        for seed, value in values_of(cells.get((arm, compute), {}), metric).items():
            found[seed] = min(value, found.get(seed, value))
    return found


def pair(own: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any] | None:
    """Own minus other on the seeds that both have; below zero, own is better."""
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return None
    found = describe([own[seed] - other[seed] for seed in seeds])
    half = (
        found["error"] * float(t.ppf(0.975, len(seeds) - 1)) if found["error"] else None
    )  # a bootstrap of 5 is too sure
    low, high = (None, None) if half is None else (found["mean"] - half, found["mean"] + half)
    sigmas = found["mean"] / found["error"] if found["error"] else None
    return {**found, "low": low, "high": high, "sigmas": sigmas, "seeds": seeds}


def equal_compute(points: Sequence[tuple[float, float]], value: float) -> float | None:
    """The compute at which a curve of (compute, value) comes down to `value`, straight in log compute.

    Infinite if it never does; None if it is there from the first point on, so that the answer lies before it.
    """
    points = sorted(points)
    if not points or points[0][1] <= value:
        return None
    for (before, high), (after, low) in pairwise(points):
        if low <= value:
            share = (high - value) / (high - low)
            return math.exp(math.log(before) + share * (math.log(after) - math.log(before)))
    return math.inf


def savings(rows: Rows, frontier: Sequence[Best], metric: str) -> dict[str, Any]:
    """Compute that an arm saves over the frontier at its own loss, seed by seed; where the frontier never gets there,
    what it saves at least."""
    most = max(best.used for best in frontier)
    found, beyond, before = [], 0, 0
    for seed, row in rows.items():
        points = [(best.used, best.values[seed]) for best in frontier if seed in best.values]
        if len(points) < 2:
            continue
        reached = equal_compute(points, row[metric])
        beyond, before = beyond + (reached == math.inf), before + (reached is None)
        if reached is not None:
            found.append(1 - row["used"] / min(reached, most))
    return {**(describe(found) if found else {"count": 0}), "beyond": beyond, "before": before}


def values_of(rows: Rows, metric: str) -> dict[int, float]:
    return {seed: row[metric] for seed, row in rows.items()}


def judge(cells: Cells, settings: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """The frontier of each decay, and every arm against that of its own: two plans of the rate are not compared."""
    found: dict[str, Any] = {"frontier": {}, "arms": {}}
    for decay in dict.fromkeys(each["decay"] for each in settings.values()):
        own = [arm for arm, each in settings.items() if each["decay"] == decay]
        static = [arm for arm in own if settings[arm]["is_static"]]
        frontier = find_frontier(cells, static, metric)
        found["frontier"][f"{decay:g}"] = [
            {
                "compute": best.compute,
                "arm": best.arm,
                "used": best.used,
                "rivals": list(best.rivals),
            }
            | describe(list(best.values.values()))
            for best in frontier
        ]
        at = {best.compute: best for best in frontier}
        lucky = {
            c: replace(best, values=best_by_seed(cells, static, c, metric))
            for c, best in at.items()
        }
        for arm in own:
            found["arms"][arm] = {"settings": settings[arm], "computes": {}}
            for compute in sorted(compute for name, compute in cells if name == arm):
                rows = cells[arm, compute]
                cell = describe(list(values_of(rows, metric).values())) | costs_of(rows)
                if compute in at:
                    cell["minus frontier"] = pair(values_of(rows, metric), at[compute].values)
                    cell["minus best of each seed"] = pair(
                        values_of(rows, metric), lucky[compute].values
                    )
                if frontier and not settings[arm]["is_static"]:
                    cell["saving"] = savings(rows, frontier, metric)
                    cell["saving over the best of each seed"] = savings(
                        rows, list(lucky.values()), metric
                    )
                if (base := base_of(settings[arm], settings)) and (base, compute) in cells:
                    cell["base"], other = base, values_of(cells[base, compute], metric)
                    cell["minus base"] = pair(values_of(rows, metric), other)
                found["arms"][arm]["computes"][f"{compute:g}"] = cell
    return found


def costs_of(rows: Rows) -> dict[str, Any]:
    means = {
        key: statistics.fmean(row[key] for row in rows.values())
        for key in ("used", "examples", "params")
    }
    sums = {
        key: sum(row.get(key, 0) for row in rows.values())
        for key in ("rolled_back", "culled", "off_plan")
    }
    return means | sums


def base_of(own: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The arm that this one varies: its plan with plain copies at once, or the static network of its size."""
    word, _, sizes = own["shape"].partition(" ")
    is_doubt = word in ("tiled", "direct")
    shape = f"static {sizes.split('-')[-1]}" if is_doubt else own["shape"]
    if not is_doubt and ("@" not in shape or (own["kind"] is None and own["ramp"] == 0)):
        return None
    wanted = {
        "shape": shape,
        "kind": None,
        "ramp": 0,
        "decay": own["decay"],
        "factor": own["factor"],
    }
    fitting = (
        arm for arm, other in settings.items() if all(other[key] == wanted[key] for key in wanted)
    )
    return next(fitting, None)


def regrets(judged: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What it costs not to know the right size: how far each arm lies above the frontier, at worst and in the mean."""
    found = {}
    for arm, each in judged["arms"].items():
        if not is_plain(each["settings"]):
            continue
        over = {
            c: cell["minus frontier"]["mean"]
            for c, cell in each["computes"].items()
            if cell.get("minus frontier")
        }
        if over:
            worst, mean = max(over.values()), statistics.fmean(over.values())
            found[arm] = {"worst": worst, "mean": mean, "computes": len(over), "over": over}
    return dict(sorted(found.items(), key=lambda item: (-item[1]["computes"], item[1]["worst"])))


def choose_plan(cells: Cells, settings: Mapping[str, Mapping[str, Any]], metric: str) -> str | None:
    """The plan with the lowest mean over all these computes and seeds; those that were dropped on the way lack some."""
    found = {}
    for arm, each in settings.items():
        rows = {
            (c, seed): row[metric]
            for (name, c), by in cells.items()
            if name == arm
            for seed, row in by.items()
        }
        if "@" in each["shape"] and is_plain(each) and rows:
            found[arm] = rows
    most = max(map(len, found.values()), default=0)
    means = {
        arm: statistics.fmean(rows.values()) for arm, rows in found.items() if len(rows) == most
    }
    return min(means, key=lambda arm: (means[arm], arm), default=None)


def verdict(judged: Mapping[str, Any], chosen: str | None, best: str | None) -> dict[str, Any]:
    """Whether the goal is reached: below the frontier at two computes, or as much less compute at equal loss."""
    plan = chosen or best
    if plan is None or plan not in judged["arms"]:
        return {"plan": None, "remark": "no grown plan was run"}
    computes = judged["arms"][plan]["computes"]
    ahead, saved = [], {}
    for compute, cell in computes.items():
        lead, saving = cell.get("minus frontier"), cell.get("saving", {"count": 0})
        is_sure = (
            lead
            and lead["count"] >= FEWEST
            and lead["sigmas"] is not None
            and lead["sigmas"] < -SIGMAS
        )
        ahead += [compute] if is_sure and float(compute) in GOAL else []
        if saving["count"] >= FEWEST:
            saved[compute] = saving["mean"]
    is_reached = len(ahead) >= 2 or any(value >= LEAST_SAVING for value in saved.values())
    remark = "chosen on seeds of their own" if chosen else NO_CHOICE
    return {
        "plan": plan,
        "remark": remark,
        "ahead": ahead,
        "saved": saved,
        "is_reached": is_reached,
    }


def challenge(cells: Cells, static: Sequence[str], plan: str, metric: str) -> dict[str, Any]:
    """A sceptic's readings of the plan's lead over the best depth by its mean, at each compute with enough seeds."""
    found: dict[str, Any] = {}
    for compute in sorted(compute for arm, compute in cells if arm == plan):
        own = values_of(cells[plan, compute], metric)
        arms = {
            arm: values_of(cells[arm, compute], metric) for arm in static if (arm, compute) in cells
        }
        arms = {arm: values for arm, values in arms.items() if values.keys() >= own.keys()}
        if len(own) < FEWEST or not arms:
            continue
        medians = {arm: statistics.median(values.values()) for arm, values in arms.items()}
        above = {
            (arm, s): value - medians[arm]
            for arm, values in arms.items()
            for s, value in values.items()
        }
        bad = {key: value for key, value in above.items() if value > BAD_START}
        mended = {
            arm: {s: medians[arm] if (arm, s) in bad else v for s, v in by.items()}
            for arm, by in arms.items()
        }
        seeds, spoilt = sorted(own), {seed for _, seed in bad}
        without = [
            lead_over(own, arms, [seed for seed in seeds if seed != left]) | {"left": left}
            for left in seeds
        ]
        found[f"{compute:g}"] = {
            "bad starts": [
                {"arm": arm, "seed": seed, "above": value} for (arm, seed), value in bad.items()
            ],
            "without seeds of bad starts": lead_over(
                own, arms, [seed for seed in seeds if seed not in spoilt]
            ),
            "bad starts at their depth's median": lead_over(own, mended, seeds),
            "least without one seed": max(without, key=lambda each: each["mean"]),
            "seeds beyond the first five": lead_over(own, arms, seeds[FEWEST:]),
        }
    return found


def lead_over(
    own: Mapping[int, float], arms: Mapping[str, Mapping[int, float]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Own minus the arm that is best by its mean over these seeds."""
    if not seeds:
        return {"count": 0}
    best = min(arms, key=lambda arm: (statistics.fmean(arms[arm][seed] for seed in seeds), arm))
    paired = pair({seed: own[seed] for seed in seeds}, arms[best])
    assert paired is not None
    return {"arm": best, **paired}


def paces(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds for 1.0 of compute, by arm, of jobs that had the machine to themselves.

    The first job of a process also compiles and wakes the device, which shows in its seconds too: it is left out.
    """
    timed = [r for r in records if r["settings"]["stage"] == "seconds" and r["workers"] == 1]
    extra = [record["wall"] - sum(row["seconds"] for row in record["rows"]) for record in timed]
    found: dict[str, list[float]] = {}
    for record, own in zip(timed, extra, strict=True):
        if own <= COLD * statistics.median(extra):
            for row in record["rows"]:
                found.setdefault(record["settings"]["arm"], []).append(row["seconds"] / row["used"])
    return {arm: statistics.fmean(values) for arm, values in found.items()}


def at_any_rate(alone: Mapping[str, float], arms: Sequence[str]) -> dict[str, float]:
    """The same with arms of another learning rate, which changes no kernel: they have the pace of their shape."""
    shapes = {arm: re.sub(r" rate=\S+", "", arm) for arm in arms}
    return {arm: alone[shape] for arm, shape in shapes.items() if shape in alone}


def summarise(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One setup: every role's tables by every metric, and the rows that they come from."""
    if len({(r["corpus"], r["settings"]["is_smoke"], r["amp"]) for r in records}) > 1:
        raise SystemExit(
            f"jobs of {name} are of different data, precision or size; use a folder for each."
        )
    settings = {
        r["settings"]["arm"]: r["settings"] for r in records if r["settings"]["stage"] != "seconds"
    }
    kept = ("shape", "kind", "where", "ramp", "decay", "factor", "is_static", "policy", "lr")
    settings = {
        arm: {key: each.get(key) for key in kept} | {"warmup": round(each["warmup"] / WARMUP, 6)}
        for arm, each in settings.items()
    }
    found: dict[str, Any] = {
        **{
            key: sorted({str(record[key]) for record in records})
            for key in ("hardware", "date", "corpus", "amp")
        },
        "seconds for 1.0, alone": paces(records),
        "roles": {},
        "rows": [
            {key: r["settings"][key] for key in ("arm", "stage", "role", "seed")}
            | {"workers": r["workers"], **row}
            for r in records
            for row in r["rows"]
        ],
    }
    metrics = METRICS[name]
    choosing = collect(records, "choose")
    chosen = choose_plan(choosing, settings, metrics[0])
    for role in ("tune", "choose", "judge"):
        cells = collect(records, role)
        own = {
            arm: each for arm, each in settings.items() if any(arm == known for known, _ in cells)
        }
        if cells:
            found["roles"][role] = {metric: judge(cells, own, metric) for metric in metrics}
            for judged in found["roles"][role].values():
                judged["regret"] = regrets(judged)
    if "judge" in found["roles"]:
        best = choose_plan(collect(records, "judge"), settings, metrics[0])
        found["verdict"] = verdict(found["roles"]["judge"][metrics[0]], chosen, best)
        plan, cells = found["verdict"]["plan"], collect(records, "judge")
        if plan and metrics[0] == "loss":
            static = [arm for arm, each in settings.items() if each["is_static"] and is_plain(each)]
            found["challenge"] = challenge(cells, static, plan, metrics[0])
            found |= {"bad start": BAD_START, "warm-up": WARMUP}
    return found


def show(title: str, judged: Mapping[str, Any], times: float) -> None:
    """Every arm at every compute, and how it stands to frontier and base."""
    print(f"\n{title}")
    for decay, frontier in judged["frontier"].items():
        if frontier:
            best = ", ".join(
                f"{each['compute']:g}: {each['arm']} {times * each['mean']:.4f}"
                for each in frontier
            )
            print(f"frontier in hindsight, decay {decay}: {best}")
            for each in frontier:
                if each["rivals"]:
                    print(
                        f"  at {each['compute']:g} more seeds are needed of "
                        f"{', '.join(each['rivals'])}"
                    )
    for arm, each in sorted(
        judged["arms"].items(), key=lambda item: (not item[1]["settings"]["is_static"], item[0])
    ):
        for compute, cell in each["computes"].items():
            parts = [f"{arm:34s} {compute:>5s}  {written(cell, times)} ({cell['count']})"]
            for key in ("minus frontier", "minus base"):
                if cell.get(key) and not (each["settings"]["is_static"] and key == "minus base"):
                    against = f" {cell['base']}" if key == "minus base" else ""
                    parts.append(f"{key}{against} {written(cell[key], times, '+')}")
            if cell.get("saving", {}).get("count"):
                parts.append(f"saves {written(cell['saving'], 100, '+', 1)} %")
            parts += [
                f"{key} {cell[key]}" for key in ("rolled_back", "culled", "off_plan") if cell[key]
            ]
            print("  ".join(parts))
    print("what it costs not to know the right size, above the frontier at worst and in the mean:")
    for arm, each in judged["regret"].items():
        over = f"{times * each['worst']:+.4f}, {times * each['mean']:+.4f}"
        print(f"  {arm:34s} {over} at {each['computes']} computes")


def written(found: Mapping[str, Any], times: float, sign: str = "", digits: int = 4) -> str:
    error = "" if found["error"] is None else f" ± {times * found['error']:.{digits}f}"
    return f"{times * found['mean']:{sign}.{digits}f}{error}"


def gather(
    asks: str, jobs: Mapping[str, Mapping[str, Any]], seeds: Mapping[str, int]
) -> dict[str, Any]:
    """What jobs came to, setup by setup, and the jobs themselves."""
    records = list(jobs.values())
    if not records:
        raise SystemExit("no job is finished; run a --stage first.")
    found: dict[str, Any] = {
        "asks": asks,
        "command": "python benchmarks/frontier.py",
        "first_seed": dict(seeds),
        "seconds": "rows of several workers were timed side by side; 'alone' are the "
        "seconds to compare",
        "setups": {},
    }
    for name in dict.fromkeys(record["settings"]["setup"] for record in records):
        found["setups"][name] = summarise(
            name, [r for r in records if r["settings"]["setup"] == name]
        )
    found["jobs"] = dict(jobs)
    return found


def report(
    asks: str,
    jobs: Mapping[str, Mapping[str, Any]],
    results: Path | None,
    seeds: Mapping[str, int],
) -> None:
    """Tables on the screen; JSON and one figure per setup into `results`, or into the project's folders."""
    found = gather(asks, jobs, seeds)
    where, pictures = (
        (results, results)
        if results
        else (ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures")
    )
    where.mkdir(parents=True, exist_ok=True)
    for name, summary in found["setups"].items():
        for role, by_metric in summary["roles"].items():
            for metric, judged in by_metric.items():
                show(f"{name}, {role}, {metric}", judged, 100 if metric == "error" else 1)
        if "judge" in summary["roles"]:
            print(
                f"{name}: "
                + "; ".join(f"{key}: {value}" for key, value in summary["verdict"].items())
            )
            metric = METRICS[name][0]
            judged = summary["roles"]["judge"][metric]
            alone = at_any_rate(summary["seconds for 1.0, alone"], list(judged["arms"]))
            if len(judged["frontier"].get("0.2", [])) > 1:  # one compute is no curve
                drawn = draw_figure(name, metric, judged, alone)
                (pictures / f"frontier_{name}.svg").write_text(drawn, encoding="utf-8")
    (where / "frontier.json").write_text(
        json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
