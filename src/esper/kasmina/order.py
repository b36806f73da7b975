"""Whether a network runs the members of a list one after the other, so that one more can stand among them."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina.natives import locate, restack
from esper.kasmina.probing import Example, call_with, undisturbed

Reasons = dict[str, str | None]


class Tap(nn.Module):
    """Stands where a copy would stand: gives back its first argument, and is in all else what its original is."""

    def __init__(self, original: nn.Module):
        super().__init__()
        vars(self)["stands_for"] = original  # not a child: the network must not count it twice
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((*args, *kwargs.values())[0])
        return self.seen[-1]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["stands_for"].state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["stands_for"], name)


def runs_in_order(host: nn.Module, example: Example, names: Sequence[str]) -> Reasons:
    """Why a copy of each named module cannot stand behind it in its list; None if it can. The host is as before."""
    reasons: Reasons = {}
    lists: dict[tuple[str, str], dict[int, str]] = {}  # a site and its block are two ways to the same place
    for name in names:
        try:
            path, place = locate(host, name)
            lists.setdefault((path, name.rpartition(".")[0]), {})[place] = name
        except ValueError as problem:
            reasons[name] = str(problem)
    if lists:
        with undisturbed(host):
            plain = _tensors(call_with(host, example))
            for (path, _), places in lists.items():
                reasons |= _try_taps(host, example, path, places, plain)
    return {name: reasons[name] for name in names}


def _try_taps(host: nn.Module, example: Example, path: str, places: dict[int, str], plain: list[Tensor]) -> Reasons:
    members = list(enumerate(host.get_submodule(path).children()))
    taps = {place: Tap(module) for place, module in members if place in places}
    layout = [(place, each) for place, module in members for each in (module, taps.get(place)) if each is not None]
    outputs: dict[int, list[Any]] = {place: [] for place in places}
    with ExitStack() as stack:
        for place, name in places.items():
            site, note = host.get_submodule(name), outputs[place].append
            stack.enter_context(site.register_forward_hook(lambda _m, _i, output, note=note: note(output)))
        try:
            stack.enter_context(restack(host, path, layout))
            with torch.no_grad():
                output = _tensors(call_with(host.eval(), example))
        except Exception as problem:  # whatever a user's network does with a longer list
            return dict.fromkeys(places.values(), f"one more member does not work: {type(problem).__name__}: {problem}")
    pairs = list(zip(plain, output, strict=False))
    # of outputs with an entry for every layer only the first can be compared
    if not pairs or not all(torch.equal(*pair) for pair in (pairs if len(plain) == len(output) else pairs[:1])):
        return dict.fromkeys(places.values(), f"what the network does with {path} depends on how long it is")
    return {name: _judge(outputs[place], taps[place].seen) for place, name in places.items()}


def _judge(outputs: list[Any], seen: list[Any]) -> str | None:
    if len(seen) != 1 or len(outputs) != 1:
        return f"it runs {len(outputs)} times, and a member behind it would run {len(seen)} times"
    return None if seen[0] is outputs[0] else "a member behind it would not get its output as it is"


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
