"""Faults of growing runs and their saves, each with the test that must catch it."""

from planted_faults import Fault

SAVES, GROWING = "trials/saves.py", "trials/growing.py"
STOPPED = "trials/test_growing.py::test_a_run_that_is_stopped_after_every_epoch_comes_to_the_same_end"
DAMAGED = "trials/test_saves.py::test_a_damaged_newest_epoch_is_named_and_the_one_before_is_used"
EPOCHS = [
    Fault(
        "files that were altered are read",
        SAVES,
        "if found.get(name) != wanted:",
        "if name not in found:",
        f"{DAMAGED}[order of data]",
    ),
    Fault(
        "a state that was altered is read",
        SAVES,
        "runfolder.digest(path) != digest",
        "not digest",
        f"{DAMAGED}[state]",
    ),
    Fault(
        "where all is damaged the run begins anew",
        SAVES,
        "        if entries:\n            raise",
        "        if not entries:\n            raise",
        "trials/test_saves.py::test_where_every_epoch_is_damaged_it_is_an_error_and_nothing_is_begun_anew",
    ),
    Fault(
        "events are told twice",
        SAVES,
        'self.sink.rewind(int(state["events"]))',
        'assert state["events"] >= 0',
        "trials/test_saves.py::test_a_stopped_run_goes_on_to_the_same_end",
    ),
    Fault(
        "events of a run without a save are told twice",
        SAVES,
        "        self.sink.rewind(0)\n",
        "",
        "trials/test_saves.py::test_without_a_save_a_resumed_run_begins_at_the_beginning",
    ),
    Fault(
        "a resumed policy has seen nothing yet",
        SAVES,
        'decider.tracker.load(state["trackers"][host])',
        'assert state["trackers"]',
        f"{STOPPED}[checkpoint]",
    ),
    Fault(
        "a resumed network has forgotten",
        SAVES,
        'if f"{host}.0" in tensors:',
        'if f"{host}.9" in tensors:',
        f"{STOPPED}[checkpoint]",
    ),
    Fault(
        "a resumed rule has forgotten",
        SAVES,
        'decider.memory = state["memory"][host]',
        "decider.memory = None",
        f"{STOPPED}[heuristic]",
    ),
    Fault(
        "a resumed run does not know of the rollback",
        SAVES,
        'for events in state["happened"]]',
        'for events in state["happened"][:0] or [()] * len(self.deciders)]',
        "trials/test_saves.py::test_a_rollback_is_lived_through_and_resumed[4]",
    ),
    Fault(
        "a resumed run counts seeds from the save on",
        SAVES,
        '"counts": save.counts,',
        '"counts": [{} for _ in save.counts],',
        f"{STOPPED}[heuristic]",
    ),
    Fault(
        "one saved epoch is enough",
        SAVES,
        "[-KEPT_EPOCHS:]",
        "[-1:]",
        f"{DAMAGED}[weights]",
    ),
    Fault(
        "whatever lies beside saved epochs is deleted",
        SAVES,
        '.glob("epoch-*")',
        ".iterdir()",
        "trials/test_saves.py::test_what_is_not_a_saved_epoch_is_left_alone",
    ),
    Fault(
        "an epoch of a future that was given up is kept",
        SAVES,
        'if entry["epoch"] < epoch]',
        'if entry["epoch"] != epoch]',
        "trials/test_saves.py::test_an_epoch_that_is_lived_again_replaces_its_save",
    ),
    Fault(
        "tensors that do not fit on the disk are a traceback",
        SAVES,
        "except (OSError, SafetensorError) as problem:",
        "except OSError as problem:",
        "test_cli_grow.py::test_a_full_disk_is_one_line_and_the_run_can_go_on",
    ),
]
GROWN = [
    Fault(
        "a stop promises epochs that are not saved",
        GROWING,
        "raise StoppedGrowing(saves.epochs)",
        "raise StoppedGrowing(epoch + 1)",
        "trials/test_saves.py::test_a_host_under_suspicion_is_not_saved",
    ),
    Fault(
        "an epoch is skipped on the way back",
        GROWING,
        "first = 0 if found is None else found.epoch",
        "first = 0 if found is None else found.epoch + 1",
        "trials/test_saves.py::test_a_stopped_run_goes_on_to_the_same_end",
    ),
    Fault(
        "whoever asks in the last epoch gets no results",
        GROWING,
        "if should_stop() and epoch + 1 < population.task.life:",
        "if should_stop() and epoch < population.task.life:",
        "trials/test_growing.py::test_asking_to_stop_in_the_last_epoch_comes_too_late",
    ),
    Fault(
        "all hosts are the same",
        GROWING,
        "config.seed + number for number",
        "config.seed for number",
        "trials/test_growing.py::test_hosts_count_on_from_the_first_seed",
    ),
    Fault(
        "sham growth has real blueprints too",
        GROWING,
        "return (SHAM,) if",
        "return (SHAM, *(self.task.build().blueprints or ())) if",
        "trials/test_growing.py::test_sham_growth_has_the_sham_blueprint_only",
    ),
    Fault(
        "a policy for other choices decides",
        GROWING,
        "    require_layout(layout, own, path)\n",
        "    assert callable(require_layout)\n",
        "trials/test_growing.py::test_a_policy_for_other_choices_is_refused_with_both[blueprints]",
    ),
    Fault(
        "every policy is shown telemetry",
        GROWING,
        "    return policy, reads_telemetry",
        "    return policy, True",
        f"{STOPPED}[blind]",
    ),
    Fault(
        "a run goes on with whatever policy is there now",
        GROWING,
        "if not (is_resumed and kept.is_file()):",
        "if not is_resumed or Path(config.policy).is_file():",
        "trials/test_growing.py::test_a_run_goes_on_with_the_policy_that_it_was_started_with[overwritten]",
    ),
    Fault(
        "a new run takes the policy of an old one",
        GROWING,
        "if not (is_resumed and kept.is_file()):",
        "if not kept.is_file():",
        "trials/test_growing.py::test_a_new_run_reads_the_policy_anew",
    ),
    Fault(
        "seeds are counted once",
        GROWING,
        "counts[host].get(event.after, 0) + 1",
        "1",
        "trials/test_growing.py::test_a_result_counts_what_the_events_say",
    ),
    Fault(
        "networks that do not fit on the disk are a traceback",
        GROWING,
        "except (OSError, SafetensorError) as problem:",
        "except SafetensorError as problem:",
        "trials/test_growing.py::test_networks_that_cannot_be_written_are_one_clear_error",
    ),
]
FAULTS = [*EPOCHS, *GROWN]
