"""Settings of the learner:

what is unknown, of the wrong type or out of range is refused where it is written.
"""

import json

import pytest
from pydantic import ValidationError

from esper.simic import PPOConfig


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(ValidationError, match=r"gama\s+Extra"):
        PPOConfig(gama=0.9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": "10"},
        {"epochs": 2.5},
        {"epochs": True},
        {"lr": "0.001"},
        {"lr": None},
        {"gamma": [0.9]},
        {"target_kl": "none"},
        {"clip_mode": "both"},
        {"clip_mode": None},
        {"compile": True},
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_type_is_refused_and_not_converted(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PPOConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon": 0},
        {"epochs": 0},
        {"minibatches": -1},
        {"gamma": 0.0},
        {"gamma": 1.01},
        {"gae_lambda": -0.1},
        {"gae_lambda": 1.1},
        {"clip": 0.0},
        {"clip": 1.0},
        {"value_clip": 0.0},
        {"value_weight": -1.0},
        {"entropy": -0.1},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"lr_floor": -1e-4},
        {"anneal_decisions": 0},
        {"target_kl": 0.0},
        {"target_kl": -0.1},
        {"max_grad_norm": 0.0},
        {"hidden_dim": 0},
    ],
    ids=str,
)
def test_a_setting_out_of_its_range_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PPOConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"lr": 1e-5}, {"lr_floor": 0.1}, {"entropy": 0.0}, {"entropy_floor": 0.5}], ids=str
)
def test_a_floor_above_where_the_line_begins_is_refused(wrong):
    name = next(iter(wrong)).removesuffix("_floor")
    with pytest.raises(ValidationError, match=rf"{name}_floor is .* {name} "):
        PPOConfig(**wrong)


def test_without_a_bonus_both_ends_of_its_line_are_zero():
    assert PPOConfig(entropy=0.0, entropy_floor=0.0).entropy == 0.0


def test_settings_cannot_be_changed_afterwards():
    config = PPOConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 1.0


def test_settings_come_back_from_json_as_they_were():
    config = PPOConfig(lr=3e-4, target_kl=None, clip_mode="joint", anneal_decisions=1000)
    assert PPOConfig.model_validate_json(json.dumps(config.model_dump())) == config


def test_every_setting_says_what_it_does():
    assert all(field.description for field in PPOConfig.model_fields.values())


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [(0, 1.0), (25, 0.8), (50, 0.6), (100, 0.2), (101, 0.2), (10**9, 0.2)],
)
def test_a_schedule_is_a_line_by_decisions_and_then_its_floor(decisions, expected):
    config = PPOConfig(lr=1.0, lr_floor=0.2, anneal_decisions=100)
    assert config.annealed("lr", decisions) == pytest.approx(expected)


def test_a_schedule_without_a_length_stays_where_it_begins():
    assert PPOConfig(entropy=1.0, entropy_floor=0.2).annealed("entropy", 10**9) == 1.0
