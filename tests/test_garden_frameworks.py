"""Growing in two processes under what people really use: accelerate and transformers' Trainer, with gloo."""

import pytest
import torch
from torch import nn

import esper
from simic.team_workers import assert_ended_well, run_ranks
from test_garden_processes import HELD_OUT, IMAGES, PLAN, digest
from user_models import PLANT_FIRST, grow_cnn, losses_of, script

pytestmark = pytest.mark.ranks


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
            garden.step(lambda: accelerator.gather_for_metrics(losses_of(garden.model, HELD_OUT[rank::2])))
            found.append(digest(garden.model))
        assert garden.model.fossilized_seeds
        return found, garden.model.link.steps

    ended = run_ranks(tmp_path, 2, live)
    assert_ended_well(ended)
    assert ended[0].value == ended[1].value
    assert len(set(ended[0].value[0])) == 7


def test_the_trainer_keeps_two_processes_equal(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    texts = torch.randint(16, (48, 8), generator=torch.Generator().manual_seed(1))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, **sizes))

    class Growth(transformers.TrainerCallback):
        def __init__(self, garden, rank):
            self.garden, self.rank, self.found = garden, rank, []

        def evaluate(self):
            rows = texts[self.rank :: 2]
            logits = self.garden.model(input_ids=rows).logits[:, :-1].transpose(1, 2)
            return nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)

        def on_epoch_end(self, args, state, control, **kwargs):
            self.garden.step(self.evaluate)
            self.found.append(digest(self.garden.model))

    def live(rank):
        garden = esper.grow(
            model, slots="transformer.h.*", example={"input_ids": texts[:2]}, policy=script({0: PLANT_FIRST})
        )
        optimizer = torch.optim.AdamW(garden.parameters(), lr=2e-3)
        garden.attach(optimizer)  # before the process group is joined
        callback = Growth(garden, rank)
        quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=4,
            per_device_train_batch_size=8,
            remove_unused_columns=False,
            use_cpu=True,
            **quiet,
        )
        rows = [{"input_ids": row, "labels": row} for row in texts]
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        transformers.Trainer(
            garden.model, arguments, train_dataset=rows, callbacks=[callback], optimizers=(optimizer, scheduler)
        ).train()
        return callback.found, garden.model.total_params, arguments.world_size

    ended = run_ranks(tmp_path, 2, live)
    assert_ended_well(ended)
    assert ended[0].value == ended[1].value
    found, size, processes = ended[0].value
    assert processes == 2
    assert len(set(found)) == 4
    assert size > sum(p.numel() for p in model.parameters())
