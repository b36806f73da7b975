"""The whole system on one page:

decide, act, train an epoch, measure, reward, observe; after each round, one update.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import torch

from esper.episodes import decision_flops
from esper.kasmina.randomness import mix_seed, own_randomness
from esper.leyline.errors import MeasurementError, SaveError
from esper.runtime.devices import limited_threads, parse_devices, repeatable_kernels
from esper.runtime.population import memory_errors
from esper.simic.checkpoints import History, require_saved_corpus, saved_rounds
from esper.simic.config import TrainingConfig
from esper.simic.environment import GrowthVectorEnv, draw_host_seeds
from esper.simic.ppo.agent import PPOAgent
from esper.simic.ppo.codecs import ActionCodec, ObservationCodec
from esper.simic.ppo.diagnostics import AnomalyDetector, UpdateRecord
from esper.simic.ppo.rollout import Rollout
from esper.simic.rewards import weights_of
from esper.simic.round_summary import RoundTally
from esper.simic.team import Team
from esper.simic.twins import twin_readings
from esper.storage import runfolder
from esper.tamiyo.policy_files import Layout
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.events import AnomalyFound, RankTimed, RoundBegan, RoundFinished, finite
from esper.telemetry.sink import Sink


class InterruptedTraining(Exception):  # noqa: N818  # nobody made a mistake
    """Somebody asked to stop; the last whole round is saved."""

    def __init__(self, rounds: int):
        super().__init__(f"stopped after {rounds} whole rounds")
        self.rounds = rounds


def train_ppo_vectorized(
    config: TrainingConfig,
    *,
    sink: Sink,
    resume: bool = False,
    watch: Callable[[RoundFinished], None] = lambda event: None,
    watch_ranks: Callable[[Sequence[RankTimed]], None] = lambda ranks: None,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda line: None,
    team: Team | None = None,
) -> PPOAgent:
    """Train a growth policy; the run folder is `config.out`, and the caller holds its lock.

    Args: resume: go on from the newest whole checkpoint; without any, begin at the beginning.
        watch: is shown every round. watch_ranks: is shown how long each rank took to play its share
        of a round. should_stop: asked after every epoch, by ranks about every two seconds; True on
        any rank, or the end of `time_limit`, ends the run with `InterruptedTraining` on all. tell:
        is told what episodes may cost and rest on. team: the processes that train together; each
        has its share of the hosts, and all end with the same policy.
    """
    team, until = team or Team(), time.monotonic() + (config.time_limit or math.inf)

    def is_over() -> bool:
        return should_stop() or time.monotonic() > until

    with memory_errors(), repeatable_kernels(config.deterministic), limited_threads(config.threads):
        with team.together():
            env = build_environment(config, team, is_over)
            agent, layout = build_agent(config, env, team)
            history = History(config, layout, sink, team, env.population.corpus)
            first = history.resume(agent) if resume else 0
            if team.rank == 0:  # what it goes on with
                runfolder.write_json(config.out / runfolder.CONFIG, config.model_dump(mode="json"))
        env.population.describe(tell)
        rollout = build_rollout(env, agent, config.hosts)
        started, every, reads_later = time.perf_counter(), 1, False
        for number in range(first, config.rounds):
            tally = play_round(env, agent, rollout, number, sink, is_over, every, reads_later)
            record = agent.update(rollout)
            check_health(record, number, config, sink, tells=team.rank == 0)
            before, started = (
                started,
                time.perf_counter(),
            )  # from update to update, checkpoint and all
            event = tally.finish(agent.decisions, plain(record), started - before, team)
            if (
                team.size > 1
            ):  # who asks every two seconds and reads the answer the next time stops within four
                pace = rollout.steps / event.seconds
                every, reads_later = min(max(1, int(2 * pace)), rollout.steps), pace > 0.5
            history.save(agent, number + 1, event.mean_return)
            sink.telemetry.end_round()
            watch_ranks(tally.ranks)
            watch(event)
    return agent


def build_environment(
    config: TrainingConfig,
    team: Team | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GrowthVectorEnv:
    """This rank's share of the hosts, their twins and what they earn."""
    team = team or Team()
    here, task, folder = (
        team.assign(config.hosts)[team.rank],
        config.task.build(),
        config.out / runfolder.TWINS,
    )
    seeds = draw_host_seeds(config.seed, config.host_pool)
    places: dict[str, Any] = {"devices": config.devices, **config.way_to_run}
    try:
        with team.together():
            places["splits"] = splits = task.load(config.data_root)
            require_saved_corpus(config.out, splits.corpus)
        team.require_same({"the corpus": splits.corpus})
        with team.together():  # every rank plays some of the twins, and then reads the others'
            played = twin_readings(
                task, seeds[team.rank :: team.size], folder, should_stop=should_stop, **places
            )
        if team.any(played is None):
            raise InterruptedTraining(saved_rounds(config.out))
        weights, sees = weights_of(config.family, config.reward.weights), config.observe_telemetry
        own: dict[str, Any] = {
            "first": here.start,
            "weights": weights,
            "use_telemetry": sees,
            **places,
        }
        env = GrowthVectorEnv(task, len(here), host_seeds=seeds, folder=folder, **own)
    except OSError as problem:
        found = f"cannot read the data or keep the twins in {folder}: {problem.strerror}"
        raise SaveError(f"{found}. Free disk space and use --resume.") from problem
    env.seed = config.seed
    return env


def build_agent(
    config: TrainingConfig, env: GrowthVectorEnv, team: Team | None = None
) -> tuple[PPOAgent, Layout]:
    """A fresh policy for these hosts and what it is built for."""
    ppo = config.settled().ppo
    layout = Layout.of(env.space, config.observe_telemetry, ppo.hidden_dim, ppo.head_dim)
    with own_randomness(mix_seed(config.seed, 11)):
        network = layout.build()
    network.lean_to_wait(config.initial_wait)
    network.to(parse_devices([config.policy_device])[0])
    codecs = (
        ObservationCodec(env.single_observation_space),
        ActionCodec(env.single_action_space, env.heads),
    )
    agent = PPOAgent(network, ppo, seed=mix_seed(config.seed, 12), codecs=codecs, team=team)
    agent.layout = layout
    return agent, layout


def build_rollout(env: GrowthVectorEnv, agent: PPOAgent, total: int | None = None) -> Rollout:
    """Storage for whole episodes:

    every decision of every host here, of `total` on all ranks; None is no others.
    """
    ops, slots, blueprints, blends = env.space.sizes
    shapes = {
        "op": (ops,),
        "slot": (ops, slots),
        "blueprint": (slots, blueprints),
        "blend": (blends,),
    }
    size, place = (env.task.epochs - 1, env.num_envs, env.width), (env.first, total or env.num_envs)
    return Rollout(*size, env.heads, shapes, like=next(agent.network.parameters()), place=place)


def draw_noise(env: GrowthVectorEnv, rollout: Rollout, number: int) -> torch.Tensor:
    """The random numbers of a round's decisions, [T, N, heads, widest]:

    every episode has its own, wherever it runs.
    """
    first, shape = (
        number * rollout.total + env.first,
        (rollout.steps, len(env.heads.heads), max(env.heads.sizes)),
    )
    seeds = (mix_seed(env.seed, 13, first + host) for host in range(env.num_envs))
    return torch.stack(
        [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds], 1
    )


@torch.no_grad()
def play_round(
    env: GrowthVectorEnv,
    agent: PPOAgent,
    rollout: Rollout,
    number: int,
    sink: Sink,
    should_stop: Callable[[], bool],
    every: int = 1,
    reads_later: bool = False,
) -> RoundTally:
    """N whole episodes: one part trains while another is decided about. After `every` epochs all
    ask if they stop.

    Read later, with the next question, an answer keeps nobody waiting; two open ones would keep
    survivors from leaving.
    """
    sink.write(RoundBegan(number))
    began, waited, stops, tally = time.perf_counter(), 0.0, False, RoundTally(env, number, sink)
    rollout.begin(agent.network.get_initial_hidden(env.num_envs))
    parts = [(part, rollout.part(part.first - env.first, part.num_envs)) for part in env.parts()]
    answer: Callable[[], bool] = bool  # nobody has asked
    try:
        for epoch, _ in enumerate(
            zip_longest(*(play_part(part, agent, rows, number, tally) for part, rows in parts))
        ):
            asked = time.perf_counter()
            if epoch and epoch % every == 0 and not (stops := answer()):
                answer = agent.team.ask(should_stop())
                stops = not reads_later and answer()
            if stops:
                break
            waited += time.perf_counter() - asked  # for ranks that take longer
        asked = time.perf_counter()
        if stops or answer():
            raise InterruptedTraining(number)
        waited += time.perf_counter() - asked
    finally:  # who stops in the middle leaves hosts that train
        env.population.executor.settle(env.population.runs)
    tally.ranks = [
        RankTimed(number, agent.team.rank, env.num_envs, time.perf_counter() - began - waited)
    ]
    sink.write(tally.ranks[0])
    return tally


def play_part(
    env: GrowthVectorEnv, agent: PPOAgent, rollout: Rollout, number: int, tally: RoundTally
) -> Iterator[None]:
    """Whole episodes of some hosts, until they train:

    then others may come. One that is given up has no more steps.
    """
    env.reset_async(seed=env.seed, options={"episodes": number * rollout.total + env.first})
    noise = draw_noise(env, rollout, number).to(agent.device)
    hidden, flops = agent.network.get_initial_hidden(env.num_envs), decision_flops(agent.network)
    goes_on = torch.ones(env.num_envs, dtype=torch.bool, device=agent.device)
    begins, first = torch.zeros_like(goes_on), env.first - tally.env.first  # hidden is zero already
    yield
    obs, info = env.reset_wait()
    for host, events in enumerate(info["events"]):
        tally.tell(first + host, events)
    for step in range(rollout.steps):
        asked = time.perf_counter()
        states = _on(obs, agent).to(rollout.states.dtype)
        masks = {head: _on(mask, agent) for head, mask in info["action_mask"].items()}
        choices, log_probs, values, hidden = agent.network.choose(
            states, hidden, masks, noise=noise[step]
        )
        actions = torch.stack([choices[head] for head in env.heads.names], -1).cpu().numpy()
        env.episodes.charge_policy(range(env.num_envs), flops, time.perf_counter() - asked)
        rollout.add_decision(states, masks, choices, log_probs, values, goes_on, begins)
        before = info
        env.step_async(actions)
        yield
        obs, rewards, terminated, truncated, info = env.step_wait()
        paid = _on(rewards, agent).to(rollout.rewards.dtype)
        rollout.add_outcome(paid, _on(terminated, agent), _on(truncated, agent))
        tally.take(first, actions, rewards, before["action_mask"], info, goes_on.cpu().numpy())
        goes_on &= ~_on(terminated, agent)
    rollout.finish(torch.zeros_like(rollout.values[0]), hidden)


def check_health(
    record: UpdateRecord, number: int, config: TrainingConfig, sink: Sink, tells: bool
) -> None:
    """Tell what does not look healthy; the first sign of a series brings debug records for a few
    rounds.
    """
    for anomaly in (found := AnomalyDetector().check(record, number / config.rounds)):
        escalated = sink.telemetry.escalate_temporarily()
        if tells:
            value, limit = finite(anomaly.value), finite(anomaly.limit)
            sink.write(AnomalyFound(number, anomaly.kind, value, limit, anomaly.where, escalated))
            if escalated:
                sink.write_record(
                    "UPDATE_DUMP", {"round": number, **plain(record)}, TelemetryLevel.DEBUG
                )
    if config.stop_on_anomaly and found:
        kinds = ", ".join(dict.fromkeys(anomaly.kind for anomaly in found))
        reason = f"round {number + 1}: {kinds}, and stop_on_anomaly is set"
        raise MeasurementError(f"{reason}. {number} rounds are saved; change ppo, --resume.")


def plain(record: UpdateRecord) -> Any:
    """The same for JSON: NaN and infinity become None."""
    return json.loads(json.dumps(asdict(record)), parse_constant=lambda name: None)


def _on(values: Any, agent: PPOAgent) -> torch.Tensor:
    return torch.as_tensor(values).to(agent.device)
