"""Grow a model under Hugging Face's Trainer: one callback, the Trainer does the rest (a tiny GPT-2, Python source)."""

import argparse
import inspect
import typing

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import esper


class GrowthCallback(TrainerCallback):
    """Steps the garden after every epoch. Give the Trainer `garden.model` and the attached optimiser."""

    def __init__(self, garden, evaluate):
        self.garden, self.evaluate = garden, evaluate

    def on_epoch_end(self, args, state, control, **kwargs):
        for event in self.garden.step(self.evaluate):
            print(event)


def main(epochs: int, texts: int, context: int = 32, folder: str = "runs/trainer") -> None:
    torch.manual_seed(0)  # first, so that all processes hold out the same rows
    text = torch.tensor(list(inspect.getsource(typing).encode()))
    rows = text[: len(text) // context * context].view(-1, context)[torch.randperm(len(text) // context)]
    held_out, rows = rows[:32], [{"input_ids": row, "labels": row} for row in rows[32 : 32 + texts]]
    config = {"n_positions": context, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **config))

    garden = esper.grow(model, slots="transformer.h.*", example={"input_ids": held_out[:2]}, budget=1.6)
    optimizer = torch.optim.AdamW(garden.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(rows) // 16)
    garden.attach(optimizer, scheduler)

    def evaluate():
        logits = garden.model(input_ids=held_out).logits[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, held_out[:, 1:], reduction="none").mean(1)

    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=16, remove_unused_columns=False, **quiet
    )
    callback = GrowthCallback(garden, evaluate)
    Trainer(
        garden.model, arguments, train_dataset=rows, callbacks=[callback], optimizers=(optimizer, scheduler)
    ).train()
    plain = garden.harvest()
    print(f"{type(plain).__name__}: {model.num_parameters():,} -> {plain.num_parameters():,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--texts", type=int, default=1000)
    main(**vars(parser.parse_args()))
