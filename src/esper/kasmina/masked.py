"""Which modules of a model have a mask or a cache, as its calls and configurations show.

What a single call holds is judged in `unseen`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from esper.kasmina.unseen import is_cache, is_causal, is_mask, names_of

Arguments = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments and keywords of a call, and what it gave."""


def find_unseen(model: nn.Module, calls: Mapping[str, Sequence[Arguments]]) -> dict[str, str]:
    """The mask or the cache of each module that has one, by the module's name; "" is the model.

    The model has one if it takes one, and a module in it if it was called with one, or keeps one by
    its configuration. A mask that only hides later tokens counts as none.
    """
    unseen: dict[str, str] = {}
    for name in names_of(model):
        if is_cache(name) or is_mask(name):
            unseen.setdefault("", name)
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True or getattr(config, "is_decoder", False):
            unseen.setdefault(path, "use_cache")
    for path, module_calls in calls.items():
        names = names_of(model.get_submodule(path))
        for args, kwargs, _ in module_calls:
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                has_cache = is_cache(name) and not isinstance(value, bool | int | str)
                has_mask = is_mask(name) and not (isinstance(value, Tensor) and is_causal(value))
                if value is not None and (has_cache or has_mask):
                    unseen.setdefault(path, name)
    return unseen


def around(name: str) -> Iterator[str]:
    """A module's name and those of the modules around it; the last one, "", is the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
