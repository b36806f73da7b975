"""What tests of growth share: twins, each computed once, and processes whose forks begin warm."""

import pytest

from simic.tiny_runs import tiny, train


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    return tmp_path_factory.mktemp("twins")


@pytest.fixture(scope="session")
def warm_forks(tmp_path_factory):
    """What is loaded on first use is then there in every fork."""
    train(tiny(tmp_path_factory.mktemp("warm")))
