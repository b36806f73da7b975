"""Faults of `esper grow`, `esper export`, the demo and hosts on disk, each with the test that must catch it."""

from planted_faults import Fault
from trials import planted_faults as trials_faults

STORING = "runtime/storing.py"
RUNNING, CLI = "cli/session.py", "cli/app.py"
HOST, POPULATION, SPLITS, TASKS = "runtime/host.py", "runtime/population.py", "runtime/splits.py", "runtime/tasks.py"
EVERY_EPOCH = (
    "runtime/test_storing.py::test_a_host_that_is_stored_and_read_back_after_every_epoch_has_the_same_episode[adamw]"
)
ON_DISK = [
    Fault(
        "a stored host sees its examples in a new order",
        STORING,
        'run.plan.stream.load({**_read_stream(folder / _STREAM), "position": extra["position"]})',
        "_read_stream(folder / _STREAM)",
        EVERY_EPOCH,
    ),
    Fault(
        "a stored host sees examples twice",
        STORING,
        '"position": extra["position"]})',
        '"position": 0})',
        EVERY_EPOCH,
    ),
    Fault(
        "a stored host's optimiser begins anew",
        STORING,
        "    restore_optimizer(run.model, run.link, loaded.optimizer)\n",
        "    assert callable(restore_optimizer)\n",
        EVERY_EPOCH,
    ),
    Fault(
        "greedy scores are not stored",
        STORING,
        "slot.gradient_norm, slot.greedy_score = norm, score",
        "slot.gradient_norm, slot.greedy_score = norm, None",
        EVERY_EPOCH,
    ),
    Fault(
        "gradient norms are not stored",
        STORING,
        "slot.gradient_norm, slot.greedy_score = norm, score",
        "slot.greedy_score = score",
        EVERY_EPOCH,
    ),
    Fault(
        "a stored host has cost nothing",
        STORING,
        "{name: PhaseCost(**cost) for name, cost in",
        "{name: PhaseCost() for name, cost in",
        EVERY_EPOCH,
    ),
    Fault(
        "a stored host forgets how large it was",
        STORING,
        'extra["peak_params"])',
        "0)",
        EVERY_EPOCH,
    ),
    Fault(
        "a stored host is young again",
        STORING,
        'run.epoch = extra["epoch"]',
        'assert extra["epoch"]',
        EVERY_EPOCH,
    ),
    Fault(
        "the last reading is not stored",
        STORING,
        'EpochReading(**_unspell(extra["reading"]))',
        "run.reading",
        EVERY_EPOCH,
    ),
    Fault(
        "slots of the network that was before are trained",
        STORING,
        "    run.slots = [run.model.slot(slot_id) for slot_id in run.model.slot_config.slot_ids]\n",
        "",
        EVERY_EPOCH,
    ),
    Fault(
        "a host that broke cannot be stored",
        STORING,
        "_spell(asdict(run.reading))",
        "asdict(run.reading)",
        "runtime/test_storing.py::test_a_host_that_was_just_brought_back_can_be_stored",
    ),
    Fault(
        "rollbacks are counted from the save on",
        STORING,
        "0, rollbacks],",
        "0, 0],",
        "runtime/test_storing.py::test_rollbacks_are_counted_on",
    ),
    Fault(
        "as much is expected of a network without its seeds",
        STORING,
        "best_accuracy, best_loss, _, rollbacks = governor.state()",
        "best_accuracy, best_loss, rollbacks = governor.best_accuracy, governor.best_loss, governor.rollbacks",
        "runtime/test_storing.py::test_of_a_host_that_lost_its_seeds_no_more_is_expected_than_before_the_save",
    ),
    Fault(
        "nothing is expected of a stored host",
        STORING,
        'governor.load(tuple(extra["governor"]))',
        'assert extra["governor"]',
        EVERY_EPOCH,
    ),
    Fault(
        "a host under suspicion is stored",
        STORING,
        "governor.bad_checks == 0",
        "governor.bad_checks >= 0",
        "trials/test_saves.py::test_a_host_under_suspicion_is_not_saved",
    ),
    Fault(
        "any host is taken for this one",
        STORING,
        'if extra["seed"] != run.seed:',
        'if extra["seed"] < 0:',
        "runtime/test_storing.py::test_the_host_of_another_seed_is_refused",
    ),
]
COMMANDS = [
    Fault(
        "the test split chooses what is exported",
        RUNNING,
        'key=lambda host: results[host]["validation_accuracy"]',
        'key=lambda host: results[host]["test_accuracy"]',
        "cli/test_run.py::test_the_best_network_is_best_on_held_out_examples_whatever_the_test_says",
    ),
    Fault(
        "an export replaces what is there",
        RUNNING,
        "    if folder.exists():\n",
        "    if folder.is_file():\n",
        "cli/test_run.py::test_what_cannot_be_exported_is_one_line_and_nothing_is_written[taken]",
    ),
    Fault(
        "links in a run are followed",
        RUNNING,
        ", symlinks=True)",
        ")",
        "cli/test_run.py::test_a_link_in_a_run_is_not_followed",
    ),
    Fault(
        "an export needs the policy",
        RUNNING,
        "    _read_config(run)\n    path = run / RESULTS",
        "    grow_config_of(run)\n    path = run / RESULTS",
        "cli/test_run.py::test_exporting_needs_neither_the_policy_nor_the_saves",
    ),
    Fault(
        "the run of any command is taken for a grown one",
        RUNNING,
        'values.pop("command", None) != "grow"',
        'values.pop("command", "grow") != "grow"',
        "cli/test_run.py::test_what_cannot_be_exported_is_one_line_and_nothing_is_written[ppo]",
    ),
    Fault(
        "growing begins in any folder",
        RUNNING,
        'runfolder.require_fresh(config.out)\n        console.print(f"{config.policy}',
        'assert config.out.exists()\n        console.print(f"{config.policy}',
        "cli/test_run.py::test_a_folder_that_is_not_empty_is_refused",
    ),
    Fault(
        "a stopped run exits as if it had failed",
        CLI,
        "    if results is None:\n        raise typer.Exit(130)",
        "    if results is None:\n        raise typer.Exit(1)",
        "cli/test_run.py::test_a_signal_ends_after_the_epoch_and_the_run_goes_on_as_if_nothing_was",
    ),
    Fault(
        "a resumed run takes the options of the day",
        CLI,
        "if resume and (out / CONFIG).exists():",
        "if resume and not (out / CONFIG).exists():",
        "cli/test_run.py::test_a_resumed_run_is_the_one_that_was_started",
    ),
    Fault(
        "slots need commas",
        CLI,
        'LISTS = ("--devices", "--slots", ',
        'LISTS = ("--devices", ',
        "cli/test_run.py::test_slots_are_written_with_spaces_or_commas[r0c0 r0c2]",
    ),
    Fault(
        "a budget on the command line is dropped",
        CLI,
        '"budget": budget,',
        '"budget": None,',
        "cli/test_run.py::test_every_option_reaches_the_run",
    ),
    Fault(
        "the demo runs once",
        CLI,
        "    if not folder.exists():\n        return folder\n",
        "    if not folder.is_file():\n        return folder\n",
        "cli/test_cli.py::test_the_demo_takes_a_fresh_folder_every_time",
    ),
    Fault(
        "the demo exports the host that was left alone",
        CLI,
        'export_run(out / "heuristic",',
        'export_run(out / "never",',
        "cli/test_cli.py::test_the_demo_grows_a_network_prints_one_comparison_and_exports_it",
    ),
]
CHOSEN = [
    Fault(
        "enabled slots are numbered anew",
        HOST,
        "return SlotConfig(tuple(chosen), chosen)",
        "return SlotConfig.for_modules(chosen.values())",
        "runtime/test_tasks.py::test_slots_are_a_hosts_own_by_id_or_modules_by_name",
    ),
    Fault(
        "enabled slots sit on the first modules",
        HOST,
        "own.modules[name] for name in patterns}",
        'f"sites.{place}" for place, name in enumerate(patterns)}',
        "trials/test_growing.py::test_counterfactuals_of_enabled_slots_are_those_of_the_same_slots_among_all",
    ),
    Fault(
        "one example more is held out",
        POPULATION,
        "splits.validation.first(task.held_out)",
        "splits.validation.first(task.held_out + 1)",
        "runtime/test_tasks.py::test_hosts_are_measured_on_exactly_the_first_validation_examples",
    ),
    Fault(
        "all examples cannot be held out",
        TASKS,
        "task.held_out > len(splits.validation)",
        "task.held_out >= len(splits.validation)",
        "runtime/test_tasks.py::test_more_held_out_examples_than_there_are_are_refused",
    ),
    Fault(
        "the first examples have the last labels",
        SPLITS,
        "targets=self.targets[:count]",
        "targets=self.targets[-count:]",
        "runtime/test_splits.py::test_the_first_examples_are_the_first_and_look_the_same",
    ),
    Fault(
        "the first windows of a text lack the last token",
        SPLITS,
        "self.tokens[: count * self.context + 1]",
        "self.tokens[: count * self.context]",
        "runtime/test_splits.py::test_the_first_windows_of_a_text_are_the_first",
    ),
    Fault(
        "twins are measured on whatever is held out",
        "simic/twins.py",
        '    "held_out",\n',
        "",
        "runtime/test_tasks.py::test_a_twin_on_fewer_held_out_examples_is_another_twin",
    ),
]
GROW_FAULTS = [*ON_DISK, *trials_faults.FAULTS, *COMMANDS, *CHOSEN]
