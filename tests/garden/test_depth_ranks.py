"""A network that gets deeper in several processes: alike on all, and the one that one would have."""

import copy
import hashlib
import os
import signal

import pytest
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import esper
from esper.garden import depth_schedule
from esper.leyline.errors import HostError
from garden.depths import (
    PLAN,
    STEPS,
    adamw,
    build,
    loss_of,
    schedule,
    sgd,
    split,
    train,
    values_of,
)
from garden.test_processes import in_group
from garden.test_processes import values_of as values_of_ranks
from simic.team_workers import run_ranks

pytestmark = pytest.mark.ranks


def digest(model):
    parts = [value.numpy().tobytes() for value in values_of(model).values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def own_share():
    return slice(distributed.get_rank(), None, distributed.get_world_size())


def build_exact():
    """In double precision: Muon rounds to half precision, which makes more of every difference."""
    return build().double()


def alone(build=build_exact, optimizers_of=split):
    """The run that one process makes on all rows."""
    model = build()
    optimizers = optimizers_of(model)
    train(model, optimizers, schedule(model, optimizers))
    return values_of(model)


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=0)


def accumulate(call, tokens):
    """Two passes for a step, the first without DDP's reduction."""
    half = len(tokens) // 2
    with call.no_sync():
        (loss_of(call, tokens[:half]) / 2).backward()
    return loss_of(call, tokens[half:]) / 2


WAYS = {
    "plain": ({}, loss_of),
    "static graph": ({"static_graph": True}, loss_of),
    "unused parameters": ({"find_unused_parameters": True}, loss_of),
    "no_sync": ({}, accumulate),
    "views of buckets": ({"gradient_as_bucket_view": True}, loss_of),
    "small buckets": ({"bucket_cap_mb": 0.0001}, loss_of),
}


@pytest.mark.parametrize("way", WAYS)
def test_ddp_is_wrapped_once_and_ranks_are_equal_after_every_step(way, tmp_path):
    settings, loss = WAYS[way]

    def work(rank):
        model = build_exact()
        if settings.get("find_unused_parameters"):
            model.idle = torch.nn.Linear(2, 2)  # no loss reaches it
        optimizers = split(model)
        wrapped = DistributedDataParallel(model, **settings)
        depth = schedule(wrapped, optimizers)
        digests = []
        for number in range(STEPS):
            train(wrapped, optimizers, depth, [number], own_share(), loss)
            digests.append(digest(model))
        assert depth.grown == [3, 4]
        return digests, {n: v for n, v in values_of(model).items() if "idle" not in n}

    (first, values), (second, _) = values_of_ranks(tmp_path, in_group(work))
    assert first == second
    assert len(set(first)) == STEPS
    assert_close(values, alone())


def test_ddp_in_single_precision_is_the_run_of_one_process(tmp_path):
    def work(rank):
        model = build()
        optimizers = sgd(model)
        wrapped = DistributedDataParallel(model)
        train(wrapped, optimizers, schedule(wrapped, optimizers), share=own_share())
        return values_of(model)

    values, _ = values_of_ranks(tmp_path, in_group(work))
    assert_close(values, alone(build, sgd))


def test_a_ddp_that_is_built_after_the_schedule_follows_too(tmp_path):
    def work(rank):
        model = build_exact()
        optimizers = split(model)
        depth = schedule(model, optimizers)
        wrapped = DistributedDataParallel(torch.nn.Sequential(model))
        train(wrapped, optimizers, depth, share=own_share())
        return digest(model), values_of(model)

    (first, values), (second, _) = values_of_ranks(tmp_path, in_group(work))
    assert first == second
    assert_close(values, alone())


def test_a_communication_hook_of_ddp_reduces_new_layers_too(tmp_path):
    def work(rank):
        model = build()
        optimizers = adamw(model)
        wrapped = DistributedDataParallel(model)
        calls = []

        def note(state, bucket):
            calls.append(sum(p.numel() for p in bucket.parameters()))
            return default_hooks.allreduce_hook(state, bucket)

        wrapped.register_comm_hook(None, note)
        depth = schedule(wrapped, optimizers)
        train(wrapped, optimizers, depth, share=own_share())
        calls.clear()
        train(wrapped, optimizers, depth, [0], own_share())
        assert len(wrapped._module_parameters) == len(list(model.parameters()))
        return digest(model), sum(calls), sum(p.numel() for p in model.parameters())

    first, second = values_of_ranks(tmp_path, in_group(work))
    assert first == second
    assert first[1] == first[2]


def test_compiled_layers_and_half_precision_under_ddp(tmp_path):
    def loss(call, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(call, tokens)

    def work(rank):
        model = esper.compile_layers(build(), "blocks", backend="aot_eager")
        optimizers = split(model)
        wrapped = DistributedDataParallel(model)
        depth = schedule(wrapped, optimizers)
        train(wrapped, optimizers, depth, range(2), own_share(), loss)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(wrapped, optimizers, depth, range(2, STEPS), own_share(), loss)
        assert depth.grown == [3, 4]
        return digest(model), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    first, second = values_of_ranks(tmp_path, in_group(work), seconds=120)
    assert first == second
    assert first[1] == 0


def test_a_fork_of_a_ddp_goes_on_as_the_first(tmp_path):
    def work(rank):
        model = build()
        optimizers = split(model)
        wrapped = DistributedDataParallel(model, static_graph=True)
        train(wrapped, optimizers, schedule(wrapped, optimizers), range(13), own_share())
        second, others = esper.fork(wrapped, optimizers)
        assert type(second) is DistributedDataParallel
        train(second, others, steps=range(13, STEPS), share=own_share())
        train(wrapped, optimizers, steps=range(13, STEPS), share=own_share())
        return digest(second.module), digest(model)

    (one, other), (third, fourth) = values_of_ranks(tmp_path, in_group(work))
    assert one == other == third == fourth


def test_a_resumed_run_under_ddp_is_the_uninterrupted_one(tmp_path):
    def start(wraps_first):
        model = build()
        optimizers = split(model)
        call = DistributedDataParallel(model) if wraps_first else model
        return model, optimizers, call, schedule(call, optimizers)

    def work(rank):
        model, optimizers, call, depth = start(True)
        train(call, optimizers, depth, range(9), own_share())
        saved = depth.state_dict(), values_of(model), [o.state_dict() for o in optimizers]
        digests = []
        for wraps_first in (True, False):
            again, others, call_again, resumed = start(wraps_first)
            resumed.load_state_dict(saved[0])
            again.load_state_dict(saved[1])
            for optimizer, state in zip(others, saved[2], strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
            if not wraps_first:
                call_again = DistributedDataParallel(again)
            train(call_again, others, resumed, range(9, STEPS), own_share())
            digests.append(digest(again))
        train(call, optimizers, depth, range(9, STEPS), own_share())
        return [digest(model), *digests]

    first, second = values_of_ranks(tmp_path, in_group(work))
    assert len({*first, *second}) == 1


def test_a_ddp_that_new_layers_cannot_follow_is_refused(tmp_path):
    def work(rank):
        model = build()
        optimizers = adamw(model)
        last = model.head.bias
        wrapped = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[("head.bias", last)],
            param_to_hook_all_reduce=last,
        )
        with pytest.raises(HostError, match="delay_all_reduce_named_params"):
            schedule(wrapped, optimizers, plan=PLAN)
        return len(model.blocks)

    assert values_of_ranks(tmp_path, in_group(work)) == [2, 2]


def test_a_run_that_is_killed_while_it_grows_resumes_bit_for_bit(tmp_path):
    path = tmp_path / "run.pt"

    def work(rank):
        model = build()
        optimizers = split(model)
        depth = schedule(model, optimizers)
        joined = depth_schedule.join_originals

        def die(*given):
            joined(*given)
            if len(model.blocks) == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        depth_schedule.join_originals = die
        for number in range(STEPS):
            train(model, optimizers, depth, [number])
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save((number, depth.state_dict(), model.state_dict(), states), path)

    (ended,) = run_ranks(tmp_path / "killed", 1, work)
    assert ended.code not in (0, 2, 99)
    number, plan, weights, states = torch.load(path)
    model = build(seed=4)
    optimizers = split(model)
    depth = schedule(model, optimizers)
    depth.load_state_dict(plan)
    assert len(model.blocks) == 3
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    train(model, optimizers, depth, range(number + 1, STEPS))
    whole = build()
    others = split(whole)
    train(whole, others, schedule(whole, others))
    assert digest(model) == digest(whole)
