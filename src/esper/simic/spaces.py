"""Other people's spaces as the learner's tensors: observations to rows, actions and flat masks to heads."""

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import EnvironmentMismatchError, MaskError
from esper.tamiyo.heads import HeadSpec


class ObservationCodec:
    """Observations of N environments as rows of float32: boxes flattened, discrete ones as one-hot."""

    def __init__(self, space: gym.Space[Any]):
        self.space = space
        match space:
            case gym.spaces.Box():
                self.width = int(np.prod(space.shape))
                self.sizes: tuple[int, ...] | None = None
            case gym.spaces.Discrete():
                self.sizes = (int(space.n),)
            case gym.spaces.MultiDiscrete():
                self.sizes = tuple(int(size) for size in space.nvec.flatten())
            case gym.spaces.MultiBinary():
                self.width, self.sizes = int(np.prod(space.shape)), None
            case _:
                raise EnvironmentMismatchError(
                    f"observations of {type(space).__name__} are not supported. Known: Box, Discrete, MultiDiscrete, "
                    "MultiBinary; flatten others with gymnasium.wrappers.vector.FlattenObservation."
                )
        if self.sizes is not None:
            self.width = sum(self.sizes)
            starts = [0, *np.cumsum(self.sizes)[:-1].tolist()]
            first = np.atleast_1d(getattr(space, "start", 0)).flatten()
            self._shift = torch.as_tensor(np.asarray(starts) - first, dtype=torch.long)

    def encode(self, obs: Any) -> Tensor:
        """[N, width]"""
        values = torch.as_tensor(np.asarray(obs))
        if self.sizes is None:
            return values.reshape(len(values), self.width).float()
        places = values.long().reshape(len(values), len(self.sizes)) + self._shift
        return torch.zeros(len(values), self.width).scatter_(1, places, 1.0)


class ActionCodec:
    """Actions of N environments as independent heads, one per number."""

    def __init__(self, space: gym.Space[Any]):
        self.space = space
        match space:
            case gym.spaces.Discrete():
                sizes = [int(space.n)]
            case gym.spaces.MultiDiscrete():
                sizes = [int(size) for size in space.nvec.flatten()]
            case gym.spaces.MultiBinary():
                sizes = [2] * int(np.prod(space.shape))
            case _:
                raise EnvironmentMismatchError(
                    f"actions of {type(space).__name__} are not supported; the policy chooses among a few things. "
                    "Known: Discrete, MultiDiscrete, MultiBinary."
                )
        self.spec = HeadSpec.independent(sizes)

    def decode(self, choices: Mapping[str, Tensor]) -> Any:
        """Choices [N] per head as the vector environment's `step` takes them."""
        numbers = torch.stack([choices[name] for name in self.spec.names], -1).cpu().numpy()
        start = getattr(self.space, "start", 0)
        if isinstance(self.space, gym.spaces.Discrete):
            return numbers[:, 0] + start
        shape = cast(tuple[int, ...], self.space.shape)
        return (numbers.reshape(len(numbers), *shape) + start).astype(self.space.dtype)

    @property
    def mask_shapes(self) -> dict[str, tuple[int, ...]]:
        return {head.name: (head.size,) for head in self.spec.heads}

    def split_mask(self, mask: NDArray[np.bool_] | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """A flat mask [N, sum of choices] as one mask per head; None masks nothing."""
        if mask is None:
            return {}
        flat = torch.as_tensor(np.asarray(mask)).bool().to(device)
        if flat.dim() != 2 or flat.shape[1] != sum(self.spec.sizes):
            raise MaskError(
                f"a mask of shape {tuple(flat.shape)} does not fit actions of sizes {self.spec.sizes}; it must be "
                f"[environments, {sum(self.spec.sizes)}]."
            )
        return dict(zip(self.spec.names, flat.split(list(self.spec.sizes), -1), strict=True))
