"""A garden says in words what its policy read and what it preferred, by how much."""

import re

import pytest
import torch

import esper
from esper.garden.measuring import track
from esper.leyline.factored_actions import OP_NAMES
from esper.tamiyo import reasons
from esper.tamiyo.layout import BASE_ROW, BLUEPRINT_ROW, PAIR_ROW, SLOT_ROW
from esper.tamiyo.policy_names import read_policy
from esper.tamiyo.readings import observe
from garden.test_trained_policies import HELD_OUT, grown, play
from policy_files import write_policy
from user_models import CNN, WAIT, losses_of, made_up

UNTAUGHT = "Nothing has been decided yet"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "one.safetensors")


def stepped(garden, losses, train_loss=None):
    garden.step(lambda: torch.full((8,), losses), train_loss=train_loss)
    return garden.why()


@pytest.mark.parametrize(("policy", "times"), [("heuristic", 0), (None, 3)])
def test_the_whole_history_is_read_once_a_step_and_only_by_a_network(
    policy, times, file, monkeypatch
):
    read = []

    def reading(*rest):
        read.append(rest)
        return track(*rest)

    monkeypatch.setattr("esper.garden.garden.track", reading)
    play(grown(policy or file), range(3))
    assert len(read) == times


# -- rules -----------------------------------------------------------------------------------------


def test_before_the_first_step_and_after_a_load_there_is_nothing_to_say(tmp_path):
    garden = grown("heuristic")
    assert garden.why().startswith(UNTAUGHT)
    folder = play(garden, range(2)).save(tmp_path / "save")
    assert not garden.why().startswith(UNTAUGHT)
    assert esper.load(folder, CNN()).why().startswith(UNTAUGHT)
    garden.restore(folder)
    assert garden.why().startswith(UNTAUGHT)


def test_the_default_rule_says_what_let_it_plant():
    why = stepped(grown("heuristic"), 1.0, 0.9)
    assert why.startswith("epoch 1: heuristic chose GERMINATE conv_")
    assert "No test held it back: as a slot's first seed one that mixes positions" in why
    assert "the training loss 0.9 and the held-out loss 1;" in why


def test_the_default_rule_says_when_data_are_missing():
    garden = grown("heuristic", blueprints=["norm"])
    for epoch in range(5):
        why = stepped(garden, 1.0 + 0.1 * epoch, 0.9 - 0.15 * epoch)
    assert why.startswith("epoch 5: heuristic chose WAIT.")
    assert "What decided it: data are missing." in why
    assert "the training loss 0.3 and the held-out loss 1.4;" in why


def test_the_default_rule_says_when_it_is_too_late():
    garden = grown("heuristic:planting_part=0.1", epochs=10, max_seeds=9)
    stepped(garden, 1.0)
    why = stepped(garden, 1.0)
    assert "What decided it: only the first 10% of the epochs are for planting." in why
    assert "cannot see whether data are missing; pass train_loss=... to step." in why


def test_the_default_rule_says_when_every_slot_is_taken():
    garden = grown("heuristic", max_seeds=1)
    stepped(garden, 1.0)
    assert "What decided it: no slot may take a seed now." in stepped(garden, 1.0)


def test_other_rules_say_what_they_chose_and_what_was_kept():
    garden = grown("schedule:epochs=0")
    assert stepped(garden, 1.0).splitlines() == [
        "epoch 1: schedule:epochs=0 chose GERMINATE conv_light (linear) in r0c0 (layer1)."
    ]
    for _ in range(20):
        garden.step(made_up(garden))
        if garden.model.fossilized_seeds:
            break
    chosen, kept = garden.why().splitlines()
    assert chosen.endswith("chose WAIT.")
    assert kept == "Kept because it was measured, as rules do: FOSSILIZE in r0c0 (layer1)."


def test_a_plan_says_all_that_it_chose():
    plan = "schedule:epochs=0+0:places=r0c0.norm+r0c1.norm"
    why = stepped(grown(plan), 1.0)
    assert "GERMINATE norm (linear) in r0c0 (layer1), GERMINATE norm (linear) in r0c1" in why


# -- networks --------------------------------------------------------------------------------------


def test_a_trained_policy_says_how_likely_each_op_was(file):
    garden = play(grown(file), range(5))
    question = garden.questions[-1]
    policy = garden.policy
    states = torch.as_tensor(observe([question.sight], policy.layout))
    masks = {name: torch.as_tensor(mask) for name, mask in question.masks.items()}
    draws = torch.Generator().manual_seed(0)
    decision = policy.network.get_action(states, question.memory, masks, True, draws)
    chosen = OP_NAMES[int(decision.choices["op"])]
    first, second, *_ = garden.why().splitlines()
    assert f"chose {chosen}" in first
    known = dict(re.findall(r"(\w+) ([\d.]+)%", second))
    assert max(known, key=lambda op: float(known[op])) == chosen
    chance = decision.log_probs["op"].exp().item()
    assert float(known[chosen]) == pytest.approx(100 * chance, abs=0.06)
    assert sum(map(float, known.values())) == pytest.approx(100, abs=0.3)
    impossible = [OP_NAMES[op] for op in range(4) if not question.masks["op"][0, op]]
    assert not set(known) & set(impossible)
    assert all(op in second for op in impossible)


def test_it_names_slots_and_blueprints_where_they_were_chosen(file):
    garden = grown(file)
    for epoch in range(6):
        play(garden, [epoch])
        answer = garden.questions[-1].answer
        if answer[0] == 1:
            break
    lines = garden.why().splitlines()
    (slots,) = [line for line in lines if line.startswith("Of the slots: ")]
    (blueprints,) = [line for line in lines if line.startswith("Of the blueprints: ")]
    space = garden.model.space
    assert slots.split()[3] == space.slots.slot_ids[answer[1]]
    assert blueprints.split()[3] == space.blueprint_ids[answer[2]]
    assert "None" not in blueprints


def test_it_says_what_was_absent(file):
    garden = play(grown(file), range(1))
    (absent,) = [line for line in garden.why().splitlines() if line.startswith("Absent: ")]
    assert "scores" in absent
    assert "the loss of guessing" in absent
    assert "training losses" not in absent
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    assert "training losses" in garden.why()


def test_what_was_dropped_in_training_is_absent_too(tmp_path):
    path = write_policy(tmp_path / "p", lacking=("telemetry", "train_loss"))
    garden = play(grown(path), range(2))
    assert re.search("Absent: .*training losses.*gradients and greedy scores", garden.why())


def test_a_reading_weighs_as_much_as_its_difference_from_the_usual_one_changes(file):
    garden = play(grown(file), range(4))
    question, network = garden.questions[-1], garden.policy.network
    layout = garden.policy.layout
    rows = torch.randn(50, layout.width) * 0.1 + 0.5
    network.observation_stats.update(rows)
    states = torch.as_tensor(observe([question.sight], layout))[:, None].requires_grad_()
    masks = {name: torch.as_tensor(mask)[:, None] for name, mask in question.masks.items()}
    case = reasons._Case(network, states, question, masks)
    influence = case.influence()
    for name in ("host.epochs", "host.gap", "slot0.place"):
        index = layout.names.index(name)
        value = states[0, 0, index].item()
        nudged = states.detach().clone()
        nudged[0, 0, index] += 1e-2
        after = reasons._Case(network, nudged, question, masks).ops[question.answer[0]]
        slope = (after - case.ops[question.answer[0]]).item() / 1e-2
        row, column = name.split(".")
        start = {"host": 0, "slot0": len(BASE_ROW.numbers)}[row]
        numbers = {"host": BASE_ROW, "slot0": SLOT_ROW}[row].numbers
        usual = network.observation_stats.mean[start + numbers.index(column)].item()
        expected = slope * (value - usual)
        assert influence[index].item() == pytest.approx(expected, rel=0.1, abs=1e-3), name


def test_every_number_that_is_read_has_words():
    assert tuple(reasons._HOST) == BASE_ROW.numbers
    assert tuple(reasons._SLOT) == SLOT_ROW.numbers
    assert tuple(reasons._BLUEPRINT) == BLUEPRINT_ROW.numbers
    assert tuple(reasons._PAIR) == PAIR_ROW.numbers


def test_to_say_why_changes_nothing(file):
    garden = play(grown(file), range(3))
    memory = [part.clone() for part in garden.memory]
    grads = [parameter.grad for parameter in garden.policy.network.parameters()]
    assert garden.why() == garden.why()
    assert all(torch.equal(*pair) for pair in zip(memory, garden.memory, strict=True))
    assert grads == [parameter.grad for parameter in garden.policy.network.parameters()]


def test_a_policy_of_ones_own_says_what_it_chose():
    class Waiting:
        def decide(self, observation, masks, reports, memory, signals):
            return torch.tensor([WAIT]).numpy(), memory

    garden = grown(lambda facts: Waiting())
    assert stepped(garden, 1.0) == "epoch 1: Waiting() chose WAIT."
    assert read_policy("heuristic") == "heuristic"
