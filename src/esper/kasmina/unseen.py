"""What a call of a network holds that a seed does not see: a mask, or earlier tokens in a cache.

A seed gets the features of its module and no more. Seeds that work position by position need no
more; attention does. Needs torch alone: an exported network with attention carries this file along,
and the hooks of a harvested one carry their source.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = frozenset({"input_ids", "inputs_embeds"})


def is_cache(name: str) -> bool:
    """Whether an argument of this name brings what earlier calls have left."""
    kinds = "past|past_key_values?|layer_past|caches?|cache_params|mems|past_buckets_states"
    return re.search(rf"^(?!use_)(.*_)?({kinds}|inference_params)$", name) is not None


def is_mask(name: str) -> bool:
    """Whether an argument of this name says which tokens may be looked at."""
    # masks of something else than the tokens that come in
    others = "encoder|cross|memory|head|loss|labels?|pred|output|observed|future|p"
    is_other = re.search(rf"(^|_)({others})_", name) is not None
    return re.search(r"(^|_)masks?$", name) is not None and not is_other


def names_of(module: nn.Module) -> tuple[str, ...]:
    """The arguments of a module, in their order; none where its forward does not say."""
    try:
        return tuple(signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward that is no plain function
        return ()


def looks_around(part: nn.Module) -> bool:
    """Whether a module looks at other tokens, and so must be told what it does not see.

    It is attention in a garden, and in a harvested network the module that attention grew on.
    """
    return hasattr(part, "grown_unseen")


def watch_calls(network: nn.Module, grown: Mapping[str, nn.Module] | None = None) -> None:
    """Let attention that grew in a network know what each call holds that it does not see.

    The network and each part of it that takes tokens look at their arguments; the part next to the
    attention has the last word. `grown` has what is kept outside of the network, by the name of the
    module that it comes after. Earlier watching ends.
    """
    stop_watching(network)
    if not grown and not any(map(looks_around, network.modules())):
        return
    for name, module in network.named_modules():
        names = names_of(module)
        if name and _TOKENS.isdisjoint(names):
            continue
        prefix = f"{name}." if name else ""
        inside = [part for site, part in (grown or {}).items() if f"{site}.".startswith(prefix)]
        has_grown = any(looks_around(part) for part in module.modules())
        if (inside or has_grown) and _may_hold(module):
            hook = Watch(names, not name, inside)
            module.register_forward_pre_hook(hook, with_kwargs=True)
    for module in network.modules():
        if "grown_unseen" in vars(module):
            module.register_forward_pre_hook(Refuse(), with_kwargs=True)


def stop_watching(network: nn.Module) -> None:
    """Take the hooks of `watch_calls` off a network, also those of a network that was unpickled."""
    for module in network.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if _is_watching(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_watching(hook: Any) -> bool:
    return getattr(hook, "is_watching", False) is True


def _may_hold(module: nn.Module) -> bool:
    """Whether a mask or a cache may be among the arguments of a module."""
    try:
        parameters = signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    return takes_any or any(is_cache(name) or is_mask(name) for name in names_of(module))


class Watch:
    """Forward pre-hook that notes what of a call the attention inside a module does not see.

    `names` are the module's arguments in their order, `grown` has what is kept outside of it.
    """

    is_watching = True

    def __init__(self, names: tuple[str, ...], is_outermost: bool, grown: Iterable[nn.Module] = ()):
        self.names = names
        self.is_outermost = is_outermost
        self.grown = tuple(grown)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the attention; see `note_unseen`."""
        note_unseen(self.grown, self.names, self.is_outermost, module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.names, self.is_outermost)
        return (Watch, (*arguments, self.grown)) if self.grown else _carry("Watch", arguments)


class Refuse:
    """Forward pre-hook that ends a call in which attention that grew on a module would be wrong."""

    is_watching = True

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise what the watching modules have noted."""
        if module.grown_unseen is not None:
            raise RuntimeError(module.grown_unseen)

    def __reduce__(self) -> tuple[Any, ...]:
        return _carry("Refuse", ())


def _carry(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """How pickle builds a hook again where Esper is not installed: from its source."""
    source = globals().get("SOURCE")
    if source is None:
        parts: list[Any] = [is_cache, is_mask, looks_around, Watch, Refuse, _carry, note_unseen]
        parts += [_restarts, holds_tokens, hides_tokens, _hides_nothing, is_causal]
        source = _IMPORTS + "\n\n".join(inspect.getsource(part) for part in parts)
    space = {"SOURCE": source, "ARGUMENTS": arguments, "__name__": "esper_unseen"}
    build = f"lambda space: exec(space['SOURCE'], space) or space[{name!r}](*space['ARGUMENTS'])"
    return eval, (f"({build})({space!r})",)


_IMPORTS = """import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


"""


def note_unseen(
    grown: Iterable[nn.Module],
    names: tuple[str, ...],
    is_outermost: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Tell the attention inside a module what it does not see of this call.

    A mask that only the one that it was made from can tell is left to a module further out.
    """
    problem: str | None = None
    is_sure = True
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    has_mask = any(is_mask(name) and value is not None for name, value in values.items())
    for name, value in values.items():
        if value is None or problem is not None:
            continue
        if is_cache(name) and holds_tokens(value):
            problem = (
                f"attention that grew here sees the tokens of one call only, and {name} brings "
                f"those of earlier calls. Call with use_cache=False, or grow without attention."
            )
        elif name == "position_ids" and not has_mask and _restarts(value):
            problem = (
                f"attention that grew here does not see where a new text begins in a row, as "
                f"{name} says. Pass one text a row, or grow without attention."
            )
        elif is_mask(name):
            hides = hides_tokens(name, value)
            is_sure = is_sure and hides is not None
            if hides or (hides is None and is_outermost):
                problem = (
                    f"attention that grew here does not see {name}, which hides an earlier token "
                    f"from a later one. Pad on the right, or grow without attention."
                )
    if problem is None and not is_sure:
        return
    for holder in (module, *grown):
        for part in holder.modules():
            if looks_around(part):
                part.grown_unseen = problem  # type: ignore[assignment]


def _restarts(positions: Any) -> bool:
    """Whether positions go back within a row: texts are packed, one behind the other."""
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions[:, 1:] < positions[:, :-1]).any())


def holds_tokens(cache: Any) -> bool:
    """Whether a cache has tokens of earlier calls; True where it does not say."""
    if cache is None or isinstance(cache, bool | int | float | str):
        return False
    if isinstance(cache, Tensor):
        return cache.numel() > 0
    if isinstance(cache, Mapping):
        return any(map(holds_tokens, cache.values()))
    if isinstance(cache, tuple | list):
        return any(map(holds_tokens, cache))
    has_answered = False
    for question in ("get_seq_length", "has_previous_state"):
        try:
            if getattr(cache, question)():
                return True
            has_answered = True
        except (AttributeError, ValueError):  # it has no layers of the kind that is asked about
            continue
    return not has_answered


def hides_tokens(name: str, mask: Any) -> bool | None:
    """Whether a mask hides a token from a later one that is not hidden itself.

    Attention looks back only, so padding on the right is no harm. None for a mask that was made
    from another one, which only that one can tell.
    """
    if not isinstance(mask, Tensor):
        return None
    if _hides_nothing(mask) or is_causal(mask):
        return False
    if mask.dim() > 2:
        return None
    if mask.dim() == 2 and name.endswith("key_padding_mask"):
        hidden = mask < 0 if mask.is_floating_point() else mask != 0
    elif mask.dim() == 2 and name.endswith("attention_mask"):
        hidden = mask < 0 if bool((mask < 0).any()) else mask == 0
    else:
        return True  # what its entries mean is not known
    return bool((hidden[:, :-1] & ~hidden[:, 1:]).any())


def _hides_nothing(mask: Tensor) -> bool:
    """Whether all entries of a mask are alike, so that it hides nothing."""
    return mask.numel() == 0 or bool((mask == mask.flatten()[0]).all())


def is_causal(mask: Tensor) -> bool:
    """Whether a mask hides from each token those after it, and nothing else."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    shown = mask[..., :1, :1]
    hidden = mask[..., :1, 1:2]
    return bool((shown != hidden).all()) and bool((mask == hidden.where(later, shown)).all())
