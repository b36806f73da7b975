"""`esper run`:

one policy on one or many hosts, saved after every epoch. What surrounds the loop is in `cli`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from esper.episodes import Episodes
from esper.kasmina.blueprints import SHAM
from esper.kasmina.exporting import export_network
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population, memory_errors
from esper.runtime.splits import require_corpus
from esper.runtime.storing import can_be_stored, describe_population, restore_population
from esper.simic.checkpoints import other_episodes
from esper.storage import runfolder
from esper.storage.store import NewFile, Store, fitting, require_plain
from esper.tamiyo.policy_files import load_fitting
from esper.tamiyo.policy_names import Rule, parse
from esper.telemetry.events import ArmFinished, Event, StageChanged, from_record, to_record
from esper.telemetry.sink import Sink
from esper.trials.arms import Decider, Say, Stopped, Watch, act_on_epoch, arm_result, make_decider
from esper.trials.config import RunConfig

KEPT_EPOCHS = 2  # Newest epochs whose hosts stay on disk.
_MEMORY = "memory"


@memory_errors()
def run_hosts(
    config: RunConfig,
    *,
    sink: Sink,
    resume: bool = False,
    watch: Watch = lambda epoch, events: None,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Say = lambda line: None,
) -> list[ArmFinished]:
    """Play the hosts' episodes under the policy and score the results; the caller holds the
    folder's lock.
    """
    with repeatable_kernels(config.deterministic), limited_threads(config.threads):
        episodes, deciders = build(config, resume, tell)
        population = episodes.population
        population.describe(tell)
        saves = EpochSaves(config.out, population, deciders, sink, config.digest())
        first, measured, counts = (resume and saves.restore()) or (
            0,
            None,
            [{} for _ in population.runs],
        )
        for epoch in range(first, population.task.epochs):
            if epoch == first and measured is not None:
                episodes.look_again()
                happened = measured
            else:
                happened = episodes.train()
                saves.save(epoch, happened, counts)
            act_on_epoch(episodes, deciders, happened)
            for own, events in zip(counts, happened, strict=True):
                for event in events:
                    sink.write(event)
                    if isinstance(event, StageChanged):
                        own[event.after] = own.get(event.after, 0) + 1
            watch(epoch, [event for events in happened for event in events])
            if should_stop() and epoch + 1 < population.task.epochs:
                raise Stopped(saves.epochs)
        return _finish(config, episodes, counts, sink)


def build(
    config: RunConfig, is_resumed: bool = False, tell: Say = lambda line: None
) -> tuple[Episodes, list[Decider]]:
    """Fresh hosts and whoever decides about each; of a trained policy the run keeps a copy, which
    it goes on with.
    """
    task = config.task.build()
    task = replace(task, blueprints=(SHAM,)) if config.policy == SHAM else task
    seeds = [config.seed + number for number in range(config.hosts)]
    population = Population(
        task, seeds, config.devices, data_root=config.data_root, **config.way_to_run
    )
    episodes = Episodes(population)
    if isinstance(parse(config.policy), Rule):
        return episodes, [
            make_decider(episodes, host, config.policy) for host in range(config.hosts)
        ]
    store = Store(
        config.out / runfolder.POLICY_MANIFEST,
        "policy of a run",
        owned=re.compile("policy"),
        bound_to=config.digest(),
    )
    space = population.runs[0].model.space
    kept = store.newest() if is_resumed else None
    if kept is None:
        load_fitting(source := Path(config.policy), space)
        if line := other_episodes(source, population.task):
            tell(line)
        kept = store.save(
            {}, {"policy": NewFile(name=runfolder.POLICY, content=source.read_bytes())}
        )
    policy = load_fitting(store.path(kept, "policy"), space)
    return episodes, [
        make_decider(episodes, host, lambda facts: policy, config.policy)
        for host in range(config.hosts)
    ]


def _finish(
    config: RunConfig, episodes: Episodes, counts: list[dict[str, int]], sink: Sink
) -> list[ArmFinished]:
    """Harvest, read the test split, write the results down."""
    results = []
    for host, final in enumerate(episodes.population.final_scores()):
        run = episodes.population.runs[host]
        start, seconds = (
            run.model.host_params,
            sum(cost.seconds for cost in run.ledger.phases.values()),
        )
        result = arm_result(
            config.policy, run, final, counts[host], start_params=start, seconds=seconds
        )
        export_network(run.model, runfolder.network_folder(config.out, host))
        sink.write(episodes.close(host))
        sink.write(result)
        results.append(result)
    sink.commit()
    return results


class EpochSaves:
    """Saves every epoch that has been trained and measured, before anything is decided about it;
    finds the way back.
    """

    def __init__(
        self,
        out: Path,
        population: Population,
        deciders: Sequence[Decider],
        sink: Sink,
        bound_to: str | None = None,
    ):
        self.population, self.deciders, self.sink = population, deciders, sink
        self.epochs = 0  # epochs of the episodes that a resume would not have to train again
        self.store = Store(
            out / runfolder.MANIFEST,
            "run of a policy",
            out / runfolder.CHECKPOINTS,
            owned=re.compile(r"epoch-\d{6}-[a-z0-9-]+"),
            keep=KEPT_EPOCHS,
            bound_to=bound_to,
        )

    def save(self, epoch: int, happened: list[list[Event]], counts: list[dict[str, int]]) -> None:
        """A kill after this costs less than an epoch.

        Hosts under the governor's suspicion are not saved.
        """
        if not can_be_stored(self.population):
            return
        hosts, contents = describe_population(self.population)
        # memories of networks; those of rules are plain data
        own = {
            host: each.memory
            for host, each in enumerate(self.deciders)
            if isinstance(each.memory, tuple)
        }
        tensors = {
            f"{host}.{n}": t.cpu().contiguous()
            for host, parts in own.items()
            for n, t in enumerate(parts)
        }
        contents[_MEMORY] = partial(save_file, tensors)
        facts = {
            "epoch": epoch,
            "corpus": self.population.corpus,
            "events": self.sink.commit(),
            "memory": [
                None if isinstance(d.memory, tuple) else require_plain(d.memory)
                for d in self.deciders
            ],
            "trackers": [decider.tracker.state() for decider in self.deciders],
            "happened": [[to_record(event) for event in events] for events in happened],
            "counts": counts,
            "hosts": hosts,
        }
        start = f"epoch-{epoch:06d}-"
        self.store.save(
            facts,
            {
                role: NewFile(name=f"{start}{role}.safetensors", content=content)
                for role, content in contents.items()
            },
        )
        self.epochs = epoch + 1

    def restore(self) -> tuple[int, list[list[Event]], list[dict[str, int]]] | None:
        """Back to the newest whole epoch:

        its number, what happened in it, each host's stages so far; None if none.
        """
        if (save := self.store.newest()) is None:
            self.sink.rewind(runfolder.BEGINNING)
            return None
        facts, paths = save.facts, {role: self.store.path(save, role) for role in save.files}
        with fitting(self.store.manifest):
            require_corpus(facts.get("corpus"), self.population.corpus, self.store.manifest.parent)
            restore_population(self.population, facts["hosts"], paths)
            tensors = load_file(paths[_MEMORY])
            for host, decider in enumerate(self.deciders):
                own = f"{host}.0" in tensors
                decider.memory = (
                    (tensors[f"{host}.0"], tensors[f"{host}.1"]) if own else facts["memory"][host]
                )
                decider.recalled = partial(fitting, self.store.manifest)
                decider.tracker.load(facts["trackers"][host])
            kinds = tuple[int, list[dict[str, int]], runfolder.Position]
            epoch, counts, end = TypeAdapter(kinds).validate_python(
                (facts["epoch"], facts["counts"], facts["events"])
            )
            self.sink.rewind(end)
            self.epochs = epoch + 1
            happened = [[from_record(record) for record in events] for events in facts["happened"]]
            [
                str(event) for events in happened for event in events
            ]  # what is of another type cannot be told
            return epoch, happened, counts
