"""Growth as an environment:

the order of a step, its ends, what `info` says, hosts that know nothing of each other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE
from esper.leyline.stages import SeedStage
from esper.runtime.charges import network_flops
from esper.runtime.population import Population
from esper.simic.environment import typical_change
from esper.simic.host_seeds import draw_host_seeds
from esper.simic.rewards import StepFacts, in_units, reward_parts
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import compute_batch_masks, pad_masks
from esper.telemetry.events import ActionRefused, ActionTaken, HostEpoch, StageChanged
from simic.growths import (
    BUSY,
    EVERY_TERM,
    PICTURES,
    PLANT,
    POINTS,
    WAIT,
    always,
    decide,
    differing_steps,
    grow,
    kinds,
    play,
    poisoner,
    refusals,
    scripted,
    twin_readings,
    wander,
)

PARTS = {*EVERY_TERM, "contribution:r0c0", "contribution:r0c1"} - {"contribution"}

every_task = pytest.mark.parametrize("task", [POINTS, PICTURES], ids=lambda task: task.name)


# -- the order of a step ---------------------------------------------------------------------------


def live_by_hand(task, seed, script, twin):
    """The same episode without an environment:

    op, tick, train, measure; reading and facts after each decision.
    """
    population = Population(task, [seed])
    run = population.runs[0]
    population.train_epoch()
    population.evaluate()
    lived = []
    readings = {}
    worth_before = (dict.fromkeys(run.model.slot_config.slot_ids, 0.0), 0.0)
    for step in range(task.epochs - 1):
        before = run.reading
        choice = script.get(step, WAIT)
        population.apply(0, choice)
        population.tick()
        population.train_epoch()
        assert population.evaluate() == []
        for verdict in population.prune(0):
            assert verdict.is_kept
            readings[run.slots[0].fossils[0]] = verdict.contribution.mean
        if run.epoch == task.epochs:
            remains = population.measure_remains(0)
            assert remains.left_out == ("r0c0",)  # planted a second time, and not decided about
            readings |= {
                run.model.slot(place.slot_id).fossils[place.number]: gain.mean
                for place, gain in remains.contributions.items()
            }
            readings.pop(run.slots[0].seed, None)
        facts = facts_of(population, before, choice[0], twin, readings, worth_before)
        worth_before = (facts.contributions, facts.lead)
        lived.append((run.reading, facts))
    return lived


def contributions_of(run, readings, unit):
    """By slot, the last readings of what is there."""
    worth = {}
    for slot in run.slots:
        if run.epoch < POINTS.epochs and slot.seed is not None and slot.state.contribution:
            readings[slot.seed] = slot.state.contribution.mean
        total = sum(readings.get(module, 0.0) for module in [*slot.fossils, slot.seed])
        worth[slot.slot_id] = in_units(total, unit)
    return worth


def facts_of(population, before, op, twin, readings, worth_before):
    run = population.runs[0]
    model, now, added = run.model, run.reading, run.model.total_params - run.model.host_params
    twin_before, twin_now = twin[run.epoch - 2 : run.epoch]
    unit = typical_change(twin, population.task.chance)
    is_last = run.epoch == population.task.epochs
    measured = model.fossilized_params if is_last else added  # undecided seeds are off at the end
    return StepFacts(
        accuracy=now.held_out_accuracy,
        accuracy_before=before.held_out_accuracy,
        twin_accuracy=twin_now.held_out_accuracy,
        twin_accuracy_before=twin_before.held_out_accuracy,
        loss=now.held_out_loss,
        loss_before=before.held_out_loss,
        twin_loss=twin_now.held_out_loss,
        twin_loss_before=twin_before.held_out_loss,
        loss_unit=unit,
        op=op,
        params_share=added / model.host_params,
        flops_share=network_flops(model, population.runs[0].flops) / population.runs[0].flops.whole
        - 1,
        kept_share=model.fossilized_params / measured if measured else 0.0,
        is_last=is_last,
        contributions=contributions_of(run, readings, unit),
        contributions_before=worth_before[0],
        lead=in_units(twin_now.held_out_loss - now.held_out_loss, unit),
        lead_before=worth_before[1],
    )


def test_a_step_is_op_tick_epoch_measuring_and_is_paid_by_that_epoch(twins):
    """A busy episode equals the same episode by hand to the bit:

    readings, and every part of every reward.
    """
    env = grow(POINTS, 1, twins, seeds=[3], weights=EVERY_TERM)
    by_hand = live_by_hand(POINTS, 3, BUSY, twin_readings(POINTS, [3], twins)[3])
    info = env.reset(seed=0)[1]
    for step, (reading, facts) in enumerate(by_hand):
        answer = decide(env, scripted(BUSY), step, info)
        info = answer.info
        assert env.population.runs[0].reading == reading
        assert info["reward_parts"] == [reward_parts(facts, EVERY_TERM)]
        assert refusals([answer]) == 0
    assert env.population.runs[0].model.fossilized_seeds == 1
    assert answer.terminated.all()


def test_a_reset_has_lived_and_measured_one_epoch(twins):
    env = grow(POINTS, 2, twins)
    step = play(env, always(WAIT), steps=0)[0]
    assert [run.epoch for run in env.population.runs] == [1, 1]
    assert all(run.reading.held_out_loss is not None for run in env.population.runs)
    left = env.layout.names.index("host.share_left")
    assert step.obs[:, left].tolist() == [np.float32(1 - 1 / POINTS.epochs)] * 2


def test_a_larger_layout_pads_what_is_seen_and_what_may_be_done(twins):
    layout = ObservationLayout(4, 6)
    narrow, wide = grow(POINTS, 2, twins), grow(POINTS, 2, twins, layout=layout)
    assert wide.heads.sizes == (4, 4, 6, narrow.space.sizes[3])
    assert wide.single_action_space.nvec.tolist() == list(wide.heads.sizes)
    for small, large in zip(play(narrow, wander), play(wide, wander), strict=True):
        assert large.obs.shape == (2, layout.width)
        parts, wide_parts = (
            seen.layout.split(torch.as_tensor(step.obs))
            for seen, step in ((narrow, small), (wide, large))
        )
        assert torch.equal(parts.slots, wide_parts.slots[:, :2])
        assert torch.equal(parts.pairs, wide_parts.pairs[:, :2, :3])
        assert not wide_parts.slots[:, 2:].any()
        assert large.rewards.tolist() == small.rewards.tolist()
        padded = pad_masks(small.info["action_mask"], layout)
        assert all(
            np.array_equal(mask, padded[head]) for head, mask in large.info["action_mask"].items()
        )
        assert not large.info["action_mask"]["slot"][:, 1:, 2:].any()
        assert not large.info["action_mask"]["blueprint"][..., 3:].any()


def test_readings_are_dropped_for_whole_episodes_that_own_their_draws(twins):
    def flags(first, count, episodes):
        env = grow(POINTS, count, twins, drop_readings=0.5, first=first)
        names = [name for name in env.layout.names if name.startswith("host.has_")]
        columns = [env.layout.names.index(name) for name in names]
        obs, _ = env.reset(seed=4, options={"episodes": episodes})
        seen = [obs[:, columns]]
        for _ in range(POINTS.epochs - 1):
            obs, *_ = env.step(np.array([WAIT] * count))
            seen.append(obs[:, columns])
        return np.stack(seen, 1)

    four = flags(0, 4, 0)
    lacks = [frozenset(np.flatnonzero(~host.any(0)).tolist()) for host in four]
    assert len(set(lacks)) > 1
    for host in four:
        assert np.array_equal(host[4:].all(0), host.any(0)), "all of the episode, or none of it"
    assert np.array_equal(flags(2, 2, 2), four[2:])


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "often"])
def test_a_chance_that_is_none_is_refused(twins, wrong):
    with pytest.raises(SettingError, match="drop_readings is"):
        grow(POINTS, 1, twins, drop_readings=wrong)


def test_a_seed_has_lived_when_its_planting_is_paid_and_is_measured_an_epoch_later(twins):
    env = grow(POINTS, 1, twins)
    step, later = play(env, scripted({0: PLANT}), steps=2)[1:]
    report, measured = (each.info["reports"][0]["r0c0"] for each in (step, later))
    assert (report.stage, report.seed_age_epochs, report.alpha) == (SeedStage.BLENDING, 1, 1.0)
    assert not report.is_measured
    assert (measured.stage, measured.seed_age_epochs, measured.is_measured) == (
        SeedStage.PROBATIONARY,
        2,
        True,
    )
    assert step.info["reward_parts"][0]["rent"] < 0
    assert step.info["reward_parts"][0]["churn"] < 0


# -- ends ------------------------------------------------------------------------------------------


def test_an_episode_has_one_decision_less_than_epochs_and_its_end_is_no_truncation(twins):
    env = grow(POINTS, 2, twins)
    lived = play(env, wander)
    assert [step.terminated.tolist() for step in lived] == [[False] * 2] * (POINTS.epochs - 1) + [
        [True] * 2
    ]
    assert not any(step.truncated.any() for step in lived)
    assert [run.epoch for run in env.population.runs] == [POINTS.epochs] * 2


def test_the_step_after_an_end_ignores_its_action_and_begins_a_new_episode(twins):
    env = grow(POINTS, 2, twins)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    play(env, scripted({0: PLANT}))
    seeds = [run.seed for run in env.population.runs]
    _, rewards, terminated, _, info = env.step(np.array([PLANT, (OP_CULL, 1, 0, 0)]))
    assert rewards.tolist() == [0.0, 0.0]
    assert not terminated.any()
    assert [[type(event) for event in events] for events in info["events"]] == [
        [HostEpoch],
        [HostEpoch],
    ]
    assert info["reward_parts"] == [{}, {}]
    assert all(
        run.epoch == 1 and run.model.total_params == run.model.host_params
        for run in env.population.runs
    )
    assert {run.seed for run in env.population.runs}.isdisjoint(seeds)
    assert env.accuracy.tolist() == [env.twin(host).held_out_accuracy for host in range(2)]


def test_a_new_episode_in_one_place_leaves_the_others_bit_identical(twins):
    """Host 0 is given up in the third step and begins anew in the fourth."""
    calm = play(grow(POINTS, 3, twins), wander)
    env = grow(POINTS, 3, twins)
    lived = play(env, wander, meddle=poisoner(0, 0, 1, 2))
    assert [step.terminated[0] for step in lived[:5]] == [False, False, False, True, False]
    assert env.population.runs[0].epoch == 4
    assert differing_steps(calm, lived, hosts=(1, 2)) == []


def test_a_new_episode_is_the_episode_its_host_has_from_a_reset(twins):
    """Nothing of the old episode is left:

    not in the host, not in what the policy sees, not in what it is paid.
    """
    env = grow(POINTS, 1, twins, seeds=[3])
    first = play(env, scripted(BUSY))
    again = [decide(env, always(PLANT), 0, first[-1].info)]
    for step in range(POINTS.epochs - 1):
        again.append(decide(env, scripted(BUSY), step, again[-1].info))
    assert all(
        np.array_equal(left.obs, right.obs) for left, right in zip(first, again, strict=True)
    )
    assert [step.rewards.tolist() for step in first] == [step.rewards.tolist() for step in again]


# -- what info says --------------------------------------------------------------------------------


def test_the_parts_sum_exactly_to_the_reward(twins):
    env = grow(POINTS, 3, twins, weights=EVERY_TERM)
    for step in play(env, wander, meddle=poisoner(1, 1))[1:]:
        assert [sum(parts.values()) for parts in step.info["reward_parts"]] == step.rewards.tolist()
        assert all(set(parts) == PARTS for parts in step.info["reward_parts"])


@every_task
def test_masks_reports_and_ledger_are_those_of_the_hosts_now(task, twins):
    env = grow(task, 2, twins)
    info = env.reset(seed=0)[1]
    for step in range(task.epochs - 1):
        info = decide(env, wander, step, info).info
        masks = compute_batch_masks(env.population.views())
        assert set(info["action_mask"]) == set(masks)
        assert all(np.array_equal(info["action_mask"][head], mask) for head, mask in masks.items())
        assert info["reports"] == env.population.reports()
        assert info["ledger"] == [run.ledger.counts() for run in env.population.runs]
        assert info["ledger"][0]["training.examples"] == (step + 2) * task.epoch_examples


def test_what_was_done_and_what_came_of_it_are_told(twins):
    env = grow(POINTS, 2, twins)
    lived = play(env, scripted(BUSY, hosts=[1]))
    told = [kinds(step.info["events"][1], ActionTaken) for step in lived[1:]]
    assert [[event.op for event in events] for events in told] == [
        ["GERMINATE"],
        [],
        ["FOSSILIZE"],
        ["GERMINATE"],
        ["CULL"],
        ["GERMINATE"],
        [],
    ]
    assert (told[0][0].host, told[0][0].slot, told[0][0].blueprint, told[0][0].blend) == (
        1,
        "r0c0",
        "mlp",
        "linear",
    )
    stages = [e.after for step in lived[:4] for e in kinds(step.info["events"][1], StageChanged)]
    assert stages == ["GERMINATED", "BLENDING", "PROBATIONARY", "FOSSILIZED"]
    assert all([type(event) for event in step.info["events"][0]] == [HostEpoch] for step in lived)


IMPOSSIBLE = {
    "culling nothing": (OP_CULL, 1, 0, 0),
    "planting no blueprint": (OP_GERMINATE, 0, 0, 0),
    "fossilizing nothing": (3, 0, 0, 0),
}


@pytest.mark.parametrize("action", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_action_is_executed_as_wait_counted_and_told(action, twins):
    waited = play(grow(POINTS, 2, twins), always(WAIT), steps=3)
    lived = play(grow(POINTS, 2, twins), scripted({1: action}, hosts=[0]), steps=3)
    assert refusals(lived) == 1
    event, _ = lived[2].info["events"][0]
    assert isinstance(event, ActionRefused)
    assert (event.host, event.slot) == (0, f"r0c{action[1]}")
    assert event.reason
    lived[2].info["events"][0].remove(event)
    assert differing_steps(waited, lived, hosts=(0, 1)) == []


def test_a_legal_action_is_never_refused(twins):
    assert refusals(play(grow(POINTS, 3, twins), wander, steps=2 * POINTS.epochs)) == 0


def test_an_index_outside_the_space_is_an_error(twins):
    env = grow(POINTS, 1, twins)
    env.reset(seed=0)
    with pytest.raises(SettingError, match="blueprint index 3"):
        env.step(np.array([(OP_GERMINATE, 0, 3, 0)]))


# -- one host and another --------------------------------------------------------------------------


@every_task
def test_the_same_seed_is_the_same_run_twice(task, twins):
    env = grow(task, 2, twins)
    first = play(env, wander, steps=task.epochs + 2, seed=5)
    assert (
        differing_steps(first, play(env, wander, steps=task.epochs + 2, seed=5), hosts=(0, 1)) == []
    )
    other = play(grow(task, 2, twins), wander, steps=task.epochs + 2, seed=5)
    assert differing_steps(first, other, hosts=(0, 1)) == []


def test_another_seed_takes_the_hosts_in_another_order(twins):
    orders = set()
    for seed in range(4):
        env = grow(POINTS, 4, twins)
        env.reset(seed=seed)
        orders.add(tuple(run.seed for run in env.population.runs))
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {(3, 4, 5, 6)}


@every_task
def test_adding_a_host_changes_nothing_for_the_others(task, twins):
    few, many = (play(grow(task, count, twins), wander) for count in (2, 3))
    assert differing_steps(few, many, hosts=(0, 1)) == []


def test_every_host_seed_is_used_once_per_pass_over_the_pool(twins):
    pool = (3, 4, 5, 6, 7)
    task = replace(POINTS, epochs=2, epoch_examples=32)
    env = grow(task, 2, twins, seeds=pool)
    env.reset(seed=1)
    used = []
    for _ in range(8):  # every second step begins two episodes
        used += [run.seed for run in env.population.runs]
        env.step(np.array([WAIT] * 2))
        env.step(np.array([WAIT] * 2))
    passes = [tuple(used[start : start + 5]) for start in (0, 5, 10)]
    assert [sorted(order) for order in passes] == [list(pool)] * 3
    assert len(set(passes)) > 1


def test_episodes_can_be_counted_from_anywhere(twins):
    """A round that is played again after a resume takes the hosts it took then."""
    env = grow(POINTS, 2, twins)
    env.reset(seed=1)
    env.reset()
    third = [run.seed for run in env.population.runs]
    env.reset(seed=1, options={"episodes": 2})
    assert [run.seed for run in env.population.runs] == third
    assert env.begun == 4


def test_the_pool_of_a_run_comes_from_its_seed():
    assert draw_host_seeds(1, 3) == draw_host_seeds(1, 5)[:3]
    assert len(set(draw_host_seeds(1, 50) + draw_host_seeds(2, 50))) == 100


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "count", "seeds"),
    [(POINTS, 0, [1]), (POINTS, 1, []), (replace(POINTS, epochs=1), 1, [1])],
)
def test_an_environment_without_hosts_or_decisions_is_refused(task, count, seeds, twins):
    with pytest.raises(SettingError, match=r"host.*seed.*epochs"):
        grow(task, count, twins, seeds=seeds)


def test_an_unknown_reward_term_is_refused_at_once_with_the_nearest(twins):
    with pytest.raises(UnknownNameError, match=r"'rant'.*'rent'"):
        grow(POINTS, 1, twins, weights={"rant": 1.0})


def test_a_task_by_name_is_refused_with_the_way_to_get_it(twins):
    with pytest.raises(SettingError, match=r"'blobs'.*get_task"):
        grow("blobs", 1, twins)


def test_the_folder_of_twins_may_be_given_as_text(twins):
    assert grow(POINTS, 1, str(twins), seeds=(3,)).twins == grow(POINTS, 1, twins, seeds=(3,)).twins
