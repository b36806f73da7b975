"""A folder in which the twins of all growth tests are kept, so that each is computed once."""

import pytest


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    return tmp_path_factory.mktemp("twins")
