"""A deeper network from a trained one, at once, with copies of its layers; no garden, no policy."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from esper.garden.joining import Optimizers, join_originals, list_optimizers, require_cover
from esper.garden.shared_code import follow_compiled
from esper.kasmina.copies.copying import Site, zeroed_copy
from esper.kasmina.copies.counting import UndescribedError, fields_that_tell_members_apart
from esper.kasmina.copies.eligibility import study_zeros
from esper.kasmina.copies.membership import (
    ADAPTERS_ALONE,
    Member,
    configs_around,
    follow_flags,
    keeper_of,
    members_of,
    restack,
    saves_adapters_alone,
)
from esper.kasmina.copies.order import handing_on, run_on
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.outputs import pair_outputs
from esper.kasmina.plain import grafts_of
from esper.kasmina.probing import Example, find_wrapper, refuse_parts
from esper.kasmina.proving import Batch, find_difference, find_unequal, record_trials
from esper.kasmina.slot import has_slots
from esper.leyline.errors import HostError, SettingError, UnknownNameError


@torch.inference_mode(mode=False)  # what is made here is trained later
def deepen(
    model: nn.Module,
    to: int,
    *,
    layers: str | None = None,
    identity: bool = False,
    optimizer: Optimizers | None = None,
    example: Example | None = None,
) -> nn.Module:
    """Make a model of `to` layers, in place: its own layers and copies of them.

    Copies stand right behind their originals, evenly; where the network or its configuration
    cannot have that, in another order that it can have, and a warning says which. If nothing fits,
    or the optimiser cannot follow, it is refused with the model as before.

    Args:
        model: a network whose layers stand in an `nn.ModuleList` or `nn.Sequential`.
        to: how many layers it shall have; more than now.
        layers: name of that list, if the model has several: "model.layers".
        identity: whether copies change nothing at first: the last layer of each residual branch
            is zero. Needs `example`.
        optimizer: takes the new parameters into the groups of their originals; all other state
            stays. Of several, as in `[muon, adamw]`, each parameter of a copy goes to the one that
            holds its original.
        example: one batch, as the model takes it. It is proven on it that all layers run in order.
            An `nn.Sequential` and language models of transformers do without.

    Returns:
        The model that you passed.

    Raises:
        HostError: the model cannot have copies of its layers.
        OptimizerError: an optimiser cannot take up new parameters one by one, or a parameter that
            learns is in none.
        SettingError: `to` is not larger than the number of layers, or `example` is missing.
        UnknownNameError: the model has no such list.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> deeper = esper.deepen(model, 3, optimizer=optimizer)
        >>> deeper is model, len(model), len(optimizer.param_groups[0]["params"])
        (True, 3, 6)
        >>> torch.equal(model[2].weight, model[1].weight)
        True
    """
    optimizers = None if optimizer is None else list_optimizers(optimizer)
    _refuse_unfit(model, identity, example)
    path = find_layers(model, layers)
    old = members_of(model.get_submodule(path))
    if isinstance(to, bool) or not isinstance(to, int) or to <= len(old):
        raise SettingError(
            f"to is {to!r}, and {path or 'the model'} has {len(old)} layers; it must be a larger "
            f"number."
        )
    stack = Stack(model, path, old, identity)
    for source, member in enumerate(old):
        reason = refuse_parts(member)
        if reason is not None:
            raise HostError(f"no copy can follow {stack.name_of(source)}: {reason}.")
    if optimizers is not None:
        named = [(stack.name_of(source), member) for source, member in enumerate(old)]
        require_cover(optimizers, named, parameters_outside(model, old))
    layout = stack.grow(to, _example_for(model, path, example))
    if optimizers is not None:
        join_originals(optimizers, model, layout, old)
    if saves_adapters_alone(model):
        warnings.warn(ADAPTERS_ALONE, stacklevel=2)
    return model


class Stack:
    """A list of layers that gets copies, and the proof that the network can have them."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        old: list[nn.Module],
        identity: bool = False,
        make: Callable[[nn.Module], nn.Module] | None = None,
    ):
        self.model = model
        self.path = path
        self.old = old
        self.identity = identity
        self.make = make
        """what stands for a copy of a layer; by default a plain copy"""
        self.undo = ExitStack()
        """closed, it makes the network as it was"""
        self.zeroed: dict[int, Mapping[str, float]] = {}
        """for each original what to zero in its copies"""
        self.zero_problems: dict[int, str | None] = {}
        self._copies: dict[int, list[nn.Module]] = {}

    def name_of(self, source: int) -> str:
        """The name of an original in the model."""
        key = list(self.model.get_submodule(self.path)._modules)[source]
        return f"{self.path}.{key}".lstrip(".")

    def grow(self, to: int, example: Example | None) -> list[Member]:
        """Put copies into the list in the first order that the network can have."""
        proof = None if example is None else Proof(self, example)
        find_problem = None if proof is None else proof.find_problem
        return self._place(to, find_problem)

    def try_out(self, to: int, example: Example | None) -> None:
        """Put stand-ins for copies into the list, which hand on what they get; or refuse it."""
        proof = None if example is None else Proof(self, example)
        find_problem = None if proof is None else proof.find_disorder
        with warnings.catch_warnings(action="ignore"):  # growing says it, when it does it
            self._place(to, find_problem)
        self.undo.close()

    def _place(
        self, to: int, find_problem: Callable[[Sequence[Member]], str | None] | None
    ) -> list[Member]:
        problems: list[ValueError] = []
        for sources in _orders(self.old, to):
            try:
                layout = self._layout_of(sources)
                accept = _accept_all if find_problem is None else partial(find_problem, layout)
                self.undo = restack(self.model, self.path, layout, accept)
            except ValueError as problem:
                problems.append(problem)
                continue
            if problems:
                warnings.warn(
                    f"the layers of {self.path} are copied as {_shown(sources)}: they cannot be "
                    f"copied evenly, since {problems[0]}.",
                    stacklevel=4,
                )
            return layout
        raise HostError(
            f"this model cannot have {to} layers: {problems[0]}{self._name_fields(problems[0])}."
        ) from problems[0]

    def _layout_of(self, sources: Sequence[int]) -> list[Member]:
        """Originals and copies, by the positions that they come from."""
        copied: Counter[int] = Counter()
        layout: list[Member] = []
        for source in sources:
            count = copied[source]
            copied[source] += 1
            module = self.old[source] if count == 0 else self._copy(source, count - 1)
            layout.append(Member(source, module))
        return layout

    def _copy(self, source: int, number: int) -> nn.Module:
        """A copy in the mode of its original; what is frozen there is frozen here."""
        problem = self.zero_problems.get(source)
        if problem is not None:
            raise ValueError(
                f"no copy that changes nothing can follow {self.name_of(source)}: {problem}"
            )
        copies = self._copies.setdefault(source, [])
        while len(copies) <= number:
            original = self.old[source]
            copied = self._plain_copy(source) if self.make is None else self.make(original)
            copies.append(copied)
        return copies[number]

    def _plain_copy(self, source: int) -> nn.Module:
        original = self.old[source]
        site = Site(original, self.model, zeroed=self.zeroed.get(source, {}))
        copied = zeroed_copy(0, site).body
        for new, parameter in zip(copied.parameters(), original.parameters(), strict=True):
            new.requires_grad_(parameter.requires_grad)
        follow_flags(original, copied)
        follow_compiled(original, copied)
        return copied

    def _name_fields(self, problem: ValueError) -> str:
        """The fields of the configuration that stand in the way, in words."""
        if not isinstance(problem, UndescribedError):
            return ""
        keeper = keeper_of(self.model, self.path)
        members = self.model.get_submodule(self.path)
        inside = next(name for name, module in keeper.named_modules() if module is members)
        configs = configs_around(self.model, self.path)
        fields = fields_that_tell_members_apart(keeper, inside, configs)
        if not fields:
            return ""
        return f"; which layers differ stands in {', '.join(fields)}, where copies have no place"


class Proof:
    """Runs a network on an example: as it is, and with copies."""

    def __init__(self, stack: Stack, example: Example):
        self.stack = stack
        self.example = example
        model = stack.model
        try:
            self.plain = run_on(model, example)
        except Exception as problem:  # whatever a user's network does with an example
            raise HostError(
                f"the example batch does not run through {type(model).__name__}: {problem}. "
                f"`example` must be what the model is called with: a tensor, a tuple of arguments "
                f"or a dict of keywords."
            ) from problem
        # layers that a network leaves out at random while training are others with copies
        self.trials = record_trials(model, (), Batch.of_example(example), training_seed=1)
        if stack.identity:
            names = [stack.name_of(source) for source in range(len(stack.old))]
            with _without_cache(model):
                studied = study_zeros(model, names, example)
            for source, name in enumerate(names):
                stack.zeroed[source] = studied[name].zeroed
                stack.zero_problems[source] = studied[name].zero_problem

    def find_problem(self, layout: Sequence[Member]) -> str | None:
        """Why the network is not right with this list; None if it is."""
        return self.find_disorder(layout) or self._find_failure()

    def find_disorder(self, layout: Sequence[Member]) -> str | None:
        """Whether copies that hand on what they get change anything."""
        stack, model = self.stack, self.stack.model
        members = [member.module for member in layout]
        sources = [member.source for member in layout]
        originals = {id(module) for module in stack.old}
        added = [position for position, module in enumerate(members) if id(module) not in originals]
        with handing_on(members, added, {}) as watch:
            try:
                output = run_on(model, self.example)
            except Exception as problem:  # whatever a user's network does with a longer list
                return f"it fails with more layers: {type(problem).__name__}: {problem}"
            for position in range(len(members)):
                if not watch.runs[position]:
                    return (
                        f"a layer at {stack.path}.{position} would never run, since the network "
                        f"goes through {stack.path} by a number or a list of its own"
                    )
            for position in added:
                first = sources.index(sources[position])
                reason = watch.shapes.get(first) or watch.judge(position)
                if reason is not None:
                    return f"no copy can follow {stack.name_of(sources[position])}: {reason}"
            if find_unequal(output, self.plain, may_grow=True) is not None:
                return f"what the network does with {stack.path} depends on how long it is"
            return find_difference(model, self.trials, may_grow=True)

    def _find_failure(self) -> str | None:
        """Whether the network runs with its copies."""
        try:
            output = run_on(self.stack.model, self.example)
            pairs = list(pair_outputs(output, self.plain, may_grow=True))
        except Exception as problem:  # whatever a user's layer does with features that it never saw
            return f"it fails with copies: {type(problem).__name__}: {problem}"
        for pair in pairs:
            if _is_finite(pair.wanted) and not _is_finite(pair.ours):
                return "with copies it gives NaN or Inf"
        if self.stack.identity and not all(pair.is_equal() for pair in pairs):
            return "with zeroed copies its output is another one"
        return None


def parameters_outside(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a network that modules other than these layers hold: copies share them."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    outside: list[nn.Parameter] = []
    for module in model.modules():
        if id(module) not in inside:
            outside += module.parameters(recurse=False)
    return outside


def _is_finite(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or bool(tensor.isfinite().all())


def _accept_all() -> None:
    """What runs in order by its class needs no proof."""


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """No key-value cache inside: a layer that runs alone has none."""
    modules: Iterable[Any] = model.modules()
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _orders(old: Sequence[nn.Module], to: int) -> Iterator[list[int]]:
    """For each of `to` layers the original that it comes from: evenly, then other orders.

    These leave out the first, the last or both, copy only layers of the commonest build, or copy
    two or more layers together.
    """
    count = len(old)
    builds = [(type(layer), tuple(layer.state_dict())) for layer in old]
    commonest, _ = Counter(builds).most_common(1)[0]
    stretches: list[Sequence[int]] = [range(count), range(1, count)]
    stretches += [range(count - 1), range(1, count - 1)]
    stretches.append([source for source in range(count) if builds[source] == commonest])
    tried: list[list[int]] = []
    for stretch in stretches:
        if not stretch:
            continue
        copied = _evenly(len(stretch), to - count + len(stretch))
        others = [source for source in range(count) if source not in stretch]
        order = sorted([*others, *(stretch[index] for index in copied)])
        if order not in tried:
            tried.append(order)
            yield order
    for size in range(2, count + 1):
        if count % size == 0 and to % size == 0:
            order = []
            for group in _evenly(count // size, to // size):
                order += range(group * size, group * size + size)
            yield order


def _evenly(count: int, to: int) -> list[int]:
    """Originals of `to` layers; later layers first, since their copies are worth more."""
    return [count - 1 - (to - 1 - position) * count // to for position in range(to)]


def _shown(sources: Sequence[int]) -> str:
    return " ".join(map(str, sources))


def _example_for(model: nn.Module, path: str, example: Example | None) -> Example | None:
    """The batch to prove on: the caller's, or the model's own; None where nothing has to be."""
    if example is not None:
        return example
    is_chain = path == "" and type(model).forward is nn.Sequential.forward
    if is_chain:
        return None
    device = next((parameter.device for parameter in model.parameters()), None)
    language_model: Any = model
    try:
        inputs = {name: value.to(device) for name, value in language_model.dummy_inputs.items()}
        run_on(model, inputs)
    except Exception:  # it has none, or none that it takes
        raise SettingError(
            f"whether the layers of {path or 'this model'} run in order shows on a batch only; "
            f"pass example=, one batch as the model takes it."
        ) from None
    return inputs


def _refuse_unfit(model: nn.Module, identity: bool, example: Example | None) -> None:
    """Refuse what cannot be deepened, before anything is copied."""
    if isinstance(model, MorphogeneticModel) or has_slots(model):
        raise HostError(
            "this model is growing in a garden; deepen garden.harvest(), or the "
            "model before esper.grow."
        )
    wrapper = find_wrapper(model)
    if wrapper is not None:
        raise HostError(
            f"this model holds a {wrapper}; deepen the plain model, then wrap, shard or compile it."
        )
    if identity and example is None:
        raise SettingError(
            "identity=True finds by trying which layers to zero; pass example=, one batch."
        )


def find_layers(model: nn.Module, name: str | None) -> str:
    """The list to deepen: the one that is named, or the only one with members of one class."""
    lists: dict[str, nn.ModuleList | nn.Sequential] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            lists[path] = module
    if name is not None:
        filled = [path for path, members in lists.items() if len(members)]
        if name not in filled:
            raise UnknownNameError("list of layers", name, filled)
        return name
    for graft in grafts_of(model):
        lists = {path: members for path, members in lists.items() if not _is_at(path, graft)}
    lengths = {path: len(members) for path, members in lists.items() if _is_stack(members)}
    outer = [path for path in lengths if not _is_inside(path, lengths)]
    candidates = [path for path in outer if lengths[path] > 1] or outer
    if len(candidates) != 1:
        shown = ", ".join(f"{path!r} ({lengths[path]})" for path in candidates) or "none"
        raise HostError(
            f"lists with layers of one class in this {type(model).__name__}: {shown}. One is "
            f"needed: name an nn.ModuleList or nn.Sequential with layers='...'."
        )
    return candidates[0]


def _is_stack(members: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a list holds layers of one class, with parameters."""
    if not any(True for _ in members.parameters()):
        return False
    return len({type(member) for member in members}) == 1


def _is_at(path: str, other: str) -> bool:
    """Whether a module is another one, or in it."""
    return f"{path}.".startswith(f"{other}.")


def _is_inside(path: str, others: Iterable[str]) -> bool:
    """Whether one of the other lists holds this one; the model itself has the path ''."""
    return any(path.startswith(f"{other}." if other else "") for other in others if other != path)
