"""Damage of files and folders, by accident and on purpose: never another result without a word, never a write outside.

What each case damages is drawn: which files, how, whether results have to be made again from what is damaged.
"""

import json
import os
import shutil
import socket

import torch

import esper
from esper.leyline.errors import EsperError
from esper.simic.ppo.agent import PPOAgent
from esper.storage.files import MOST_BYTES
from faults.commands import Bad, run
from faults.damage import (
    WRONG,
    discard,
    forge,
    leaves,
    link_away,
    link_hard,
    pipe,
    replaced,
    swap,
    tree,
)
from tools.faults import world
from tools.faults.driver import CLEAR, SAME, WORKS, Group
from tools.faults.power import garden_subject
from user_models import CNN, script

# -- of a file's content ---------------------------------------------------------------------------


def truncate(draw, path, _):
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def zero(draw, path, _):
    """The content from some place on is gone, the size is right."""
    size = path.stat().st_size
    keep = draw.choice([0, draw.randrange(max(1, size))])
    path.write_bytes(path.read_bytes()[:keep] + bytes(size - keep))


def flip(draw, path, _):
    content = bytearray(path.read_bytes() or b"\0")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def scribble(draw, path, _):
    """Other bytes in place of some, more or fewer of them."""
    content = path.read_bytes()
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.choice([0, 1, 8, 64]))
    path.write_bytes(content[:start] + draw.randbytes(draw.choice([0, 1, 8, 64])) + content[end:])


def change_number(draw, path, _):
    """One digit of a JSON file; of another file a bit."""
    text = path.read_bytes()
    places = [at for at, letter in enumerate(text) if letter in b"0123456789"]
    if path.suffix not in (".json", ".jsonl") or not places:
        flip(draw, path, _)
        return
    at = draw.choice(places)
    path.write_bytes(
        text[:at]
        + str((int(text[at : at + 1]) + draw.randint(1, 9)) % 10).encode()
        + text[at + 1 :]
    )


def retype(draw, path, _):
    """One value of a JSON file has another type."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        scribble(draw, path, _)
        return
    path.write_text(
        json.dumps(
            replaced(value, draw.choice(list(leaves(value))), draw.choice((*WRONG, float("inf"))))
        )
    )


def deepen(draw, path, _):
    """Brackets without end, half a text, no UTF-8."""
    path.write_bytes(
        draw.choice(
            [b"[" * 200_000, b'{"a":' * 50_000, b"\xff\xfe{}", b"", b"null", b"1e999", b'"\\ud800"']
        )
    )


# -- of what a name stands for ---------------------------------------------------------------------


def remove(draw, path, _):
    discard(path)


def another_file(draw, path, scene):
    """The file of another run, or another file of this one, under this name."""
    others = [other for other in scene.files() if other != path]
    foreign = scene.foreign / path.relative_to(scene.folder)
    if foreign.is_file() and scene.may_be_foreign and draw.random() < 0.5:
        path.write_bytes(foreign.read_bytes())
    elif others:
        swap(path, draw.choice(others))


def symbolic_link(draw, path, scene):
    """To something outside that must stay as it is, to the run, to itself; a folder mostly to its like in another run.

    All that could be written to is in the scene: a fault that follows links is seen, and does no harm.
    """
    like, source = (
        root / path.relative_to(scene.folder) for root in (scene.outside / "another", scene.foreign)
    )
    like.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, like, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copyfile(source, like)
    targets = [
        scene.precious,
        scene.outside / "nothing",
        "/dev/zero",
        scene.outside,
        scene.folder,
        path,
        like,
    ]
    link_away(path, draw.choice([*targets, *([like] * 5 if path.is_dir() else [])]))


def hard_link(draw, path, scene):
    link_hard(path, scene.precious)


def fifo(draw, path, _):
    pipe(path)


def folder_instead(draw, path, _):
    discard(path)
    path.mkdir()
    (path / "inner").write_text("x")


def socket_instead(draw, path, _):
    discard(path)
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name[:60]}")
    os.close(here)


def enormous(draw, path, _):
    """More than anybody would read whole; no block of it is on the disk."""
    os.truncate(path, MOST_BYTES * 3)


CONTENT = (truncate, zero, flip, flip, scribble, change_number, change_number, retype, deepen)
NAMES = (
    remove,
    another_file,
    symbolic_link,
    hard_link,
    fifo,
    folder_instead,
    socket_instead,
    enormous,
)
FOLDERS = ("checkpoints", "networks", "networks/host-0", "twins", "arms", "pretrained")


class Scene:
    """A copy of a finished folder, another run, and something outside that no command may touch."""

    def __init__(self, kind, place):
        self.kind, self.folder, self.outside = (
            kind,
            world.copied(kind, place / "run"),
            place / "outside",
        )
        self.outside.mkdir()
        self.precious = self.outside / "precious"
        self.precious.write_text("mine\n")
        self.foreign = world.finished(kind, 7)
        self.may_be_foreign = (
            kind != "ppo"
        )  # a checkpoint of PPO is bound to its layout, not to its run
        self.before = None
        self.said = []

    def files(self):
        """Those that can be damaged further."""
        found = sorted(
            path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()
        )
        return [path for path in found if path.stat().st_size < MOST_BYTES]

    def damage(self, draw, number):
        """One to three damages; none in the first case, which must give the same result then."""
        for _ in range(draw.choice([1, 1, 1, 2, 3]) if number else 0):
            names = [
                path
                for path in map(self.folder.joinpath, FOLDERS)
                if path.is_dir() and not path.is_symlink()
            ]
            if names and draw.random() < 0.08:
                path, how = draw.choice(names), draw.choice([remove, symbolic_link, fifo])
            elif files := self.files():
                deep = [
                    path
                    for path in files
                    if path.parent != self.folder and path.parent.parent == self.folder
                ]
                files = (
                    deep if deep and draw.random() < 0.4 else files
                )  # what a command reads back is mostly there
                path, how = (
                    draw.choice(files),
                    draw.choice(CONTENT if draw.random() < 0.65 else NAMES),
                )
            else:
                break
            self.said.append(f"{how.__name__} {path.relative_to(self.folder)}")
            how(draw, path, self)
        self.before = tree(self.outside)

    def forget(self, draw):
        """What is read back leads to results; some are made again."""
        gone = {
            "ppo": [[], ["manifest.json", "checkpoints"]],
            "run": [[], ["results.json"], ["results.json", "networks"], ["manifest.json"]],
            "compare": [[], ["results.json"], ["results.json", "arms"], ["arms/never-1.json"]],
        }[self.kind]
        for name in draw.choice(gone):
            discard(self.folder / name)
        self.before = tree(self.outside)  # a name may lead there by a link

    def check_outside(self):
        if tree(self.outside) != self.before:
            raise Bad("something outside of the folder was touched")


def told(scene, act):
    """Whatever goes wrong names what was damaged."""
    try:
        found = act()
        scene.check_outside()
    except Exception as problem:
        raise Bad(f"{'; '.join(scene.said)}: {problem}") from problem
    if not scene.said and found == CLEAR:
        raise Bad("an undamaged folder is refused")
    return found


def resumed(kind):
    def play(draw, number, place):
        scene = Scene(kind, place)
        scene.damage(draw, number)
        scene.forget(draw)
        more = ["--seed", "0", "--resume"]
        command = world.command(kind, scene.folder, *more)
        return told(scene, lambda: world.judge(kind, scene.folder, run(place / "process", command)))

    return play


def forged(kind):
    """Values of another type under a checksum that is right: any result, but no traceback, no hang, nothing outside."""

    def play(draw, number, place):
        scene = Scene(kind, place)
        listed = [
            path
            for path in scene.files()
            if path.suffix == ".json" and '"body"' in path.read_text()
        ]
        path = draw.choice(listed)

        def change(body):
            new = replaced(
                body,
                draw.choice(list(leaves(body))),
                draw.choice([*WRONG, "../../outside/precious", 10**30]),
            )
            body.clear()
            body.update(new if isinstance(new, dict) else {"generations": new})

        forge(path, change)
        scene.said.append(f"forged {path.name}")
        scene.before = tree(scene.outside)
        scene.forget(draw)

        def act():
            ended = run(
                place / "process", world.command(kind, scene.folder, "--seed", "0", "--resume")
            )
            return CLEAR if ended[0] == CLEAR else WORKS

        return told(scene, act)

    return play


def exported(draw, number, place):
    scene = Scene("run", place)
    scene.damage(draw, number)

    def act():
        if run(place / "process", ["export", scene.folder, "--to", place / "to"])[0] == CLEAR:
            if (place / "to").exists():
                raise Bad("an export that was refused left a folder")
            return CLEAR
        if tree(place / "to") != tree(world.place() / "exported"):
            raise Bad("another network was handed out")
        return SAME

    return told(scene, act)


def looked_at(draw, number, place):
    scene = Scene(draw.choice(["run", "ppo"]), place)
    scene.damage(draw, number)

    def act():
        listed = run(place / "process", ["runs", place, "--json"], 30)
        ended = run(place / "process", ["report", scene.folder, "--out", place / "report.html"], 30)
        return CLEAR if CLEAR in (listed[0], ended[0]) else WORKS

    return told(scene, act)


def loaded(draw, number, place):
    """A garden's folder; loading is in this process."""
    scene = Scene.__new__(Scene)
    scene.kind, scene.folder, scene.outside, scene.said = (
        "garden",
        place / "run",
        place / "outside",
        [],
    )
    scene.outside.mkdir()
    scene.precious, scene.foreign, scene.may_be_foreign = (
        scene.outside / "precious",
        place / "foreign",
        True,
    )
    scene.precious.write_text("mine\n")
    subject = garden_subject()
    subject.save(scene.foreign, 7)
    subject.save(scene.folder, 3)
    scene.damage(draw, number)

    def act():
        try:
            found = esper.load(scene.folder, CNN(), policy=script({}))
        except EsperError:
            return CLEAR
        if found.epoch != 3 or subject.load(scene.folder) != 3:
            raise Bad("silently another garden")
        return SAME

    return told(scene, act)


def trusted(draw, number, place):
    """A policy file that decides in `esper run`."""
    source = world.policy()
    path = place / "policy.safetensors"
    shutil.copyfile(source, path)
    how = draw.choice([*CONTENT, fifo, folder_instead, enormous])
    if number:
        how(draw, path, None)
    command = world.command("run", place / "run", "--policy", path)
    try:
        if run(place / "process", command)[0] == CLEAR:
            if not number:
                raise Bad("an undamaged policy is refused")
            return CLEAR
        own, intact = (PPOAgent.load(policy).network.state_dict() for policy in (path, source))
        if any(not torch.equal(own[name], value) for name, value in intact.items()):
            raise Bad("silently another policy")
        return SAME
    except Exception as problem:
        raise Bad(f"{how.__name__} of a policy: {problem}") from problem


GROUPS = [
    Group("damage", "esper run --resume", resumed("run"), 260),
    Group("damage", "esper ppo --resume", resumed("ppo"), 220),
    Group("damage", "esper compare --resume", resumed("compare"), 220),
    Group("damage", "garden.load", loaded, 200, seconds=30),
    Group("damage", "esper export", exported, 100),
    Group("damage", "esper report and esper runs", looked_at, 80),
    Group("damage", "a policy of somebody else", trusted, 80),
    Group("damage", "forged checksums, run", forged("run"), 60),
    Group("damage", "forged checksums, ppo", forged("ppo"), 60),
    Group("damage", "forged checksums, compare", forged("compare"), 60),
]
