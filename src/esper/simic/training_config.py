"""Everything that decides a training run, in one frozen value. The only way into training; a knob exists here once."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.tasks import Task, get_task
from esper.simic.config import PPOSettings
from esper.simic.rewards import weights_of
from esper.telemetry.curve_export import TrackerName

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


class TaskConfig(BaseModel):
    """What hosts are trained on; None leaves a default of the task alone."""

    model_config = _STRICT

    name: str = "digits"
    """one of `esper tasks`"""
    epoch_examples: int | None = Field(None, ge=1)
    """least examples per epoch and decision, rounded up to steps of one size"""
    held_out: int | None = Field(None, ge=2)
    """validation examples to measure on"""
    batch: int | None = Field(None, ge=1)
    """most examples per training step"""
    epochs: int | None = Field(None, ge=2)
    """epochs in a host's episode"""
    budget: float | None = Field(None, gt=1, le=1e6)
    """most parameters, as a multiple of the host's"""
    max_seeds: int | None = Field(None, ge=1)
    """most seeds, live and kept"""
    slots: tuple[str, ...] | None = Field(None, min_length=1)
    """slots that are enabled, by id"""
    blueprints: tuple[str, ...] | None = Field(None, min_length=1)
    """what may be planted"""

    def build(self) -> Task:
        """The task with what was changed."""
        changed = {name: value for name, value in self if name != "name" and value is not None}
        return replace(get_task(self.name), **changed)


class RewardConfig(BaseModel):
    """What a decision earns."""

    model_config = _STRICT

    family: Literal["contribution", "loss"] = "contribution"
    """lead over the twin in accuracy, or in held-out loss"""
    weights: dict[str, float] = Field(default_factory=dict)
    """changed weights of the family's terms, by name"""


class TelemetrySettings(BaseModel):
    """How much is written down."""

    model_config = _STRICT

    level: Literal["off", "minimal", "normal", "debug"] = "normal"
    """off, rounds only, seeds and epochs too, every decision too"""
    escalation_rounds: int = Field(3, ge=1)
    """rounds at debug, the one that an anomaly is found in included"""
    track: tuple[TrackerName, ...] = ()
    """who draws curves of it as well: tensorboard, wandb; at every level"""


class TrainingConfig(BaseModel):
    """One training run of a growth policy."""

    model_config = _STRICT

    task: TaskConfig = TaskConfig()
    """what hosts are trained on"""
    reward: RewardConfig = RewardConfig()
    """what a decision earns"""
    ppo: PPOSettings = PPOSettings()
    """how the policy learns"""
    telemetry: TelemetrySettings = TelemetrySettings()
    """how much is written down"""
    rounds: int = Field(40, ge=1)
    """rounds of N episodes and one update"""
    hosts: int = Field(8, ge=1)
    """hosts that live side by side"""
    host_pool: int = Field(32, ge=1)
    """different hosts there are; each one's twin is computed once"""
    initial_wait: float = Field(0.8, gt=0, lt=1)
    """how likely an untrained policy waits where every op is possible"""
    seed: int = Field(0, ge=0)
    """decides hosts, data orders, weights and draws"""
    devices: tuple[str, ...] = Field(("cpu",), min_length=1)
    """where hosts train"""
    policy_device: str = "cpu"
    """where the policy decides and learns; a network this small is faster on the CPU, unless hosts are hundreds"""
    executor: Literal["auto", "eager", "graphed"] = "auto"
    """how hosts' steps are run"""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """precision of hosts' forward passes"""
    out: Path = Path("runs/ppo")
    """run folder: configuration, events, checkpoints, twins"""
    data_root: Path | None = None
    """folder that holds the data sets"""
    threads: int | None = Field(None, ge=1)
    """CPU threads per operation; None leaves it to torch. Small hosts are fastest with 1"""
    deterministic: bool = False
    """only kernels that give the same result twice; slower on a GPU"""
    observe_telemetry: bool = True
    """whether the policy sees the ten telemetry features of each slot"""
    keep_checkpoints: int = Field(3, ge=1)
    """newest checkpoints that are kept, beside the best"""
    time_limit: float | None = Field(None, gt=0)
    """seconds after which training ends as on Ctrl-C; a resumed run counts anew"""
    stop_on_anomaly: bool = False
    """end with an error where an update does not look healthy; its round is not saved"""

    @classmethod
    def from_json_path(cls, path: str | Path) -> Self:
        """The configuration in a JSON file; keys that are not there have their defaults."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as problem:
            raise SettingError(f"cannot read the configuration {path}: {problem.strerror}.") from problem
        except (ValueError, RecursionError) as problem:
            raise SettingError(f"{path} is not JSON: {problem}. Write an object of keys and values.") from problem
        return cls.of(values, str(path))

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """A configuration that comes with the package, by the name of its task."""
        known = presets()
        if name not in known:
            raise UnknownNameError("preset", name, known)
        return cls.of(json.loads((files("esper.simic") / "presets" / f"{name}.json").read_text()), f"preset {name}")

    @classmethod
    def of(cls, values: Any, source: str = "the configuration") -> Self:
        """A checked configuration from plain values; every mistake gets one clear line."""
        if not isinstance(values, dict):
            raise SettingError(f"{source} holds a {type(values).__name__}; it must be an object of keys and values.")
        try:
            found = cls.model_validate_json(json.dumps(values, default=str))  # lists and paths as JSON has them
        except ValidationError as problem:
            raise SettingError(f"{source}: {'; '.join(explain(cls, problem.errors()))}") from None
        found.check()
        return found

    def check(self) -> None:
        """What single fields cannot tell: names that exist, combinations that make sense."""
        task = self.task.build()
        weights_of(self.reward.family, self.reward.weights)
        if task.epochs < 2:
            raise SettingError(f"task {task.name} episodes {task.epochs} epoch; a decision needs at least two.")
        if self.amp == "fp16" and any(device.startswith("cpu") for device in self.devices):
            raise SettingError("amp fp16 needs CUDA devices; on a CPU use bf16 or off.")
        if self.amp == "fp16" and self.executor == "graphed":
            raise SettingError("amp fp16 runs on the eager executor only; choose executor eager or auto.")
        if self.executor == "graphed" and any(device.startswith("cpu") for device in self.devices):
            raise SettingError("executor graphed needs CUDA devices; on a CPU choose executor eager or auto.")
        if (backend := self.ppo.compile) is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
            raise UnknownNameError("backend of torch.compile", backend, torch.compiler.list_backends())

    def with_changes(self, changes: Sequence[tuple[str, Any]], source: str) -> Self:
        """The same with some leaves changed, named by dotted keys such as ppo.lr."""
        values = self.model_dump(mode="json")
        for key, value in changes:
            *parents, leaf = key.split(".")
            place: Any = values
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise SettingError(f"{source}: {_unknown(type(self), key.split('.'))}")
            place[leaf] = value
        return type(self).of(values, source)


def presets() -> tuple[str, ...]:
    """Names of the configurations that come with the package."""
    return tuple(sorted(path.name.removesuffix(".json") for path in (files("esper.simic") / "presets").iterdir()))


def read_setting(text: str) -> tuple[str, Any]:
    """`key=value` from the command line; the value is JSON where it can be, else a string."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise SettingError(f"--set {text!r} is not KEY=VALUE; write it like --set ppo.lr=3e-4.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def leaves(model: type[BaseModel] = TrainingConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf field by its dotted key."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def explain(model: type[BaseModel], errors: Sequence[Any]) -> Iterator[str]:
    """A few words for each mistake; of a list with a wrong entry, the entry alone is named."""
    for error in errors:
        path, message = [str(part) for part in error["loc"]], error["msg"]
        if any(len(other["loc"]) > len(path) and other["loc"][: len(path)] == error["loc"] for other in errors):
            continue
        if error["type"] == "extra_forbidden":
            yield _unknown(model, path)
        elif error["type"] == "value_error":
            yield f"{'.'.join(path)}: {error['ctx']['error']}"
        else:
            yield f"{'.'.join(path)} is {json.dumps(error['input'])}: {message[0].lower()}{message[1:]}"


def _unknown(model: type[BaseModel], path: Sequence[str]) -> str:
    key, section = ".".join(path), ".".join(path[:-1])
    known = [*leaves(model), *{leaf.rpartition(".")[0]: None for leaf in leaves(model) if "." in leaf}]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    near = [siblings[name] for name in get_close_matches(path[-1], siblings, n=1)]
    near += [name for name in known if name.endswith(f".{path[-1]}")]
    near += [] if siblings and section else get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(siblings.values() or known)}."
    return f"unknown key {key!r}. {hint}"


__all__ = ["RewardConfig", "TaskConfig", "TelemetrySettings", "TrainingConfig", "leaves", "presets"]
