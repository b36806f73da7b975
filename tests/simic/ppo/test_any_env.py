"""`learn` on anybody's vector environment, and the agent that it returns."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.leyline.errors import EnvironmentMismatchError, MaskError, MeasurementError, SettingError
from esper.simic import PPOAgent, PPOConfig, learn
from esper.simic.ppo.codecs import ActionCodec, ObservationCodec
from esper.tamiyo.heads import HeadSpec
from simic.worlds import NEXT_STEP, SAME_STEP, SMALL, agent_for, bytes_of, clocks


class Any(gym.Env):
    """Random observations of any space; actions must be in theirs."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        return self.observation_space.sample(), 1.0, self.time % 5 == 0, self.time % 7 == 0, {}


def any_env(observations, actions, mode=NEXT_STEP):
    return SyncVectorEnv(
        [lambda: Any(observations, actions) for _ in range(3)], autoreset_mode=mode
    )


FLAT = Box(-1, 1, (3,), np.float32)


# -- the same seed ---------------------------------------------------------------------------------


def learned(seed, global_seed=0):
    torch.manual_seed(global_seed)
    records = []
    agent = learn(
        clocks(3, SAME_STEP, [4, 6, None]),
        96,
        SMALL,
        seed,
        watch=lambda _, record: records.append(record),
    )
    return bytes_of(agent.network), records


def test_the_same_seed_learns_the_same_twice_whatever_else_was_drawn():
    first, second = learned(5, global_seed=0), learned(5, global_seed=1)
    assert first[0] == second[0]
    assert list(map(str, first[1])) == list(map(str, second[1]))  # NaN is not equal to itself


def test_another_seed_learns_something_else():
    assert learned(5)[0] != learned(6)[0]


def test_learning_leaves_the_global_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    learn(clocks(2), 40, SMALL)
    assert torch.equal(torch.rand(3), expected)


# -- how long --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "decisions"), [(96, [48, 96]), (100, [48, 96, 99]), (3, [3])])
def test_steps_are_counted_over_all_environments_together(total, decisions):
    found = []
    agent = learn(clocks(3), total, SMALL, watch=lambda _, record: found.append(record.decisions))
    assert found == decisions
    assert (agent.decisions, agent.updates) == (decisions[-1], len(decisions))


@pytest.mark.parametrize("total", [0, -5, 2])
def test_too_few_steps_are_refused(total):
    with pytest.raises(SettingError, match=f"total_steps is {total}, .*3 environments"):
        learn(clocks(3), total, SMALL)


def test_schedules_end_with_the_training_unless_told_otherwise():
    agent = learn(clocks(3), 96, SMALL)
    assert agent.config.annealed("lr", agent.decisions) == pytest.approx(SMALL.lr_floor)
    longer = SMALL.model_copy(update={"anneal_decisions": 960})
    agent = learn(clocks(3), 96, longer)
    rate = agent.config.annealed("lr", agent.decisions)
    assert rate == pytest.approx(SMALL.lr - 0.1 * (SMALL.lr - SMALL.lr_floor))


def test_defaults_serve_where_nothing_is_said():
    agent = learn(clocks(2), 4)
    assert agent.config == PPOConfig(anneal_decisions=4)


# -- spaces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=["next_step", "same_step"])
@pytest.mark.parametrize(
    "space",
    [
        FLAT,
        Box(0, 255, (4, 3, 2), np.uint8),
        Box(-1, 1, (), np.float64),
        Discrete(5),
        Discrete(5, start=-2),
        MultiDiscrete([3, 4]),
        MultiDiscrete([[2, 3], [4, 2]]),
        MultiDiscrete([3, 4], start=[1, 10]),
        MultiBinary(4),
        MultiBinary((2, 3)),
    ],
    ids=str,
)
def test_it_learns_from_any_observations(space, mode):
    agent = learn(any_env(space, Discrete(2), mode), 3 * 16, SMALL)
    assert agent.updates == 1
    assert agent.network.observation_stats.count > 30


@pytest.mark.parametrize(
    "space",
    [
        Discrete(3),
        Discrete(3, start=5),
        MultiDiscrete([3, 2]),
        MultiDiscrete([3, 2], start=[4, -1]),
        MultiDiscrete([[2, 3], [4, 2]]),
        MultiBinary(3),
        MultiBinary((2, 2)),
    ],
    ids=str,
)
def test_it_learns_any_actions_and_never_takes_one_outside_their_space(space):
    agent = learn(any_env(FLAT, space), 3 * 16, SMALL)
    actions, _ = agent.act(np.zeros((3, 3), np.float32))
    assert all(space.contains(action) for action in actions)


@pytest.mark.parametrize(
    ("space", "observations", "rows"),
    [
        (Discrete(3), [0, 2], [[1, 0, 0], [0, 0, 1]]),
        (Discrete(3, start=-1), [-1, 1], [[1, 0, 0], [0, 0, 1]]),
        (MultiDiscrete([2, 3]), [[1, 0], [0, 2]], [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
        (MultiDiscrete([2, 3], start=[5, 1]), [[6, 1]], [[0, 1, 1, 0, 0]]),
        (MultiBinary(2), [[0, 1]], [[0, 1]]),
        (Box(0, 9, (2, 2)), [[[1, 2], [3, 4]]], [[1, 2, 3, 4]]),
    ],
    ids=str,
)
def test_an_observation_becomes_a_row_of_numbers(space, observations, rows):
    codec = ObservationCodec(space)
    assert codec.encode(np.array(observations)).tolist() == rows
    assert codec.width == len(rows[0])


@pytest.mark.parametrize(
    ("space", "choices", "actions"),
    [
        (Discrete(4, start=3), [[2, 0]], [5, 3]),
        (MultiDiscrete([3, 4]), [[2, 0], [3, 1]], [[2, 3], [0, 1]]),
        (MultiDiscrete([3, 4], start=[1, 5]), [[2, 0], [3, 1]], [[3, 8], [1, 6]]),
        (MultiDiscrete([[2, 3], [4, 5]]), [[1], [2], [3], [4]], [[[1, 2], [3, 4]]]),
        (MultiBinary((1, 2)), [[0], [1]], [[[0, 1]]]),
    ],
    ids=str,
)
def test_choices_become_actions_as_the_environment_writes_them(space, choices, actions):
    codec = ActionCodec(space)
    decoded = codec.decode(
        {f"action_{place}": torch.tensor(choice) for place, choice in enumerate(choices)}
    )
    assert decoded.tolist() == actions
    assert all(space.contains(action) for action in decoded)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (Dict({"a": FLAT}), "observations .*Dict .*Box, .*FlattenObservation"),
        (Tuple((FLAT,)), "observations .*Tuple"),
    ],
    ids=["dict", "tuple"],
)
def test_observations_that_nobody_can_read_are_refused(space, words):
    with pytest.raises(EnvironmentMismatchError, match=words):
        learn(any_env(space, Discrete(2)), 100, SMALL)


def test_actions_that_are_not_choices_are_refused():
    with pytest.raises(EnvironmentMismatchError, match=r"actions .*Box .*MultiBinary"):
        learn(any_env(FLAT, FLAT), 100, SMALL)


def test_heads_that_do_not_fit_the_actions_are_refused():
    with pytest.raises(EnvironmentMismatchError, match=r"heads .*\(2, 3\) .*\[3\]"):
        learn(clocks(2), 100, SMALL, spec=HeadSpec.independent([2, 3]))


# -- acting ----------------------------------------------------------------------------------------


@pytest.fixture
def agent():
    agent = agent_for(clocks(4, actions=MultiDiscrete([3, 2])))
    for head in agent.network.policy_heads.values():
        torch.nn.init.normal_(head[-1].weight, std=0.5)
    return agent


OBSERVATIONS = np.array([[0, 1, 0], [1, 5, 0], [2, 9, 1], [3, 0, 2]], np.float32)


def test_acting_takes_the_likeliest_choices_unless_told_otherwise(agent):
    first = agent.act(OBSERVATIONS)[0]
    assert all(np.array_equal(agent.act(OBSERVATIONS)[0], first) for _ in range(20))
    drawn = {tuple(agent.act(OBSERVATIONS, deterministic=False)[0].flatten()) for _ in range(20)}
    assert len(drawn) > 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_flat_mask_is_obeyed(agent, deterministic):
    mask = np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 1, 1, 0]], bool)
    for _ in range(10):
        assert agent.act(OBSERVATIONS, mask, deterministic=deterministic)[0].tolist() == [
            [2, 0],
            [0, 1],
            [1, 1],
            [2, 0],
        ]


def test_a_mask_may_come_per_head(agent):
    masks = {
        "action_0": np.eye(3, dtype=bool)[[0, 1, 2, 0]],
        "action_1": np.eye(2, dtype=bool)[[1, 0, 1, 0]],
    }
    assert agent.act(OBSERVATIONS, masks)[0].tolist() == [[0, 1], [1, 0], [2, 1], [0, 0]]


@pytest.mark.parametrize(
    "shape", [(5,), (4, 4), (4, 6), (1, 5), (3, 5), (4, 1, 5), (0, 5)], ids=str
)
def test_a_mask_of_another_shape_is_refused(agent, shape):
    with pytest.raises(MaskError, match=r"4 environments .*\(3, 2\).*\[4, 5\]"):
        agent.act(OBSERVATIONS, np.ones(shape, bool))


def test_a_mask_that_allows_nothing_is_refused_with_its_place(agent):
    mask = np.ones((4, 5), bool)
    mask[2, 3:] = False
    with pytest.raises(MaskError, match="host 2, head 'action_1'"):
        agent.act(OBSERVATIONS, mask)


def test_the_state_carries_memory_and_none_begins_anew(agent):
    _, once = agent.act(OBSERVATIONS)
    _, twice = agent.act(OBSERVATIONS, state=once)
    _, again = agent.act(OBSERVATIONS, state=None)
    assert not torch.equal(once[0], twice[0])
    assert torch.equal(once[0], again[0])
    states = torch.as_tensor(OBSERVATIONS)[:, None].expand(4, 2, 3)
    both = agent.network.follow(states, agent.network.get_initial_hidden(4))
    torch.testing.assert_close(twice[0], both[0])


def test_restarting_clears_single_memories_even_of_what_is_not_a_number(agent):
    _, state = agent.act(OBSERVATIONS)
    state[0][:, 1] = state[1][:, 1] = torch.nan
    cleared = agent.restart(state, np.array([False, True, False, True]))
    for before, after in zip(state, cleared, strict=True):
        assert after[:, [1, 3]].eq(0).all()
        assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])


def test_acting_does_not_learn(agent):
    before = bytes_of(agent.network)
    _, state = agent.act(OBSERVATIONS, deterministic=False)
    assert bytes_of(agent.network) == before
    assert not state[0].requires_grad


def test_an_agent_without_an_environment_says_how_to_give_it_one(agent):
    with pytest.raises(SettingError, match=r"spaces.*codecs="):
        PPOAgent(agent.network).act(OBSERVATIONS)


class Masked(VectorEnv):
    """Masks of its own, and nothing that could be called in other processes."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, reward=1.0):
        self.num_envs, self.reward, self.forbidden = 2, reward, 0
        self.single_observation_space, self.single_action_space = (
            gym.spaces.Box(-1, 1, (2,)),
            gym.spaces.Discrete(5),
        )
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)

    def action_masks(self):
        return np.tile(np.arange(5) == 2, (2, 1))

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):
        self.forbidden += int((actions != 2).sum())
        never = np.zeros(2, bool)
        return np.zeros((2, 2), np.float32), np.full(2, self.reward), never, never, {}


def test_masks_of_a_vector_environment_are_obeyed():
    env = Masked()
    learn(env, 64, SMALL)
    assert env.forbidden == 0


def test_rewards_that_are_no_numbers_are_told():
    with pytest.raises(MeasurementError, match="NaN"):
        learn(Masked(float("nan")), 64, SMALL)
