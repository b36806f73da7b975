"""The network as a policy like any other: observation and masks in, actions out, its memory handed back and forth."""

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.errors import SettingError
from esper.tamiyo.masks import Masks
from esper.tamiyo.network import RecurrentActorCritic
from esper.tamiyo.policies import Actions
from esper.tamiyo.recurrence import Hidden


class NetworkPolicy:
    """Decides for N hosts with a trained network.

    Args:
        deterministic: take the likeliest choice; otherwise draw from `seed`.
    """

    def __init__(self, network: RecurrentActorCritic, *, deterministic: bool = True, seed: int = 0):
        self.network, self.deterministic = network, deterministic
        self.device = next(network.parameters()).device
        self.draws = torch.Generator(self.device).manual_seed(seed)

    def decide(
        self, observation: NDArray[np.float32] | None, masks: Masks, reports: object, memory: Hidden | None
    ) -> tuple[Actions, Hidden]:
        """Actions [N, 4] in the order of the heads; `memory` is None at the start of N fresh episodes."""
        if observation is None:
            raise SettingError("a learned policy needs observations [N, F]; this loop has none to give.")
        states = torch.as_tensor(observation, dtype=torch.float32, device=self.device)
        if states.dim() != 2 or states.shape[1] != self.network.state_dim:
            raise SettingError(
                f"observations are {tuple(states.shape)}, but this policy was trained on {self.network.state_dim} "
                "features; use the slots and telemetry setting it was trained with (docs/checkpoints.md)."
            )
        on_device = {name: torch.as_tensor(mask, device=self.device) for name, mask in masks.items()}
        with torch.no_grad():
            choices, _, _, hidden = self.network.choose(states, memory, on_device, self.deterministic, self.draws)
        return torch.stack([choices[name] for name in self.network.spec.names], -1).cpu().numpy(), hidden
