"""Faults of starts, restarts and ends: of ranks, full memories, comparisons. Each with the test that must see it."""

from planted_faults import Fault

RUNNING, TEAM, TRAINER = "cli/session.py", "simic/team.py", "simic/trainer.py"
HISTORY, COMPARING, POPULATION = "simic/history.py", "trials/comparing.py", "runtime/population.py"
STARTS = "simic/test_team_starts.py"

START_FAULTS = [
    Fault(
        "a restart gets into another run",
        RUNNING,
        "(is_restart and runfolder.is_begun_with(config.out, values))",
        "is_restart",
        f"{STARTS}::test_a_start_that_was_refused_does_not_get_in_when_it_is_started_anew",
    ),
    Fault(
        "ranks go on from whatever checkpoint they see",
        HISTORY,
        "        self.team.require_same({",
        "        dict({",
        f"{STARTS}::test_ranks_that_see_other_checkpoints_do_not_go_on",
    ),
    Fault(
        "what rank 0 does not know is not compared",
        TEAM,
        "for name in (*everyone[0], *other):",
        "for name in everyone[0]:",
        "simic/test_team.py::test_the_rank_and_the_fact_that_differ_are_named",
    ),
    Fault(
        "a limit of time is not kept",
        RUNNING,
        "is_asked() or time.monotonic() > until",
        "is_asked()",
        f"{STARTS}::test_a_limit_of_time_ends_all_ranks_in_good_order",
    ),
    Fault(
        "training goes on after an anomaly",
        TRAINER,
        "if config.stop_on_anomaly and",
        "if False and",
        f"{STARTS}::test_an_anomaly_ends_all_ranks_where_that_is_asked_for",
    ),
    Fault(
        "ranks draw screens over each other",
        "cli/app.py",
        "if watch and is_launched():",
        "if watch and not watch:",
        f"{STARTS}::test_a_screen_is_not_for_ranks",
    ),
    Fault(
        "who asks to stop waits for the twins",
        "simic/twins.py",
        "            if should_stop():\n                return None\n",
        "",
        "simic/test_trainer.py::test_who_asks_to_stop_waits_one_epoch_and_is_told_what_is_saved",
    ),
    Fault(
        "a quiet rank is dumb",
        "cli/console/progress.py",
        "if console.quiet or not console.is_terminal:",
        "if not console.is_terminal:",
        "cli/console/test_progress.py::test_a_quiet_console_leaves_stderr_alone",
    ),
    Fault(
        "a full GPU is a traceback in training",
        TRAINER,
        "with memory_errors(), repeatable_kernels",
        "with repeatable_kernels",
        "test_full_memory.py::test_it_is_one_error_that_says_what_to_lower[ppo-reset]",
    ),
    Fault(
        "a full GPU is a traceback in a comparison",
        "trials/arms.py",
        "@memory_errors()\n",
        "",
        "test_full_memory.py::test_it_is_one_error_that_says_what_to_lower[compare-apply]",
    ),
    Fault(
        "a full GPU is a traceback in growing",
        "trials/growing.py",
        "@memory_errors()\n",
        "",
        "test_full_memory.py::test_it_is_one_error_that_says_what_to_lower[grow-apply]",
    ),
    Fault(
        "a name that is too long is a traceback",
        "telemetry/runfolder.py",
        "    try:\n        is_new = not folder.exists()\n",
        "    is_new = not folder.exists()\n    try:\n",
        "telemetry/test_runfolder.py::test_a_name_that_no_file_can_have_is_refused_in_one_line",
    ),
    Fault(
        "validation sees seeds that are not taken home",
        POPULATION,
        "self._score(network, run.splits.validation, run.device)",
        "self._score(run.model.eval(), run.splits.validation, run.device)",
        "runtime/test_population.py::test_the_final_validation_score_is_the_harvested_networks",
    ),
    Fault(
        "a host that broke before growth stays broken",
        "trials/pretraining.py",
        "            hosts.evaluate()  # brings back a host that broke\n",
        "",
        "trials/test_pretraining.py::test_a_host_that_breaks_while_it_is_trained_is_brought_back",
    ),
    Fault(
        "an arm without a number is a traceback",
        COMPARING,
        "if not math.isfinite(run.result.test_loss)",
        "if False",
        "trials/test_static.py::test_an_arm_that_ends_with_no_number_is_named_and_the_others_are_kept",
    ),
    Fault(
        "a rule that does not fit is found in the middle",
        COMPARING,
        "                make_decider(probe, 0, policy)",
        "                assert policy",
        "trials/test_static.py::test_a_setting_that_this_network_refuses_is_told_before_any_arm_runs",
    ),
    Fault(
        "arms of two versions stand in one table",
        RUNNING,
        'values["code"] = code_digest()',
        'values["code"] = ""',
        "cli/test_compare.py::test_arms_of_another_version_are_not_gone_on_with",
    ),
    Fault(
        "the gap to the oracle is that of the loss",
        "cli/console/comparison.py",
        "100 * found['test_accuracy']['mean']:+.2f}\"\n\n\ndef _interval",
        "100 * found['test_accuracy']['low']:+.2f}\"\n\n\ndef _interval",
        "cli/console/test_comparison.py::test_the_gap_to_the_oracle_is_a_column_where_there_is_one",
    ),
]
