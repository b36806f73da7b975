"""Where a benchmark's record goes: a new file, or a new run in a file of several runs.

A benchmark calls `add_options` and, before it measures anything, `claim`; at the end `keep`.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where a record goes."""
    parser.add_argument(
        "--out", type=Path, help="JSON file to write; one that exists is not replaced"
    )
    parser.add_argument("--name", help="add the record to --out under this name, beside other runs")
    parser.add_argument("--replace", action="store_true", help="replace what is in --out")


def claim(options: argparse.Namespace) -> None:
    """End the program if its record would replace another one."""
    if options.out and options.name:
        claim_parts(options.out, "runs", [options.name], options.replace)
    elif options.out:
        claim_file(options.out, options.replace)


def claim_file(path: Path, replace: bool) -> None:
    """End the program if the file exists and may not be replaced."""
    if path.exists() and not replace:
        raise SystemExit(f"{path} exists; choose another --out, or --replace it.")


def claim_parts(path: Path, key: str, names: Iterable[str], replace: bool) -> None:
    """End the program if the file cannot take these parts, or has one that may not be replaced."""
    if not path.exists():
        return
    known = json.loads(path.read_text(encoding="utf-8")).get(key)
    if known is None:
        raise SystemExit(f"{path} holds a single record, not {key} by name; choose another --out.")
    if not replace and (taken := [name for name in names if name in known]):
        raise SystemExit(f"{path} has {', '.join(taken)}; choose another --out, or --replace it.")


def keep(options: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Write the record to --out, if there is one; again as often as the program has more of it."""
    if options.out and options.name:
        write(options.out, {"runs": known_parts(options.out, "runs") | {options.name: record}})
    elif options.out:
        write(options.out, record)


def known_parts(path: Path, key: str) -> dict[str, Any]:
    """The named parts that a file has; none if there is no file."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[key]
    return found


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as readable JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
