"""kill -9 at random times and around file operations; what is left is resumed to the same end, bit for bit."""

import os
import signal
import time
from collections import Counter

from faults.commands import Bad, no_waiting, run
from faults.power_cuts import NOTHING
from simic.tiny_runs import Forked, Ticks, kill_self
from tools.faults import world
from tools.faults.driver import SAME, Group
from tools.faults.power import garden_subject
from trials import grown_runs

KILLED = -signal.SIGKILL
MOST_MOMENTS = {"ppo": 260, "run": 500, "compare": 160, "garden": 60}
"""more or less what there are; a moment that never comes is no kill"""


def install(kind, ticks):
    """Moments of a command: file operations, epochs, updates."""
    no_waiting()
    if kind == "ppo":
        ticks.install()
    else:
        grown_runs.install(ticks)


def _killed(kind, place, arguments, draw):
    """Start the command and kill it, at a counted moment or at a time; whether it was alive until then."""
    if draw.random() < 0.6:
        moment = draw.randint(1, MOST_MOMENTS[kind])
        ticks = Ticks(moment, kill_self)
        code, _, said = Forked(place / "process", arguments, lambda: install(kind, ticks)).wait()
    else:
        process = Forked(place / "process", arguments, no_waiting)
        time.sleep(draw.uniform(0.0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        code, _, said = process.wait()
    if code not in (0, KILLED):
        raise Bad(f"exit code {code}: {said[-2000:]}")
    return code == KILLED


def killed_command(kind):
    def play(draw, number, place):
        out, deaths = place / "run", 0
        wanted = draw.randint(1, 3)
        for _ in range(6):
            if deaths == wanted:
                break
            more = ["--resume"] if out.exists() else []
            deaths += _killed(kind, place, world.command(kind, out, *more), draw)
        ended = run(
            place / "process", world.command(kind, out, *(["--resume"] if out.exists() else []))
        )
        if world.judge(kind, out, ended) != SAME:
            raise Bad(f"after {deaths} kills it cannot be resumed: {ended[1][-1000:]}")
        world.same_events(kind, out)
        left = [path.name for path in out.rglob(".new-*")]
        if left:
            raise Bad(f"killed writes left {left} for good")
        return Counter({SAME: deaths})

    return play


def killed_garden(draw, number, place):
    """A process that saves a garden again and again dies; the folder has its last save or the one that was begun."""
    subject, folder, told = garden_subject(), place / "garden", place / "told"
    moment = draw.randint(1, 4 * MOST_MOMENTS["garden"])
    process = os.fork()
    if process == 0:
        no_waiting()
        ticks = Ticks(moment, kill_self)
        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (os, "unlink"),
            (os, "mkdir"),
            (os, "rmdir"),
        ):
            ticks.watch(owner, name)
        for save in range(100):
            with open(told, "w") as file:
                file.write(str(save))
            subject.save(folder, save)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code != KILLED:
        raise Bad(f"exit code {code}")
    begun, found = int(told.read_text()), subject.load(folder)
    if found not in ({NOTHING, 0} if begun == 0 else {begun - 1, begun}):
        raise Bad(f"save {begun} was begun, {found} is there")
    subject.save(folder, 1000)
    left = {path.name for path in folder.rglob("*")}
    if subject.load(folder) != 1000 or left != subject.names(folder):
        raise Bad(f"after the next save there is {left}")
    return SAME


GROUPS = [
    Group("kills", "esper ppo", killed_command("ppo"), 50),
    Group("kills", "esper run", killed_command("run"), 50),
    Group("kills", "esper compare", killed_command("compare"), 40),
    Group("kills", "garden.save", killed_garden, 60),
]
