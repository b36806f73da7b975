"""Cases of parametrised tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """The cases, those of `slow` marked, so that only `make slow` runs them."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]
