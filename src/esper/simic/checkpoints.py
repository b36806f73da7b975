"""A training run's checkpoints, the newest and the best, and what they say of the run."""

import re
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from esper.runtime.config import TaskConfig
from esper.runtime.splits import require_corpus
from esper.runtime.tasks.registry import TASKS
from esper.runtime.tasks.task import Task
from esper.simic.config import TrainingConfig
from esper.simic.ppo.agent import PPOAgent
from esper.simic.team import Team
from esper.storage import runfolder
from esper.storage.store import NewFile, Store, fitting
from esper.tamiyo.policy_files import Layout, read, require_layout
from esper.telemetry.events import CheckpointSaved
from esper.telemetry.sink import Sink

# told apart by the layout, and lengths one by one
_OF_LAYOUT = ("slots", "blueprints", "blends", "lengths")


def load_agent(path: Path, agent: PPOAgent, layout: Layout) -> dict[str, Any]:
    """Put a learner back to where it was; returns the facts that the file was written with.

    What does not fit is refused at once.
    """
    content = read(path)
    require_layout(content.plain["layout"], layout, path)
    return agent.restore(content, path)


def episodes_of(path: Path) -> int | None:
    """How many episodes the policy in a checkpoint has learned from; None where it does not say."""
    with fitting(path):
        return TypeAdapter(int | None).validate_python(read(path).plain["facts"].get("episodes"))


def other_episodes(path: Path, played: Task) -> str | None:
    """How the episodes that a policy was trained for differ from those it is to play; None where
    nothing is known.
    """
    known = read(path).plain["facts"].get("task")
    with fitting(path):
        if known is not None and known["name"] not in TASKS:
            return (
                f"{path} was trained on {known['name']}, a task that is not known "
                f"here: name its file with --import."
            )
        trained = played if known is None else TaskConfig.of(known, str(path)).build()
    names = {
        *TaskConfig.model_fields,
        *(f"lengths.{name}" for name in asdict(played.lengths)),
    }.difference(_OF_LAYOUT)
    pairs = {name: (attrgetter(name)(trained), attrgetter(name)(played)) for name in sorted(names)}
    differing = ", ".join(
        f"{n} {there} there and {here} here" for n, (there, here) in pairs.items() if there != here
    )
    return (
        f"{path} was trained for other episodes: {differing}. Say --set task.KEY=VALUE."
        if differing
        else None
    )


def saved_rounds(folder: Path) -> int:
    """Whole rounds that a run has behind it on disk."""
    with fitting(folder / runfolder.MANIFEST):
        return max(
            (int(save.facts["rounds"]) for save in _store(folder, 1).generations()), default=0
        )


def require_saved_corpus(folder: Path, corpus: str | None) -> None:
    """Refuse to go on with another corpus than the one that a run's checkpoints rest on."""
    for kept in _store(folder, 1).generations():
        require_corpus(kept.facts.get("corpus"), corpus, folder)


def _store(folder: Path, keep: int) -> Store:
    return Store(
        folder / runfolder.MANIFEST,
        "training of a policy",
        folder / runfolder.CHECKPOINTS,
        owned=re.compile(r"round-\d{6,}"),
        keep=keep,
        best_by="return",
    )


class History:
    """Saves after every round and finds the way back."""

    def __init__(
        self,
        config: TrainingConfig,
        layout: Layout,
        sink: Sink,
        team: Team | None = None,
        corpus: str | None = None,
    ):
        self.folder, self.store = config.out, _store(config.out, config.keep_checkpoints)
        self.layout, self.sink, self.team = layout, sink, team or Team()
        self.hosts, self.episodes, self.corpus = config.hosts, 0, corpus
        self.task = config.settled_task.model_dump(mode="json")

    def save(self, agent: PPOAgent, rounds: int, mean_return: float) -> None:
        """The learner after `rounds` whole rounds, with where each rank's events stood; hosts begin
        anew with each.
        """
        name = f"round-{rounds:06d}.safetensors"
        self.episodes += self.hosts
        if self.team.rank == 0:
            name = self.store.free_name(name)
            self.sink.write(CheckpointSaved(rounds, name))
        files = runfolder.event_files(self.folder)  # of ranks that there were once, too
        events = {
            str(rank): (segment, path.stat().st_size) for (rank, segment), path in files.items()
        }
        events |= {str(rank): end for rank, end in enumerate(self.team.gather(self.sink.commit()))}
        if self.team.rank == 0:
            facts = {
                "rounds": rounds,
                "episodes": self.episodes,
                "events": events,
                "task": self.task,
            }
            agent.facts = {**facts, "telemetry": self.sink.telemetry.state()}
            content = agent.to_bytes(self.layout, agent.facts)
            known = {"rounds": rounds, "return": mean_return, "corpus": self.corpus}
            self.store.save(known, {"policy": NewFile(name=name, content=content)})

    def resume(self, agent: PPOAgent) -> int:
        """Put the learner and the events back to the newest whole checkpoint; the number of rounds
        it has behind it.
        """
        with self.team.together():
            newest = self.store.newest()
        file = None if newest is None else newest.files["policy"]
        self.team.require_same(
            {"the checkpoint to go on from": file and f"{file['name']} {file['sha256'][:12]}"}
        )
        if newest is None:
            self._rewind({})
            return 0
        path = self.store.path(newest, "policy")
        facts = load_agent(path, agent, self.layout)
        with fitting(path):
            self.episodes = int(facts["episodes"])
            self._rewind(facts["events"])
            self.sink.telemetry.load(facts["telemetry"])
            self.sink.telemetry.end_round()
            return int(facts["rounds"])

    def _rewind(self, ends: dict[str, Any]) -> None:
        """To where each rank's events ended; rank 0 does it for those that are not there any
        more.
        """
        known = TypeAdapter(dict[int, runfolder.Position]).validate_python(ends)
        self.sink.rewind(known.get(self.team.rank, runfolder.BEGINNING))
        for rank, _ in runfolder.event_files(self.folder) if self.team.rank == 0 else ():
            if rank >= self.team.size:
                runfolder.cut_events(self.folder, rank, known.get(rank, runfolder.BEGINNING))
