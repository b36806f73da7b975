"""Teaches the decider: rollouts, PPO, diagnostics. The learner knows heads, masks and rewards, nothing of growth."""

from esper.simic.agent import PPOAgent
from esper.simic.any_env import learn
from esper.simic.config import PPOConfig
from esper.simic.diagnostics import Anomaly, AnomalyDetector, RatioExplosionDiagnostic, UpdateRecord
from esper.simic.rollout import Rollout, gae
from esper.tamiyo.normalising import RunningMeanStd

__all__ = [
    "Anomaly",
    "AnomalyDetector",
    "PPOAgent",
    "PPOConfig",
    "RatioExplosionDiagnostic",
    "Rollout",
    "RunningMeanStd",
    "UpdateRecord",
    "gae",
    "learn",
]
