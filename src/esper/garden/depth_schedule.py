"""A network that gets deeper while it trains, on a plan of tokens; no garden, no evaluation."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.garden.deepening import Stack, find_layers, parameters_outside
from esper.garden.depth_checks import (
    read_plan,
    refuse_foreign_state,
    require_alike,
    require_copyable,
    require_count,
    warn_of_compilations,
)
from esper.garden.joining import Optimizers, join_originals, list_optimizers, require_cover
from esper.garden.sharded_copies import copy_sharded, is_sharded, join_root
from esper.garden.shared_code import follow_compiled
from esper.garden.wrapping import find_ddps, rebuild_reducer, refuse_unfit_ddp, unwrap
from esper.kasmina.copies.copying import copy_module
from esper.kasmina.copies.membership import follow_flags, members_of
from esper.kasmina.copies.order import Tap
from esper.kasmina.probing import Example
from esper.leyline.depth_law import depth_of, token_shares
from esper.leyline.errors import HostError, OptimizerError


class DepthSchedule:
    """Deepens a network while it trains: the depth follows the tokens that it has seen.

    It is shaped like a learning-rate scheduler. Call `step` after `optimizer.step()`. A layer that
    is added is a copy of the last one (of several, each behind its original), in training mode like
    its original, and joins its optimiser without history; everything else stays bit for bit.

    The network may be plain, or inside DDP, or sharded layer by layer with `fully_shard`; with
    layers compiled by `esper.compile_layers` growing compiles nothing. In several processes create
    it on all, and call `step` with the same number on all.

    Args:
        model: the network, or what wraps it.
        optimizers: one optimiser or a list; each parameter of a copy joins the one that holds its
            original. None: call `attach` before the first step.
        layers: name of the `nn.ModuleList` or `nn.Sequential`, as in "model.layers".
        to: how many layers the network ends with.
        total: tokens of the whole run, over all processes.
        plan: shares of `total` at which depths begin: `{3: 0.3, 4: 0.6}`. Without it the law
            decides: depth grows as the cube root of the compute spent, counted by parameters.
        example: one batch. With it, it is proven that the network runs longer lists in order.

    Raises:
        HostError: the layers are not alike, or the network cannot have more of them.
        OptimizerError: a parameter of the layers that learns is in no optimiser.
        SettingError: `to`, `total` or `plan` make no sense.
        UnknownNameError: the model has no such list.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> depth = esper.DepthSchedule(
        ...     model, optimizer, layers="", to=4, total=100, plan={3: 0.3, 4: 0.6}
        ... )
        >>> for step in range(10):
        ...     loss = model(torch.ones(10, 4)).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     if depth.step(tokens=10):
        ...         print(depth.tokens, "tokens:", depth.depth, "layers")
        30 tokens: 3 layers
        60 tokens: 4 layers
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers | None,
        *,
        layers: str,
        to: int,
        total: int,
        plan: Mapping[int, float] | None = None,
        example: Example | None = None,
    ):
        self.model = model
        wrapped = unwrap(model)
        self._network = wrapped.network
        self._path = find_layers(self._network, layers)
        members = self._members()
        self.start = len(members)
        """layers that the network began with"""
        self.to = require_count("to", to, self.start, f"{layers or 'the model'} has")
        self.total = require_count("total", total, 1, "at least")
        named = [(self._name_of(number), member) for number, member in enumerate(members)]
        require_alike(named)
        require_copyable(named)
        self.has_plan = plan is not None
        """whether the caller gave the shares, and not the law"""
        self.shares = self._law() if plan is None else read_plan(plan, self.start, self.to)
        """depth -> share of the tokens at which it begins"""
        self.tokens = 0
        """tokens seen"""
        self.grown: list[int] = []
        """the depths so far, in order, without the first"""
        self._followers: list[nn.Module] = []
        self._unproven: list[Unproven] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        if optimizers is not None:
            self.attach(optimizers)
        for ddp in wrapped.ddps:
            refuse_unfit_ddp(ddp)
        self._try_out(example)
        warn_of_compilations(wrapped, len(self.shares), layers)

    @property
    def depth(self) -> int:
        """How many layers the network has now."""
        return len(self._members())

    def attach(self, optimizers: Optimizers) -> None:
        """Say which optimisers train the network, where it was built before them."""
        listed = list_optimizers(optimizers)
        self._require_cover(listed)
        self.optimizers = listed

    def follow(self, average: nn.Module) -> None:
        """Let an average of the network become deeper with it.

        That is a `torch.optim.swa_utils.AveragedModel`, or any network of the same build. Its
        copies are copies of its own layers.
        """
        network = average.module if isinstance(average, AveragedModel) else unwrap(average).network
        find_layers(network, self._path)
        count = len(members_of(network.get_submodule(self._path)))
        if count != self.depth:
            raise HostError(
                f"this average has {count} layers and the network {self.depth}; make it from the "
                f"network as it is now."
            )
        self._followers.append(network)

    def step(self, tokens: int) -> bool:
        """Count the tokens of one optimiser step, over all processes; deepen where the plan says.

        Call it on all processes, after `optimizer.step()`.

        Returns:
            Whether the network has just become deeper.
        """
        count = require_count("tokens", tokens, 0, "at least")
        if not self.optimizers:
            raise OptimizerError("this schedule knows no optimiser yet; call attach(optimizers).")
        self._prove_copies_ran()
        seen = self.tokens + count
        due = depth_of(seen, self.total, self.start, self.shares)
        is_due = due > self.depth
        if is_due:
            self._grow(due)
        self.tokens = seen
        return is_due

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs; plain numbers, so JSON will do."""
        return {
            "tokens": self.tokens,
            "start": self.start,
            "to": self.to,
            "total": self.total,
            "has_plan": self.has_plan,
            "shares": [[depth, share] for depth, share in self.shares.items()],
            "grown": list(self.grown),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a plan: the network gets the depth that it had, with any weights.

        Call it before the weights and the optimisers' states are loaded. The network must have the
        depth that it began with; a network that has the saved depth already keeps it.
        """
        refuse_foreign_state(state, self.state_dict(), self.depth)
        for depth in state["grown"]:
            if depth > self.depth:
                self._grow(depth)
        self.grown = list(state["grown"])
        self.start = state["start"]
        self.shares = {depth: share for depth, share in state["shares"]}  # noqa: C416
        self.tokens = state["tokens"]
        self._unproven = []

    # -- growing -----------------------------------------------------------------------------------

    @torch.inference_mode(mode=False)  # what is made here is trained later
    def _grow(self, depth: int) -> None:
        """Make the network this deep, and all that follows it; on failure all is as before."""
        if self.optimizers:
            self._require_cover(self.optimizers)
        ddps = find_ddps(unwrap(self.model), self._network.get_submodule(self._path))
        for ddp in ddps:
            refuse_unfit_ddp(ddp)
        old = self._members()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        with ExitStack() as undo:
            for group in groups:
                undo.callback(group.update, dict(group, params=list(group["params"])))
            for ddp in ddps:
                undo.callback(rebuild_reducer, ddp)
            for network in (self._network, *self._followers):
                members = members_of(network.get_submodule(self._path))
                stack = Stack(network, self._path, members, make=_copier(network))
                layout = stack.grow(depth, None)
                undo.push(stack.undo)
                for member in layout:
                    join_root(network, member.module)
                if network is self._network:
                    join_originals(self.optimizers, network, layout, old)
                    originals = {id(member) for member in old}
                    self._unproven = [
                        Unproven(member.module, old[member.source])
                        for member in layout
                        if id(member.module) not in originals
                    ]
            for ddp in ddps:
                rebuild_reducer(ddp)
            undo.pop_all()
        self.grown.append(depth)

    def _try_out(self, example: Example | None) -> None:
        """Let the network have its longer lists for a moment, without copies, or refuse it."""
        depths = sorted(self.shares)
        for depth in dict.fromkeys([*depths[:1], *depths[-1:]]):
            stack = Stack(self._network, self._path, self._members(), make=Tap)
            stack.try_out(depth, example)

    def _prove_copies_ran(self) -> None:
        """Refuse copies that got no gradient while their originals got one."""
        pending: list[Unproven] = []
        for pair in self._unproven:
            if not pair.has_original_run():
                pending.append(pair)
            elif all(parameter.grad is None for parameter in pair.copied.parameters()):
                members = self._members()
                number = next(n for n, member in enumerate(members) if member is pair.copied)
                raise HostError(
                    f"{self._name_of(number)} got no gradient: the network goes through "
                    f"{self._path} by a number or a list of its own. Loop over the list itself."
                )
        self._unproven = pending

    # -- what there is -----------------------------------------------------------------------------

    def _members(self) -> list[nn.Module]:
        return members_of(self._network.get_submodule(self._path))

    def _name_of(self, number: int) -> str:
        key = list(self._network.get_submodule(self._path)._modules)[number]
        return f"{self._path}.{key}".lstrip(".")

    def _require_cover(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        members = self._members()
        named = [(self._name_of(number), member) for number, member in enumerate(members)]
        require_cover(optimizers, named, parameters_outside(self._network, members))

    def _law(self) -> dict[int, float]:
        """The law's shares of tokens; a token costs what it is multiplied with."""
        members = self._members()
        sizes = {id(p): p.numel() for member in members for p in member.parameters()}
        rest = {id(p): p.numel() for p in self._network.parameters() if id(p) not in sizes}
        looked_up: set[int] = set()
        multiplied: set[int] = set()
        for module in self._network.modules():
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            held = looked_up if is_table else multiplied
            held.update(id(parameter) for parameter in module.parameters(recurse=False))
        for parameter in looked_up - multiplied:
            rest.pop(parameter, None)
        layer = sum(sizes.values()) / self.start
        return token_shares(self.start, self.to, layer, sum(rest.values()))


class Unproven:
    """A copy of which no step has shown yet that the network runs it, and its original."""

    def __init__(self, copied: nn.Module, original: nn.Module):
        self.copied = copied
        self.original = original
        self.seen: list[tuple[Any, int]] = []
        """the original's gradients when it was copied, weakly, and their versions"""
        for parameter in original.parameters():
            grad = parameter.grad
            self.seen.append((lambda: None, 0) if grad is None else (ref(grad), grad._version))

    def has_original_run(self) -> bool:
        """Whether the original has got gradients since then that are still there."""
        for parameter, (old, version) in zip(self.original.parameters(), self.seen, strict=True):
            grad = parameter.grad
            if grad is not None and (old() is not grad or grad._version != version):
                return True
        return False


def _copier(network: nn.Module) -> Any:
    """What makes the copy of a layer of a network; it is sharded and compiled as its original."""

    def make(original: nn.Module) -> nn.Module:
        if is_sharded(original):
            copied = copy_sharded(original, network)
        else:
            copied, _ = copy_module(original, network)
        for new, parameter in zip(copied.parameters(), original.parameters(), strict=True):
            new.requires_grad_(parameter.requires_grad)
        follow_flags(original, copied)
        follow_compiled(original, copied)
        return copied

    return make
