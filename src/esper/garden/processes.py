"""Several processes that train one growing network.

DDP keeps the host equal in all of them; this file keeps what grows equal.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from esper.garden.description import find_differences
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import MeasurementError, SettingError

T = TypeVar("T")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Answer(NamedTuple):
    """What one process sends to all others."""

    problem: str | None
    result: object


def count() -> int:
    """How many processes train together.

    All of them make the calls of this file, at the same points.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def is_first() -> bool:
    """Whether this process decides and writes for all."""
    return count() == 1 or distributed.get_rank() == 0


def gather(work: Callable[[], T]) -> list[T]:
    """What the work returns in every process, by rank.

    Where one fails all do, so that no process waits for it.
    """
    if count() == 1:
        return [work()]
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        problem = caught
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    answers = [_Answer(None, None)] * count()  # filled by the next line
    distributed.all_gather_object(answers, _Answer(text, result))
    if problem is not None:
        raise problem
    for rank, answer in enumerate(answers):
        if answer.problem is not None:
            raise MeasurementError(
                f"rank {rank} failed, so this one stops too. It said: {answer.problem}"
            )
    return [answer.result for answer in answers]  # type: ignore[misc]  # none has failed


def ask_first(decide: Callable[..., T]) -> Callable[..., T]:
    """The same function, which only the first process calls; all of them take its answer."""

    def ask(*arguments: object) -> T:
        answer = gather(lambda: decide(*arguments) if is_first() else None)[0]
        assert answer is not None
        return answer

    return ask


def mean_of(loss: float | Tensor | None) -> float | None:
    """The mean of a loss that every process has of its own; None where one does not know it."""
    known: list[float] = []
    parts = gather(lambda: None if loss is None else _one_number(loss))
    for part in parts:
        if part is not None and math.isfinite(part):
            known.append(part)
    return sum(known) / len(known) if len(known) == len(parts) else None


def _one_number(loss: float | Tensor) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        raise MeasurementError(
            f"train_loss is a {type(loss).__name__} that is not one number; pass the mean training "
            f"loss of the epoch."
        ) from None


def share(tensors: Iterable[Tensor]) -> None:
    """Every process takes over the first one's values."""
    if count() == 1:
        return
    for group in _group_alike(tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in group])
        if distributed.get_backend() == "nccl":
            flat = flat.cuda()  # a model may still be on the CPU
        distributed.broadcast(flat, 0)
        parts = flat.split([tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def require_alike(describe: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse to continue where processes describe differently what each has built for itself.

    Where one fails to describe it all do.
    """
    first, *others = gather(describe)
    for rank, other in enumerate(others, start=1):
        for difference in find_differences(first, other):
            raise SettingError(
                f"{difference.place} is {difference.other} on rank {rank} and {difference.one} on "
                f"rank 0. Call esper.grow or esper.load with the same arguments on every rank."
            )


def require_equal(model: MorphogeneticModel) -> None:
    """Refuse to continue where processes hold different networks.

    Their evidence would be about none of them.
    """
    if count() == 1:
        return
    first, *others = gather(lambda: _checksums(model))
    for rank, other in enumerate(others, start=1):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            raise SettingError(
                f"rank {rank} and rank 0 hold different networks; the first difference is "
                f"{differing[0]}. Train DistributedDataParallel(garden.model), or what accelerate "
                f"makes of garden.model, with the same steps on all ranks."
            )


def _checksums(model: MorphogeneticModel) -> dict[str, int]:
    """The sum of each parameter's bits, by name."""
    sums: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(_BITS[parameter.element_size()])
        sums[name] = int(bits.sum(dtype=torch.int64))
    return sums


class Follower:
    """Keeps the seeds and fossils of one network equal in all processes.

    DDP makes its buckets once, so it has to leave the slots alone. When a backward pass has reached
    the network, gradients in the slots become their mean, before anything clips, unscales or steps.
    Within `no_sync` too: that is more traffic and the same sum, as the mean of equal values is the
    value.
    """

    def __init__(self, model: MorphogeneticModel):
        self.model = model
        # number of the backward pass that was noted last
        self._task = -1
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.follow()

    def follow(self) -> None:
        """Take the network as it is now; what is new in it gets the first process's values."""
        self.rejoin()
        share([*self.model.slots.parameters(), *self.model.slots.buffers()])

    def rejoin(self) -> None:
        """Take the network as it is now, whatever the other processes do."""
        slots = self.model.slots
        names = [f"slots.{name}" for name, _ in (*slots.named_parameters(), *slots.named_buffers())]
        vars(self.model)["_ddp_params_and_buffers_to_ignore"] = names
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # the group may be joined later
        is_announced = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        if is_announced or count() > 1:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._note)
                    self._handles.append(handle)

    def _note(self, parameter: Tensor) -> None:
        """Average once per backward pass, whichever parameter it reaches first.

        Processes may reach different ones.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task and count() > 1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Make gradients in the slots means; a process without one adds zero.

        Buffers follow the first process, as DDP's do.
        """
        learning = [p for p in self.model.slots.parameters() if p.requires_grad]
        for group in _group_alike(learning):
            _average_gradients(group)
        buffers: list[Tensor] = []
        for slot in self.model.slots.values():
            for child in slot.children():
                buffers += child.buffers()
        share(buffers)


def _average_gradients(parameters: list[Tensor]) -> None:
    """Make the gradients of parameters that can travel as one the means of all processes."""
    sent: list[Tensor] = []
    for parameter in parameters:
        sent.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for parameter in parameters:
        sent.append(parameter.new_full((), float(parameter.grad is not None)))
    flat = torch.cat([tensor.flatten() for tensor in sent]).div_(count())
    distributed.all_reduce(flat)
    received = flat.split([tensor.numel() for tensor in sent])
    means = received[: len(parameters)]
    shares = received[len(parameters) :]  # of processes that had a gradient
    for parameter, mean, present in zip(parameters, means, shares, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(mean.view_as(parameter))
        elif present > 0:  # read back only where this process had none
            parameter.grad = mean.view_as(parameter).clone()


def _group_alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that can travel as one."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
