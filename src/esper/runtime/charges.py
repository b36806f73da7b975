"""The formulas that turn prices into charges; used by the clock, the population and gardens.

Prices are counted in `kasmina.pricing`, charges are booked in `ledger`. FLOPs are of one example.
"""

import math
from collections.abc import Sequence

from esper.kasmina.blueprints import BlueprintCost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pricing import HostFlops
from esper.kasmina.pruning import find_judged
from esper.kasmina.slot import SeedSlot, has_gate
from esper.runtime.closing import leaves_more_than_the_host
from esper.runtime.counterfactuals import SCORE_EXAMPLES, incubated_slots, measured_slots
from esper.runtime.host import HostRun
from esper.runtime.ledger import Charge

_BACKWARD = 2  # A backward pass to weights and features costs two forward passes.


def incubation_flops(slot: SeedSlot) -> int:
    """Forward FLOPs of a seed that trains in the shadow of the host."""
    return _seed_price(slot).flops


def slot_flops(slot: SeedSlot, *, live: bool = True) -> int:
    """Forward FLOPs of a slot's fossils that are on, and of its live seed if that is in the output.

    Without `live` the seed does not count.
    """
    return sum(price.flops for price in _computed_prices(slot, live=live))


def network_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """Forward FLOPs of one example through the network as it stands."""
    slots = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids]
    return host.whole + sum(slot_flops(slot) for slot in slots)


def learning_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """FLOPs of one example forward and backward through the network as it stands."""
    grown = network_flops(model, host) - host.whole
    return host.learnt + (1 + _BACKWARD) * grown


def shadow_flops(model: MorphogeneticModel, host: HostFlops, incubated: Sequence[SeedSlot]) -> int:
    """FLOPs of one example that teaches the seeds in the shadow, in the order of their slots.

    All else is frozen: gradients go back to the first of these seeds and no further.
    """
    first = incubated[0]
    seeds = (1 + _BACKWARD) * sum(incubation_flops(slot) for slot in incubated)
    way_back = _way_back(model, host, first.slot_id)
    return network_flops(model, host) + way_back + seeds - _seed_price(first).backward.entry


def score_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """FLOPs of one example's greedy scores.

    That is a pass, its gradients back to the first slot, and each slot's products of channels.
    """
    slots = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids]
    products = sum(2 * slot.channels * math.prod(slot.feature_shape) for slot in slots)
    return network_flops(model, host) + _way_back(model, host, slots[0].slot_id) + products


def ablation_flops(model: MorphogeneticModel, host: HostFlops, slot_id: str) -> int:
    """Extra forward FLOPs of one example to see the network without one seed.

    A prefix that is shared is not counted.
    """
    passed_ids = model.slot_config.slot_ids
    if slot_id in host.after:
        passed_ids = passed_ids[passed_ids.index(slot_id) :]
    seeds = 0
    for passed_id in passed_ids:
        seeds += slot_flops(model.slot(passed_id), live=passed_id != slot_id)
    return host.after.get(slot_id, host.whole) + seeds


def training_charges(run: HostRun, flops: HostFlops, examples: int) -> list[Charge]:
    """Return what it costs to learn from examples with the network as it stands."""
    charges = [Charge("training", examples, learning_flops(run.model, flops))]
    incubated = incubated_slots(run)
    if incubated:
        charges.append(Charge("shadow", examples, shadow_flops(run.model, flops, incubated)))
    return charges


def score_charges(run: HostRun, flops: HostFlops) -> list[Charge]:
    """Return what the greedy scores of an epoch cost."""
    if not run.pays_for_measuring:
        return []
    examples = min(SCORE_EXAMPLES, run.plan.most * run.plan.size)
    return [Charge("score", examples, score_flops(run.model, flops))]


def evaluation_charges(run: HostRun, flops: HostFlops) -> list[Charge]:
    """Return what held-out losses and the evidence about seeds cost."""
    if not run.pays_for_measuring:
        return []
    examples = len(run.splits.validation)
    whole = network_flops(run.model, flops)
    charges = [Charge("validation", examples, whole)]
    for slot in measured_slots(run):
        ablated = ablation_flops(run.model, flops, slot.slot_id)
        charges.append(Charge("counterfactual", examples, ablated))
    for slot in incubated_slots(run):
        charges.append(Charge("shadow", examples, whole + incubation_flops(slot)))
    return charges


def most_seed_charges(run: HostRun, flops: HostFlops) -> list[Charge]:
    """Return what the evidence about seeds costs at most, before any has grown.

    Probation has no end, so every slot that can hold a seed may be measured in every epoch. Without
    a ramp a seed is a fossil from its first epoch on, which no measurement looks at.
    """
    lengths = run.model.settings.lengths
    if not lengths.ramp:
        return []
    passes = []
    for slot_id in {slot_id: None for slot_id, _, _ in run.model.costs}:
        # a seed in the shadow of the host is measured by a whole pass
        is_cut = slot_id in flops.after and not lengths.training
        passes.append(flops.after[slot_id] if is_cut else flops.whole)
    passes.sort(reverse=True)
    examples = len(run.splits.validation)
    return [
        Charge("counterfactual", examples, dearest) for dearest in passes[: run.model.max_seeds]
    ]


def closing_passes(run: HostRun, *, measures_left: bool) -> int:
    """Passes over held-out examples that the end of an episode takes, for the seeds there are.

    Late pruning, and if `measures_left` the measurement of what is left, take one of the whole and
    one for every fossil.
    """
    fossils = len(find_judged(run.model))
    passes = 0
    if fossils and run.model.settings.prunes and not run.is_pruned:
        passes += 1 + fossils
    if measures_left and leaves_more_than_the_host(run.model):
        passes += 1 + fossils
    return passes


def sum_charges(charges: Sequence[Charge]) -> int:
    """FLOPs of all charges."""
    return sum(charge.flops for charge in charges)


def _seed_price(slot: SeedSlot) -> BlueprintCost:
    """What the live seed of a slot costs."""
    return slot.prices[str(slot.state.blueprint_id), has_gate(slot.seed)]


def _computed_prices(slot: SeedSlot, *, live: bool = True) -> list[BlueprintCost]:
    """What everything in a slot costs that a pass computes."""
    prices = []
    for number, (name, fossil) in enumerate(zip(slot.fossil_names, slot.fossils, strict=True)):
        if number not in slot.left_out:
            prices.append(slot.prices[name, has_gate(fossil)])
    if live and slot.is_in_output and slot.seed is not None:
        prices.append(_seed_price(slot))
    return prices


def _way_back(model: MorphogeneticModel, host: HostFlops, slot_id: str) -> int:
    """FLOPs of gradients from the output to what a slot returns, none of them a weight's."""
    slot_ids = model.slot_config.slot_ids
    bare = host.back.get(slot_id, host.after.get(slot_id, host.whole))
    grown = 0
    for later_id in slot_ids[slot_ids.index(slot_id) + 1 :]:
        for price in _computed_prices(model.slot(later_id)):
            grown += price.flops + price.backward.mixing
    return bare + grown
