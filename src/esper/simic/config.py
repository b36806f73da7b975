"""Everything that decides a training run, in one frozen value.

It is the only way into training; a knob exists here once.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field

from esper.leyline.configuration import Configuration
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.config import MOST_HOSTS, HostsConfig, TaskConfig, TelemetrySettings
from esper.runtime.devices import refuse_idle
from esper.runtime.executors.choosing import refuse_impossible
from esper.simic.ppo.settings import PPOSettings
from esper.simic.rewards import weights_of
from esper.simic.suites import SuiteConfig
from esper.tamiyo.policy_names import parse_rule

_PRESETS = files("esper.simic") / "presets"


class RewardConfig(Configuration):
    """What a decision earns."""

    family: str | None = Field(
        default=None, description="contribution, lead, loss, compute or your own (esper list)"
    )
    weights: dict[str, float] = Field(default_factory=dict)
    """changed weights of the family's terms, by name"""


class ImitationConfig(Configuration):
    """A rule that the policy learns from before it learns from what it earns."""

    policy: str = Field(default="heuristic", description="the rule, with settings if you like")
    rounds: int = Field(
        default=0, ge=0, description="so many of the rounds, the first ones; 0: none"
    )
    """the rule decides about the first third of them alone, then less and less"""


class TrainingTelemetry(TelemetrySettings):
    """How much is written down."""

    escalation_rounds: int = Field(
        default=3, ge=1, description="rounds at debug, the one that an anomaly is found in included"
    )


class HostShare(NamedTuple):
    """A task, and how many of a run's hosts play it."""

    task: TaskConfig
    hosts: int
    pool: int  # different hosts there are of it


class TrainingConfig(HostsConfig):
    """One training run of a growth policy; docs/config.md lists the fields.

    A value is frozen and checked when it is made: an unknown key is refused with the nearest known
    one. Beside its own fields it has those of the hosts, such as `task`, `devices` and `executor`.

    >>> import esper
    >>> config = esper.TrainingConfig.of({"task": {"name": "blobs"}, "hosts": 2, "rounds": 1})
    >>> config.family, config.ppo.gamma
    ('contribution', 0.99)
    >>> config.with_changes([("ppo.lr", 0.002)], "my script").ppo.lr
    0.002
    >>> esper.TrainingConfig.from_preset("digits").task.name
    'digits'
    """

    suite: SuiteConfig | None = Field(
        default=None, description="families to teach on, instead of one task"
    )
    reward: RewardConfig = Field(default=RewardConfig(), description="what a decision earns")
    ppo: PPOSettings = Field(default=PPOSettings(), description="how the policy learns")
    telemetry: TrainingTelemetry = Field(
        default=TrainingTelemetry(), description="how much is written down"
    )
    imitation: ImitationConfig = Field(
        default=ImitationConfig(), description="a rule that the policy learns from first"
    )
    rounds: int = Field(default=40, ge=1, description="rounds of N episodes and one update")
    hosts: int = Field(default=8, ge=1, le=MOST_HOSTS, description="hosts that train side by side")
    host_pool: int = Field(default=32, ge=1, le=100_000)
    """different hosts there are; each one's twin is computed once"""
    initial_wait: float = Field(default=0.8, gt=0, lt=1)
    """how likely an untrained policy waits rather than plant or cull; it keeps what was measured as
    likely as it waits"""
    seed: int = Field(
        default=0, ge=0, le=2**128, description="decides hosts, data orders, weights and draws"
    )
    policy_device: str = "cpu"
    """where the policy decides and learns; a network this small is faster on the CPU, unless hosts
    are hundreds
    """
    out: Path = Field(default=Path("runs/ppo"), description="run folder")
    observe_telemetry: bool = Field(
        default=True, description="whether the policy reads gradients and greedy scores of slots"
    )
    drop_readings: float = Field(default=0.0, ge=0, le=1)
    """chance of each group of readings to be absent in an episode; a policy that learns with some
    absent can act in a loop that lacks them"""
    keep_checkpoints: int = Field(
        default=3, ge=1, description="newest checkpoints that are kept, beside the best"
    )
    time_limit: float | None = Field(default=None, gt=0)
    """seconds after which training ends as on Ctrl-C; a resumed run counts again from 0"""
    stop_on_anomaly: bool = False
    """end with an error where an update does not look healthy; its round is not saved"""

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """A configuration that comes with the package, by the name of its task."""
        if name not in presets():
            raise UnknownNameError("preset", name, presets())
        text = (_PRESETS / f"{name}.json").read_text()
        return cls.of(json.loads(text), f"preset {name}")

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """The named preset, or the task's own; where neither is named, the preset of digits.

        A task without a preset gets the defaults.
        """
        if preset is None and isinstance(task, str) and task not in presets():
            return cls.of({"task": {"name": task}})
        return cls.from_preset(preset or str(task or "digits"))

    @classmethod
    def of(cls, values: Any, source: str = "the configuration") -> Self:
        """A checked configuration from plain values; a suite without a task brings its own."""
        if isinstance(values, dict) and "task" not in values:
            with suppress(LookupError, TypeError):
                values = {**values, "task": values["suite"]["families"][0]["task"]}
        return super().of(values, source)

    def with_changes(self, changes: Sequence[tuple[str, Any]], source: str) -> Self:
        """The same with some leaves changed, named by dotted keys such as ppo.lr.

        A suite brings its tasks.
        """
        suite = dict(changes).get("suite")
        if isinstance(suite, dict):
            with suppress(LookupError, TypeError):
                changes = [("task", dict(suite["families"][0]["task"])), *changes]
        return super().with_changes(changes, source)

    def check(self) -> None:
        """Refuse settings that contradict each other or name what is not there."""
        if self.suite is not None:
            self.suite.check()
            self._check_suite(self.suite)
        super().check()
        refuse_idle(self.hosts, self.devices)
        weights_of(self.family, self.reward.weights)
        task = self.task.build()
        unfit = ("contribution", "lead", "loss") if task.clock == "compute" else ("compute",)
        if self.family in unfit:
            raise SettingError(
                f"reward.family is {self.family}, which does not pay for what clock {task.clock} "
                f"measures. Leave it out: --set reward.family=null."
            )
        for share in self.shares_of_hosts:
            epochs = share.task.build().epochs
            if epochs < 2:
                raise SettingError(
                    f"an episode of {share.task.name} has {epochs} epoch; a decision needs at "
                    f"least two. Raise it: --set task.epochs=2."
                )
        parse_rule(self.imitation.policy).check()
        if self.imitation.rounds > self.rounds:
            raise SettingError(
                f"imitation.rounds is {self.imitation.rounds}, of {self.rounds} rounds in all. "
                f"Raise rounds, or imitate in fewer."
            )
        backend = self.ppo.compile
        if backend is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
            raise UnknownNameError(
                "backend of torch.compile", backend, torch.compiler.list_backends()
            )

    def _check_suite(self, suite: SuiteConfig) -> None:
        """Refuse a task beside a suite, and too few hosts for its families."""
        if self.task.settled != suite.families[0].task.settled:
            raise SettingError(
                "a suite names its tasks and their settings; leave task, --task and --epochs out."
            )
        suite.shares(self.hosts, "hosts")
        suite.shares(self.host_pool, "host_pool")
        for family in suite.families:
            refuse_impossible(self.executor, self.amp, self.devices, family.task.build())

    def settled(self) -> Self:
        """The same with what follows from other fields written out.

        A later change of those fields does not move it any more.
        """
        per_round = sum(
            share.hosts * (share.task.build().epochs - 1) for share in self.shares_of_hosts
        )
        changes: dict[str, Any] = {
            "ppo": self.ppo.annealed_over(self.rounds * per_round),
            "task": self.settled_task,
        }
        if self.suite is not None:
            changes["suite"] = self.suite.settled()
        return self.model_copy(update=changes)

    @property
    def lacking(self) -> tuple[str, ...]:
        """Groups of readings that the policy never gets."""
        return () if self.observe_telemetry else ("telemetry",)

    @property
    def shares_of_hosts(self) -> list["HostShare"]:
        """The tasks that are played, each with its hosts and with the different hosts there are."""
        if self.suite is None:
            return [HostShare(task=self.task, hosts=self.hosts, pool=self.host_pool)]
        shares = []
        hosts = self.suite.shares(self.hosts, "hosts")
        pools = self.suite.shares(self.host_pool, "host_pool")
        for family, count, pool in zip(self.suite.families, hosts, pools, strict=True):
            shares.append(HostShare(task=family.task, hosts=count, pool=pool))
        return shares

    @property
    def family(self) -> str:
        """The family of rewards that is named, or the clock's own."""
        if self.reward.family:
            return self.reward.family
        return "compute" if self.task.build().clock == "compute" else "contribution"


def presets() -> tuple[str, ...]:
    """Names of the configurations that come with the package."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _PRESETS.iterdir()))
