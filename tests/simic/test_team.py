"""What a team of one does, and the parts of a team that need no other process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.leyline.errors import DeviceError, SaveError, SettingError
from esper.simic import team
from esper.simic.ppo.diagnostics import (
    MinibatchTrace,
    RatioExplosionDiagnostic,
    UpdateFacts,
    summarise,
)
from esper.simic.team import Team, code_digest, is_launched, joined_team, was_restarted


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_host_has_one_rank_and_shares_differ_by_one_at_most(size, more):
    total = size + more - 1
    shares = Team(0, size).assign(total)
    assert len(shares) == size
    assert [host for share in shares for host in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_hosts_are_refused_with_the_way_out():
    with pytest.raises(SettingError, match=r"3 hosts .*4 ranks.*--hosts"):
        Team(0, 4).assign(3)


def test_a_team_of_one_has_what_it_has():
    values, weight = torch.tensor([1.0, 2.0]), nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    alone = Team()
    assert alone.sum_gradients([weight], values) is values
    assert alone.sum(values) is values
    assert weight.grad.tolist() == [3.0, 4.0]
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert [alone.any(claim) for claim in (True, False)] == [True, False]
    assert alone.assign(7) == [range(7)]


def test_a_mistake_of_a_team_of_one_is_raised_as_it_is():
    alone, mistake = Team(), SaveError("the disk is full.")
    with pytest.raises(SaveError) as found, alone.together(), alone.together():
        raise mistake
    assert found.value is mistake


def test_what_is_no_mistake_of_the_callers_passes_through_at_once():
    with pytest.raises(ZeroDivisionError), Team().together():
        raise ZeroDivisionError


class Told(Team):
    """A rank that hears of others what the test says."""

    def __init__(self, everyone):
        super().__init__(0, len(everyone))
        self.everyone = everyone

    def gather(self, value):
        return [value, *self.everyone[1:]]


def test_the_rank_and_the_fact_that_differ_are_named():
    ranks = Told([{}, {"a": 1, "b": 2}, {"a": 1, "b": 3}])
    with pytest.raises(SettingError, match=r" b: rank 0 .* 2, rank 2 .* 3"):
        ranks.require_same({"a": 1, "b": 2})
    with pytest.raises(SettingError, match=r" c: rank 0 .*None, rank 1 .* 4"):
        Told([{}, {"a": 1, "c": 4}]).require_same({"a": 1})
    Told([{}, {"a": 1}]).require_same({"a": 1})


def test_the_digest_of_the_code_follows_every_file(tmp_path, monkeypatch):
    package = tmp_path / "esper"
    (package / "simic").mkdir(parents=True)
    (package / "simic" / "team.py").write_text("a = 1\n")
    monkeypatch.setattr(team, "__file__", str(package / "simic" / "team.py"))
    before = code_digest()
    assert code_digest() == before
    (package / "cli.py").write_text("b = 2\n")
    assert code_digest() != before


def test_who_was_not_launched_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (is_launched(), was_restarted()) == (False, False)
    with joined_team(wants_cuda=False) as alone:
        assert (alone.rank, alone.size) == (0, 1)


def test_what_torchrun_sets_is_read(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (is_launched(), was_restarted()) == (True, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match="GPU"), joined_team(wants_cuda=True):
        pass


@pytest.mark.parametrize(("gpus", "place"), [(1, 0), (2, 1), (4, 3), (8, 3)])
def test_ranks_share_the_gpus_that_there_are(gpus, place, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert team._own_device() == torch.device("cuda", place)
    assert taken == [torch.device("cuda", place)]


def test_a_rank_that_saw_no_rows_has_no_worst_decision():
    found = RatioExplosionDiagnostic.of(
        torch.zeros(2, 0, 3), *torch.zeros(2, 0, dtype=torch.long), ["op", "slot"]
    )
    assert (found.worst, found.count) == ((), 0)


class Heard(Team):
    """A rank that hears what others have said, and keeps what it says itself."""

    def __init__(self, *others):
        super().__init__()
        self.others, self.said = others, None

    def gather(self, value):
        self.said = value
        return [value, *self.others]


def left_behind(ratios, steps=4):
    """The trace of one row of decisions by one head, with these ratios; steps that are left over
    are not valid.
    """
    empty, one = steps - len(ratios), torch.zeros(1)
    changes = torch.tensor([*ratios, *[1.0] * empty]).log()[None, None]
    used = torch.tensor([*[True] * len(ratios), *[False] * empty])[None, None]
    return MinibatchTrace(
        torch.tensor([0]),
        torch.tensor([0]),
        changes,
        used,
        used[0],
        one,
        one,
        one[0],
        one[0],
        one[0],
    )


def test_each_ratio_that_was_looked_at_counts_once_whatever_a_rank_has_come_to():
    facts = UpdateFacts(
        decisions=8,
        head_decisions=[8],
        explained_variance=0.0,
        early_stop_epoch=None,
        stale_state_error=0.0,
        lr=0.0,
        entropy_weight=0.0,
    )
    other = Heard()
    # all of its four decisions
    summarise([left_behind([2.0, 2.0, 2.0, 2.0])], ["op"], 0.2, facts, other)
    # one of four: cut short
    record = summarise([left_behind([1.0])], ["op"], 0.2, facts, Heard(other.said))
    assert record.heads["op"].clip_fraction == record.clip_fraction == pytest.approx(0.8)
    assert (record.ratio_mean, record.ratio_std) == (pytest.approx(1.8), pytest.approx(0.4))
    assert (record.heads["op"].steps, record.heads["op"].ratio_max, record.ratio_min) == (
        8,
        2.0,
        1.0,
    )
