"""Faults in what keeps other people's folders from doing harm."""

from planted_faults import Fault

FAULTS = [
    Fault(
        "a memory that JSON changes is saved",
        "storage/store.py",
        "if is_plain(memory):",
        "if is_plain(memory) or memory:",
        "trials/test_saves.py::test_a_memory_that_would_come_back_as_another_is_refused",
    ),
    Fault(
        "another policy goes on with the memory of the first",
        "garden/keeping.py",
        'extra["memory"] if extra["policy"] == garden.policy_name else None',
        'extra["memory"]',
        "kasmina/test_saving.py::test_another_policy_begins_without_the_memory_of_the_first",
    ),
    Fault(
        "a word in a save turns scores into losses",
        "garden/keeping.py",
        "strict=True",
        "strict=False",
        "kasmina/test_saving_refusals.py::test_a_value_of_another_type_is_refused",
    ),
    Fault(
        "a garden that is saved before its optimiser is attached loses the state",
        "kasmina/saving.py",
        "if pending is not None:",
        "if False:",
        "kasmina/test_saving.py::test_a_loaded_garden_that_is_saved_before_an_optimizer_is_attached_keeps_its_state",
    ),
    Fault(
        "a save for another seed is taken",
        "storage/store.py",
        'if body.get("of", "") != (self.bound_to or ""):',
        "if False:",
        "faults/test_damage.py::test_damage_is_told_or_what_is_damaged_is_made_again[twins-swap_two]",
    ),
    Fault(
        "a link in place of a folder is followed",
        "storage/runfolder.py",
        "if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):",
        "if not path:",
        "faults/test_folders.py::test_a_link_in_place_of_a_folder_is_refused_and_nothing_behind_it_is_touched",
    ),
    Fault(
        "a network is exported whatever became of it",
        "storage/files.py",
        'if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:',
        "if sha256 is not None and not sha256:",
        "faults/test_exports.py::test_of_a_network_that_is_not_the_one_written_nothing_is_copied",
    ),
    Fault(
        "rows of a resumed comparison come as they are found",
        "trials/comparison.py",
        "for arm in dict.fromkeys(arms):  # in this order",
        "for arm in ():  # in this order",
        "faults/test_damage.py::test_rows_of_a_resumed_comparison_are_in_the_order_of_an_undisturbed_one",
    ),
    Fault(
        "nobody looks at the digest of a policy",
        "tamiyo/policy_files.py",
        'if metadata.get("sha256") != _digest(tensors, metadata["esper"]):',
        'if "sha256" not in metadata:',
        "faults/test_policy_files.py::test_one_changed_bit_anywhere_is_refused_or_changes_nothing",
    ),
    Fault(
        "a policy may stumble over a forged memory",
        "trials/running.py",
        "decider.recalled = partial(fitting, self.store.manifest)",
        "pass",
        "faults/test_damage.py::test_a_forged_memory_of_a_rule_is_one_error[heuristic]",
    ),
    Fault(
        "a complete segment of events is written again",
        "telemetry/sink.py",
        "following = Position(segment=self.segment + 1, size=0)",
        "following = Position(segment=self.segment, size=size)",
        "telemetry/test_sink.py::test_the_end_of_a_segment_is_the_beginning_of_the_next_one",
    ),
    Fault(
        "segments of an undone round stay",
        "storage/runfolder.py",
        "if segment.number > end.segment:",
        "if segment.number > 9:",
        "telemetry/test_sink.py::test_a_save_ends_a_segment_that_is_long_enough_and_nobody_touches_it_again",
    ),
]
