"""Every host sees the whole split, pass after pass, in an order of its own; the shared gather
changes nothing.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.runtime.batches import EpochPlan, ExampleStream, Steps, shared_batches, whole_steps
from esper.runtime.population import Population
from esper.runtime.splits import TensorSplit, TokenSplit
from runtime.episodes import BLOBS, replace

CPU = torch.device("cpu")


def numbered(count, padded=False):
    images = torch.arange(count * 75, dtype=torch.float32).reshape(count, 3, 5, 5)
    split = TensorSplit(images, torch.arange(count))
    return split.with_border() if padded else split


def plans(split, steps, augment, hosts=3):
    made = [
        EpochPlan(split, ExampleStream(len(split), seed), Steps(*steps), augment, CPU)
        for seed in range(hosts)
    ]
    for plan in made:
        plan.draw()
    return made


@pytest.mark.parametrize("sizes", [[3, 4, 5, 6, 7, 8, 9], [10, 10, 10], [25, 17, 8], [1] * 20])
def test_a_stream_is_whole_permutations_one_after_the_other(sizes):
    stream = ExampleStream(10, seed=4)
    rows = torch.cat([stream.draw(size) for size in sizes])
    whole = rows[: len(rows) // 10 * 10].view(-1, 10)
    assert torch.equal(whole.sort(1).values, torch.arange(10).expand_as(whole))


def test_two_passes_have_two_orders():
    stream = ExampleStream(10, seed=4)
    assert not torch.equal(stream.draw(10), stream.draw(10))


def test_the_order_depends_on_the_seed_and_on_nothing_else():
    torch.manual_seed(1)
    first = ExampleStream(50, seed=4).draw(70)
    torch.manual_seed(2)
    assert torch.equal(first, ExampleStream(50, seed=4).draw(70))
    assert not torch.equal(first, ExampleStream(50, seed=5).draw(70))


def test_every_host_has_an_order_of_its_own():
    population = Population(BLOBS, [3, 4])
    population.train_epoch()
    first, second = (run.plan.rows for run in population.runs)
    assert not torch.equal(first, second)


def test_how_a_stream_is_cut_into_epochs_does_not_change_it():
    one, other = ExampleStream(10, seed=4), ExampleStream(10, seed=4)
    assert torch.equal(one.draw(24), torch.cat([other.draw(size) for size in (7, 7, 10)]))


def test_a_stream_goes_on_from_its_state_in_the_middle_of_a_pass():
    stream = ExampleStream(10, seed=4)
    stream.draw(13)
    state = stream.state()
    expected = stream.draw(19)
    other = ExampleStream(10, seed=99)
    other.load(state)
    assert torch.equal(other.draw(19), expected)


def test_a_state_stays_as_it_is_however_much_is_drawn_after_it():
    stream = ExampleStream(10, seed=4)
    stream.draw(3)
    state = stream.state()
    before = state["permutation"].clone()
    stream.draw(25).zero_()
    assert torch.equal(state["permutation"], before)
    assert state["position"] == 3


@pytest.mark.parametrize("examples", [100, 864, 1000])
def test_an_epoch_takes_the_next_examples_of_the_stream_whatever_its_size(examples):
    population = Population(replace(BLOBS, epoch_examples=examples), [3])
    run = population.runs[0]
    expected = ExampleStream(864, seed=0)
    expected.load(run.plan.stream.state())
    for _ in range(2):
        population.train_epoch()
        assert torch.equal(run.plan.rows, expected.draw(run.plan.examples))


@pytest.mark.parametrize("batch", [32, 100])
def test_by_default_an_epoch_is_one_pass_and_what_fills_its_last_step(batch):
    population = Population(replace(BLOBS, batch=batch), [3])
    population.train_epoch()
    run = population.runs[0]
    count = len(run.splits.train)
    assert torch.equal(run.plan.rows[:count].sort().values, torch.arange(count))
    assert len(run.plan.rows) == run.plan.examples < count + run.plan.steps


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("steps", [(3, 4), (4, 4), (1, 3)])
def test_the_shared_gather_equals_each_hosts_own_batches_row_for_row(augment, steps):
    split = numbered(9, padded=augment)
    together, alone = plans(split, steps, augment), plans(split, steps, augment)
    shared = list(shared_batches(together))
    assert len(shared) == steps[0]
    for inputs, targets in shared:
        for host, plan in enumerate(alone):
            own_inputs, own_targets = plan.next_batch()
            assert torch.equal(inputs[host], own_inputs)
            assert torch.equal(targets[host], own_targets)


@given(st.integers(1, 5000), st.integers(1, 600))
def test_steps_are_alike_none_too_large_and_hardly_more_than_was_asked_for(examples, batch):
    steps, size = whole_steps(examples, batch)
    assert size <= batch
    assert examples <= steps * size < examples + steps
    assert (steps - 1) * batch < examples


def test_the_shared_gather_serves_texts_too():
    split = TokenSplit(torch.arange(61, dtype=torch.uint8), context=5)
    together, alone = plans(split, (1, 7), False), plans(split, (1, 7), False)
    for inputs, targets in shared_batches(together):
        for host, plan in enumerate(alone):
            assert torch.equal(
                torch.stack([inputs[host], targets[host]]), torch.stack(plan.next_batch())
            )


def test_a_new_epoch_starts_at_its_first_example():
    run = Population(BLOBS, [1]).runs[0]
    for _ in range(2):
        run.begin_epoch()
        rows = run.plan.rows[: run.plan.size]
        assert torch.equal(run.plan.next_batch()[1], run.splits.train.targets[rows])


def test_every_example_of_every_epoch_is_augmented_anew():
    (plan,) = plans(numbered(9, padded=True), (10, 20), augment=True, hosts=1)
    first = plan.placed[1:].clone()
    plan.draw()
    assert not torch.equal(first, plan.placed[1:])
    assert first[:2].unique().tolist() == list(range(9))
    assert first[2].unique().tolist() == [0, 1]
