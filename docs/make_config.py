"""Writes docs/config.md from the fields of `TrainingConfig`: python docs/make_config.py. A test compares the two."""

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from esper.simic.training_config import TrainingConfig, leaves, presets

PAGE = Path(__file__).parent / "config.md"
WORDS: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true, false", Path: "path"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
INTRODUCTION = """# Configuration

<!-- written by docs/make_config.py; change the fields in src/esper, then run it -->

One frozen value decides a training run. It starts from a preset (`esper ppo --preset digits`) or from a JSON file
(`--config-json mine.json`, which names only what it changes), and every key can be changed on the command line:
`--set ppo.lr=3e-4 --set 'devices=["cuda:0","cuda:1"]' --set reward.weights.rent=0.05`. Values are JSON; what is not
JSON is text. An unknown key is refused with the nearest known one, and no value is converted: `"12"` is not 12. What a
run was started with is in `config.json` of its folder.
"""


def kind_of(annotation: Any, limits: str) -> str:
    """What may be written for a field, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if NoneType in inner:
        return f"{kind_of(next(part for part in inner if part is not NoneType), limits)}, null"
    return _plain_kind(annotation, origin, inner) + limits


def _plain_kind(annotation: Any, origin: Any, inner: tuple[Any, ...]) -> str:
    if origin is Literal:
        return ", ".join(inner)
    if origin is tuple:
        return "list of texts"
    if origin is dict:
        return "numbers by name"
    return WORDS[annotation]


def limits_of(field: Any) -> str:
    """Bounds of a field: ' ≥ 1', or nothing."""
    found = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(limit, name)
    ]
    found += ["not empty" for limit in field.metadata if hasattr(limit, "min_length")]
    return f" ({', '.join(found)})" if found else ""


def default_of(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return json.dumps(list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value)


def row_of(key: str, field: Any) -> str:
    help_text = re.sub(r"\bNone\b", "null", field.description)
    cells = f"`{key}`", f"`{default_of(field)}`", kind_of(field.annotation, limits_of(field)), help_text
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def table(rows: list[str]) -> str:
    return "\n".join(["| key | default | what it takes | what it does |", "|---|---|---|---|", *rows]) + "\n"


def changed_keys(name: str) -> str:
    """What a preset changes, as settings."""
    plain, own = TrainingConfig().model_dump(mode="json"), TrainingConfig.from_preset(name).model_dump(mode="json")
    found = []
    for key in leaves():
        *parents, leaf = key.split(".")
        before, after = (values[parents[0]] if parents else values for values in (plain, own))
        if before[leaf] != after[leaf]:
            found.append(f"{key}={json.dumps(after[leaf])}")
    return f"| `{name}` | {', '.join(f'`{text}`' for text in found)} |"


def page() -> str:
    """The whole page."""
    fields = leaves()
    parts = [INTRODUCTION, "## The run\n", table([row_of(key, fields[key]) for key in fields if "." not in key])]
    for name, field in TrainingConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            about = re.sub(r"\bNone\b", "null", section.__doc__ or "").strip()
            own = [row_of(key, fields[key]) for key in fields if key.startswith(f"{name}.")]
            parts += [f"## {name}\n", f"{about}\n", table(own)]
    rows = ["| preset | changes |", "|---|---|", *(changed_keys(name) for name in presets())]
    return "\n".join([*parts, "## Presets\n", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
