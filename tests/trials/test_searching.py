"""A search for plans:

within its episodes and its room, on its own hosts, chosen by validation, stopped and resumed.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.episodes import facts_of
from esper.runtime.population import Population
from esper.simic.checkpoints import episodes_of
from esper.storage.runfolder import PLANS
from esper.tamiyo.policy_names import make_policy
from esper.trials import comparison
from esper.trials.arms import Stopped
from esper.trials.results import summarise
from esper.trials.searching import Draws, Searching, SearchSettings, Step, read_search, write_plan
from runtime.episodes import IMAGES
from trials.grown_runs import asked_at
from trials.test_comparison import LR, compare, configured, logged, timeless
from trials.test_running import trained

FACTS = facts_of(Population(IMAGES, [0]).runs[0].model, 20)
ARM = "search:episodes=9:plans=4:hosts=2"


def parts_of(policy):
    """(decision, place) of each planting of a plan."""
    if policy == "never":
        return []
    _, epochs, places = policy.split(":")
    return list(zip(map(int, epochs[7:].split("+")), places[7:].split("+"), strict=True))


def searched(value, **settings):
    """What a search finds where `value(policy, host)` is the validation accuracy, and what it
    played.
    """
    played = []

    def play(wanted):
        played.extend(wanted)
        return [value(policy, host) for policy, host in wanted]

    return *Searching(SearchSettings(**settings), FACTS, play).find(), played


def closeness(policy, host=0):
    """Best is one conv_light at r0c1, early."""
    parts = parts_of(policy)
    return sum(
        2.0 - 0.1 * decision for decision, place in parts if place == "r0c1.conv_light"
    ) - len(parts)


# -- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("episodes", [2, 3, 17, 40, 250])
def test_as_many_episodes_as_it_was_given_and_none_twice(episodes):
    plan, scores, played = searched(closeness, episodes=episodes)
    assert len(played) == len(set(played)) == episodes
    assert scores == [closeness(plan)] * len(scores)


def test_a_search_finds_what_is_best_and_more_episodes_find_better():
    found = [
        np.mean([closeness(searched(closeness, episodes=n, seed=s)[0]) for s in range(5)])
        for n in (10, 60, 400)
    ]
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.8


def test_the_result_is_the_best_on_the_most_hosts():
    plan, scores, played = searched(lambda policy, host: closeness(policy), episodes=250)
    most = {policy for policy, host in played if host == 7}
    assert len(scores) == 8
    assert closeness(plan) == max(map(closeness, most))


def test_plans_are_judged_on_the_same_hosts_only():
    """Hosts differ by more than plans do; a plan on one easy host must not beat one on eight."""
    good, bad = (Step(0, "r0c1.conv_light"),), (Step(0, "r0c0.norm"),)
    searching = Searching(
        SearchSettings(),
        FACTS,
        lambda wanted: [closeness(policy) - 100 * (host > 0) for policy, host in wanted],
    )
    assert searching._extend([bad, good], 1) == [good, bad]
    searching._extend([good], 4)
    assert searching._extend([bad, good], 1) == [good, bad]
    assert searching._ranked() == [good, bad]


def test_the_better_half_is_played_on_twice_as_many_hosts():
    _, _, played = searched(closeness, episodes=40, plans=8, hosts=4)
    assert [host for _, host in played[:16]] == [0] * 8 + [1] * 4 + [2, 3] * 2
    first, second = (
        {policy for policy, _ in played[start:end]} for start, end in ((0, 8), (8, 12))
    )
    assert min(map(closeness, second)) >= max(map(closeness, first - second))


def test_the_same_search_finds_the_same_plan_and_another_seed_draws_others():
    runs = [searched(closeness, episodes=30, seed=seed) for seed in (4, 4, 5)]
    assert runs[0] == runs[1]
    assert runs[0][2] != runs[2][2]


def test_where_every_plan_has_been_tried_it_ends():
    model = (
        Population(replace(IMAGES, slots=("r0c0",), blueprints=("conv_small",), budget=1.1), [0])
        .runs[0]
        .model
    )
    played = []

    def play(wanted):
        played.extend(wanted)
        return [0.5] * len(wanted)

    Searching(SearchSettings(episodes=500, hosts=1), facts_of(model, 2), play).find()
    assert len(played) == len(set(played)) < 500


def test_every_plan_can_be_paid_for_and_played():
    draws, plan = Draws(FACTS, 3), ()
    seen = set()
    for step in range(300):
        plan = draws.mutate(plan if step % 9 else ())
        assert list(plan) == sorted(plan)
        assert sum(draws.prices[place] for _, place in plan) <= FACTS.budget - FACTS.host_params
        assert all(0 <= decision <= 18 for decision, _ in plan)
        make_policy(write_plan(plan), FACTS)
        seen |= {place for _, place in plan}
    assert seen == {place for place, price in draws.prices.items() if price <= FACTS.most_room}


# -- as an arm -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    config = configured(tmp_path_factory.mktemp("search"), policies=["never", ARM], seeds=2)
    with logged() as log:
        done = compare(config)
    return config, done, log


def test_its_hosts_are_not_those_of_the_comparison(found):
    config, _, log = found
    seeds = {seed for arm, _, seed in log.left if arm == ARM}
    assert seeds == {1_000_000, 1_000_001, *config.host_seeds}


def test_its_plan_is_a_policy_that_does_the_same(found, tmp_path):
    _, done, _ = found
    plan = done[ARM, 1.0].plan
    assert plan != "never"
    (alone,) = compare(configured(tmp_path, policies=[plan], seeds=2)).values()
    for mine, others in zip(timeless(done[ARM, 1.0]), timeless(alone), strict=True):
        assert [{**row, "arm": ARM} if "arm" in row else row for row in others] == list(mine)


def test_what_it_was_given_and_found_is_in_the_results(found):
    config, done, _ = found
    arms = summarise(config, done)["arms"]
    assert (arms[ARM]["episodes"], arms["never"]["episodes"]) == (9, 0)
    assert arms[ARM]["plan"] == done[ARM, 1.0].plan
    assert "plan" not in arms["never"]


def test_validation_chooses(found, tmp_path, monkeypatch):
    """Test scores that say the opposite change nothing."""
    _, done, _ = found
    play = comparison.run_entries

    def opposite(*given, **options):
        runs = play(*given, **options)
        return [
            replace(run, result=replace(run.result, test_accuracy=1 - run.result.test_accuracy))
            for run in runs
        ]

    monkeypatch.setattr(comparison, "run_entries", opposite)
    assert (
        compare(configured(tmp_path, policies=[ARM], seeds=2))[ARM, 1.0].plan == done[ARM, 1.0].plan
    )


@pytest.mark.slow
def test_stopped_in_the_middle_it_goes_on_and_plays_nothing_again(found, tmp_path):
    _, done, log = found
    config = configured(tmp_path, policies=["never", ARM], seeds=2)
    with logged() as first, pytest.raises(Stopped):
        compare(config, asked_at(8 * 4))
    (kept,) = (tmp_path / PLANS).iterdir()
    before = kept.read_bytes()
    with logged() as second:
        again = compare(config)
    assert timeless(again[ARM, 1.0]) == timeless(done[ARM, 1.0])
    assert again[ARM, 1.0].plan == done[ARM, 1.0].plan
    assert sum(first.sizes[:-1]) + sum(second.sizes) == sum(log.sizes), "all but what was cut off"
    assert kept.read_bytes() != before
    with logged() as nothing:
        compare(config)
    assert nothing.sizes == []


def test_its_hosts_are_trained_first_as_the_others_are(tmp_path):
    arm = "search:episodes=2:hosts=1"
    with logged() as log:
        compare(
            configured(
                tmp_path, policies=[arm], static=["final"], seeds=1, pretrain=1, task__epochs=4
            )
        )
    assert {path.stem for path in (tmp_path / "pretrained").iterdir()} == {"seed-0", "seed-1000000"}
    assert (arm, LR, 1_000_000) in log.left


def test_settings_reach_the_search():
    assert read_search("search") == SearchSettings()
    assert read_search("search:episodes=7:plans=3:hosts=2:seed=5") == SearchSettings(7, 3, 2, 5)


# -- what others were given ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trained_arm_and_its_final_network_were_given_its_episodes_and_the_oracle_what_it_tried(
    tmp_path,
):
    path = str(trained(tmp_path / "ppo", hosts=3))
    few = {
        "task__slots": ["r0c1"],
        "task__blueprints": ["lora", "mlp"],
        "task__epochs": 3,
        "seeds": 2,
    }
    assert episodes_of(Path(path)) == 3
    done = compare(
        configured(tmp_path / "a", policies=[path, "heuristic"], static=["final"], task__epochs=3)
    )
    assert {arm: trials.episodes for (arm, _), trials in done.items()} == {
        path: 3,
        "heuristic": 0,
        f"final of {path}": 3,
        "final of heuristic": 0,
    }
    done = compare(configured(tmp_path / "b", policies=["never"], oracle=True, **few))
    assert {trials.episodes for (arm, _), trials in done.items() if arm != "never"} == {2 * 2 * 2}
