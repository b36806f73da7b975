"""Decides:

signals, observation, action masks, rules of thumb and controls, and the recurrent network.
"""
