"""`esper report`:

runs as one HTML file that needs nothing else. The drawing is the page's own, from `static`.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from esper.dashboard.payload import (
    arms_of,
    curves,
    encode,
    episode_data,
    header,
    plain,
    rest,
    standings,
)
from esper.dashboard.reader import RunReader, is_run, open_run
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
    """The report as HTML; it may run its own two scripts, and reach nothing."""
    files = (
        "uPlot.iife.min.js",
        "app.js",
        "uPlot.min.css",
        "app.css",
        "uPlot.LICENSE.txt",
        "report.html",
    )
    uplot, app, *styles, licence, frame = (
        (STATIC / name).read_text(encoding="utf-8") for name in files
    )
    style = "".join(styles)
    digests = (b64encode(sha256(text.encode()).digest()).decode() for text in (uplot, app, style))
    *scripts, look = (f"'sha256-{digest}'" for digest in digests)
    # a JSON text has these letters inside of strings only
    text = encode(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {look}; img-src data:; "
    )
    policy += "base-uri 'none'; form-action 'none'"
    shown = {
        "title": escape(title),
        "style": style,
        "licence": licence,
        "uplot": uplot,
        "data": text,
        "app": app,
    }
    return frame.format(policy=policy, **shown)
