"""Everything that decides a run of a policy or a comparison, in one frozen value each.

The work is elsewhere.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from esper.kasmina.blueprints import SHAM
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.config import MOST_EPOCHS, MOST_HOSTS, HostsConfig, TelemetrySettings
from esper.runtime.devices import refuse_idle, split_names
from esper.simic.config import TrainingConfig
from esper.storage.runfolder import POLICY
from esper.storage.store import digest_json
from esper.tamiyo.policy_files import MOST_WIDTH
from esper.tamiyo.policy_names import File, Rule, parse
from esper.tamiyo.rules import RULES
from esper.trials.searching import read_search

ALL = "all"  # Stands for every arm that grows.
_MOST_POLICY = (
    192 * MOST_WIDTH**2
)  # Bytes: all weights of the widest policy, with what its optimiser remembers.


class TrialConfig(HostsConfig):
    """What a run of a policy and a comparison have in common."""

    def digest(self, *names: str) -> str:
        """Of settings, by default of all that decide the results: what is saved is bound to it."""
        values = self.settled().model_dump(mode="json", exclude={"out", "data_root", "telemetry"})
        return digest_json({name: values[name] for name in names or values})

    @classmethod
    def start(cls, preset: str | None = None, task: object = None) -> Self:
        """The defaults, with the hosts and episodes of a preset if one is named."""
        return cls.of(
            {} if preset is None else {"task": TrainingConfig.from_preset(preset).task.model_dump()}
        )


class RunConfig(TrialConfig):
    policy: str = Field("heuristic", description="a rule, as heuristic:share=0.5, or a checkpoint")
    hosts: int = Field(1, ge=1, le=MOST_HOSTS, description="hosts that train side by side")
    telemetry: TelemetrySettings = Field(
        TelemetrySettings(), description="how much is written down"
    )
    out: Path = Field(Path("runs/run"), description="run folder")

    def check(self) -> None:
        super().check()
        refuse_idle(self.hosts, self.devices)
        _require_policy("policy", self.policy, self.out / POLICY)

    def settled(self) -> Self:
        """The same with the task's own length and budget written out, for whoever reads the run
        folder.
        """
        budget = {"budget": self.task.build().budget}
        return self.model_copy(update={"task": self.settled_task.model_copy(update=budget)})


class CompareConfig(TrialConfig):
    policies: tuple[str, ...] = Field(("never", "sham", "heuristic", "random"), min_length=1)
    """rules, search:episodes=250, checkpoints"""
    static: tuple[Literal["start", "final", "final-equal-flops", "final-whole"], ...] = ()
    """networks of fixed size, trained from scratch"""
    seeds: int = Field(
        10, ge=1, le=MOST_HOSTS, description="how many hosts each arm has, the same for all"
    )
    final_of: tuple[str, ...] = Field((ALL,), min_length=1)
    """arms that get final networks; sham replays the first"""
    rates: tuple[float, ...] = Field(
        (1.0,), min_length=1, description="learning rates to try, as multiples: 0.5 1 2"
    )
    pretrain: int = Field(
        0, ge=0, le=MOST_EPOCHS, description="epochs that hosts are trained alone first"
    )
    oracle: bool = Field(False, description="also try every single planting, at three times")
    out: Path = Field(Path("runs/compare"), description="folder for results")

    def check(self) -> None:
        super().check()
        if len(split_names(self.devices)) > 1:
            raise SettingError(
                f"devices are {', '.join(self.devices)}, but a comparison runs on one; name one."
            )
        for policy in self.policies:
            self._require_arm(policy)
        needs = [name for name in self.static if name != "start"] + [SHAM] * (SHAM in self.policies)
        grown = [policy for policy in self.policies if policy not in ("never", SHAM)]
        if unknown := [
            arm for arm in self.followed or ((ALL,) if needs else ()) if arm not in grown
        ]:
            what, known = ", ".join(needs) or "final networks", ", ".join(grown) or "none"
            found = (
                f"{what} follow the arm {unknown[0]!r}, which is not among the "
                f"policies that grow ({known})"
            )
            raise SettingError(f"{found}. Add it, or name others with --final-of.")
        if "final-whole" in self.static and not self.pretrain:
            raise SettingError(
                "final-whole trains for pretraining and growth together; it needs --pretrain."
            )
        longer = [name for name in self.static if name in ("final-equal-flops", "final-whole")]
        if (longer or self.pretrain) and self.task.build().clock == "compute":
            what = (
                f"replace {longer[0]} by final"
                if longer
                else "omit --pretrain, which nobody pays for"
            )
            raise SettingError(f"with clock compute every arm has the same FLOPs; {what}.")
        if any(not 1e-6 <= rate <= 1e6 for rate in self.rates):
            raise SettingError(
                f"rates are {list(self.rates)}, but are multiples and must lie "
                f"between 1e-6 and 1e6."
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
    def followed(self) -> tuple[str, ...]:
        """Arms that have final networks; sham replays the first."""
        grown = [policy for policy in self.policies if policy not in ("never", SHAM)]
        return tuple(dict.fromkeys(grown if self.final_of == (ALL,) else self.final_of))

    @property
    def finals(self) -> dict[str, tuple[str, str]]:
        """Every network of fixed size that can follow an arm:

        its name -> what it is and the arm.
        """
        kinds = ("final", "final-equal-flops", "final-whole")
        return {f"{kind} of {arm}": (kind, arm) for kind in kinds for arm in self.followed}

    @property
    def checkpoints(self) -> list[str]:
        """Policies that are files."""
        return [policy for policy in self.policies if isinstance(parse(policy), File)]

    @property
    def host_seeds(self) -> list[int]:
        return [self.seed + number for number in range(self.seeds)]


def _require_policy(kind: str, name: str, *copies: Path) -> None:
    """Refuse a rule with settings that it does not have, and a checkpoint that is not there."""
    policy = parse(name)
    if isinstance(policy, File):
        policy.check(kind, copies, _MOST_POLICY)
    elif isinstance(policy, Rule):
        policy.check()
    else:
        raise UnknownNameError(kind, name, RULES, "A search is an arm of `esper compare`.")
