"""The greedy policy in a loop of one's own: real training, scores that are slopes, and a training left undisturbed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import MeasurementError
from esper.tamiyo import RulePolicy
from esper.tamiyo.rules import Greedy
from esper.telemetry.events import ActionRefused, ActionTaken, StageChanged
from user_models import CNN, MLP, TiedLanguageModel, losses_of, random_images, random_vectors, train_epoch


def random_tokens(count=24, seed=1):
    return torch.randint(7, (count, 5), generator=torch.Generator().manual_seed(seed))


def token_losses(model, tokens):
    scores = model(tokens[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)


CASES = {
    "mlp": (MLP, ["enter", "middle"], random_vectors(96, seed=1), random_vectors(96, seed=2), losses_of),
    "cnn": (CNN, ["layer1", "layer2"], random_images(96, seed=1), random_images(96, seed=2), losses_of),
    "tokens": (TiedLanguageModel, ["embedding", "body"], random_tokens(), random_tokens(seed=2), token_losses),
}
VECTORS = CASES["mlp"][3]


class Loop:
    """A user's training loop around one of the cases."""

    def __init__(self, case="mlp", policy="greedy", host=None, slots=None, **options):
        build, own_slots, self.train, self.held_out, self.losses = CASES[case]
        self.host = host or build()
        example = self.train[:2, :-1] if case == "tokens" else self.train[:2].to(next(self.host.parameters()).dtype)
        self.garden = esper.grow(self.host, slots=slots or own_slots, example=example, policy=policy, **options)
        self.optimizer = torch.optim.AdamW(self.garden.parameters(), lr=2e-2)
        self.garden.attach(self.optimizer)

    def evaluate(self):
        return self.losses(self.garden.model, self.held_out)

    def step(self, evaluate=None):
        return self.garden.step(evaluate or self.evaluate)

    def epoch(self, number):
        train_epoch(self.garden.model, self.optimizer, number, self.train)
        return self.step()

    @property
    def scores(self):
        return [report.metrics.greedy_score for report in self.garden.model.get_slot_reports().values()]


def plain_mlp(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


# -- whole episodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_in_a_real_loop_seeds_are_planted_where_the_score_is_highest_and_kept(case):
    loop = Loop(case)
    planted = []
    for number in range(10):
        reports = loop.garden.model.get_slot_reports()
        open_slots = [slot for slot, report in reports.items() if report.stage.name == "DORMANT"]
        events = loop.epoch(number)
        taken = {event.op: event.slot for event in events if isinstance(event, ActionTaken)}
        scores = dict(zip(reports, loop.scores, strict=True))
        if taken:
            assert taken == {"GERMINATE": max(open_slots, key=scores.get)}
            planted += taken.values()
    assert planted
    ends = [
        event.slot for event in loop.garden.history if isinstance(event, StageChanged) if event.after == "FOSSILIZED"
    ]
    assert ends
    assert ends == planted[: len(ends)]
    assert not [event for event in loop.garden.history if isinstance(event, ActionRefused)]


@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_what_grew_greedily_is_harvested_as_a_plain_module(case):
    loop = Loop(case)
    for number in range(8):
        loop.epoch(number)
    plain = loop.garden.harvest()
    assert type(plain) is CASES[case][0]
    assert loop.losses(plain.eval(), loop.held_out).isfinite().all()


# -- scores are slopes -------------------------------------------------------------------------------------------------


def numeric_slope(loop, slot_id, step=1e-4):
    """The steepest fall of the mean loss along a map of +1 and -1 behind the slot, by differences and nothing else."""
    model = loop.garden.model.eval()
    slot = model.slot(slot_id)
    width, shape = slot.channels, "oc,bc...->bo..." if slot.kind == "image" else "oc,b...c->b...o"
    extra = torch.zeros(width, width, dtype=torch.double)
    site = model.host.get_submodule(model.slot_config.modules[slot_id])
    handle = site.register_forward_hook(lambda m, i, output: output + torch.einsum(shape, extra, output))
    slopes = torch.zeros(width, width, dtype=torch.double)
    with torch.no_grad():
        for place in np.ndindex(width, width):
            ends = []
            for end in (step, -step):
                extra[place] = end
                ends.append(float(loop.evaluate().mean()))
            extra[place] = 0.0
            slopes[place] = (ends[0] - ends[1]) / (2 * step)
    handle.remove()
    return float(slopes.abs().sum())


def doubled(case):
    """A loop in double precision, so that differences are exact enough to compare with."""
    loop = Loop(case, host=CASES[case][0]().double())
    if case != "tokens":
        loop.train, loop.held_out = loop.train.double(), loop.held_out.double()[:24]
    return loop


@pytest.mark.parametrize("case", CASES)
def test_a_score_is_the_steepest_slope_along_a_linear_map_at_the_slot(case):
    loop = doubled(case)
    expected = [numeric_slope(loop, slot) for slot in ("r0c0", "r0c1")]
    loop.step()
    assert loop.scores == pytest.approx(expected, rel=1e-3)
    assert expected[0] != pytest.approx(expected[1], rel=0.01)


def test_a_score_is_measured_behind_the_seed_that_is_there():
    loop = doubled("cnn")
    for number in range(3):
        train_epoch(loop.garden.model, loop.optimizer, number, loop.train[:32])
        if number == 2:
            assert loop.garden.model.active_seeds
            expected = [numeric_slope(loop, slot) for slot in ("r0c0", "r0c1")]
        loop.step()
    assert loop.scores == pytest.approx(expected, rel=1e-3)


def test_an_evaluation_in_batches_gives_the_scores_of_one_in_a_single_batch():
    loop = Loop("cnn")
    loop.step()
    whole = loop.scores
    other = Loop("cnn", host=copy.deepcopy(loop.garden.harvest()))
    other.step(lambda: torch.cat([losses_of(other.garden.model, part) for part in other.held_out.split(20)]))
    assert other.scores == pytest.approx(whole, rel=1e-4)


def test_scores_do_not_grow_with_the_number_of_examples():
    loop, twice = Loop(host=plain_mlp(nn.ReLU()), slots="0"), Loop(host=plain_mlp(nn.ReLU()), slots="0")
    twice.held_out = torch.cat([loop.held_out, loop.held_out])
    loop.step()
    twice.step()
    assert twice.scores == pytest.approx(loop.scores, rel=1e-4)


def test_a_layer_that_works_in_place_behind_a_slot_does_not_change_its_score():
    scores = []
    for inplace in (False, True):
        loop = Loop(host=plain_mlp(nn.ReLU(inplace=inplace)), slots="0")
        loop.step()
        scores.append(loop.scores)
    assert scores[0] == scores[1]


@pytest.mark.parametrize("frozen", ["0", "0 2", "all"])
def test_a_frozen_host_is_scored_like_any_other(frozen):
    scores = []
    for names in ("", frozen):
        host = nn.Sequential(*plain_mlp(nn.ReLU()), nn.ReLU(), nn.Linear(3, 3))
        for name, module in host.named_children():
            module.requires_grad_(not (names == "all" or name in names.split()))
        loop = Loop(host=host, slots=["0", "2"])
        with torch.no_grad():
            host[4].weight.copy_(torch.eye(3))
        loop.step()
        scores.append(loop.scores)
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert min(scores[1]) > 0


def test_a_slot_that_the_loss_does_not_depend_on_scores_zero():
    class Sidetrack(MLP):
        def forward(self, vectors):
            self.middle(torch.relu(self.enter(vectors)))
            return self.leave(torch.relu(self.enter.weight.sum() + vectors.mean(1, keepdim=True)).expand(-1, 8))

    loop = Loop(host=Sidetrack())
    loop.step()
    assert loop.scores == [0.0, 0.0]


# -- nothing is disturbed ----------------------------------------------------------------------------------------------


class Idle:
    """Reads the scores and does nothing."""

    reads_scores = True

    def decide(self, observation, masks, reports, memory):
        return np.zeros((1, 4), np.int64), memory


def state_of(loop):
    model = loop.garden.model
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "needs": {name: torch.tensor(p.requires_grad) for name, p in model.named_parameters()},
        "modes": {name: torch.tensor(module.training) for name, module in model.named_modules()},
        "hooks": {name: torch.tensor(len(module._forward_hooks)) for name, module in model.named_modules()},
        "random": {"state": torch.get_rng_state()},
    }


def differing(before, after):
    return [
        f"{part} {name}"
        for part in before
        for name in before[part].keys() | after[part].keys()
        if not (name in before[part] and name in after[part] and torch.equal(before[part][name], after[part][name]))
    ]


@pytest.mark.parametrize("case", CASES)
def test_scoring_leaves_gradients_buffers_modes_hooks_and_random_state_alone(case):
    loop = Loop(case, policy=lambda facts: Idle())
    loop.garden.model.train()
    next(loop.host.children()).eval()
    loop.losses(loop.garden.model, loop.train).mean().backward()
    before = state_of(loop)
    loop.step(lambda: loop.evaluate() + 0 * torch.rand(1))
    assert differing(before, state_of(loop)) == []
    assert all(score > 0 for score in loop.scores)


def test_a_training_that_is_scored_ends_like_one_that_is_not_to_the_bit():
    ends = []
    for policy in ("never", lambda facts: Idle()):
        torch.manual_seed(3)
        loop = Loop("cnn", policy=policy, host=CNN(dropout=0.2))
        for number in range(3):
            loop.epoch(number)
        ends.append(state_of(loop))
    assert differing(*ends) == []


def test_evaluate_is_called_once_more_with_gradients_for_greedy_only():
    for policy, expected in (("greedy", [False, True]), ("heuristic", [False])):
        loop, modes = Loop(policy=policy), []

        def evaluate(loop=loop, modes=modes):
            modes.append(torch.is_grad_enabled())
            return loop.evaluate()

        loop.step(evaluate)
        assert modes == expected


# -- refusals ----------------------------------------------------------------------------------------------------------


def without_gradients(context):
    def evaluate(model):
        with context():
            return losses_of(model, VECTORS)

    return evaluate


OTHER = MLP()
USELESS = {
    "no_grad inside": without_gradients(torch.no_grad),
    "inference mode inside": without_gradients(torch.inference_mode),
    "detached": lambda model: losses_of(model, VECTORS).detach(),
    "correctness": lambda model: model(VECTORS).argmax(1) == 0,
    "another model": lambda model: losses_of(OTHER, VECTORS),
}


@pytest.mark.parametrize("evaluate", USELESS.values(), ids=USELESS)
def test_an_evaluation_without_gradients_is_refused_with_what_to_do_and_nothing_changes(evaluate):
    loop = Loop()
    before = state_of(loop)
    with pytest.raises(MeasurementError, match=r"evaluate\(\).*no_grad"):
        loop.step(lambda: evaluate(loop.garden.model))
    assert differing(before, state_of(loop)) == []
    assert (loop.garden.epoch, loop.garden.history, loop.scores) == (0, [], [None, None])
    loop.step()
    assert loop.garden.epoch == 1


@pytest.mark.parametrize("evaluate", [USELESS["no_grad inside"], USELESS["correctness"]])
def test_the_same_evaluation_serves_every_other_policy(evaluate):
    loop = Loop(policy="heuristic")
    loop.step(lambda: evaluate(loop.garden.model))
    assert loop.garden.epoch == 1


# -- by name, and as a user writes it ----------------------------------------------------------------------------------


def test_a_saved_garden_keeps_its_greedy_policy_by_name_and_goes_on_to_the_bit(tmp_path):
    loop = Loop("cnn")
    for number in range(3):
        loop.epoch(number)
    loop.garden.save(tmp_path)
    resumed = Loop("cnn", policy="never")
    resumed.garden = esper.load(tmp_path, CNN())
    resumed.optimizer = torch.optim.AdamW(resumed.garden.parameters(), lr=2e-2)
    resumed.garden.attach(resumed.optimizer)
    assert resumed.garden.policy_name == "greedy"
    assert [loop.epoch(number) for number in range(3, 7)] == [resumed.epoch(number) for number in range(3, 7)]
    assert resumed.scores == loop.scores


def test_a_greedy_rule_with_settings_of_the_users_own_gets_its_scores():
    small = Loop(policy=lambda facts: RulePolicy(Greedy(facts, share=0.0)))
    large = Loop(policy=lambda facts: RulePolicy(Greedy(facts, share=1000.0)))
    names = [[e.blueprint for e in loop.step() if isinstance(e, ActionTaken)] for loop in (small, large)]
    assert names == [["lora"], ["mlp"]]


def test_a_policy_that_does_not_read_scores_costs_no_gradients():
    loop = Loop(policy="heuristic")
    loop.step()
    assert loop.scores == [None, None]
