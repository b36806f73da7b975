"""Slots that Esper chooses: repeated blocks first, else the ends of layers, never the answer."""

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, features):
        return features + torch.relu(self.conv(features))


def stages():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Sequential(Block(4), Block(4)),
        nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), Block(8), Block(8)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def plain_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def encoder(layers):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


IMAGES = torch.zeros(2, 3, 8, 8)
TOKENS = torch.zeros(2, 5, 8)


def slots_of(model, example, **options):
    garden = esper.grow(model, example=example, **options)
    return list(garden.model.slot_config.modules.values())


def test_blocks_of_all_stages_are_chosen():
    assert slots_of(stages(), IMAGES) == ["1.0", "1.1", "2.1", "2.2"]


def test_of_many_blocks_four_are_chosen_over_the_whole_depth():
    assert slots_of(encoder(8), TOKENS) == [f"layers.{index}" for index in (1, 3, 5, 7)]


def test_of_two_lists_the_outermost_with_many_parameters_is_chosen():
    outer = nn.ModuleList([encoder(2), encoder(2)])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = outer
            self.small = nn.ModuleList([nn.Sequential(nn.Linear(8, 1)) for _ in range(2)])

        def forward(self, tokens):
            for part in self.parts:
                tokens = part(tokens)
            return [head(tokens) for head in self.small]

    assert slots_of(Model(), TOKENS) == ["parts.0", "parts.1"]


def test_without_blocks_slots_stand_after_each_layers_activation_and_not_on_the_answer():
    assert slots_of(plain_cnn(), IMAGES) == ["2", "5"]
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert slots_of(mlp, torch.zeros(2, 4), slots=None) == ["1", "3"]


def test_what_was_chosen_is_said_in_one_line(capsys):
    slots_of(stages(), IMAGES, slots="auto")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "chose 4 slots: 1.0, 1.1, 2.1, 2.2 (of 4 Block blocks)" in said
    slots_of(stages(), IMAGES, slots="1.0")
    assert capsys.readouterr().err == ""


def test_a_model_with_nothing_to_choose_is_refused_with_the_way_out():
    with pytest.raises(HostError, match=r"slots=\[\.\.\.\]"):
        esper.grow(nn.Sequential(nn.Linear(4, 2)), example=torch.zeros(2, 4))
