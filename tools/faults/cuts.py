"""Real power cuts: an ext4 file system in a file, copied at a moment while somebody writes to it, and mounted again.

What the kernel has not sent to its disk by then is not in the copy. The writer stands still while the file is copied.
"""

import filecmp
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from faults.commands import DONE, Bad, run
from faults.damage import tree
from faults.power_cuts import NOTHING
from simic.tiny_runs import Forked
from tools.faults import world
from tools.faults.driver import SAME, Group, Skipped
from tools.faults.power import garden_subject

MEGABYTES = 16


def called(*command):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Skipped(f"{command[0]} failed: {done.stderr.strip()[:200]}")


@contextmanager
def mounted(image, place):
    """The file system in a file; its journal is played first, as after a power cut."""
    place.mkdir(exist_ok=True)
    called("mount", "-o", "loop,commit=300", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=False, capture_output=True)


def new_image(place):
    if os.geteuid() or shutil.which("mkfs.ext4") is None or not os.path.exists("/dev/loop-control"):
        raise Skipped("loop devices cannot be mounted here")
    image = place / "disk.img"
    image.touch()
    os.truncate(image, MEGABYTES << 20)
    called("mkfs.ext4", "-q", "-F", image)
    return image


def copied(image, target):
    """What the disk holds now; again if it changed meanwhile."""
    for _ in range(50):
        shutil.copyfile(image, target)
        if filecmp.cmp(image, target, shallow=False):
            return target
    raise Bad("the disk never stands still")


def stopped(process):
    """Let it stand still; False if it is at its end."""
    while True:
        try:
            os.kill(process, signal.SIGSTOP)
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "TZ":
            return state == "T"
        time.sleep(0.001)


def cut(process, image, place, draw, moments, longest):
    """Copies of the image at some moments; whether the process came to its end before the last."""
    copies = []
    for moment in range(moments):
        time.sleep(draw.uniform(0.0, longest))
        is_alive = stopped(process)
        copies.append((copied(image, place / f"cut-{moment}.img"), is_alive))
        if not is_alive:
            break
        os.kill(process, signal.SIGCONT)
    return copies


def cut_command(kind):
    def play(draw, number, place):
        image, found = new_image(place), 0
        with mounted(image, place / "disk") as disk:
            writer = Forked(place / "writer", world.command(kind, disk / "run"))
            copies = cut(writer.pid, image, place, draw, 5, 0.35)
            os.kill(writer.pid, signal.SIGKILL)
            os.waitpid(writer.pid, 0)
        for copy, is_alive in copies:
            with mounted(copy, place / "after") as disk:
                out = disk / "run"
                if not is_alive and world.result_of(kind, out) != world.wanted(kind, 0):
                    raise Bad("what had ended is not whole")
                ended = run(
                    place / "process",
                    world.command(kind, out, *(["--resume"] if out.exists() else [])),
                )
                if ended[0] != DONE:
                    raise Bad(f"it cannot be resumed: {ended[1][-800:]}")
                world.judge(kind, out, ended)
                found += 1
        return Counter({SAME: found})

    return play


def cut_garden(draw, number, place):
    subject, image, told, found = garden_subject(), new_image(place), place / "told", 0
    with mounted(image, place / "disk") as disk:
        process = os.fork()
        if process == 0:
            for save in range(10_000):
                subject.save(disk / "garden", save)
                beside = place / "told-new"
                beside.write_text(str(save))
                beside.rename(told)
            os._exit(0)
        copies = []
        for moment in range(8):
            time.sleep(draw.uniform(0.0, 0.06))
            stopped(process)
            returned = int(told.read_text()) if told.exists() else NOTHING
            copies.append((copied(image, place / f"cut-{moment}.img"), returned))
            os.kill(process, signal.SIGCONT)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    for copy, returned in copies:
        with mounted(copy, place / "after") as disk:
            there = subject.load(disk / "garden")
            if there not in ({NOTHING, 0} if returned == NOTHING else {returned, returned + 1}):
                raise Bad(f"save {returned} had returned, {there} is there")
            found += 1
    return Counter({SAME: found})


def cut_export(draw, number, place):
    """No folder, or all of it."""
    image, found = new_image(place), 0
    with mounted(image, place / "disk") as disk:
        writer = Forked(
            place / "writer", ["export", str(world.finished("run")), "--to", str(disk / "to")]
        )
        copies = cut(writer.pid, image, place, draw, 6, 0.02)
        os.kill(writer.pid, signal.SIGKILL)
        os.waitpid(writer.pid, 0)
    for copy, is_alive in copies:
        with mounted(copy, place / "after") as disk:
            is_whole = (disk / "to").exists() and tree(disk / "to") == tree(
                world.place() / "exported"
            )
            if not is_whole and ((disk / "to").exists() or not is_alive):
                raise Bad("half an export")
            found += 1
    return Counter({SAME: found})


GROUPS = [
    *(Group("power", f"esper {kind} on a real disk", cut_command(kind), 8) for kind in world.KINDS),
    Group("power", "garden.save on a real disk", cut_garden, 12),
    Group("power", "esper export on a real disk", cut_export, 6),
]
