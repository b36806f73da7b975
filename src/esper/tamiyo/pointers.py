"""Heads of the growth policy that point at what is described instead of numbering it.

Shapes: H wide, D wide inside a head, S slots, K blueprints of G numbers, P numbers of a pair.
"""

import math

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import NUM_BLENDS
from esper.tamiyo.heads import SLOT_OPS

_PRICE_DIM = 8
"""width in which a pair's numbers are weighed"""


class Questions(nn.Module):
    """What the pointers ask of slots and of blueprints, for all of them at once."""

    def __init__(self, width: int, inner: int, blueprint_width: int):
        super().__init__()
        self.of_slot = nn.Linear(width, 3 * inner)
        self.of_whole = nn.Linear(width, 3 * inner, bias=False)
        self.of_blueprint = nn.Linear(blueprint_width, 2 * inner)

    def ask_slots(self, whole: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each slot, given the whole, for slot, blueprint and blend: [..., S, D] each."""
        asked = torch.tanh(self.of_slot(slots) + self.of_whole(whole).unsqueeze(-2))
        for_slot, for_blueprint, for_blend = asked.chunk(3, -1)
        return for_slot, for_blueprint, for_blend

    def ask_blueprints(self, blueprints: Tensor) -> tuple[Tensor, Tensor]:
        """Of each blueprint, for blueprint and blend: [..., K, D] each."""
        for_blueprint, for_blend = torch.tanh(self.of_blueprint(blueprints)).chunk(2, -1)
        return for_blueprint, for_blend

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        by_slot = slots * self.of_slot.weight.numel() + self.of_whole.weight.numel()
        return by_slot + blueprints * self.of_blueprint.weight.numel()


class SlotPointer(nn.Module):
    """Points at a slot, in the case of each op that needs one."""

    def __init__(self, inner: int):
        super().__init__()
        self.last = nn.Linear(inner, len(SLOT_OPS))

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last]

    def forward(self, slots: Tensor) -> Tensor:
        """Logits [..., ops, S] from [..., S, D]."""
        return self.last(slots).transpose(-1, -2)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        return slots * self.last.weight.numel()


class BlueprintPointer(nn.Module):
    """Points at a blueprint by how it is described, and by its price in each slot."""

    def __init__(self, inner: int, pair_width: int):
        super().__init__()
        self.last = nn.Linear(inner, inner)
        self.of_pair = nn.Linear(pair_width, _PRICE_DIM)
        self.pair_last = nn.Linear(inner, _PRICE_DIM)

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last, self.pair_last]

    def forward(self, slots: Tensor, blueprints: Tensor, pairs: Tensor) -> Tensor:
        """Logits [..., S, K] from [..., S, D], [..., K, D] and [..., S, K, P]."""
        answers = self.last(blueprints)
        fit = slots @ answers.transpose(-1, -2) / math.sqrt(slots.shape[-1])
        prices = torch.tanh(self.of_pair(pairs))
        return fit + (prices @ self.pair_last(slots).unsqueeze(-1)).squeeze(-1)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        of_pair = self.of_pair.weight.numel() + self.last.in_features + _PRICE_DIM
        of_slots = slots * self.pair_last.weight.numel()
        return blueprints * self.last.weight.numel() + of_slots + slots * blueprints * of_pair


class BlendPointer(nn.Module):
    """Weighs the built-in blends for a blueprint in a slot."""

    def __init__(self, inner: int):
        super().__init__()
        self.last = nn.Linear(inner, NUM_BLENDS)
        self.blueprint_last = nn.Linear(inner, NUM_BLENDS, bias=False)

    @property
    def ends(self) -> list[nn.Linear]:
        """Layers that begin close to 0."""
        return [self.last, self.blueprint_last]

    def forward(self, slots: Tensor, blueprints: Tensor) -> Tensor:
        """Logits [..., S, K, blends] from [..., S, D] and [..., K, D]."""
        return self.last(slots).unsqueeze(-2) + self.blueprint_last(blueprints).unsqueeze(-3)

    def products(self, slots: int, blueprints: int) -> int:
        """Multiplications with an addition of one call."""
        of_slots = slots * self.last.weight.numel()
        return of_slots + blueprints * self.blueprint_last.weight.numel()


Pointer = SlotPointer | BlueprintPointer | BlendPointer
