"""Teaches a policy to grow: growth as an environment, rewards, twins, the training loop.

What learns is in `ppo`, which knows heads, masks and rewards, nothing of growth. How hosts train
(`runtime`), what a policy network is (`tamiyo`) and how runs are shown do not come in here.
"""

from esper.simic.ppo.agent import PPOAgent as PPOAgent
from esper.simic.ppo.any_env import learn as learn
from esper.simic.ppo.settings import PPOConfig as PPOConfig
