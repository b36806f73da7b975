"""What a comparison found, as plain data: estimates per arm, paired differences, what may be claimed of them."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.comparing import ORACLE, Trials
from esper.trials.config import CompareConfig

METRICS = {"test_accuracy": 1.0, "test_loss": -1.0}
"""Name and sign: what is ahead has more of it times the sign."""
_OPPOSITE = {"ahead": "behind", "behind": "ahead"}
_COSTS = ("final_params", "peak_params", "flops", "seconds", "germinated", "fossilized", "culled", "epochs")


def summarise(config: CompareConfig, done: Mapping[tuple[str, float], Trials]) -> dict[str, Any]:
    """Every arm at the rate that its validation accuracy chose, and how it stands to every other arm."""
    chosen: dict[str, Trials] = {}
    for (arm, _), trials in done.items():
        name = ORACLE if arm.startswith(f"{ORACLE} ") else arm
        known = chosen.get(name)
        if known is None or trials.mean("validation_accuracy") > known.mean("validation_accuracy"):
            chosen[name] = trials
    arms = {name: _describe(trials) for name, trials in chosen.items()}
    for name, trials in chosen.items():
        arms[name]["minus"] = {other: _differ(trials, than) for other, than in chosen.items() if other != name}
    return {
        "config": config.model_dump(mode="json", exclude={"out", "data_root"}),
        "arms": arms,
        "rows": [{**row, "rate": trials.rate} for trials in done.values() for row in trials.rows],
    }


def _describe(trials: Trials) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": trials.arm, "rate": trials.rate, "seeds": [row["seed"] for row in trials.rows]}
    found |= {"episodes": trials.episodes} | ({} if trials.plan is None else {"plan": trials.plan})
    found |= {name: asdict(estimate_mean(trials.column(name))) for name in (*METRICS, "validation_accuracy")}
    return found | {name: trials.mean(name) for name in _COSTS}


def _differ(trials: Trials, than: Trials) -> dict[str, Any]:
    """Paired by seed; the verdict says which way the interval excludes zero, if it does."""
    found = {}
    for name, sign in METRICS.items():
        difference = compare_pairs(trials.column(name), than.column(name))
        verdict = difference.verdict
        found[name] = {**asdict(difference), "verdict": verdict if sign > 0 else _OPPOSITE.get(verdict, verdict)}
    return found


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every episode as one line."""
    out = io.StringIO()
    names = [name for name in rows[0] if name != "type"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
