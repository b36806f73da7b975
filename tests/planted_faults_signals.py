"""Faults of signals, observation, greedy scores, the network as a policy and look-ups, with the test for each."""

from planted_faults import Fault

SIGNALS, OBSERVATION, LEARNED = "tamiyo/signals.py", "tamiyo/observation.py", "tamiyo/learned.py"
RULES, MASKS, ARMS = "tamiyo/rules.py", "tamiyo/masks.py", "trials/arms.py"
MEASURING, GARDEN = "kasmina/evidence.py", "garden.py"
ACTIONS, LEGALITY = "leyline/factored_actions.py", "leyline/legality.py"

TRACKED = [
    Fault(
        "history grows without end",
        SIGNALS,
        "losses=(*before.losses, loss)[-HISTORY:]",
        "losses=(*before.losses, loss)",
        "tamiyo/test_signals.py::test_the_last_five_held_out_readings_are_kept_oldest_first",
    ),
    Fault(
        "the worst loss is the record",
        SIGNALS,
        "min(loss, before.best_loss)",
        "max(loss, before.best_loss)",
        "tamiyo/test_signals.py::test_any_episode_is_followed_as_a_slow_reference_would",
    ),
    Fault(
        "progress is not in units of the loss scale",
        SIGNALS,
        "before.best_loss - _PROGRESS * self.loss_scale",
        "before.best_loss - _PROGRESS",
        "tamiyo/test_signals.py::test_a_thousandth_of_the_loss_scale_is_progress_and_less_is_not",
    ),
    Fault(
        "a plateau never ends",
        SIGNALS,
        "plateau_epochs=0 if is_better else before.plateau_epochs + 1",
        "plateau_epochs=before.plateau_epochs + 1",
        "tamiyo/test_signals.py::test_a_plateau_counts_epochs_since_the_loss_got_better",
    ),
    Fault(
        "one NaN stays in the records",
        SIGNALS,
        "        signals = _only_finite(signals)\n",
        "",
        "tamiyo/test_signals.py::test_a_host_that_broke_does_not_spoil_its_records",
    ),
    Fault(
        "a slot without a report goes unnoticed",
        SIGNALS,
        "        if missing:\n",
        "        if len(missing) > 9:\n",
        "tamiyo/test_signals.py::test_a_slot_without_a_report_is_refused_by_name",
    ),
    Fault(
        "a loss scale of zero is taken",
        SIGNALS,
        "if not loss_scale > 0:",
        "if loss_scale < 0:",
        "tamiyo/test_signals.py::test_a_loss_scale_that_is_not_above_zero_is_refused",
    ),
    Fault(
        "a loaded tracker has lost its past",
        SIGNALS,
        '"losses": tuple(values["losses"])',
        '"losses": tuple(values["losses"])[-1:]',
        "tamiyo/test_signals.py::test_a_saved_tracker_goes_on_as_if_nothing_had_happened",
    ),
]

OBSERVED = [
    Fault(
        "histories are oldest first",
        OBSERVATION,
        "values[-1 - ago]",
        "values[ago]",
        "tamiyo/test_observation.py::test_histories_are_newest_first_and_unknown_before_the_beginning",
    ),
    Fault(
        "telemetry has another order than its names",
        OBSERVATION,
        'names += [f"{slot}.{name}" for name in TELEMETRY_FEATURES]',
        'names += [f"{slot}.{name}" for name in sorted(TELEMETRY_FEATURES)]',
        "tamiyo/test_observation.py::test_base_comes_first_then_every_slot_then_every_slots_telemetry",
    ),
    Fault(
        "the width counts telemetry that is off",
        OBSERVATION,
        "use_telemetry * len(TELEMETRY_FEATURES)",
        "len(TELEMETRY_FEATURES)",
        "tamiyo/test_observation.py::test_three_slots_make_eighty_features_and_fifty_without_telemetry",
    ),
    Fault(
        "an empty slot shows the seed it had",
        OBSERVATION,
        "[feature(report, loss_scale) if report.is_live else 0.0 for feature in _PER_SLOT]",
        "[feature(report, loss_scale) if report.blueprint_id else 0.0 for feature in _PER_SLOT]",
        "tamiyo/test_observation.py::test_an_empty_slot_is_zero_whatever_its_report_remembers",
    ),
    Fault(
        "the score of an empty slot is hidden",
        OBSERVATION,
        '_OF_THE_PLACE = ("greedy_score", "epochs_in_stage")',
        '_OF_THE_PLACE = ("epochs_in_stage",)',
        "tamiyo/test_observation.py::test_a_place_has_its_score_and_its_time_in_stage_without_a_seed",
    ),
    Fault(
        "an empty slot is flagged for want of a score",
        OBSERVATION,
        "max(0.0, TELEMETRY_FEATURES[name](report, loss_scale))",
        "(TELEMETRY_FEATURES[name](report, loss_scale))",
        "tamiyo/test_observation.py::test_an_empty_slot_is_zero_whatever_its_report_remembers",
    ),
    Fault(
        "losses are not in units of guessing",
        OBSERVATION,
        "min(value / scale, 3.0)",
        "min(value, 3.0)",
        "tamiyo/test_observation.py::test_losses_are_in_units_of_guessing_up_to_three",
    ),
    Fault(
        "not measured looks like zero",
        OBSERVATION,
        "UNKNOWN = -1.0",
        "UNKNOWN = 0.0",
        "tamiyo/test_observation.py::test_what_was_not_measured_of_the_host_is_flagged",
    ),
    Fault(
        "every live seed counts as measured",
        OBSERVATION,
        "float(r.is_measured)",
        "float(r.is_live)",
        "tamiyo/test_observation.py::test_a_contribution_of_zero_is_told_from_none_by_its_flag",
    ),
    Fault(
        "NaN gets into the observation",
        OBSERVATION,
        "return value is not None and not math.isnan(value)",
        "return value is not None",
        "tamiyo/test_observation.py::test_no_reading_whatever_makes_a_feature_that_is_not_finite_or_beyond_five",
    ),
    Fault(
        "vanishing is told as exploding",
        OBSERVATION,
        "ratio <= 0.01 if low else ratio >= 100.0",
        "ratio >= 100.0 if low else ratio <= 0.01",
        "tamiyo/test_observation.py::test_health_is_one_where_seed_and_host_move_alike",
    ),
    Fault(
        "a change has lost its sign",
        OBSERVATION,
        "math.tanh(10 * value / scale)",
        "math.tanh(10 * abs(value) / scale)",
        "tamiyo/test_observation.py::test_a_contribution_is_signed_and_in_units_of_the_loss_scale",
    ),
    Fault(
        "a deep blueprint leaves the range",
        OBSERVATION,
        "min(_traits(r).depth / _DEEP, 2.0)",
        "_traits(r).depth / _DEEP",
        "tamiyo/test_observation.py::test_a_very_deep_blueprint_does_not_leave_the_range",
    ),
    Fault(
        "a trait may be anything",
        OBSERVATION,
        "np.clip(np.asarray(values, np.float32), -LARGEST, LARGEST)",
        "np.asarray(values, np.float32)",
        "tamiyo/test_observation.py::test_no_feature_is_further_from_zero_than_the_largest[trait]",
    ),
]

GREEDY = [
    Fault(
        "greedy is modest",
        RULES,
        "slot = max(scores, key=",
        "slot = min(scores, key=",
        "tamiyo/test_greedy.py::test_the_highest_score_is_planted",
    ),
    Fault(
        "equal scores go to the earlier slot",
        RULES,
        "(scores[s] or 0.0, s)",
        "(scores[s] or 0.0, -s)",
        "tamiyo/test_greedy.py::test_of_equal_scores_the_later_slot_is_planted",
    ),
    Fault(
        "a missing score counts as zero",
        RULES,
        "        if unknown:\n",
        "        if len(unknown) > 9:\n",
        "tamiyo/test_greedy.py::test_a_missing_score_is_an_error_that_names_the_slots_and_a_way_out",
    ),
    Fault(
        "greedy plants shams",
        RULES,
        '[(s, b) for s, b in _legal_places(masks) if self.facts.space.blueprint_ids[b] != "sham"]',
        "_legal_places(masks)",
        "tamiyo/test_greedy.py::test_a_sham_is_never_planted",
    ),
    Fault(
        "greedy plants until the end",
        RULES,
        ">= self.planting_part * self.facts.horizon:",
        ">= self.facts.horizon:",
        "tamiyo/test_greedy.py::test_only_the_first_part_of_a_known_episode_is_for_planting",
    ),
    Fault(
        "greedy does not say that it reads scores",
        RULES,
        "reads_scores: ClassVar[bool] = True",
        "reads_scores: ClassVar[bool] = False",
        "test_garden_greedy.py::test_a_greedy_rule_with_settings_of_the_users_own_gets_its_scores",
    ),
    Fault(
        "a host that was brought back is asked all the same",
        ARMS,
        "            masks = only_waiting(masks)\n",
        "            pass\n",
        "tamiyo/test_greedy.py::test_a_host_that_breaks_in_its_first_epoch_does_not_stop_the_others",
    ),
    Fault(
        "closed masks are open",
        MASKS,
        "mask[..., 0] = True",
        "mask[...] = True",
        "tamiyo/test_masks_in_populations.py::test_where_only_waiting_is_left_every_policy_waits",
    ),
]

SCORES = [
    Fault(
        "a layer that works in place spoils the score",
        MEASURING,
        "return output.clone()",
        "return output",
        "test_garden_greedy.py::test_a_layer_that_works_in_place_behind_a_slot_does_not_change_its_score",
    ),
    Fault(
        "frozen features have no gradient",
        MEASURING,
        "if torch.is_grad_enabled() and not output.requires_grad:",
        "if output.is_nested:",
        "test_garden_greedy.py::test_a_frozen_host_is_scored_like_any_other",
    ),
    Fault(
        "watchers stay on the model",
        MEASURING,
        "            handle.remove()\n",
        "            pass\n",
        "test_garden_greedy.py::test_scoring_leaves_gradients_buffers_modes_hooks_and_random_state_alone",
    ),
    Fault(
        "a gradient is lost between two places",
        MEASURING,
        "for value, gradient in zip(own, gradients, strict=False)",
        "for gradient, value in zip(gradients, own, strict=False)",
        "test_garden_greedy.py::test_a_score_is_the_steepest_slope_along_a_linear_map_at_the_slot[mlp]",
    ),
    Fault(
        "an image's channels are its columns",
        MEASURING,
        'axis = 1 if kind == "image" else -1',
        "axis = -1",
        "test_garden_greedy.py::test_a_score_is_the_steepest_slope_along_a_linear_map_at_the_slot[cnn]",
    ),
    Fault(
        "only the last batch is scored",
        MEASURING,
        "sum(products[1:], products[0])",
        "products[-1]",
        "test_garden_greedy.py::test_an_evaluation_in_batches_gives_the_scores_of_one_in_a_single_batch",
    ),
    Fault(
        "scores grow with the number of examples",
        GARDEN,
        "slot.greedy_score = float(score) / len(values)",
        "slot.greedy_score = float(score)",
        "test_garden_greedy.py::test_scores_do_not_grow_with_the_number_of_examples",
    ),
    Fault(
        "values without gradients are taken",
        GARDEN,
        "if not values.requires_grad or not all(seen):",
        "if not all(seen):",
        "test_garden_greedy.py::test_an_evaluation_without_gradients_is_refused_with_what_to_do_and_nothing_changes",
    ),
    Fault(
        "the losses of another model are taken",
        GARDEN,
        "if not values.requires_grad or not all(seen):",
        "if not values.requires_grad:",
        "test_garden_greedy.py"
        "::test_an_evaluation_without_gradients_is_refused_with_what_to_do_and_nothing_changes[another model]",
    ),
    Fault(
        "every policy pays for scores",
        GARDEN,
        'if getattr(self.policy, "reads_scores", False):',
        "if self.policy:",
        "test_garden_greedy.py::test_evaluate_is_called_once_more_with_gradients_for_greedy_only",
    ),
    Fault(
        "scoring disturbs the training",
        GARDEN,
        "with undisturbed(self.model), torch.enable_grad(), watched(sites) as seen:",
        "with torch.enable_grad(), watched(sites) as seen:",
        "test_garden_greedy.py::test_a_training_that_is_scored_ends_like_one_that_is_not_to_the_bit",
    ),
]

NETWORK = [
    Fault(
        "the network's memory is not handed back",
        LEARNED,
        "self.network.choose(states, memory, on_device",
        "self.network.choose(states, None, on_device",
        "tamiyo/test_learned.py::test_step_by_step_it_decides_as_the_network_does_over_the_whole_sequence",
    ),
    Fault(
        "lots are drawn from the global random state",
        LEARNED,
        "self.deterministic, self.draws)",
        "self.deterministic)",
        "tamiyo/test_learned.py::test_deciding_builds_no_graph_and_leaves_the_global_random_state_alone",
    ),
    Fault(
        "nothing is ever drawn",
        LEARNED,
        "on_device, self.deterministic, self.draws",
        "on_device, True, self.draws",
        "tamiyo/test_learned.py::test_drawn_episodes_are_the_same_with_the_same_seed_and_differ_with_another",
    ),
    Fault(
        "the network does not see the masks",
        LEARNED,
        "for name, mask in masks.items()}",
        "for name, mask in masks.items() if False}",
        "tamiyo/test_learned.py::test_over_a_whole_episode_every_action_of_an_untrained_network_is_carried_out[vectors]",
    ),
    Fault(
        "any width of observation is taken",
        LEARNED,
        "if states.dim() != 2 or states.shape[1] != self.network.state_dim:",
        "if states.dim() != 2:",
        "tamiyo/test_learned.py::test_observations_of_another_width_are_refused_with_both_widths_and_where_to_look",
    ),
    Fault(
        "actions are in the order of the alphabet",
        LEARNED,
        "for name in self.network.spec.names]",
        "for name in sorted(self.network.spec.names)]",
        "tamiyo/test_learned.py::test_actions_are_in_the_order_op_slot_blueprint_blend",
    ),
    Fault(
        "masks offer what the budget has no room for",
        LEGALITY,
        "if blueprint is not None and _has_room(view.costs.get((slot_id, blueprint, blend)), view)",
        "if (slot_id, blueprint, blend) in view.costs",
        "tamiyo/test_masks_in_populations.py::test_no_action_drawn_from_the_masks_is_refused_by_a_population[images]",
    ),
    Fault(
        "masks offer places that are taken",
        LEGALITY,
        "if _refuse_place(view.reports[slot_id], view) is not None:",
        "if view.max_seeds == 0:",
        "tamiyo/test_masks_in_populations.py"
        "::test_no_action_drawn_through_a_networks_conditional_masks_is_refused_by_a_population[vectors]",
    ),
]

LOOK_UPS = [
    Fault(
        "a look-up knows one slot",
        ACTIONS,
        "names = OP_NAMES[op], space.slots.slot_ids[slot]",
        "names = OP_NAMES[op], space.slots.slot_ids[0]",
        "leyline/test_factored_actions.py"
        "::test_looking_up_says_what_the_action_says_for_every_index_of_a_space[default]",
    ),
    Fault(
        "a look-up does not check itself",
        ACTIONS,
        "    if __debug__:  #",
        "    if False:  #",
        "leyline/test_factored_actions.py::test_a_table_that_differs_from_its_enum_is_caught_by_a_look_up",
    ),
    Fault(
        "a look-up checks itself in production too",
        ACTIONS,
        "    if __debug__:  #",
        "    if True:  #",
        "leyline/test_factored_actions.py::test_an_optimised_python_looks_up_without_building_an_action",
    ),
]

SIGNAL_FAULTS = [*TRACKED, *OBSERVED, *GREEDY, *SCORES, *NETWORK, *LOOK_UPS]
