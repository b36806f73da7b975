"""Faults of growing in a loop of one's own: several processes, averages, several optimisers, states, hints."""

from planted_faults import Fault

FAULTS = [
    Fault(
        "seeds' gradients stay each process's own",
        "kasmina/processes.py",
        "            distributed.all_reduce(flat)\n",
        "",
        "test_garden_processes.py::test_all_processes_hold_the_same_network_after_every_step[plain]",
    ),
    Fault(
        "every process decides for itself",
        "kasmina/processes.py",
        "gather(lambda: work() if is_first() else None)[0]",
        "work()",
        "test_garden_processes.py::test_the_first_process_decides_for_all",
    ),
    Fault(
        "DDP waits for seeds that are gone",
        "kasmina/processes.py",
        '["_ddp_params_and_buffers_to_ignore"] = names',
        '["_ddp_params_and_buffers_to_ignore"] = []',
        "test_garden_processes.py::test_a_save_of_all_processes_goes_on_in_all_of_them",
    ),
    Fault(
        "evidence is the first process's own",
        "garden.py",
        "torch.cat(parts) if self._is_split else parts[0]",
        "parts[0]",
        "test_garden_processes.py::test_two_processes_grow_the_network_that_one_grows[script]",
    ),
    Fault(
        "examples that all processes measured count twice",
        "garden.py",
        "any(not torch.equal(part, parts[0]) for part in parts)",
        "True",
        "test_garden_processes.py::test_examples_that_every_process_measured_count_once",
    ),
    Fault(
        "processes drift apart unseen",
        "garden.py",
        "        processes.require_equal(self.model)\n",
        "",
        "test_garden_processes.py::test_processes_that_drifted_apart_are_refused_everywhere",
    ),
    Fault(
        "an average of half precision stands still",
        "kasmina/averaging.py",
        "torch.promote_types(parameter.dtype, torch.float32)",
        "parameter.dtype",
        "test_garden_loops.py::test_an_average_of_half_precision_moves",
    ),
    Fault(
        "an average is lost when it is saved",
        "garden.py",
        'garden.ema(extra["decay"]).restore(average)',
        'garden.ema(extra["decay"])',
        "test_garden_loops.py::test_an_average_is_saved_and_goes_on",
    ),
    Fault(
        "Muon gets a seed's vectors",
        "kasmina/surgery.py",
        "if p.dim() == parameter.dim()]",
        "]",
        "test_garden_loops.py::test_two_optimisers_share_the_seeds_as_they_share_the_host",
    ),
    Fault(
        "a state is loaded without its seeds",
        "kasmina/slot.py",
        "    if slot.is_noted and slot.note:\n",
        "    if False:\n",
        "test_garden_loops.py::test_a_state_with_seeds_does_not_fit_a_network_without_them[live]",
    ),
    Fault(
        "a shuffled evaluation passes for sound",
        "telling.py",
        "[0, 1]) < 0.5",
        "[0, 1]) < -1.0",
        "test_garden_loops.py::test_an_evaluation_that_does_not_repeat_itself_gives_a_hint[live-shuffled-order]",
    ),
    Fault(
        "an arm goes on as if it had waited where its rule chose what is not possible",
        "trials/arms.py",
        "raise IllegalActionError(f",
        "str(f",
        "cli/test_own_files.py::test_an_op_that_is_not_possible_names_arm_and_host[run-rash]",
    ),
    Fault(
        "a seed of one's own may look at later tokens",
        "kasmina/checks.py",
        "features.shape[1] if is_causal else 0",
        "0",
        "kasmina/test_blueprints.py::test_the_check_rejects_a_broken_blueprint[later tokens]",
    ),
    Fault(
        "a run goes on with another file of one's own",
        "leyline/own.py",
        "if digest(Path(file)) != known:",
        "if False:",
        "leyline/test_own.py::test_a_file_that_was_imported_once_is_asked_for_by_name",
    ),
]
