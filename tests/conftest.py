"""What every test runs under: one thread, a fixed random seed, hypothesis without surprises."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import esper
from second_cases import SECOND_CASES

torch.set_num_threads(1)
settings.register_profile("esper", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("esper")


def pytest_configure() -> None:
    """A run on a copy of the sources (see test_planted_faults) must test that copy and no other."""
    wanted = os.environ.get("ESPER_SOURCE")
    if wanted and not Path(esper.__file__).is_relative_to(wanted):
        pytest.exit(f"testing {esper.__file__}, which is not under {wanted}", returncode=9)


@pytest.hookimpl(tryfirst=True)  # before the marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    prefixes = tuple(f"tests/{case}" for case in SECOND_CASES)
    for item in items:
        if item.nodeid.startswith(prefixes):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
