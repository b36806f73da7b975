"""What surrounds every run: the settings it starts from, signals, and what is printed."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console

from esper.cli.options import Asked
from esper.leyline.configuration import leaves
from esper.leyline.errors import SaveError, SettingError, printable
from esper.leyline.imports import IMPORTED
from esper.runtime.config import HostsConfig
from esper.storage import runfolder

Config = TypeVar("Config", bound=HostsConfig)

_NOTES = ("command", "files", "code", "corpus", "training", runfolder.CHECKSUM)


def assemble(
    asked: Asked, command: str, model: type[Config], may_change: Sequence[str] | None = None
) -> Config:
    """Put together the settings that a command plays with.

    A new run takes a preset, a file or the defaults, and the command line changes them.

    A resumed run is the one that was started, so the settings in its folder win:

    - without a preset and a file it starts from the saved settings;
    - with one of them, or with options, these may repeat what was saved. A setting that
      contradicts it is refused by name, unless it is free to change;
    - `out` is always free: the folder may have been moved.

    Args:
        asked: what the command line asks for.
        command: the command that must have started the run.
        model: the command's configuration.
        may_change: the settings that are free on resume. None frees all that the command line
            names, such as more rounds of training; the training itself refuses those that its
            saves do not fit.
    """
    if asked.preset is not None and asked.file is not None:
        raise SettingError(
            "--preset and --config-json both name a configuration; give one of them."
        )
    named = dict(asked.changes)
    changes = list(asked.changes)
    if IMPORTED:
        changes.append(("imports", dict(IMPORTED)))
    if asked.file is None:
        start = model.start(asked.preset, named.get("task.name"))
    else:
        start = model.from_json_path(asked.file, notes=_NOTES)
    out = Path(str(named.get("out", start.out)))
    if not asked.resume or not runfolder.is_there(out / runfolder.CONFIG):
        return _changed(start, changes)

    saved = _read_settings(out, command, model)
    is_configured = asked.preset is not None or asked.file is not None
    config = _changed(start if is_configured else saved, changes)
    free = {"out"}
    if may_change is not None:
        _refuse_contradictions(config, saved, free | set(may_change))
        return config
    free.update(named)
    # what a preset or a file leaves open is as it was saved
    free.update(key for key in leaves(model) if config.value(key) is None)
    _refuse_contradictions(config, saved, free)
    return _changed(saved, changes)


def _changed(config: Config, changes: Sequence[tuple[str, Any]]) -> Config:
    """Return the settings with the changes of the command line."""
    return config.with_changes(changes, "the command line") if changes else config


def _read_settings(out: Path, command: str, model: type[Config]) -> Config:
    """Return the settings that the run in a folder was started with."""
    values = read_started(out, command)
    settings = {key: value for key, value in values.items() if key not in _NOTES}
    return model.of({**settings, "out": str(out)}, str(out / runfolder.CONFIG))


def _refuse_contradictions(config: Config, saved: Config, free: set[str]) -> None:
    """Refuse settings that are not those a run was started with, but for the free ones."""
    # lengths that follow from the task are written out, so that naming one of them is no change
    wanted = config.settled()
    started = saved.settled()
    for key in leaves(type(config)):
        if key in free or wanted.value(key) == started.value(key):
            continue
        before = json.dumps(started.value(key), default=str)
        now = json.dumps(wanted.value(key), default=str)
        raise SettingError(
            f"the run was started with {key} {before}, not {now}. Leave that out, or choose "
            "another --out. A run of esper.train_ppo continues in Python."
        )


def read_started(run: Path, command: str) -> dict[str, Any]:
    """Return what a run folder says that the command was started with."""
    path = run / runfolder.CONFIG
    if not path.is_file():
        raise SaveError(
            f"{run} is not a run folder: it has no {path.name}. Name the --out of a run."
        )
    values = runfolder.read_json(path)
    starter = values.get("command", "ppo")
    if starter != command:
        raise SaveError(
            f"{run} is not a run of esper {command}: {path.name} says {starter}. "
            f"Name a folder that esper {command} has written."
        )
    return values


@contextmanager
def stop_on_signals(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Ask for an orderly end by Ctrl-C or SIGTERM; a second one ends at once, unless `patient`.

    Yields a function that says whether an end was asked for.
    """
    received: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        # torchrun passes on what the terminal has sent already, so its ranks get it twice
        if received and not patient:
            raise KeyboardInterrupt
        received.append(number)

    with ExitStack() as ending:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, ask)
            ending.callback(signal.signal, number, previous)
        yield lambda: bool(received)


def way_on(command: str, out: Path) -> str:
    """Return the call that continues a run."""
    imports = [f"--import {name}" for name in IMPORTED]
    return " ".join(["esper", *imports, f"{command} --out {out} --resume"])


def teller(console: Console) -> Callable[[str], None]:
    """Return a function that prints lines as they are, but for what a terminal would obey."""

    def tell(line: str) -> None:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    return tell
