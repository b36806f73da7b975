"""Faults in what learning sees again of acting, and in what it makes of several heads; numbers: PPO_TRAPS.md."""

from planted_faults import Fault

AGENT = "simic/agent.py"
DIAGNOSTICS = "simic/diagnostics.py"
LEARNING = "simic/learning.py"
LOSSES = "simic/losses.py"
ROLLOUT = "simic/rollout.py"
TRACING = "simic/update_record.py"
RECONSTRUCTION = "simic/test_reconstruction.py::test_"
LOSS = "simic/test_losses.py::test_"
UPDATE = "simic/test_update.py::test_"
RECORD = "simic/test_record.py::test_every_field_of_a_record_is_what_a_slow_learner_finds"

ACTED = (
    "        rollout.add_decision(self.states, self.masks, choices, log_probs, values, ~self.is_filler, self.begins)\n"
)
MOVED = "        obs, rewards, terminated, truncated, info = self.env.step(self.actions.decode(choices))\n"
PASSED = "        traces, stopped = self._passes(rollout, advantages, returns, weight)\n"

SEEN_AGAIN = [
    Fault(
        "1: rows begin with empty memory",
        ROLLOUT,
        "self.hidden = (hidden[0].clone(), hidden[1].clone())",
        "self.hidden = (torch.zeros_like(hidden[0]), torch.zeros_like(hidden[1]))",
        RECONSTRUCTION + "before_any_step_every_ratio_is_one",
    ),
    Fault(
        "1: the first ratio is measured after the last step",
        TRACING,
        "_first_gaps(traces[0], names)",
        "_first_gaps(traces[-1], names)",
        RECONSTRUCTION + "before_any_step_every_ratio_of_chained_heads_is_one",
    ),
    Fault(
        "1: acting and learning may disagree unseen",
        DIAGNOSTICS,
        '("first ratio gap", gap,',
        '("first ratio gap", 0.0,',
        RECONSTRUCTION + "a_stored_probability_that_is_a_hundredth_off_is_an_anomaly_that_names_it",
    ),
    Fault(
        "1: the first disagreement is named by the wrong end of the list",
        TRACING,
        "RatioExplosionDiagnostic.of(trace.log_ratios, trace.rows, names, 1.0).worst)",
        "RatioExplosionDiagnostic.of(trace.log_ratios, trace.rows, names, 1.0).worst[::-1])",
        RECONSTRUCTION + "a_stored_probability_that_is_a_hundredth_off_is_an_anomaly_that_names_it",
    ),
    Fault(
        "2: learning forgets the masks",
        ROLLOUT,
        "masks={name: mask[:, index].transpose(0, 1) for name, mask in self.masks.items()},",
        "masks={},",
        RECONSTRUCTION + "before_any_step_every_ratio_is_one",
    ),
    Fault(
        "3: the environment's own mask is written to",
        LEARNING,
        "given = np.array(list(given), dtype=np.bool_)",
        "given = np.asarray(given, dtype=np.bool_)",
        RECONSTRUCTION + "the_environments_arrays_are_only_read",
    ),
    Fault(
        "3: what was seen is stored after the environment has moved on",
        LEARNING,
        ACTED + MOVED,
        MOVED + ACTED,
        RECONSTRUCTION
        + "stored_masks_and_observations_are_those_that_were_used_though_the_environment_reuses_its_arrays",
    ),
    Fault(
        "3: the state of a row is the caller's own tensor",
        ROLLOUT,
        "self.hidden = (hidden[0].clone(), hidden[1].clone())",
        "self.hidden = hidden",
        RECONSTRUCTION + "a_decision_is_stored_by_value",
    ),
    Fault(
        "5: the state after the first step is stored",
        LEARNING,
        "rollout.begin(self.hidden)",
        "rollout.begin(self.agent.network.choose(self.states, self.hidden, self.masks)[3])",
        RECONSTRUCTION + "the_state_of_a_row_is_the_one_before_its_first_step",
    ),
    Fault(
        "5: memory outlives its epochs",
        LEARNING,
        "self.hidden = self.agent.restart(self.hidden, self.begins)",
        "self.hidden = hidden",
        RECONSTRUCTION + "memory_is_as_old_as_the_episode_and_zero_where_one_begins",
    ),
    Fault(
        "6: rows mix environments",
        ROLLOUT,
        "states=self.states[:, index].transpose(0, 1),",
        "states=self.states[:, index].reshape(len(index), self.steps, -1),",
        RECONSTRUCTION + "a_row_is_one_environment_with_consecutive_steps",
    ),
    Fault(
        "6: rows have the states of others",
        ROLLOUT,
        "hidden=(self.hidden[0][:, index], self.hidden[1][:, index]),",
        "hidden=(self.hidden[0][:, : len(index)], self.hidden[1][:, : len(index)]),",
        RECONSTRUCTION + "everything_in_a_row_belongs_to_its_environment_and_step",
    ),
    Fault(
        "9: learning goes on across the beginning of a epochs",
        ROLLOUT,
        "starts=self.starts[:, index].transpose(0, 1),",
        "starts=torch.zeros_like(self.starts)[:, index].transpose(0, 1),",
        RECONSTRUCTION + "what_was_seen_before_an_episode_began_changes_nothing_after_it",
    ),
    Fault(
        "10: looking ahead advances the memory",
        LEARNING,
        "        rollout.finish(",
        "        self.hidden = self.agent.network.follow(self.states[:, None], self.hidden)\n        rollout.finish(",
        RECONSTRUCTION + "looking_ahead_does_not_advance_the_memory",
    ),
    Fault(
        "11: states are never called stale",
        AGENT,
        "return float((fresh - rollout.end_hidden[0][:, goes_on]).square().mean())",
        "return 0.0",
        RECONSTRUCTION + "rows_that_go_on_report_how_stale_their_states_have_become",
    ),
    Fault(
        "11: episodes that ended are called stale",
        AGENT,
        "goes_on = rollout.valid[-1] & ~rollout.ended[-1]",
        "goes_on = rollout.valid[-1]",
        RECONSTRUCTION + "rows_that_are_whole_episodes_have_no_stale_states",
    ),
    Fault(
        "12: statistics move from minibatch to minibatch",
        AGENT,
        "                own = advantages[:, index].T, returns[:, index].T\n",
        "                own = advantages[:, index].T, returns[:, index].T\n"
        "                self.network.observation_stats.update(rollout.rows(index).states.flatten(0, 1))\n",
        RECONSTRUCTION + "statistics_stand_still_from_the_first_act_to_the_last_minibatch_and_change_once_after",
    ),
    Fault(
        "12: statistics of returns move before the update",
        AGENT,
        PASSED,
        "        self.network.update_return_stats(returns[rollout.valid][:, None])\n" + PASSED,
        RECONSTRUCTION + "statistics_stand_still_from_the_first_act_to_the_last_minibatch_and_change_once_after",
    ),
    Fault(
        "12: statistics take in filler",
        AGENT,
        "_finite(rollout.states[rollout.valid])",
        "_finite(rollout.states.flatten(0, 1))",
        RECONSTRUCTION + "statistics_take_in_the_stored_observations_and_the_returns",
    ),
    Fault(
        "13: acting is done in half precision",
        LEARNING,
        "    @torch.no_grad()\n    def play",
        '    @torch.no_grad()\n    @torch.autocast("cpu", torch.bfloat16)\n    def play',
        RECONSTRUCTION + "before_any_step_every_ratio_is_one",
    ),
    Fault(
        "13: log-probabilities are stored in half precision",
        ROLLOUT,
        "self.log_probs = like.new_zeros(*shape, heads)",
        "self.log_probs = like.new_zeros(*shape, heads, dtype=torch.bfloat16)",
        RECONSTRUCTION + "before_any_step_every_ratio_of_chained_heads_is_one",
    ),
]

HEADS = [
    Fault(
        "22: heads that an op does not use are learned from",
        LOSSES,
        "rows.append(valid & torch.isin(first, torch.tensor(head.used_by, device=first.device)))",
        "rows.append(valid)",
        UPDATE + "what_is_stored_for_heads_that_an_op_does_not_use_changes_no_bit",
    ),
    Fault(
        "23: a rare head is divided by all steps",
        LOSSES,
        "per_head = surrogate.sum((1, 2)) / counts.relevant",
        "per_head = surrogate.sum((1, 2)) / counts.valid",
        LOSS + "a_head_is_divided_by_the_steps_it_took_part_in",
    ),
    Fault(
        "23: a head that nobody used is 0 / 0",
        LOSSES,
        "by_row.sum(1).clamp(min=1).split(",
        "by_row.sum(1).split(",
        LOSS + "a_head_that_nobody_used_costs_nothing",
    ),
    Fault(
        "24: the divergence counts heads that were not used",
        LOSSES,
        "log_ratios = torch.where(is_relevant, new - old, 0.0)",
        "log_ratios = new - old",
        LOSS + "the_divergence_is_of_whole_decisions_and_leaves_unused_heads_out",
    ),
    Fault(
        "24: a head's clip fraction counts steps that it had no part in",
        TRACING,
        "_head_record(own[relevant[place]],",
        "_head_record(own.flatten(),",
        RECORD,
    ),
    Fault(
        "25: heads are always clipped jointly",
        LOSSES,
        'if mode == "joint":',
        "if mode:",
        LOSS + "each_head_is_clipped_by_itself_as_in_a_table_worked_out_by_hand",
    ),
    Fault(
        "25: heads are never clipped jointly",
        LOSSES,
        'if mode == "joint":',
        "if not mode:",
        LOSS + "four_heads_at_one_point_one_five_are_clipped_jointly_but_not_by_themselves",
    ),
    Fault(
        "25: ratios are clipped from above only",
        LOSSES,
        "ratio.clamp(1 - clip, 1 + clip)",
        "ratio.clamp(max=1 + clip)",
        LOSS + "whole_decisions_are_clipped_jointly_as_in_a_table_worked_out_by_hand",
    ),
    Fault(
        "25: the better of clipped and unclipped is taken",
        LOSSES,
        "-torch.minimum(ratio * advantages,",
        "-torch.maximum(ratio * advantages,",
        LOSS + "clipping_stops_the_gradient_only_where_more_change_would_pay",
    ),
    Fault(
        "27: the entropy bonus is paid only where the op was taken",
        AGENT,
        "mean_entropy(entropy, steps.is_open, rows.valid, counts.open)",
        "mean_entropy(entropy, steps.is_open & relevant, rows.valid, counts.open)",
        UPDATE + "a_head_whose_op_was_possible_but_not_taken_still_gets_its_entropy_bonus",
    ),
    Fault(
        "27: entropy is averaged over steps without a choice",
        LOSSES,
        "counted = is_open & valid",
        "counted = valid.expand(is_open.shape)",
        LOSS + "entropy_is_averaged_over_valid_steps_at_which_the_head_had_a_choice",
    ),
]
