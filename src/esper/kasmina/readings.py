"""Takes losses and gradients as readings of the live seeds; nothing is decided here.

An owner is the host with its fossils, or the live seed of one slot. Lists by owner have the host
first and then one entry per slot, in order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.evidence import gradient_norm, gradient_ratio, measure_pairs
from esper.kasmina.slot import SeedSlot
from esper.leyline.errors import MeasurementError
from esper.leyline.gates import Measurement
from esper.leyline.stages import SeedStage

Owners = Sequence[Sequence[nn.Parameter]]


def record_counterfactual(slot: SeedSlot, with_slot: Tensor, without_slot: Tensor) -> Measurement:
    """Take held-out losses of the same examples, with a seed and without it, as evidence.

    The seed must be TRAINING or PROBATIONARY.
    """
    stage = slot.state.stage
    if stage not in (SeedStage.TRAINING, SeedStage.PROBATIONARY):
        raise MeasurementError(
            f"slot {slot.slot_id} is {stage.name}, and evidence is about a seed that is TRAINING "
            f"or PROBATIONARY. Measure it when it is."
        )
    gain = measure_pairs(better=with_slot, than=without_slot)
    if stage is SeedStage.TRAINING:
        slot.assign(slot.state.incubated(gain))
    else:
        slot.assign(slot.state.measured(gain))
    return gain


def parameters_by_owner(network: nn.Module, slots: Sequence[SeedSlot]) -> list[list[nn.Parameter]]:
    """Parameters of the host (with its fossils), then those of each slot's live seed."""
    seeds: list[list[nn.Parameter]] = []
    live: set[int] = set()
    for slot in slots:
        parameters = [] if slot.seed is None else list(slot.seed.parameters())
        seeds.append(parameters)
        live.update(id(parameter) for parameter in parameters)
    host = [parameter for parameter in network.parameters() if id(parameter) not in live]
    return [host, *seeds]


def clip_by_owner(owners: Owners, max_norm: float) -> list[Tensor | None]:
    """Clip each owner's gradients apart; returns the norms before, None where no gradient is."""
    norms: list[Tensor | None] = []
    for parameters in owners:
        learning = [parameter for parameter in parameters if parameter.grad is not None]
        norms.append(nn.utils.clip_grad_norm_(learning, max_norm) if learning else None)
    return norms


def record_gradients(
    slots: Sequence[SeedSlot], norms: Sequence[float], owners: Owners, steps: int | None = None
) -> None:
    """Take sums of gradient norms by owner as readings; with `steps` the mean norm is one too."""
    sizes = [_trained_size(parameters) for parameters in owners]
    host_norm, *seed_norms = norms
    host_size, *seed_sizes = sizes
    for slot, norm, size in zip(slots, seed_norms, seed_sizes, strict=True):
        mean = norm / steps if steps and size else None
        ratio = gradient_ratio(norm, size, host_norm, host_size)
        slot.set_plain(gradient_norm=mean, gradient_ratio=ratio)


def _trained_size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


class GradientNotes:
    """Sums of gradient norms by owner since they were last read, kept on the device."""

    def __init__(self) -> None:
        # norms before clipping, for the step that follows
        self._clipped: list[Tensor | None] | None = None
        self._sums: Tensor | None = None

    def expect_step(self, norms: list[Tensor | None]) -> None:
        """Gradients were clipped: these norms, of before, are those of the next step."""
        self._clipped = norms

    def note_step(self, owners: Owners) -> None:
        """Before an optimiser's step: add the norms up. Nothing is read back from the device."""
        norms = self._clipped or [gradient_norm(parameters) for parameters in owners]
        self._clipped = None
        device = next((norm.device for norm in norms if norm is not None), None)
        nothing = torch.zeros((), device=device)
        row = torch.stack([nothing if norm is None else norm.to(nothing) for norm in norms])
        row = row.detach()  # with a graph behind it, the model could not be copied
        # a step that overflows is skipped, so it is no reading
        row = torch.where(row.isfinite().all(), row, 0.0)
        self._sums = row if self._sums is None else self._sums + row

    def skip_step(self) -> None:
        """Before a step without a live seed: there is nothing to compare."""
        self._clipped = None

    def forget(self) -> None:
        """The structure changes: the sums until now are of other owners."""
        self._sums = None

    def take(self) -> list[float] | None:
        """The sums since the last call, read from the device; None without a step."""
        sums = None if self._sums is None else self._sums.tolist()
        self._sums = None
        return sums
