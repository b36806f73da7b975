"""Faults of rollouts, PPO and diagnostics, each with the test that must catch it."""

from planted_faults import Fault

LEARNER_FAULTS: list[Fault] = []
