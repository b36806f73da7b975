"""The `compile` setting compiles the network while it learns, and changes no result."""

import pytest
import torch

from esper.simic import learn
from simic.worlds import SAME_STEP, SMALL, clocks


@pytest.fixture
def graphs():
    """Names a backend that counts the graphs it is given and runs them as they are."""
    counted = []

    def count(graph, inputs):
        counted.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(count, name="counted_by_a_test")
    yield counted
    torch._dynamo.backends.registry._BACKENDS.pop("counted_by_a_test", None)
    torch._dynamo.reset()


def records_of(backend):
    records = []
    config = SMALL.model_copy(update={"compile": backend})
    learn(clocks(2, SAME_STEP, [4, 6]), 64, config, watch=lambda _, record: records.append(record))
    return records


@pytest.mark.slow
def test_a_compiled_learner_learns_the_same(graphs):
    plain = records_of(None)
    assert graphs == []
    compiled = records_of("counted_by_a_test")
    assert len(graphs) > 0
    for mine, theirs in zip(compiled, plain, strict=True):
        for field in (
            "policy_loss",
            "value_loss",
            "entropy",
            "approx_kl",
            "ratio_max",
            "gradient_norm",
        ):
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-4, abs=1e-6)
        assert mine.steps == theirs.steps
