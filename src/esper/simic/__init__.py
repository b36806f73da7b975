"""Teaches the decider: rollouts, PPO, diagnostics. The learner knows heads, masks and rewards, nothing of growth."""

from esper.simic.agent import PPOAgent as PPOAgent
from esper.simic.any_env import learn as learn
from esper.simic.config import PPOConfig as PPOConfig
from esper.simic.diagnostics import Anomaly as Anomaly
from esper.simic.diagnostics import AnomalyDetector as AnomalyDetector
from esper.simic.diagnostics import RatioExplosionDiagnostic as RatioExplosionDiagnostic
from esper.simic.diagnostics import UpdateRecord as UpdateRecord
from esper.simic.rollout import Rollout as Rollout
from esper.simic.rollout import gae as gae
from esper.tamiyo.normalising import RunningMeanStd as RunningMeanStd
