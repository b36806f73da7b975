"""What the page and the report are given:

JSON without surprises, only what is new, and fair comparisons.
"""

import json
import math
from dataclasses import asdict

import pytest

from dashboard.web_runs import (
    append,
    booked,
    grow_run,
    grown_epoch,
    ppo_round,
    ppo_run,
    seed_events,
)
from esper.dashboard import payload
from esper.dashboard.payload import Sent, curves, encode, episode_data, header, news, plain
from esper.dashboard.reader import RunReader
from esper.dashboard.standings import arms_of, standings
from esper.telemetry.events import ActionRefused, ActionTaken
from esper.telemetry.statistics import compare_pairs, estimate_mean


def read(folder):
    reader = RunReader(folder)
    reader.refresh()
    return reader


def standings_of(*folders):
    return standings(arm for folder in folders for arm in arms_of(read(folder).view, folder.name))


def test_plain_data_holds_nothing_that_json_does_not_know():
    value = {
        "a": [math.nan, math.inf, 1 / 3],
        1: (True, None, 2),
        "text": "x" * 9000,
        "path": object,
    }
    found = json.loads(encode(value), parse_constant=pytest.fail)
    assert found["a"] == [None, None, 0.3333333]
    assert found["1"] == [True, None, 2]
    assert len(found["text"]) < 9000


def test_endless_nesting_has_an_end():
    deep = []
    for _ in range(900):
        deep = [deep]
    assert len(json.dumps(plain(deep))) < 10_000


def test_a_new_client_is_told_everything_and_then_only_what_is_new(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=3)
    reader, sent = read(folder), Sent()
    first = news(reader, 0, sent)
    assert first["whole"]
    assert {"header", "episode", "log", "rounds", "rest"} <= first.keys()
    assert news(reader, 0, sent) is None
    append(folder, grown_epoch(0, 3))
    reader.refresh()
    second = news(reader, 0, sent)
    assert second.keys() == {"whole", "header", "episode", "log"}
    assert not second["whole"]
    assert len(second["log"]) == 1
    assert second["episode"]["epochs"]["epoch"] == [1, 2, 3, 4]


def test_a_run_that_was_cut_back_is_told_anew(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=3)
    reader, sent = read(folder), Sent()
    news(reader, 0, sent)
    whole = (folder / "events-0.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events-0.jsonl").write_bytes(b"".join(whole[:2]))
    reader.refresh()
    message = news(reader, 0, sent)
    assert message["whole"]
    assert message["header"]["events"] == 2
    assert len(message["log"]) == 2


def test_rounds_are_told_when_one_has_finished(tmp_path):
    folder = ppo_run(tmp_path / "run", rounds=1)
    reader, sent = read(folder), Sent()
    news(reader, 0, sent)
    *lived, finished = ppo_round(1)
    append(folder, *lived)
    reader.refresh()
    assert "rounds" not in news(reader, 0, sent)
    append(folder, finished)
    reader.refresh()
    assert news(reader, 0, sent)["rounds"]["round"] == [0, 1]


def test_costs_that_are_booked_after_the_ledgers_are_told_too(tmp_path):
    folder = ppo_run(tmp_path / "run", rounds=1)
    reader, sent = read(folder), Sent()
    first = news(reader, 0, sent)["rest"]["spent"]
    assert {(row["what"], row["phase"]): row["flops"] for row in first} == {
        ("twins", "training"): 10**5,
        ("episodes", "training"): 2 * 10**6,
        ("episodes", "policy"): 2 * 10**5,
        ("learning", "learning"): 5 * 10**5,
    }
    append(folder, booked("learning", 1, "learning", 10))
    reader.refresh()
    (learning,) = [r for r in news(reader, 0, sent)["rest"]["spent"] if r["what"] == "learning"]
    assert learning == {
        "what": "learning",
        "phase": "learning",
        "flops": 5 * 10**5 + 10,
        "examples": 20,
        "seconds": 0.5,
    }


def test_every_host_tells_its_last_action(tmp_path):
    folder = ppo_run(tmp_path / "run", rounds=1)
    actions = [
        ActionTaken(0, 6, "GERMINATE", "r0c1", "norm", "linear"),
        ActionRefused(1, 6, "CULL", "r0c0", "it is too young"),
    ]
    append(folder, *actions)
    message = news(read(folder), 0, Sent())
    first, second = message["header"]["last_actions"]
    assert message["episode"]["last_action"] == {k: v for k, v in first.items() if k != "host"}
    assert [first[name] for name in ("host", "op", "slot", "blueprint", "blend", "refused")] == [
        0, "GERMINATE", "r0c1", "norm", "linear", None
    ]  # fmt: skip
    assert (second["host"], second["op"], second["refused"]) == (1, "CULL", "it is too young")
    quiet = grow_run(tmp_path / "quiet", "never")
    message = news(read(quiet), 0, Sent())
    assert message["header"]["last_actions"] == []
    assert message["episode"]["last_action"] is None
    assert message["rest"]["spent"] == []


def test_the_episode_that_is_told_is_the_one_that_was_asked_for(tmp_path):
    reader = read(grow_run(tmp_path / "run"))
    assert news(reader, 1, Sent())["episode"]["host"] == 1


def test_an_episode_keeps_spans_and_evidence_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    folder = grow_run(tmp_path / "run")
    episode = read(folder).view.episodes[0]
    assert [
        (span["slot"], span["fate"], span["end"]) for span in episode_data(episode)["spans"]
    ] == [
        ("r0c0", "FOSSILIZED", 3),
        ("r0c1", "CULLED", 4),
    ]
    assert episode_data(episode)["spans"][0]["verdicts"][-1]["gate"] == "G5"
    monkeypatch.setattr(payload, "MOST_SPANS", 1)
    assert [span["slot"] for span in episode_data(episode)["spans"]] == ["r0c1"]
    assert episode_data(episode)["spans_left_out"] == 1


def test_a_long_episode_is_thinned(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=0)
    append(folder, *(batch for batches in seed_events(0, 0, "r0c0", "CULLED") for batch in batches))
    append(
        folder, *(grown_epoch(0, epoch, 0.99 if epoch == 1234 else 0.5) for epoch in range(3000))
    )
    epochs = episode_data(read(folder).view.episodes[0])["epochs"]
    assert len(epochs["epoch"]) <= payload.POINTS
    assert (epochs["epoch"][0], epochs["epoch"][-1]) == (1, 3000)
    assert 0.99 in epochs["accuracy"]


def test_the_header_says_how_far_the_last_round_was_over_its_twins(tmp_path):
    found = header(read(ppo_run(tmp_path / "run")))
    assert found["over_twin"] == pytest.approx(0.4)
    assert found["hosts"] == [0, 1]
    assert "path" not in found


def test_curves_of_a_grown_run_are_means_over_its_hosts(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=0)
    append(folder, grown_epoch(0, 0, 0.2), grown_epoch(1, 0, 0.4), grown_epoch(0, 1, 0.6))
    found = curves(read(folder).view)
    assert found["epoch"] == [1, 2]
    assert found["accuracy"] == pytest.approx([0.3, 0.6])


def test_policies_are_compared_on_the_same_host_seeds(tmp_path):
    never = grow_run(tmp_path / "never", "never", seeds=(0, 1, 2), test=0.80)
    grown = grow_run(tmp_path / "grown", "heuristic", seeds=(1, 2), test=0.90)
    rows = {row["policy"]: row for row in standings_of(never, grown)}
    assert rows["never"]["accuracy"]["mean"] == pytest.approx(0.81)
    assert rows["never"]["gain"] is None
    assert rows["heuristic"]["gain"]["mean"] == pytest.approx(0.09)  # 0.90 - 0.81 and 0.91 - 0.82
    assert rows["heuristic"]["accuracy"]["count"] == 2


def test_a_lead_is_the_one_that_a_comparison_finds(tmp_path):
    never = grow_run(tmp_path / "never", "never", seeds=range(6))
    grown = grow_run(tmp_path / "grown", "heuristic", seeds=range(6))
    scores = {}
    for folder, own in (
        (never, (0.81, 0.7, 0.76, 0.8, 0.93, 0.72)),
        (grown, (0.9, 0.852, 0.757, 0.79, 0.951, 0.98)),
    ):
        lines = (folder / "events-0.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            if record["type"] == "ArmFinished":
                record["test_accuracy"] = own[record["seed"]]
        (folder / "events-0.jsonl").write_text("\n".join(map(json.dumps, reversed(records))) + "\n")
        scores[folder] = own
    _, row = standings_of(never, grown)
    assert row["gain"] == asdict(compare_pairs(scores[grown], scores[never]))
    assert row["accuracy"] == asdict(estimate_mean(scores[grown]))


def test_runs_of_one_policy_join_and_runs_with_other_settings_do_not(tmp_path):
    first = grow_run(tmp_path / "first", seeds=(0,))
    second = grow_run(tmp_path / "second", seeds=(7,))
    larger = grow_run(
        tmp_path / "larger", seeds=(9,), task={"name": "digits", "epochs": 6, "budget": 3.0}
    )
    assert [row["accuracy"]["count"] for row in standings_of(first, second, larger)] == [2, 1]


@pytest.mark.parametrize("name", ["amp", "compile", "imports", "files"])
def test_runs_that_were_played_in_another_way_do_not_join(tmp_path, name):
    never = grow_run(tmp_path / "never", "never", seeds=(0,), **{name: "other"})
    first, second = (
        grow_run(tmp_path / "a", seeds=(0,)),
        grow_run(tmp_path / "b", seeds=(0,), **{name: "other"}),
    )
    _, one, other = standings_of(never, first, second)
    is_own_code = name in (
        "imports",
        "files",
    )  # a rule's file says nothing about a host that never grows
    assert (one["gain"] is not None, other["gain"] is not None) == (is_own_code, True)


def test_a_score_that_is_no_number_counts_nowhere(tmp_path):
    folder = grow_run(tmp_path / "run", seeds=(0, 1))
    events = folder / "events-0.jsonl"
    events.write_text(
        events.read_text().replace('"test_accuracy": 0.9,', '"test_accuracy": 1e999,')
    )
    (row,) = standings_of(folder)
    assert row["accuracy"] == asdict(estimate_mean([0.91]))


def test_a_control_that_was_trained_otherwise_is_none(tmp_path):
    never = grow_run(tmp_path / "never", "never", task={"name": "digits", "epochs": 6, "batch": 8})
    rows = standings_of(never, grow_run(tmp_path / "grown"))
    assert [row["gain"] for row in rows] == [None, None]


def test_a_control_of_another_folder_is_none_where_the_training_is_not_recorded(tmp_path):
    never = grow_run(tmp_path / "never", "never")
    grown = grow_run(tmp_path / "grown")
    for folder in (never, grown):
        config = json.loads((folder / "config.json").read_text())
        del config["training"]
        (folder / "config.json").write_text(json.dumps(config))
    assert [row["gain"] for row in standings_of(never, grown)] == [None, None]


def test_a_taught_policy_is_compared_with_each_episode_s_twin(tmp_path):
    (row,) = standings_of(ppo_run(tmp_path / "run"))
    assert (row["measure"], row["control"], row["accuracy"]["count"]) == ("held-out", "its twin", 2)
    assert row["gain"]["mean"] == pytest.approx(0.8 - 0.4)


def test_in_the_middle_of_a_round_the_last_finished_one_counts(tmp_path):
    folder = ppo_run(tmp_path / "run", rounds=1)
    append(folder, *list(ppo_round(1))[:4])
    (row,) = standings_of(folder)
    assert (row["gain"]["count"], row["gain"]["low"]) == (1, None)
    assert row["gain"]["mean"] == pytest.approx(0.7 - 0.4)
