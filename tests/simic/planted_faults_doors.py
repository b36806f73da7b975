"""Faults at the doors of the learner: settings, spaces, masks, seeds, acting; numbers are those of PPO_TRAPS.md."""

from planted_faults import Fault

AGENT = "simic/agent.py"
CONFIG = "simic/config.py"
LEARNING = "simic/learning.py"
ROLLOUT = "simic/rollout.py"
SPACES = "simic/spaces.py"
PLAYING = "simic/test_playing.py::test_"
LEARN = "simic/test_learning.py::test_"
SETTINGS = "simic/test_config.py::test_"


DOORS = [
    Fault(
        "48: settings that nobody knows are ignored",
        CONFIG,
        'extra="forbid"',
        'extra="ignore"',
        SETTINGS + "an_unknown_setting_is_refused_by_name",
    ),
    Fault(
        "48: settings of the wrong type are converted",
        CONFIG,
        "strict=True, ",
        "",
        SETTINGS + "a_setting_of_the_wrong_type_is_refused_and_not_converted",
    ),
    Fault(
        "48: settings may be infinite",
        CONFIG,
        "allow_inf_nan=False, ",
        "",
        SETTINGS + "a_setting_out_of_its_range_is_refused",
    ),
    Fault(
        "48: a clip may be 1",
        CONFIG,
        "clip: float = Field(0.2, gt=0, lt=1)",
        "clip: float = Field(0.2, gt=0, le=1)",
        SETTINGS + "a_setting_out_of_its_range_is_refused",
    ),
    Fault(
        "48: settings can be changed",
        CONFIG,
        "frozen=True, ",
        "",
        SETTINGS + "settings_cannot_be_changed_afterwards",
    ),
    Fault(
        "48: a floor may lie above its start",
        CONFIG,
        "if floor > start:",
        "if floor > 1e9:",
        SETTINGS + "a_floor_above_where_the_line_begins_is_refused",
    ),
    Fault(
        "learning draws from the global random numbers",
        LEARNING,
        "with own_randomness(mix_seed(seed, 0)):",
        "with torch.random.fork_rng(devices=[]):",
        LEARN + "the_same_seed_learns_the_same_twice_whatever_else_was_drawn",
    ),
    Fault(
        "every seed learns the same",
        LEARNING,
        "    config = config or PPOConfig()\n",
        "    config, seed = config or PPOConfig(), 0\n",
        LEARN + "another_seed_learns_something_else",
    ),
    Fault(
        "steps are counted per environment",
        LEARNING,
        "left = total_steps // env.num_envs",
        "left = total_steps",
        LEARN + "steps_are_counted_over_all_environments_together",
    ),
    Fault(
        "too few steps are no mistake",
        LEARNING,
        "if total_steps < env.num_envs:",
        "if total_steps < 0:",
        LEARN + "too_few_steps_are_refused",
    ),
    Fault(
        "schedules outlast the training",
        LEARNING,
        '{"anneal_decisions": total_steps}',
        '{"anneal_decisions": 10 * total_steps}',
        LEARN + "schedules_end_with_the_training_unless_told_otherwise",
    ),
    Fault(
        "observations are taken to start at 0",
        SPACES,
        "np.asarray(starts) - first",
        "np.asarray(starts)",
        LEARN + "an_observation_becomes_a_row_of_numbers",
    ),
    Fault(
        "actions are taken to start at 0",
        SPACES,
        "return numbers[:, 0] + start",
        "return numbers[:, 0]",
        LEARN + "it_learns_any_actions_and_never_takes_one_outside_their_space",
    ),
    Fault(
        "a mask of another number of environments is stretched",
        SPACES,
        "if flat.shape != (count, sum(self.spec.sizes)):",
        "if flat.shape[-1] != sum(self.spec.sizes):",
        LEARN + "a_mask_of_another_shape_is_refused",
    ),
    Fault(
        "a mask per head is not looked at",
        SPACES,
        "if mask.shape != (count, *rows, head.size):",
        "if mask.dim() < 2:",
        PLAYING + "a_mask_per_head_that_does_not_fit_is_refused",
    ),
    Fault(
        "heads need not fit the actions",
        SPACES,
        "if list(self.spec.sizes) != sizes:",
        "if len(self.spec.sizes) < len(sizes):",
        LEARN + "heads_that_do_not_fit_the_actions_are_refused",
    ),
    Fault(
        "environments in other processes are not asked for masks",
        LEARNING,
        'call = getattr(env.unwrapped, "call", None)',
        'call = getattr(env.unwrapped, "call", None) if hasattr(env.unwrapped, "envs") else None',
        PLAYING + "masks_are_asked_for_where_environments_have_them_even_in_other_processes",
    ),
    Fault(
        "masks may come and go",
        LEARNING,
        "if (has_one != self._is_masked).any():",
        "if has_one is None:",
        PLAYING + "masks_that_come_and_go_are_refused",
    ),
    Fault(
        "masks are ignored in acting",
        AGENT,
        "masks = actions.split_mask(mask, len(states), self.device)",
        "masks = actions.split_mask(None, len(states), self.device)",
        "simic/test_foreign.py"
        "::test_where_masks_leave_one_choice_an_untrained_agent_is_right_with_them_and_wrong_without",
    ),
    Fault(
        "acting forgets",
        AGENT,
        "self.network.choose(states, state, masks,",
        "self.network.choose(states, None, masks,",
        LEARN + "the_state_carries_memory_and_none_begins_anew",
    ),
    Fault(
        "acting draws unless told otherwise",
        AGENT,
        "deterministic: bool = True,",
        "deterministic: bool = False,",
        LEARN + "acting_takes_the_likeliest_choices_unless_told_otherwise",
    ),
    Fault(
        "actions do not earn their rewards",
        ROLLOUT,
        "        step = self.length\n        self.rewards[step],",
        "        step = (self.length + 1) % self.steps\n        self.rewards[step],",
        "simic/test_foreign.py::test_an_identity_is_learned_in_1200_steps",
    ),
]
