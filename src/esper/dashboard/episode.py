"""What one host's episode looks like so far: its seeds, its epochs, its newest action.

Plain data; `view` folds it from event records.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from esper.dashboard.series import Series


class StageStart(NamedTuple):
    """A stage of a seed, and the epoch in which it began."""

    stage: str
    epoch: int


@dataclass
class SeedSpan:
    """One seed in a slot, from planting to its end.

    Epochs count those trained so far, as in events.
    """

    slot: str
    module: str | None  # the host's name of the module that the slot sits on
    blueprint: str | None
    stages: list[StageStart] = field(default_factory=list)  # those behind CULLED too
    end: int | None = None  # the epoch in which it was FOSSILIZED or CULLED; None is alive
    fate: str | None = None  # which of the two
    removed: int | None = None  # the epoch in which late pruning removed the fossil
    alpha: float = 0.0
    age: int = 0
    params: int = 0
    contribution: float | None = None
    standard_error: float | None = None
    readings: Series = field(default_factory=Series)  # epoch, alpha, contribution, standard_error
    # each has gate, measured, needed, verdict, reason, epoch
    verdicts: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Episode:
    """One host's episode: in one round of `esper ppo`, or in a run without rounds."""

    host: int
    round: int
    rank: int = 0  # the rank whose file holds its events
    drawn: str = ""  # what the host has drawn, in words; empty where hosts are alike
    epochs: Series = field(default_factory=Series)
    """epoch, train_loss, held_out_loss, accuracy, score, twin_accuracy, params, flops, steps,
    share, reward, part.NAME
    """
    spans: list[SeedSpan] = field(default_factory=list)
    actions: int = 0  # those that were refused included
    acted: int = -1  # epoch of the newest action
    # of the newest action: epoch, op, slot, module, blueprint, blend, refused; WAIT is none
    last_action: dict[str, Any] = field(default_factory=dict)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # epoch, reason
    undecided: list[str] = field(default_factory=list)  # slots whose seed was left out at the end
    # slot -> verdicts before a seed germinated in it
    unborn: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        """Whether anything is known of it."""
        return bool(self.epochs.rows or self.spans or self.actions or self.rollbacks or self.unborn)

    def newest(self, slot: str) -> SeedSpan | None:
        """Return the last seed that was planted in a slot, alive or not."""
        return next((span for span in reversed(self.spans) if span.slot == slot), None)

    def alive(self, slot: str) -> SeedSpan | None:
        """Return the seed that lives in a slot."""
        span = self.newest(slot)
        if span is None or span.end is not None:
            return None
        return span
