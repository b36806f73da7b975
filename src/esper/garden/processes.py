"""Several processes that train one growing network.

DDP keeps the host equal in all of them, this file what grows.
"""

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, distributed

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import MeasurementError, SettingError

T = TypeVar("T")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count() -> int:
    """How many processes train together.

    All of them make the calls of this file, at the same points.
    """
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def is_first() -> bool:
    """Whether this process decides and writes for all."""
    return count() == 1 or distributed.get_rank() == 0


def gather(work: Callable[[], T]) -> list[T]:
    """What every process finds, by rank. Where one fails all do, so that nobody waits for it."""
    if count() == 1:
        return [work()]
    found, problem = None, None
    try:
        found = work()
    except Exception as caught:
        problem = caught
    told: list[tuple[str | None, T]] = [(None, found)] * count()  # type: ignore[list-item]  # filled by the next line
    distributed.all_gather_object(told, (problem and f"{type(problem).__name__}: {problem}", found))
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise MeasurementError(f"rank {rank} failed, so this one stops too. It said: {text}")
    return [value for _, value in told]


def share(tensors: Iterable[Tensor]) -> None:
    """Every process takes over the first one's values."""
    for own in _alike(tensors) if count() > 1 else []:
        flat = torch.cat([tensor.detach().flatten() for tensor in own])
        flat = (
            flat.cuda() if distributed.get_backend() == "nccl" else flat
        )  # a model may still be on the CPU
        distributed.broadcast(flat, 0)
        for tensor, part in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def require_equal(model: MorphogeneticModel) -> None:
    """Refuse to go on where processes hold different networks:

    their evidence would be about none of them.
    """
    if count() == 1:
        return
    bits = {
        name: p.detach().contiguous().view(_BITS[p.element_size()])
        for name, p in model.named_parameters()
    }
    everyone = gather(lambda: {name: int(own.sum(dtype=torch.int64)) for name, own in bits.items()})
    for rank, other in enumerate(everyone):
        if differing := [
            name for name in {**everyone[0], **other} if everyone[0].get(name) != other.get(name)
        ]:
            what = (
                f"rank {rank} and rank 0 hold different networks; the first "
                f"difference is {differing[0]}"
            )
            network = (
                "DistributedDataParallel(garden.model), or what accelerate makes of garden.model"
            )
            raise SettingError(f"{what}. Train {network}, with the same steps on all ranks.")


class Follower:
    """Keeps the seeds and fossils of one network equal in all processes.

    DDP makes its buckets once, so it is told to leave the slots alone. When a backward pass has
    reached the network, gradients in the slots become their mean, before anybody clips, unscales or
    steps. Within `no_sync` too: that is more traffic and the same sum, as the mean of equal values
    is the value.
    """

    def __init__(self, model: MorphogeneticModel):
        self.model, self._task = model, -1
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.follow()

    def follow(self) -> None:
        """Take the network as it is now; what is new in it gets the first process's values."""
        slots = self.model.slots
        names = [f"slots.{name}" for name, _ in (*slots.named_parameters(), *slots.named_buffers())]
        vars(self.model)["_ddp_params_and_buffers_to_ignore"] = names
        share([*slots.parameters(), *slots.buffers()])
        for handle in self._handles:
            handle.remove()
        is_announced = os.environ.get("WORLD_SIZE", "1") not in (
            "",
            "1",
        )  # the group may be joined later
        learning = (
            [p for p in self.model.parameters() if p.requires_grad]
            if is_announced or count() > 1
            else []
        )
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note) for parameter in learning
        ]

    def _note(self, parameter: Tensor) -> None:
        """Once per backward pass, whichever parameter it reaches first:

        processes may reach different ones.
        """
        if (task := torch._C._current_graph_task_id()) != self._task and count() > 1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Gradients become means, a process without one adds zero; buffers follow the first
        process, as DDP's do.
        """
        for own in _alike(p for p in self.model.slots.parameters() if p.requires_grad):
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            found += [p.new_full((), float(p.grad is not None)) for p in own]
            flat = torch.cat([each.flatten() for each in found]).div_(count())
            distributed.all_reduce(flat)
            parts = flat.split([each.numel() for each in found])
            for p, part, present in zip(own, parts, parts[len(own) :], strict=False):
                if p.grad is not None:
                    p.grad.copy_(part.view_as(p))
                elif present > 0:  # read back only where this process had none
                    p.grad = part.view_as(p).clone()
        share(
            buffer
            for slot in self.model.slots.values()
            for part in slot.children()
            for buffer in part.buffers()
        )


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that can travel as one."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())
