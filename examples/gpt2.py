"""Grow a small GPT-2 from transformers on the source code of Python's own standard library (bytes
as tokens).
"""

import argparse
import inspect
import json
import typing

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import esper


def main(epochs: int, steps: int, context: int = 64) -> None:
    text = torch.tensor(list((inspect.getsource(typing) + inspect.getsource(json)).encode()))
    cut = len(text) * 9 // 10
    held_out = text[cut:][: (len(text) - cut) // context * context].view(-1, context)[:64]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=context,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)

    garden = esper.grow(
        model,
        slots="transformer.h.*",
        example={"input_ids": held_out[:2]},
        budget=1.8,
        settings=esper.GrowthSettings(epochs=epochs),  # the last epoch judges what has grown
    )
    optimizer = torch.optim.AdamW(garden.parameters(), lr=2e-3)
    garden.attach(optimizer)

    def losses(tokens: torch.Tensor) -> torch.Tensor:
        logits = garden.model(input_ids=tokens).logits[:, :-1]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )

    for _ in range(epochs):
        garden.model.train()
        for _ in range(steps):
            starts = torch.randint(0, cut - context, (16,))
            loss = losses(text[starts[:, None] + torch.arange(context)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # the tokens of a text depend on each other, so one value per text, not per token, is the
        # honest evidence
        for event in garden.step(lambda: losses(held_out).view(len(held_out), -1).mean(1)):
            print(event)

    plain = garden.harvest()
    print(
        f"{type(plain).__name__}: {model.num_parameters():,} -> "
        f"{plain.num_parameters():,} parameters"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
