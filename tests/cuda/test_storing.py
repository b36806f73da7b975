"""A host on a GPU that was written to disk and read back goes on as if it had never stopped."""

import pytest
import torch

from cuda.test_executors import COPIED, GROWTH, PHOTOS, TEXT, TEXT_GROWTH, _deterministic, build  # noqa: F401
from runtime.episodes import COPIES, act, differing, play, print_of
from runtime.stored import restore, store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EPOCHS = 7


@pytest.mark.parametrize("executor", ["graphed", "eager"])
@pytest.mark.parametrize(
    ("task", "script"), [(PHOTOS, GROWTH), (TEXT, TEXT_GROWTH), (COPIED, COPIES)]
)
def test_a_stored_host_has_the_same_episode(task, script, executor, tmp_path):
    straight, broken_up = (build(task, executor=executor) for _ in range(2))
    for epoch in range(EPOCHS):
        for population in (straight, broken_up):
            population.train_epoch()
            population.evaluate()
        store(broken_up, tmp_path / str(epoch))
        broken_up = build(task, executor=executor)
        restore(broken_up, tmp_path / str(epoch))
        assert [differing(print_of(straight, h), print_of(broken_up, h)) for h in (0, 1)] == [
            [],
            [],
        ], f"epoch {epoch}"
        for population in (straight, broken_up):
            for move in script.get(epoch, []):
                act(population, 0, *move)
            population.tick()


def test_a_host_may_be_restored_into_one_that_has_lived(tmp_path):
    """Graphs of the network that was there before must not be taken for the new one's."""
    straight, other = build(seeds=[7]), build(seeds=[7])
    for population in (straight, other):
        population.train_epoch()
        population.evaluate()
    store(straight, tmp_path)
    play(other, 2)
    restore(other, tmp_path)
    for population in (straight, other):
        population.tick()
        play(population, 2)
    assert differing(print_of(straight), print_of(other)) == []
