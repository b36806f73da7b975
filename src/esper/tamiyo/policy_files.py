"""A growth policy as one safetensors file: what it was built for, its weights, a digest of both.

The learner adds its optimiser and counters to the same file. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.leyline.errors import CheckpointMismatchError, SaveError
from esper.leyline.factored_actions import ActionSpace
from esper.storage.files import FileKind, metadata_of
from esper.storage.store import fitting
from esper.tamiyo.layout import BASE_ROW, BLUEPRINT_ROW, PAIR_ROW, SLOT_ROW, ObservationLayout
from esper.tamiyo.network import ActorCritic, FactoredRecurrentActorCritic
from esper.tamiyo.policies import NetworkPolicy

FORMAT = 5
MOST_WIDTH = 16384  # of a layer of a policy: a small file must not ask for any memory there is
NETWORK = "network."  # begins the names of the weights
POLICY_FILE = FileKind(
    "a policy file of Esper's", lambda file: {"esper", "sha256"} <= metadata_of(file).keys()
)
"""A policy file is known again by the plain data and the digest in its metadata."""
Tensors = Mapping[str, Tensor]
Network = TypeVar("Network", bound=ActorCritic)


@dataclass(frozen=True)
class Layout:
    """What a growth policy reads, how wide it is, and the actions that it learned with.

    Its weights fit hosts with other slots, blueprints and blends too, and no other features or
    widths.
    """

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    blends: tuple[str, ...]
    features: tuple[str, ...]
    lacking: tuple[str, ...]
    """groups of readings that it learned without"""
    hidden_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]
    head_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)]

    def __post_init__(self) -> None:
        for kind in ("slots", "blueprints", "blends"):
            names = getattr(self, kind)
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{kind} are none or repeat a name")

    @classmethod
    def of(
        cls,
        space: ActionSpace,
        hidden_dim: int = 64,
        head_dim: int = 32,
        *,
        lacking: Collection[str] = (),
    ) -> Self:
        """Return the layout of a policy of these widths that learns with these actions."""
        real_blueprints = space.blueprint_ids[1:]  # the first one is none
        return cls(
            slots=space.slots.slot_ids,
            blueprints=tuple(str(blueprint) for blueprint in real_blueprints),
            blends=space.blends,
            features=policy_features(),
            lacking=tuple(sorted(lacking)),
            hidden_dim=hidden_dim,
            head_dim=head_dim,
        )

    def build(self) -> FactoredRecurrentActorCritic:
        """Return a fresh network for these actions."""
        layout = ObservationLayout(len(self.slots), len(self.blueprints) + 1)  # and none
        return FactoredRecurrentActorCritic(
            layout.width,
            layout.num_slots,
            hidden_dim=self.hidden_dim,
            head_dim=self.head_dim,
            layout=layout,
            blends=self.blends,
        )


def policy_features() -> tuple[str, ...]:
    """The names of all that a growth policy reads of a host, a slot, a blueprint and a pair."""
    rows = {"host": BASE_ROW, "slot": SLOT_ROW, "blueprint": BLUEPRINT_ROW, "pair": PAIR_ROW}
    return tuple(f"{kind}.{name}" for kind, row in rows.items() for name in row.names)


class PolicyFile(NamedTuple):
    """The content of a file: tensors by name and plain data."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def seal(tensors: Tensors, plain: Mapping[str, Any]) -> bytes:
    """Return a file of tensors and plain data with a digest of both.

    It may be handed on without the run it is from.
    """
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(plain, allow_nan=False, default=vars)
    return save(on_cpu, {"esper": text, "sha256": _digest(on_cpu, text)})


def _digest(tensors: Tensors, text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\0{name} {value.dtype} {list(value.shape)}\0".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(path: Path, layouts: Any = Layout, content: bytes | None = None) -> PolicyFile:
    """Return tensors and plain data of a file; a damaged or foreign file is refused.

    `layouts` is the type that the file's layout must have, or a union of types. With `content` the
    file was read already, and errors name its path.
    """
    whole = read_whole(path) if content is None else content
    try:
        tensors = load(whole)
        metadata = _metadata_of(whole)
        plain = json.loads(metadata["esper"])
    except (SafetensorError, KeyError, ValueError, RecursionError) as problem:
        raise _not_a_policy(path, problem) from problem
    file_format = plain.get("format") if isinstance(plain, dict) else None
    if file_format != FORMAT:
        raise SaveError(
            f"{path} has format {file_format}, this version reads format {FORMAT}. Policies of "
            f"0.3.0 and before read other numbers; train a new one (docs/checkpoints.md)."
        )
    if metadata.get("sha256") != _digest(tensors, metadata["esper"]):
        raise SaveError(
            f"{path} was changed after it was written: its checksum does not match. "
            f"Use another copy."
        )
    with fitting(path):
        if layouts is Layout and "observation" in plain["layout"]:
            raise SaveError(
                f"{path} is a policy for another environment than growth; give one "
                f"that learned to grow."
            )
        plain["layout"] = TypeAdapter(layouts).validate_python(plain["layout"])
        TypeAdapter(dict[str, int]).validate_python(plain["counters"])
        TypeAdapter(dict[str, Any]).validate_python(plain["facts"])
    return PolicyFile(tensors, plain)


def read_whole(path: Path) -> bytes:
    """What is in a file; one that cannot be read is no policy."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise _not_a_policy(path, problem) from problem


def _not_a_policy(path: Path, problem: Exception) -> SaveError:
    return SaveError(
        f"{path} is not a checkpoint of a growth policy, or it is damaged ({problem})."
    )


def _metadata_of(content: bytes) -> Mapping[str, str]:
    """What a file that safetensors could read says beside its tensors."""
    size = int.from_bytes(content[:8], "little")
    metadata: Mapping[str, str] = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    return metadata


def load_fitting(path: Path, space: ActionSpace, content: bytes | None = None) -> NetworkPolicy:
    """Return the trained policy of a file, for a host with these actions."""
    return load_policy(path, content).for_space(space)


def load_policy(path: Path, content: bytes | None = None) -> NetworkPolicy:
    """Return the trained policy of a file, for a host with the actions that it learned with.

    One that reads other features is refused. With `content` the file was read already.
    """
    file = read(path, content=content)
    saved: Layout = file.plain["layout"]
    require_features(saved, path)
    network = load_network(saved.build, file.tensors, path)
    return NetworkPolicy(network, lacking=saved.lacking)


def load_network(build: Callable[[], Network], tensors: Tensors, path: Path) -> Network:
    """Return the network of a file, filled with its weights.

    Shapes are compared on a network that takes no memory: a small file may name any widths.
    """
    with fitting(path), torch.device("meta"):
        network = build()
    require_tensors(tensors, weights_of(network), path, "Use another checkpoint.")
    with fitting(path):
        network.to_empty(device="cpu").load_state_dict(take(tensors, NETWORK))
    return network


def weights_of(network: ActorCritic) -> dict[str, Tensor]:
    """Return the weights of a network under the names that they have in a file."""
    return {f"{NETWORK}{name}": value for name, value in network.state_dict().items()}


def take(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def require_features(saved: Layout, path: Path) -> None:
    """Refuse weights that were trained to read other features than there are; one is named."""
    here = policy_features()
    if saved.features == here:
        return
    unknown = [name for name in saved.features if name not in here]
    missing = [name for name in here if name not in saved.features]
    difference = "in another order"
    if unknown:
        difference = f"{unknown[0]}, which is not read here"
    elif missing:
        difference = f"no {missing[0]}, which is read here"
    raise CheckpointMismatchError(
        f"{path} reads other features: {difference}. Train a new policy (docs/checkpoints.md)."
    )


def require_layout(saved: Layout, here: Layout, path: Path) -> None:
    """Refuse to continue a run with other slots, blueprints, features or widths.

    The error shows both layouts side by side.
    """
    differences = []
    for name, then in vars(saved).items():
        now = getattr(here, name)
        if then != now:
            differences.append(f"  {name}: {_brief(then)} in the checkpoint, {_brief(now)} here\n")
    if differences:
        raise CheckpointMismatchError(
            f"{path} was trained for another layout (size mismatch):\n{''.join(differences)}"
            f"Use the task, slots, blueprints and observation that it was trained with, or train "
            f"a new policy; see docs/checkpoints.md."
        )


def _brief(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value)} ({', '.join(value[:3])}, ...)"
    return str(list(value) if isinstance(value, tuple) else value)


def require_tensors(tensors: Tensors, needed: Tensors, path: Path, way_out: str) -> None:
    """Refuse a file that lacks a tensor, or has one of another type or shape, or not finite."""
    for name, wanted in needed.items():
        if name not in tensors:
            raise SaveError(f"{path} is damaged: it has no {name}.")
        kind = _kind(tensors[name])
        wanted_kind = _kind(wanted)
        if kind != wanted_kind:
            raise CheckpointMismatchError(
                f"{path} has {name} of {kind}, not {wanted_kind} (size mismatch). {way_out}"
            )
        if not tensors[name].isfinite().all():
            raise SaveError(f"{path} is damaged: {name} holds what is not a finite number.")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
