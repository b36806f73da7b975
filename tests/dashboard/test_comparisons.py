"""The folder of `esper compare` in lists, on its page and in the report."""

import json

import pytest
from starlette.testclient import TestClient

from dashboard.test_report import report_of
from dashboard.web_runs import ACCURACIES, TAUGHT, comparison, grow_run, trials_of_arm
from esper.cli import main
from esper.dashboard.comparisons import ComparisonReader, comparison_data, summarise_comparison
from esper.dashboard.reader import find_runs, open_run
from esper.dashboard.server import build_app
from esper.leyline.errors import SaveError
from esper.storage.runfolder import RESULTS, only_writer
from esper.telemetry.statistics import compare_pairs


def read(folder):
    reader = ComparisonReader(folder)
    reader.refresh()
    return reader


def arms_of(folder):
    return {arm["label"]: arm for arm in comparison_data(read(folder))["arms"]}


# -- what it holds ---------------------------------------------------------------------------------


def test_a_comparison_is_listed_among_runs_with_its_best_arm(tmp_path, capsys):
    folder = comparison(tmp_path / "runs" / "arms")
    run = grow_run(tmp_path / "runs" / "grown")
    assert find_runs(tmp_path / "runs") == [folder, run]
    assert find_runs(folder) == [folder]
    summary = summarise_comparison(read(folder))
    assert (summary.kind, summary.status, summary.task) == ("compare", "finished", "blobs")
    assert summary.policy == "never, heuristic, first round 6"
    assert summary.best_accuracy == pytest.approx(0.802)
    assert (summary.done, summary.params) == (3, 200)
    main_ok(["runs", str(tmp_path / "runs")])
    assert "3 arms" in capsys.readouterr().out


def main_ok(arguments):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert not leaving.value.code


def test_a_checkpoints_arm_is_called_by_its_run_and_round(tmp_path):
    assert list(arms_of(comparison(tmp_path / "arms"))) == ["never", "heuristic", "first round 6"]


def test_differences_are_the_comparisons_own_and_paired_by_host_seed(tmp_path):
    arm = arms_of(comparison(tmp_path / "arms"))["heuristic"]
    assert tuple(arm["accuracies"]) == ACCURACIES["heuristic"]
    assert arm["seeds"] == [0, 1, 2, 3, 4]
    expected = compare_pairs(ACCURACIES["heuristic"], ACCURACIES[TAUGHT])
    difference = arm["minus"][TAUGHT]["test_accuracy"]
    assert (difference["mean"], difference["low"]) == (expected.mean, expected.low)
    assert difference["verdict"] == expected.verdict


def test_pairs_are_those_that_the_terminal_shows(tmp_path):
    data = comparison_data(read(comparison(tmp_path / "arms")))
    assert data["pairs"] == [
        ("heuristic", "never"),
        (TAUGHT, "never"),
        (TAUGHT, "heuristic"),
    ]


def test_an_arms_curve_has_loss_against_flops(tmp_path):
    curve = arms_of(comparison(tmp_path / "arms"))["never"]["curve"]
    assert curve["flops"] == [10**6 * epoch for epoch in range(1, 7)]
    assert curve["held_out_loss"][0] == 2.0


def test_only_rows_of_the_rate_that_validation_chose_are_dots(tmp_path):
    other = trials_of_arm("heuristic", (0.99,) * 5, rate=2.0, validation=0.1)
    arm = arms_of(comparison(tmp_path / "arms", more=[other]))["heuristic"]
    assert (arm["rate"], tuple(arm["accuracies"])) == (1.0, ACCURACIES["heuristic"])


def test_the_dots_of_the_oracle_are_those_of_the_placement_that_it_chose(tmp_path):
    placed = trials_of_arm("oracle norm in r0c0 at 1", (0.9,) * 5)
    arm = arms_of(comparison(tmp_path / "arms", more=[placed]))["oracle"]
    assert arm["accuracies"] == [0.9] * 5


# -- while it is played, and damaged ---------------------------------------------------------------


def test_a_comparison_that_is_played_says_how_many_arms_are_done(tmp_path):
    folder = comparison(tmp_path / "arms", is_finished=False)
    data = comparison_data(read(folder))
    assert (data["header"]["status"], data["header"]["done"], data["arms"]) == ("stopped", 3, [])
    with only_writer(folder):
        assert read(folder).status() == "running"


def test_results_that_come_later_are_read(tmp_path):
    folder = comparison(tmp_path / "arms", is_finished=False)
    reader = read(folder)
    whole = comparison(tmp_path / "other") / RESULTS
    (folder / RESULTS).write_bytes(whole.read_bytes())
    reader.refresh()
    assert reader.status() == "finished"
    assert reader.version == 1
    reader.refresh()
    assert reader.version == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.5", "0.6"), ("{", "["), ("arms", "legs")],
    ids=["changed", "cut", "foreign"],
)
def test_results_that_are_not_its_own_are_damaged_and_refused_in_one_line(tmp_path, old, new):
    folder = comparison(tmp_path / "arms")
    text = (folder / RESULTS).read_text()
    (folder / RESULTS).write_text(text.replace(old, new, 1))
    assert read(folder).status() == "damaged"
    with pytest.raises(SaveError) as refused:
        report_of(tmp_path, folder)
    assert len(str(refused.value).splitlines()) == 1


def test_watch_says_where_a_comparison_can_be_looked_at(tmp_path):
    folder = comparison(tmp_path / "arms")
    with pytest.raises(SaveError, match="is a comparison"):
        open_run(folder)


# -- the report and the server ---------------------------------------------------------------------


def test_a_report_of_a_comparison_holds_arms_differences_and_how_to_do_it_again(tmp_path):
    _, _, data = report_of(tmp_path, comparison(tmp_path / "arms"))
    (shown,) = data["comparisons"]
    assert data["runs"] == []
    assert [arm["label"] for arm in shown["arms"]] == ["never", "heuristic", "first round 6"]
    assert shown["command"][0].startswith("esper compare --config-json config.json")
    assert json.loads("\n".join(shown["command"][3:]))["seeds"] == 5


def test_a_report_takes_runs_and_comparisons_together(tmp_path):
    _, _, data = report_of(tmp_path, comparison(tmp_path / "arms"), grow_run(tmp_path / "grown"))
    assert [shown["header"]["name"] for shown in data["comparisons"]] == ["arms"]
    assert [run["header"]["name"] for run in data["runs"]] == ["grown"]


@pytest.fixture
def client(tmp_path):
    comparison(tmp_path / "runs" / "arms")
    grow_run(tmp_path / "runs" / "grown")
    with TestClient(build_app(tmp_path / "runs"), base_url="http://127.0.0.1:8765") as client:
        yield client


def test_the_server_lists_a_comparison_and_answers_with_its_arms(client):
    rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert (rows["arms"]["kind"], rows["arms"]["status"]) == ("compare", "finished")
    data = client.get("/api/comparisons/arms").json()
    assert [arm["name"] for arm in data["arms"]] == list(ACCURACIES)


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/arms/episode",
        "/api/runs/arms/stream",
        "/api/compare?run=arms&run=grown",
        "/api/comparisons/grown",
        "/api/comparisons/none",
    ],
)
def test_a_comparison_is_no_run_and_a_run_is_no_comparison(client, path):
    assert client.get(path).status_code == 404


def test_results_that_change_are_seen_in_the_list(client, tmp_path):
    client.get("/api/runs")
    (tmp_path / "runs" / "arms" / RESULTS).write_text("{}")
    rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["arms"]["status"] == "damaged"
