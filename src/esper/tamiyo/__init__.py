"""Decides what grows: signals, observation, action masks, rules, controls, and the network.

A policy reads what it is shown and answers with an action. It trains nothing, touches no model and
knows no task; how a network learns to decide is in `simic`.
"""
