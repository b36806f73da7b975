"""What `policies.py` found: arms and differences by host, keeps and culls against the evidence.

Differences are paired by host seed. Those of several policies of one lesson are first averaged by
host, so that an interval is over hosts; three trainings are too few to say more about trainings.
"""

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hardware import hardware
from policies_jobs import (
    CHOOSING,
    CHUNK,
    JUDGING,
    LESSONS,
    Pupil,
    path_of_choice,
    path_of_judgement,
    read_json,
)
from records import keep
from rich.console import Console
from rich.table import Table

from esper.cli.run import run_policy
from esper.simic.checkpoints import saved_rounds
from esper.simic.team import code_digest
from esper.storage import runfolder
from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.config import RunConfig

SCORES = ("test_accuracy", "test_loss", "validation_accuracy")
COSTS = ("params", "flops", "germinated", "fossilized", "culled")
POINTS = 40
"""Points of a learning curve that are written down."""
LAST = 3
"""Points of a learning curve that count as its end."""

Rows = list[dict[str, Any]]


def report(pupils: Sequence[Pupil], options: argparse.Namespace) -> None:
    """Write and print what there is of these policies; one that is not judged is left out."""
    record = {
        "script": "benchmarks/policies.py",
        "hardware": hardware("cpu"),
        "date": datetime.date.today().isoformat(),
        "code": code_digest(),
        "declared": {
            "choosing": [CHOOSING.start, CHOOSING.stop - 1],
            "judging": [JUDGING.start, JUDGING[: options.hosts].stop - 1],
            "checkpoint": "the last round's",
        },
        "lessons": {},
    }
    groups: dict[tuple[str, str], list[Pupil]] = {}
    for pupil in pupils:
        groups.setdefault((pupil.lesson, pupil.family), []).append(pupil)
    for (lesson, family), members in groups.items():
        judged = {pupil: rows_of(pupil, options) for pupil in members}
        known = {pupil: arms for pupil, arms in judged.items() if "taught" in arms}
        if known:
            described = describe_group(known, options.keep)
            record["lessons"].setdefault(lesson, {})[family] = described
            show_group(f"{lesson}, rewards {family}", described)
    credit = {
        lesson: compare_families(families)
        for lesson, families in record["lessons"].items()
        if len(families) > 1
    }
    record["credit"] = credit
    for lesson, found in credit.items():
        print(f"\n{lesson}: {json.dumps(found, indent=1)}")
    keep(options, record)


def report_curves(pupils: Sequence[Pupil], options: argparse.Namespace) -> None:
    """Write and print how trainings of two families of rewards went, paired by training seed."""
    taught = [pupil for pupil in pupils if pupil.is_taught(options.keep)]
    trainings: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for pupil in taught:
        families = trainings.setdefault(pupil.lesson, {})
        described = describe_training(pupil, options.keep)
        families.setdefault(pupil.family, {})[pupil.seed] = described
    record = {
        "script": "benchmarks/policies.py",
        "hardware": hardware("cpu"),
        "date": datetime.date.today().isoformat(),
        "trainings": trainings,
        "credit": {lesson: compare_curves(families) for lesson, families in trainings.items()},
    }
    print(json.dumps(record["credit"], indent=1))
    keep(options, record)


def compare_curves(families: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """Each pair of families on one lesson: the first one's lead over twins minus the other's.

    Once over all rounds, and once at the end of the learning curves.
    """
    compared: dict[str, Any] = {}
    for first, second in itertools.combinations(families, 2):
        seeds = sorted(set(families[first]) & set(families[second]))
        curves = {}
        for family in (first, second):
            curves[family] = [families[family][seed]["lead_curve"] for seed in seeds]
        compared[f"{first} minus {second}"] = {
            "seeds": seeds,
            "all rounds": _compare_means(curves[first], curves[second], 0),
            "last rounds": _compare_means(curves[first], curves[second], -LAST),
        }
    return compared


def _compare_means(
    curves: Sequence[Sequence[float]], others: Sequence[Sequence[float]], start: int
) -> dict[str, Any]:
    means = [statistics.fmean(curve[start:]) for curve in curves]
    return asdict(compare_pairs(means, [statistics.fmean(curve[start:]) for curve in others]))


# -- reading ---------------------------------------------------------------------------------------


def rows_of(pupil: Pupil, options: argparse.Namespace) -> dict[str, Rows]:
    """Every arm's episodes in the order of the judging seeds; an arm that lacks some is left out."""
    seeds = JUDGING[: options.hosts]
    rows: dict[str, Rows] = {}
    for arm in LESSONS[pupil.lesson].arms:
        paths = [
            path_of_judgement(pupil, arm, first, options.keep)
            for first in range(seeds.start, seeds.stop, CHUNK)
        ]
        if all(path.is_file() for path in paths):
            chunks = [read_json(path)["rows"] for path in paths]
            rows[arm] = [row for chunk in chunks for row in chunk]
            assert [row["seed"] for row in rows[arm]] == list(seeds)
    return rows


def rounds_of(pupil: Pupil, keep: Path) -> Iterator[dict[str, Any]]:
    """Every round of a policy's training, as its events have it."""
    for path in runfolder.event_files(pupil.folder(keep)).values():
        for line in path.open(encoding="utf-8"):
            event = json.loads(line)
            if event["type"] == "RoundFinished":
                yield event


# -- describing ------------------------------------------------------------------------------------


def describe_group(judged: Mapping[Pupil, Mapping[str, Rows]], keep: Path) -> dict[str, Any]:
    """The policies of one lesson and family, one by one and together."""
    policies = {}
    for pupil, arms in judged.items():
        policies[str(pupil.seed)] = {
            "training": describe_training(pupil, keep),
            "plan": describe_plan(pupil, keep),
            "arms": describe_arms(arms),
            "evidence": {
                arm: describe_evidence(arms[arm]) for arm in ("taught", "drawn") if arm in arms
            },
        }
    shared = set.intersection(*(set(arms) for arms in judged.values()))
    first = next(iter(judged.values()))
    names = [arm for arm in first if arm in shared]
    together = {arm: _average([arms[arm] for arms in judged.values()]) for arm in names}
    return {
        "policies": policies,
        "together": describe_arms(together),
        "evidence": describe_evidence([row for arms in judged.values() for row in arms["taught"]]),
    }


def _average(many: Sequence[Rows]) -> Rows:
    """Rows of several policies on the same hosts as one row for each host."""
    averaged = []
    for of_host in zip(*many, strict=True):
        means = {name: statistics.fmean(row[name] for row in of_host) for name in (*SCORES, *COSTS)}
        averaged.append({"seed": of_host[0]["seed"], **means})
    return averaged


def describe_arms(arms: Mapping[str, Rows]) -> dict[str, Any]:
    """Each arm's means, and by how much the taught policy's score is above its own, by host."""
    described = {}
    for arm, rows in arms.items():
        described[arm] = {
            **{name: asdict(estimate_mean([row[name] for row in rows])) for name in SCORES},
            **{name: statistics.fmean(row[name] for row in rows) for name in COSTS},
        }
        if arm != "taught":
            described[arm]["taught minus"] = {
                name: _difference(arms["taught"], rows, name) for name in SCORES
            }
        if arm != "never" and "never" in arms:
            described[arm]["minus never"] = {
                name: _difference(rows, arms["never"], name) for name in SCORES
            }
    return described


def _difference(rows: Rows, others: Rows, name: str) -> dict[str, Any]:
    return asdict(compare_pairs([row[name] for row in rows], [row[name] for row in others]))


def describe_training(pupil: Pupil, keep: Path) -> dict[str, Any]:
    """How it was taught: rounds, decisions, time, and how far growing was ahead of twins."""
    rounds = list(rounds_of(pupil, keep))
    leads = [event["accuracy"] - event["twin_accuracy"] for event in rounds]
    step = max(1, len(leads) // POINTS)
    return {
        "rounds": saved_rounds(pupil.folder(keep)),
        "decisions": rounds[-1]["decisions"],
        "seconds": sum(event["seconds"] for event in rounds),
        "lead_area": statistics.fmean(leads),
        "lead_at_end": statistics.fmean(leads[-10:]),
        "lead_curve": [
            statistics.fmean(leads[at : at + step]) for at in range(0, len(leads), step)
        ],
        "config": runfolder.read_json(pupil.folder(keep) / runfolder.CONFIG),
    }


def describe_plan(pupil: Pupil, keep: Path) -> dict[str, Any] | None:
    """The policy's usual actions, as validation on the choosing seeds picked them."""
    path = path_of_choice(pupil, keep)
    if not path.is_file():
        return None
    chosen = read_json(path)
    return {name: value for name, value in chosen.items() if name != "seen"}


def describe_evidence(rows: Rows) -> dict[str, Any]:
    """How often seeds were kept and culled in line with what they were measured to contribute.

    `clear` counts contributions further than one standard error from zero. A cull on the ramp, or
    a measurement that failed, has no evidence.
    """
    decided = [choice for row in rows for choice in row["decided"]]
    counts: dict[str, Any] = {}
    for op, sign in (("FOSSILIZE", 1.0), ("CULL", -1.0)):
        choices = [choice for choice in decided if choice["op"] == op]
        known = [choice for choice in choices if choice["contribution"] is not None]
        clear = [choice for choice in known if abs(choice["contribution"]) > choice["error"]]
        counts[op] = {
            "times": len(choices),
            "measured": len(known),
            "in_line": sum(sign * choice["contribution"] > 0 for choice in known),
            "clear": len(clear),
            "clear_in_line": sum(sign * choice["contribution"] > 0 for choice in clear),
        }
    stays = [stay for row in rows for stay in row.get("stays_when_blinded", [])]
    germinated = sum(row["germinated"] for row in rows)
    ended = sum(row["fossilized"] + row["culled"] for row in rows)
    return {
        **counts,
        "stays_when_blinded": [sum(stays), len(stays)],
        "left_undecided": germinated - ended,
    }


def compare_families(families: Mapping[str, Any]) -> dict[str, Any]:
    """Two families of rewards on one lesson: the lead over never, and the learning curve's mean."""
    found: dict[str, Any] = {}
    for family, described in families.items():
        policies = described["policies"].values()
        of_hosts = [policy["arms"]["taught"]["minus never"] for policy in policies]
        found[family] = {
            "lead_in_accuracy": [lead["test_accuracy"]["mean"] for lead in of_hosts],
            "lead_in_loss": [-lead["test_loss"]["mean"] for lead in of_hosts],
            "lead_area": [policy["training"]["lead_area"] for policy in policies],
            "drawn": [
                policy["arms"]["drawn"]["minus never"]["test_accuracy"]["mean"]
                for policy in policies
            ],
        }
    first, second, *_ = found
    found[f"{first} minus {second}"] = {
        name: asdict(compare_pairs(found[first][name], found[second][name]))
        for name in found[first]
    }
    return found


# -- printing --------------------------------------------------------------------------------------


def show_group(title: str, described: Mapping[str, Any]) -> None:
    """Arms as a table, and how keeps and culls stand to the evidence."""
    columns = ("accuracy, %", "taught minus it, points", "parameters", "MFLOPs", "kept", "culled")
    table = Table("policy", "arm", *columns, title=title)
    sets = {**described["policies"], "all": {"arms": described["together"]}}
    for name, policy in sets.items():
        for arm, row in policy["arms"].items():
            table.add_row(
                name,
                arm,
                f"{100 * row['test_accuracy']['mean']:.2f}",
                _points(row.get("taught minus", {}).get("test_accuracy")),
                f"{row['params']:,.0f}",
                f"{row['flops'] / 1e6:,.0f}",
                f"{row['fossilized']:.2f}",
                f"{row['culled']:.2f}",
            )
    Console(width=130).print(table)
    print(json.dumps(described["evidence"]))


def _points(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return ""
    text = f"{100 * difference['mean']:+.2f}"
    if difference["low"] is None:
        return text
    return f"{text} [{100 * difference['low']:+.2f}, {100 * difference['high']:+.2f}]"


# -- a run to look at ------------------------------------------------------------------------------


def show_run(pupils: Sequence[Pupil], options: argparse.Namespace) -> None:
    """Play again the first judged host on which evidence decided both ways, as `esper run`.

    On it a seed was culled that was measured to harm by more than a standard error, and one was
    kept that was measured to help by more than that.
    """
    for pupil in pupils:
        rows = rows_of(pupil, options).get("taught", [])
        shown = [row for row in rows if _decides_both_ways(row)]
        print(f"{pupil.name}: {len(shown)} of {len(rows)} hosts")
        if not shown:
            continue
        config = RunConfig.of(
            {
                "task": LESSONS[pupil.lesson].config("loss", 0, options.keep).task.model_dump(),
                "policy": str(pupil.checkpoint(options.keep)),
                "seed": shown[0]["seed"],
                "out": str(options.keep / "shown"),
            }
        )
        run_policy(config, False, Console())
        print(f"host seed {config.seed} in {config.out}: {json.dumps(shown[0]['decided'])}")
        return
    raise SystemExit("on no judged host did evidence decide both ways; judge more of them.")


def _decides_both_ways(row: Mapping[str, Any]) -> bool:
    ops = set()
    for choice in row["decided"]:
        worth, error = choice["contribution"], choice["error"]
        if worth is None:
            continue
        if choice["op"] == "CULL" and worth < -error:
            ops.add("CULL")
        if choice["op"] == "FOSSILIZE" and worth > error:
            ops.add("FOSSILIZE")
    return len(ops) == 2
