"""A learner as one safetensors file: weights, optimiser, statistics, random numbers, counters. Nothing is unpickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from esper.leyline.errors import CheckpointMismatchError, SaveError
from esper.simic.agent import PPOAgent
from esper.tamiyo.learned import NetworkPolicy
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.telemetry.runfolder import write_atomically

FORMAT = 2


@dataclass(frozen=True)
class Layout:
    """What a policy is built for; weights fit no other."""

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    blends: tuple[str, ...]
    features: tuple[str, ...]
    hidden_dim: int
    head_dim: int

    def plain(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def save_agent(path: Path, agent: PPOAgent, layout: Layout, facts: Mapping[str, Any]) -> None:
    """Write everything that the learner goes on from; `facts` is plain data of the caller's."""
    tensors = {f"network.{name}": value for name, value in agent.network.state_dict().items()}
    for index, state in agent.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors |= {"draws": agent.draws.get_state(), "shuffles": agent.shuffles.get_state()}
    plain = {
        "format": FORMAT,
        "layout": layout.plain(),
        "counters": {"decisions": agent.decisions, "updates": agent.updates},
        "facts": dict(facts),
    }
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(path, save(ready, {"esper": json.dumps(plain, allow_nan=False)}))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain data of a file; a damaged or foreign one is refused."""
    try:
        with safe_open(path, "pt") as file:
            plain = json.loads((file.metadata() or {})["esper"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise SaveError(f"{path} is not a checkpoint of a growth policy, or it is damaged ({problem}).") from problem
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise SaveError(f"{path} has format {found}; this version reads format {FORMAT}.")
    return tensors, plain


def load_agent(path: Path, agent: PPOAgent, layout: Layout) -> dict[str, Any]:
    """Put a learner back to where it was; returns the caller's facts. What does not fit is refused at once."""
    tensors, plain = read_checkpoint(path)
    require_layout(plain["layout"], layout, path)
    _require_fit(tensors, agent, path)
    agent.network.load_state_dict(_part(tensors, "network."))
    saved = agent.optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _part(tensors, "optimizer.").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    agent.optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    agent.draws.set_state(tensors["draws"])
    agent.shuffles.set_state(tensors["shuffles"])
    agent.decisions, agent.updates = plain["counters"]["decisions"], plain["counters"]["updates"]
    return dict(plain["facts"])


def require_layout(saved: Mapping[str, Any], own: Layout, path: Path) -> None:
    """Refuse weights that were trained for other slots, blueprints, features or widths, with both side by side."""
    here = own.plain()
    different = [name for name in here if saved.get(name) != here[name]]
    if not different:
        return
    rows = [f"  {name}: {_brief(saved.get(name))} in the checkpoint, {_brief(here[name])} here" for name in different]
    raise CheckpointMismatchError(
        f"{path} was trained for another layout (size mismatch):\n" + "\n".join(rows) + "\nUse the task, slots, "
        "blueprints and observation that it was trained with, or train a new policy; see docs/checkpoints.md."
    )


def _require_fit(tensors: Mapping[str, Tensor], agent: PPOAgent, path: Path) -> None:
    """Every weight and both states of random numbers are there and have the right size."""
    needed = {f"network.{name}": value for name, value in agent.network.state_dict().items()}
    needed |= {"draws": agent.draws.get_state(), "shuffles": agent.shuffles.get_state()}
    for name, value in needed.items():
        if name not in tensors:
            raise SaveError(f"{path} is damaged: it has no {name}.")
        if tensors[name].shape != value.shape:
            raise CheckpointMismatchError(
                f"{path} has {name} of shape {list(tensors[name].shape)}, here it is {list(value.shape)} (size "
                f"mismatch). A run goes on on the kind of device that it was started on; this is {agent.device.type}: "
                "set policy_device to the other."
            )


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} ({', '.join(map(str, value[:3]))}, ...)"
    return str(value)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_policy(path: Path) -> tuple[NetworkPolicy, dict[str, Any]]:
    """The trained policy in a checkpoint, ready to decide, and the layout it fits."""
    tensors, plain = read_checkpoint(path)
    layout = plain["layout"]
    network = FactoredRecurrentActorCritic(
        len(layout["features"]),
        len(layout["slots"]),
        num_blueprints=len(layout["blueprints"]) + 1,
        num_blends=len(layout["blends"]),
        hidden_dim=layout["hidden_dim"],
        head_dim=layout["head_dim"],
    )
    network.load_state_dict(_part(tensors, "network."))
    return NetworkPolicy(network), layout
