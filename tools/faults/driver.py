"""Plays cases in forked workers and counts their verdicts. What a case does is told by the parts.

A case is named part/group/number, and draws what it does from that name and the campaign's random seed, so that each
can be played again alone. A worker that dies or hangs is a case that failed; another worker takes its place.
"""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CLEAR, SAME, SAID, WORKS = "clear error", "same result", "said so", "works"
VERDICTS = (CLEAR, SAME, SAID, WORKS)
SECONDS = 120.0
"""that a case may take where its group does not say"""


class Skipped(Exception):  # noqa: N818  # no error
    """This cannot be tried here; its text says why."""


class Hang(BaseException):
    """A case takes longer than it may. Nothing that a case calls takes this for an error of its own."""


class Over(Exception):  # noqa: N818  # no error
    """There is no call of that number any more: the sweep has come to its end."""


@dataclass(frozen=True)
class Group:
    """Cases of one kind.

    Args:
        play: takes a random generator, the case's number and an empty folder; gives a verdict, or how many of each.
        count: cases in a whole campaign; for a sweep the most that there may be.
        sweep: numbers are tried one after another until `Over`; a part of a campaign tries every so-manieth.
        seconds: that a case may take.
    """

    part: str
    name: str
    play: Callable[[random.Random, int, Path], str | Counter]
    count: int = 1
    sweep: bool = False
    seconds: float = SECONDS

    @property
    def key(self):
        return f"{self.part}/{self.name}"

    def numbers(self, scale):
        if self.sweep:
            return list(range(1, self.count + 1, max(1, round(1 / scale))))
        return list(range(max(1, round(self.count * scale))))


@dataclass
class Told:
    """What is known of a group."""

    verdicts: Counter = field(default_factory=Counter)
    cases: int = 0
    seconds: float = 0.0
    skipped: str = ""
    is_over: bool = False
    bad: list = field(default_factory=list)
    """(key of the case, why)"""


def play(groups, seed=0, scale=1.0, only=None, workers=2, say=print):
    """Play all cases, or the one whose key is `only`; group key -> what came of it."""
    longest_first = sorted(
        groups, key=lambda group: -group.seconds
    )  # so that no test waits for the last one
    cases = [(group, number) for group in longest_first for number in group.numbers(scale)]
    if only is not None:
        name, _, number = only.rpartition("/")
        cases = [(group, int(number)) for group in groups if group.key == name]
        if not cases:
            raise SystemExit(f"there is no case {only}; a case is called part/group/number.")
    told = {group.key: Told() for group in groups}
    place = Path(
        tempfile.mkdtemp(
            prefix="faults-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
    )
    try:
        Workers(cases, seed, place, workers, told, say).run()
    finally:
        _unmount(place)
        shutil.rmtree(place, ignore_errors=True)
    for group in groups:
        if (
            group.sweep
            and scale >= 1
            and only is None
            and not (told[group.key].is_over or told[group.key].skipped)
        ):
            told[group.key].bad.append(
                (group.key, f"the sweep has no end after {group.count} calls")
            )
    return told


class Workers:
    """Processes that take cases from one pipe and write what happens to a file each."""

    def __init__(self, cases, seed, place, count, told, say):
        self.cases, self.seed, self.place, self.told, self.say = cases, seed, place, told, say
        self.count, self.started = count, 0
        self.running = {}
        """process -> (file of what it tells, how much of it is known, the case it is at and since when)"""

    def run(self):
        ends = _filled([index for index, _ in enumerate(self.cases)])
        try:
            for _ in range(self.count):
                self._start(ends)
            while self.running:
                time.sleep(0.05)
                for process in list(self.running):
                    self._look(process, ends)
        finally:
            os.close(ends)
            for process in self.running:
                os.killpg(process, signal.SIGKILL)

    def _start(self, ends):
        self.started += 1
        path = self.place / f"told-{self.started}"
        path.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            code = 1
            try:
                self._work(ends, path)
                code = 0
            finally:
                os._exit(code)
        self.running[process] = [path, 0, None, time.monotonic()]

    def _work(self, ends, path):
        with open(path, "a", buffering=1) as file:
            while index := os.read(ends, 4):
                group, number = self.cases[struct.unpack("i", index)[0]]
                over = self.place / f"over-{group.key.replace('/', '-')}"
                if over.exists():
                    continue
                file.write(json.dumps({"begin": [group.key, number, group.seconds]}) + "\n")
                result = _one(
                    group, number, self.seed, self.place / path.name.replace("told", "work")
                )
                if result.get("over"):
                    over.touch()
                file.write(json.dumps({"end": [group.key, number], **result}) + "\n")

    def _look(self, process, ends):
        done, status = os.waitpid(process, os.WNOHANG)
        entry = self.running[process]
        with open(entry[0]) as file:
            file.seek(entry[1])
            lines = file.read()
        whole = lines[: lines.rfind("\n") + 1]
        entry[1] += len(whole)
        for line in map(json.loads, whole.splitlines()):
            entry[2], entry[3] = line.get("begin"), time.monotonic()
            if "end" in line:
                self._take(*line["end"], line)
        if not done and entry[2] is not None and time.monotonic() - entry[3] > entry[2][2] + 30:
            os.killpg(process, signal.SIGKILL)  # not even an alarm woke it
        if done:
            del self.running[process]
            if entry[2] is not None:
                key, number, _ = entry[2]
                end = os.waitstatus_to_exitcode(status)
                self._take(
                    key, number, {"bad": f"the process ended with {end}, or hung", "seconds": 0.0}
                )
                self._start(ends)

    def _take(self, key, number, result):
        told = self.told[key]
        told.seconds += result["seconds"]
        if "bad" in result:
            told.bad.append((f"{key}/{number}", result["bad"]))
            self.say(f"FAILED {key}/{number}: {result['bad']}")
        elif "skipped" in result:
            told.skipped = result["skipped"]
        elif "over" in result:
            told.is_over = True
        else:
            told.cases += 1
            told.verdicts.update(result["verdicts"])


def _unmount(place):
    """What a case that was killed left mounted."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in (path for path in mounted if Path(path).is_relative_to(place)):
        subprocess.run(["umount", "-l", path], check=False)


def _filled(indices):
    """The reading end of a pipe that holds all of these and then ends."""
    ends, begins = os.pipe()
    content = b"".join(struct.pack("i", index) for index in indices)
    if os.fork() == 0:  # more than a pipe takes at once
        os.close(ends)
        while content:
            content = content[os.write(begins, content[:4096]) :]
        os._exit(0)
    os.close(begins)
    return ends


def _one(group, number, seed, place):
    """What came of one case, as plain data."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _wake)
    signal.setitimer(signal.ITIMER_REAL, group.seconds)
    try:
        found = group.play(random.Random(f"{seed}/{group.key}/{number}"), number, place)
        found = Counter({found: 1}) if isinstance(found, str) else found
        unknown = set(found) - set(VERDICTS)
        result = {"bad": f"no verdict: {unknown}"} if unknown else {"verdicts": dict(found)}
    except Skipped as reason:
        result = {"skipped": str(reason)}
    except Over:
        result = {"over": True}
    except BaseException as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        result = {
            "bad": f"{brief(f'{type(problem).__name__}: {problem}')} "
            f"({Path(where.filename).name}:{where.lineno})"
        }
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {**result, "seconds": round(time.monotonic() - began, 3)}


def brief(text):
    """Of a traceback inside a text the last place in the package and what was raised; of anything long both ends."""
    if frames := re.findall(r'File "[^"]*src/(esper/[^"]*)", line (\d+), in (\w+)', text):
        text = (
            f"{text[:200].splitlines()[0]} ... {':'.join(frames[-1])}: "
            f"{text.strip().splitlines()[-1]}"
        )
    return text if len(text) < 900 else f"{text[:500]} ... {text[-300:]}"


def _wake(*_):
    raise Hang("it takes too long")
