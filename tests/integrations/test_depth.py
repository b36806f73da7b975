"""Networks that get deeper under accelerate, the Trainer and Lightning: saved, resumed, in processes."""

import json

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader

from esper.leyline.errors import SaveError, SettingError
from garden.depths import (
    LENGTH,
    PLAN,
    ROWS,
    STEPS,
    TOTAL,
    batch,
    build,
    loss_of,
    schedule,
    sgd,
    split,
    train,
    values_of,
)
from garden.test_depth_ranks import alone, assert_close, build_exact, own_share
from garden.test_processes import in_group
from garden.test_processes import values_of as values_of_ranks
from integrations.test_transformers import tiny_llama

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
SIZES = {"layers": "model.layers", "to": 4, "total": 24 * 8, "plan": PLAN}


@pytest.fixture(autouse=True)
def no_accelerator_before():
    """accelerate keeps one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- accelerate ------------------------------------------------------------------------------------


class Loop:
    """A loop as accelerate's manual has it."""

    def __init__(self, seed=0, optimizers_of=split, model=None, **options):
        from esper.integrations.accelerate import join_depth

        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.network = build(seed=seed) if model is None else model
        prepared = self.accelerator.prepare(self.network, *optimizers_of(self.network))
        self.model, *self.optimizers = prepared
        self.depth = schedule(self.model, self.optimizers)
        join_depth(self.accelerator, self.depth)

    def train(self, steps):
        for number in steps:
            tokens = batch(number)
            if distributed.is_initialized():
                tokens = tokens[own_share()]
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.accelerator.backward(loss_of(self.model, tokens))
            for optimizer in self.optimizers:
                optimizer.step()
            self.depth.step(tokens=ROWS * LENGTH)
        return self


@pytest.mark.parametrize("stop", [4, 8])
def test_a_state_of_accelerate_resumes_bit_for_bit_across_a_growth(stop, tmp_path):
    loop = Loop().train(range(stop))
    loop.accelerator.save_state(str(tmp_path))
    assert json.loads((tmp_path / "depth.json").read_text())["grown"] == loop.depth.grown
    loop.train(range(stop, STEPS))
    again = Loop(seed=7)
    again.accelerator.load_state(str(tmp_path))
    again.train(range(stop, STEPS))
    assert again.depth.grown == [3, 4]
    assert equal(values_of(loop.network), values_of(again.network))


def test_a_state_without_a_schedule_or_with_a_damaged_one_is_refused(tmp_path):
    loop = Loop()
    loop.accelerator.save_state(str(tmp_path))
    (tmp_path / "depth.json").write_text('{"tok')
    with pytest.raises(SaveError, match="is damaged"):
        Loop().accelerator.load_state(str(tmp_path))
    (tmp_path / "depth.json").unlink()
    with pytest.raises(SaveError, match=r"has no depth\.json"):
        Loop().accelerator.load_state(str(tmp_path))


def test_accelerates_accumulation_and_half_precision_train_through_a_growth():
    loop = Loop(mixed_precision="bf16", gradient_accumulation_steps=2)
    for number in range(STEPS):
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loss_of(loop.model, batch(number)))
            for optimizer in loop.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if loop.accelerator.sync_gradients:
                loop.depth.step(tokens=2 * ROWS * LENGTH)
    assert loop.depth.grown == [3, 4]
    states = [optimizer.optimizer.state for optimizer in loop.optimizers]
    assert all(any(p in state for state in states) for p in loop.network.parameters())


@pytest.mark.ranks
def test_accelerate_with_ddp_is_the_run_of_one_process(tmp_path):
    def work(rank):
        loop = Loop(model=build_exact())
        assert type(loop.model).__name__ == "DistributedDataParallel"
        loop.train(range(9))
        loop.accelerator.save_state(str(tmp_path / "state"))
        loop.train(range(9, STEPS))
        again = Loop(model=build(seed=3).double())
        again.accelerator.load_state(str(tmp_path / "state"))
        again.train(range(9, STEPS))
        assert equal(values_of(loop.network), values_of(again.network))
        return values_of(loop.network)

    one, other = values_of_ranks(tmp_path, in_group(work))
    assert equal(one, other)
    assert_close(one, alone())


@pytest.mark.ranks
def test_accelerate_with_fsdp2_is_the_run_of_one_process(tmp_path):
    """accelerate turns FSDP on for accelerators only, so its state is told to."""

    def work(rank):
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        plugin.transformer_cls_names_to_wrap = ["Block"]
        accelerator = accelerate.Accelerator(cpu=True)
        shared = accelerate.state.AcceleratorState._shared_state
        shared["distributed_type"] = accelerate.DistributedType.FSDP
        shared["fsdp_plugin"] = plugin
        network = build_exact()
        model, optimizer = accelerator.prepare(network, *sgd(network))
        depth = schedule(model, optimizer)
        for number in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch(number)[own_share()]))
            optimizer.step()
            depth.step(tokens=ROWS * LENGTH)
        assert depth.grown == [3, 4]
        kinds = {type(p.data).__name__ for p in model.parameters()}
        whole = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
        return whole, kinds

    (one, kinds), (other, _) = values_of_ranks(tmp_path, in_group(work))
    assert kinds == {"DTensor"}
    assert equal(one, other)
    assert_close(one, alone(optimizers_of=sgd))


# -- the Trainer -----------------------------------------------------------------------------------

TEXTS = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
TRAIN = [{"input_ids": row, "labels": row} for row in TEXTS]


def make_trainer(folder, model=None, **options):
    from esper.integrations.transformers_depth import join_depth

    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_strategy": "no",
        "report_to": [],
    }
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=3,
        learning_rate=5e-3,
        use_cpu=True,
        disable_tqdm=True,
        **{"per_device_train_batch_size": 4, **settings, **options},
    )
    trainer = transformers.Trainer(
        model or tiny_llama(), arguments, train_dataset=TRAIN, eval_dataset=TRAIN
    )
    depth = join_depth(trainer, tokens=4 * 8, **SIZES | {"total": 18 * 4 * 8})
    return trainer, depth


def test_a_trainers_model_gets_deeper_and_its_checkpoints_resume_bit_for_bit(tmp_path):
    trainer, depth = make_trainer(tmp_path)
    trainer.train()
    assert depth.grown == [3, 4]
    assert trainer.model.config.num_hidden_layers == 4
    for step in (4, 8, 14):
        again, resumed = make_trainer(tmp_path / "again")
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.grown == [3, 4]
        assert equal(values_of(trainer.model), values_of(again.model))
    folder = tmp_path / "checkpoint-18"
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert equal(values_of(loaded), values_of(trainer.model))


@pytest.mark.ranks
def test_a_trainer_with_ddp_deepens_all_processes_alike_and_resumes(tmp_path):
    def work(rank):
        def run(checkpoint=None):
            # 24 texts, 2 on each of 2 processes: 18 steps, as in one process
            options = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
            trainer, depth = make_trainer(tmp_path / "run", **options)
            trainer.train(resume_from_checkpoint=checkpoint)
            wrapper = type(trainer.model_wrapped).__name__
            return values_of(trainer.model), depth.grown, wrapper

        whole, grown, wrapper = run()
        resumed, again, _ = run(str(tmp_path / "run" / "checkpoint-8"))
        return whole, grown, again, wrapper, equal(whole, resumed)

    (one, *facts), (other, *others) = values_of_ranks(tmp_path, work, seconds=200)
    assert facts == others == [[3, 4], [3, 4], "DistributedDataParallel", True]
    assert equal(one, other)


def test_a_trainer_that_would_go_back_is_refused_and_so_is_another_checkpoint(tmp_path):
    with pytest.raises(SettingError, match="load_best_model_at_end"):
        make_trainer(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    trainer, _ = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    (tmp_path / "checkpoint-2" / "depth.json").unlink()
    again, _ = make_trainer(tmp_path)
    with pytest.raises(SaveError, match=r"has no depth\.json"):
        again.train(resume_from_checkpoint=True)


# -- Lightning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_lightnings_checkpoints_resume_bit_for_bit_across_a_growth(processes, tmp_path):
    lightning = pytest.importorskip("lightning")
    from esper.integrations.lightning_depth import DepthCallback

    rows = torch.cat([batch(number) for number in range(STEPS // 4)])

    class Module(lightning.LightningModule):
        def __init__(self, seed):
            super().__init__()
            self.network = build(seed=seed)
            self.automatic_optimization = False

        def training_step(self, tokens, index):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss_of(self.network, tokens))
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self):
            return split(self.network)

    def fit(folder, seed=0, ckpt_path=None):
        module = Module(seed)
        deepening = DepthCallback(
            module.network, layers="blocks", to=4, total=TOTAL, tokens=ROWS * LENGTH, plan=PLAN
        )
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            max_epochs=4,
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            callbacks=[saving, deepening],
            **quiet,
        )
        trainer.fit(module, DataLoader(rows, ROWS // processes), ckpt_path=ckpt_path)
        return values_of(module.network), deepening.depth.grown

    def work(rank):
        whole, grown = fit(tmp_path / "whole")
        paths = sorted((tmp_path / "whole").glob("*.ckpt"))
        assert len(paths) == 4
        same = []
        for number, path in enumerate(paths):
            values, again = fit(tmp_path / f"again-{number}", seed=5, ckpt_path=str(path))
            same.append(equal(values, whole) and again == grown == [3, 4])
        return same, whole

    if processes == 1:
        same, _ = work(0)
        assert same == [True] * len(same)
        return
    (same, one), (others, other) = values_of_ranks(tmp_path, work, seconds=200)
    assert same == others == [True] * len(same)
    assert equal(one, other)


@pytest.mark.slow
def test_lightning_refuses_a_checkpoint_without_a_schedule(tmp_path):
    lightning = pytest.importorskip("lightning")
    from esper.integrations.lightning_depth import DepthCallback

    network = build()
    module = lightning.LightningModule()
    module.network = network
    callback = DepthCallback(network, layers="blocks", to=4, total=TOTAL, tokens=8, plan=PLAN)
    trainer = lightning.Trainer(accelerator="cpu", logger=False)
    callback.setup(trainer, module, "fit")
    with pytest.raises(SaveError, match="no depth schedule, only epoch"):
        module.on_load_checkpoint({"epoch": 1})
    callback.teardown(trainer, module, "fit")
    assert "on_load_checkpoint" not in vars(module)
    train(network, optimizers := sgd(network), schedule(network, optimizers), range(6))
    assert callback.depth.depth == 3
