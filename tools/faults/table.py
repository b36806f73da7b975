"""The counts of a campaign, as plain data and as the table in lab/reliability.md."""

import json
from pathlib import Path

from tools.faults.driver import VERDICTS

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "lab" / "reliability.md", ROOT / "benchmarks" / "results" / "faults.json"
BEGIN, END = "<!-- counted by make faults -->\n", "<!-- end of the counts -->\n"
PARTS = {
    "power": ("power cuts", 1000),
    "kills": ("kill -9", 200),
    "damage": ("damage", 1000),
    "garden": ("gardens in your own loop", 400),
    "settings": ("settings", 1000),
    "disk": ("failing disk and memory", 500),
    "soak": ("one process for long", 1000),
    "page": ("the page", 0),
}
"""part -> its name, and how many verdicts a whole campaign has at least"""


def counted(told, seed, scale, seconds):
    """What came of a campaign, as plain data. `scale` is 1 for a whole one."""
    groups = {
        key: {
            "cases": group.cases,
            "verdicts": {name: group.verdicts[name] for name in VERDICTS if group.verdicts[name]},
            "bad": [list(bad) for bad in group.bad],
            "skipped": group.skipped,
            "seconds": round(group.seconds, 1),
        }
        for key, group in told.items()
    }
    return {"seed": seed, "scale": scale, "seconds": round(seconds), "groups": groups}


def too_few(found):
    """Parts of a whole campaign that have fewer verdicts than are promised: their names and numbers."""
    if found["scale"] < 1:
        return {}
    counts = {}
    for key, group in found["groups"].items():
        part = key.partition("/")[0]
        counts[part] = counts.get(part, 0) + sum(group["verdicts"].values())
    return {part: count for part, count in counts.items() if count < PARTS[part][1]}


def is_bad(found):
    return bool(too_few(found)) or any(group["bad"] for group in found["groups"].values())


def rendered(found):
    """The table."""
    lines = [
        f"| | {' | '.join(VERDICTS)} | anything else |",
        f"|---|{'---:|' * len(VERDICTS)}---:|",
    ]
    for part, (title, _) in PARTS.items():
        rows = {key: group for key, group in found["groups"].items() if key.startswith(f"{part}/")}
        if not rows:
            continue
        lines.append(_row(f"**{title}**", rows.values()))
        lines += [
            _row(key.partition("/")[2] + _note(group), [group]) for key, group in rows.items()
        ]
    return "\n".join(lines) + "\n"


def _note(group):
    return f" (not tried: {group['skipped']})" if group["skipped"] else ""


def _row(name, groups):
    groups = list(groups)
    numbers = [sum(group["verdicts"].get(verdict, 0) for group in groups) for verdict in VERDICTS]
    bad = sum(len(group["bad"]) for group in groups)
    return (
        f"| {name} | "
        f"{' | '.join(f'{number:,}' if number else '' for number in numbers)} | {bad:,} |"
    )


def text(found):
    """For a terminal: the table, the seconds of every group, and how to play again what failed."""
    lines = [rendered(found)]
    for key, group in found["groups"].items():
        lines.append(f"{group['seconds']:8.1f} s  {group['cases']:5d} cases  {key}{_note(group)}")
    for group in found["groups"].values():
        for case, reason in group["bad"]:
            lines.append(
                f"FAILED {reason}\n  again: python -m tools.faults --seed "
                f'{found["seed"]} --case "{case}"'
            )
    lines += [f"TOO FEW: {count} of {PARTS[part][0]}" for part, count in too_few(found).items()]
    lines.append(f"{found['seconds']} s, random seed {found['seed']}")
    return "\n".join(lines)


def write_json(found, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def paged(page, found):
    """The page with the table of these counts."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{rendered(found)}{END}{rest.split(END)[1]}"


def write_page(found):
    """Counts and table, where the project keeps them; only of a whole campaign."""
    if found["scale"] < 1:
        return
    write_json(found, RESULTS)
    PAGE.write_text(paged(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
