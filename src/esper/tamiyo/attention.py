"""How tokens look at each other, and what a set of slots comes to."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_FAR_BELOW = 1e6


class TokenAttention(nn.Module):
    """Tokens [..., 1 + S, H] look at the first one and at those slots that are there."""

    def __init__(self, width: int):
        super().__init__()
        self.question = nn.Linear(width, 3 * width)

    def forward(self, tokens: Tensor, is_there: Tensor) -> Tensor:
        """What each token is told, [..., 1 + S, H]; `is_there` is [..., S]."""
        query, key, value = self.question(tokens).chunk(3, -1)
        seen = F.pad(is_there, (1, 0), value=True).unsqueeze(-2)
        # on a GPU gradients of the fused kernels do not repeat bit for bit
        is_plain = sdpa_kernel(SDPBackend.MATH) if tokens.is_cuda else nullcontext()
        with is_plain:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    def products(self, tokens: int) -> int:
        """Multiplications with an addition in one pass over so many tokens."""
        width = self.question.in_features
        return tokens * self.question.weight.numel() + 2 * tokens * tokens * width


def pool_slots(slots: Tensor, is_there: Tensor) -> Tensor:
    """Mean and largest values [..., 2 H] over the slots [..., S, H] that are there; 0 of none."""
    there = is_there[..., None].to(slots.dtype)
    count = there.sum(-2)
    mean = (slots * there).sum(-2) / count.clamp(min=1)
    largest = (slots - _FAR_BELOW * (1 - there)).amax(-2)
    return torch.cat([mean, largest * (count > 0)], -1)
