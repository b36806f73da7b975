"""Faults of networks that get deeper: in several processes, when resumed, when forked."""

from planted_faults import Fault

RANKS, SHARDS = "garden/test_depth_ranks.py", "garden/test_depth_shards.py"

FAULTS = [
    Fault(
        phrase="DDP does not reduce new layers",
        place="garden/depth_schedule.py::DepthSchedule._grow",
        old="rebuild_reducer(ddp)",
        new="None",
        test=f"{RANKS}::test_ddp_is_wrapped_once_and_ranks_are_equal_after_every_step",
    ),
    Fault(
        phrase="a new sharded layer is a root of its own",
        place="garden/depth_schedule.py::DepthSchedule._grow",
        old="join_root(network, member.module)",
        new="None",
        test=f"{SHARDS}::test_new_layers_free_their_weights_after_forward_as_the_others_do",
    ),
    Fault(
        phrase="a new sharded layer is set as by default",
        place="garden/sharded_copies.py::_shard_one",
        old="setattr(follower_group, name, copy.copy(getattr(group, name)))",
        new="None",
        test=f"{SHARDS}::test_what_was_set_on_sharded_layers_holds_for_new_ones",
    ),
    Fault(
        phrase="copies are not compiled",
        place="garden/depth_schedule.py::_copier",
        old="follow_compiled(original, copied)",
        new="None",
        test="garden/test_layer_compiling.py::"
        "test_growing_compiles_nothing_and_the_run_is_that_of_plain_layers",
    ),
    Fault(
        phrase="groups lose the order of the network",
        place="garden/joining.py::join_originals",
        old="members.sort(key=lambda parameter: numbers[id(parameter)])",
        new="None",
        test="garden/test_depth_schedule.py::"
        "test_a_network_that_is_built_as_deep_as_it_was_saved_resumes_too",
    ),
    Fault(
        phrase="a fork forgets accumulated gradients",
        place="garden/forking.py::fork",
        old="parameter.grad.detach().clone()",
        new="None",
        test="garden/test_forking.py::test_a_fork_inside_an_accumulated_step_has_its_gradients",
    ),
    Fault(
        phrase="the law is late by a layer",
        place="leyline/depth_law.py::compute_shares",
        old="depth - 0.5",
        new="depth + 0.0",
        test="garden/test_depth_schedule.py::test_the_law_spends_compute_as_the_cube_root_says",
    ),
]
