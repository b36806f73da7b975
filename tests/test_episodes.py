"""Environment, comparison and garden play the same episode, without any action objects."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.episodes import Episodes, decide
from esper.garden.garden import Garden
from esper.leyline.factored_actions import FactoredAction
from esper.runtime.population import Population
from esper.simic.environment import GrowthVectorEnv
from esper.tamiyo.policies import RulePolicy
from esper.tamiyo.signals import Signals
from esper.telemetry.events import HostEpoch
from esper.trials.arms import Entry, make_decider, play_epoch, run_entries
from runtime.episodes import IMAGES
from simic.growths import BUSY, POINTS, WAIT

SEED = 4
TASKS = {
    "vectors": (POINTS, BUSY),
    "images": (
        replace(IMAGES, epochs=6, epoch_examples=48),
        {0: BUSY[0], 2: BUSY[3], 3: BUSY[2], 4: BUSY[4]},
    ),
}
every_task = pytest.mark.parametrize("name", TASKS)


class Script:
    """A rule that does at each decision what is written down, possible or not, and no more."""

    keeps_measured = False

    def __init__(self, steps):
        self.steps = steps

    def choose(self, masks, reports, memory, signals):
        return self.steps.get(memory["epoch"], WAIT), memory


def in_environment(task, steps, folder):
    env = GrowthVectorEnv(task, 1, host_seeds=[SEED], folder=folder)
    _, info = env.reset(seed=0)
    events = list(info["events"][0])
    for number in range(task.epochs - 1):
        *_, info = env.step(np.array([steps.get(number, WAIT)]))
        events += info["events"][0]
    return events


def in_comparison(task, steps):
    (run,) = run_entries(task, [Entry("script", SEED, lambda facts: RulePolicy(Script(steps)))])
    return list(run.events)


def in_garden(task, steps):
    """The host trains as in a population; the garden measures, decides and acts as in anybody's own
    loop.
    """
    population = Population(task, [SEED])
    run = population.runs[0]
    garden = Garden(run.model, lambda facts: RulePolicy(Script(steps)))

    def evaluate():
        inputs, targets = run.splits.validation.gather(torch.arange(len(run.splits.validation)))
        return task.score(run.model(inputs).float(), targets)[0]

    for _ in range(task.epochs):
        population.train_epoch()
        for group in (
            run.optimizer.param_groups
        ):  # as a scheduler would; this link does not watch the steps itself
            group["lr"] = task.rate(run.epoch)
        run.link.was_high = True
        garden.step(evaluate)
        run.prime()
    return garden.history


def of_an_episode(events, epochs):
    """What the three can all tell; the last epoch's decision, which no environment asks for, is
    left out.
    """
    told = []
    for event in events:
        if isinstance(event, HostEpoch):
            told.append(
                HostEpoch(
                    event.host,
                    event.epoch,
                    pytest.approx(event.held_out_loss, rel=1e-6),
                    event.params,
                )
            )
        elif event.epoch < epochs or type(event).__name__ == "SeedMeasured":
            told.append(rounded(event))
    return told


def rounded(event):
    numbers = {
        name: pytest.approx(value, rel=1e-4, abs=1e-9)
        for name in ("contribution", "standard_error", "measured")
        if isinstance(value := getattr(event, name, None), float)
    }
    return replace(event, **numbers, **({"reason": ""} if hasattr(event, "reason") else {}))


@every_task
def test_environment_comparison_and_garden_tell_the_same_episode(name, tmp_path):
    task, steps = TASKS[name]
    environment = in_environment(task, steps, tmp_path)
    comparison, garden = in_comparison(task, steps), in_garden(task, steps)
    kinds = {type(event).__name__ for event in environment}
    assert kinds >= {
        "HostEpoch",
        "SeedMeasured",
        "ActionTaken",
        "StageChanged",
        "GateJudged",
        "FossilJudged",
    }
    assert of_an_episode(environment, task.epochs) == of_an_episode(comparison, task.epochs)
    assert of_an_episode(comparison, task.epochs) == of_an_episode(garden, task.epochs)


@every_task
def test_an_epoch_and_what_is_decided_after_it_have_the_same_number(name):
    task, steps = TASKS[name]
    events = in_comparison(task, steps)
    assert [event.epoch for event in events if isinstance(event, HostEpoch)] == list(
        range(1, task.epochs + 1)
    )
    assert [event.epoch for event in events] == sorted(event.epoch for event in events)


def test_the_loop_builds_no_action_objects(monkeypatch):
    built = []
    real = FactoredAction.__init__
    monkeypatch.setattr(
        FactoredAction,
        "__init__",
        lambda self, *args, **kw: (built.append(args), real(self, *args, **kw))[1],
    )
    FactoredAction.from_indices(op_idx=0, slot_idx=0, blueprint_idx=0, blend_idx=0)
    assert len(built) == 1, "the count counts"
    episodes = Episodes(Population(POINTS, [1, 2]))
    deciders = [
        make_decider(episodes, host, lambda facts: RulePolicy(Script(BUSY))) for host in range(2)
    ]
    for _ in range(6):
        play_epoch(episodes, deciders)
    assert len(built) == 1


class Plan:
    """A policy that wants these choices in one decision, one after the other."""

    is_plan = True

    def __init__(self, *choices):
        self.choices = choices

    def decide(self, observation, masks, reports, memory, signals):
        number = memory or 0
        return np.array([[*self.choices, WAIT][number]]), number + 1

    @staticmethod
    def ask_again(memory):
        return memory


def test_a_plan_is_asked_until_it_waits_and_sees_what_it_has_done():
    model = Population(POINTS, [SEED]).runs[0].model
    first = model.view()
    looked = []

    def look():
        looked.append(model.view())
        return looked[-1]

    decisions = []
    for decision in decide(Plan((1, 0, 1, 0), (1, 1, 1, 0)), first, None, Signals(), look=look):
        model.act(decision.choice, decision.view)
        decisions.append(decision)
    assert [decision.choice for decision in decisions] == [(1, 0, 1, 0), (1, 1, 1, 0), WAIT]
    assert [decision.memory for decision in decisions] == [1, 2, 3]
    assert [decision.view for decision in decisions] == [first, *looked]
    assert looked[-1].seeds_used == 2


def test_any_other_policy_is_asked_once():
    model = Population(POINTS, [SEED]).runs[0].model
    policy = Plan((1, 0, 1, 0))
    policy.is_plan = False
    (decision,) = decide(policy, model.view(), None, Signals(), look=model.view)
    assert decision.choice == (1, 0, 1, 0)


def test_where_nothing_may_be_done_a_policy_is_asked_once_and_may_only_wait():
    model = Population(POINTS, [SEED]).runs[0].model
    seen = []

    def ask(masks, reports, memory, signals):
        seen.append(masks)
        return np.array([(1, 0, 1, 0)]), memory

    (_,) = decide(Plan(), model.view(), None, Signals(), look=model.view, ask=ask, may_act=False)
    assert seen[0]["op"].tolist() == [[True, False, False, False]]
