"""Recurrent masked PPO for any Gymnasium environment: agent, rollouts, losses, diagnostics.

Nothing of growth comes in: no host, task or population, no reward term, no run folder. Of the rest
of simic it knows the `team` that sums over processes.
"""
