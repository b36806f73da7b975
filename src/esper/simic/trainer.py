"""The whole system on one page.

Decide, act, train an epoch, measure, reward, observe; after each round, one update.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch

from esper.kasmina.randomness import mix_seed, own_randomness
from esper.leyline.errors import MeasurementError, SaveError
from esper.runtime.devices import limited_threads, parse_devices, repeatable_kernels
from esper.runtime.population import Population, memory_errors
from esper.runtime.tasks.task import Task
from esper.simic.checkpoints import History, require_saved_corpus, saved_rounds
from esper.simic.config import TrainingConfig
from esper.simic.costs import TWINS, book, learning_ledger
from esper.simic.environment import GrowthVectorEnv
from esper.simic.host_seeds import draw_host_seeds, host_seed_draws
from esper.simic.imitation import Lesson, Teacher, require_teacher
from esper.simic.ppo.agent import PPOAgent
from esper.simic.ppo.codecs import ActionCodec, Codecs, ObservationCodec
from esper.simic.ppo.diagnostics import IMITATING, AnomalyDetector, UpdateRecord
from esper.simic.ppo.rollout import Rollout
from esper.simic.rewards import weights_of
from esper.simic.round_summary import RoundTally
from esper.simic.suite_env import SuiteEnv, join_corpora, union_space, widest_layout
from esper.simic.team import StopVote, Team
from esper.simic.twins import Twin, raise_twins
from esper.storage import runfolder
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.policy_files import Layout
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.events import AnomalyFound, RankTimed, RoundBegan, RoundFinished, finite
from esper.telemetry.sink import Sink

Hosts = GrowthVectorEnv | SuiteEnv
"""What is played: hosts of one task, or of the families of a suite."""

Count = Callable[[int, int], None]
"""Takes how much of some work is done, and how much there is."""

Advance = Callable[[str, int, int], None]
"""The same, after what is being done."""


class InterruptedTraining(Exception):  # noqa: N818  # it is no error
    """Raised where `should_stop` or the time limit ends training; whole rounds are saved."""

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
    advance: Advance = lambda work, done, total: None,
    team: Team | None = None,
) -> PPOAgent:
    """Train a growth policy; the run folder is `config.out`, and the caller holds its lock.

    Args:
        config: all that decides the run.
        sink: where events are written.
        resume: continue from the newest whole checkpoint; without one, begin at the beginning.
        watch: gets every round.
        watch_ranks: gets how long each rank took to play its share of a round.
        should_stop: asked after every epoch, by several ranks about every two seconds. True on
            any rank, or the end of `time_limit`, raises `InterruptedTraining` on all.
        tell: gets lines on what episodes may cost and rest on.
        advance: gets what this process is at, how much of it is done and how much there is.
        team: the processes that train together. Each has its share of the hosts, and all end
            with the same policy.
    """
    team = team or Team()
    deadline = time.monotonic() + (config.time_limit or math.inf)

    def is_over() -> bool:
        return should_stop() or time.monotonic() > deadline

    with memory_errors(), repeatable_kernels(config.deterministic), limited_threads(config.threads):
        with team.together():
            env = build_environment(config, team, is_over, partial(advance, "twins"))
            agent, layout = build_agent(config, env, team)
            history = History(config, layout, sink, team, env.corpus)
            first_round = history.resume(agent) if resume else 0
            if team.rank == 0:  # a resumed run may continue with another configuration
                runfolder.write_json(config.out / runfolder.CONFIG, config.model_dump(mode="json"))
        env.describe(tell)
        tell(cast(FactoredRecurrentActorCritic, agent.network).describe())
        tell_twins(env, tell, sink if team.rank == 0 and first_round == 0 else None)
        rollout = build_rollout(env, agent, config.hosts)
        vote = StopVote(team, is_over)
        last_update = time.perf_counter()
        for number in range(first_round, config.rounds):
            lesson = Lesson.of(config.imitation, number)
            tally = play_round(
                env,
                agent,
                rollout,
                number,
                sink,
                vote,
                watch=partial(advance, f"round {number + 1}"),
                lesson=lesson,
            )
            played = time.perf_counter()
            record = agent.update(rollout, imitates=lesson is not None)
            learning = learning_ledger(agent.network, record, time.perf_counter() - played)
            check_health(record, number, config, sink, emits=team.rank == 0)
            # a round lasts from update to update, with the checkpoint of the round before it
            now = time.perf_counter()
            seconds = now - last_update
            last_update = now
            event = tally.finish(agent.decisions, plain(record), learning, seconds, team)
            vote = vote.for_next_round(rollout.steps, event.seconds)
            # what a rule earned is not the policy's
            history.save(agent, number + 1, event.mean_return if lesson is None else None)
            sink.telemetry.end_round()
            watch_ranks(tally.ranks)
            watch(event)
    return agent


def tell_twins(env: Hosts, tell: Callable[[str], None], sink: Sink | None) -> None:
    """Say what the twins cost when they were computed, and book it where there is a sink."""
    ledger = env.twin_ledger
    seconds = sum(cost.seconds for cost in ledger.phases.values())
    tell(f"twins: {env.twin_count}, computed once with {ledger.flops:.3g} FLOPs in {seconds:.1f} s")
    if sink is not None:
        sink.write(book(TWINS, 0, ledger))


def build_environment(
    config: TrainingConfig,
    team: Team | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    watch_twins: Count = lambda done, total: None,
) -> Hosts:
    """This rank's share of the hosts, their twins and what they earn."""
    team = team or Team()
    here = team.assign(config.hosts)[team.rank]
    try:
        plays = _plan_plays(config, team)
        for play in plays:
            with team.together():  # each rank plays some of the twins and later reads all of them
                twins = raise_twins(
                    play.task,
                    play.seeds[team.rank :: team.size],
                    config.out / runfolder.TWINS,
                    should_stop=should_stop,
                    watch=watch_twins,
                    **play.way_to_run,
                )
            if team.any(twins is None):
                raise InterruptedTraining(saved_rounds(config.out))
        env = _build_hosts(config, plays, here)
    except OSError as problem:
        raise SaveError(
            f"cannot read the data or keep the twins in {config.out / runfolder.TWINS}: "
            f"{problem.strerror}. Free disk space and use --resume."
        ) from problem
    env.begin_from(config.seed)
    return env


@dataclass(frozen=True)
class _Play:
    """One task that a run plays."""

    task: Task
    hosts: range  # among those of all ranks
    seeds: tuple[int, ...]
    way_to_run: dict[str, Any]  # as `Population` takes it


def _plan_plays(config: TrainingConfig, team: Team) -> list[_Play]:
    """The tasks with their hosts, seeds and data; all ranks have the same."""
    plays = []
    start = 0
    with team.together():
        for share in config.shares_of_hosts:
            task = share.task.build()
            splits = task.load(config.data_root)
            seeds = draw_host_seeds(config.seed, share.pool)
            if config.suite is not None:
                draws = host_seed_draws(config.seed)
                seeds = config.suite.training_seeds(task, draws, share.pool)
            play = _Play(
                task=task,
                hosts=range(start, start + share.hosts),
                seeds=seeds,
                way_to_run={"devices": config.devices, **config.way_to_run, "splits": splits},
            )
            plays.append(play)
            start += share.hosts
        if config.imitation.rounds:
            for play in plays:  # before twins, which take long
                rule = config.imitation.policy
                require_teacher(rule, play.task, play.seeds[0], **play.way_to_run)
        corpus = join_corpora(play.way_to_run["splits"].corpus for play in plays)
        require_saved_corpus(config.out, corpus)
    team.require_same({"the corpus": corpus})
    return plays


def _build_hosts(config: TrainingConfig, plays: Sequence[_Play], here: range) -> Hosts:
    """The environment of the only task, or those of a suite's families that have hosts here."""

    def build(play: _Play, layout: ObservationLayout | None = None) -> GrowthVectorEnv:
        hosts = range(max(play.hosts.start, here.start), min(play.hosts.stop, here.stop))
        return GrowthVectorEnv(
            play.task,
            len(hosts),
            host_seeds=play.seeds,
            folder=config.out / runfolder.TWINS,
            weights=weights_of(config.family, config.reward.weights),
            gamma=config.ppo.gamma,
            lacking=config.lacking,
            drop_readings=config.drop_readings,
            first=hosts.start,
            layout=layout,
            **play.way_to_run,
        )

    if config.suite is None:
        return build(plays[0])
    # every rank has the same layout, whichever families it plays
    spaces = [Population(play.task, play.seeds[:1], **play.way_to_run).space for play in plays]
    space = union_space(spaces)
    layout = widest_layout(spaces)
    families = [
        build(play, layout)
        for play in plays
        if play.hosts.start < here.stop and here.start < play.hosts.stop
    ]
    twins: list[Twin] = []
    for play in plays:
        raised = raise_twins(play.task, play.seeds, config.out / runfolder.TWINS, **play.way_to_run)
        assert raised is not None  # no should_stop was given that could end it
        twins += raised.values()
    epochs = max(play.task.epochs for play in plays)
    return SuiteEnv(families, here.start, epochs, twins, space)


def build_agent(
    config: TrainingConfig, env: Hosts, team: Team | None = None
) -> tuple[PPOAgent, Layout]:
    """A fresh policy for these hosts and what it is built for."""
    ppo = config.settled().ppo
    layout = Layout.of(env.space, ppo.hidden_dim, ppo.head_dim, lacking=config.lacking)
    with own_randomness(mix_seed(config.seed, 11)):
        network = layout.build().for_space(env.layout, env.space.blends)
    network.lean_to_wait(config.initial_wait)
    network.to(parse_devices([config.policy_device])[0])
    codecs = Codecs(
        observations=ObservationCodec(env.single_observation_space),
        actions=ActionCodec(env.single_action_space, env.heads),
    )
    agent = PPOAgent(
        network,
        ppo,
        seed=mix_seed(config.seed, 12),
        codecs=codecs,
        team=team,
        families=[share.task.name for share in config.shares_of_hosts],
    )
    agent.layout = layout
    return agent, layout


def build_rollout(env: Hosts, agent: PPOAgent, total: int | None = None) -> Rollout:
    """Storage for every decision of whole episodes of the hosts here.

    `total` is the number of hosts on all ranks; None: there are no others.
    """
    ops, slots, blueprints, blends = env.heads.sizes
    mask_shapes: dict[str, tuple[int, ...]] = {
        "op": (ops,),
        "slot": (ops, slots),
        "blueprint": (slots, blueprints),
        "blend": (blends,),
    }
    return Rollout(
        steps=env.epochs - 1,
        count=env.num_envs,
        state_dim=env.width,
        spec=env.heads,
        mask_shapes=mask_shapes,
        like=next(agent.network.parameters()),
        first=env.first,
        total=total,
        families=[agent.returns.names.index(name) for name in env.task_names],
    )


def draw_noise(env: GrowthVectorEnv, rollout: Rollout, number: int) -> torch.Tensor:
    """The random numbers of a round's decisions, [T, N, heads, widest].

    They belong to the episode, whichever rank plays it.
    """
    first_episode = number * rollout.total + env.first
    shape = (rollout.steps, len(env.heads.heads), max(env.heads.sizes))
    draws = []
    for host in range(env.num_envs):
        seed = mix_seed(env.seed, 13, first_episode + host)
        generator = torch.Generator().manual_seed(seed)
        draws.append(torch.rand(shape, generator=generator))
    return torch.stack(draws, 1)


@torch.no_grad()
def play_round(
    env: Hosts,
    agent: PPOAgent,
    rollout: Rollout,
    number: int,
    sink: Sink,
    vote: StopVote,
    watch: Count = lambda done, total: None,
    lesson: Lesson | None = None,
) -> RoundTally:
    """N whole episodes; the hosts of one part train while the policy decides about another.

    In a lesson a rule decides too, and the choices in the rollout are the rule's.

    Raises `InterruptedTraining` after the epoch at which the ranks vote to stop.
    """
    sink.write(RoundBegan(number))
    began = time.perf_counter()
    tally = RoundTally(env, number, sink, lesson)
    rollout.begin(agent.network.get_initial_hidden(env.num_envs))
    parts = []
    for part in env.parts():
        rows = rollout.part(part.first - env.first, part.num_envs)
        parts.append(play_part(part, agent, rows, number, tally, lesson))
    try:
        for epoch, _ in enumerate(zip_longest(*parts)):
            watch(epoch + 1, rollout.steps + 1)
            if vote.after(epoch):
                raise InterruptedTraining(number)
        if vote.at_the_end():
            raise InterruptedTraining(number)
    finally:  # a round that stops in the middle leaves hosts that still train
        env.settle()
    timed = RankTimed(
        round=number,
        rank=agent.team.rank,
        hosts=env.num_envs,
        seconds=time.perf_counter() - began - vote.seconds_waited,
    )
    tally.ranks = [timed]
    sink.write(timed)
    return tally


def play_part(
    env: GrowthVectorEnv,
    agent: PPOAgent,
    rollout: Rollout,
    number: int,
    tally: RoundTally,
    lesson: Lesson | None = None,
) -> Iterator[None]:
    """Whole episodes of some hosts; yields whenever they train, so that others may have a turn.

    A host that is given up has no more valid steps.
    """
    first_episode = number * rollout.total + env.first
    env.reset_async(seed=env.seed, options={"episodes": first_episode})
    noise = draw_noise(env, rollout, number).to(agent.device)
    hidden = agent.network.get_initial_hidden(env.num_envs)
    flops = agent.network.decision_flops
    is_playing = torch.ones(env.num_envs, dtype=torch.bool, device=agent.device)
    # episodes begin with the rollout, where the memory is zero already
    begins = torch.zeros_like(is_playing)
    first = env.first - tally.env.first
    yield
    obs, info = env.reset_wait()
    for host, events in enumerate(info["events"]):
        tally.emit(first + host, events)
    teacher = None if lesson is None else Teacher(lesson, env, rollout.steps, first_episode)
    for step in range(env.epochs - 1):
        asked = time.perf_counter()
        states = _on(obs, agent).to(rollout.states.dtype)
        masks = {head: _on(mask, agent) for head, mask in info["action_mask"].items()}
        choices, log_probs, values, hidden = agent.network.get_action(
            states, hidden, masks, teacher is not None, noise=noise[step]
        )
        actions = torch.stack([choices[head] for head in env.heads.names], -1).cpu().numpy()
        env.episodes.charge_policy(range(env.num_envs), flops, time.perf_counter() - asked)
        if teacher is not None:
            wanted, actions = teacher.correct(step, actions, is_playing.cpu().numpy())
            choices = dict(zip(env.heads.names, _on(wanted.T, agent), strict=True))
        rollout.add_decision(states, masks, choices, log_probs, values, is_playing, begins)
        masks_before = info["action_mask"]
        env.step_async(actions)
        yield
        obs, rewards, terminated, truncated, info = env.step_wait()
        paid = _on(rewards, agent).to(rollout.rewards.dtype)
        is_terminated = _on(terminated, agent)
        rollout.add_outcome(paid, is_terminated, _on(truncated, agent))
        tally.take(first, actions, rewards, masks_before, info, is_playing.cpu().numpy())
        is_playing &= ~is_terminated
    # episodes of other families may be longer
    for _ in range(rollout.steps - rollout.length):
        rollout.repeat_last_step()
        yield
    rollout.finish(torch.zeros_like(rollout.values[0]), hidden)


def check_health(
    record: UpdateRecord, number: int, config: TrainingConfig, sink: Sink, emits: bool
) -> None:
    """Emit what does not look healthy, on the rank that emits.

    The first anomaly of a series brings debug records for a few rounds.
    """
    detector = IMITATING if number < config.imitation.rounds else AnomalyDetector()
    anomalies = detector.check(record, number / config.rounds)
    for anomaly in anomalies:
        escalated = sink.telemetry.escalate_temporarily()
        if not emits:
            continue
        event = AnomalyFound(
            round=number,
            kind=anomaly.kind,
            value=finite(anomaly.value),
            limit=finite(anomaly.limit),
            where=anomaly.where,
            escalated=escalated,
        )
        sink.write(event)
        if escalated:
            dump = {"round": number, **plain(record)}
            sink.write_record("UPDATE_DUMP", dump, TelemetryLevel.DEBUG)
    if config.stop_on_anomaly and anomalies:
        kinds = ", ".join(dict.fromkeys(anomaly.kind for anomaly in anomalies))
        raise MeasurementError(
            f"round {number + 1}: {kinds}, and stop_on_anomaly is set. {number} rounds are saved; "
            f"change ppo, --resume."
        )


def plain(record: UpdateRecord) -> Any:
    """The record as plain data for JSON; NaN and infinity become None."""
    return json.loads(json.dumps(asdict(record)), parse_constant=lambda name: None)


def _on(values: Any, agent: PPOAgent) -> torch.Tensor:
    return torch.as_tensor(values).to(agent.device)
