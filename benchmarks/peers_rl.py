"""Our learner beside stable-baselines3 and sb3-contrib: what is learned, and how fast.

    python benchmarks/peers_rl.py --out benchmarks/results/peers_rl.json                    # learning, 5 seeds each
    python benchmarks/peers_rl.py --recurrent-peer --out benchmarks/results/peers_rl.json   # the recurrent peer
    python benchmarks/peers_rl.py --speed --out benchmarks/results/peers_rl.json            # steps per second

Ours has `PPOConfig()` with 8 and with 4 environments, the peers have their defaults and 1
environment; a row names what differs. Ours learns once more from random first values, as it did in
0.2.0. A run adds its own parts to the JSON file and leaves the others. One torch thread per
process; `--workers 16` learns in so many processes at once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from hardware import hardware
from records import claim_parts, known_parts, write
from rich.console import Console
from rich.table import Table
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.envs import (
    InvalidActionEnvDiscrete,
    InvalidActionEnvMultiBinary,
    InvalidActionEnvMultiDiscrete,
)
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import (
    IdentityEnv,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from esper.simic import PPOAgent, PPOConfig, learn
from esper.simic.ppo.codecs import ActionCodec, ObservationCodec
from esper.tamiyo.network import RecurrentActorCritic

OUR_ENVS = (8, 4)
EPISODES = 20
"""Played by the likeliest action after training; their mean is a seed's result."""
EVALUATION_SEED = 10_000
TEST_SETTINGS: dict[str, Any] = {
    "n_steps": 128,
    "learning_rate": 7e-4,
    "batch_size": 256,
    "n_epochs": 10,
    "max_grad_norm": 1,
    "gae_lambda": 0.98,
    "policy_kwargs": {
        "net_arch": {"vf": [64], "pi": []},
        "lstm_hidden_size": 64,
        "ortho_init": False,
        "enable_critic_lstm": True,
    },
}
"""What sb3-contrib's own test (tests/test_lstm.py) uses for CartPole without velocity, with 8 environments."""


class Keep(gym.ObservationWrapper):
    """Shows some numbers of an observation only."""

    def __init__(self, env: gym.Env, places: Iterable[int]):
        super().__init__(env)
        self.places = list(places)
        whole = env.observation_space
        self.observation_space = gym.spaces.Box(
            whole.low[self.places], whole.high[self.places], dtype=np.float32
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self.places].astype(np.float32)


def cartpole() -> gym.Env:
    return Keep(gym.make("CartPole-v1"), (0, 2))


def acrobot() -> gym.Env:
    return Keep(gym.make("Acrobot-v1"), range(4))


@dataclass(frozen=True)
class Problem:
    """An environment, how long it is learned and what is asked of ours."""

    name: str
    make: Callable[[], gym.Env]
    steps: int
    peer: type
    gamma: float = 0.99
    floor: float | None = None
    """ours must reach this"""
    tolerance: float = 2.0
    """and the peer's median less this"""
    each_seed: bool = False
    """whether the floor holds for the worst seed too"""

    @property
    def is_masked(self) -> bool:
        return self.peer is MaskablePPO


def masked(make: type, steps: int, **sizes: Any) -> Callable[..., Problem]:
    words = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return lambda gamma, floor, each_seed=False: Problem(
        name=f"{make.__name__}({words})",
        make=lambda: make(**sizes),
        steps=steps,
        peer=MaskablePPO,
        gamma=gamma,
        floor=floor,
        each_seed=each_seed,
    )


UNTRAINED = [
    masked(InvalidActionEnvDiscrete, 0, dim=20, n_invalid_actions=19)(0.99, 99.0, True),
    masked(InvalidActionEnvMultiDiscrete, 0, dims=[2, 3], n_invalid_actions=3)(0.99, 99.0, True),
]
_NAMED = masked(InvalidActionEnvDiscrete, 2048, dim=70, n_invalid_actions=55)
_HELD_OUT = [
    masked(InvalidActionEnvDiscrete, 2048, dim=40, n_invalid_actions=30),
    masked(InvalidActionEnvDiscrete, 2048, dim=100, n_invalid_actions=80),
    masked(InvalidActionEnvMultiDiscrete, 2048, dims=[10, 12], n_invalid_actions=14),
    masked(InvalidActionEnvMultiDiscrete, 2048, dims=[3, 3, 3, 3], n_invalid_actions=4),
    masked(InvalidActionEnvMultiDiscrete, 2048, dims=[4, 5, 5, 6], n_invalid_actions=8),
    masked(InvalidActionEnvMultiDiscrete, 4096, dims=[5, 5, 6, 6], n_invalid_actions=12),
    masked(InvalidActionEnvMultiBinary, 2048, dims=8, n_invalid_actions=4),
]
MASKED = [_NAMED(0.4, 80.0), _NAMED(0.99, None)] + [
    make(gamma, None) for make in _HELD_OUT for gamma in (0.4, 0.99)
]
IDENTITY = [
    Problem(f"{make.__name__}(4)", lambda make=make: make(4), 1200, PPO, gamma, floor)
    for make in (IdentityEnv, IdentityEnvMultiDiscrete, IdentityEnvMultiBinary)
    for gamma, floor in (
        (0.4, 90.0),
        (0.99, None),
    )  # 0.4 is what the peers' own tests of these environments use
]
CARTPOLE = Problem(
    "CartPole-v1 without velocity", cartpole, 50_000, PPO, floor=450.0, each_seed=True
)
ACROBOT = Problem("Acrobot-v1 without velocities", acrobot, 50_000, PPO, tolerance=5.0)


# -- ours ------------------------------------------------------------------------------------------


def make_envs(problem: Problem, count: int, seed: int) -> gym.vector.SyncVectorEnv:
    """`count` copies. The peers' environments draw from numpy and from their action space, so both are seeded."""
    np.random.seed(seed)
    envs = gym.vector.SyncVectorEnv([problem.make] * count)
    for place, env in enumerate(envs.envs):
        env.action_space.seed(1000 * seed + place)
    return envs


@contextmanager
def random_first_values() -> Iterator[None]:
    """A fresh network values states at random, as that of 0.2.0 did."""
    initialise = RecurrentActorCritic._initialise

    def with_random_values(network: RecurrentActorCritic) -> None:
        initialise(network)
        with torch.no_grad():
            network.value_head[-1].weight.mul_(100)

    RecurrentActorCritic._initialise = with_random_values
    try:
        yield
    finally:
        RecurrentActorCritic._initialise = initialise


def train_with_random_values(problem: Problem, seed: int, count: int) -> PPOAgent:
    with random_first_values():
        return train_ours(problem, seed, count)


def train_ours(problem: Problem, seed: int, count: int) -> PPOAgent:
    envs, config = make_envs(problem, count, seed), PPOConfig(gamma=problem.gamma)
    if problem.steps:
        return learn(envs, problem.steps, config, seed)
    codecs = ObservationCodec(envs.single_observation_space), ActionCodec(envs.single_action_space)
    torch.manual_seed(seed)
    return PPOAgent(
        RecurrentActorCritic(codecs[0].width, codecs[1].spec), config, seed=seed, codecs=codecs
    )


def play(
    agent: PPOAgent, problem: Problem, *, uses_mask: bool = True, remembers: bool = True
) -> float:
    """Mean return of the first episode in each of 20 environments."""
    envs = make_envs(problem, EPISODES, EVALUATION_SEED)
    obs, _ = envs.reset(seed=EVALUATION_SEED)
    returns, is_on, state = np.zeros(EPISODES), np.ones(EPISODES, bool), None
    while is_on.any():
        mask = np.array(envs.call("action_masks")) if problem.is_masked and uses_mask else None
        actions, state = agent.act(obs, mask, state if remembers else None)
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += rewards * is_on
        is_on &= ~(terminated | truncated)
    return float(returns.mean())


# -- the peers -------------------------------------------------------------------------------------


def make_peer_env(problem: Problem, seed: int, count: int = 1) -> DummyVecEnv:
    np.random.seed(seed)
    envs = DummyVecEnv([problem.make] * count)
    envs.seed(seed)
    for place, env in enumerate(envs.envs):
        env.action_space.seed(1000 * seed + place)
    return envs


def train_peer(problem: Problem, seed: int) -> Any:
    model = problem.peer(
        "MlpPolicy", make_peer_env(problem, seed), gamma=problem.gamma, seed=seed, device="cpu"
    )
    return model.learn(problem.steps) if problem.steps else model


def play_peer(model: Any, problem: Problem, *, uses_mask: bool = True) -> float:
    env = make_peer_env(problem, EVALUATION_SEED)
    if problem.is_masked:
        return float(evaluate_masked(model, env, EPISODES, warn=False, use_masking=uses_mask)[0])
    return float(evaluate_policy(model, env, EPISODES, warn=False)[0])


def describe(model: Any) -> dict[str, Any]:
    """A peer's settings as it says them itself."""
    names = (
        "n_envs",
        "n_steps",
        "batch_size",
        "n_epochs",
        "gamma",
        "gae_lambda",
        "ent_coef",
        "vf_coef",
        "max_grad_norm",
        "target_kl",
    )
    return {name: getattr(model, name) for name in names} | {
        "learning_rate": model.lr_schedule(1.0),
        "steps_taken": model.num_timesteps,
    }


# -- learning --------------------------------------------------------------------------------------


def read_clocks() -> np.ndarray:
    """Seconds on the wall and of this process; they differ where others use the cores."""
    return np.array([time.perf_counter(), time.process_time()])


@dataclass(frozen=True)
class Learner:
    """How something is trained, and how it is played: by row of the record."""

    train: Callable[[Problem, int], Any]
    plays: Mapping[str, Callable[[Any, Problem], float]]
    envs: int | None = None
    """of ours; None: a peer"""


class Outcome(NamedTuple):
    """What one seed came to."""

    returns: dict[str, float]
    seconds: tuple[float, float]
    settings: dict[str, Any]


def ours_with(envs: int, more: Mapping[str, Any] | None = None) -> Learner:
    """Our learner; `more` are further ways to play what was learned."""
    name = f"ours, {envs} environments"
    plays = {f"{name}{words}": played for words, played in (more or {}).items()}
    return Learner(lambda of, seed: train_ours(of, seed, envs), {name: play} | plays, envs)


def ours_before(envs: int) -> Learner:
    name = f"ours, {envs} environments, random first values"
    return Learner(lambda of, seed: train_with_random_values(of, seed, envs), {name: play}, envs)


def peer_named(name: str, more: Mapping[str, Any] | None = None) -> Learner:
    return Learner(train_peer, {name: play_peer} | dict(more or {}))


def learn_one(learner: Learner, problem: Problem, seed: int) -> Outcome:
    """One seed of one learner on one problem."""
    started = read_clocks()
    trained = learner.train(problem, seed)
    wall, own = (read_clocks() - started).round(2)
    returns = {name: round(played(trained, problem), 2) for name, played in learner.plays.items()}
    if learner.envs is None:
        settings = describe(trained)
    else:
        settings = {"n_envs": learner.envs, "gamma": problem.gamma, "rest": "PPOConfig()"}
    return Outcome(returns=returns, seconds=(float(wall), float(own)), settings=settings)


def rows_of(problem: Problem, outcomes: list[Outcome]) -> list[dict]:
    """One row for each way in which all seeds of a learner were played."""
    rows = []
    for name in outcomes[0].returns:
        returns = [outcome.returns[name] for outcome in outcomes]
        row = {
            "problem": problem.name,
            "gamma": problem.gamma,
            "steps": problem.steps,
            "learner": name,
            "median": statistics.median(returns),
            "returns": returns,
            "seconds": [outcome.seconds[0] for outcome in outcomes],
            "cpu_seconds": [outcome.seconds[1] for outcome in outcomes],
            "settings": outcomes[0].settings,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def judge(problem: Problem, ours: dict, peer: dict) -> dict:
    """Whether ours reached its bar."""
    least = min(ours["returns"]) if problem.each_seed else ours["median"]
    is_high = problem.floor is None or least >= problem.floor
    return {
        "bar": max(peer["median"] - problem.tolerance, problem.floor or -np.inf),
        "difference": round(ours["median"] - peer["median"], 2),
        "passes": bool(is_high and ours["median"] >= peer["median"] - problem.tolerance),
    }


def play_blind(agent: PPOAgent, problem: Problem) -> float:
    return play(agent, problem, uses_mask=False)


def play_peer_blind(model: Any, problem: Problem) -> float:
    return play_peer(model, problem, uses_mask=False)


def play_forgetting(agent: PPOAgent, problem: Problem) -> float:
    """With a memory that is cleared at every step."""
    return play(agent, problem, remembers=False)


def learners_of(part: str, peer: type) -> list[Learner]:
    """Ours first, the peer last."""
    if part == "untrained":
        ours = [ours_with(OUR_ENVS[0], {", no mask": play_blind})]
        return [*ours, peer_named(peer.__name__, {"MaskablePPO, no mask": play_peer_blind})]
    before = [ours_before(envs) for envs in OUR_ENVS]
    if part in ("cartpole", "acrobot"):
        cleared = {", memory cleared when evaluated": play_forgetting}
        now = [ours_with(envs, cleared) for envs in OUR_ENVS]
        return [*now, *before, peer_named("PPO (no memory)")]
    return [*(ours_with(envs) for envs in OUR_ENVS), *before, peer_named(peer.__name__)]


LEARNING: dict[str, list[Problem]] = {
    "untrained": UNTRAINED,
    "masked": MASKED,
    "identity": IDENTITY,
    "cartpole": [CARTPOLE],
    "acrobot": [ACROBOT],
}


class Task(NamedTuple):
    """One seed of one learner on one problem, in words that another process understands."""

    part: str
    problem: int
    learner: int
    seed: int


def learn_task(task: Task) -> Outcome:
    torch.set_num_threads(1)
    problem = LEARNING[task.part][task.problem]
    return learn_one(learners_of(task.part, problem.peer)[task.learner], problem, task.seed)


def learn_part(part: str, seeds: Iterable[int], workers: int) -> list[dict]:
    """All problems of a part; ours is judged by the peer of the same job."""
    tasks = [
        Task(part, place, learner, seed)
        for place, problem in enumerate(LEARNING[part])
        for learner in range(len(learners_of(part, problem.peer)))
        for seed in seeds
    ]
    if workers == 1:
        outcomes = [learn_task(task) for task in tasks]
    else:
        with ProcessPoolExecutor(workers) as pool:
            outcomes = list(pool.map(learn_task, tasks))
    rows: list[dict] = []
    for place, problem in enumerate(LEARNING[part]):
        by_learner: dict[int, list[Outcome]] = {}
        for task, outcome in zip(tasks, outcomes, strict=True):
            if task.problem == place:
                by_learner.setdefault(task.learner, []).append(outcome)
        *ours, peer = [rows_of(problem, of_learner) for of_learner in by_learner.values()]
        for first, *others in ours:
            rows += [first | judge(problem, first, peer[0]), *others]
        rows += peer
    return rows


# -- the recurrent peer ----------------------------------------------------------------------------


class TimeLimit(BaseCallback):
    """Ends training after some seconds."""

    def __init__(self, seconds: float):
        super().__init__()
        self.ends_at = time.perf_counter() + seconds

    def _on_step(self) -> bool:
        return time.perf_counter() < self.ends_at


def train_recurrent(problem: Problem, seed: int, limit: float) -> Any:
    """RecurrentPPO with the settings of its own test on CartPole."""
    env = VecNormalize(make_peer_env(problem, seed, 8))
    model = RecurrentPPO("MlpLstmPolicy", env, seed=seed, device="cpu", **TEST_SETTINGS)
    return model.learn(problem.steps, callback=TimeLimit(limit))


def play_recurrent(model: Any, problem: Problem) -> float:
    env = VecNormalize(make_peer_env(problem, EVALUATION_SEED), training=False, norm_reward=False)
    env.obs_rms = model.get_vec_normalize_env().obs_rms
    return float(evaluate_policy(model, env, EPISODES, warn=False)[0])


def recurrent_peer(seeds: Iterable[int], limit: float) -> list[dict]:
    rows = []
    for problem in (CARTPOLE, ACROBOT):
        train = lambda of, seed: train_recurrent(of, seed, limit)  # noqa: E731
        learner = Learner(train, {"RecurrentPPO": play_recurrent})
        outcomes = [learn_one(learner, problem, seed) for seed in seeds]
        [row] = rows_of(problem, outcomes)
        row["settings"] |= {
            "seconds at most": limit,
            "observations and rewards": "VecNormalize",
        } | TEST_SETTINGS
        rows.append(row)
    return rows


# -- speed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What both sides have in common while they are timed."""

    width: int
    horizon: int
    minibatches: int
    epochs: int = 10
    envs: int = 8

    @property
    def steps(self) -> int:
        return self.envs * self.horizon


SIZES = {"ours": Sizes(128, 256, 8), "sb3-contrib's test": Sizes(64, 128, 4)}


class Encoder(BaseFeaturesExtractor):
    """The layer that ours has before its LSTM."""

    def __init__(self, space: gym.spaces.Box, width: int):
        super().__init__(space, width)
        self.layers = nn.Sequential(nn.Linear(int(np.prod(space.shape)), width), nn.Tanh())

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)


ONE_LSTM = {"shared_lstm": True, "enable_critic_lstm": False}
PEERS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "RecurrentPPO, two LSTMs (default)": lambda sizes: {},
    "RecurrentPPO, one LSTM": lambda sizes: ONE_LSTM,
    "RecurrentPPO, one LSTM, our encoder": lambda sizes: (
        ONE_LSTM
        | {"features_extractor_class": Encoder, "features_extractor_kwargs": {"width": sizes.width}}
    ),
}


def build_peer(sizes: Sizes, more: dict[str, Any]) -> RecurrentPPO:
    policy = {"lstm_hidden_size": sizes.width, "net_arch": {"pi": [64], "vf": [64]}} | more
    batch = sizes.steps // sizes.minibatches
    return RecurrentPPO(
        "MlpLstmPolicy",
        make_peer_env(CARTPOLE, 0, sizes.envs),
        batch_size=batch,
        n_steps=sizes.horizon,
        n_epochs=sizes.epochs,
        policy_kwargs=policy,
        device="cpu",
    )


def time_sizes(name: str, sizes: Sizes, repeats: int) -> list[dict]:
    """Rollout and update of ours, then of each peer, and again; the first round warms up. No update stops early."""
    config = PPOConfig(
        horizon=sizes.horizon,
        epochs=sizes.epochs,
        minibatches=sizes.minibatches,
        target_kl=None,
        hidden_dim=sizes.width,
    )
    peers = {peer: build_peer(sizes, more(sizes)) for peer, more in PEERS.items()}
    seconds: dict[str, list[np.ndarray]] = {learner: [] for learner in ("ours", *peers)}
    optimiser_steps: list[int] = []
    clocks = read_clocks()

    def take_turns(agent: PPOAgent, record: Any) -> None:
        nonlocal clocks
        seconds["ours"].append(read_clocks() - clocks)
        optimiser_steps.append(record.steps)
        for peer, model in peers.items():
            clocks = read_clocks()
            model.learn(sizes.steps, reset_num_timesteps=False)
            seconds[peer].append(read_clocks() - clocks)
        clocks = read_clocks()

    learn(make_envs(CARTPOLE, sizes.envs, 0), sizes.steps * (repeats + 1), config, watch=take_turns)
    assert set(optimiser_steps) == {sizes.epochs * sizes.minibatches}
    ours = np.array(seconds["ours"][1:])
    rows = []
    for learner, times in seconds.items():
        wall, own = np.array(times[1:]).T
        ratios = wall / ours[:, 0]
        rows.append(
            {
                "sizes": name,
                "learner": learner,
                "steps_per_s": float(sizes.steps / np.median(wall)),
                "ours_is_faster_by": float(np.median(ratios)),
                "by_cpu_time": float(np.median(own / ours[:, 1])),
                "settings": asdict(sizes),
                "ratios": ratios.round(2).tolist(),
                "seconds": wall.round(3).tolist(),
                "cpu_seconds": own.round(3).tolist(),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


# -- the record ------------------------------------------------------------------------------------


def show(rows: list[dict]) -> None:
    keys = [key for key in rows[0] if not isinstance(rows[0][key], dict)]
    table = Table()
    for key in keys:
        table.add_column(key)
    for row in rows:
        table.add_row(
            *(
                f"{row[key]:,.2f}" if isinstance(row.get(key), float) else str(row.get(key, ""))
                for key in keys
            )
        )
    Console(width=200).print(table)


def keep(out: Path, parts: dict[str, list[dict]]) -> None:
    """Put these parts into the file beside those of other runs."""
    record = {
        "script": "benchmarks/peers_rl.py",
        "hardware": hardware("cpu"),
        "ours": {"n_envs": list(OUR_ENVS), "autoreset": "NEXT_STEP: the reset costs a step"}
        | PPOConfig().model_dump(),
        "evaluation": f"{EPISODES} episodes, likeliest action",
        "parts": known_parts(out, "parts") | parts,
    }
    write(out, record)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=LEARNING, nargs="+", default=list(LEARNING))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes that learn at once")
    parser.add_argument("--recurrent-peer", action="store_true")
    parser.add_argument(
        "--limit",
        type=float,
        default=3600,
        help="seconds that the recurrent peer may train per seed",
    )
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file; parts that it has are not replaced")
    parser.add_argument("--replace", action="store_true", help="replace parts that --out has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        jobs = {
            "speed": lambda: [
                row for name in SIZES for row in time_sizes(name, SIZES[name], options.repeats)
            ]
        }
    elif options.recurrent_peer:
        jobs = {"recurrent_peer": lambda: recurrent_peer(range(options.seeds), options.limit)}
    else:
        jobs = {
            part: lambda part=part: learn_part(part, range(options.seeds), options.workers)
            for part in options.only
        }
    extra = "" if options.seeds == 5 else f", {options.seeds} seeds"
    if options.out:
        names = [f"{part}{extra}" for part in jobs]
        claim_parts(options.out, "parts", names, options.replace)
    for part, job in jobs.items():
        rows = job()
        show(rows)
        if options.out:
            keep(options.out, {f"{part}{extra}": rows})


if __name__ == "__main__":
    main()
