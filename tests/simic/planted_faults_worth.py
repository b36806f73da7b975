"""Faults in what a decision is worth: ends, filler, advantages, values; numbers are those of PPO_TRAPS.md."""

from planted_faults import Fault

AGENT = "simic/agent.py"
LEARNING = "simic/learning.py"
LOSSES = "simic/losses.py"
ROLLOUT = "simic/rollout.py"
RETURNS = "simic/test_returns.py::test_"
PLAYING = "simic/test_playing.py::test_"
LOSS = "simic/test_losses.py::test_"
UPDATE = "simic/test_update.py::test_"
LEARN = "simic/test_learning.py::test_"


WORTH = [
    Fault(
        "28: a termination bootstraps",
        ROLLOUT,
        "gamma * torch.where(terminated, 0.0, after_values) * pays_on",
        "gamma * after_values",
        RETURNS + "a_termination_does_not_bootstrap_whatever_comes_after_it",
    ),
    Fault(
        "28: a truncation does not bootstrap",
        ROLLOUT,
        "torch.where(terminated, 0.0, after_values)",
        "torch.where(ended, 0.0, after_values)",
        RETURNS + "a_truncation_bootstraps_from_the_last_observation",
    ),
    Fault(
        "28: the trace runs across a truncation",
        ROLLOUT,
        "goes_on = (~ended).to(rewards)",
        "goes_on = (~terminated).to(rewards)",
        RETURNS + "no_trace_crosses_an_end",
    ),
    Fault(
        "28: a truncated epochs is worth what it was one step before",
        ROLLOUT,
        "torch.where(self.final_values.isnan(), following, self.final_values)",
        "torch.where(self.truncated, self.values, following)",
        PLAYING + "a_truncated_episode_is_worth_its_last_observation_seen_with_its_own_memory",
    ),
    Fault(
        "28: the last observation is seen with fresh memory",
        LEARNING,
        "self.agent.network.look(torch.as_tensor(shown), self.hidden)",
        "self.agent.network.look(torch.as_tensor(shown), self.agent.network.get_initial_hidden(len(shown)))",
        PLAYING + "a_truncated_episode_is_worth_its_last_observation_seen_with_its_own_memory",
    ),
    Fault(
        "28: the next epochs's first observation is taken for the last",
        LEARNING,
        "shown[host] = self.observations.encode(last)[0].numpy()",
        "self.observations.encode(last)",
        PLAYING + "a_truncated_episode_is_worth_its_last_observation_seen_with_its_own_memory",
    ),
    Fault(
        "28: a reset that takes a step clears the memory too early",
        LEARNING,
        "self.begins = ends if self.resets_at_once else self.is_filler",
        "self.begins = ends",
        PLAYING + "a_truncated_episode_is_worth_its_last_observation_seen_with_its_own_memory",
    ),
    Fault(
        "28: truncations are taken for terminations",
        LEARNING,
        "torch.as_tensor(terminated), torch.as_tensor(truncated), finals",
        "torch.as_tensor(terminated | truncated), torch.as_tensor(truncated), finals",
        RETURNS + "a_stream_of_ones_that_is_only_truncated_is_worth_its_infinite_sum",
    ),
    Fault(
        "28: terminations are taken for truncations",
        LEARNING,
        "torch.as_tensor(terminated), torch.as_tensor(truncated), finals",
        "torch.as_tensor(terminated & False), torch.as_tensor(terminated | truncated), finals",
        RETURNS + "a_stream_of_ones_that_terminates_is_worth_only_what_is_paid",
    ),
    Fault(
        "28: an end that is both bootstraps",
        ROLLOUT,
        "= rewards, terminated, truncated & ~terminated",
        "= rewards, terminated & ~truncated, truncated",
        RETURNS + "an_end_that_is_both_counts_as_a_termination",
    ),
    Fault(
        "29: a rollout that breaks off is worth nothing",
        ROLLOUT,
        "torch.cat([self.values[1:], values[None]])",
        "torch.cat([self.values[1:], torch.zeros_like(values)[None]])",
        PLAYING + "a_episode_that_goes_on_is_worth_what_the_next_observation_is_worth",
    ),
    Fault(
        "29: the end of a step is read one step late",
        ROLLOUT,
        "gamma * lam * goes_on[step] * carried",
        "gamma * lam * goes_on[min(step + 1, len(rewards) - 1)] * carried",
        RETURNS + "a_reward_at_the_last_step_reaches_back_as_the_closed_form_says",
    ),
    Fault(
        "30: any way of resetting will do",
        LEARNING,
        "if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):",
        "if mode is None:",
        PLAYING + "another_way_of_resetting_is_refused",
    ),
    Fault(
        "30: resets that take a step are decisions",
        LEARNING,
        "values, ~self.is_filler, self.begins)",
        "values, torch.ones_like(self.begins), self.begins)",
        PLAYING + "a_reset_that_takes_a_step_is_filler_and_one_that_does_not_is_none",
    ),
    Fault(
        "30: numbers at filler steps are kept",
        ROLLOUT,
        "numbers[~self.valid] = 0.0",
        "numbers[~self.valid] += 0.0",
        PLAYING + "what_stands_at_filler_steps_changes_no_bit_of_what_is_learned",
    ),
    Fault(
        "30: filler has advantages",
        ROLLOUT,
        "found = torch.where(self.valid, found, 0.0)",
        "found = found.clone()",
        PLAYING + "filler_has_no_advantage_and_no_return",
    ),
    Fault(
        "30: a finished epochs has to allow something",
        LEARNING,
        "mask[self.is_filler] = True",
        "mask[self.is_filler] &= True",
        PLAYING + "masks_are_read_from_info",
    ),
    Fault(
        "30: memory is cleared by multiplying",
        AGENT,
        "return state[0].masked_fill(is_new, 0.0), state[1].masked_fill(is_new, 0.0)",
        "return state[0] * ~is_new, state[1] * ~is_new",
        LEARN + "restarting_clears_single_memories_even_of_what_is_not_a_number",
    ),
    Fault(
        "31: a failure's penalty is lost",
        LEARNING,
        "torch.as_tensor(rewards).float(),",
        "torch.as_tensor(rewards * ~terminated).float(),",
        PLAYING + "the_penalty_of_a_host_that_fails_reaches_the_learner_on_that_step",
    ),
    Fault(
        "32: advantages are normalised over filler too",
        ROLLOUT,
        "_moments(advantages[valid], pool)",
        "_moments(advantages.flatten(), pool)",
        RETURNS + "advantages_are_normalised_over_valid_steps_only",
    ),
    Fault(
        "32: equal advantages are divided by zero",
        ROLLOUT,
        "(variance.sqrt() + 1e-8)",
        "variance.sqrt()",
        RETURNS + "equal_advantages_are_zero_and_finite",
    ),
    Fault(
        "33: the value pays for the better of clipped and unclipped",
        LOSSES,
        "worst = torch.maximum(",
        "worst = torch.minimum(",
        LOSS + "the_value_pays_for_the_worse_of_clipped_and_unclipped",
    ),
    Fault(
        "33: the value's loss is clamped",
        LOSSES,
        "worst = torch.maximum((new - returns).square(), (clipped - returns).square())",
        "worst = (new - returns).square().clamp(max=10 * clip)",
        LOSS + "a_large_error_keeps_its_gradient",
    ),
    Fault(
        "33: the value's clip is in the rewards' units",
        LOSSES,
        "new, old, returns = new / scale, old / scale, returns / scale\n"
        "    clipped = old + (new - old).clamp(-clip, clip)",
        "clipped = (old + (new - old).clamp(-clip, clip)) / scale\n    new, returns = new / scale, returns / scale",
        LOSS + "the_value_clip_is_in_units_of_the_returns_scale",
    ),
    Fault(
        "33: the value's loss grows with the rewards",
        AGENT,
        "scale = self.network.return_stats.std.to(values.dtype)",
        "scale = torch.ones(1)",
        UPDATE + "rewards_a_hundred_times_as_large_give_the_same_gradients",
    ),
    Fault(
        "33: old values follow the new ones",
        AGENT,
        "value_loss(values, rows.values, returns,",
        "value_loss(values, values.detach(), returns,",
        UPDATE + "every_pass_sees_the_same_normalised_advantages_and_the_same_old_values",
    ),
    Fault(
        "34: new statistics of returns move every value",
        AGENT,
        "self.network.update_return_stats(_finite(returns[rollout.valid][:, None]), pool)",
        "self.network.return_stats.update(_finite(returns[rollout.valid][:, None]), pool)",
        UPDATE + "new_statistics_of_returns_change_no_value",
    ),
    Fault(
        "46: environments share a trace",
        ROLLOUT,
        "goes_on[step] * carried\n",
        "goes_on[step] * carried.mean()\n",
        RETURNS + "environments_do_not_touch_each_other",
    ),
]
