"""Trains and measures hosts:

data sets with honest splits, one epoch of training, held-out losses.
"""
