"""Faults in when an update stops, what it skips, and what it says of itself; numbers are those of PPO_TRAPS.md."""

from planted_faults import Fault

AGENT = "simic/agent.py"
CONFIG = "simic/config.py"
DIAGNOSTICS = "simic/diagnostics.py"
LOSSES = "simic/losses.py"
ROLLOUT = "simic/rollout.py"
TRACING = "simic/update_record.py"
ESCALATION = "telemetry/escalation.py"
RETURNS = "simic/test_returns.py::test_"
LOSS = "simic/test_losses.py::test_"
UPDATE = "simic/test_update.py::test_"
RECORD = "simic/test_record.py::test_every_field_of_a_record_is_what_a_slow_learner_finds"
ANOMALIES = "simic/test_anomalies.py::test_"
SETTINGS = "simic/test_config.py::test_"
ESCALATING = "telemetry/test_escalation.py::test_"

CONTROL = [
    Fault(
        "35: the divergence is the mean log-ratio",
        LOSSES,
        "torch.where(valid, log_ratio.exp() - 1 - log_ratio, 0.0)",
        "torch.where(valid, -log_ratio, 0.0)",
        LOSS + "the_divergence_is_never_negative_where_the_plain_estimate_is",
    ),
    Fault(
        "35: the divergence is averaged over filler",
        LOSSES,
        "return each.sum() / (valid.sum().clamp(min=1) if count is None else count)",
        "return each.mean()",
        LOSS + "the_divergence_is_the_mean_of_r_minus_one_minus_log_r",
    ),
    Fault(
        "35: the minibatch that goes too far still takes its step",
        AGENT,
        "            return None, kl\n",
        "            self.optimizer.step()\n            return None, kl\n",
        UPDATE + "the_minibatch_that_goes_too_far_takes_no_step_and_ends_the_update",
    ),
    Fault(
        "35: too large a divergence skips a minibatch but not the rest",
        AGENT,
        "                    return traces, epoch\n",
        "                    pass\n",
        UPDATE + "the_minibatch_that_goes_too_far_takes_no_step_and_ends_the_update",
    ),
    Fault(
        "35: the update stops at the target itself",
        AGENT,
        "KL_SLACK = 1.5",
        "KL_SLACK = 1.0",
        UPDATE + "the_update_stops_beyond_one_and_a_half_times_the_target",
    ),
    Fault(
        "37: schedules go by updates",
        AGENT,
        "self.decisions += int(pool(rollout.valid.sum()))",
        "self.decisions += 1",
        UPDATE + "rate_and_bonus_fall_in_a_straight_line_by_decisions_to_their_floors",
    ),
    Fault(
        "37: schedules stand still when an update is cut short",
        AGENT,
        "self.decisions += int(pool(rollout.valid.sum()))",
        "self.decisions += 0 if stopped is not None else int(pool(rollout.valid.sum()))",
        UPDATE + "schedules_do_not_depend_on_updates_that_were_cut_short",
    ),
    Fault(
        "37: the optimiser is not told of its rate",
        AGENT,
        'group["lr"] = rate',
        "assert group",
        UPDATE + "rate_and_bonus_fall_in_a_straight_line_by_decisions_to_their_floors",
    ),
    Fault(
        "37: schedules fall through their floor",
        CONFIG,
        "min(1.0, decisions / over)",
        "decisions / over",
        SETTINGS + "a_schedule_is_a_line_by_decisions_and_then_its_floor",
    ),
    Fault(
        "38: the worst is named by its place in the minibatch",
        DIAGNOSTICS,
        "key = (int(hosts[row]), step, head)",
        "key = (row, step, head)",
        ANOMALIES + "the_worst_are_named_by_host_epoch_and_head_the_worst_first",
    ),
    Fault(
        "38: a choice is named at its least bad pass",
        DIAGNOSTICS,
        " and key not in worst and",
        " and",
        ANOMALIES + "a_choice_that_is_off_in_every_pass_is_named_once_at_its_worst",
    ),
    Fault(
        "38: heads that are off only together are not named",
        DIAGNOSTICS,
        "outside = (size > bound) | ((whole > bound) & (size == size.amax(0)))",
        "outside = size > bound",
        ANOMALIES + "a_decision_that_is_far_off_only_as_a_whole_is_named_by_the_head_that_moved_most",
    ),
    Fault(
        "38: probabilities that vanish are no anomaly",
        DIAGNOSTICS,
        "extreme = max(record.ratio_max, 1 / record.ratio_min if record.ratio_min > 0 else math.inf)",
        "extreme = record.ratio_max",
        ANOMALIES + "each_limit_has_its_own_anomaly",
    ),
    Fault(
        "38: losses that are not numbers are no anomaly",
        DIAGNOSTICS,
        "broken = record.skipped_steps + sum(not math.isfinite(number) for number in numbers)",
        "broken = record.skipped_steps",
        ANOMALIES + "each_limit_has_its_own_anomaly",
    ),
    Fault(
        "38: a policy without doubt is no anomaly",
        DIAGNOSTICS,
        "if first.entropy < self.entropy_floor:",
        "if first.entropy < 0:",
        ANOMALIES + "a_first_head_without_doubt_is_an_anomaly_and_a_later_one_is_not",
    ),
    Fault(
        "38: the value never has to know anything",
        DIAGNOSTICS,
        "if progress >= start][-1]",
        "if progress >= start][0]",
        ANOMALIES + "the_value_has_to_know_more_as_training_goes_on",
    ),
    Fault(
        "38: log-ratios in records are not clamped",
        TRACING,
        "return log_ratios.clamp(-_LIMIT, _LIMIT).exp()",
        "return log_ratios.exp()",
        ANOMALIES + "records_stay_finite_however_far_a_probability_moved",
    ),
    Fault(
        "38: every anomaly escalates anew",
        ESCALATION,
        "if not is_first or self.base_level in",
        "if self.base_level in",
        ANOMALIES + "one_bad_row_gives_exactly_one_escalation_that_names_it",
    ),
    Fault(
        "38: an escalation never ends",
        ESCALATION,
        "max(0, self._rounds_left - 1)",
        "max(0, self._rounds_left)",
        ANOMALIES + "one_bad_row_gives_exactly_one_escalation_that_names_it",
    ),
    Fault(
        "38: a fault that stays escalates for ever",
        ESCALATION,
        "self._is_series = self._was_called or self._rounds_left > 0",
        "self._is_series = self._rounds_left > 0",
        ESCALATING + "a_fault_that_stays_is_shown_in_full_once",
    ),
    Fault(
        "38: a series of anomalies never ends",
        ESCALATION,
        "        self._was_called = False\n\n\n",
        "\n\n",
        ESCALATING + "an_anomaly_after_a_quiet_round_is_a_new_one",
    ),
    Fault(
        "39: gradients that are not finite are used",
        AGENT,
        "if bool(torch.isfinite(norm)):",
        "if norm is not None:",
        UPDATE + "a_reward_that_is_not_a_number_changes_nothing_and_is_counted",
    ),
    Fault(
        "39: skipped steps are not counted",
        TRACING,
        "skipped_steps=len(norms) - len(finite),",
        "skipped_steps=0,",
        UPDATE + "one_bad_minibatch_is_left_out_and_the_others_are_learned_from",
    ),
    Fault(
        "39: statistics take in what is not a number",
        AGENT,
        "return rows[rows.isfinite().all(1)]",
        "return rows",
        UPDATE + "statistics_never_take_in_what_is_not_finite",
    ),
    Fault(
        "40: each part of the network is clipped by itself",
        AGENT,
        "norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)",
        "norm = torch.stack([nn.utils.clip_grad_norm_(part.parameters(), self.config.max_grad_norm) "
        "for part in self.network.children()]).norm()",
        UPDATE + "gradients_of_the_whole_network_are_clipped_together",
    ),
    Fault(
        "rows are dealt into fewer parts than there are minibatches",
        AGENT,
        "order.tensor_split(min(",
        "order.chunk(min(",
        UPDATE + "rows_are_dealt_into_as_many_parts_as_there_are_minibatches_each_row_once",
    ),
    Fault(
        "the divergence in the record is the first one",
        TRACING,
        "approx_kl=float(traces[-1].kl),",
        "approx_kl=float(traces[0].kl),",
        RECORD,
    ),
    Fault(
        "a head's decisions are counted in every op",
        ROLLOUT,
        "return [int(count) for count in relevant_steps(self.spec, choices, self.valid).sum((1, 2))]",
        "return [int(self.valid.sum()) for _ in self.spec.heads]",
        RECORD,
    ),
    Fault(
        "explained variance is the share that is left",
        ROLLOUT,
        "return 1.0 - missed / spread if",
        "return missed / spread if",
        RETURNS + "explained_variance_is_the_share_of_the_returns_that_the_values_knew",
    ),
    Fault(
        "the network is not compiled",
        AGENT,
        "network.evaluate if backend is None else torch.compile(network.evaluate, backend=backend)",
        "network.evaluate",
        "simic/test_compile.py::test_a_compiled_learner_learns_the_same",
    ),
]
