"""Masks against real populations:

whatever they let through is carried out, by lots or through a network.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import with_slow
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.tamiyo.masks import compute_batch_masks, only_waiting
from esper.tamiyo.policies import NetworkPolicy
from tamiyo.observed_episodes import TASKS, RandomPolicy, Watched

LIMITS = st.tuples(st.sampled_from([None, 1, 2, 3]), st.sampled_from([1.1, 1.4, 3.0, 16.0]))
"""max_seeds and budget, of which most bind within a few epochs"""


def limited(task, max_seeds, budget):
    """The task with limits; a budget must leave room for one seed, or the population is refused as
    a whole.
    """
    least = 1.4 if task == "vectors" else 1.1
    return replace(TASKS[task], max_seeds=max_seeds, budget=max(budget, least))


def check_limits(hosts):
    for run in hosts.population.runs:
        model = run.model
        assert model.total_params <= model.budget
        assert (
            model.max_seeds is None
            or model.active_seeds + model.fossilized_seeds <= model.max_seeds
        )


def play(hosts, policy, epochs):
    """Let a policy live; a refusal is raised by the population. Returns the masks it was shown."""
    shown, memory = [], None
    for _ in range(epochs):
        seen, masks = hosts.train()
        assert masks["op"][:, OP_WAIT].all()
        for rows in (masks["op"], masks["slot"], masks["blueprint"], masks["blend"]):
            assert rows.any(-1).all()
        actions, memory = policy.decide(
            seen, masks, hosts.population.reports(), memory, hosts.signals()
        )
        hosts.act(actions)
        check_limits(hosts)
        shown.append((masks, actions))
    return shown


@pytest.mark.parametrize("task", with_slow(TASKS, {"images", "texts"}))
@settings(max_examples=3)
@given(limits=LIMITS, seed=st.integers(0, 10**6))
def test_no_action_drawn_from_the_masks_is_refused_by_a_population(task, limits, seed):
    hosts = Watched(limited(task, *limits), [1, 2])
    play(hosts, RandomPolicy(seed), 7)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=3)
@given(limits=LIMITS, seed=st.integers(0, 10**6))
def test_no_action_drawn_through_conditional_masks_is_refused_by_a_population(task, limits, seed):
    hosts = Watched(limited(task, *limits), [3, 4])
    play(hosts, NetworkPolicy(hosts.network(seed % 7), deterministic=False, seed=seed), 7)


@pytest.fixture(scope="module")
def crowded():
    """Hosts with room for few seeds, and what was possible and done in a long episode."""
    hosts = Watched(limited("images", 3, 1.5), [1, 2, 3])
    return hosts, play(hosts, RandomPolicy(5), 20)


def test_in_a_long_episode_every_op_is_done(crowded):
    _, shown = crowded
    ops = {int(op) for _, actions in shown for op in actions[:, 0]}
    assert ops == {OP_WAIT, OP_GERMINATE, OP_CULL, OP_FOSSILIZE}


def test_in_a_long_episode_limits_take_away_what_was_possible_before(crowded):
    """The limits bind, so that the tests above are about them."""
    hosts, shown = crowded
    can = np.stack(
        [masks["slot"][:, OP_GERMINATE] & masks["op"][:, OP_GERMINATE, None] for masks, _ in shown]
    )
    choices = np.stack([masks["blueprint"].sum(-1) for masks, _ in shown])
    assert len(set(choices[can])) > 2, "the budget takes away some blueprints"
    used = [run.model.active_seeds + run.model.fossilized_seeds for run in hosts.population.runs]
    assert 3 in used, "max_seeds is reached"
    now = compute_batch_masks(hosts.population.views())
    assert not now["op"][np.array(used) == 3, OP_GERMINATE].any()


def test_a_host_at_its_limit_of_seeds_may_still_cull_and_keep(crowded):
    _, shown = crowded
    assert any(
        not masks["op"][host, OP_GERMINATE] and masks["op"][host, [OP_CULL, OP_FOSSILIZE]].any()
        for masks, _ in shown
        for host in range(3)
    )


@pytest.mark.parametrize("task", TASKS)
def test_masks_fit_the_heads_of_a_network_for_the_same_space(task):
    hosts = Watched(TASKS[task], [1, 2])
    masks = compute_batch_masks(hosts.population.views())
    ops, slots, blueprints, blends = hosts.network().spec.sizes
    assert {name: mask.shape for name, mask in masks.items()} == {
        "op": (2, ops),
        "slot": (2, ops, slots),
        "blueprint": (2, slots, blueprints),
        "blend": (2, blends),
    }


def test_where_only_waiting_is_left_every_policy_waits(crowded):
    hosts, shown = crowded
    for masks, _ in shown[:3]:
        closed = only_waiting(masks)
        assert {name: mask.shape for name, mask in closed.items()} == {
            n: m.shape for n, m in masks.items()
        }
        assert all(mask[..., 0].all() and not mask[..., 1:].any() for mask in closed.values())
        seen = np.zeros((3, hosts.network().state_dim), np.float32)
        for policy in (RandomPolicy(1), NetworkPolicy(hosts.network(), deterministic=False)):
            actions, _ = policy.decide(seen, closed, None, None, None)
            assert not actions.any()


def test_closing_masks_leaves_the_open_ones_alone(crowded):
    _, shown = crowded
    masks = shown[0][0]
    before = {name: mask.copy() for name, mask in masks.items()}
    only_waiting(masks)
    assert all(np.array_equal(before[name], mask) for name, mask in masks.items())
