"""What hosts are trained on and how they are run:

the settings that every command shares. Plain data.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from esper.leyline.configuration import Configuration
from esper.leyline.errors import SettingError
from esper.leyline.imports import require_imported
from esper.runtime.executors.choosing import refuse_impossible
from esper.runtime.tasks.task import Task, get_task
from esper.telemetry.curve_export import TrackerName

MOST_EPOCHS, MOST_HOSTS = 100_000, 10_000


class LengthsConfig(Configuration):
    """Epochs that each stage of a seed lasts when nobody intervenes; None leaves a default of the
    task alone.
    """

    training: int | None = Field(
        None, ge=0, description="incubation before blending; 0 starts to blend at once"
    )
    ramp: int | None = Field(None, ge=0)
    """from alpha 0 to alpha 1; 1 is fully blended in from the first epoch, 0 kept at once,
    unmeasured
    """
    probation: int | None = Field(
        None, ge=1, description="measured at full strength before a seed is kept"
    )
    embargo: int | None = Field(None, ge=0, description="a slot stays closed after a cull")
    resetting: int | None = Field(None, ge=0, description="between embargo and the next chance")


class TaskConfig(Configuration):
    """What hosts are trained on; None leaves a default of the task alone."""

    name: str = Field("digits", description="what hosts are trained on, see `esper list`")
    epoch_examples: int | None = Field(None, ge=1, le=10**7)
    """least examples per epoch and decision, rounded up to steps of one size"""
    held_out: int | None = Field(None, ge=2, description="validation examples to measure on")
    batch: int | None = Field(None, ge=1, description="most examples per training step")
    epochs: int | None = Field(
        None, ge=2, le=MOST_EPOCHS, description="epochs in an episode, or decisions"
    )
    clock: Literal["epochs", "compute"] | None = None
    """unit of an episode's length; naming task.compute chooses compute"""
    compute: float | None = Field(
        None, gt=0, le=1e4, description="FLOPs of an episode; 1 is the task's reference run"
    )
    decay: float | None = Field(None, gt=0, le=1)
    """last part of the compute, in which the learning rate falls to zero"""
    budget: float | None = Field(
        None, gt=1, le=1e6, description="most parameters, as a multiple of the host's"
    )
    max_seeds: int | None = Field(None, ge=1, description="most seeds, live and kept")
    slots: tuple[str, ...] | None = Field(
        None, min_length=1, description="slots that are enabled: r0c0 r0c1"
    )
    blueprints: tuple[str, ...] | None = Field(
        None, min_length=1, description="what may be planted"
    )
    blends: tuple[str, ...] | None = Field(None, min_length=1)
    """ways to blend that a policy may choose from: linear, sigmoid, gated"""
    scale_at_birth: float | None = Field(None, ge=0)
    """strength of a newborn seed's branch; 0 is the identity, 1 a cold start"""
    prunes: bool | None = None
    """whether kept seeds that do not pay are removed when the rate has fallen to a tenth of its
    peak
    """
    lengths: LengthsConfig = Field(
        LengthsConfig(), description="epochs that each stage of a seed lasts"
    )

    def build(self) -> Task:
        """The task with what was changed; a length in compute makes that the clock."""
        task = get_task(self.name)
        if self.compute is not None and self.clock is None:
            task = replace(task, clock="compute")
        if (self.clock or task.clock) == "epochs" and (self.compute or self.decay) is not None:
            given = f"compute is {self.compute} and decay {self.decay}, which are of clock compute"
            raise SettingError(
                f"clock is epochs, but {given}. Give them without that clock, or leave them out."
            )
        changed = {
            name: value
            for name, value in self
            if name not in ("name", "lengths") and value is not None
        }
        lengths = {name: value for name, value in self.lengths if value is not None}
        return replace(task, **changed, lengths=replace(task.lengths, **lengths))


class TelemetrySettings(Configuration):
    level: Literal["off", "minimal", "normal", "debug"] = "normal"
    """off, rounds only, seeds and epochs too, every decision too"""
    track: tuple[TrackerName, ...] = ()
    """who draws curves of it as well: tensorboard, wandb; at every level"""


class HostsConfig(Configuration):
    """What `esper ppo`, `esper run` and `esper compare` have in common:

    hosts, and where they train.
    """

    task: TaskConfig = Field(
        TaskConfig(), description="what hosts are trained on, and for how long"
    )
    seed: int = Field(
        0, ge=0, le=2**128, description="the first host's random seed; the others count on"
    )
    devices: tuple[str, ...] = Field(
        ("cpu",), min_length=1, description="where hosts train: cpu, or cuda:0 cuda:1"
    )
    executor: Literal["auto", "eager", "graphed"] = Field(
        "auto", description="how hosts' steps are run"
    )
    amp: Literal["off", "bf16", "fp16"] = Field(
        "off", description="precision of hosts' forward passes"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compile blocks; auto if large, on GPUs"
    )
    graph_memory: float | None = Field(
        None, gt=0, description="GiB of graphs per GPU; None is half of what is free"
    )
    out: Path = Field(description="run folder")
    imports: dict[str, str] = Field(default_factory=dict)
    """files that `esper --import` brought in, by name, with their SHA-256; not for you to set"""
    data_root: Path | None = Field(None, description="folder that holds the data sets")
    threads: int | None = Field(1, ge=1, le=512)
    """CPU threads per operation; None leaves it to torch. Small hosts are fastest with 1"""
    deterministic: bool = Field(False, description="only kernels that give the same result twice")

    @property
    def way_to_run(self) -> dict[str, Any]:
        """How hosts are run, as `Population` takes it."""
        return {
            name: getattr(self, name) for name in ("executor", "amp", "compile", "graph_memory")
        }

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """What a command starts from: the defaults, or as much of a preset as it takes."""
        raise NotImplementedError

    def settled(self) -> Self:
        """The same with what follows from other fields written out."""
        return self

    @property
    def settled_task(self) -> TaskConfig:
        """The task's settings with its length written out, for whoever reads the run folder."""
        task = self.task.build()
        compute = task.compute if task.clock == "compute" else None
        return self.task.model_copy(
            update={"epochs": task.epochs, "clock": task.clock, "compute": compute}
        )

    def check(self) -> None:
        require_imported(self.imports)
        refuse_impossible(self.executor, self.amp, self.devices, self.task.build())
