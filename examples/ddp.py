"""Grow in several processes:

DDP around garden.model, once. Start it alone, or with torchrun --nproc-per-node 2.
"""

import argparse
import hashlib
import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import esper


def main(epochs: int, weights: str | None) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(2400, 2) * 2 - 1
    y = (x.prod(1) > 0).long()
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))

    settings = esper.GrowthSettings(epochs=epochs)  # the last epoch judges what has grown
    garden = esper.grow(model, slots=["0"], example=x[:8], budget=20.0, settings=settings)
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-2)
    garden.attach(optimizer)
    wrapped = DistributedDataParallel(garden.model) if size > 1 else garden.model

    def losses(call, rows):
        return nn.functional.cross_entropy(call(x[rows]), y[rows], reduction="none")

    held_out = torch.arange(2000, 2400)[
        rank::size
    ]  # each process measures its own part of the held-out examples
    for _ in range(epochs):
        for batch in torch.randperm(2000).split(
            80
        ):  # the same in all processes; each takes its part
            optimizer.zero_grad()
            losses(wrapped, batch[rank::size]).mean().backward()
            optimizer.step()
        for event in garden.step(lambda: losses(garden.model, held_out)):
            if rank == 0:
                print(event)

    state = {name: p.detach() for name, p in garden.model.named_parameters()}
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in state.values())).hexdigest()
    print(
        f"rank {rank}: {garden.model.total_params:,} parameters, digest {digest[:16]}\n",
        end="",
        flush=True,
    )
    if weights and rank == 0:
        torch.save(state, weights)
    if size > 1:
        del wrapped  # before its group: see docs/processes.md
        distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--weights", help="a file for all parameters, to compare runs")
    main(**vars(parser.parse_args()))
