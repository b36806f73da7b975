"""Rows of a foreign environment are learned from in pieces, each from the state that it was played
from.
"""

import pytest
import torch

from simic.worlds import NEXT_STEP, SAME_STEP, SMALL, clocks, counting_player, player_for

MODES = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=["next_step", "same_step"])
PIECES = pytest.mark.parametrize("pieces", [1, 2, 5, 6, 23, 24])
STEPS = 23
"""no number of equal pieces gives it, so that the last one is short"""


def settings(**changes):
    return SMALL.model_copy(update=changes)


def cutting_player(env, pieces, **changes):
    player = player_for(env, settings(**changes))
    player.pieces = pieces
    return player


def ending_clocks(mode=SAME_STEP, **more):
    """Episodes end inside pieces of 4, at their boundaries, and never."""
    return clocks(3, mode, [4, 6, None], masked=True, **more)


def pieces_of(rollout):
    return rollout.rows(torch.arange(rollout.count * rollout.per_row))


@MODES
@PIECES
@torch.no_grad()
def test_pieces_give_the_log_probabilities_and_values_of_the_play(mode, pieces):
    player = cutting_player(ending_clocks(mode), pieces)
    player.play(9)  # the second rollout goes on with episodes and memory of the first
    rows = pieces_of(player.play(STEPS))
    said = player.agent.network.evaluate_actions(
        rows.states, rows.choices, rows.masks, rows.hidden, rows.starts
    )
    gaps = (said.log_probs["action_0"] - rows.log_probs[..., 0])[rows.valid]
    assert gaps.abs().max() <= 1e-6
    torch.testing.assert_close(said.values[rows.valid], rows.values[rows.valid], rtol=0, atol=1e-6)


@MODES
@PIECES
def test_before_any_step_every_ratio_of_every_piece_is_one(mode, pieces):
    player = cutting_player(ending_clocks(mode), pieces, minibatches=1)
    player.play(9)
    record = player.agent.update(player.play(STEPS))
    assert max(record.first_ratio_gap.values()) <= 1e-6


@MODES
@PIECES
def test_every_decision_is_in_one_piece_and_in_its_order(mode, pieces):
    rollout = cutting_player(ending_clocks(mode), pieces).play(STEPS)
    rows = pieces_of(rollout)
    assert len(rows.valid) == 3 * min(pieces, STEPS)
    for host in range(3):
        own = slice(host * rollout.per_row, (host + 1) * rollout.per_row)
        for stored, cut in ((rollout.states, rows.states), (rollout.log_probs, rows.log_probs)):
            assert torch.equal(cut[own][rows.valid[own]], stored[:, host][rollout.valid[:, host]])


@MODES
def test_a_piece_begins_with_the_state_before_its_first_step(mode):
    """The network's state counts the steps of an episode, as the observation does."""
    player, at_cuts = counting_player(ending_clocks(mode)), set()
    player.pieces = 6
    for _ in range(2):
        rollout = player.play(STEPS)
        rows = pieces_of(rollout)
        begun = rows.valid[:, 0]
        assert torch.equal(rows.hidden[0][0, begun, 0], rows.states[begun, 0, 1])
        assert rows.hidden[0][0, rows.starts[:, 0], 0].eq(0).all()
        assert rows.starts[:, 1:].any()
        at_cuts |= set(rows.starts[begun, 0].tolist())
    assert at_cuts == {True, False}


@pytest.mark.parametrize("begins", [8, 10], ids=["at_a_boundary", "inside_a_piece"])
@torch.no_grad()
def test_what_was_seen_before_an_episode_began_changes_nothing_after_it(begins):
    player = cutting_player(clocks(2), 4)
    rollout = player.play(16)
    rollout.starts[begins] = True

    def judged():
        rows = pieces_of(rollout)
        said = player.agent.network.evaluate_actions(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts
        )
        return said.values.view(2, 16)

    before = judged()
    rollout.states[:begins] += 1
    number = begins // 4
    for state in rollout.hidden:
        state[:, number :: rollout.per_row] += 1  # of the piece in which the episode begins
    after = judged()
    assert torch.equal(before[:, begins:12], after[:, begins:12])
    assert not torch.equal(before[:, :begins], after[:, :begins])


# -- minibatches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "pieces"), [(1, 8), (2, 4), (3, 3), (7, 2), (8, 1), (9, 1)])
def test_rows_are_cut_into_as_few_pieces_as_fill_all_minibatches(count, pieces):
    player = player_for(clocks(count), settings(minibatches=8, epochs=3, target_kl=None))
    rollout = player.play(64)
    assert rollout.per_row == pieces
    assert player.agent.update(rollout).steps == 3 * 8


@pytest.mark.parametrize("steps", [1, 5])
def test_a_rollout_that_is_shorter_than_its_pieces_is_cut_into_single_steps(steps):
    player = player_for(clocks(1), settings(minibatches=8, epochs=3, target_kl=None))
    assert player.agent.update(player.play(steps)).steps == 3 * steps


@MODES
def test_decisions_of_short_pieces_are_counted_once(mode):
    player = cutting_player(ending_clocks(mode), 6, minibatches=8, epochs=1, target_kl=None)
    rollout = player.play(STEPS)
    seen = []
    real = player.agent._step
    player.agent._step = lambda *args: seen.append(real(*args)) or seen[-1]
    record = player.agent.update(rollout)
    assert len(seen) == 8
    assert (
        sum(int(trace.valid.sum()) for trace in seen)
        == record.decisions
        == int(rollout.valid.sum())
    )


def test_all_pieces_together_teach_what_whole_rows_teach_where_no_memory_crosses_a_cut():
    """Episodes of 4 steps begin with every piece, so that cutting loses no gradient."""
    learned = []
    for pieces in (6, 1):
        player = cutting_player(clocks(2, episodes=[4, 4]), pieces, minibatches=1, epochs=1)
        record = player.agent.update(player.play(24))
        learned.append(
            (record.policy_loss, record.value_loss, record.gradient_norm, record.entropy)
        )
    assert learned[0] == pytest.approx(learned[1], abs=1e-6)


# -- what is said about it -------------------------------------------------------------------------


def test_a_decision_is_named_by_its_place_in_the_row_not_in_the_piece():
    player = cutting_player(clocks(3), 6, minibatches=1)
    rollout = player.play(STEPS)
    rollout.log_probs[14, 1] -= 2.0
    record = player.agent.update(rollout)
    assert (record.first_worst.host, record.first_worst.epoch) == (1, 15)
    assert (record.explosion.worst[0].host, record.explosion.worst[0].epoch) == (1, 15)


@MODES
def test_states_at_the_cuts_are_stale_by_what_was_learned_and_not_otherwise(mode):
    for shift, is_stale in (
        (0.0, True),
        (1.0, False),
    ):  # a shift is far too large a divergence: no step is taken
        player = cutting_player(ending_clocks(mode), 6, epochs=4)
        rollout = player.play(STEPS)
        rollout.log_probs -= shift
        record = player.agent.update(rollout)
        assert (record.steps > 0) == is_stale
        assert (record.stale_state_error > 1e-9) == is_stale


@torch.no_grad()
def test_stale_states_are_counted_at_the_end_of_every_piece():
    player = cutting_player(clocks(2, episodes=[6, None]), 3)
    rollout = player.play(11)
    rollout.hidden[0][:, 1::3] += 0.5  # before step 4, of both
    rollout.hidden[0][:, 2::3] += 0.25  # before step 8
    rollout.end_hidden[0][:] += 0.125
    assert not rollout.ended[[3, 7, 10]].any()
    expected = (0.25 + 0.0625 + 0.015625) / 3
    assert player.agent._stale_state_error(rollout) == pytest.approx(expected, rel=1e-4)
