"""What goes on around every run: what it starts from, signals, what is said."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console

from esper.cli.options import Asked
from esper.leyline.configuration import leaves, read_json
from esper.leyline.errors import SaveError, SettingError, printable
from esper.leyline.imports import IMPORTED
from esper.runtime.config import HostsConfig
from esper.storage import runfolder

Config = TypeVar("Config", bound=HostsConfig)


def assemble(
    asked: Asked, command: str, model: type[Config], may_change: Sequence[str] | None = None
) -> Config:
    """Preset or file (on resume:

    what the run began with), then changes: of `may_change`, or of all named if None.
    """
    if asked.preset is not None and asked.file is not None:
        raise SettingError(
            "--preset and --config-json both name a configuration; give one of them."
        )
    named = dict(asked.changes)
    config = model.start(asked.preset, named.get("task.name"))
    if asked.file is not None:
        config = model.of(_settings(read_json(asked.file)), str(asked.file))
    out, saved = Path(str(named.get("out", config.out))), None
    if asked.resume and runfolder.is_there(out / runfolder.CONFIG):
        saved = model.of(
            {**_settings(read_started(out, command)), "out": str(out)}, str(out / runfolder.CONFIG)
        )
        config = saved if asked.preset is None and asked.file is None else config
    if changes := [*asked.changes, *([("imports", dict(IMPORTED))] if IMPORTED else [])]:
        config = config.with_changes(changes, "the command line")
    if saved is not None:
        now, then = config.settled(), saved.settled()
        free = {*(named if may_change is None else may_change), "out"}
        if (
            may_change is None
        ):  # a length that the preset or the file leaves open is the saved one's
            free |= {key for key in leaves(model) if config.value(key) is None}
        for key in leaves(model):
            if key not in free and now.value(key) != then.value(key):
                before, given = (json.dumps(one.value(key), default=str) for one in (then, now))
                advice = (
                    "Leave that out, or choose another --out. A run of "
                    "esper.train_ppo goes on in Python."
                )
                raise SettingError(
                    f"the run was started with {key} {before}, not {given}. {advice}"
                )
        config = saved.with_changes(changes, "the command line") if may_change is None else config
    return config


def _settings(values: Any) -> Any:
    """What a run folder's configuration holds, without what it notes beside the settings."""
    notes = ("command", "files", "code", "corpus", runfolder.CHECKSUM)
    return (
        {key: value for key, value in values.items() if key not in notes}
        if isinstance(values, dict)
        else values
    )


def read_started(run: Path, command: str) -> dict[str, Any]:
    """What a run folder says that the command was started with."""
    path = run / runfolder.CONFIG
    if not path.is_file():
        raise SaveError(
            f"{run} is not a run folder: it has no {path.name}. Name the --out of a run."
        )
    values = runfolder.read_json(path)
    if (found := values.get("command", "ppo")) != command:
        raise SaveError(f"{run} is not a run of esper {command}: {path.name} says {found}.")
    return values


@contextmanager
def stop_on_signals(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for an orderly end; a second one ends at once, unless `patient`."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if (
            asked and not patient
        ):  # torchrun passes on what the terminal has sent already, so its ranks get it twice
            raise KeyboardInterrupt
        asked.append(number)

    with ExitStack() as ending:
        for number in (signal.SIGINT, signal.SIGTERM):
            ending.callback(signal.signal, number, signal.signal(number, ask))
        yield lambda: bool(asked)


def way_on(command: str, out: Path) -> str:
    """The call that continues a run."""
    return " ".join(
        ["esper", *(f"--import {name}" for name in IMPORTED), f"{command} --out {out} --resume"]
    )


def teller(console: Console) -> Callable[[str], None]:
    """Prints lines as they are, but for what a terminal would obey."""
    return lambda line: console.print(
        printable(line), markup=False, highlight=False, soft_wrap=True
    )
