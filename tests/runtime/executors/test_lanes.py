"""How hosts share the lanes of a device, on a CPU:

a stand-in runs a call anew where CUDA would replay its graph.
"""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from esper.leyline.errors import NotCompiledError
from esper.leyline.stages import SeedStage
from esper.runtime.executors import graphs as executors
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.executors.structure import graph_key
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from runtime.episodes import BLOBS, CULL, GERMINATE, IMAGES, act, differing, play, print_of
from runtime.episodes import GROWTH as IMAGE_GROWTH

GROWTH = {0: [(GERMINATE, "r0c0", "mlp")], 1: [(CULL, "r0c0")]}


class StandInStream:
    def wait_stream(self, other):
        """Everything runs in order anyway."""

    wait_event = wait_stream

    def record_event(self):
        return None


class Rerun:
    """A call that is made again at every replay and leaves its result where a captured one
    would.
    """

    made = 0

    def __init__(self, lane, call, room):
        Rerun.made += 1
        self.call, self.room, self.stream = call, room, lane.stream
        self.graph = self
        self.result = room[:0]

    def replay(self):
        found = self.call()
        if found is not None:
            self.result = self.room[: len(found)]
            self.result.copy_(found)


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch):
    stand_ins = {
        "current_stream": lambda device=None: StandInStream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (2**40, 2**40),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(executors, "_Captured", Rerun)
    monkeypatch.setattr(
        executors, "_streams", lambda device: [StandInStream() for _ in range(executors._LANES)]
    )


def build(task=BLOBS, seeds=(7,)):
    population = Population(task, list(seeds), ["cpu"], executor="eager")
    population.executor = GraphedExecutor()
    return population


def kept(population):
    return population.executor._device(population.runs[0])._kept


def captures(population, epochs, script=None):
    """How many graphs these epochs needed."""
    before = Rerun.made
    play(population, epochs, script)
    return Rerun.made - before


def test_hosts_are_assigned_to_lanes_in_turn():
    population = build(seeds=range(2 * executors._LANES + 1))
    play(population, 1)
    lanes = [population.executor._device(run).lane(run) for run in population.runs]
    assert len(set(lanes)) == executors._LANES
    assert lanes == [lanes[index % executors._LANES] for index in range(len(lanes))]


def test_hosts_that_share_a_lane_have_the_episodes_of_the_eager_executor(monkeypatch):
    monkeypatch.setattr(executors, "_LANES", 2)
    graphed, eager = (
        build(IMAGES, range(5)),
        Population(IMAGES, list(range(5)), ["cpu"], executor="eager"),
    )
    for population in (graphed, eager):
        play(population, 6, dict.fromkeys((0, 2, 3), IMAGE_GROWTH))
    assert [differing(print_of(eager, host), print_of(graphed, host)) for host in range(5)] == [
        []
    ] * 5


def test_a_host_runs_once_before_a_capture_only_where_something_is_new(monkeypatch):
    """Known parts may still need compiling when they get each other's outputs; that is noticed, and
    the host runs.
    """
    brought_back, capture, refused = [], executors._capture, []
    graphed, eager = build(seeds=(7, 8, 9)), Population(BLOBS, [7, 8, 9], ["cpu"], executor="eager")

    def refuse_once(run, lane, call):
        if (
            run is graphed.runs[1]
            and len(graphed.executor._device(run).graphs(run)) == 1
            and not refused
        ):
            refused.append(run)
            for parameter in run.model.parameters():  # in the pool, where others may write
                parameter.grad = torch.zeros_like(parameter)
            raise NotCompiledError
        return capture(run, lane, call)

    def stale(run):
        return [p for p in run.model.parameters() if p.grad is not None]

    restore, learn, given = HostRun.restore, HostRun.learn, []
    monkeypatch.setattr(
        HostRun, "restore", lambda run, kept: (brought_back.append(run.seed), restore(run, kept))[1]
    )
    monkeypatch.setattr(executors, "_capture", refuse_once)
    monkeypatch.setattr(
        HostRun, "learn", lambda run, *batch: (given.extend(stale(run)), learn(run, *batch))[1]
    )
    for population in (graphed, eager):
        play(population, 3)
    assert brought_back == [7, 8]  # after their first step of training; the third host needs none
    assert not given
    assert [differing(print_of(eager, host), print_of(graphed, host)) for host in range(3)] == [
        []
    ] * 3


def test_a_host_that_is_compiled_anew_at_every_call_is_refused(monkeypatch):
    monkeypatch.setattr(executors, "_capture", Mock(side_effect=NotCompiledError))
    with pytest.raises(NotCompiledError):
        play(build(), 1)


def test_a_culled_seed_brings_the_graphs_of_before_back():
    population = build()
    assert captures(population, 2, {0: GROWTH}) == 1 + 3 + 3  # an anchor, alone, with the seed
    assert captures(population, 2) == 0


def test_probation_needs_no_graph_of_its_own_and_no_other_seed_is_measured(monkeypatch):
    population, asked, real = build(), [], executors.measure

    def measure(run, split, *ablated):
        asked.append([slot.slot_id for own in ablated for slot in own])
        return real(run, split, *ablated)

    monkeypatch.setattr(executors, "measure", measure)
    captures(population, 3, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    assert asked[-1] == ["r0c0"]  # in the graph from the ramp on: nothing else is captured
    assert population.reports()[0]["r0c0"].stage is SeedStage.PROBATIONARY
    assert not population.reports()[0]["r0c0"].is_measured
    assert captures(population, 1) == 0
    assert population.reports()[0]["r0c0"].is_measured


def test_a_seed_on_its_ramp_may_contribute_what_is_not_a_number():
    """Nobody asks what it contributes: without it a network may well overflow."""
    population = build()
    captures(population, 1, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    population.train_epoch()
    run = population.runs[0]
    assert run.slots[0].state.stage is SeedStage.BLENDING
    site, blend = run.model.site("r0c0"), run.slots[0].seed.blend
    site.register_forward_hook(lambda module, inputs, output: output * torch.inf, prepend=True)
    run.slots[0].seed.blend = lambda features, alpha: blend(torch.zeros_like(features), alpha)
    assert population.executor.measure([run], [run.splits.validation])[0].isnan().any()
    assert population.evaluate() == []
    assert not population.reports()[0]["r0c0"].is_measured


def test_evidence_does_not_depend_on_what_else_a_graph_measures():
    population = build(IMAGES, [3])
    play(population, 3, {0: {0: [(GERMINATE, "r0c0", "conv_small"), (GERMINATE, "r0c1", "norm")]}})
    run = population.runs[0]
    alone = [executors.measure(run, run.splits.validation, [slot]) for slot in run.slots]
    both = executors.measure(run, run.splits.validation, run.slots)
    assert torch.equal(both, alone[0] + alone[1].index_fill(0, torch.arange(2), 0.0))


def test_a_seed_that_is_kept_needs_no_graph_of_its_own():
    population = build()
    captures(population, 4, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    assert captures(population, 2) == 0
    assert len(population.runs[0].slots[0].fossils) == 1
    assert captures(population, 2, {0: {0: [(GERMINATE, "r0c0", "mlp")]}}) == 3


def test_parts_have_their_measurements_whichever_is_asked_first():
    whole, divided = build(IMAGES, range(4)), build(IMAGES, range(4))
    play(whole, 2)
    parts = [divided.part(range(2)), divided.part(range(2, 4))]
    for order in (parts, parts[::-1]):
        for part in parts:
            part.start_epoch(then_evaluate=True)
        for part in order:
            part.finish_epoch()
            part.evaluate()
            part.tick()
    assert [differing(print_of(whole, host), print_of(divided, host)) for host in range(4)] == [
        []
    ] * 4


def test_a_measurement_that_was_promised_and_not_asked_for_is_not_taken_for_a_later_one():
    population, other = build(IMAGES), build(IMAGES)
    for each in (population, other):
        each.train_epoch(then_evaluate=each is population)
        each.train_epoch()
        each.evaluate()
    assert population.readings() == other.readings()


class LateStream(StandInStream):
    """Says what it is told to wait for."""

    told: list = []  # noqa: RUF012

    def wait_event(self, event):
        self.told.append(event)


def test_who_trains_again_or_begins_anew_waits_for_what_is_under_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: LateStream())
    population = build(IMAGES)
    executor, run, saved = population.executor, population.runs[0], population.snapshot()
    for act_again in (
        lambda: executor.train([run]),
        lambda: population.restore(saved),
        lambda: population.reset(0, 3),
    ):
        executor.train([run], then_measure=True)
        executor._trained[run] = "trained"
        executor._measured[run] = executor._measured[run]._replace(end="measured")
        LateStream.told.clear()
        act_again()
        assert LateStream.told[:2] == ["trained", "measured"]
        assert run not in executor._measured


def test_spare_structures_are_bounded_and_the_ones_used_least_lately_go(monkeypatch):
    monkeypatch.setattr(executors, "_SPARE", 3)
    population = build(seeds=[7, 8])
    first = [(run, graph_key(run)) for run in population.runs]
    used = []
    for _ in range(5):
        play(population, 1)
        act(population, 0, GERMINATE, "r0c0", "mlp")
        used.append((population.runs[0], graph_key(population.runs[0])))
        play(population, 1)
        act(population, 0, CULL)
    play(population, 1)
    missing, extra = (
        {*first, *used[-3:]} - set(kept(population)),
        set(kept(population)) - {*first, *used[-3:]},
    )
    assert (len(missing), len(extra)) == (0, 0)


def test_a_structure_that_is_used_again_and_again_stays(monkeypatch):
    monkeypatch.setattr(executors, "_SPARE", 2)
    graphs = executors._DeviceGraphs(torch.device("cpu"))
    monkeypatch.setattr(executors, "graph_key", lambda host: host.structure)

    class Visitor:
        structure = None

    host, found = Visitor(), []
    for structure in ["first", "again", 1, "again", 2, "again", 3, "again", 4, "again"]:
        host.structure = structure
        found += [graphs.graphs(host)] if structure == "again" else []
        graphs.graphs(host)
        graphs.drop_spare()
    assert all(one is found[0] for one in found)
    assert [structure for _, structure in graphs._kept] == ["first", 3, 4, "again"]


def test_the_structures_that_hosts_are_in_now_stay_however_many_there_are(monkeypatch):
    monkeypatch.setattr(executors, "_SPARE", 1)
    population = build(seeds=range(6))
    play(population, 2, {host: {0: [(GERMINATE, "r0c0", "mlp")]} for host in range(6)})
    before = Rerun.made
    population.train_epoch()
    population.evaluate()
    assert Rerun.made == before


class Large(Rerun):
    """A capture for which a pool has to be this large."""

    needed = 100

    def __init__(self, lane, call, room):
        super().__init__(lane, call, room)
        lane.taken = max(lane.taken, Large.needed)


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(executors, "_Captured", Large)
    monkeypatch.setattr(Large, "needed", 100)
    return lambda needed: monkeypatch.setattr(Large, "needed", needed)


def within(seeds, most):
    population = build(seeds=seeds)
    population.executor._most = most
    return population, population.executor._device(population.runs[0])


def test_no_more_lanes_are_opened_than_memory_allows(large):
    population, graphs = within(range(7), 350)
    play(population, 2)
    assert (len(graphs._lanes), graphs.taken) == (3, 300)
    hosts = [list(graphs._lane_of.values()).count(lane) for lane in graphs._lanes]
    assert sorted(hosts) == [2, 2, 3]


def test_pools_that_grow_too_large_begin_anew_as_fewer_and_hosts_go_on_the_same(large):
    population, graphs = within(range(4), 350)
    eager = Population(BLOBS, list(range(4)), ["cpu"], executor="eager")
    script = {1: {0: [(GERMINATE, "r0c0", "mlp")]}}
    for hosts in (eager, population):
        play(hosts, 1, script)
    assert len(graphs._lanes) == 3
    large(160)  # what the grown host needs, and then every one of its lane
    for hosts in (eager, population):
        play(hosts, 3, start=1)
    assert (len(graphs._lanes), graphs.taken) == (2, 320)
    assert [differing(print_of(eager, host), print_of(population, host)) for host in range(4)] == [
        []
    ] * 4


def test_one_lane_that_needs_more_than_it_may_is_not_built_again_and_again(large):
    population, graphs = within(range(3), 50)
    play(population, 2)
    assert (len(graphs._lanes), graphs.taken) == (1, 100)
    assert captures(population, 3) == 0


# -- measuring behind training ---------------------------------------------------------------------


def test_measuring_that_was_started_behind_training_has_the_results_of_measuring_afterwards():
    early, late = build(IMAGES, range(3)), build(IMAGES, range(3))
    for epoch in range(6):
        for population, promise in ((early, True), (late, False)):
            population.train_epoch(then_evaluate=promise)
            population.evaluate()
            for host in (0, 2):
                for move in IMAGE_GROWTH.get(epoch, []):
                    act(population, host, *move)
            population.tick()
    assert [differing(print_of(early, host), print_of(late, host)) for host in range(3)] == [[]] * 3


def test_a_host_is_measured_once_in_an_epoch_and_again_when_asked_again(monkeypatch):
    population, made = build(seeds=[1, 2]), []
    real = executors.measure
    monkeypatch.setattr(
        executors, "measure", lambda run, *how: made.append(run.seed) or real(run, *how)
    )
    population.train_epoch(then_evaluate=True)
    made.clear()  # with what capturing did
    population.evaluate()
    assert made == []
    population.evaluate()
    assert made == [1, 2]
    population.train_epoch(then_evaluate=True)
    population.evaluate()
    assert made == [1, 2, 1, 2]


def test_an_episode_that_ends_takes_its_structures_along_and_no_others():
    population = build(seeds=[7, 8])
    play(population, 2, {host: {0: [(GERMINATE, "r0c0", "mlp")]} for host in (0, 1)})
    assert len(kept(population)) == 4
    population.reset(0, 9)
    assert [run.seed for run, _ in kept(population)].count(9) == 1
    assert len(kept(population)) == 3
    assert captures(population, 1) == 0


def test_a_population_that_is_gone_leaves_no_graph_behind():
    """Only then can its pools be given back; a cycle would keep them until some later
    collection.
    """
    population = build(IMAGES)
    play(population, 2, {0: IMAGE_GROWTH})
    executor = weakref.ref(population.executor)
    gc.disable()
    try:
        del population
        assert executor() is None
    finally:
        gc.enable()


def test_hosts_take_turns_of_a_few_calls_and_each_keeps_its_order():
    told = []

    def calls(host, count):
        graphs = [
            SimpleNamespace(replay=partial(told.append, (host, number))) for number in range(count)
        ]
        return [SimpleNamespace(stream=host, graph=graph) for graph in graphs]

    GraphedExecutor()._replay([calls("a", 19), [], calls("b", 3), calls("c", 9)])
    turn = executors._TURN
    first = (
        [("a", n) for n in range(turn)]
        + [("b", n) for n in range(3)]
        + [("c", n) for n in range(turn)]
    )
    assert told[: len(first)] == first
    assert {host: [n for who, n in told if who == host] for host in "abc"} == {
        "a": list(range(19)),
        "b": list(range(3)),
        "c": list(range(9)),
    }
