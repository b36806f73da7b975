"""Choosing among what is possible: log-probabilities, sampling and entropy under a mask.

No network, no growth.
"""

import math

import torch
from torch import Tensor

from esper.leyline.errors import MaskError

# Finite on purpose: an infinity turns the gradient of the entropy into NaN.
_LOWEST = torch.finfo(torch.float32).min


def at_least_single(values: Tensor) -> Tensor:
    """In float32, or in float64 where it was."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """The logits in float32 or better, with the lowest finite number where the mask is false."""
    logits = at_least_single(logits)
    return logits if mask is None else logits.masked_fill(~mask, _LOWEST)


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities in float32, whatever autocast says; masked entries get no gradient."""
    with torch.autocast(logits.device.type, enabled=False):
        return torch.log_softmax(mask_logits(logits, mask), -1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy in nats; entries of probability 0 add exactly nothing, in the gradient too."""
    probs = log_probs.exp()
    # the lowest number times anything above 1 is an infinity, and 0 times that is NaN: it must not
    # enter the product
    return -(probs * torch.where(probs > 0, log_probs, 0.0)).sum(-1)


def normalised_entropy(log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """Entropy over its largest value ln(n_valid).

    1 is an even draw. With one valid choice it is 0, without gradient.
    """
    if mask is None:
        size = log_probs.shape[-1]
        if size <= 1:
            return log_probs.new_zeros(log_probs.shape[:-1])
        return entropy_of(log_probs) / math.log(size)
    valid = mask.sum(-1)
    entropy = entropy_of(log_probs) / valid.clamp(min=2).to(log_probs.dtype).log()
    return torch.where(valid > 1, entropy, torch.zeros_like(entropy))


def require_choices(possible: Tensor, head: str, row: str = "host") -> None:
    """Refuse the mask of `head` if a row of it allows nothing.

    `possible` says for rows [N] or [N, T, ...] whether there is a choice; `row` is the word for N.
    """
    if bool(possible.all()):
        return
    number, *inner = (~possible).nonzero()[0].tolist() or [0]
    step_words = f", step {inner[0]}" if inner else ""
    raise MaskError(
        f"{row} {number}, head {head!r}{step_words}: the mask allows nothing. Every row needs at "
        f"least one possible choice; an unused head has index 0 as its only one."
    )


class MaskedCategorical:
    """A distribution over the choices that a mask leaves; rows are [..., choices]."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None, *, head: str = "action"):
        if mask is not None:
            mask = mask.expand(logits.shape)
            require_choices(mask.any(-1), head)
        self.mask = mask
        self.logits = mask_logits(logits, mask)
        self.log_probs = masked_log_softmax(self.logits, None)

    def sample(
        self, generator: torch.Generator | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """One choice per row by the Gumbel trick on even draws `noise`, [..., choices].

        A masked entry cannot win, even by rounding.
        """
        if noise is None:
            noise = torch.rand(
                self.logits.shape,
                generator=generator,
                device=self.logits.device,
                dtype=torch.float32,
            )
        positive = noise.clamp(min=torch.finfo(torch.float32).tiny)
        scores = self.log_probs.detach() - torch.log(-torch.log(positive))
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        return scores.argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choice of each row."""
        return self.logits.argmax(-1)

    def log_prob(self, choices: Tensor) -> Tensor:
        """The log-probability of one choice per row."""
        return self.log_probs.gather(-1, choices[..., None]).squeeze(-1)
