"""Plain loops over one model, for whoever trains outside a population. Knows nothing of seeds."""

import torch
from torch import Tensor, nn

from esper.runtime.splits import Split
from esper.runtime.tasks import cross_entropy_scores

_CHUNK = 2048


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, split: Split, batch: int, order: torch.Generator
) -> float:
    """One pass over the whole split in an order drawn from `order`; returns the mean loss."""
    model.train()
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for rows in torch.randperm(len(split), generator=order).to(device).split(batch):
        inputs, targets = split.gather(rows)
        losses, _ = cross_entropy_scores(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        optimizer.step()
        total += losses.detach().sum()
    return float(total) / len(split)


@torch.no_grad()
def held_out_losses(model: nn.Module, split: Split) -> Tensor:
    """Cross-entropy of every example, in order."""
    return _scores(model, split)[0]


@torch.no_grad()
def score(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy as a fraction and mean loss, in evaluation mode."""
    model.eval()
    losses, correct = _scores(model, split)
    return float(correct.mean()), float(losses.mean())


def _scores(model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(split), device=next(model.parameters()).device)
    batches = [split.gather(part) for part in rows.split(_CHUNK)]
    scored = [cross_entropy_scores(model(inputs).float(), targets) for inputs, targets in batches]
    return torch.cat([losses for losses, _ in scored]), torch.cat([correct for _, correct in scored])
