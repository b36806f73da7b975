"""Our learner beside stable-baselines3 and sb3-contrib: what is learned, and how fast.

    python benchmarks/peers_rl.py --out benchmarks/results/peers_rl.json                    # learning, 5 seeds each
    python benchmarks/peers_rl.py --recurrent-peer --out benchmarks/results/peers_rl.json   # the recurrent peer
    python benchmarks/peers_rl.py --speed --out benchmarks/results/peers_rl.json            # steps per second

Ours has `PPOConfig()` and 8 environments, the peers have their defaults and 1 environment; a row
names what differs. A run adds its own parts to the JSON file and leaves the others. One torch
thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

OUR_ENVS = 8
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

    @property
    def is_masked(self) -> bool:
        return self.peer is MaskablePPO


def masked(make: type, steps: int, **sizes: Any) -> Callable[[float, float | None], Problem]:
    words = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return lambda gamma, floor: Problem(
        f"{make.__name__}({words})", lambda: make(**sizes), steps, MaskablePPO, gamma, floor
    )


UNTRAINED = [
    masked(InvalidActionEnvDiscrete, 0, dim=20, n_invalid_actions=19)(0.99, 99.0),
    masked(InvalidActionEnvMultiDiscrete, 0, dims=[2, 3], n_invalid_actions=3)(0.99, 99.0),
]
_NAMED = masked(InvalidActionEnvDiscrete, 2048, dim=70, n_invalid_actions=55)
_HELD_OUT = [
    masked(InvalidActionEnvDiscrete, 2048, dim=40, n_invalid_actions=30),
    masked(InvalidActionEnvDiscrete, 2048, dim=100, n_invalid_actions=80),
    masked(InvalidActionEnvMultiDiscrete, 2048, dims=[10, 12], n_invalid_actions=14),
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
CARTPOLE = Problem("CartPole-v1 without velocity", cartpole, 50_000, PPO, floor=450.0)
ACROBOT = Problem("Acrobot-v1 without velocities", acrobot, 50_000, PPO, tolerance=5.0)


# -- ours ------------------------------------------------------------------------------------------


def make_envs(problem: Problem, count: int, seed: int) -> gym.vector.SyncVectorEnv:
    """`count` copies. The peers' environments draw from numpy and from their action space, so both are seeded."""
    np.random.seed(seed)
    envs = gym.vector.SyncVectorEnv([problem.make] * count)
    for place, env in enumerate(envs.envs):
        env.action_space.seed(1000 * seed + place)
    return envs


def train_ours(problem: Problem, seed: int) -> PPOAgent:
    envs, config = make_envs(problem, OUR_ENVS, seed), PPOConfig(gamma=problem.gamma)
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


def measure(
    problem: Problem, learner: str, train: Callable, played: Callable, seeds: Iterable[int]
) -> dict:
    """One learner on one problem over all seeds."""
    returns, seconds, settings = [], [], {}
    for seed in seeds:
        started = read_clocks()
        trained = train(problem, seed)
        seconds.append((read_clocks() - started).round(2))
        returns.append(round(played(trained, problem), 2))
        if isinstance(trained, PPOAgent):
            settings = {"n_envs": OUR_ENVS, "gamma": problem.gamma, "rest": "PPOConfig()"}
        else:
            settings = describe(trained)
    row = {
        "problem": problem.name,
        "gamma": problem.gamma,
        "steps": problem.steps,
        "learner": learner,
        "median": statistics.median(returns),
        "returns": returns,
        "seconds": [float(wall) for wall, _ in seconds],
        "cpu_seconds": [float(own) for _, own in seconds],
        "settings": settings,
    }
    print(json.dumps(row), flush=True)
    return row


def judge(problem: Problem, ours: dict, peer: dict, each_seed: bool = False) -> dict:
    """Whether ours reached its bar; `each_seed`: the floor holds for the worst seed too."""
    least = min(ours["returns"]) if each_seed else ours["median"]
    is_high = problem.floor is None or least >= problem.floor
    return {
        "bar": max(peer["median"] - problem.tolerance, problem.floor or -np.inf),
        "difference": round(ours["median"] - peer["median"], 2),
        "passes": bool(is_high and ours["median"] >= peer["median"] - problem.tolerance),
    }


def compare(problem: Problem, seeds: Iterable[int], each_seed: bool = False) -> list[dict]:
    ours = measure(problem, "ours", train_ours, play, seeds)
    peer = measure(problem, problem.peer.__name__, train_peer, play_peer, seeds)
    return [ours | judge(problem, ours, peer, each_seed), peer]


def untrained(seeds: Iterable[int]) -> list[dict]:
    rows = []
    for problem in UNTRAINED:
        rows += compare(problem, seeds, each_seed=True)
        for name, train, played in (
            ("ours", train_ours, play),
            ("MaskablePPO", train_peer, play_peer),
        ):
            blind = lambda model, of, played=played: played(model, of, uses_mask=False)  # noqa: E731
            rows.append(measure(problem, f"{name}, no mask", train, blind, seeds))
    return rows


def remembering(problem: Problem, seeds: Iterable[int]) -> list[dict]:
    """Ours, ours whose memory is cleared at every evaluation step, and PPO, which has none."""
    without: list[float] = []

    def play_both(agent: PPOAgent, of: Problem) -> float:
        without.append(round(play(agent, of, remembers=False), 2))
        return play(agent, of)

    ours = measure(problem, "ours", train_ours, play_both, seeds)
    cleared = ours | {"learner": "ours, memory cleared when evaluated", "returns": without}
    cleared["median"] = statistics.median(without)
    peer = measure(problem, "PPO (no memory)", train_peer, play_peer, seeds)
    return [ours | judge(problem, ours, peer, each_seed=True), cleared, peer]


LEARNING: dict[str, Callable[[Iterable[int]], list[dict]]] = {
    "untrained": untrained,
    "masked": lambda seeds: [row for problem in MASKED for row in compare(problem, seeds)],
    "identity": lambda seeds: [row for problem in IDENTITY for row in compare(problem, seeds)],
    "cartpole": lambda seeds: remembering(CARTPOLE, seeds),
    "acrobot": lambda seeds: remembering(ACROBOT, seeds),
}


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
        row = measure(problem, "RecurrentPPO", train, play_recurrent, seeds)
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
        "ours": {"n_envs": OUR_ENVS, "autoreset": "NEXT_STEP: the reset costs a step"}
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
            part: lambda part=part: LEARNING[part](range(options.seeds)) for part in options.only
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
