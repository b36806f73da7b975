"""What can become of a file or a folder, by accident or on purpose. Each function takes paths and changes the disk."""

import json
import os
import shutil

from esper.storage.store import digest_json


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def zero(path):
    """The size is right and the content is gone, as a power cut can leave it."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path, place=0.5):
    """One bit, at this part of the file."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def change_digit(path):
    """One digit of a number becomes another one; the file is as good JSON as before."""
    text = path.read_text()
    place = next(
        at for at, letter in enumerate(text) if letter in "12345678" and text[at - 1] == "."
    )
    path.write_text(f"{text[:place]}{int(text[place]) + 1}{text[place + 1 :]}")


def delete(path):
    path.unlink()


def swap(path, other):
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def link_away(path, target):
    """A symbolic link in place of a file or a folder."""
    discard(path)
    path.symlink_to(target)


def link_hard(path, target):
    discard(path)
    os.link(target, path)


def pipe(path):
    """A FIFO that nobody writes to: whoever opens it to read waits for ever."""
    discard(path)
    os.mkfifo(path)


def discard(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def forge(manifest, change):
    """Change what a manifest lists, and give it the checksum that it would have then."""
    whole = json.loads(manifest.read_text())
    change(whole["body"])
    whole["sha256"] = digest_json(whole["body"])
    manifest.write_text(json.dumps(whole))


WRONG = (None, True, -1, 0.5, 1e308, "text", "\ud800", "\x1b[2J\n", [], {}, [[None]], {"key": {}})
"""a value of every type of JSON, and texts that nobody can print or encode"""


def leaves(value, path=()):
    """Where every value inside a JSON value is, itself included."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inner:
        yield from leaves(part, (*path, key))


def replaced(value, path, new):
    """A copy of a JSON value with another value at a path."""
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return copy


def tree(folder):
    """Everything below a folder, to see whether something was touched."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
