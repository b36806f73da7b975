"""Faults of masks, distributions, network, observation and policies, each with the test that must catch it."""

from planted_faults import Fault

POLICY_FAULTS: list[Fault] = []
