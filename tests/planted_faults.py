"""Faults of contracts and blueprints to plant in a copy of the sources, each with the test that must catch it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One textual mistake: `old` becomes `new` in `file`, and `test` has to fail."""

    phrase: str
    file: str
    old: str
    new: str
    test: str


ACTIONS, SLOTS = "leyline/factored_actions.py", "leyline/slots.py"
STAGES, LIFE, GATES, LEGALITY = "leyline/stages.py", "leyline/lifecycle.py", "leyline/gates.py", "leyline/legality.py"
SEEDS, BLUEPRINTS, CHECKS = "kasmina/seeds.py", "kasmina/blueprints.py", "kasmina/checks.py"

CONTRACTS = [
    Fault(
        "tables are not checked at import",
        ACTIONS,
        "\n_check_tables()\n",
        "\n",
        "leyline/test_factored_actions.py::test_a_doctored_table_does_not_survive_an_import",
    ),
    Fault(
        "every action is in the first slot",
        ACTIONS,
        "slot_id=space.slots.slot_ids[slot_idx]",
        "slot_id=space.slots.slot_ids[0]",
        "leyline/test_factored_actions.py::test_every_slot_of_the_default_space_is_found_by_its_index",
    ),
    Fault(
        "an index outside the space is taken",
        ACTIONS,
        "if not 0 <= index < size:",
        "if not index < size:",
        "leyline/test_factored_actions.py::test_an_index_outside_the_space_is_refused_by_head",
    ),
    Fault(
        "slots are ordered as text",
        SLOTS,
        "sorted(slot_ids, key=slot_position)",
        "sorted(slot_ids)",
        "leyline/test_slots.py::test_ten_comes_after_two",
    ),
    Fault(
        "slots keep the order of insertion",
        SLOTS,
        'object.__setattr__(self, "slot_ids", ordered)',
        'object.__setattr__(self, "slot_ids", tuple(self.slot_ids))',
        "leyline/test_slots.py::test_order_does_not_depend_on_dict_insertion",
    ),
    Fault(
        "a refused slot name is not told what to write",
        SLOTS,
        "write 'r0c0', 'r0c1', 'r0c2' for",
        "write it right for",
        "leyline/test_slots.py::test_a_name_such_as_early_is_refused_with_what_to_write",
    ),
    Fault(
        "a repeated slot is taken",
        SLOTS,
        "        if repeated:",
        "        if False:",
        "leyline/test_slots.py::test_a_repeated_id_is_refused_by_name",
    ),
    Fault(
        "an embargo never ends",
        STAGES,
        "SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING})",
        "SeedStage.EMBARGOED: frozenset({SeedStage.EMBARGOED})",
        "leyline/test_lifecycle.py::test_every_failed_seed_can_free_its_slot",
    ),
    Fault(
        "a seed may be planted during an embargo",
        LEGALITY,
        "if report.stage is not SeedStage.DORMANT:",
        "if report.is_live:",
        "leyline/test_lifecycle.py::test_a_random_walk_of_legal_moves_never_leaves_the_table",
    ),
    Fault(
        "any move is taken",
        LIFE,
        "if to not in TRANSITIONS[self.stage]:",
        "if to is self.stage:",
        "leyline/test_lifecycle.py::test_advance_follows_the_table_and_nothing_else",
    ),
    Fault(
        "a newborn seed may be culled",
        LEGALITY,
        "if report.seed_age_epochs < MIN_CULL_AGE:",
        "if report.seed_age_epochs < 0:",
        "leyline/test_legality.py::test_each_refusal_has_its_own_error_with_what_rule_and_way_out",
    ),
    Fault(
        "an unmeasured seed may be fossilized",
        LEGALITY,
        "if report.stage is SeedStage.PROBATIONARY and report.is_measured:",
        "if report.stage is SeedStage.PROBATIONARY:",
        "kasmina/test_model.py::test_a_refusal_leaves_the_model_as_before",
    ),
    Fault(
        "one seed more than max_seeds",
        LEGALITY,
        "view.seeds_used >= view.max_seeds",
        "view.seeds_used > view.max_seeds",
        "kasmina/test_model.py::test_the_seed_limit_counts_live_seeds_and_fossils",
    ),
    Fault(
        "the budget is checked before the seed is counted",
        LEGALITY,
        "view.params_used + cost <= view.budget",
        "view.params_used <= view.budget",
        "kasmina/test_model.py::test_no_sequence_of_moves_exceeds_the_budget",
    ),
    Fault(
        "not measured passes",
        GATES,
        "if measured is None or math.isnan(measured):",
        "if measured is None and not passes:",
        "leyline/test_gates.py::test_what_was_not_measured_never_passes",
    ),
    Fault(
        "any gain counts, however uncertain",
        GATES,
        "return self.mean > self.standard_error",
        "return self.mean > 0",
        "leyline/test_lifecycle.py::test_a_seed_without_evidence_that_it_helps_is_culled_after_probation",
    ),
    Fault(
        "incubation ends well without a measurement",
        LIFE,
        "(SeedStage.BLENDING if gate.passed else SeedStage.CULLED)",
        "(SeedStage.BLENDING if gate.verdict != 'failed' else SeedStage.CULLED)",
        "leyline/test_lifecycle.py::test_incubation_ends_as_its_gate_says",
    ),
    Fault(
        "a ramp starts above zero",
        LIFE,
        "    if progress <= 0.0:\n        return 0.0",
        "    if progress <= 0.0:\n        return 0.01",
        "leyline/test_lifecycle.py::test_a_ramp_starts_at_zero_and_ends_at_one_exactly",
    ),
    Fault(
        "a ramp ends below one",
        LIFE,
        "    if progress >= 1.0:\n        return 1.0",
        "    if progress >= 1.0:\n        return 0.999999",
        "kasmina/test_lifecycle_in_model.py::test_a_ramp_in_a_model_goes_from_exactly_zero_to_exactly_one",
    ),
    Fault(
        "an embargo lasts an epoch too long",
        LIFE,
        "state.epochs_in_stage >= lengths.embargo",
        "state.epochs_in_stage > lengths.embargo",
        "leyline/test_lifecycle.py::test_a_culled_slot_opens_after_three_epochs_of_embargo_and_one_of_resetting",
    ),
    Fault(
        "leyline needs torch",
        SLOTS,
        "import re\n",
        "import re\n\nimport torch  # noqa: F401\n",
        "test_imports.py::test_it_imports_with_torch_blocked",
    ),
    Fault(
        "importing esper loads torch",
        "__init__.py",
        "from importlib import import_module\n",
        "from importlib import import_module\n\nimport torch\n",
        "test_imports.py::test_importing_esper_does_not_load_torch",
    ),
    Fault(
        "a word that must not exist",
        STAGES,
        '"""Stages in which the slot holds',
        '"""Legacy stages in which the slot holds',
        "test_architecture.py::test_what_must_not_exist_does_not",
    ),
    Fault(
        "no nearest name is offered",
        "leyline/errors.py",
        "close = get_close_matches(str(name), known, n=1)",
        "close = []",
        "kasmina/test_blueprints.py::test_an_unknown_name_gets_the_nearest_one",
    ),
]

BLUEPRINT_FAULTS = [
    Fault(
        "a newborn seed is not the identity",
        SEEDS,
        "if channels_first else (channels,), value)",
        "if channels_first else (channels,), value + 0.01)",
        "kasmina/test_blueprints.py::test_a_newborn_seed_is_the_identity_to_the_bit",
    ),
    Fault(
        "the zero sits in front of the ReLU",
        SEEDS,
        "return nn.Sequential(*layers, group_norm(channels), nn.ReLU())",
        "norm = group_norm(channels)\n    nn.init.zeros_(norm.weight)\n"
        "    return nn.Sequential(*layers, norm, nn.ReLU())",
        "kasmina/test_blueprints.py::test_one_optimiser_step_changes_the_output",
    ),
    Fault(
        "a layer never gets a gradient",
        SEEDS,
        "nn.functional.leaky_relu(self.squeeze(pooled), 0.01)",
        "nn.functional.leaky_relu(self.squeeze(pooled), 0.01).detach()",
        "kasmina/test_blueprints.py::test_every_parameter_gets_a_gradient_within_three_steps",
    ),
    Fault(
        "a seed looks at the future",
        SEEDS,
        "is_causal=True",
        "is_causal=False",
        "kasmina/test_blueprints.py::test_a_sequence_seed_does_not_look_at_the_future",
    ),
    Fault(
        "attention takes any width",
        SEEDS,
        "    if channels % heads:",
        "    if channels < heads:",
        "kasmina/test_blueprints.py::test_attention_refuses_a_width_its_heads_do_not_divide",
    ),
    Fault(
        "the price forgets a parameter",
        BLUEPRINTS,
        "BlueprintCost(sum(p.numel() for p in seed.parameters()),",
        "BlueprintCost(sum(p.numel() for n, p in seed.named_parameters() if n != 'scale'),",
        "kasmina/test_blueprints.py::test_the_price_is_the_number_of_parameters_that_get_built",
    ),
    Fault(
        "multiply-adds count once",
        BLUEPRINTS,
        "int(counter.get_total_flops())",
        "int(counter.get_total_flops()) // 2",
        "kasmina/test_blueprints.py::test_the_flops_are_those_of_a_real_forward_pass",
    ),
    Fault(
        "a blueprint may be called anything",
        BLUEPRINTS,
        "if not name.isidentifier():",
        "if not name:",
        "kasmina/test_blueprints.py::test_a_blueprints_name_is_an_identifier",
    ),
    Fault(
        "seeds that mix examples pass the check",
        CHECKS,
        "if not is_alike:",
        "if together.shape != features[:1].shape:",
        "kasmina/test_blueprints.py::test_the_check_rejects_a_broken_blueprint[batch norm]",
    ),
    Fault(
        "dead seeds pass the check",
        CHECKS,
        "if step == 0 and torch.equal(seed(features), features):",
        "if step < 0:",
        "kasmina/test_blueprints.py::test_the_check_rejects_a_broken_blueprint[zeros]",
    ),
]

FAULTS = [*CONTRACTS, *BLUEPRINT_FAULTS]
