"""A host with slots:

what can be done to it, what it reports, what it costs. Training and deciding happen elsewhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina import fitting
from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, AnySeed
from esper.kasmina.copies.copying import Copy, Site, copied_next
from esper.kasmina.copies.membership import source_name
from esper.kasmina.copies.originals import pair_originals
from esper.kasmina.evidence import gradient_norm, gradient_ratio, measure_pairs
from esper.kasmina.optimiser import OptimizerLink, link_optimizers
from esper.kasmina.probing import batch_size, buffers_kept
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import SeedSlot, count_parameters, remove_slots, seed_size
from esper.leyline.errors import MeasurementError, OptimizerError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    ActionSpace,
    Choice,
    look_up,
)
from esper.leyline.gates import Measurement, optimizer_gate
from esper.leyline.legality import GrowthView, require
from esper.leyline.lifecycle import SeedState, germinate, tick
from esper.leyline.reports import SeedStateReport
from esper.leyline.settings import GrowthSettings, SlotChange
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import LIVE_STAGES, SeedStage


class MorphogeneticModel(nn.Module):
    """A host that can grow.

    Called like the host, and equal to it to the bit while nothing is planted.
    """

    def __init__(
        self,
        host: nn.Module,
        slots: SlotConfig | None = None,
        *,
        example: fitting.Given = None,
        blueprints: Sequence[str] | None = None,
        max_seeds: int | None = None,
        budget: int | None = None,
        settings: GrowthSettings | None = None,
    ):
        super().__init__()
        self.host = host
        self.host_params = count_parameters(host)
        self.settings = settings or GrowthSettings()
        self.slot_config = fitting.complete_slots(host, slots)
        slots_of = fitting.build_slots(
            host, self.slot_config, example, self.settings.kinds, blueprints or ()
        )
        self.slots = nn.ModuleDict(slots_of)
        self._listed = [slots_of[slot_id] for slot_id in self.slot_config.slot_ids]
        names = tuple(blueprints or REGISTRY.defaults_for(slot.kind for slot in self._ordered()))
        self.space = ActionSpace.of(self.slot_config, names, self.settings.blends)
        self.costs = fitting.price_list(
            self._ordered(), self.space, {s: self.site_of(s) for s in slots_of}
        )
        fitting.refuse_limits(max_seeds, budget, self.host_params, self.costs)
        self.max_seeds, self.budget = max_seeds and int(max_seeds), budget
        self.link: OptimizerLink | None = None
        self.births = self.shadow_passes = 0
        self.examples = {"training": 0, "shadow": 0}
        """learned from since whoever keeps the books last looked; calls of a compiled network are
        not counted
        """
        self._clipped_norms: list[Tensor | None] | None = None
        """norms before `clip_gradients`, for the step that follows"""
        self._gradient_sums: Tensor | None = None
        for slot in self._ordered():
            slot.sit_on(self.site(slot.slot_id))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            phase = "shadow" if any(slot.is_shadowed for slot in self._ordered()) else "training"
            self.examples[phase] += batch_size((*args, *kwargs.values()))
        return self.host(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What this wrapper does not have, the host may: `model.config`, `model.generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            return getattr(self.host, name)

    def germinate_seed(
        self,
        slot_id: str,
        blueprint_id: str | None,
        blend_id: str = "linear",
        *,
        view: GrowthView | None = None,
    ) -> SlotChange:
        """Plant a newborn seed.

        Refused with the model as before if anything about it does not fit. `view` is the model as
        it stands, for a caller that has it already.
        """
        is_incubated = self.settings.lengths.training > 0
        scale = 0.0 if is_incubated else self.settings.scale_at_birth
        return self._plant(slot_id, blueprint_id, blend_id, scale, view)

    def _plant(
        self,
        slot_id: str,
        blueprint_id: str | None,
        blend_id: str,
        scale: float,
        view: GrowthView | None = None,
    ) -> SlotChange:
        slot = self._permit(OP_GERMINATE, slot_id, blueprint_id, blend_id, view)
        assert blueprint_id is not None  # no price list has a seed without one
        with own_randomness(self.settings.seed, self.births):
            seed = self.build_seed(slot_id, blueprint_id, blend_id == "gated", scale)
            probe = torch.randn(2, *slot.feature_shape)
        fitting.refuse_mispriced(seed, blueprint_id, self.costs[slot_id, blueprint_id, blend_id])
        evidence = fitting.judge_newborn(
            slot, seed, probe.to(slot.alpha), blueprint_id, is_zero=scale == 0.0
        )
        self.births += 1
        self._gradient_sums = None
        before = slot.state
        if self.link is not None:
            self.link.adopt(slot_id, seed.parameters(), self._originals(slot_id, seed))
        slot.plant(seed, germinate(blueprint_id, blend_id).judged(evidence))
        return SlotChange(slot_id, before, slot.state)

    def build_seed(
        self, slot_id: str, blueprint_id: str, gated: bool, scale: float = 0.0
    ) -> AnySeed:
        """A newborn seed of this slot, on its device; nothing is planted."""
        slot = self.slot(slot_id)
        blueprint = REGISTRY.get(slot.kind, blueprint_id)
        site = self.site_of(slot_id) if blueprint.inherits else None
        seed = blueprint.build_seed(slot.feature_shape, scale=scale, gated=gated, site=site)
        remove_slots(seed)
        if (blueprint_id, gated) not in slot.prices:  # of a save whose blends were others
            slot.prices[blueprint_id, gated] = fitting.price(
                slot, blueprint_id, gated, self.site_of(slot_id)
            )
        own = next(filter(Tensor.is_floating_point, self.host.parameters()), slot.alpha)
        # the weights' type: features are shorter where a model opens autocast itself
        like = slot.alpha.to(max(own.dtype, slot.alpha.dtype, key=lambda kind: kind.itemsize))
        if isinstance(
            seed, Copy
        ):  # as its original, which need not have the features' type; the gate has no original
            if seed.gate is not None:
                seed.gate.to(like)
            return seed
        return seed.to(like)

    def _originals(self, slot_id: str, seed: nn.Module | None) -> dict[nn.Parameter, nn.Parameter]:
        """Whose optimiser settings each parameter of a copy inherits; empty for any other seed."""
        if not isinstance(seed, Copy):
            return {}
        return pair_originals(seed, self.source(slot_id))

    def cull_seed(
        self, slot_id: str, *, at_any_age: bool = False, view: GrowthView | None = None
    ) -> SlotChange:
        """Remove the live seed; the function is the host's with this slot empty, to the bit."""
        # whoever has to bring a broken network back cannot wait for a seed to grow old enough
        slot = self.slot(slot_id) if at_any_age else self._permit(OP_CULL, slot_id, view=view)
        return self._settle(slot, slot.state.advance(SeedStage.CULLED))

    def fossilize_seed(self, slot_id: str, *, view: GrowthView | None = None) -> SlotChange:
        """Keep the live seed for good; the output does not change, the slot opens on the next
        tick.
        """
        slot = self._permit(OP_FOSSILIZE, slot_id, view=view)
        return self._settle(slot, slot.state.advance(SeedStage.FOSSILIZED))

    def build_in(self, slot_id: str, blueprint_id: str, blend_id: str = "linear") -> None:
        """Make a fossil at once:

        part of the host from the first step on, as in a net of fixed size.
        """
        is_gated = blend_id == "gated"  # all that is left of a way to blend when a seed is kept
        blend_id = next(
            (blend for blend in self.space.blends if (blend == "gated") == is_gated), blend_id
        )
        self._plant(slot_id, blueprint_id, blend_id, self.settings.scale_at_birth)
        slot = self.slot(slot_id)
        self._settle(slot, SeedState(SeedStage.FOSSILIZED))
        slot.assign(SeedState())
        slot.built_in = len(slot.fossils)

    def remove_fossil(self, slot_id: str, number: int) -> None:
        """Take a fossil out of network and optimiser; the slot and its live seed stay as they
        are.
        """
        slot = self.slot(slot_id)
        fossil = slot.fossils.pop(number)
        del slot.fossil_names[number]
        self._gradient_sums = None  # they are of another structure
        if self.link is not None:
            self.link.release(fossil.parameters())

    def act(self, choice: Choice, view: GrowthView | None = None) -> list[SlotChange]:
        """Carry out one decision: indices of op, slot, blueprint and blend.

        WAIT changes nothing. `view` is the model as it stands, for a caller that has it already:
        whether the op is legal is judged by it, and no other is built.
        """
        op, (_, slot_id, blueprint_id, blend_id) = choice[0], look_up(self.space, *choice)
        if op == OP_CULL:
            return [self.cull_seed(slot_id, view=view)]
        if op == OP_FOSSILIZE:
            return [self.fossilize_seed(slot_id, view=view)]
        if op != OP_GERMINATE:
            return []
        changes = [self.germinate_seed(slot_id, blueprint_id, blend_id, view=view)]
        slot = self.slot(slot_id)
        if not self.settings.lengths.ramp:  # kept at once, and the slot is open for the next one
            ends = (SeedStage.FOSSILIZED, SeedStage.DORMANT)
            changes += [self._settle(slot, slot.state.advance(stage)) for stage in ends]
        return changes

    def tick(self) -> list[SlotChange]:
        """Between two epochs:

        stages that are over end, ramps take a step. Returns what changed stage.
        """
        self._require_owned()
        changes = [
            self._settle(slot, tick(slot.state, self.settings.lengths)) for slot in self._ordered()
        ]
        return [change for change in changes if change.before.stage is not change.after.stage]

    def _permit(
        self,
        op: int,
        slot_id: str,
        blueprint_id: str | None = None,
        blend_id: str | None = None,
        view: GrowthView | None = None,
    ) -> SeedSlot:
        """The slot, if the op is legal there now; otherwise the refusal is raised."""
        slot = self.slot(slot_id)
        self.space.blueprint_index(blueprint_id)
        blend_id = (
            self.space.blends[0]
            if blend_id is None
            else self.space.blends[self.space.blend_index(blend_id)]
        )
        require(op, slot_id, blueprint_id, blend_id, self.view() if view is None else view)
        return slot

    def _settle(self, slot: SeedSlot, after: SeedState) -> SlotChange:
        """Move modules and parameters to where `after` says they are."""
        before = slot.state
        if (
            after is before
        ):  # nothing grows here; to write alpha again would take longer than all the rest on a GPU
            return SlotChange(slot.slot_id, before, after)
        if after.stage is not before.stage and after.stage in (
            SeedStage.CULLED,
            SeedStage.FOSSILIZED,
        ):
            is_kept = after.stage is SeedStage.FOSSILIZED
            seed = slot.petrify() if is_kept else slot.uproot()
            self._gradient_sums = None  # they are of another structure
            if self.link is not None and is_kept:
                self.link.commit(slot.slot_id)
            elif self.link is not None:
                self.link.release(seed.parameters())
        slot.assign(after)
        return SlotChange(slot.slot_id, before, after)

    def _require_owned(self) -> None:
        planted = [slot for slot in self._ordered() if slot.seed is not None]
        owned = self.link.owners() if planted and self.link is not None else {}
        for slot in planted:
            assert slot.seed is not None
            orphans = sum(id(parameter) not in owned for parameter in slot.seed.parameters())
            slot.assign(slot.state.judged(optimizer_gate(orphans)))
            if orphans:
                rule = (
                    "are in no optimiser, so it would never learn. Call "
                    "attach(optimizer) before the first epoch."
                )
                seed = f"the {slot.state.blueprint_id} seed in slot {slot.slot_id}"
                raise OptimizerError(f"{orphans} parameters of {seed} {rule}")

    def record_counterfactual(
        self, slot_id: str, with_slot: Tensor, without_slot: Tensor
    ) -> Measurement:
        """Take held-out losses of the same examples, with a seed and without it, while it trains or
        is on probation.
        """
        slot = self.slot(slot_id)
        takes = {
            SeedStage.TRAINING: slot.state.incubated,
            SeedStage.PROBATIONARY: slot.state.measured,
        }
        if (stage := slot.state.stage) not in takes:
            rule = (
                f"evidence is about a seed that is "
                f"{' or '.join(s.name for s in takes)}. Measure it when it is."
            )
            raise MeasurementError(f"slot {slot_id} is {stage.name}, and {rule}")
        slot.assign(takes[stage](gain := measure_pairs(better=with_slot, than=without_slot)))
        return gain

    def owners(self) -> list[list[nn.Parameter]]:
        """Parameters of the host (with its fossils), then those of each slot's live seed."""
        seeds = [
            [] if slot.seed is None else list(slot.seed.parameters()) for slot in self._ordered()
        ]
        live = {id(parameter) for own in seeds for parameter in own}
        return [[parameter for parameter in self.parameters() if id(parameter) not in live], *seeds]

    def clip_gradients(self, max_norm: float) -> list[Tensor | None]:
        """Clip each of `owners` apart, so that no seed shrinks the host's step; returns the norms
        before, if any.
        """
        learning = [
            [parameter for parameter in own if parameter.grad is not None] for own in self.owners()
        ]
        norms = [nn.utils.clip_grad_norm_(own, max_norm) if own else None for own in learning]
        if self.link is not None and self.link.follows_rates:
            self._clipped_norms = norms
        return norms

    def _note_gradients(self) -> None:
        """Before an optimiser's step:

        add up the norms on the device while a seed is live. Nothing is read back.
        """
        norms, self._clipped_norms = self._clipped_norms, None
        if all(slot.seed is None for slot in self._ordered()):
            return
        norms = norms or [gradient_norm(own) for own in self.owners()]
        nothing = torch.zeros(
            (), device=next((norm.device for norm in norms if norm is not None), None)
        )
        row = torch.stack([nothing if norm is None else norm.to(nothing) for norm in norms])
        row = torch.where(
            row.isfinite().all(), row, 0.0
        )  # a step that overflows is skipped, so it is no reading
        self._gradient_sums = row if self._gradient_sums is None else self._gradient_sums + row

    def read_gradients(self) -> None:
        """Take the gradients of the optimiser's steps since the last call as readings of the live
        seeds.
        """
        if self._gradient_sums is not None:
            self.record_gradients(self._gradient_sums.tolist())
        self._gradient_sums = None

    def record_gradients(
        self, norms: Sequence[float], steps: int | None = None, owners: Any = None
    ) -> None:
        """Take sums of gradient norms, in the order of `owners`, as readings; with `steps` the mean
        norm is one too.
        """
        sizes = [sum(p.numel() for p in own if p.requires_grad) for own in owners or self.owners()]
        for slot, norm, size in zip(self._ordered(), norms[1:], sizes[1:], strict=True):
            mean = norm / steps if steps and size else None
            ratio = gradient_ratio(norm, size, norms[0], sizes[0])
            slot.set_plain(gradient_norm=mean, gradient_ratio=ratio)

    @contextmanager
    def slot_off(self, slot_id: str) -> Iterator[None]:
        """The network as it would be without this slot's live seed.

        No change of structure: a compiled one stays.
        """
        slot = self.slot(slot_id)
        try:
            slot.alpha.fill_(0.0)
            yield
        finally:
            slot.assign(slot.state)

    @contextmanager
    def fossil_off(self, slot_id: str, number: int) -> Iterator[None]:
        """The network as it would be without one of this slot's fossils; several may be off at
        once.
        """
        slot = self.slot(slot_id)
        before = slot.left_out
        try:
            slot.left_out = (*before, range(len(slot.fossils))[number])
            yield
        finally:
            slot.left_out = before

    @contextmanager
    def at_full_strength(self, slot_id: str) -> Iterator[None]:
        """The network with this slot's live seed fully in, whatever its stage."""
        slot = self.slot(slot_id)
        try:
            slot.is_shadowed = slot.seed is not None
            yield
        finally:
            slot.is_shadowed = False

    @contextmanager
    def shadow(self) -> Iterator[None]:
        """All TRAINING seeds at full strength, all else frozen; buffers and random state are as
        before afterwards.
        """
        training = [slot for slot in self._ordered() if slot.state.stage is SeedStage.TRAINING]
        learning = {
            id(p) for slot in training if slot.seed is not None for p in slot.seed.parameters()
        }
        frozen = [p for p in self.parameters() if p.requires_grad and id(p) not in learning]
        devices = sorted({p.device.index for p in self.parameters() if p.device.type == "cuda"})
        try:
            with (
                own_randomness(self.settings.seed, -1 - self.shadow_passes, devices=devices),
                ExitStack() as stack,
            ):
                stack.enter_context(buffers_kept(self))
                for parameter in frozen:
                    parameter.requires_grad_(False)
                for slot in training:
                    stack.enter_context(self.at_full_strength(slot.slot_id))
                yield
        finally:
            self.shadow_passes += 1
            for parameter in frozen:
                parameter.requires_grad_(True)

    def slot(self, slot_id: str) -> SeedSlot:
        return self._listed[self.slot_config.index_for_slot_id(slot_id)]

    def site(self, slot_id: str) -> nn.Module:
        """The host's module whose output the slot sits on."""
        return self.host.get_submodule(self.slot_config.modules[slot_id])

    def site_of(self, slot_id: str) -> Site:
        """The slot's place as blueprints see it; a copy planted there copies the last one kept, or
        the source.
        """
        slot = self.slot(slot_id)
        source = copied_next(self.source(slot_id), slot.fossils)
        return Site(source, self.host, tuple(self._ordered()), slot.inheritance.zeroed)

    def source(self, slot_id: str) -> nn.Module:
        """The host's own module that copies in the slot go back to."""
        return self.host.get_submodule(source_name(self.host, self.slot_config.modules[slot_id]))

    def _ordered(self) -> list[SeedSlot]:
        return self._listed

    def get_slot_reports(self) -> dict[str, SeedStateReport]:
        host_params = self.host_params + self.fossilized_params
        return {slot.slot_id: slot.report(host_params) for slot in self._ordered()}

    def view(self) -> GrowthView:
        """What legality is judged by; the prices of copies are those of the modules as they are
        now.
        """
        if {COPY, COPY_ZERO} & set(self.space.blueprint_ids):
            self.costs.update(fitting.price_copies(self._ordered(), self.costs, self.site_of))
        reports, seeds = self.get_slot_reports(), self.active_seeds + self.fossilized_seeds
        return GrowthView(
            self.space, reports, seeds, self.max_seeds, self.total_params, self.budget, self.costs
        )

    @property
    def active_seeds(self) -> int:
        return sum(slot.state.stage in LIVE_STAGES for slot in self._ordered())

    @property
    def fossilized_seeds(self) -> int:
        return sum(len(slot.fossils) for slot in self._ordered())

    @property
    def active_params(self) -> int:
        return sum(seed_size(slot.seed) for slot in self._ordered())

    @property
    def fossilized_params(self) -> int:
        return sum(seed_size(fossil) for slot in self._ordered() for fossil in slot.fossils)

    @property
    def total_params(self) -> int:
        return self.host_params + self.fossilized_params + self.active_params

    def attach(self, optimizer: Any, **options: Any) -> OptimizerLink:
        """Let an optimiser, or each of a list, follow this network from now on; see `OptimizerLink`
        for the options.
        """
        sources = {slot_id: self.source(slot_id) for slot_id in self.slot_config.modules}
        link = link_optimizers(optimizer, self.link, self.host, sources, **options)
        if self.link is not None:
            self.link.detach()
        self.link, link.note_gradients = link, self._note_gradients
        for slot in self._ordered():
            for fossil in slot.fossils:
                link.adopt(
                    slot.slot_id,
                    fossil.parameters(),
                    self._originals(slot.slot_id, fossil),
                    is_host=True,
                )
            if slot.seed is not None:
                link.release(slot.seed.parameters())
                link.adopt(
                    slot.slot_id, slot.seed.parameters(), self._originals(slot.slot_id, slot.seed)
                )
        return link

    def __getstate__(self) -> dict[str, Any]:
        """Copies are without an optimiser: the original's one trains the original."""
        return {**super().__getstate__(), "link": None}
