"""Contracts everybody shares:

stages, slot ids, factored actions, gates, reports, legality, errors. No torch here.
"""
