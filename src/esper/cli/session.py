"""What goes on around every run: what it starts from, its folder and lock, signals, the screen beside it."""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

from esper.cli.options import Asked
from esper.leyline.configuration import leaves, read_json
from esper.leyline.errors import SaveError, SettingError
from esper.leyline.own import IMPORTED
from esper.runtime.config import HostsConfig
from esper.telemetry import runfolder

Config = TypeVar("Config", bound=HostsConfig)


def assemble(asked: Asked, command: str, model: type[Config], may_change: Sequence[str] | None = None) -> Config:
    """Preset or file (on resume: what the run began with), then the changes: of `may_change`, or of all if None."""
    if asked.preset is not None and asked.file is not None:
        raise SettingError("--preset and --config-json both name a configuration; give one of them.")
    named = dict(asked.changes)
    config = model.start(asked.preset, named.get("task.name"))
    if asked.file is not None:
        config = model.of(_settings(read_json(asked.file)), str(asked.file))
    out, saved = Path(str(named.get("out", config.out))), None
    if asked.resume and runfolder.is_there(out / runfolder.CONFIG):
        values = _settings(read_started(out, command))
        saved = model.of({**values, "out": str(out)}, str(out / runfolder.CONFIG))
        config = saved if asked.preset is None and asked.file is None else config
    if changes := [*asked.changes, *([("imports", dict(IMPORTED))] if IMPORTED else [])]:
        config = config.with_changes(changes, "the command line")
    if saved is not None and may_change is not None:
        now, then = config.settled(), saved.settled()
        for key in leaves(model):
            if key not in (*may_change, "out") and now.value(key) != then.value(key):
                before, given = (json.dumps(one.value(key), default=str) for one in (then, now))
                advice = "Leave that out, or choose another --out."
                raise SettingError(f"the run was started with {key} {before}, not {given}. {advice}")
    return config


def _settings(values: Any) -> Any:
    """What a run folder's configuration holds, without what it notes beside the settings."""
    notes = ("command", "files", "code", "corpus", runfolder.CHECKSUM)
    return {key: value for key, value in values.items() if key not in notes} if isinstance(values, dict) else values


def read_started(run: Path, command: str) -> dict[str, Any]:
    """What a run folder says that the command was started with."""
    path = run / runfolder.CONFIG
    if not path.is_file():
        raise SaveError(f"{run} is not a run folder: it has no {path.name}. Name the --out of a run.")
    values = runfolder.read_json(path)
    if (found := values.get("command", "ppo")) != command:
        raise SaveError(f"{run} is not a run of esper {command}: {path.name} says {found}.")
    return values


@contextmanager
def stop_on_signals(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for an orderly end; a second one ends at once, unless `patient`.

    torchrun passes on what the terminal has sent already, so its ranks get everything twice.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked and not patient:
            raise KeyboardInterrupt
        asked.append(number)

    with ExitStack() as ending:
        for number in (signal.SIGINT, signal.SIGTERM):
            ending.callback(signal.signal, number, signal.signal(number, ask))
        yield lambda: bool(asked)


def way_on(command: str, out: Path) -> str:
    """The call that continues a run."""
    return " ".join(["esper", *(f"--import {name}" for name in IMPORTED), f"{command} --out {out} --resume"])


def teller(console: Console) -> Callable[[str], None]:
    """Prints lines as they are."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


PATIENCE = 5.0
"""Most seconds from a run's configuration to the screen; the first event brings it at once, a refusal not at all."""


def watch_beside(asked: Asked, out: Path) -> NoReturn:
    """The same call without --watch in another process, and its run on this terminal."""
    arguments = [argument for argument in asked.arguments if argument != "--watch"]
    raise typer.Exit(train_beside(arguments, out, asked.resume, require_screen()))


def require_screen() -> Callable[[Path], None]:
    """What shows a run; refused where there is nothing to draw on, or with."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingError("--watch needs a terminal; omit it, and use `esper watch` where you have one.")
    from esper.dashboard.watch import watch

    return watch


def train_beside(arguments: Sequence[str], out: Path, resume: bool, show: Callable[[Path], None]) -> int:
    """Call `esper` with the arguments and show its run folder meanwhile; returns its exit code."""
    with runfolder.only_writer(out, fresh=not resume):
        pass  # refused here, where it is not mistaken for the run that is there
    command = [sys.executable, "-P", "-m", "esper", *arguments]
    env = {**os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)}
    print(f"Starting the run in {out}; the screen comes with its first event.", flush=True)
    with ExitStack() as ending:
        said = ending.enter_context(TemporaryFile())
        child = ending.enter_context(  # in a session of its own, so that Ctrl-C reaches it once: through us
            Popen(command, stdin=DEVNULL, stdout=said, stderr=STDOUT, env=env, start_new_session=True)
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it finishes its epoch, saves, says how to go on
            ending.callback(signal.signal, number, signal.signal(number, lambda *_: child.terminate()))
        if _has_begun(child, out, said.fileno()):
            try:
                show(out)
            except Exception as problem:  # a broken screen must not leave training unattended
                print(f"esper: the screen failed: {problem}", file=sys.stderr)
            if child.poll() is None:
                print(f"Training goes on to its end, or to Ctrl-C, which saves first. Again: esper watch {out}")
        place, is_over = 0, False
        while not is_over:
            is_over = child.poll() is not None
            sys.stdout.flush()
            while text := os.pread(said.fileno(), 2**16, place):  # leaves alone where the child writes
                place += sys.stdout.buffer.write(text)
            time.sleep(0 if is_over else 0.1)
        sys.stdout.flush()
        return child.returncode if child.returncode >= 0 else 128 - child.returncode  # as a shell counts


def _has_begun(child: Popen[bytes], out: Path, said: int) -> bool:
    """Wait for the run's first event, or for `PATIENCE`; False if it ended instead."""
    begun, deadline = time.time(), math.inf
    while child.poll() is None and time.time() < deadline:
        with suppress(FileNotFoundError):
            if deadline == math.inf and (out / runfolder.CONFIG).stat() and os.fstat(said).st_size:
                deadline = time.time() + PATIENCE
            if (events := (out / runfolder.EVENTS).stat()).st_size and events.st_mtime >= begun:
                break
        time.sleep(0.05)
    return child.poll() is None
