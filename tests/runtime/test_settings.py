"""Devices, executors and precision: what is impossible is refused by name before any work."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from esper.leyline.errors import DeviceError, EsperError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.runtime.executors.choosing import choose_executor, find_eager_only
from esper.runtime.executors.eager import EagerExecutor
from esper.runtime.population import Population, memory_errors
from runtime.episodes import BLOBS

CUDA = [torch.device("cuda:0")]


def refuse_to_load(root):
    raise AssertionError("the data were read although the setting is impossible")


NO_WORK = replace(BLOBS, load=refuse_to_load)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["mps"], "device mps"),
        (["mps:0"], "device mps"),
        (["cuda:99"], "'cuda:99' .*CUDA"),
        (["tpu"], "'tpu'"),
        (["cpu", "gpu0"], "'gpu0'"),
        (["meta"], "device meta"),
        (["cuda:300"], "cuda:300"),
        ([], "cpu, cuda, or"),
        ([""], "cpu, cuda, or"),
        ([","], "cpu, cuda, or"),
    ],
    ids=str,
)
def test_an_impossible_device_is_refused_before_any_work(devices, words):
    with pytest.raises(DeviceError, match=words):
        Population(NO_WORK, [1], devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(name):
    with pytest.raises(DeviceError, match=f"{name}.* 0 CUDA"):
        Population(NO_WORK, [1], [name])


@pytest.mark.parametrize("names", [["cpu cpu"], ["cpu,cpu"], ["cpu", "cpu"], ["cpu, cpu"]])
def test_lists_of_devices_take_spaces_or_commas(names):
    assert parse_devices(names) == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("own", "has_server", "found"),
    [(None, False, "32"), ("1", False, "1"), (None, True, None), ("4", True, "4")],
)
def test_a_gpu_is_asked_for_all_its_queues_unless_somebody_chose_or_processes_share_it(
    own, has_server, found, tmp_path, monkeypatch
):
    monkeypatch.setenv(
        "CUDA_MPS_PIPE_DIRECTORY", str(tmp_path if has_server else tmp_path / "none")
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(own))  # and put back afterwards
    if own is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    parse_devices(["cpu"])
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == own, "a CPU needs none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_devices(["cuda"]) == [torch.device("cuda:0")]
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == found


@pytest.mark.parametrize(
    ("hosts", "devices", "placed"),
    [(4, 2, [0, 0, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (3, 3, [0, 1, 2]), (2, 4, [0, 2])],
)
def test_hosts_are_mapped_in_equal_contiguous_shares(hosts, devices, placed):
    named = [torch.device("cuda", index) for index in range(devices)]
    assert [device.index for device in map_hosts(hosts, named)] == placed


def test_no_hosts_are_refused():
    with pytest.raises(EsperError, match="host"):
        Population(NO_WORK, [])


def test_the_map_says_how_many_hosts_are_where():
    placed = map_hosts(5, [torch.device("cuda:0"), torch.device("cuda:1")])
    assert describe_map(placed) == "cuda:0: 3 hosts, cuda:1: 2 hosts"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"amp": "fp8"}, r"unknown amp 'fp8'.*bf16, fp16, off"),
        ({"amp": "fp16"}, "fp16"),
        ({"executor": "fast"}, r"executor 'fast'.*auto, eager, graphed"),
        ({"executor": "graphed"}, "CUDA .*cpu"),
    ],
    ids=["unknown amp", "fp16 on a cpu", "unknown executor", "graphs on a cpu"],
)
def test_an_impossible_setting_is_refused_before_any_work(options, words):
    with pytest.raises(EsperError, match=words):
        Population(NO_WORK, [1], ["cpu"], **options)


@pytest.mark.parametrize(
    ("amp", "changes", "words"),
    [
        ("fp16", {}, "fp16"),
        ("off", {"lengths": StageLengths(training=1)}, "shadow pass"),
        ("off", {"build_host": lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))}, "dropout"),
    ],
)
def test_what_needs_the_eager_executor_is_refused_on_the_graphed_one(amp, changes, words):
    task = replace(BLOBS, **changes)
    with pytest.raises(SettingError, match=words):
        choose_executor("graphed", amp, CUDA, task)
    assert isinstance(choose_executor("auto", amp, CUDA, task), EagerExecutor)


def test_nothing_about_a_plain_task_needs_the_eager_executor():
    assert find_eager_only(BLOBS, "bf16") is None


def test_auto_is_eager_on_the_cpu():
    assert isinstance(Population(BLOBS, [1]).executor, EagerExecutor)


def test_bf16_trains_on_the_cpu():
    population = Population(BLOBS, [1], amp="bf16")
    exact = Population(BLOBS, [1])
    (reading,), (reference,) = population.train_epoch(), exact.train_epoch()
    assert reading.train_loss != reference.train_loss
    assert reading.train_loss == pytest.approx(reference.train_loss, rel=0.05)


def test_running_out_of_memory_names_the_knobs_to_lower():
    with pytest.raises(DeviceError, match=r"hosts \(seeds\).*batch"), memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_memory_of_the_cpu_that_runs_out_is_the_same_error():
    with pytest.raises(DeviceError, match=r"memory: .*hidden_dim"), memory_errors():
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("problem", [KeyError("x"), RuntimeError("x"), RuntimeError()])
def test_other_errors_are_not_taken_for_memory(problem):
    with pytest.raises(type(problem)) as raised, memory_errors():
        raise problem
    assert raised.value is problem


def test_incubating_tasks_run_on_the_eager_executor():
    task = replace(BLOBS, lengths=StageLengths(training=1))
    assert isinstance(Population(task, [1]).executor, EagerExecutor)
