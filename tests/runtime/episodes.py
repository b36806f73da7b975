"""Small populations and the moves of an episode, for the tests of the runtime."""

from dataclasses import replace

import torch

from esper.episodes import keepable
from esper.leyline.factored_actions import LifecycleOp
from esper.leyline.lifecycle import StageLengths
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Splits, TensorSplit, carve
from esper.runtime.tasks.registry import get_task

GERMINATE, CULL, FOSSILIZE = LifecycleOp.GERMINATE, LifecycleOp.CULL, LifecycleOp.FOSSILIZE
QUICK = StageLengths(ramp=2, embargo=0, resetting=0)


def image_splits(count=240, size=8, channels=1, contrast=40):
    """Made-up pictures: noise, the second class a little brighter than the first."""
    draw = torch.Generator().manual_seed(5)

    def part(number):
        labels = torch.randint(2, (number,), generator=draw)
        images = (
            torch.randint(0, 180, (number, channels, size, size), generator=draw)
            + contrast * labels[:, None, None, None]
        )
        return TensorSplit(images.to(torch.uint8), labels, scale=1 / 128, shift=-0.7)

    train, validation = carve(part(count), share=0.25)
    return Splits(train, validation, SealedSplit(part(count // 4)))


IMAGES = replace(
    get_task("digits"),
    load=lambda root: image_splits(),
    batch=32,
    epoch_examples=80,
    lengths=QUICK,
    epochs=12,
    augment=True,
)
"""Two slots, batch norm, augmentation, 81 examples in an epoch."""
BLOBS = replace(get_task("blobs"), batch=64, lr=0.05, scale_at_birth=0.0, lengths=QUICK)

GROWTH = {
    0: [(GERMINATE, "r0c0", "conv_light", "gated")],
    1: [(GERMINATE, "r0c1", "norm", "linear")],
    3: [(FOSSILIZE, "r0c0"), (CULL, "r0c1")],
    5: [(GERMINATE, "r0c0", "conv_small", "linear")],
}
"""An episode with every kind of change: what is done after which epoch."""

BLOBS_GROWTH = {
    0: [(GERMINATE, "r0c0", "mlp", "gated")],
    3: [(FOSSILIZE, "r0c0")],
    4: [(GERMINATE, "r0c1", "lora")],
}
"""The same for hosts of blobs."""

COPIES = {
    0: [(GERMINATE, "r0c0", "copy", "linear"), (GERMINATE, "r0c1", "copy_zero", "linear")],
    3: [(FOSSILIZE, "r0c0"), (CULL, "r0c1")],
    5: [(GERMINATE, "r0c0", "copy", "gated"), (GERMINATE, "r0c1", "copy", "linear")],
}
"""The same with copies of blocks, one of them a copy of a copy."""


def act(population, host, op, slot="r0c0", blueprint=None, blend="linear"):
    space = population.views()[host].space
    place = space.slots.index_for_slot_id(slot)
    return population.apply(
        host, (op, place, space.blueprint_index(blueprint), space.blend_index(blend))
    )


def keep_measured(population):
    """The standing order of rules: every measured seed of every host is fossilized."""
    for host, view in enumerate(population.views()):
        for choice in keepable(view):
            population.apply(host, choice)


def play(population, epochs, script=None, start=0, keeps=True):
    """Epochs of train, measure, act, keep what was measured if it `keeps`, tick.

    `script`: host -> epoch -> moves; returns what the governor did.
    """
    rollbacks = []
    for epoch in range(start, start + epochs):
        population.train_epoch()
        rollbacks += population.evaluate()
        for host, moves in (script or {}).items():
            for move in moves.get(epoch, []):
                act(population, host, *move)
        if keeps:
            keep_measured(population)
        population.tick()
    return rollbacks


def print_of(population, host=0):
    """Everything that says where one host is: tensors, states, readings, its place in the data."""
    run = population.runs[host]
    tensors = {name: value.detach().clone() for name, value in run.tensors().items()}
    stream = {f"stream {key}": value for key, value in run.plan.stream.state().items()}
    states = {slot.slot_id: (slot.state, list(slot.fossil_names)) for slot in run.slots}
    reports = {key: report.metrics for key, report in population.reports()[host].items()}
    return (
        tensors
        | stream
        | {"states": states, "reports": reports, "reading": run.reading, "epoch": run.epoch}
    )


def differing(first, second):
    """Names of what is not equal to the bit."""
    names = first.keys() ^ second.keys()
    for name in first.keys() & second.keys():
        left, right = first[name], second[name]
        same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        names = names if same else names | {name}
    return sorted(names)


def epochs(task, seeds, epochs=7, script=None, keeps=True, **options):
    """A population after `epochs`; `script` is played by every host unless it is by host."""
    population = Population(task, seeds, **options)
    by_host = dict.fromkeys(range(len(seeds)), GROWTH) if script is None else script
    play(population, epochs, by_host, keeps=keeps)
    return population
