"""Writes docs/results.md, the answers, from benchmarks/results: python docs/make_results.py. A test compares the two."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "results.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
VERSIONS = {"2026-11-15": "0.1.0", "2026-11-16": "0.2.0", "2026-11-17": "0.2.0"}
"""the version of that day's code; later days are of 0.3.0"""
SPACE = "\u00a0"
"""does not break a line: an interval stays together"""

HEAD = """# Results

<!-- written by docs/make_results.py from benchmarks/results; change neither by hand -->

All arms of a question have the same host seeds, orders of data and learning-rate plans, so differences are paired by seed. Decisions see
validation data only; the test split is read once, by the harvested network. Intervals are 95 %, over host seeds, by bootstrap where nothing else is
said. They do not cover the choice of the task. *n* counts host seeds. *Version* is that of the code that made a number. The
[laboratory](../lab/README.md) has all arms, curves, commands, and what did not work. CIFAR-10 here means its images after JPEG compression.
"""
TRAINED = """Points of test accuracy of a network that was trained, then grown. *More training*: the same network left alone, as long. *As long*:
the network that it became, from random weights, for the epochs that growing took. *Whole*: the same for all epochs."""
SCRATCH = """Points ahead of the same host left alone, and of the grown network from random weights (same epochs; same FLOPs). So growing from
scratch is level with knowing the right size. It saves the search: to reach 66, 68 and 70 % on CIFAR-10, trying widths in turn costs {sweep}
times the FLOPs of one grown run (0.1.0)."""
PLACES = """At most 1.3 times the parameters, from a host trained for 15 epochs, 8 more. Random and schedule plant later, so a part of
the lead is time: on the 7 seeds where random lost no seed to the end, the lead over it is 1.56."""
FRONTIER = """`code`, a byte GPT: networks that grow by copies against the best of all fixed depths in hindsight, for the same training FLOPs.
`{plan}` goes from 3 to 5 blocks when 30 % is spent; it was chosen on host seeds of its own. Student's t. At 0.6 it reaches the same loss with {saved}
less compute than the best depth on average ({own} less than the best of each seed). Deep networks have bad starts here that growing
may avoid; a larger network (2 seeds) was inconclusive, and on a ResNet no gain was found: [frontier](../lab/frontier.md)."""
TAUGHT = """Policies of `esper ppo`, three trainings each, on 48 hosts that no training and no choice saw. By how many points the taught policy is
ahead of each arm:"""
DECIDES = """On `digits` it chose FOSSILIZE {kept} times, {kept_right} in line with the last measurement, and CULL {culled} times, {measured} of them after a
measurement and {culled_right} of these in line. **It is a good plan**: its usual actions, replayed without reading anything, and the policy
blinded to its measurements are as good. All hosts of a task are alike, so there is little to read. [Policies](../lab/policies.md)."""
HARM = """Points ahead of the host left alone: the default rule, and in brackets the rule of 0.2.0 (mean ± standard error). Digits, 8 to 24 host
seeds each, settings chosen on others. In the mean {now} and {before}. [Rules](../lab/rules.md)."""
EVIDENCE = """912 forked episodes: how often the sign of a measured contribution was right, of the cases where the gain is beyond twice its noise.
So Esper keeps what was measured, and judges when the rate has fallen. [Evidence](../lab/evidence.md)."""
RULES = """Points of test accuracy ahead of the rule of 0.1.0, and the FLOPs. The rule now also waits where data are missing.
[Rules](../lab/rules.md)."""
SPEED = "[Speed](../lab/speed.md), [ranks](../lab/ranks.md)."
LEARNER = "Medians of five random seeds. [The learner](../lab/learner.md)."
FAULTS = """`make faults`: what came of attacks on what is saved. *Anything else* would be another result, a traceback, a hang or a write outside.
[Reliability](../lab/reliability.md)."""


def read(name: str) -> dict[str, Any]:
    """A committed result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def version(found: dict[str, Any]) -> str:
    """The version of the code that made it, by its last day."""
    return VERSIONS.get(str(found["date"]).rpartition(", ")[2].strip("[]'"), "0.3.0")


def table(head: str, rows: Iterable[str]) -> list[str]:
    """A table and an empty line."""
    return [
        f"| {head} |",
        "|" + "---|" * (head.count("|") + 1),
        *(f"| {row} |" for row in rows),
        "",
    ]


def points(estimate: dict[str, Any]) -> str:
    """Mean and interval in points."""
    mean, low, high = (100 * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:+.2f} [{low:+.2f},{SPACE}{high:+.2f}]"


def minus(found: dict[str, Any], other: str, arm: str = "heuristic") -> str:
    """By how much an arm is ahead of another, if both were played."""
    difference = found["arms"][arm]["minus"].get(other)
    return points(difference["test_accuracy"]) if difference else ""


def seeds_of(found: dict[str, Any]) -> int:
    return len(next(iter(found["arms"].values()))["seeds"])


def question_rows(names: dict[str, str], others: Iterable[str]) -> list[str]:
    """A question a row: what heuristic is ahead of."""
    others, rows = list(others), []
    for name, words in names.items():
        found = read(f"question_{name}")
        cells = [minus(found, other) for other in others]
        rows.append(" | ".join([words, *cells, str(seeds_of(found)), version(found)]))
    return rows


def trained() -> list[str]:
    names = {
        "q2-cifar10": "CIFAR-10, 20 + 10 epochs",
        "q2-fashion_mnist": "Fashion-MNIST, 20 + 10",
        "q2-shakespeare": "tinyshakespeare, 20 + 10",
        "q2-digits": "digits, 30 + 15",
    }
    rows = question_rows(names, ("never", "final", "final-whole"))
    return [TRAINED, "", *table("task | more training | as long | whole | n | version", rows)]


def scratch() -> list[str]:
    names = {"q1-cifar10": "CIFAR-10, 20 epochs", "q1-digits": "digits, 40"}
    rows = question_rows(names, ("never", "final", "final-equal-flops"))
    ratios = [f"{row['flops_ratio']['mean']:.2f}" for row in read("sweep_cifar10")["targets"]]
    sweep = f"{', '.join(ratios[:-1])} and {ratios[-1]}"
    head = "task | left alone | same epochs | same FLOPs | n | version"
    return [SCRATCH.format(sweep=sweep), "", *table(head, rows)]


def places() -> list[str]:
    rows = question_rows({"budget-cifar10": "CIFAR-10"}, ("never", "random", "schedule"))
    return [PLACES, "", *table("task | left alone | random | schedule | n | version", rows)]


def frontier() -> list[str]:
    setup = read("frontier")["setups"]["code"]
    judged, plan = setup["roles"]["judge"]["loss"]["arms"], setup["verdict"]["plan"]
    rows = []
    for arm in (plan, "heuristic"):
        for compute, cell in judged[arm]["computes"].items():
            lead = cell["minus frontier"]
            shown = f"{lead['mean']:+.4f} [{lead['low']:+.4f},{SPACE}{lead['high']:+.4f}]"
            label = arm if arm == plan else "rule of 0.2.0"
            rows.append(
                f"{label} | {compute} | {cell['mean']:.4f} | {shown} | {lead['count']} | 0.2.0"
            )
    cell = judged[plan]["computes"]["0.6"]
    saved, own = (
        f"{100 * cell[key]['mean']:.0f} %"
        for key in ("saving", "saving over the best of each seed")
    )
    head = "arm | compute | test loss, nats | minus the best fixed depth | n | version"
    return [FRONTIER.format(plan=plan, saved=saved, own=own), "", *table(head, rows)]


def taught() -> list[str]:
    record = read("policies")
    arms = {
        "never": "left alone",
        "heuristic": "the default rule",
        "plan": "its usual actions as a plan",
        "blinded": "itself, with other hosts' means for its readings",
    }
    rows = []
    for task, families in record["lessons"].items():
        together = families["contribution"]["together"]
        own = f"{together['taught']['params']:,.0f}"
        for arm, words in arms.items():
            cell = together[arm]
            lead = points(cell["taught minus"]["test_accuracy"])
            rows.append(
                f"{task} | {words} | {lead} | {own} | {cell['params']:,.0f} | {version(record)}"
            )
    evidence = record["lessons"]["digits"]["contribution"]["evidence"]
    keeps, culls = evidence["FOSSILIZE"], evidence["CULL"]
    text = DECIDES.format(
        kept=keeps["times"],
        kept_right=keeps["in_line"],
        culled=culls["times"],
        measured=culls["measured"],
        culled_right=culls["in_line"],
    )
    head = "task | minus | points | its parameters | theirs | version"
    old = read("question_controller-cifar10")
    past = f"Under the lifecycle of 0.2.0 a policy for CIFAR-10 was {minus(old, 'never', 'trained')} over the host left alone and {minus(old, 'heuristic', 'trained')} against the rule (20 host seeds)."
    return [TAUGHT, "", *table(head, rows), text, "", past, ""]


def lead(found: dict[str, Any], arm: str) -> tuple[float, float]:
    """Mean and standard error of an arm's lead over never, in points."""
    gaps = [
        100 * (row["test_accuracy"] - found["never"][seed]["test_accuracy"])
        for seed, row in found[arm].items()
    ]
    return fmean(gaps), stdev(gaps) / len(gaps) ** 0.5


def harm() -> list[str]:
    judged = read("harm")["judge"]
    cells: dict[tuple[int, str], dict[int, str]] = {}
    means: dict[str, list[tuple[float, float]]] = {"now": [], "before": []}
    for name, found in judged["variations"].items():
        noise, width = (part.rpartition(" ")[2] for part in name.split(", ")[1:])
        arms = {"now": "heuristic", "before": "heuristic:held_out_part=0"}
        leads = {word: lead(found, arm) for word, arm in arms.items()}
        for word, pair in leads.items():
            means[word].append(pair)
        now, before = (f"{mean:+.1f}{SPACE}±{SPACE}{error:.1f}" for mean, error in leads.values())
        key = (int(name.split()[0]), f"{float(noise):.0%}")
        cells.setdefault(key, {})[int(width)] = f"{now} ({before})"
    rows = [
        " | ".join(
            [f"{key[0]:,}", key[1], *(cells[key][width] for width in (2, 4, 8)), version(judged)]
        )
        for key in sorted(cells)
    ]
    overall = {}
    for word, pairs in means.items():
        error = sum(pair[1] ** 2 for pair in pairs) ** 0.5 / len(pairs)
        overall[word] = f"{fmean(pair[0] for pair in pairs):+.1f} ± {error:.1f}"
    head = "examples | wrong labels | width 2 | width 4 | width 8 | version"
    return [HARM.format(**overall), "", *table(head, rows)]


def evidence() -> list[str]:
    rows = []
    for task, found in read("evidence")["tasks"].items():
        tables = [
            found["tables"][f"test_loss all {point}"] for point in ("early", "middle", "late")
        ]
        signs = [f"{each['predictors']['moment']['right_signs']:.0%}" for each in tables]
        forks = sum(each["forks"] for each in tables)
        rows.append(f"{task} | {' | '.join(signs)} | {forks} | 0.2.0")
    return [EVIDENCE, "", *table("task | early | middle | late | forks | version", rows)]


def speed() -> list[str]:
    runs = read("throughput")["runs"]
    grid = {
        (row["hosts"], row["batch"], row["seeds"]): row["examples_per_s"]
        for row in runs["grid, 16 lanes"]["rows"]
    }
    eager = next(
        row["examples_per_s"]
        for row in runs["grid"]["rows"]
        if (row["executor"], row["hosts"], row["batch"], row["seeds"]) == ("eager", 32, 128, 3)
    )
    findings = read("ppo_findings")["runs"]
    rows = [
        f"32 hosts, three seeds each, batch 128, one H200: examples per second | {round(grid[32, 128, 3], -3):,.0f} | eager {round(eager, -2):,.0f} | 0.2.0"
    ]
    for name, words in {
        "1 process, bf16": "teaching on 16 hosts, one H200, bf16: decisions per second",
        "8 processes, bf16, compiled": "the same, 8 processes, compiled",
    }.items():
        row = findings[name]["rows"][0]
        low, high = row["decisions_per_s_range"]
        rows.append(
            f"{words} | {row['decisions_per_s']:.0f} ({low:.0f} to {high:.0f}) | 24.7 of an earlier system | 0.2.0"
        )
    overhead = read("overhead")
    low, high = (100 * part for part in overhead["quartiles"])
    rows.append(
        f"wrapping a CNN of 1 M parameters, nothing planted, one CPU thread | {100 * overhead['median_overhead']:+.1f} % per step ({low:+.1f} to {high:+.1f}) | the bare model | 0.1.0"
    )
    return [SPEED, "", *table("what | result | beside | version", rows)]


def learner() -> list[str]:
    parts = read("peers_rl")["parts"]
    cartpole = next(row for row in parts["cartpole"] if row["learner"] == "ours")
    ratios = next(row for row in parts["speed"] if "default" in row["learner"])["ratios"]
    rows = [
        f"CartPole without velocity, 50,000 steps | {cartpole['median']:.0f} | RecurrentPPO 500 | {min(ratios):.1f} to {max(ratios):.1f} x its steps per second | 0.3.0"
    ]
    ahead = {True: 0, False: 0}
    problems = sorted({(row["problem"], row["gamma"]) for row in parts["masked"]})
    for problem, gamma in problems:
        own, peer = (
            next(
                row["median"]
                for row in parts["masked"]
                if (row["problem"], row["gamma"]) == (problem, gamma) and word in row["learner"]
            )
            for word in ("ours, 8", "Maskable")
        )
        ahead[own >= peer] += 1
    rows.append(
        f"{len(problems)} masked problems of sb3-contrib, 8 environments | ahead or level in {ahead[True]} | MaskablePPO | behind in {ahead[False]} | 0.3.0"
    )
    return [LEARNER, "", *table("problem | ours | peer | beside | version", rows)]


def rules() -> list[str]:
    stages = read("rules")["stages"]
    gate, kept = stages["judge, with the gate"], stages["judge, kept once measured"]
    rows = []
    for task in ("cifar10", "cifar10_full", "fashion_mnist", "digits"):
        new, old = kept[task]["most work"], gate[task]["heuristic"]
        rows.append(rule_row(task, new, old))
    fresh = stages["judge, fresh seeds"]["cifar10_deep"]
    rows.append(rule_row("cifar10_deep", fresh["most work"], fresh["heuristic, with the gate"]))
    text = stages["judge, positions first"]["python_text"]
    rows.append(
        rule_row(
            "python_text", text["most work, positions first"], text["heuristic, with the gate"]
        )
    )
    return [RULES, "", *table("task | points | standard error | FLOPs | n | version", rows)]


def rule_row(task: str, new: dict[str, Any], old: dict[str, Any]) -> str:
    """Two rules on the seeds that both have."""
    pairs = {
        key: [
            (dict(zip(new["seeds"], new[key], strict=True))[seed], other)
            for seed, other in zip(old["seeds"], old[key], strict=True)
            if seed in new["seeds"]
        ]
        for key in ("test_accuracy", "flops")
    }
    gaps = [100 * (own - other) for own, other in pairs["test_accuracy"]]
    work = sum(own for own, _ in pairs["flops"]) / sum(other for _, other in pairs["flops"])
    error = stdev(gaps) / len(gaps) ** 0.5
    return f"{task} | {fmean(gaps):+.2f} | {error:.2f} | x {work:.2f} | {len(gaps)} | 0.2.0"


def faults() -> list[str]:
    groups = read("faults")["groups"]
    words = {
        "power": "power cuts",
        "kills": "kill -9",
        "damage": "damaged files",
        "settings": "absurd settings",
        "disk": "failing disk and memory",
    }
    rows = []
    for key, name in words.items():
        own = [group for path, group in groups.items() if path.startswith(f"{key}/")]
        cases = sum(sum(group["verdicts"].values()) for group in own)
        rows.append(f"{name} | {cases:,} | {sum(len(group['bad']) for group in own)} | 0.2.0")
    return [FAULTS, "", *table("attack | cases | anything else | version", rows)]


SECTIONS = {
    "Growing a trained network": trained,
    "Growing from scratch": scratch,
    "Equal compute": frontier,
    "A taught policy": taught,
    "Where growing would hurt": harm,
    "What evidence can tell": evidence,
    "Does the place matter": places,
    "The default rule": rules,
    "Speed": speed,
    "The learner": learner,
    "Reliability": faults,
}


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", *section()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
