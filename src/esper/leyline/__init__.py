"""Contracts that all packages share: stages, slots, actions, legality, gates, settings, errors.

Plain data and pure rules. Nothing here imports torch or another package of Esper, holds a network,
writes a file or emits an event; what needs one of these belongs further up.
"""
