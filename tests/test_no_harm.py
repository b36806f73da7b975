"""The default rule leaves a host alone that lacks data, and plants one that lacks capacity."""

from functools import partial

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.hosts import build_cnn_host
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import ActionTaken
from esper.trials.arms import Entry, run_entries
from user_models import MLP, labels_of, random_vectors

NOW, BEFORE = "heuristic", "heuristic:held_out_part=0"


def plantings(events):
    return [event.epoch for event in events if isinstance(event, ActionTaken)]


def digits(count, *, is_random=False, epochs=16):
    """A task of a few digits; labels at random can be memorised, and nothing else."""
    images, labels = (split.clone() for split in unpack(get_task("digits").load(None).train))
    if is_random:
        labels = torch.randint(10, (len(labels),), generator=torch.Generator().manual_seed(0))
    pairs = list(zip(images, labels.tolist(), strict=True))
    build = partial(build_cnn_host, blocks=2, base_channels=8, in_channels=1, image_size=8)
    return esper.task_from_datasets(
        "few_digits",
        pairs[:count],
        pairs[-100:],
        build,
        classes=10,
        batch=16,
        epochs=epochs,
        budget=8.0,
    )


def unpack(split):
    return split.inputs.float(), split.targets


def test_a_host_that_memorises_is_left_alone_and_was_not_before():
    task = digits(100, is_random=True)
    now, before = run_entries(task, [Entry("now", 1, NOW), Entry("before", 1, BEFORE)])
    assert plantings(now.events) == []
    assert plantings(before.events)


def test_a_host_that_learns_is_planted_as_before():
    task = digits(800, epochs=8)
    now, before = run_entries(task, [Entry("now", 1, NOW), Entry("before", 1, BEFORE)])
    assert plantings(now.events) == plantings(before.events)
    assert plantings(now.events)


def test_a_host_that_lacks_capacity_is_planted():
    (run,) = run_entries(get_task("blobs"), [Entry("heuristic", 1, NOW)])
    assert plantings(run.events)[0] == 2
    assert run.result.test_accuracy > 0.9


def test_a_trained_host_is_planted_at_once():
    task = digits(800, epochs=12)
    (trained,) = run_entries(task, [Entry("never", 1, "never")])
    (run,) = run_entries(task, [Entry("now", 1, NOW, weights=trained.network.state_dict())])
    assert plantings(run.events)[0] == 1


# -- in a loop of one's own ------------------------------------------------------------------------


def grown(labels, epochs, *, is_told=True, rate=0.01):
    """An MLP that trains on 24 vectors, whose labels are given, and is measured on 200 others."""
    torch.manual_seed(0)
    inputs, held_out = random_vectors(24, seed=1), random_vectors(200, seed=2)
    garden = esper.grow(MLP(), slots=["middle"], example=inputs, budget=6.0)
    optimizer = torch.optim.Adam(garden.parameters(), lr=rate)
    garden.attach(optimizer)
    for _ in range(epochs):
        losses = []
        for rows in torch.randperm(24).split(6):
            loss = nn.functional.cross_entropy(garden.model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        def evaluate():
            values = garden.model(held_out)
            return nn.functional.cross_entropy(values, labels_of(held_out), reduction="none")

        garden.step(evaluate, torch.stack(losses).mean() if is_told else None)
    return plantings(garden.history)


RANDOM_LABELS = torch.randint(3, (24,), generator=torch.Generator().manual_seed(0))


def test_a_garden_that_memorises_is_left_alone_if_it_is_told_the_training_loss():
    """At first both losses fall, as the outputs find the labels' shares."""
    told, silent = (grown(RANDOM_LABELS, 18, is_told=is_told) for is_told in (True, False))
    assert told == [epoch for epoch in silent if epoch < 12]
    assert silent[-1] >= 15


@pytest.mark.parametrize("is_told", [True, False])
def test_a_garden_of_a_trained_flat_host_is_planted_at_once(is_told):
    assert grown(RANDOM_LABELS, 4, is_told=is_told, rate=1e-9)[0] == 1
