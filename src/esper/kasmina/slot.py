"""One place in a network where seeds grow: its modules and its forward pass.

The rules of a seed's life are in `leyline.lifecycle`.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import AnySeed, BlueprintCost, Shape, channels_of
from esper.kasmina.copies.eligibility import Inheritance
from esper.kasmina.plain import hook_before_recorders
from esper.kasmina.unseen import stop_watching
from esper.leyline.errors import HostError
from esper.leyline.lifecycle import SeedState
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.stages import SeedStage

# Part of the name of a key in every state dict with seeds. A network without those seeds reports
# the key as unexpected, and the name says how to load the state.
NOTE = "grew here: write it with garden.save(folder), read it with esper.load(folder, model)"
_SIZE = "_grown_parameters"  # Where a seed's size is kept, in itself.
_IN_OUTPUT = (SeedStage.BLENDING, SeedStage.PROBATIONARY)


@dataclass(frozen=True)
class SlotContents:
    """All that grew in a slot, and what is known of it; modules are held by reference.

    Snapshots, saved gardens and stored hosts all keep this record. The default is an empty slot.
    """

    fossils: tuple[nn.Module, ...] = ()
    fossil_names: tuple[str, ...] = ()
    built_in: int = 0
    seed: AnySeed | None = None
    state: SeedState = field(default_factory=SeedState)
    gradient_ratio: float | None = None
    gradient_norm: float | None = None
    greedy_score: float | None = None


class SeedSlot(nn.Module):
    """Fossils in the order they were made, then the live seed.

    An empty slot returns its input untouched. The forward pass branches on structure only: which
    modules exist, and whether the seed is in the output. Alpha is a tensor, so a compiled or
    captured network follows a ramp without being rebuilt.
    """

    alpha: Tensor

    def __init__(
        self, slot_id: str, kind: str, feature_shape: Shape, like: Tensor, inheritance: Inheritance
    ):
        super().__init__()
        self.slot_id = slot_id
        self.kind = kind
        self.feature_shape = tuple(feature_shape)
        self.fossils = nn.ModuleList()
        self.fossil_names: list[str] = []
        # how many fossils, from the first on, were built in before the first step: they did not
        # grow
        self.built_in = 0
        # numbers of fossils that are switched off, to measure the network without them
        self.left_out: tuple[int, ...] = ()
        # what copies of the module here can be
        self.inheritance = inheritance
        # by blueprint and whether it is gated
        self.prices: dict[tuple[str, bool], BlueprintCost] = {}
        # size of the module for which copies were priced last
        self.copied_params = -1
        self.seed: AnySeed | None
        self.register_module("seed", None)
        # it follows the stage, so it is in no state dict: earlier weights leave it alone
        alpha = torch.ones((), device=like.device, dtype=like.dtype)
        self.register_buffer("alpha", alpha, persistent=False)
        self.state = SeedState()
        # whether the seed's output is blended in
        self.is_in_output = False
        # whether the seed is fully in, whatever its stage
        self.is_shadowed = False
        # passes with gradients since the last step of a garden; compiled ones are not counted
        self.passes = 0
        # whether state dicts carry the note
        self.is_noted = False
        self.gradient_ratio: float | None = None
        self.gradient_norm: float | None = None
        self.greedy_score: float | None = None

    @property
    def channels(self) -> int:
        """Channels of the features here."""
        return channels_of(self.kind, self.feature_shape)

    def forward(self, features: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        """Run the fossils and the live seed on what the host's module returned.

        `args` and `kwargs` are what else that module was called with: a copy of it needs them.
        """
        for number, fossil in enumerate(self.fossils):
            if number not in self.left_out:
                features = fossil(features, *args, **kwargs)
        if self.seed is None:
            return features
        if self.is_shadowed:
            return self.seed(features, *args, **kwargs)
        if not self.is_in_output:
            return features
        return self.seed.blend(features, self.alpha, *args, **kwargs)

    def hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Run the slot after the forward pass of the host's module."""
        is_empty = self.seed is None and not len(self.fossils)
        if not isinstance(output, Tensor) and (self.training or not is_empty):
            self._refuse_output(module, output)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.set_plain(passes=self.passes + 1)
        if is_empty:
            return output
        if output.is_nested:
            raise HostError(
                f"slot {self.slot_id} got a nested tensor; build its host with "
                f"enable_nested_tensor=False."
            )
        return self(output, *args[1:], **kwargs)

    def _refuse_output(self, module: nn.Module, output: object) -> NoReturn:
        """Say that a seed cannot read this: a tensor came when the slot was made."""
        mode = "training" if self.training else "evaluation"
        raise HostError(
            f"slot {self.slot_id} sits on a {type(module).__name__} that returned a tensor to "
            f"esper.grow and now, in {mode} mode, a {type(output).__name__}. Let it return a "
            f"tensor in both modes, or name a module inside it as the slot."
        )

    def sit_on(self, site: nn.Module) -> None:
        """Run after a module of the host.

        The module's state cannot be loaded without what grew there.
        """
        hook_before_recorders(site, self.hook)
        site.register_state_dict_post_hook(partial(_note_growth, self))
        site.register_load_state_dict_pre_hook(partial(_take_note, self))

    def require_on(self, module: nn.Module, name: str) -> None:
        """Refuse a module, found at `name`, that does not run this slot: it was put there later."""
        if self.hook not in module._forward_hooks.values():
            raise HostError(
                f"another {type(module).__name__} stands at {name!r} since this model grows, so "
                f"slot {self.slot_id} does not run any more. Put the old module back; replace a "
                f"module before you call esper.grow."
            )

    @property
    def note(self) -> str:
        """The key that says what grew here; empty if nothing did."""
        grown = list(self.fossil_names)
        if self.seed is not None:
            grown.append(str(self.state.blueprint_id))
        return f"[{', '.join(grown)} {NOTE}]" if grown else ""

    def set_plain(self, **values: Any) -> None:
        """Set attributes that are neither modules nor tensors.

        `nn.Module.__setattr__` looks through all registries first, which is slow for what every
        slot of every host sets once per epoch.
        """
        vars(self).update(values)

    def assign(self, state: SeedState) -> None:
        """Take over a state: alpha and the seed's place in the output follow.

        Without a seed alpha is 1: what was captured or compiled for a seed at full strength is
        right when it is kept.
        """
        self.set_plain(state=state, is_in_output=state.stage in _IN_OUTPUT)
        self.alpha.fill_(1.0 if self.seed is None else state.alpha)

    def contents(self) -> SlotContents:
        """All that grew here, and what is known of it; `take` puts it back."""
        return SlotContents(
            fossils=tuple(self.fossils),
            fossil_names=tuple(self.fossil_names),
            built_in=self.built_in,
            seed=self.seed,
            state=self.state,
            gradient_ratio=self.gradient_ratio,
            gradient_norm=self.gradient_norm,
            greedy_score=self.greedy_score,
        )

    def take(self, contents: SlotContents) -> None:
        """Hold these contents in place of the present ones; optimisers are not asked."""
        self.fossils = nn.ModuleList(contents.fossils)
        self.fossil_names = list(contents.fossil_names)
        self.built_in = contents.built_in
        self.seed = contents.seed
        self.assign(contents.state)
        self.gradient_ratio = contents.gradient_ratio
        self.gradient_norm = contents.gradient_norm
        self.greedy_score = contents.greedy_score

    def plant(self, seed: AnySeed, state: SeedState) -> None:
        """Let a seed live here; nothing has been read off its gradients yet."""
        self.seed = seed
        self._clear_gradient_readings()
        self.assign(state)

    def uproot(self) -> AnySeed:
        """Take the live seed out; what remains is the host and its fossils, bit for bit."""
        assert self.seed is not None
        seed = self.seed
        self.seed = None
        self._clear_gradient_readings()
        return seed

    def petrify(self) -> AnySeed:
        """Make the live seed, gate included, part of the host."""
        seed = self.uproot()
        self.fossils.append(seed)
        self.fossil_names.append(str(self.state.blueprint_id))
        return seed

    def _clear_gradient_readings(self) -> None:
        self.gradient_ratio = None
        self.gradient_norm = None

    def report(self, host_param_count: int) -> SeedStateReport:
        """What policies, screens and logs see of this slot."""
        state = self.state
        gain = state.contribution
        metrics = SeedMetrics(
            counterfactual_contribution=None if gain is None else gain.mean,
            counterfactual_standard_error=None if gain is None else gain.standard_error,
            seed_gradient_norm_ratio=self.gradient_ratio,
            seed_gradient_norm=self.gradient_norm,
            greedy_score=self.greedy_score,
            seed_param_count=seed_size(self.seed),
            host_param_count=host_param_count,
        )
        return SeedStateReport(
            slot_id=self.slot_id,
            stage=state.stage,
            epochs_in_stage=state.epochs_in_stage,
            seed_age_epochs=state.age,
            alpha=state.alpha,
            blueprint_id=state.blueprint_id,
            blend_algorithm_id=state.blend_id,
            fossil_count=len(self.fossils),
            kind=self.kind,
            feature_shape=self.feature_shape,
            metrics=metrics,
            gates=state.gates,
        )


def _note_growth(
    slot: SeedSlot, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Add the slot's note to a state dict that is being written."""
    if slot.is_noted and slot.note:
        # not empty: empty tensors would count as tied, and be left out
        state[prefix + slot.note] = slot.alpha.new_zeros(1)


def _take_note(
    slot: SeedSlot,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *unused: Any,
) -> None:
    """Take the slot's note out of a state dict that is being loaded.

    The state of a bare host has none of the slot's weights, so its note counts as missing.
    """
    state.pop(f"{prefix}{slot.note}", None)
    is_bare = "host." not in prefix
    if slot.is_noted and slot.note and is_bare:
        missing_keys.append(prefix + slot.note)


def bare(module: nn.Module) -> nn.Module:
    """A module without what `torch.compile` put around it."""
    return getattr(module, "_orig_mod", module)


def has_slots(host: nn.Module) -> bool:
    """Whether slots sit on this host already."""
    return any(slots_on(module) for module in host.modules())


def slots_on(module: nn.Module) -> list[SeedSlot]:
    """The slots that sit on this module itself."""
    owners = [_owner_of(hook) for hook in module._forward_hooks.values()]
    return [owner for owner in owners if isinstance(owner, SeedSlot)]


def remove_slots(host: nn.Module, *, runs: bool = True) -> None:
    """Take every slot's hooks off a host; with `runs=False` it still runs them."""
    stop_watching(host)
    for module in host.modules():
        tables: list[dict[int, Any]] = [module._state_dict_hooks, module._load_state_dict_pre_hooks]
        if runs:
            tables.append(module._forward_hooks)
        for hooks in tables:
            own = [key for key, hook in hooks.items() if isinstance(_owner_of(hook), SeedSlot)]
            for key in own:
                del hooks[key]


def _owner_of(hook: Any) -> Any:
    """Whose method a hook is, or the first argument that it is bound to; None without either."""
    hook = getattr(hook, "hook", hook)  # as torch wraps what is called before loading
    owner = getattr(hook, "__self__", None)
    return next(iter(getattr(hook, "args", ())), None) if owner is None else owner


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
    """Number of parameters, each counted once; 0 without a module."""
    if module is None:
        return 0
    return sum(parameter.numel() for parameter in module.parameters())
