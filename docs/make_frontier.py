"""Writes docs/frontier.md from benchmarks/results/frontier.json: python docs/make_frontier.py."""

import json
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "frontier.md"
FOUND = DOCS.parent / "benchmarks" / "results" / "frontier.json"
INTRODUCTION = """# Does growing pay?

<!-- written by docs/make_frontier.py from benchmarks/results/frontier.json; change neither by hand -->

You have compute, not epochs. So the question is: for the same training FLOPs, does a network that grows end with a
lower held-out loss than the best network of *fixed depth*, even if somebody had told you that depth beforehand?

The task is `code`: a byte GPT of width 256 and context 256 on the Python sources of one installation. 1.0 of
compute is 8 blocks on 3,000 steps of 64 x 256 bytes. Every arm has the same compute clock, ledger and learning-rate
plan (constant, with the last fifth of the compute falling to zero), bf16, AdamW, clipping at 1. A grown run pays
for its measurements. Each run reads the test loss once, with the network as it is taken home. Rates and plans were
chosen by test loss on other host seeds, but on the same test windows. Intervals are Student's t over host seeds, 95
%; they do not cover the choice of windows.
"""
ANSWER = """## The answer

**Yes, with the right plan, by a little.** A network of 3 blocks whose last two blocks are copied when {when} % of
the compute is used (`{plan}`) ends **{lead:.4f} nats below the best fixed depth in hindsight** at compute 0.6
([{low:.4f}, {high:.4f}], {count} host seeds), and about as much at 0.8 and 1.0. It is below on every seed at every
compute, even if the best depth is picked for each seed by its test loss, a choice that nobody can make.

**The size of the lead is less sure than its sign.** One of five starts of 4 blocks went wrong. Without that host
seed 4 blocks are the best depth, and the lead is {without} (four seeds; each interval includes 0). Against the best
depth of each seed it is {lucky}. At equal loss the plan takes {saved:.0f} % less compute at 0.6; against the best
depth of each seed {saved_lucky:.0f} %.

**No, with a plan from the shelf.** The four plans that were written down first grow to 8 blocks. On their one host
seed all of them lie above the best depth of that seed: 8 blocks are too deep for this compute, and a plan that ends
there pays for it. The default rule starts with 2 blocks and copies each once, early. That limit was set after the
plans below had been seen; it comes out level with the best depth at 0.6.

The plan was chosen on host seeds of its own, among {plans} plans at compute 0.6 ({choices} of them on a second
seed). When its name entered the list, 4, 5 and 6 blocks had been run on the seeds that judge, so that depths of 4
to 6 were known to be right: as they are to the best depth in hindsight.
"""
NAMES = """`3-5@30 last`: from 3 to 5 blocks when 30 % of the compute is used, by copies of the last half of the
blocks. `end`: all copies are of the last block. Without a word every block is copied as often. `rate=1.5`:
times the task's learning rate. *saves*: compute at equal loss, from the frontier of the same seed; where the
frontier ends before that loss, nothing can be said."""
WHY = """## Why?

Compute 0.6, the plan above with one thing changed, on two of the same host seeds."""
SURVIVES = """What survives so far: copies that work from their first step beat the same copies with zero output,
and trained blocks beat random ones (random minus copied, both with zero output: {zeroed}). Copies of another block
and copies of an untrained network vary by 0.01 between two seeds, so they decide nothing yet. **Not excluded**:
that growing from a shallow network avoids bad starts that deep ones have here. Standard deviation over seeds at
0.6: {spread}. A longer warm-up, or an initialisation that scales with depth, might give deep networks a part of the
lead."""
NOTES = {
    "random_block_zero": "random blocks with zero output in place of copies",
    "copy_zero": "copies whose output is zero at first",
    "copy_elsewhere": "copies of another block, drawn at random",
    "tiled": "the deep network from the start, as copies of an untrained one (minus: the fixed depth)",
}
CHOICE = """## When, how often, which blocks

Every plan that was tried, on the seeds that choose, compute 0.6; most on one seed, where differences below 0.005
say little. What the network ends with matters most: 4 to 6 blocks. Earlier is better than later, down to 15 % of
the compute. Of half the blocks the last half; several copies of the last block alone are worse. The default rule
follows: it copies a place once, later places first, early in the episode."""
TUNE = """## Learning rates

Test loss at compute 0.6, times the task's rate of 4e-3, on one host seed that is used for nothing else. The rate of
a depth in the tables above is the best here, where the depth comes near the frontier."""
OPEN = """## What is not known

- One width, one data set, one machine. `cifar10_resnet` and a larger network (`--stage large`) have not been run.
- More host seeds, a longer warm-up and another initialisation for deep networks, other shares of decay, ramps, and
  `2-4@15` on the seeds that judge: not run.
- Seconds: `--stage seconds` has not been run. Compute is counted in FLOPs; small networks use a GPU worse than deep
  ones.
- Passes over the data differ: 3 blocks train on {passes} times as many windows as the plan at 0.6 and 1.0.
- Depths 2 and 8, 3 at the task's own rate, and the first plans have one host seed each. None of them lies below the
  best depth of that seed; `4-8@50` comes within 0.001 of it at 1.0. A depth with fewer
  seeds that lay below it would be named here: {rivals}.

## Again

{commands}
"""


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    return found


def nats(found: dict[str, Any] | None, sign: str = "") -> str:
    """Mean and standard error."""
    if found is None:
        return ""
    return f"{found['mean']:{sign}.4f}" + ("" if found["error"] is None else f" ± {found['error']:.4f}")


def interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    ends = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    return f"{found['mean']:+.4f}{ends}"


def table(head: str, rows: list[str]) -> list[str]:
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {row} |" for row in rows), ""]


def answer(setup: dict[str, Any]) -> str:
    plan, judged = setup["verdict"]["plan"], setup["roles"]["judge"]["loss"]["arms"]
    cell, chosen = judged[plan]["computes"]["0.6"], setup["roles"]["choose"]["loss"]["arms"]
    lead = cell["minus frontier"]
    lucky = [-each["minus best of each seed"]["mean"] for each in judged[plan]["computes"].values()]
    return ANSWER.format(
        without=", ".join(f"{-value:.4f}" for value in without_bad_start(setup, plan)),
        lucky=f"{min(lucky):.4f} to {max(lucky):.4f}",
        saved_lucky=100 * cell["saving over the best of each seed"]["mean"],
        plan=plan,
        when=plan.partition("@")[2].split()[0],
        lead=-lead["mean"],
        low=-lead["high"],
        high=-lead["low"],
        count=lead["count"],
        saved=100 * cell["saving"]["mean"],
        plans=len(chosen),
        choices=sum(each["computes"]["0.6"]["count"] > 1 for each in chosen.values()),
    )


def without_bad_start(setup: dict[str, Any], plan: str) -> list[float]:
    """The plan minus the best depth by its mean at each compute, without the seed on which a fixed depth stands out."""
    losses: dict[tuple[str, float], dict[int, float]] = {}
    for row in setup["rows"]:
        if row["role"] == "judge":
            losses.setdefault((row["arm"], row["compute"]), {})[row["seed"]] = row["loss"]
    most = max(map(len, losses.values()))
    full = {key: values for key, values in losses.items() if len(values) == most}
    seeds = next(iter(full.values()))
    worst = {seed: max(v[seed] - median(v.values()) for v in full.values() if seed in v) for seed in seeds}
    kept = sorted(set(worst) - {max(worst, key=worst.__getitem__)})
    means = {key: fmean(values[seed] for seed in kept) for key, values in full.items()}
    computes = sorted(compute for arm, compute in full if arm == plan)
    static = {arm for arm, _ in full if arm.startswith("static")}
    return [means[plan, c] - min(means[arm, c] for arm in static if (arm, c) in means) for c in computes]


def column(setup: dict[str, Any], arm: str, compute: float, key: str = "loss") -> dict[int, float]:
    """What an arm had on each seed that judges."""
    rows = [row for row in setup["rows"] if (row["role"], row["arm"], row["compute"]) == ("judge", arm, compute)]
    return {row["seed"]: row[key] for row in rows}


def survives(setup: dict[str, Any]) -> str:
    shape, _, where = setup["verdict"]["plan"].partition(" ")
    random, copied = (column(setup, f"{shape} {kind} {where}", 0.6) for kind in ("random_block_zero", "copy_zero"))
    arms = (setup["verdict"]["plan"], "static 3 rate=1.5", "static 4", "static 5", "static 6")
    spread = ", ".join(f"{arm} {stdev(column(setup, arm, 0.6).values()):.4f}" for arm in arms)
    zeroed = ", ".join(f"{random[seed] - copied[seed]:+.4f}" for seed in sorted(random))
    return SURVIVES.format(zeroed=zeroed, spread=spread)


def judged_rows(arms: dict[str, Any], *, is_static: bool) -> list[str]:
    rows = []
    for arm, each in arms.items():
        known = each["settings"]
        if known["is_static"] != is_static or known["kind"] or known["decay"] != 0.2 or "tiled" in known["shape"]:
            continue
        for compute, cell in each["computes"].items():
            saving = cell.get("saving", {"count": 0})
            is_known = saving["count"] > saving.get("beyond", 0)
            saved = f"{100 * saving['mean']:+.0f} %" if is_known and compute != "1" else ""
            parts = [arm, compute, str(cell["count"]), nats(cell), interval(cell["minus frontier"])]
            if not is_static:
                parts += [interval(cell["minus best of each seed"]), saved]
            rows.append(" | ".join(parts))
    return rows


def doubts(arms: dict[str, Any], plan: str) -> list[str]:
    shape = plan.split()[0]
    rows = []
    for each in arms.values():
        known, cell = each["settings"], each["computes"].get("0.6")
        word = "tiled" if known["shape"].startswith("tiled") else known["kind"]
        if cell and word in NOTES and (known["shape"] == shape or word == "tiled"):
            rows.append(f"{NOTES[word]} | {cell['count']} | {nats(cell)} | {nats(cell['minus base'], '+')}")
    return rows


def tuned(arms: dict[str, Any]) -> list[str]:
    rates = sorted({each["settings"]["factor"] for each in arms.values()})
    shapes: dict[str, dict[float, str]] = {}
    for each in arms.values():
        known = each["settings"]
        shape = " ".join(filter(None, [known["shape"], known["where"]]))
        shapes.setdefault(shape, {})[known["factor"]] = f"{each['computes']['0.6']['mean']:.4f}"
    rows = [" | ".join([shape, *(own.get(rate, "") for rate in rates)]) for shape, own in sorted(shapes.items())]
    return table(" | ".join(["", *(f"x {rate:g}" for rate in rates)]), rows)


def regrets(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        f"{arm} | {each['worst']:+.4f} | {each['mean']:+.4f} | {', '.join(each['over'])}" for arm, each in found.items()
    ]
    return table("arm | at worst | in the mean | computes", rows)


def frontier_rows(judged: dict[str, Any]) -> list[str]:
    return [f"{each['compute']:g} | {each['arm']} | {nats(each)}" for each in judged["frontier"]["0.2"]]


def render(found: dict[str, Any]) -> str:
    setup = found["setups"]["code"]
    judged, chosen = setup["roles"]["judge"]["loss"], setup["roles"]["choose"]["loss"]
    rivals = sorted({arm for each in judged["frontier"]["0.2"] for arm in each["rivals"]})
    plans = sorted(chosen["arms"].items(), key=lambda item: item[1]["computes"]["0.6"]["mean"])
    script = (DOCS.parent / "benchmarks" / "frontier.py").read_text(encoding="utf-8")
    commands = [line.strip() for line in script.splitlines() if line.startswith("    python benchmarks/frontier.py")]
    lines = [INTRODUCTION, answer(setup), "![loss against compute](pictures/frontier_code.svg)", ""]
    lines += [f"{'; '.join(setup['hardware'])}, {', '.join(setup['date'])}, {', '.join(setup['corpus'])}.", ""]
    lines += ["## Grown networks", "", NAMES, ""]
    lines += table(
        "plan | compute | seeds | test loss | minus the best depth | minus the best depth of each seed | saves",
        judged_rows(judged["arms"], is_static=False),
    )
    lines += ["## Fixed depths", "", "The best of them at each compute:", ""]
    lines += table("compute | arm | test loss", frontier_rows(judged))
    rows = judged_rows(judged["arms"], is_static=True)
    lines += table("arm | compute | seeds | test loss | minus the best depth", rows)
    lines += ["## What it costs not to know the right size", "", "Nats above the best depth in hindsight.", ""]
    lines += regrets(judged["regret"])
    doubted = doubts(judged["arms"], setup["verdict"]["plan"])
    lines += [WHY, "", *table("instead | seeds | test loss | minus the plan", doubted), survives(setup), ""]
    cells = [f"{arm} | {each['computes']['0.6']['count']} | {nats(each['computes']['0.6'])}" for arm, each in plans]
    lines += [CHOICE, "", *table("plan | seeds | test loss", cells)]
    lines += [TUNE, "", *tuned(setup["roles"]["tune"]["loss"]["arms"])]
    again = "\n".join(f"    {line}" for line in commands)
    plan, seen = setup["verdict"]["plan"], "examples"
    ratios = [
        fmean(column(setup, "static 3 rate=1.5", c, seen).values()) / fmean(column(setup, plan, c, seen).values())
        for c in (0.6, 1.0)
    ]
    passes = " and ".join(f"{ratio:.1f}" for ratio in ratios)
    lines += [OPEN.format(commands=again, rivals=", ".join(rivals) or "there is none", passes=passes)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
