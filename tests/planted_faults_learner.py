"""Faults of rollouts, PPO and diagnostics, each with the test that must catch it."""

from planted_faults import Fault
from simic.planted_faults_control import CONTROL
from simic.planted_faults_doors import DOORS
from simic.planted_faults_seeing import HEADS, SEEN_AGAIN
from simic.planted_faults_worth import WORTH

LEARNER_FAULTS: list[Fault] = [*SEEN_AGAIN, *HEADS, *WORTH, *CONTROL, *DOORS]
