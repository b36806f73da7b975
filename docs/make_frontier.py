"""Writes lab/frontier.md from benchmarks/results/frontier.json and frontier.toml: python docs/make_frontier.py."""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS.parent / "lab" / "frontier.md"
FOUND = DOCS.parent / "benchmarks" / "results" / "frontier.json"
WORDS: dict[str, str] = tomllib.loads((DOCS / "frontier.toml").read_text(encoding="utf-8"))
MIDDLE, FIRST = "0.6", 5
"""The compute that has most, and host seeds before those that were declared."""
LEADS = ("minus frontier", "minus best of each seed")
SHELF, SECOND = ("2-4-8@30,70", "2-8@30", "2-8@50", "4-8@50"), "2-4@15"
"""The plans that were written down first, and the one that was next best on the seeds that choose."""
NOTES = {
    "random_block_zero": "random blocks with zero output in place of copies",
    "copy_zero": "copies whose output is zero at first",
    "copy_elsewhere": "copies of another block, drawn at random",
    "tiled": "copies of an untrained network, deep from the start (minus: the fixed depth)",
}
SECTIONS = {"decay=": "**Other shares", "ramp=": "**Ramps", "resnet": "## cifar10_resnet"}
SECTIONS |= {"--warmup": "**Longer warm", "large": "## A larger", "--stage seconds": "## Seconds"}
"""What a command has in it, and how the part of the page begins that it is for."""
MISSING = ["other shares of decay", "copies along a ramp", "fixed depths of `cifar10_resnet`"]
MISSING += ["longer warm-ups", "a larger network", "seconds"]


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    return found


def say(key: str, **values: Any) -> list[str]:
    """A text with its numbers, its paragraphs and points filled anew."""
    lines = []
    for paragraph in WORDS[key].strip().format(**values).split("\n\n"):
        for point in paragraph.replace("\n  ", " ").split("\n- "):
            is_point = point.startswith("- ") or (point is not paragraph and "\n- " in paragraph)
            text = re.sub(r"\bat 1\b(?!\.\d)", "at 1.0", " ".join(point.removeprefix("- ").split()))
            heads = ("- ", "  ") if is_point else ("", "")
            filled = textwrap.wrap(text, 136, break_long_words=False, break_on_hyphens=False)
            lines += [heads[number > 0] + line for number, line in enumerate(filled)]
        lines.append("")
    return lines


def nats(found: Mapping[str, Any], sign: str = "", times: float = 1, digits: int = 4) -> str:
    """Mean and standard error."""
    error = "" if found["error"] is None else f" ± {times * found['error']:.{digits}f}"
    return f"{times * found['mean']:{sign}.{digits}f}{error}"


def interval(found: Mapping[str, Any] | None) -> str:
    if found is None or not found["count"]:
        return ""
    ends = [f"{found[end]:+.4f}" for end in ("low", "high") if found[end] is not None]
    return f"{found['mean']:+.4f}" + (f" [{', '.join(ends)}]" if ends else "")


def table(head: str, rows: Iterable[str]) -> list[str]:
    return [
        f"| {head} |",
        "|" + "---|" * (head.count("|") + 1),
        *(f"| {row} |" for row in rows),
        "",
    ]


def signed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:+.4f}" for value in values)


def span(values: Sequence[float]) -> str:
    return f"{min(values):.4f} to {max(values):.4f}"


def is_plain(known: Mapping[str, Any]) -> bool:
    """Depths, plans and the default rule, without a variant."""
    is_plan = "@" in known["shape"] and known["ramp"] == 0
    is_usual = known["kind"] is None and known["decay"] == 0.2 and known["warmup"] == 1
    return is_usual and (known["is_static"] or is_plan or known["shape"] == "heuristic")


class Setup:
    """One task's part of the results, by its first metric."""

    def __init__(self, found: Mapping[str, Any], metric: str = "loss"):
        self.found, self.metric = found, metric
        judged = found["roles"]["judge"][metric]
        self.arms, self.frontier = judged["arms"], judged["frontier"].get("0.2", [])
        self.regret, self.plan = judged["regret"], found["verdict"]["plan"]
        known = {arm: each["settings"] for arm, each in self.arms.items()}
        self.static = [arm for arm, each in known.items() if each["is_static"] and is_plain(each)]
        self.grown = [
            arm for arm, each in known.items() if not each["is_static"] and is_plain(each)
        ]

    def cells(self, arm: str) -> dict[str, Any]:
        found: dict[str, Any] = self.arms.get(arm, {"computes": {}})["computes"]
        return found

    def column(
        self, arm: str, compute: str, key: str = "", role: str = "judge"
    ) -> dict[int, float]:
        """What an arm had on each host seed."""
        wanted = (role, arm, float(compute))
        rows = (
            row for row in self.found["rows"] if (row["role"], row["arm"], row["compute"]) == wanted
        )
        return {row["seed"]: row[key or self.metric] for row in rows if row["stage"] != "seconds"}

    def best_of_seed(self, compute: str) -> dict[int, float]:
        """On each host seed what its best depth had."""
        columns = [self.column(arm, compute) for arm in self.static]
        return {
            seed: min(own[seed] for own in columns if seed in own)
            for own in columns
            for seed in own
        }

    def over_best(self, arm: str, compute: str) -> list[float]:
        return minus(self.column(arm, compute), self.best_of_seed(compute))

    def depth_rows(self, times: float = 1, digits: int = 4) -> list[str]:
        """Static depths by compute; the best at each is bold."""
        computes, rows = [f"{each['compute']:g}" for each in self.frontier], []
        best = {(each["arm"], f"{each['compute']:g}") for each in self.frontier}
        for arm in sorted(self.static, key=lambda arm: (int(arm.split()[1]), arm)):
            cells = [self.cells(arm).get(compute) for compute in computes]
            told = [
                f"{nats(cell, '', times, digits)} ({cell['count']})" if cell else ""
                for cell in cells
            ]
            told = [
                f"**{t}**" if (arm, c) in best else t for t, c in zip(told, computes, strict=True)
            ]
            rows.append(" | ".join([arm, *told]))
        return table(" | ".join(["arm", *computes]), rows)

    def grown_rows(self) -> list[str]:
        """Grown networks by compute: value, seeds, and what is between them and the best depth."""
        computes = sorted({compute for arm in self.grown for compute in self.cells(arm)}, key=float)
        rows = []
        for arm in self.grown:
            told = [arm]
            for cell in map(self.cells(arm).get, computes):
                leads = [interval(cell.get(k)) for k in LEADS] if cell else []
                told.append(f"{nats(cell)} ({cell['count']}): {'; '.join(leads)}" if cell else "")
            rows.append(" | ".join(told))
        return table(" | ".join(["plan", *computes]), rows)


def minus(own: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def saves(cell: Mapping[str, Any]) -> str:
    """Compute at equal loss, over the best depth by its mean and over that of each seed."""
    both = [cell["saving"], cell["saving over the best of each seed"]]
    if (
        any(each["count"] <= each["beyond"] for each in both)
        or both[0]["beyond"] > both[0]["count"] / 2
    ):
        return ""
    return "{:.0f} % ({:.0f} %)".format(*(100 * each["mean"] for each in both))


def answer(code: Setup, larger: Setup | None) -> list[str]:
    plan, verdict, chosen = (
        code.plan,
        code.found["verdict"],
        code.found["roles"]["choose"]["loss"]["arms"],
    )
    cells, depths = code.cells(plan), {f"{each['compute']:g}": each for each in code.frontier}
    leads = [-cell["minus frontier"]["mean"] for cell in cells.values()]
    lucky = [-cell["minus best of each seed"]["mean"] for cell in cells.values()]
    saved = "reached" if max(verdict["saved"].values(), default=0.0) >= 0.15 else "not reached"
    told = {
        "start": plan[0],
        "share": plan.partition("@")[2].split()[0],
        "plan": plan,
        "saved": saved,
    }
    word, ahead = "Yes" if verdict["is_reached"] else "No", len(verdict["ahead"])
    lines = ["## The answer", ""]
    lines += say("answer", word=word, ahead=ahead, leads=span(leads), lucky=span(lucky), **told)
    rows = []
    for compute, cell in cells.items():
        lead, over, best = cell["minus frontier"], code.over_best(plan, compute), depths[compute]
        parts = [compute, str(cell["count"]), nats(cell), f"{best['arm']}: {nats(best)}"]
        parts += [f"**{interval(lead)}**, {-lead['sigmas']:.1f} standard errors"]
        parts += [
            interval(cell["minus best of each seed"]),
            f"{sum(v < 0 for v in over)} of {len(over)}",
            saves(cell),
        ]
        rows.append(" | ".join(parts))
    head = (
        "compute | seeds | the plan | best depth | difference | to the best depth of "
        "each seed | below | saves"
    )
    lines += [*table(head, rows), *say("answer_table")]
    challenge, starts = code.found["challenge"], dict[str, list[str]]()
    for start in challenge[MIDDLE]["bad starts"]:
        told_start = f"{start['seed']} ({start['above']:+.3f})"
        starts.setdefault(start["arm"].removeprefix("static ").partition(" ")[0], []).append(
            told_start
        )
    bad = (
        "; ".join(f"of {depth} blocks {', '.join(seeds)}" for depth, seeds in starts.items())
        or "none"
    )
    own, bound = code.column(plan, MIDDLE).values(), code.found["bad start"]
    best = [f"{min(code.best_of_seed(compute).values()):.4f} at {compute}" for compute in cells]
    choices = sum(each["computes"][MIDDLE]["count"] > 1 for each in chosen.values())
    counts: dict[str, Any] = {"plans": len(chosen), "choices": choices, "count": len(own)}
    counts["own"] = sum(v - median(own) > bound for v in own) or "none"
    means = ", ".join(f"{cell['mean']:.4f}" for cell in cells.values())
    halves = {compute: code.over_best(plan, compute) for compute in cells}
    told = {
        word: ", ".join(
            f"{-fmean(over[part]):.4f} at {c}" for c, over in halves.items() if over[part]
        )
        for word, part in (("early", slice(FIRST)), ("late", slice(FIRST, None)))
    }
    last = max(code.column(plan, MIDDLE))
    told["declared"] = ", ".join(
        f"`{arm}`" for arm in code.static if last in code.column(arm, MIDDLE)
    )
    told |= {
        "bound": bound,
        "bad": bad,
        "large": large_lead(larger),
        "best": ", ".join(best),
        "mean": means,
    }
    lines += say("weak", **counts, **told)
    readings = {
        key: [each[key] for each in challenge.values()]
        for key in challenge[MIDDLE]
        if key != "bad starts"
    }
    texts = {
        k: [f"{interval(v)} ({v['arm']}, {v['count']})" if v["count"] else "" for v in r]
        for k, r in readings.items()
    }
    lines += [
        *say("sceptic"),
        *table(" | ".join(["", *challenge]), (" | ".join([k, *t]) for k, t in texts.items())),
    ]
    known = [
        (compute, each[key])
        for compute, each in challenge.items()
        for key in readings
        if each[key]["count"]
    ]
    unsure = [compute for compute, each in known if each["high"] is None or each["high"] >= 0]
    where = f", at {', '.join(dict.fromkeys(unsure))}" if unsure else ""
    below, most = sum(each["mean"] < 0 for _, each in known), dict[str, float]()
    for compute, each in known:
        most[compute] = max(each["mean"], most.get(compute, each["mean"]))
    least = ", ".join(f"{-value:.4f} at {compute}" for compute, value in most.items())
    lines += say(
        "verdict",
        readings=len(known),
        below=below,
        open=len(unsure) or "none",
        where=where,
        least=least,
    )
    if seconds_cells := code.cells(SECOND):
        values = " and ".join(
            f"{interval(cell['minus frontier'])} at {c}" for c, cell in seconds_cells.items()
        )
        over = [fmean(minus(code.column(SECOND, c), code.column(plan, c))) for c in seconds_cells]
        lines += say(
            "second",
            second=SECOND,
            plan=plan,
            values=values,
            over=" and ".join(f"{v:.4f}" for v in over),
        )
    nearest = min(
        cell["minus best of each seed"]["mean"]
        for arm in SHELF
        for cell in code.cells(arm).values()
    )
    ruled = code.cells("heuristic").items()
    rule = ", ".join(
        f"{interval(cell['minus frontier'])} at {c} ({cell['count']} host seeds)"
        for c, cell in ruled
    )
    return lines + say("shelf", nearest=f"{nearest:+.4f}", rule=rule)


def seconds(code: Setup) -> list[str]:
    alone = code.found["seconds for 1.0, alone"]
    depth = next(
        each["arm"] for each in code.frontier if f"{each['compute']:g}" == MIDDLE
    ).partition(" rate=")[0]
    if code.plan not in alone or depth not in alone:
        return []
    computes = sorted(
        {f"{row['compute']:g}" for row in code.found["rows"] if row["stage"] == "seconds"}
    )
    more, saved = alone[code.plan] / alone[depth], code.cells(code.plan)[MIDDLE]["saving"]["mean"]
    shares = {
        "more": 100 * (more - 1),
        "saved": 100 * saved,
        "left": 100 * (1 - (1 - saved) * more),
    }
    told = {key: f"{share:.{int(key == 'more')}f}" for key, share in shares.items()}
    paces = ", ".join(f"{arm} {pace:.1f}" for arm, pace in alone.items())
    told |= {"computes": ", ".join(computes), "paces": paces, "plan": code.plan, "depth": depth}
    return ["## Seconds", "", *say("seconds", **told)]


def why(code: Setup) -> list[str]:
    shape, _, place = code.plan.partition(" ")
    rows, wide = [], []
    for arm, each in code.arms.items():
        known, cell = each["settings"], each["computes"].get(MIDDLE)
        word = "tiled" if known["shape"].startswith("tiled") else known["kind"]
        if (
            cell
            and cell.get("minus base")
            and word in NOTES
            and (known["shape"] == shape or word == "tiled")
        ):
            rows.append(
                f"{NOTES[word]} | {cell['count']} | {nats(cell)} | {nats(cell['minus base'], '+')}"
            )
            own = code.column(arm, MIDDLE).values()
            wide += [NOTES[word].partition(",")[0]] if max(own) - min(own) > 0.01 else []
    random, copied = (
        code.column(f"{shape} {kind} {place}", MIDDLE)
        for kind in ("random_block_zero", "copy_zero")
    )
    spread = {arm: code.column(arm, MIDDLE).values() for arm in (code.plan, *code.static)}
    told = ", ".join(
        f"{arm} {stdev(own):.4f} ({len(own)})" for arm, own in spread.items() if len(own) > 1
    )
    lines = [
        "## Why?",
        "",
        *say("why"),
        *table("instead | seeds | test loss | minus the plan", rows),
    ]
    doubtful = WORDS["wide"].format(arms=", ".join(wide)) if wide else ""
    lines += say("survives", zeroed=signed(minus(random, copied)), wide=doubtful, spread=told)
    shifted = [arm for arm, each in code.arms.items() if each["settings"]["decay"] != 0.2]
    cells = [
        (arm, compute, cell) for arm in sorted(shifted) for compute, cell in code.cells(arm).items()
    ]
    if cells:
        rows = [
            f"{a} | {c} | {x['count']} | {nats(x)} | {interval(x.get('minus frontier'))}"
            for a, c, x in cells
        ]
        lines += [
            *say("decays"),
            *table("arm | compute | seeds | test loss | minus the best depth", rows),
        ]
    return lines


def when(code: Setup) -> list[str]:
    chosen = code.found["roles"]["choose"]["loss"]["arms"].items()
    plans = sorted(
        ((arm, each["computes"][MIDDLE]) for arm, each in chosen), key=lambda item: item[1]["mean"]
    )
    told = [f"{arm} | {nats(cell)} ({cell['count']})" for arm, cell in plans]
    third = -(-len(told) // 3)
    told += [" | "] * (3 * third - len(told))
    rows = [" | ".join(told[row::third]) for row in range(third)]
    lines = ["## When, how often, which blocks", "", *say("choice")]
    lines += table(" | ".join(["plan | test loss (seeds)"] * 3), rows)
    ramps = [
        arm
        for arm, each in code.arms.items()
        if each["settings"]["ramp"] and "@" in each["settings"]["shape"]
    ]
    cells = [(arm, compute, cell) for arm in ramps for compute, cell in code.cells(arm).items()]
    if cells:
        rows = [
            f"{a} | {c} | {x['count']} | {nats(x)} | {interval(x.get('minus base'))}"
            for a, c, x in cells
        ]
        lines += [
            *say("ramps"),
            *table("plan | compute | seeds | test loss | minus the same at once", rows),
        ]
    return lines


def tuned(code: Setup) -> list[str]:
    arms = code.found["roles"]["tune"]["loss"]["arms"]
    usual = {arm: each["settings"] for arm, each in arms.items() if each["settings"]["warmup"] == 1}
    rates, shapes = (
        sorted({known["factor"] for known in usual.values()}),
        dict[str, dict[float, str]](),
    )
    for arm, known in usual.items():
        shape = " ".join(filter(None, [known["shape"], known["where"]]))
        first = min(code.column(arm, MIDDLE, role="tune").items(), default=None)
        shapes.setdefault(shape, {})[known["factor"]] = f"{first[1]:.4f}" if first else ""
    rows = [
        " | ".join([shape, *(own.get(rate, "") for rate in rates)])
        for shape, own in sorted(shapes.items())
    ]
    lr = next(known["lr"] / known["factor"] for known in usual.values())
    lines = ["## Learning rates and warm-ups", "", *say("tune", lr=lr)]
    lines += table(" | ".join(["", *(f"x {rate:g}" for rate in rates)]), rows)
    pairs = [(arm, arm.partition(" warmup=")[0]) for arm in arms if arm not in usual]
    columns = [[code.column(name, MIDDLE, role="tune") for name in names] for names in pairs]
    costs = [cost for own, other in columns for cost in minus(own, other)]
    if not costs:
        return lines
    told = [
        [", ".join(f"{by[seed]:.4f}" for seed in sorted(by)) for by in both] for both in columns
    ]
    rows = [" | ".join([arm, *texts]) for (arm, _), texts in zip(pairs, told, strict=True)]
    lines += say("warmups", share=f"{code.found['warm-up']:g}")
    lines += table(
        "times the usual one | test loss, host seed by host seed | usual, on the "
        "seeds that have it",
        rows,
    )
    return lines + say("warm", costs=span(costs))


def large_lead(larger: Setup | None) -> str:
    """The larger network in a sentence."""
    if larger is None:
        return "A larger network was not run."
    (compute, cell), *_ = larger.cells(larger.plan).items()
    over, lead = larger.over_best(larger.plan, compute), cell["minus frontier"]["mean"]
    below = (
        f"below the best depth of its seed on {sum(v < 0 for v in over)} of {len(over)} host seeds"
    )
    return (
        f"On a larger network the plan has {lead:+.4f} against the best depth by its "
        f"mean, and is {below}."
    )


def large(larger: Setup) -> list[str]:
    plan, first = larger.plan, larger.frontier[0]
    compute = f"{first['compute']:g}"
    cells = [
        (arm, each["computes"][compute])
        for arm, each in larger.arms.items()
        if compute in each["computes"]
    ]
    cells.sort(key=lambda item: item[1]["mean"])
    rows = [
        f"{a} | {c['count']} | {nats(c)} | {signed(larger.over_best(a, compute))}" for a, c in cells
    ]
    tried = larger.found["roles"].get("tune", {"loss": {"arms": {}}})["loss"]["arms"]
    tuned = ", ".join(
        f"{arm} {next(iter(each['computes'].values()))['mean']:.4f}" for arm, each in tried.items()
    )
    rate, lucky = larger.arms[plan]["settings"]["factor"], larger.over_best(plan, compute)
    leads = minus(larger.column(plan, compute), larger.column(first["arm"], compute))
    end = plan.partition("@")[0].split("-")[-1]
    has_end = any(arm.split()[1] == end for arm in larger.static)
    missing = (
        "" if has_end else f" {end} blocks, the depth that the plan ends with, have not been run."
    )
    lines = [
        "## A larger network, once",
        "",
        *say("large", compute=compute, rate=rate, tuned=tuned),
    ]
    lines += table("arm | seeds | test loss | minus the best depth of each seed", rows)
    told = {
        "plan": plan,
        "best": first["arm"],
        "leads": signed(leads),
        "lucky": signed(lucky),
        "missing": missing,
    }
    return lines + say("large_result", below=sum(v < 0 for v in lucky), count=len(lucky), **told)


def images(shown: Setup) -> list[str]:
    rows, means, rate = (
        [],
        [],
        {arm: each["settings"]["factor"] for arm, each in shown.arms.items()},
    )
    for plan, compute, cell in (
        (arm, *each) for arm in shown.grown for each in shown.cells(arm).items()
    ):
        gaps = []
        for key in ("error", "loss"):
            same = [
                shown.column(each, compute, key)
                for each in shown.static
                if rate[each] == rate[plan]
            ]
            for best in sorted(filter(None, same), key=lambda own: fmean(own.values()))[
                :1
            ]:  # none at this rate yet
                gaps.append(minus(shown.column(plan, compute, key), best))
        if gaps:
            told = [
                nats(cell, "", 100, 2) + f" ({cell['count']})",
                ", ".join(f"{100 * gap:+.2f}" for gap in gaps[0]),
            ]
            rows.append(" | ".join([plan, compute, *told, signed(gaps[1])]))
            means.append([sum(own) > 0 for own in gaps])
    behind, higher = (sum(mean[place] for mean in means) for place in (0, 1))
    lines = [
        "## cifar10_resnet",
        "",
        "![wrong answers against compute](../docs/pictures/frontier_cifar10_resnet.svg)",
        "",
    ]
    lines += [*say("images"), *shown.depth_rows(100, 2)]
    lines += table(
        "plan | compute | wrong | minus the best depth of that rate | by loss: minus "
        "the best depth",
        rows,
    )
    lines += say("images_result", points=len(means), behind=behind, higher=higher)
    tuned, paces = dict[str, list[str]](), shown.found.get("seconds for 1.0, alone", {})
    for arm, each in (
        shown.found["roles"].get("tune", {"error": {"arms": {}}})["error"]["arms"].items()
    ):
        loss, wrong = (
            fmean(shown.column(arm, MIDDLE, key, "tune").values()) for key in ("loss", "error")
        )
        told = f"x {each['settings']['factor']:g} {loss:.4f} ({100 * wrong:.2f})"
        tuned.setdefault(each["settings"]["shape"], []).append(told)
    rates = "; ".join(f"{shape} {', '.join(sorted(found))}" for shape, found in tuned.items())
    lines += say("images_rates", rates=rates) if rates else []
    return lines + (
        say("images_seconds", paces=", ".join(f"{a} {p:.1f}" for a, p in paces.items()))
        if paces
        else []
    )


def unknown(code: Setup, page: str) -> Iterator[str]:
    left = [name for name, mark in zip(MISSING, SECTIONS.values(), strict=True) if mark not in page]
    depth = next(each["arm"] for each in code.frontier if f"{each['compute']:g}" == MIDDLE)
    means = [
        [fmean(code.column(arm, c, "examples").values()) for arm in (depth, code.plan)]
        for c in ("0.6", "1")
    ]
    rivals = (
        ", ".join(sorted({arm for each in code.frontier for arm in each["rivals"]}))
        or "there is none"
    )
    once = ", ".join(
        a
        for a in (*code.static, *code.grown)
        if all(c["count"] == 1 for c in code.cells(a).values())
    )
    if left:
        yield f"- Not run: {', '.join(left)}."
    yield "- Not run: other texts, other machines, an initialisation that scales with depth, warm-ups in between."
    ratios = " and ".join(f"{own / other:.1f}" for own, other in means)
    yield f"- Passes over the data differ: at 0.6 and 1.0 `{depth}` sees {ratios} times as many windows as the plan."
    yield f"- One host seed each: {once}."
    yield f"- A depth with fewer host seeds than others that lies below the best depth would be named here: {rivals}."


def again(page: str) -> Iterator[str]:
    """The benchmark's own commands, for what is on the page."""
    script = (
        (DOCS.parent / "benchmarks" / "frontier.py")
        .read_text(encoding="utf-8")
        .partition('\n"""\n')[0]
    )
    for line in script.splitlines():
        marks = [mark for word, mark in SECTIONS.items() if word in line]
        if line.lstrip().startswith(("$", "F=", "resnet=", "nvidia")) and all(
            mark in page for mark in marks
        ):
            yield line
    yield "    python docs/make_frontier.py"


def render(found: Mapping[str, Any]) -> str:
    setups, code = found["setups"], Setup(found["setups"]["code"])
    others = {
        name: "judge" in setups.get(name, {"roles": {}})["roles"]
        for name in ("code_large", "cifar10_resnet")
    }
    larger = Setup(setups["code_large"]) if others["code_large"] else None
    larger = larger if larger and larger.plan and larger.frontier else None
    where = (
        f"{'; '.join(code.found['hardware'])}, {', '.join(code.found['date'])}, "
        f"{', '.join(code.found['corpus'])}."
    )
    note = (
        "written by docs/make_frontier.py from benchmarks/results/frontier.json and "
        "frontier.toml; not by hand"
    )
    lines = [
        "# Does growing pay?",
        "",
        f"<!-- {note} -->",
        "",
        *say("introduction"),
        *answer(code, larger),
    ]
    lines += [
        "![loss against compute](../docs/pictures/frontier_code.svg)",
        "",
        *say("figure", where=where),
    ]
    lines += ["## Grown networks", "", *say("names"), *code.grown_rows()]
    lines += ["## Fixed depths", "", *say("depths"), *code.depth_rows()]
    lines += ["## What it costs not to know the right size", "", *say("regret")]
    told = {
        a: e
        for a, e in code.regret.items()
        if a in code.static or max(c["count"] for c in code.cells(a).values()) > 1
    }
    rows = [
        f"{a} | {e['worst']:+.4f} | {e['mean']:+.4f} | {', '.join(e['over'])}"
        for a, e in told.items()
    ]
    lines += table("arm | at worst | in the mean | computes", rows)
    lines += [
        *seconds(code),
        *why(code),
        *when(code),
        *tuned(code),
        *(large(larger) if larger else []),
    ]
    shown = Setup(setups["cifar10_resnet"], "error") if others["cifar10_resnet"] else None
    lines += (
        images(shown) if shown and shown.frontier else []
    )  # without fixed depths, plans alone say nothing
    page = "\n".join(lines)
    lines += ["## What is not known", "", *unknown(code, page), "", "## Again", "", *again(page)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
