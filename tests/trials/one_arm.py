"""One policy on some host seeds, the way a comparison runs an arm."""

from dataclasses import replace

from esper.kasmina.blueprints import SHAM
from esper.runtime.population import Population
from esper.tamiyo.rules import replay
from esper.trials.arms import Entry, run_entries


def run_arm(task, arm, seeds, populate=Population, *, replayed=(), **options):
    """Train one host per seed; `replayed` are another arm's events, per seed, for sham growth to go
    through.
    """
    task = replace(task, blueprints=(SHAM,)) if arm == SHAM else task
    policies = [replay(events) for events in replayed] if replayed else [arm] * len(seeds)
    entries = [Entry(arm, seed, policy) for seed, policy in zip(seeds, policies, strict=True)]
    return run_entries(task, entries, populate, **options)
