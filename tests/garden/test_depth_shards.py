"""A network that gets deeper while `fully_shard` shards it: the run of one that is not sharded."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import esper
from esper.leyline.errors import HostError
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
from garden.test_depth_ranks import alone, assert_close, build_exact, own_share
from garden.test_processes import in_group
from garden.test_processes import values_of as values_of_ranks

pytestmark = pytest.mark.ranks
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model, **settings):
    """Layer by layer, then the rest, as the documentation of `fully_shard` says."""
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def gathered(model):
    """All values, whole, on every process."""
    values = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        values[name] = whole.detach().clone()
    return values


SETTINGS = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("optimizers_of", [adamw, sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_steps_with_growth_are_those_of_an_unsharded_run(name, optimizers_of, tmp_path):
    def work(rank):
        model = shard(build_exact(), **SETTINGS[name])
        optimizers = optimizers_of(model)
        depth = schedule(model, optimizers)
        train(model, optimizers, depth, share=own_share())
        assert depth.grown == [3, 4]
        kinds = {type(p.data).__name__ for p in model.parameters()}
        sizes = [sum(p.to_local().numel() for p in block.parameters()) for block in model.blocks]
        return gathered(model), kinds, sizes

    (one, kinds, sizes), (other, _, others) = values_of_ranks(tmp_path, in_group(work))
    assert kinds == {"DTensor"}
    assert len({*sizes}) == len({*others}) == 1
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_close(one, alone(optimizers_of=optimizers_of))


def test_muon_is_as_close_to_an_unsharded_run_as_without_growth(tmp_path):
    """Muon rounds to half precision between products of shards, so no sharded run is closer."""

    def distance(values, wanted):
        assert values.keys() == wanted.keys()
        return max(float((values[name] - wanted[name]).abs().max()) for name in wanted)

    def work(rank):
        values = []
        for grows in (True, False):
            model = shard(build_exact())
            optimizers = split(model)
            train(
                model, optimizers, schedule(model, optimizers) if grows else None, share=own_share()
            )
            values.append(gathered(model))
        return values

    (grown, kept), _ = values_of_ranks(tmp_path, in_group(work))
    model = build_exact()
    train(model, split(model))
    assert distance(kept, values_of(model)) > 1e-5
    assert distance(grown, alone()) < 2 * distance(kept, values_of(model)) < 0.05


def test_growing_before_the_first_forward_and_with_layers_as_roots(tmp_path):
    def work(rank):
        model = build_exact()
        for parameter in [*model.token.parameters(), *model.head.parameters()]:
            parameter.requires_grad_(False)
        for block in model.blocks:
            fully_shard(block)
        optimizers = [torch.optim.SGD(model.blocks.parameters(), lr=0.1)]
        depth = schedule(model, optimizers, plan={3: 0.0, 4: 0.3})
        assert depth.step(tokens=0)
        train(model, optimizers, depth, share=own_share())
        assert len(model.blocks) == 4
        return gathered(model)

    def plainly():
        model = build_exact()
        for parameter in [*model.token.parameters(), *model.head.parameters()]:
            parameter.requires_grad_(False)
        optimizers = [torch.optim.SGD(model.blocks.parameters(), lr=0.1)]
        depth = schedule(model, optimizers, plan={3: 0.0, 4: 0.3})
        depth.step(tokens=0)
        train(model, optimizers, depth)
        return values_of(model)

    one, other = values_of_ranks(tmp_path, in_group(work))
    assert_close(one, other)
    assert_close(one, plainly())


def test_new_layers_have_the_mixed_precision_of_the_others(tmp_path):
    def work(rank):
        model = shard(build(), mp_policy=HALF)
        optimizers = sgd(model)
        depth = schedule(model, optimizers)
        types = []
        train(model, optimizers, depth)  # all rows on both: so no rounding in the reduction
        for block in model.blocks:
            block.up.register_forward_hook(lambda m, i, output: types.append(output.dtype))
        loss_of(model, batch(0)).backward()
        policies = {block._get_fsdp_state()._mp_policy for block in model.blocks}
        return gathered(model), types, len(policies)

    (one, types, policies), _ = values_of_ranks(tmp_path, in_group(work))
    assert types == [torch.bfloat16] * 4
    assert policies == 1

    def half_plain():
        model = build()
        optimizers = sgd(model)
        train(model, optimizers, schedule(model, optimizers), loss=half_loss)
        return values_of(model)

    def half_loss(model, tokens):
        half = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        return loss_of(lambda t: torch.func.functional_call(model, half, (t,)), tokens)

    assert_close(one, half_plain())


@pytest.mark.parametrize("frees", [True, False, None], ids=["yes", "no", "default"])
def test_new_layers_free_their_weights_after_forward_as_the_others_do(frees, tmp_path):
    def work(rank):
        model = shard(build(), reshard_after_forward=frees)
        optimizers = sgd(model)
        depth = schedule(model, optimizers)
        train(model, optimizers, depth)
        with torch.no_grad():
            loss_of(model, batch(0))
        return [type(block.up.weight.data).__name__ for block in model.blocks]

    kind = "Tensor" if frees is False else "DTensor"  # by default all but the root
    assert values_of_ranks(tmp_path, in_group(work)) == [[kind] * 4] * 2


def test_what_was_set_on_sharded_layers_holds_for_new_ones(tmp_path):
    """Gradients are added up here, and not averaged: twice as large on two processes."""

    def work(rank):
        model = shard(build_exact())
        for part in (model, *model.blocks):
            part.set_gradient_divide_factor(1.0)
        optimizers = sgd(model)
        train(model, optimizers, schedule(model, optimizers), share=own_share())
        return gathered(model)

    one, _ = values_of_ranks(tmp_path, in_group(work))
    model = build_exact()
    optimizers = sgd(model)
    depth = schedule(model, optimizers)
    train(model, optimizers, depth, loss=lambda call, tokens: 2 * loss_of(call, tokens))
    assert_close(one, values_of(model))


def test_offloaded_shards_are_copied_to_where_they_are(tmp_path):
    def work(rank):
        model = shard(build_exact(), offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizers = sgd(model)
        train(model, optimizers, schedule(model, optimizers), share=own_share())
        return gathered(model)

    one, _ = values_of_ranks(tmp_path, in_group(work))
    assert_close(one, alone(optimizers_of=sgd))


def test_gradients_are_accumulated_without_reduction_through_a_growth(tmp_path):
    def work(rank):
        model = shard(build_exact())
        optimizers = sgd(model)
        depth = schedule(model, optimizers)
        for number in range(0, STEPS, 2):
            for part in (number, number + 1):
                model.set_requires_gradient_sync(part % 2 == 1)
                (loss_of(model, batch(part)[own_share()]) / 2).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            depth.step(tokens=2 * ROWS * LENGTH)
        return gathered(model), depth.grown

    def plainly():
        model = build_exact()
        optimizers = sgd(model)
        depth = schedule(model, optimizers)
        for number in range(0, STEPS, 2):
            for part in (number, number + 1):
                (loss_of(model, batch(part)) / 2).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            depth.step(tokens=2 * ROWS * LENGTH)
        return values_of(model)

    (one, grown), _ = values_of_ranks(tmp_path, in_group(work))
    assert grown == [3, 4]
    assert_close(one, plainly())


def test_compiled_layers_that_are_sharded_grow_without_compiling(tmp_path):
    def work(rank):
        model = shard(build())
        esper.compile_layers(model, "blocks", backend="aot_eager")
        optimizers = sgd(model)
        depth = schedule(model, optimizers)
        train(model, optimizers, depth, range(2), own_share())
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(model, optimizers, depth, range(2, STEPS), own_share())
        after = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return gathered(model), before, after

    (one, before, after), _ = values_of_ranks(tmp_path, in_group(work), seconds=120)
    assert before == after > 0
    assert_close(one, alone(build, sgd))


def test_a_fork_of_a_sharded_network_goes_on_as_the_first(tmp_path):
    def work(rank):
        model = shard(build())
        optimizers = split(model)
        train(model, optimizers, schedule(model, optimizers), range(13), own_share())
        second, others = esper.fork(model, optimizers)
        train(second, others, steps=range(13, STEPS), share=own_share())
        one = gathered(second)
        train(model, optimizers, steps=range(13, STEPS), share=own_share())
        other = gathered(model)
        assert type(second) is type(model)
        return all(torch.equal(one[name], other[name]) for name in other), len(one)

    assert values_of_ranks(tmp_path, in_group(work)) == [(True, len(values_of(build(4))))] * 2


@pytest.mark.parametrize("stop", [9, 15])
def test_a_saved_run_resumes_at_the_new_depth(stop, tmp_path):
    folder = str(tmp_path / "checkpoint")

    def work(rank):
        model = shard(build())
        optimizers = split(model)
        depth = schedule(model, optimizers)
        train(model, optimizers, depth, range(stop), own_share())
        weights, states = get_state_dict(model, optimizers)
        dcp.save({"model": weights, "optimizers": states}, checkpoint_id=folder)
        saved = depth.state_dict()
        train(model, optimizers, depth, range(stop, STEPS), own_share())

        again = shard(build(seed=5))
        others = split(again)
        resumed = schedule(again, others)
        resumed.load_state_dict(saved)
        weights, states = get_state_dict(again, others)
        state = {"model": weights, "optimizers": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            again,
            others,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
        )
        train(again, others, resumed, range(stop, STEPS), own_share())
        one, other = gathered(model), gathered(again)
        return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)

    assert values_of_ranks(tmp_path, in_group(work)) == [True, True]


def test_layers_that_are_sharded_with_the_rest_are_refused(tmp_path):
    def work(rank):
        model = fully_shard(build())
        with pytest.raises(HostError, match=r"blocks\.0\.\S+ is sharded with other modules"):
            schedule(model, adamw(model))
        old = nn.Module()
        old.blocks = distributed.fsdp.FullyShardedDataParallel(build(), device_id="cpu")
        with pytest.raises(HostError, match="fully_shard, layer by layer"):
            schedule(old, adamw(old))
        return len(model.blocks)

    assert values_of_ranks(tmp_path, in_group(work)) == [2, 2]
