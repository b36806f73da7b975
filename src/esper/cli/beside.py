"""`--watch`: training in a process of its own, and a screen on it in this one. Neither trains nor draws."""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from tempfile import TemporaryFile
from typing import NoReturn

import typer

from esper.cli.options import Asked
from esper.leyline.errors import SettingError
from esper.telemetry.runfolder import CONFIG, EVENTS, only_writer

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
    with only_writer(out, fresh=not resume):
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
            if deadline == math.inf and (out / CONFIG).stat() and os.fstat(said).st_size:
                deadline = time.time() + PATIENCE
            if (events := (out / EVENTS).stat()).st_size and events.st_mtime >= begun:
                break
        time.sleep(0.05)
    return child.poll() is None
