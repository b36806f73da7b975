"""Saves that survive a power cut: generations of files and plain facts, listed in one manifest.

All files of a generation are durable before the manifest names them, and what the manifest no
longer names goes only when the manifest is durable. So a folder holds the old save or the new one,
never neither and never parts of both. One process writes at a time. Whoever reads gets the bytes
that were checked. No torch in here.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from esper.leyline.errors import EsperError, SaveError, complain
from esper.storage import files as disk
from esper.storage.claims import Claim, claimed, lock_of, noted
from esper.storage.files import Content, FileKind, has_mark

FORMAT = 3
MOST_READS = 1000  # of a folder that is saved to again each time that it is read
MANIFEST_FILE = FileKind("a list of Esper's saves", has_mark('"sha256"'))
"""A manifest is known again by its checksum, whatever its format."""
Plain = dict[str, Any]


class NewFile(NamedTuple):
    """A file to be saved."""

    name: str
    content: Content


class DamagedManifestError(SaveError):
    """A manifest that does not say what was written to it."""


@dataclass(frozen=True)
class Generation:
    """One save: its number, its plain facts and its files."""

    number: int
    facts: Plain
    files: dict[str, dict[str, str]]  # role -> name and sha256

    @property
    def names(self) -> set[str]:
        """The names of its files."""
        return {file["name"] for file in self.files.values()}


@dataclass(frozen=True)
class Save(Generation):
    """A generation that is whole, with what its files hold by their roles.

    These are the bytes that were checked; nothing is opened a second time.
    """

    contents: dict[str, bytes]


class Store:
    """The newest saves of one thing.

    Args:
        manifest: The file that lists the saves.
        kind: What is saved, in words. A manifest of another kind is refused.
        folder: Where the saved files are; by default beside the manifest.
        owned: Fits the names of the store's files, without their endings. A file is deleted only
            if it fits and a manifest of this store listed it, or a killed save was writing it.
            None: the store deletes no file.
        keep: How many of the newest generations stay.
        best_by: A fact; the generation in which it is highest stays as well. One without it has
            no part in that.
        bound_to: What the saves are for, such as a seed and settings. A manifest that was written
            for anything else is damage. None: the saves are bound to nothing.
    """

    def __init__(
        self,
        manifest: Path,
        kind: str,
        folder: Path | None = None,
        *,
        owned: re.Pattern[str] | None = None,
        keep: int = 1,
        best_by: str | None = None,
        bound_to: str | None = None,
    ):
        self.manifest = manifest
        self.kind = kind
        self.folder = folder or manifest.parent
        self.owned = owned
        self.keep = keep
        self.best_by = best_by
        self.bound_to = bound_to
        self._newest = 0  # the generation resumed from; younger ones are undone

    def save(self, facts: Plain, files: Mapping[str, NewFile] | None = None) -> Generation:
        """Add a generation of facts and files by their roles; old generations go afterwards.

        While another process saves here, this one waits; after some seconds it is refused.
        """
        try:
            facts = json.loads(json.dumps(facts, allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise SaveError(f"the {self.kind} does not fit into JSON ({problem}).") from problem
        with disk.naming_failures(self.manifest):
            disk.make_folder(self.manifest.parent)
        with claimed(self.manifest) as claim:
            listed = self._listed()
            former = self._names_of(listed)
            self._clear_up(former)
            names = {
                role: self._free_name(new.name, listed, left=())
                for role, new in (files or {}).items()
            }
            self._note(claim, {*former, *names.values()})
            try:
                written = self._write(files or {}, names)
                number = listed[-1].number + 1 if listed else 1
                generation = Generation(number, facts, written)
                past = [known for known in listed if known.number <= self._newest]
                self._write_manifest([*past, generation])
            except BaseException:
                with suppress(SaveError):
                    self._clear(names.values())
                raise
            self._newest = generation.number
            claim.is_over = self._clear(former)
        return generation

    def _write_manifest(self, generations: Sequence[Generation]) -> None:
        """List those of the generations that stay."""
        kept = list(generations[-self.keep :])
        best_number = None
        fact = self.best_by or ""
        rated = [generation for generation in generations if fact in generation.facts]
        if rated:
            best = max(rated, key=lambda generation: generation.facts[fact])
            best_number = best.number
            if best not in kept:
                kept = [best, *kept]
        body = {
            "of": self.bound_to or "",
            "best": best_number,
            "generations": [asdict(generation) for generation in kept],
        }
        whole = {"format": FORMAT, "kind": self.kind, "sha256": digest_json(body), "body": body}
        content = (json.dumps(whole, indent=1) + "\n").encode()
        if len(content) > disk.MOST_BYTES:
            raise SaveError(
                f"the {self.kind} has {len(content):,} bytes of facts, more than the "
                f"{disk.MOST_BYTES:,} that can be read back. Save less."
            )
        disk.write_durably(self.manifest, content)

    def _clear(self, names: Iterable[str]) -> bool:
        """Delete those of these files that the manifest does not list; all others stay.

        Returns whether they are gone for good, so that the note of them can go.
        """
        listed = self._names_of(self._listed())
        there = disk.names_in(self.folder)
        unlisted = [name for name in names if name in there and name not in listed]
        mine = [self.folder / name for name in unlisted if self._owns(name)]
        disk.remove(mine)
        if mine:
            with disk.naming_failures(self.manifest):
                disk.sync_folder(self.folder)
        return not any(path.exists() for path in mine)

    @staticmethod
    def _names_of(generations: Iterable[Generation]) -> set[str]:
        names: set[str] = set()
        return names.union(*(generation.names for generation in generations))

    def _owns(self, name: str) -> bool:
        """Whether a file name is the store's, with the number that `free_name` may have added."""
        if self.owned is None:
            return False
        return re.fullmatch(rf"(?:{self.owned.pattern})(?:-\d+)?\.\w+", name) is not None

    def _clear_up(self, listed: set[str]) -> None:
        """Delete what a killed save has left, before its note is replaced."""
        left = set(noted(lock_of(self.manifest)))
        if left:
            with disk.naming_failures(self.manifest):
                disk.sync_folder(self.manifest.parent)  # the list as seen is now the one on disk
            self._clear(left - listed)

    def _note(self, claim: Claim, names: set[str]) -> None:
        """Note what is listed or about to be written, before a file is written."""
        if names:
            with disk.naming_failures(self.manifest):
                claim.note(names)
                # the name of a new note must be durable before a file that it names is
                disk.sync_folder(self.manifest.parent)

    def _write(
        self, files: Mapping[str, NewFile], names: Mapping[str, str]
    ) -> dict[str, dict[str, str]]:
        """Make the files of a generation durable under these names."""
        if not files:
            return {}
        disk.sweep(self.folder, self._owns)
        contents = {names[role]: file.content for role, file in files.items()}
        digests = disk.write_files(self.folder, contents)
        return {role: {"name": name, "sha256": digests[name]} for role, name in names.items()}

    def free_name(self, name: str) -> str:
        """The name that a file gets in the next generation.

        No listed generation has it, and no file that somebody else put there.
        """
        left = {name for name in noted(lock_of(self.manifest)) if self._owns(name)}
        return self._free_name(name, self._listed(), left)

    def _free_name(self, name: str, listed: Sequence[Generation], left: Collection[str]) -> str:
        """A free name where all is gone that a killed save has `left`."""
        taken = self._names_of(listed).union(set(disk.names_in(self.folder)).difference(left))
        stem, dot, ending = name.rpartition(".")
        number = listed[-1].number if listed else 0
        while name in taken:
            number += 1
            name = f"{stem}-{number}{dot}{ending}"
        return name

    def _listed(self) -> list[Generation]:
        """What the manifest lists; a damaged one lists nothing and is replaced."""
        try:
            return self.generations()
        except DamagedManifestError:
            return []

    def newest(self) -> Save | None:
        """The newest generation that is whole, byte for byte; None where nothing is saved.

        A damaged one is named on standard error. Where another process saves meanwhile, what it
        has saved is read.
        """
        for _ in range(MOST_READS):
            manifest = self._read_manifest()
            problems: list[str] = []
            save = self._newest_whole(manifest, problems)
            if not problems or manifest == self._read_manifest():
                break  # nobody has saved meanwhile
        fatal = problems.pop() if problems and save is None else None
        for problem in problems:
            complain(f"{problem}; using the save before it.")
        if fatal is not None:
            raise SaveError(
                f"{fatal}, and no other save there is whole. "
                "Restore it from a copy, or start again."
            )
        if save is not None:
            self._newest = save.number
        return save

    def _newest_whole(self, manifest: bytes | None, problems: list[str]) -> Save | None:
        """The newest whole generation of a manifest; what is wrong with others joins `problems`."""
        for generation in reversed(self._parse(manifest)):
            try:
                contents = self._read(generation)
            except SaveError as problem:
                problems.append(str(problem))
            else:
                return Save(generation.number, generation.facts, generation.files, contents)
        return None

    def _read(self, generation: Generation) -> dict[str, bytes]:
        """What a generation's files hold, by their roles; each is read once, and then checked."""
        contents: dict[str, bytes] = {}
        for role, file in generation.files.items():
            path = self.path(generation, role)
            try:
                with disk.open_plain(path) as opened:
                    contents[role] = opened.read()
            except OSError as problem:
                raise SaveError(
                    f"{path} is missing or cannot be read ({problem.strerror})"
                ) from problem
            except MemoryError:
                raise SaveError(f"{path} is larger than the memory that is free") from None
            if hashlib.sha256(contents[role]).hexdigest() != file["sha256"]:
                raise SaveError(f"{path} is truncated or altered: its checksum does not match")
        return contents

    def path(self, generation: Generation, role: str) -> Path:
        """Where the file with this role is, for errors that name it."""
        return self.folder / generation.files[role]["name"]

    def generations(self) -> list[Generation]:
        """What the manifest lists, oldest first; nothing where there is none."""
        return self._parse(self._read_manifest())

    def _read_manifest(self) -> bytes | None:
        """What is in the manifest; None where there is none."""
        try:
            return disk.read_plain(self.manifest)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise SaveError(
                f"cannot read {self.manifest}: {problem.strerror}. Name another folder."
            ) from problem

    def _parse(self, manifest: bytes | None) -> list[Generation]:
        """The generations that a manifest lists; a damaged one is refused."""
        if manifest is None:
            return []
        try:
            return self._open(json.loads(manifest))
        except SaveError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
            reason = " ".join(str(problem).split())[:300]
            raise DamagedManifestError(
                f"{self.manifest} is damaged ({reason}). Restore it from a copy, or start again."
            ) from problem

    def _open(self, whole: Any) -> list[Generation]:
        """The generations of a manifest; a damaged one raises whatever its damage brings about."""
        body = whole.get("body", whole)  # the first format had no key for the body
        written_format = whole.get("format") or body["format"]
        if written_format != FORMAT:
            raise SaveError(
                f"{self.manifest} has format {written_format}, this version reads format "
                f"{FORMAT}. Use the version that wrote it, or start again."
            )
        if whole["kind"] != self.kind:
            raise SaveError(
                f"{self.manifest} is of a {whole['kind']}, not of a {self.kind}. "
                "Choose another folder."
            )
        if digest_json(body) != whole["sha256"]:
            raise ValueError("it was changed after it was written: its checksum does not match")
        if body.get("of", "") != (self.bound_to or ""):
            raise ValueError("it was saved for another seed or for other settings")
        generations = TypeAdapter(list[Generation]).validate_python(body["generations"])
        for generation in generations:
            self._check(generation)
        return generations

    def _check(self, generation: Generation) -> None:
        """Refuse a generation that cannot be compared, or whose files may lie elsewhere."""
        if not isinstance(generation.facts.get(self.best_by or "", 0), int | float):
            raise ValueError(f"{self.best_by} is not a number")
        for name in generation.names:
            if not disk.is_plain_name(name):
                raise ValueError(f"{name!r} is not a plain file name")


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Whatever fails with what was saved at a path becomes one line that names the path."""
    try:
        yield
    except EsperError:
        raise
    except Exception as problem:  # whatever a forged file brings about
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        raise SaveError(
            f"{path} does not fit together ({reason}). Use another save, or start again."
        ) from problem


def is_plain(value: Any, *, exact: bool = True) -> bool:
    """Whether JSON gives a value back as it is.

    If not `exact`, something equal is enough: tuples come back as lists, enums as numbers.
    """
    if exact and type(value) not in (dict, list, str, int, float, bool, type(None)):
        return False
    if isinstance(value, dict):
        has_text_keys = all(isinstance(key, str) for key in value)
        return has_text_keys and is_plain([*value, *value.values()], exact=exact)
    if isinstance(value, list | tuple):
        return all(is_plain(item, exact=exact) for item in value)
    if isinstance(value, float):
        return isfinite(value)
    return value is None or isinstance(value, str | int)


def require_plain(memory: Any) -> Any:
    """Return what a policy remembers, if JSON gives it back as it is.

    A memory that came back as something else would decide otherwise, so it is refused.
    """
    if is_plain(memory):
        return memory
    raise SaveError(
        f"the policy's memory would not come back from JSON as it is: {str(memory)[:200]}. "
        "Remember text, numbers, None, lists, and dicts whose keys are text."
    )


def digest_json(body: Plain) -> str:
    """The sha256 of plain values, however they are laid out in their file."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
