"""The network as a policy:

the same interface as a rule, legal in whole episodes, its memory handed back and forth.
"""

import copy

import numpy as np
import pytest
import torch

from esper.episodes import Episodes
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import OP_GERMINATE, OP_WAIT
from esper.runtime.population import Population
from esper.tamiyo.policies import NetworkPolicy
from esper.tamiyo.policy_names import make_policy
from esper.tamiyo.rules import HostFacts
from esper.telemetry.events import ActionTaken
from esper.trials.arms import make_decider, play_epoch
from tamiyo.observed_episodes import TASKS, Watched
from tamiyo.policy_cases import ends_of

SEEDS = [1, 2, 3]


@pytest.fixture(scope="module")
def watched():
    """Three hosts after an epoch, and what a policy is shown of them."""
    hosts = Watched(TASKS["vectors"], SEEDS)
    return hosts, *hosts.train()


def sharp(network, factor=200.0):
    """The same network with clear preferences; a fresh one is close to even."""
    with torch.no_grad():
        for layer in ends_of(network.policy_heads):
            layer.weight.mul_(factor)
    return network


def decide(watched, memory=None, **options):
    hosts, seen, masks = watched
    return NetworkPolicy(sharp(hosts.network()), **options).decide(
        seen, masks, hosts.population.reports(), memory
    )


# -- the interface ---------------------------------------------------------------------------------


def test_actions_are_whole_numbers_in_the_shape_that_rules_give_them(watched):
    hosts, seen, masks = watched
    actions, _ = decide(watched)
    rule = make_decider(Episodes(hosts.population), 0, "never").policy
    by_rule, _ = rule.decide(seen, masks, hosts.population.reports(), None, hosts.signals())
    assert actions.shape == by_rule.shape == (3, 4)
    assert actions.dtype == by_rule.dtype == np.int64
    assert (actions < np.array(hosts.space.sizes)).all()


def test_actions_are_in_the_order_op_slot_blueprint_blend(watched):
    hosts, seen, masks = watched
    wanted = [OP_GERMINATE, 1, 2, 2]
    only = {name: np.zeros_like(mask) for name, mask in masks.items()}
    for name, choice in zip(("op", "slot", "blueprint", "blend"), wanted, strict=True):
        only[name][..., choice] = True
    for deterministic in (True, False):
        actions, _ = NetworkPolicy(hosts.network(), deterministic=deterministic).decide(
            seen, only, None, None
        )
        assert actions.tolist() == [wanted] * 3


def test_it_takes_what_the_network_itself_likes_best(watched):
    hosts, seen, masks = watched
    network = sharp(hosts.network())
    named = {f"{name}_mask": torch.as_tensor(mask) for name, mask in masks.items()}
    chosen = network.get_action(torch.as_tensor(seen), **named, deterministic=True)[0]
    actions, _ = NetworkPolicy(network).decide(seen, masks, None, None)
    for column, name in enumerate(network.spec.names):
        assert actions[:, column].tolist() == chosen[name].tolist()


def test_it_plays_where_a_rule_plays():
    """One loop serves both: only the way to build the policy differs."""
    hosts = Watched(TASKS["vectors"], [1])
    model = hosts.population.runs[0].model
    for policy in (
        make_policy("heuristic", facts_of(model)),
        NetworkPolicy(hosts.network(), deterministic=False),
    ):
        assert len(hosts.live(policy, 3)) == 3


def facts_of(model):
    return HostFacts(model.space, model.costs, model.host_params, model.budget)


def test_reports_are_not_needed(watched):
    hosts, seen, masks = watched
    policy = NetworkPolicy(sharp(hosts.network()))
    with_reports, without = (
        policy.decide(seen, masks, given, None)[0] for given in (hosts.population.reports(), None)
    )
    assert np.array_equal(with_reports, without)


def test_deciding_builds_no_graph_and_leaves_the_global_random_state_alone(watched):
    hosts, seen, masks = watched
    network = hosts.network()
    before = torch.get_rng_state()
    _, memory = NetworkPolicy(network, deterministic=False).decide(seen, masks, None, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(part.requires_grad for part in memory)
    assert all(parameter.grad is None for parameter in network.parameters())


# -- whole episodes --------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_over_a_whole_episode_every_action_of_an_untrained_network_is_carried_out(task):
    """`Watched.act` raises what a population refuses."""
    hosts = Watched(TASKS[task], [1, 2])
    lived = hosts.live(
        NetworkPolicy(hosts.network(), deterministic=False, seed=4), hosts.task.epochs
    )
    ops = np.concatenate([actions[:, 0] for _, _, actions in lived])
    assert set(ops) >= {OP_WAIT, OP_GERMINATE}
    for _, masks, actions in lived:
        assert masks["op"][np.arange(2), actions[:, 0]].all()


def test_an_arms_loop_shows_the_network_what_a_tracker_shows():
    """Two ways to the same episode: hosts played by the loop of an arm, and hosts watched here."""
    arm, hosts = Episodes(Population(TASKS["vectors"], [2])), Watched(TASKS["vectors"], [2])
    network = sharp(hosts.network(seed=5), 50.0)
    decider = make_decider(arm, 0, lambda facts: NetworkPolicy(network))
    told = [event for _ in range(6) for event in play_epoch(arm, [decider])[0]]
    lived = hosts.live(NetworkPolicy(network), 6)
    done = [hosts.space.slots.slot_ids[a[0, 1]] for _, _, a in lived if a[0, 0] != OP_WAIT]
    assert done
    assert [event.slot for event in told if isinstance(event, ActionTaken)] == done
    assert arm.population.reports() == hosts.population.reports()


def test_heads_that_an_op_does_not_use_choose_their_first_entry():
    hosts = Watched(TASKS["images"], SEEDS)
    lived = hosts.live(NetworkPolicy(hosts.network(), deterministic=False, seed=1), 10)
    actions = np.concatenate([actions for _, _, actions in lived])
    waits, plants = actions[:, 0] == OP_WAIT, actions[:, 0] == OP_GERMINATE
    assert waits.any()
    assert plants.any()
    assert not actions[waits, 1:].any()
    assert not actions[~plants, 2:].any()
    assert actions[plants, 2].all(), "planting needs a blueprint"


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown():
    """Eight epochs of what three hosts show while nothing is done to them."""
    hosts = Watched(TASKS["vectors"], SEEDS)
    return hosts, [hosts.train() for _ in range(8)]


def test_step_by_step_it_decides_as_the_network_does_over_the_whole_sequence(shown):
    hosts, epochs = shown
    network = sharp(hosts.network())
    policy, memory, rows = NetworkPolicy(network), None, []
    for seen, masks in epochs:
        actions, memory = policy.decide(seen, masks, None, memory)
        rows.append(actions)
    states = torch.as_tensor(np.stack([seen for seen, _ in epochs], 1))
    masks = {
        name: torch.as_tensor(np.stack([mask[name] for _, mask in epochs], 1))
        for name in epochs[0][1]
    }
    chosen, _, _, hidden = network.get_action(states, None, masks, deterministic=True)
    for column, name in enumerate(network.spec.names):
        assert np.array_equal(np.stack(rows, 1)[..., column], chosen[name].numpy())
    for kept, last in zip(memory, hidden, strict=True):
        torch.testing.assert_close(kept, last.detach())


def test_what_it_remembers_changes_with_every_epoch_and_matters(shown):
    hosts, epochs = shown
    network = sharp(hosts.network(), 2000.0)
    policy = NetworkPolicy(network)
    memory, values = None, {"remembering": [], "forgetting": []}
    for seen, masks in epochs:
        for name, given in (("remembering", memory), ("forgetting", None)):
            states = torch.as_tensor(seen)
            hidden = network.get_initial_hidden(3) if given is None else given
            values[name].append(network.look(states, hidden).detach())
        before = memory
        _, memory = policy.decide(seen, masks, None, memory)
        assert before is None or not torch.equal(before[0], memory[0])
    assert torch.equal(values["remembering"][0], values["forgetting"][0])
    assert not torch.allclose(
        torch.stack(values["remembering"][1:]), torch.stack(values["forgetting"][1:])
    )


def test_no_memory_is_the_state_in_which_episodes_begin(watched):
    hosts, _, _ = watched
    fresh = decide(watched)
    begun = decide(watched, hosts.network().get_initial_hidden(3))
    assert np.array_equal(fresh[0], begun[0])
    assert all(torch.equal(one, other) for one, other in zip(fresh[1], begun[1], strict=True))


def test_deciding_does_not_change_the_memory_it_was_given(shown):
    hosts, epochs = shown
    policy = NetworkPolicy(hosts.network())
    _, memory = policy.decide(*epochs[0], None, None)
    before = copy.deepcopy(memory)
    policy.decide(*epochs[1], None, memory)
    assert all(torch.equal(one, other) for one, other in zip(before, memory, strict=True))


def test_a_host_is_decided_about_as_if_it_were_alone(watched):
    hosts, seen, masks = watched
    policy = NetworkPolicy(sharp(hosts.network()))
    together, _ = policy.decide(seen, masks, None, None)
    for host in range(3):
        own = {name: mask[host : host + 1] for name, mask in masks.items()}
        alone, _ = policy.decide(seen[host : host + 1], own, None, None)
        assert alone[0].tolist() == together[host].tolist()


# -- lots ------------------------------------------------------------------------------------------


def episode_of(**options):
    hosts = Watched(TASKS["vectors"], SEEDS)
    policy = NetworkPolicy(sharp(hosts.network(seed=5), 50.0), **options)
    return [actions.tolist() for _, _, actions in hosts.live(policy, 8)]


def test_the_likeliest_choice_is_the_same_whatever_the_seed():
    first = episode_of(seed=1)
    assert first == episode_of(seed=2)
    assert np.any(first), "it does more than wait"


def test_drawn_episodes_are_the_same_with_the_same_seed_and_differ_with_another():
    first, again, other = (episode_of(deterministic=False, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_drawing_twice_from_the_same_state_gives_different_draws(watched):
    hosts, seen, masks = watched
    policy = NetworkPolicy(hosts.network(), deterministic=False)
    drawn = {policy.decide(seen, masks, None, None)[0].tobytes() for _ in range(20)}
    assert len(drawn) > 5


# -- refusals --------------------------------------------------------------------------------------


def test_a_loop_without_observations_is_refused(watched):
    hosts, _, masks = watched
    with pytest.raises(SettingError, match=r"observations \[N, F\]"):
        NetworkPolicy(hosts.network()).decide(None, masks, None, None)


def test_observations_of_another_width_are_refused_with_both_widths_and_where_to_look(watched):
    hosts, _, masks = watched
    _, seen, _ = watched
    with pytest.raises(SettingError, match=r"\(3, 194\).*195 features.*docs/checkpoints\.md"):
        NetworkPolicy(hosts.network()).decide(seen[:, 1:], masks, None, None)


def test_the_observation_of_one_host_needs_its_axis(watched):
    hosts, seen, masks = watched
    with pytest.raises(SettingError, match=r"are \(195,\)"):
        NetworkPolicy(hosts.network()).decide(seen[0], masks, None, None)
