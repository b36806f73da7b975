"""Tables and figure of benchmarks/evidence.py: how well each predictor ranks and decides, beside the noise."""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
DRAWS = 1000
"""Bootstrap samples of host seeds."""
FEWEST = 8
"""Forks below which no table is made."""
ZERO = {"gate": 1.0}
"""Where a predictor says keep: above 0, and for today's gate above one standard error. The others learn where."""
NO_ZERO = ("greedy", "gradient", "gradient_ratio", "gradient_reading", "params")
SHOWN = ("moment", "later")
"""Predictors in the figure."""
Numbers = NDArray[np.float64]


def write_report(parts: Path, results: Path | None, points: Sequence[str]) -> None:
    """Read every part, print the tables, write JSON and figure."""
    records = [json.loads(path.read_text()) for path in sorted(parts.glob("*.json"))]
    records = [record for record in records if "forks" in record]
    if not records:
        raise SystemExit(
            f"{parts} holds no parts of benchmarks/evidence.py; run it with a --task first."
        )
    tasks = {}
    for name in dict.fromkeys(record["task"] for record in records):
        own = [record for record in records if record["task"] == name]
        if len({(json.dumps(r["settings"]), r["smoke"]) for r in own}) > 1:
            raise SystemExit(
                f"parts of {name} under {parts} have different settings; use a folder for each."
            )
        tasks[name] = summarise(own, points)
        print_task(name, tasks[name])
    total = sum(task["forks"] for task in tasks.values())
    # predictors have seen validation examples, so the test split is the fair judge
    for measure in ("validation_loss", "test_loss"):
        print_summary(tasks, measure, "spearman", "rank correlation with the realised gain", 1)
        print_summary(
            tasks, measure, "over_keeping_all", "1e-3 nats gained over keeping every seed", 1000
        )
    print(f"{total} forks in all")
    report = {"command": "python benchmarks/evidence.py", "forks": total, "tasks": tasks}
    where = results or ROOT / "benchmarks" / "results"
    where.mkdir(parents=True, exist_ok=True)
    (where / "evidence.json").write_text(json.dumps(report) + "\n")
    picture = (results or ROOT / "docs" / "pictures") / "evidence.svg"
    picture.write_text(draw_figure(tasks, points))


def summarise(records: Sequence[dict[str, Any]], points: Sequence[str]) -> dict[str, Any]:
    """One task: its forks as plain rows, and a table for each point and measure of the end."""
    forks = [fork for record in records for fork in record["forks"]]
    sound = [fork for fork in forks if fork["gains"]["validation_loss"] is not None]
    tables = {}
    for measure in ("validation_loss", "test_loss"):
        for kind in ("all", "live", "fossil"):
            for point in points:
                chosen = [f for f in sound if f["point"] == point and kind in ("all", f["kind"])]
                if len(chosen) >= FEWEST:
                    tables[f"{measure} {kind} {point}"] = judge(
                        chosen, measure, with_intervals=kind == "all"
                    )
    columns = (
        "seed",
        "policy",
        "epoch",
        "point",
        "slot",
        "birth",
        "kind",
        "stage",
        "blueprint",
        "alpha",
        "rate_share",
    )
    rows = [
        {key: fork[key] for key in columns}
        | {"predictors": {k: rounded(v) for k, v in fork["predictors"].items()}}
        | {
            "gains": {
                k: [rounded(g) for g in fork["gains"][k]] for k in ("validation_loss", "test_loss")
            }
        }
        for fork in sound
    ]
    replays = [record["replays"] for record in records]
    return {
        "settings": records[0]["settings"],
        "hardware": records[0]["hardware"],
        "date": records[0]["date"],
        "hosts": sum(len(record["seeds"]) for record in records),
        "first_seed": min(seed for record in records for seed in record["seeds"]),
        "rolled_back_hosts": sum(len(record["broken"]) for record in records),
        "forks": len(sound),
        "forks_dropped": len(forks) - len(sound),
        "replays": sum(replay["count"] for replay in replays),
        "replays_differ_by": max(
            (r["largest_difference"] for r in replays if r["count"]), default=None
        ),
        "tables": tables,
        "rows": rows,
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def judge(forks: Sequence[dict[str, Any]], measure: str, *, with_intervals: bool) -> dict[str, Any]:
    """Noise, the two rules that need no evidence, and every predictor."""
    seeds = np.array([fork["seed"] for fork in forks])
    noise = noise_of([fork["gains"][measure] for fork in forks])
    gains = np.array(
        [np.mean(fork["gains"][measure]) for fork in forks]
    )  # over all orders of data that there are
    orders = np.array([len(fork["gains"][measure]) for fork in forks])
    spread = noise["standard_deviation"]
    sure = (
        np.zeros(len(forks), bool)
        if spread is None
        else np.abs(gains) > 2 * spread / np.sqrt(orders)
    )
    found: dict[str, Any] = {
        "forks": len(forks),
        "hosts": len(set(seeds.tolist())),
        "noise": noise,
        "sure": int(sure.sum()),
        "mean_gain": float(gains.mean()),
        "share_positive": float((gains > 0).mean()),
        "regret_keep": float(np.maximum(-gains, 0).mean()),
        "regret_cull": float(np.maximum(gains, 0).mean()),
        "predictors": {},
    }
    names = [*forks[0]["predictors"], "gate"]
    for name in names:
        source = "moment_t" if name == "gate" else name
        told = [fork["predictors"][source] for fork in forks]
        has = np.array([value is not None and math.isfinite(value) for value in told])
        if has.sum() >= FEWEST:
            values = np.array([value for value, ok in zip(told, has, strict=True) if ok], float)
            picked = values, gains[has], sure[has], seeds[has]
            found["predictors"][name] = judge_one(name, *picked, with_intervals=with_intervals)
    return found


def judge_one(
    name: str,
    values: Numbers,
    gains: Numbers,
    sure: NDArray[np.bool_],
    seeds: Any,
    *,
    with_intervals: bool,
) -> dict[str, Any]:
    """Rank correlation, right signs and regret of one predictor."""
    found: dict[str, Any] = {"n": len(values), "spearman": spearman(values, gains)}
    if with_intervals:
        found["spearman_interval"] = bootstrap(
            lambda rows: spearman(values[rows], gains[rows]), seeds
        )
    learnt = learn_threshold(values, gains, seeds)
    found["regret_learnt"] = float(regrets(learnt, gains).mean())
    keeps = learnt  # where the predictor has no natural zero
    if name not in NO_ZERO:
        keeps = values > ZERO.get(name, 0.0)
        found["regret"] = float(regrets(keeps, gains).mean())
        found["share_kept"] = float(keeps.mean())
    if with_intervals:  # how much better than keeping everything
        better = np.maximum(-gains, 0) - regrets(keeps, gains)
        found["over_keeping_all"] = float(better.mean())
        found["over_keeping_all_interval"] = bootstrap(
            lambda rows: float(better[rows].mean()), seeds
        )
    found["signs"] = int(sure.sum())
    found["right_signs"] = float((keeps == (gains > 0))[sure].mean()) if sure.any() else None
    return found


def regrets(keeps: NDArray[np.bool_], gains: Numbers) -> Numbers:
    """What each decision cost: the better branch's loss is what could have been had."""
    return np.where(keeps, np.maximum(-gains, 0), np.maximum(gains, 0))


def learn_threshold(values: Numbers, gains: Numbers, seeds: Any) -> NDArray[np.bool_]:
    """Keep or not by the threshold that is best on the other half of the host seeds."""
    numbers = {seed: number for number, seed in enumerate(sorted(set(seeds.tolist())))}
    half = np.array(
        [numbers[seed] // 2 % 2 == 0 for seed in seeds.tolist()]
    )  # neighbours: both policies in each half
    keeps = np.zeros(len(values), bool)
    for judged in (half, ~half):
        known = ~judged
        order = np.unique(values[known])
        between = [-np.inf, *((order[:-1] + order[1:]) / 2), np.inf] if len(order) else [0.0]
        costs = [regrets(values[known] > threshold, gains[known]).sum() for threshold in between]
        keeps[judged] = values[judged] > between[int(np.argmin(costs))]
    return keeps


def noise_of(gains: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What other orders of data do to a realised gain, and the rank correlation left for a perfect predictor."""
    repeated = [own for own in gains if len(own) > 1]
    if len(repeated) < 3:
        nothing = (
            "standard_deviation",
            "repeat_correlation",
            "ceiling",
            "ceiling_interval",
            "ceiling_by_variance",
        )
        return {"repeated": len(repeated), **dict.fromkeys(nothing)}
    table = np.array(repeated)
    pairs = [(a, b) for a in range(table.shape[1]) for b in range(a)]

    def agree(rows: NDArray[np.int64]) -> float:
        return float(np.mean([spearman(table[rows, a], table[rows, b]) for a, b in pairs]))

    share = float(np.mean([1 / len(own) for own in gains]))

    def ceiling(agreement: float) -> float:
        """Of gains that are means over 1 / share orders (Spearman and Brown)."""
        agreement = max(0.0, agreement)
        return math.sqrt(agreement / (share + (1 - share) * agreement)) if agreement else 0.0

    agreement = agree(np.arange(len(table)))
    interval = bootstrap(agree, np.arange(len(table)))
    variance = float(table.var(1, ddof=1).mean())
    spread = float(np.var([np.mean(own) for own in gains], ddof=1))
    return {
        "repeated": len(repeated),
        "standard_deviation": math.sqrt(variance),
        "repeat_correlation": agreement,
        "ceiling": ceiling(agreement),
        "ceiling_interval": [ceiling(end) for end in interval],
        "ceiling_by_variance": math.sqrt(max(0.0, 1 - variance * share / spread)),
    }


def ranks(values: Numbers) -> Numbers:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


def spearman(left: Numbers, right: Numbers) -> float:
    """Rank correlation; 0 where one side has no ranks to tell apart."""
    a, b = ranks(left), ranks(right)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size > 0 else 0.0


def bootstrap(statistic: Callable[[NDArray[np.int64]], float], seeds: Any) -> list[float]:
    """95 % interval by resampling host seeds: forks of one host are not independent."""
    rows = [np.flatnonzero(seeds == seed) for seed in sorted(set(seeds.tolist()))]
    draw = np.random.default_rng(0)
    found = [
        statistic(np.concatenate([rows[n] for n in draw.integers(len(rows), size=len(rows))]))
        for _ in range(DRAWS)
    ]
    return [float(value) for value in np.quantile(found, [0.025, 0.975])]


# -- showing ---------------------------------------------------------------------------------------


def print_task(name: str, task: dict[str, Any]) -> None:
    print(
        f"\n## {name}: {task['forks']} forks of {task['hosts']} hosts, "
        f"{task['forks_dropped']} dropped, "
        f"{task['rolled_back_hosts']} hosts rolled back, {task['replays']} replays "
        f"differ by at most "
        f"{task['replays_differ_by']}"
    )
    for title, table in task["tables"].items():
        if title.split()[1] != "all" and not title.startswith("validation"):
            continue
        noise = table["noise"]
        print(
            f"\n### {title}: {table['forks']} forks of {table['hosts']} hosts, gain "
            f"{1000 * table['mean_gain']:+.1f} in the mean, "
            f"{table['share_positive']:.0%} positive; noise "
            f"{_show(noise['standard_deviation'], 1000)} "
            f"({noise['repeated']} repeated), ceiling {_ceiling(noise)}; "
            f"{table['sure']} signs are sure\n"
            f"regret in 1e-3 nats: always keep {1000 * table['regret_keep']:.2f}, "
            f"always cull {1000 * table['regret_cull']:.2f}"
        )
        print(
            f"{'predictor':18s} {'n':>4s} "
            f"{'rank correlation':>22s} "
            f"{'right signs':>14s} "
            f"{'regret':>8s} "
            f"{'learnt':>8s} {'over keeping all':>24s}"
        )
        for predictor, row in table["predictors"].items():
            signs = f"{_show(row['right_signs'], 100, 0)} % of {row['signs']}"
            print(
                f"{predictor:18s} {row['n']:4d} {_interval(row, 'spearman'):>22s} {signs:>14s} "
                f"{_show(row.get('regret'), 1000):>8s} {_show(row['regret_learnt'], 1000):>8s} "
                f"{_interval(row, 'over_keeping_all', 1000):>24s}"
            )


def print_summary(tasks: dict[str, Any], measure: str, key: str, what: str, times: float) -> None:
    """One line for each predictor, one column for each task and point."""
    tables = {
        (name, title.split()[2]): table
        for name, task in tasks.items()
        for title, table in task["tables"].items()
        if title.startswith(f"{measure} all")
    }
    print(f"\n## {what}, {measure}\n{'':18s}" + "".join(f"{name[:12]:>13s}" for name, _ in tables))
    print(f"{'':18s}" + "".join(f"{point:>13s}" for _, point in tables))
    for predictor in dict.fromkeys(
        name for table in tables.values() for name in table["predictors"]
    ):
        rows = [table["predictors"].get(predictor, {}) for table in tables.values()]
        print(f"{predictor:18s}" + "".join(f"{_show(row.get(key), times):>13s}" for row in rows))


def _show(value: float | None, times: float = 1, digits: int = 2) -> str:
    return "-" if value is None else f"{times * value:.{digits}f}"


def _ceiling(noise: dict[str, Any]) -> str:
    if noise["ceiling"] is None:
        return "unknown"
    low, high = noise["ceiling_interval"]
    return (
        f"{noise['ceiling']:.2f} [{low:.2f}, {high:.2f}] (by variance "
        f"{noise['ceiling_by_variance']:.2f})"
    )


def _interval(row: dict[str, Any], key: str, times: float = 1) -> str:
    if row.get(f"{key}_interval") is None:
        return f"{times * row[key]:+.2f}" if key in row else "-"
    low, high = row[f"{key}_interval"]
    return f"{times * row[key]:+.2f} [{times * low:+.2f}, {times * high:+.2f}]"


_PANEL, _GAP, _LEFT, _TOP = 190, 26, 116, 92
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:15px}"
    ".note{fill:#666;font-size:11px}"
    ".middle{text-anchor:middle}.axis{stroke:#bbb}.frame{fill:none;stroke:#ddd}"
    ".moment{fill:#cc6677}.average{fill:#4477aa}"
    "circle{opacity:.6}.back{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#eee}.note{fill:#aaa}.axis{stroke:#666}"
    ".frame{stroke:#444}.back{fill:#181818}}"
)


def draw_figure(tasks: dict[str, Any], points: Sequence[str]) -> str:
    """A panel for each task and point: predicted gain to the right, realised gain upwards, both on a bent scale."""
    width = _LEFT + len(points) * (_PANEL + _GAP) + 10
    height = _TOP + len(tasks) * (_PANEL + _GAP) + 34
    parts = [
        _text(12, 24, "What measurements predicted, and what came of it", "title"),
        '<circle class="moment" cx="18" cy="42" r="4"/>',
        _text(28, 46, "weights of the moment", "note"),
        '<circle class="average" cx="178" cy="42" r="4"/>',
        _text(
            188,
            46,
            "the same when the rate has fallen to a tenth; in brackets the rank correlations",
            "note",
        ),
        _text(
            _LEFT,
            height - 12,
            "→ predicted contribution   ↑ realised gain (nats, asinh scale; right signs lie in",
            "note",
        ),
        _text(_LEFT + 410, height - 12, "the upper right and lower left)", "note"),
    ]
    for column, point in enumerate(points):
        parts.append(
            _text(_LEFT + column * (_PANEL + _GAP) + _PANEL / 2, _TOP - 26, point, "middle")
        )
    for line, (name, task) in enumerate(tasks.items()):
        y = _TOP + line * (_PANEL + _GAP)
        parts.append(_text(12, y + _PANEL / 2, name, "name"))
        for column, point in enumerate(points):
            table = task["tables"].get(f"validation_loss all {point}")
            rows = [row for row in task["rows"] if row["point"] == point]
            if table is not None:
                parts.append(_panel(_LEFT + column * (_PANEL + _GAP), y, rows, table))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="Predicted against realised gain">'
    )
    return (
        f'{head}<style>{_STYLE}</style><rect class="back" width="100%" '
        f'height="100%"/>{"".join(parts)}</svg>\n'
    )


def _panel(x: float, y: float, rows: Sequence[dict[str, Any]], table: dict[str, Any]) -> str:
    gains = np.array([np.mean(row["gains"]["validation_loss"]) for row in rows])
    told = {name: np.array([row["predictors"][name] for row in rows]) for name in SHOWN}
    bend = max(1e-4, float(np.median(np.abs(gains))))
    reach = (
        max(float(np.abs(np.arcsinh(values / bend)).max()) for values in (gains, *told.values()))
        * 1.05
    )
    place = lambda values: np.arcsinh(values / bend) / reach * _PANEL / 2  # noqa: E731
    middle_x, middle_y = x + _PANEL / 2, y + _PANEL / 2
    parts = [
        f'<rect class="frame" x="{x}" y="{y}" width="{_PANEL}" height="{_PANEL}"/>',
        f'<line class="axis" x1="{x}" x2="{x + _PANEL}" y1="{middle_y}" y2="{middle_y}"/>',
        f'<line class="axis" x1="{middle_x}" x2="{middle_x}" y1="{y}" y2="{y + _PANEL}"/>',
    ]
    for name, kind in zip(SHOWN, ("moment", "average"), strict=True):
        for right, up in zip(place(told[name]), place(gains), strict=True):
            parts.append(
                f'<circle class="{kind}" cx="{middle_x + right:.1f}" '
                f'cy="{middle_y - up:.1f}" r="2.5"/>'
            )
    told_ranks = ", ".join(f"{table['predictors'][name]['spearman']:+.2f}" for name in SHOWN)
    parts.append(_text(x + _PANEL / 2, y - 6, f"{len(rows)} forks ({told_ranks})", "note middle"))
    return "".join(parts)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
