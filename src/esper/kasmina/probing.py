"""Where in a module a slot would fit: found by one example forward, with hooks that observe.

The model is as before afterwards; nothing is planted here.
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
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from esper.kasmina.copies.membership import source_name
from esper.kasmina.masked import around, find_unseen
from esper.leyline.errors import HostError, UnknownNameError
from esper.leyline.slots import KINDS

_WRAPPERS = (
    "FullyShardedDataParallel",
    "DTensor",
    "DistributedDataParallel",
    "DataParallel",
    "OptimizedModule",
)
_MODE_METHODS = frozenset({"train", "eval"})
Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""One batch: a tensor, positional arguments or keyword arguments."""


class Call(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Place:
    """One sub-module's output, seen as a place for a slot."""

    name: str
    """the sub-module's name in the model"""
    module: str
    """its class"""
    kind: str | None
    """image, sequence or vector; None if no slot fits"""
    shape: tuple[int, ...]
    """one example's features"""
    problem: str | None
    """why no slot fits here; None if one does"""
    like: Tensor | None = None
    """an empty tensor on the device and of the type of the features"""
    copy_problem: str | None = None
    """why the module cannot be copied; None if it can, as far as one call shows"""
    unseen: str | None = None
    """the mask or cache of the model that seeds do not see here; None if it has none"""

    def __str__(self) -> str:
        label = f"{self.name} ({self.module})"
        if self.problem is not None:
            return f"{label}: no slot: {self.problem}"
        if self.copy_problem is not None:
            return f"{label}: {self.kind} {self.shape}; no copy: {self.copy_problem}"
        return f"{label}: {self.kind} {self.shape}"


def call_with(model: nn.Module, example: Example) -> Any:
    """Run the model on an example batch, spread as its form says."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(example) if isinstance(example, Tensor) else model(*example)


def batch_size(example: Example) -> int:
    """Examples in a batch: the length of its first tensor; 0 if it has none."""
    if isinstance(example, Tensor):
        example = [example]
    values = example.values() if isinstance(example, Mapping) else example
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return 0


def resize(example: Example, count: int) -> Example:
    """The example with so many rows, which repeat if it has fewer.

    What has no row for each example stays as it is.
    """
    size = batch_size(example)
    rows = torch.arange(count) % max(1, size)

    def take(tensor: Tensor) -> Tensor:
        is_plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0
        return tensor[rows.to(tensor.device)] if is_plain and len(tensor) == size else tensor

    if isinstance(example, Tensor):
        return take(example)
    if isinstance(example, Mapping):
        return {name: tree_map_only(Tensor, take, value) for name, value in example.items()}
    return tuple(tree_map_only(Tensor, take, value) for value in example)


# -- a model as before -----------------------------------------------------------------------------


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode afterwards.

    Where no module has a `train` or `eval` of its own, flags are set directly, which is several
    times as fast as `eval`.
    """
    modes = [(module, module.training) for module in model.modules()]
    classes = {type(module) for module, _ in modes}
    is_plain = all(map(_has_plain_modes, classes))
    is_plain = is_plain and all(_MODE_METHODS.isdisjoint(vars(module)) for module, _ in modes)
    try:
        if is_plain:
            for module, _ in modes:
                vars(module)["training"] = False
        else:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            if is_plain:
                vars(module)["training"] = mode
            else:
                module.training = mode


def _has_plain_modes(module_class: type[nn.Module]) -> bool:
    """Whether a class switches its mode as every module does, and by nothing else."""
    return (
        module_class.train is nn.Module.train
        and module_class.eval is nn.Module.eval
        and module_class.__setattr__ is nn.Module.__setattr__
        and not hasattr(module_class, "training")
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; mode flags, buffers and random state are as before then.

    Buffers are kept although evaluation mode moves no running statistics: a module may stay in
    training mode, or count its calls.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    randomness = torch.random.fork_rng(devices=devices)
    with torch.no_grad(), randomness, buffers_kept(model), evaluated(model):
        yield


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are as before afterwards, though a forward may replace them or write to them.

    What is written to an expanded buffer stays: its entries share their memory.
    """
    buffers: list[_KeptBuffer] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            value = None
            if buffer is not None:
                is_expanded = buffer.layout is torch.strided and 0 in buffer.stride()
                value = None if is_expanded else buffer.clone()
            buffers.append(_KeptBuffer(module, name, buffer, value))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer


class _KeptBuffer(NamedTuple):
    """A module's buffer, and what it held."""

    module: nn.Module
    name: str
    buffer: Tensor | None
    value: Tensor | None


# -- places for slots ------------------------------------------------------------------------------


def record_calls(model: nn.Module, example: Example, names: Iterable[str]) -> dict[str, list[Call]]:
    """All calls of these modules when the model runs on `example`, in the order of ending."""
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
    """Every sub-module that runs on `example`, with whether a slot fits its output.

    They are in the order of execution. Other rows show which axis is the batch. `kinds` says by
    name or pattern what features are, where their shape does not; a pattern that no module has is
    refused.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in kinds or {}:
        _require_names(pattern, modules)
    try:
        calls = record_calls(model, example, modules)
    except Exception as problem:
        raise HostError(
            f"the example batch does not run through {type(model).__name__}: {problem}. `example` "
            f"must be what the model is called with: a tensor, a tuple of arguments or a dict of "
            f"keywords."
        ) from problem
    tokens_first = any(getattr(module, "batch_first", True) is False for module in model.modules())
    unseen = find_unseen(model, calls)
    axes = _find_batch_axes(model, example, calls)
    places = []
    for name, module_calls in calls.items():
        outputs = [call.output for call in module_calls]
        axis = axes.get(name, 0)
        output = outputs[0]
        # tokens may come before the batch, or channels behind the positions
        on_last_axis = tokens_first and getattr(output, "ndim", 0) == 3
        on_last_axis = on_last_axis or _has_channels_last(modules[name], output)
        fit = _judge_outputs(outputs, axis, on_last_axis, _stated_kind(name, kinds or {}))
        if isinstance(modules[name], GraphModule):
            fit = _Fit(None, "it is a torch.fx.GraphModule, whose copies lose their hooks")
        copy_problem = None
        if fit.problem is None:
            source = source_name(model, name)
            copy_problem = refuse_copy(model, source, calls.get(source), output)
        is_dense = isinstance(output, Tensor) and not output.is_nested
        place = Place(
            name=name,
            module=type(modules[name]).__name__,
            kind=fit.kind,
            shape=(*output.shape[:axis], *output.shape[axis + 1 :]) if is_dense else (),
            problem=fit.problem,
            like=output.new_empty(0) if is_dense else None,
            copy_problem=copy_problem,
            unseen=next((unseen[part] for part in around(name) if part in unseen), None),
        )
        places.append(place)
    return places


def _find_batch_axes(
    model: nn.Module, example: Example, calls: Mapping[str, Sequence[Call]]
) -> dict[str, int]:
    """Which axis of a module's output is the batch, of those where it is not the first.

    The model runs once more, on another number of rows; where it does not, nothing is said.
    """
    size = batch_size(example)
    if not size:
        return {}
    count = 1 if size == 2 else 2
    resized = resize(example, count)
    try:
        others = record_calls(model, resized, calls)
    except Exception:  # whatever a user's model does with other rows than it knows
        return {}
    ratio = count / size
    axes: dict[str, int] = {}
    for name, module_calls in calls.items():
        output = module_calls[0].output
        other = others[name][0].output if name in others else None
        if not isinstance(output, Tensor) or not isinstance(other, Tensor):
            continue
        if output.is_nested or output.dim() != other.dim():
            continue
        sizes = enumerate(zip(output.shape, other.shape, strict=True))
        changed = [(axis, pair[1] / pair[0]) for axis, pair in sizes if pair[0] != pair[1]]
        if len(changed) == 1 and changed[0][0] > 0 and changed[0][1] == ratio:
            axes[name] = changed[0][0]
    return axes


def _has_channels_last(module: nn.Module, image: Any) -> bool:
    """Whether the layers of a module show that the channels of its image are the last axis."""
    if not isinstance(image, Tensor) or image.dim() != 4 or image.shape[1] == image.shape[-1]:
        return False
    widths: list[int] = []
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            widths.append(part.normalized_shape[-1])
        elif isinstance(part, nn.Linear):
            widths.append(part.out_features)
        elif isinstance(part, nn.Conv2d):
            widths.append(part.out_channels)
    telling = [width for width in widths if width in (image.shape[1], image.shape[-1])]
    return bool(telling) and telling[-1] == image.shape[-1]


def _stated_kind(name: str, kinds: Mapping[str, str]) -> str | None:
    """The kind that the caller gives a module by its name or a pattern; None without one."""
    for pattern, kind in kinds.items():
        if find_names(pattern, [name]):
            return kind
    return None


def find_wrapper(model: nn.Module) -> str | None:
    """What spreads a model over devices or processes, or compiles it; None for a plain one."""
    classes = {type(module).__name__ for module in model.modules()}
    classes |= {type(parameter.data).__name__ for parameter in model.parameters()}
    for wrapper in _WRAPPERS:
        if wrapper in classes:
            return wrapper
    return None


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a wrapped model: a wrapper's buckets or shards do not follow seeds.

    A model that was built in inference mode is refused too: nothing behind its weights can learn.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise HostError(
            f"this {type(model).__name__} was built inside torch.inference_mode(), so nothing can "
            f"be trained through its weights. Build it outside."
        )
    wrapper = find_wrapper(model)
    if wrapper not in (None, "OptimizedModule"):
        raise HostError(
            f"this model holds a {wrapper}, which would not know of seeds that are planted later. "
            f"Grow the plain model and train DistributedDataParallel(garden.model); what has to be "
            f"sharded is garden.harvest()."
        )


def refuse_copy(
    model: nn.Module, name: str, calls: Sequence[Call] | None, output: Tensor
) -> str | None:
    """Why a module cannot be copied and run on its own output.

    None if nothing in it or in its calls speaks against that.
    """
    first: Any = None
    if calls:
        arguments = [*calls[-1].args, *calls[-1].kwargs.values()]
        first = arguments[0] if arguments else None
    shape = tuple(first.shape[1:]) if isinstance(first, Tensor) else type(first).__name__
    if shape != tuple(output.shape[1:]):
        return f"its input has shape {shape} and its output {tuple(output.shape[1:])}"
    return refuse_parts(model.get_submodule(name))


def refuse_parts(module: nn.Module) -> str | None:
    """Why a copy of a module would not stand alone; None if nothing in it speaks against it."""
    if not any(True for _ in module.parameters()):
        return "it has no weights to copy"
    for part in module.modules():
        if "forward" in vars(part):
            return f"the forward of a {type(part).__name__} in it was replaced"
        if "quantized" in type(part).__module__.split("."):
            return f"it holds a quantised {type(part).__name__}"
    for name, parameter in module.named_parameters():
        is_plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
        if not is_plain or not parameter.is_floating_point():
            kind = type(parameter.data).__name__
            return f"its {name} is a {kind} of {parameter.dtype}: quantised or sharded"
    return None


class _Fit(NamedTuple):
    """Whether a slot fits a module's output; one of the two is None."""

    kind: str | None
    problem: str | None


def _judge_outputs(outputs: list[Any], axis: int, on_last_axis: bool, stated: str | None) -> _Fit:
    """The kind of features that a module gives out, or why no slot fits them.

    `axis` is that of the batch. `on_last_axis` says that only seeds of the last axis are safe.
    """
    problem = _refuse_outputs(outputs)
    if problem is not None:
        return _Fit(None, problem)
    if stated is not None and stated not in KINDS.values():
        raise UnknownNameError("kind of slot", stated, KINDS.values())
    rank = outputs[0].dim()
    natural = KINDS.get(rank)
    if natural is None:
        return _Fit(None, f"its output has {rank} dimensions, and slots take 2, 3 or 4")
    if axis and (axis == rank - 1 or stated not in (None, "vector")):
        said = "" if stated is None else f", and it is said to be {stated}"
        problem = f"axis {axis} of its {rank}, counted from 0, is the batch{said}"
        return _Fit(None, problem)
    if axis:
        return _Fit("vector", None)  # only seeds that work on the last axis alone are safe
    if stated not in (None, natural, "vector"):
        problem = f"it is said to be {stated}, but its output is {natural}: {rank} dimensions"
        return _Fit(None, problem)
    if stated is None and on_last_axis:
        return _Fit("vector", None)
    return _Fit(stated or natural, None)


def _refuse_outputs(outputs: list[Any]) -> str | None:
    """Why no slot fits what a module gives out, whatever its shape; None if one may."""
    output = outputs[0]
    if not isinstance(output, Tensor):
        return f"its output is a {type(output).__name__}, and a slot needs one tensor"
    if output.is_nested:
        return (
            "its output is a nested tensor; build nn.TransformerEncoder with "
            "enable_nested_tensor=False"
        )
    if len(outputs) > 1:
        return f"it is called {len(outputs)} times per forward, and a slot belongs to one place"
    if not output.is_floating_point():
        return f"its output is {output.dtype}, and seeds work on floating point features"
    return None


def find_names(pattern: str, names: Iterable[str]) -> set[str]:
    """The module names meant by a pattern.

    It is a name, or a shell pattern part by part ('h.*.mlp'), or else a regular expression.
    """
    names = set(names)
    if pattern in names:
        return {pattern}
    matching = {name for name in names if _matches_parts(name, pattern)}
    if matching:
        return matching
    try:
        return {name for name in names if re.fullmatch(pattern, name)}
    except re.error:
        return set()


def _require_names(pattern: str, names: Iterable[str]) -> set[str]:
    """The module names meant by a pattern; one without any is refused."""
    meant = find_names(pattern, names)
    if not meant:
        advice = "See esper.inspect(model, example)."
        raise UnknownNameError("module or pattern", pattern, names, advice)
    return meant


def _matches_parts(name: str, pattern: str) -> bool:
    """Whether a shell pattern matches a name part by part, so that * does not cross a dot."""
    name_parts = name.split(".")
    pattern_parts = pattern.split(".")
    if len(name_parts) != len(pattern_parts):
        return False
    return all(map(fnmatchcase, name_parts, pattern_parts))


def choose_places(
    model: nn.Module, places: Sequence[Place], patterns: Sequence[str]
) -> list[Place]:
    """The places that the patterns name, in the order of execution.

    A pattern without a fitting place is refused.
    """
    names = {name for name, _ in model.named_modules() if name}
    problems: dict[str, str | None] = dict.fromkeys(names, "it does not run on the example batch")
    problems |= {place.name: place.problem for place in places}
    chosen: set[str] = set()
    for pattern in patterns:
        meant = _require_names(pattern, names)
        fitting = {name for name in meant if problems[name] is None}
        if not fitting:
            misfits = "; ".join(f"{name}: {problems[name]}" for name in sorted(meant))
            raise HostError(
                f"no slot fits {pattern!r}: {misfits}. Name a module whose output is one floating "
                f"point tensor; esper.inspect(model, example) lists them."
            )
        chosen |= fitting
    return [place for place in places if place.name in chosen]
