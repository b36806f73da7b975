"""What `esper ppo` spends beside its episodes is booked: twins once, learning after every round."""

import json
from dataclasses import replace

import pytest
import torch

from esper.kasmina.pricing import count_flops
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.simic.costs import learning_flops
from esper.simic.trainer import build_environment
from esper.simic.twins import raise_twins
from esper.tamiyo.heads import HeadSpec, count_cases
from esper.tamiyo.network import FactoredRecurrentActorCritic, RecurrentActorCritic
from simic.tiny_runs import DECISIONS, events_of, lines_of, tiny, train

TASK = replace(get_task("blobs"), epochs=3)
PASSES = 2
"""passes over a rollout in a tiny run"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("costs") / "run", ppo__target_kl=None)
    return config, train(config), lines_of(config.out)


def booked(rows, what):
    return [row for row in rows if row["type"] == "CostsBooked" and row["what"] == what]


# -- learning --------------------------------------------------------------------------------------


def test_learning_is_booked_after_every_round(trained):
    _, agent, rows = trained
    learning = booked(rows, "learning")
    assert [row["round"] for row in learning] == [0, 1]
    for row in learning:
        assert row["examples"] == {"learning": PASSES * DECISIONS}
        assert row["flops"] == {"learning": PASSES * DECISIONS * learning_flops(agent.network)}
        assert 0 < row["seconds"]["learning"] < 60


def test_a_round_sums_up_what_its_episodes_and_its_learning_cost(trained):
    _, _, rows = trained
    number, episodes = 0, [0, 0]
    for row in rows:
        number = row["round"] if row["type"] == "RoundBegan" else number
        if row["type"] == "LedgerClosed":
            episodes[number] += sum(row["flops"].values())
    learning = [row["flops"]["learning"] for row in booked(rows, "learning")]
    finished = [row["flops"] for row in rows if row["type"] == "RoundFinished"]
    assert finished == [
        {"episodes": episodes[number], "learning": learning[number]} for number in (0, 1)
    ]
    assert all(episodes)


def test_an_update_that_is_cut_short_costs_less(trained, tmp_path):
    config, _, rows = trained
    cut = config.with_changes([("out", str(tmp_path / "cut")), ("ppo.target_kl", 1e-9)], "the test")
    train(cut)
    for before, after in zip(
        booked(rows, "learning"), booked(lines_of(cut.out), "learning"), strict=True
    ):
        assert 0 < after["examples"]["learning"] < before["examples"]["learning"]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_judging_a_decision_costs_what_torch_counts(slots):
    network = FactoredRecurrentActorCritic(80, slots, num_blueprints=8)
    states = torch.randn(16, 20, 80)
    actions = {
        name: torch.randint(0, size, (16, 20))
        for name, size in zip(network.spec.names, network.spec.sizes, strict=True)
    }
    forward = (
        count_flops(lambda: network.evaluate_actions(states, actions)) / states[..., 0].numel()
    )
    assert learning_flops(network) / 3 == pytest.approx(forward, rel=0.05)


def test_a_head_is_asked_in_every_case_of_the_choices_that_it_sees():
    growth = HeadSpec.growth(num_slots=5, num_blueprints=3, num_blends=2)
    assert [count_cases(growth, head) for head in range(4)] == [1, 3, 5, 15]
    assert count_cases(HeadSpec.independent([3, 5]), 1) == 1
    network = RecurrentActorCritic(4, growth, hidden_dim=8, head_dim=8)
    cases, _ = network._cases(3, torch.zeros(1, 8), {})
    assert cases.shape[1:-1].numel() == 15


# -- twins -----------------------------------------------------------------------------------------


def test_a_twin_costs_what_its_episode_cost(tmp_path):
    alone = Population(TASK, [7])
    for run in alone.runs:
        run.is_static = True
    for _ in range(TASK.epochs):
        alone.train_epoch()
        alone.evaluate()
    twin = raise_twins(TASK, [3, 7], tmp_path)[7]
    assert twin.ledger.counts() == alone.runs[0].ledger.counts()
    assert twin.ledger.phases["training"].examples > 0
    assert twin.ledger.phases["training"].seconds > 0


def test_what_a_twin_cost_is_kept_with_it_and_reading_it_back_costs_nothing(tmp_path, monkeypatch):
    first = raise_twins(TASK, [1, 2], tmp_path)
    monkeypatch.setattr(Population, "start_epoch", lambda self, **_: pytest.fail("trained again"))
    again = raise_twins(TASK, [2, 1], tmp_path)
    assert again == first


def test_a_file_without_costs_is_computed_again(tmp_path):
    first = raise_twins(TASK, [1], tmp_path)[1]
    path = next(tmp_path.iterdir())
    kept = json.loads(path.read_text())
    assert "ledger" in json.dumps(kept)
    path.write_text(json.dumps(kept).replace('"ledger"', '"costs"'))
    assert raise_twins(TASK, [1], tmp_path)[1].ledger.counts() == first.ledger.counts()


def test_twins_are_booked_once_before_the_first_round_with_what_they_cost(trained):
    config, _, rows = trained
    (twins,) = booked(rows, "twins")
    assert rows.index(twins) < min(
        number for number, row in enumerate(rows) if row["type"] == "RoundBegan"
    )
    env = build_environment(config)
    assert len(env.twins) == config.host_pool
    assert twins["flops"] == {
        name: cost.flops for name, cost in env.twin_ledger.phases.items() if cost.examples
    }
    assert twins["examples"]["training"] == config.host_pool * 4 * 64
    assert sum(twins["seconds"].values()) > 0


def test_a_run_that_continues_books_its_twins_no_second_time(trained, tmp_path):
    config, _, _ = trained
    whole = tiny(tmp_path / "run", ppo__target_kl=None)
    train(whole.with_changes([("rounds", 1)], "the test"))
    train(whole, resume=True)
    both = events_of(whole.out, "CostsBooked")
    assert both == events_of(config.out, "CostsBooked")


def test_what_twins_cost_is_told(tmp_path):
    told = []
    config = tiny(tmp_path / "run", rounds=1)
    train(config, tell=told.append)
    (line,) = [line for line in told if line.startswith("twins: ")]
    flops = sum(events_of(config.out, "CostsBooked")[0]["flops"].values())
    assert f"{config.host_pool}, computed once with {flops:.3g} FLOPs" in line
