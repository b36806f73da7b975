"""What a power cut may leave of a folder: a recorder of everything that is asked of the disk, and the legal folders.

The disk is as unkind as POSIX allows. Content that was not fsynced may be old, empty, half there or whole. A name that
was made, moved or deleted may or may not be so until its folder is fsynced, each on its own and in any order.
"""

import os
import random
import shutil
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from esper.leyline.errors import SaveError

FOLDER = object()
NOTHING, RUN = "nothing", "run"
MOST = 4096
"""legal folders of one moment beyond which a sample is drawn"""


class Killed(BaseException):
    """The process is gone: nothing that it would have done afterwards happens."""


class Disk:
    """Records what happens below `root` from `recording()` on; `moments` are all that a power cut can come between.

    Args:
        manifest: name of the file whose rename ends a save; only to tell the kinds of fsync apart.
        without: a kind of fsync that is forgotten, as if the code did not have it.
    """

    def __init__(self, root, manifest="manifest.json", without=None):
        self.root, self.manifest, self.without = Path(root), manifest, without
        self.kinds = []
        """of every fsync that there was"""
        self.moments = []
        """(number of the save, state): what the disk knows then"""
        self.save = 0
        self.kill_at = None
        self._calls, self._renamed, self._last = 0, [], None
        self._named, self._now, self._synced, self._content = {}, {}, {}, {}
        self._pending = []
        self._handles = {}
        self._nodes = 0

    # -- recording ---------------------------------------------------------------------------------

    @contextmanager
    def recording(self):
        """Everything that the package asks of the disk goes through these."""
        real = {
            name: getattr(os, name)
            for name in ("open", "fsync", "replace", "unlink", "mkdir", "rmdir")
        }
        self._real = real
        try:
            for name in real:
                setattr(os, name, getattr(self, f"_{name}"))
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def begin_save(self, kill_at=None):
        """Another save begins; it is killed before its `kill_at`-th call, or before its first fsync of that kind."""
        self.save, self._calls, self.kill_at, self._renamed, self._last = (
            self.save + 1,
            0,
            kill_at,
            [],
            None,
        )
        self._mark()

    def end_save(self):
        """It has come back to whoever asked for it: from now on it is the one."""
        self.save, self.kill_at = self.save + 1, None
        self._mark()

    def _call(self, path):
        path = (
            os.path.realpath(os.path.dirname(os.fspath(path)))
            + "/"
            + os.path.basename(os.fspath(path))
        )
        if not path.startswith(str(self.root.resolve()) + "/"):
            return None
        self._count()
        return os.path.relpath(path, self.root.resolve())

    def _count(self, kind=None):
        """Count a call; the dead make none."""
        self._calls += 1
        is_due = (
            kind == self.kill_at
            if isinstance(self.kill_at, str)
            else self._calls >= (self.kill_at or 10**9)
        )
        if is_due:
            self.kill_at = 1
            raise Killed

    def _mark(self):
        self.moments.append(
            (
                self.save,
                (dict(self._named), list(self._pending), dict(self._synced), dict(self._content)),
            )
        )

    def _open(self, path, flags, mode=0o777, **options):
        name = self._call(path) if flags & os.O_CREAT else None
        is_new = name is not None and not os.path.lexists(path)
        handle = self._real["open"](path, flags, mode, **options)
        self._handles[handle] = os.path.realpath(path)
        if is_new:
            self._create(name)
        return handle

    def _create(self, name):
        self._nodes += 1
        self._now[name], self._content[self._nodes] = self._nodes, b""
        self._change(name, {name: self._nodes})

    def _change(self, name, entries):
        self._pending.append((os.path.dirname(name), entries))
        self._mark()

    def _look(self, name):
        """Take in what was written to a file by its name, and the file where a library made it."""
        if name not in self._now:
            self._create(name)
        content = (self.root / name).read_bytes()
        if content != self._content[self._now[name]]:
            self._content[self._now[name]] = content
            self._mark()

    def _fsync(self, handle):
        path = self._handles[handle]
        if not path.startswith(str(self.root.resolve())):
            return
        name = os.path.relpath(path, self.root.resolve())
        name = "" if name == "." else name
        is_folder = os.path.isdir(path)
        if not is_folder:
            self._look(name)
        kind = (
            self._kind_of_folder()
            if is_folder
            else "manifest"
            if name.endswith(self.manifest)
            else "note"
            if name.endswith(".lock")
            else "file"
        )
        self._count(kind)
        self._last = "fsync"
        self.kinds.append(kind)
        if kind == self.without:
            return
        if not is_folder:
            self._synced[self._now[name]] = self._content[self._now[name]]
        else:
            for folder, entries in self._pending:
                if folder == name:
                    _apply(self._named, entries)
            self._pending = [
                (folder, entries) for folder, entries in self._pending if folder != name
            ]
        self._mark()

    def _kind_of_folder(self):
        if self._last == "mkdir":
            return "folder above a new one"
        if self.manifest in self._renamed:
            return "folder after the manifest"
        return "folder before the manifest" if self._renamed else "folder at the beginning"

    def _replace(self, source, target):
        old, new = self._call(source), self._call(target)
        if old is not None and os.path.isdir(source):
            self._move_folder(source, target, old, new)
            return
        if old is not None:
            self._look(old)
        self._real["replace"](source, target)
        if new is not None:
            self._renamed.append(os.path.basename(new))
            self._last = "rename"
            node = self._now[new] = self._now.pop(old)
            if os.path.dirname(old) == os.path.dirname(new):
                self._change(new, {old: None, new: node})
            else:  # each folder knows of its own name only
                self._pending.append((os.path.dirname(old), {old: None}))
                self._change(new, {new: node})

    def _move_folder(self, source, target, old, new):
        """With all that is in it, of which the names must be durable: else it could be empty under the new name."""
        assert not [folder for folder, _ in self._pending if folder == old], (
            f"{old} is moved too early"
        )
        self._real["replace"](source, target)
        entries = {old: None, new: FOLDER}
        for name in [name for name in self._now if name.startswith(f"{old}/")]:
            entries |= {name: None, f"{new}{name.removeprefix(old)}": self._now[name]}
        _apply(self._now, entries)
        self._last = "rename"
        self._change(new, entries)

    def _unlink(self, path, **options):
        name = self._call(path)
        self._real["unlink"](path, **options)
        if name is not None:
            self._now.pop(name)
            self._change(name, {name: None})

    def _rmdir(self, path, **options):
        name = self._call(path)
        self._real["rmdir"](path, **options)
        if name is not None:
            self._now.pop(name)
            self._change(name, {name: None})

    def _mkdir(self, path, *args, **options):
        name = self._call(path)
        self._real["mkdir"](path, *args, **options)
        if name is not None:
            self._last = None if os.path.basename(name).startswith(".") else "mkdir"
            self._now[name] = FOLDER
            self._change(name, {name: FOLDER})

    # -- what may be left --------------------------------------------------------------------------

    def written(self):
        """What the recorder saw, to be compared with what is there: nobody may go around it."""
        return {
            name: None if node is FOLDER else self._content[node]
            for name, node in self._now.items()
        }


def legal_folders(state, most=MOST, seed=0):
    """Every folder that a power cut may leave at a moment, as {name: content, None for a folder}."""
    named, pending, synced, content = state
    draw = random.Random(seed)
    subsets = _choices([(True, False)] * len(pending), most, draw)
    for chosen in subsets:
        found = dict(named)
        for (_, entries), is_done in zip(pending, chosen, strict=True):
            if is_done:
                _apply(found, entries)
        found = {name: node for name, node in found.items() if _is_reachable(name, found)}
        files = [name for name, node in found.items() if node is not FOLDER]
        options = [_contents(found[name], synced, content) for name in files]
        for contents in _choices(options, max(1, most // 16), draw):
            folders = {name: None for name, node in found.items() if node is FOLDER}
            yield {**folders, **dict(zip(files, contents, strict=True))}


def _choices(options, most, draw):
    """All combinations, or so many of them with the first and the last."""
    count = 1
    for option in options:
        count *= len(option)
    if count <= most:
        return product(*options)
    drawn = [tuple(draw.choice(option) for option in options) for _ in range(most)]
    return [tuple(option[0] for option in options), tuple(option[-1] for option in options), *drawn]


def _apply(named, entries):
    for name, node in entries.items():
        if node is None:
            named.pop(name, None)
        else:
            named[name] = node


def _is_reachable(name, found):
    above = os.path.dirname(name)
    return not above or (found.get(above) is FOLDER and _is_reachable(above, found))


def _contents(node, synced, content):
    now, before = content[node], synced.get(node)
    if before == now:
        return (now,)
    return tuple(
        dict.fromkeys([*([] if before is None else [before]), b"", now[: len(now) // 2], now])
    )


def rebuild(folder, files):
    """Lay a folder out as it would be found."""
    folder.mkdir(parents=True)
    for name, content in sorted(files.items()):
        if content is None:
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)


# -- saving and loading ----------------------------------------------------------------------------


class Violation(AssertionError):  # noqa: N818  # of a promise
    """A folder that a power cut may leave and that holds neither the old save nor the new one."""


@contextmanager
def quick_folder():
    """A place in memory: thousands of small folders are laid out."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def record(root, subject, saves, kills=(), without=None):
    """Play saves one after another; the disk, and which numbers are allowed at each number of `Disk.save`."""
    disk = Disk(root, without=without)
    allowed, known = {0: {NOTHING}}, {NOTHING}
    with disk.recording():
        for number in range(saves):
            disk.begin_save(dict(kills).get(number))
            known = known | {number}
            allowed[disk.save] = known
            try:
                subject.save(root / RUN, number)
                known = {number}
            except Killed:
                pass
            disk.end_save()
            allowed[disk.save] = known
    there = {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }
    assert disk.written() == there, "something was written that the recorder did not see"
    return disk, allowed


def check(subject, disk, allowed, place, following=None, most=4096):
    """Load every legal folder of every moment, then save once more into it; how many folders there were."""
    seen = set()
    for moment, (save, state) in enumerate(disk.moments):
        for files in legal_folders(state, most, moment):
            key = (frozenset(allowed[save]), frozenset(files.items()))
            if key in seen:
                continue
            seen.add(key)
            folder = place / str(len(seen))
            rebuild(folder, files)
            _check_one(subject, folder / RUN, allowed[save], following)
            shutil.rmtree(folder)
    return len(seen)


def _check_one(subject, folder, allowed, following):
    try:
        found = subject.load(folder)
    except SaveError as problem:
        raise Violation(f"neither of {allowed}: {problem}") from problem
    if found not in allowed:
        raise Violation(f"{found} instead of {allowed}")
    if following is not None:
        subject.save(folder, following)
        left = {
            path.name for path in folder.rglob("*") if path.is_file() or path.name.startswith(".")
        }
        if subject.load(folder) != following or left != subject.names(folder):
            raise Violation(
                f"after the next save the folder holds {left}, not {subject.names(folder)}"
            )


def play(subject, saves, kills=(), without=None, following=None, most=4096):
    with quick_folder() as place:
        (place / "disk").mkdir()
        disk, allowed = record(place / "disk", subject, saves, kills, without)
        return disk, check(subject, disk, allowed, place, following, most)
