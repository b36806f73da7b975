"""Commands whose options come from a configuration.

Names, types, help and defaults of options are those of its fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from esper.leyline.configuration import (
    Configuration,
    leaves,
    read_json,
    read_setting,
    read_value,
)

# options that are not called after the last part of their key
_NAMES = {"task.name": "--task", "reward.family": "--reward-family"}


def options_of(*keys: str) -> dict[str, str]:
    """The keys by the options that set them."""
    return {_NAMES.get(key, f"--{key.rpartition('.')[2].replace('_', '-')}"): key for key in keys}


HOSTS = options_of(  # Every command has these.
    *("task.name", "task.epochs", "task.compute", "task.slots", "task.budget", "task.max_seeds"),
    *(
        "seed",
        "devices",
        "executor",
        "amp",
        "compile",
        "graph_memory",
        "deterministic",
        "data_root",
        "out",
    ),
)
_TRACKERS = ("tensorboard", "wandb")
_WIRING: dict[str, Any] = {
    **{
        f"--{name}": (bool, False, f"Curves by {name} as well, in OUT/{name}.")
        for name in _TRACKERS
    },
    "--set": (list[str] | None, None, "Any other setting, see docs/config.md.", "KEY=VALUE"),
    "--preset": (str | None, None, "Configuration that comes with Esper, such as digits."),
    "--config-json": (Path | None, None, "Configuration file, instead of a preset."),
    "--resume": (bool, False, "Continue the run in --out."),
    "--json": (bool, False, "Print JSON instead of tables."),
    "--verbose": (bool, False, "Also print the whole configuration."),
}


@dataclass(frozen=True)
class Asked:
    """What a command line asks for: its arguments as written, and what they mean."""

    arguments: Sequence[str]
    # (key, value) of the options that were written, then of each --set; later ones win
    changes: list[tuple[str, Any]]
    preset: str | None
    file: Path | None
    resume: bool
    as_json: bool
    verbose: bool = False


class ConfiguredCommand(TyperCommand):
    """A command that is the module `esper.cli.NAME`.

    The module has `OPTIONS`, the `CONFIG` whose fields they set, and `play`. `HAS_VERBOSE` adds
    `--verbose`.
    """

    @cached_property
    def _inner(self) -> Any:
        # the module loads torch, so it is imported when the options are asked for, not when
        # commands are listed
        inner = typer.Typer(add_completion=False)
        inner.command()(_function(import_module(f"esper.cli.{self.name}")))
        return typer.main.get_command(inner)

    def get_params(self, ctx: Any) -> Any:
        """Return the options of the module."""
        return self._inner.get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take lists with spaces as well as with commas."""
        lists = {
            option
            for parameter in self.get_params(ctx)
            if parameter.multiple
            for option in parameter.opts
        }
        return super().parse_args(ctx, join_lists(args, lists - {"--set"}))

    def invoke(self, ctx: Any) -> Any:
        """Call the module's `play`."""
        return self._inner.invoke(ctx)


def join_lists(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """`--devices a b` as `--devices a,b`, the way the parser takes it."""
    joined: list[str] = []
    is_list = False
    for argument in arguments:
        is_value = not argument.startswith("-")
        if is_list and is_value and joined[-1] not in lists:
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
            is_list = argument in lists or (is_list and is_value)
    return joined


def _function(module: Any) -> Callable[..., None]:
    """`module.play` behind a signature that has a parameter for every option."""
    start = module.CONFIG.start()
    kinds = {key: _kind(field.annotation) for key, field in leaves(module.CONFIG).items()}

    def call(call: typer.Context, **values: Any) -> None:
        sources = {name: call.get_parameter_source(name) for name in values}
        typed = {
            name: values[name]
            for name, source in sources.items()
            if source and source.name != "DEFAULT"
        }
        options = [
            (key, typed[_name(option)])
            for option, key in module.OPTIONS.items()
            if _name(option) in typed
        ]
        changes = [(key, _plain(kinds[key], value)) for key, value in options]
        tracked = [name for name in _TRACKERS if name in typed]
        changes += [("telemetry.track", tracked)] if tracked else []
        changes += [read_setting(text) for text in typed.get("set", ())]
        module.play(
            Asked(
                arguments=call.obj,
                changes=changes,
                preset=typed.get("preset"),
                file=typed.get("config_json"),
                resume="resume" in typed,
                as_json="json" in typed,
                verbose="verbose" in typed,
            )
        )

    parameters = [Parameter("call", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for option, key in module.OPTIONS.items():
        text = leaves(module.CONFIG)[key].description.replace("`", "")
        parameters.append(
            _option(option, kinds[key], start.value(key), f"{text[0].upper()}{text[1:]}.")
        )
    lacking = set() if hasattr(module, "HAS_VERBOSE") else {"--verbose"}
    if "telemetry" not in module.CONFIG.model_fields:
        lacking |= {f"--{name}" for name in _TRACKERS}
    parameters += [
        _parameter(name, *parts) for name, parts in _WIRING.items() if name not in lacking
    ]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _option(option: str, kind: Any, default: Any, help_text: str) -> Parameter:
    if get_origin(kind) is tuple:
        return _parameter(option, list[str] | None, list(default or ()) or None, help_text, "LIST")
    if _is_section(kind):
        return _parameter(option, Path | None, None, help_text, "FILE")
    if get_origin(kind) is Literal:
        return _parameter(option, str, default, help_text, "|".join(get_args(kind)))
    return _parameter(option, kind if kind is bool else kind | None, default, help_text)


def _parameter(
    option: str, kind: Any, default: Any, help_text: str, metavar: str | None = None
) -> Parameter:
    envvar = "ESPER_DATA" if option == "--data-root" else None
    info = typer.Option(option, help=help_text, metavar=metavar, envvar=envvar, show_envvar=False)
    return Parameter(
        _name(option), Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _is_section(kind: Any) -> bool:
    """Whether a setting is a section of its own, which a command line names as a file."""
    return isinstance(kind, type) and issubclass(kind, Configuration)


def _kind(annotation: Any) -> Any:
    """A field's type without None."""
    inner = get_args(annotation)
    return next(part for part in inner if part is not NoneType) if NoneType in inner else annotation


def _plain(kind: Any, value: Any) -> Any:
    """Return a value as the configuration takes it.

    What is not a number stays as it was written, and is refused there.
    """
    if _is_section(kind):
        return read_json(value)
    if get_origin(kind) is not tuple:
        return str(value) if isinstance(value, Path) else value
    parts = [part for text in value for part in text.split(",") if part]
    return [read_value(part) for part in parts] if get_args(kind)[0] is float else parts
