"""What a depth schedule refuses, and how it says so."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from esper.garden.sharded_copies import is_sharded, refuse_unsharded_alone
from esper.garden.shared_code import find_foreign_compilation
from esper.garden.wrapping import Wrapped, captures_graphs, seconds_compiling
from esper.kasmina.probing import refuse_parts
from esper.leyline.errors import HostError, SaveError, SettingError, is_number

Named = Sequence[tuple[str, nn.Module]]
"""Layers with their names in the network."""


def require_count(name: str, value: Any, least: int, reason: str) -> int:
    """A whole number that is at least `least`, or a refusal."""
    if isinstance(value, bool) or not is_number(value, least, is_whole=True):
        raise SettingError(f"{name} is {value!r}; it must be a whole number, {reason} {least}.")
    return int(value)


def read_plan(plan: Any, start: int, to: int) -> dict[int, float]:
    """A caller's plan in order of its shares: deeper each time, up to `to`; others are refused."""
    if not isinstance(plan, Mapping) or not plan:
        raise SettingError(f"plan is {plan!r}; it must say shares of total by depth: {{3: 0.3}}.")
    for depth, share in plan.items():
        is_depth = is_number(depth, 1, is_whole=True) and not isinstance(depth, bool)
        if not is_depth or not is_number(share, 0) or float(share) > 1:
            raise SettingError(
                f"plan has {depth!r}: {share!r}; depths are whole numbers, and shares of total lie "
                f"between 0 and 1."
            )
    shares = {int(depth): float(share) for depth, share in plan.items()}
    ordered = dict(sorted(shares.items(), key=lambda entry: (entry[1], entry[0])))
    deepest = start
    for depth, share in ordered.items():
        if depth <= deepest:
            raise SettingError(
                f"the plan shrinks: {depth} layers at {share} of total, after {deepest}; a later "
                f"share must be deeper. To resume, build the model as deep as it began."
            )
        deepest = depth
    if deepest != to:
        raise SettingError(f"the plan ends with {deepest} layers, and to is {to}; make them equal.")
    if len(set(ordered.values())) < len(ordered):
        raise SettingError(f"plan is {plan!r}; two depths cannot begin at one share.")
    return ordered


def require_alike(layers: Named) -> None:
    """Refuse a list whose members are not of one build."""
    builds = []
    for name, layer in layers:
        shapes = {key: tuple(p.shape) for key, p in layer.named_parameters()}
        builds.append((name, type(layer), shapes))
    first = builds[0]
    for name, kind, shapes in builds[1:]:
        if kind is not first[1] or shapes != first[2]:
            raise HostError(
                f"{name}, a {kind.__name__}, is built differently from {first[0]}, a "
                f"{first[1].__name__}; a depth schedule needs a list of layers of one build. "
                f"esper.deepen takes mixed lists."
            )


def require_copyable(layers: Named) -> None:
    """Refuse layers of which no copy would do what they do."""
    for name, layer in layers:
        if type(layer).__name__ == "OptimizedModule":
            problem: str | None = "it is wrapped by torch.compile"
        elif is_sharded(layer):
            refuse_unsharded_alone(name, layer)
            problem = None
        else:
            problem = refuse_parts(layer)
        compiled = find_foreign_compilation(layer)
        if problem is None and compiled is not None:
            problem = f"{compiled} in it was compiled by itself"
        if problem is not None:
            way_out = " Use esper.compile_layers." if "compile" in problem else ""
            raise HostError(f"no copy can follow {name}: {problem}.{way_out}")


def refuse_foreign_state(state: Mapping[str, Any], current: Mapping[str, Any], depth: int) -> None:
    """Refuse a state of something else, of another plan, or of a network that is not this deep."""
    if not isinstance(state, Mapping) or set(state) != set(current):
        raise SaveError(
            "this is no state of a DepthSchedule; pass what its state_dict() gave when you saved."
        )
    for name in ("to", "total", "has_plan"):
        if state[name] != current[name]:
            raise SettingError(
                f"{name} is {current[name]!r}, and was {state[name]!r} when this was saved; resume "
                f"with the same plan."
            )
    saved = [list(entry) for entry in state["shares"]]
    if state["has_plan"] and saved != current["shares"]:
        raise SettingError(
            f"plan is {dict(current['shares'])}, and was {dict(saved)} when this was saved; resume "
            f"with the same plan."
        )
    last = state["grown"][-1] if state["grown"] else state["start"]
    if depth not in (state["start"], last):
        raise SettingError(
            f"the network has {depth} layers; this run began with {state['start']} and was saved "
            f"with {last}. Build it with {state['start']}."
        )


def warn_of_compilations(wrapped: Wrapped, growths: int, layers: str) -> None:
    """Say what growths cost where the model is compiled as a whole; refuse graphs by name."""
    for compiled in wrapped.compiled:
        if captures_graphs(compiled):
            raise HostError(
                "this model is compiled with mode='reduce-overhead' (CUDA graphs), and growth with "
                "it has not run on a GPU yet; leave the mode out, or use esper.compile_layers."
            )
    if wrapped.compiled and growths:
        from torch._dynamo import config

        seconds = seconds_compiling()
        spent = f" ({seconds:.0f} s so far in this process)" if seconds >= 1 else ""
        limit: int = config.recompile_limit
        beyond = ""
        if growths >= limit:
            beyond = (
                f", and after {limit} torch stops compiling it: raise "
                f"torch._dynamo.config.recompile_limit"
            )
        warnings.warn(
            f"this model is compiled as a whole: each of its {growths} growths compiles it "
            f"again{spent}{beyond}. esper.compile_layers(model, {layers!r}) instead compiles "
            f"nothing at a growth.",
            stacklevel=3,
        )
