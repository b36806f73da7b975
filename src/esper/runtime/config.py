"""The settings that every command shares: what hosts are trained on, and how they are run.

Plain data; nothing here runs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from esper.leyline.configuration import Configuration
from esper.leyline.errors import SettingError
from esper.leyline.imports import require_imported
from esper.runtime.executors.choosing import refuse_impossible
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import FIELDS, Task
from esper.telemetry.curve_export import TrackerName

MOST_EPOCHS = 100_000
MOST_HOSTS = 10_000


class LengthsConfig(Configuration):
    """Epochs that each stage of a seed lasts unless the policy ends it earlier.

    None leaves a default of the task alone.
    """

    training: int | None = Field(
        default=None, ge=0, description="incubation before blending; 0 starts to blend at once"
    )
    ramp: int | None = Field(default=None, ge=0)
    """from alpha 0 to alpha 1; 1 is fully blended in from the first epoch, 0 plants for good,
    unmeasured
    """
    embargo: int | None = Field(default=None, ge=0, description="a slot stays closed after a cull")
    resetting: int | None = Field(
        default=None, ge=0, description="between embargo and the next chance"
    )


def _of_task(name: str, note: str = "", **limits: Any) -> Any:
    """A setting that changes a field of `Task`: its help and bounds are those of that field.

    `note` is added to the help, `limits` are what is stricter here, as `pydantic.Field` takes them.
    """
    about = FIELDS[name]
    bounds: dict[str, Any] = {}
    if about.least is not None:
        bounds["ge"] = about.least
    if about.range is not None:
        bounds["gt"] = about.range.above
        bounds["le"] = about.range.most
    return Field(default=None, description=about.help + note, **{**bounds, **limits})


class TaskConfig(Configuration):
    """What hosts are trained on; None leaves a default of the task alone."""

    name: str = Field(default="digits", description=FIELDS["name"].help)
    epoch_examples: int | None = _of_task("epoch_examples", le=10**7)
    held_out: int | None = _of_task("held_out")
    batch: int | None = _of_task("batch")
    epochs: int | None = _of_task("epochs", ge=2, le=MOST_EPOCHS)
    clock: Literal["epochs", "compute"] | None = _of_task(
        "clock", note="; naming task.compute chooses compute"
    )
    compute: float | None = _of_task("compute")
    decay: float | None = _of_task("decay")
    budget: float | None = _of_task("budget", gt=1, le=1e6)
    max_seeds: int | None = _of_task("max_seeds", ge=1)
    slots: tuple[str, ...] | None = _of_task("slots", min_length=1)
    blueprints: tuple[str, ...] | None = _of_task("blueprints", min_length=1)
    blends: tuple[str, ...] | None = _of_task("blends", min_length=1)
    scale_at_birth: float | None = _of_task("scale_at_birth", ge=0)
    prunes: bool | None = _of_task("prunes")
    lengths: LengthsConfig = Field(default=LengthsConfig(), description=FIELDS["lengths"].help)

    def build(self) -> Task:
        """Return the task with what was changed; a length in compute makes that the clock."""
        task = get_task(self.name)
        if self.compute is not None and self.clock is None:
            task = replace(task, clock="compute")
        counts_epochs = (self.clock or task.clock) == "epochs"
        if counts_epochs and (self.compute is not None or self.decay is not None):
            raise SettingError(
                f"clock is epochs, but compute is {self.compute} and decay {self.decay}, which are "
                "of clock compute. Give them without that clock, or leave them out."
            )
        changes: dict[str, Any] = {}
        for name, value in self:
            if name not in ("name", "lengths") and value is not None:
                changes[name] = value
        if task.varies is not None:
            # what is named here is the same for all hosts
            changes["varies"] = task.varies.fixed(*changes)
        lengths = {name: value for name, value in self.lengths if value is not None}
        return replace(task, **changes, lengths=replace(task.lengths, **lengths))

    @property
    def settled(self) -> Self:
        """The same settings with the length of an episode written out."""
        task = self.build()
        compute = task.compute if task.clock == "compute" else None
        return self.model_copy(
            update={"epochs": task.epochs, "clock": task.clock, "compute": compute}
        )


class TelemetrySettings(Configuration):
    """How much of a run is recorded, and where curves are sent beside the run folder."""

    level: Literal["off", "minimal", "normal", "debug"] = "normal"
    """off, rounds only, seeds and epochs too, every decision too"""
    track: tuple[TrackerName, ...] = ()
    """also send curves to: tensorboard, wandb; at every level"""


class HostsConfig(Configuration):
    """What `esper ppo`, `esper run` and `esper compare` have in common."""

    task: TaskConfig = Field(
        default=TaskConfig(), description="what hosts are trained on, and for how long"
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**128,
        description="random seed of the first host; others take the next ones",
    )
    devices: tuple[str, ...] = Field(
        default=("cpu",), min_length=1, description="where hosts train: cpu, or cuda:0 cuda:1"
    )
    executor: Literal["auto", "eager", "graphed"] = Field(
        default="auto", description="how hosts' steps are run"
    )
    amp: Literal["off", "bf16", "fp16"] = Field(
        default="off", description="precision of hosts' forward passes"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="compile blocks; auto if large, on GPUs"
    )
    graph_memory: float | None = Field(
        default=None, gt=0, description="GiB of graphs per GPU; None is half of what is free"
    )
    out: Path = Field(description="run folder")
    imports: dict[str, str] = Field(default_factory=dict)
    """files that `esper --import` brought in, by name, with their SHA-256; not for you to set"""
    data_root: Path | None = Field(default=None, description="folder that holds the data sets")
    threads: int | None = Field(default=1, ge=1, le=512)
    """CPU threads per operation; None leaves it to torch. Small hosts are fastest with 1"""
    deterministic: bool = Field(
        default=False, description="only kernels that give the same result twice"
    )

    @property
    def way_to_run(self) -> dict[str, Any]:
        """How hosts are run, as `Population` takes it."""
        return {
            "executor": self.executor,
            "amp": self.amp,
            "compile": self.compile,
            "graph_memory": self.graph_memory,
        }

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """Return what a command starts from: the defaults, or as much of a preset as it takes."""
        raise NotImplementedError

    def settled(self) -> Self:
        """Return the same with what follows from other fields written out."""
        return self

    @property
    def settled_task(self) -> TaskConfig:
        """The task's settings with its length written out, for readers of the run folder."""
        return self.task.settled

    def check(self) -> None:
        """Refuse files that were not imported, and what devices and precision cannot do."""
        require_imported(self.imports)
        refuse_impossible(self.executor, self.amp, self.devices, self.task.build())
