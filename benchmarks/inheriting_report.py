"""Tables of what `inheriting.py` ran: means with intervals, and gains host by host."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from esper.telemetry.statistics import compare_pairs, estimate_mean

CONTROLS = ("never", "static")


def read_arms(out: Path) -> dict[tuple[str, str], dict[str, dict]]:
    """(task, question) -> arm -> its record."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for path in sorted(out.glob("*.json")):
        record = json.loads(path.read_text())
        known = record["settings"]
        found.setdefault((known["task"], known["question"]), {})[known["arm"]] = record
    if not found:
        raise SystemExit(f"{out} holds no arms; run some first.")
    return found


def values(record: dict, key: str) -> list[float]:
    return [row[key] for row in record["rows"]]


def gain_over(own: dict, other: dict, key: str) -> dict[str, object]:
    """How much better an arm is than another, host by host: lower loss, or more accuracy in points."""
    if own["settings"]["seeds"] != other["settings"]["seeds"]:
        raise SystemExit(
            f"{own['settings']['arm']} and {other['settings']['arm']} ran on other host seeds."
        )
    sign = -1.0 if key.endswith("loss") else 100.0
    found = compare_pairs(
        *([sign * value for value in values(record, key)] for record in (own, other))
    )
    return {**asdict(found), "verdict": found.verdict}


def summarise(
    arms: dict[str, dict], against: Callable[[str], Sequence[str]], keys: Sequence[str]
) -> dict[str, dict]:
    """Means with intervals, and gains over the arms that `against` names, as far as they were run."""
    table: dict[str, dict] = {}
    for name, record in arms.items():
        row = {
            key: asdict(estimate_mean(values(record, key))) for key in (*keys, "flops", "params")
        }
        row |= {
            key: sum(values(record, key))
            for key in ("planted", "copies", "kept", "rolled_back", "off_plan")
        }
        known = [other for other in against(name) if other in arms and other != name]
        table[name] = row | {
            f"gain over {other}": {key: gain_over(record, arms[other], key) for key in keys}
            for other in known
        }
    return table


def best_of_kinds(arms: dict[str, dict], key: str) -> dict[str, str]:
    """The ramp and scale of each kind that validation likes most; ties go to the first by name."""
    sign, best = (1 if key == "loss" else -1), dict[str, str]()
    means = {name: sign * estimate_mean(values(record, key)).mean for name, record in arms.items()}
    for name in sorted(arms, key=lambda name: (means[name], name)):
        best.setdefault(name.split()[0], name)
    return best


def show(title: str, table: dict[str, dict], keys: Sequence[str]) -> None:
    print(f"\n{title}")
    compute = max(row["flops"]["mean"] for row in table.values())
    for name, row in sorted(table.items(), key=lambda item: item[1][keys[0]]["mean"]):
        cells = [f"{name:34s}"]
        for key in keys:
            times, digits = (1, 4) if key.endswith("loss") else (100, 2)
            low, high = (row[key][end] for end in ("low", "high"))
            interval = (
                "" if low is None else f" [{times * low:.{digits}f}, {times * high:.{digits}f}]"
            )
            cells.append(f"{key} {times * row[key]['mean']:.{digits}f}{interval}")
        cells.append(f"compute {row['flops']['mean'] / compute:.2f}")
        cells.append(f"kept {row['kept']}/{row['planted']}, copies {row['copies']}")
        cells += [f"{key} {row[key]}" for key in ("rolled_back", "off_plan") if row[key]]
        print("  ".join(cells))
    for name, row in table.items():
        for label, gains in row.items():
            if row["copies"] and label.startswith("gain over"):
                print(
                    f"{name}: {label}: {'; '.join(f'{key} {_written(gains[key])}' for key in keys)}"
                )


def _written(gain: dict) -> str:
    low, high = (math.nan if gain[end] is None else gain[end] for end in ("low", "high"))
    return f"{gain['mean']:+.4f} [{low:+.4f}, {high:+.4f}] {gain['verdict']}"


def report(asks: str, out: Path, path: Path) -> None:
    """Tables on the screen, everything in one file."""
    record: dict[str, object] = {"asks": asks, "tasks": {}}
    for (task, question), arms in read_arms(out).items():
        if question == "rules":
            keys = ("loss", "accuracy", "test_loss", "test_accuracy")
            table, best = summarise(arms, lambda name: [f"{name.split()[0]} without"], keys), None
        else:
            keys = ("loss", "accuracy")
            best = best_of_kinds(arms, "loss" if task == "python_text" else "accuracy")
            chosen = list(best.values())
            table = summarise(
                arms, lambda name, chosen=chosen: chosen if name in chosen else CONTROLS, keys
            )
        show(f"{task}, {question}", table, keys)
        some = next(iter(arms.values()))
        record["tasks"][f"{task} {question}"] = {  # type: ignore[index]
            **{key: some[key] for key in ("hardware", "date")},
            **({"best": best} if best else {}),
            "table": table,
            "arms": {
                name: {"settings": arm["settings"], "rows": arm["rows"]}
                for name, arm in arms.items()
            },
        }
    path.write_text(json.dumps(record, indent=1) + "\n")
