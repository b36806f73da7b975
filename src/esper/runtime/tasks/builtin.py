"""The tasks that come with Esper, each as one literal; a variant names only what differs."""

from dataclasses import replace
from functools import partial

from torch import nn

from esper.kasmina.hosts import (
    ChainHost,
    build_cnn_host,
    build_mlp_host,
    build_resnet_host,
    build_transformer_host,
)
from esper.leyline.lifecycle import StageLengths
from esper.runtime.tasks import data
from esper.runtime.tasks.families import Span, Variety
from esper.runtime.tasks.gymnasium_ids import BUILT_IN_NAMES
from esper.runtime.tasks.task import Task

_OFFICIAL = "official files under --data-root"


def _linear_host() -> ChainHost:
    """Two linear layers: a linear map however it is trained."""
    host = build_mlp_host(inputs=2, widths=(8, 8), classes=2)
    for block in host.blocks:
        assert isinstance(block, nn.Sequential)
        del block[1]
    return host


DIGITS = Task(
    name="digits",
    summary="8 x 8 handwritten digits, 2-block CNN",
    source="scikit-learn",
    load=data.load_digits,
    build_host=partial(build_cnn_host, blocks=2, base_channels=4, in_channels=1, image_size=8),
    chance=0.1,
    batch=64,
    epochs=40,
)


def _varied_cnn(*, width: int, depth: int = 2, **sizes: int) -> ChainHost:
    """A CNN of a width and a depth that hosts draw."""
    return build_cnn_host(blocks=depth, base_channels=width, **sizes)


DIGITS_VARIED = replace(
    DIGITS,
    name="digits_varied",
    summary="digits, where each host has other examples, label noise and width",
    batch=32,
    epochs=30,
    budget=8.0,
    varies=Variety(
        variations=4096,
        examples=Span(60, 1000, "log"),
        noise=Span(0, 0.45, exact=0.5),
        width=Span.of(2, 3, 4, 6, 8),
        build_host=partial(_varied_cnn, in_channels=1, image_size=8),
    ),
)

BLOBS = Task(
    name="blobs",
    summary="sign of x * y in a square: a linear host cannot, one MLP seed can",
    source="generated",
    load=data.load_blobs,
    build_host=_linear_host,
    chance=0.5,
    batch=32,
    epochs=16,
    blueprints=("lora", "mlp"),
    budget=16.0,
)

PYTHON_TEXT = Task(
    name="python_text",
    summary="source of the standard library, bytes",
    source="this Python",
    load=data.load_python_text,
    build_host=partial(
        build_transformer_host, vocabulary=256, width=64, layers=2, context=64, slots=2
    ),
    chance=1 / 256,
    batch=64,
    optimizer="adamw",
    lr=2e-3,
    weight_decay=0.01,
    clip_norm=1.0,
    epoch_examples=4096,
    blueprints=("copy", "lora", "mlp_small", "mlp", "attention", "norm"),
    budget=2.0,
    lengths=StageLengths(ramp=3),
)

SHAKESPEARE = replace(
    PYTHON_TEXT,
    name="shakespeare",
    summary="tinyshakespeare, bytes",
    source=_OFFICIAL,
    load=data.load_shakespeare,
)

TINYSTORIES = replace(
    PYTHON_TEXT,
    name="tinystories",
    summary="TinyStories, bytes",
    source=_OFFICIAL,
    load=data.load_tinystories,
)

# A byte GPT of 2 blocks grows to at most 8 by copies; 1 of compute is 8 blocks for 3,000 steps.
_code_host = partial(build_transformer_host, vocabulary=256, width=256, context=256)
CODE = Task(
    name="code",
    summary="Python sources, bytes, GPT of 2 blocks",
    source="this Python",
    load=partial(data.load_code, context=256, size=2**26),
    build_host=partial(_code_host, layers=2, slots=2),
    chance=1 / 256,
    batch=64,
    optimizer="adamw",
    beta2=0.95,
    lr=4e-3,
    weight_decay=0.01,
    clip_norm=1.0,
    clock="compute",
    reference=(partial(_code_host, layers=8, slots=8), 3000 * 64),
    epoch_examples=9600,
    held_out=512,
    blueprints=("copy", "copy_zero"),
    budget=3.67,
    # copies at full strength from their first step did best in prototypes
    lengths=StageLengths(ramp=0),
)

# Its 1 of compute is 8 blocks for 400 steps.
_small_code_host = partial(build_transformer_host, vocabulary=256, width=32, context=32)
CODE_TINY = replace(
    CODE,
    name="code_tiny",
    summary="the same in small, for a CPU",
    load=partial(data.load_code, context=32, size=2**20),
    build_host=partial(_small_code_host, layers=2, slots=2),
    batch=16,
    lr=1e-3,
    reference=(partial(_small_code_host, layers=8, slots=8), 400 * 16),
    epoch_examples=320,
    held_out=128,
    epochs=10,
    budget=2.8,
)

CIFAR10 = Task(
    name="cifar10",
    summary="32 x 32 photographs, 3-block CNN",
    source=_OFFICIAL,
    load=data.load_cifar10,
    build_host=build_cnn_host,
    chance=0.1,
    batch=256,
    lr=0.2,
    augment=True,
    # a seed at full strength from its first epoch harms a trained host: +2.0 points on CIFAR-10,
    # raised so +4.9
    lengths=StageLengths(ramp=3),
    scale_at_birth=0.3,
)

CIFAR10_DEEP = replace(
    CIFAR10,
    name="cifar10_deep",
    summary="32 x 32 photographs, 5-block CNN",
    build_host=partial(build_cnn_host, blocks=5),
)

CIFAR10_RESNET = replace(
    CIFAR10,
    name="cifar10_resnet",
    summary="32 x 32 photographs, ResNet of 6 blocks",
    build_host=build_resnet_host,
    lr=0.4,
    # the last block of each stage
    slots=("r0c1", "r0c3", "r0c5"),
    blueprints=("copy_zero", "copy"),
    budget=3.3,
)

FASHION_MNIST = replace(
    CIFAR10,
    name="fashion_mnist",
    summary="28 x 28 articles of clothing, 3-block CNN",
    load=data.load_fashion_mnist,
    build_host=partial(build_cnn_host, in_channels=1, image_size=28),
    augment=False,
)

FASHION_VARIED = replace(
    FASHION_MNIST,
    name="fashion_varied",
    summary="clothing at 14 x 14, hosts of other examples, noise, width, depth and rate",
    load=partial(data.load_half_size, load=data.load_fashion_mnist),
    build_host=partial(build_cnn_host, blocks=2, in_channels=1, image_size=14),
    batch=32,
    lr=0.1,
    epochs=24,
    budget=8.0,
    varies=Variety(
        variations=4096,
        examples=Span(120, 2000, "log"),
        noise=Span(0, 0.4, exact=0.5),
        width=Span.of(2, 3, 4, 6, 8),
        depth=Span(2, 3),
        lr=Span(0.03, 0.2, "log"),
        build_host=partial(_varied_cnn, in_channels=1, image_size=14),
    ),
)

CIFAR10_VARIED = replace(
    CIFAR10,
    name="cifar10_varied",
    summary="photographs at 16 x 16, hosts of other examples, noise, width, depth and rate",
    load=partial(data.load_half_size, load=data.load_cifar10),
    build_host=partial(build_cnn_host, blocks=2, image_size=16),
    batch=32,
    lr=0.1,
    # a shift by 4 of 16 pixels is too much
    augment=False,
    epochs=24,
    budget=8.0,
    varies=Variety(
        variations=4096,
        examples=Span(200, 3000, "log"),
        noise=Span(0, 0.3, exact=0.5),
        width=Span.of(3, 4, 6, 8, 12),
        depth=Span(2, 3),
        lr=Span(0.03, 0.2, "log"),
        build_host=partial(_varied_cnn, in_channels=3, image_size=16),
    ),
)

BUILT_IN = (
    DIGITS,
    DIGITS_VARIED,
    BLOBS,
    CODE,
    CODE_TINY,
    PYTHON_TEXT,
    SHAKESPEARE,
    TINYSTORIES,
    FASHION_MNIST,
    FASHION_VARIED,
    CIFAR10,
    CIFAR10_VARIED,
    CIFAR10_DEEP,
    CIFAR10_RESNET,
)
assert tuple(task.name for task in BUILT_IN) == BUILT_IN_NAMES, "Gymnasium knows other tasks"
