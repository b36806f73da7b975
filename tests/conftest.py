"""What every test runs under: one thread, a fixed random seed, hypothesis without surprises."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import esper

torch.set_num_threads(1)
settings.register_profile("esper", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("esper")


def pytest_configure() -> None:
    """A run on a copy of the sources (see test_planted_faults) must test that copy and no other."""
    wanted = os.environ.get("ESPER_SOURCE")
    if wanted and not Path(esper.__file__).is_relative_to(wanted):
        pytest.exit(f"testing {esper.__file__}, which is not under {wanted}", returncode=9)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
