"""Teaches the decider: rollouts, PPO, diagnostics. The learner knows heads, masks and rewards, nothing of growth."""

from esper.simic.agent import PPOAgent as PPOAgent
from esper.simic.any_env import learn as learn
from esper.simic.config import PPOConfig as PPOConfig
