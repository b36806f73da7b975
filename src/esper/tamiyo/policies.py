"""What every policy is:

rules of thumb lifted to many hosts, and a trained network. The rules are in `rules`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import Choice
from esper.leyline.reports import SeedStateReport
from esper.tamiyo.masks import Masks
from esper.tamiyo.network import Hidden, RecurrentActorCritic

Reports = Mapping[str, SeedStateReport]
Actions = NDArray[np.int64]  # [N, 4]: op, slot, blueprint, blend
WAIT: Choice = (0, 0, 0, 0)


class Policy(Protocol):
    """Decides once per epoch for N hosts at a time."""

    def decide(
        self, observation: Any, masks: Masks, reports: Sequence[Reports], memory: Any
    ) -> tuple[Actions, Any]:
        """Actions [N, 4] and what to hand back next time.

        `memory` is None at the start of N fresh episodes.
        """


class Rule(Protocol):
    """A rule of thumb for one host; what it remembers is plain data that fits into JSON."""

    def choose(
        self, masks: Masks, reports: Reports, memory: dict[str, Any]
    ) -> tuple[Choice, dict[str, Any]]: ...


@dataclass(frozen=True)
class RulePolicy:
    """A rule applied to each host by itself, so that no host depends on who its neighbours are."""

    rule: Rule

    @property
    def is_plan(self) -> bool:
        """Whether it may want several ops in one decision:

        after each, `ask_again` until it waits.
        """
        return getattr(self.rule, "is_plan", False)

    def decide(
        self,
        observation: Any,
        masks: Masks,
        reports: Sequence[Reports],
        memory: list[dict[str, Any]] | None,
    ) -> tuple[Actions, list[dict[str, Any]]]:
        memory = memory or [{"epoch": 0, "host": host} for host in range(len(reports))]
        actions = np.zeros((len(reports), 4), np.int64)
        after = []
        for host, (own_reports, own_memory) in enumerate(zip(reports, memory, strict=True)):
            found = self.rule.choose(
                {head: mask[host] for head, mask in masks.items()}, own_reports, own_memory
            )
            if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
                name = type(self.rule).__name__
                raise SettingError(
                    f"{name}.choose gave {found!r}; return (op, slot, blueprint, blend), memory."
                )
            actions[host], kept = found
            kept = {key: value for key, value in kept.items() if key != "is_again"}
            after.append({**kept, "epoch": own_memory["epoch"] + 1, "host": own_memory["host"]})
        return actions, after

    @staticmethod
    def ask_again(memory: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The memory with which to ask about the same decision once more."""
        return [{**own, "epoch": own["epoch"] - 1, "is_again": True} for own in memory]


class NetworkPolicy:
    """Decides for N hosts with a trained network:

    the likeliest choices or, not `deterministic`, drawn from `seed`.
    """

    def __init__(
        self,
        network: RecurrentActorCritic,
        *,
        deterministic: bool = True,
        seed: int = 0,
        reads_telemetry: bool = True,
    ):
        self.network, self.deterministic, self.reads_telemetry = (
            network,
            deterministic,
            reads_telemetry,
        )
        self.device = next(network.parameters()).device
        self.draws = torch.Generator(self.device).manual_seed(seed)

    def decide(
        self,
        observation: NDArray[np.float32] | None,
        masks: Masks,
        reports: object,
        memory: Hidden | None,
    ) -> tuple[Actions, Hidden]:
        """Actions [N, 4] in the order of the heads; `memory` is None at the start of N fresh
        episodes.
        """
        if observation is None:
            raise SettingError(
                "a learned policy needs observations [N, F]; this loop has none to give."
            )
        states = torch.as_tensor(observation, dtype=torch.float32, device=self.device)
        if states.dim() != 2 or states.shape[1] != self.network.state_dim:
            found = (
                f"observations are {tuple(states.shape)}, but this policy has "
                f"{self.network.state_dim} features"
            )
            raise SettingError(
                f"{found}; use the slots and telemetry setting of its training "
                f"(docs/checkpoints.md)."
            )
        on_device = {
            name: torch.as_tensor(mask, device=self.device) for name, mask in masks.items()
        }
        with torch.no_grad():
            choices, _, _, hidden = self.network.choose(
                states, memory, on_device, self.deterministic, self.draws
            )
        return torch.stack(
            [choices[name] for name in self.network.spec.names], -1
        ).cpu().numpy(), hidden
