"""`esper ppo`: options reach the configuration, a mistake is one line, a run says what it does."""

import json
import re
import shutil
from contextlib import nullcontext
from types import NoneType
from typing import get_args

import pytest

from cli.test_cli import call, options_of
from esper.cli import ppo as running
from esper.cli.app import main
from esper.cli.options import join_lists
from esper.leyline.configuration import leaves
from esper.leyline.errors import DataError
from esper.simic.config import TrainingConfig
from esper.storage import runfolder
from simic.tiny_runs import command, events_of, lines_of, manifest_of

OPTIONS = options_of("ppo")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def configured(monkeypatch):
    """Calls `esper ppo` up to the point where it would train; returns the configuration and whether
    to resume.
    """
    taken = []
    monkeypatch.setattr(
        running,
        "run_ppo",
        lambda config, resume, console, verbose: taken.append((config, resume)) or True,
    )

    def configure(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["ppo", *arguments])
        assert not leaving.value.code
        return taken[-1]

    return configure


# -- options ---------------------------------------------------------------------------------------

WIRING = {"--preset", "--config-json", "--set", "--resume", "--json", "--verbose"}
REACHES = {
    "--task": ("task.name", ["blobs"], "blobs"),
    "--epochs": ("task.epochs", ["7"], 7),
    "--compute": ("task.compute", ["1.5"], 1.5),
    "--slots": ("task.slots", ["r0c0", "r0c1"], ("r0c0", "r0c1")),
    "--budget": ("task.budget", ["2.5"], 2.5),
    "--max-seeds": ("task.max_seeds", ["3"], 3),
    "--devices": ("devices", ["cuda:0", "cuda:1"], ("cuda:0", "cuda:1")),
    "--amp": ("amp", ["bf16"], "bf16"),
    "--executor": ("executor", ["eager"], "eager"),
    "--compile": ("compile", ["off"], "off"),
    "--graph-memory": ("graph_memory", ["1.5"], 1.5),
    "--reward-family": ("reward.family", ["loss"], "loss"),
    "--rounds": ("rounds", ["7"], 7),
    "--hosts": ("hosts", ["3"], 3),
    "--seed": ("seed", ["12"], 12),
    "--out": ("out", ["runs/x"], "runs/x"),
    "--data-root": ("data_root", ["data"], "data"),
    "--deterministic": ("deterministic", [], True),
    "--tensorboard": ("telemetry.track", [], ("tensorboard",)),
    "--wandb": ("telemetry.track", [], ("wandb",)),
}


def test_every_option_is_wiring_or_a_leaf_of_the_configuration():
    of_files = {"--suite"}  # names a file of settings: simic/test_suites.py
    assert set(OPTIONS) == WIRING | set(REACHES) | of_files
    assert {key for key, _, _ in REACHES.values()} <= set(leaves(TrainingConfig))


@pytest.mark.parametrize("option", REACHES)
def test_an_option_reaches_its_leaf_and_nothing_else(configured, option):
    key, values, expected = REACHES[option]
    config, resume = configured("--preset", "digits", option, *values)
    plain = TrainingConfig.from_preset("digits")
    changed = plain.with_changes(
        [(key, list(expected) if isinstance(expected, tuple) else expected)], "the test"
    )
    assert config == changed != plain
    assert not resume


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--devices", "cuda:0", "cuda:1"], ("cuda:0", "cuda:1")),
        (["--devices", "cuda:0,cuda:1"], ("cuda:0", "cuda:1")),
        (["--devices", "cuda:0,", "cuda:1", "--rounds", "3"], ("cuda:0", "cuda:1")),
        (["--devices", "cuda:0", "--devices", "cuda:1"], ("cuda:0", "cuda:1")),
        (["--devices", "cuda:0"], ("cuda:0",)),
    ],
    ids=" ".join,
)
def test_lists_take_spaces_or_commas(configured, given, expected):
    assert configured(*given)[0].devices == expected


def test_a_list_ends_where_the_next_option_begins():
    assert join_lists(
        ["--devices", "a", "b", "--rounds", "3", "--devices", "c"], {"--devices"}
    ) == [
        "--devices",
        "a,b",
        "--rounds",
        "3",
        "--devices",
        "c",
    ]


def test_without_anything_it_is_the_preset_of_digits(configured):
    assert configured() == (TrainingConfig.from_preset("digits"), False)


def test_a_task_brings_its_own_preset_where_there_is_one(configured):
    assert configured("--task", "shakespeare")[0] == TrainingConfig.from_preset("shakespeare")
    assert configured("--task", "blobs")[0] == TrainingConfig.of({"task": {"name": "blobs"}}), (
        "not the digits' episodes"
    )
    assert configured("--task", "shakespeare", "--preset", "digits")[0].task.epoch_examples == 512


def test_settings_are_applied_last_and_in_order(configured):
    given = [
        "--rounds",
        "3",
        "--set",
        "rounds=4",
        "--set",
        "ppo.lr=3e-4",
        "--set",
        "reward.weights.rent=0.5",
    ]
    config, _ = configured(*given, "--set", "rounds=5")
    assert (config.rounds, config.ppo.lr, config.reward.weights) == (5, 3e-4, {"rent": 0.5})


def test_a_file_is_read_and_changed_by_options(configured, tmp_path):
    (tmp_path / "mine.json").write_text('{"rounds": 3, "hosts": 2}')
    config, _ = configured("--config-json", "mine.json", "--hosts", "5")
    assert (config.rounds, config.hosts, config.task.name) == (3, 5, "digits")


def test_resuming_takes_the_configuration_of_the_run(configured, tmp_path):
    mine = TrainingConfig.from_preset("shakespeare").with_changes(
        [("rounds", 9), ("out", "run")], "the test"
    )
    (tmp_path / "run").mkdir()
    runfolder.write_json(tmp_path / "run" / runfolder.CONFIG, mine.model_dump(mode="json"))
    assert configured("--out", "run", "--resume") == (mine, True)
    assert configured("--out", "run", "--resume", "--rounds", "12")[0].rounds == 12
    assert configured("--out", "new", "--resume")[0].task.name == "digits"


# -- help ------------------------------------------------------------------------------------------


def test_the_help_is_short_and_names_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = call(capsys, "ppo", "--help")
    assert (code, err) == (0, "")
    assert set(re.findall(r"^\W*(--[a-z-]+)", out, re.MULTILINE)) == set(OPTIONS) | {"--help"}
    assert len(out.splitlines()) <= 41


@pytest.mark.parametrize("option", OPTIONS)
def test_the_help_of_an_option_is_one_sentence(option):
    assert re.fullmatch(r"[^.]+(\.[^ .]+)*\.", OPTIONS[option].help), OPTIONS[option].help
    assert len(OPTIONS[option].help) < 60


@pytest.mark.parametrize("option", ["--amp", "--executor"])
def test_the_help_names_the_choices_that_there_are(option):
    annotation = leaves(TrainingConfig)[REACHES[option][0]].annotation
    choices = get_args(annotation)[0] if NoneType in get_args(annotation) else annotation
    assert OPTIONS[option].metavar == "|".join(get_args(choices))


# -- mistakes --------------------------------------------------------------------------------------

QUICK = [
    "--hosts",
    "1",
    "--set",
    "host_pool=1",
    "--set",
    "task.epochs=2",
    "--set",
    "task.epoch_examples=64",
]
"""so that a mistake that is not noticed does not take minutes to show"""
BLOBS = ["--task", "blobs", "--set", "task.epochs=3"]
MISTAKES = {
    "unknown preset": (["--preset", "digit"], "preset 'digit'.*'digits'"),
    "unknown task": (["--task", "blob"], "task 'blob'.*'blobs'"),
    "unknown amp": (["--amp", "fp8"], "amp is \"fp8\".*'off', 'bf16' or 'fp16'"),
    "unknown executor": (
        ["--executor", "fast"],
        "executor is \"fast\".*'auto', 'eager' or 'graphed'",
    ),
    "unknown family": (["--reward-family", "profit"], "reward family .profit."),
    "missing device": (
        ["--devices", "cuda:300"],
        "device 'cuda:300' is not there: this machine has",
    ),
    "one missing device": (
        ["--hosts", "2", "--devices", "cpu", "cuda:300"],
        "device 'cuda:300' is not there",
    ),
    "no device": (["--devices", ","], r"devices is \[\]"),
    "not a device": (["--devices", "gpu0"], "'gpu0' is not a device"),
    "mps": (["--devices", "mps"], "device mps is not supported"),
    "an idle device": (
        ["--hosts", "1", "--devices", "cpu", "cpu"],
        "hosts is 1, but devices are cpu, cpu",
    ),
    "preset and file": (
        ["--preset", "digits", "--config-json", "x.json"],
        "--preset and --config-json both name a c",
    ),
    "no file": (
        ["--config-json", "gone.json"],
        "cannot read the configuration gone.json: No such file",
    ),
    "broken file": (["--config-json", "broken.json"], "broken.json is not JSON"),
    "a list": (["--config-json", "list.json"], "list.json holds a list; it must be an object"),
    "unknown key in a file": (
        ["--config-json", "key.json"],
        "key.json: unknown key 'ppo.gama'. Did you mean 'ppo.ga",
    ),
    "wrong type in a file": (
        ["--config-json", "type.json"],
        'type.json: rounds is "many": input should be a valid i',
    ),
    "negative in a file": (["--config-json", "count.json"], "count.json: hosts is -4"),
    "no rounds": (["--rounds", "0"], "rounds is 0"),
    "setting without a value": (["--set", "rounds"], "--set 'rounds' .*KEY=VALUE"),
    "unknown setting": (["--set", "ppo.lrr=1"], "'ppo.lrr'.*'ppo.lr'"),
    "no text for out": (["--set", "out=3"], "out is 3"),
    "fp16 on a cpu": (["--amp", "fp16"], "amp fp16 .*CUDA"),
    "graphs on a cpu": (["--executor", "graphed"], "executor graphed .*CUDA"),
    "unknown compiler": (["--set", "ppo.compile=gcc"], "torch.compile 'gcc'"),
    "no such reward term": (["--set", "reward.weights.rant=1"], "'rant'.*'rent'"),
    "a batch too large": ([*BLOBS, "--set", "task.batch=99999"], "batch .*99999"),
    "too much held out": ([*BLOBS, "--set", "task.held_out=99999"], "held_out is 99999"),
    "unknown blueprint": ([*BLOBS, "--set", 'task.blueprints=["mpl"]'], "'mpl'.*'mlp'"),
    "unknown slot": ([*BLOBS, "--set", 'task.slots=["r9c9"]'], "r9c9"),
    "no data": (["--task", "shakespeare", "--devices", "cpu"], "--data-root"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_two_and_leaves_nothing(mistake, capsys, tmp_path):
    files = {
        "broken": "{",
        "list": "[1]",
        "key": '{"ppo": {"gama": 0.9}}',
        "type": '{"rounds": "many"}',
        "count": '{"hosts": -4}',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    arguments, words = MISTAKES[mistake]
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call(capsys, "ppo", "--out", "run", *QUICK, *arguments)
    assert code == 2
    assert err.startswith("esper: ")
    assert re.search(words, err)
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["--rounds", "many"], ["--hosts"], ["--fast"], ["more"]], ids=" ".join
)
def test_what_the_parser_refuses_is_exit_code_two_without_a_traceback(arguments, capsys, tmp_path):
    code, out, err = call(capsys, "ppo", "--out", "run", *arguments)
    assert code == 2
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder after two rounds; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.raises(SystemExit) as leaving:
        main(command(folder))
    assert not leaving.value.code
    return folder


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "run")


def test_a_run_begins_with_one_line_and_has_one_line_per_round(capsys, tmp_path):
    code, out, err = call(capsys, *command(tmp_path / "run", rounds=3))
    assert (code, err) == (0, "")
    first, *rounds = out.splitlines()
    assert first.startswith("blobs: 3 rounds of 4 epochs, reward contribution, cpu: 2 hosts, in ")
    assert [line.split()[1] for line in rounds] == ["1/3", "2/3", "3/3"]


def test_verbose_says_the_configuration_the_policy_and_the_twins_too(capsys, tmp_path):
    code, out, err = call(capsys, *command(tmp_path / "run", rounds=3), "--verbose")
    assert (code, err) == (0, "")
    _, configuration, policy, twins, *rounds = out.splitlines()
    said = json.loads(configuration.removeprefix("configuration: "))
    assert said == runfolder.read_json(tmp_path / "run/config.json")
    # settled, so that more rounds later do not move it
    assert said["ppo"]["anneal_decisions"] == 3 * 2 * 3
    assert policy.startswith(
        "policy: op of 4, slot of 2, blueprint of 3, blend of 3; "
        "entropy scales 1.39, 1.00, 1.10, 1.10 nats; "
    )
    assert twins.startswith("twins: 3, computed once with ")
    assert len(rounds) == 3


@pytest.mark.parametrize("name", ["run", "compare"])
def test_only_ppo_has_verbose(name, capsys):
    code, _, err = call(capsys, name, "--verbose")
    assert code == 2
    assert "--verbose" in err


def test_a_run_folder_has_these_files(finished):
    assert {path.name for path in finished.iterdir()} == {
        "config.json",
        "events-0.jsonl",
        "manifest.json",
        "checkpoints",
        "twins",
        "lock",
    }
    assert manifest_of(finished)["rounds"] == 2
    assert {row["type"] for row in lines_of(finished)} >= {
        "HostEpoch",
        "RoundFinished",
        "CheckpointSaved",
    }


def test_a_folder_that_is_not_empty_is_refused_without_resume(capsys, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = call(capsys, *command(run))
    assert (code, out) == (2, "")
    assert re.fullmatch(f"esper: .*{run} .*--resume.*--out.*\n", err)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resuming_where_nothing_is_yet_begins_at_the_beginning(capsys, finished, tmp_path):
    code, _, err = call(capsys, *command(tmp_path / "run"), "--resume")
    assert (code, err) == (0, "")
    assert events_of(tmp_path / "run") == events_of(finished)


def test_a_preset_or_a_file_cannot_change_a_run_that_goes_on(
    capsys, configured, finished, tmp_path
):
    """What is named may change; all else stays what the run was started with."""
    run = copy_of(finished, tmp_path)
    options = ["--out", str(run), "--rounds", "3", "--resume"]
    before = (run / "config.json").read_bytes()
    code, _, err = call(capsys, "ppo", "--preset", "digits", *options)
    assert code == 2
    assert re.match(r"esper: .*started with \S+ .*, not ", err)
    assert (run / "config.json").read_bytes() == before
    own = {
        name: value
        for name, value in json.loads(before).items()
        if name in TrainingConfig.model_fields
    }
    own["ppo"]["anneal_decisions"] = None
    (tmp_path / "same.json").write_text(json.dumps(own))
    config, resume = configured("--config-json", str(tmp_path / "same.json"), *options)
    assert resume
    assert config.rounds == 3
    assert config.ppo.anneal_decisions == json.loads(before)["ppo"]["anneal_decisions"]


def test_resuming_a_finished_run_changes_nothing_but_says_so_little(capsys, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    code, out, err = call(capsys, "ppo", "--out", str(run), "--resume")
    assert (code, err) == (0, "")
    assert "round " not in out
    assert events_of(run) == events_of(finished)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ('task.slots=["r0c1"]', r": slots: \['r0c0', 'r0c1'\] .*\['r0c1'\]"),
        ('task.blueprints=["mlp"]', r": blueprints: \['lora', 'mlp'\] .*\['mlp'\]"),
        ("observe_telemetry=false", r": lacking: \[\] .*\['telemetry'\]"),
    ],
)
def test_resuming_with_another_layout_is_refused_with_both_and_does_no_harm(
    capsys, finished, tmp_path, change, row
):
    run = copy_of(finished, tmp_path)
    code, _, err = call(
        capsys, "ppo", "--out", str(run), "--resume", "--rounds", "3", "--set", change
    )
    assert code == 2
    assert "Traceback" not in err
    assert re.search(row, err)
    assert "layout (size mismatch):" in err
    assert (run / "config.json").read_bytes() == (finished / "config.json").read_bytes()
    code, out, err = call(capsys, "ppo", "--out", str(run), "--resume", "--rounds", "3")
    assert (code, err) == (0, "")
    assert "round 3/3" in out


def test_resuming_notes_what_it_goes_on_with(capsys, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    call(
        capsys,
        "ppo",
        "--out",
        str(run),
        "--resume",
        "--rounds",
        "3",
        "--set",
        "telemetry.level=minimal",
    )
    saved = json.loads((run / "config.json").read_text())
    assert (saved["rounds"], saved["telemetry"]["level"]) == (3, "minimal")
    assert saved["ppo"]["anneal_decisions"] == 12  # of the run as it was started


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(capsys, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    (run / "checkpoints/round-000002.safetensors").write_bytes(b"")
    code, out, err = call(capsys, "ppo", "--out", str(run), "--resume")
    assert code == 0
    assert err.startswith(f"esper: {run}/checkpoints/round-000002.safetensors is truncated")
    assert err.count("\n") == 1
    assert "round 2/2" in out
    *told, saved = events_of(run)
    assert told == events_of(finished)[:-1]
    assert (run / "checkpoints" / saved["file"]).is_file()


def test_if_all_checkpoints_are_damaged_it_is_an_error(capsys, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"")
    code, _, err = call(capsys, "ppo", "--out", str(run), "--resume")
    assert code == 2
    assert "no other save there is whole" in err.splitlines()[-1]


def test_an_error_that_is_not_the_users_is_not_hidden(monkeypatch, tmp_path):
    def fail(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(running, "train_ppo_vectorized", fail)
    with pytest.raises(ZeroDivisionError):
        main(command(tmp_path / "run"))


def test_data_that_is_damaged_is_one_line(monkeypatch, capsys, tmp_path):
    def fail(*args, **options):
        raise DataError("the blobs are gone. Put them back.")

    monkeypatch.setattr(running, "train_ppo_vectorized", fail)
    assert (
        call(capsys, *command(tmp_path / "run"))[2] == "esper: the blobs are gone. Put them back.\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_stopped_is_exit_code_130(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(running, "stop_on_signals", lambda patient: nullcontext(lambda: True))
    code, out, err = call(capsys, *command(tmp_path / "run"))
    assert (code, err) == (130, "")
    assert re.search(f" 0 .*esper ppo --out {tmp_path / 'run'} --resume$", out.splitlines()[-1])
