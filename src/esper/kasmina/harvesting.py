"""Taking the grown network home: as a plain module, or as weights and a source file that need no esper."""

import ast
import copy
import inspect
import textwrap
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from esper.kasmina import copies, natives, seeds
from esper.kasmina.blueprints import REGISTRY, SHAM
from esper.kasmina.copies import Copy
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot, has_gate, remove_slots
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.files import sweep, write_files

WEIGHTS = "weights.safetensors"
SOURCE = "grown.py"


def harvest(model: MorphogeneticModel) -> nn.Module:
    """A copy of the host with its fossils built in and every unfinished seed left out."""
    grown = copy.deepcopy(model, copies.detached_memo(model))
    remove_slots(grown.host, runs=False)
    for slot, site in [
        (grown.slot(slot_id), grown.site(slot_id)) for slot_id in grown.slot_config.slot_ids
    ]:
        hooks = site._forward_hooks
        own = next(
            key
            for key, hook in hooks.items()
            if isinstance(getattr(hook, "__self__", None), SeedSlot)
        )
        try:  # copies become members of their original's list if they can; the module before runs all else from a hook
            fossils = [(fossil, _becomes_member(slot, fossil)) for fossil in slot.fossils]
            natives.place_fossils(grown.host, site, fossils, partial(_graft, site, own))
        except ValueError as problem:
            raise HostError(f"slot {slot.slot_id} cannot be harvested: {problem}.") from problem
        if isinstance(getattr(hooks[own], "__self__", None), SeedSlot):
            del hooks[own], site._forward_hooks_with_kwargs[own]
    grafted = [
        name for name, module in grown.host.named_modules() if isinstance(module, seeds.Fossils)
    ]
    if grafted and any(hasattr(module, "save_pretrained") for module in grown.host.modules()):
        lost = f"save_pretrained would drop the fossils in {', '.join(grafted)}: its configuration does not know them"
        warnings.warn(
            f"{lost}. Keep this network with garden.export(folder) or torch.save.", stacklevel=3
        )
    return grown.host


def _becomes_member(slot: SeedSlot, fossil: nn.Module) -> bool:
    """Whether a fossil can stand in the list of the slot's module: it is a copy, and nothing blends it."""
    return isinstance(fossil, Copy) and not has_gate(fossil) and slot.inheritance.is_native


def _graft(site: nn.Module, own: int, carrier: nn.Module, fossils: Sequence[nn.Module]) -> None:
    earlier = getattr(carrier, seeds.CHILD, None)
    if isinstance(earlier, seeds.Fossils):  # a harvested network that grew again
        earlier.extend(fossils)
    elif earlier is not None or carrier is not site:
        seeds.graft_fossils(carrier, seeds.Fossils(*fossils))
    else:
        site.add_module(seeds.CHILD, seeds.Fossils(*fossils))
        site._forward_hooks[own] = seeds.run_grown  # in the slot's place among the hooks


def export_network(model: MorphogeneticModel, folder: Path) -> Path:
    """Write the harvested weights and `grown.py`, whose `graft(model)` rebuilds the network without esper."""
    if any(isinstance(module, seeds.Fossils) for module in model.host.modules()):
        way_out = "Keep it with garden.harvest() and torch.save, or grow a fresh instance."
        raise HostError(
            f"this host was harvested and grew again: earlier fossils have no source to export. {way_out}"
        )
    plain = harvest(model)
    _prove(render_source(model, ""), model, plain)
    sweep(folder, {SOURCE, WEIGHTS}.__contains__)
    written = write_files(folder, {WEIGHTS: lambda path: save_model(seeds.whole(plain), str(path))})
    write_files(folder, {SOURCE: render_source(model, written[WEIGHTS]).encode()})
    return folder


def render_source(model: MorphogeneticModel, digest: str) -> str:
    """Source of all fossils and of `graft`, which checks the weights' sha256, `digest`; names go through `repr`."""
    table: list[tuple[str, str, list[tuple[Any, ...]]]] = []
    own: dict[tuple[str, str], str] = {}
    for slot_id in model.slot_config.slot_ids:
        slot, module = model.slot(slot_id), model.slot_config.modules[slot_id]
        stack: list[tuple[Any, ...]] = []
        for fossil, name in zip(slot.fossils, slot.fossil_names, strict=True):
            if name != SHAM:
                own.setdefault((slot.kind, name), _builder_source(slot.kind, name))
            inherits, is_member = (
                REGISTRY.get(slot.kind, name).inherits,
                _becomes_member(slot, fossil),
            )
            stack.append(
                (
                    slot.kind,
                    name,
                    slot.channels,
                    slot.kind == "image",
                    has_gate(fossil),
                    inherits,
                    is_member,
                )
            )
        if stack:
            table.append((module, natives.source_name(model.host, module), stack))
    parts = [
        seeds,
        *([copies, natives] if any(entry[5] for *_, stack in table for entry in stack) else []),
    ]
    builders = "\n".join(
        f"BUILDERS[{key!r}] = {code}" if "\n" not in code else code for key, code in own.items()
    )
    sources = [inspect.getsource(part).split('"""', 2)[2].strip() for part in parts]
    place = _PLACE if len(parts) > 1 else _GRAFT
    names = {
        "builders": builders,
        "table": table,
        "weights": WEIGHTS,
        "digest": digest,
        "place": place,
    }
    return _TEMPLATE.format(parts="\n\n\n".join(sources), **names)


def _builder_source(kind: str, name: str) -> str:
    """Code that enters one blueprint into BUILDERS: by name if it is built in, with its source if it is the user's."""
    build = REGISTRY.get(kind, name).build
    name_of = getattr(build, "__name__", "")
    if build in (getattr(seeds, name_of, None), getattr(copies, name_of, None)):
        return name_of
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(build))).body[0]
        if not isinstance(function, ast.FunctionDef):
            raise TypeError("it is not a plain function")
    except (OSError, TypeError, SyntaxError) as problem:
        way_out = "Define it as a plain function in a file, using only torch, so that its source can be exported."
        raise BlueprintError(
            f"{kind} blueprint {name!r} cannot be exported ({problem}). {way_out}"
        ) from problem
    function.decorator_list = []
    wrapper = f"_own_{kind}_{name}"
    body = textwrap.indent(ast.unparse(function), "    ")
    return f"def {wrapper}():\n{body}\n    return {function.name}\n\n\nBUILDERS[{(kind, name)!r}] = {wrapper}()"


def _prove(source: str, model: MorphogeneticModel, plain: nn.Module) -> None:
    """Run the generated code here and compare what it builds with ours: a file that cannot work is never written."""
    scope: dict[str, Any] = {"__name__": "grown", "__file__": SOURCE}
    slots = {
        model.slot_config.modules[slot_id]: model.slot(slot_id)
        for slot_id in model.slot_config.slot_ids
    }
    unequal: list[str] = []
    try:
        exec(compile(source, SOURCE, "exec"), scope)
        fresh = copy.deepcopy(model, copies.detached_memo(model)).host
        remove_slots(fresh)
        built = scope["build"](fresh)
        for (name, _, entries), stack in zip(scope["FOSSILS"], built, strict=True):
            # a copy runs with its original's arguments, which nobody has here: modules and weights are compared
            if not any(entry[5] for entry in entries) and not _are_equal(
                seeds.Fossils(*stack), slots[name]
            ):
                unequal.append(slots[name].slot_id)
        scope["place"](fresh, built)
        fresh.load_state_dict(plain.state_dict())
        shapes = [
            [(name, type(module).__name__) for name, module in each.named_modules()]
            for each in (fresh, plain)
        ]
    except Exception as problem:
        what = f"the exported source does not run by itself: {type(problem).__name__}: {problem}"
        rule = (
            "A blueprint of your own must be a self-contained function that uses only torch and nn"
        )
        raise BlueprintError(f"{what}. {rule}; import what else it needs inside it.") from problem
    if unequal:
        raise BlueprintError(
            f"the exported fossils of slot {unequal[0]} do not compute what the grown ones do."
        )
    if shapes[0] != shapes[1]:
        raise BlueprintError(
            "the exported source builds other modules than the harvested network has."
        )


def _are_equal(rebuilt: Any, slot: SeedSlot) -> bool:
    # a deep copy runs uncompiled; with compiled or channels-last fossils rounding would differ
    own = copy.deepcopy(slot.fossils).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    rebuilt.load_state_dict(own.state_dict())
    rebuilt.to(next(own.parameters(), slot.alpha))
    features = torch.linspace(-1, 1, 2 * torch.Size(slot.feature_shape).numel())
    features = features.reshape(2, *slot.feature_shape).to(slot.alpha)
    with torch.no_grad():
        return torch.equal(rebuilt.grow(features), nn.Sequential(*own)(features))


_GRAFT = """graft_fossils(site, Fossils(*fossils))"""
_PLACE = """are_members = [entry[6] for entry in entries]
        add = lambda carrier, group: graft_fossils(carrier, Fossils(*group))
        place_fossils(model, site, list(zip(fossils, are_members)), add)"""
_TEMPLATE = '''"""A grown network without the library that grew it: graft(model) on a fresh host gives it back."""

from hashlib import sha256
from pathlib import Path

from safetensors.torch import load_model

{parts}


BUILDERS = {{}}
{builders}

FOSSILS = {table!r}
"""(module name, name of what its copies copy, [(kind, blueprint, channels, channels first, gated, takes after the
module, becomes a member of its list), ...])"""


def build(model):
    """The fossils of every module, without their weights; nothing is grafted."""
    like = next(model.parameters())
    return [build_fossils(model, like, model.get_submodule(source), entries) for _, source, entries in FOSSILS]


def build_fossils(model, like, source, entries):
    grown = []
    for kind, name, channels, channels_first, gated, inherits, _ in entries:
        if name == "sham":
            grown.append(Sham())
            continue
        gate = Gate(channels, channels_first).to(like) if gated else None
        if inherits:
            last = grown[-1] if grown and isinstance(grown[-1], Copy) else None
            body = BUILDERS[kind, name](channels, site=Site(source if last is None else last.body, model))
        else:
            body = BUILDERS[kind, name](channels)
        if inherits and isinstance(body, Copy):
            body.gate = gate
            grown.append(body)
        else:
            grown.append(Seed(body, scale_of(channels, channels_first), gate).to(like))
    return grown


def place(model, built):
    """Put the fossils where they belong."""
    sites = [model.get_submodule(name) for name, *_ in FOSSILS]
    for site, fossils, (*_, entries) in zip(sites, built, FOSSILS):
        {place}


def graft(model, weights=None):
    """Graft the fossils onto a fresh host and load the grown weights, by default those next to this file."""
    path = Path(weights or Path(__file__).with_name({weights!r}))
    if weights is None and sha256(path.read_bytes()).hexdigest() != {digest!r}:
        raise ValueError(f"{{path}} was not exported with this file. Export again, or name weights of your own.")
    place(model, build(model))
    load_model(whole(model), str(path))
    return model
'''
