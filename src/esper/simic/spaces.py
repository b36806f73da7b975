"""Other people's spaces as the learner's tensors: observations to rows, actions and flat masks to heads."""

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import EnvironmentMismatchError, MaskError
from esper.tamiyo.heads import Head, HeadSpec


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


Mask = NDArray[np.bool_] | Mapping[str, NDArray[np.bool_]] | None
"""flat [N, sum of choices], or one array per head, [N, size] or with a row per earlier choice"""


class ActionCodec:
    """Actions of N environments as heads, one per number.

    Args:
        spec: which choices depend on which; without it they are independent.
    """

    def __init__(self, space: gym.Space[Any], spec: HeadSpec | None = None):
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
        self.spec = spec or HeadSpec.independent(sizes)
        if list(self.spec.sizes) != sizes:
            raise EnvironmentMismatchError(f"heads of sizes {self.spec.sizes} do not fit actions of sizes {sizes}.")

    def decode(self, choices: Mapping[str, Tensor]) -> Any:
        """Choices [N] per head as the vector environment's `step` takes them."""
        numbers = torch.stack([choices[name] for name in self.spec.names], -1).cpu().numpy()
        start = getattr(self.space, "start", 0)
        if isinstance(self.space, gym.spaces.Discrete):
            return numbers[:, 0] + start
        shape = cast(tuple[int, ...], self.space.shape)
        return (numbers.reshape(len(numbers), *shape) + start).astype(self.space.dtype)

    def split_mask(self, mask: Mask, count: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """One mask per head for `count` environments; None masks nothing."""
        if mask is None:
            return {}
        if isinstance(mask, Mapping):
            return {head.name: self._own_mask(mask, head, count).to(device) for head in self.spec.heads}
        flat = torch.as_tensor(np.asarray(mask)).bool().to(device)
        if flat.shape != (count, sum(self.spec.sizes)):
            raise MaskError(
                f"a mask of shape {tuple(flat.shape)} does not fit {count} environments with actions of sizes "
                f"{self.spec.sizes}; it must be [{count}, {sum(self.spec.sizes)}]."
            )
        return dict(zip(self.spec.names, flat.split(list(self.spec.sizes), -1), strict=True))

    def _own_mask(self, masks: Mapping[str, NDArray[np.bool_]], head: Head, count: int) -> Tensor:
        if head.name not in masks:
            raise MaskError(f"there is no mask for head {head.name!r}; give one for each of {self.spec.names}.")
        mask = torch.as_tensor(np.asarray(masks[head.name])).bool()
        sizes = dict(zip(self.spec.names, self.spec.sizes, strict=True))
        rows = () if head.mask_by is None or mask.dim() == 2 else (sizes[head.mask_by],)
        if mask.shape != (count, *rows, head.size):
            raise MaskError(
                f"the mask of head {head.name!r} has shape {tuple(mask.shape)}; it must be [{count}, {head.size}]"
                + (f" or [{count}, {sizes[head.mask_by]}, {head.size}]." if head.mask_by else ".")
            )
        return mask
