"""Weights go back into a network of the same shape; any other is refused, unharmed, with the reason
and the way out.
"""

from pathlib import Path

import pytest
import torch

from esper.leyline.errors import CheckpointMismatchError
from esper.tamiyo.network import FactoredRecurrentActorCritic
from tamiyo.policy_cases import STATE_DIM, build


def copy_of(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_weights_and_statistics_survive_the_way_into_a_network_of_the_same_shape():
    net, other, states = build(seed=1), build(seed=2), torch.randn(5, STATE_DIM)
    net.observation_stats.update(torch.randn(50, STATE_DIM) * 3 + 1)
    net.update_return_stats(torch.randn(50) * 20)
    other.load_state_dict(net.state_dict())
    assert torch.equal(
        net.look(states, net.get_initial_hidden(5)), other.look(states, other.get_initial_hidden(5))
    )


@pytest.mark.parametrize(("trained", "wanted"), [(2, 5), (5, 2), (3, 4), (1, 32)])
def test_weights_for_another_number_of_slots_and_blueprints_fit(trained, wanted):
    weights = build(trained, seed=1).state_dict()
    other = build(wanted, seed=2, num_blueprints=4, num_blends=1)
    other.load_state_dict(weights)
    for name, value in other.state_dict().items():
        assert torch.equal(value, weights[name]), name
    choices, *_ = other.get_action(torch.randn(200, STATE_DIM))
    assert int(choices["slot"].max()) == wanted - 1
    assert int(choices["blueprint"].max()) == 3


def test_the_refusal_points_to_a_page_that_exists():
    with pytest.raises(CheckpointMismatchError, match=r"docs/checkpoints\.md"):
        build(2).load_state_dict(build(2, hidden_dim=24).state_dict())
    assert (Path(__file__).parents[2] / "docs" / "checkpoints.md").exists()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"hidden_dim": 24}, "lstm.weight_ih_l0"), ({"head_dim": 24}, "value_head.0.weight")],
)
def test_weights_of_another_width_are_refused_by_name(sizes, name, strict):
    with pytest.raises(CheckpointMismatchError, match=f"size mismatch: .*{name} "):
        build().load_state_dict(build(**sizes).state_dict(), strict=strict)


def test_weights_for_other_observations_do_not_fit():
    with pytest.raises(CheckpointMismatchError, match=r"encoder\.weight .*\(64, 50\).*\(64, 80\)"):
        FactoredRecurrentActorCritic(80, 3).load_state_dict(
            FactoredRecurrentActorCritic(50, 3).state_dict()
        )


def test_a_refused_load_changes_nothing():
    net = build(2, seed=1)
    before = copy_of(net)
    with pytest.raises(CheckpointMismatchError):
        net.load_state_dict(build(2, seed=2, head_dim=24).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_missing_weight_is_not_called_a_mismatch_of_sizes():
    weights = copy_of(build())
    del weights["value_head.2.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*value_head\.2\.bias"):
        build().load_state_dict(weights)
