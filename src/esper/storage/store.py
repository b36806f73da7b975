"""Saves that survive a power cut: generations of files and plain facts, listed in one manifest. No
torch in here.

All files of a generation are durable before the manifest names them, and what the manifest no
longer names goes only when the manifest is durable. So a folder holds the old save or the new one,
never neither and never parts of both.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from esper.leyline.errors import EsperError, SaveError, complain
from esper.storage import files as disk
from esper.storage.files import Content

FORMAT = 2
_PLAIN_NAME = re.compile(r"[^./\\\0][^/\\\0]*")
Plain = dict[str, Any]
Files = Mapping[str, tuple[str, Content]]  # role -> the name to have and what to hold


class DamagedManifestError(SaveError):
    """A manifest that does not say what was written to it."""


@dataclass(frozen=True)
class Generation:
    number: int
    facts: Plain
    files: dict[str, dict[str, str]]  # role -> name and sha256

    @property
    def names(self) -> set[str]:
        return {file["name"] for file in self.files.values()}


class Store:
    """The newest saves of one thing."""

    def __init__(
        self,
        manifest: Path,
        kind: str,  # what is saved, in words; a manifest of another kind is refused
        folder: Path | None = None,  # where the files are, by default beside the manifest
        # pattern of names without endings; files that fit it and are not listed are deleted
        names: str = "(?!)",
        keep: int = 1,  # newest generations that stay
        best: str = "",  # a fact whose highest holder stays as well
        # what it was saved for, such as a seed and settings; saved for anything else is damage
        of: str = "",
    ):
        self.manifest, self.kind, self.folder = manifest, kind, folder or manifest.parent
        self.keep, self.best, self.of = keep, best, of
        self._is_own = re.compile(rf"(?:{names})(?:-\d+)?\.\w+").fullmatch
        self._newest = 0  # the generation resumed from; younger ones are undone

    def save(self, facts: Plain, files: Files | None = None) -> Generation:
        """Add a generation of facts and files; old ones go afterwards."""
        try:
            facts = json.loads(json.dumps(facts, allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise SaveError(f"the {self.kind} does not fit into JSON ({problem}).") from problem
        listed = self._listed()
        stored = self._write(files, listed) if files else {}
        past = [known for known in listed if known.number <= self._newest]
        known = [*past, Generation(listed[-1].number + 1 if listed else 1, facts, stored)]
        kept, best = known[-self.keep :], None
        if self.best:
            best = max(known, key=lambda generation: generation.facts[self.best])
            kept = kept if best in kept else [best, *kept]
        body = {
            "of": self.of,
            "best": best and best.number,
            "generations": [asdict(each) for each in kept],
        }
        whole = {"format": FORMAT, "kind": self.kind, "sha256": digest_json(body), "body": body}
        content = (json.dumps(whole, indent=1) + "\n").encode()
        if len(content) > disk.MOST_BYTES:
            raise SaveError(
                f"the {self.kind} has {len(content):,} bytes of facts, which nothing "
                f"would read back."
            )
        disk.write_durably(self.manifest, content)
        self._newest = kept[-1].number
        names = {self.manifest.name}.union(*(generation.names for generation in kept))
        own = [
            name for name in disk.names_in(self.folder) if self._is_own(name) and name not in names
        ]
        disk.remove([self.folder / name for name in own])  # what others put there stays
        return kept[-1]

    def _write(self, files: Files, listed: Sequence[Generation]) -> dict[str, dict[str, str]]:
        """Make the files of a generation durable; no file that is listed is touched."""
        with disk.told(self.manifest):
            disk.make_folder(self.manifest.parent)
            disk.sync_folder(
                self.manifest.parent
            )  # the list as seen is now the one on disk: other names are free
        disk.sweep(self.folder, self._is_own)
        names = {role: self.free_name(name, listed) for role, (name, _) in files.items()}
        digests = disk.write_files(
            self.folder, {names[role]: content for role, (_, content) in files.items()}
        )
        return {role: {"name": name, "sha256": digests[name]} for role, name in names.items()}

    def free_name(self, name: str, listed: Sequence[Generation] | None = None) -> str:
        """The name that a file gets in the next generation:

        no listed generation has one of that name.
        """
        listed = self._listed() if listed is None else listed
        if not any(name in known.names for known in listed):
            return name
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{listed[-1].number + 1}{dot}{ending}"

    def _listed(self) -> list[Generation]:
        try:
            return self.generations()
        except DamagedManifestError:
            return []  # what nobody can load is replaced

    def newest(self) -> Generation | None:
        """The newest generation that is whole, byte for byte; a damaged one is named.

        None where nothing is saved.
        """
        listed = self.generations()
        for generation in reversed(listed):
            if (problem := self._problem(generation)) is None:
                self._newest = generation.number
                return generation
            if generation is listed[0]:
                raise SaveError(
                    f"{problem}, and no other save there is whole. Restore it from a "
                    f"copy, or start anew."
                )
            complain(f"{problem}; using the save before it.")
        return None

    def path(self, generation: Generation, role: str) -> Path:
        return self.folder / generation.files[role]["name"]

    def _problem(self, generation: Generation) -> str | None:
        for role, file in generation.files.items():
            path = self.path(generation, role)
            try:
                if disk.digest(path) != file["sha256"]:
                    return f"{path} is truncated or altered: its checksum does not match"
            except OSError as problem:
                return f"{path} is missing or cannot be read ({problem.strerror})"
        return None

    def generations(self) -> list[Generation]:
        """What the manifest lists, oldest first; nothing where there is none."""
        try:
            return self._open(json.loads(disk.read_plain(self.manifest)))
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise SaveError(
                f"cannot read {self.manifest}: {problem.strerror}. Name another folder."
            ) from problem
        except SaveError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
            reason, way_out = (
                " ".join(str(problem).split())[:300],
                "Restore it from a copy, or start anew.",
            )
            raise DamagedManifestError(
                f"{self.manifest} is damaged ({reason}). {way_out}"
            ) from problem

    def _open(self, whole: Any) -> list[Generation]:
        body = whole.get(
            "body", whole
        )  # the first format had no place of its own for what is not the body
        if (written := whole.get("format") or body["format"]) != FORMAT:
            way_out = "Use the version that wrote it, or start anew."
            raise SaveError(
                f"{self.manifest} has format {written}, this version reads format "
                f"{FORMAT}. {way_out}"
            )
        if whole["kind"] != self.kind:
            raise SaveError(
                f"{self.manifest} is of a {whole['kind']}, not of a {self.kind}. "
                f"Choose another folder."
            )
        if digest_json(body) != whole["sha256"]:
            raise ValueError("it was changed after it was written: its checksum does not match")
        if body.get("of", "") != self.of:
            raise ValueError("it was saved for another seed or for other settings")
        found = TypeAdapter(list[Generation]).validate_python(body["generations"])
        if self.best and any(
            not isinstance(generation.facts[self.best], int | float) for generation in found
        ):
            raise ValueError(f"{self.best} is not a number")
        for name in {name for generation in found for name in generation.names}:
            if not (_PLAIN_NAME.fullmatch(name) and name.isprintable()):
                raise ValueError(f"{name!r} is not a plain file name")
        return found


@contextmanager
def fitting(place: Path) -> Iterator[None]:
    """What was saved in a place and does not fit together becomes one line that names the place."""
    try:
        yield
    except EsperError:
        raise
    except Exception as problem:  # whatever a forged file brings about
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        raise SaveError(
            f"{place} does not fit together ({reason}). Use another save, or start anew."
        ) from problem


def is_plain(value: Any, *, exact: bool = True) -> bool:
    """Whether JSON gives it back as it is or, if not `exact`, as something equal:

    tuples as lists, enums as numbers.
    """
    if exact and type(value) not in (dict, list, str, int, float, bool, type(None)):
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and is_plain(
            [*value, *value.values()], exact=exact
        )
    if isinstance(value, list | tuple):
        return all(is_plain(item, exact=exact) for item in value)
    return (
        value is None
        or isinstance(value, str | int)
        or (isinstance(value, float) and isfinite(value))
    )


def require_plain(memory: Any) -> Any:
    """What a policy remembers; refused where it would come back as something else, and decide
    otherwise.
    """
    if is_plain(memory):
        return memory
    rule = "Remember text, numbers, None, lists, and dicts whose keys are text."
    raise SaveError(
        f"the policy's memory would not come back from JSON as it is: {str(memory)[:200]}. {rule}"
    )


def digest_json(body: Plain) -> str:
    """The sha256 of plain values, however they are laid out in their file."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
