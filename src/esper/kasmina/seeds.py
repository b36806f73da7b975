"""The modules that seeds are made of.

Needs torch alone: an exported network carries this file along as its source.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Seed(nn.Module):
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._modules.setdefault(
            "join", Join()
        )  # of networks that were pickled before there was one

    def forward(self, features: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """The seed at full strength; what else the module before it was called with is not looked
        at.
        """
        # the gate first, as in `blend`: gradients are then added in the same order
        return self._joined(features, None if self.gate is None else self.gate(features))

    def blend(self, features: Tensor, alpha: Tensor, /, *_: Any, **__: Any) -> Tensor:
        """A share `alpha` of the seed; exactly the input at 0 and exactly `forward` at 1."""
        return self._joined(features, alpha if self.gate is None else alpha * self.gate(features))

    def _joined(self, features: Tensor, weight: Tensor | None) -> Tensor:
        is_cast = any(
            map(torch.is_autocast_enabled, ("cuda", "cpu"))
        )  # which chooses types for itself
        branch = self.body(features if is_cast else features.to(self.scale.dtype))
        return self.join(features, branch, self.scale, weight)


class Join(nn.Module):
    """Where a branch meets the features that it began with; a module of its own, so that it can be
    compiled.
    """

    def forward(
        self, features: Tensor, branch: Tensor, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        grown = features + (scale * branch).to(features.dtype)
        return grown if weight is None else torch.lerp(features, grown, weight.to(features.dtype))


class Gate(nn.Module):
    """How much of a seed one example (or one token) takes, learned from its features."""

    def __init__(self, channels: int, channels_first: bool):
        super().__init__()
        self.channels_first = channels_first
        self.linear = nn.Linear(channels, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        if self.channels_first:
            return torch.sigmoid(self.linear(features.mean((2, 3)).to(self.linear.weight.dtype)))[
                :, :, None, None
            ]
        # token by token: a gate must not look at the future
        return torch.sigmoid(self.linear(features.to(self.linear.weight.dtype)))


class SqueezeExcite(nn.Module):
    """Channels weighed by what the whole image shows."""

    def __init__(self, channels: int):
        super().__init__()
        inner = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, inner, bias=False)
        self.excite = nn.Linear(inner, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        pooled = features.mean((2, 3))
        # the tiny slope keeps the branch alive when a small squeeze layer starts out all negative
        weights = torch.sigmoid(self.excite(nn.functional.leaky_relu(self.squeeze(pooled), 0.01)))
        return features * weights[:, :, None, None]


class CausalAttention(nn.Module):
    """Multi-head attention over earlier tokens only, so that it is safe inside a language model.

    Batch first.
    """

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        batch, tokens, channels = features.shape
        split = self.qkv(self.norm(features)).view(
            batch, tokens, 3, self.heads, channels // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, channels))


def group_norm(channels: int) -> nn.GroupNorm:
    """Groups of four channels where they divide evenly:

    statistics of one example, no running buffers.
    """
    return nn.GroupNorm(channels // 4 if channels % 4 == 0 else 1, channels)


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


def conv_stack(channels: int, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, group_norm(channels), nn.ReLU())


def conv_small(channels: int) -> nn.Module:
    return conv_stack(channels, conv(channels, channels, 1))


def conv_light(channels: int) -> nn.Module:
    return conv_stack(channels, conv(channels, channels, 3))


def conv_heavy(channels: int) -> nn.Module:
    return nn.Sequential(conv_light(channels), conv_light(channels))


def depthwise(channels: int) -> nn.Module:
    return conv_stack(
        channels, conv(channels, channels, 3, groups=channels), conv(channels, channels, 1)
    )


def bottleneck(channels: int) -> nn.Module:
    inner = max(1, channels // 4)
    squeeze = nn.Sequential(conv(channels, inner, 1), nn.ReLU(), conv(inner, inner, 3), nn.ReLU())
    return conv_stack(channels, squeeze, conv(inner, channels, 1))


def inverted_bottleneck(channels: int) -> nn.Module:
    inner = 2 * channels
    widen = nn.Sequential(
        conv(channels, inner, 1), nn.ReLU(), conv(inner, inner, 3, groups=inner), nn.ReLU()
    )
    return conv_stack(channels, widen, conv(inner, channels, 1))


def token_norm(channels: int) -> nn.Module:
    return nn.LayerNorm(channels)


def lora(channels: int) -> nn.Module:
    rank = max(1, min(8, channels // 4))
    return nn.Sequential(
        nn.Linear(channels, rank, bias=False), nn.Linear(rank, channels, bias=False)
    )


def perceptron(channels: int, hidden: int) -> nn.Module:
    widen, narrow = nn.Linear(channels, hidden), nn.Linear(hidden, channels, bias=False)
    return nn.Sequential(nn.LayerNorm(channels), widen, nn.GELU(), narrow)


def mlp_small(channels: int) -> nn.Module:
    return perceptron(channels, channels)


def mlp(channels: int) -> nn.Module:
    return perceptron(channels, 4 * channels)


def attention(channels: int) -> nn.Module:
    heads = 4
    if channels % heads:
        raise ValueError(
            f"attention splits the width into {heads} heads; {channels} is not divisible by {heads}"
        )
    return CausalAttention(channels, heads)


class Sham(nn.Module):
    """A seed without parameters or effect:

    it goes through every event of growing and adds nothing.
    """

    def forward(self, features: Tensor, /, *_: Any, **__: Any) -> Tensor:
        return features

    def blend(self, features: Tensor, alpha: Tensor, /, *_: Any, **__: Any) -> Tensor:
        return features


def scale_of(channels: int, channels_first: bool, value: float = 0.0) -> Tensor:
    """A seed's per-channel scale, shaped to multiply its features."""
    return torch.full((channels, 1, 1) if channels_first else (channels,), float(value))


CHILD = "grown"  # Name of the child that holds a module's fossils in a harvested network.


class Fossils(nn.Sequential):
    """The fossils of one module, run by that module's forward hook.

    Called as a child it does nothing: a Sequential calls all its children by itself, and these come
    after its hooks.
    """

    def forward(self, features: Tensor) -> Tensor:
        return features

    def grow(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`args` and `kwargs` are what else the module was called with: a copy of it needs them."""
        for fossil in self:
            features = fossil(features, *args, **kwargs)
        return features


def run_grown(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Forward hook of a module that carries fossils: its output goes through them."""
    fossils = module.get_submodule(CHILD)
    assert isinstance(fossils, Fossils)
    return fossils.grow(output, *args[1:], **kwargs)


def graft_fossils(site: nn.Module, fossils: Fossils) -> None:
    """Make `fossils` the last thing `site` does; its own children and parameter names stay as they
    are.
    """
    if hasattr(site, CHILD):
        raise ValueError(
            f"{type(site).__name__} already has an attribute {CHILD!r}; rename it before grafting"
        )
    site.add_module(CHILD, fossils)
    site.register_forward_hook(run_grown, with_kwargs=True)


def whole(model: nn.Module) -> Any:
    """A network as safetensors takes it:

    parts of one tensor, as an LSTM has them on CUDA, as tensors of their own.
    """
    state = {
        k: v.clone() if v.untyped_storage().nbytes() > v.nbytes else v
        for k, v in model.state_dict().items()
    }
    return SimpleNamespace(state_dict=lambda: state, load_state_dict=model.load_state_dict)
