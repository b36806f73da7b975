"""Commands whose options come from a configuration: names, types, help and defaults are the fields' own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from esper.leyline.configuration import leaves, read_setting, read_value

if TYPE_CHECKING:
    from esper.runtime.config import HostsConfig

HOSTS = {
    "--task": "task.name",
    "--epochs": "task.epochs",
    "--slots": "task.slots",
    "--budget": "task.budget",
    "--max-seeds": "task.max_seeds",
    "--seed": "seed",
    "--devices": "devices",
    "--executor": "executor",
    "--amp": "amp",
    "--deterministic": "deterministic",
    "--data-root": "data_root",
    "--out": "out",
}
"""Options that every command has, each with the key that it sets."""
TRACKERS = {"--tensorboard": "telemetry.track=tensorboard", "--wandb": "telemetry.track=wandb"}
"""Flags that add a value to a list."""
_ENVIRONMENT = {"data_root": "ESPER_DATA"}
_WIRING: dict[str, Any] = {
    "--set": (list[str] | None, None, "Any other setting, see docs/config.md.", "KEY=VALUE"),
    "--preset": (str | None, None, "Configuration that comes with Esper, such as digits."),
    "--config-json": (Path | None, None, "Configuration file, instead of a preset."),
    "--resume": (bool, False, "Go on with the run in --out."),
    "--json": (bool, False, "Print JSON instead of tables."),
    "--watch": (bool, False, "Show the run on this terminal while it trains."),
}


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    arguments: Sequence[str]
    """as they were written"""
    changes: list[tuple[str, Any]]
    """(key, value) of the options that were given, then of each --set; later ones win"""
    preset: str | None
    file: Path | None
    resume: bool
    as_json: bool
    watch: bool


class ConfiguredCommand(TyperCommand):
    """A command of `esper.cli.NAME`: its `OPTIONS`, the `CONFIG` that has their fields, and `play`.

    The module loads torch, so it is imported when somebody asks for the options, not when commands are listed.
    """

    @property
    def _inner(self) -> TyperCommand:
        if not hasattr(self, "_built"):
            assert self.name is not None
            inner = typer.Typer(add_completion=False)
            inner.command()(_function(import_module(f"esper.cli.{self.name}")))
            self._built: Any = typer.main.get_command(inner)
        return self._built

    def get_params(self, ctx: Any) -> Any:
        return self._inner.get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {option for parameter in self.get_params(ctx) if parameter.multiple for option in parameter.opts}
        return super().parse_args(ctx, join_lists(args, lists - {"--set"}))

    def invoke(self, ctx: Any) -> Any:
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


def _function(module: ModuleType) -> Callable[..., None]:
    """`module.play` behind a signature that has a parameter for every option."""
    start: HostsConfig = module.CONFIG.start()
    keys: Mapping[str, str] = module.OPTIONS
    has_events = TRACKERS.keys() <= keys.keys()
    wiring = {name: parts for name, parts in _WIRING.items() if name != "--watch" or has_events}

    def call(call: typer.Context, **values: Any) -> None:
        given = {name: value for name, value in values.items() if _is_given(call, name)}
        options = [(key, given[_name(option)]) for option, key in keys.items() if _name(option) in given]
        tracked = [key.partition("=")[2] for key, _ in options if "=" in key]
        changes = [(key, _plain(start, key, value)) for key, value in options if "=" not in key]
        changes += [("telemetry.track", tracked)] if tracked else []
        module.play(
            Asked(
                arguments=call.obj,
                changes=changes + [read_setting(text) for text in given.get("set", ())],
                preset=given.get("preset"),
                file=given.get("config_json"),
                resume="resume" in given,
                as_json="json" in given,
                watch="watch" in given,
            )
        )

    parameters = [_option(start, option, key) for option, key in keys.items()]
    parameters += [_parameter(name, *parts) for name, parts in wiring.items()]
    own = Parameter("call", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    call.__signature__ = Signature([own, *parameters])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in (own, *parameters)}
    return call


def _is_given(call: typer.Context, name: str) -> bool:
    source = call.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _name(option: str) -> str:
    return {"--from": "source"}.get(option, option.removeprefix("--").replace("-", "_"))


def _option(start: "HostsConfig", option: str, key: str) -> Parameter:
    """One option as Typer reads it, from the field of its key."""
    if "=" in key:
        tracker = key.partition("=")[2]
        return _parameter(option, bool, False, f"Curves by {tracker} as well, in OUT/{tracker}.")
    field, default = leaves(type(start))[key], start.value(key)
    kind = _kind(field.annotation)
    help_text = f"{field.description[0].upper()}{field.description[1:].replace('`', '')}."
    if get_origin(kind) is tuple:
        return _parameter(option, list[str] | None, list(default or ()) or None, help_text, "LIST")
    if get_origin(kind) is Literal:
        return _parameter(option, str, default, help_text, "|".join(get_args(kind)))
    optional = kind if kind is bool else kind | None
    return _parameter(option, optional, default, help_text, envvar=_ENVIRONMENT.get(key))


def _parameter(
    option: str, annotation: Any, default: Any, help_text: str, metavar: str | None = None, envvar: str | None = None
) -> Parameter:
    info = typer.Option(option, help=help_text, metavar=metavar, envvar=envvar, show_envvar=False)
    return Parameter(_name(option), Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info])


def _kind(annotation: Any) -> Any:
    """A field's type without None."""
    if NoneType in get_args(annotation):
        (annotation,) = [part for part in get_args(annotation) if part is not NoneType]
    return annotation


def _plain(start: "HostsConfig", key: str, value: Any) -> Any:
    """A value as the configuration takes it; what is not a number stays as it was written, and is refused there."""
    kind = _kind(leaves(type(start))[key].annotation)
    if get_origin(kind) is not tuple:
        return str(value) if isinstance(value, Path) else value
    parts = [part for text in value for part in text.split(",") if part]
    return [read_value(part) for part in parts] if get_args(kind)[0] is float else parts
