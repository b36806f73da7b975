"""Faults of episodes, models and optimisers to plant in a copy of the sources, each with the test that catches it."""

from planted_faults import Fault

SEEDS, SLOT, LIFE, FITTING = "kasmina/seeds.py", "kasmina/slot.py", "leyline/lifecycle.py", "kasmina/fitting.py"
MODEL, HOSTS, SURGERY = "kasmina/model.py", "kasmina/hosts.py", "kasmina/surgery.py"

LIFE_FAULTS = [
    Fault(
        "a TRAINING seed steers the host's gradients",
        SLOT,
        "if self.is_in_output else features",
        "if self.is_in_output else features + (self.seed(features) - self.seed(features).detach())",
        "kasmina/test_isolation.py::test_host_gradients_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        "a TRAINING seed is in the output",
        SLOT,
        "_IN_OUTPUT = (SeedStage.BLENDING,",
        "_IN_OUTPUT = (SeedStage.TRAINING, SeedStage.BLENDING,",
        "kasmina/test_slot.py::test_a_seed_that_is_not_blended_in_yet_has_no_effect",
    ),
    Fault(
        "a shadow seed stays at full strength",
        MODEL,
        "            for slot in training:\n                slot.is_shadowed = False\n",
        "",
        "kasmina/test_isolation.py::test_outputs_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        "a shadow pass trains the host",
        MODEL,
        "parameter.requires_grad_(False)",
        "parameter.requires_grad_(True)",
        "kasmina/test_isolation.py::test_host_gradients_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        "a shadow pass moves the batch norm buffers",
        MODEL,
        "buffer.copy_(value)",
        "value.copy_(buffer)",
        "kasmina/test_isolation.py::test_shadow_passes_leave_the_batch_norm_buffers_alone",
    ),
    Fault(
        "a shadow pass draws from the global generator",
        MODEL,
        "with own_randomness(self.settings.seed, -1 - self.shadow_passes, devices=devices):",
        "with torch.enable_grad():",
        "kasmina/test_isolation.py::test_shadow_passes_leave_the_global_random_state_alone",
    ),
    Fault(
        "host and seeds are clipped together",
        MODEL,
        "for parameters in (host, *live):",
        "for parameters in ([*host, *(p for seed in live for p in seed)],):",
        "kasmina/test_isolation.py::test_host_gradients_are_bit_identical_to_a_run_without_the_seed",
    ),
    Fault(
        "the alpha tensor does not follow the state",
        SLOT,
        "        self.alpha.fill_(state.alpha)\n",
        "",
        "kasmina/test_lifecycle_in_model.py::test_a_ramp_in_a_model_goes_from_exactly_zero_to_exactly_one",
    ),
    Fault(
        "the gate is not in the optimiser",
        MODEL,
        "self.link.adopt(slot_id, seed.parameters())",
        "self.link.adopt(slot_id, [p for n, p in seed.named_parameters() if 'gate' not in n])",
        "kasmina/test_lifecycle_in_model.py::test_the_gate_is_in_the_optimiser",
    ),
    Fault(
        "the gate does not learn",
        SEEDS,
        "alpha * self.gate(features)",
        "alpha * self.gate(features).detach()",
        "kasmina/test_lifecycle_in_model.py::test_the_gate_learns",
    ),
    Fault(
        "a culled seed stays in the function",
        MODEL,
        "seed = slot.uproot()",
        "seed = slot.petrify()",
        "kasmina/test_lifecycle_in_model.py::test_after_a_cull_the_function_is_the_current_hosts_to_the_bit",
    ),
    Fault(
        "a fossil loses its gate",
        SLOT,
        "        self.fossils.append(seed)\n",
        "        seed.gate = None\n        self.fossils.append(seed)\n",
        "kasmina/test_lifecycle_in_model.py::test_fossilizing_changes_nothing_in_the_output",
    ),
    Fault(
        "alpha 1 is almost the seed",
        SEEDS,
        "return torch.lerp(features, self._grown(features), weight.to(features.dtype))",
        "return features + weight.to(features.dtype) * (self._grown(features) - features)",
        "kasmina/test_lifecycle_in_model.py::test_fossilizing_changes_nothing_in_the_output",
    ),
    Fault(
        "the slot stays closed after fossilizing",
        LIFE,
        "        case SeedStage.FOSSILIZED:\n",
        "        case SeedStage.FOSSILIZED if state.epochs_in_stage >= 2:\n",
        "kasmina/test_lifecycle_in_model.py::test_the_slot_opens_on_the_tick_after_fossilizing",
    ),
    Fault(
        "a younger fossil acts before the older ones",
        SLOT,
        "        self.fossils.append(seed)\n",
        "        self.fossils.insert(0, seed)\n",
        "kasmina/test_lifecycle_in_model.py::test_several_generations_grow_in_one_slot",
    ),
    Fault(
        "slot off leaves a little on",
        MODEL,
        "slot.alpha.fill_(0.0)",
        "slot.alpha.fill_(0.001)",
        "kasmina/test_lifecycle_in_model.py::test_slot_off_is_the_network_with_that_slot_empty",
    ),
]

MODEL_FAULTS = [
    Fault(
        "a refused seed leaves a trace",
        MODEL,
        "        slot = self._permit(LifecycleOp.GERMINATE,",
        "        self.births += 1\n        slot = self._permit(LifecycleOp.GERMINATE,",
        "kasmina/test_model.py::test_a_refusal_leaves_the_model_as_before",
    ),
    Fault(
        "a budget smaller than any seed is taken",
        FITTING,
        "if budget < host_params + costs[cheapest]:",
        "if budget < host_params:",
        "kasmina/test_model.py::test_a_budget_smaller_than_any_seed_is_refused_with_the_least_that_works",
    ),
    Fault(
        "a seed without an optimiser goes unnoticed",
        MODEL,
        "            if orphans:\n",
        "            if orphans < 0:\n",
        "kasmina/test_model.py::test_a_seed_that_no_optimiser_owns_stops_the_tick",
    ),
    Fault(
        "fossils are not counted",
        MODEL,
        "return sum(len(slot.fossils) for slot in self._ordered())",
        "return 0",
        "kasmina/test_model_reports.py::test_seeds_and_parameters_are_counted_by_their_state",
    ),
    Fault(
        "a copy's hooks call the original's slots",
        MODEL,
        "register_forward_hook(slot.hook)",
        "register_forward_hook(lambda module, inputs, output, slot=slot: slot(output))",
        "kasmina/test_model_reports.py::test_a_copys_slots_act_on_the_copy",
    ),
    Fault(
        "a pass from a segment skips that slot",
        HOSTS,
        "        features = self.sites[index](features)\n",
        "",
        "kasmina/test_hosts.py::test_cnn_segment_consistency",
    ),
    Fault(
        "a pass to a segment skips the slots before",
        HOSTS,
        "self.blocks[index + 1](self.sites[index](features))",
        "self.blocks[index + 1](features)",
        "kasmina/test_hosts.py::test_transformer_segment_consistency",
    ),
    Fault(
        "germinating clears the optimiser's memory",
        SURGERY,
        "        self.steps_since_planting[slot_id] = 0\n",
        "        self.steps_since_planting[slot_id] = 0\n        self.optimizer.state.clear()\n",
        "kasmina/test_surgery.py::test_germinating_keeps_the_state_of_all_others",
    ),
    Fault(
        "culling clears the optimiser's memory",
        SURGERY,
        "            del self.optimizer.state[parameter]\n",
        "            self.optimizer.state.clear()\n            break\n",
        "kasmina/test_surgery.py::test_culling_keeps_the_state_of_all_others",
    ),
    Fault(
        "a fossil starts without its history",
        SURGERY,
        "        moving = {id(parameter) for parameter in parameters}\n",
        "        parameters = list(parameters)\n        moving = {id(parameter) for parameter in parameters}\n"
        "        [self.optimizer.state.pop(parameter, None) for parameter in parameters]\n",
        "kasmina/test_surgery.py::test_fossilizing_keeps_the_state_of_all_and_of_the_fossil",
    ),
    Fault(
        "a scheduler's seeds do not get the multiplier",
        SURGERY,
        "(self.seed_lr * min(1.0, (steps + 1) / (self.warmup_steps + 1)))",
        "min(1.0, (steps + 1) / (self.warmup_steps + 1))",
        "kasmina/test_rates.py::test_a_seeds_rate_is_a_multiple_of_the_hosts_at_every_step",
    ),
    Fault(
        "a re-warmed rate stays up",
        SURGERY,
        '            group["lr"] = rate\n',
        "            pass\n",
        "kasmina/test_rates.py::test_the_plans_own_rates_come_back_after_every_rewarmed_step",
    ),
]

FAULTS = [*LIFE_FAULTS, *MODEL_FAULTS]
