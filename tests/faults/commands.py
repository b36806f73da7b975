"""Commands in processes of their own, with a time limit, and what may be said of how they ended."""

import os
import signal
import time

from simic.tiny_runs import Forked
from simic.tiny_runs import command as ppo_command

RUN = ("run", "--task", "blobs", "--hosts", "2", "--epochs", "4", "--set", "task.epoch_examples=64")
COMPARE = (
    *(
        "compare",
        "--task",
        "blobs",
        "--epochs",
        "3",
        "--seeds",
        "2",
        "--set",
        "task.epoch_examples=64",
    ),
    *("--policies", "never", "heuristic", "random", "--pretrain", "1"),
)
CLEAR, DONE = "clear error", "done"


def command(kind, out, *more):
    """The command that made a run folder, on a folder."""
    if kind == "ppo":
        return [*ppo_command(out, rounds=1), *more]
    return [*(RUN if kind == "run" else COMPARE), "--out", str(out), *more]


class Bad(AssertionError):  # noqa: N818  # a verdict
    """A traceback, a crash or a hang."""


def no_waiting():
    """Nobody cuts the power of a test: it need not wait for the disk."""
    os.fsync = lambda handle: None


def run(place, arguments, seconds=60, prepare=no_waiting):
    """CLEAR or DONE, and what was said; anything else is bad. `prepare` is called in the process first."""
    process = Forked(place, [str(argument) for argument in arguments], prepare)
    ends = time.monotonic() + seconds
    while not (done := os.waitpid(process.pid, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            raise Bad(f"{arguments[0]} hangs")
        time.sleep(0.01)
    code, out, err = (
        os.waitstatus_to_exitcode(done[1]),
        process.out.read_text(),
        process.err.read_text(),
    )
    if code == 0:
        return DONE, out + err
    lines = [line for line in err.splitlines() if line.startswith("esper: ")]
    if code != 2 or "Traceback" in err or not lines:
        raise Bad(f"exit code {code}: {err[-2000:]}")
    return CLEAR, err
