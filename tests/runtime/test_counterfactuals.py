"""Held-out evidence:

shared prefixes change nothing, contributions are paired means with their standard error.
"""

import copy
import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from esper.kasmina.probing import evaluated
from esper.kasmina.switches import bypassed
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from esper.runtime import counterfactuals as measuring
from esper.runtime.counterfactuals import greedy_scores, measure, measured_slots
from esper.runtime.executors.eager import EagerExecutor
from esper.runtime.population import Population
from runtime.episodes import BLOBS, GERMINATE, IMAGES, differing, epochs, play, print_of

TWO_SEEDS = {0: {0: [(GERMINATE, "r0c0", "conv_small", "gated"), (GERMINATE, "r0c1", "norm")]}}


@pytest.fixture(scope="module")
def grown():
    """A host with a seed on probation in both slots."""
    population = epochs(IMAGES, [3], epochs=3, script=TWO_SEEDS)
    population.train_epoch()
    return population


def losses_of(run, split):
    inputs, targets = split.gather(torch.arange(len(split)))
    with torch.no_grad():
        outputs = run.model.eval()(inputs)
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none").double(), outputs


def test_a_measurement_is_the_mean_loss_and_the_accuracy_of_the_whole_split(grown):
    run = grown.runs[0]
    losses, outputs = losses_of(run, run.splits.validation)
    result = measure(run, run.splits.validation)
    accuracy = (outputs.argmax(1) == run.splits.validation.targets).double().mean()
    torch.testing.assert_close(result[:2], torch.stack([losses.mean(), accuracy]))


def test_contributions_are_paired_means_with_their_standard_error(grown):
    """Against a full forward pass with the slot's alpha at zero, and the formula written out."""
    run = grown.runs[0]
    split = run.splits.validation
    with_seed, _ = losses_of(run, split)
    result = measure(run, split)[2:].view(2, 2).tolist()
    for (mean, error), slot_id in zip(result, ("r0c0", "r0c1"), strict=True):
        with run.model.slot_off(slot_id):
            gain = losses_of(run, split)[0] - with_seed
        expected = float(gain.sum()) / len(split)
        spread = math.sqrt(sum((float(value) - expected) ** 2 for value in gain) / (len(split) - 1))
        assert mean == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert error == pytest.approx(spread / math.sqrt(len(split)), rel=1e-6)


def test_a_shared_prefix_gives_the_outputs_of_a_full_pass_to_the_bit(grown):
    run = grown.runs[0]
    inputs, _ = run.splits.validation.gather(torch.arange(20))
    run.model.eval()
    with torch.no_grad():
        shared = list(measuring._passes(run, measured_slots(run), [], inputs))
        full = [run.model(inputs)]
        for slot in run.slots:
            with bypassed(slot):
                full.append(run.model(inputs))
    assert [torch.equal(a, b) for a, b in zip(shared, full, strict=True)] == [True] * 3


def test_a_bypassed_seed_is_in_the_output_again_afterwards(grown):
    (slot, _) = grown.runs[0].slots
    with pytest.raises(ZeroDivisionError), bypassed(slot):
        1 / 0  # noqa: B018
    assert slot.is_in_output


def test_measuring_in_parts_equals_measuring_at_once(grown, monkeypatch):
    run = grown.runs[0]
    whole = measure(run, run.splits.validation)
    monkeypatch.setattr(measuring, "_CHUNK", 7)
    torch.testing.assert_close(measure(run, run.splits.validation), whole, rtol=1e-6, atol=1e-8)


def test_measuring_changes_nothing_of_a_host(grown):
    before, mode = print_of(grown), grown.runs[0].model.training
    measure(grown.runs[0], grown.runs[0].splits.validation)
    greedy_scores(grown.runs[0])
    assert differing(before, print_of(grown)) == []
    assert grown.runs[0].model.training is mode


class KeepsItsMode(nn.Module):
    """One of a user's, that never leaves the mode that it was put into by hand."""

    def train(self, mode=True):
        return self


class DerivesItsMode(nn.Module):
    """Another one, whose mode is no attribute of its own."""

    training = property(
        lambda self: getattr(self, "mode", True), lambda self, mode: setattr(self, "mode", mode)
    )


class EvaluatesItself(nn.Module):
    """A third one, that notes in which mode it is asked for."""

    def eval(self):
        self.was_asked = True
        return super().eval()


def test_a_network_with_an_eval_of_its_own_is_asked():
    network = EvaluatesItself()
    with evaluated(network):
        assert (network.was_asked, network.training) == (True, False)
    assert network.training


@pytest.mark.parametrize(
    "odd", [nn.Identity, KeepsItsMode, DerivesItsMode], ids=["plain", "stubborn", "derived"]
)
def test_evaluating_leaves_every_module_in_its_own_mode(odd):
    frozen = nn.BatchNorm1d(2)
    network = nn.Sequential(nn.Dropout(), nn.Sequential(frozen), odd())
    frozen.training = False
    before = [module.training for module in network.modules()]
    as_torch_does = [module.training for module in copy.deepcopy(network).eval().modules()]
    with suppress(ZeroDivisionError), evaluated(network):
        assert [module.training for module in network.modules()] == as_torch_does
        _ = 1 / 0
    assert [module.training for module in network.modules()] == before


def test_a_host_that_is_built_in_evaluation_mode_trains_in_training_mode():
    task = replace(IMAGES, build_host=lambda: IMAGES.build_host().eval())
    assert all(module.training for module in epochs(task, [3], epochs=1).runs[0].model.modules())
    assert all(module.training for module in Population(task, [3]).runs[0].model.modules())


def test_only_seeds_on_probation_are_measured():
    moves = {0: [(GERMINATE, "r0c1", "norm")], 1: [(GERMINATE, "r0c0", "conv_small")]}
    population = epochs(IMAGES, [3], epochs=3, script={0: moves})
    population.train_epoch()
    run = population.runs[0]
    assert [slot.state.alpha for slot in run.slots] == [
        1.0,
        1.0,
    ]  # the first one has just ended its ramp
    assert [slot.slot_id for slot in measured_slots(run)] == ["r0c1"]
    assert [bool(gain) for gain in measure(run, run.splits.validation)[2:]] == [
        False,
        False,
        True,
        True,
    ]


def test_a_seed_on_its_ramp_costs_no_counterfactual_and_has_none():
    population = epochs(
        replace(IMAGES, lengths=StageLengths(ramp=3)), [3], epochs=4, script=TWO_SEEDS
    )
    run = population.runs[0]
    assert run.ledger.phases["counterfactual"].examples == 0
    assert [report.is_measured for report in population.reports()[0].values()] == [False, False]
    population.train_epoch()
    population.evaluate()
    assert run.ledger.phases["counterfactual"].examples == 2 * len(run.splits.validation)
    assert [report.is_measured for report in population.reports()[0].values()] == [True, True]


def test_a_report_carries_the_contribution_that_was_measured():
    population = epochs(IMAGES, [3], epochs=3, script=TWO_SEEDS)
    population.train_epoch()
    run = population.runs[0]
    expected = measure(run, run.splits.validation).tolist()
    population.evaluate()
    for report, values in zip(
        population.reports()[0].values(), (expected[2:4], expected[4:6]), strict=True
    ):
        metrics = report.metrics
        assert [
            metrics.counterfactual_contribution,
            metrics.counterfactual_standard_error,
        ] == values
    assert [run.reading.held_out_loss, run.reading.held_out_accuracy] == expected[:2]


def test_after_an_epoch_a_live_seed_has_gradient_readings_and_every_slot_a_score():
    population = epochs(IMAGES, [3], epochs=1, script={0: {0: [(GERMINATE, "r0c0", "conv_small")]}})
    population.train_epoch()
    planted, empty = (report.metrics for report in population.reports()[0].values())
    assert planted.seed_gradient_norm > 0
    assert planted.seed_gradient_norm_ratio > 0
    assert (empty.seed_gradient_norm, empty.seed_gradient_norm_ratio) == (None, None)
    assert planted.greedy_score > 0
    assert empty.greedy_score > 0


def test_before_the_first_epoch_nothing_is_measured():
    metrics = Population(BLOBS, [1]).reports()[0]["r0c0"].metrics
    assert (
        metrics.greedy_score,
        metrics.seed_gradient_norm,
        metrics.counterfactual_contribution,
    ) == (None,) * 3


def test_gradient_readings_are_means_of_norms_before_clipping():
    """Against a loop written out, with a fossil:

    one epoch of two steps at a rate too small to matter.
    """
    task = replace(BLOBS, epoch_examples=128, lr=1e-12, clip_norm=1e-3, scale_at_birth=0.5)
    population = Population(task, [1])
    run = population.runs[0]
    run.model.build_in("r0c0", "mlp")
    run.prime()
    play(population, 1, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    population.train_epoch()
    seed = list(run.model.slot("r0c0").seed.parameters())
    host = [*run.model.host.parameters(), *run.model.slot("r0c0").fossils.parameters()]
    norms = []
    for rows in run.plan.rows.split(64):
        inputs, targets = run.splits.train.gather(rows)
        loss = torch.nn.functional.cross_entropy(run.model(inputs), targets)
        gradients = torch.autograd.grad(loss, [*host, *seed])
        parts = gradients[: len(host)], gradients[len(host) :]
        norms.append([float(torch.cat([g.flatten() for g in part]).norm()) for part in parts])
    host_norm, seed_norm = torch.tensor(norms, dtype=torch.double).mean(0).tolist()
    sizes = [sum(p.numel() for p in own) for own in (host, seed)]
    assert run.reading.host_gradient_norm == pytest.approx(host_norm, rel=1e-4)
    metrics = population.reports()[0]["r0c0"].metrics
    assert metrics.seed_gradient_norm == pytest.approx(seed_norm, rel=1e-4)
    ratio = seed_norm / math.sqrt(sizes[1]) / (host_norm / math.sqrt(sizes[0]))
    assert metrics.seed_gradient_norm_ratio == pytest.approx(ratio, rel=1e-4)


def test_an_epochs_reading_is_the_mean_over_its_examples():
    population = Population(replace(BLOBS, epoch_examples=100, lr=1e-12), [1])
    (reading,) = population.train_epoch()
    run = population.runs[0]
    inputs, targets = run.splits.train.gather(run.plan.rows)
    outputs = run.model(inputs).detach()
    assert reading.train_loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-4
    )
    assert reading.train_accuracy == pytest.approx(
        float((outputs.argmax(1) == targets).float().mean())
    )
    assert (reading.epoch, reading.held_out_loss) == (0, None)


def test_the_greedy_score_is_the_slope_along_the_best_map_of_equal_weights():
    """A map W added at a slot changes the loss by gradient :

    W features, so the best W of +1 and -1 has this slope.
    """
    population = Population(BLOBS, [1])
    run = population.runs[0]
    run.begin_epoch()
    score = float(greedy_scores(run)[0])
    inputs, targets = run.splits.train.gather(run.plan.rows[: measuring.SCORE_EXAMPLES])
    extra = torch.zeros(8, 8, requires_grad=True)
    host = run.model.host
    features = host.forward_to_segment("r0c0", inputs)
    outputs = host.forward_from_segment("r0c0", features + features @ extra)
    torch.nn.functional.cross_entropy(outputs, targets).backward()
    assert score == pytest.approx(float(extra.grad.abs().sum()), rel=1e-4)


def test_a_population_of_partly_frozen_hosts_has_all_its_scores():
    def build():
        host = BLOBS.build_host()
        next(iter(host.blocks)).requires_grad_(False)
        return host

    scores = []
    for task in (BLOBS, replace(BLOBS, build_host=build)):
        population = Population(task, [1])
        population.train_epoch()
        scores.append([report.metrics.greedy_score for report in population.reports()[0].values()])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


# -- the shadow pass -------------------------------------------------------------------------------

INCUBATED = replace(IMAGES, lengths=StageLengths(training=2, ramp=1))
PLANTED = {0: {0: [(GERMINATE, "r0c0", "conv_small")]}}


def host_tensors(population):
    found = print_of(population)
    return {name: value for name, value in found.items() if name.startswith(("host.", "stream"))}


def test_an_incubated_seed_leaves_the_hosts_trajectory_bit_identical():
    never, incubated = (epochs(INCUBATED, [3], epochs=2, script=script) for script in ({}, PLANTED))
    for population in (never, incubated):
        population.train_epoch()
        population.evaluate()
    assert incubated.runs[0].model.slot("r0c0").state.stage is SeedStage.TRAINING
    assert differing(host_tensors(never), host_tensors(incubated)) == []
    assert never.runs[0].reading == incubated.runs[0].reading


def test_an_incubated_seed_learns():
    population = epochs(INCUBATED, [3], epochs=1, script=PLANTED)
    seed = population.runs[0].model.slot("r0c0").seed
    before = [parameter.detach().clone() for parameter in seed.parameters()]
    play(population, 1)
    assert not any(
        torch.equal(old, new) for old, new in zip(before, seed.parameters(), strict=True)
    )
    assert population.reports()[0]["r0c0"].metrics.seed_gradient_norm > 0


def test_an_incubated_seed_is_judged_by_its_held_out_gain():
    """G2: measured before TRAINING ends, and the verdict is not just "never measured"."""
    population = epochs(INCUBATED, [3], epochs=3, script=PLANTED)
    state = population.runs[0].model.slot("r0c0").state
    assert state.shadow_gain is not None
    assert state.shadow_gain.examples == len(population.runs[0].splits.validation)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_seed_that_changes_nothing_yet_gains_exactly_nothing_in_any_precision(amp):
    population = Population(INCUBATED, [3], amp=amp)
    population.train_epoch()
    run = population.runs[0]
    run.model.germinate_seed("r0c0", "conv_small")
    run.prime()
    population.tick()
    assert measure(run, run.splits.validation)[2].item() == 0


def test_shadow_passes_are_in_the_ledger():
    population = epochs(INCUBATED, [3], epochs=3, script=PLANTED)
    run = population.runs[0]
    cost = run.ledger.phases["shadow"]
    assert cost.examples == 2 * (run.plan.examples + len(run.splits.validation))
    assert cost.flops > 2 * 2 * run.plan.examples * population.runs[0].flops.after["r0c0"]


def test_incubation_is_eager():
    assert isinstance(Population(INCUBATED, [1]).executor, EagerExecutor)


def test_slots_named_by_module_are_measured_at_their_own_modules():
    """The ids count the named modules, not the host's own slots:

    here r0c0 sits where the host has r0c1.
    """
    task = replace(IMAGES, slots=("blocks.1",))
    population = Population(task, [3])
    play(population, 3, {0: {0: [(GERMINATE, "r0c0", "conv_light", "linear")]}})
    run = population.runs[0]
    split = run.splits.validation
    (slot,) = measured_slots(run)
    with_seed, _ = losses_of(run, split)
    with bypassed(slot):
        without, _ = losses_of(run, split)
    gain = without - with_seed
    assert gain.abs().sum() > 0
    assert measure(run, split)[2].item() == pytest.approx(float(gain.mean()), rel=1e-5)
    assert not population.runs[0].flops.after
