"""Starts and restarts that must not go wrong:

another run's folder, another checkpoint, a limit of time, an anomaly.
"""

import json
import os
import re

import pytest
import torch

from esper.storage import runfolder
from esper.storage.store import Store
from simic.team_workers import assert_ended_well, assert_one_line, esper, run_ranks, train_ranks
from simic.test_every_knob import LOUD
from simic.test_team_torchrun import torchrun
from simic.tiny_runs import command, manifest_of

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_forks")]

SETTLED = {"hosts": 2, "ppo__anneal_decisions": 24}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert_ended_well(train_ranks(out, 2, torch.float32, rounds=2, **SETTLED))
    return out


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def begun_again_for_two_rounds(out):
    """A run of two rounds that has come to its first: what a death in the second leaves."""
    assert_ended_well(train_ranks(out, 2, torch.float32, rounds=1, **SETTLED))
    config = json.loads((out / runfolder.CONFIG).read_text())
    runfolder.write_json(out / runfolder.CONFIG, {**config, "rounds": 2})


def test_what_one_torchrun_knows_of_a_restart_counts_for_all(tmp_path):
    def prepare(rank):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(
            rank
        )  # each counts the deaths of its own ranks

    begun_again_for_two_rounds(tmp_path / "run")
    assert_ended_well(
        train_ranks(tmp_path / "run", 2, torch.float32, rounds=2, prepare=prepare, **SETTLED)
    )
    assert manifest_of(tmp_path / "run")["rounds"] == 2


def test_a_team_of_one_that_was_started_anew_goes_on(tmp_path):
    begun_again_for_two_rounds(tmp_path / "run")
    (ended,) = run_ranks(
        tmp_path / "ranks",
        1,
        lambda rank: esper(command(tmp_path / "run", rounds=2, **SETTLED)),
        environments={0: {"TORCHELASTIC_RESTART_COUNT": "1"}},
    )
    assert_ended_well([ended])
    assert manifest_of(tmp_path / "run")["rounds"] == 2


@pytest.mark.slow
def test_a_start_that_was_refused_does_not_get_in_when_it_is_started_anew(finished):
    before = files_of(finished)
    arguments = ["esper", *command(finished, rounds=4, seed=7, **SETTLED)]
    code, said = torchrun(arguments, "--max-restarts", "1")
    assert code == 1
    assert said.count("--resume (") == 4
    assert files_of(finished) == before


def test_ranks_that_see_other_checkpoints_do_not_go_on(finished):
    before = files_of(finished)

    def prepare(rank):
        parse = Store._parse

        def late(store, manifest):
            listed = parse(store, manifest)
            return listed[:-1] if rank and store.manifest.name == runfolder.MANIFEST else listed

        Store._parse = late

    ended = train_ranks(
        finished, 2, torch.float32, rounds=3, resume=True, prepare=prepare, **SETTLED
    )
    assert_one_line(ended, "checkpoint.*: rank 0 .*'round-000002.safetensors")
    after = files_of(finished)
    assert {
        name
        for name in before
        if name.startswith(("events", "check", "mani")) and after[name] != before[name]
    } == set()


def test_a_limit_of_time_ends_all_ranks_in_good_order(tmp_path):
    ended = train_ranks(tmp_path / "run", 2, torch.float32, rounds=2, time_limit=1e-9, **SETTLED)
    assert [rank.code for rank in ended] == [130, 130], [rank.said for rank in ended]
    assert re.search(" 0 .*esper ppo --out", ended[0].said)


def test_an_anomaly_ends_all_ranks_where_that_is_asked_for(tmp_path):
    ended = train_ranks(
        tmp_path / "run", 2, torch.float32, **{**LOUD, **SETTLED, "stop_on_anomaly": True}
    )
    assert_one_line(ended, "stop_on_anomaly")


def test_json_is_not_for_ranks(tmp_path):
    ended = run_ranks(
        tmp_path / "ranks", 2, lambda rank: esper([*command(tmp_path / "run", **SETTLED), "--json"])
    )
    assert_one_line(ended, "--json")
    assert not (tmp_path / "run").exists()
