"""Growing in several processes:

all of them hold the same network to the bit, and it is the one that one would have.
"""

import gc
import hashlib
import os
import re
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import esper
from esper.leyline.errors import EsperError, HostError, MeasurementError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.telemetry.events import HostEpoch, SeedMeasured
from simic.team_workers import assert_ended_well, run_ranks
from user_models import (
    CNN,
    MLP,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    random_vectors,
    script,
    train_epoch,
)

pytestmark = pytest.mark.ranks
IMAGES, HELD_OUT = random_images(64, seed=1), random_images(40, seed=2)
VECTORS, OTHERS = random_vectors(64, seed=1), random_vectors(40, seed=2)
MLP_OPTIONS = {
    "slots": ["enter", "middle"],
    "example": VECTORS[:2],
    "blueprints": ["mlp", "lora"],
    "max_seeds": 4,
}
PLAN = {0: PLANT_FIRST, 1: (1, 1, 2, 0), 4: (1, 0, 2, 0), 6: (2, 0, 0, 0)}
"""plant in both slots, later once more in the first, and cull that one"""


def digest(model):
    """Of every tensor by name: equal only where all are, to the bit."""
    state = [
        (name, value.detach().numpy().tobytes())
        for name, value in sorted(model.state_dict().items())
    ]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def in_group(work):
    """`work(rank)` in a process group of gloo."""

    def live(rank):
        torch.manual_seed(100 * rank)  # processes need not start alike
        distributed.init_process_group("gloo")
        try:
            return work(rank)
        finally:
            # a DDP that outlives its group waits for gloo's thread with the GIL, for which that may
            # wait
            gc.collect()
            distributed.destroy_process_group()

    return live


def values_of(tmp_path, work, size=2, **options):
    ended = run_ranks(tmp_path / f"ranks-{size}", size, work, **options)
    assert_ended_well(ended)
    return [rank.value for rank in ended]


def own_rows(inputs):
    """This process's part of a batch."""
    return (
        inputs[distributed.get_rank() :: distributed.get_world_size()]
        if distributed.is_initialized()
        else inputs
    )


def learn_plainly(optimizer, call, rows):
    losses_of(call, own_rows(rows)).mean().backward()
    optimizer.step()


def learn_in_parts(optimizer, call, rows):
    """Two passes for a step, the first without DDP's reduction; then all gradients are clipped."""
    first, second = rows.split(len(rows) // 2)
    with call.no_sync():
        (losses_of(call, own_rows(first)).mean() / 2).backward()
    (losses_of(call, own_rows(second)).mean() / 2).backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
    optimizer.step()


class Scaled:
    """Half precision's way: a step in which one process's gradients overflow is skipped by all."""

    def __init__(self):
        self.scaler, self.steps = torch.amp.GradScaler("cpu", init_scale=2.0**10), 0

    def __call__(self, optimizer, call, rows):
        self.steps += 1
        loss = losses_of(call, own_rows(rows)).mean()
        is_lost = self.steps % 5 == 0 and distributed.get_rank() == 1
        self.scaler.scale(loss * (float("inf") if is_lost else 1.0)).backward()
        self.scaler.step(optimizer)
        self.scaler.update()


def train(garden, call, learn, epochs=8, inputs=IMAGES, held_out=HELD_OUT, batch=16):
    """Digests of the parameters after every step of the optimiser, and of the whole network after
    every epoch.
    """
    optimizer, found = garden.model.link.optimizer, []
    for epoch in range(epochs):
        garden.model.train()
        for rows in torch.randperm(
            len(inputs), generator=torch.Generator().manual_seed(epoch)
        ).split(batch):
            optimizer.zero_grad()
            learn(optimizer, call, inputs[rows])
            found.append(float(sum(p.detach().double().sum() for p in garden.parameters())))
        garden.step(lambda: losses_of(garden.model, own_rows(held_out)))
        found.append(digest(garden.model))
    return found


@pytest.mark.parametrize(
    "learn", [learn_plainly, learn_in_parts, Scaled()], ids=["plain", "accumulated", "scaled"]
)
def test_all_processes_hold_the_same_network_after_every_step(learn, tmp_path):
    def live(rank):
        garden = grow_cnn(
            PLAN,
            scale=0.5,
            max_seeds=4,
            blueprints=["conv_light", "copy"],
            slots=["layer1", "layer2"],
        )
        found = train(garden, DistributedDataParallel(garden.model), learn)
        return found, garden.model.total_params, [str(event) for event in garden.history]

    first, second = values_of(tmp_path, in_group(live))
    assert first == second
    assert len(set(first[0])) > 30


def train_mlp(policy, rank=None):
    """Without batch norm, whose statistics are each process's own."""
    torch.manual_seed(0)
    settings = GrowthSettings(lengths=StageLengths(ramp=2), scale_at_birth=0.5)
    garden = esper.grow(MLP(), policy=policy, settings=settings, **MLP_OPTIONS)
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=3e-3))
    call = garden.model if rank is None else DistributedDataParallel(garden.model)
    train(garden, call, learn_plainly, epochs=6, inputs=VECTORS, held_out=OTHERS)
    weights = {name: value.detach() for name, value in garden.model.named_parameters()}
    measured = [
        e.contribution
        for e in garden.history
        if isinstance(e, SeedMeasured) and e.contribution is not None
    ]
    return weights, measured, garden.ledger.counts(), garden.history


@pytest.mark.parametrize("policy", [script(PLAN), "heuristic"], ids=["script", "heuristic"])
def test_two_processes_grow_the_network_that_one_grows(policy, tmp_path):
    alone, gains, counts, history = train_mlp(policy)
    for weights, found, own_counts, told in values_of(
        tmp_path, in_group(partial(train_mlp, policy))
    ):
        assert weights.keys() == alone.keys()
        assert (
            max(float((weights[name] - value).abs().max()) for name, value in alone.items()) < 1e-5
        )
        assert found == pytest.approx(gains, abs=1e-5)
        assert own_counts == counts
        assert [type(event) for event in told] == [type(event) for event in history]


def test_examples_that_every_process_measured_count_once(tmp_path):
    def live(rank):
        garden, counts = (
            grow_cnn({0: PLANT_FIRST}, scale=0.5, keeps=False),
            [],
        )
        for held_out in (HELD_OUT, HELD_OUT, HELD_OUT, own_rows(HELD_OUT)):
            train_epoch(
                DistributedDataParallel(garden.model),
                garden.model.link.optimizer,
                0,
                own_rows(IMAGES),
            )
            garden.step(lambda held_out=held_out: losses_of(garden.model, held_out))
            counts.append(getattr(garden.model.slot("r0c0").state.contribution, "examples", None))
        return counts

    assert values_of(tmp_path, in_group(live)) == [[None, None, len(HELD_OUT), len(HELD_OUT)]] * 2


class Moody:
    """A policy that draws lots of its own, and is asked in the first process only."""

    def decide(self, observation, masks, reports, memory, signals):
        assert distributed.get_rank() == 0
        return np.array([(1, int(torch.randint(2, ())), 1, 0)]), {
            "asked": (memory or {"asked": 0})["asked"] + 1
        }


def test_the_first_process_decides_for_all(tmp_path):
    def live(rank):
        garden = grow_cnn(policy=lambda facts: Moody())
        for _ in range(3):
            garden.step(made_up(garden))
        return garden.memory, digest(garden.model)

    first, second = values_of(tmp_path, in_group(live))
    assert first == second
    assert first[0] == {"asked": 3}


def refusal(work):
    try:
        work()
    except EsperError as problem:
        return type(problem), str(problem)
    return None


def test_processes_that_drifted_apart_are_refused_everywhere(tmp_path):
    """Without DDP nobody averages the host's gradients."""

    def live(rank):
        garden = grow_cnn()
        train_epoch(garden.model, garden.model.link.optimizer, 0, own_rows(IMAGES))
        return refusal(lambda: garden.step(made_up(garden)))

    for kind, text in values_of(tmp_path, in_group(live)):
        assert kind is SettingError
        assert re.search(r"rank 1 .*host\.layer1.*DistributedDataParallel\(garden\.model\)", text)


def test_a_failure_of_one_process_is_everybodys(tmp_path):
    def live(rank):
        garden = grow_cnn()
        return refusal(lambda: garden.step(lambda: torch.ones(3) / (1 - rank)))

    other, own = values_of(tmp_path, in_group(live))
    assert (own[0], other[0]) == (MeasurementError, MeasurementError)
    assert re.match("evaluate.*NaN", own[1])
    assert re.match("rank 1 .*NaN", other[1])


def test_scores_on_one_process_and_losses_on_another_are_refused_everywhere(tmp_path):
    """Added up they would be evidence of mixed signs."""

    def live(rank):
        garden = grow_cnn()
        values = [torch.rand(6), torch.rand(6) > 0.5][rank]
        return refusal(lambda: garden.step(lambda: values))

    for kind, text in values_of(tmp_path, in_group(live)):
        assert kind is MeasurementError
        assert "returned scores on rank 1 and losses on rank 0" in text


def test_seeds_that_a_process_does_not_reach_get_the_others_gradients(tmp_path):
    """As DDP has it with find_unused_parameters."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.around = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, vectors, goes_in=True):
            return self.around(self.inner(vectors) if goes_in else vectors)

    def live(rank):
        garden = esper.grow(
            Fork(),
            slots="inner",
            example=VECTORS[:2],
            blueprints=["mlp"],
            policy=script({0: PLANT_FIRST}),
            settings=GrowthSettings(scale_at_birth=1.0),
        )
        garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
        garden.step(lambda: losses_of(garden.model, OTHERS))
        call = DistributedDataParallel(garden.model, find_unused_parameters=True)
        losses_of(lambda vectors: call(vectors, goes_in=rank == 0), VECTORS).mean().backward()
        return [p.grad for p in garden.model.slots.parameters()]

    first, second = values_of(tmp_path, in_group(live))
    assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True))
    assert any(gradient.abs().sum() > 0 for gradient in second)


def test_a_save_of_all_processes_goes_on_in_all_of_them(tmp_path):
    """As the run that was not interrupted, to the bit; DDP is built around fossils and a live seed
    here.
    """

    def live(rank):
        garden = grow_cnn(PLAN, scale=0.5, max_seeds=4)
        call = DistributedDataParallel(garden.model)
        train(garden, call, learn_plainly, epochs=5)
        garden.save(tmp_path / "save")
        distributed.barrier()
        again = esper.load(tmp_path / "save", CNN(), policy=script(PLAN))
        again.attach(torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9))
        assert again.model.fossilized_seeds
        assert again.model.active_seeds
        return train(garden, call, learn_plainly, epochs=3), train(
            again, DistributedDataParallel(again.model), learn_plainly, epochs=3
        )

    (whole, resumed), other = values_of(tmp_path, in_group(live))
    assert whole == resumed
    assert other == (whole, resumed)


def test_a_restore_waits_for_the_save_of_the_first_process(tmp_path):
    def live(rank):
        garden = grow_cnn(PLAN, scale=0.5, max_seeds=4)
        garden.save(tmp_path / "save")
        distributed.barrier()
        train(garden, DistributedDataParallel(garden.model), learn_plainly, epochs=2)
        if rank == 0:
            time.sleep(1.0)
        garden.save(tmp_path / "save")
        garden.restore(tmp_path / "save")
        return garden.epoch, digest(garden.model)

    first, second = values_of(tmp_path, in_group(live))
    assert first == second
    assert first[0] == 2


def test_incubated_seeds_learn_the_same_everywhere(tmp_path):
    def live(rank):
        garden = grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(training=2))
        call = DistributedDataParallel(garden.model)
        garden.step(made_up(garden))
        optimizer = garden.model.link.optimizer
        for rows in IMAGES.split(16):
            optimizer.zero_grad()
            losses_of(call, own_rows(rows)).mean().backward()
            garden.shadow(lambda rows=rows: losses_of(garden.model, own_rows(rows)).mean())
            optimizer.step()
        events = garden.step(lambda: losses_of(garden.model, own_rows(HELD_OUT)))
        return digest(garden.model), [str(event) for event in events]

    first, second = values_of(tmp_path, in_group(live))
    assert first == second


def test_a_sharded_model_is_refused_with_the_reason(tmp_path):
    def live(rank):
        from torch.distributed.fsdp import fully_shard

        host, garden = CNN(), grow_cnn(attach=False)
        fully_shard(host)
        fully_shard(garden.model)
        optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
        return [
            refusal(lambda: esper.grow(host, slots="layer1", example=random_images(2))),
            refusal(lambda: garden.attach(optimizer)),
        ]

    for told in values_of(tmp_path, in_group(live)):
        assert [kind for kind, _ in told] == [HostError, HostError]
        assert all(
            re.search(r"DTensor.*DistributedDataParallel\(garden\.model\)", text)
            for _, text in told
        )


@pytest.mark.parametrize("told", ["1", "", "2"])
def test_a_process_that_joined_nobody_grows_alone(told, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", told)
    garden = grow_cnn({0: PLANT_FIRST})
    for epoch in range(2):
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    assert [e.epoch for e in garden.history if isinstance(e, HostEpoch)] == [1, 2]
    assert "RANK" not in os.environ


def report_of(folder, rank=0):
    torch.manual_seed(0)
    garden = esper.grow(MLP(), policy=script(PLAN), **MLP_OPTIONS)
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=3e-3))
    garden.record(folder)
    call = DistributedDataParallel(garden.model) if distributed.is_initialized() else garden.model
    train(garden, call, learn_plainly, 5, VECTORS, OTHERS)
    garden.model.host.register_buffer("own", torch.tensor(float(rank)))
    report = garden.report()
    assert float(garden.model.host.own) == rank
    return report, garden.run is not None


def test_a_report_is_of_all_processes_and_the_first_one_records_it(tmp_path):
    alone, _ = report_of(None)
    (first, is_first), (second, is_second) = values_of(
        tmp_path, in_group(partial(report_of, tmp_path / "run"))
    )
    assert (is_first, is_second) == (True, False)
    assert first.examples == second.examples == alone.examples == len(OTHERS)
    for report in (first, second):
        assert (report.whole, report.without_all) == pytest.approx(
            (alone.whole, alone.without_all), abs=1e-5
        )
        assert [part["gain"] for part in report.parts] == pytest.approx(
            [part["gain"] for part in alone.parts], abs=1e-5
        )
        assert report.spent == alone.spent
    lines = (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()
    assert sum("HostEpoch" in line for line in lines) == 5
    assert sum("GrowthReported" in line for line in lines) == 1
