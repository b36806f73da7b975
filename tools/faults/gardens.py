"""Gardens that are interrupted, checkpoints of somebody else, paths where something stands, many processes."""

import os
import socket
import stat
import time
from collections import Counter
from functools import partial

import torch

from esper.integrations import pack, unpack
from esper.kasmina.exporting import SOURCE, WEIGHTS
from esper.leyline.errors import EsperError
from esper.storage.runfolder import EVENTS, MANIFEST
from faults.commands import Bad, no_waiting
from garden import test_undoing as undoing
from tools.faults.driver import CLEAR, SAME, WORKS, Group
from tools.faults.power import garden_subject
from user_models import grow_cnn

ACTS = {
    "step": (undoing.step, (0, 2, 3, 4)),
    "cull": (lambda garden: garden.cull("r0c1"), (2,)),
    "report": (
        lambda garden: garden.report(lambda: undoing.losses_of(garden.model, undoing.HELD_OUT)),
        (2, 5),
    ),
    "prune": (
        lambda garden: garden.prune(lambda: undoing.losses_of(garden.model, undoing.HELD_OUT)),
        (5,),
    ),
    "restore": (None, (3, 5)),
}
"""act -> how a garden does it, and after which epochs something happens in it"""
SECONDS = 3.0
"""that processes save to one folder"""


def interrupted(draw, number, place):
    """Ctrl-C before any line: the garden is as before or as after, and goes on either way."""
    name = draw.choice(list(ACTS))
    act, moments = ACTS[name]
    epochs = draw.choice(moments)
    garden, twin = undoing.grown(epochs), undoing.grown(epochs)
    if act is None:
        undoing.grown(1).save(place / "garden")
        act = partial(_restore, place / "garden")
    before = undoing.describe(garden)
    with undoing.Interrupter() as counted:
        act(twin)
    undoing.is_interrupted(act, garden, draw.randint(1, counted.lines))
    undoing.require_consistent(garden)
    left = undoing.describe(garden)
    if left not in (before, undoing.describe(twin)):
        raise Bad(f"{name} after {epochs} epochs is neither done nor undone")
    undoing.train(garden, 9)
    undoing.step(garden)
    return SAME


def _restore(folder, garden):
    garden.restore(folder)


HOSTILE = (
    "{}/evil",
    "../evil",
    "a/../../evil",
    "..",
    ".",
    "",
    "/",
    "a\0b",
    "a\\b",
    "C:evil",
    "\\\\host\\evil",
    ".evil",
    "a\nb",
    "\u202eevil",
    3,
    None,
)


def named(draw, number, place):
    """A Lightning checkpoint whose garden has a name that leads elsewhere: nothing at all is written."""
    inner = place / "inner"
    inner.mkdir()
    grow_cnn(attach=False).save(place / "saved")
    files = pack(place / "saved")
    name = draw.choice(HOSTILE)
    name = name.format(place) if isinstance(name, str) else name
    items = [*files.items(), (name, torch.zeros(3, dtype=torch.uint8))]
    draw.shuffle(items)
    before = sorted(place.rglob("*"))
    try:
        unpack(dict(items), inner)
    except EsperError as problem:
        if sorted(place.rglob("*")) != before or "\n" in str(problem):
            raise Bad(f"{name!r}: {problem}") from problem
        return CLEAR
    raise Bad(f"{name!r} was written")


def _listen(path):
    with socket.socket(socket.AF_UNIX) as heard:
        heard.bind(str(path))


STANDING = {
    "text": lambda path: path.write_text("mine"),
    "pipe": os.mkfifo,
    "socket": _listen,
    "folder": lambda path: path.mkdir(),
    "link to a file": lambda path: (
        (path.parent / "mine").write_text("mine"),
        path.symlink_to("mine"),
    ),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
}
WRITERS = {
    MANIFEST: lambda garden, folder: garden.save(folder),
    f"{MANIFEST}.lock": lambda garden, folder: garden.save(folder),
    SOURCE: lambda garden, folder: garden.export(folder),
    WEIGHTS: lambda garden, folder: garden.export(folder),
    f"{SOURCE}.lock": lambda garden, folder: garden.export(folder),
    EVENTS: lambda garden, folder: garden.record(folder),
}
"""name -> what writes a file of that name"""


def stood(draw, number, place):
    """Something of the user's stands where a garden writes: it stays, and one line names it."""
    name, what = draw.choice(list(WRITERS)), draw.choice(list(STANDING))
    path = place / name
    STANDING[what](path)
    before = [_look(path), _look(place / "mine")]
    try:
        WRITERS[name](grow_cnn(attach=False), place)
    except EsperError as problem:
        if "\n" in str(problem):
            raise Bad(f"{what} at {name}: {problem}") from problem
    else:
        raise Bad(f"{what} at {name} was written over")
    if [_look(path), _look(place / "mine")] != before or (place / "nothing").exists():
        raise Bad(f"{what} at {name} did not stay")
    return CLEAR


def _look(path):
    """What a path is and holds, not followed; None where there is nothing."""
    if not os.path.lexists(path):
        return None
    status = path.lstat()
    held = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
    return status.st_mode, status.st_ino, held


def together(draw, number, place):
    """Two processes save one garden, a third is killed while it saves, and this one loads: one save each time."""
    folder, end = place / "garden", time.monotonic() + SECONDS
    garden_subject().save(folder, 0)
    savers = [_fork(partial(_save_until, folder, end, first)) for first in (1000, 2000)]
    loads = 0
    while time.monotonic() < end:
        killed = _fork(partial(_save_until, folder, end, 3000))
        time.sleep(draw.uniform(0.02, 0.3))
        os.kill(killed, 9)
        os.waitpid(killed, 0)
        garden_subject().load(folder)  # refuses parts of two saves
        loads += 1
    for saver in savers:
        if os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]):
            raise Bad("a process that saves ended with an error")
    garden_subject().save(folder, 5000)
    left = {path.name for path in folder.rglob("*")}
    if garden_subject().load(folder) != 5000 or left != garden_subject().names(folder):
        raise Bad(f"after the last save there is {left}")
    return Counter({WORKS: loads})


def _fork(act):
    process = os.fork()
    if process == 0:
        code = 1
        try:
            no_waiting()
            act()
            code = 0
        finally:
            os._exit(code)
    return process


def _save_until(folder, end, number):
    while time.monotonic() < end:
        number += 1
        garden_subject().save(folder, number)


GROUPS = [
    Group("garden", "Ctrl-C in a garden", interrupted, 300, seconds=60),
    Group("garden", "names in a checkpoint", named, 100, seconds=30),
    Group("garden", "what stands where one writes", stood, 100, seconds=30),
    Group("garden", "several processes at one folder", together, 6, seconds=60),
]
