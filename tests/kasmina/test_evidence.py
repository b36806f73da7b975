"""From losses and gradients to evidence."""

import math

import pytest
import torch
from torch import nn

from esper.kasmina.evidence import check_values, gradient_norm, gradient_ratio, measure_pairs
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
    assert gain.mean == 0.5


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


@pytest.mark.parametrize(("seed_size", "host_norm"), [(0, 1.0), (4, 0.0), (4, math.nan)])
def test_without_a_seed_to_learn_or_a_hosts_gradient_there_is_no_ratio(seed_size, host_norm):
    assert gradient_ratio(1.0, seed_size, host_norm, 9) is None


def test_a_ratio_is_of_norms_per_root_parameter():
    assert gradient_ratio(6.0, 4, 2.0, 16) == 6.0


def test_a_gradient_norm_counts_sparse_gradients_too():
    table, dense = nn.Embedding(5, 2, sparse=True), nn.Linear(1, 1, bias=False)
    (table(torch.tensor([1, 1, 3])).sum() + dense(torch.ones(1)).sum()).backward()
    assert float(gradient_norm([*table.parameters(), *dense.parameters()])) == pytest.approx(
        math.sqrt(11.0)
    )
    assert gradient_norm(nn.Linear(2, 2).parameters()) is None
