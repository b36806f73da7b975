"""Faults of measurements and of fair comparisons."""

from planted_faults import Fault

FAULTS = [
    Fault(
        phrase="a save forgets that it was pruned",
        place="runtime/storing.py::_restore",
        old="facts['is_pruned']",
        new="False",
        test="runtime/test_pruning.py::test_stored_before_or_after_the_pass_it_goes_on_to_the_bit",
    ),
    Fault(
        phrase="the evidence is taken with the seed in",
        place="kasmina/switches.py::bypassed",
        old="slot.is_in_output = False",
        new="slot.is_in_output = True",
        test="runtime/test_counterfactuals.py::test_contributions_are_paired_means_with_their_standard_error",
    ),
    Fault(
        phrase="evidence is taken with the slot on",
        place="garden/measuring.py::Evaluation.read",
        old=("with self.model.slot_off(slot.slot_id):\n    values = self.losses(evaluate).values"),
        new=("if slot.slot_id:\n    values = self.losses(evaluate).values"),
        test="garden/test_garden.py::test_a_contribution_is_the_loss_without_the_slot_minus_with_it",
    ),
    Fault(
        phrase="a held-out loss of NaN is healthy",
        place="runtime/governor.py::Governor.judge",
        old="not math.isfinite(value)",
        new="name != 'held-out loss' and (not math.isfinite(value))",
        test="runtime/test_governor.py::test_a_reading_that_is_not_a_number_is_named",
    ),
    Fault(
        phrase="validation examples are trained on",
        place="runtime/splits.py::carve",
        old="_pick(split, order[cut:])",
        new="_pick(split, order)",
        test="runtime/test_splits.py::test_every_example_is_in_exactly_one_split",
    ),
    Fault(
        phrase="the test split can be looked into",
        place="runtime/splits.py::SealedSplit.__getattr__",
        old="raise DataError(f'the test split is sealed, but {name!r} was read from it. Use validation; final_scores() opens it.')",
        new=(
            "return getattr(self.__dict__['_split'], name)\n"
            "raise DataError(f'the test split is sealed, but {name!r} was read from it. Use validation; final_scores() opens it.')"
        ),
        test="runtime/test_splits.py::test_the_test_split_is_sealed",
    ),
    Fault(
        phrase="all hosts see the examples in one order",
        place="runtime/host.py::HostRun._plan_steps",
        old="mix_seed(self.seed, 2)",
        new="mix_seed(2)",
        test="runtime/test_batches.py::test_every_host_has_an_order_of_its_own",
    ),
    Fault(
        phrase="a host is drawn from the global random state",
        place="runtime/host.py::HostRun._build_network",
        old="own_randomness(self.seed)",
        new="nullcontext()",
        test="runtime/test_population.py::test_the_same_seed_has_the_same_episode_twice",
    ),
    Fault(
        phrase="not measured looks like zero",
        place="tamiyo/observation.py",
        old="UNKNOWN = -1.0",
        new="UNKNOWN = 0.0",
        test="tamiyo/test_observation.py::test_what_was_not_measured_of_the_host_is_flagged",
    ),
    Fault(
        phrase="NaN gets into the observation",
        place="tamiyo/observation.py::_is_known",
        old="value is not None and (not math.isnan(value))",
        new="value is not None",
        test="tamiyo/test_observation.py::test_no_reading_whatever_makes_a_feature_that_is_not_finite_or_beyond_five",
    ),
    Fault(
        phrase="four seeds make a claim",
        place="telemetry/statistics.py::Estimate.verdict",
        old="self.count < FEWEST",
        new="self.count < FEWEST - 1",
        test="telemetry/test_statistics.py::test_a_claim_needs_an_interval_off_zero_and_five_seeds",
    ),
    Fault(
        phrase="more loss is ahead",
        place="trials/results.py::Trials.minus",
        old=("if sign < 0:\n    ..."),
        new=("if not sign:\n    ..."),
        test="trials/test_summary.py::test_ahead_is_more_accuracy_and_less_loss",
    ),
    Fault(
        phrase="test scores choose the reported rate",
        place="trials/results.py::summarise",
        old="best_by_validation(trials)",
        new="max(trials, key=lambda one: one.mean('test_accuracy'))",
        test="trials/test_summary.py::test_an_arm_is_reported_at_the_rate_that_validation_chose",
    ),
    Fault(
        phrase="an arm gets its neighbour's episodes",
        place="trials/comparison.py::Comparison._play_group",
        old="runs[number]",
        new="runs[number % self.config.seeds]",
        test="trials/test_comparison.py::test_an_arm_is_the_same_however_many_hosts_live_side_by_side[9-sizes3]",
    ),
    Fault(
        phrase="test scores choose what is built",
        place="trials/results.py::best_by_validation",
        old="'validation_accuracy'",
        new="'test_accuracy'",
        test="trials/test_comparison.py::test_the_better_rate_is_the_one_that_validation_likes",
    ),
    Fault(
        phrase="a search chooses by test scores",
        place="trials/comparison.py::Comparison._search.play",
        old="run.result.validation_accuracy",
        new="run.result.test_accuracy",
        test="trials/test_searching.py::test_validation_chooses",
    ),
    Fault(
        phrase="a search looks at the hosts of the comparison",
        place="trials/comparison.py::Comparison._search.play",
        old="settings.seed",
        new="self.config.seed",
        test="trials/test_searching.py::test_its_hosts_are_not_those_of_the_comparison",
    ),
    Fault(
        phrase="measuring is not paid from the budget",
        place="runtime/population.py::Population.evaluate",
        old="evaluation_charges(run, self.flops)",
        new="[]",
        test="runtime/test_clock.py::test_the_ledger_agrees_with_torch_about_a_whole_episode[cnn]",
    ),
]
