"""What every policy is: a rule of thumb, applied to many hosts, or a trained network.

The rules themselves are in `rules`.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import ActionSpace, Choice
from esper.leyline.reports import SeedStateReport
from esper.tamiyo.actor_critic import ActorCritic
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import Masks
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.recurrence import Hidden
from esper.tamiyo.signals import Signals

Reports = Mapping[str, SeedStateReport]
"""What is known of each slot of one host."""

Actions = NDArray[np.int64]
"""[N, 4]: op, slot, blueprint, blend."""

WAIT: Choice = (0, 0, 0, 0)


class Policy(Protocol):
    """Decides once per epoch for N hosts at a time."""

    def decide(
        self,
        observation: Any,
        masks: Masks,
        reports: Sequence[Reports],
        memory: Any,
        signals: Sequence[Signals],
    ) -> tuple[Actions, Any]:
        """Actions [N, 4] and what to hand back next time.

        `memory` is None at the start of N fresh episodes.
        """


class Rule(Protocol):
    """A rule of thumb for one host; what it remembers is plain data that fits into JSON."""

    def choose(
        self, masks: Masks, reports: Reports, memory: dict[str, Any], signals: Signals
    ) -> tuple[Choice, dict[str, Any]]:
        """The action for this host now, and what to remember.

        `memory` is what the rule returned last, with `epoch` (decisions so far) and `host` (its
        number among those decided about together).
        """


def require_parameters(method: Callable[..., Any], owner: object, names: Sequence[str]) -> None:
    """Refuse a method that cannot be called with so many arguments, before it is called."""
    try:
        signature(method).bind(*names)
    except TypeError:
        kind = type(owner).__name__
        parameters = ", ".join(signature(method).parameters)
        raise SettingError(
            f"{kind}.{method.__name__}({parameters}) cannot be called with "
            f"({', '.join(names)}); add the parameters that it lacks (esper.Signals)."
        ) from None


@dataclass(frozen=True)
class RulePolicy:
    """A rule applied to each host by itself, so that no host depends on its neighbours."""

    rule: Rule

    def __post_init__(self) -> None:
        names = ("masks", "reports", "memory", "signals")
        require_parameters(self.rule.choose, self.rule, names)

    @property
    def is_plan(self) -> bool:
        """Whether it may want several ops in one decision.

        After each op it is asked once more, with the memory of `ask_again`, until it waits.
        """
        return getattr(self.rule, "is_plan", False)

    @property
    def keeps_measured(self) -> bool:
        """Whether its measured seeds are fossilized in the same decision, after it has chosen.

        It is the standing order of every rule that does not say `keeps_measured = False`.
        """
        return getattr(self.rule, "keeps_measured", True)

    def decide(
        self,
        observation: Any,
        masks: Masks,
        reports: Sequence[Reports],
        memory: list[dict[str, Any]] | None,
        signals: Sequence[Signals],
    ) -> tuple[Actions, list[dict[str, Any]]]:
        """Actions [N, 4] and each host's memory; a rule that answers something else is refused."""
        memory = memory or [{"epoch": 0, "host": host} for host in range(len(reports))]
        actions = np.zeros((len(reports), 4), np.int64)
        memory_after = []
        hosts = zip(reports, memory, signals, strict=True)
        for host, (reports_of_host, before, signals_of_host) in enumerate(hosts):
            masks_of_host = {head: mask[host] for head, mask in masks.items()}
            answer = self.rule.choose(masks_of_host, reports_of_host, before, signals_of_host)
            if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
                name = type(self.rule).__name__
                raise SettingError(
                    f"{name}.choose gave {answer!r}; return (op, slot, blueprint, blend), memory."
                )
            actions[host], remembered = answer
            after = {key: value for key, value in remembered.items() if key != "is_again"}
            memory_after.append({**after, "epoch": before["epoch"] + 1, "host": before["host"]})
        return actions, memory_after

    @staticmethod
    def ask_again(memory: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The memory with which to ask about the same decision once more."""
        return [{**of_host, "epoch": of_host["epoch"] - 1, "is_again": True} for of_host in memory]


class NetworkPolicy:
    """Decides for N hosts with a trained network.

    It takes the likeliest choices or, not `deterministic`, draws them from `seed`. Of the groups
    `lacking` it reads nothing, as in its training (`esper.tamiyo.readings.GROUPS`). Where it is
    built for a host, it plays with that host's slots, blueprints and blends.
    """

    def __init__(
        self,
        network: ActorCritic,
        *,
        deterministic: bool = True,
        seed: int = 0,
        lacking: Collection[str] = (),
    ):
        self.network = network
        self.deterministic = deterministic
        self.lacking = tuple(lacking)
        self.device = next(network.parameters()).device
        self.draws = torch.Generator(self.device).manual_seed(seed)

    def for_space(self, space: ActionSpace) -> "NetworkPolicy":
        """The same policy, with weights and draws in common, for a host with these actions."""
        network = self.network
        if not isinstance(network, FactoredRecurrentActorCritic):
            return self
        _, slots, blueprints, _ = space.sizes
        fitting = network.for_space(ObservationLayout(slots, blueprints), space.blends)
        if fitting is network:
            return self
        other = copy.copy(self)
        other.network = fitting
        return other

    @property
    def layout(self) -> ObservationLayout:
        """Where the numbers of its observations lie."""
        layout = getattr(self.network, "layout", None)
        if isinstance(layout, ObservationLayout):
            return layout
        raise SettingError(
            "this network was not built for what is read of growing networks; build it with "
            "Layout.of(space).build() of esper.tamiyo.policy_files."
        )

    def decide(
        self,
        observation: NDArray[np.float32] | None,
        masks: Masks,
        reports: object,
        memory: Hidden | None,
        signals: object = None,
    ) -> tuple[Actions, Hidden]:
        """Actions [N, 4] in the order of the heads, and the state of the network.

        `memory` is None at the start of N fresh episodes. Observations have all signals in them.
        """
        if observation is None:
            raise SettingError(
                "a learned policy needs observations [N, F]; this loop has none to give."
            )
        states = torch.as_tensor(observation, dtype=torch.float32, device=self.device)
        if states.dim() != 2 or states.shape[1] != self.network.state_dim:
            raise SettingError(
                f"observations are {tuple(states.shape)}, but this policy has "
                f"{self.network.state_dim} features here; make them with `observe` for its own "
                "layout (docs/checkpoints.md)."
            )
        masks_on_device = {
            name: torch.as_tensor(mask, device=self.device) for name, mask in masks.items()
        }
        if memory is not None:
            memory = self._fitting(memory, len(states))
        with torch.no_grad():
            decision = self.network.get_action(
                states, memory, masks_on_device, self.deterministic, self.draws
            )
        actions = torch.stack([decision.choices[name] for name in self.network.spec.names], -1)
        return actions.cpu().numpy(), decision.hidden

    def _fitting(self, memory: Hidden, count: int) -> Hidden:
        """A memory where the weights are; that of another network is refused."""
        wanted = (1, count, self.network.memory_width)
        shapes = [tuple(part.shape) for part in memory]
        if shapes != [wanted, wanted]:
            raise SettingError(
                f"the memory has shapes {shapes}, this policy needs two of {wanted}; hand back "
                "what it returned for the same hosts, or None where their episodes begin."
            )
        return memory[0].to(self.device), memory[1].to(self.device)
