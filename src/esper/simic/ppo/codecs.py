"""Between the spaces of an environment and the learner: observations as rows, actions as heads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self, cast

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import EnvironmentMismatchError, MaskError, outline
from esper.tamiyo.heads import Head, HeadSpec
from esper.tamiyo.network import RecurrentActorCritic
from esper.tamiyo.policy_files import MOST_WIDTH

# flat, or per head [N, size] or [N, rows, size]
Mask = NDArray[np.bool_] | Mapping[str, NDArray[np.bool_]] | None
_MADE_OF = {
    "Box": (),
    "Discrete": ("n", "start"),
    "MultiDiscrete": ("nvec", "dtype", "start"),
    "MultiBinary": ("n",),
}


class ObservationCodec:
    """Turns observations of N environments into rows of float32.

    Boxes are flattened, discrete observations become one-hot.
    """

    def __init__(self, space: gym.Space[Any]):
        self.space = space
        self.sizes = _sizes(space)
        if self.sizes is None and not isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
            raise EnvironmentMismatchError(
                f"observations of {type(space).__name__} are not supported. Known: Box, Discrete, "
                f"MultiDiscrete, MultiBinary; flatten others with "
                f"gymnasium.wrappers.vector.FlattenObservation."
            )
        self.width = gym.spaces.flatdim(space)
        if self.sizes is not None:
            columns = np.cumsum([0, *self.sizes[:-1]])
            first_values = np.ravel(getattr(space, "start", 0))
            self._shift = torch.as_tensor(columns - first_values, dtype=torch.long)

    def encode(self, obs: Any) -> Tensor:
        """Return observations of N environments as rows [N, width]."""
        values = self._read(obs)
        if self.sizes is None:
            return values.reshape(len(values), self.width).float()
        columns = values.long().reshape(len(values), len(self.sizes)) + self._shift
        return torch.zeros(len(values), self.width).scatter_(1, columns, 1.0)

    def _read(self, obs: Any) -> Tensor:
        """Observations as numbers; what has other rows than the space is refused."""
        try:
            values = torch.as_tensor(np.asarray(obs))
        except (TypeError, ValueError):  # text, None or rows of different lengths
            values = torch.empty(())
        row = len(self.sizes) if self.sizes is not None else self.width
        if not values.dim() or values.is_complex() or values.numel() != len(values) * row:
            raise EnvironmentMismatchError(
                f"got observations {outline(obs)}; give N rows of {self.space}, one for each "
                f"environment."
            )
        return values


class ActionCodec:
    """Turns actions of N environments into heads, one per number.

    Without a `spec` the heads are independent.
    """

    def __init__(self, space: gym.Space[Any], spec: HeadSpec | None = None):
        self.space = space
        if isinstance(space, gym.spaces.MultiBinary):
            sizes: list[int] | None = [2] * int(np.prod(space.shape))
        else:
            sizes = _sizes(space)
        if sizes is None:
            raise EnvironmentMismatchError(
                f"actions of {type(space).__name__} are not supported. Known: Discrete, "
                f"MultiDiscrete, MultiBinary."
            )
        self.spec = spec or HeadSpec.independent(sizes)
        if list(self.spec.sizes) != sizes:
            raise EnvironmentMismatchError(
                f"heads of sizes {self.spec.sizes} do not fit actions of sizes {sizes}."
            )

    def decode(self, choices: Mapping[str, Tensor]) -> Any:
        """Return choices [N] per head as the vector environment's `step` takes them."""
        by_head = [choices[name] for name in self.spec.names]
        numbers = torch.stack(by_head, -1).cpu().numpy()
        start = getattr(self.space, "start", 0)
        if isinstance(self.space, gym.spaces.Discrete):
            return numbers[:, 0] + start
        shape = cast(tuple[int, ...], self.space.shape)
        return (numbers.reshape(len(numbers), *shape) + start).astype(self.space.dtype)

    def split_mask(
        self, mask: Mask, count: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return one mask per head for `count` environments, copied; None masks nothing."""
        if mask is None:
            return {}
        if isinstance(mask, Mapping):
            return {
                head.name: self._mask_of(head, mask, count).to(device) for head in self.spec.heads
            }
        width = sum(self.spec.sizes)
        try:
            flat = torch.as_tensor(np.array(list(mask), dtype=np.bool_)).to(device)
        except (TypeError, ValueError):  # no rows, or rows of different lengths
            flat = torch.empty(0)
        if flat.shape != (count, width):
            raise MaskError(
                f"a mask of shape {tuple(flat.shape)} for {count} environments with "
                f"actions of {self.spec.sizes} does not fit; it must be [{count}, {width}]."
            )
        return dict(zip(self.spec.names, flat.split(list(self.spec.sizes), -1), strict=True))

    def _mask_of(self, head: Head, masks: Mapping[str, NDArray[np.bool_]], count: int) -> Tensor:
        if head.name not in masks:
            raise MaskError(
                f"there is no mask for head {head.name!r}; give one for each of {self.spec.names}."
            )
        mask = torch.as_tensor(np.array(masks[head.name], dtype=np.bool_))
        sizes = dict(zip(self.spec.names, self.spec.sizes, strict=True))
        shape: tuple[int, ...] = (count, head.size)
        by_row = ""
        if head.mask_by is not None:
            rows = sizes[head.mask_by]
            by_row = f" or [{count}, {rows}, {head.size}]"
            if mask.dim() != 2:
                shape = (count, rows, head.size)
        if mask.shape != shape:
            raise MaskError(
                f"the mask of head {head.name!r} has shape {tuple(mask.shape)}; "
                f"it must be [{count}, {head.size}]{by_row}."
            )
        return mask


class Codecs(NamedTuple):
    """How an agent reads the observations of an environment and writes its actions."""

    observations: ObservationCodec
    actions: ActionCodec


@dataclass(frozen=True)
class Spaces:
    """What an agent of any environment is built for, as plain data to be saved.

    Bounds of observations are left out.
    """

    observation: dict[str, Any]
    action: dict[str, Any]
    width: int
    heads: HeadSpec
    hidden_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]
    head_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]

    @classmethod
    def of(
        cls,
        observations: ObservationCodec,
        actions: ActionCodec,
        network: RecurrentActorCritic,
    ) -> Self:
        """Return the spaces of an agent with these codecs and this network."""
        return cls(
            observation=_describe(observations.space),
            action=_describe(actions.space),
            width=observations.width,
            heads=actions.spec,
            hidden_dim=network.hidden_dim,
            head_dim=network.head_dim,
        )

    def build(self) -> RecurrentActorCritic:
        """Return a fresh network for these spaces."""
        return RecurrentActorCritic(
            self.width, self.heads, hidden_dim=self.hidden_dim, head_dim=self.head_dim
        )

    def codecs(self) -> Codecs:
        """Return the codecs of these spaces; widths that do not agree are refused."""
        observations = ObservationCodec(_rebuild(self.observation, self.width))
        if observations.width != self.width:
            raise ValueError(f"observations of width {observations.width}, not {self.width}")
        action_space = _rebuild(self.action, len(self.heads.heads))
        return Codecs(observations, ActionCodec(action_space, self.heads))


def _sizes(space: gym.Space[Any]) -> list[int] | None:
    """How many choices each number of a space has; None where numbers are not choices."""
    if isinstance(space, gym.spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.flatten()]
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    return None


def _describe(space: gym.Space[Any]) -> dict[str, Any]:
    kind = next(name for name in _MADE_OF if isinstance(space, getattr(gym.spaces, name)))
    plain: dict[str, Any] = {"kind": kind}
    for key in _MADE_OF[kind]:
        value = getattr(space, key)
        plain[key] = str(value) if key == "dtype" else np.asarray(value).tolist()
    return plain


def _rebuild(plain: Mapping[str, Any], count: int) -> gym.Space[Any]:
    """The space of `count` numbers; a forged one must not take memory before it is refused."""
    kind = plain["kind"]
    arguments = {key: plain[key] for key in _MADE_OF[kind]}
    if kind == "Box":
        return gym.spaces.Box(-np.inf, np.inf, (count,))
    if kind == "MultiBinary" and math.prod(np.ravel(plain["n"]).tolist()) != count:
        raise ValueError(f"{plain['n']} bits, not {count}")
    return cast(gym.Space[Any], getattr(gym.spaces, kind)(**arguments))
