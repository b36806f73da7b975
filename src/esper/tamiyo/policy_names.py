"""What the name of a policy stands for: a rule, sham growth, a search for a plan, or a file.

`parse` is the only place that decides it. How a plan is searched for is in `trials`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from esper.kasmina.blueprints import SHAM
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.registry import read_settings
from esper.tamiyo.policies import NetworkPolicy, Policy, RulePolicy, require_parameters
from esper.tamiyo.rules import RULES, HostFacts

SEARCH = "search"
NEVER = "never"


@dataclass(frozen=True)
class Rule:
    """A rule with its settings, as "heuristic" or "schedule:epochs=1+5+9"."""

    text: str

    @property
    def name(self) -> str:
        """The rule without its settings."""
        return self.text.partition(":")[0]

    @property
    def is_static(self) -> bool:
        """Whether it plants nothing, so that the host trains alone."""
        return self.name == NEVER

    @property
    def is_control(self) -> bool:
        """Whether it adds no capacity, so that there is no final network to compare with."""
        return self.is_static

    def settings(self) -> dict[str, Any]:
        """The settings that the text gives, checked; others have their defaults."""
        return read_settings(self.name, self.text.split(":")[1:], RULES[self.name])

    def check(self) -> None:
        """Refuse settings that the rule does not have."""
        self.settings()

    def blueprints(self) -> tuple[str, ...]:
        """Blueprints that this policy needs beside those of the task."""
        return ()

    def build(self, facts: HostFacts) -> RulePolicy:
        """The policy for one network."""
        settings = self.settings()
        if not facts.costs:
            raise SettingError(
                "a policy needs a price list; build `HostFacts` from a MorphogeneticModel's view."
            )
        make = RULES[self.name]
        takes_facts = "facts" in signature(make).parameters
        rule: Any = make(facts, **settings) if takes_facts else None
        if not hasattr(rule, "choose"):
            raise SettingError(
                f"rule {self.name} is no dataclass with facts first and a method choose(masks, "
                f"reports, memory, signals)."
            )
        return RulePolicy(rule)


@dataclass(frozen=True)
class Sham(Rule):
    """Growth without its capacity; a comparison replays another arm's events instead."""

    @property
    def is_control(self) -> bool:
        """It adds no capacity."""
        return True

    def blueprints(self) -> tuple[str, ...]:
        """The sham blueprint, which no task has by itself."""
        return (SHAM,)


@dataclass(frozen=True)
class Search:
    """A search for a plan, as "search" or "search:episodes=100:plans=16"."""

    text: str

    is_control: ClassVar[bool] = False

    def settings(self, kind: type) -> dict[str, Any]:
        """The settings that the text gives, checked by the fields of the dataclass `kind`."""
        return read_settings(SEARCH, self.text.split(":")[1:], kind)

    def blueprints(self) -> tuple[str, ...]:
        """A search plants what the task has."""
        return ()


@dataclass(frozen=True)
class File:
    """A trained policy in a file of `esper ppo`."""

    text: str
    is_control: ClassVar[bool] = False

    @property
    def path(self) -> Path:
        """Where the file is, if it is still there."""
        return Path(self.text)

    def check(self, kind: str, copies: Sequence[Path], most_bytes: int) -> None:
        """Refuse a name without a file, and a file that is too large for a policy.

        `kind` is what the error calls it; one of `copies` may stand in for the file.
        """
        files = [path for path in (self.path, *copies) if path.is_file()]
        if not files:
            raise UnknownNameError(
                kind, self.text, RULES, "Or name a checkpoint file of `esper ppo`."
            )
        size = files[0].stat().st_size
        if size > most_bytes:
            raise SettingError(
                f"{self.text} has {size:,} bytes, a policy at most {most_bytes:,}. Name a "
                f"file of `esper ppo`."
            )

    def blueprints(self) -> tuple[str, ...]:
        """A trained policy plants what the task has."""
        return ()


PolicyName = Rule | Sham | Search | File
"""All that `parse` can answer."""


def parse(text: str) -> PolicyName:
    """What a policy's name stands for; whatever is neither a rule nor a search names a file."""
    name = text.partition(":")[0]
    if name == SHAM:
        return Sham(text)
    if name in RULES:
        return Rule(text)
    if name == SEARCH:
        return Search(text)
    return File(text)


def parse_rule(text: str) -> Rule:
    """The rule that a text names; other policies are refused."""
    policy = parse(text)
    if not isinstance(policy, Rule):
        raise UnknownNameError("policy", text, RULES, "A rule of your own: esper --import FILE.")
    return policy


def make_policy(text: str, facts: HostFacts) -> RulePolicy:
    """The rule that a text names, as a policy for one network."""
    return parse_rule(text).build(facts)


def build_policy(policy: str | Callable[[HostFacts], Policy], facts: HostFacts) -> Policy:
    """The policy for one network: a rule by its name, or what the caller's function builds."""
    if isinstance(policy, str):
        return make_policy(policy, facts)
    if not callable(policy):
        raise SettingError(
            f"policy is {policy!r}; give one of {', '.join(RULES)} or a function of HostFacts."
        )
    built = policy(facts)
    if not hasattr(built, "decide"):
        raise SettingError(
            f"policy built a {type(built).__name__}, which has no method decide(...)."
        )
    names = ("observation", "masks", "reports", "memory", "signals")
    require_parameters(built.decide, built, names)
    return built.for_space(facts.space) if isinstance(built, NetworkPolicy) else built
