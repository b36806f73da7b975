"""A host with slots: what can be done to it, what it reports, what it costs.

Training and deciding happen elsewhere. How parts are switched off and on for a measurement is in
`switches`, what gradients say is in `readings`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina import fitting, readings, switches
from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, AnySeed
from esper.kasmina.copies.copying import Copy, Site, copied_next
from esper.kasmina.copies.membership import source_name
from esper.kasmina.copies.originals import pair_originals
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.newborns import (
    build_newborn,
    judge_newborn,
    refuse_mispriced,
    require_optimizer,
)
from esper.kasmina.optimiser import OptimizerLink, link_optimizers
from esper.kasmina.probing import batch_size
from esper.kasmina.proving import Batch, keep_first_batch
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import SeedSlot, bare, count_parameters, seed_size
from esper.kasmina.unseen import watch_calls
from esper.leyline.errors import UnknownNameError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    ActionSpace,
    Choice,
    look_up,
)
from esper.leyline.gates import Measurement
from esper.leyline.legality import GrowthView, require
from esper.leyline.lifecycle import SeedState, germinate, tick
from esper.leyline.registry import in_order
from esper.leyline.reports import SeedStateReport
from esper.leyline.settings import GrowthSettings, SlotChange
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import LIVE_STAGES, SeedStage


class MorphogeneticModel(nn.Module):
    """A host that can grow, called like the host.

    While nothing is planted it computes what the host computes, bit for bit. A garden
    (`esper.grow`) wraps a model of yours in it; a policy, or you, then plant seeds in its slots.

    Args:
        host: the network that grows. It gets hooks, and is otherwise left as it is.
        slots: which modules seeds may follow; a host that names its slots itself needs none.
        example: one batch, from which the shapes inside the host are read.
        blueprints: names of what may be planted; by default all that suit the slots' features.
        max_seeds: most live seeds and fossils together; None is no limit.
        budget: most parameters of the whole network; None is no limit.
        settings: how seeds are raised.

    >>> import torch
    >>> import esper
    >>> from esper.leyline.slots import SlotConfig
    >>> host = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> slots = SlotConfig.for_modules(["0"])
    >>> batch = torch.zeros(2, 4)
    >>> model = esper.MorphogeneticModel(host, slots, example=batch, blueprints=["mlp"])
    >>> link = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> planted = model.germinate_seed("r0c0", "mlp")
    >>> planted.after.stage.name, model.host_params, model.active_params
    ('GERMINATED', 58, 568)
    >>> [change.after.stage.name for change in model.tick()]
    ['BLENDING']
    """

    def __init__(
        self,
        host: nn.Module,
        slots: SlotConfig | None = None,
        *,
        example: fitting.ShapeSource = None,
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
        slot_by_id = fitting.build_slots(
            host, self.slot_config, example, self.settings.kinds, blueprints or ()
        )
        self.slots = nn.ModuleDict(slot_by_id)
        self._slot_by_id = dict(slot_by_id)
        # in the order in which the host runs them
        self.ordered_slots = [slot_by_id[slot_id] for slot_id in self.slot_config.slot_ids]
        kinds = [slot.kind for slot in self.ordered_slots]
        names = in_order(blueprints or REGISTRY.defaults_for(kinds))
        self.space = ActionSpace.of(self.slot_config, names, self.settings.blends)
        sites = {slot_id: self.site_of(slot_id) for slot_id in slot_by_id}
        self.costs = fitting.price_list(self.ordered_slots, self.space, sites)
        fitting.refuse_limits(max_seeds, budget, self.host_params, self.costs)
        self.max_seeds = max_seeds and int(max_seeds)
        self.budget = budget
        self.flops_limit: fitting.FlopsLimit | None = None
        self.link: OptimizerLink | None = None
        self.births = 0
        self.shadow_passes = 0
        # examples learned from since the caller that charges for them last set this to 0; calls of
        # a compiled network are not counted
        self.examples = {"training": 0, "shadow": 0}
        self._gradient_notes = readings.GradientNotes()
        # rows on which a harvest is compared with this network
        self.sample: Batch | None = None
        known = None if isinstance(example, fitting.KnownSlots) else example
        if known is None and not isinstance(host, SegmentedHost):
            keep_first_batch(self)
        else:
            self.sample = Batch.of_example(fitting.example_of(host, known))
        for slot in self.ordered_slots:
            name = self.slot_config.modules[slot.slot_id]
            slot.sit_on(bare(host.get_submodule(name)))
        watch_calls(host, fitting.attentive_slots(slot_by_id, self.slot_config, names))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the host, whose modules run their slots; examples that are learned from count."""
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            is_shadow = any(slot.is_shadowed for slot in self.ordered_slots)
            phase = "shadow" if is_shadow else "training"
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

    def __getstate__(self) -> dict[str, Any]:
        """Copies are without an optimiser: the original's one trains the original."""
        return {**super().__getstate__(), "link": None}

    # What can be done to it.

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
        slot = self._permit(OP_GERMINATE, slot_id, blueprint_id, blend_id, view)
        assert blueprint_id is not None  # no price list has a seed without one
        is_incubated = self.settings.lengths.training > 0
        scale = 0.0 if is_incubated else self.settings.scale_at_birth
        return self._plant(slot, blueprint_id, blend_id, scale)

    def _plant(self, slot: SeedSlot, blueprint_id: str, blend_id: str, scale: float) -> SlotChange:
        """Plant a seed whose branch starts with this strength; it was permitted before."""
        slot_id = slot.slot_id
        with own_randomness(self.settings.seed, self.births):
            seed = self.build_seed(slot_id, blueprint_id, blend_id == "gated", scale)
            probe = torch.randn(2, *slot.feature_shape)
        refuse_mispriced(seed, blueprint_id, self.costs[slot_id, blueprint_id, blend_id])
        evidence = judge_newborn(
            slot, seed, probe.to(slot.alpha), blueprint_id, is_zero=scale == 0.0
        )
        self.births += 1
        self._gradient_notes.forget()
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
        inherits = REGISTRY.get(slot.kind, blueprint_id).inherits
        site = self.site_of(slot_id) if inherits else None
        seed = build_newborn(slot, self.host, site, blueprint_id, gated=gated, scale=scale)
        if (blueprint_id, gated) not in slot.prices:  # of a save whose blends were others
            price = fitting.price(slot, blueprint_id, gated, self.site_of(slot_id))
            slot.prices[blueprint_id, gated] = price
        return seed

    def cull_seed(
        self, slot_id: str, *, at_any_age: bool = False, view: GrowthView | None = None
    ) -> SlotChange:
        """Remove the live seed; the function is the host's with this slot empty, bit for bit.

        A rollback culls `at_any_age`: a broken network cannot wait for its seeds to grow old.
        """
        slot = self.slot(slot_id) if at_any_age else self._permit(OP_CULL, slot_id, view=view)
        return self._settle(slot, slot.state.advance(SeedStage.CULLED))

    def fossilize_seed(self, slot_id: str, *, view: GrowthView | None = None) -> SlotChange:
        """Keep the live seed for good.

        The output does not change. The slot opens when one more epoch was trained.
        """
        slot = self._permit(OP_FOSSILIZE, slot_id, view=view)
        return self._settle(slot, slot.state.advance(SeedStage.FOSSILIZED))

    def build_in(self, slot_id: str, blueprint_id: str, blend_id: str = "linear") -> None:
        """Make a fossil at once.

        It is part of the host from the first step on, as in a network of fixed size.
        """
        # whether it is gated is all that is left of a way to blend when a seed is kept
        is_gated = blend_id == "gated"
        alike = (blend for blend in self.space.blends if (blend == "gated") == is_gated)
        blend_id = next(alike, blend_id)
        slot = self._permit(OP_GERMINATE, slot_id, blueprint_id, blend_id)
        self._plant(slot, blueprint_id, blend_id, self.settings.scale_at_birth)
        self._settle(slot, SeedState(SeedStage.FOSSILIZED))
        slot.assign(SeedState())
        slot.built_in = len(slot.fossils)

    def remove_fossil(self, slot_id: str, number: int) -> None:
        """Take a fossil out of network and optimiser; the slot and its live seed stay."""
        slot = self.slot(slot_id)
        fossil = slot.fossils.pop(number)
        del slot.fossil_names[number]
        self._gradient_notes.forget()
        if self.link is not None:
            self.link.release(fossil.parameters())

    def act(self, choice: Choice, view: GrowthView | None = None) -> list[SlotChange]:
        """Carry out one decision: indices of op, slot, blueprint and blend.

        WAIT changes nothing. `view` is the model as it stands, for a caller that has it already:
        whether the op is legal is judged by it, and no other is built.
        """
        op = choice[0]
        _, slot_id, blueprint_id, blend_id = look_up(self.space, *choice)
        if op == OP_CULL:
            return [self.cull_seed(slot_id, view=view)]
        if op == OP_FOSSILIZE:
            return [self.fossilize_seed(slot_id, view=view)]
        if op != OP_GERMINATE:
            return []
        changes = [self.germinate_seed(slot_id, blueprint_id, blend_id, view=view)]
        slot = self.slot(slot_id)
        if not self.settings.lengths.ramp:
            # planted for good, and the slot is open for the next one
            for stage in (SeedStage.FOSSILIZED, SeedStage.DORMANT):
                changes.append(self._settle(slot, slot.state.advance(stage)))
        return changes

    def tick(self, slot_id: str | None = None) -> list[SlotChange]:
        """Between two epochs: stages that are over end, ramps take a step.

        It concerns all slots, or the one that is named. Returns the slots that changed stage.
        """
        self._require_owned()
        changes: list[SlotChange] = []
        for slot in self.ordered_slots if slot_id is None else [self.slot(slot_id)]:
            self.site(slot.slot_id)
            change = self._settle(slot, tick(slot.state, self.settings.lengths))
            if change.before.stage is not change.after.stage:
                changes.append(change)
        return changes

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
        if blend_id is None:
            blend_id = self.space.blends[0]
        self.space.blend_index(blend_id)
        require(op, slot_id, blueprint_id, blend_id, self.view() if view is None else view)
        return slot

    def _settle(self, slot: SeedSlot, after: SeedState) -> SlotChange:
        """Move modules and parameters to where `after` says they are."""
        before = slot.state
        change = SlotChange(slot.slot_id, before, after)
        if after is before:
            # nothing grows here; to write alpha again would take longer than all else on a GPU
            return change
        ends = (SeedStage.CULLED, SeedStage.FOSSILIZED)
        if after.stage is not before.stage and after.stage in ends:
            is_kept = after.stage is SeedStage.FOSSILIZED
            seed = slot.petrify() if is_kept else slot.uproot()
            self._gradient_notes.forget()
            if self.link is not None and is_kept:
                self.link.commit(slot.slot_id)
            elif self.link is not None:
                self.link.release(seed.parameters())
        slot.assign(after)
        return change

    def _require_owned(self) -> None:
        """Refuse a live seed that no optimiser trains."""
        planted = [slot for slot in self.ordered_slots if slot.seed is not None]
        owned = self.link.owners() if planted and self.link is not None else {}
        for slot in planted:
            require_optimizer(slot, owned)

    def attach(self, optimizer: Any, **options: Any) -> OptimizerLink:
        """Let an optimiser, or each of a list, follow this network from now on.

        `OptimizerLink` explains the options.
        """
        sources = {slot_id: self.source(slot_id) for slot_id in self.slot_config.modules}
        link = link_optimizers(optimizer, self.link, self.host, sources, **options)
        if self.link is not None:
            self.link.detach()
        self.link = link
        link.note_gradients = self._note_gradients
        for slot in self.ordered_slots:
            for fossil in slot.fossils:
                originals = self._originals(slot.slot_id, fossil)
                link.adopt(slot.slot_id, fossil.parameters(), originals, is_host=True)
            if slot.seed is not None:
                originals = self._originals(slot.slot_id, slot.seed)
                link.release(slot.seed.parameters())
                link.adopt(slot.slot_id, slot.seed.parameters(), originals)
        return link

    def _originals(self, slot_id: str, seed: nn.Module | None) -> dict[nn.Parameter, nn.Parameter]:
        """Whose optimiser settings each parameter of a copy inherits; empty for any other seed."""
        if not isinstance(seed, Copy):
            return {}
        return pair_originals(seed, self.source(slot_id))

    # What it runs without, or with, for a measurement.

    def slot_off(self, slot_id: str) -> AbstractContextManager[None]:
        """The network as it would be without this slot's live seed.

        The structure does not change, so a compiled network stays compiled.
        """
        return switches.slot_off(self.slot(slot_id))

    def fossil_off(self, slot_id: str, number: int) -> AbstractContextManager[None]:
        """The network without one of this slot's fossils; several may be off at once."""
        return switches.fossil_off(self.slot(slot_id), number)

    def at_full_strength(self, slot_id: str) -> AbstractContextManager[None]:
        """The network with this slot's live seed fully in, whatever its stage."""
        return switches.at_full_strength(self.slot(slot_id))

    @contextmanager
    def shadow(self) -> Iterator[None]:
        """All TRAINING seeds at full strength, all else frozen.

        Buffers and random state are as before afterwards.
        """
        random_seed = (self.settings.seed, -1 - self.shadow_passes)
        try:
            with switches.shadow(self, self.ordered_slots, random_seed):
                yield
        finally:
            self.shadow_passes += 1

    # What is read off it.

    def record_counterfactual(
        self, slot_id: str, with_slot: Tensor, without_slot: Tensor
    ) -> Measurement:
        """Take held-out losses of the same examples, with a seed and without it.

        The seed must be TRAINING or PROBATIONARY.
        """
        return readings.record_counterfactual(self.slot(slot_id), with_slot, without_slot)

    def owners(self) -> list[list[nn.Parameter]]:
        """Parameters of the host (with its fossils), then those of each slot's live seed."""
        return readings.parameters_by_owner(self, self.ordered_slots)

    def clip_gradients(self, max_norm: float) -> list[Tensor | None]:
        """Clip each of `owners` apart, so that no seed shrinks the host's step.

        Returns the norms before; None for an owner without gradients.
        """
        norms = readings.clip_by_owner(self.owners(), max_norm)
        if self.link is not None and self.link.follows_rates:
            self._gradient_notes.expect_step(norms)
        return norms

    def _note_gradients(self) -> None:
        """Before an optimiser's step: note the gradients while a seed is live."""
        if all(slot.seed is None for slot in self.ordered_slots):
            self._gradient_notes.skip_step()
        else:
            self._gradient_notes.note_step(self.owners())

    def read_gradients(self) -> None:
        """Take the gradients of the steps since the last call as readings of the live seeds."""
        sums = self._gradient_notes.take()
        if sums is not None:
            readings.record_gradients(self.ordered_slots, sums, self.owners())

    # Its parts, and how many there are.

    def slot(self, slot_id: str) -> SeedSlot:
        """The slot of this id; an unknown id is refused."""
        slot = self._slot_by_id.get(slot_id)
        if slot is None:
            raise UnknownNameError("slot", slot_id, self.slot_config.slot_ids)
        return slot

    def site(self, slot_id: str) -> nn.Module:
        """The host's module whose output the slot sits on; an error where another one is now."""
        name = self.slot_config.modules[slot_id]
        module = bare(self.host.get_submodule(name))
        self.slot(slot_id).require_on(module, name)
        return module

    def site_of(self, slot_id: str) -> Site:
        """The slot's position as blueprints see it.

        A copy that is planted there copies the last copy that was kept, or the source.
        """
        slot = self.slot(slot_id)
        source = copied_next(self.source(slot_id), slot.fossils)
        return Site(
            module=source,
            network=self.host,
            held=tuple(self.ordered_slots),
            zeroed=slot.inheritance.zeroed,
        )

    def source(self, slot_id: str) -> nn.Module:
        """The host's own module that copies in the slot go back to."""
        name = source_name(self.host, self.slot_config.modules[slot_id])
        return bare(self.host.get_submodule(name))

    def get_slot_reports(self) -> dict[str, SeedStateReport]:
        """What policies, screens and logs see of each slot, in order."""
        host_params = self.host_params + self.fossilized_params
        return {slot.slot_id: slot.report(host_params) for slot in self.ordered_slots}

    def view(self) -> GrowthView:
        """What legality is judged by; copies cost what the modules have now."""
        if {COPY, COPY_ZERO} & set(self.space.blueprint_ids):
            self.costs.update(fitting.price_copies(self.ordered_slots, self.costs, self.site_of))
        return GrowthView(
            space=self.space,
            reports=self.get_slot_reports(),
            seeds_used=self.active_seeds + self.fossilized_seeds,
            max_seeds=self.max_seeds,
            params_used=self.total_params,
            budget=self.budget,
            costs=self.costs,
            ramp=self.settings.lengths.ramp,
            flops=fitting.view_flops(self.flops_limit, self.ordered_slots, self.costs),
        )

    @property
    def active_seeds(self) -> int:
        """Live seeds."""
        return sum(slot.state.stage in LIVE_STAGES for slot in self.ordered_slots)

    @property
    def fossilized_seeds(self) -> int:
        """Fossils, those that were built in included."""
        return sum(len(slot.fossils) for slot in self.ordered_slots)

    @property
    def active_params(self) -> int:
        """Parameters of the live seeds."""
        return sum(seed_size(slot.seed) for slot in self.ordered_slots)

    @property
    def fossilized_params(self) -> int:
        """Parameters of the fossils."""
        return sum(seed_size(fossil) for slot in self.ordered_slots for fossil in slot.fossils)

    @property
    def total_params(self) -> int:
        """Parameters of host, fossils and live seeds."""
        return self.host_params + self.fossilized_params + self.active_params
