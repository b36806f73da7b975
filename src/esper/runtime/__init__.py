"""Trains and measures hosts: honest splits, epochs of training, held-out losses, costs.

Here is what many hosts need side by side. A user's own loop is in `garden`; what decides about
growth is in `tamiyo`, what learns to decide in `simic`, and neither may come in.
"""
