"""benchmarks/frontier.py:

forks are runs of their own, plans are what they say, and the arithmetic of the report.
"""

import importlib
import json
import math
import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from esper.kasmina.blueprints import REGISTRY
from readme_tables import ROOT
from runtime.clocked import text_splits

MODULES = ("frontier_figure", "frontier_report", "frontier_arms", "frontier_jobs", "frontier")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules; the blueprints that they register are gone afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    here = str(ROOT / "benchmarks")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(here):
            del sys.modules[name]


def settings_of(shape, **changes):
    known = {
        "kind": None,
        "ramp": 0,
        "decay": 0.2,
        "factor": 1.0,
        "is_static": shape.startswith("static"),
    }
    return {"shape": shape, **known, **changes}


def rows_of(*losses, used=1.0):
    row = {"examples": 1, "params": 1, "rolled_back": 0}
    return {seed: {**row, "loss": loss, "used": used} for seed, loss in enumerate(losses)}


# -- the report's arithmetic -----------------------------------------------------------------------


def test_the_frontier_is_the_best_depth_at_each_compute(bench):
    cells = {
        ("static 2", 0.5): rows_of(1.0, 1.2),
        ("static 4", 0.5): rows_of(1.1, 1.3),
        ("static 2", 1.0): rows_of(0.9, 1.0),
        ("static 4", 1.0): rows_of(0.7, 0.9),
    }
    found = bench.frontier_report.find_frontier(cells, ["static 2", "static 4"], "loss")
    assert [(best.compute, best.arm, best.mean) for best in found] == [
        (0.5, "static 2", pytest.approx(1.1)),
        (1.0, "static 4", pytest.approx(0.8)),
    ]


def test_a_depth_with_fewer_seeds_is_no_frontier_but_a_rival_where_it_lies_lower(bench):
    """A depth on one lucky seed is not the best for that, and one that was not run enough is not
    forgotten.
    """
    cells = {
        ("static 2", 1.0): rows_of(1.0, 0.9),
        ("static 4", 1.0): rows_of(0.95),
        ("static 8", 1.0): rows_of(1.1),
    }
    (best,) = bench.frontier_report.find_frontier(
        cells, ["static 2", "static 4", "static 8"], "loss"
    )
    assert (best.arm, best.rivals) == ("static 2", ("static 4",))


def test_differences_are_paired_by_seed(bench):
    found = bench.frontier_report.pair({1: 1.0, 2: 3.0, 5: 9.0}, {2: 3.5, 1: 1.1, 6: 0.0})
    assert found["seeds"] == [1, 2]
    assert found["mean"] == pytest.approx(-0.3)
    assert found["error"] == pytest.approx(0.2)
    assert found["sigmas"] == pytest.approx(-1.5)
    assert bench.frontier_report.pair({1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.9, 0.5),
        (0.95, math.sqrt(0.25 * 0.5)),
        (0.8, 1.0),
        (0.7, math.inf),
        (1.0, None),
        (1.5, None),
    ],
)
def test_equal_loss_is_looked_up_in_log_compute(bench, value, expected):
    points = [(1.0, 0.8), (0.25, 1.0), (0.5, 0.9)]
    assert bench.frontier_report.equal_compute(points, value) == (
        expected and pytest.approx(expected)
    )


def test_what_is_saved_is_counted_seed_by_seed(bench):
    best = bench.frontier_report.Best
    frontier = [
        best(0.25, "static 2", 0.25, {0: 1.0, 1: 1.1}),
        best(1.0, "static 4", 1.0, {0: 0.8, 1: 0.9}),
    ]
    found = bench.frontier_report.savings(rows_of(0.9, 0.85, used=0.4), frontier, "loss")
    assert found["mean"] == pytest.approx((1 - 0.4 / 0.5 + 1 - 0.4) / 2)
    assert (found["count"], found["beyond"], found["before"]) == (2, 1, 0)


def test_an_arm_is_held_against_static_networks_with_its_own_plan_of_the_rate(bench):
    settings = {
        "static 2": settings_of("static 2"),
        "static 2 decay=0.4": settings_of("static 2", decay=0.4),
        "2-4@30": settings_of("2-4@30"),
        "2-4@30 decay=0.4": settings_of("2-4@30", decay=0.4),
        "2-4@30 copy_zero": settings_of("2-4@30", kind="copy_zero"),
        "2-4@30 ramp=3": settings_of("2-4@30", ramp=3),
        "direct 2": settings_of("direct 2"),
    }
    losses = (1.0, 0.9, 0.95, 0.7, 0.97, 0.96, 1.0)
    cells = {(arm, 1.0): rows_of(loss, loss) for arm, loss in zip(settings, losses, strict=True)}
    judged = bench.frontier_report.judge(cells, settings, "loss")
    found = {arm: each["computes"]["1"] for arm, each in judged["arms"].items()}
    assert found["2-4@30"]["minus frontier"]["mean"] == pytest.approx(-0.05)
    assert found["2-4@30 decay=0.4"]["minus frontier"]["mean"] == pytest.approx(-0.2)
    bases = {arm: cell.get("base") for arm, cell in found.items()}
    varied = {"2-4@30 copy_zero": "2-4@30", "2-4@30 ramp=3": "2-4@30", "direct 2": "static 2"}
    assert bases == {arm: varied.get(arm) for arm in settings}
    assert list(bench.frontier_report.regrets(judged)) == ["2-4@30", "static 2"], (
        "variants are no sizes to choose from"
    )


@pytest.mark.parametrize(
    ("leads", "count", "is_reached"),
    [((-0.05, -0.05), 5, True), ((-0.05, 0.05), 5, False), ((-0.05, -0.05), 4, False)],
)
def test_the_goal_is_two_computes_below_the_frontier_on_enough_seeds(
    bench, leads, count, is_reached
):
    noise = [0.001 * seed for seed in range(count)]
    cells = {}
    for compute, lead in zip((0.6, 1.0), leads, strict=True):
        cells["static 2", compute] = rows_of(*(1 / compute for _ in noise), used=compute)
        cells["2-8@30", compute] = rows_of(
            *(1 / compute + lead + each for each in noise), used=compute
        )
    settings = {arm: settings_of(arm) for arm in ("static 2", "2-8@30")}
    judged = bench.frontier_report.judge(cells, settings, "loss")
    found = bench.frontier_report.verdict(judged, "2-8@30", None)
    assert found["is_reached"] is is_reached
    assert (
        bench.frontier_report.verdict(judged, None, "2-8@30")["remark"]
        == bench.frontier_report.NO_CHOICE
    )


def test_on_each_seed_the_best_depth_is_the_best_of_all_that_it_has(bench):
    cells = {
        ("static 2", 1.0): rows_of(1.0, 0.9),
        ("static 4", 1.0): rows_of(0.95),
        ("static 8", 0.5): rows_of(0.1),
    }
    found = bench.frontier_report.best_by_seed(
        cells, ["static 4", "static 2", "static 8"], 1.0, "loss"
    )
    assert found == {0: 0.95, 1: 0.9}


def test_the_sceptic_mends_bad_starts_and_leaves_seeds_out(bench):
    """4 blocks are the better depth but for one start; the plan is 0.01 below them, and 0.02 below
    2 blocks.
    """
    cells = {
        ("2-4@30", 1.0): rows_of(*[0.9 + 0.001 * seed for seed in range(6)]),
        ("static 2", 1.0): rows_of(*[0.92 + 0.001 * seed for seed in range(6)]),
        ("static 4", 1.0): rows_of(*[0.91 + 0.001 * seed for seed in range(5)], 1.2),
    }
    found = bench.frontier_report.challenge(cells, ["static 2", "static 4"], "2-4@30", "loss")["1"]
    assert [(start["arm"], start["seed"]) for start in found.pop("bad starts")] == [("static 4", 5)]
    leads = {
        key: (each["arm"], round(each["mean"], 4), each["count"]) for key, each in found.items()
    }
    assert leads == {
        "without seeds of bad starts": ("static 4", -0.01, 5),
        "bad starts at their depth's median": ("static 4", -0.0096, 6),
        "least without one seed": ("static 4", -0.01, 5),
        "seeds beyond the first five": ("static 2", -0.02, 1),
    }


def test_a_shape_has_its_pace_at_any_rate_and_the_first_job_of_a_process_is_not_timed(bench):
    def timed(arm, seconds, wall):
        settings = {"stage": "seconds", "arm": arm}
        return {
            "settings": settings,
            "workers": 1,
            "wall": wall,
            "rows": [{"seconds": seconds, "used": 0.5}],
        }

    report = bench.frontier_report
    alone = report.paces(
        [timed("static 2", 7.0, 30.0), timed("static 3", 2.0, 3.0), timed("2-4@30 last", 3.0, 4.0)]
    )
    assert alone == {"static 3": 4.0, "2-4@30 last": 6.0}
    assert report.at_any_rate(
        alone, ["static 3 rate=1.5", "static 3", "2-4@30 last rate=0.5", "static 2"]
    ) == {
        "static 3 rate=1.5": 4.0,
        "static 3": 4.0,
        "2-4@30 last rate=0.5": 6.0,
    }


# -- the page --------------------------------------------------------------------------------------

PARTS = (
    "## Seconds",
    "## A larger network",
    "**Longer warm-ups",
    "**Other shares of decay",
    "**Ramps",
    "## cifar10",
)


def committed_jobs(bench):
    return json.loads(bench.frontier.COMMITTED.read_text(encoding="utf-8"))["jobs"]


def page_of(bench, records):
    script = runpy.run_path(str(ROOT / "docs" / "make_frontier.py"))
    jobs = {str(number): record for number, record in enumerate(records)}
    return script["render"](bench.frontier_report.gather("", jobs, {}))


def test_the_committed_report_is_the_one_that_its_jobs_make(bench):
    asks = bench.frontier.__doc__.splitlines()[0]
    found = bench.frontier_report.gather(
        asks, committed_jobs(bench), bench.frontier_arms.FIRST_SEED
    )
    committed = bench.frontier.COMMITTED.read_text(encoding="utf-8")
    assert json.dumps(found, indent=1, allow_nan=False) + "\n" == committed


def test_the_page_has_a_part_for_what_was_run_and_none_for_what_was_not(bench):
    jobs = committed_jobs(bench)
    records = [record for key, record in jobs.items() if key.startswith("code")]
    few = [
        r
        for r in records
        if (r["settings"]["setup"], r["settings"]["decay"]) == ("code", 0.2)
        and r["settings"]["stage"] != "seconds"
        and not any(word in r["settings"]["arm"] for word in ("warmup", "ramp"))
    ]
    page = page_of(bench, few)
    assert [part for part in PARTS if part in page] == []
    assert all(
        word not in page.partition("## Again")[2]
        for word in ("seconds ", "large", "warmup", "decay=", "cifar")
    )

    def vary(record, name, **changes):
        settings = record["settings"] | changes | {"arm": record["settings"]["arm"] + name}
        return record | {"settings": settings}

    judged = [
        r for r in records if r["settings"]["role"] == "judge" and r["settings"]["seed"] < 60_002
    ]
    plain = [r for r in judged if r["settings"]["arm"] in ("static 4", "static 6", "3-5@30 last")]
    plain = [
        r for r in plain if r["settings"]["setup"] == "code" and r["settings"]["stage"] != "seconds"
    ]
    more = [vary(r, " decay=0.4", decay=0.4) for r in plain]
    more += [vary(r, " ramp=3", ramp=3) for r in plain if "@" in r["settings"]["arm"]]
    images = [vary(r, "", setup="cifar10_resnet") for r in plain]
    more += [
        *images,
        *(vary(r, " rate=0.5", factor=0.5) for r in images if "@" in r["settings"]["arm"]),
    ]
    page = page_of(bench, records + more)
    assert [part for part in PARTS if part in page] == list(PARTS)
    assert "nan" not in page
    held = page.partition("best depth of that rate")[2].partition("**Growing")[0]
    assert "| 3-5@30 last | 0.6 |" in held
    assert "rate=0.5" not in held, "no depth has that rate"
    assert "- Not run: other texts" in page
    assert page.count("- Not run") == 1


# -- jobs ------------------------------------------------------------------------------------------


def test_a_plan_plants_when_its_share_of_the_compute_is_used(bench):
    code = bench.frontier_arms.setups(False)["code"]
    policy = bench.frontier_arms.policy_of(code, bench.frontier_arms.Arm("2-4-8@30,70"))
    _, epochs, places = policy.split(":")
    assert epochs == "epochs=5+5+13+13+13+13", "decision 5 comes after six of twenty shares"
    assert places == "places=" + "+".join(["r0c0.copy", "r0c1.copy"] * 3)


def test_every_plan_comes_out_even(bench):
    arms = bench.frontier_arms
    for setup in arms.setups(False).values():
        for plan in setup.plans:
            arm, steps = arms.Arm(plan), arms.read_plan(plan)
            planted = sum(
                len(arms.places_of(setup, arm, before, after)) for _, before, after in steps
            )
            assert planted == (setup.most - arm.start) * (1 if setup.is_text else 3), plan
            assert all(math.isclose(share * setup.task.epochs % 1, 0) for share, *_ in steps), plan


def test_no_seed_has_two_uses(bench):
    firsts = sorted(bench.frontier_arms.FIRST_SEED.values())
    assert min(after - before for before, after in pairwise(firsts)) >= 1000
    setup = bench.frontier_arms.setups(False)["code"]
    (job, *_) = bench.frontier_arms.jobs_of(setup, "tune", range(1))
    assert (job.role, job.seed) == ("tune", bench.frontier_arms.FIRST_SEED["tune"])


def test_a_trunk_costs_what_is_run_of_it(bench):
    setup = bench.frontier_arms.setups(False)["code"]
    jobs = bench.frontier_arms.jobs_of(setup, "static", range(1))
    assert jobs[0].units == pytest.approx(0.8 * 1.0 + 0.2 * (0.3 + 0.45 + 0.6 + 0.8 + 1.0))
    assert {job.arm.name for job in jobs} == {f"static {depth}" for depth in (1, 2, 3, 4, 5, 6, 8)}


@pytest.mark.slow
def test_a_fork_is_the_run_that_it_stands_for(bench):
    """Forked from one trunk or run alone: the same examples and FLOPs, and nearly the same loss.

    The last measurement is set aside first, and is another share of each budget, so the warm-up
    differs by that share.
    """
    arms, jobs = bench.frontier_arms, bench.frontier_jobs
    setup = arms.setups(True)["code"]
    setup = replace(setup, task=replace(setup.task, load=lambda root: text_splits(32)), tested=8)
    splits = jobs.load_splits(setup, None)
    forked = arms.Job("code", "static", "judge", arms.Arm("static 2"), 1, (0.3, 0.5, 0.7), True)
    rows = jobs.play(setup, forked, splits, "cpu", "off")
    alone = replace(forked, arm=arms.Arm("direct 2"), computes=(0.5, 0.7))
    for row, own in zip(rows[1:], jobs.play(setup, alone, splits, "cpu", "off"), strict=True):
        assert {key: row[key] for key in ("compute", "flops", "examples", "params")} == {
            key: own[key] for key in ("compute", "flops", "examples", "params")
        }
        assert row["loss"] == pytest.approx(own["loss"], abs=2e-3)
    assert rows[0]["loss"] != rows[1]["loss"]


def test_a_job_of_other_settings_is_not_taken_as_done(bench):
    job = bench.frontier_arms.Job(
        "code", "static", "judge", bench.frontier_arms.Arm("static 2"), 1, (1.0,), True
    )
    assert not bench.frontier.is_done({}, job)
    settings = bench.frontier_arms.settings_of(bench.frontier_arms.setups(True)["code"], job)
    assert bench.frontier.is_done({job.key: {"settings": settings}}, job)
    with pytest.raises(SystemExit, match=r"\(lr\)"):
        bench.frontier.is_done({job.key: {"settings": settings | {"lr": 7.0}}}, job)


def test_committed_jobs_are_not_run_again_unless_asked(bench, tmp_path, capsys):
    few = ["--stage", "static", "--depths", "4", "--seeds", "5", "--out", str(tmp_path), "--list"]
    assert bench.frontier.main(few) == 0
    assert capsys.readouterr().out.startswith("0 jobs")
    assert bench.frontier.main([*few, "--again"]) == 0
    assert "\n5 jobs" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_everything_runs_in_small_and_is_not_run_twice(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "frontier.py"),
        "--smoke",
        "--out",
        str(tmp_path),
    ]
    first, again = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    finished = {path.stem for path in tmp_path.glob("*.json")}
    assert len(finished) >= 50
    assert finished == {
        name for line in first.splitlines() if (name := line.split(":")[0]) in finished
    }
    assert not finished & {line.split(":")[0] for line in again.splitlines()}
    found = json.loads((tmp_path / "report" / "frontier.json").read_text())
    assert set(found["setups"]) == {"code", "cifar10_resnet"}
    code = found["setups"]["code"]
    assert code["roles"]["judge"]["loss"]["frontier"]["0.2"][0]["compute"] == 0.5
    assert {row["workers"] for row in code["rows"]} == {1}
    assert "static 2" in code["seconds for 1.0, alone"]
    assert (tmp_path / "report" / "frontier_code.svg").read_text().count("<circle") > 4
