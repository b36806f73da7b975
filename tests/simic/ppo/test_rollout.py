"""A rollout stores numbers: no graph of the policy that made them outlives the step."""

import torch

from simic.worlds import growth_agent, growth_rollout


def tensors_of(rollout):
    """Everything that a rollout holds, by name."""
    held = {name: value for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}
    for name in ("hidden", "end_hidden"):
        for part, value in enumerate(getattr(rollout, name)):
            held[f"{name} {part}"] = value
    return held | {f"mask {name}": mask for name, mask in rollout.masks.items()}


def test_what_is_stored_is_detached_from_the_policy():
    agent = growth_agent()
    stored = tensors_of(growth_rollout(agent, has_graph=True))
    assert {"states", "log_probs", "values", "final_values", "hidden 0", "end_hidden 1"} <= {
        *stored
    }
    assert [name for name, value in stored.items() if value.requires_grad] == []
    assert all(parameter.grad is None for parameter in agent.network.parameters())


def test_with_and_without_a_graph_the_same_numbers_are_stored():
    plain, recorded = (
        tensors_of(growth_rollout(growth_agent(), has_graph=has_graph))
        for has_graph in (False, True)
    )
    for name, value in plain.items():
        assert torch.allclose(value, recorded[name], equal_nan=True), name
