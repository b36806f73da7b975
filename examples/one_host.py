"""Somebody else's agent decides about growth: MaskablePPO of sb3-contrib.

It learns on one host of `blobs`, then plays an episode.
"""

import argparse

import gymnasium as gym
from sb3_contrib import MaskablePPO

import esper

gym.register_envs(
    esper
)  # does nothing, but says why esper is imported: Gymnasium knows its tasks now


def main(steps: int) -> None:
    env = gym.make("esper/blobs-v0", host_seeds=[1])
    agent = MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=32, seed=0, device="cpu")
    agent.learn(steps)
    obs, _ = env.reset()
    is_over = False
    while not is_over:
        # heads do not depend on each other here: what is impossible as a whole counts as WAIT
        action, _ = agent.predict(obs, action_masks=env.get_wrapper_attr("action_masks")())
        obs, reward, is_over, _, info = env.step(action)
        print(f"reward {reward:+.3f}", *info["events"], sep="; ")
    env.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=512)
    main(**vars(parser.parse_args()))
