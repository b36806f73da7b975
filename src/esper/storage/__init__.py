"""Durable files, the store of saves and the names in a run folder; no torch, no events."""
