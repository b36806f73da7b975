"""`esper report`: runs as one HTML file that needs nothing else. The drawing is the page's own, from `static`."""

import json
import os
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from esper.dashboard.payload import arms_of, curves, encode, episode_data, header, plain, rest, standings
from esper.dashboard.reader import RunReader, open_run
from esper.dashboard.runs import is_run
from esper.leyline.errors import SaveError

STATIC = Path(__file__).parent / "static"
MOST_EPISODES = 8
"""Hosts whose timelines are drawn, per run."""
_NO_FLAG = ("epoch_examples", "held_out", "batch", "blueprints")
_FLAGS = {
    "--task": ("task", "name"),
    "--policy": ("policy",),
    "--hosts": ("hosts",),
    "--epochs": ("task", "epochs"),
    "--slots": ("task", "slots"),
    "--budget": ("task", "budget"),
    "--max-seeds": ("task", "max_seeds"),
    "--seed": ("seed",),
    "--devices": ("devices",),
    "--executor": ("executor",),
    "--amp": ("amp",),
    "--data-root": ("data_root",),
}


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write one page about the runs: configuration, curves, timelines, ledger, gates, scores, how to do it again."""
    readers = []
    for path in runs:
        if not is_run(path.resolve()):
            raise SaveError(
                f"{path} is no run folder: it holds no config.json with events beside it. Name a run's --out."
            )
        readers.append(open_run(path))
        readers[-1].refresh()
    if not readers:
        raise SaveError("a report needs at least one run folder.")
    names = _distinct(runs)
    data = {
        "version": version("esper-lite"),
        "date": date.today().isoformat(),
        "standings": standings(
            arm for reader, name in zip(readers, names, strict=True) for arm in arms_of(reader.view, name)
        ),
        "runs": [_run_data(reader, name) for reader, name in zip(readers, names, strict=True)],
    }
    _write_atomically(out, page(data, "esper report: " + ", ".join(names)))


def _distinct(runs: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in runs]
    return names if len(set(names)) == len(names) else [str(path) for path in runs]


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
        "command": command,
        "advice": advice,
    }


def reproduce(config: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """The command that does the run again, and what has to be known about it."""
    same = "The same version and kind of hardware give the same run" + (
        "." if config.get("deterministic") else "; to the bit only with --deterministic on both."
    )
    release = f"# esper {version('esper-lite')}"
    if kind == "ppo":
        text = json.dumps(plain(config), indent=1)
        command = f"esper ppo --config-json config.json --out runs/again  {release}"
        return f"{command}\n\nconfig.json:\n{text}", f"Save what follows as config.json. {same}"
    words = ["esper", "grow"]
    for flag, place in _FLAGS.items():
        value: Any = config
        for name in place:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            words += [flag, *(map(str, value) if isinstance(value, list) else [str(value)])]
    words += ["--deterministic"] if config.get("deterministic") else []
    task = config.get("task", {})
    odd = [f"task.{name} = {task[name]}" for name in _NO_FLAG if task.get(name) is not None]
    more = f" The command line has no flag for {', '.join(odd)}." if odd else ""
    return f"{shlex.join([*words, '--out', 'runs/again'])}  {release}", same + more


def page(data: Mapping[str, Any], title: str) -> str:
    """The report as HTML; it may run its own two scripts, and reach nothing."""
    uplot, app = (_static(name) for name in ("uPlot.iife.min.js", "app.js"))
    style = _static("uPlot.min.css") + _static("app.css")
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (uplot, app))
    # a JSON text has these letters inside of strings only
    text = encode(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _static("report.html").format(
        policy=f"default-src 'none'; script-src {scripts}; style-src 'sha256-{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        title=escape(title),
        style=style,
        licence=_static("uPlot.LICENSE.txt"),
        uplot=uplot,
        data=text,
        app=app,
    )


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _write_atomically(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as problem:
        raise SaveError(f"cannot write {path}: {problem.strerror}. Choose another --out.") from problem
