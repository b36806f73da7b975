"""Real processes joined by gloo: the same answer as one, stopping together, refusing together."""

import errno
import os
import re
import socket
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from cases import with_slow
from esper.leyline.errors import EsperError, SaveError, SettingError
from esper.simic import team
from esper.simic import training as running
from esper.simic.ppo import agent as learner
from esper.simic.trainer import train_ppo_vectorized
from esper.storage import runfolder
from null_sink import NullSink
from simic import team_workers
from simic.team_workers import (
    CLOSE,
    FREE,
    assert_ended_well,
    assert_one_line,
    counted,
    decisions_of,
    farthest,
    farthest_tensor,
    free_port,
    hosts_of,
    in_team,
    rounds_of,
    run_ranks,
    sorted_episodes,
    tensors_of,
    train_ranks,
)
from simic.tiny_runs import command, manifest_of, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_forks")]


# -- the same answer -------------------------------------------------------------------------------

CASES = {
    "2 ranks": (2, FREE),
    "2 ranks, joint": (2, {**FREE, "ppo__clip_mode": "joint"}),
    "4 ranks": (4, FREE),
    "4 ranks, joint": (4, {**FREE, "ppo__clip_mode": "joint"}),
    "2 ranks, imitating": (2, {**FREE, "imitation__rounds": 2}),
    "shares of 3 and 2": (2, {**FREE, "hosts": 5}),
    "minibatches of one row": (2, {**FREE, "hosts": 5, "ppo__minibatches": 5}),
    "no row on some ranks": (4, {**FREE, "ppo__minibatches": 4, "ppo__target_kl": 0.002}),
}
SLOW_CASES = ("2 ranks", "4 ranks", "minibatches of one row", "no row on some ranks")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Settings -> the run of one process; each is trained once."""
    known = {}

    def find(changes):
        key = tuple(sorted(changes.items()))
        if key not in known:
            out = tmp_path_factory.mktemp("alone") / "run"
            known[key] = out, train_ranks(out, 1, **changes)
            assert_ended_well(known[key][1])
        return known[key]

    return find


@pytest.mark.parametrize("case", with_slow(CASES, SLOW_CASES))
def test_several_ranks_find_what_one_finds(case, alone, tmp_path):
    size, changes = CASES[case]
    (out, ended), here = alone(changes), tmp_path / "run"
    team_ended = train_ranks(here, size, **changes)
    assert_ended_well(team_ended)
    for rank in (*ended, *team_ended):
        assert set.union(*(seen["types"] for seen in rank.value)) == {torch.float64}
    assert torch.equal(decisions_of(ended), decisions_of(team_ended))
    (tensors, plain), (tensors2, plain2) = tensors_of(out), tensors_of(here)
    assert farthest_tensor(tensors, tensors2) < (CLOSE,)
    assert plain["counters"] == plain2["counters"]
    assert farthest(plain["learner"]["returns"], plain2["learner"]["returns"]) < (CLOSE,)
    assert farthest(rounds_of(out), rounds_of(here)) < (CLOSE,)
    assert counted(out) == counted(here)
    assert farthest(hosts_of(out), hosts_of(here)) < (CLOSE,)


def test_a_first_pass_that_is_cut_short_leaves_ranks_without_rows(alone):
    records = [row["update"] for row in rounds_of(alone(CASES["no row on some ranks"][1])[0])]
    assert min(record["steps"] for record in records) < 3  # four minibatches of one row each


@pytest.mark.slow
def test_in_float32_ranks_differ_by_rounding(tmp_path):
    ends = []
    for size in (1, 2, 4):
        assert_ended_well(train_ranks(tmp_path / str(size), size, torch.float32, **FREE))
        ends.append(tensors_of(tmp_path / str(size))[0])
    gaps = [farthest_tensor(ends[0], end) for end in ends[1:]]
    print("float32:", gaps)
    assert max(gaps) < (1e-4,)


# -- stopping together -----------------------------------------------------------------------------


def updated(tmp_path, fault):
    """Two ranks train for one round, `fault` on rank 1 only; each rank's record of the update and
    its weights.
    """

    def live(team):
        if team.rank == 1:
            fault()
        records, update = [], learner.PPOAgent.update
        learner.PPOAgent.update = lambda agent, rollout, **options: (
            records.append(update(agent, rollout, **options)) or records[-1]
        )
        config = tiny(tmp_path / "run", hosts=4, rounds=1, ppo__target_kl=1.0, ppo__epochs=3)
        taught = train_ppo_vectorized(config, sink=NullSink(), team=team)
        return asdict(records[0]), taught.network.state_dict()

    (tmp_path / "run").mkdir()
    ended = run_ranks(tmp_path / "ranks", 2, in_team(live))
    assert_ended_well(ended)
    (record, weights), (record1, weights1) = (rank.value for rank in ended)
    assert str(record) == str(record1)  # as text, NaN is NaN
    assert [name for name in weights if not torch.equal(weights[name], weights1[name])] == []
    return record, weights


def at_call(owner, name, number, change):
    """The `number`-th call of a function gives `change(result)`."""
    real, calls = getattr(owner, name), []

    def called(*args, **kwargs):
        calls.append(None)
        found = real(*args, **kwargs)
        return change(found, *args) if len(calls) == number else found

    setattr(owner, name, called)


def test_one_rank_over_the_limit_stops_all_in_the_same_minibatch(tmp_path):
    def too_far(loss, *_):
        return replace(loss, kl=loss.kl + 2.0)

    record, _ = updated(tmp_path, lambda: at_call(learner, "policy_loss", 4, too_far))
    assert (record["steps"], record["early_stop_epoch"]) == (3, 1)
    assert record["approx_kl"] > 1.5


def test_a_gradient_of_one_rank_that_is_no_number_is_left_out_by_all(tmp_path):
    def spoil():
        real, calls = team.Team.sum_gradients, []

        def spoiled(self, parameters, number):
            own = list(parameters)
            calls.append(None)
            if len(calls) == 2:
                own[0].grad.view(-1)[0] = torch.nan
            return real(self, own, number)

        team.Team.sum_gradients = spoiled

    record, weights = updated(tmp_path, spoil)
    assert (record["steps"], record["skipped_steps"]) == (5, 1)
    assert all(bool(value.isfinite().all()) for value in weights.values())


def told_by(team, others):
    """What is raised where rank 1 fails before it does what the others do."""
    try:
        with team.together():
            if team.rank == 1:
                raise SaveError("the disk is full.")
            others()
    except EsperError as found:
        return type(found), str(found)


def test_a_mistake_of_one_rank_is_raised_on_all(tmp_path):
    def live(team):
        return told_by(team, lambda: None)

    ended = run_ranks(tmp_path, 3, in_team(live))
    assert_ended_well(ended)
    first, own, last = (rank.value for rank in ended)
    assert own == (SaveError, "the disk is full.")
    assert first == last
    assert first[0] is SettingError
    assert re.match("rank 1 .*: the disk is full.", first[1])


def test_a_mistake_before_an_inner_block_is_raised_on_all_too(tmp_path):
    def live(team):
        def meet():
            with team.together():
                pass

        return team.gather(told_by(team, meet)[1])  # nobody is one message behind

    ended = run_ranks(tmp_path, 2, in_team(live))
    assert_ended_well(ended)
    other, own = ended[0].value
    assert own == "the disk is full."
    assert re.match("rank 1 .*: the disk is full.", other)


# -- what is refused at the start ------------------------------------------------------------------


def esper_ranks(tmp_path, size, arguments, prepare=lambda rank: None, **options):
    """`esper` on every rank, with that rank's arguments."""

    def live(rank):
        prepare(rank)
        team_workers.esper(arguments(rank))

    return run_ranks(tmp_path / "ranks", size, live, **options)


def test_ranks_with_other_settings_are_refused_and_the_difference_is_named(tmp_path):
    ended = esper_ranks(
        tmp_path, 2, lambda rank: command(tmp_path / "run", ppo__lr=0.02 + 0.01 * rank)
    )
    assert_one_line(ended, "ppo.lr: rank 0 .*0.02, rank 1 .*0.03")
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_code_are_refused(tmp_path):
    def prepare(rank):
        running.code_digest = lambda: f"digest of {rank}"

    ended = esper_ranks(tmp_path, 2, lambda rank: command(tmp_path / "run"), prepare)
    assert_one_line(ended, "code: rank 0 .*'digest of 0', rank 1 .*'digest of 1'")


def test_more_ranks_than_hosts_are_refused(tmp_path):
    ended = esper_ranks(tmp_path, 3, lambda rank: command(tmp_path / "run"))
    assert_one_line(ended, "2 hosts .*3 ranks.*--hosts")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (["--devices", "cpu", "cpu"], "--devices"),
        (["--set", 'devices=["cpu", "cpu"]'], "a rank has one device"),
    ],
)
def test_devices_under_torchrun_are_refused(places, text, tmp_path):
    ended = esper_ranks(tmp_path, 2, lambda rank: [*command(tmp_path / "run"), *places])
    assert_one_line(ended, text)
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_one_clear_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"WORLD_SIZE": "2", "MASTER_PORT": str(taken.getsockname()[1])}
        ended = esper_ranks(
            tmp_path, 1, lambda rank: command(tmp_path / "run"), environments={0: place}
        )
    assert_one_line(ended, f"rank 0 .*127.0.0.1:{place['MASTER_PORT']}")
    assert "free port" in ended[0].said


def test_an_address_where_nobody_is_is_one_clear_line(tmp_path):
    def prepare(rank):
        team._JOINING = timedelta(seconds=2)

    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": str(free_port())}
    ended = esper_ranks(
        tmp_path, 1, lambda rank: command(tmp_path / "run"), prepare, environments={0: place}
    )
    assert_one_line(ended, "rank 1 .*127.0.0.1")
    assert "--master-addr" in ended[0].said


# -- a disk that fails -----------------------------------------------------------------------------


def fail_to_replace(name):
    """The disk is full when a file whose name begins so is put in its place."""
    real = os.replace

    def failing(source, target):
        if Path(target).name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    os.replace = failing


@pytest.mark.parametrize("name", ["round-000002.safetensors", runfolder.MANIFEST, runfolder.CONFIG])
def test_a_disk_that_fails_while_rank_0_saves_ends_all_with_one_line(name, tmp_path):
    ended = train_ranks(
        tmp_path / "run", 2, prepare=lambda rank: fail_to_replace(name) if not rank else None
    )
    assert_one_line(ended, f"{name}: No space")


def test_a_disk_that_fails_while_one_rank_keeps_twins_ends_all_with_one_line(tmp_path):
    def prepare(rank):
        if rank == 1:
            fail_to_replace("twin-")

    ended = train_ranks(tmp_path / "run", 2, prepare=prepare)
    assert_one_line(ended, "/twins/twin-")


def test_a_start_that_is_refused_leaves_nothing_behind(tmp_path):
    places = [
        "--set",
        'devices=["cpu"]',
        "--data-root",
        str(tmp_path / "nothing"),
        "--out",
        str(tmp_path / "run"),
    ]
    ended = esper_ranks(tmp_path, 2, lambda rank: ["ppo", "--preset", "cifar10", *places])
    assert_one_line(ended, "nothing")
    assert not (tmp_path / "run").exists()


# -- other numbers of ranks ------------------------------------------------------------------------


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    settings = {**FREE, "ppo__anneal_decisions": 4 * 4 * 3}
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert_ended_well(train_ranks(whole, 1, **{**settings, "rounds": 4}))
    for rounds, size in ((2, 2), (3, 1), (4, 4)):
        assert_ended_well(
            train_ranks(out, size, resume=rounds > 2, **{**settings, "rounds": rounds})
        )
        with open(out / runfolder.events_of(1), "a") as file:
            file.write('{"type": "HostEpoch", "host": 2')  # what a rank that is killed leaves
    (out / runfolder.events_of(1)).write_text(
        (out / runfolder.events_of(1)).read_text().removesuffix('{"type": "HostEpoch", "host": 2')
    )
    assert farthest_tensor(tensors_of(whole)[0], tensors_of(out)[0]) < (CLOSE,)
    assert farthest(rounds_of(whole), rounds_of(out)) < (CLOSE,)
    assert sorted_episodes(whole) == sorted_episodes(out)
    assert [entry["rounds"] for entry in manifest_of(out)["checkpoints"]][-1] == 4
