"""Built-in hosts:

a chain of blocks with a slot after each, and a head. Slots are attached from outside, by `model`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from esper.kasmina.seeds import CausalAttention
from esper.leyline.errors import SettingError
from esper.leyline.slots import SlotConfig


@runtime_checkable
class SegmentedHost(Protocol):
    """A host that knows its own slots and can be run in parts."""

    def slot_config(self) -> SlotConfig: ...
    def example(self) -> Tensor: ...
    def forward_to_segment(
        self, slot_id: str, inputs: Tensor, from_segment: str | None = None
    ) -> Tensor: ...
    def forward_from_segment(self, slot_id: str, features: Tensor) -> Tensor: ...


class ChainHost(nn.Module):
    """A stem, blocks, a head.

    After each block comes a site: an identity whose output a slot may take over.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        head: nn.Module,
        example: Tensor,
        stem: nn.Module | None = None,
    ):
        super().__init__()
        if not blocks:
            raise SettingError("a host needs at least one block, got none.")
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.sites = nn.ModuleList(nn.Identity() for _ in blocks)
        self.head = head
        self._example = example

    def slot_config(self) -> SlotConfig:
        return SlotConfig.for_modules(f"sites.{index}" for index in range(len(self.blocks)))

    def copied_module(self, name: str) -> str:
        """What a copy at a site copies: the block before it. Every other module copies itself."""
        path, _, place = name.partition(".")
        return f"blocks.{place}" if path == "sites" and place.isdecimal() else name

    def insert_block(self, place: int, block: nn.Module) -> None:
        """Make a block the one at `place`, with a site after it."""
        self.blocks.insert(place, block)
        self.sites.insert(place, nn.Identity())

    def example(self) -> Tensor:
        """A batch of the right shape and type, for probing."""
        return self._example.to(next(self.parameters()).device)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._finish(self._enter(inputs), 0)

    def forward_to_segment(
        self, slot_id: str, inputs: Tensor, from_segment: str | None = None
    ) -> Tensor:
        """Features that arrive at `slot_id`, before that slot; `inputs` are those at `from_segment`
        if it is given.
        """
        end, start = self._index(slot_id), 0 if from_segment is None else self._index(from_segment)
        if start > end:
            raise SettingError(
                f"from_segment {from_segment} comes after {slot_id}; a pass goes forward only."
            )
        return self._advance(self._enter(inputs) if from_segment is None else inputs, start, end)

    def forward_from_segment(self, slot_id: str, features: Tensor) -> Tensor:
        """The output for features that arrive at `slot_id`; that slot and all after it are
        applied.
        """
        return self._finish(features, self._index(slot_id))

    def _enter(self, inputs: Tensor) -> Tensor:
        return self.blocks[0](inputs if self.stem is None else self.stem(inputs))

    def _finish(self, features: Tensor, start: int) -> Tensor:
        return self.head(self.sites[-1](self._advance(features, start, len(self.blocks) - 1)))

    def _advance(self, features: Tensor, start: int, end: int) -> Tensor:
        for index in range(start, end):
            features = self.blocks[index + 1](self.sites[index](features))
        return features

    def _index(self, slot_id: str) -> int:
        return self.slot_config().index_for_slot_id(slot_id)


def build_cnn_host(
    *,
    blocks: int = 3,
    base_channels: int = 8,
    in_channels: int = 3,
    image_size: int = 32,
    classes: int = 10,
) -> ChainHost:
    """Conv-norm-pool-ReLU blocks whose width doubles each time, then average pooling and a linear
    head.
    """
    _require_positive(**locals())
    widths = [base_channels * 2**index for index in range(blocks)]
    layers, size = [], image_size
    for inputs, outputs in pairwise([in_channels, *widths]):
        parts = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        if size >= 2:  # a small image stops shrinking, the blocks go on
            parts.append(nn.MaxPool2d(2))
            size //= 2
        layers.append(
            nn.Sequential(*parts, nn.ReLU())
        )  # the same as before the pool, at a quarter of the cost
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    return ChainHost(layers, head, torch.zeros(2, in_channels, image_size, image_size))


class BasicBlock(nn.Module):
    """Two convolutions with batch norm around a residual, and a ReLU behind it; the first may halve
    the image.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.branch = nn.Sequential(
            *_conv_bn(inputs, outputs, 3, stride), nn.ReLU(), *_conv_bn(outputs, outputs, 3)
        )
        is_same = stride == 1 and inputs == outputs
        self.skip = (
            nn.Identity() if is_same else nn.Sequential(*_conv_bn(inputs, outputs, 1, stride))
        )

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.relu(self.skip(features) + self.branch(features))


def _conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, bias=False
    ), nn.BatchNorm2d(outputs)


def build_resnet_host(
    *, width: int = 16, blocks: int = 2, stages: int = 3, in_channels: int = 3, classes: int = 10
) -> ChainHost:
    """A ResNet for small images:

    later stages halve the image and double the width. A slot follows every block.
    """
    _require_positive(**locals())
    layers = []
    for stage in range(stages):
        own = width * 2**stage
        # a copy fits behind every block that keeps its shape: all but the first of a later stage
        layers.append(BasicBlock(own // 2, own, stride=2) if stage else BasicBlock(own, own))
        layers += [BasicBlock(own, own) for _ in range(blocks - 1)]
    stem = nn.Sequential(*_conv_bn(in_channels, width, 3), nn.ReLU())
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 2 ** (stages - 1), classes)
    )
    return ChainHost(layers, head, torch.zeros(2, in_channels, 32, 32), stem)


def build_mlp_host(
    *, inputs: int, widths: Sequence[int] = (32, 32), classes: int = 10
) -> ChainHost:
    """Linear-ReLU blocks and a linear head."""
    _require_positive(
        inputs=inputs, classes=classes, **{f"widths_{i}": width for i, width in enumerate(widths)}
    )
    layers = [
        nn.Sequential(nn.Linear(before, after), nn.ReLU())
        for before, after in pairwise([inputs, *widths])
    ]
    return ChainHost(
        layers, nn.Linear(widths[-1] if widths else inputs, classes), torch.zeros(2, inputs)
    )


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.context:
            raise SettingError(
                f"{tokens.shape[1]} tokens are longer than this host's context of {self.context}."
            )
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class DecoderLayer(nn.Module):
    """Causal attention and a perceptron, both behind a norm and around a residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = CausalAttention(width, heads)
        inner = 4 * width
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.attention(features)
        return features + self.mlp(features)


def build_transformer_host(
    *,
    vocabulary: int,
    width: int = 64,
    layers: int = 4,
    heads: int = 4,
    context: int = 64,
    slots: int = 2,
) -> ChainHost:
    """A small GPT; its layers form `slots` groups with a slot after each group."""
    _require_positive(**locals())
    if width % heads:
        raise SettingError(f"width {width} is not divisible by {heads} heads; choose a multiple.")
    if slots > layers:
        raise SettingError(
            f"{slots} slots need as many layers, got {layers}; lower slots or raise layers."
        )
    cuts = [round(index * layers / slots) for index in range(slots + 1)]
    groups = [
        nn.Sequential(*(DecoderLayer(width, heads) for _ in range(start, end)))
        for start, end in pairwise(cuts)
    ]
    stem = TokenEmbedding(vocabulary, width, context)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return ChainHost(groups, head, torch.zeros(2, context, dtype=torch.long), stem)


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, got {value!r}.")
