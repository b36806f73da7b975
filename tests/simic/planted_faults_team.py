"""Faults of training on several processes, each with the test that must catch it."""

from planted_faults import Fault

TEAM, AGENT, TRAINER, LOSSES = "simic/team.py", "simic/agent.py", "simic/trainer.py", "simic/losses.py"
ROLLOUT, TRACING, RUNNING, HISTORY = "simic/rollout.py", "simic/tracing.py", "running.py", "simic/history.py"
TALLY, FOLDER, DIAGNOSTICS = "simic/tally.py", "simic/runfolder.py", "simic/diagnostics.py"
UNIT, RANKS = "simic/test_team.py", "simic/test_team_ranks.py"
SAME = f"{RANKS}::test_several_ranks_find_what_one_finds"
MOVES = f"{RANKS}::test_a_run_goes_on_on_another_number_of_ranks"

SUMS = [
    Fault(
        "gradients are averaged over ranks",
        TEAM,
        "        dist.all_reduce(flat)\n",
        "        dist.all_reduce(flat)\n        flat /= self.size\n",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "losses are divided by what one rank has",
        AGENT,
        "Counts.of(relevant, rows.valid, is_open, self.team.sum)",
        "Counts.of(relevant, rows.valid, is_open)",
        f"{SAME}[shares of 3 and 2]",
    ),
    Fault(
        "every rank normalises its own advantages",
        AGENT,
        "normalise_advantages(raw, rollout.valid, pool)",
        "normalise_advantages(raw, rollout.valid)",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "every rank normalises what it has seen itself",
        AGENT,
        "_finite(rollout.states[rollout.valid]), pool)",
        "_finite(rollout.states[rollout.valid]))",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "every rank scales by its own returns",
        AGENT,
        "_finite(returns[rollout.valid][:, None]), pool)",
        "_finite(returns[rollout.valid][:, None]))",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "explained variance is that of one rank",
        AGENT,
        "explained_variance(rollout.values, returns, rollout.valid, pool)",
        "explained_variance(rollout.values, returns, rollout.valid)",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "decisions of one rank are counted",
        AGENT,
        "int(pool(rollout.valid.sum()))",
        "int(rollout.valid.sum())",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "every rank has the first rank's minibatches",
        AGENT,
        ".to(self.device) - here.start",
        ".to(self.device)",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "every rank has the same random numbers",
        TRAINER,
        "number * rollout.total + env.first + host for host",
        "number * rollout.total + host for host",
        f"{SAME}[4 ranks]",
    ),
    Fault(
        "every rank lives the first rank's lives",
        TRAINER,
        '{"lives": number * rollout.total + env.first}',
        '{"lives": number * rollout.total}',
        f"{SAME}[4 ranks]",
    ),
    Fault(
        "decisions are named by their place on a rank",
        TRACING,
        "rows=trace.rows + first",
        "rows=trace.rows",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "losses of one rank are told",
        TRACING,
        "team.sum(torch.stack(told))",
        "torch.stack(told)",
        f"{SAME}[2 ranks, joint]",
    ),
    Fault(
        "spread of ratios is that of the first rank",
        TRACING,
        "ratio_std=max(0.0, square - mean**2) ** 0.5",
        "ratio_std=first.ratio_std",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "a rank counts as many ratios as it has decisions",
        TRACING,
        "    seen = torch.cat([trace.is_relevant for trace in traces], 1).sum((1, 2)).tolist()\n",
        "    seen = list(uses)\n",
        f"{UNIT}::test_each_ratio_that_was_looked_at_counts_once_whatever_a_rank_has_come_to",
    ),
    Fault(
        "a rank without rows looks for its worst decision",
        DIAGNOSTICS,
        "int(hosts.bincount().max()) if len(hosts) else 0",
        "int(hosts.bincount().max())",
        f"{UNIT}::test_a_rank_that_saw_no_rows_has_no_worst_decision",
    ),
    Fault(
        "a round is what the first rank's hosts did",
        TALLY,
        'hosts = sum(facts["hosts"] for facts, *_ in everyone)',
        'hosts = everyone[0][0]["hosts"]',
        f"{SAME}[2 ranks]",
    ),
]
STOPS = [
    Fault(
        "every rank minds its own divergence",
        AGENT,
        "self.team.sum(policy.kl)",
        "policy.kl",
        f"{RANKS}::test_one_rank_over_the_limit_stops_all_in_the_same_minibatch",
    ),
    Fault(
        "a rank stops for itself",
        TRAINER,
        "if agent.team.any(should_stop()):",
        "if should_stop():",
        f"{RANKS}::test_whoever_is_asked_to_stop_all_stop_at_the_same_step[1]",
    ),
    Fault(
        "a mistake is raised where it was made only",
        TEAM,
        "        if said:\n",
        "        if problem is not None:\n",
        f"{RANKS}::test_a_mistake_of_one_rank_is_raised_on_all",
    ),
    Fault(
        "what all ranks know is told again",
        TEAM,
        "if found is self._told:",
        "if found is self:",
        f"{RANKS}::test_a_mistake_before_an_inner_block_is_raised_on_all_too",
    ),
    Fault(
        "a save that fails is known to rank 0 only",
        HISTORY,
        "        with self.team.together():\n            if self.team.rank == 0:\n",
        "        if True:\n            if self.team.rank == 0:\n",
        f"{RANKS}::test_a_disk_that_fails_while_rank_0_saves_ends_all_with_one_line[manifest.json]",
    ),
]
STARTS = [
    Fault(
        "the first hosts have two ranks",
        TEAM,
        "first = self.rank * least + min(self.rank, more)",
        "first = self.rank * least",
        f"{UNIT}::test_every_host_has_one_rank_and_shares_differ_by_one_at_most",
    ),
    Fault(
        "ranks with other settings train on",
        TEAM,
        "                if other.get(name) != value:\n",
        "                if name not in other:\n",
        f"{RANKS}::test_ranks_with_other_settings_are_refused_and_the_difference_is_named",
    ),
    Fault(
        "nobody asks for the code",
        RUNNING,
        '"code": code_digest(), ',
        '"code": "", ',
        f"{RANKS}::test_ranks_with_other_code_are_refused",
    ),
    Fault(
        "a port that is taken is a traceback",
        TEAM,
        "except (RuntimeError, ValueError, OSError) as problem:",
        "except OSError as problem:",
        f"{RANKS}::test_a_taken_port_is_one_clear_line",
    ),
    Fault(
        "a start meets what dead ranks have left",
        TEAM,
        "_met(store, rank, size)",
        "store",
        "simic/test_team_torchrun.py::test_a_rank_that_dies_is_started_anew_and_the_run_ends_as_if_nothing_was[0]",
    ),
    Fault(
        "a rank knows of the deaths on its own machine only",
        RUNNING,
        "team.any(resume or was_restarted())",
        "resume or was_restarted()",
        f"{RANKS}::test_what_one_torchrun_knows_of_a_restart_counts_for_all",
    ),
    Fault(
        "a start that is refused leaves the events of other ranks",
        FOLDER,
        "<= {_LOCK, CONFIG, *empty}:",
        "<= {_LOCK, CONFIG, EVENTS}:",
        f"{RANKS}::test_a_start_that_is_refused_leaves_nothing_behind",
    ),
    Fault(
        "events of ranks that are gone stay as they are",
        HISTORY,
        'runfolder.cut_events(self.folder, facts["events"], self.team.size)',
        'assert facts["events"]',
        MOVES,
    ),
    Fault(
        "events of ranks that are gone are forgotten",
        HISTORY,
        "events = runfolder.event_sizes(self.folder)",
        "events: dict[str, int] = {}",
        MOVES,
    ),
]
TEAM_FAULTS = [*SUMS, *STOPS, *STARTS]
