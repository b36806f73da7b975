"""A run view as plain data for the page and the report: small, finite, thinned.

No files, no HTTP. Who leads by how much is in `standings`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import mean
from typing import Any, NamedTuple

from esper.dashboard.episode import Episode
from esper.dashboard.reader import RunReader, summarise
from esper.dashboard.series import Series
from esper.dashboard.view import RunView
from esper.storage.runfolder import label_policies

POINTS = 400
"""Rows of a chart; more than a screen can tell apart."""

MOST_SPANS = 400
MOST_ROWS = 200
_LONGEST_TEXT = 2000
_DEEPEST = 16
_LISTS = ("results", "ledgers", "anomalies", "worth")  # of a view; they grow now and then
_COMPARED = ("accuracy", "held_out_loss", "score", "params")  # columns of an episode's epochs


def encode(value: Any) -> str:
    """Write a value as compact JSON, as `plain` has it."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def plain(value: Any, depth: int = 0, digits: int = 7) -> Any:
    """Return the value as JSON has it: no infinities, no endless text or depth.

    Numbers have seven digits; 17 are exact.
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if not isinstance(value, Mapping | list | tuple):
        return str(value)[:_LONGEST_TEXT]
    if depth >= _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return {
            str(name)[:_LONGEST_TEXT]: plain(item, depth + 1, digits)
            for name, item in value.items()
        }
    return [plain(item, depth + 1, digits) for item in value]


def header(reader: RunReader) -> dict[str, Any]:
    """Return what stands above a run: its line of the list, and what there is to choose from."""
    view = reader.view
    summary = {name: value for name, value in vars(summarise(reader)).items() if name != "path"}
    trained = [int(episode.epochs.last("epoch") or 0) for episode in view.episodes.values()]
    planned = view.config.get("task", {}).get("epochs")
    grown = view.rounds.last("accuracy")
    twin = view.rounds.last("twin_accuracy")
    return summary | {
        "round": view.round,
        "hosts": sorted(view.episodes),
        "last_actions": _last_actions(view),
        "slots": view.slots,
        "modules": view.modules,
        "epochs": planned if type(planned) is int else max(trained, default=0),
        "over_twin": None if grown is None or twin is None else grown - twin,
        "unknown": view.unknown,
    }


def _last_actions(view: RunView) -> list[dict[str, Any]]:
    """The newest action of each host that has acted in its episode."""
    hosts = sorted(view.episodes)[:MOST_ROWS]
    acted = [host for host in hosts if view.episodes[host].last_action]
    return [{"host": host, **view.episodes[host].last_action} for host in acted]


def episode_data(episode: Episode, points: int = POINTS) -> dict[str, Any]:
    """Return one episode: curves, spans with the evidence of their gates, and what is left out."""
    spans = episode.spans[-MOST_SPANS:]
    share = min(points, max(24, 8 * points // max(1, len(spans))))
    shown = [
        vars(span)
        | {"readings": span.readings.thinned(share), "verdicts": span.verdicts[-MOST_ROWS:]}
        for span in spans
    ]
    return {
        "host": episode.host,
        "round": episode.round,
        "drawn": episode.drawn,
        "epochs": episode.epochs.thinned(points),
        "spans": shown,
        "spans_left_out": len(episode.spans) - len(spans),
        "actions": episode.actions,
        "last_action": episode.last_action or None,
        "rollbacks": episode.rollbacks[-MOST_ROWS:],
        "undecided": episode.undecided[-MOST_ROWS:],
    }


def rest(view: RunView) -> dict[str, Any]:
    """Return what does not change with every epoch."""
    spent = [
        {"what": what, "phase": phase, **costs}
        for what, phases in view.spent.items()
        for phase, costs in phases.items()
    ]
    lists = {name: getattr(view, name)[-MOST_ROWS:] for name in _LISTS}
    labels = label_policies(result["arm"] for result in lists["results"])
    lists["results"] = [row | {"arm": labels[row["arm"]]} for row in lists["results"]]
    return {"config": view.config, "spent": spent[:MOST_ROWS], **lists}


class Counts(NamedTuple):
    """How much there was to send in the parts of a message that seldom change."""

    rounds: int | None = None
    lists: list[int] | None = None


@dataclass
class Sent:
    """What one client has been sent."""

    view: RunView | None = None
    events: int = 0
    status: str = ""
    counts: Counts = field(default_factory=Counts)


def news(reader: RunReader, host: int, sent: Sent) -> dict[str, Any] | None:
    """Return what a client that looks at a host does not know yet, if anything.

    A new client knows nothing. `sent` is brought up to date.
    """
    view = reader.view
    status = reader.status()
    is_whole = view is not sent.view
    if not is_whole and (view.events, status) == (sent.events, sent.status):
        return None
    if is_whole:
        # a view that was folded again has other numbers
        sent.events = 0
        sent.counts = Counts()
    message: dict[str, Any] = {"whole": is_whole, "header": header(reader)}
    episode = view.episodes.get(host) or next(iter(view.episodes.values()), None)
    if episode:
        message["episode"] = episode_data(episode)
    lines = [asdict(line) for line in view.log if line.number >= sent.events]
    if lines:
        message["log"] = lines[-MOST_ROWS:]
    lengths = [len(getattr(view, name)) for name in _LISTS]
    counts = Counts(rounds=view.rounds.rows, lists=[*lengths, view.bookings])
    if counts.rounds != sent.counts.rounds:
        message["rounds"] = view.rounds.thinned(POINTS)
    if counts.lists != sent.counts.lists:
        message["rest"] = rest(view)
    sent.view = view
    sent.events = view.events
    sent.status = status
    sent.counts = counts
    return message


def curves(view: RunView) -> dict[str, list[float | None]]:
    """Return what two runs are compared by.

    That is rounds (ppo), or the mean over hosts epoch by epoch (run).
    """
    if view.kind == "ppo":
        return view.rounds.thinned(POINTS)
    measured: dict[float, dict[str, list[float]]] = {}  # epoch -> column -> values of the hosts
    for episode in view.episodes.values():
        for name in _COMPARED:
            _gather(episode, name, measured)
    series = Series()
    for epoch, columns in sorted(measured.items()):
        series.append(epoch=epoch, **{name: mean(values) for name, values in columns.items()})
    return series.thinned(POINTS)


def _gather(episode: Episode, name: str, measured: dict[float, dict[str, list[float]]]) -> None:
    """Add a column of one host to what was measured of all of them."""
    epochs = episode.epochs.column("epoch")
    for epoch, value in zip(epochs, episode.epochs.column(name), strict=True):
        if isfinite(value):
            measured.setdefault(epoch, {}).setdefault(name, []).append(value)
