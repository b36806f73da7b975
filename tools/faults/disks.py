"""Disks that fail: the Nth call, the Nth and all that follow, files that may not grow, a file system that is full.

Each is tried for every N until nothing fails. A clear error leaves a folder that is resumed to the same end.
"""

import builtins
import errno
import io
import os
import resource
import subprocess
from functools import partial

import esper
from esper.dashboard.report import write_report
from esper.kasmina.exporting import export_network
from esper.leyline.errors import SaveError
from faults.commands import DONE, Bad, no_waiting, run
from faults.damage import tree
from simic.tiny_runs import Ticks
from tools.faults import kills, world
from tools.faults.driver import CLEAR, SAME, Group, Over, Skipped
from tools.faults.power import Export, garden_subject
from user_models import CNN, script

CALLS = (
    "open",
    "fsync",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "fchmod",
    "truncate",
    "listdir",
    "fdopen",
)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)


class Failing:
    """From `install` on the Nth call of this process fails, or all from it on; `failures` are told."""

    def __init__(self, place, nth, number, forever=False):
        self.place, self.nth, self.number, self.forever = str(place), nth, number, forever
        self.count, self.failures, self.real = 0, [], {}

    def install(self):
        for owner, name in (*((os, name) for name in CALLS), (builtins, "open"), (io, "open")):
            self.real[owner, name] = getattr(owner, name)
            setattr(owner, name, partial(self._call, owner, name))

    def remove(self):
        for (owner, name), function in self.real.items():
            setattr(owner, name, function)

    def _call(self, owner, name, *args, **options):
        what = f"/proc/self/fd/{args[0]}" if isinstance(args[0], int) else args[0]
        is_own = os.path.realpath(what).startswith(
            self.place
        )  # Esper's own files are on a disk that is well
        is_counted = is_own and not (
            owner is io and isinstance(args[0], int)
        )  # that is what os.fdopen calls
        self.count += is_counted
        if is_counted and (self.count == self.nth or (self.forever and self.count > self.nth)):
            self.failures.append(name)
            raise OSError(self.number, os.strerror(self.number), str(what))
        return self.real[owner, name](*args, **options)


def _noted(place, failing):
    """In a process that ends soon: whether anything failed is in a file then."""
    no_waiting()
    note, leave = os.open(place / "failures", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), os._exit

    def end(code):
        os.write(note, " ".join(failing.failures[:3]).encode())
        leave(code)

    os._exit = end
    failing.install()


def _resumed(kind, out, ended, place, why):
    """What a failure led to, and whether the folder can be resumed to the same end."""
    if ended[0] == DONE:
        return world.judge(kind, out, ended)
    again = run(
        place / "process", world.command(kind, out, *(["--resume"] if out.exists() else []))
    )
    if again[0] == CLEAR:
        raise Bad(f"after {why} it cannot be resumed: {again[1][-800:]}")
    world.judge(kind, out, again)
    if left := [path.name for path in out.rglob(".new-*")]:
        raise Bad(f"after {why} and --resume {left} is left")
    return CLEAR


def failing_command(kind, forever, stride=1):
    def play(draw, number, place):
        error, out = draw.choice(ERRORS), place / "run"
        failing = Failing(out, 1 + stride * (number - 1), error, forever)
        try:
            ended = run(
                place / "process", world.command(kind, out), prepare=lambda: _noted(place, failing)
            )
        except Bad as problem:
            calls = (place / "failures").read_text()
            raise Bad(f"{os.strerror(error)} in {calls or 'nothing'}: {problem}") from problem
        if not (calls := (place / "failures").read_text()):
            raise Over
        return _resumed(kind, out, ended, place, f"{os.strerror(error)} in {calls}")

    return play


def full_memory(kind, stride):
    """The Nth thing that is done finds no memory: one line, and a folder that is resumed to the same end."""

    def play(draw, number, place):
        out = place / "run"

        def install():
            note = os.open(place / "failures", os.O_CREAT | os.O_WRONLY)

            def act():
                os.write(note, b"x")
                raise MemoryError

            kills.install(kind, Ticks(1 + stride * (number - 1), act))

        (place / "failures").touch()
        ended = run(place / "process", world.command(kind, out), prepare=install)
        if not (place / "failures").read_text():
            raise Over
        return _resumed(kind, out, ended, place, "a MemoryError")

    return play


def small_files(kind):
    """No file may grow beyond so many bytes: every write fails in its turn, a library's too."""

    def play(draw, number, place):
        out, most = place / "run", 1024 * number

        def limit():
            no_waiting()
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

        ended = run(place / "process", world.command(kind, out), prepare=limit)
        if ended[0] == DONE and "esper: " not in ended[1]:
            raise Over
        return _resumed(kind, out, ended, place, f"files of at most {most} bytes")

    return play


def full_disk(kind):
    """A real file system of so many pages; then there is room again."""

    def play(draw, number, place):
        disk = place / "disk"
        disk.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={4 * number}k", "faults", str(disk))
        try:
            ended = run(place / "process", world.command(kind, disk / "run"))
            if ended[0] == DONE and "esper: " not in ended[1]:
                raise Over
            _mount("-o", "remount,size=64m", str(disk))
            return _resumed(kind, disk / "run", ended, place, f"a full disk of {4 * number} kB")
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False)

    return play


def _mount(*arguments):
    if os.geteuid():
        raise Skipped("mounting needs root")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"mounting failed: {done.stderr.strip()}")


# -- in this process -------------------------------------------------------------------------------


def failing_call(make):
    """`make(place)` gives what to do, and what tells whether the folder is as before or as wanted."""

    def play(draw, number, place):
        act, is_sound = make(place)
        failing = Failing(place, number, draw.choice(ERRORS), draw.random() < 0.3)
        problem, fsync = None, os.fsync
        no_waiting()
        failing.install()
        try:
            act()
        except SaveError as raised:
            problem = raised
        finally:
            failing.remove()
            os.fsync = fsync
        if not failing.failures:
            raise Over
        why = f"{os.strerror(failing.number)} in {failing.failures[0]}"
        if not is_sound(problem is None):
            raise Bad(f"{why}: the folder is neither as before nor as it should be")
        act()
        if not is_sound(True):
            raise Bad(f"{why}: the next time does not work")
        if left := [name for name in tree(place) if ".new-" in name]:
            raise Bad(f"{why}: {left} is left")
        return SAME if problem is None else CLEAR

    return play


def a_garden(place):
    subject, folder = garden_subject(), place / "garden"
    subject.save(folder, 1)

    def is_sound(is_done):
        found = esper.load(folder, CNN(), policy=script({})).epoch
        return found == 2 if is_done else found in (1, 2)

    return lambda: subject.save(folder, 2), is_sound


def a_report(place):
    out = place / "report.html"
    former = '<meta name="generator" content="esper report">'
    out.write_text(former)

    def is_sound(is_done):
        text = out.read_text()
        return "</html>" in text or (text == former and not is_done)

    return lambda: write_report([world.finished("run")], out), is_sound


def an_export(place):
    """Into an empty folder: no grown.py, or both files."""
    subject, folder = Export(), place / "network"

    def is_sound(is_done):
        if not is_done and not (folder / "grown.py").exists():
            return True
        return subject.load(folder) == 1.0

    return lambda: (
        subject.model.host.head.bias.data.fill_(1.0),
        export_network(subject.model, folder),
    ), is_sound


IN_PROCESS = {"garden.save": a_garden, "esper report": a_report, "garden.export": an_export}
COMMANDS = world.SHORT.items()
GROUPS = [
    *(
        Group("disk", f"esper {name}, one call fails", failing_command(kind, False), 600, True)
        for name, kind in COMMANDS
    ),
    *(
        Group(
            "disk",
            f"esper {name}, all calls from one on fail",
            failing_command(kind, True, 5),
            120,
            True,
        )
        for name, kind in COMMANDS
    ),
    *(
        Group("disk", f"{name}, a call fails", failing_call(make), 200, True)
        for name, make in IN_PROCESS.items()
    ),
    *(
        Group("disk", f"esper {name}, files may not grow", small_files(kind), 120, True)
        for name, kind in COMMANDS
    ),
    *(
        Group("disk", f"esper {name}, full file system", full_disk(kind), 150, True)
        for name, kind in COMMANDS
    ),
    *(
        Group("disk", f"esper {name}, memory runs out", full_memory(kind, 8), 100, True)
        for name, kind in COMMANDS
    ),
]
