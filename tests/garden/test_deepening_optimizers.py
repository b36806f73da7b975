"""esper.deepen with the optimisers that a network is trained with: every copy learns, or a refusal."""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import OptimizerError
from kasmina.copies.test_membership import GPT, TOKENS, Config


def muon_and_adamw(model):
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)


def step(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(TOKENS).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def ids_of(optimizer):
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def test_each_parameter_of_a_copy_goes_to_the_optimiser_of_its_original():
    model = GPT()
    muon, adamw = muon_and_adamw(model)
    step(model, [muon, adamw])
    state = {id(p): copy.deepcopy(v) for o in (muon, adamw) for p, v in o.state.items()}
    esper.deepen(model, 4, optimizer=[muon, adamw], example=TOKENS)
    matrices = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    assert set(ids_of(muon)) == matrices
    assert set(ids_of(adamw)) == {id(p) for p in model.parameters()} - matrices
    assert {id(p) for o in (muon, adamw) for p in o.state} == state.keys()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, [muon, adamw])
    assert all(
        not torch.equal(p, before[name]) for name, p in model.named_parameters() if "blocks" in name
    )


def test_groups_are_those_of_a_network_that_was_built_as_deep():
    model, deep = GPT(), GPT(Config(4, 2, ("near",) * 4))
    optimizers, others = muon_and_adamw(model), muon_and_adamw(deep)
    esper.deepen(model, 4, optimizer=optimizers, example=TOKENS)
    names = {id(p): name for name, p in model.named_parameters()}
    deep_names = {id(p): name for name, p in deep.named_parameters()}
    for optimizer, other in zip(optimizers, others, strict=True):
        assert [names[i] for i in ids_of(optimizer)] == [deep_names[i] for i in ids_of(other)]


def test_a_parameter_that_no_optimiser_holds_is_an_error_and_the_model_is_as_before():
    model = GPT()
    muon, _ = muon_and_adamw(model)
    before = (list(model.state_dict()), ids_of(muon))
    with pytest.raises(OptimizerError, match=r"blocks\.0\.\S+ and \d+ more .*Muon does not hold"):
        esper.deepen(model, 4, optimizer=muon, example=TOKENS)
    assert (list(model.state_dict()), ids_of(muon)) == before
    for name, parameter in model.blocks.named_parameters():
        if "norm" in name or parameter.dim() < 2:
            parameter.requires_grad_(False)  # what does not learn needs no optimiser
    esper.deepen(model, 4, optimizer=muon, example=TOKENS)
    assert len(model.blocks) == 4


def test_a_parameter_that_copies_share_with_the_network_needs_no_optimiser():
    class Scaled(nn.Linear):
        def forward(self, features):
            return super().forward(features) * self.table

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4))
            self.layers = nn.ModuleList(Scaled(4, 4) for _ in range(2))
            for layer in self.layers:
                layer.table = self.table

        def forward(self, features):
            for layer in self.layers:
                features = layer(features)
            return features

    model = Shared()
    weights = [p for p in model.parameters() if p is not model.table]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    esper.deepen(model, 3, optimizer=optimizer, example=torch.zeros(2, 4))
    assert len(optimizer.param_groups[0]["params"]) == 6
    assert model.layers[2].table is model.table


def test_what_is_no_optimiser_in_a_list_is_refused():
    with pytest.raises(OptimizerError, match="str cannot take up"):
        esper.deepen(GPT(), 4, optimizer=["AdamW"], example=TOKENS)
