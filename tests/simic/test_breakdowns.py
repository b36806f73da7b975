"""A host and its twin, and hosts that break:

what the environment makes of them, to pay for and to look at.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.runtime.host import EpochReading
from esper.simic.environment import MAX_ROLLBACKS, bridge_gaps, typical_change
from esper.telemetry.events import HostRolledBack, StageChanged
from simic.growths import (
    BOTH,
    BUSY,
    PICTURES,
    PLANT,
    POINTS,
    WAIT,
    always,
    differing_steps,
    grow,
    kinds,
    play,
    poisoner,
    scripted,
    wander,
)

BEYOND = ("accuracy_beyond_twin", "loss_beyond_twin")
every_task = pytest.mark.parametrize("task", [POINTS, PICTURES], ids=lambda task: task.name)


# -- the twin --------------------------------------------------------------------------------------


@every_task
def test_at_the_first_observation_a_host_equals_its_twin_exactly(task, twins):
    env = grow(task, 3, twins)
    env.reset(seed=0)
    for host in range(3):
        assert env.population.runs[host].reading == env.twin(host)
        assert (env.accuracy[host], env.loss[host]) == (
            env.twin(host).held_out_accuracy,
            env.twin(host).held_out_loss,
        )


UNSTEADY = {
    "points": POINTS,
    "pictures": PICTURES,
    "loss explodes": replace(POINTS, lr=20.0, epochs=9),
    "batch norm explodes": replace(PICTURES, lr=1.0, epochs=9),
    "NaN from the first epoch on": replace(POINTS, lr=1e30, clip_norm=1e30),
}


@pytest.mark.parametrize("task", UNSTEADY.values(), ids=UNSTEADY.keys())
def test_waiting_earns_exactly_nothing_beyond_the_twin(task, twins):
    """Even where host and twin break down: they break down alike."""
    env = grow(task, 3, twins, weights=BOTH)
    for step in play(env, always(WAIT))[1:]:
        for parts in step.info["reward_parts"]:
            assert [
                parts.get(name, 0.0)
                for name in (*BEYOND, "lasting_accuracy", "lasting_loss", "rent")
            ] == [0.0] * 5
    if task is POINTS or task is PICTURES:
        assert all(sum(parts.values()) == 0.0 for parts in step.info["reward_parts"])
    else:
        assert any(governor.rollbacks for governor in env.population.governors)


READING = EpochReading(0, 1.0, 0.5, 1.0, 0.1, held_out_loss=0.9, held_out_accuracy=0.4)


def test_a_twin_without_a_reading_stands_where_it_stood():
    gap = replace(READING, epoch=1, held_out_loss=math.nan)
    later = replace(READING, epoch=2, held_out_loss=0.5)
    assert bridge_gaps([READING, gap, replace(gap, held_out_loss=None), later], 0.25) == [
        READING
    ] * 3 + [later]


def test_a_twin_that_breaks_at_once_stands_at_guessing():
    steady = bridge_gaps([replace(READING, held_out_loss=None), READING], 0.25)
    assert (steady[0].held_out_loss, steady[0].held_out_accuracy) == (math.log(4), 0.25)
    assert steady[1] == READING


@pytest.mark.parametrize(
    ("losses", "unit"),
    [
        ((0.9, 0.5, 0.3), 0.6),
        ((0.9, 0.3, 0.8), 0.6),
        ((0.69, 0.69, 0.688), 0.1 * math.log(4)),
        ((0.9, 1e9), None),
    ],
)
def test_the_unit_of_loss_is_how_far_the_twin_falls_but_never_as_small_as_noise(losses, unit):
    twin = [replace(READING, held_out_loss=loss) for loss in losses]
    assert typical_change(twin, 0.25) == pytest.approx(0.1 * math.log(4) if unit is None else unit)


# -- the governor ----------------------------------------------------------------------------------


@every_task
def test_a_poisoned_host_is_brought_back_and_fined_alone(task, twins):
    calm = play(grow(task, 3, twins, weights=BOTH), wander)
    env = grow(task, 3, twins, weights=BOTH)
    lived = play(env, wander, meddle=poisoner(1, 2))
    told = [len(kinds(step.info["events"][1], HostRolledBack)) for step in lived]
    assert told == [int(step == 3) for step in range(len(lived))]
    fines = [step.info["reward_parts"][1]["breakdown"] for step in lived[1:]]
    assert fines == [-BOTH["breakdown"] if step == 2 else 0.0 for step in range(len(fines))]
    assert not lived[3].terminated.any()
    assert all(np.isfinite(step.obs).all() and np.isfinite(step.rewards).all() for step in lived)
    assert differing_steps(calm, lived, hosts=(0, 2)) == []


def test_a_poisoned_host_stands_where_it_stood(twins):
    stood = []

    def meddle(env, step):
        stood.append((env.accuracy.tolist(), env.loss.tolist()))
        poisoner(0, 2)(env, step)

    play(grow(POINTS, 1, twins), scripted(BUSY), meddle=meddle)
    assert stood[3] == stood[2] != stood[1]


def test_a_rollback_that_culls_a_seed_is_told_with_its_seed(twins):
    env = grow(POINTS, 1, twins)
    lived = play(env, scripted({0: PLANT}), steps=3, meddle=poisoner(0, 2))
    (culled,) = [
        event
        for event in kinds(lived[3].info["events"][0], StageChanged)
        if event.after == "CULLED"
    ]
    assert (culled.slot, culled.blueprint) == ("r0c0", "mlp")
    assert env.population.runs[0].model.active_seeds == 0


def test_the_third_rollback_ends_an_episode_with_the_fine_on_that_step(twins):
    env = grow(POINTS, 2, twins, weights=BOTH)
    lived = play(env, always(WAIT), steps=6, meddle=poisoner(0, 0, 2, 4))
    assert [step.terminated[0] for step in lived] == [False] * 5 + [True, False]
    assert not any(step.truncated.any() for step in lived)
    fines = [step.info["reward_parts"][0]["breakdown"] for step in lived[1:6]]
    assert fines == [-0.1, 0.0, -0.1, 0.0, -1.0]
    assert MAX_ROLLBACKS == 3
    assert env.population.governors[0].rollbacks == 0  # the next episode has begun


def test_a_host_that_is_given_up_leaves_nothing_that_lasts(twins):
    env = grow(replace(POINTS, epoch_examples=600), 1, twins, weights=BOTH)
    lived = play(env, scripted(BUSY), steps=6, meddle=poisoner(0, 3, 4, 5))
    assert lived[-1].terminated[0]
    assert env.population.runs[0].model.fossilized_seeds == 1
    assert env.accuracy[0] > env.twin(0).held_out_accuracy
    assert [
        lived[-1].info["reward_parts"][0][name] for name in ("lasting_accuracy", "lasting_loss")
    ] == [0.0, 0.0]


def test_a_host_that_breaks_at_once_stands_at_guessing_and_is_told_so(twins):
    env = grow(UNSTEADY["NaN from the first epoch on"], 2, twins)
    env.accuracy[:], env.loss[:] = 0.9, 0.1  # of earlier episodes
    step = play(env, always(WAIT), steps=0)[0]
    assert (env.accuracy.tolist(), env.loss.tolist()) == ([0.5] * 2, [math.log(2)] * 2)
    assert [len(kinds(events, HostRolledBack)) for events in step.info["events"]] == [1, 1]


# -- observations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", UNSTEADY.values(), ids=UNSTEADY.keys())
def test_observations_stay_in_the_declared_box(task, twins):
    env = grow(task, 2, twins)
    for step in play(env, wander, steps=task.epochs + 1, meddle=poisoner(1, 1)):
        assert step.obs.dtype == np.float32
        assert env.observation_space.contains(step.obs)


def test_telemetry_is_a_part_of_the_observation_that_can_be_left_out(twins):
    with_it, without = (
        play(grow(POINTS, 1, twins, lacking=lacking), wander) for lacking in ((), ("telemetry",))
    )
    names = grow(POINTS, 1, twins).layout.names
    of_telemetry = [name.endswith(("gradient_ratio", "score_ratio")) for name in names]
    for left, right in zip(with_it, without, strict=True):
        assert np.array_equal(left.obs[0] * ~np.array(of_telemetry), right.obs[0])
        assert left.obs[:, of_telemetry].any()
    assert [step.rewards[0] for step in with_it] == [step.rewards[0] for step in without]
