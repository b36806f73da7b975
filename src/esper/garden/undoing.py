"""A garden's changes are made whole or not at all.

How all of a garden stands is noted before a change, and put back if the change is broken off.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from esper.leyline.errors import SaveError, SettingError, complain
from esper.runtime.executors.compiling import forget_compiled

if TYPE_CHECKING:
    from esper.garden.garden import Garden
    from esper.garden.recorder import Recorder

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner")
Method = Callable[Concatenate[Owner, Arguments], Result]


def whole(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
    """Make a garden's method one change: Ctrl-C in the middle of it leaves all as it was.

    An error that the method raises itself leaves what the method says.
    """
    return _guarded(method, is_undone=False)


def whole_or_refused(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
    """Make a garden's method one change that any error undoes, changes of weights included."""
    return _guarded(method, is_undone=True)


def _guarded(
    method: Method[Owner, Arguments, Result], *, is_undone: bool
) -> Method[Owner, Arguments, Result]:
    @wraps(method)
    @torch.inference_mode(mode=False)  # what is made here is trained later
    def guarded(owner: Owner, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        garden = cast("Garden", owner)
        refuse_broken(garden)
        standing = Standing(garden, has_weights=is_undone)
        try:
            garden.is_broken = True
            result = method(owner, *args, **options)
            garden.is_broken = False
        except BaseException as problem:
            if is_undone or not isinstance(problem, Exception):
                standing.put_back()
            garden.is_broken = False
            raise
        return result

    return guarded


def refuse_broken(garden: "Garden") -> None:
    """Refuse to go on with a garden that is neither as before a change nor as after it."""
    if garden.is_broken:
        raise SettingError(
            "a change of this garden was broken off, and to undo it was broken off too. Build "
            "model and optimiser again, and continue from a save: esper.load(folder, model)."
        )


class _Attributes:
    """The attributes of one object, and what is in its own lists, dicts and sets."""

    def __init__(self, owner: Any):
        self.owner = owner
        self.values = dict(vars(owner))
        collections = [v for v in self.values.values() if type(v) in (list, dict, set)]
        self.contents = [(collection, copy(collection)) for collection in collections]

    def put_back(self) -> None:
        attributes = vars(self.owner)
        attributes.update(self.values)
        for name in attributes.keys() - self.values.keys():
            del attributes[name]
        for collection, content in self.contents:
            collection.clear()
            add = collection.extend if isinstance(collection, list) else collection.update
            add(content)


class _Optimizer:
    """Groups and state of one optimiser, by reference: a change makes new entries."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.state = optimizer.state
        self.entries = dict(optimizer.state)
        self.groups = [
            (group, dict(group), list(group["params"])) for group in optimizer.param_groups
        ]
        options = [value for group in optimizer.param_groups for value in group.values()]
        self.tensors = _Tensors([value for value in options if isinstance(value, Tensor)])

    def put_back(self) -> None:
        self.state.clear()
        self.state.update(self.entries)
        for group, options, parameters in self.groups:
            group.clear()
            group.update(options)
            group["params"][:] = parameters
        self.tensors.put_back()


class _Tensors:
    """What tensors hold; those whose entries share memory are never written to."""

    def __init__(self, tensors: list[Tensor]):
        kept = [t for t in tensors if not (t.layout is torch.strided and 0 in t.stride())]
        self.values = [(tensor, tensor.detach().clone()) for tensor in kept]

    def put_back(self) -> None:
        for tensor, value in self.values:
            tensor.detach().copy_(value)


class Standing:
    """How a garden stands: its network, its optimisers, its books and what it remembers.

    With `has_weights` the host's weights are kept as well, since a change will write to them.
    """

    def __init__(self, garden: "Garden", *, has_weights: bool):
        self.garden = garden
        self.events = len(garden.history)
        self.recorder: Recorder | None = garden._recorder
        model = garden.model
        slots = model.ordered_slots
        links = () if model.link is None else model.link.all
        schedulers = [link.scheduler for link in links if link.scheduler is not None]
        owners: list[Any] = [garden, garden.books, garden._evaluation, garden.loss_meter]
        owners += [] if garden.average is None else [garden.average]
        owners += [model, model._gradient_notes, *slots, *(slot.fossils for slot in slots)]
        owners += [*links, *schedulers]
        for scheduler in schedulers:  # schedules that are objects of the user's remember too
            owners += [plan for plan in getattr(scheduler, "lr_lambdas", ()) if _is_object(plan)]
        modules = list(model.modules())
        owned = [(module, dict(module._buffers), module.training) for module in modules]
        self.modules: list[tuple[nn.Module, dict[str, Tensor | None], bool]] = owned
        self.attributes = [_Attributes(owner) for owner in owners]
        self.attributes[0].values["is_broken"] = True  # until all is put back
        self.ledger = deepcopy(vars(garden.books.ledger))
        self.optimizers = [_Optimizer(link.optimizer) for link in links]
        self.tensors = _Tensors([*model.buffers(), *(model.parameters() if has_weights else ())])

    def put_back(self) -> None:
        """Make all as it was; no other process is asked."""
        garden = self.garden
        recorder = garden._recorder
        is_told = len(garden.history) != self.events or recorder is not self.recorder
        for attributes in self.attributes:
            attributes.put_back()
        vars(garden.books.ledger).update(self.ledger)
        for optimizer in self.optimizers:
            optimizer.put_back()
        for module, buffers, training in self.modules:
            module._buffers.update(buffers)
            module.training = training
        self.tensors.put_back()
        garden._follower.rejoin()
        if garden.books.is_passed_by:
            forget_compiled()
        garden.is_broken = False
        if is_told and self.recorder is not None:
            self._record_again(recorder)

    def _record_again(self, recorder: "Recorder | None") -> None:
        """Take what was undone out of the run's folder, which holds the history and no more."""
        assert self.recorder is not None
        for closing in (recorder, self.recorder):
            if closing is not None:
                closing.close()
        self.garden._recorder = None
        try:
            self.garden.record(self.recorder.folder, track=self.recorder.track)
        except SaveError as problem:
            complain(f"{problem} This garden is not recorded any more.")


def _is_object(plan: Any) -> bool:
    """Whether a schedule keeps values of its own."""
    return bool(getattr(plan, "__dict__", None))
