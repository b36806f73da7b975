"""What the name of a policy stands for: a rule, sham growth, a search for a plan, or a file.

`parse` is the only place that decides it. How a plan is searched for is in `trials`.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from esper.kasmina.blueprints import SHAM
from esper.leyline.errors import SaveError, SettingError, UnknownNameError
from esper.leyline.registry import read_settings
from esper.tamiyo.policies import NetworkPolicy, Policy, RulePolicy, require_parameters
from esper.tamiyo.policy_files import MOST_WIDTH, load_policy, read_whole
from esper.tamiyo.rules import RULES, HostFacts

SEARCH = "search"
NEVER = "never"
PRETRAINED = "pretrained"
SHIPPED = Path(__file__).parents[1] / "policies" / "pretrained.safetensors"
"""The policy that comes with the package. Beside it, in JSON, are its digest and its suite."""

MOST_BYTES = 192 * MOST_WIDTH**2
"""All weights of the widest policy, with what its optimiser remembers."""


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
    is_shipped: ClassVar[bool] = False
    """whether it comes with the package, and was trained for many tasks"""

    @property
    def path(self) -> Path:
        """Where the file is, if it is still there."""
        return Path(self.text)

    def check(self, kind: str = "policy", copies: Sequence[Path] = ()) -> None:
        """Refuse a name without a file, and a file that is too large for a policy.

        `kind` is what the error calls it; one of `copies` may stand in for the file.
        """
        files = [path for path in (self.path, *copies) if path.is_file()]
        if not files:
            raise self.missing(kind)
        size = files[0].stat().st_size
        if size > MOST_BYTES:
            raise SettingError(
                f"{self.text} has {size:,} bytes, a policy at most {MOST_BYTES:,}. Name a "
                f"file of `esper ppo`."
            )

    def missing(self, kind: str) -> Exception:
        """What is raised where there is no such file."""
        return UnknownNameError(kind, self.text, RULES, "Or name a checkpoint file of `esper ppo`.")

    def read(self) -> bytes:
        """The content of the file."""
        return read_whole(self.path)

    def blueprints(self) -> tuple[str, ...]:
        """A trained policy plants what the task has."""
        return ()


@dataclass(frozen=True)
class Pretrained(File):
    """The trained policy that comes with the package."""

    is_shipped: ClassVar[bool] = True

    @property
    def path(self) -> Path:
        """Where it is, if this version has one."""
        return SHIPPED

    def missing(self, kind: str) -> Exception:
        """What is raised where none came with the package."""
        return SettingError(
            f"{kind} is {self.text}, but no trained policy ships with this version. Use the rule "
            f'"heuristic", or a file of `esper ppo`.'
        )

    def read(self) -> bytes:
        """The content of the file, if it is the one that was shipped."""
        content = super().read()
        notes = self.path.with_suffix(".json")
        try:
            shipped = json.loads(notes.read_text(encoding="utf-8"))["sha256"]
        except (OSError, ValueError, LookupError, TypeError) as problem:
            raise SaveError(f"{notes} is damaged ({problem}). Install Esper again.") from problem
        if digest_of(content) != shipped:
            raise SaveError(
                f"{self.path} is not the policy that was shipped: its checksum does not match. "
                f"Install Esper again, or name a file of your own."
            )
        return content


def digest_of(content: bytes) -> str:
    """The sha256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


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
    return Pretrained(text) if text == PRETRAINED else File(text)


def parse_rule(text: str) -> Rule:
    """The rule that a text names; other policies are refused."""
    policy = parse(text)
    if not isinstance(policy, Rule):
        raise UnknownNameError("policy", text, RULES, "A rule of your own: esper --import FILE.")
    return policy


def make_policy(text: str, facts: HostFacts) -> RulePolicy:
    """The rule that a text names, as a policy for one network."""
    return parse_rule(text).build(facts)


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy of a file, read once: a function from `HostFacts`, as a policy of your own is."""

    text: str
    """the name that it was asked for by"""
    digest: str
    """sha256 of the file"""
    policy: NetworkPolicy

    def __call__(self, facts: HostFacts) -> NetworkPolicy:
        """The policy for one network; all of them have the same weights."""
        return self.policy.for_space(facts.space)


Chooser = str | Path | Callable[[HostFacts], Policy]
"""How a policy is given: the name of a rule, "pretrained", a file, or what builds it."""


def read_policy(policy: Chooser) -> str | Callable[[HostFacts], Policy]:
    """The same, where a file is meant with its content; what does not fit is refused."""
    if not isinstance(policy, str | Path):
        return policy
    name = parse(str(policy))
    if not isinstance(name, File):
        return str(policy)
    name.check()
    content = name.read()
    trained = load_policy(name.path, content)
    return TrainedPolicy(text=name.text, digest=digest_of(content), policy=trained)


def build_policy(policy: Chooser, facts: HostFacts) -> Policy:
    """The policy for one network: a rule, that of a file, or what the caller's function builds."""
    policy = read_policy(policy)
    if isinstance(policy, str):
        return make_policy(policy, facts)
    if not callable(policy):
        raise SettingError(
            f"policy is {policy!r}; give one of {', '.join(RULES)}, a file of `esper ppo`, or a "
            f"function of HostFacts."
        )
    built = policy(facts)
    if not hasattr(built, "decide"):
        raise SettingError(
            f"policy built a {type(built).__name__}, which has no method decide(...)."
        )
    names = ("observation", "masks", "reports", "memory", "signals")
    require_parameters(built.decide, built, names)
    return built.for_space(facts.space) if isinstance(built, NetworkPolicy) else built
