"""A growing network on disk, from which it continues later, bit for bit.

Nothing is ever unpickled, and no saved name is imported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save_file
from torch import Tensor, nn

from esper.kasmina.buffers import read_buffers, write_buffers
from esper.kasmina.copies.eligibility import Inheritance
from esper.kasmina.fitting import FlopsLimit, KnownSlots
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimizer_saving import (
    OptimizerSnapshot,
    Tensors,
    describe_optimizers,
    match_optimizers,
    read_snapshot,
)
from esper.kasmina.packing import is_extra, load_state, pack, pack_state, unpack
from esper.kasmina.slot import (
    NOTE,
    SeedSlot,
    SlotContents,
    has_gate,
    remove_slots,
    slots_on,
)
from esper.leyline.errors import HostError, SaveError
from esper.leyline.lifecycle import SeedState
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.storage.files import Content, require_replaceable
from esper.storage.runfolder import MANIFEST
from esper.storage.store import MANIFEST_FILE, NewFile, Plain, Store, fitting


class Description(NamedTuple):
    """A network and its optimiser as plain facts, and by role what their tensor files hold."""

    facts: Plain
    contents: dict[str, Content]


class RebuiltNetwork(NamedTuple):
    """A network as it was saved, and the state that waits for its optimiser."""

    model: MorphogeneticModel
    optimizer: OptimizerSnapshot | None


class LoadedNetwork(NamedTuple):
    """A rebuilt network with all else that `save_network` wrote."""

    network: RebuiltNetwork
    average: Tensors | None
    extra: Plain


class RestoredNetwork(NamedTuple):
    """What `save_network` wrote besides the network, which was restored in place.

    The caller puts the snapshot into an attached optimiser.
    """

    optimizer: OptimizerSnapshot | None
    average: Tensors | None
    extra: Plain


class _Save(NamedTuple):
    """What lies in a folder that `save_network` wrote."""

    facts: Plain
    contents: Mapping[str, bytes]
    average: Tensors | None


def save_network(
    model: MorphogeneticModel,
    folder: Path,
    extra: Plain,
    average: Tensors | None,
    pending: OptimizerSnapshot | None,
) -> Path:
    """Write model, optimiser, averages and `extra`, which is plain data of the caller's.

    A `pending` state of an optimiser that is not attached yet is written as it was read. A host of
    which a part grows in another garden is refused: nothing could load it. Another program's file
    in place of the manifest is refused.
    """
    _refuse_other_gardens(model)
    require_replaceable(folder / MANIFEST, MANIFEST_FILE)
    facts, contents = describe_network(model)
    if pending is not None:  # which an optimiser of another kind could not take
        facts["optimizer"] = pending.facts
        contents["optimizer"] = partial(save_file, pack(pending.tensors))
    if average is not None:
        contents["average"] = partial(save_file, pack(average))
    files = {
        role: NewFile(f"garden-{role}.safetensors", content) for role, content in contents.items()
    }
    _store(folder).save({**facts, "extra": extra}, files)
    return folder


def _refuse_other_gardens(model: MorphogeneticModel) -> None:
    for name, module in model.host.named_modules():
        if any(slot not in model.ordered_slots for slot in slots_on(module)):
            raise HostError(
                f"{name} of this {type(model.host).__name__} grows in another garden. One garden "
                f"tends a model: grow it with all slots in one call."
            )


def load_network(
    folder: Path, host: nn.Module, check: Callable[[Plain, MorphogeneticModel], Any]
) -> LoadedNetwork:
    """Rebuild a save around a fresh host; `check` may refuse `extra`, or the slots that it gets.

    The host is as before if anything is wrong.
    """
    save = _read(folder)
    extra = save.facts["extra"]
    network = rebuild_network(
        host, save.facts, save.contents, folder / MANIFEST, partial(check, extra)
    )
    return LoadedNetwork(network, save.average, extra)


def restore_network(
    model: MorphogeneticModel, folder: Path, check: Callable[[Plain], None]
) -> RestoredNetwork:
    """Become what was saved, in place, or refuse with all as it was.

    Settings and limits stay the network's own.
    """
    facts, contents, average = _read(folder)
    with fitting(folder / MANIFEST):
        saved = facts["network"]
        for key, present in _describe_space(model).items():
            if saved[key] != present:
                raise SaveError(
                    f"{folder} has {key} {saved[key]}, this garden {present}. Grow with those "
                    f"saved."
                )
        _refuse_other_host(facts["host"], _describe_tensors(model.host))
        check(facts["extra"])
        snapshot = read_snapshot(facts["optimizer"], contents, folder / MANIFEST)
        if model.link is not None:
            if snapshot is None:
                raise SaveError(
                    f"{folder} was saved without an optimiser, and this garden has one. "
                    f"Use another save."
                )
            match_optimizers(model.link, snapshot)
            model.link.release(model.slots.parameters())
        model.read_gradients()  # those since the last step are of a network that goes
        _fill(model, saved, contents)
        return RestoredNetwork(snapshot, average, facts["extra"])


def _read(folder: Path) -> _Save:
    store = _store(folder)
    save = store.newest()
    if save is None:
        raise SaveError(
            f"{folder} holds no saved garden: {MANIFEST} is missing. Name a folder "
            f"that garden.save wrote."
        )
    with fitting(store.manifest):
        average = unpack(load(save.contents["average"])) if "average" in save.contents else None
    return _Save(save.facts, save.contents, average)


def _store(folder: Path) -> Store:
    owned = re.compile("garden-(model|buffers|optimizer|average)")
    return Store(folder / MANIFEST, "saved garden", owned=owned)


def describe_network(model: MorphogeneticModel) -> Description:
    """A network and its optimiser as plain facts, and by role what their tensor files hold."""
    try:
        state = pack_state(model)
    except ValueError as problem:
        raise SaveError(f"{type(model.host).__name__} cannot be saved: {problem}.") from problem
    contents: dict[str, Content] = {"model": partial(save_file, state.tensors)}
    network = {
        **_describe_space(model),
        "max_seeds": model.max_seeds,
        "budget": model.budget,
        "flops_limit": None if model.flops_limit is None else asdict(model.flops_limit),
        "settings": asdict(model.settings),
        "births": model.births,
        "shadow_passes": model.shadow_passes,
        "slots": {slot.slot_id: _describe_slot(slot) for slot in model.ordered_slots},
        "notes": state.notes,
    }
    buffers = read_buffers(model)
    if buffers:
        contents["buffers"] = partial(save_file, pack(buffers))
    facts = {"host": _describe_tensors(model.host), "network": network, "optimizer": None}
    if model.link is not None:
        facts["optimizer"], tensors = describe_optimizers(model, model.link)
        contents["optimizer"] = partial(save_file, pack(tensors))
    return Description(facts, contents)


def _describe_space(model: MorphogeneticModel) -> Plain:
    """Where and what a network may plant."""
    return {
        "modules": dict(model.slot_config.modules),
        "blueprints": list(model.space.blueprint_ids[1:]),
    }


def _describe_tensors(host: nn.Module) -> Plain:
    """What a host must have in common with another one to carry its weights.

    Its grown parts are not looked at.
    """
    described: Plain = {}
    for name, value in host.state_dict().items():
        if not isinstance(value, Tensor) or is_extra(name) or NOTE in name:
            continue
        is_dense = value.layout is torch.strided
        if is_dense and value.untyped_storage().nbytes() < value.nbytes:
            raise SaveError(
                f"{name} of the host is expanded. Only tensors with memory of their own are "
                f"saved: make it one, or register it with persistent=False."
            )
        described[name] = [list(value.shape), str(value.dtype)]
    return described


def _describe_slot(slot: SeedSlot) -> Plain:
    """A slot's position and contents as plain facts; `_fill_slot` reads the contents back."""
    contents = slot.contents()
    fossils = [
        _describe_seed(name, fossil)
        for name, fossil in zip(contents.fossil_names, contents.fossils, strict=True)
    ]
    seed = None
    if contents.seed is not None:
        seed = _describe_seed(contents.state.blueprint_id, contents.seed)
    return {
        "kind": slot.kind,
        "shape": list(slot.feature_shape),
        "dtype": str(slot.alpha.dtype).removeprefix("torch."),
        "inheritance": asdict(slot.inheritance),
        "fossils": fossils,
        "built_in": contents.built_in,
        "seed": seed,
        "state": asdict(contents.state),
        "gradient_ratio": contents.gradient_ratio,
        "gradient_norm": contents.gradient_norm,
        "greedy_score": contents.greedy_score,
    }


def _describe_seed(blueprint_id: str | None, seed: nn.Module) -> Plain:
    return {"blueprint": blueprint_id, "gated": has_gate(seed)}


def rebuild_network(
    host: nn.Module,
    facts: Plain,
    contents: Mapping[str, bytes],
    path: Path,
    check: Callable[[MorphogeneticModel], None] = lambda model: None,
) -> RebuiltNetwork:
    """The network that `describe_network` described, around a fresh host.

    Errors name `path`; `check` may refuse the network while its slots are empty. The host is as
    before if anything is wrong.
    """
    weights = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in host.state_dict().items()
    }
    try:
        with fitting(path):
            _refuse_other_host(facts["host"], _describe_tensors(host))
            model = _build_network(host, facts["network"])
            check(model)
            _fill(model, facts["network"], contents)
            return RebuiltNetwork(model, read_snapshot(facts["optimizer"], contents, path))
    except Exception:
        remove_slots(host)
        host.load_state_dict(weights)
        raise


def _build_network(host: nn.Module, network: Plain) -> MorphogeneticModel:
    """The saved network with empty slots; the host need not be run to know their shapes."""
    weight = next(host.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    known = KnownSlots()
    for slot_id, saved in network["slots"].items():
        known[slot_id] = SeedSlot(
            slot_id=slot_id,
            kind=saved["kind"],
            feature_shape=saved["shape"],
            like=torch.empty(0, device=device, dtype=getattr(torch, saved["dtype"])),
            inheritance=Inheritance(**saved["inheritance"]),
        )
    limit = network["flops_limit"]
    model = MorphogeneticModel(
        host,
        SlotConfig(tuple(network["modules"]), network["modules"]),
        example=known,
        blueprints=network["blueprints"],
        max_seeds=network["max_seeds"],
        budget=network["budget"],
        settings=TypeAdapter(GrowthSettings).validate_python(network["settings"]),
    )
    model.flops_limit = None if limit is None else TypeAdapter(FlopsLimit).validate_python(limit)
    return model


def _fill(model: MorphogeneticModel, network: Plain, contents: Mapping[str, bytes]) -> None:
    """Build what had grown in place of what the slots hold, and read all weights."""
    with torch.random.fork_rng(devices=[]):
        for slot_id, saved in network["slots"].items():
            _fill_slot(model, slot_id, saved)
    load_state(model, load(contents["model"]), network["notes"])
    if "buffers" in contents:
        write_buffers(model, unpack(load(contents["buffers"])))
    model.births = network["births"]
    model.shadow_passes = network["shadow_passes"]


def _fill_slot(model: MorphogeneticModel, slot_id: str, saved: Plain) -> None:
    """Build what had grown in one slot, without its weights."""
    slot = model.slot(slot_id)
    slot.take(SlotContents())
    slot.copied_params = -1
    for fossil in saved["fossils"]:
        # into the slot at once: the next fossil may be a copy of this one
        slot.fossils.append(model.build_seed(slot_id, fossil["blueprint"], fossil["gated"]))
    seed = saved["seed"]
    if seed is not None:
        seed = model.build_seed(slot_id, seed["blueprint"], seed["gated"])
    contents = SlotContents(
        fossils=tuple(slot.fossils),
        fossil_names=tuple(fossil["blueprint"] for fossil in saved["fossils"]),
        built_in=int(saved["built_in"]),
        seed=seed,
        state=TypeAdapter(SeedState).validate_python(saved["state"]),
        gradient_ratio=saved["gradient_ratio"],
        gradient_norm=saved["gradient_norm"],
        greedy_score=saved["greedy_score"],
    )
    slot.take(contents)


def _refuse_other_host(saved: Plain, present: Plain) -> None:
    """Refuse a host whose tensors differ from those saved; the first that differs is named."""
    names = {*saved, *present}
    differing = sorted(name for name in names if saved.get(name) != present.get(name))
    if differing:
        first = differing[0]
        raise SaveError(
            f"the save belongs to another model: {len(differing)} tensors differ, first {first!r} "
            f"(saved: {saved.get(first, 'absent')}, here: {present.get(first, 'absent')}). "
            f"Build the model as before growing."
        )
