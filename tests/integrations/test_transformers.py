"""A tiny Llama through transformers' Trainer:

killed, resumed, taken back to its best, with the host's own labels.
"""

import os
import signal

import pytest
import torch
from torch import nn

import esper
from esper.integrations import Stepper
from esper.integrations import transformers as growing
from esper.leyline.errors import SaveError, SettingError
from esper.telemetry.events import GrowthReported, HostEpoch
from user_models import script

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
TEXTS = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in TEXTS]
PLAN = {0: (1, 0, 1, 0), 1: (1, 1, 2, 0)}
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Kill(transformers.TrainerCallback):
    """Ends the process as a power cut would."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def tiny_llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=16, max_position_embeddings=8, **SIZES, **options)
    return transformers.LlamaForCausalLM(config)


def make_trainer(
    folder, *, plan=PLAN, epochs=5, every=None, rows=ROWS, callbacks=(), model=None, **options
):
    settings = {
        "save_strategy": "epoch",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        use_cpu=True,
        **{**settings, **options},
    )
    garden = esper.grow(
        model or tiny_llama(),
        slots="model.layers.*",
        example={"input_ids": TEXTS[:2]},
        policy=script(plan),
        settings=esper.GrowthSettings(prunes=False),
    )
    trainer = transformers.Trainer(
        garden.model,
        arguments,
        train_dataset=rows,
        eval_dataset=ROWS[:8],
        callbacks=list(callbacks),
    )

    def evaluate():
        logits = garden.model(input_ids=TEXTS[:8]).logits[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, TEXTS[:8, 1:], reduction="none").mean(1)

    growing.join(trainer, garden, evaluate, every=every)
    garden.ema(0.9)
    return trainer, garden


def weights_of(garden):
    return {name: parameter.detach().clone() for name, parameter in garden.model.named_parameters()}


def train_and_kill(folder, step, **options):
    """In a process of its own, which must not end otherwise."""
    if (child := os.fork()) == 0:
        try:
            make_trainer(folder, callbacks=[Kill(step)], **options)[0].train()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def state_of(garden):
    """All that two gardens must have in common to be the same one."""
    optimizer, names = (
        garden.model.link.optimizer,
        {id(p): name for name, p in garden.model.named_parameters()},
    )
    moments = {
        f"{names[id(p)]} {key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    costs = {name: (cost.examples, cost.flops) for name, cost in garden.ledger.phases.items()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    averages = {f"average of {name}": value for name, value in garden.average.tensors().items()}
    history = [
        event for event in garden.history if not isinstance(event, GrowthReported)
    ]  # which tells seconds
    return {**weights_of(garden), **moments, **averages}, (garden.epoch, history, costs, groups)


def assert_same(first, second):
    (tensors, facts), (others, other_facts) = state_of(first), state_of(second)
    assert facts == other_facts
    assert tensors.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


BY_STEP = {"save_strategy": "steps", "save_steps": 3, "every": 2, "optim": "sgd"}
AT_ENDS = {"save_strategy": "steps", "save_steps": 3}
"""saved after the last step of an epoch, before the Trainer says that it has ended"""


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(BY_STEP, marks=pytest.mark.slow),
        pytest.param(AT_ENDS, marks=pytest.mark.slow),
    ],
    ids=["by epoch", "by step", "at ends of epochs"],
)
def test_killed_and_resumed_it_is_the_uninterrupted_one(tmp_path, options, capsys):
    whole, garden = make_trainer(tmp_path / "whole", **options)
    whole.train()
    train_and_kill(tmp_path / "cut", 11, **options)
    resumed, again = make_trainer(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert again.model.fossilized_seeds + again.model.active_seeds == 2
    assert_same(garden, again)
    assert isinstance(garden.history[-1], GrowthReported)  # what it was worth, in words
    assert str(garden.history[-1]) in capsys.readouterr().out
    assert resumed.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


class Stop(transformers.TrainerCallback):
    """Ends training after a step, as a callback that watches the clock would."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4


def test_stopped_within_an_epoch_and_resumed_it_is_the_uninterrupted_one(tmp_path):
    whole, garden = make_trainer(tmp_path / "whole", epochs=3)
    whole.train()
    cut, stopped = make_trainer(tmp_path / "cut", epochs=3, callbacks=[Stop()])
    cut.train()
    assert stopped.epoch == 1
    resumed, again = make_trainer(tmp_path / "cut", epochs=3)
    resumed.train(resume_from_checkpoint=True)
    assert again.epoch == garden.epoch == 3
    assert_same(garden, again)


@pytest.mark.parametrize("most", [-1, 10], ids=["whole epochs", "ends within an epoch"])
def test_the_last_checkpoint_has_the_garden_of_the_end(tmp_path, most):
    trainer, garden = make_trainer(tmp_path, save_strategy="steps", save_steps=500, max_steps=most)
    trainer.train()
    (last,) = tmp_path.glob("checkpoint-*")
    saved = esper.load(last / "garden", tiny_llama(), policy=script(PLAN))
    assert saved.epoch == garden.epoch == (5 if most == -1 else 4)
    assert saved.history == garden.history[: len(saved.history)]
    assert weights_of(saved).keys() == weights_of(garden).keys()


def test_a_report_that_fails_costs_no_training(tmp_path, capsys):
    _, garden = make_trainer(tmp_path)
    Stepper(garden, evaluate=3).on_train_end()
    assert "could not be measured: evaluate is a int" in capsys.readouterr().out


def test_the_best_checkpoint_comes_back_with_the_structure_it_had(tmp_path):
    scores = iter([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    seen = []

    class Note(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append((weights_of(garden), garden.epoch))

    trainer, garden = make_trainer(
        tmp_path,
        plan={0: PLAN[0], 3: PLAN[1]},
        callbacks=[Note()],
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="wanted",
        greater_is_better=True,
    )
    trainer.compute_metrics = lambda _: {"wanted": next(scores)}
    trainer.train()
    best, epoch = seen[1]
    assert seen[-1][0].keys() != best.keys()
    assert weights_of(garden).keys() == best.keys()
    assert all(torch.equal(value, best[name]) for name, value in weights_of(garden).items())
    assert garden.epoch == epoch == 2
    held = {id(p) for group in garden.model.link.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in garden.parameters()}


def test_columns_and_losses_are_those_of_the_bare_model(tmp_path):
    """Labels are told from columns by the host's signature; smoothed ones are shifted by its
    name.
    """
    options = {"label_smoothing_factor": 0.1, "epochs": 1}
    rows = [{**row, "text": "a column that forward does not take"} for row in ROWS]
    trainer, garden = make_trainer(tmp_path / "grown", rows=rows, plan={}, **options)
    bare = transformers.Trainer(
        tiny_llama(), trainer.args, train_dataset=rows, eval_dataset=ROWS[:8]
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(bare.evaluate()["eval_loss"], rel=1e-6)
    assert trainer.train().training_loss == pytest.approx(bare.train().training_loss, rel=1e-6)
    assert all(
        torch.equal(p, q)
        for p, q in zip(garden.model.host.parameters(), bare.model.parameters(), strict=True)
    )


def test_a_model_of_ones_own_is_only_given_what_its_forward_takes(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, input_ids, labels=None):
            logits = self.head(self.embed(input_ids))
            loss = (
                None
                if labels is None
                else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            )
            return {"loss": loss, "logits": logits}

    garden = esper.grow(
        Own(), slots="embed", example={"input_ids": TEXTS[:2]}, policy=script({0: PLAN[0]})
    )
    args = make_trainer(tmp_path, epochs=2)[0].args
    trainer = transformers.Trainer(garden.model, args, train_dataset=ROWS, eval_dataset=ROWS[:8])
    growing.join(trainer, garden, lambda: garden.model(TEXTS[:8])["logits"].square().mean((1, 2)))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert garden.model.active_seeds == 1


def test_tied_weights_are_saved_and_resumed(tmp_path):
    trainer, garden = make_trainer(tmp_path, model=tiny_llama(tie_word_embeddings=True), epochs=2)
    trainer.train()
    resumed, again = make_trainer(tmp_path, model=tiny_llama(tie_word_embeddings=True), epochs=2)
    resumed.train(resume_from_checkpoint=True)
    assert_same(garden, again)
    assert again.model.host.lm_head.weight is again.model.host.model.embed_tokens.weight


def test_a_checkpoint_without_a_garden_is_refused(tmp_path):
    plain = transformers.Trainer(
        tiny_llama(), make_trainer(tmp_path, epochs=1)[0].args, train_dataset=ROWS
    )
    plain.train()
    with pytest.raises(SaveError, match=r"checkpoint-3.garden"):
        make_trainer(tmp_path)[0].train(resume_from_checkpoint=True)


def test_generation_is_configured_as_the_trainer_was_told(tmp_path):
    """Seq2SeqTrainer writes it onto the model that it is given, and the host generates."""
    garden = esper.grow(tiny_llama(), slots="model.layers.*", example={"input_ids": TEXTS[:2]})
    told = transformers.GenerationConfig(max_length=6)
    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), generation_config=told, use_cpu=True, report_to=[]
    )
    growing.join(transformers.Seq2SeqTrainer(garden.model, arguments), garden, lambda: None)
    assert garden.model.generation_config is garden.model.host.generation_config
    assert garden.model.generate(input_ids=TEXTS[:2, :3]).shape == (2, 6)


def test_a_trainer_of_another_model_is_refused(tmp_path):
    trainer, garden = make_trainer(tmp_path)
    other = transformers.Trainer(garden.model.host, trainer.args)
    with pytest.raises(SettingError, match="LlamaForCausalLM"):
        growing.join(other, garden, lambda: None)


def test_a_trainer_that_shards_its_model_is_refused_before_it_is_touched(tmp_path, monkeypatch):
    joined, garden = make_trainer(tmp_path)
    trainer = transformers.Trainer(garden.model, joined.args)
    before = len(trainer.callback_handler.callbacks)
    sharding = property(lambda self: accelerate.DistributedType.DEEPSPEED)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", sharding)
    with pytest.raises(SettingError, match=r"DEEPSPEED .*garden\.harvest"):
        growing.join(trainer, garden, lambda: None)
    assert len(trainer.callback_handler.callbacks) == before


@pytest.mark.parametrize("every", [0, 2.5, float("nan")])
def test_steps_between_two_of_the_garden_are_a_whole_number(every):
    with pytest.raises(SettingError, match=rf"every .*whole.* {every}"):
        Stepper(None, None, every)


# -- training losses -------------------------------------------------------------------------------


class Logged(transformers.TrainerCallback):
    """The losses that the Trainer logs itself, with the optimiser's step."""

    def __init__(self):
        self.losses = {}

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"])


@pytest.mark.parametrize("batches", [1, 2], ids=["plain", "accumulated"])
def test_the_garden_is_given_the_mean_training_loss_of_each_epoch(tmp_path, batches):
    logged = Logged()
    trainer, garden = make_trainer(
        tmp_path,
        epochs=3,
        callbacks=[logged],
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="no",
        gradient_accumulation_steps=batches,
    )
    trainer.train()
    measured = [event for event in garden.history if isinstance(event, HostEpoch)]
    steps = trainer.state.global_step // 3
    for epoch, event in enumerate(measured):
        of_epoch = [logged.losses[epoch * steps + step] for step in range(1, steps + 1)]
        assert event.train_loss == pytest.approx(sum(of_epoch) / steps, abs=1e-4)
    assert len(measured) == 3


def test_the_trainers_own_log_has_what_grew(tmp_path):
    trainer, garden = make_trainer(tmp_path)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "growth/params" in row]
    assert len(logged) == garden.epoch
    assert logged[-1]["growth/params"] == garden.model.total_params
    assert logged[-1]["growth/fossils"] == garden.model.fossilized_seeds > 0
    epochs = [event for event in garden.history if isinstance(event, HostEpoch)]
    assert [row["growth/held_out_loss"] for row in logged] == [e.held_out_loss for e in epochs]


def test_the_names_that_lightning_puts_into_a_callback_are_free():
    assert not {"log", "log_dict", "trainer"} & set(dir(Stepper))
