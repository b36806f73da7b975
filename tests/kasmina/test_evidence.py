"""From losses and gradients to evidence."""

import math

import pytest
import torch
from torch import nn

from esper.kasmina.evidence import check_values, gradient_ratio, measure_pairs
from esper.leyline.errors import MeasurementError


def test_a_gain_is_the_mean_difference_with_its_standard_error():
    before, after = torch.tensor([3.0, 5.0, 4.0, 8.0]), torch.tensor([1.0, 4.0, 4.0, 5.0])
    gain = measure_pairs(better=after, than=before)
    assert gain.mean == pytest.approx(1.5)
    assert gain.standard_error == pytest.approx(torch.tensor([2.0, 1.0, 0.0, 3.0]).std().item() / 2)
    assert gain.examples == 4


def test_pairing_removes_what_examples_have_in_common():
    hard_and_easy = torch.linspace(0, 1000, 50, dtype=torch.double)
    gain = measure_pairs(better=hard_and_easy, than=hard_and_easy + 0.5)
    assert gain.standard_error < 1e-9
    assert gain.is_positive


BAD = {
    "a float": 0.5,
    "a list": [0.1, 0.2],
    "a scalar tensor": torch.tensor(0.5),
    "a matrix": torch.ones(2, 2),
    "one example": torch.ones(1),
    "NaN": torch.tensor([1.0, math.nan]),
    "infinity": torch.tensor([1.0, math.inf]),
}


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_what_is_no_evidence_is_refused(values):
    with pytest.raises(MeasurementError, match=r"evaluate\(\) returned"):
        check_values(values)


def test_examples_that_do_not_pair_up_are_refused():
    with pytest.raises(MeasurementError, match="3 and 4"):
        measure_pairs(better=torch.ones(3), than=torch.ones(4))


@pytest.mark.parametrize("lacking", ["seed", "host"])
def test_without_a_gradient_there_is_no_ratio(lacking):
    seed, host = nn.Linear(2, 2), nn.Linear(3, 3)
    for parameter in (host if lacking == "seed" else seed).parameters():
        parameter.grad = torch.ones_like(parameter)
    assert gradient_ratio(seed, host) is None


def test_a_host_with_a_zero_gradient_has_no_ratio():
    seed, host = nn.Linear(2, 2), nn.Linear(3, 3)
    for parameter in (*seed.parameters(), *host.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    assert gradient_ratio(seed, host) is None
