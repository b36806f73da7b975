"""`esper report`: runs as one HTML file that needs nothing else.

The drawing is the page's own, from `static`.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from esper.dashboard.comparisons import (
    ComparisonReader,
    FolderReader,
    comparison_data,
    open_shown,
)
from esper.dashboard.payload import curves, encode, episode_data, header, plain, rest
from esper.dashboard.reader import RunReader
from esper.dashboard.standings import Arm, arms_of, standings
from esper.leyline.errors import SaveError
from esper.storage.files import FileKind, has_mark, require_replaceable, write_durably
from esper.storage.runfolder import COMPARE_COMMAND, GARDEN_COMMAND

STATIC = Path(__file__).parent / "static"
MOST_EPISODES = 8
"""Hosts whose timelines are drawn, per run."""

REPORT = FileKind(
    "a report of esper report", has_mark('<meta name="generator" content="esper report">')
)
"""A report is known again by a line of its head."""


class Recipe(NamedTuple):
    """How to do a run again."""

    text: str  # the command, and the settings that it reads
    advice: str  # what has to be known about it


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write one page about runs and comparisons.

    Of a run it has configuration, curves, timelines, ledger, gates, scores, and how to do it again;
    of a comparison arms, paired differences and curves. What stands at `out` and is no report is
    refused.
    """
    require_replaceable(out, REPORT)
    if not runs:
        raise SaveError("a report needs at least one folder of a run or comparison.")
    names = [path.resolve().name for path in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in runs]
    readers = {name: open_shown(path) for name, path in zip(names, runs, strict=True)}
    write_durably(out, page(report_data(readers), "esper report: " + ", ".join(readers)).encode())


def report_data(readers: Mapping[str, FolderReader]) -> dict[str, Any]:
    """Return all that a report shows, by the names of its folders."""
    arms: list[Arm] = []
    runs = []
    comparisons = []
    for name, reader in readers.items():
        if isinstance(reader, ComparisonReader):
            comparisons.append(_comparison_data(reader, name))
        else:
            arms.extend(arms_of(reader.view, name))
            runs.append(_run_data(reader, name))
    return {
        "version": version("esper-lite"),
        "date": date.today().isoformat(),
        "standings": standings(arms),
        "comparisons": comparisons,
        "runs": runs,
    }


def _comparison_data(reader: ComparisonReader, name: str) -> dict[str, Any]:
    data = comparison_data(reader)
    recipe = reproduce(data["config"], COMPARE_COMMAND)
    again = {"command": recipe.text.split("\n"), "advice": recipe.advice}
    return data | again | {"header": data["header"] | {"name": name}}


def _run_data(reader: RunReader, name: str) -> dict[str, Any]:
    view = reader.view
    episodes = [view.episodes[host] for host in sorted(view.episodes)]
    recipe = reproduce(view.config, view.kind)
    return {
        "header": header(reader) | {"name": name},
        "rounds": view.rounds.thinned(300),
        "curves": curves(view),
        "episodes": [episode_data(episode, 200) for episode in episodes[:MOST_EPISODES]],
        "episodes_left_out": max(0, len(episodes) - MOST_EPISODES),
        "rest": rest(view),
        # line by line: as one text it may be too long to be shown whole
        "command": recipe.text.split("\n"),
        "advice": recipe.advice,
    }


def reproduce(config: Mapping[str, Any], kind: str) -> Recipe:
    """Return the command that does a run again, and what has to be known about it."""
    settings = {name: value for name, value in config.items() if name != "command"}
    text = json.dumps(plain(settings, digits=17), indent=1)
    if config.get("command") == GARDEN_COMMAND:
        return Recipe(
            text=text, advice="Run your own training loop again. This is what esper.grow knew:"
        )
    command = (
        f"esper {kind} --config-json config.json --out runs/again  # esper {version('esper-lite')}"
    )
    exactly = (
        "" if config.get("deterministic") else "; bit for bit only with --deterministic on both"
    )
    return Recipe(
        text=f"{command}\n\nconfig.json:\n{text}",
        advice=(
            "Save what follows as config.json. "
            f"The same version and kind of hardware give the same run{exactly}."
        ),
    )


def page(data: Mapping[str, Any], title: str) -> str:
    """The report as HTML; it may run the page's own scripts, and reach nothing."""
    library, *scripts = map(_static, script_names())
    style = _static("uPlot.min.css") + _static("app.css")
    # a JSON text has these letters inside of strings only
    text = encode(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _static("report.html").format(
        policy=_content_policy([library, *scripts], style),
        title=escape(title),
        style=style,
        licence=_static("uPlot.LICENSE.txt"),
        uplot=library,
        data=text,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def script_names() -> list[str]:
    """The scripts in the order in which the live page loads them; the first is the library."""
    return re.findall(r'<script src="static/([^"]+)"', _static("index.html"))


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _content_policy(scripts: Iterable[str], style: str) -> str:
    """What a browser lets the report do: these scripts by their digests, and one style."""
    allowed = " ".join(_source(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    """An inline script or style as a content policy names it."""
    digest = sha256(text.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"
