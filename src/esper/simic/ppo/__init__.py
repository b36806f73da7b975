"""Recurrent masked PPO for any environment; knows nothing of growth."""
