"""Writes docs/frontier.md from benchmarks/results/frontier.json: python docs/make_frontier.py."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "frontier.md"
FOUND = DOCS.parent / "benchmarks" / "results" / "frontier.json"
INTRODUCTION = """# Does growing pay?

<!-- written by docs/make_frontier.py from benchmarks/results/frontier.json; change neither by hand -->

You have compute, not epochs. So the question is: for the same training FLOPs, does a network that grows end with a
lower held-out loss than the best network of *fixed* size, even if somebody had told you that size beforehand?

The task is `code`: a byte GPT of width 256 and context 256 on the Python sources of one installation. 1.0 of
compute is 8 blocks on 3,000 steps of 64 x 256 bytes. Every arm has the same compute clock, ledger and learning-rate
plan (constant, with the last fifth of the compute falling to zero), bf16, AdamW, clipping at 1. A grown run pays
for its measurements. The test loss is read once, at the end, by the network as it is taken home.
"""
ANSWER = """## The answer

**Yes, with the right plan.** A network of 3 blocks whose last two blocks are copied when {when} % of the compute is
used (`{plan}`) ends **{lead:.4f} nats below the best fixed depth in hindsight** at compute 0.6 (95 % [{low:.4f},
{high:.4f}], {count} host seeds), and as much at 0.8 and 1.0. At equal loss that is {saved:.0f} % less compute than
the best fixed depth. It is below on every seed at every compute, even if the best depth is picked for each seed by
its test loss, a choice that nobody can make.

**No, with a plan from the shelf.** The four plans that were written down first grow to 8 blocks. On their one host
seed all of them lie above the best depth of that seed: 8 blocks are too deep for this compute, and a plan that ends
there pays for it. The default rule, which knows nothing of the right size, starts with 2 blocks, copies each once
and early, and comes out level with the best depth.

The plan was chosen on host seeds of its own, among {plans} plans at compute 0.6 ({choices} of them on a second
seed); what is claimed is on other seeds. Every depth has a learning rate of its own, tuned on a third set of seeds.
"""
NAMES = """`3-5@30 last`: from 3 to 5 blocks when 30 % of the compute is used, by copies of the last half of the
blocks. `end`: all copies are of the last block. Without a word every block is copied as often. `rate=1.5`:
times the task's learning rate. *saves*: compute at equal loss, from the frontier of the same seed; where the
frontier ends before that loss, nothing can be said."""
WHY = """## Why? What was tried to explain it away

Compute 0.6, the plan above with one thing changed, on the same host seeds."""
SURVIVES = """What survives: a copy must be *trained*, must stand *next to its original*, and must work *from
its first step*. Random blocks of the same shape, copies with their output set to zero, and copies of another
block lose more than growing gains. Depth that begins as copies of an untrained network is no better than any
other deep network. So what is inherited is not a good starting scale; it is what the block has learnt."""
NOTES = {
    "random_block_zero": "random blocks with zero output in place of copies",
    "copy_zero": "copies whose output is zero at first",
    "copy_elsewhere": "copies of another block, drawn at random",
    "tiled": "the deep network from the start, as copies of an untrained one (minus: the fixed depth)",
}
CHOICE = """## When, how often, which blocks

Every plan that was tried, on the seeds that choose, compute 0.6. Earlier is better than later, down to 15 % of the
compute. One copy of a block is better than two or three. Of half the blocks, the last half; all copies of the last
block is worse. What the network ends with matters most: 4 to 6 blocks at this compute. The default rule follows: it
copies a place once, later places first, early in the episode."""
TUNE = """## Learning rates

Test loss at compute 0.6, times the task's rate of 4e-3, one host seed that is used for nothing else. The rate of a
depth in the tables above is the best here, where the depth comes near the frontier."""
OPEN = """## What is not known

- One width, one data set, one machine. `cifar10_resnet` and a larger network (`--stage large`) have not been run.
- Seconds: `--stage seconds` has not been run. Compute is counted in FLOPs; small networks use a GPU worse than deep
  ones.
- Depths 2 and 8 and the first plans have one host seed each; they lie far above the frontier. A depth with fewer
  seeds that lay below it would be named here: {rivals}.
- One host seed of 4 blocks ends 0.026 above its other four. Without it 4 blocks would be the best depth at 0.6 to
  1.0; the plan lies below 4 blocks on every seed. That growing from a shallower network spares one such bad starts
  is possible and was not tested.

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
    ends = "" if found["count"] < 2 else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    return f"{found['mean']:+.4f}{ends}"


def table(head: str, rows: list[str]) -> list[str]:
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {row} |" for row in rows), ""]


def answer(setup: dict[str, Any]) -> str:
    plan, judged = setup["verdict"]["plan"], setup["roles"]["judge"]["loss"]["arms"]
    cell, chosen = judged[plan]["computes"]["0.6"], setup["roles"]["choose"]["loss"]["arms"]
    lead = cell["minus frontier"]
    return ANSWER.format(
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
    lines += [WHY, "", *table("instead | seeds | test loss | minus the plan", doubted), SURVIVES, ""]
    cells = [f"{arm} | {each['computes']['0.6']['count']} | {nats(each['computes']['0.6'])}" for arm, each in plans]
    lines += [CHOICE, "", *table("plan | seeds | test loss", cells)]
    lines += [TUNE, "", *tuned(setup["roles"]["tune"]["loss"]["arms"])]
    again = "\n".join(f"    {line}" for line in commands)
    lines += [OPEN.format(commands=again, rivals=", ".join(rivals) or "there is none")]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
