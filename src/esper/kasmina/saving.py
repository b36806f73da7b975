"""A growing network on disk, to go on later to the bit.

Nothing is ever unpickled, and no saved name is imported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from esper.kasmina.copies.eligibility import Inheritance
from esper.kasmina.fitting import KnownSlots
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.seeds import whole
from esper.kasmina.slot import NOTE, SeedSlot, SlotContents, has_gate, remove_slots
from esper.leyline.errors import OptimizerError, SaveError
from esper.leyline.lifecycle import SeedState
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.storage.files import Content
from esper.storage.runfolder import MANIFEST
from esper.storage.store import NewFile, Plain, Store, fitting, is_plain

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class OptimizerSnapshot:
    """An optimiser's state by parameter name, waiting for an optimiser of the same kind to be
    attached.
    """

    facts: Plain
    tensors: Tensors
    place: Path  # named where it does not fit


Rebuilt = tuple[MorphogeneticModel, OptimizerSnapshot | None]


def save_network(
    model: MorphogeneticModel,
    folder: Path,
    extra: Plain,
    average: Tensors | None,
    pending: OptimizerSnapshot | None,
) -> Path:
    """Write model, optimiser (or what is `pending` for one), averages and `extra`, plain data of
    the caller's.
    """
    facts, contents = describe_network(model)
    if pending is not None:  # which an optimiser of another kind could not take
        facts["optimizer"], contents["optimizer"] = (
            pending.facts,
            partial(save_file, dict(pending.tensors)),
        )
    if average is not None:
        contents["average"] = partial(save_file, dict(average))
    files = {
        role: NewFile(name=f"garden-{role}.safetensors", content=content)
        for role, content in contents.items()
    }
    _store(folder).save({**facts, "extra": extra}, files)
    return folder


def load_network(
    folder: Path, host: nn.Module, check: Callable[[Plain], Any]
) -> tuple[Rebuilt, Tensors | None, Plain]:
    """Rebuild a save around a fresh host, which is as before if anything is wrong; `check` may
    refuse `extra`.
    """
    facts, paths, average = _read(folder)
    rebuilt = rebuild_network(host, facts, paths, folder / MANIFEST, lambda: check(facts["extra"]))
    return rebuilt, average, facts["extra"]


def restore_network(
    model: MorphogeneticModel, folder: Path, check: Callable[[Plain], None]
) -> tuple[OptimizerSnapshot | None, Tensors | None, Plain]:
    """Become what was saved, in place, or refuse with all as it was; settings and limits stay the
    network's own.
    """
    facts, paths, average = _read(folder)
    with fitting(folder / MANIFEST):
        saved, own = facts["network"], describe_network(model)[0]["network"]
        for key in ("modules", "blueprints"):
            if saved[key] != own[key]:
                raise SaveError(
                    f"{folder} has {key} {saved[key]}, this garden {own[key]}. Grow "
                    f"with those saved."
                )
        _refuse_other_host(facts["host"], _describe_tensors(model.host))
        check(facts["extra"])
        snapshot = _snapshot_from(facts, paths)
        if model.link is not None and snapshot is None:
            raise SaveError(
                f"{folder} was saved without an optimiser, and this garden has one. "
                f"Use another save."
            )
        if model.link is not None and snapshot is not None:
            _match(model.link, snapshot)
            model.link.release(model.slots.parameters())
        model.read_gradients()  # those since the last step are of a network that goes
        _fill(model, saved, paths)
        return (
            snapshot,
            average,
            facts["extra"],
        )  # whoever calls puts the snapshot into an attached optimiser


def _read(folder: Path) -> tuple[Plain, Mapping[str, Path], Tensors | None]:
    store = _store(folder)
    save = store.newest()
    if save is None:
        raise SaveError(
            f"{folder} holds no saved garden: {MANIFEST} is missing. Name a folder "
            f"that garden.save wrote."
        )
    paths = {role: store.path(save, role) for role in save.files}
    with fitting(store.manifest):
        return save.facts, paths, load_file(paths["average"]) if "average" in paths else None


def _store(folder: Path) -> Store:
    owned = re.compile("garden-(model|optimizer|average)")
    return Store(folder / MANIFEST, "saved garden", owned=owned)


def describe_network(model: MorphogeneticModel) -> tuple[Plain, dict[str, Content]]:
    """A network and its optimiser as plain facts, and by role what their tensor files hold."""
    contents: dict[str, Content] = {"model": lambda path: save_model(whole(model), str(path))}
    network = {
        "modules": dict(model.slot_config.modules),
        "blueprints": list(model.space.blueprint_ids[1:]),
        "max_seeds": model.max_seeds,
        "budget": model.budget,
        "settings": asdict(model.settings),
        "births": model.births,
        "shadow_passes": model.shadow_passes,
        "slots": {
            slot_id: _describe_slot(model.slot(slot_id)) for slot_id in model.slot_config.slot_ids
        },
    }
    facts = {"host": _describe_tensors(model.host), "network": network, "optimizer": None}
    if model.link is not None:
        tensors: dict[str, Tensor] = {}
        first, *others = [_describe_optimizer(model, link, tensors) for link in model.link.all]
        facts["optimizer"] = {**first, "others": others}
        contents["optimizer"] = partial(save_file, tensors)
    return facts, contents


def rebuild_network(
    host: nn.Module,
    facts: Plain,
    paths: Mapping[str, Path],
    place: Path,
    check: Callable[[], None] = lambda: None,
) -> Rebuilt:
    """The network that `describe_network` told of, around a fresh host; `place` is named where it
    does not fit.
    """
    weights = {key: value.clone() for key, value in host.state_dict().items()}
    try:
        with fitting(place):
            _refuse_other_host(facts["host"], _describe_tensors(host))
            check()
            network, known = facts["network"], KnownSlots()
            device = next(
                (parameter.device for parameter in host.parameters()), torch.device("cpu")
            )
            for slot_id, s in network["slots"].items():
                like = torch.empty(0, device=device, dtype=getattr(torch, s["dtype"]))
                known[slot_id] = SeedSlot(
                    slot_id, s["kind"], s["shape"], like, Inheritance(**s["inheritance"])
                )
            slots = SlotConfig(tuple(network["modules"]), network["modules"])
            limits = {key: network[key] for key in ("blueprints", "max_seeds", "budget")}
            settings = TypeAdapter(GrowthSettings).validate_python(network["settings"])
            model = MorphogeneticModel(host, slots, example=known, settings=settings, **limits)
            _fill(model, network, paths)
            return model, _snapshot_from(facts, paths)
    except Exception:
        remove_slots(host)
        host.load_state_dict(weights)
        raise


def _fill(model: MorphogeneticModel, network: Plain, paths: Mapping[str, Path]) -> None:
    """Build what had grown in place of what the slots hold, and read all weights."""
    with torch.random.fork_rng(devices=[]):
        for slot_id, saved in network["slots"].items():
            _fill_slot(model, slot_id, saved)
    load_model(whole(model), str(paths["model"]))
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


def _snapshot_from(facts: Plain, paths: Mapping[str, Path]) -> OptimizerSnapshot | None:
    if (found := facts["optimizer"]) is None:
        return None
    for each in (found, *found["others"]):
        groups = [(group["names"], group["options"]) for group in each["groups"]]
        values = (
            each["peak_rate"],
            each["was_high"],
            each["steps"],
            each["scalars"],
            each["scheduler"],
            groups,
        )
        kinds = tuple[
            float, bool, int, dict[str, Plain], Plain | None, list[tuple[list[str], Plain]]
        ]
        TypeAdapter(kinds).validate_python(values, strict=True)
    return OptimizerSnapshot(found, load_file(paths["optimizer"]), paths["optimizer"])


def _describe_tensors(host: nn.Module) -> Plain:
    """What a host must have in common with another one to carry its weights; its grown parts are
    not looked at.
    """
    found = host.state_dict()
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() < value.nbytes:
            kind = "expanded" if isinstance(value, Tensor) else type(value)
            rule = (
                "Only tensors with memory of their own are saved: make it one, or "
                "register it with persistent=False"
            )
            raise SaveError(f"{name} of the host is {kind}. {rule}.")
    return {
        key: [list(value.shape), str(value.dtype)]
        for key, value in found.items()
        if NOTE not in key
    }


def _describe_slot(slot: SeedSlot) -> Plain:
    """A slot's place and contents as plain facts; `_fill_slot` reads the contents back."""
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


def _describe_optimizer(
    model: MorphogeneticModel, link: OptimizerLink, tensors: dict[str, Tensor]
) -> Plain:
    """Group settings, the scheduler's numbers, the highest rate so far; state by parameter name
    goes into `tensors`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scalars: dict[str, Plain] = {}
    for parameter, state in link.optimizer.state.items():
        if (name := names.get(id(parameter))) is None:
            continue  # not a parameter of this network: whoever owns it saves it
        scalars[name] = {
            key: value for key, value in state.items() if not isinstance(value, Tensor)
        }
        tensors |= {
            f"{name}|{key}": v.detach().contiguous()
            for key, v in state.items()
            if isinstance(v, Tensor)
        }
    groups = [
        {
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
            "options": {
                k: v.item() if hasattr(v, "item") else v for k, v in group.items() if k != "params"
            },
        }
        for group in link.optimizer.param_groups
    ]
    # the scheduler's functions are the user's own and are made again by their code
    schedule = None if link.scheduler is None else link.scheduler.state_dict()
    return {
        "kind": type(link.optimizer).__name__,
        "slots": link.slot_groups,
        "scalars": scalars,
        "groups": groups,
        "scheduler": schedule
        and {key: value for key, value in schedule.items() if is_plain(value, exact=False)},
        "peak_rate": link.peak_rate,
        "was_high": link.was_high,
        "steps": link.steps,
    }


def restore_optimizer(
    model: MorphogeneticModel, link: OptimizerLink, snapshot: OptimizerSnapshot
) -> None:
    """Put a snapshot into freshly attached optimisers of the same kinds."""
    with fitting(snapshot.place):
        for each, facts in _match(link, snapshot):
            _restore_one(model, each, facts, snapshot.tensors)


def _match(link: OptimizerLink, snapshot: OptimizerSnapshot) -> list[tuple[OptimizerLink, Plain]]:
    """Every optimiser with what was saved of it; those of other kinds are refused."""
    saved = [snapshot.facts, *snapshot.facts["others"]]
    kinds = [(facts["kind"], len(facts["groups"]), facts["slots"]) for facts in saved]
    own = [
        (type(each.optimizer).__name__, len(each.optimizer.param_groups), each.slot_groups)
        for each in link.all
    ]
    if kinds != own:
        texts = (
            [f"{kind} with {n} parameter groups, slots in {s}" for kind, n, s in each]
            for each in (kinds, own)
        )
        told, got = map(" and ".join, texts)
        raise OptimizerError(
            f"the save belongs to {told}, got {got}. Build each as before, groups in "
            f"the same order."
        )
    return list(zip(link.all, saved, strict=True))


def _restore_one(
    model: MorphogeneticModel, link: OptimizerLink, facts: Plain, tensors: Tensors
) -> None:
    parameters, optimizer = dict(model.named_parameters()), link.optimizer
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)  # what was saved before its first step has none
    options = {name: saved["options"] for saved in facts["groups"] for name in saved["names"]}
    for name, scalars in facts["scalars"].items():
        is_moved = any(
            options.get(name, {}).get(key) for key in ("capturable", "fused")
        )  # `step` too, as torch has it
        own = {
            key.rpartition("|")[2]: v
            for key, v in tensors.items()
            if key.rpartition("|")[0] == name
        }
        moved = {
            k: v.to(parameters[name].device) if k != "step" or is_moved else v.clone()
            for k, v in own.items()
        }
        optimizer.state[parameters[name]] = {**scalars, **moved}
    known = {id(parameter) for parameter in parameters.values()}
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        for key, value in saved["options"].items():
            held, plain = group.get(key), tuple(value) if isinstance(value, list) else value
            if isinstance(held, float) and not isinstance(plain, int | float):
                raise TypeError(f"{key} is not a number")
            group[key] = (
                held.fill_(value) if isinstance(held, Tensor) else plain
            )  # your own loop may hold it too
        foreign = [parameter for parameter in group["params"] if id(parameter) not in known]
        group["params"][:] = [*(parameters[name] for name in saved["names"]), *foreign]
    if link.scheduler is not None and facts["scheduler"] is not None:
        link.scheduler.load_state_dict({**link.scheduler.state_dict(), **facts["scheduler"]})
    link.peak_rate, link.was_high, link.steps = (
        facts["peak_rate"],
        facts["was_high"],
        facts["steps"],
    )


def _refuse_other_host(saved: Plain, own: Plain) -> None:
    differing = sorted(key for key in {*saved, *own} if saved.get(key) != own.get(key))
    for first in differing[:1]:
        then, now = saved.get(first, "absent"), own.get(first, "absent")
        found = f"{len(differing)} tensors differ, first {first!r} (saved: {then}, here: {now})"
        raise SaveError(
            f"the save belongs to another model: {found}. Build the model as before growing."
        )
