"""What docs/results.md and lab/ say is what the committed results say."""

import json
import re
import runpy
import sys

import pytest

from readme_tables import README, ROOT, told_differences

SCRIPT = runpy.run_path(str(ROOT / "docs" / "make_lab.py"))
KNOWN = SCRIPT["load"]()
BLOCKS = SCRIPT["blocks"](KNOWN)


@pytest.mark.parametrize("name", BLOCKS)
def test_tables_of_the_laboratory_are_those_that_the_committed_results_make(name):
    page = (SCRIPT["LAB"] / name).read_text(encoding="utf-8")
    assert page == SCRIPT["filled"](page, BLOCKS[name]), "run: python docs/make_lab.py"


def test_the_page_of_results_is_the_one_that_the_committed_results_make():
    script = runpy.run_path(str(ROOT / "docs" / "make_results.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["render"](), "run: python docs/make_results.py"


def test_the_page_of_the_frontier_is_the_one_that_the_committed_results_make():
    script = runpy.run_path(str(ROOT / "docs" / "make_frontier.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["render"](script["read"]()), "run: python docs/make_frontier.py"


def test_what_the_readme_says_that_depth_saves_is_the_frontiers():
    setup = json.loads(
        (ROOT / "benchmarks" / "results" / "frontier.json").read_text(encoding="utf-8")
    )["setups"]["code"]
    assert setup["verdict"]["is_reached"]
    cell = setup["roles"]["judge"]["loss"]["arms"][setup["verdict"]["plan"]]["computes"]["0.6"]
    saved = [cell[name]["mean"] for name in ("saving over the best of each seed", "saving")]
    assert f"{100 * saved[0]:.0f} to {100 * saved[1]:.0f} % fewer FLOPs" in README


def test_the_picture_of_the_front_page_is_the_one_that_its_results_make():
    script = runpy.run_path(str(ROOT / "docs" / "make_hero.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["draw"]()


def test_means_over_seeds_in_the_readme_are_those_of_its_benchmark():
    path = ROOT / "benchmarks" / "results" / "readme.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    told = " ".join(README.split())
    for found in record["summary"].values():
        assert f"{found['mean']:.1f} ± {found['standard_error']:.1f}" in told


@pytest.mark.parametrize("name", KNOWN)
def test_a_figure_is_the_one_that_its_results_make(name):
    picture = ROOT / "docs" / "pictures" / f"question_{name}.svg"
    assert picture.read_text(encoding="utf-8") == SCRIPT["compared_figure"](KNOWN[name]), (
        "run: python docs/make_lab.py"
    )


def test_the_curve_is_the_one_that_its_results_make():
    picture = ROOT / "docs" / "pictures" / SCRIPT["CURVE_PICTURE"]
    assert picture.read_text(encoding="utf-8") == SCRIPT["curve_figure"](), (
        "run: python docs/make_lab.py"
    )


@pytest.mark.parametrize("name", KNOWN)
def test_summaries_follow_from_the_rows_beside_them(name):
    """Means in a committed result are those of its own episodes, at the rate that validation
    chose.
    """
    found = KNOWN[name]
    pages = "".join(path.read_text(encoding="utf-8") for path in SCRIPT["LAB"].glob("*.md"))
    for label, arm in found["arms"].items():
        rows = [
            row for row in found["rows"] if row["arm"] == arm["arm"] and row["rate"] == arm["rate"]
        ]
        assert [row["seed"] for row in rows] == arm["seeds"], label
        mean = sum(row["test_accuracy"] for row in rows) / len(rows)
        assert arm["test_accuracy"]["mean"] == pytest.approx(mean, abs=1e-12)
        assert f"{100 * mean:.2f}" in pages


def differences_of_policies():
    """By how much taught policies are ahead of every other arm, and on how many hosts."""
    path = ROOT / "benchmarks" / "results" / "policies.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    first, last = record["declared"]["judging"]
    return {
        (SCRIPT["points"](arm["taught minus"]["test_accuracy"], "+"), str(last - first + 1))
        for families in record["lessons"].values()
        for family in families.values()
        for name, arm in family["together"].items()
        if name != "taught"
    }


def test_differences_in_the_readme_are_those_of_committed_results():
    """Every difference with an interval is a paired one in some question's JSON."""
    known = {
        SCRIPT["points"](difference["test_accuracy"], "+")
        for found in KNOWN.values()
        for arm in found["arms"].values()
        for difference in arm["minus"].values()
    } | {told for told, _ in differences_of_policies()}
    told = told_differences()
    assert len(told) >= 3
    assert [difference for difference in told if difference not in known] == []


def test_what_the_laboratory_says_of_keeps_before_0_3_0_is_the_committed_result():
    path = ROOT / "benchmarks" / "results" / "policies_before.json"
    counts = json.loads(path.read_text(encoding="utf-8"))["counts"]
    assert not {"FOSSILIZE chosen", "CULL chosen", "CULLED"} & set(counts)
    page = (ROOT / "lab" / "policies.md").read_text(encoding="utf-8")
    assert f"| FOSSILIZE chosen | 0; {counts['FOSSILIZED']} seeds were kept automatically |" in page
    in_line = f"{counts['FOSSILIZED in line']} of {counts['FOSSILIZED measured']}"
    clear = f"{counts['FOSSILIZED clear in line']} of {counts['FOSSILIZED clear']}"
    assert f"| kept in line | {in_line}; clear {clear} |" in page


def test_the_sweeps_targets_follow_from_its_rows(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    judge = runpy.run_path(str(ROOT / "benchmarks" / "sweep.py"))["judge"]
    sweep = SCRIPT["load_sweep"]()
    seeds = len({row["seed"] for row in sweep["rows"]})
    grown, *columns = (
        sweep["rows"][start : start + seeds] for start in range(0, len(sweep["rows"]), seeds)
    )
    for found in sweep["targets"]:
        again = judge(grown, [list(sizes) for sizes in zip(*columns, strict=True)], found["target"])
        assert again.pop("flops_ratio") == pytest.approx(found.pop("flops_ratio"))
        assert again == pytest.approx(found)


def test_results_name_no_place_on_a_machine():
    for found in KNOWN.values():
        assert re.search(r"/(tmp|home|root|work)/", str(found)) is None


def test_a_sweep_pays_for_every_size_until_one_reaches_the_target(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    judge = runpy.run_path(str(ROOT / "benchmarks" / "sweep.py"))["judge"]

    def rows(*pairs):
        return [{"flops": f, "validation_accuracy": v, "final_params": 100 * f} for f, v in pairs]

    grown = rows((2.0, 0.7), (2.0, 0.6))
    sweeps = [rows((1.0, 0.5), (3.0, 0.7), (9.0, 0.9)), rows((1.0, 0.5), (3.0, 0.6), (9.0, 0.6))]
    found = judge(grown, sweeps, 0.65)
    assert (found["grown_reaches"], found["sweep_reaches"]) == (0.5, 0.5)
    assert (found["sweep_flops"], found["sweep_params"]) == ((4.0 + 13.0) / 2, 300.0)
    assert found["flops_ratio"]["mean"] == (4.0 / 2.0 + 13.0 / 2.0) / 2
    assert found["right_size_ratio"] == 3.0 / 2.0
