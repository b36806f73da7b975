"""Faults in what keeps other people's folders and files from doing harm."""

from planted_faults import Fault

FAULTS = [
    Fault(
        phrase="a corpus is known by its size only",
        place="runtime/tasks/data.py::load_code",
        old="digest.update(key)",
        new="digest.update(b'')",
        test="runtime/tasks/test_code.py::test_a_changed_source_is_another_corpus",
    ),
    Fault(
        phrase="a run goes on with another corpus",
        place="runtime/splits.py::require_corpus",
        old="saved != present",
        new="saved is None and present is not None",
        test="trials/test_compute.py::test_a_run_does_not_go_on_with_another_corpus",
    ),
    Fault(
        phrase="a memory that JSON changes is saved",
        place="storage/store.py::require_plain",
        old="is_plain(memory)",
        new="is_plain(memory) or memory",
        test="trials/test_saves.py::test_a_memory_that_would_come_back_as_another_is_refused",
    ),
    Fault(
        phrase="another policy goes on with the memory of the first",
        place="garden/keeping.py::take",
        old="extra['memory'] if extra['policy'] == garden.policy_name else None",
        new="extra['memory']",
        test="kasmina/test_saving.py::test_another_policy_begins_without_the_memory_of_the_first",
    ),
    Fault(
        phrase="a word in a save turns scores into losses",
        place="garden/keeping.py::check",
        old="TypeAdapter(Kept).validate_json(json.dumps(extra), strict=True)",
        new="TypeAdapter(Kept).validate_json(json.dumps(extra), strict=False)",
        test="kasmina/test_saving_refusals.py::test_a_value_of_another_type_is_refused",
    ),
    Fault(
        phrase="a garden that is saved before its optimiser is attached loses the state",
        place="kasmina/saving.py::save_network",
        old="pending is not None",
        new="False",
        test="kasmina/test_saving.py::test_a_loaded_garden_that_is_saved_before_an_optimizer_is_attached_keeps_its_state",
    ),
    Fault(
        phrase="a save for another seed is taken",
        place="storage/store.py::Store._open",
        old="body.get('of', '') != (self.bound_to or '')",
        new="False",
        test="faults/test_damage.py::test_damage_is_told_or_what_is_damaged_is_made_again[twins-swap_two]",
    ),
    Fault(
        phrase="a link in place of a folder is followed",
        place="storage/runfolder.py::require_plain",
        old="os.path.lexists(path) and (not stat.S_ISDIR(path.lstat().st_mode))",
        new="not path",
        test="faults/test_folders.py::test_a_link_in_place_of_a_folder_is_refused_and_nothing_behind_it_is_touched",
    ),
    Fault(
        phrase="a network is exported whatever became of it",
        place="storage/files.py::reading",
        old="hashlib.file_digest(file, 'sha256').hexdigest() != sha256",
        new="not sha256",
        test="faults/test_exports.py::test_of_a_network_that_is_not_the_one_written_nothing_is_copied",
    ),
    Fault(
        phrase="rows of a resumed comparison come as they are found",
        place="trials/comparison.py::Comparison.play_arms",
        old=("for arm in dict.fromkeys(arms):\n    ..."),
        new=("for arm in ():\n    ..."),
        test="faults/test_damage.py::test_rows_of_a_resumed_comparison_are_in_the_order_of_an_undisturbed_one",
    ),
    Fault(
        phrase="nobody looks at the digest of a policy",
        place="tamiyo/policy_files.py::read",
        old="metadata.get('sha256') != _digest(tensors, metadata['esper'])",
        new="'sha256' not in metadata",
        test="faults/test_policy_files.py::test_one_changed_bit_anywhere_is_refused_or_changes_nothing",
    ),
    Fault(
        phrase="a policy may stumble over a forged memory",
        place="trials/running.py::EpochSaves.restore",
        old="decider.recalled = partial(fitting, self.store.manifest)",
        new="pass",
        test="faults/test_damage.py::test_a_forged_memory_of_a_rule_is_one_error[heuristic]",
    ),
    Fault(
        phrase="a complete segment of events is written again",
        place="telemetry/sink.py::Sink.commit",
        old="Position(segment=self.segment + 1, size=0)",
        new="Position(segment=self.segment, size=size)",
        test="telemetry/test_sink.py::test_the_end_of_a_segment_is_the_beginning_of_the_next_one",
    ),
    Fault(
        phrase="segments of an undone round stay",
        place="storage/runfolder.py::cut_events",
        old="segment.number > end.segment",
        new="segment.number > 9",
        test="telemetry/test_sink.py::test_a_save_ends_a_segment_that_is_long_enough_and_nobody_touches_it_again",
    ),
]
