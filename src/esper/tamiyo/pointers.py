"""Heads of the growth policy that point at what is described instead of numbering it.

Shapes: H wide, S slots, K blueprints of G numbers, P numbers of a pair.
"""

import math

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import NUM_BLENDS
from esper.tamiyo.heads import SLOT_OPS

_PRICE_DIM = 8
"""width in which a pair's numbers are weighed"""


class _Asking(nn.Module):
    """What a head asks of each slot, given the whole."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.of_slot = nn.Linear(width, inner)
        self.of_whole = nn.Linear(width, inner, bias=False)

    def forward(self, whole: Tensor, slots: Tensor) -> Tensor:
        return torch.tanh(self.of_slot(slots) + self.of_whole(whole).unsqueeze(-2))

    def products(self, slots: int) -> int:
        """Multiplications with an addition."""
        return slots * self.of_slot.weight.numel() + self.of_whole.weight.numel()


class SlotPointer(nn.Module):
    """Points at a slot, in the case of each op that needs one."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.asking = _Asking(width, inner)
        self.last = nn.Linear(inner, len(SLOT_OPS))

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last]

    def forward(self, whole: Tensor, slots: Tensor) -> Tensor:
        """Logits [..., ops, S]."""
        return self.last(self.asking(whole, slots)).transpose(-1, -2)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        return self.asking.products(slots) + slots * self.last.weight.numel()


class BlueprintPointer(nn.Module):
    """Points at a blueprint by how it is described, and by its price in each slot."""

    def __init__(self, width: int, inner: int, blueprint_width: int, pair_width: int):
        super().__init__()
        self.asking = _Asking(width, inner)
        self.of_blueprint = nn.Linear(blueprint_width, inner)
        self.last = nn.Linear(inner, inner)
        self.of_pair = nn.Linear(pair_width, _PRICE_DIM)
        self.pair_last = nn.Linear(inner, _PRICE_DIM)

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last, self.pair_last]

    def forward(self, whole: Tensor, slots: Tensor, blueprints: Tensor, pairs: Tensor) -> Tensor:
        """Logits [..., S, K]."""
        asked = self.asking(whole, slots)
        answers = self.last(torch.tanh(self.of_blueprint(blueprints)))
        fit = asked @ answers.transpose(-1, -2) / math.sqrt(asked.shape[-1])
        prices = torch.tanh(self.of_pair(pairs))
        return fit + (prices @ self.pair_last(asked).unsqueeze(-1)).squeeze(-1)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        inner = self.last.in_features
        of_blueprint = self.of_blueprint.weight.numel() + self.last.weight.numel()
        of_pair = self.of_pair.weight.numel() + inner + _PRICE_DIM
        of_slot = self.pair_last.weight.numel()
        return (
            self.asking.products(slots)
            + blueprints * of_blueprint
            + slots * of_slot
            + slots * blueprints * of_pair
        )


class BlendPointer(nn.Module):
    """Weighs the built-in blends for a blueprint in a slot."""

    def __init__(self, width: int, inner: int, blueprint_width: int):
        super().__init__()
        self.asking = _Asking(width, inner)
        self.of_blueprint = nn.Linear(blueprint_width, inner)
        self.last = nn.Linear(inner, NUM_BLENDS)
        self.blueprint_last = nn.Linear(inner, NUM_BLENDS, bias=False)

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last, self.blueprint_last]

    def forward(self, whole: Tensor, slots: Tensor, blueprints: Tensor) -> Tensor:
        """Logits [..., S, K, blends]."""
        of_slot = self.last(self.asking(whole, slots))
        of_blueprint = self.blueprint_last(torch.tanh(self.of_blueprint(blueprints)))
        return of_slot.unsqueeze(-2) + of_blueprint.unsqueeze(-3)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        of_blueprint = self.of_blueprint.weight.numel() + self.blueprint_last.weight.numel()
        of_slot = self.last.weight.numel()
        return self.asking.products(slots) + slots * of_slot + blueprints * of_blueprint
