"""esper.fork: a second run from the middle of one that goes on as the first would, bit for bit."""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError, OptimizerError
from garden.depths import (
    adamw,
    are_equal,
    batch,
    build,
    loss_of,
    schedule,
    sgd,
    split,
    train,
    values_of,
)


@pytest.mark.parametrize("optimizers_of", [split, adamw, sgd], ids=["muon", "adamw", "sgd"])
def test_a_fork_goes_on_as_the_first_bit_for_bit_and_shares_nothing(optimizers_of):
    model = build()
    optimizers = optimizers_of(model)
    train(model, optimizers, schedule(model, optimizers), range(8))
    second, others = esper.fork(model, optimizers)
    before = values_of(model)
    losses = train(second, others, steps=range(8, 14))
    assert are_equal(model, second) is False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert train(model, optimizers, steps=range(8, 14)) == losses
    assert are_equal(model, second)


def test_a_fork_inside_an_accumulated_step_has_its_gradients():
    model = build()
    optimizers = adamw(model)
    loss_of(model, batch(0)).backward()
    second, others = esper.fork(model, optimizers)
    for network, listed in ((model, optimizers), (second, others)):
        loss_of(network, batch(1)).backward()
        listed[0].step()
    assert are_equal(model, second)


def test_one_optimiser_gives_one_and_a_rate_that_falls_is_the_forks_own():
    model = build()
    (optimizer,) = adamw(model)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    train(model, [optimizer], steps=range(3))
    second, other = esper.fork(model, optimizer)
    assert type(other) is torch.optim.AdamW
    decay = torch.optim.lr_scheduler.LambdaLR(other, lambda n: 1 - n / 4)
    for _ in range(3):
        train(second, [other], steps=[0])
        decay.step()
    rate.step()
    assert other.param_groups[0]["lr"] == pytest.approx(3e-3 / 4)
    assert optimizer.param_groups[0]["lr"] == 3e-3


def test_a_fork_keeps_modes_ties_buffers_and_what_is_frozen():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Dropout())
    model[2].weight = model[0].weight
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model(torch.randn(4, 3))
    trained = [p for p in model.parameters() if p.requires_grad]
    second, _ = esper.fork(model, torch.optim.SGD(trained, lr=0.1))
    assert second[2].weight is second[0].weight
    assert [part.training for part in second] == [True, False, True, True]
    assert [p.requires_grad for p in second.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert are_equal(model, second)


def test_a_fork_of_a_frozen_network_is_frozen():
    model = build().requires_grad_(False)
    model.head.weight.requires_grad_(True)
    second, _ = esper.fork(model, torch.optim.SGD([model.head.weight], lr=0.1))
    learning = [name for name, p in second.named_parameters() if p.requires_grad]
    assert learning == ["head.weight"]


def test_what_an_optimiser_of_your_own_keeps_beside_its_state_is_copied():
    class Counting(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.first = self.param_groups[0]["params"][0]
            self.calls = [0]

        def step(self, closure=None):
            self.calls[0] += 1
            return super().step(closure)

    model = build()
    optimizer = Counting(model.parameters())
    train(model, [optimizer], steps=[0])
    second, other = esper.fork(model, optimizer)
    train(second, [other], steps=[1])
    assert (optimizer.calls, other.calls) == ([1], [2])
    assert other.first is next(second.parameters())


def test_a_compiled_fork_runs_the_code_of_the_first():
    torch._dynamo.reset()
    for compile_it in (esper.compile_layers, None):
        model = build()
        optimizers = adamw(model)
        call = torch.compile(model, backend="aot_eager")
        if compile_it is not None:
            call = compile_it(model, "blocks", backend="aot_eager")
        train(call, optimizers, steps=range(2))
        second, others = esper.fork(call, optimizers)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert train(call, optimizers, steps=[2]) == train(second, others, steps=[2])
        assert type(second) is type(call)
        if compile_it is not None:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
            compiled = [block._compiled_call_impl for block in (*model.blocks, *second.blocks)]
            assert len({code.run for code in compiled}) == 1
            assert compiled[2].layer is second.blocks[0]


def test_what_cannot_be_forked_is_refused_in_one_line():
    model = build()
    with pytest.raises(OptimizerError, match="parameters that the model does not have"):
        esper.fork(model, adamw(copy.deepcopy(model)))
    model.file = open(__file__, encoding="utf-8")  # noqa: SIM115
    with model.file, pytest.raises(HostError, match="GPT cannot be copied"):
        esper.fork(model, adamw(model))
    garden = esper.grow(build(), slots="blocks.0", example=batch(0)[:, :-1])
    with pytest.raises(HostError, match=r"harvest\(\)"):
        esper.fork(garden.model, [])
