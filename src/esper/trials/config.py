"""Everything that decides a run of a policy or a comparison, in one frozen value each.

The work is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field

from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.config import MOST_EPOCHS, MOST_HOSTS, HostsConfig, TelemetrySettings
from esper.runtime.devices import refuse_idle, split_names
from esper.runtime.tasks.families import Variation, variation_of
from esper.simic.config import TrainingConfig
from esper.simic.suites import SuiteConfig
from esper.storage.runfolder import POLICY
from esper.storage.store import digest_json
from esper.tamiyo.policy_names import File, Rule, Sham, parse
from esper.tamiyo.rules import RULES
from esper.trials.searching import read_search

ALL = "all"
"""Stands for every arm that grows."""

START = "start"
"""The arm of the bare host, trained from scratch as the final networks are."""


class FinalNetwork(NamedTuple):
    """A network of fixed size that an arm ended with, trained from scratch."""

    kind: str  # final, final-equal-flops or final-whole
    follows: str  # the arm that grew it


class TrialConfig(HostsConfig):
    """What a run of a policy and a comparison have in common."""

    def digest(self, *names: str) -> str:
        """The sha256 of settings, by default of all that decide the results.

        What is saved is bound to it. The task of hosts that differ counts with what they draw.
        """
        values = self.settled().model_dump(mode="json", exclude={"out", "data_root", "telemetry"})
        digested = {name: values[name] for name in names or values}
        varies = self.task.build().varies
        if varies is not None and "task" in digested:
            digested["varies"] = varies.describe()
            digested["variations"] = [asdict(known) for known in self.variations.values()]
        return digest_json(digested)

    @property
    def host_seeds(self) -> Sequence[int]:
        """The random seeds of the hosts."""
        raise NotImplementedError

    @property
    def variations(self) -> dict[int, Variation]:
        """The variation that each host plays, by its seed; empty where hosts are alike."""
        task = self.task.build()
        variations = {}
        for seed in self.host_seeds:
            variation = variation_of(task, seed)
            if variation is not None:
                variations[seed] = variation
        return variations

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """The defaults, with the hosts and episodes of a preset if one is named."""
        if preset is None:
            return cls.of({})
        return cls.of({"task": TrainingConfig.from_preset(preset).task.model_dump()})


class RunConfig(TrialConfig):
    """What decides an `esper run`: one policy on one or many hosts."""

    policy: str = Field(
        default="heuristic",
        description="a rule (heuristic:share=0.5), pretrained, or a checkpoint",
    )
    hosts: int = Field(default=1, ge=1, le=MOST_HOSTS, description="hosts that train side by side")
    telemetry: TelemetrySettings = Field(
        default=TelemetrySettings(), description="how much is written down"
    )
    out: Path = Field(default=Path("runs/run"), description="run folder")

    def check(self) -> None:
        """Refuse a policy that does not exist, and devices without hosts."""
        super().check()
        refuse_idle(self.hosts, self.devices)
        _require_policy("policy", self.policy, self.out / POLICY)

    def settled(self) -> Self:
        """The same with the task's own length and budget written out.

        So a reader of the run folder sees them.
        """
        task = self.task.build()
        if task.varies is not None and task.varies.budget is not None:
            return self.model_copy(update={"task": self.settled_task})
        settled = self.settled_task.model_copy(update={"budget": task.budget})
        return self.model_copy(update={"task": settled})

    @property
    def host_seeds(self) -> range:
        """The random seeds of the hosts."""
        return range(self.seed, self.seed + self.hosts)


class CompareConfig(TrialConfig):
    """What decides an `esper compare`: arms, controls, hosts and learning rates."""

    policies: tuple[str, ...] = Field(
        default=("never", "sham", "heuristic", "random"), min_length=1
    )
    """rules, search:episodes=250, pretrained, checkpoints"""
    static: tuple[Literal["start", "final", "final-equal-flops", "final-whole"], ...] = ()
    """networks of fixed size, trained from scratch"""
    seeds: int = Field(
        default=10, ge=1, le=MOST_HOSTS, description="how many hosts each arm has, the same for all"
    )
    final_of: tuple[str, ...] = Field(default=(ALL,), min_length=1)
    """arms that get final networks; sham replays the first"""
    rates: tuple[float, ...] = Field(
        default=(1.0,), min_length=1, description="learning rates to try, as multiples: 0.5 1 2"
    )
    pretrain: int = Field(
        default=0, ge=0, le=MOST_EPOCHS, description="epochs that hosts are trained alone first"
    )
    oracle: bool = Field(
        default=False, description="also try every single planting, at three times"
    )
    suite: SuiteConfig | None = Field(
        default=None, description="judge on the variations that a suite reserves"
    )
    out: Path = Field(default=Path("runs/compare"), description="folder for results")

    @classmethod
    def of(cls, values: Any, source: str = "the configuration") -> Self:
        """A checked configuration from plain values.

        Without a task a suite brings its only family.
        """
        suite = values.get("suite") if isinstance(values, dict) else None
        if isinstance(suite, dict) and "task" not in values:
            family = SuiteConfig.of(suite, source).family(None)
            values = {**values, "task": family.task.model_dump(mode="json")}
        return super().of(values, source)

    def with_changes(self, changes: Sequence[tuple[str, Any]], source: str) -> Self:
        """The same with some leaves changed, named by dotted keys such as task.epochs.

        A suite brings the settings of the family that is named, or of its only one.
        """
        known = dict(changes)
        if isinstance(known.get("suite"), dict):
            suite = SuiteConfig.of(known["suite"], source)
            family = suite.family(known.get("task.name"))
            changes = [("task", family.task.model_dump(mode="json")), *changes]
        return super().with_changes(changes, source)

    def check(self) -> None:
        """Refuse arms that do not exist, and settings that contradict each other."""
        super().check()
        if self.suite is not None:
            self.suite.check()
            self._check_suite(self.suite)
        if len(split_names(self.devices)) > 1:
            raise SettingError(
                f"devices are {', '.join(self.devices)}, but a comparison runs on one; name one."
            )
        for policy in self.policies:
            self._require_arm(policy)
        self._require_followed()
        if "final-whole" in self.static and not self.pretrain:
            raise SettingError(
                "final-whole trains for pretraining and growth together; it needs --pretrain."
            )
        self._require_equal_compute()
        if any(not 1e-6 <= rate <= 1e6 for rate in self.rates):
            raise SettingError(
                f"rates are {list(self.rates)}, but are multiples and must lie "
                "between 1e-6 and 1e6."
            )

    def _check_suite(self, suite: SuiteConfig) -> None:
        """Refuse a task that is none of the suite's, and searches on what the suite reserves."""
        suite.family(self.task.name)
        for policy in self.policies:
            if read_search(policy) is not None:
                raise SettingError(
                    f"{policy} would look for its plan on hosts of its own, which may play what "
                    "the suite reserves. Leave the search out, or the suite."
                )

    def _require_followed(self) -> None:
        """Refuse followers, final networks and sham growth, of an arm that does not grow."""
        followers: list[str] = [name for name in self.static if name != START]
        followers += [policy for policy in self.policies if isinstance(parse(policy), Sham)]
        followed = self.followed
        if followers and not followed:
            followed = (ALL,)
        for arm in followed:
            if arm not in self.grown:
                raise SettingError(
                    f"{', '.join(followers) or 'final networks'} follow the arm {arm!r}, which is "
                    f"not among the policies that grow ({', '.join(self.grown) or 'none'}). "
                    "Add it, or name others with --final-of."
                )

    def _require_equal_compute(self) -> None:
        """Refuse arms that would train longer than others where all have the same FLOPs."""
        longer = [name for name in self.static if name in ("final-equal-flops", "final-whole")]
        if not longer and not self.pretrain:
            return
        if self.task.build().clock != "compute":
            return
        if longer:
            raise SettingError(
                f"with clock compute every arm has the same FLOPs; replace {longer[0]} by final."
            )
        raise SettingError(
            "with clock compute every arm has the same FLOPs; omit --pretrain, which no arm "
            "pays for."
        )

    def _require_arm(self, policy: str) -> None:
        """Refuse an arm that does not exist, or that searches on the comparison's own hosts."""
        search = read_search(policy)
        if search is None:
            _require_policy("arm", policy)
            return
        shared = set(search.host_seeds) & set(self.host_seeds)
        if shared:
            raise SettingError(
                f"{policy} would look for its plan on host seed {min(shared)}, one of the "
                f"comparison's. Give it others: {policy}:seed=N, or choose another --seed."
            )

    @property
    def grown(self) -> list[str]:
        """Policies that add capacity."""
        return [policy for policy in self.policies if not parse(policy).is_control]

    @property
    def followed(self) -> tuple[str, ...]:
        """Arms that have final networks; sham replays the first."""
        arms = self.grown if self.final_of == (ALL,) else self.final_of
        return tuple(dict.fromkeys(arms))

    @property
    def finals(self) -> dict[str, FinalNetwork]:
        """Every network of fixed size that can follow an arm, by the name of its own arm."""
        networks = {}
        for kind in ("final", "final-equal-flops", "final-whole"):
            for arm in self.followed:
                networks[f"{kind} of {arm}"] = FinalNetwork(kind=kind, follows=arm)
        return networks

    @property
    def files(self) -> dict[str, File]:
        """Policies that are files, by their names."""
        files = {}
        for policy in self.policies:
            name = parse(policy)
            if isinstance(name, File):
                files[policy] = name
        return files

    @property
    def host_seeds(self) -> Sequence[int]:
        """The random seeds of the hosts, the same for all arms."""
        if self.suite is None:
            return [self.seed + number for number in range(self.seeds)]
        return self.suite.judging_seeds(self.task.build(), self.seed, self.seeds)


def _require_policy(kind: str, name: str, *copies: Path) -> None:
    """Refuse a rule with settings that it does not have, and a checkpoint that is not there."""
    policy = parse(name)
    if isinstance(policy, File):
        policy.check(kind, copies)
    elif isinstance(policy, Rule):
        policy.check()
    else:
        raise UnknownNameError(kind, name, RULES, "A search is an arm of `esper compare`.")
