"""Where in a module a slot would fit:

one example forward with observers, the model is as before. Plants nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.copies.membership import source_name
from esper.leyline.errors import HostError, UnknownNameError
from esper.leyline.slots import KINDS

_WRAPPERS = (
    "FullyShardedDataParallel",
    "DTensor",
    "DistributedDataParallel",
    "DataParallel",
    "OptimizedModule",
)
Example = (
    Tensor | Sequence[Any] | Mapping[str, Any]
)  # One batch: a tensor, positional or keyword arguments.


class Call(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Place:
    """One sub-module's output, seen as a place for a slot."""

    name: str
    module: str
    kind: str | None
    shape: tuple[int, ...]  # one example's features
    problem: str | None  # why no slot fits here; None if one does
    like: Tensor | None = None  # an empty tensor on the device and of the type of the features
    copy_problem: str | None = (
        None  # why the module cannot be copied; None if it can, as far as one call shows
    )

    def __str__(self) -> str:
        fit = f"{self.kind} {self.shape}" if self.problem is None else f"no slot: {self.problem}"
        no_copy = (
            "" if self.problem or self.copy_problem is None else f"; no copy: {self.copy_problem}"
        )
        return f"{self.name} ({self.module}): {fit}{no_copy}"


def call_with(model: nn.Module, example: Example) -> Any:
    """Run the model on an example batch, spread as its form says."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(example) if isinstance(example, Tensor) else model(*example)


def batch_size(example: Example) -> int:
    """Examples in a batch: the length of its first tensor; 0 if it has none."""
    values = (
        example.values()
        if isinstance(example, Mapping)
        else [example]
        if isinstance(example, Tensor)
        else example
    )
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 0)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode afterwards; several times as fast as `eval` if
    that is plain.
    """
    modes = [(module, module.training) for module in model.modules()]
    plain, own = (nn.Module.train, nn.Module.eval, nn.Module.__setattr__, False), {"train", "eval"}
    kinds = {
        (k.train, k.eval, k.__setattr__, hasattr(k, "training"))
        for k in {type(module) for module, _ in modes}
    }
    is_plain = kinds == {plain} and all(own.isdisjoint(vars(module)) for module, _ in modes)
    try:
        if not is_plain:
            model.eval()
        for module, _ in modes if is_plain else ():
            vars(module)["training"] = False
        yield
    finally:
        for module, mode in modes:
            if is_plain:
                vars(module)["training"] = mode
            else:
                module.training = mode


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; mode flags and random state are restored afterwards."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices=devices), evaluated(model):
        yield


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are as before afterwards, though a forward may replace them, or write to all that are
    not expanded.
    """
    found = [
        (m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    values = [
        None if b.layout is torch.strided and 0 in b.stride() else b.clone() for *_, b in found
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(found, values, strict=True):
                module._buffers[name] = buffer if value is None else buffer.copy_(value)


def record_calls(model: nn.Module, example: Example, names: Iterable[str]) -> dict[str, list[Call]]:
    """All calls of these modules when the model runs on `example`, in the order in which they
    end.
    """
    calls: dict[str, list[Call]] = {}

    def note(
        name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        calls.setdefault(name, []).append(Call(args, kwargs, output))

    with ExitStack() as hooks, undisturbed(model):
        for name in names:
            module = model.get_submodule(name)
            hook = module.register_forward_hook(partial(note, name), with_kwargs=True)
            hooks.enter_context(hook)
        call_with(model, example)
    return calls


def find_places(
    model: nn.Module, example: Example, kinds: Mapping[str, str] | None = None
) -> list[Place]:
    """Every sub-module that runs on `example`, in the order of execution, with whether a slot fits
    its output.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    try:
        calls = record_calls(model, example, modules)
    except Exception as problem:
        rule = (
            "`example` must be what the model is called with: a tensor, a tuple of "
            "arguments or a dict of keywords."
        )
        what = f"the example batch does not run through {type(model).__name__}: {problem}"
        raise HostError(f"{what}. {rule}") from problem
    tokens_first = any(getattr(module, "batch_first", True) is False for module in model.modules())
    places = []
    for name, own in calls.items():
        outputs, source = [output for *_, output in own], source_name(model, name)
        said = next(
            (kind for pattern, kind in (kinds or {}).items() if find_names(pattern, [name])), None
        )
        kind, misfit = _judge(outputs, tokens_first, said)
        reason = (
            refuse_copy(model, source, calls.get(source), outputs[0]) if misfit is None else None
        )
        is_dense = isinstance(outputs[0], Tensor) and not outputs[0].is_nested
        shape, like = (
            (tuple(outputs[0].shape[1:]), outputs[0].new_empty(0)) if is_dense else ((), None)
        )
        places.append(Place(name, type(modules[name]).__name__, kind, shape, misfit, like, reason))
    return places


def find_wrapper(model: nn.Module) -> str | None:
    """What spreads a model over devices or processes, or compiles it; None for a plain one."""
    kinds = {
        type(each).__name__ for each in (*model.modules(), *(p.data for p in model.parameters()))
    }
    return next((wrapper for wrapper in _WRAPPERS if wrapper in kinds), None)


def refuse_copy(
    model: nn.Module, name: str, calls: Sequence[Call] | None, output: Tensor
) -> str | None:
    """Why a module cannot be copied and run on its own output; None if nothing in it or in its
    calls speaks against.
    """
    args, kwargs, _ = calls[-1] if calls else ((), {}, None)
    given = next(iter((*args, *kwargs.values())), None)
    shape = tuple(given.shape[1:]) if isinstance(given, Tensor) else type(given).__name__
    if shape != tuple(output.shape[1:]):
        return f"its input has shape {shape} and its output {tuple(output.shape[1:])}"
    return refuse_parts(model.get_submodule(name))


def refuse_parts(module: nn.Module) -> str | None:
    """Why a copy of a module would not be one of its own; None if nothing in it speaks against
    it.
    """
    if not any(True for _ in module.parameters()):
        return "it has no weights to copy"
    for part in module.modules():
        if "forward" in vars(part):
            return f"somebody replaced the forward of a {type(part).__name__} in it"
        if "quantized" in type(part).__module__.split("."):
            return f"it holds a quantised {type(part).__name__}"
    for own, tensor in module.named_parameters():
        if (
            type(tensor) is not nn.Parameter
            or type(tensor.data) is not Tensor
            or not tensor.is_floating_point()
        ):
            return (
                f"its {own} is a {type(tensor.data).__name__} of {tensor.dtype}: "
                f"quantised or sharded"
            )
    return None


def _judge(
    outputs: list[Any], tokens_first: bool, said: str | None
) -> tuple[str | None, str | None]:
    """The kind of features that a module gives out, and why no slot fits them; one of the two is
    None.
    """
    output = outputs[0]
    if not isinstance(output, Tensor):
        return None, f"its output is a {type(output).__name__}, and a slot needs one tensor"
    if output.is_nested:
        return (
            None,
            "its output is a nested tensor; build nn.TransformerEncoder with "
            "enable_nested_tensor=False",
        )
    if len(outputs) > 1:
        return (
            None,
            f"it is called {len(outputs)} times per forward, and a slot belongs to one place",
        )
    if not output.is_floating_point():
        return None, f"its output is {output.dtype}, and seeds work on floating point features"
    if said is not None and said not in KINDS.values():
        raise UnknownNameError("kind of slot", said, KINDS.values())
    if (natural := KINDS.get(output.dim())) is None:
        return None, f"its output has {output.dim()} dimensions, and slots take 2, 3 or 4"
    if said not in (None, natural, "vector"):
        return (
            None,
            f"it is said to be {said}, but its output is {natural}: {output.dim()} dimensions",
        )
    if said is None and natural == "sequence" and tokens_first:
        # tokens may come before the batch here, so only seeds that work token by token are safe
        said = "vector"
    return said or natural, None


def find_names(pattern: str, names: Iterable[str]) -> set[str]:
    """The module names meant by a pattern:

    a name, or a shell pattern part by part ('h.*.mlp'), or else a regex.
    """
    names = set(names)
    if pattern in names:
        return {pattern}
    parts = pattern.split(".")
    found = {
        name
        for name in names
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    }
    if found:
        return found
    try:
        return {name for name in names if re.fullmatch(pattern, name)}
    except re.error:
        return set()


def choose_places(
    model: nn.Module, places: Sequence[Place], patterns: Sequence[str]
) -> list[Place]:
    """The places that the patterns name, in the order of execution; a pattern without a fitting
    place is refused.
    """
    names = {name for name, _ in model.named_modules() if name}
    problems: dict[str, str | None] = dict.fromkeys(names, "it does not run on the example batch")
    problems |= {place.name: place.problem for place in places}
    chosen: set[str] = set()
    for pattern in patterns:
        if not (meant := find_names(pattern, names)):
            raise UnknownNameError(
                "module or pattern", pattern, names, "See esper.inspect(model, example)."
            )
        if not (fitting := {name for name in meant if problems[name] is None}):
            misfits = "; ".join(f"{name}: {problems[name]}" for name in sorted(meant))
            rule = (
                "Name a module whose output is one floating point tensor; "
                "esper.inspect(model, example) lists them."
            )
            raise HostError(f"no slot fits {pattern!r}: {misfits}. {rule}")
        chosen |= fitting
    return [place for place in places if place.name in chosen]
