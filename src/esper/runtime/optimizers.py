"""Optimisers of hosts, and the state that new parameters begin with."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.runtime.tasks.task import Task

_MOMENTUM = 0.9


def build_optimizer(task: Task, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Build the task's optimiser.

    On a GPU its rate is a tensor, so that a captured graph follows the plan.
    """
    is_cuda = device.type == "cuda"
    rate = torch.tensor(task.lr, device=device) if is_cuda else task.lr
    options: dict[str, Any] = {
        "lr": rate,
        "weight_decay": task.weight_decay,
        "fused": is_cuda or None,
    }
    if task.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(), betas=(0.9, task.beta2), capturable=is_cuda, **options
        )
    return torch.optim.SGD(model.parameters(), momentum=_MOMENTUM, nesterov=True, **options)


def build_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Build the zero state of a parameter that has none.

    Its first step is then like every other.
    """
    zeros = torch.zeros_like(parameter)
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": zeros}
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": zeros,
        "exp_avg_sq": zeros.clone(),
    }
