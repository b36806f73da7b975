"""Writes docs/config.md from the fields of the configurations: python docs/make_config.py. A test compares the two."""

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from esper.leyline.configuration import leaves
from esper.runtime.config import HostsConfig, TaskConfig
from esper.simic.config import TrainingConfig, presets
from esper.simic.suites import SuiteConfig
from esper.trials.config import CompareConfig, RunConfig

PAGE = Path(__file__).parent / "config.md"
WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true, false",
    Path: "path",
    SuiteConfig: "[suite](varied.md#suites)",
}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
INTRODUCTION = """# Configuration

<!-- written by docs/make_config.py; change the fields in src/esper, then run it -->

One frozen value decides each `esper ppo`, `esper run` and `esper compare`. It starts from a JSON file
(`--config-json mine.json`, which names only what it changes from the defaults below), from a preset (`--preset digits`:
all of it for `esper ppo`, its `task` for the others) or from neither. Then `esper run` and `esper compare` have the
defaults below; `esper ppo` takes the preset that is named after its `--task` (`digits` without one), or the defaults if
there is none. The options of a command set some of the keys, and
`--set` sets any:
`--set ppo.lr=3e-4 --set 'devices=["cuda:0","cuda:1"]' --set task.lengths.ramp=3`. Values are JSON; what is not JSON is
text. An unknown key is refused with the nearest known one, and no value is converted: `"12"` is not 12. A number is at
most a billion, unless its row says otherwise. What a run was started with is in `config.json` of its folder;
`--resume` continues with that. A preset or a file that says otherwise is refused then; `esper ppo` takes over what
options and `--set` change, `esper run` and `esper compare` do not.
"""
COMMANDS = {"ppo": TrainingConfig, "run": RunConfig, "compare": CompareConfig}


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
        return "list of numbers" if inner[0] is float else "list of texts"
    if origin is dict:
        return "numbers by name" if inner[1] is float else "texts by name"
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
    if field.is_required():
        return "-"
    value = field.get_default(call_default_factory=True)
    return json.dumps(
        list(value)
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, Path)
        else value
    )


def row_of(key: str, field: Any) -> str:
    help_text = re.sub(r"\bNone\b", "null", field.description)
    cells = (
        f"`{key}`",
        f"`{default_of(field)}`",
        kind_of(field.annotation, limits_of(field)),
        help_text,
    )
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def table(rows: list[str]) -> str:
    return (
        "\n".join(["| key | default | what it takes | what it does |", "|---|---|---|---|", *rows])
        + "\n"
    )


def changed_keys(name: str) -> str:
    """What a preset changes, as settings."""
    plain, own = TrainingConfig(), TrainingConfig.from_preset(name)
    changed = [
        (key, own.value(key))
        for key in leaves(TrainingConfig)
        if plain.value(key) != own.value(key)
    ]
    return f"| `{name}` | {', '.join(f'`{key}={json.dumps(value)}`' for key, value in changed)} |"


def own_rows(model: type[HostsConfig]) -> dict[str, str]:
    """Rows of the keys that are the command's own, or that it has another default or meaning of."""
    shared = {key: row_of(key, field) for key, field in leaves(HostsConfig).items()}
    rows = {key: row_of(key, field) for key, field in leaves(model).items()}
    return {key: row for key, row in rows.items() if shared.get(key) != row}


def page() -> str:
    """The whole page."""
    shared = {key: row_of(key, field) for key, field in leaves(HostsConfig).items() if key != "out"}
    about = re.sub(r"\bNone\b", "null", TaskConfig.__doc__ or "")
    parts = [
        INTRODUCTION,
        "## Every command\n",
        table([row for key, row in shared.items() if "." not in key]),
    ]
    parts += [
        "## task, for every command\n",
        f"{about}\n",
        table([row for key, row in shared.items() if "." in key]),
    ]
    for command, model in COMMANDS.items():
        parts += [f"## esper {command}\n", table(list(own_rows(model).values()))]
    rows = ["| preset | changes |", "|---|---|", *(changed_keys(name) for name in presets())]
    return "\n".join([*parts, "## Presets\n", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
