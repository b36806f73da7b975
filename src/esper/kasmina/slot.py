"""One place in a network where seeds grow:

forward pass and modules. The rules are in `leyline.lifecycle`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import AnySeed, BlueprintCost, Shape, channels_of
from esper.kasmina.copies.eligibility import Inheritance
from esper.leyline.errors import HostError
from esper.leyline.lifecycle import SeedState
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.stages import SeedStage

NOTE = "grew here: write it with garden.save(folder), read it with esper.load(folder, model)"
"""in the name of a key that a state with seeds carries:

whoever loads it elsewhere is told that it is unexpected
"""
_SIZE = "_grown_parameters"  # Where a seed's size is kept, in itself.
_IN_OUTPUT = (SeedStage.BLENDING, SeedStage.PROBATIONARY)


class SeedSlot(nn.Module):
    """Fossils in the order they were made, then the live seed. Empty, it returns its input
    untouched.

    The forward pass branches on structure only (which modules exist, whether the seed is in the
    output); alpha is a tensor, so a compiled or captured network follows a ramp without being
    rebuilt.
    """

    alpha: Tensor

    def __init__(
        self, slot_id: str, kind: str, feature_shape: Shape, like: Tensor, inheritance: Inheritance
    ):
        super().__init__()
        self.slot_id, self.kind, self.feature_shape = slot_id, kind, tuple(feature_shape)
        self.fossils = nn.ModuleList()
        self.fossil_names: list[str] = []
        # how many of them, from the first on, did not grow: they were built in before the first
        # step
        self.built_in = 0
        self.left_out: tuple[int, ...] = ()
        """numbers of fossils that are switched off, to measure the network without them"""
        self.inheritance = inheritance  # what copies of the module here can be
        self.prices: dict[
            tuple[str, bool], BlueprintCost
        ] = {}  # by blueprint and whether it is gated
        self.copied_params = -1  # size of the module for which copies were priced last
        self.seed: AnySeed | None
        self.register_module("seed", None)
        self.register_buffer("alpha", torch.ones((), device=like.device, dtype=like.dtype))
        self.state = SeedState()
        self.is_in_output = self.is_shadowed = self.is_noted = False
        self.gradient_ratio: float | None = None
        self.gradient_norm: float | None = None
        self.greedy_score: float | None = None

    @property
    def channels(self) -> int:
        return channels_of(self.kind, self.feature_shape)

    def forward(self, features: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        """`args` and `kwargs` are what else the host's module was called with:

        a copy of it needs them.
        """
        for number, fossil in enumerate(self.fossils):
            if number not in self.left_out:
                features = fossil(features, *args, **kwargs)
        if self.seed is None:
            return features
        if self.is_shadowed:
            return self.seed(features, *args, **kwargs)
        return (
            self.seed.blend(features, self.alpha, *args, **kwargs)
            if self.is_in_output
            else features
        )

    def hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """What the host's module calls after its own forward."""
        if self.seed is None and not len(self.fossils):
            return output
        if output.is_nested:
            raise HostError(
                f"slot {self.slot_id} got a nested tensor; build its host with "
                f"enable_nested_tensor=False."
            )
        return self(output, *args[1:], **kwargs)

    def sit_on(self, site: nn.Module) -> None:
        """Run after a module of the host, and keep its state from being loaded without what grew
        there.
        """
        site.register_forward_hook(self.hook, with_kwargs=True)
        site.register_state_dict_post_hook(partial(_note_growth, self))
        site.register_load_state_dict_pre_hook(partial(_take_note, self))

    @property
    def note(self) -> str:
        """The key that says what grew here; empty if nothing did."""
        grown = [
            *self.fossil_names,
            *([str(self.state.blueprint_id)] if self.seed is not None else []),
        ]
        return f"[{', '.join(grown)} {NOTE}]" if grown else ""

    def assign(self, state: SeedState) -> None:
        """Take over a state: alpha and the seed's place in the output follow.

        Without a seed alpha is 1: what was captured or compiled for a seed at full strength is
        right when it is kept.
        """
        vars(self).update(
            state=state, is_in_output=state.stage in _IN_OUTPUT
        )  # a module's own way to set them is slow
        self.alpha.fill_(1.0 if self.seed is None else state.alpha)

    def plant(self, seed: AnySeed, state: SeedState) -> None:
        self.seed = seed
        self.gradient_ratio = self.gradient_norm = None
        self.assign(state)

    def uproot(self) -> AnySeed:
        """Take the live seed out; what remains is the host and its fossils, to the bit."""
        assert self.seed is not None
        seed, self.seed = self.seed, None
        self.gradient_ratio = self.gradient_norm = None
        return seed

    def petrify(self) -> AnySeed:
        """Make the live seed, gate included, part of the host."""
        seed = self.uproot()
        self.fossils.append(seed)
        self.fossil_names.append(str(self.state.blueprint_id))
        return seed

    def readings(self) -> tuple[float | None, float | None, float | None]:
        """What was last read off the live seed's gradients, and the greedy score."""
        return self.gradient_ratio, self.gradient_norm, self.greedy_score

    def report(self, host_param_count: int) -> SeedStateReport:
        state, gain = self.state, self.state.contribution
        paired: tuple[float | None, float | None] = (
            (None, None) if gain is None else (gain.mean, gain.standard_error)
        )
        metrics = SeedMetrics(*paired, *self.readings(), seed_size(self.seed), host_param_count)
        seed = (
            state.stage,
            state.epochs_in_stage,
            state.age,
            state.alpha,
            state.blueprint_id,
            state.blend_id,
        )
        place = len(self.fossils), self.kind, self.feature_shape
        return SeedStateReport(self.slot_id, *seed, *place, metrics, state.gates)


def _note_growth(
    slot: SeedSlot, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    if slot.is_noted and slot.note:
        state[prefix + slot.note] = slot.alpha.new_zeros(
            1
        )  # not empty: those would count as tied, and be left out


def _take_note(
    slot: SeedSlot, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    state.pop(f"{prefix}{slot.note}", None)  # the same grew here
    if (
        slot.is_noted and slot.note and "host." not in prefix
    ):  # the bare host's state has none of its weights
        rest[2].append(prefix + slot.note)


def has_slots(host: nn.Module) -> bool:
    """Whether somebody is growing this host already."""
    return any(
        _is_slots(hook) for module in host.modules() for hook in module._forward_hooks.values()
    )


def remove_slots(host: nn.Module, *, runs: bool = True) -> None:
    """Take every slot's hooks off a host; with `runs=False` it still runs them."""
    for module in host.modules():
        saving = [module._state_dict_hooks, module._load_state_dict_pre_hooks]
        for hooks in [*saving, module._forward_hooks] if runs else saving:
            for key in [key for key, hook in hooks.items() if _is_slots(hook)]:
                del hooks[key]


def _is_slots(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # as torch wraps what is called before loading
    return isinstance(
        getattr(hook, "__self__", None) or next(iter(getattr(hook, "args", ())), None), SeedSlot
    )


def has_gate(seed: nn.Module | None) -> bool:
    """Whether a seed or fossil blends through a learned gate."""
    return getattr(seed, "gate", None) is not None


def seed_size(seed: nn.Module | None) -> int:
    """Parameters of a seed or fossil.

    They are counted once: it keeps its size, and is asked for it often.
    """
    if seed is None:
        return 0
    if _SIZE not in vars(seed):
        vars(seed)[_SIZE] = count_parameters(seed)
    return int(vars(seed)[_SIZE])


def count_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
