"""Faults of what a policy is shown, which hosts learn, and what is kept of a decision."""

from planted_faults import Fault

FAULTS = [
    Fault(
        phrase="features are in the order of a dict",
        place="tamiyo/observation.py::signals_to_features",
        old=(
            "for slot in slots.slot_ids:\n"
            "    report = reports[slot]\n"
            "    if report.is_live:\n"
            "        values += [feature(report, loss_scale) for feature in seed_features]\n"
            "    else:\n"
            "        values += [0.0] * len(seed_features)"
        ),
        new=(
            "for slot in reports:\n"
            "    report = reports[slot]\n"
            "    if report.is_live:\n"
            "        values += [feature(report, loss_scale) for feature in seed_features]\n"
            "    else:\n"
            "        values += [0.0] * len(seed_features)"
        ),
        test="simic/test_slot_order.py::test_features_follow_the_configuration_and_not_the_dict",
    ),
    Fault(
        phrase="telemetry is in the order of a dict",
        place="tamiyo/observation.py::signals_to_features",
        old=("for slot in slots.slot_ids:\n    values += _telemetry_of(reports[slot], loss_scale)"),
        new="for slot in reports:\n    values += _telemetry_of(reports[slot], loss_scale)",
        test="simic/test_slot_order.py::test_features_follow_the_configuration_and_not_the_dict",
    ),
    Fault(
        phrase="masks are in the order of a dict",
        place="tamiyo/masks.py::compute_action_masks",
        old="reports[slot_id] = _as_report(slot_id, slot_states.get(slot_id))",
        new=(
            "state = dict(zip(space.slots.slot_ids, slot_states.values())).get(slot_id)\n"
            "reports[slot_id] = _as_report(slot_id, state)"
        ),
        test="simic/test_slot_order.py::test_masks_follow_the_configuration_and_not_the_dict",
    ),
    Fault(
        phrase="an environment masks in the order in which a model reports",
        place="tamiyo/masks.py::masks_for",
        old="view.reports",
        new="dict(zip(view.space.slots.slot_ids, view.reports.values()))",
        test="simic/test_slot_order.py::test_an_environment_shows_slots_in_the_same_order_whatever_a_model_reports_first",
    ),
    Fault(
        phrase="only the hosts of the first device are trained",
        place="runtime/executors/eager.py::EagerExecutor.train",
        old="dict.fromkeys(run.device for run in runs)",
        new="[runs[0].device]",
        test="runtime/test_population.py::test_hosts_of_every_device_are_trained_and_measured_as_on_one",
    ),
    Fault(
        phrase="all hosts are placed on the first device",
        place="runtime/devices.py::map_hosts",
        old="devices[index * len(devices) // hosts]",
        new="devices[0]",
        test="runtime/test_population.py::test_every_device_gets_its_share_of_the_hosts_and_all_of_them_learn",
    ),
    Fault(
        phrase="a mask that leaves one choice is not flagged",
        place="simic/round_summary.py::RoundTally._emit_action",
        old="head not in used or row.sum() <= 1",
        new="head not in used",
        test="simic/test_masked_flags.py::test_a_mask_that_leaves_one_choice_is_flagged_on_its_head_alone",
    ),
    Fault(
        phrase="a flag is of another slot's mask",
        place="simic/round_summary.py::RoundTally._emit_action",
        old="masks['blueprint'][slot]",
        new="masks['blueprint'][0]",
        test="simic/test_masked_flags.py::test_a_mask_that_leaves_one_choice_is_flagged_on_its_head_alone",
    ),
    Fault(
        phrase="a rollout keeps the graph of its values",
        place="simic/ppo/rollout.py::Rollout.add_decision",
        old="values.detach()",
        new="values",
        test="simic/ppo/test_rollout.py::test_what_is_stored_is_detached_from_the_policy",
    ),
    Fault(
        phrase="learning costs nothing",
        place="simic/costs.py::learning_ledger",
        old="record.judged",
        new="0",
        test="simic/test_costs.py::test_learning_is_booked_after_every_round",
    ),
    Fault(
        phrase="twins that are read back are free",
        place="simic/environment.py::GrowthVectorEnv.__init__",
        old="add_up(twin.ledger for twin in twins.values())",
        new="add_up([])",
        test="simic/test_costs.py::test_twins_are_booked_once_before_the_first_round_with_what_they_cost",
    ),
]
