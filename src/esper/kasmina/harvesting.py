"""Taking the grown network home: as a plain module, or as weights and a source file that need no esper."""

import ast
import copy
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from esper.kasmina import seeds
from esper.kasmina.blueprints import REGISTRY, SHAM
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot, has_gate
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.files import sweep, write_files

WEIGHTS = "weights.safetensors"
SOURCE = "grown.py"


def harvest(model: MorphogeneticModel) -> nn.Module:
    """A copy of the host with its fossils grafted in and every unfinished seed left out."""
    grown = copy.deepcopy(model)
    for slot_id in grown.slot_config.slot_ids:
        site = grown.host.get_submodule(grown.slot_config.modules[slot_id])
        hooks = site._forward_hooks
        own = next(key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), SeedSlot))
        fossils, earlier = grown.slot(slot_id).fossils, getattr(site, seeds.CHILD, None)
        if isinstance(earlier, seeds.Fossils):  # a harvested network that grew again
            earlier.extend(fossils)
            del hooks[own]
        elif not len(fossils):
            del hooks[own]
        elif earlier is not None:
            place = f"{type(site).__name__} already has an attribute {seeds.CHILD!r}"
            raise HostError(f"slot {slot_id} cannot be harvested: {place}; rename it.")
        else:
            site.add_module(seeds.CHILD, seeds.Fossils(*fossils))
            hooks[own] = seeds.run_grown  # in the slot's place among the hooks
    return grown.host


def export_network(model: MorphogeneticModel, folder: Path) -> Path:
    """Write the harvested weights and `grown.py`, whose `graft(model)` rebuilds the network without esper."""
    if any(isinstance(module, seeds.Fossils) for module in model.host.modules()):
        way_out = "Keep it with garden.harvest() and torch.save, or grow a fresh instance."
        raise HostError(f"this host was harvested and grew again: earlier fossils have no source to export. {way_out}")
    plain, source = harvest(model), render_source(model)
    _prove(source, model)
    sweep(folder, {SOURCE, WEIGHTS}.__contains__)
    write_files(folder, {SOURCE: source.encode(), WEIGHTS: lambda path: save_model(plain, str(path))})
    return folder


def render_source(model: MorphogeneticModel) -> str:
    """A module that holds the sources of all fossils and a `graft` function; every name goes through `repr`."""
    table: list[tuple[str, list[tuple[str, str, int, bool, bool]]]] = []
    own: dict[tuple[str, str], str] = {}
    for slot_id in model.slot_config.slot_ids:
        slot = model.slot(slot_id)
        stack = []
        for fossil, name in zip(slot.fossils, slot.fossil_names, strict=True):
            if name != SHAM:
                own.setdefault((slot.kind, name), _builder_source(slot.kind, name))
            stack.append((slot.kind, name, slot.channels, slot.kind == "image", has_gate(fossil)))
        if stack:
            table.append((model.slot_config.modules[slot_id], stack))
    builders = "\n".join(f"BUILDERS[{key!r}] = {code}" if "\n" not in code else code for key, code in own.items())
    return _TEMPLATE.format(
        parts=inspect.getsource(seeds).split('"""', 2)[2].strip(), builders=builders, table=table, weights=WEIGHTS
    )


def _builder_source(kind: str, name: str) -> str:
    """Code that enters one blueprint into BUILDERS: by name if it is built in, with its source if it is the user's."""
    build = REGISTRY.get(kind, name).build
    if getattr(seeds, getattr(build, "__name__", ""), None) is build:
        return build.__name__
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(build))).body[0]
        if not isinstance(function, ast.FunctionDef):
            raise TypeError("it is not a plain function")
    except (OSError, TypeError, SyntaxError) as problem:
        way_out = "Define it as a plain function in a file, using only torch, so that its source can be exported."
        raise BlueprintError(f"{kind} blueprint {name!r} cannot be exported ({problem}). {way_out}") from problem
    function.decorator_list = []
    wrapper = f"_own_{kind}_{name}"
    body = textwrap.indent(ast.unparse(function), "    ")
    return f"def {wrapper}():\n{body}\n    return {function.name}\n\n\nBUILDERS[{(kind, name)!r}] = {wrapper}()"


def _prove(source: str, model: MorphogeneticModel) -> None:
    """Run the generated code here and compare its fossils with ours: a file that cannot work is never written."""
    scope: dict[str, Any] = {"__name__": "grown", "__file__": SOURCE}
    try:
        exec(compile(source, SOURCE, "exec"), scope)
        stacks = {name: scope["build_fossils"](stack) for name, stack in scope["FOSSILS"]}
        slots = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids if len(model.slot(slot_id).fossils)]
        equal = {slot.slot_id: _are_equal(stacks[model.slot_config.modules[slot.slot_id]], slot) for slot in slots}
    except Exception as problem:
        raise BlueprintError(
            f"the exported source does not run by itself: {type(problem).__name__}: {problem}. A blueprint of your own "
            "must be a self-contained function that uses only torch and nn; import what else it needs inside it."
        ) from problem
    for slot_id, is_equal in equal.items():
        if not is_equal:
            raise BlueprintError(f"the exported fossils of slot {slot_id} do not compute what the grown ones do.")


def _are_equal(rebuilt: Any, slot: SeedSlot) -> bool:
    rebuilt.load_state_dict(slot.fossils.state_dict())
    rebuilt.to(slot.alpha)
    features = torch.linspace(-1, 1, 2 * torch.Size(slot.feature_shape).numel())
    features = features.reshape(2, *slot.feature_shape).to(slot.alpha)
    with torch.no_grad():
        return torch.equal(rebuilt.grow(features), nn.Sequential(*slot.fossils)(features))


_TEMPLATE = '''"""A grown network without the library that grew it: graft(model) on a fresh host gives it back."""

from pathlib import Path

from safetensors.torch import load_model

{parts}


BUILDERS = {{}}
{builders}

FOSSILS = {table!r}
"""(module name, [(kind, blueprint, channels, channels first, gated), ...])"""


def build_fossils(stack):
    """The seeds of one module, without their weights."""
    grown = []
    for kind, name, channels, channels_first, gated in stack:
        if name == "sham":
            grown.append(Sham())
            continue
        gate = Gate(channels, channels_first) if gated else None
        grown.append(Seed(BUILDERS[kind, name](channels), scale_of(channels, channels_first), gate))
    return Fossils(*grown)


def graft(model, weights=None):
    """Graft the fossils onto a fresh host and load the grown weights, by default those next to this file."""
    reference = next(model.parameters())
    for name, stack in FOSSILS:
        graft_fossils(model.get_submodule(name), build_fossils(stack).to(reference))
    load_model(model, str(weights or Path(__file__).with_name({weights!r})))
    return model
'''
