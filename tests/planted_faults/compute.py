"""Faults of the compute clock (shares, who pays for measuring, rates, the corpus), of parts of
hosts and kept seeds.
"""

from planted_faults import Fault

FAULTS = [
    Fault(
        "an empty slot switches off what was kept there",
        "kasmina/slot.py",
        "self.alpha.fill_(1.0 if self.seed is None else state.alpha)",
        "self.alpha.fill_(state.alpha)",
        "runtime/test_parts.py::test_keeping_a_seed_leaves_the_wiring_and_changes_what_a_rollback_goes_back_to",
    ),
    Fault(
        "a kept gate's gradients come in another order",
        "kasmina/seeds.py",
        "weight = None if self.gate is None else self.gate(features)\n"
        "        return self._joined(features, weight)",
        "return self._joined(features, None) if self.gate is None else torch.lerp("
        "features, self._joined(features, None), self.gate(features).to(features.dtype))",
        "runtime/test_parts.py::test_a_kept_seed_trains_to_the_bit_as_the_seed_that_it_was",
    ),
    Fault(
        "torch may compile inside a captured graph",
        "runtime/executors/compiling.py",
        'torch.compiler.set_stance("fail_on_recompile")',
        'torch.compiler.set_stance("default")',
        "runtime/executors/test_compiling.py::test_where_nothing_new_may_be_compiled_known_calls_run_and_others_are_refused",
    ),
    Fault(
        "every host runs before it is captured",
        "runtime/executors/graphs.py",
        "if parts <= self._warmed:",
        "if not parts:",
        "runtime/executors/test_lanes.py::test_a_host_runs_once_before_a_capture_only_where_something_is_new",
    ),
    Fault(
        "heads that nobody uses take no draws from a stream that others share",
        "tamiyo/network.py",
        "if used is not None and noise is not None and not bool(used.any()):",
        "if used is not None and not bool(used.any()):",
        "tamiyo/test_network.py::test_heads_that_nobody_uses_are_not_asked_and_the_decision_is_the_same[waits0-1]",
    ),
    Fault(
        "a kept seed is still clipped by itself",
        "runtime/clipping.py",
        "torch.where(is_seed, factors[1:], host_factor)",
        "factors[1:]",
        "runtime/test_parts.py::test_hosts_are_clipped_as_gardens_are",
    ),
    Fault(
        "two parts are charged with the same second",
        "runtime/population.py",
        "now - max(started, self.shared.charged_until)",
        "now - started",
        "runtime/test_parts.py::test_a_second_is_charged_to_one_part_only",
    ),
    Fault(
        "what a share leaves is lost",
        "runtime/clock.py",
        "left = self.due(run.epoch, prices.reserve) - prices.used - prices.fixed",
        "left = self.due(0, prices.reserve) - prices.fixed",
        "runtime/test_clock.py::test_what_a_share_leaves_is_carried_over[cnn]",
    ),
    Fault(
        "measuring is not paid from the budget",
        "runtime/population.py",
        "run.ledger.settle(evaluation_charges(run, self.flops), seconds)",
        "run.ledger.settle([], seconds)",
        "runtime/test_clock.py::test_the_ledger_agrees_with_torch_about_a_whole_episode[cnn]",
    ),
    Fault(
        "a network that nobody decides about pays for every measurement",
        "runtime/clock.py",
        "run.pays_for_measuring = run.epoch + 1 >= self.task.epochs",
        "run.pays_for_measuring = True",
        "runtime/test_clock.py::test_a_static_network_pays_for_its_last_measurement_only",
    ),
    Fault(
        "all steps of a decision have the rate of its first",
        "runtime/host.py",
        "self.rates[self.step - 1]",
        "self.rates[0]",
        "runtime/test_clock.py::test_every_step_has_the_rate_of_its_share",
    ),
    Fault(
        "a rate that rises counts as one that has fallen",
        "runtime/tasks/task.py",
        "is_low(self.rate(epoch), self.lr) and not is_rising",
        "is_low(self.rate(epoch), self.lr)",
        "runtime/test_clock.py::test_a_warm_up_is_not_a_rate_that_has_fallen",
    ),
    Fault(
        "a corpus is known by its size only",
        "runtime/tasks/data.py",
        "digest.update(key)",
        'digest.update(b"")',
        "runtime/tasks/test_code.py::test_a_changed_source_is_another_corpus",
    ),
    Fault(
        "a run goes on with another corpus",
        "runtime/splits.py",
        "if saved != present:",
        "if saved is None and present is not None:",
        "trials/test_compute.py::test_a_run_does_not_go_on_with_another_corpus",
    ),
    Fault(
        "every seed of the heuristic mixes positions, not only a slot's first",
        "tamiyo/rules.py",
        "if fewest == 0:",
        "if fewest >= 0:",
        "tamiyo/test_rules.py::test_the_heuristic_plants_what_computes_most_not_what_is_largest",
    ),
    Fault(
        "a host's calls beyond its first turn are not launched",
        "runtime/executors/graphs.py",
        "for turn in filter(None, (own[start : start + _TURN] for own in calls)):",
        "for turn in filter(None, (own[:_TURN] for own in calls)):",
        "runtime/executors/test_lanes.py::test_hosts_take_turns_of_a_few_calls_and_each_keeps_its_order",
    ),
]
