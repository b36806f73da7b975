"""Checkpoints:

everything comes back, what is damaged, foreign or built for something else is named and refused.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from esper.leyline.errors import CheckpointMismatchError, SaveError
from esper.simic.checkpoints import History, episodes_of, load_agent
from esper.simic.team import StopVote
from esper.simic.trainer import build_agent, build_environment, build_rollout, play_round
from esper.storage import runfolder
from esper.storage.store import Store
from esper.tamiyo.policy_files import read as read_policy
from esper.tamiyo.policy_files import require_layout, seal
from null_sink import NullSink
from simic.tiny_runs import checkpoints_in, events_of, is_whole, manifest_of, open_sink, tiny, train


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A configuration, its environment, and an agent that has learned one round."""
    config = tiny(tmp_path_factory.mktemp("learned") / "run")
    env = build_environment(config)
    agent, layout = build_agent(config, env)
    rollout = build_rollout(env, agent)
    play_round(env, agent, rollout, 0, NullSink(), StopVote(agent.team))
    agent.update(rollout)
    return config, env, agent, layout


@pytest.fixture
def saved(learned, tmp_path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(learned[2].to_bytes(learned[3], {"rounds": 1, "note": "ü"}))
    return path


def fresh(learned, **changes):
    config = learned[0].with_changes(
        [(key.replace("__", "."), value) for key, value in changes.items()], "the test"
    )
    return build_agent(config, build_environment(config) if changes else learned[1])


def state_of(agent):
    """Everything that a learner goes on from, by name."""
    found = {f"network.{name}": value.clone() for name, value in agent.network.state_dict().items()}
    for index, state in agent.optimizer.state_dict()["state"].items():
        found |= {
            f"optimizer.{index}.{key}": torch.as_tensor(value).clone()
            for key, value in state.items()
        }
    found |= {"draws": agent.draws.get_state(), "shuffles": agent.shuffles.get_state()}
    return found | {"counters": torch.tensor([agent.decisions, agent.updates])}


def differing(one, other):
    return {name for name in one.keys() | other.keys() if name not in one or name not in other} | {
        name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])
    }


# -- there and back --------------------------------------------------------------------------------


def test_a_learner_comes_back_to_the_bit_with_the_callers_facts(learned, saved):
    agent, layout = fresh(learned)
    assert differing(state_of(agent), state_of(learned[2]))
    assert load_agent(saved, agent, layout) == {"rounds": 1, "note": "ü"}
    assert differing(state_of(agent), state_of(learned[2])) == set()


def test_a_learner_that_came_back_learns_on_alike(learned, saved, tmp_path):
    config, env, _, layout = learned
    ends = []
    for _ in range(2):
        agent, _ = fresh(learned)
        load_agent(saved, agent, layout)
        rollout = build_rollout(env, agent)
        play_round(env, agent, rollout, 1, NullSink(), StopVote(agent.team))
        agent.update(rollout)
        ends.append(state_of(agent))
    assert differing(*ends) == set()
    assert config.hosts == 2


def test_a_learner_that_has_not_learned_yet_comes_back_too(learned, tmp_path):
    agent, layout = fresh(learned)
    before = state_of(agent)
    (tmp_path / "new").write_bytes(agent.to_bytes(layout, {}))
    load_agent(tmp_path / "new", agent, layout)
    assert differing(state_of(agent), before) == set()


def test_the_file_is_plain_tensors_and_json(saved, learned):
    with safe_open(saved, "pt") as file:
        plain = json.loads(file.metadata()["esper"])
    assert plain["format"] == 5
    assert plain["layout"] == json.loads(json.dumps(vars(learned[3])))
    assert plain["counters"] == {"decisions": 6, "updates": 1}
    names = set(load_file(saved))
    assert {
        "draws",
        "shuffles",
        "network.observation_stats.mean",
        "network.return_stats.var",
    } <= names
    assert any(name.startswith("optimizer.0.") for name in names)


def test_a_checkpoint_says_how_many_episodes_it_learned_from_whatever_hosts_a_resume_had(tmp_path):
    for rounds, hosts in ((2, 2), (3, 3)):
        train(tiny(tmp_path, rounds=rounds, hosts=hosts, keep_checkpoints=5), resume=rounds == 3)
    folder = tmp_path / runfolder.CHECKPOINTS
    assert [episodes_of(folder / name) for name in checkpoints_in(tmp_path)] == [2, 4, 7]


def test_a_checkpoint_that_does_not_say_so_is_not_guessed_at(saved):
    assert episodes_of(saved) is None


# -- what is refused -------------------------------------------------------------------------------


def damage(path, how):
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "a pickle":
            torch.save({"weights": torch.ones(2)}, path)
        case "text":
            path.write_text("not a checkpoint")
        case "gone":
            path.unlink()
        case "a folder":
            path.unlink()
            path.mkdir()
        case "no metadata":
            save_file(load_file(path), path)
        case "other metadata":
            save_file(load_file(path), path, {"esper": "not json"})
        case "a list":
            save_file(load_file(path), path, {"esper": "[]"})
        case "another format":
            save_file(load_file(path), path, {"esper": json.dumps({"format": 99})})
        case "the one before":  # it had no digest
            save_file(load_file(path), path, {"esper": json.dumps({"format": 3})})


@pytest.mark.parametrize(
    "how", ["cut", "empty", "a pickle", "text", "gone", "a folder", "no metadata", "other metadata"]
)
def test_a_file_that_is_no_checkpoint_of_ours_is_refused_by_name(saved, how):
    damage(saved, how)
    with pytest.raises(SaveError, match=r"one\.safetensors .*checkpoint"):
        read_policy(saved)


@pytest.mark.parametrize(
    ("how", "found"), [("a list", None), ("another format", 99), ("the one before", 3)]
)
def test_another_format_is_refused(saved, how, found):
    damage(saved, how)
    with pytest.raises(SaveError, match=f"format {found}, .*format 5"):
        read_policy(saved)


@pytest.mark.parametrize("name", ["draws", "shuffles", "network.observation_stats.mean"])
def test_a_file_that_lacks_a_part_is_refused_before_anything_changes(learned, saved, name):
    tensors, plain = read_policy(saved)
    del tensors[name]
    saved.write_bytes(seal(tensors, plain))
    agent, layout = fresh(learned)
    before = state_of(agent)
    with pytest.raises(SaveError, match=f"{saved.name} .*{name}"):
        load_agent(saved, agent, layout)
    assert differing(state_of(agent), before) == set()


def test_random_numbers_of_another_kind_of_device_are_refused(learned, saved):
    tensors, plain = read_policy(saved)
    tensors["draws"] = torch.zeros(16, dtype=torch.uint8)  # as a GPU's are
    saved.write_bytes(seal(tensors, plain))
    agent, layout = fresh(learned)
    with pytest.raises(CheckpointMismatchError, match=r"\[16\].*cpu"):
        load_agent(saved, agent, layout)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"task__slots": ["r0c1"]}, r"slots: \['r0c0', 'r0c1'\] .*\['r0c1'\]"),
        ({"task__blueprints": ["mlp"]}, r"blueprints: \['lora', 'mlp'\] .*\['mlp'\]"),
        (
            {"task__blueprints": ["mlp", "lora"]},
            r"blueprints: \['lora', 'mlp'\] .*\['mlp', 'lora'\]",
        ),
        ({"observe_telemetry": False}, r"lacking: \[\] .*\['telemetry'\]"),
        ({"ppo__hidden_dim": 9}, "hidden_dim: 8 .*9"),
        ({"ppo__head_dim": 9}, "head_dim: 8 .*9"),
    ],
    ids=str,
)
def test_another_layout_is_refused_with_both_side_by_side(learned, saved, change, row):
    agent, layout = fresh(learned, **change)
    before = state_of(agent)
    with pytest.raises(CheckpointMismatchError, match=row) as refused:
        load_agent(saved, agent, layout)
    assert "size mismatch" in str(refused.value)
    assert "docs/checkpoints.md" in str(refused.value)
    assert differing(state_of(agent), before) == set()


def test_every_difference_has_a_row_and_nothing_else_has(learned, tmp_path):
    layout = learned[3]
    other = replace(layout, slots=("r0c0",), blends=("linear",))
    with pytest.raises(CheckpointMismatchError) as refused:
        require_layout(layout, other, tmp_path)
    assert re.findall(r"^  (\w+):", str(refused.value), re.MULTILINE) == ["slots", "blends"]
    require_layout(layout, layout, tmp_path)


# -- a run's checkpoints ---------------------------------------------------------------------------


@pytest.fixture
def history(learned, tmp_path):
    config = learned[0].with_changes(
        [("out", str(tmp_path / "run")), ("keep_checkpoints", 2)], "the test"
    )
    with open_sink(config) as sink:
        yield History(config, learned[3], sink)


def save_all(history, agent, returns):
    for rounds, value in enumerate(returns, 1):
        agent.updates = rounds
        history.save(agent, rounds, value)
    return [
        path.removeprefix("round-00000").removesuffix(".safetensors")
        for path in checkpoints_in(history.folder)
    ]


@pytest.mark.parametrize(
    ("returns", "kept", "best"),
    [
        ([1.0], "1", 1),
        ([1.0, 2.0, 3.0, 4.0], "34", 4),
        ([9.0, 2.0, 3.0, 4.0], "134", 1),
        ([1.0, 9.0, 9.0, 2.0, 3.0], "245", 2),
        ([-3.0, -2.0, -5.0, -4.0], "234", 2),
    ],
)
def test_the_newest_and_the_best_are_kept(learned, history, returns, kept, best):
    assert "".join(save_all(history, learned[2], returns)) == kept
    manifest = manifest_of(history.folder)
    assert manifest["rounds"] == len(returns)
    assert [entry["rounds"] for entry in manifest["checkpoints"]] == [int(name) for name in kept]
    assert manifest["best"]["rounds"] == best
    for entry in (*manifest["checkpoints"], manifest["best"]):
        assert is_whole(history.folder, entry)


def test_what_others_put_beside_the_checkpoints_stays(learned, history):
    places = history.folder / runfolder.CHECKPOINTS
    places.mkdir(parents=True)
    (places / "my-favourite.safetensors").touch()
    (places / "notes").mkdir()
    (places / "round-000009.safetensors").touch()
    (places / f".new-{'0' * 32}-round-000009.safetensors").touch()
    save_all(history, learned[2], [1.0, 2.0, 3.0])
    kept = [f"round-{rounds:06d}.safetensors" for rounds in (2, 3)]
    others = ["round-000009.safetensors"]
    assert checkpoints_in(history.folder) == ["my-favourite.safetensors", "notes", *kept, *others]


def reopen(learned, history):
    """A fresh agent and what the folder brings it back to."""
    agent, layout = fresh(learned)
    again = History(
        learned[0].with_changes([("out", str(history.folder))], "the test"), layout, history.sink
    )
    again.store.keep = history.store.keep
    return agent, again


def test_resuming_takes_the_newest(learned, history, capsys):
    save_all(history, learned[2], [1.0, 3.0, 2.0])
    agent, again = reopen(learned, history)
    assert again.resume(agent) == agent.updates == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["cut", "empty", "gone", "text", "a folder"])
def test_a_damaged_newest_is_named_and_the_one_before_is_taken(learned, history, capsys, how):
    save_all(history, learned[2], [1.0, 3.0, 2.0])
    damage(history.folder / runfolder.CHECKPOINTS / "round-000003.safetensors", how)
    agent, again = reopen(learned, history)
    assert again.resume(agent) == agent.updates == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"esper: {history.folder / runfolder.CHECKPOINTS / 'round-000003.safetensors'} is "
    )
    assert told.endswith("; using the save before it.\n")
    assert told.count("\n") == 1
    assert [row["round"] for row in events_of(history.folder)] == [1, 2]


def test_one_flipped_bit_is_damage(learned, history, capsys):
    save_all(history, learned[2], [1.0, 2.0])
    path = history.folder / runfolder.CHECKPOINTS / "round-000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    agent, again = reopen(learned, history)
    assert again.resume(agent) == 1
    assert "round-000002" in capsys.readouterr().err


def test_a_link_in_place_of_a_checkpoint_is_not_followed(learned, history, capsys, tmp_path):
    save_all(history, learned[2], [1.0, 2.0])
    path = history.folder / runfolder.CHECKPOINTS / "round-000002.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    agent, again = reopen(learned, history)
    assert again.resume(agent) == 1


def test_a_best_that_lies_in_the_undone_future_is_chosen_anew(learned, history, capsys):
    save_all(history, learned[2], [1.0, 3.0, 4.0])
    damage(history.folder / runfolder.CHECKPOINTS / "round-000003.safetensors", "cut")
    agent, again = reopen(learned, history)
    again.resume(agent)
    again.save(agent, 3, 2.5)
    manifest = manifest_of(history.folder)
    assert manifest["best"]["rounds"] == 2
    assert [entry["rounds"] for entry in manifest["checkpoints"]] == [2, 3]


def test_a_round_that_is_played_again_does_not_write_over_its_damaged_checkpoint(
    learned, history, capsys
):
    """A power cut in the middle would leave its old digest with its new content."""
    save_all(history, learned[2], [1.0, 2.0])
    damage(history.folder / runfolder.CHECKPOINTS / "round-000002.safetensors", "cut")
    agent, again = reopen(learned, history)
    again.resume(agent)
    again.save(agent, 2, 3.0)
    assert checkpoints_in(history.folder) == [
        "round-000001.safetensors",
        "round-000002-3.safetensors",
    ]
    assert events_of(history.folder)[-1]["file"] == "round-000002-3.safetensors"
    assert reopen(learned, history)[1].resume(agent) == 2


def test_if_none_is_whole_it_is_an_error_that_names_the_folder(learned, history, capsys):
    save_all(history, learned[2], [1.0, 2.0, 3.0])
    for name in checkpoints_in(history.folder):
        damage(history.folder / runfolder.CHECKPOINTS / name, "cut")
    agent, again = reopen(learned, history)
    before = state_of(agent)
    with pytest.raises(SaveError, match=rf"{history.folder}.* whole"):
        again.resume(agent)
    assert capsys.readouterr().err.count("using the save before it") == 1
    assert differing(state_of(agent), before) == set()


def test_a_manifest_of_something_else_is_refused(learned, history):
    Store(history.folder / runfolder.MANIFEST, "saved garden").save({})
    agent, again = reopen(learned, history)
    with pytest.raises(SaveError, match="of a saved garden"):
        again.resume(agent)


def test_a_run_of_the_first_format_is_refused_in_one_line(learned, history):
    """As the first version of Esper left it."""
    entry = {"file": "round-000001.safetensors", "rounds": 1, "return": 0.5, "sha256": "0" * 64}
    values = {"format": 1, "rounds": 1, "checkpoints": [entry], "best": entry}
    (history.folder / runfolder.MANIFEST).write_text(json.dumps(values))
    agent, again = reopen(learned, history)
    for refused in (lambda: again.resume(agent), lambda: again.save(agent, 1, 0.0)):
        with pytest.raises(SaveError, match=r"^[^\n]*format 1, [^\n]*reads format 3[^\n]*$"):
            refused()
    assert json.loads((history.folder / runfolder.MANIFEST).read_text()) == values


def test_before_the_first_checkpoint_one_begins_at_the_beginning(learned, history):
    history.sink.write_record("X", {}, history.sink.telemetry.level)
    agent, again = reopen(learned, history)
    before = state_of(agent)
    assert again.resume(agent) == 0
    assert differing(state_of(agent), before) == set()
    assert events_of(history.folder) == []


def test_the_events_are_cut_to_where_the_checkpoint_was_taken(tmp_path):
    config = tiny(tmp_path / "run", rounds=2)
    train(config)
    whole = events_of(config.out)
    with open(config.out / runfolder.EVENTS, "a") as file:
        file.write('{"type": "HostEpoch", "round": 2}\n{"type": "Host')
    train(config, resume=True)
    assert events_of(config.out) == whole
    assert events_of(config.out)[-1]["type"] == "CheckpointSaved"
