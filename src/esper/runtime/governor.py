"""Watches one host and rolls it back after NaN, collapse to guessing or an exploding loss.

It decides nothing about growth.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from esper.leyline.settings import SlotChange
from esper.leyline.stages import SeedStage
from esper.runtime.executors.structure import Key, good_state_key
from esper.runtime.host import EpochReading, HostRun, HostSnapshot
from esper.runtime.tensor_pairs import Pairs, copy_pairs

# Times chance that accuracy must have reached before guessing is a collapse; it must also have been
# four standard errors above chance.
CLEARLY_BETTER = 2.0
# Times chance up to which accuracy is that of guessing.
GUESSING = 1.1
# Times its best that a held-out loss worse than guessing may be, ...
EXPLODED = 3.0
# ... and for how many checks in a row.
PATIENCE = 3


class Expectations(NamedTuple):
    """What a governor expects of its host; the defaults are those when an episode begins."""

    best_accuracy: float = 0.0
    best_loss: float = math.inf
    bad_checks: int = 0
    rollbacks: int = 0


NEWBORN = Expectations()


class Governor:
    """Keeps the last good state of one host and judges every epoch's reading."""

    def __init__(self, run: HostRun):
        self.run = run
        self._good: HostSnapshot  # `load` keeps the first one
        self._pairs: Pairs = {}
        self.load(NEWBORN)

    def state(self) -> Expectations:
        """Return what is expected of the host from now on."""
        self._expect_less_of_a_smaller_network()
        return Expectations(
            best_accuracy=self.best_accuracy,
            best_loss=self.best_loss,
            bad_checks=self.bad_checks,
            rollbacks=self.rollbacks,
        )

    def load(self, state: Expectations) -> None:
        """Expect what was expected then; the present, which was just restored, counts as good."""
        self.best_accuracy = state.best_accuracy
        self.best_loss = state.best_loss
        self.bad_checks = state.bad_checks
        self.rollbacks = state.rollbacks
        self._members = self._seeds()
        self._good_key: Key | None = None
        self.keep()

    def judge(self, reading: EpochReading) -> str | None:
        """Return what is wrong with this epoch, or None.

        Healthy epochs update what is expected of the next.
        """
        self._expect_less_of_a_smaller_network()
        loss = reading.held_out_loss
        accuracy = reading.held_out_accuracy
        assert loss is not None
        assert accuracy is not None
        finite = {
            "training loss": reading.train_loss,
            "gradient": reading.host_gradient_norm,
            "held-out loss": loss,
        }
        for name, value in finite.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        chance = self.run.task.chance
        luck = 4 * math.sqrt(chance * (1 - chance) / len(self.run.splits.validation))
        clearly = min(max(CLEARLY_BETTER * chance, chance + luck), (1 + chance) / 2)
        if self.best_accuracy >= clearly and accuracy <= GUESSING * chance:
            return f"accuracy fell from {self.best_accuracy:.1%} to guessing, {accuracy:.1%}"
        has_exploded = loss > max(EXPLODED * self.best_loss, -math.log(chance))
        self.bad_checks = self.bad_checks + 1 if has_exploded else 0
        if self.bad_checks >= PATIENCE:
            return (
                f"held-out loss is {loss:.3g} for {PATIENCE} checks, best was {self.best_loss:.3g}"
            )
        self.best_accuracy = max(self.best_accuracy, accuracy)
        self.best_loss = min(self.best_loss, loss)
        return None

    def _expect_less_of_a_smaller_network(self) -> None:
        """Forget what was expected with a seed that has gone: it took its accuracy with it."""
        seeds = self._seeds()
        present = {id(seed) for seed in seeds}
        if any(id(seed) not in present for seed in self._members):
            self.best_accuracy = 0.0
            self.best_loss = math.inf
        self._members = seeds

    def _seeds(self) -> list[nn.Module]:
        """All modules that have grown, fossils and live seeds."""
        seeds: list[nn.Module] = []
        for slot in self.run.slots:
            seeds += slot.fossils
            if slot.seed is not None:
                seeds.append(slot.seed)
        return seeds

    def keep(self) -> None:
        """Remember the present as good, unless it is under suspicion."""
        keep_together([self])

    def due_copies(self) -> Pairs:
        """Return (kept, live) tensors that are still to be copied.

        A new structure is kept at once and leaves none.
        """
        if self.bad_checks:
            return {}
        key = good_state_key(self.run)
        if key == self._good_key:
            self._good = replace(self._good, plain=self.run.plain_state())
            return self._pairs
        self._good_key = key
        known: dict[int, Tensor] = {}
        for kept_tensors, live_tensors in self._pairs.values():
            for kept, live in zip(kept_tensors, live_tensors, strict=True):
                known[id(live)] = kept
        self._good, self._pairs = self.run.paired_snapshot(known)
        return {}

    def roll_back(self) -> list[SlotChange]:
        """Put host, optimiser and fossils back to the last good state, and cull live seeds.

        Data stream, clock and ledger continue.
        """
        live = {slot: slot.state for slot in self.run.slots if slot.state.is_live}
        self.run.restore(self._good, with_stream=False)
        self.rollbacks += 1
        self.bad_checks = 0
        changes = []
        for slot in self.run.slots:
            if slot.state.is_live:
                changes.append(self.run.model.cull_seed(slot.slot_id, at_any_age=True))
        culled = {change.slot_id for change in changes}
        for slot, before in live.items():
            if slot.slot_id not in culled:  # planted after the last good epoch
                slot.assign(before.advance(SeedStage.CULLED))
                changes.append(SlotChange(slot.slot_id, before, slot.state))
        self.keep()
        return changes


def keep_together(governors: Iterable[Governor]) -> None:
    """Let governors remember their hosts' present.

    That is one copy per device and type, however many hosts there are.
    """
    due: Pairs = {}
    for governor in governors:
        for kind, pairs in governor.due_copies().items():
            kept_tensors, live_tensors = due.setdefault(kind, ([], []))
            kept_tensors += pairs[0]
            live_tensors += pairs[1]
    copy_pairs(due)
