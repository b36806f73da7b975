"""Teaches the decider: rollouts, PPO, diagnostics.

The learner knows heads, masks and rewards, nothing of growth.
"""

from esper.simic.ppo.agent import PPOAgent as PPOAgent
from esper.simic.ppo.any_env import learn as learn
from esper.simic.ppo.settings import PPOConfig as PPOConfig
