"""The modules that seeds are made of.

Needs torch alone: an exported network carries this file along as its source.
"""

from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.plain import Recordable, record


class Seed(Recordable):
    """A body in a residual branch behind a per-channel scale; with scale 0 it is the identity.

    The scale comes after the body's last non-linearity, so a newborn seed has a gradient from its
    first step on.
    """

    def __init__(self, body: nn.Module, scale: Tensor, gate: nn.Module | None):
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(scale)
        self.gate = gate
        self.join = Join()

    def forward(self, features: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """The seed at full strength; all other arguments of the module before it are ignored."""
        # the gate first, as in `blend`: gradients are then added in the same order
        weight = None if self.gate is None else self.gate(features)
        return self._joined(features, weight)

    def blend(self, features: Tensor, alpha: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """A share `alpha` of the seed; exactly the input at 0 and exactly `forward` at 1."""
        weight = alpha if self.gate is None else alpha * self.gate(features)
        return self._joined(features, weight)

    def _joined(self, features: Tensor, weight: Tensor | None) -> Tensor:
        """The features with a share `weight` of the branch; all of it without a weight."""
        branch = self.body(features.to(self.scale.dtype))
        return self.join(features, branch, self.scale, weight)


class Join(Recordable):
    """Where a branch meets the features that it began with.

    It is a module of its own, so that it can be compiled.
    """

    is_inlined = True

    def forward(
        self, features: Tensor, branch: Tensor, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Features plus the scaled branch, or a share `weight` of the way there."""
        grown = features + (scale * branch).to(features.dtype)
        if weight is None:
            return grown
        return torch.lerp(features, grown, weight.to(features.dtype))


class Gate(Recordable):
    """How much of a seed one example (or one token) takes, learned from its features."""

    def __init__(self, channels: int, channels_first: bool):
        super().__init__()
        self.channels_first = channels_first
        self.linear = nn.Linear(channels, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """A share from 0 to 1, shaped to multiply the features."""
        dtype = self.linear.weight.dtype
        if self.channels_first:
            pooled = features.mean((2, 3)).to(dtype)  # [B, C]
            return torch.sigmoid(self.linear(pooled))[:, :, None, None]
        # token by token: a gate must not look at the future
        return torch.sigmoid(self.linear(features.to(dtype)))


class SqueezeExcite(Recordable):
    """Channels weighed by what the whole image shows."""

    def __init__(self, channels: int):
        super().__init__()
        inner = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, inner, bias=False)
        self.excite = nn.Linear(inner, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """The features, each channel times its weight."""
        pooled = features.mean((2, 3))
        # the tiny slope keeps the branch alive when a small squeeze layer starts out all negative
        squeezed = nn.functional.leaky_relu(self.squeeze(pooled), 0.01)
        weights = torch.sigmoid(self.excite(squeezed))
        return features * weights[:, :, None, None]


class CausalAttention(Recordable):
    """Multi-head attention over earlier tokens only, so that it is safe inside a language model.

    Batch first. A call in which it would not see what the network around it sees is refused.
    """

    grown_unseen: str | None = None
    """what it does not see of the present call, in words; None if it sees all"""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """What each token takes from itself and those before it, [B, T, C]."""
        if self.grown_unseen is not None:
            raise RuntimeError(self.grown_unseen)
        return self.attend(features)

    def plain(self, gets_call: bool = False) -> nn.Module:
        """The same as modules of torch alone; the module that it grew on refuses calls for it."""
        return record(self, ["features"], lambda own, features: own.attend(features))

    def attend(self, features: Tensor) -> Tensor:
        """The attention itself, whatever the call holds."""
        batch, tokens, channels = features.shape
        joined = self.qkv(self.norm(features))
        split = joined.view(batch, tokens, 3, self.heads, channels // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, channels))


def group_norm(channels: int) -> nn.GroupNorm:
    """Groups of four channels where they divide evenly, else one group.

    Statistics are of one example; there are no running buffers.
    """
    groups = channels // 4 if channels % 4 == 0 else 1
    return nn.GroupNorm(groups, channels)


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the image's size."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


def conv_stack(channels: int, *layers: nn.Module) -> nn.Sequential:
    """The layers, then group norm and ReLU."""
    return nn.Sequential(*layers, group_norm(channels), nn.ReLU())


def conv_small(channels: int) -> nn.Module:
    """A 1 x 1 convolution: mixes channels, no positions."""
    return conv_stack(channels, conv(channels, channels, 1))


def conv_light(channels: int) -> nn.Module:
    """A 3 x 3 convolution."""
    return conv_stack(channels, conv(channels, channels, 3))


def conv_heavy(channels: int) -> nn.Module:
    """Two 3 x 3 convolutions, each with norm and ReLU."""
    return nn.Sequential(conv_light(channels), conv_light(channels))


def depthwise(channels: int) -> nn.Module:
    """A 3 x 3 convolution of each channel by itself, then a 1 x 1 convolution."""
    spatial = conv(channels, channels, 3, groups=channels)
    pointwise = conv(channels, channels, 1)
    return conv_stack(channels, spatial, pointwise)


def bottleneck(channels: int) -> nn.Module:
    """A 3 x 3 convolution on a quarter of the width."""
    inner = max(1, channels // 4)
    squeeze = nn.Sequential(conv(channels, inner, 1), nn.ReLU(), conv(inner, inner, 3), nn.ReLU())
    return conv_stack(channels, squeeze, conv(inner, channels, 1))


def inverted_bottleneck(channels: int) -> nn.Module:
    """A depthwise 3 x 3 convolution on twice the width."""
    inner = 2 * channels
    widen = conv(channels, inner, 1)
    spatial = conv(inner, inner, 3, groups=inner)
    widened = nn.Sequential(widen, nn.ReLU(), spatial, nn.ReLU())
    return conv_stack(channels, widened, conv(inner, channels, 1))


def token_norm(channels: int) -> nn.Module:
    """A layer norm of each token."""
    return nn.LayerNorm(channels)


def lora(channels: int) -> nn.Module:
    """A linear map of low rank: at most 8, at most a quarter of the width."""
    rank = max(1, min(8, channels // 4))
    down = nn.Linear(channels, rank, bias=False)
    up = nn.Linear(rank, channels, bias=False)
    return nn.Sequential(down, up)


def perceptron(channels: int, hidden: int) -> nn.Module:
    """A layer norm and two linear layers with a GELU between them."""
    widen = nn.Linear(channels, hidden)
    narrow = nn.Linear(hidden, channels, bias=False)
    return nn.Sequential(nn.LayerNorm(channels), widen, nn.GELU(), narrow)


def mlp_tiny(channels: int) -> nn.Module:
    """A perceptron a quarter as wide as the features."""
    return perceptron(channels, max(1, channels // 4))


def mlp_small(channels: int) -> nn.Module:
    """A perceptron as wide as the features."""
    return perceptron(channels, channels)


def mlp(channels: int) -> nn.Module:
    """A perceptron four times as wide as the features."""
    return perceptron(channels, 4 * channels)


def attention(channels: int) -> nn.Module:
    """Causal attention with four heads."""
    heads = 4
    if channels % heads:
        raise ValueError(
            f"attention splits the width into {heads} heads; {channels} is not divisible by {heads}"
        )
    return CausalAttention(channels, heads)


class Sham(Recordable):
    """A seed without parameters or effect.

    It goes through every event of growing and adds nothing.
    """

    def forward(self, features: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """The features as they are."""
        return features

    def blend(self, features: Tensor, alpha: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """The features as they are, whatever the share."""
        return features

    def plain(self, gets_call: bool = False) -> nn.Module:
        """Torch has a module for that."""
        return nn.Identity()


def scale_of(channels: int, channels_first: bool, value: float = 0.0) -> Tensor:
    """A seed's per-channel scale, shaped to multiply its features."""
    shape = (channels, 1, 1) if channels_first else (channels,)
    return torch.full(shape, float(value))
