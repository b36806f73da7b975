"""Greedy scores are slopes:

checked by differences, behind seeds, with frozen hosts, and the network left alone.
"""

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.kasmina.evidence import score_sites
from user_models import (
    CNN,
    MLP,
    TiedLanguageModel,
    losses_of,
    random_images,
    random_vectors,
    train_epoch,
)


def random_tokens(count=24, seed=1):
    return torch.randint(7, (count, 5), generator=torch.Generator().manual_seed(seed))


def token_losses(model, tokens):
    scores = model(tokens[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)


CASES = {
    "mlp": (MLP, ["enter", "middle"], random_vectors(24, seed=2), losses_of),
    "cnn": (CNN, ["layer1", "layer2"], random_images(24, seed=2), losses_of),
    "tokens": (TiedLanguageModel, ["embedding", "body"], random_tokens(seed=2), token_losses),
}


class Scored:
    """A model with slots, and the data on which it is scored."""

    def __init__(self, case="mlp", host=None, slots=None, **options):
        build, own_slots, self.data, self.losses = CASES[case]
        self.host = host or build()
        if case != "tokens":
            self.data = self.data.to(next(self.host.parameters()).dtype)
        example = self.data[:2, :-1] if case == "tokens" else self.data[:2]
        self.garden = esper.grow(self.host, slots=slots or own_slots, example=example, **options)
        self.model = self.garden.model.eval()
        self.slots = list(self.model.slots.values())

    def evaluate(self):
        return self.losses(self.model, self.data)

    def scores(self, evaluate=None):
        sites = [self.model.site(slot.slot_id) for slot in self.slots]
        return score_sites(
            evaluate or self.evaluate, sites, [slot.kind for slot in self.slots]
        ).tolist()

    def numeric_slope(self, slot, step=1e-4):
        """The steepest fall of the mean loss along a map of +1 and -1 behind the slot, by
        differences alone.
        """
        width, shape = (
            slot.channels,
            "oc,bc...->bo..." if slot.kind == "image" else "oc,b...c->b...o",
        )
        extra, slopes = torch.zeros(2, width, width, dtype=torch.double)
        site = self.host.get_submodule(self.model.slot_config.modules[slot.slot_id])
        handle = site.register_forward_hook(
            lambda m, i, output: output + torch.einsum(shape, extra, output)
        )
        with torch.no_grad():
            for place in np.ndindex(width, width):
                ends = []
                for end in (step, -step):
                    extra[place] = end
                    ends.append(float(self.evaluate().mean()))
                extra[place] = 0.0
                slopes[place] = (ends[0] - ends[1]) / (2 * step)
        handle.remove()
        return float(slopes.abs().sum())


def doubled(case, **options):
    """In double precision, so that differences are exact enough to compare with."""
    return Scored(case, host=CASES[case][0]().double(), **options)


def plain_mlp(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


@pytest.mark.parametrize("case", CASES)
def test_a_score_is_the_steepest_slope_along_a_linear_map_at_the_slot(case):
    scored = doubled(case)
    expected = [scored.numeric_slope(slot) for slot in scored.slots]
    assert scored.scores() == pytest.approx(expected, rel=1e-3)
    assert expected[0] != pytest.approx(expected[1], rel=0.01)


def test_a_score_is_measured_behind_the_seed_that_is_there():
    scored = doubled("cnn", settings=esper.GrowthSettings(scale_at_birth=1.0))
    before = scored.scores()
    optimizer = torch.optim.AdamW(scored.garden.parameters(), lr=2e-2)
    scored.garden.attach(optimizer)
    scored.garden.step(lambda: scored.evaluate())
    train_epoch(scored.model, optimizer, 0, scored.data)
    scored.model.eval()
    assert any(slot.is_in_output and slot.alpha > 0 for slot in scored.slots)
    expected = [scored.numeric_slope(slot) for slot in scored.slots]
    assert scored.scores() == pytest.approx(expected, rel=1e-3)
    assert before != pytest.approx(expected, rel=1e-3)


def test_a_module_that_runs_once_per_batch_scores_as_in_a_single_batch():
    scored = Scored("cnn")
    in_parts = scored.scores(
        lambda: torch.cat([losses_of(scored.model, part) for part in scored.data.split(10)])
    )
    assert in_parts == pytest.approx(scored.scores(), rel=1e-4)


def test_scores_do_not_grow_with_the_number_of_examples():
    scored = Scored()
    once = scored.scores()
    scored.data = torch.cat([scored.data, scored.data])
    assert scored.scores() == pytest.approx(once, rel=1e-4)


def test_a_layer_that_works_in_place_behind_a_slot_does_not_change_its_score():
    hosts = [plain_mlp(nn.ReLU(inplace=inplace)) for inplace in (False, True)]
    plain, in_place = (Scored(host=host, slots="0").scores() for host in hosts)
    assert plain == in_place


@pytest.mark.parametrize("frozen", ["0", "0 2", "all"])
def test_a_frozen_host_is_scored_like_any_other(frozen):
    scores = []
    for names in ("", frozen):
        host = nn.Sequential(*plain_mlp(nn.ReLU()), nn.ReLU(), nn.Linear(3, 3))
        for name, module in host.named_children():
            module.requires_grad_(not (names == "all" or name in names.split()))
        with torch.no_grad():
            host[4].weight.copy_(torch.eye(3))
            host[4].bias.zero_()
        scores.append(Scored(host=host, slots=["0", "2"]).scores())
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert min(scores[1]) > 0


def test_a_slot_that_the_loss_does_not_depend_on_scores_zero():
    scored = Scored()
    weights = scored.host.leave.weight
    assert scored.scores(lambda: scored.evaluate().detach() + weights.sum()) == [0.0, 0.0]


@pytest.mark.parametrize("case", CASES)
def test_scoring_leaves_weights_gradients_and_hooks_alone(case):
    scored = Scored(case)
    scored.evaluate().mean().backward()

    def state():
        weights = {name: value.clone() for name, value in scored.model.state_dict().items()}
        gradients = {
            f"{n}.grad": p.grad.clone()
            for n, p in scored.model.named_parameters()
            if p.grad is not None
        }
        hooks = {
            f"{n}.hooks": torch.tensor(len(m._forward_hooks))
            for n, m in scored.model.named_modules()
        }
        return {**weights, **gradients, **hooks, "random": torch.get_rng_state()}

    before = state()
    assert min(scored.scores()) > 0
    after = state()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
