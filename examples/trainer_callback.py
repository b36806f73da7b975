"""Grow a model under Hugging Face's Trainer, killed and resumed as you like (a tiny Llama, Python
source).
"""

import argparse
import inspect
import typing

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import esper
from esper.integrations.transformers import join


def main(
    epochs: int, texts: int, resume: bool, context: int = 32, folder: str = "runs/trainer"
) -> None:
    torch.manual_seed(0)  # first, so that all processes hold out the same rows
    text = torch.tensor(list(inspect.getsource(typing).encode()))
    rows = text[: len(text) // context * context].view(-1, context)[
        torch.randperm(len(text) // context)
    ]
    held_out, rows = rows[:32], [{"input_ids": row, "labels": row} for row in rows[32 : 32 + texts]]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=context, **sizes))

    garden = esper.grow(
        model, slots="model.layers.*", example={"input_ids": held_out[:2]}, budget=1.6
    )
    ema = garden.ema(0.99)

    def evaluate():
        logits = garden.model(input_ids=held_out).logits[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, held_out[:, 1:], reduction="none").mean(1)

    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    held_out_rows = [{"input_ids": row, "labels": row} for row in held_out]
    trainer = Trainer(garden.model, arguments, train_dataset=rows, eval_dataset=held_out_rows)
    join(trainer, garden, evaluate)
    trainer.train(resume_from_checkpoint=resume)

    with ema.applied():
        print("averaged:", trainer.evaluate()["eval_loss"])
    plain = garden.harvest()
    print(
        f"{type(plain).__name__}: {model.num_parameters():,} -> "
        f"{plain.num_parameters():,} parameters"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    main(**vars(parser.parse_args()))
