"""Networks of fixed size as controls:

the grown architecture, from the first step on, with everything trained.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from esper.kasmina.harvesting import harvest
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import MeasurementError, UnknownNameError
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.storage.runfolder import ARMS
from esper.trials import comparison
from esper.trials.arms import Entry, architecture_of, prepare_host, run_entries
from runtime.episodes import BLOBS, IMAGES
from trials.test_arms import same
from trials.test_comparison import LR, compare, configured, logged, timeless

BUILT = (
    ("r0c0", "conv_light", "gated"),
    ("r0c0", "norm", "linear"),
    ("r0c1", "conv_small", "linear"),
)
"""Two in one slot, one with a gate, batch norm in the host."""
SEEDS = range(3)
GROWN = "heuristic:held_out_part=0"
"""Plants from the first epoch on, so that there is time for seeds to be kept or pruned differently."""
FINALS = tuple(f"{kind} of {GROWN}" for kind in ("final", "final-equal-flops", "final-whole"))


def prepared(task=IMAGES, seed=4, **entry):
    population = Population(task, [seed])
    prepare_host(population, 0, Entry("final", seed, "never", **entry))
    return population, population.runs[0]


# -- one network -----------------------------------------------------------------------------------


def test_a_built_in_network_has_the_named_parts_in_their_order():
    _, run = prepared(built_in=BUILT)
    assert architecture_of(run.model) == BUILT
    assert {slot.state.stage for slot in run.slots} == {SeedStage.DORMANT}
    assert all(slot.seed is None for slot in run.slots)


def test_its_host_has_the_weights_that_the_seed_gives_it():
    (_, run), (_, bare) = prepared(built_in=BUILT), prepared()
    for (name, mine), (other, expected) in zip(
        run.model.host.named_parameters(), bare.model.host.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, expected)


def test_all_of_it_is_in_the_hosts_group_with_state_of_its_own():
    _, run = prepared(built_in=BUILT)
    home, *others = (set(map(id, group["params"])) for group in run.optimizer.param_groups)
    assert run.link.home == 0
    assert home == {id(parameter) for parameter in run.model.parameters()}
    assert not any(others)
    assert all(run.optimizer.state[parameter] for parameter in run.model.parameters())


def test_all_of_it_is_trained_and_harvested():
    population, run = prepared(built_in=BUILT)
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    population.train_epoch()
    assert [
        name for name, value in run.model.named_parameters() if torch.equal(value, before[name])
    ] == []
    assert (
        count_parameters(harvest(run.model))
        == count_parameters(run.model)
        == run.ledger.peak_params
    )


def test_it_is_the_network_that_grows_into_it():
    """The same parts, planted and kept one by one: the same shapes under the same names."""
    _, run = prepared(built_in=BUILT)
    grown = Population(IMAGES, [4]).runs[0].model
    for slot_id, blueprint, blend in BUILT:
        grown.germinate_seed(slot_id, blueprint, blend)
        slot = grown.slot(slot_id)
        slot.petrify()
        slot.assign(type(slot.state)())
    mine, other = harvest(run.model).state_dict(), harvest(grown).state_dict()
    assert {name: value.shape for name, value in mine.items()} == {
        name: value.shape for name, value in other.items()
    }


@pytest.mark.parametrize(
    "entry", [{"built_in": BUILT}, {"weights": "trained"}], ids=["built in", "trained"]
)
def test_a_host_that_breaks_in_its_first_epoch_is_brought_back_to_how_it_was_prepared(entry):
    if "weights" in entry:
        source = Population(IMAGES, [9])
        source.train_epoch()
        entry = {"weights": source.runs[0].model.host.state_dict()}
    population, run = prepared(**entry)
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    population.train_epoch()
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    assert len(population.evaluate()) == 1
    assert all(torch.equal(value, start[name]) for name, value in run.model.state_dict().items())
    assert architecture_of(run.model) == entry.get("built_in", ())


def test_parts_that_do_not_change_the_start_leave_it_to_training():
    """Seeds are born as the identity where scale at birth is 0, and yet the built-in ones learn
    from the first step.
    """
    task = replace(BLOBS, epochs=2)
    (bare,) = run_entries(task, [Entry("start", 1, "never")])
    (built,) = run_entries(
        task, [Entry("final", 1, "never", built_in=(("r0c1", "mlp", "linear"),))]
    )
    assert built.result.test_loss != bare.result.test_loss
    assert built.result.start_params == built.result.final_params > bare.result.final_params


# -- as arms ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    config = configured(
        tmp_path_factory.mktemp("static"),
        policies=[GROWN],
        static=["start", "final", "final-equal-flops", "final-whole"],
        pretrain=3,
    )
    with logged() as log:
        done = compare(config)
    return SimpleNamespace(
        done={arm: trials for (arm, _), trials in done.items()}, log=log, task=config.task.build()
    )


def test_the_final_network_is_per_seed_what_the_named_arm_grew(found):
    grown = found.done[GROWN].architectures
    assert len(set(grown)) > 1, "chosen so that seeds grow different networks"
    assert all(grown)
    for arm in FINALS:
        assert found.done[arm].architectures == grown
        for row, other in zip(found.done[arm].rows, found.done[GROWN].rows, strict=True):
            assert row.start_params == row.peak_params == row.final_params == other.final_params
            assert (row.germinated, row.fossilized, row.culled) == (0, 0, 0)
    for seed in SEEDS:
        mine, other = (
            found.log.left[arm, LR, seed].network.state_dict() for arm in (FINALS[0], GROWN)
        )
        assert {name: value.shape for name, value in mine.items()} == {
            k: v.shape for k, v in other.items()
        }


def test_the_start_is_the_bare_host_of_each_seed(found):
    assert found.done["start"].architectures == ((), (), ())
    for row, other in zip(found.done["start"].rows, found.done[GROWN].rows, strict=True):
        assert row.final_params == other.start_params


def test_at_equal_flops_an_episode_ends_within_half_an_epoch_of_the_grown_arms_cost(found):
    for row, grown in zip(found.done[FINALS[1]].rows, found.done[GROWN].rows, strict=True):
        assert abs(row.flops - grown.flops) <= 0.5 * row.flops / row.epochs
    assert len({row.epochs for row in found.done[FINALS[1]].rows}) > 1, (
        "chosen so that episodes differ"
    )


def test_the_rate_plan_of_an_episode_is_stretched_to_its_length(found):
    for arm in FINALS:
        for row in found.done[arm].rows:
            rates = [rate for _, rate in found.log.epochs[arm, LR, row.seed]]
            plan = replace(found.task, epochs=row.epochs)
            assert rates == [plan.rate(epoch) for epoch in range(row.epochs)]


def test_the_other_episodes_are_as_long_as_they_say(found):
    lengths = {arm: {row.epochs for row in found.done[arm].rows} for arm in found.done}
    assert (lengths[GROWN], lengths["start"], lengths[FINALS[0]]) == ({8}, {8}, {8})
    assert lengths[FINALS[2]] == {8 + 3}


def test_what_an_arm_that_grew_nothing_leaves_is_the_start(tmp_path):
    """An episode of two epochs is too short to keep anything."""
    with logged() as log:
        done = compare(
            configured(tmp_path, policies=[GROWN], static=["start", "final"], task__epochs=2)
        )
    assert done[GROWN, 1.0].architectures == ((), (), ())
    assert all(same(log.left["start", LR, seed], log.left[FINALS[0], LR, seed]) for seed in SEEDS)
    start, final = (timeless(done[arm, 1.0]) for arm in ("start", FINALS[0]))
    assert [{**row, "arm": FINALS[0]} for row in start[0]] == final[0]


@pytest.mark.parametrize(
    ("final_of", "followed"),
    [(["schedule"], ["schedule"]), (["all"], ["heuristic", "schedule"])],
    ids=["one", "all"],
)
def test_every_arm_that_is_named_has_a_final_network_of_its_own(final_of, followed, tmp_path):
    policies = ["never", "heuristic", "schedule"]
    done = compare(
        configured(tmp_path, policies=policies, static=["final"], final_of=final_of, seeds=1),
        most=3,
    )
    assert [arm for arm, _ in done] == [*policies, *(f"final of {arm}" for arm in followed)]
    for arm in followed:
        assert done[f"final of {arm}", 1.0].architectures == done[arm, 1.0].architectures
    assert done["schedule", 1.0].architectures != done["heuristic", 1.0].architectures


def test_a_rule_is_tuned_by_its_name_and_may_be_what_others_follow(tmp_path):
    early, late = "schedule:epochs=0", "schedule:epochs=1+2"
    done = compare(
        configured(
            tmp_path,
            policies=["sham", early, late],
            final_of=[late],
            static=["final"],
            task__epochs=4,
        )
    )
    assert {arm: {row.germinated for row in trials.rows} for (arm, _), trials in done.items()} == {
        early: {1},
        late: {2},
        "sham": {2},
        f"final of {late}": {0},
    }


# -- what breaks, and what is refused before anything runs -----------------------------------------


def test_an_arm_that_ends_with_no_number_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    def one_breaks(task, entries, populate, **options):
        runs = run_entries(task, entries, populate, **options)
        is_broken = [entry.arm == "random" and entry.seed == 1 for entry in entries]
        broken = float("nan")
        return [
            replace(run, result=replace(run.result, test_loss=broken)) if no_number else run
            for run, no_number in zip(runs, is_broken, strict=True)
        ]

    monkeypatch.setattr(comparison, "run_entries", one_breaks)
    config = configured(tmp_path, policies=["never", "random"], task__epochs=2)
    with pytest.raises(MeasurementError, match=r"random .*\(host seeds 1\)"):
        compare(config)
    assert [path.name for path in (tmp_path / ARMS).iterdir()] == ["never-1.json"]


def test_a_setting_that_this_network_refuses_is_told_before_any_arm_runs(tmp_path):
    config = configured(tmp_path, policies=["never", "schedule:blueprint_id=nope"])
    with logged() as log, pytest.raises(UnknownNameError, match="blueprint 'nope'"):
        compare(config)
    assert log.sizes == []
