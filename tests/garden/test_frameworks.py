"""Growing in two processes under what people really use:

accelerate and transformers' Trainer, with gloo.
"""

import pytest
import torch
from torch import nn

import esper
from garden.test_processes import HELD_OUT, IMAGES, PLAN, digest
from simic.team_workers import assert_ended_well, run_ranks
from user_models import PLANT_FIRST, grow_cnn, losses_of, script

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _no_state_of_earlier_tests():
    """accelerate keeps one state per process, which says how many there are, and ranks are forks of
    this one.
    """
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("attaches", ["before", "after"])
def test_accelerate_keeps_two_processes_equal(attaches, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def live(rank):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == 2
        garden = grow_cnn(PLAN, scale=0.5, max_seeds=4, attach=False)
        optimizer = torch.optim.SGD(garden.parameters(), lr=0.05, momentum=0.9)
        if attaches == "before":
            garden.attach(optimizer)
        loader = torch.utils.data.DataLoader(IMAGES, 8)
        model, optimizer, loader = accelerator.prepare(garden.model, optimizer, loader)
        if attaches == "after":
            garden.attach(optimizer)
        found = []
        for _ in range(7):
            for images in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(losses_of(model, images).mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(garden.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            garden.step(
                lambda: accelerator.gather_for_metrics(losses_of(garden.model, HELD_OUT[rank::2]))
            )
            found.append(digest(garden.model))
        assert garden.model.fossilized_seeds
        return found, garden.model.link.steps

    ended = run_ranks(tmp_path, 2, live)
    assert_ended_well(ended)
    assert ended[0].value == ended[1].value
    assert len(set(ended[0].value[0])) == 7


def test_accelerates_states_bring_two_processes_back(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from esper.integrations.accelerate import join

    def train(rank, accelerator, start=None):
        torch.manual_seed(rank)
        garden = grow_cnn(PLAN, scale=0.5, max_seeds=4, attach=False)
        average, optimizer = garden.ema(0.9), torch.optim.AdamW(garden.parameters(), lr=1e-2)
        garden.attach(optimizer)
        loader = torch.utils.data.DataLoader(IMAGES, 8, shuffle=True)
        model, optimizer, loader = accelerator.prepare(garden.model, optimizer, loader)
        join(accelerator, garden)
        if start is not None:
            accelerator.load_state(str(tmp_path / str(start)))
        found = {}
        for epoch in range(garden.epoch, 7):
            loader.set_epoch(epoch)
            for images in loader:
                optimizer.zero_grad()
                accelerator.backward(losses_of(model, images).mean())
                optimizer.step()
            garden.step(lambda: losses_of(garden.model, HELD_OUT[rank::2]))
            with average.applied():
                averaged = digest(garden.model)
            found[epoch] = digest(garden.model), averaged, garden.history[-1]
            if start is None:
                accelerator.save_state(str(tmp_path / str(epoch)))
        return found

    def live(rank):
        # without it and `set_epoch` accelerate itself begins with the first order again after
        # load_state
        loaders = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loaders)
        whole = train(rank, accelerator)
        again = {}
        for start in (3,):
            accelerator.free_memory()
            accelerator._save_model_state_pre_hook.clear()
            accelerator._load_model_state_pre_hook.clear()
            again[start] = train(rank, accelerator, start)
        return whole, again

    ended = run_ranks(tmp_path, 2, live, seconds=80)
    assert_ended_well(ended)
    assert ended[0].value == ended[1].value
    whole, again = ended[0].value
    for start, found in again.items():
        assert found == {epoch: whole[epoch] for epoch in range(start + 1, 7)}


def test_the_trainer_keeps_two_processes_equal_and_resumes_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    from esper.integrations.transformers import join

    sizes = {
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    texts = torch.randint(16, (48, 8), generator=torch.Generator().manual_seed(1))
    settings = {
        "save_strategy": "epoch",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }

    class Note(transformers.TrainerCallback):
        def on_save(self, args, state, control, model, **kwargs):
            self.found[state.global_step] = digest(model)

    def train(rank, note, **options):
        torch.manual_seed(rank)  # rank 0's weights are everybody's
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, **sizes))
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=3,
            per_device_train_batch_size=8,
            use_cpu=True,
            **settings,
        )
        garden = esper.grow(
            model,
            slots="transformer.h.*",
            example={"input_ids": texts[:2]},
            policy=script({0: PLANT_FIRST}),
        )

        def evaluate():
            rows = texts[rank::2]
            logits = garden.model(input_ids=rows).logits[:, :-1].transpose(1, 2)
            return nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)

        rows = [{"input_ids": row, "labels": row} for row in texts]
        trainer = transformers.Trainer(
            garden.model, arguments, train_dataset=rows, callbacks=[note]
        )
        join(trainer, garden, evaluate)
        trainer.train(**options)
        return garden.model.total_params - garden.model.host_params, arguments.world_size

    def live(rank):
        whole, resumed = Note(), Note()
        whole.found, resumed.found = {}, {}
        grown, processes = train(rank, whole)
        train(rank, resumed, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
        return whole.found, resumed.found, grown, processes

    ended = run_ranks(tmp_path, 2, live)
    assert_ended_well(ended)
    assert ended[0].value == ended[1].value
    whole, resumed, grown, processes = ended[0].value
    assert processes == 2
    assert grown > 0
    assert [*whole] == [3, 6, 9]
    assert len(set(whole.values())) == 3
    assert resumed == {9: whole[9]}
