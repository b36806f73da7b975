"""`esper run`: one policy on one or many hosts, saved after every epoch.

What surrounds the loop is in `cli`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from safetensors.torch import load, save_file
from torch import Tensor

from esper.episodes import Episodes
from esper.kasmina.exporting import export_network
from esper.leyline.errors import SaveError, SettingError
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population, memory_errors
from esper.runtime.splits import require_corpus
from esper.runtime.storing import can_be_stored, describe_population, restore_population
from esper.simic.checkpoints import other_episodes
from esper.storage import runfolder
from esper.storage.store import NewFile, Store, fitting, require_plain
from esper.tamiyo.policies import NetworkPolicy, Policy
from esper.tamiyo.policy_files import load_fitting
from esper.tamiyo.policy_names import File, Rule, parse
from esper.tamiyo.rules import HostFacts
from esper.telemetry.events import ArmFinished, Event, StageChanged, from_record, to_record
from esper.telemetry.sink import Sink
from esper.trials.arms import (
    Decider,
    Say,
    Stopped,
    Watch,
    act_on_epoch,
    arm_result,
    describe_undecided,
    make_decider,
)
from esper.trials.config import RunConfig

KEPT_EPOCHS = 2
"""Newest epochs whose hosts stay on disk."""

_MEMORY = "memory"
StageCounts = dict[str, int]
"""How often each stage began on one host."""


class Restored(NamedTuple):
    """The newest whole epoch of a run that was interrupted."""

    epoch: int
    happened: list[list[Event]]  # in that epoch, host by host
    counts: list[StageCounts]  # before that epoch, host by host


@memory_errors()
def run_hosts(
    config: RunConfig,
    *,
    sink: Sink,
    resume: bool = False,
    watch: Watch = lambda epoch, events: None,
    should_stop: Callable[[], bool] = lambda: False,
    say: Say = lambda line: None,
) -> list[ArmFinished]:
    """Play the hosts' episodes under the policy and score the results.

    The caller holds the folder's lock. `say` gets lines for people.
    """
    with repeatable_kernels(config.deterministic), limited_threads(config.threads):
        episodes, deciders = build(config, resume, say)
        population = episodes.population
        population.describe(say)
        saves = EpochSaves(config.out, population, deciders, sink, config.digest())
        restored = saves.restore() if resume else None
        first = 0 if restored is None else restored.epoch
        counts: list[StageCounts] = [{} for _ in population.runs]
        if restored is not None:
            counts = restored.counts
        for epoch in range(first, population.task.epochs):
            if epoch == first and restored is not None:
                episodes.look_again()
                happened = restored.happened
            else:
                happened = episodes.train()
                saves.save(epoch, happened, counts)
            act_on_epoch(episodes, deciders, happened)
            for counts_of_host, events in zip(counts, happened, strict=True):
                for event in events:
                    sink.write(event)
                    if isinstance(event, StageChanged):
                        counts_of_host[event.after] = counts_of_host.get(event.after, 0) + 1
            watch(epoch, list(chain.from_iterable(happened)))
            if should_stop() and epoch + 1 < population.task.epochs:
                raise Stopped(saves.epochs)
        for line in describe_undecided(config.policy, population.runs):
            say(line)
        return _finish(config, episodes, counts, sink)


def build(
    config: RunConfig, is_resumed: bool = False, say: Say = lambda line: None
) -> tuple[Episodes, list[Decider]]:
    """Fresh hosts, and what decides about each of them.

    Of a trained policy the run keeps a copy, with which it continues.
    """
    name = parse(config.policy)
    task = config.task.build()
    blueprints = name.blueprints()
    if blueprints:
        task = replace(task, blueprints=blueprints)
    population = Population(
        task, config.host_seeds, config.devices, data_root=config.data_root, **config.way_to_run
    )
    episodes = Episodes(population)
    policy: str | Callable[[HostFacts], Policy] = config.policy
    if not isinstance(name, Rule):
        trained = _trained_policy(config, population, is_resumed, say)
        policy = lambda facts: trained  # noqa: E731  # one policy for all hosts
    return episodes, [
        make_decider(episodes, host, policy, config.policy) for host in range(config.hosts)
    ]


def _trained_policy(
    config: RunConfig, population: Population, is_resumed: bool, say: Say
) -> NetworkPolicy:
    """The policy of a checkpoint, read from the run's own copy of it."""
    store = Store(
        config.out / runfolder.POLICY_MANIFEST,
        "policy of a run",
        owned=re.compile("policy"),
        bound_to=config.digest(),
    )
    space = population.space
    kept = store.newest() if is_resumed else None
    if kept is not None:
        return load_fitting(store.path(kept, "policy"), space, kept.contents["policy"])
    name = parse(config.policy)
    assert isinstance(name, File), "a search is refused"
    source = name.path
    # read once: a learner may replace it meanwhile
    content = name.read()
    policy = load_fitting(source, space, content)
    warning = None
    if not name.is_shipped:
        warning = other_episodes(source, population.task, content)
    if warning:
        say(warning)
    store.save({}, {"policy": NewFile(name=runfolder.POLICY, content=content)})
    return policy


def _finish(
    config: RunConfig, episodes: Episodes, counts: list[StageCounts], sink: Sink
) -> list[ArmFinished]:
    """Harvest, read the test split, write the results down."""
    results = []
    for host, final in enumerate(episodes.population.final_scores()):
        run = episodes.population.runs[host]
        seconds = sum(cost.seconds for cost in run.ledger.phases.values())
        result = arm_result(
            config.policy,
            run,
            final,
            counts[host],
            start_params=run.model.host_params,
            seconds=seconds,
        )
        export_network(run.model, runfolder.network_folder(config.out, host))
        sink.write(episodes.close(host))
        sink.write(result)
        results.append(result)
    sink.commit()
    return results


class EpochSaves:
    """Saves every epoch that has been trained and measured, and finds the way back.

    It saves before anything is decided about the epoch.
    """

    def __init__(
        self,
        out: Path,
        population: Population,
        deciders: Sequence[Decider],
        sink: Sink,
        bound_to: str | None = None,
    ):
        self.population = population
        self.deciders = deciders
        self.sink = sink
        self.epochs = 0  # epochs of the episodes that a resume would not have to train again
        self.store = Store(
            out / runfolder.MANIFEST,
            "run of a policy",
            out / runfolder.CHECKPOINTS,
            owned=re.compile(r"epoch-\d{6}-[a-z0-9-]+"),
            keep=KEPT_EPOCHS,
            bound_to=bound_to,
        )

    def save(self, epoch: int, happened: list[list[Event]], counts: list[StageCounts]) -> None:
        """A kill after this costs less than an epoch.

        Hosts under the governor's suspicion are not saved.
        """
        if not can_be_stored(self.population):
            return
        hosts, contents = describe_population(self.population)
        # memories of networks are tensors; those of rules are plain data
        tensors: dict[str, Tensor] = {}
        memories: list[Any] = []
        for host, decider in enumerate(self.deciders):
            if isinstance(decider.memory, tuple):
                for part, tensor in enumerate(decider.memory):
                    tensors[f"{host}.{part}"] = tensor.cpu().contiguous()
                memories.append(None)
            else:
                memories.append(require_plain(decider.memory))
        contents[_MEMORY] = partial(save_file, tensors)
        facts = {
            "epoch": epoch,
            "corpus": self.population.corpus,
            "events": self.sink.commit(),
            "memory": memories,
            "trackers": [decider.tracker.state() for decider in self.deciders],
            "happened": [_to_records(events) for events in happened],
            "counts": counts,
            "hosts": hosts,
        }
        files = {
            role: NewFile(name=f"epoch-{epoch:06d}-{role}.safetensors", content=content)
            for role, content in contents.items()
        }
        self.store.save(facts, files)
        self.epochs = epoch + 1

    def restore(self) -> Restored | None:
        """Bring everything back to the newest whole epoch; None if there is none."""
        save = self.store.newest()
        if save is None:
            self.sink.rewind(runfolder.BEGINNING)
            return None
        facts = save.facts
        with fitting(self.store.manifest):
            require_corpus(facts.get("corpus"), self.population.corpus, self.store.manifest.parent)
            restore_population(self.population, facts["hosts"], save.contents, self.store.manifest)
            tensors = load(save.contents[_MEMORY])
            for host, decider in enumerate(self.deciders):
                decider.memory = facts["memory"][host]
                if f"{host}.0" in tensors:
                    decider.memory = (tensors[f"{host}.0"], tensors[f"{host}.1"])
                decider.recalled = partial(_recalling, self.store.manifest)
                decider.tracker.load(facts["trackers"][host])
            epoch = TypeAdapter(int).validate_python(facts["epoch"])
            counts = TypeAdapter(list[StageCounts]).validate_python(facts["counts"])
            end = TypeAdapter(runfolder.Position).validate_python(facts["events"])
            self.sink.rewind(end)
            self.epochs = epoch + 1
            happened = [_from_records(records) for records in facts["happened"]]
            return Restored(epoch=epoch, happened=happened, counts=counts)


@contextmanager
def _recalling(manifest: Path) -> Iterator[None]:
    """What is wrong with a memory that was restored is an error that names the save."""
    with fitting(manifest):
        try:
            yield
        except SettingError as problem:  # a policy refuses a memory of another shape
            raise SaveError(
                f"{manifest} does not fit together ({problem}) Use another save, or start again."
            ) from problem


def _to_records(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [to_record(event) for event in events]


def _from_records(records: Sequence[dict[str, Any]]) -> list[Event]:
    """The events of records; a field of another type is refused, since no line shows it."""
    events = [from_record(record) for record in records]
    for event in events:
        str(event)
    return events
