"""A masked distribution knows its valid entries only:

in probabilities, draws, entropy, and above all in gradients.
"""

import math

import pytest
import torch

from esper.leyline.errors import MaskError
from esper.tamiyo.distributions import (
    MaskedCategorical,
    entropy_of,
    masked_log_softmax,
    normalised_entropy,
)

LOWEST = torch.finfo(torch.float32).min
SIZE = 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def first_valid(count, size=SIZE):
    return torch.arange(size) < count


def entropy(drawn):
    """Between 0 (certain, or no choice) and 1 (even over what is valid)."""
    return normalised_entropy(drawn.log_probs, drawn.mask)


def random_rows(rows, size=SIZE, spread=3.0):
    """Logits, and masks with at least one valid entry each."""
    mask = torch.rand(rows, size) < 0.5
    mask[torch.arange(rows), torch.randint(size, (rows,))] = True
    return torch.randn(rows, size) * spread, mask


# -- probabilities ---------------------------------------------------------------------------------


def test_a_masked_entry_has_the_lowest_finite_logit_and_probability_zero():
    logits, mask = random_rows(50)
    drawn = MaskedCategorical(logits, mask)
    assert (drawn.logits[~mask] == LOWEST).all()
    assert torch.equal(drawn.logits[mask], logits[mask])
    assert (drawn.log_probs.exp()[~mask] == 0).all()
    assert drawn.log_probs.isfinite().all()


def test_valid_entries_have_the_probabilities_that_they_have_among_themselves():
    logits, mask = random_rows(50)
    drawn = MaskedCategorical(logits, mask)
    for row in range(50):
        alone = torch.log_softmax(logits[row][mask[row]], -1)
        torch.testing.assert_close(drawn.log_probs[row][mask[row]], alone, rtol=0, atol=1e-6)


def test_one_mask_serves_all_rows_that_it_is_given_for():
    logits, _ = random_rows(6)
    mask = first_valid(3)
    assert torch.equal(
        MaskedCategorical(logits, mask).log_probs,
        MaskedCategorical(logits, mask.expand(6, -1)).log_probs,
    )


def test_the_log_probability_is_that_of_the_choice():
    logits, mask = random_rows(4)
    drawn = MaskedCategorical(logits.view(2, 2, SIZE), mask.view(2, 2, SIZE))
    choices = torch.tensor([[0, 3], [6, 1]])
    found = drawn.log_prob(choices)
    for row, column in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        assert found[row, column] == drawn.log_probs[row, column, choices[row, column]]


def test_without_a_mask_everything_is_valid():
    logits, _ = random_rows(5)
    drawn = MaskedCategorical(logits)
    torch.testing.assert_close(drawn.log_probs, torch.log_softmax(logits, -1))
    torch.testing.assert_close(entropy(drawn), entropy_of(drawn.log_probs) / math.log(SIZE))


def test_log_probabilities_are_float32_under_autocast():
    weight, seen = torch.randn(SIZE, 16), torch.randn(9, 16)
    _, mask = random_rows(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = seen @ weight.T
        drawn = MaskedCategorical(logits, mask)
        found = entropy(drawn)
    assert logits.dtype == torch.bfloat16
    assert drawn.log_probs.dtype == found.dtype == torch.float32
    assert torch.equal(drawn.log_probs, masked_log_softmax(logits.float(), mask))
    assert (drawn.log_probs.exp().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4, 1e8])
def test_no_scale_of_logits_makes_a_number_infinite(scale):
    logits, mask = random_rows(50)
    logits = (logits * scale).requires_grad_()
    drawn = MaskedCategorical(logits, mask)
    (entropy(drawn).sum() + drawn.log_prob(drawn.mode()).sum()).backward()
    assert drawn.log_probs.isfinite().all()
    assert logits.grad.isfinite().all()


# -- rows without any choice -----------------------------------------------------------------------


def test_a_row_that_allows_nothing_is_refused_by_host_and_head():
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2] = False
    with pytest.raises(MaskError, match=r"host 2, head 'slot': "):
        MaskedCategorical(torch.zeros(4, 3), mask, head="slot")


def test_in_a_sequence_the_refusal_names_the_step():
    mask = torch.ones(4, 6, 3, dtype=torch.bool)
    mask[3, 5] = False
    with pytest.raises(MaskError, match=r"host 3, head 'blend', step 5: "):
        MaskedCategorical(torch.zeros(4, 6, 3), mask, head="blend")


def test_a_single_row_that_allows_nothing_is_refused_too():
    with pytest.raises(MaskError, match="host 0, head 'action': "):
        MaskedCategorical(torch.zeros(3), torch.zeros(3, dtype=torch.bool))


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("valid", range(1, SIZE + 1))
def test_gradients_are_finite_for_every_number_of_valid_entries_in_every_precision(valid, dtype):
    logits = torch.randn(8, SIZE).to(dtype).requires_grad_()
    drawn = MaskedCategorical(logits, first_valid(valid))
    choices = drawn.sample()
    (
        drawn.log_prob(choices).sum() + entropy(drawn).sum() + entropy_of(drawn.log_probs).sum()
    ).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad != 0).any() == (valid > 1)


@pytest.mark.parametrize("quantity", ["log_prob", "entropy"])
def test_masked_logits_get_exactly_no_gradient(quantity):
    logits, mask = random_rows(60)
    mask[:, :2] = True  # two choices at least, so that there is something to differentiate
    logits.requires_grad_()
    drawn = MaskedCategorical(logits, mask)
    found = drawn.log_prob(drawn.sample()) if quantity == "log_prob" else entropy(drawn)
    found.sum().backward()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()


# -- entropy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("valid", range(1, SIZE + 1))
def test_even_logits_have_the_entropy_of_the_number_of_valid_entries(valid):
    drawn = MaskedCategorical(torch.full((2, SIZE), -3.0), first_valid(valid))
    assert entropy_of(drawn.log_probs).tolist() == pytest.approx([math.log(valid)] * 2, abs=1e-6)
    assert entropy(drawn).tolist() == pytest.approx([1.0 if valid > 1 else 0.0] * 2, abs=1e-6)


def test_with_one_valid_entry_entropy_and_its_gradient_are_exactly_zero():
    logits = torch.randn(5, SIZE, requires_grad=True)
    found = entropy(MaskedCategorical(logits, first_valid(1)))
    found.sum().backward()
    assert (found == 0).all()
    assert (logits.grad == 0).all()


def test_a_choice_among_one_thing_without_a_mask_has_no_entropy():
    assert torch.equal(normalised_entropy(torch.zeros(4, 1), None), torch.zeros(4))


def test_entropy_is_that_of_the_valid_entries_alone():
    logits, mask = random_rows(50)
    mask[:, 0] = mask[:, 1] = True
    drawn = MaskedCategorical(logits, mask)
    for row in range(50):
        alone = torch.distributions.Categorical(logits=logits[row][mask[row]]).entropy()
        torch.testing.assert_close(entropy_of(drawn.log_probs)[row], alone, rtol=0, atol=1e-6)
        share = alone / math.log(int(mask[row].sum()))
        torch.testing.assert_close(entropy(drawn)[row], share, rtol=0, atol=1e-6)


# -- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [-1e-3, -5.0, -1e4])
def test_the_likeliest_is_valid_where_all_valid_logits_are_negative(level):
    logits = torch.full((1, 4), level)
    logits[0, 2] += abs(level) / 2
    mask = torch.tensor([[False, True, True, False]])
    assert MaskedCategorical(logits, mask).mode().tolist() == [2]


def test_the_likeliest_is_the_valid_entry_with_the_largest_logit():
    logits, mask = random_rows(500)
    likeliest = MaskedCategorical(logits, mask).mode()
    expected = logits.masked_fill(~mask, -math.inf).argmax(-1)
    assert torch.equal(likeliest, expected)


def test_of_a_million_draws_none_is_invalid():
    logits, mask = random_rows(1000, spread=10.0)
    logits = torch.where(
        mask, logits - 40, logits + 40
    )  # what is forbidden would be by far the likeliest
    drawn = MaskedCategorical(logits.expand(1000, -1, -1), mask.expand(1000, -1, -1))
    for choices in (drawn.sample(), drawn.mode()):
        assert choices.numel() == 1_000_000
        assert int((~drawn.mask.gather(-1, choices[..., None])).sum()) == 0


def test_draws_are_as_frequent_as_their_probabilities_say():
    draws = 200_000
    mask = torch.tensor([True, False, True, True, True])
    drawn = MaskedCategorical(torch.tensor([0.5, 9.0, -2.0, 1.5, 0.0]).expand(draws, -1), mask)
    counts = torch.bincount(drawn.sample(torch.Generator().manual_seed(1)), minlength=5)
    expected = drawn.log_probs.exp()[0] * draws
    error = (expected * (1 - drawn.log_probs.exp()[0])).sqrt()
    assert ((counts - expected).abs() <= 4 * error).all()


def test_draws_depend_on_the_generator_and_on_nothing_else():
    logits, mask = random_rows(200)
    drawn = MaskedCategorical(logits, mask)
    first = drawn.sample(torch.Generator().manual_seed(3))
    torch.manual_seed(99)
    assert torch.equal(first, drawn.sample(torch.Generator().manual_seed(3)))
    assert not torch.equal(first, drawn.sample(torch.Generator().manual_seed(4)))


def test_a_draw_carries_no_gradient():
    logits = torch.randn(3, SIZE, requires_grad=True)
    assert not MaskedCategorical(logits).sample().requires_grad
