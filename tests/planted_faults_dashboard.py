"""Faults of what the screens draw from: the view, the reader, its index and the list of runs."""

from planted_faults import Fault

VIEW, SERIES, READER = "dashboard/view.py", "dashboard/series.py", "dashboard/reader.py"
INDEX, RUNS, TABLES = "dashboard/index.py", "dashboard/runs.py", "cli/console/tables.py"
PIECES = "dashboard/test_reader.py::test_folding_growing_files_in_pieces_equals_folding_all_at_once[all]"
KNOWS = "dashboard/test_reader.py::test_skipping_knows_all_slots_and_who_lived_in_the_round_before_the_newest"
FOLDED = [
    Fault(
        "epochs of a grow run count from 0",
        VIEW,
        'record["epoch"] + (self.kind == "grow"))',
        'record["epoch"])',
        "dashboard/test_view.py::test_epochs_are_epochs_lived_in_either_kind_of_run[grow-5]",
    ),
    Fault(
        "the verdict at birth is lost",
        VIEW,
        "verdicts=epochs.unborn.pop(slot, [])",
        "verdicts=epochs.unborn.pop(slot, [])[:0]",
        "dashboard/test_view.py::test_a_span_is_a_seeds_way_with_its_verdicts_from_the_one_before_birth_on",
    ),
    Fault(
        "a fossil loses its share when the slot opens",
        VIEW,
        'if stage in ("EMBARGOED", "RESETTING", "DORMANT"):',
        'if stage in ("EMBARGOED", "RESETTING"):',
        "dashboard/test_view.py::test_a_fossil_keeps_its_alpha_when_the_slot_opens_again",
    ),
    Fault(
        "waiting is counted beside every action",
        VIEW,
        'decided = epoch - (view.kind == "ppo")',
        "decided = epoch",
        "dashboard/test_view.py::test_ops_counted_while_a_round_is_lived_are_those_it_is_said_to_have_had",
    ),
    Fault(
        "episodes go on from round to round",
        VIEW,
        "                    self.episodes[host] = Episode(host, number, rank)\n",
        "                    self.episodes[host] = epochs\n",
        "dashboard/test_view.py::test_a_round_begins_new_episodes_for_all_who_lived_in_the_one_before",
    ),
    Fault(
        "true is taken for an epoch",
        VIEW,
        "any(type(value) not in fields[name]",
        "any(not isinstance(value, tuple(fields[name]))",
        "dashboard/test_view.py::test_a_record_that_is_not_understood_only_counts",
    ),
    Fault(
        "a log line obeys the file",
        VIEW,
        "printable(text[:_LONGEST_TEXT])",
        "text[:_LONGEST_TEXT]",
        "dashboard/test_view.py::test_text_from_events_obeys_no_terminal_and_stays_short",
    ),
    Fault(
        "a late column begins at the first row",
        SERIES,
        "self.values += old[place * width : (place + 1) * width] + blank",
        "self.values += blank + old[place * width : (place + 1) * width]",
        "dashboard/test_view.py::test_columns_are_of_equal_length_and_gaps_are_not_measured",
    ),
    Fault(
        "thinned curves lose their peaks",
        SERIES,
        "for extreme in (min, max) if known)",
        "for extreme in (min,) if known)",
        "dashboard/test_view.py::test_a_thinned_curve_keeps_its_peaks",
    ),
]
READ = [
    Fault(
        "a torn line is folded",
        READER,
        '*lines, rest = chunk.split(b"\\n")',
        'lines, rest = chunk.split(b"\\n"), b""',
        "dashboard/test_reader.py::test_a_torn_last_line_waits_for_its_rest",
    ),
    Fault(
        "a long line counts once per piece",
        READER,
        "            place.is_inside = True\n",
        "            place.is_inside = False\n",
        "dashboard/test_reader.py::test_a_line_that_is_too_long_counts_once_and_is_never_read_whole[20480]",
    ),
    Fault(
        "a file that was cut and grew is read on",
        READER,
        " and _sample(file, place.offset) == place.sample",
        "",
        "dashboard/test_reader.py::test_a_file_that_was_cut_and_has_grown_longer_since_is_folded_anew",
    ),
    Fault(
        "links to events are followed",
        READER,
        "if not path.is_symlink()]",
        "if path]",
        "dashboard/test_reader.py::test_only_regular_files_are_read[link]",
    ),
    Fault(
        "the last whole round is skipped",
        READER,
        "for begin in reversed(begins[:-1]):",
        "for begin in reversed(begins):",
        KNOWS,
    ),
    Fault(
        "slots of episodes that are over are skipped",
        READER,
        "return slot < 9 or line[slot",
        "return True or line[slot",
        KNOWS,
    ),
    Fault(
        "the log is short after skipping",
        READER,
        'if tail.count(b"\\n", begin) > LOG_LINES:',
        "if True:",
        "dashboard/test_reader.py::test_a_long_run_shows_the_same_whether_episodes_that_are_over_are_skipped_or_not",
    ),
    Fault(
        "an older epochs reads on into the next",
        READER,
        "_follow(file, Place(starts[round]), past, rank, end)",
        "_follow(file, Place(starts[round]), past, rank)",
        "dashboard/test_reader.py::test_an_older_episode_is_the_one_that_was_lived_then",
    ),
    Fault(
        "the index forgets what ops were chosen",
        INDEX,
        '"chosen": {rank: Counter(ops)',
        '"chosen": {rank: Counter()',
        PIECES,
    ),
    Fault(
        "the index forgets the log",
        INDEX,
        '"lines": found.log,',
        '"lines": [],',
        PIECES,
    ),
    Fault(
        "a damaged index is trusted",
        INDEX,
        "if sha256(kept[64:]).hexdigest().encode() != kept[:64]:",
        "if len(kept) < 64:",
        "dashboard/test_index.py::test_a_damaged_index_is_ignored[3]",
    ),
    Fault(
        "any folder's index is taken",
        INDEX,
        "return [str(folder.resolve()), _code()]",
        "return [_code()]",
        "dashboard/test_index.py::test_the_index_of_another_folder_or_version_is_ignored",
    ),
    Fault(
        "asking who writes keeps the lock",
        READER,
        "        with open_plain(path) as file:\n            fcntl.flock(file",
        "        for file in [os.open(path, os.O_RDONLY)]:\n            fcntl.flock(file",
        "dashboard/test_reader.py::test_a_run_is_running_while_its_writer_holds_the_lock",
    ),
]
LISTED = [
    Fault(
        "runs behind links are listed",
        RUNS,
        "return not folder.is_symlink() and",
        "return",
        "dashboard/test_runs.py::test_only_run_folders_are_found_and_links_are_not_followed",
    ),
    Fault(
        "the last round counts as the best",
        RUNS,
        'max((value for value in view.rounds.column("accuracy") if value == value), default=None)',
        'view.rounds.last("accuracy")',
        "dashboard/test_runs.py::test_a_ppo_run_has_its_best_rounds_accuracy_and_its_hosts_mean_size",
    ),
    Fault(
        "names of runs are markup",
        TABLES,
        "*(Text(printable(text)) for",
        "*(printable(text) for",
        "dashboard/test_runs.py::test_names_are_neither_markup_nor_orders_to_the_terminal",
    ),
]
DASHBOARD_FAULTS = [*FOLDED, *READ, *LISTED]
