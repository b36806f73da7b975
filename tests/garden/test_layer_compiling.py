"""esper.compile_layers: copies run code that is compiled already, so that growing compiles nothing."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import esper
from esper.leyline.errors import EsperError, HostError, SettingError, UnknownNameError
from garden.depths import (
    LENGTH,
    ROWS,
    STEPS,
    adamw,
    batch,
    build,
    loss_of,
    schedule,
    sgd,
    split,
    train,
    values_of,
)

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations():
    """What torch counts: frames that it compiled, graphs, and compilations that failed a guard."""
    frames, stats = counters["frames"], counters["stats"]
    return frames["total"], stats["unique_graphs"], sum(counters["recompiles"].values())


def close(first, second):
    one, other = values_of(first), values_of(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_growing_compiles_nothing_and_the_run_is_that_of_plain_layers(backend):
    model, plain = build(), build()
    esper.compile_layers(model, "blocks", backend=backend)
    optimizers, others = sgd(model), sgd(plain)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(2))
    before = compilations()
    assert before[0] > 0
    train(model, optimizers, depth, range(2, STEPS))
    assert depth.grown == [3, 4]
    assert compilations() == before
    assert len({block._compiled_call_impl.run for block in model.blocks}) == 1
    train(plain, others, schedule(plain, others))
    close(model, plain)


def test_muon_and_adamw_train_compiled_layers_through_a_growth():
    model = esper.compile_layers(build(), "blocks", backend="aot_eager")
    optimizers = split(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, range(2))
    before, values = compilations(), values_of(model)
    train(model, optimizers, depth, range(2, STEPS))
    assert depth.grown == [3, 4]
    assert compilations() == before
    assert all(not torch.equal(value, values_of(model)[name]) for name, value in values.items())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_layers_of_transformers_compile_once_and_growing_compiles_nothing(checkpoints):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    esper.compile_layers(model, "model.layers", backend="aot_eager")
    optimizers = adamw(model)
    depth = schedule(model, optimizers, layers="model.layers")

    def loss(call, tokens):
        return call(input_ids=tokens, labels=tokens, use_cache=False).loss

    train(model, optimizers, depth, range(2), loss=loss)
    before = compilations()
    assert before[1] == 1
    train(model, optimizers, depth, range(2, STEPS), loss=loss)
    assert depth.grown == [3, 4]
    assert compilations() == before
    assert all(layer.gradient_checkpointing is checkpoints for layer in model.model.layers)


def test_esper_deepen_compiles_nothing_either():
    model = build()
    esper.compile_layers(model, "blocks", backend="aot_eager")
    optimizers = adamw(model)
    train(model, optimizers, steps=range(2))
    before = compilations()
    esper.deepen(model, 4, optimizer=optimizers, example=batch(0)[:, :-1])
    train(model, optimizers, steps=range(2))
    assert len(model.blocks) == 4
    assert len({block._compiled_call_impl.run for block in model.blocks}) == 1
    assert compilations() == before


def test_layers_with_hooks_run_them_around_compiled_code():
    model = build()
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append("before"))
        block.register_forward_hook(lambda module, args, output: seen.append("after"))
    wanted = loss_of(model, batch(0))
    esper.compile_layers(model, "blocks", backend="aot_eager")
    seen.clear()
    for _ in range(2):
        torch.testing.assert_close(loss_of(model, batch(0)), wanted)
    assert seen == ["before", "after"] * 4
    assert all("forward" not in vars(block) for block in model.blocks)
    before = compilations()
    esper.deepen(model, 3, example=batch(0)[:, :-1])
    loss_of(model, batch(0))
    assert compilations() == before


def test_evaluation_and_autocast_run_compiled_layers_too():
    model = build()
    esper.compile_layers(model, "blocks", backend="aot_eager")
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert loss_of(model, batch(0)).isfinite()
    assert compilations()[0] > 0


def test_many_models_in_one_process_do_not_use_up_torchs_limit_of_compilations():
    for width in range(8, 8 + 2 * torch._dynamo.config.recompile_limit, 2):
        model = build(width=width)
        esper.compile_layers(model, "blocks", backend="eager")
        before = compilations()
        loss_of(model, batch(0)).backward()
        assert compilations()[1] > before[1]


def test_a_model_that_is_compiled_as_a_whole_works_and_says_what_growth_costs():
    model, plain = build(), build()
    compiled = torch.compile(model, backend="eager")
    optimizers, others = adamw(model), adamw(plain)
    said = r"each of its 2 growths compiles it again.*compile_layers\(model, 'blocks'\)"
    with pytest.warns(UserWarning, match=said) as caught:
        depth = schedule(compiled, optimizers)
    assert caught[0].filename == schedule.__code__.co_filename
    train(compiled, optimizers, depth)
    train(plain, others, schedule(plain, others))
    close(model, plain)


def test_more_growths_than_torch_compiles_are_said():
    model = build()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.warns(UserWarning, match=r"after 8 torch stops .*recompile_limit"):
        schedule(compiled, adamw(model), to=12, plan=None)


def test_compiled_layers_say_nothing():
    model = build()
    esper.compile_layers(model, "blocks", backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule(model, adamw(model))


def test_modes_with_cuda_graphs_are_refused_by_name():
    for options in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}):
        with pytest.raises(SettingError, match=f"mode='{options['mode']}'"):
            esper.compile_layers(build(), "blocks", **options)
    with pytest.raises(SettingError, match="cudagraphs"):
        esper.compile_layers(build(), "blocks", options={"triton.cudagraphs": True})
    model = build()
    with pytest.raises(HostError, match="mode='reduce-overhead'"):
        schedule(torch.compile(model, mode="reduce-overhead"), adamw(model))


def test_what_cannot_be_compiled_layer_by_layer_is_refused():
    wrapped = build()
    wrapped.blocks[1] = torch.compile(wrapped.blocks[1], backend="eager")
    replaced = build()
    replaced.blocks[0].forward = lambda features: features
    cases = [
        (torch.compile(build(), backend="eager"), "blocks", HostError, "compiled as a whole"),
        (wrapped, "blocks", HostError, r"blocks\.1 is compiled already"),
        (replaced, "blocks", HostError, r"blocks\.0 is replaced"),
        (build(), "layers", UnknownNameError, "'layers'"),
        (nn.DataParallel(build()), "blocks", HostError, "DataParallel"),
    ]
    for model, layers, error, said in cases:
        with pytest.raises(error, match=said) as caught:
            esper.compile_layers(model, layers)
        assert isinstance(caught.value, EsperError)
        assert "\n" not in str(caught.value)


def test_tokens_are_counted_alike_when_layers_are_compiled():
    model = build()
    esper.compile_layers(model, "blocks", backend="aot_eager")
    depth = schedule(model, adamw(model))
    assert [depth.step(tokens=ROWS * LENGTH) for _ in range(6)] == [False] * 5 + [True]
