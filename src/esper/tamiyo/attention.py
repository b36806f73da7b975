"""How tokens look at each other, and what a set of slots comes to."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FAR_BELOW = 1e6


class TokenAttention(nn.Module):
    """Tokens [..., 1 + S, H] look at the first one and at those slots that are there."""

    HEADS = 2

    def __init__(self, width: int):
        super().__init__()
        self.heads = self.HEADS if width % self.HEADS == 0 else 1
        self.question = nn.Linear(width, 3 * width)
        self.answer = nn.Linear(width, width)

    def forward(self, tokens: Tensor, is_there: Tensor) -> Tensor:
        """What each token is told, [..., 1 + S, H]; `is_there` is [..., S]."""
        lead = tokens.shape[:-1]
        parts = self.question(tokens).view(*lead, 3, self.heads, -1)
        query, key, value = parts.movedim(-4, -2).unbind(-4)  # each [..., heads, tokens, width]
        seen = F.pad(is_there, (1, 0), value=True)[..., None, None, :]
        told = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.answer(told.transpose(-2, -3).reshape(*lead, -1))

    def products(self, tokens: int) -> int:
        """Multiplications with an addition in one pass over so many tokens."""
        linear = self.question.weight.numel() + self.answer.weight.numel()
        return tokens * linear + 2 * tokens * tokens * self.answer.in_features


def pool_slots(slots: Tensor, is_there: Tensor) -> Tensor:
    """Mean and largest values [..., 2 H] over the slots [..., S, H] that are there; 0 of none."""
    there = is_there[..., None].to(slots.dtype)
    count = there.sum(-2)
    mean = (slots * there).sum(-2) / count.clamp(min=1)
    largest = (slots - _FAR_BELOW * (1 - there)).amax(-2)
    return torch.cat([mean, largest * (count > 0)], -1)
