"""`--watch`: training in a process of its own, and a screen on it in this one. Neither trains nor draws."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from tempfile import TemporaryFile

from esper.leyline.errors import SettingError
from esper.simic import runfolder

PATIENCE = 1.0
"""Seconds after its first words in which a run that is refused says so; no screen is shown for it."""


def require_screen() -> Callable[[Path], None]:
    """What shows a run; refused where there is nothing to draw on, or with."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingError("--watch needs a terminal to draw on; leave it out, and use `esper watch` where one is.")
    from esper.dashboard.watch import watch

    return watch


def train_beside(arguments: Sequence[str], out: Path, resume: bool, show: Callable[[Path], None]) -> int:
    """Call `esper` with the arguments and show its run folder meanwhile; returns its exit code."""
    with runfolder.only_writer(out):  # refused here, where it is not mistaken for the run that is there
        if not resume:
            runfolder.require_fresh(out)
    command = [sys.executable, "-P", "-m", "esper", *arguments]
    env = {**os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)}
    with (
        TemporaryFile() as said,  # a session of its own, so that Ctrl-C reaches the child once: through us
        Popen(command, stdin=DEVNULL, stdout=said, stderr=STDOUT, env=env, start_new_session=True) as child,
        _signals_passed_to(child),
    ):
        while child.poll() is None and not ((out / runfolder.CONFIG).exists() and os.fstat(said.fileno()).st_size):
            time.sleep(0.05)
        with suppress(TimeoutExpired):
            child.wait(PATIENCE)
        if child.returncode is None:
            try:
                show(out)
            except Exception as problem:  # a broken screen must not leave training unattended
                print(f"esper: the screen failed: {problem}", file=sys.stderr)
            if child.poll() is None:
                print(f"The screen is closed, training goes on; Ctrl-C ends it in order. Again: esper watch {out}")
        return _follow(child, said.fileno())


def _follow(child: Popen[bytes], said: int) -> int:
    """Print what the child has said and says; its exit code, as a shell counts."""
    place = 0
    while True:
        is_over = child.poll() is not None
        sys.stdout.flush()
        while text := os.pread(said, 2**16, place):  # leaves alone where the child writes
            place += sys.stdout.buffer.write(text)
        if is_over:
            return child.returncode if child.returncode >= 0 else 128 - child.returncode
        time.sleep(0.1)


@contextmanager
def _signals_passed_to(child: Popen[bytes]) -> Iterator[None]:
    """Whoever asks us to end asks the child: it finishes its epoch, saves, and says how to go on."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: child.terminate()) for number in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
