"""What a run looks like so far: plain data, folded from its event records one by one. No files, no drawing, no clock."""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

LOG_LINES = 500
"""Event lines that a view remembers; older ones are on disk."""


class Series:
    """Columns of numbers of equal length; NaN is not measured. A column that appears late is NaN before."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0


@dataclass
class SeedSpan:
    """One seed's life in a slot. Epochs are epochs lived: 0 is birth, an epoch's readings belong to its end."""

    slot: str
    blueprint: str | None
    stages: list[tuple[str, int]] = field(default_factory=list)
    """(stage, epoch it began), in order"""
    end: int | None = None
    """epoch it was fossilized or culled; None is alive"""
    fate: str | None = None
    """FOSSILIZED, CULLED or None"""
    alpha: float = 0.0
    age: int = 0
    params: int = 0
    contribution: float | None = None
    standard_error: float | None = None
    readings: Series = field(default_factory=Series)
    """epoch, alpha, contribution, standard_error"""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """gate, measured, needed, verdict, reason, epoch"""


@dataclass
class Life:
    """One host's life in one round (PPO) or run (grow)."""

    host: int
    round: int
    epochs: Series = field(default_factory=Series)
    """epoch, train_loss, held_out_loss, accuracy, twin_accuracy, params, flops, reward, part.NAME"""
    spans: list[SeedSpan] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    """epoch, op, slot, blueprint, blend, and `refused` with the reason where it was"""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """epoch, reason"""


@dataclass(frozen=True)
class LogLine:
    """One event for people."""

    number: int
    """counts all events of the run from 0"""
    kind: str
    round: int
    host: int | None
    text: str


@dataclass
class RunView:
    """All that screens and reports draw."""

    kind: str
    """ppo or grow"""
    config: dict[str, Any]
    slots: list[str] = field(default_factory=list)
    """slot ids seen so far, in execution order"""
    round: int = 0
    """the round that is being lived; 0 in a grow run"""
    rounds: Series = field(default_factory=Series)
    """round, decisions, mean_return, accuracy, twin_accuracy, params_share, germinated, fossilized, culled, refused,
    seconds, part.NAME, op.NAME, and of the update: kl, clip_fraction, explained_variance, value_loss, policy_loss,
    first_ratio_gap, entropy.HEAD, clip.HEAD"""
    lives: dict[int, Life] = field(default_factory=dict)
    """newest life of each host"""
    ops: Counter[str] = field(default_factory=Counter)
    """ops of the round that is being lived, WAIT included"""
    results: list[dict[str, Any]] = field(default_factory=list)
    """ArmFinished records"""
    ledgers: list[dict[str, Any]] = field(default_factory=list)
    """LedgerClosed records"""
    anomalies: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: str | None = None
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    events: int = 0
    """records folded"""
    unknown: int = 0
    """records that were not understood"""
