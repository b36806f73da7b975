"""Everything that decides a training run, in one frozen value. The only way into training; a knob exists here once."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from esper.leyline.configuration import Configuration
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.config import MOST_HOSTS, HostsConfig, TelemetrySettings
from esper.runtime.devices import refuse_idle
from esper.simic.rewards import weights_of

MOST_WIDTH = 16384


class PPOSettings(Configuration):
    """How the policy learns from a rollout."""

    epochs: int = Field(10, ge=1, description="passes over one rollout")
    minibatches: int = Field(8, ge=1)
    """parts that the rows of a rollout are assigned to; growth never cuts a row"""
    gamma: float = Field(0.99, gt=0, le=1, description="discount of later rewards")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="how far advantages look beyond the value's own estimate"
    )
    clip: float = Field(
        0.2, gt=0, lt=1, description="largest relative change of a probability that still pays"
    )
    clip_mode: Literal["per_head", "joint"] = "per_head"
    """whether each head's ratio is clipped by itself or the product of all relevant ones"""
    value_clip: float = Field(0.2, gt=0)
    """largest paid change of a value, in standard deviations of the returns"""
    value_weight: float = Field(0.5, ge=0, description="share of the value's loss")
    entropy: float = Field(
        0.01, ge=0, description="bonus for undecided heads at the first decision"
    )
    entropy_floor: float = Field(0.001, ge=0, description="the bonus after `anneal_decisions`")
    lr: float = Field(1e-3, gt=0, description="learning rate at the first decision")
    lr_floor: float = Field(1e-4, ge=0, description="the learning rate after `anneal_decisions`")
    anneal_decisions: int | None = Field(None, ge=1, le=2**62)
    """decisions over which bonus and rate fall in a straight line; None = the whole training"""
    target_kl: float | None = Field(0.03, gt=0)
    """an update ends before a step whose divergence exceeds 1.5 times this; None = never"""
    max_grad_norm: float = Field(0.5, gt=0)
    """gradients of the whole network are clipped to this norm together"""
    hidden_dim: int = Field(128, ge=1, le=MOST_WIDTH, description="width of encoder and LSTM")
    head_dim: int = Field(
        64, ge=1, le=MOST_WIDTH, description="width of the layer inside each head"
    )
    compile: str | None = None
    """backend for torch.compile of the network while it learns, such as "inductor"; None = not compiled"""

    @model_validator(mode="after")
    def _floors_lie_below(self) -> Self:
        for name in ("entropy", "lr"):
            start, floor = getattr(self, name), getattr(self, f"{name}_floor")
            if floor > start:
                raise ValueError(
                    f"{name}_floor is {floor}, above {name} {start}; it has to be at most that."
                )
        return self

    def annealed_over(self, decisions: int) -> Self:
        """The same with a length of the line, which is the whole training where none is set."""
        return (
            self
            if self.anneal_decisions is not None
            else self.model_copy(update={"anneal_decisions": decisions})
        )

    def annealed(self, name: str, decisions: int) -> float:
        """`lr` or `entropy` after so many decisions: the same after a resume, whatever updates were cut short."""
        start, floor, over = (
            getattr(self, name),
            getattr(self, f"{name}_floor"),
            self.anneal_decisions,
        )
        return start if over is None else start + (floor - start) * min(1.0, decisions / over)


class PPOConfig(PPOSettings):
    """How an agent learns where episodes have no fixed length. In growth a rollout is N whole episodes."""

    horizon: int = Field(256, ge=1, description="steps of every environment in one rollout")


class RewardConfig(Configuration):
    """What a decision earns."""

    family: str | None = Field(
        None, description="contribution, loss, compute or your own; see esper list"
    )
    weights: dict[str, float] = Field(default_factory=dict)
    """changed weights of the family's terms, by name"""


class TrainingTelemetry(TelemetrySettings):
    """How much is written down."""

    escalation_rounds: int = Field(
        3, ge=1, description="rounds at debug, the one that an anomaly is found in included"
    )


class TrainingConfig(HostsConfig):
    """One training run of a growth policy."""

    reward: RewardConfig = Field(RewardConfig(), description="what a decision earns")
    ppo: PPOSettings = Field(PPOSettings(), description="how the policy learns")
    telemetry: TrainingTelemetry = Field(
        TrainingTelemetry(), description="how much is written down"
    )
    rounds: int = Field(40, ge=1, description="rounds of N episodes and one update")
    hosts: int = Field(8, ge=1, le=MOST_HOSTS, description="hosts that train side by side")
    host_pool: int = Field(32, ge=1, le=100_000)
    """different hosts there are; each one's twin is computed once"""
    initial_wait: float = Field(0.8, gt=0, lt=1)
    """how likely an untrained policy waits where every op is possible"""
    seed: int = Field(
        0, ge=0, le=2**128, description="decides hosts, data orders, weights and draws"
    )
    policy_device: str = "cpu"
    """where the policy decides and learns; a network this small is faster on the CPU, unless hosts are hundreds"""
    out: Path = Field(Path("runs/ppo"), description="run folder")
    observe_telemetry: bool = Field(
        True, description="whether the policy sees the ten telemetry features of each slot"
    )
    keep_checkpoints: int = Field(
        3, ge=1, description="newest checkpoints that are kept, beside the best"
    )
    time_limit: float | None = Field(None, gt=0)
    """seconds after which training ends as on Ctrl-C; a resumed run counts anew"""
    stop_on_anomaly: bool = False
    """end with an error where an update does not look healthy; its round is not saved"""

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """A configuration that comes with the package, by the name of its task."""
        if name not in presets():
            raise UnknownNameError("preset", name, presets())
        return cls.of(
            json.loads((files("esper.simic") / "presets" / f"{name}.json").read_text()),
            f"preset {name}",
        )

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """The named preset, or the task's own; the defaults for a task without one, digits where none is named."""
        if preset is None and isinstance(task, str) and task not in presets():
            return cls.of({"task": {"name": task}})
        return cls.from_preset(preset or str(task or "digits"))

    def check(self) -> None:
        super().check()
        refuse_idle(self.hosts, self.devices)
        weights_of(self.family, self.reward.weights)
        clock = self.task.build().clock
        if self.family in (("contribution", "loss") if clock == "compute" else ("compute",)):
            reason = f"reward.family is {self.family}, which does not pay for what clock {clock} measures"
            raise SettingError(f"{reason}. Leave it out: --set reward.family=null.")
        if (epochs := self.task.build().epochs) < 2:
            raise SettingError(
                f"an episode of {self.task.name} has {epochs} epoch; a decision needs at least two."
            )
        if (
            backend := self.ppo.compile
        ) is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
            raise UnknownNameError(
                "backend of torch.compile", backend, torch.compiler.list_backends()
            )

    def settled(self) -> Self:
        """The same with what follows from other fields written out, so that a later change cannot move it."""
        whole = self.rounds * self.hosts * (self.task.build().epochs - 1)
        return self.model_copy(
            update={"ppo": self.ppo.annealed_over(whole), "task": self.settled_task}
        )

    @property
    def family(self) -> str:
        """The family of rewards that is named, or the clock's own."""
        return self.reward.family or (
            "compute" if self.task.build().clock == "compute" else "contribution"
        )


def presets() -> tuple[str, ...]:
    """Names of the configurations that come with the package."""
    return tuple(
        sorted(
            path.name.removesuffix(".json") for path in (files("esper.simic") / "presets").iterdir()
        )
    )
