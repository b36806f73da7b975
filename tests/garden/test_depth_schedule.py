"""esper.DepthSchedule: a network that gets deeper by a plan, in the loop that people write."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import esper
from esper.garden import depth_schedule
from esper.leyline.depth_law import compute_shares, depth_at, token_shares
from esper.leyline.errors import (
    EsperError,
    HostError,
    OptimizerError,
    SaveError,
    SettingError,
    UnknownNameError,
)
from garden.depths import (
    GPT,
    LENGTH,
    ROWS,
    STEPS,
    TOTAL,
    Block,
    adamw,
    are_equal,
    batch,
    build,
    loss_of,
    schedule,
    split,
    train,
    values_of,
)

transformers = pytest.importorskip("transformers")

# -- the plan --------------------------------------------------------------------------------------


def test_the_network_is_as_deep_as_the_plan_says_after_every_step():
    model = build()
    depth = schedule(model, split(model))
    depths, answers = [], []
    for _ in range(STEPS):
        answers.append(depth.step(tokens=ROWS * LENGTH))
        depths.append(len(model.blocks))
    assert depths == [2] * 5 + [3] * 6 + [4] * 9
    assert [n for n, answer in enumerate(answers) if answer] == [5, 11]
    assert depth.depth == 4
    assert depth.tokens == TOTAL


def test_a_step_that_passes_two_depths_grows_once():
    model = build()
    depth = schedule(model, adamw(model))
    assert depth.step(tokens=TOTAL)
    assert depth.grown == [4]
    assert not depth.step(tokens=0)


@pytest.mark.parametrize("start", [1, 2, 5])
@pytest.mark.parametrize("rest", [0.0, 3.0])
def test_the_law_spends_compute_as_the_cube_root_says(start, rest):
    to, layer = 8, 2.0
    shares = token_shares(start, to, layer, rest)
    assert list(shares) == list(range(start + 1, to + 1))
    begins = [0.0, *shares.values(), 1.0]
    spent = [
        (begins[n + 1] - begins[n]) * (rest + (start + n) * layer) for n in range(to - start + 1)
    ]
    reached = [sum(spent[: n + 1]) / sum(spent) for n in range(to - start)]
    assert reached == pytest.approx(list(compute_shares(start, to).values()))
    for depth, share in compute_shares(start, to).items():
        assert depth_at(share * 1.001, to) == depth
        assert depth_at(share * 0.999, to) == depth - 1


def test_without_a_plan_the_law_decides_by_the_parameters_that_multiply():
    model = build()
    depth = schedule(model, adamw(model), plan=None)
    layer = sum(p.numel() for p in model.blocks[0].parameters())
    head = sum(p.numel() for p in model.head.parameters())
    assert depth.shares == token_shares(2, 4, layer, head)
    model.head.weight = model.token.weight  # tied: looked up and multiplied
    tied = schedule(model, adamw(model), plan=None)
    assert tied.shares == depth.shares


# -- what grows ------------------------------------------------------------------------------------


def test_growing_changes_nothing_but_the_list():
    model = build()
    model.blocks[1].norm.weight.requires_grad_(False)
    model.blocks[1].eval()
    optimizers = split(model)
    depth = schedule(model, optimizers, plan={4: 0.5})
    train(model, optimizers, depth, range(9))
    before, states = values_of(model), [copy.deepcopy(o.state) for o in optimizers]
    old = list(model.blocks)
    kept = [{id(p) for p in o.state} for o in optimizers]
    assert depth.step(tokens=ROWS * LENGTH)
    assert [block in old for block in model.blocks] == [True, False, True, False]
    assert [block.training for block in model.blocks] == [True, True, False, False]
    assert not model.blocks[3].norm.weight.requires_grad
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name.replace("blocks.1", "blocks.2")], value)
    assert [{id(p) for p in o.state} for o in optimizers] == kept
    for optimizer, state in zip(optimizers, states, strict=True):
        for values, saved in zip(optimizer.state.values(), state.values(), strict=True):
            assert all(torch.equal(values[key], saved[key]) for key in values)
    fresh = values_of(model)
    train(model, optimizers, depth, range(10, 11))
    changed = [n for n, p in model.blocks[3].named_parameters() if p.requires_grad]
    assert all(
        not torch.equal(model.state_dict()[f"blocks.3.{n}"], fresh[f"blocks.3.{n}"])
        for n in changed
    )


def test_a_model_of_transformers_keeps_its_configuration_true():
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config)
    optimizers = adamw(model)
    depth = schedule(model, optimizers, layers="model.layers")
    tokens = batch(0)
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizers[0].step()
        depth.step(tokens=ROWS * LENGTH)
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


# -- in people's loops -----------------------------------------------------------------------------


def test_gradient_accumulation_counts_the_tokens_of_all_its_batches():
    model = build()
    optimizers = adamw(model)
    depth = schedule(model, optimizers)
    depths = []
    for number in range(STEPS):
        loss_of(model, batch(number)).backward()
        if number % 2:
            optimizers[0].step()
            optimizers[0].zero_grad()
            depth.step(tokens=2 * ROWS * LENGTH)
            depths.append(depth.depth)
    assert depths == [2, 2, 3, 3, 3, 4, 4, 4, 4, 4]


def test_half_precision_with_a_scaler_trains_through_a_growth():
    model = build()
    optimizers = adamw(model)
    depth = schedule(model, optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(STEPS):
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch(number))
        broken = float("inf") if number % 5 == 4 else 1.0  # such a step is skipped
        scaler.scale(loss * broken).backward()
        scaler.step(optimizers[0])
        scaler.update()
        depth.step(tokens=ROWS * LENGTH)
    assert depth.depth == 4
    assert all(p in optimizers[0].state for p in model.parameters())


def test_an_average_of_the_weights_gets_copies_of_its_own_layers():
    model = build()
    optimizers = adamw(model)
    depth = schedule(model, optimizers)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    depth.follow(average)
    for number in range(STEPS):
        train(model, optimizers, None, [number])
        average.update_parameters(model)
        last = values_of(average.module.blocks[-1])
        if depth.step(tokens=ROWS * LENGTH):
            copied = average.module.blocks[-1].state_dict()
            assert all(torch.equal(copied[name], last[name]) for name in last)
            assert not torch.equal(copied["up.weight"], model.blocks[-1].up.weight)
    assert len(average.module.blocks) == 4
    assert average.module.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(HostError, match="2 layers and the network 4"):
        depth.follow(build())


def test_gradient_checkpointing_gives_the_same_run():
    class Checkpointed(GPT):
        def forward(self, tokens):
            features = self.token(tokens)
            for block in self.blocks:
                features = checkpoint(block, features, use_reentrant=False)
            return self.head(features)

    plain, model = build(), Checkpointed()
    model.load_state_dict(plain.state_dict())
    for network in (plain, model):
        optimizers = split(network)
        train(network, optimizers, schedule(network, optimizers))
    assert are_equal(plain, model)


def test_a_learning_rate_scheduler_goes_on():
    model = build()
    optimizers = split(model)
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in optimizers]
    depth = schedule(model, optimizers)
    for number in range(STEPS):
        train(model, optimizers, depth, [number])
        for rate in rates:
            rate.step()
    assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([0.02 / 21, 3e-3 / 21])


# -- resuming --------------------------------------------------------------------------------------


def save(model, optimizers, depth):
    return copy.deepcopy(
        {
            "depth": json.dumps(depth.state_dict()),
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    )


def resume(saved, layers=2):
    model = build(layers, seed=9)
    if layers == 2:
        optimizers = split(model)
        depth = schedule(model, optimizers)
        depth.load_state_dict(json.loads(saved["depth"]))
    else:
        optimizers = split(model)
        depth = schedule(model, optimizers, plan=None)
        depth.load_state_dict(json.loads(saved["depth"]))
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return model, optimizers, depth


@pytest.mark.parametrize("stop", [3, 6, 8, 15], ids=["before", "just grown", "between", "after"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(stop):
    whole = build()
    optimizers = split(whole)
    train(whole, optimizers, schedule(whole, optimizers))
    model = build()
    optimizers = split(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(stop))
    model, optimizers, depth = resume(save(model, optimizers, depth))
    train(model, optimizers, depth, range(stop, STEPS))
    assert are_equal(model, whole)
    assert depth.grown == [3, 4]


def test_a_network_that_is_built_as_deep_as_it_was_saved_resumes_too():
    whole = build()
    optimizers = split(whole)
    depth = schedule(whole, optimizers, plan=None)
    stop = next(
        n for n in range(STEPS) if not train(whole, optimizers, depth, [n]) or depth.depth > 2
    )
    saved = save(whole, optimizers, depth)
    train(whole, optimizers, depth, range(stop + 1, STEPS))
    model, optimizers, depth = resume(saved, layers=3)
    assert depth.start == 2
    train(model, optimizers, depth, range(stop + 1, STEPS))
    assert are_equal(model, whole)


def test_a_growth_that_fails_leaves_all_as_before_and_may_be_tried_again(monkeypatch):
    model = build()
    optimizers = split(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(5))
    before = save(model, optimizers, depth)
    groups = [[id(p) for p in o.param_groups[0]["params"]] for o in optimizers]
    with monkeypatch.context() as patch:
        joined = depth_schedule.join_originals

        def fail(*given):
            joined(*given)
            raise MemoryError

        patch.setattr(depth_schedule, "join_originals", fail)
        with pytest.raises(MemoryError):
            depth.step(tokens=ROWS * LENGTH)
    assert save(model, optimizers, depth)["depth"] == before["depth"]
    assert values_of(model).keys() == before["model"].keys()
    assert [[id(p) for p in o.param_groups[0]["params"]] for o in optimizers] == groups
    assert depth.step(tokens=ROWS * LENGTH)
    assert len(model.blocks) == 3


# -- bad input -------------------------------------------------------------------------------------


class ByNumber(GPT):
    def forward(self, tokens):
        features = self.token(tokens)
        for number in range(2):
            features = self.blocks[number](features)
        return self.head(features)


def mixed():
    model = build()
    model.blocks.append(nn.Linear(8, 8))
    return model


def wider():
    model = build()
    model.blocks.append(Block(4))
    return model


def compiled_alone():
    model = build()
    model.blocks[1].compile(backend="eager")
    return model


def growing():
    return esper.grow(build(), slots="blocks.0", example=batch(0)[:, :-1]).model


REFUSALS = {
    "no such list": (build, {"layers": "layers"}, UnknownNameError, "'layers'"),
    "another class": (mixed, {}, HostError, r"blocks\.2, a Linear, .*blocks\.0, a Block"),
    "other shapes": (wider, {}, HostError, r"blocks\.2, a Block, is built differently"),
    "compiled by itself": (compiled_alone, {}, HostError, r"blocks\.1.*esper\.compile_layers"),
    "growing": (growing, {}, HostError, r"harvest\(\)"),
    "data parallel": (lambda: nn.DataParallel(build()), {}, HostError, "DistributedDataParallel"),
    "to below": (build, {"to": 1}, SettingError, "to is 1.*the|blocks has 2"),
    "to no number": (build, {"to": "4"}, SettingError, "'4'"),
    "total": (build, {"total": 0}, SettingError, "total is 0"),
    "empty plan": (build, {"plan": {}}, SettingError, "plan is"),
    "shares above one": (build, {"plan": {4: 3}}, SettingError, "4: 3"),
    "shrinks": (build, {"plan": {4: 0.3, 3: 0.6}}, SettingError, "shrinks: 3 layers at 0.6"),
    "below the present": (build, {"plan": {2: 0.1, 4: 0.3}}, SettingError, "shrinks: 2 layers"),
    "ends elsewhere": (build, {"plan": {3: 0.3}}, SettingError, "ends with 3 layers, and to is 4"),
    "two at once": (build, {"plan": {3: 0.3, 4: 0.3}}, SettingError, "two depths"),
    "not in order": (
        ByNumber,
        {"example": batch(0)[:, :-1]},
        HostError,
        r"blocks\.\d would never run",
    ),
}


@pytest.mark.parametrize(("host", "options", "error", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_schedule_that_cannot_be_kept_is_refused_with_the_model_as_before(
    host, options, error, said
):
    model = host()
    before = values_of(model)
    optimizers = adamw(model)
    with pytest.raises(error, match=said) as caught:
        schedule(model, optimizers, **options)
    assert "\n" not in str(caught.value)
    assert values_of(model).keys() == before.keys()


def test_a_proof_on_an_example_leaves_the_network_as_it_was():
    model = build()
    before, blocks = values_of(model), list(model.blocks)
    optimizers = split(model)
    depth = schedule(model, optimizers, example=batch(0)[:, :-1])
    assert list(model.blocks) == blocks
    assert all("forward" not in vars(block) for block in blocks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizers, depth)
    assert depth.depth == 4


def test_an_optimiser_that_misses_parameters_is_refused():
    model = build()
    with pytest.raises(OptimizerError, match=r"blocks\.0\.norm\.weight and \d+ more"):
        schedule(model, split(model)[:1])
    depth = schedule(model, None)
    with pytest.raises(OptimizerError, match=r"attach\(optimizers\)"):
        depth.step(tokens=1)
    depth.attach(split(model))
    assert not depth.step(tokens=1)


@pytest.mark.parametrize("tokens", [-1, 1.5, "8", None, float("nan"), True])
def test_tokens_that_are_no_count_are_refused_and_nothing_is_counted(tokens):
    model = build()
    depth = schedule(model, adamw(model))
    with pytest.raises(SettingError, match="tokens is"):
        depth.step(tokens=tokens)
    assert depth.tokens == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"total": TOTAL + 1}, "total is"),
        ({"plan": {4: 0.6}}, "plan is"),
        ({"plan": None}, "has_plan"),
        ({"to": 5, "plan": {5: 0.5}}, "to is 5, and was 4"),
    ],
)
def test_a_resume_with_another_plan_is_refused_with_the_model_as_before(change, said):
    model = build()
    depth = schedule(model, adamw(model))
    depth.step(tokens=TOTAL // 2)
    again = build()
    other = schedule(again, adamw(again), **change)
    with pytest.raises(SettingError, match=said) as caught:
        other.load_state_dict(depth.state_dict())
    assert "\n" not in str(caught.value)
    assert len(again.blocks) == 2
    assert other.tokens == 0


def test_a_resume_from_something_else_is_refused():
    model = build()
    depth = schedule(model, adamw(model))
    with pytest.raises(SaveError, match="no state of a DepthSchedule"):
        depth.load_state_dict({"step": 3})
    deep = build(3)
    other = schedule(deep, adamw(deep), plan={4: 0.6})
    state = depth.state_dict() | {"shares": other.state_dict()["shares"]}
    with pytest.raises(SettingError, match="has 3 layers; this run began with 2"):
        other.load_state_dict(state)


def test_copies_that_never_run_are_an_error_at_the_next_step():
    torch.manual_seed(0)
    model = ByNumber()
    optimizers = adamw(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(6))
    assert len(model.blocks) == 3
    with pytest.raises(EsperError, match=r"blocks\.2 got no gradient.*Loop over the list"):
        train(model, optimizers, depth, range(6, 8))


def test_steps_without_a_backward_between_them_say_nothing_about_copies():
    model = build()
    optimizers = adamw(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(6))
    assert depth.depth == 3
    assert not depth.step(tokens=0)
    assert not depth.step(tokens=0)
    train(model, optimizers, depth, range(6, STEPS))
