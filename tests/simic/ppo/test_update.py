"""One PPO update:

what it must not look at, what it must not change, when it stops, and what it skips.
"""

import copy

import pytest
import torch

from esper.leyline.factored_actions import NUM_OPS, OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.simic.ppo import agent as agent_module
from esper.simic.ppo.rollout import Targets
from simic.worlds import SMALL, bytes_of, clocks, growth_agent, growth_rollout, player_for
from tamiyo.policy_cases import end_of

EVERY_OP = {
    OP_WAIT: ("slot", "blueprint", "blend"),
    OP_CULL: ("blueprint", "blend"),
    OP_FOSSILIZE: ("blueprint", "blend"),
}
"""heads that an op does not use"""
CLIP_MODES = pytest.mark.parametrize("mode", ["per_head", "joint"])


def settings(**changes):
    return SMALL.model_copy(update=changes)


def optimizer_bytes(agent):
    state = agent.optimizer.state_dict()["state"]
    return {(p, k): v.numpy().tobytes() for p, entries in state.items() for k, v in entries.items()}


def watched(agent, name):
    """Arguments of every call of a function that the agent's module uses."""
    calls, real = [], getattr(agent_module, name)

    def spy(*args, **options):
        calls.append(args)
        return real(*args, **options)

    return calls, spy


# -- unused heads ----------------------------------------------------------------------------------


def poison_unused(rollout, amount):
    """Other stored choices and log-probabilities wherever a head was not used."""
    sizes = dict(zip(rollout.spec.names, rollout.spec.sizes, strict=True))
    for op, names in EVERY_OP.items():
        here = rollout.choices[..., 0] == op
        for name in names:
            place = rollout.spec.names.index(name)
            rollout.choices[..., place][here] = sizes[name] - 1
            rollout.log_probs[..., place][here] = amount


@CLIP_MODES
@pytest.mark.parametrize("amount", [-7.0, float("nan")], ids=["wrong", "nan"])
def test_what_is_stored_for_heads_that_an_op_does_not_use_changes_no_bit(mode, amount):
    learned = []
    for is_poisoned in (False, True):
        agent = growth_agent(settings(clip_mode=mode))
        rollout = growth_rollout(agent, steps=10, count=6)
        assert all((rollout.choices[..., 0] == op).any() for op in range(NUM_OPS))
        if is_poisoned:
            poison_unused(rollout, amount)
        record = agent.update(rollout)
        learned.append((bytes_of(agent.network), optimizer_bytes(agent), record))
    assert learned[0] == learned[1]


def test_what_is_stored_for_heads_that_are_used_does_change_something():
    learned = []
    for shift in (0.0, 0.1):
        agent = growth_agent()
        rollout = growth_rollout(agent, steps=10, count=6)
        rollout.log_probs[..., 2][rollout.choices[..., 0] == OP_GERMINATE] += shift
        agent.update(rollout)
        learned.append(bytes_of(agent.network))
    assert learned[0] != learned[1]


def waiting_rollout(agent, possible=tuple(range(NUM_OPS))):
    """These ops were possible everywhere, and everybody waited."""
    rollout = growth_rollout(agent, whole=True)
    rollout.masks["op"][:] = torch.isin(torch.arange(NUM_OPS), torch.tensor(possible))
    rollout.choices[:] = 0
    rows = rollout.rows(torch.arange(rollout.count))
    with torch.no_grad():
        said = agent.network.evaluate_actions(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts
        )
    for place, name in enumerate(rollout.spec.names):
        rollout.log_probs[..., place] = said.log_probs[name].T
    return rollout


def gradients(agent, rollout, weight):
    index = torch.arange(rollout.count)
    flat = torch.zeros(rollout.count, rollout.steps)
    agent._descend = lambda loss, kl: agent_module.Descent(
        agent.network.zero_grad() or loss.backward(), kl
    )
    steps = agent._look_through(rollout).minibatch(index, index)
    agent._step(rollout, index, steps, Targets(flat, flat), weight)
    return {
        name: value.grad
        for name, value in agent.network.named_parameters()
        if value.grad is not None
    }


def test_a_head_whose_op_was_possible_but_not_taken_still_gets_its_entropy_bonus():
    agent = growth_agent()
    found = gradients(agent, waiting_rollout(agent), weight=0.01)
    assert all(found[end_of(name)].any() for name in agent.network.spec.names)


def test_without_the_bonus_a_head_that_was_not_used_learns_nothing():
    agent = growth_agent()
    found = gradients(agent, waiting_rollout(agent), weight=0.0)
    assert not any(found[end_of(name)].any() for name in ("slot", "blueprint", "blend"))


def test_a_head_whose_op_was_impossible_gets_no_bonus():
    agent = growth_agent()
    found = gradients(agent, waiting_rollout(agent, (OP_WAIT, OP_CULL)), weight=0.01)
    assert not any(found[end_of(name)].any() for name in ("blueprint", "blend"))
    assert found[end_of("slot")].any()


# -- advantages, values and their units ------------------------------------------------------------


def test_every_pass_sees_the_same_normalised_advantages_and_the_same_old_values(monkeypatch):
    agent = growth_agent(settings(epochs=3, target_kl=None))
    rollout = growth_rollout(agent)
    raw, returns = rollout.targets(agent.config.gamma, agent.config.gae_lambda)
    old = {
        name: getattr(rollout, name).clone()
        for name in ("values", "log_probs", "choices", "states", "rewards")
    }
    policy_calls, spy = watched(agent, "policy_loss")
    monkeypatch.setattr(agent_module, "policy_loss", spy)
    value_calls, value_spy = watched(agent, "value_loss")
    monkeypatch.setattr(agent_module, "value_loss", value_spy)
    assigned, assign = [], agent._assign
    agent._assign = lambda *rows: assigned.extend(parts := assign(*rows)) or parts
    agent.update(rollout)
    expected = (raw - raw.mean()) / raw.std(unbiased=False)
    assert len(assigned) == len(policy_calls) == 6
    for index, policy, value in zip(assigned, policy_calls, value_calls, strict=True):
        torch.testing.assert_close(policy[2], expected[:, index].T)
        assert torch.equal(value[1], old["values"][:, index].T)
        assert torch.equal(value[2], returns[:, index].T)
    assert all(torch.equal(getattr(rollout, name), kept) for name, kept in old.items())


def scaled_agent(scale, **changes):
    """An agent whose returns have been `scale` times as large all along."""
    agent = growth_agent(settings(max_grad_norm=1e9, **changes))
    stats = agent.network.return_stats
    stats.mean.fill_(2.0 * scale)
    stats.var.fill_((3.0 * scale) ** 2)
    stats.count.fill_(1000.0)
    return agent


def test_rewards_a_hundred_times_as_large_give_the_same_gradients():
    found = []
    for scale in (1.0, 100.0):
        agent, gradients = scaled_agent(scale), []
        agent.optimizer.register_step_pre_hook(
            lambda *_, agent=agent, gradients=gradients: gradients.append(
                {name: value.grad.clone() for name, value in agent.network.named_parameters()}
            )
        )
        record = agent.update(
            growth_rollout(agent, reward=lambda draws, scale=scale: scale * draws)
        )
        found.append((gradients[0], record))
    (plain, first), (scaled, second) = found
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], gradient, rtol=1e-3, atol=1e-5)
    assert second.policy_loss == pytest.approx(first.policy_loss, abs=1e-4)
    assert second.value_loss == pytest.approx(first.value_loss, rel=1e-3)


def test_values_are_stored_in_the_rewards_units():
    agent = scaled_agent(100.0)
    torch.nn.init.zeros_(agent.network.value_head[2].weight)
    assert growth_rollout(agent).values.eq(200.0).all()


def test_new_statistics_of_returns_change_no_value():
    agent = growth_agent()
    rollout = growth_rollout(agent, reward=lambda draws: 50 + 10 * draws)
    rollout.log_probs -= 1.0  # no step is taken, so that only the statistics can change anything
    states, hidden = torch.randn(4, 5), agent.network.get_initial_hidden(4)
    agent.network.observation_stats.update = lambda rows, pool: None
    before = agent.network.look(states, hidden)
    assert agent.update(rollout).steps == 0
    assert agent.network.return_stats.mean > 10
    torch.testing.assert_close(agent.network.look(states, hidden), before, rtol=1e-4, atol=1e-4)


# -- when to stop ----------------------------------------------------------------------------------


def shifted_rollout(agent, rows):
    """A rollout in which the stored probabilities of some rows are e times too small:

    a divergence of e - 2.
    """
    rollout = growth_rollout(agent, count=6)
    rollout.log_probs[:, rows, 0] -= 1.0
    return rollout


@pytest.mark.parametrize("place", range(3))
def test_the_minibatch_that_goes_too_far_takes_no_step_and_ends_the_update(place):
    """Minibatches of two rows; the rows of the one at `place` are spoilt, so exactly `place` steps
    are taken.
    """
    config = settings(minibatches=3, epochs=5, lr=1e-6, lr_floor=0.0, target_kl=0.1)
    agent = growth_agent(config)
    assigned = copy.deepcopy(agent)._assign(6)
    rollout = shifted_rollout(agent, assigned[place])
    steps = []
    agent.optimizer.register_step_post_hook(lambda *_: steps.append(bytes_of(agent.network)))
    agent.network.update_return_stats = lambda returns, pool: None
    agent.network.observation_stats.update = lambda rows, pool: None
    untrained = bytes_of(agent.network)
    record = agent.update(rollout)
    assert record.steps == len(steps) == place
    assert record.early_stop_epoch == 0
    assert record.approx_kl == pytest.approx(torch.e - 2, rel=1e-2)
    assert bytes_of(agent.network) == (steps[-1] if steps else untrained)


def test_the_update_stops_beyond_one_and_a_half_times_the_target():
    divergence = float(torch.e - 2)
    for target, stops in ((divergence / 1.49, False), (divergence / 1.51, True)):
        agent = growth_agent(settings(minibatches=1, epochs=1, target_kl=target))
        record = agent.update(shifted_rollout(agent, slice(None)))
        assert (record.steps, record.early_stop_epoch) == ((0, 0) if stops else (1, None))


def test_a_later_pass_is_named_when_it_is_cut_short():
    agent = growth_agent(settings(lr=0.02, epochs=50, target_kl=0.01, minibatches=1))
    record = agent.update(growth_rollout(agent))
    assert 0 < record.early_stop_epoch == record.steps < 49
    assert record.approx_kl > 0.015


@pytest.mark.parametrize("target", [None, 1e6])
def test_without_a_limit_all_passes_are_made(target):
    agent = growth_agent(settings(target_kl=target, minibatches=2, epochs=3))
    record = agent.update(shifted_rollout(agent, slice(None)))
    assert (record.steps, record.early_stop_epoch) == (6, None)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(4, 2, [2, 2]), (9, 8, [2] + [1] * 7), (2, 8, [1, 1]), (5, 1, [5])]
)
def test_rows_are_dealt_into_as_many_parts_as_there_are_minibatches_each_row_once(
    rows, parts, sizes
):
    agent = growth_agent(settings(minibatches=parts))
    assigned = agent._assign(rows)
    assert sorted(map(len, assigned), reverse=True) == sizes
    assert sorted(torch.cat(assigned).tolist()) == list(range(rows))


def test_rows_are_dealt_anew_in_every_pass():
    agent = growth_agent(settings(minibatches=1))
    assert len({tuple(agent._assign(8)[0].tolist()) for _ in range(5)}) == 5


# -- schedules -------------------------------------------------------------------------------------


def rates(agent, rollouts, **known):
    """Rate and bonus of every update; the optimiser must have used them."""
    found = []
    for rollout in rollouts:
        record = agent.update(rollout)
        assert agent.optimizer.param_groups[0]["lr"] == record.lr
        found.append((record.lr, record.entropy_weight))
    return found


SCHEDULE = {
    "lr": 1e-3,
    "lr_floor": 1e-4,
    "entropy": 0.02,
    "entropy_floor": 0.01,
    "anneal_decisions": 96,
}
LINE = [(1e-3 - 9e-4 * share, 0.02 - 0.01 * share) for share in (0, 1 / 3, 2 / 3, 1, 1)]


def test_rate_and_bonus_fall_in_a_straight_line_by_decisions_to_their_floors():
    agent = growth_agent(settings(**SCHEDULE))
    found = rates(
        agent, (growth_rollout(agent, seed=seed) for seed in range(5))
    )  # 32 decisions each
    assert found == [pytest.approx(pair) for pair in LINE]


def test_schedules_do_not_depend_on_updates_that_were_cut_short():
    agent = growth_agent(settings(**SCHEDULE))
    found = rates(
        agent, (shifted_rollout(agent, slice(None)) for _ in range(3))
    )  # 48 decisions each, no step
    assert found == [pytest.approx(pair) for pair in ((1e-3, 0.02), (5.5e-4, 0.015), (1e-4, 0.01))]


def test_schedules_go_on_from_the_decisions_that_were_made_before():
    agent = growth_agent(settings(**SCHEDULE))
    agent.decisions = 64
    assert rates(agent, [growth_rollout(agent)]) == [pytest.approx(LINE[2])]


def test_without_a_length_rate_and_bonus_stay():
    agent = growth_agent()
    agent.decisions = 10**9
    assert rates(agent, [growth_rollout(agent)]) == [(SMALL.lr, SMALL.entropy)]


# -- numbers that are not finite -------------------------------------------------------------------


def test_a_reward_that_is_not_a_number_changes_nothing_and_is_counted():
    player = player_for(clocks(4), settings(epochs=3))
    agent = player.agent
    agent.update(player.play(8))
    before = bytes_of(agent.network), optimizer_bytes(agent)
    rollout = player.play(8)
    rollout.rewards[:] = torch.nan
    frozen = agent.network.observation_stats.state_dict()
    agent.network.observation_stats.update = lambda rows, pool: None
    record = agent.update(rollout)
    assert (record.steps, record.skipped_steps) == (0, 6)
    assert (bytes_of(agent.network), optimizer_bytes(agent)) == before
    assert frozen["count"] == 32
    assert agent.decisions == 64  # schedules go by decisions, skipped or not


def test_one_bad_minibatch_is_left_out_and_the_others_are_learned_from():
    agent = growth_agent(settings(minibatches=2, epochs=1))
    passes = agent._passes

    def with_one_bad_return(rollout, table, targets, weight):
        returns = targets.returns.clone()
        returns[5, 1] = torch.nan
        return passes(rollout, table, targets._replace(returns=returns), weight)

    agent._passes = with_one_bad_return
    record = agent.update(growth_rollout(agent))
    assert (record.steps, record.skipped_steps) == (1, 1)
    assert all(value.isfinite().all() for value in agent.network.state_dict().values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_never_take_in_what_is_not_finite(bad):
    agent = growth_agent()
    rollout = growth_rollout(agent)
    rollout.rewards[3, 1] = bad
    rollout.states[2, 0, 4] = bad
    agent.update(rollout)
    assert all(value.isfinite().all() for value in agent.network.state_dict().values())
    assert agent.network.observation_stats.count == 31
    clean = agent.update(growth_rollout(agent, seed=1))
    assert clean.skipped_steps == 0
    assert clean.steps > 0


# -- one step --------------------------------------------------------------------------------------


def test_gradients_of_the_whole_network_are_clipped_together():
    norms = []
    agent = growth_agent(settings(max_grad_norm=0.01, epochs=1, minibatches=1))
    parameters = dict(agent.network.named_parameters())

    def measure(*_):
        norms.append({name: value.grad.norm() for name, value in parameters.items()})

    agent.optimizer.register_step_pre_hook(measure)
    record = agent.update(growth_rollout(agent))
    total = torch.stack(list(norms[0].values())).norm()
    assert record.gradient_norm > 0.1
    assert float(total) == pytest.approx(0.01, rel=1e-4)
    assert all(norm < 0.01 for norm in norms[0].values())


def test_small_gradients_are_left_alone():
    found = []
    for limit in (1e3, 1e6):
        agent = growth_agent(settings(max_grad_norm=limit))
        agent.update(growth_rollout(agent))
        found.append(bytes_of(agent.network))
    assert found[0] == found[1]
