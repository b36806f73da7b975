"""Built-in hosts: a chain of blocks with a site for a slot after each, and a head.

Slots are attached from outside, by `model`.
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
    """A host that knows its own slots and can be run in parts.

    A counterfactual then runs only what comes after the slot.
    """

    def slot_config(self) -> SlotConfig:
        """The slots, each with the module that it sits on."""
        ...

    def example(self) -> Tensor:
        """A batch of the right shape and type."""
        ...

    def forward_to_segment(
        self, slot_id: str, inputs: Tensor, from_segment: str | None = None
    ) -> Tensor:
        """Features that arrive at a slot; `inputs` are those at `from_segment` if it is given."""
        ...

    def forward_from_segment(self, slot_id: str, features: Tensor) -> Tensor:
        """The output for features that arrive at a slot."""
        ...


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
        """One slot after each block, at its site."""
        return SlotConfig.for_modules(f"sites.{index}" for index in range(len(self.blocks)))

    def copied_module(self, name: str) -> str:
        """What a copy at a site copies: the block before it. Every other module copies itself."""
        path, _, index = name.partition(".")
        return f"blocks.{index}" if path == "sites" and index.isdecimal() else name

    def insert_block(self, index: int, block: nn.Module) -> None:
        """Make a block the one with this index, with a site after it."""
        self.blocks.insert(index, block)
        self.sites.insert(index, nn.Identity())

    def example(self) -> Tensor:
        """A batch of the right shape and type, for probing."""
        return self._example.to(next(self.parameters()).device)

    def forward(self, inputs: Tensor) -> Tensor:
        """The head's output."""
        return self._finish(self._enter(inputs), 0)

    def forward_to_segment(
        self, slot_id: str, inputs: Tensor, from_segment: str | None = None
    ) -> Tensor:
        """Features that arrive at `slot_id`, before that slot.

        `inputs` are the host's, or the features at `from_segment` if it is given.
        """
        end = self._index(slot_id)
        if from_segment is None:
            return self._advance(self._enter(inputs), 0, end)
        start = self._index(from_segment)
        if start > end:
            raise SettingError(
                f"from_segment {from_segment} comes after {slot_id}; a pass goes forward only."
            )
        return self._advance(inputs, start, end)

    def forward_from_segment(self, slot_id: str, features: Tensor) -> Tensor:
        """The output for features that arrive at `slot_id`.

        That slot and all after it are applied.
        """
        return self._finish(features, self._index(slot_id))

    def _enter(self, inputs: Tensor) -> Tensor:
        """Features that arrive at the first slot."""
        stemmed = inputs if self.stem is None else self.stem(inputs)
        return self.blocks[0](stemmed)

    def _finish(self, features: Tensor, start: int) -> Tensor:
        """The output for features that arrive at the slot with index `start`."""
        last = self._advance(features, start, len(self.blocks) - 1)
        return self.head(self.sites[-1](last))

    def _advance(self, features: Tensor, start: int, end: int) -> Tensor:
        """From what arrives at slot `start` to what arrives at slot `end`."""
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
    """Conv-norm-pool-ReLU blocks whose width doubles each time; average pooling, a linear head."""
    _require_positive(
        blocks=blocks,
        base_channels=base_channels,
        in_channels=in_channels,
        image_size=image_size,
        classes=classes,
    )
    widths = [base_channels * 2**index for index in range(blocks)]
    layers = []
    size = image_size
    for inputs, outputs in pairwise([in_channels, *widths]):
        parts = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        if size >= 2:  # a small image stops shrinking, the blocks continue
            parts.append(nn.MaxPool2d(2))
            size //= 2
        # a ReLU after the pool gives the same as one before it, at a quarter of the cost
        layers.append(nn.Sequential(*parts, nn.ReLU()))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    return ChainHost(layers, head, torch.zeros(2, in_channels, image_size, image_size))


class BasicBlock(nn.Module):
    """Two convolutions with batch norm in a residual branch, and a ReLU behind the sum.

    With stride 2 the first convolution halves the image.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        first = _conv_bn(inputs, outputs, 3, stride)
        second = _conv_bn(outputs, outputs, 3)
        self.branch = nn.Sequential(*first, nn.ReLU(), *second)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(*_conv_bn(inputs, outputs, 1, stride))

    def forward(self, features: Tensor) -> Tensor:
        """The ReLU of skip plus branch."""
        return nn.functional.relu(self.skip(features) + self.branch(features))


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias, and a batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def build_resnet_host(
    *, width: int = 16, blocks: int = 2, stages: int = 3, in_channels: int = 3, classes: int = 10
) -> ChainHost:
    """A ResNet for small images, with a slot after every block.

    Later stages halve the image and double the width.
    """
    _require_positive(
        width=width, blocks=blocks, stages=stages, in_channels=in_channels, classes=classes
    )
    layers = []
    for stage in range(stages):
        outputs = width * 2**stage
        # a copy fits behind every block that keeps its shape: all but the first of a later stage
        if stage:
            layers.append(BasicBlock(outputs // 2, outputs, stride=2))
        else:
            layers.append(BasicBlock(outputs, outputs))
        layers += [BasicBlock(outputs, outputs) for _ in range(blocks - 1)]
    stem = nn.Sequential(*_conv_bn(in_channels, width, 3), nn.ReLU())
    last_width = width * 2 ** (stages - 1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last_width, classes))
    return ChainHost(layers, head, torch.zeros(2, in_channels, 32, 32), stem)


def build_mlp_host(
    *, inputs: int, widths: Sequence[int] = (32, 32), classes: int = 10
) -> ChainHost:
    """Linear-ReLU blocks and a linear head."""
    named_widths = {f"widths_{index}": width for index, width in enumerate(widths)}
    _require_positive(inputs=inputs, classes=classes, **named_widths)
    layers = [
        nn.Sequential(nn.Linear(before, after), nn.ReLU())
        for before, after in pairwise([inputs, *widths])
    ]
    last_width = widths[-1] if widths else inputs
    return ChainHost(layers, nn.Linear(last_width, classes), torch.zeros(2, inputs))


class TokenEmbedding(nn.Module):
    """Tokens as vectors, with a learned vector for each position added."""

    def __init__(self, vocabulary: int, width: int, context: int):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors [B, T, C] for tokens [B, T]."""
        length = tokens.shape[1]
        if length > self.context:
            raise SettingError(
                f"{length} tokens are longer than this host's context of {self.context}; give "
                f"shorter sequences, or build the host with a larger context."
            )
        return self.token(tokens) + self.position.weight[:length]


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
        """Features [B, T, C] after both."""
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
    _require_positive(
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        context=context,
        slots=slots,
    )
    if width % heads:
        raise SettingError(f"width {width} is not divisible by {heads} heads; choose a multiple.")
    if slots > layers:
        raise SettingError(
            f"{slots} slots need as many layers, got {layers}; lower slots or raise layers."
        )
    cuts = [round(index * layers / slots) for index in range(slots + 1)]
    groups = []
    for start, end in pairwise(cuts):
        group = [DecoderLayer(width, heads) for _ in range(start, end)]
        groups.append(nn.Sequential(*group))
    stem = TokenEmbedding(vocabulary, width, context)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return ChainHost(groups, head, torch.zeros(2, context, dtype=torch.long), stem)


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, got {value!r}.")
