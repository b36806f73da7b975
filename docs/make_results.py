"""Writes docs/results.md and its figures from benchmarks/results/question_*.json: python docs/make_results.py."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.cli.console import Row, compared_figure, interval_figure
from esper.dashboard.comparisons import pairs_of
from esper.telemetry.statistics import Estimate, compare_pairs

DOCS = Path(__file__).parent
PAGE = DOCS / "results.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
ORDER = (
    ("Growing from scratch", ("q1-cifar10", "q1-digits")),
    ("Growing a trained host", ("q2-cifar10", "q2-fashion_mnist", "q2-shakespeare", "q2-digits")),
    ("Does the choice of place and kind matter?", ("budget-cifar10",)),
    ("A trained controller", ("controller-cifar10", "controller-digits")),
)
BARS = (
    (
        "q2-cifar10",
        "heuristic",
        "never",
        3.0,
        "at 3 x the host's parameters, at least +3.0 points over more training",
    ),
    (
        "budget-cifar10",
        "heuristic",
        "random",
        0.0,
        "under 1.3 x the host's parameters, ahead of random growth",
    ),
    (
        "budget-cifar10",
        "greedy",
        "random",
        0.0,
        "under 1.3 x the host's parameters, ahead of random growth",
    ),
    (
        "q1-cifar10",
        "heuristic",
        "final-equal-flops",
        -0.5,
        "lower end of the interval above -0.5 points",
    ),
)
INTRODUCTION = """# Results

<!-- written by docs/make_results.py from benchmarks/results; change neither by hand -->

Growth policies against fair controls, by `esper compare`. All arms of a question have the same host seeds, orders of
data and learning-rate plans, so differences are paired by seed; decisions see validation data only, and the test
split is read once, by the harvested network. Intervals are 95 % bootstrap intervals over host seeds (expanded
percentiles). They cover host seeds and data orders, not the choice of the task, and nothing is corrected for looking
at several differences.

Trained policies on this page learned and played under the lifecycle of 0.2.0, which kept measured seeds by itself.

**never** is the host left alone, **random** legal places and kinds at fixed times (decisions 1, 2 and 3, unless its
name says others), **schedule** the first blueprint that fits at fixed times, **greedy** the slot with the highest
gradient score. Random and schedule thus plant fewer seeds than heuristic and greedy, and add fewer parameters:
differences to them are about how much is planted as well as where. **sham** has all events of the heuristic without
capacity; events alone change nothing, so on a CPU it equals never bit for bit, and on a GPU the two differ as two runs
of the same thing do. **start** is the host from scratch; **final** the network that the heuristic grew, from random
weights with as many epochs as growth had; **final-equal-flops** the same with as many FLOPs as growth took, its
measurements included; **final-whole** the same for pretraining and growth together. Static networks start at the
scale at which the task's seeds are born. A grown network is scored as it is taken home ("harvested"): seeds that are
still on probation are left out.

FLOPs are per episode, measuring and policy included, pretraining not. Seconds are the wall clock of hosts that trained
side by side, divided by their number: on a GPU arms share a population, so their seconds say nothing about each other.
CIFAR-10 here means its images after JPEG compression. The governor rolls a host back to its last good epoch when its
loss explodes. In the sections up to "Does the choice of place and kind matter?" heuristic and greedy are the rules of
an earlier version: the largest blueprint, in the heuristic's case later slots first, and seeds kept by early evidence.
The rule greedy is gone since: it was level with the heuristic in every question here. In the other sections heuristic
is the rule of 0.2.0, `heuristic:held_out_part=0` today: since 0.3.0 the default rule waits where data are missing.
Where a remark says that steps could differ by one example, an epoch's minibatches differed in size by
one image; they no longer do, and arms that were measured later are from after that change.
"""


SWEEP = """A sweep trains
hosts of 8, 10, 12 and 14 channels in the first block from scratch, the smallest first, until one reaches the target;
14 is the widest within the budget. The grown run is the heuristic's of q1-cifar10 at the task's own learning rate. A
run counts whole. Other shapes were not tried: the network that was grown, had one known it, takes {known:.2f} times the
grown run's FLOPs from random weights in as many epochs, and reaches every target on {reached} of {count} seeds
(`final` of q1-cifar10). Measured when steps of an epoch could differ by one example."""


FRONTIER = """`code`, a byte GPT: networks grown by copies against the best of all fixed depths in hindsight, for the
same training FLOPs. `{plan}` was chosen on host seeds of its own; heuristic is the default rule, which copies each of
its 2 blocks once. Paired by host seed, intervals by Student's t. [The frontier](frontier.md) has all depths and plans,
what was tried to explain the lead away, how much of it rests on bad starts, a larger network, and what is not known."""
CURVE = """How the policy for CIFAR-10 learnt (`ppo_cifar10.json`; 32 hosts a round, episodes of 30 epochs of 3,125
images, one H200): lead over the twins, the same hosts never grown, at the end of an episode, while actions are drawn,
mean and range of five rounds each.
Rounds 1 to 16 (4 processes), 17 to 60 and 61 to 80 (8 processes, the last with hosts in bf16) are three calls of
benchmarks/training.py; each planned learning rate and entropy bonus again, up to its last round."""
CURVE_PICTURE = "controller_curve.svg"
CURVE_RUNS = ("rounds 1 to 16", "rounds 17 to 60", "bf16, rounds 61 to 80")

RULES = """Test accuracy on host seeds from 40000 on, which chose nothing; `benchmarks/rules.py`, `rules.json`
({hardware}, {date}). *heuristic* plants what computes most in the slots with the fewest fossils, and seeds are kept
once measured; *the one before it* planted the largest blueprint, later slots first, and kept seeds by early evidence.
`cifar10_full` has whole epochs. For cifar10_deep the verdict is that of 80 further seeds from 60000 on, declared before
they were played (on a CPU); for python_text that of 20 seeds from 70000 on, declared as well, since a slot's first seed
mixes positions: attention before an MLP. The rows in brackets are what was judged before. With random seeds the lower
end is above 0 on {ahead} tasks of six. With `copy` in its list, as text tasks have it (chosen on seeds 30000 to 30009,
judged on 50000 to 50019), python_text gains more, which is the list's merit: with it the earlier places give the same
plan and {copied:.2f} %. On images the rule computes more; on digits it is behind by less than the goal allows."""
RULE_TASKS = ("cifar10", "cifar10_full", "fashion_mnist", "cifar10_deep", "python_text", "digits")
LIFECYCLES = """What the lifecycle is worth, with the same places: the earlier gate (one standard error of early
evidence), every seed kept at once, and what is done now, with late pruning and without it. *earlier places*: those of
the rule before."""

EVIDENCE = """Is a measured contribution worth anything? `benchmarks/evidence.py` of commit 2465f68 forks episodes at a decision: a seed
is kept in one branch and culled in the other, both go on with the same data and rates and end. The
difference of their test losses is the seed's **realised gain**; {forks} forks. Before the fork every
predictor had said its number. *early* is the first third, *late* where the learning rate has fallen or
the last fifth; live seeds and fossils together. `evidence.json` has every fork, rank correlations with
intervals, and the same for validation loss.

What it says: keeping pays nearly always. The weights of the moment are blind early: they are right about as often as
a coin, and culling by them costs 4 to 16 thousandths of a nat more than keeping every seed. One reason is batch norm,
whose running statistics belong to the network *with* the seed: with statistics estimated afresh on both sides
(*fresh*) the same weights are right in about nine of ten sure cases. Averaging weights helps less. Once the rate has
fallen to a tenth of its peak the plain measurement is right in 91 to 100 % of the sure cases, and deciding by it
costs no more than the best of the others: so that is when Esper measures whether a seed pays. No predictor beats
keeping every seed by more than 0.5 thousandths of a nat."""
PREDICTORS = {
    "moment": "weights of the moment",
    "moment_fresh": "weights of the moment, fresh batch norm",
    "average_0.5": "averaged over half an epoch",
    "average_0.5_fresh": "averaged over half an epoch, fresh batch norm",
    "average_2": "averaged over two epochs",
    "later": "weights of the moment, when the rate has fallen",
    "greedy": "greedy score of the slot",
    "gradient": "gradient norm",
    "params": "parameters alone",
}
EVIDENCE_TABLES = {
    "Rank correlation with the realised gain": lambda row: (
        "-" if row is None else f"{row['spearman']:+.2f}"
    ),
    "Right signs, where the gain is beyond twice its noise (the last three: by the "
    "best threshold on other hosts)": (
        lambda row: "-" if row is None or not row["signs"] else f"{row['right_signs']:.0%}"
    ),
    "Gain over keeping every seed, thousandths of a nat": lambda row: (
        "-" if row is None else f"{1000 * row['over_keeping_all']:+.2f}"
    ),
}


def curve_figure() -> str:
    """Lead over the twins by round."""
    leads: list[float] = []
    runs = json.loads((RESULTS / "ppo_cifar10.json").read_text(encoding="utf-8"))["runs"]
    for name in CURVE_RUNS:
        (row,) = runs[name]["rows"]
        leads += [100 * (a - b) for a, b in zip(row["accuracy"], row["twin_accuracy"], strict=True)]
    rows: list[Row] = []
    for start in range(0, len(leads), 5):
        part = leads[start : start + 5]
        rows.append(
            (
                f"rounds {start + 1} to {start + len(part)}",
                sum(part) / len(part),
                min(part),
                max(part),
            )
        )
    return interval_figure(
        rows,
        "cifar10: lead over the twins",
        "points of held-out accuracy, mean and range of five rounds",
    )


def points(estimate: dict[str, Any], sign: str = "") -> str:
    if estimate["low"] is None:
        return f"{100 * estimate['mean']:{sign}.2f}"
    low, high = 100 * estimate["low"], 100 * estimate["high"]
    return f"{100 * estimate['mean']:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def arms_of(found: dict[str, Any]) -> list[str]:
    has_episodes = all("episodes" in arm for arm in found["arms"].values())
    columns = [
        "arm",
        "test accuracy, %",
        "loss",
        "parameters",
        "peak",
        "FLOPs",
        "s",
        "planted, kept, culled",
        *(["episodes before"] if has_episodes else []),
    ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, arm in found["arms"].items():
        seeds = f"{arm['germinated']:.1f}, {arm['fossilized']:.1f}, {arm['culled']:.1f}"
        label = name if arm["rate"] == 1 else f"{name} (rate x {arm['rate']:g})"
        lines.append(
            f"| {label} | {points(arm['test_accuracy'])} | {arm['test_loss']['mean']:.4f} | "
            f"{arm['final_params']:,.0f} | {arm['peak_params']:,.0f} | {arm['flops']:.3g} | "
            f"{arm['seconds']:.1f} | {seeds} |"
            + (f" {'?' if arm['episodes'] is None else arm['episodes']} |" if has_episodes else "")
        )
    return lines


def differences_of(found: dict[str, Any]) -> list[str]:
    lines = ["| arm | minus | points | claim |", "|---|---|---|---|"]
    for name, other in pairs_of(found["arms"]):
        difference = found["arms"][name]["minus"][other]["test_accuracy"]
        lines.append(f"| {name} | {other} | {points(difference, '+')} | {difference['verdict']} |")
    return lines


def bars_of(known: dict[str, dict[str, Any]]) -> list[str]:
    """What the project set out to reach, and what was measured; what was not measured is left out and named so."""
    lines = ["| question | goal | measured | reached |", "|---|---|---|---|"]
    for question, arm, control, least, text in BARS:
        found = known.get(question, {}).get("arms", {}).get(arm, {}).get("minus", {}).get(control)
        if found is None:
            lines.append(f"| {question} | {arm}: {text} | not measured | |")
            continue
        difference = found["test_accuracy"]
        value = difference["mean"] if question == "q2-cifar10" else difference["low"]
        reached = "yes" if 100 * value > least else "no"
        lines.append(f"| {question} | {arm}: {text} | {points(difference, '+')} | {reached} |")
    return lines


def section_of(name: str, found: dict[str, Any]) -> list[str]:
    count = len(next(iter(found["arms"].values()))["seeds"])
    return [
        f"### {name}",
        "",
        found["asks"],
        "",
        f"{found['hardware']}, {found['date']}, {count} host seeds: `{found['command']}`",
        *(["", found["remark"]] if "remark" in found else []),
        "",
        f"![{name}](pictures/question_{name}.svg)",
        "",
        *arms_of(found),
        "",
        *differences_of(found),
        "",
    ]


def frontier_of(found: dict[str, Any]) -> list[str]:
    """The plan that was chosen, against the best fixed depth at equal compute."""
    judged, verdict = found["roles"]["judge"]["loss"], found["verdict"]
    lines = ["## Does growing pay at equal compute?", "", FRONTIER.format(plan=verdict["plan"]), ""]
    lines += [
        "| arm | compute | test loss, nats | minus the best fixed depth | seeds |",
        "|---|---|---|---|---|",
    ]
    for arm in (verdict["plan"], "heuristic"):
        for compute, cell in judged["arms"][arm]["computes"].items():
            lead = cell["minus frontier"]
            shown = f"{lead['mean']:+.4f} [{lead['low']:+.4f}, {lead['high']:+.4f}]"
            lines.append(f"| {arm} | {compute} | {cell['mean']:.4f} | {shown} | {lead['count']} |")
    return [*lines, ""]


def render(known: dict[str, dict[str, Any]]) -> str:
    lines = [INTRODUCTION, "## Goals", "", *bars_of(known), ""]
    lines += frontier_of(
        json.loads((RESULTS / "frontier.json").read_text(encoding="utf-8"))["setups"]["code"]
    )
    for title, names in ORDER:
        here = [name for name in names if name in known]
        if here:
            lines += [f"## {title}", ""]
        if "controller-cifar10" in here:
            lines += [CURVE, "", f"![how the policy learnt](pictures/{CURVE_PICTURE})", ""]
        for name in here:
            lines += section_of(name, known[name])
    lines += rules_of(json.loads((RESULTS / "rules.json").read_text(encoding="utf-8")))
    lines += evidence_of(json.loads((RESULTS / "evidence.json").read_text(encoding="utf-8")))
    sweep = load_sweep()
    if sweep is not None:
        count = len({row["seed"] for row in sweep["rows"]})
        where = f"{sweep['hardware']}, {sweep['date']}, {count} host seeds: `{sweep['command']}`"
        text = SWEEP.format(
            **known_shape(known["q1-cifar10"], max(row["target"] for row in sweep["targets"]))
        )
        lines += [
            "## One run instead of a sweep",
            "",
            sweep["asks"],
            text,
            "",
            where,
            "",
            *sweep_of(sweep),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def rules_of(found: dict[str, Any]) -> list[str]:
    """How the default rule stands to the one before it and to the trained policy, and what each lifecycle is worth."""
    stages = found["stages"]
    gate, kept = stages["judge, with the gate"], stages["judge, kept once measured"]
    unpruned = stages["judge, kept once measured, unpruned"]
    rivals = {task: (kept[task]["most work"], gate[task]["heuristic"]) for task in RULE_TASKS}
    first, fresh = dict(rivals), stages["judge, fresh seeds"]["cifar10_deep"]
    rivals["cifar10_deep"] = fresh["most work"], fresh["heuristic, with the gate"]
    mixing = stages["judge, positions first"]["python_text"]
    rivals["python_text"] = mixing["most work, positions first"], mixing["heuristic, with the gate"]
    ahead = sum((lead_of(*pair).low or 0) > 0 for pair in rivals.values())
    copies = stages["judge, copies in the list"]["python_text"]
    copied = 100 * fmean(copies["heuristic, copy in the list"]["test_accuracy"])
    text = RULES.format(hardware=found["hardware"], date=found["date"], ahead=ahead, copied=copied)
    lines = ["## Which rule, which lifecycle?", "", text, ""]
    lines += [
        "| task | heuristic, % | the one before it, % | points | FLOPs |",
        "|---|---|---|---|---|",
    ]
    lines += [versus(task, *pair) for task, pair in rivals.items()]
    lines.append(versus("(cifar10_deep, the first 20)", *first["cifar10_deep"]))
    lines.append(versus("(python_text, an MLP first)", *first["python_text"]))
    with_copies = copies["most work, copy in the list"], copies["heuristic, with the gate"]
    lines.append(versus("python_text, copies", *with_copies))
    lines += [
        "",
        LIFECYCLES,
        "",
        "| task | arm, % | minus, % | points | FLOPs |",
        "|---|---|---|---|---|",
    ]
    for task in ("cifar10", "cifar10_full"):
        for rule, places in {"most work": task, "heuristic": f"{task}, earlier places"}.items():
            new, gated = kept[task][rule], gate[task][rule]
            lines += [
                versus(
                    f"{places}: every seed kept, minus the gate",
                    gate[task][f"{rule}, every seed kept"],
                    gated,
                ),
                versus(f"{places}: kept once measured and pruned, minus the gate", new, gated),
                versus(f"{places}: pruned, minus unpruned", new, unpruned[task][rule]),
            ]
        lines.append(
            versus(
                f"{task}: the same lifecycle, minus the earlier places",
                kept[task]["most work"],
                kept[task]["heuristic"],
            )
        )
    before, now = gate["cifar10"]["trained policy"], kept["cifar10"]["trained policy"]
    lines.append(
        versus(
            "cifar10: heuristic, minus the trained policy in its own lifecycle",
            new_of(kept),
            before,
        )
    )
    lines.append(
        versus("cifar10: heuristic, minus the trained policy in today's", new_of(kept), now)
    )
    return [*lines, ""]


def new_of(kept: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = kept["cifar10"]["most work"]
    return found


def paired(key: str, arm: dict[str, Any], other: dict[str, Any]) -> list[list[float]]:
    """What two arms have on the seeds that both have."""
    known = [dict(zip(each["seeds"], each[key], strict=True)) for each in (arm, other)]
    return [[each[seed] for seed in sorted(known[0].keys() & known[1].keys())] for each in known]


def lead_of(arm: dict[str, Any], other: dict[str, Any]) -> Estimate:
    return compare_pairs(*paired("test_accuracy", arm, other))


def versus(label: str, arm: dict[str, Any], other: dict[str, Any]) -> str:
    """Two arms on the seeds that both have, as a row."""
    scores, work = (paired(key, arm, other) for key in ("test_accuracy", "flops"))
    means = " | ".join(f"{100 * sum(part) / len(part):.2f}" for part in scores)
    difference = f"{points(asdict(lead_of(arm, other)), '+')}, {len(scores[0])} seeds"
    return f"| {label} | {means} | {difference} | x {sum(work[0]) / sum(work[1]):.2f} |"


def evidence_of(found: dict[str, Any]) -> list[str]:
    """What measurements say about the end of an episode, task by task and point by point."""
    lines = ["## What evidence can tell", "", EVIDENCE.format(forks=found["forks"]), ""]
    lines += ["![predicted and realised gains](pictures/evidence.svg)", ""]
    cells = [(task, point) for task in found["tasks"] for point in ("early", "middle", "late")]
    tables = {
        (task, point): found["tasks"][task]["tables"][f"test_loss all {point}"]
        for task, point in cells
    }
    heads = [f"{task} {point}" for task, point in cells]
    for title, show in EVIDENCE_TABLES.items():
        lines += [
            f"**{title}**",
            "",
            f"| predictor | {' | '.join(heads)} |",
            f"|---{'|---' * len(heads)}|",
        ]
        for name, words in PREDICTORS.items():
            shown = [show(tables[cell]["predictors"].get(name)) for cell in cells]
            lines.append(f"| {words} | {' | '.join(shown)} |")
        lines.append("")
    facts = {
        "forks": lambda table: str(table["forks"]),
        "gain of keeping, mean": lambda table: f"{1000 * table['mean_gain']:+.1f}",
        "share of gains above 0": lambda table: f"{table['share_positive']:.0%}",
        "noise of one gain": lambda table: f"{1000 * table['noise']['standard_deviation']:.1f}",
        "most that a rank correlation could be": lambda table: f"{table['noise']['ceiling']:.2f}",
        "keeping every seed costs": lambda table: f"{1000 * table['regret_keep']:.2f}",
        "culling every seed costs": lambda table: f"{1000 * table['regret_cull']:.1f}",
    }
    lines += ["**The forks** (gains, noise and costs in thousandths of a nat)", ""]
    lines += [f"| | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    lines += [
        f"| {name} | {' | '.join(show(tables[cell]) for cell in cells)} |"
        for name, show in facts.items()
    ]
    return [*lines, ""]


def known_shape(found: dict[str, Any], target: float) -> dict[str, float]:
    """The grown network from random weights: its FLOPs beside the grown run's, and how often it reaches the target."""
    grown, static = (
        {row["seed"]: row for row in found["rows"] if row["arm"] == arm and row["rate"] == 1}
        for arm in ("heuristic", "final")
    )
    ratios = [static[seed]["flops"] / row["flops"] for seed, row in grown.items()]
    reached = sum(row["validation_accuracy"] >= target for row in static.values())
    return {"known": sum(ratios) / len(ratios), "reached": reached, "count": len(static)}


def sweep_of(found: dict[str, Any]) -> list[str]:
    """One grown run against trying sizes in turn."""
    lines = [
        "| target, validation | one grown run reaches it | FLOPs | a sweep reaches "
        "it | FLOPs | sweep / grown | "
        "the right size at once / grown |",
        "|" + "---|" * 7,
    ]
    for row in found["targets"]:
        ratio = row["flops_ratio"]
        at_once = "" if row["right_size_ratio"] is None else f"{row['right_size_ratio']:.2f}"
        lines.append(
            f"| {100 * row['target']:.0f} % | {100 * row['grown_reaches']:.0f} % of "
            f"seeds | {row['grown_flops']:.3g} | "
            f"{100 * row['sweep_reaches']:.0f} % | {row['sweep_flops']:.3g} | "
            f"{ratio['mean']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] | {at_once} |"
        )
    return lines


def load_sweep() -> dict[str, Any] | None:
    path = RESULTS / "sweep_cifar10.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def load() -> dict[str, dict[str, Any]]:
    paths = {
        path.stem.removeprefix("question_"): path
        for path in sorted(RESULTS.glob("question_*.json"))
    }
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


if __name__ == "__main__":
    found = load()
    PAGE.write_text(render(found), encoding="utf-8")
    (DOCS / "pictures" / CURVE_PICTURE).write_text(curve_figure(), encoding="utf-8")
    for name, record in found.items():
        (DOCS / "pictures" / f"question_{name}.svg").write_text(
            compared_figure(record), encoding="utf-8"
        )
