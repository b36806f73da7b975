"""One epoch of one host, and its held-out losses. Knows nothing of seeds: the model it gets may be growing or not."""

import torch
from torch import Tensor, nn

from esper.runtime.data import Split

_EVALUATION_BATCH = 2048


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, split: Split, batch: int, order: torch.Generator
) -> float:
    """One pass over the whole split in an order drawn from `order`; returns the mean loss."""
    model.train()
    permutation = torch.randperm(len(split), generator=order).to(split.labels.device)
    total = torch.zeros((), device=split.labels.device)
    steps = len(split) // batch
    for step in range(steps):
        rows = permutation[step * batch : (step + 1) * batch]
        loss = nn.functional.cross_entropy(model(split.images[rows]), split.labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(total) / steps


@torch.no_grad()
def held_out_losses(model: nn.Module, split: Split) -> Tensor:
    """Cross-entropy of every example, in order."""
    return torch.cat(
        [
            nn.functional.cross_entropy(model(images), labels, reduction="none")
            for images, labels in zip(
                split.images.split(_EVALUATION_BATCH), split.labels.split(_EVALUATION_BATCH), strict=True
            )
        ]
    )


@torch.no_grad()
def score(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy as a fraction and mean loss, in evaluation mode."""
    model.eval()
    right = sum(
        int((model(images).argmax(1) == labels).sum())
        for images, labels in zip(
            split.images.split(_EVALUATION_BATCH), split.labels.split(_EVALUATION_BATCH), strict=True
        )
    )
    return right / len(split), float(held_out_losses(model, split).mean())
