"""Whether new members of a list run in order: each once on what the member before it gave out.

The new members hand that on while the host runs, so nothing but their number can be noticed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina.copies.membership import Member, locate, members_of, restack
from esper.kasmina.outputs import Output, entries_of, pair_outputs, tensors_in
from esper.kasmina.probing import Example, call_with, undisturbed
from esper.kasmina.randomness import own_randomness

Reasons = dict[str, str | None]
"""Module -> why something is not possible with it; None if it is."""


class Watch:
    """Members of a list while their network runs; some of them hand on what they get."""

    def __init__(self, members: Sequence[nn.Module], added: Collection[int]):
        self.members = members
        self.added = added
        """positions of those that hand on"""
        self.runs: Counter[int] = Counter()
        self.strangers: set[int] = set()
        """positions at which something else came in than the member before gave out"""
        self.shapes: dict[int, str] = {}
        """how a member changes the shape of its features, in words"""
        self._last = -1
        self._output: Any = None

    def hand_on(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """What a new member gives out: all that the member before it gave out."""
        first = _first_of(args, kwargs)
        leaves = [leaf for leaf in tree_leaves(self._output) if isinstance(leaf, Tensor)]
        is_handed = first is self._output or any(leaf is first for leaf in leaves)
        if self._last != position - 1 or not is_handed:
            self.strangers.add(position)
        self._last = position
        self.runs[position] += 1
        return self._output

    @contextmanager
    def watching(self, sites: Mapping[int, nn.Module]) -> Iterator[None]:
        """Note what the other members give out; `sites` are modules behind some of them."""
        with ExitStack() as hooks:
            for position, member in enumerate(self.members):
                if position in self.added:
                    continue
                note = partial(self._note, position, is_member=True)
                hooks.enter_context(member.register_forward_hook(note, with_kwargs=True))
                site = sites.get(position, member)
                if site is not member:
                    note = partial(self._note, position, is_member=False)
                    hooks.enter_context(site.register_forward_hook(note, with_kwargs=True))
            yield

    def _note(
        self,
        position: int,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        is_member: bool,
    ) -> None:
        self._output = output
        if not is_member:
            return
        self._last = position
        self.runs[position] += 1
        first = _first_of(args, kwargs)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
        if isinstance(first, Tensor) and shapes and tuple(first.shape) not in shapes:
            self.shapes[position] = (
                f"its input has shape {tuple(first.shape[1:])} and its output {shapes[0][1:]}"
            )

    def judge(self, position: int) -> str | None:
        """Why the new member at a position does not run in order; None if it does."""
        before = self.runs[position - 1]
        if self.runs[position] != before or not before:
            return f"it runs {before} times, and a member behind it {self.runs[position]} times"
        if position in self.strangers:
            return "a member behind it would not get its output as it is"
        return None


def _first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


def run_on(host: nn.Module, example: Example) -> Output:
    """What a host gives for an example in evaluation mode, always with the same random numbers.

    Nothing is compiled for this.
    """
    devices = sorted({p.device.index for p in host.parameters() if p.device.type == "cuda"})
    eager = torch.compiler.set_stance("force_eager")
    with eager, undisturbed(host), own_randomness(0, devices=devices):
        return entries_of(call_with(host, example))


class Tap(nn.Module):
    """Stands where a copy would stand, and hands on what it gets.

    In all else it is what its original is.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        vars(self)["stands_for"] = original  # not a child: the network must not count it twice

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the original."""
        return vars(self)["stands_for"].state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["stands_for"], name)


@contextmanager
def handing_on(
    members: Sequence[nn.Module], added: Collection[int], sites: Mapping[int, nn.Module]
) -> Iterator[Watch]:
    """Let the members at these positions hand on what they get, instead of what they do."""
    watch = Watch(members, added)
    try:
        for position in added:
            vars(members[position])["forward"] = partial(watch.hand_on, position)
        with watch.watching(sites):
            yield watch
    finally:
        for position in added:
            vars(members[position]).pop("forward", None)


def runs_in_order(host: nn.Module, example: Example, names: Sequence[str]) -> Reasons:
    """Why a copy of each named module cannot stand behind it in its list; None if it can.

    The host is as before.
    """
    reasons: Reasons = {}
    # by list and by parent: a site and its block are two ways to the same position
    lists: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        try:
            path, position = locate(host, name)
        except ValueError as problem:
            reasons[name] = str(problem)
            continue
        parent, _, _ = name.rpartition(".")
        lists.setdefault((path, parent), {})[position] = name
    if lists:
        plain = run_on(host, example)
        for (path, _), sites in lists.items():
            reasons |= _try_taps(host, example, path, sites, plain)
    return {name: reasons[name] for name in names}


def _try_taps(
    host: nn.Module, example: Example, path: str, sites: Mapping[int, str], plain: Output
) -> Reasons:
    """Run the host once with a tap behind some members of the list at `path`.

    `sites` are the modules in question, by the position of their member; `plain` is what the host
    gives without taps.
    """
    layout: list[Member] = []
    taps: dict[int, int] = {}
    modules: dict[int, nn.Module] = {}
    for position, module in enumerate(members_of(host.get_submodule(path))):
        layout.append(Member(position, module))
        if position in sites:
            modules[len(layout) - 1] = host.get_submodule(sites[position])
            taps[position] = len(layout)
            layout.append(Member(position, Tap(module)))
    members = [member.module for member in layout]
    added = list(taps.values())
    try:
        with restack(host, path, layout), handing_on(members, added, modules) as watch:
            output = run_on(host, example)
    except Exception as problem:  # whatever a user's network does with a longer list
        reason = f"one more member does not work: {type(problem).__name__}: {problem}"
        return dict.fromkeys(sites.values(), reason)
    # a member that is left out need not show in the output: dropout, or a branch that begins at 0
    ran = sum(position in watch.runs for position in range(len(members)) if position not in added)
    if ran < len(members) - len(added) or not _are_equal(output, plain):
        reason = f"what the network does with {path} depends on how long it is"
        return dict.fromkeys(sites.values(), reason)
    return {name: watch.judge(taps[position]) for position, name in sites.items()}


def _are_equal(output: Output, plain: Output) -> bool:
    try:
        return all(pair.is_equal() for pair in pair_outputs(output, plain))
    except ValueError:
        return False
