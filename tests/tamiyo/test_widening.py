"""Hosts of fewer slots in the action space of their family's widest list of slots."""

from dataclasses import replace

import numpy as np
import pytest

from esper.episodes import Episodes
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE, OP_WAIT
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import masks_for, padded_masks
from esper.tamiyo.readings import layout_for, observe
from esper.tamiyo.widening import narrow
from runtime.test_differing_hosts import DEEP


@pytest.fixture(scope="module")
def episodes():
    """A host of two slots and one of three, after their first epoch."""
    seeds = {}
    for seed in range(50):
        depth = Population(DEEP, [seed]).runs[0].variation.depth
        seeds.setdefault(depth, seed)
        if len(seeds) == 2:
            break
    playing = Episodes(Population(DEEP, [seeds[2], seeds[3]]))
    playing.train()
    return playing


def test_what_a_host_lacks_is_masked(episodes):
    _, slots, blueprints, _ = episodes.population.space.sizes
    wide = padded_masks(episodes.views, ObservationLayout(slots, blueprints))
    own = masks_for(episodes.views[0])
    assert wide["slot"].shape == (2, 4, 3)
    assert wide["blueprint"].shape == (2, 3, blueprints)
    assert (wide["op"][0] == own["op"]).all()
    assert (wide["blend"][0] == own["blend"]).all()
    assert (wide["slot"][0, :, :2] == own["slot"]).all()
    assert not wide["slot"][0, :, 2].any()
    assert (wide["blueprint"][0, :2] == own["blueprint"]).all()
    assert np.flatnonzero(wide["blueprint"][0, 2]).tolist() == [0]
    for head, mask in masks_for(episodes.views[1]).items():
        assert (wide[head][1] == mask).all(), head


def test_what_a_host_lacks_reads_zero(episodes):
    _, slots, blueprints, _ = episodes.population.space.sizes
    layout = ObservationLayout(slots, blueprints)
    sights = [episodes.sight(host) for host in range(2)]
    shallow, deep = observe(sights, layout)
    seen = dict(zip(layout.names, shallow, strict=True))
    assert not any(value for name, value in seen.items() if name.startswith("slot2."))
    own = dict(zip(layout_for(episodes.views[0]).names, observe(sights[:1])[0], strict=True))
    assert len(own) < len(seen)
    assert all(seen[name] == value for name, value in own.items())
    assert (deep == observe(sights[1:])[0]).all()


def test_a_choice_is_the_same_by_name():
    population = Population(get_task("blobs"), [1])
    space = population.space
    one = replace(space, slots=space.slots.choose(["r0c1"]))
    choice = (OP_GERMINATE, 1, 2, 1)
    assert narrow(choice, space, one) == (OP_GERMINATE, 0, 2, 1)
    assert narrow(choice, space, space) == choice
    assert narrow((OP_CULL, 0, 0, 0), space, one) is None
    assert narrow((OP_WAIT, 0, 0, 0), space, one) == (0, 0, 0, 0)


def test_an_act_in_a_slot_that_a_host_lacks_is_refused(episodes):
    space = episodes.population.space
    (event,) = episodes.act(0, (OP_GERMINATE, 2, 1, 0), space)
    assert (type(event).__name__, event.slot) == ("ActionRefused", "r0c2")
    assert "no slot r0c2" in str(event)
    planted = episodes.act(1, (OP_GERMINATE, 2, 1, 0), space)
    assert planted[0].slot == "r0c2"
