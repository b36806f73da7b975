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

_COMPARED_ELSEWHERE = ("lengths",)
"""fields of a task that are compared one by one"""


def load_agent(
    path: Path, agent: PPOAgent, layout: Layout, content: bytes | None = None
) -> dict[str, Any]:
    """Put a learner back to where it was; returns the facts that the file was written with.

    What does not fit is refused at once. With `content` the file was read already.
    """
    file = read(path, content=content)
    require_layout(file.plain["layout"], layout, path)
    return agent.restore(file, path)


def episodes_of(path: Path) -> int | None:
    """How many episodes the policy in a checkpoint has learned from; None where it does not say."""
    with fitting(path):
        return TypeAdapter(int | None).validate_python(read(path).plain["facts"].get("episodes"))


def other_episodes(path: Path, played: Task, content: bytes | None = None) -> str | None:
    """How the episodes that a policy was trained for differ from those it is to play.

    Returns a sentence, or None where they do not differ or nothing is known of them. With `content`
    the file was read already.
    """
    facts = read(path, content=content).plain["facts"]
    saved = facts.get("task")
    if saved is None:
        return None
    with fitting(path):
        # of a policy that was taught on a suite the family that is played, if it was one of them
        by_name = {task["name"]: task for task in facts.get("suite", ())}
        saved = by_name.get(played.name, saved)
        if saved["name"] not in TASKS:
            return (
                f"{path} was trained on {saved['name']}, a task that is not known "
                f"here: name its file with --import."
            )
        trained = TaskConfig.of(saved, str(path)).build()
    names = {*TaskConfig.model_fields}
    names |= {f"lengths.{name}" for name in asdict(played.lengths)}
    differences = []
    for name in sorted(names.difference(_COMPARED_ELSEWHERE)):
        there = attrgetter(name)(trained)
        here = attrgetter(name)(played)
        if there != here:
            differences.append(f"{name} {there} there and {here} here")
    if not differences:
        return None
    return (
        f"{path} was trained for other episodes: {', '.join(differences)}. "
        f"Say --set task.KEY=VALUE."
    )


def saved_rounds(folder: Path) -> int:
    """Whole rounds that a run has behind it on disk."""
    with fitting(folder / runfolder.MANIFEST):
        generations = _store(folder, keep=1).generations()
        return max((int(generation.facts["rounds"]) for generation in generations), default=0)


def require_saved_corpus(folder: Path, corpus: str | None) -> None:
    """Refuse to continue with another corpus than the one that a run's checkpoints rest on."""
    for kept in _store(folder, keep=1).generations():
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
        self.folder = config.out
        self.store = _store(config.out, config.keep_checkpoints)
        self.layout = layout
        self.sink = sink
        self.team = team or Team()
        self.corpus = corpus
        self.hosts = config.hosts
        self.episodes = 0
        self.task = config.settled_task.model_dump(mode="json")
        self.suite: list[dict[str, Any]] = []
        if config.suite is not None:
            tasks = [family.task for family in config.suite.settled().families]
            self.suite = [task.model_dump(mode="json") for task in tasks]

    def save(self, agent: PPOAgent, rounds: int, mean_return: float | None) -> None:
        """Save the learner after `rounds` whole rounds, and where each rank's events stood.

        Hosts are not saved: they begin again with each round. Without a `mean_return` of its own
        the policy is not the best.
        """
        name = f"round-{rounds:06d}.safetensors"
        self.episodes += self.hosts
        if self.team.rank == 0:
            name = self.store.free_name(name)
            self.sink.write(CheckpointSaved(rounds, name))
        ends = self._ends_of_events()
        if self.team.rank == 0:
            agent.facts = {
                "rounds": rounds,
                "episodes": self.episodes,
                "events": ends,
                "task": self.task,
                "telemetry": self.sink.telemetry.state(),
            }
            if self.suite:
                agent.facts["suite"] = self.suite
            content = agent.to_bytes(self.layout, agent.facts)
            facts: dict[str, Any] = {"rounds": rounds, "corpus": self.corpus}
            if mean_return is not None:
                facts["return"] = mean_return
            self.store.save(facts, {"policy": NewFile(name=name, content=content)})

    def _ends_of_events(self) -> dict[str, Any]:
        """Where the events of each rank end, of ranks that earlier starts had too."""
        ends: dict[str, Any] = {}
        for (rank, segment), path in runfolder.event_files(self.folder).items():
            ends[str(rank)] = (segment, path.stat().st_size)
        for rank, end in enumerate(self.team.gather(self.sink.commit())):
            ends[str(rank)] = end
        return ends

    def resume(self, agent: PPOAgent) -> int:
        """Put the learner and the events back to the newest whole checkpoint.

        Returns the number of rounds that it has behind it.
        """
        with self.team.together():
            newest = self.store.newest()
        checkpoint = None
        if newest is not None:
            file = newest.files["policy"]
            checkpoint = f"{file['name']} {file['sha256'][:12]}"
        self.team.require_same({"the checkpoint to continue from": checkpoint})
        if newest is None:
            self._rewind({})
            return 0
        path = self.store.path(newest, "policy")
        facts = load_agent(path, agent, self.layout, newest.contents["policy"])
        with fitting(path):
            self.episodes = int(facts["episodes"])
            self._rewind(facts["events"])
            self.sink.telemetry.load(facts["telemetry"])
            self.sink.telemetry.end_round()
            return int(facts["rounds"])

    def _rewind(self, ends: dict[str, Any]) -> None:
        """Cut the events to where those of each rank ended.

        Rank 0 does it for ranks that there are no more.
        """
        known = TypeAdapter(dict[int, runfolder.Position]).validate_python(ends)
        self.sink.rewind(known.get(self.team.rank, runfolder.BEGINNING))
        if self.team.rank > 0:
            return
        for rank, _ in runfolder.event_files(self.folder):
            if rank >= self.team.size:
                runfolder.cut_events(self.folder, rank, known.get(rank, runfolder.BEGINNING))
