"""A run view as plain data for the page and the report:

small, finite, thinned. No files, no HTTP.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import isfinite
from statistics import mean
from typing import Any

from esper.dashboard.reader import RunReader, summarise
from esper.dashboard.view import Episode, RunView, Series
from esper.telemetry.statistics import compare_pairs, estimate_mean

POINTS = 400  # Rows of a chart; more than a screen can tell apart.
MOST_SPANS, MOST_ROWS = 400, 200
_LONGEST_TEXT, _DEEPEST = 2000, 16
CONTROL, _REST = "never", ("results", "ledgers", "anomalies", "worth")
_WAYS = ("amp", "compile", "imports", "files")  # The first two change a host that never grows, too.
_TRAINING = ("name", "epoch_examples", "held_out", "batch", "clock", "compute", "decay")
"""Settings of a task that a host feels even if nothing grows."""


def encode(value: Any) -> str:
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def plain(value: Any, depth: int = 0, digits: int = 7) -> Any:
    """The value as JSON has it:

    no infinities, seven digits (17 are exact), no endless text or depth.
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {
            str(name)[:_LONGEST_TEXT]: plain(item, depth + 1, digits)
            for name, item in value.items()
        }
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(item, depth + 1, digits) for item in value]
    return "…" if isinstance(value, Mapping | list | tuple) else str(value)[:_LONGEST_TEXT]


def header(reader: RunReader) -> dict[str, Any]:
    view = reader.view
    lived = max(
        (int(episode.epochs.last("epoch") or 0) for episode in view.episodes.values()), default=0
    )
    told = view.config.get("task", {}).get("epochs")
    grown, twin = view.rounds.last("accuracy"), view.rounds.last("twin_accuracy")
    return {name: value for name, value in vars(summarise(reader)).items() if name != "path"} | {
        "round": view.round,
        "hosts": sorted(view.episodes),
        "slots": view.slots,
        "epochs": told if type(told) is int else lived,
        "over_twin": None if grown is None or twin is None else grown - twin,
        "unknown": view.unknown,
    }


def episode_data(episode: Episode, points: int = POINTS) -> dict[str, Any]:
    """One episode: curves, spans with the evidence of their gates, and how much was left out."""
    spans = episode.spans[-MOST_SPANS:]
    share = min(points, max(24, 8 * points // max(1, len(spans))))
    told = [
        {**vars(s), "readings": s.readings.thinned(share), "verdicts": s.verdicts[-MOST_ROWS:]}
        for s in spans
    ]
    return {
        "host": episode.host,
        "round": episode.round,
        "epochs": episode.epochs.thinned(points),
        "spans": told,
        "spans_left_out": len(episode.spans) - len(spans),
        "actions": episode.actions,
        "rollbacks": episode.rollbacks[-MOST_ROWS:],
    }


def rest(view: RunView) -> dict[str, Any]:
    """What does not change with every epoch."""
    return {"config": view.config, **{name: getattr(view, name)[-MOST_ROWS:] for name in _REST}}


@dataclass
class Sent:
    """What one client has been told."""

    view: RunView | None = None
    events: int = 0
    status: str = ""
    counts: dict[str, Any] = field(
        default_factory=dict
    )  # part of a message -> how much there was to tell in it


def news(reader: RunReader, host: int, sent: Sent) -> dict[str, Any] | None:
    """What a client that looks at a host does not know yet, if anything; a new client knows
    nothing.
    """
    view, status = reader.view, reader.status()
    is_whole = view is not sent.view
    if not is_whole and (view.events, status) == (sent.events, sent.status):
        return None
    if is_whole:  # a view that was folded anew has other numbers
        sent.events, sent.counts = 0, {}
    message: dict[str, Any] = {"whole": is_whole, "header": header(reader)}
    if episode := view.episodes.get(host) or next(iter(view.episodes.values()), None):
        message["episode"] = episode_data(episode)
    if lines := [asdict(line) for line in view.log if line.number >= sent.events][-MOST_ROWS:]:
        message["log"] = lines
    counts = {"rounds": view.rounds.rows, "rest": [len(getattr(view, name)) for name in _REST]}
    if counts["rounds"] != sent.counts.get("rounds"):
        message["rounds"] = view.rounds.thinned(POINTS)
    if counts["rest"] != sent.counts.get("rest"):
        message["rest"] = rest(view)
    sent.view, sent.events, sent.status, sent.counts = view, view.events, status, counts
    return message


def curves(view: RunView) -> dict[str, list[float | None]]:
    """What two runs are compared by: rounds (ppo), or the mean over hosts epoch by epoch (run)."""
    if view.kind == "ppo":
        return view.rounds.thinned(POINTS)
    rows: dict[float, dict[str, list[float]]] = {}
    for episode, name in product(
        view.episodes.values(), ("accuracy", "held_out_loss", "score", "params")
    ):
        for epoch, value in zip(
            episode.epochs.column("epoch"), episode.epochs.column(name), strict=True
        ):
            if isfinite(value):
                rows.setdefault(epoch, {}).setdefault(name, []).append(value)
    series = Series()
    for epoch, found in sorted(rows.items()):
        series.append(epoch=epoch, **{name: mean(values) for name, values in found.items()})
    return series.thinned(POINTS)


@dataclass
class Arm:
    """What the episodes of one run, or of several that differ in nothing but their hosts, reached
    under a policy.
    """

    policy: str
    task: str
    epochs: float | None
    measure: str  # which examples the accuracy is of
    own: str
    training: str  # equal where a host that never grows would be trained alike
    accuracy: dict[int, float] = field(default_factory=dict)  # by host seed (run) or host (ppo)
    twins: dict[int, float] = field(default_factory=dict)
    params: list[float] = field(default_factory=list)


def arms_of(view: RunView, run: str) -> list[Arm]:
    """A run's results on test examples (run), or its newest finished round (ppo)."""
    task = view.config.get("task", {})
    name = str(task.get("name"))
    if view.kind == "ppo":
        arm = Arm(f"ppo ({run})", name, None, "held-out", f"ppo {run}", "")
        # episode by episode as long as the finished round is the newest, else its means
        for host, episode in view.episodes.items() if view.closed[0] == view.round else ():
            grown, twin, params = (
                episode.epochs.last(name) for name in ("accuracy", "twin_accuracy", "params")
            )
            if grown is not None and twin is not None and params is not None:
                arm.accuracy[host], arm.twins[host], arm.epochs = (
                    grown,
                    twin,
                    episode.epochs.last("epoch"),
                )
                arm.params.append(params)
        if not arm.accuracy:
            arm.accuracy[0], arm.twins[0] = (
                view.rounds.last(name) or 0.0 for name in ("accuracy", "twin_accuracy")
            )
        return [arm] if view.rounds.rows else []
    arms = []
    for result in view.results:
        policy, epochs, accuracy = (
            result["arm"],
            result["epochs"],
            {result["seed"]: result["test_accuracy"]},
        )
        own = json.dumps([policy, task, epochs, *map(view.config.get, _WAYS)], sort_keys=True)
        training = json.dumps(
            [*(task.get(name) for name in _TRAINING), epochs, *map(view.config.get, _WAYS[:2])]
        )
        if isfinite(result["test_accuracy"]):
            arms.append(
                Arm(
                    policy,
                    name,
                    epochs,
                    "test",
                    own,
                    training,
                    accuracy,
                    {},
                    [result["final_params"]],
                )
            )
    return arms


def standings(arms: Iterable[Arm]) -> list[dict[str, Any]]:
    """Accuracy per policy, and its lead over `never` on the same host seeds, or over each episode's
    own twin.
    """
    joined: dict[str, Arm] = {}
    for arm in arms:
        whole = joined.setdefault(arm.own, replace(arm, accuracy={}, params=[]))
        whole.accuracy |= arm.accuracy
        whole.params += arm.params
    control = {arm.training: arm.accuracy for arm in joined.values() if arm.policy == CONTROL}
    return [
        _standing(arm, {} if arm.policy == CONTROL else control.get(arm.training, {}))
        for arm in joined.values()
    ]


def _standing(arm: Arm, control: dict[int, float]) -> dict[str, Any]:
    known = arm.twins or control
    pairs = [(value, known[seed]) for seed, value in sorted(arm.accuracy.items()) if seed in known]
    return {
        **{name: getattr(arm, name) for name in ("policy", "task", "epochs", "measure")},
        "accuracy": asdict(estimate_mean([value for _, value in sorted(arm.accuracy.items())])),
        "control": "its twin" if arm.twins else CONTROL,
        "gain": asdict(compare_pairs(*zip(*pairs, strict=True))) if pairs else None,
        "params": mean(arm.params) if arm.params else None,
    }
