"""`esper run`: one policy on one or many hosts, saved after every epoch. What surrounds the loop is in `cli`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from esper.episodes import Episodes
from esper.kasmina.blueprints import SHAM
from esper.kasmina.harvesting import export_network
from esper.leyline.factored_actions import ActionSpace
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population, memory_errors
from esper.simic.checkpoints import Layout, load_policy, other_episodes, require_layout
from esper.tamiyo.policies import NetworkPolicy
from esper.tamiyo.rules import is_rule
from esper.telemetry.events import ArmFinished, Event, StageChanged
from esper.telemetry.runfolder import NETWORKS, POLICY
from esper.telemetry.sink import Sink
from esper.telemetry.store import Store
from esper.trials.arms import Decider, act_on_epoch, arm_result, make_decider
from esper.trials.config import RunConfig
from esper.trials.saves import EpochSave, EpochSaves


class StoppedRun(Exception):  # noqa: N818  # nobody made a mistake
    """Somebody asked to stop; `epochs` epochs are saved."""

    def __init__(self, epochs: int):
        self.epochs = epochs


@memory_errors()
def run_hosts(
    config: RunConfig,
    *,
    sink: Sink,
    resume: bool = False,
    watch: Callable[[int, Sequence[Event]], None] = lambda epoch, events: None,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[ArmFinished]:
    """Play the hosts' episodes under the policy and score the results; the caller holds the folder's lock."""
    with repeatable_kernels(config.deterministic), limited_threads(config.threads):
        episodes, deciders = build(config, resume)
        population = episodes.population
        population.describe(tell)
        is_file = not is_rule(config.policy) and Path(config.policy).is_file()
        if is_file and (line := other_episodes(Path(config.policy), population.task)):
            tell(line)
        saves = EpochSaves(config.out, population, deciders, sink, config.digest())
        found = saves.restore() if resume else None
        first, counts = (0, [{} for _ in population.runs]) if found is None else (found.epoch, found.counts)
        for epoch in range(first, population.task.epochs):
            if found is not None:
                episodes.look_again()
                happened, found = found.happened, None
            else:
                happened = episodes.train()
                saves.save(EpochSave(epoch, happened, counts))
            act_on_epoch(episodes, deciders, happened)
            for own, events in zip(counts, happened, strict=True):
                for event in events:
                    sink.write(event)
                    if isinstance(event, StageChanged):
                        own[event.after] = own.get(event.after, 0) + 1
            watch(epoch, [event for events in happened for event in events])
            if should_stop() and epoch + 1 < population.task.epochs:
                raise StoppedRun(saves.epochs)
        return _finish(config, episodes, counts, sink)


def build(config: RunConfig, is_resumed: bool = False) -> tuple[Episodes, list[Decider]]:
    """Fresh hosts and whoever decides about each."""
    task = config.task.build()
    task = replace(task, blueprints=(SHAM,)) if config.policy == SHAM else task
    seeds = [config.seed + number for number in range(config.hosts)]
    population = Population(task, seeds, config.devices, data_root=config.data_root, **config.way_to_run)
    episodes = Episodes(population)
    if is_rule(config.policy):
        return episodes, [make_decider(episodes, host, config.policy) for host in range(config.hosts)]
    store = Store(config.out / "policy.json", "policy of a run", names="policy", of=config.digest())
    space = population.runs[0].model.space
    kept = store.newest() if is_resumed else None
    if kept is None:
        load_fitting(Path(config.policy), space)
        kept = store.save({}, {"policy": (POLICY, Path(config.policy).read_bytes())})
    policy, use_telemetry = load_fitting(store.path(kept, "policy"), space)
    return episodes, [make_decider(episodes, host, lambda facts: policy, use_telemetry) for host in range(config.hosts)]


def load_fitting(path: Path, space: ActionSpace) -> tuple[NetworkPolicy, bool]:
    """A trained policy that fits these slots and blueprints, and whether it reads telemetry; others are refused."""
    policy, layout = load_policy(path)
    reads_telemetry = any(name.endswith(".greedy_score") for name in layout["features"])
    require_layout(layout, Layout.of(space, reads_telemetry, layout["hidden_dim"], layout["head_dim"]), path)
    return policy, reads_telemetry


def _finish(config: RunConfig, episodes: Episodes, counts: list[dict[str, int]], sink: Sink) -> list[ArmFinished]:
    """Harvest, read the test split, write the results down."""
    results = []
    for host, final in enumerate(episodes.population.final_scores()):
        run = episodes.population.runs[host]
        seconds = sum(cost.seconds for cost in run.ledger.phases.values())
        start = run.model.host_params
        result = arm_result(config.policy, run, final, counts[host], start_params=start, seconds=seconds)
        export_network(run.model, config.out / NETWORKS / f"host-{host}")
        sink.write(episodes.close(host))
        sink.write(result)
        results.append(result)
    sink.commit()
    return results
