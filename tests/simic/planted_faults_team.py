"""Faults of training on several processes, each with the test that must catch it."""

from planted_faults import Fault

TEAM, AGENT, TRAINER, LOSSES = "simic/team.py", "simic/agent.py", "simic/trainer.py", "simic/losses.py"
ROLLOUT, TRACING, RUNNING, HISTORY = "simic/rollout.py", "simic/update_record.py", "cli/session.py", "simic/history.py"
TALLY, FOLDER, DIAGNOSTICS = "simic/round_summary.py", "telemetry/runfolder.py", "simic/diagnostics.py"
UNIT, RANKS, ROUNDS = "simic/test_team.py", "simic/test_team_ranks.py", "simic/test_team_rounds.py"
STOP = f"{ROUNDS}::test_whoever_is_asked_to_stop_all_stop_at_the_same_step"
SLOW = f"{ROUNDS}::test_a_slow_rank_gets_fewer_hosts_and_the_policy_is_that_of_one_rank"
SHARED = f"{ROUNDS}::test_where_a_gpu_is_shared_sums_are_made_on_the_cpu"
SAME = f"{RANKS}::test_several_ranks_find_what_one_finds"
MOVES = f"{RANKS}::test_a_run_goes_on_on_another_number_of_ranks"

SUMS = [
    Fault(
        "gradients are averaged over ranks",
        TEAM,
        "parameter.grad = part.view_as(parameter).clone()",
        "parameter.grad = part.view_as(parameter) / self.size",
        f"{SAME}[2 ranks]",
    ),
    Fault(
        "losses are divided by what one rank has",
        AGENT,
        "is_open, self.team.sum(counts)",
        "is_open, counts",
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
        "index = part - rollout.first",
        "index = part",
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
        "every rank plays the first rank's episodes",
        TRAINER,
        '{"episodes": number * rollout.total + env.first}',
        '{"episodes": number * rollout.total}',
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
        "kl = self.team.sum_gradients(self.network.parameters(), kl)",
        "self.team.sum_gradients(self.network.parameters(), kl)",
        f"{RANKS}::test_one_rank_over_the_limit_stops_all_in_the_same_minibatch",
    ),
    Fault(
        "a rank stops for itself",
        TRAINER,
        "if agent.team.vote(should_stop(), step + 1 == rollout.steps):",
        "if should_stop():",
        f"{STOP}[1-with the round]",
    ),
    Fault(
        "ranks wait for each other after every epoch",
        TEAM,
        "(0 if is_last else self._lag)",
        "0",
        f"{ROUNDS}::test_a_rank_goes_ahead_of_another_and_both_hear_the_same",
    ),
    Fault(
        "the last votes of a round are not read",
        TEAM,
        "(0 if is_last else self._lag)",
        "self._lag",
        f"{STOP}[0-with the round]",
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
        "a rank that fails says that all is well",
        TEAM,
        'self._own = "" if problem is None else told',
        'self._own = ""',
        f"{ROUNDS}::test_a_mistake_of_one_rank_within_a_round_ends_all_with_one_line[a step]",
    ),
    Fault(
        "a rank that does not wait for the others goes on without them",
        TEAM,
        "            os._exit(2)\n",
        "            return\n",
        f"{ROUNDS}::test_a_rank_that_is_far_away_from_the_others_is_ended_too",
    ),
    Fault(
        "a rank that is silent is waited for",
        TEAM,
        "timeout=_SILENCE)",
        "timeout=_PATIENCE)",
        f"{ROUNDS}::test_a_rank_that_falls_silent_is_not_waited_for",
    ),
    Fault(
        "what a waiting rank sees of another's end is a traceback",
        TEAM,
        "(ended is None or (isinstance(ended, RuntimeError) and not isinstance(ended, EsperError)))",
        "ended is None",
        f"{ROUNDS}::test_a_rank_that_is_killed_is_one_line_on_the_others",
    ),
]
DEALS = [
    Fault(
        "hosts are dealt in turns",
        TEAM,
        "(counts[rank] + 1) / rates[rank])",
        "counts[rank] + 1)",
        f"{UNIT}::test_no_deal_is_done_earlier",
    ),
    Fault(
        "one slow round is enough for a deal",
        TEAM,
        "min(pair) for pair in zip(before, seconds",
        "max(pair) for pair in zip(before, seconds",
        f"{UNIT}::test_hosts_are_dealt_anew_where_two_rounds_say_that_it_helps",
    ),
    Fault(
        "a deal is made for any gain",
        TEAM,
        "if max(best) > _UNEVEN * max(",
        "if max(best) > max(",
        f"{UNIT}::test_hosts_are_dealt_anew_where_two_rounds_say_that_it_helps",
    ),
    Fault(
        "waiting for the others counts as work",
        TEAM,
        "return time.perf_counter() - self._waited",
        "return time.perf_counter()",
        SLOW,
    ),
    Fault(
        "a new deal moves nobody",
        TRAINER,
        "            if team.deal != deal:",
        "            if team.deal != team.deal:",
        SLOW,
    ),
    Fault(
        "a deal is forgotten when a run goes on",
        HISTORY,
        "            self.team.deal = deal\n",
        "            self.team.deal = []\n",
        SLOW,
    ),
    Fault(
        "a deal for other ranks is kept",
        HISTORY,
        '(deal := facts.get("deal", ())) == self.team.size',
        '(deal := facts.get("deal", ())) >= 2',
        f"{ROUNDS}::test_other_ranks_than_a_deal_was_made_for_begin_evenly",
    ),
    Fault(
        "the clock deals in a deterministic run",
        TRAINER,
        "            if not config.deterministic:",
        "            if True:",
        f"{ROUNDS}::test_a_deterministic_run_keeps_its_deal",
    ),
]
STARTS = [
    Fault(
        "a rank without a GPU of its own takes one that is not there",
        TEAM,
        '"0")) % count)',
        '"0")))',
        f"{UNIT}::test_ranks_share_the_gpus_that_there_are",
    ),
    Fault(
        "NCCL is asked to join two ranks on one GPU",
        TEAM,
        "if wants_cuda and not is_shared else",
        "if wants_cuda else",
        f"{SHARED}[True]",
    ),
    Fault(
        "ranks that share a GPU sum there",
        TEAM,
        '"cpu" if self.shares_gpu else values.device',
        "values.device",
        f"{SHARED}[True]",
    ),
    Fault(
        "every rank is taken to share its GPU",
        TEAM,
        "range(size)}) < size",
        "range(size)}) <= size",
        f"{SHARED}[False]",
    ),
    Fault(
        "a stop waits for eight epochs, however long they are",
        TEAM,
        "min(_LAG, int(_DRIFT / seconds))",
        "_LAG",
        f"{ROUNDS}::test_votes_lag_by_a_few_seconds_at_most",
    ),
    Fault(
        "the first hosts have two ranks",
        TEAM,
        "first = sum(self.deal[: self.rank])",
        "first = self.rank * self.deal[0]",
        f"{UNIT}::test_every_host_has_one_rank_and_shares_differ_by_one_at_most",
    ),
    Fault(
        "ranks with other settings train on",
        TEAM,
        "if (here := other.get(name)) != (first := everyone[0].get(name)):",
        "if (here := other.get(name)) and not (first := everyone[0].get(name)):",
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
        "team.any(resume), team.any(was_restarted())",
        "team.any(resume), was_restarted()",
        "simic/test_team_starts.py::test_what_one_torchrun_knows_of_a_restart_counts_for_all",
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
        "runfolder.cut_events(self.folder, sizes, self.team.size)",
        "assert sizes is not None",
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
TEAM_FAULTS = [*SUMS, *STOPS, *DEALS, *STARTS]
