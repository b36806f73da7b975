"""A change that is broken off is as if it had never begun: Ctrl-C in a step, a refused restore."""

import json
import sys

import pytest
import torch

import esper
from cases import with_slow
from esper.garden import undoing
from esper.kasmina import optimizer_saving
from esper.leyline.errors import SaveError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.storage.store import digest_json
from esper.telemetry.events import to_record
from user_models import CNN, grow_cnn, losses_of, random_images, train_epoch

IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
PACKAGE = esper.__path__[0]
PLANT, PLANT_SECOND, KEEP, CULL = (1, 0, 1, 0), (1, 1, 2, 0), (3, 0, 0, 0), (2, 1, 0, 0)
PLAN = {0: PLANT, 1: PLANT_SECOND, 3: CULL, 4: KEEP}


class Interrupter:
    """Raises KeyboardInterrupt before the `at`-th line of the package that a call runs."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.at is not None and self.lines >= self.at:
                self.at = None
                raise KeyboardInterrupt
        return self.trace


def is_interrupted(act, garden, at):
    """Whether the call was interrupted; the last lines are not reached where less is imported."""
    try:
        with Interrupter(at):
            act(garden)
    except KeyboardInterrupt:
        return True
    return False


def interrupt_everywhere(act, garden, twin, points=15):
    """Interrupt a call at many of its lines; what each leaves is as before, or as after it."""
    before = describe(garden)
    assert describe(twin) == before
    with Interrupter() as counted:
        act(twin)
    after = describe(twin)
    assert after != before
    for at in range(1, counted.lines + 1, max(1, counted.lines // points)):
        if not is_interrupted(act, garden, at):
            break
        require_consistent(garden)
        if describe(garden) == after:
            break  # the last lines only return what has happened
        assert describe(garden) == before, at
    else:
        act(garden)
    assert describe(garden) == after
    assert at > 0.3 * counted.lines


def train(garden, epoch):
    train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)


def step(garden):
    return garden.step(lambda: losses_of(garden.model, HELD_OUT))


def grown(epochs, **options):
    """A garden after so many epochs; the next one is trained, and not measured."""
    torch.manual_seed(3)
    options = {"keeps": False, "max_seeds": 4, "lengths": StageLengths(ramp=1), **options}
    garden = grow_cnn(PLAN, scale=0.5, host=CNN(), **options)
    garden.ema(0.9)
    for epoch in range(epochs):
        train(garden, epoch)
        step(garden)
    train(garden, epochs)
    return garden


def require_consistent(garden):
    model = garden.model
    present = {id(parameter) for parameter in model.parameters()}
    optimizer = model.link.optimizer
    owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(present)
    assert {id(parameter) for parameter in optimizer.state} <= present
    for slot in model.ordered_slots:
        assert float(slot.alpha) == (1.0 if slot.seed is None else slot.state.alpha)
        assert slot.is_in_output == (slot.state.stage.name in ("BLENDING", "PROBATIONARY"))
        assert (slot.seed is not None) == (slot.state.stage.name in LIVE)
        assert not slot.is_shadowed
        assert slot.left_out == ()
        assert len(slot.fossils) == len(slot.fossil_names)
    assert all(module.training for module in model.modules())


LIVE = ("GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY")


def describe(garden):
    """All of a garden that goes on, as numbers and text; clocks apart."""
    model = garden.model
    optimizer = model.link.optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(p)]: values for p, values in optimizer.state.items()}
    tensors = {**model.state_dict(), **garden.average.tensors()}
    for name, values in state.items():
        tensors |= {f"{name}|{key}": value for key, value in values.items() if value is not None}
    return {
        "groups": [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "stages": [slot.state for slot in model.ordered_slots],
        "told": [to_record(event) for event in garden.history],
        "memory": (garden.epoch, garden.memory, garden.is_pruned, sorted(garden.by_hand)),
        "counted": (model.births, dict(model.examples), model.link.steps, model.link.was_high),
        "charged": garden.ledger.flops,
        "tensors": {name: value.tolist() for name, value in tensors.items()},
    }


MOMENTS = {
    "a seed is planted": 0,
    "a seed is blended in": 2,
    "a seed is culled": 3,
    "a seed is kept": 4,
}


@pytest.mark.parametrize("epochs", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("points", with_slow([15, 500], [500]))
def test_a_step_that_is_interrupted_anywhere_is_whole_or_has_not_begun(epochs, points):
    interrupt_everywhere(step, grown(epochs), grown(epochs), points)


@pytest.mark.parametrize("act", [lambda g: g.plant("r0c1", "norm"), lambda g: g.cull("r0c0")])
def test_an_act_by_hand_that_is_interrupted_is_whole_or_has_not_begun(act):
    interrupt_everywhere(act, grown(1), grown(1))


def test_the_run_folder_of_an_interrupted_step_holds_what_the_garden_remembers(tmp_path):
    garden, twin = grown(1), grown(1)
    garden.record(tmp_path / "run")
    with Interrupter() as counted:
        step(twin)
    events = len(garden.history)
    for share in (0.6, 0.7, 0.8):
        is_interrupted(step, garden, int(share * counted.lines))
    if len(garden.history) == events:
        step(garden)
    lines = (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()
    told = [to_record(event) for event in garden.history]
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(told))


def test_where_undoing_is_interrupted_too_the_garden_refuses_to_go_on(tmp_path, monkeypatch):
    garden = grown(2)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(undoing._Optimizer, "put_back", interrupt)
        with pytest.raises(KeyboardInterrupt), Interrupter(500):
            step(garden)
    acts = [
        step,
        lambda g: g.save(tmp_path),
        lambda g: g.harvest(),
        lambda g: g.plant("r0c0", "norm"),
    ]
    for act in acts:
        with pytest.raises(SettingError, match=r"broken off.*esper\.load") as caught:
            act(garden)
        assert "\n" not in str(caught.value)


# -- restore ---------------------------------------------------------------------------------------


def edited(folder, change):
    """Change the facts of a save, and seal it again."""
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    change(whole["body"]["generations"][-1]["facts"])
    whole["sha256"] = digest_json(whole["body"])
    path.write_text(json.dumps(whole))


def forget_group(facts):
    facts["optimizer"]["groups"][0]["names"] = ["nothing"]


def forget_rate(facts):
    facts["optimizer"]["groups"][0]["options"]["lr"] = "x"


def name_another_fossil(facts):
    facts["network"]["slots"]["r0c0"]["fossils"].append({"blueprint": "norm", "gated": False})


@pytest.mark.parametrize("change", [forget_group, forget_rate, name_another_fossil])
def test_a_refused_restore_leaves_all_as_it_was(tmp_path, change):
    grown(3).save(tmp_path)
    edited(tmp_path, change)
    garden, twin = grown(2), grown(2)
    before = describe(garden)
    with pytest.raises(SaveError, match="does not fit together"):
        garden.restore(tmp_path)
    require_consistent(garden)
    assert describe(garden) == before
    step(garden)
    step(twin)
    assert describe(garden) == describe(twin)


def test_a_restore_that_is_interrupted_is_whole_or_has_not_begun(tmp_path):
    grown(5).save(tmp_path)
    interrupt_everywhere(lambda garden: garden.restore(tmp_path), grown(2), grown(2))


def test_an_optimisers_rate_on_a_device_is_put_back_too(tmp_path, monkeypatch):
    garden = grown(1)
    garden.save(tmp_path)
    rate = torch.tensor(0.5)
    garden.model.link.optimizer.param_groups[0]["lr"] = rate
    real = optimizer_saving._restore_group
    groups = []

    def restore_group(*args):
        real(*args)
        groups.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer_saving, "_restore_group", restore_group)
    with pytest.raises(KeyboardInterrupt):
        garden.restore(tmp_path)
    assert groups
    assert float(rate) == 0.5
    assert garden.model.link.optimizer.param_groups[0]["lr"] is rate
