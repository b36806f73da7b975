"""Compares policies and controls on the same hosts, data order and learning-rate plan."""
