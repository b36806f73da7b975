"""Held-out losses of a growing network: as it stands, with a seed, without one, without a fossil.

The values come from the user's `evaluate`, of all processes' examples. Their cost is in `books`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.garden import processes
from esper.kasmina.evidence import as_losses, measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.probing import undisturbed
from esper.kasmina.slot import SeedSlot
from esper.leyline.errors import MeasurementError, SettingError, is_flag
from esper.leyline.legality import GrowthView
from esper.leyline.stages import SeedStage
from esper.runtime.ledger import Charge, Phase
from esper.tamiyo.signals import EpochSignals, Signals, TrackedSignals, follow, measure_trend
from esper.telemetry.events import Event, HostEpoch, finite

Evaluate = Callable[[], Tensor]
"""Held-out values of the model as it stands, in eval mode: one per example, in a fixed order."""


def direction_of(higher_is_better: object) -> bool | None:
    """The setting of that name, checked: True for scores, False for losses, None by their type."""
    if higher_is_better is not None and not is_flag(higher_is_better):
        raise SettingError(
            f"higher_is_better is {higher_is_better!r}; True means scores, False losses."
        )
    return None if higher_is_better is None else bool(higher_is_better)


class Losses(NamedTuple):
    """Held-out values of all processes' examples, as evidence needs them."""

    values: Tensor
    """one per example; lower is better"""
    sign: float
    """what turns them back into the scale of the user's `evaluate`: 1 for losses, -1 for scores"""


@dataclass(frozen=True)
class SeedLosses:
    """Losses of the same held-out examples with a live seed and without it."""

    slot: SeedSlot
    with_seed: Tensor
    without_seed: Tensor


@dataclass(frozen=True)
class Reading:
    """What one step measured of a network and its seeds."""

    base: Losses
    incubated: list[SeedLosses]
    on_probation: list[SeedLosses]
    again: Tensor | None
    """the network's losses once more, where the others may be of other examples"""

    @property
    def seeds(self) -> list[SeedLosses]:
        """All seeds that were measured."""
        return [*self.incubated, *self.on_probation]


class Evaluation:
    """Evaluates one network with the user's function, in all processes together.

    `higher_is_better` says whether the function returns scores; None: bools are scores.
    """

    def __init__(self, model: MorphogeneticModel, higher_is_better: bool | None):
        self.model = model
        self.higher_is_better = direction_of(higher_is_better)
        # whether processes have examples of their own to measure with
        self._is_split = False

    def read(self, evaluate: Evaluate) -> Reading:
        """Measure a network as it stands, and every seed that is incubated or on probation.

        All losses are sound before any of them is taken as evidence.
        """
        base = self.losses(evaluate, is_base=True)
        incubated: list[SeedLosses] = []
        for slot in self.slots_at(SeedStage.TRAINING):
            with self.model.at_full_strength(slot.slot_id):
                values = self.losses(evaluate).values
            measure_pairs(better=base.values, than=values)
            incubated.append(SeedLosses(slot, with_seed=values, without_seed=base.values))
        on_probation: list[SeedLosses] = []
        for slot in self.slots_at(SeedStage.PROBATIONARY):
            with self.model.slot_off(slot.slot_id):
                values = self.losses(evaluate).values
            measure_pairs(better=base.values, than=values)
            on_probation.append(SeedLosses(slot, with_seed=base.values, without_seed=values))
        others = [seed.with_seed for seed in incubated]
        others += [seed.without_seed for seed in on_probation]
        again = self.losses(evaluate).values if looks_unpaired(base.values, others) else None
        return Reading(base, incubated, on_probation, again)

    def slots_at(self, stage: SeedStage) -> list[SeedSlot]:
        """Slots whose seed is at this stage, in order."""
        return [slot for slot in self.model.ordered_slots if slot.state.stage is stage]

    def losses(self, evaluate: Evaluate, is_base: bool = False) -> Losses:
        """Losses of all processes' examples; those that every process measured count once."""
        parts = processes.gather(partial(self._losses_here, evaluate))
        first = parts[0]
        for rank, part in enumerate(parts):
            if part.sign != first.sign:
                kinds = {1.0: "losses", -1.0: "scores"}
                raise MeasurementError(
                    f"evaluate() returned {kinds[part.sign]} on rank {rank} and "
                    f"{kinds[first.sign]} on rank 0. Return the same kind on every rank, or say "
                    f"which it is: esper.grow(..., higher_is_better=True) for scores."
                )
        if is_base:
            alike = [_are_close(part.values, first.values) for part in parts]
            # once is enough: all may be right by chance
            self._is_split = self._is_split or not all(alike)
        if not self._is_split:
            return first
        return Losses(torch.cat([part.values for part in parts]), first.sign)

    def _losses_here(self, evaluate: Evaluate) -> Losses:
        """Losses of this process's examples."""
        if not callable(evaluate):
            raise MeasurementError(
                f"evaluate is a {type(evaluate).__name__}; pass the function evaluate itself."
            )
        with undisturbed(self.model):
            values, sign = as_losses(evaluate(), self.higher_is_better)
        return Losses(values, sign)


@dataclass
class Evaluations:
    """Evaluations of a network, each of it as it stands at the time, and what they cost."""

    evaluate: Callable[[bool], Losses]
    price: Callable[[], int]
    values: list[Tensor] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)

    def measure(self, *, is_base: bool = False) -> Losses:
        """Evaluate the network once more; `is_base` is with all that it has."""
        losses = self.evaluate(is_base)
        phase: Phase = "validation" if is_base else "counterfactual"
        self.charges.append(Charge(phase, len(losses.values), self.price()))
        self.values.append(losses.values)
        return losses

    def repeat_in_doubt(self, base: Tensor) -> Tensor | None:
        """Losses of the network once more, where those so far may be of other examples."""
        return self.measure().values if looks_unpaired(base, self.values) else None


@dataclass
class LossMeter:
    """The mean training loss of one process since the garden's last step, as callbacks report it.

    `total` sums the losses of the optimiser's steps; it may be on a device until it is read.
    """

    total: float | Tensor = 0.0
    steps: int = 0

    def add(self, loss: Tensor) -> None:
        """Take in what a batch, or its share of an accumulated step, has lost."""
        # in half precision a sum soon stops growing
        self.total = self.total + loss.detach().float()

    def take(self) -> float | None:
        """The mean per step, and begin again; None where no step was reported."""
        mean = float(self.total) / self.steps if self.steps else None
        self.total = 0.0
        self.steps = 0
        return mean

    def state(self) -> dict[str, float | int | None]:
        """What has been reported, ready for JSON; a total that is not finite is None there."""
        return {"total": finite(float(self.total)), "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` had been told."""
        self.total = math.nan if state["total"] is None else state["total"]
        self.steps = state["steps"]


def read_signals(history: Sequence[Event], horizon: int | None, link: OptimizerLink) -> Signals:
    """What a policy is given of the epochs that the history has; `horizon` is all, if known."""
    epochs = [event for event in history if isinstance(event, HostEpoch)]
    last = epochs[-1]
    losses = [event.held_out_loss for event in epochs]
    trend = measure_trend([loss for loss in losses if loss is not None])
    return Signals(
        held_out_loss=last.held_out_loss,
        slope=trend.slope,
        error=trend.error,
        train_loss=last.train_loss,
        share=None if horizon is None else min(1.0, last.epoch / horizon),
        rate=link.rate / link.peak_rate if link.peak_rate > 0 else None,
    )


def track(
    history: Sequence[Event], horizon: int | None, link: OptimizerLink, view: GrowthView
) -> TrackedSignals:
    """What a learned policy reads of the epochs that the history has, as of a host of a run."""
    tracked = None
    for event in history:
        if not isinstance(event, HostEpoch):
            continue
        epoch = EpochSignals(
            progress=None if horizon is None else min(1.0, event.epoch / horizon),
            lr_share=link.rate / link.peak_rate if link.peak_rate > 0 else None,
            train_loss=event.train_loss,
            held_out_loss=event.held_out_loss,
            train_accuracy=None,
            held_out_accuracy=event.held_out_score,
            params_share=view.params_used / (view.budget or view.params_used),
            seeds_share=view.seeds_used / (view.max_seeds or max(view.seeds_used, 1)),
        )
        tracked = follow(tracked, epoch)
    assert tracked is not None, "a policy is asked after an epoch"
    return tracked


def looks_unpaired(base: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether evaluations have too little in common to be of the same examples in one order."""
    for other in others:
        if float(base.std()) == 0 or float(other.std()) == 0:
            continue
        if float(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.5:
            return True
    return False


def _are_close(values: Tensor, others: Tensor) -> bool:
    return values.shape == others.shape and torch.allclose(values, others, rtol=1e-3)
