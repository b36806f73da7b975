"""What every policy is, and rules of thumb lifted to many hosts. The rules themselves are in `rules`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import Choice
from esper.leyline.reports import SeedStateReport
from esper.tamiyo.masks import Masks

Reports = Mapping[str, SeedStateReport]
Actions = NDArray[np.int64]
"""[N, 4]: op, slot, blueprint, blend"""
WAIT: Choice = (0, 0, 0, 0)


class Policy(Protocol):
    """Decides once per epoch for N hosts at a time."""

    def decide(self, observation: Any, masks: Masks, reports: Sequence[Reports], memory: Any) -> tuple[Actions, Any]:
        """Actions [N, 4] and what to hand back next time. `memory` is None at the start of N fresh episodes."""
        ...


class Rule(Protocol):
    """A rule of thumb for one host; what it remembers is plain data that fits into JSON."""

    def choose(self, masks: Masks, reports: Reports, memory: dict[str, Any]) -> tuple[Choice, dict[str, Any]]: ...


@dataclass(frozen=True)
class RulePolicy:
    """A rule applied to each host by itself, so that no host depends on who its neighbours are."""

    rule: Rule

    @property
    def reads_scores(self) -> bool:
        """Whether it needs greedy scores in the reports; a rule that does says so, the others need not mention it."""
        return getattr(self.rule, "reads_scores", False)

    def decide(
        self, observation: Any, masks: Masks, reports: Sequence[Reports], memory: list[dict[str, Any]] | None
    ) -> tuple[Actions, list[dict[str, Any]]]:
        memory = memory or [{"epoch": 0, "host": host} for host in range(len(reports))]
        actions = np.zeros((len(reports), 4), np.int64)
        after = []
        for host, (own_reports, own_memory) in enumerate(zip(reports, memory, strict=True)):
            own_masks = {head: mask[host] for head, mask in masks.items()}
            actions[host], kept = self.rule.choose(own_masks, own_reports, own_memory)
            after.append({**kept, "epoch": own_memory["epoch"] + 1, "host": own_memory["host"]})
        return actions, after
