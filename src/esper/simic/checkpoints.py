"""A learner as one safetensors file, and a run's newest and best of them. Nothing is ever unpickled."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from esper.leyline.errors import CheckpointMismatchError, SaveError
from esper.leyline.factored_actions import ActionSpace
from esper.runtime.config import TaskConfig
from esper.runtime.splits import require_corpus
from esper.runtime.tasks import TASKS, Task
from esper.simic.agent import PPOAgent
from esper.simic.any_env import ActionCodec, ObservationCodec, Spaces
from esper.simic.config import MOST_WIDTH, PPOConfig, PPOSettings, TrainingConfig
from esper.simic.team import Team
from esper.tamiyo.network import FactoredRecurrentActorCritic, RecurrentActorCritic
from esper.tamiyo.observation import feature_names
from esper.tamiyo.policies import NetworkPolicy
from esper.telemetry import runfolder
from esper.telemetry.events import CheckpointSaved
from esper.telemetry.sink import Sink
from esper.telemetry.store import Store, fitting

FORMAT = 3
Tensors = Mapping[str, Tensor]
Network = TypeVar("Network", bound=RecurrentActorCritic)
_OF_LAYOUT = (
    "slots",
    "blueprints",
    "blends",
    "lengths",
)  # told apart by the layout, and lengths one by one


@dataclass(frozen=True)
class Layout:
    """What a policy is built for; weights fit no other."""

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    blends: tuple[str, ...]
    features: tuple[str, ...]
    hidden_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]
    head_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]

    @classmethod
    def of(cls, space: ActionSpace, reads_telemetry: bool, hidden_dim: int, head_dim: int) -> Self:
        """Of a policy of these widths for one run's slots, blueprints and blends."""
        slots, (_, *names) = space.slots, space.blueprint_ids
        features = feature_names(slots, reads_telemetry)
        return cls(
            slots.slot_ids, tuple(map(str, names)), space.blends, features, hidden_dim, head_dim
        )

    def build(self) -> FactoredRecurrentActorCritic:
        """A fresh network; the first blueprint, which is none, is not listed."""
        sizes = {"num_blueprints": len(self.blueprints) + 1, "num_blends": len(self.blends)}
        widths = {"hidden_dim": self.hidden_dim, "head_dim": self.head_dim}
        return FactoredRecurrentActorCritic(len(self.features), len(self.slots), **sizes, **widths)


def describe_agent(agent: PPOAgent, layout: Layout | Spaces, facts: Mapping[str, Any]) -> bytes:
    """The file with everything that the learner goes on from; `facts` is plain data of the caller's."""
    tensors = _needed(agent)
    for index, state in agent.optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()
        }
    plain = {
        "format": FORMAT,
        "layout": asdict(layout),
        "learner": {"config": agent.config.model_dump(mode="json")},
        "counters": {"decisions": agent.decisions, "updates": agent.updates},
        "facts": dict(facts),
    }
    return seal(tensors, plain)


def seal(tensors: Tensors, plain: Mapping[str, Any]) -> bytes:
    """A file of tensors and plain data, with a digest of both: it may be handed on without the run it is from."""
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(plain, allow_nan=False, default=vars)
    return save(ready, {"esper": text, "sha256": _digest(ready, text)})


def _digest(tensors: Tensors, text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\0{name} {value.dtype} {list(value.shape)}\0".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _needed(agent: PPOAgent) -> dict[str, Tensor]:
    """What no checkpoint lacks: every weight and both states of random numbers."""
    tensors = {f"network.{name}": value for name, value in agent.network.state_dict().items()}
    return tensors | {"draws": agent.draws.get_state(), "shuffles": agent.shuffles.get_state()}


def read_checkpoint(path: Path, layouts: Any = Layout) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain data of a file; a damaged or foreign one is refused."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            plain = json.loads(metadata["esper"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as problem:
        raise SaveError(
            f"{path} is not a checkpoint of a growth policy, or it is damaged ({problem})."
        ) from problem
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise SaveError(
            f"{path} has format {found}; this version reads format {FORMAT} (docs/checkpoints.md)."
        )
    if metadata.get("sha256") != _digest(tensors, metadata["esper"]):
        raise SaveError(
            f"{path} was changed after it was written: its checksum does not match. Use another copy."
        )
    with fitting(path):
        if layouts is Layout and "observation" in plain["layout"]:
            raise SaveError(
                f"{path} is a policy for another environment than growth; give one that learned to grow."
            )
        plain["layout"] = TypeAdapter(layouts).validate_python(plain["layout"])
        TypeAdapter(dict[str, int]).validate_python(plain["counters"])
        TypeAdapter(dict[str, Any]).validate_python(plain["facts"])
    return tensors, plain


def read_agent(path: Path, device: torch.device | str = "cpu") -> PPOAgent:
    """The learner in a file, built as the file says."""
    tensors, plain = read_checkpoint(path, Layout | Spaces)
    if (own := plain.get("learner")) is None:
        raise SaveError(f"{path} does not say how its learner is built. Use it as --policy.")
    layout: Layout | Spaces = plain["layout"]
    network: RecurrentActorCritic = _built(layout.build, tensors, path)
    seen = gym.spaces.Box(-np.inf, np.inf, (network.state_dim,))
    codecs = (
        ObservationCodec(seen),
        ActionCodec(gym.spaces.MultiDiscrete([*network.spec.sizes]), network.spec),
    )
    with fitting(path):
        codecs = layout.codecs() if isinstance(layout, Spaces) else codecs
        config = (PPOConfig if "horizon" in own["config"] else PPOSettings).of(
            own["config"], str(path)
        )
        agent = PPOAgent(network.to(device), config, codecs=codecs)
    agent.layout = layout if isinstance(layout, Layout) else None
    if "draws" in tensors and len(tensors["draws"]) != len(fresh := agent.draws.get_state()):
        tensors["draws"] = (
            fresh  # it was saved on another kind of device, whose draws nothing here can go on with
        )
    agent.facts = _restore(agent, tensors, plain, path)
    return agent


def load_agent(path: Path, agent: PPOAgent, layout: Layout) -> dict[str, Any]:
    """Put a learner back to where it was; returns the caller's facts. What does not fit is refused at once."""
    tensors, plain = read_checkpoint(path)
    require_layout(plain["layout"], layout, path)
    return _restore(agent, tensors, plain, path)


def _restore(
    agent: PPOAgent, tensors: Tensors, plain: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    way_out = f"A run goes on on the kind of device it was started on, not on {agent.device.type}: set policy_device."
    _require_tensors(tensors, _needed(agent), path, way_out)
    with fitting(path):
        agent.network.load_state_dict(_part(tensors, "network."))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(tensors, "optimizer.").items():
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = value
        agent.optimizer.load_state_dict(agent.optimizer.state_dict() | {"state": state})
        agent.draws.set_state(tensors["draws"])
        agent.shuffles.set_state(tensors["shuffles"])
        agent.decisions, agent.updates = (
            plain["counters"]["decisions"],
            plain["counters"]["updates"],
        )
    return dict(plain["facts"])


def _require_tensors(tensors: Tensors, needed: Tensors, path: Path, way_out: str) -> None:
    """Refuse a file that lacks a tensor, or has one of another type or shape or with what is no finite number."""
    for name, value in needed.items():
        if name not in tensors:
            raise SaveError(f"{path} is damaged: it has no {name}.")
        own, wanted = (f"{each.dtype} {list(each.shape)}" for each in (tensors[name], value))
        if own != wanted:
            raise CheckpointMismatchError(
                f"{path} has {name} of {own}, not {wanted} (size mismatch). {way_out}"
            )
        if not tensors[name].isfinite().all():
            raise SaveError(f"{path} is damaged: {name} holds what is not a finite number.")


def require_layout(saved: Layout, own: Layout, path: Path) -> None:
    """Refuse weights that were trained for other slots, blueprints, features or widths, with both side by side."""
    pairs = [(name, then, getattr(own, name)) for name, then in vars(saved).items()]
    rows = [
        f"  {n}: {_brief(then)} in the checkpoint, {_brief(now)} here"
        for n, then, now in pairs
        if then != now
    ]
    if rows:
        found = f"{path} was trained for another layout (size mismatch):"
        way_out = "Use the task, slots, blueprints and observation that it was trained with, or train a new policy"
        raise CheckpointMismatchError(
            "\n".join([found, *rows, f"{way_out}; see docs/checkpoints.md."])
        )


def _brief(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value)} ({', '.join(value[:3])}, ...)"
    return str(list(value) if isinstance(value, tuple) else value)


def _part(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def load_fitting(path: Path, space: ActionSpace) -> NetworkPolicy:
    """A trained policy that fits these slots and blueprints; others are refused."""
    tensors, plain = read_checkpoint(path)
    saved: Layout = plain["layout"]
    reads_telemetry = any(name.endswith(".greedy_score") for name in saved.features)
    layout = Layout.of(space, reads_telemetry, saved.hidden_dim, saved.head_dim)
    require_layout(saved, layout, path)
    return NetworkPolicy(_built(layout.build, tensors, path), reads_telemetry=reads_telemetry)


def _built(build: Callable[[], Network], tensors: Tensors, path: Path) -> Network:
    """The network of a file. Shapes are compared on one that takes no memory: a small file may name any widths."""
    with fitting(path), torch.device("meta"):
        network = build()
    needed = {f"network.{name}": value for name, value in network.state_dict().items()}
    _require_tensors(tensors, needed, path, "Use another checkpoint.")
    with fitting(path):
        network.to_empty(device="cpu").load_state_dict(_part(tensors, "network."))
    return network


def episodes_of(path: Path) -> int | None:
    """How many episodes the policy in a checkpoint has learned from; None where it does not say."""
    with fitting(path):
        return TypeAdapter(int | None).validate_python(
            read_checkpoint(path)[1]["facts"].get("episodes")
        )


def other_episodes(path: Path, played: Task) -> str | None:
    """How the episodes that a policy was trained for differ from those it is to play; None where nothing is known."""
    known = read_checkpoint(path)[1]["facts"].get("task")
    with fitting(path):
        if known is not None and known["name"] not in TASKS:
            return f"{path} was trained on {known['name']}, a task that is not known here: name its file with --import."
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
    manifest, place = folder / runfolder.MANIFEST, folder / runfolder.CHECKPOINTS
    return Store(manifest, "training of a policy", place, r"round-\d{6,}", keep, best="return")


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
        """The learner after `rounds` whole rounds, with where each rank's events stood; hosts begin anew with each."""
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
            content = describe_agent(agent, self.layout, agent.facts)
            known = {"rounds": rounds, "return": mean_return, "corpus": self.corpus}
            self.store.save(known, {"policy": (name, content)})

    def resume(self, agent: PPOAgent) -> int:
        """Put the learner and the events back to the newest whole checkpoint; the number of rounds it has behind it."""
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
        """To where each rank's events ended; rank 0 does it for those that are not there any more."""
        known = TypeAdapter(dict[int, runfolder.Position]).validate_python(ends)
        self.sink.rewind(known.get(self.team.rank, (0, 0)))
        for rank, _ in runfolder.event_files(self.folder) if self.team.rank == 0 else ():
            if rank >= self.team.size:
                runfolder.cut_events(self.folder, rank, known.get(rank, (0, 0)))
