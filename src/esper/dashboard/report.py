"""`esper report`:

runs as one HTML file that needs nothing else. The drawing is the page's own, from `static`.
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
from typing import Any

from esper.dashboard.payload import curves, encode, episode_data, header, plain, rest
from esper.dashboard.reader import RunReader, is_run, open_run
from esper.dashboard.standings import arms_of, standings
from esper.leyline.errors import SaveError
from esper.storage.files import write_durably
from esper.storage.runfolder import GARDEN_COMMAND

STATIC = Path(__file__).parent / "static"
MOST_EPISODES = 8  # Hosts whose timelines are drawn, per run.


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write one page about the runs:

    configuration, curves, timelines, ledger, gates, scores, how to do it again.
    """
    names = [path.resolve().name for path in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in runs]
    readers = {}
    for name, path in zip(names, runs, strict=True):
        if not is_run(path.resolve()):
            raise SaveError(
                f"{path} is not a run folder: it has no config.json with events. Name "
                f"a run's --out."
            )
        readers[name] = open_run(path)
        readers[name].refresh()
    if not readers:
        raise SaveError("a report needs at least one run folder.")
    data = {
        "version": version("esper-lite"),
        "date": date.today().isoformat(),
        "standings": standings(
            arm for name, reader in readers.items() for arm in arms_of(reader.view, name)
        ),
        "runs": [_run_data(reader, name) for name, reader in readers.items()],
    }
    write_durably(out, page(data, "esper report: " + ", ".join(readers)).encode())


def _run_data(reader: RunReader, name: str) -> dict[str, Any]:
    view = reader.view
    episodes = [view.episodes[host] for host in sorted(view.episodes)]
    command, advice = reproduce(view.config, view.kind)
    return {
        "header": header(reader) | {"name": name},
        "rounds": view.rounds.thinned(300),
        "curves": curves(view),
        "episodes": [episode_data(episode, 200) for episode in episodes[:MOST_EPISODES]],
        "episodes_left_out": max(0, len(episodes) - MOST_EPISODES),
        "rest": rest(view),
        "command": command.split("\n"),  # one text may be too long to be told whole
        "advice": advice,
    }


def reproduce(config: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """The command that does the run again, and what has to be known about it."""
    how = "" if config.get("deterministic") else "; to the bit only with --deterministic on both"
    text = json.dumps(
        plain({name: own for name, own in config.items() if name != "command"}, digits=17), indent=1
    )
    if config.get("command") == GARDEN_COMMAND:
        return text, "Run your own training loop again. This is what esper.grow knew:"
    command = (
        f"esper {kind} --config-json config.json --out runs/again  # esper {version('esper-lite')}"
    )
    advice = (
        f"Save what follows as config.json. The same version and kind of hardware "
        f"give the same run{how}."
    )
    return f"{command}\n\nconfig.json:\n{text}", advice


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
