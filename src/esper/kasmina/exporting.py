"""The grown network as weights and a source file that need no esper."""

import ast
import copy
import inspect
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from pprint import pformat
from types import ModuleType
from typing import Any, TypedDict

import torch
from safetensors.torch import save_file
from torch import nn

from esper.kasmina import packing, plain, seeds, unseen
from esper.kasmina.blueprints import ATTENTION, REGISTRY, SHAM
from esper.kasmina.copies import configuration, copying, counting, membership
from esper.kasmina.harvesting import Harvest, can_become_member, prove_harvest
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.proving import find_difference
from esper.kasmina.slot import SeedSlot, has_gate, remove_slots
from esper.leyline.errors import BlueprintError, HostError
from esper.storage.claims import claimed
from esper.storage.files import (
    FileKind,
    has_mark,
    make_folder,
    metadata_of,
    naming_failures,
    require_replaceable,
    sweep,
    write_files,
)

# The files of an exported network.
WEIGHTS = "weights.safetensors"
SOURCE = "grown.py"
_METADATA = {"esper": "exported network"}


class FossilEntry(TypedDict):
    """What `grown.py` says about one fossil."""

    kind: str
    blueprint: str
    channels: int
    channels_first: bool
    gated: bool
    dtype: str | None  # of its own weights, if it is not that of the host's first parameter
    inherits: bool  # whether its blueprint is built from the module before it
    becomes_member: bool  # whether it stands in the list that its original is in


class ModuleEntry(TypedDict):
    """What `grown.py` says about one module that has fossils."""

    module: str
    copied_module: str  # the one that copies after this module copy
    fossils: list[FossilEntry]


def export_network(model: MorphogeneticModel, folder: Path) -> Path:
    """Write the harvested weights and `grown.py`.

    `graft(model)` of that file rebuilds the network without esper. The file is run here first: one
    that cannot work is never written. Files of these names that are no export are refused.
    """
    for name, kind in _KINDS.items():
        require_replaceable(folder / name, kind)
    if any(plain.grafts_of(model.host)):
        raise HostError(
            "this host was harvested and grew again: earlier fossils have no source to export. "
            "Keep it with garden.harvest() and torch.save, or grow a fresh instance."
        )
    grown = prove_harvest(model)
    try:
        state = packing.pack_state(grown.network)
    except ValueError as problem:
        raise HostError(f"{type(model.host).__name__} cannot be exported: {problem}.") from problem
    _prove(render_source(model, grown.members, state.notes, ""), model, grown, state)
    weights = {WEIGHTS: lambda path: save_file(state.tensors, path, dict(_METADATA))}
    with naming_failures(folder):
        make_folder(folder)
    with claimed(folder / SOURCE):
        sweep(folder, {SOURCE, WEIGHTS}.__contains__)
        digest = write_files(folder, weights)[WEIGHTS]
        source = render_source(model, grown.members, state.notes, digest)
        write_files(folder, {SOURCE: source.encode()})
    return folder


def render_source(
    model: MorphogeneticModel, members: Collection[str], notes: Mapping[str, Any], digest: str
) -> str:
    """The text of `grown.py`, whose `graft` checks that the weights have the sha256 `digest`.

    It has the source of all fossils; names go through `repr`. Copies of the slots `members` stand
    in the lists of their originals. `notes` are those of the packed state.
    """
    table = _table_of(model, members)
    entries = [entry for row in table for entry in row["fossils"]]
    has_copies = any(entry["inherits"] for entry in entries)
    has_attention = any(
        entry["kind"] == "sequence" and entry["blueprint"] == ATTENTION for entry in entries
    )
    parts = [packing, plain, seeds]
    parts += [copying, configuration, counting, membership] if has_copies else []
    parts += [unseen] if has_attention else []
    return _TEMPLATE.format(
        parts="\n\n\n".join(_source_of(part) for part in parts),
        builders=_render_builders(entries),
        table=pformat(table, width=100, sort_dicts=False),
        place=_PLACE if has_copies else _GRAFT,
        watch=_WATCH if has_attention else "",
        notes=pformat(notes, width=100, sort_dicts=False),
        weights=WEIGHTS,
        digest=digest,
    )


def _table_of(model: MorphogeneticModel, members: Collection[str]) -> list[ModuleEntry]:
    """The modules with fossils, in the order in which they run."""
    table: list[ModuleEntry] = []
    usual = next(model.host.parameters()).dtype
    for slot in model.ordered_slots:
        module = model.slot_config.modules[slot.slot_id]
        names = zip(slot.fossils, slot.fossil_names, strict=True)
        as_members = slot.slot_id in members
        fossils = [_entry_of(slot, fossil, name, as_members, usual) for fossil, name in names]
        if fossils:
            copied_module = membership.source_name(model.host, module)
            table.append({"module": module, "copied_module": copied_module, "fossils": fossils})
    return table


def _entry_of(
    slot: SeedSlot, fossil: nn.Module, name: str, as_members: bool, usual: torch.dtype
) -> FossilEntry:
    """What `grown.py` has to know to build one fossil again.

    A fossil of the `usual` type follows the host that it is grafted on. A copy's weights have the
    types of its original, so of a copy only the gate has a type of its own.
    """
    own = fossil.gate if isinstance(fossil, copying.Copy) else fossil
    dtype = next((p.dtype for p in own.parameters()), usual) if own is not None else usual
    return {
        "kind": slot.kind,
        "blueprint": name,
        "channels": slot.channels,
        "channels_first": slot.kind == "image",
        "gated": has_gate(fossil),
        "dtype": None if dtype == usual else str(dtype).removeprefix("torch."),
        "inherits": REGISTRY.get(slot.kind, name).inherits,
        "becomes_member": as_members and can_become_member(slot, fossil),
    }


def _source_of(part: ModuleType) -> str:
    """The source of a file of esper without its docstring, and without what it takes from others.

    Those are in the same file.
    """
    source = inspect.getsource(part)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        is_own = isinstance(node, ast.ImportFrom) and str(node.module).startswith("esper.")
        if is_own:
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    _, _, code = "\n".join(lines).split('"""', 2)
    return code.strip()


def _render_builders(entries: list[FossilEntry]) -> str:
    """Code that enters each blueprint into BUILDERS once; a sham has none."""
    code: dict[tuple[str, str], str] = {}
    for entry in entries:
        key = (entry["kind"], entry["blueprint"])
        if entry["blueprint"] != SHAM and key not in code:
            code[key] = _render_builder(*key)
    return "\n".join(code.values())


def _render_builder(kind: str, name: str) -> str:
    """Code that enters one blueprint into BUILDERS.

    One that is built in is entered by name, one of the user's own with its source.
    """
    build = REGISTRY.get(kind, name).build
    function_name = getattr(build, "__name__", "")
    if build in (getattr(seeds, function_name, None), getattr(copying, function_name, None)):
        return f"BUILDERS[{(kind, name)!r}] = {function_name}"
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(build))).body[0]
        if not isinstance(function, ast.FunctionDef):
            raise TypeError("it is not a plain function")
    except (OSError, TypeError, SyntaxError) as problem:
        raise BlueprintError(
            f"{kind} blueprint {name!r} cannot be exported ({problem}). Define it as a plain "
            f"function in a file, using only torch, so that its source can be exported."
        ) from problem
    function.decorator_list = []
    wrapper = f"_own_{kind}_{name}"
    body = textwrap.indent(ast.unparse(function), "    ")
    return (
        f"def {wrapper}():\n{body}\n    return {function.name}\n\n\n"
        f"BUILDERS[{(kind, name)!r}] = {wrapper}()"
    )


def _prove(
    source: str, model: MorphogeneticModel, grown: Harvest, state: packing.PackedState
) -> None:
    """Run the generated code here and compare what it builds with the harvest."""
    unequal: list[str] = []
    try:
        scope = _run_source(source)
        rebuilt = copy.deepcopy(model, copying.detached_memo(model)).host
        remove_slots(rebuilt)
        built = scope["build"](rebuilt)
        unequal += _find_unequal(model, scope["FOSSILS"], built)
        scope["place"](rebuilt, built)
        scope["load_state"](rebuilt, state.tensors, state.notes)
    except Exception as problem:
        raise BlueprintError(
            f"the exported source does not run by itself: {type(problem).__name__}: {problem}. "
            f"A blueprint of your own must be a self-contained function that uses only torch and "
            f"nn; import what else it needs inside it."
        ) from problem
    if unequal:
        raise BlueprintError(
            f"the exported fossils of slot {unequal[0]} do not compute what the grown ones do."
        )
    if _structure_of(rebuilt) != _structure_of(grown.network):
        raise BlueprintError(
            "the exported source builds other modules than the harvested network has."
        )
    difference = find_difference(rebuilt, grown.trials)
    if difference is not None:
        raise BlueprintError(
            f"the exported network would not compute what the growing one does: {difference}."
        )


def _run_source(source: str) -> dict[str, Any]:
    """The names that the generated file defines."""
    scope: dict[str, Any] = {"__name__": "grown", "__file__": SOURCE}
    exec(compile(source, SOURCE, "exec"), scope)
    return scope


def _structure_of(network: nn.Module) -> list[tuple[str, str]]:
    """The name and the class of every module."""
    return [(name, type(module).__name__) for name, module in network.named_modules()]


def _find_unequal(
    model: MorphogeneticModel, table: list[ModuleEntry], built: list[list[nn.Module]]
) -> list[str]:
    """Slots whose rebuilt fossils compute something else than the grown ones.

    A copy runs with its original's arguments, which are not known here: of slots with copies only
    modules and weights are compared, later.
    """
    modules = model.slot_config.modules
    slots = {modules[slot.slot_id]: slot for slot in model.ordered_slots}
    unequal = []
    for row, fossils in zip(table, built, strict=True):
        if any(entry["inherits"] for entry in row["fossils"]):
            continue
        slot = slots[row["module"]]
        if not _are_equal(nn.Sequential(*fossils), slot):
            unequal.append(slot.slot_id)
    return unequal


def _are_equal(rebuilt: Any, slot: SeedSlot) -> bool:
    """Whether rebuilt fossils give what the slot's give, bit for bit."""
    # a deep copy runs uncompiled; with compiled or channels-last fossils rounding would differ
    fossils = copy.deepcopy(slot.fossils).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    rebuilt.load_state_dict(fossils.state_dict())
    rebuilt.to(slot.alpha.device)
    features = torch.linspace(-1, 1, 2 * torch.Size(slot.feature_shape).numel())
    features = features.reshape(2, *slot.feature_shape).to(slot.alpha)
    with torch.no_grad():
        return torch.equal(rebuilt(features), nn.Sequential(*fossils)(features))


# How `place` of the template puts the fossils of one module: without copies, and with them.
_GRAFT = "graft_fossils(site, fossils)"
_PLACE = """are_members = [entry["becomes_member"] for entry in row["fossils"]]
        place_fossils(model, site, list(zip(fossils, are_members)), graft_fossils)"""
_WATCH = """
    watch_calls(model)"""
_TEMPLATE = '''"""A grown network without the library that grew it.

graft(model) on a fresh host gives the network back.
"""

from hashlib import sha256
from pathlib import Path

from safetensors.torch import load_file

{parts}


BUILDERS = {{}}
{builders}

# Modules with fossils.
# copied_module: what copies after this module copy.
# inherits: whether the blueprint is built from the module before it.
# dtype: the type of its own weights, where it is not that of the host's first parameter.
# becomes_member: whether the fossil stands in the list that its original is in.
FOSSILS = {table}

# What the weights' file cannot hold.
NOTES = {notes}


def build(model):
    """The fossils of every module, without their weights; nothing is grafted."""
    like = next(model.parameters())
    built = []
    for row in FOSSILS:
        source = model.get_submodule(row["copied_module"])
        built.append(build_fossils(model, like, source, row["fossils"]))
    return built


def build_fossils(model, like, source, entries):
    """The fossils of one module, on the device of the parameter `like`."""
    fossils = []
    for entry in entries:
        if entry["blueprint"] == "sham":
            fossils.append(Sham())
            continue
        channels = entry["channels"]
        channels_first = entry["channels_first"]
        build_body = BUILDERS[entry["kind"], entry["blueprint"]]
        dtype = getattr(torch, entry["dtype"]) if entry["dtype"] else like.dtype
        gate = Gate(channels, channels_first).to(like.device, dtype) if entry["gated"] else None
        if entry["inherits"]:
            body = build_body(channels, site=Site(copied_next(source, fossils), model))
        else:
            body = build_body(channels)
        if entry["inherits"] and isinstance(body, Copy):
            body.gate = gate
            fossils.append(body)
        else:
            seed = Seed(body, scale_of(channels, channels_first), gate)
            fossils.append(seed.to(like.device, dtype))
    return fossils


def place(model, built):
    """Put the fossils where they belong."""
    sites = [model.get_submodule(row["module"]) for row in FOSSILS]
    for site, fossils, row in zip(sites, built, FOSSILS):
        {place}{watch}


def graft(model, weights=None):
    """Graft the fossils onto a fresh host and load the grown weights.

    By default they are those next to this file.
    """
    path = Path(weights or Path(__file__).with_name({weights!r}))
    if weights is None and sha256(path.read_bytes()).hexdigest() != {digest!r}:
        raise ValueError(
            f"{{path}} was not exported with this file. Export again, or name weights of your own."
        )
    place(model, build(model))
    load_state(model, load_file(path), NOTES)
    return model
'''

# How the files of an older export are known again.
_KINDS = {
    SOURCE: FileKind("a grown.py that Esper exported", has_mark(_TEMPLATE.partition("\n")[0])),
    WEIGHTS: FileKind(
        "a file of weights that Esper exported",
        lambda file: metadata_of(file).items() >= _METADATA.items(),
    ),
}
