"""docs/pretraining.md: every cell of the table "What works where" is a test that there is."""

import ast
import json
import re

import pytest

from readme_tables import ROOT

PAGE = ROOT / "docs" / "pretraining.md"
COLUMNS = ("grows", "resumes bit for bit", "`esper.fork`", "`esper.compile_layers`")
SCHEDULE, RANKS = "garden/test_depth_schedule.py", "garden/test_depth_ranks.py"
SHARDS, FORKS = "garden/test_depth_shards.py", "garden/test_forking.py"
COMPILING, FRAMEWORKS = "garden/test_layer_compiling.py", "integrations/test_depth.py"

ROWS = {
    "your loop, Muon and AdamW": (
        (SCHEDULE, "test_growing_changes_nothing_but_the_list"),
        (SCHEDULE, "test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit"),
        (FORKS, "test_a_fork_goes_on_as_the_first_bit_for_bit_and_shares_nothing"),
        (COMPILING, "test_muon_and_adamw_train_compiled_layers_through_a_growth"),
    ),
    "models of transformers": (
        (SCHEDULE, "test_a_model_of_transformers_keeps_its_configuration_true"),
        (FRAMEWORKS, "test_a_trainers_model_gets_deeper_and_its_checkpoints_resume_bit_for_bit"),
        None,
        (COMPILING, "test_layers_of_transformers_compile_once_and_growing_compiles_nothing"),
    ),
    "accumulation": (
        (SCHEDULE, "test_gradient_accumulation_counts_the_tokens_of_all_its_batches"),
        None,
        (FORKS, "test_a_fork_inside_an_accumulated_step_has_its_gradients"),
        None,
    ),
    "autocast, `GradScaler`": (
        (SCHEDULE, "test_half_precision_with_a_scaler_trains_through_a_growth"),
        None,
        None,
        (RANKS, "test_compiled_layers_and_half_precision_under_ddp"),
    ),
    "averaged weights (EMA)": (
        (SCHEDULE, "test_an_average_of_the_weights_gets_copies_of_its_own_layers"),
        None,
        None,
        None,
    ),
    "gradient checkpointing": (
        (SCHEDULE, "test_gradient_checkpointing_gives_the_same_run"),
        None,
        None,
        None,
    ),
    "`torch.compile(model)`": (
        (COMPILING, "test_a_model_that_is_compiled_as_a_whole_works_and_says_what_growth_costs"),
        None,
        (FORKS, "test_a_compiled_fork_runs_the_code_of_the_first"),
        (COMPILING, "test_what_cannot_be_compiled_layer_by_layer_is_refused"),
    ),
    '`mode="reduce-overhead"`': (
        (COMPILING, "test_modes_with_cuda_graphs_are_refused_by_name"),
        None,
        None,
        (COMPILING, "test_modes_with_cuda_graphs_are_refused_by_name"),
    ),
    "DDP, also `static_graph`, `find_unused_parameters`, `no_sync`": (
        (RANKS, "test_ddp_is_wrapped_once_and_ranks_are_equal_after_every_step"),
        (RANKS, "test_a_resumed_run_under_ddp_is_the_uninterrupted_one"),
        (RANKS, "test_a_fork_of_a_ddp_goes_on_as_the_first"),
        (RANKS, "test_compiled_layers_and_half_precision_under_ddp"),
    ),
    "FSDP2 (`fully_shard`), each layer by itself": (
        (SHARDS, "test_twenty_steps_with_growth_are_those_of_an_unsharded_run"),
        (SHARDS, "test_a_saved_run_resumes_at_the_new_depth"),
        (SHARDS, "test_a_fork_of_a_sharded_network_goes_on_as_the_first"),
        (SHARDS, "test_compiled_layers_that_are_sharded_grow_without_compiling"),
    ),
    "FSDP2, mixed precision policy, CPU offload": (
        (SHARDS, "test_new_layers_have_the_mixed_precision_of_the_others"),
        None,
        None,
        None,
    ),
    "accelerate, one process and DDP": (
        (FRAMEWORKS, "test_accelerate_with_ddp_is_the_run_of_one_process"),
        (FRAMEWORKS, "test_a_state_of_accelerate_resumes_bit_for_bit_across_a_growth"),
        None,
        None,
    ),
    "accelerate, FSDP2": (
        (FRAMEWORKS, "test_accelerate_with_fsdp2_is_the_run_of_one_process"),
        None,
        None,
        None,
    ),
    "Trainer, one process and DDP": (
        (FRAMEWORKS, "test_a_trainer_with_ddp_deepens_all_processes_alike_and_resumes"),
        (FRAMEWORKS, "test_a_trainers_model_gets_deeper_and_its_checkpoints_resume_bit_for_bit"),
        None,
        None,
    ),
    "Lightning, one device and DDP": (
        (FRAMEWORKS, "test_lightnings_checkpoints_resume_bit_for_bit_across_a_growth"),
        (FRAMEWORKS, "test_lightnings_checkpoints_resume_bit_for_bit_across_a_growth"),
        None,
        None,
    ),
    "FSDP1, `DataParallel`, a garden": (
        (SCHEDULE, "test_a_schedule_that_cannot_be_kept_is_refused_with_the_model_as_before"),
        None,
        None,
        None,
    ),
}


def table():
    text = PAGE.read_text(encoding="utf-8").partition("## What works where")[2]
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_table_has_these_rows_and_columns_and_says_yes_where_there_is_a_test():
    head, _, *rows = table()
    assert tuple(head[1:]) == COLUMNS
    assert [row[0] for row in rows] == list(ROWS)
    for name, *cells in rows:
        assert [bool(cell) for cell in cells] == [test is not None for test in ROWS[name]], name


@pytest.mark.parametrize("name", ROWS)
def test_every_cell_is_a_test(name):
    for cell in ROWS[name]:
        if cell is not None:
            path, function = cell
            tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
            assert function in [
                node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            ]


def test_the_costs_on_the_page_are_those_of_the_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "depth.json").read_text())
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    steps, growth = record["steps"], record["growth"]
    assert steps["layers_over_whole"] < 1.05
    assert f"takes {100 * (steps['layers_over_whole'] - 1):.0f} % longer" in page
    after = steps["next_step_seconds"]
    assert f"{after['layers']:.1f} s in place of {after['whole']:.1f} s" in page
    slowest = max(growth["growth_seconds_clock"])
    assert slowest < 1
    assert round(growth["parameters"] / 1e7) == 10
    assert f"takes {slowest:.2f} s at 100 M parameters" in page
