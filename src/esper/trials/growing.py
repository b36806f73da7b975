"""`esper grow`: one policy on one or many hosts, saved after every epoch. What surrounds the loop is in `running`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esper.kasmina.blueprints import SHAM
from esper.kasmina.harvesting import WEIGHTS, export_network
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import ActionSpace
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.host import HostRun
from esper.runtime.population import Population, memory_errors
from esper.simic.checkpoints import Layout, load_policy, require_layout
from esper.simic.training_config import TaskConfig, explain
from esper.tamiyo.learned import NetworkPolicy
from esper.tamiyo.observation import feature_names
from esper.tamiyo.rules import RULES, is_rule, read_rule
from esper.telemetry.curve_export import TrackerName
from esper.telemetry.events import ArmFinished, Event, GrownEpoch, LedgerClosed, StageChanged, finite
from esper.telemetry.runfolder import NETWORKS, POLICY, list_files, require_listed, write_listed
from esper.telemetry.sink import Sink
from esper.trials.arms import Decider, act_on_epoch, arm_result, live_epoch, make_decider
from esper.trials.saves import EpochSave, EpochSaves


class GrowConfig(BaseModel):
    """One run of a policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    task: TaskConfig = TaskConfig()
    """what hosts are trained on, and for how long"""
    policy: str = "heuristic"
    """a rule by name, or a checkpoint of `esper ppo`"""
    hosts: int = Field(1, ge=1)
    """hosts that live side by side"""
    seed: int = Field(0, ge=0)
    """the first host's seed; the others count on from it"""
    devices: tuple[str, ...] = Field(("cpu",), min_length=1)
    """where hosts train"""
    executor: Literal["auto", "eager", "graphed"] = "auto"
    """how hosts' steps are run"""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """precision of hosts' forward passes"""
    out: Path = Path("runs/grow")
    """run folder"""
    data_root: Path | None = None
    """folder that holds the data sets"""
    threads: int | None = Field(None, ge=1)
    """CPU threads per operation; None leaves it to torch"""
    deterministic: bool = False
    """only kernels that give the same result twice"""
    telemetry: Literal["off", "minimal", "normal", "debug"] = "normal"
    """how much is written down"""
    track: tuple[TrackerName, ...] = ()
    """who draws curves of it as well: tensorboard, wandb; at every level"""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """A checked configuration from plain values; every mistake gets one clear line."""
        try:
            found = cls.model_validate_json(json.dumps(values, default=str))
        except ValidationError as problem:
            raise SettingError("; ".join(explain(cls, problem.errors()))) from None
        if is_rule(found.policy):
            read_rule(found.policy)
        elif not any(path.is_file() for path in (Path(found.policy), found.out / POLICY)):
            raise UnknownNameError("policy", found.policy, RULES, "Or name a checkpoint file of `esper ppo`.")
        found.task.build()
        return found

    @property
    def blueprints(self) -> tuple[str, ...] | None:
        return (SHAM,) if self.policy == SHAM else self.task.blueprints


class StoppedGrowing(Exception):  # noqa: N818  # nobody made a mistake
    """Somebody asked to stop; `epochs` epochs are saved."""

    def __init__(self, epochs: int):
        super().__init__(f"stopped after {epochs} epochs")
        self.epochs = epochs


@memory_errors()
def grow_hosts(
    config: GrowConfig,
    *,
    sink: Sink,
    resume: bool = False,
    watch: Callable[[int, Sequence[Event]], None] = lambda epoch, events: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[ArmFinished]:
    """Live the hosts' episodes under the policy and score what they leave; the caller holds the folder's lock."""
    with repeatable_kernels(config.deterministic), limited_threads(config.threads):
        population, deciders = build(config, resume)
        saves = EpochSaves(config.out, population, deciders, sink)
        counts: list[dict[str, int]] = [{} for _ in population.runs]
        found = saves.restore() if resume else None
        first = 0 if found is None else found.epoch
        counts = counts if found is None else found.counts
        for epoch in range(first, population.task.epochs):
            if found is not None:
                happened, found = found.happened, None
            else:
                happened = live_epoch(population, epoch)
                saves.save(EpochSave(epoch, happened, counts))
            act_on_epoch(population, deciders, epoch, happened)
            _tell(population, epoch, happened, counts, sink)
            watch(epoch, [event for events in happened for event in events])
            if should_stop() and epoch + 1 < population.task.epochs:
                raise StoppedGrowing(saves.epochs)
        return _finish(config, population, counts, sink)


def build(config: GrowConfig, is_resumed: bool = False) -> tuple[Population, list[Decider]]:
    """Fresh hosts and whoever decides about each."""
    task = config.task.model_copy(update={"blueprints": config.blueprints}).build()
    seeds = [config.seed + number for number in range(config.hosts)]
    population = Population(
        task, seeds, config.devices, executor=config.executor, amp=config.amp, data_root=config.data_root
    )
    if is_rule(config.policy):
        return population, [make_decider(population, host, config.policy) for host in range(config.hosts)]
    kept = config.out / POLICY
    space = population.runs[0].model.space
    if not (is_resumed and kept.is_file()):
        load_fitting(Path(config.policy), space)
        write_listed(kept, Path(config.policy).read_bytes())
    require_listed(config.out, kept)
    policy, use_telemetry = load_fitting(kept, space)
    return population, [
        make_decider(population, host, lambda facts: policy, use_telemetry) for host in range(config.hosts)
    ]


def load_fitting(path: Path, space: ActionSpace) -> tuple[NetworkPolicy, bool]:
    """A trained policy that fits these slots and blueprints, and whether it reads telemetry; others are refused."""
    policy, layout = load_policy(path)
    reads_telemetry = any(name.endswith(".greedy_score") for name in layout["features"])
    own = Layout(
        slots=space.slots.slot_ids,
        blueprints=tuple(str(name) for name in space.blueprint_ids[1:]),
        blends=space.blends,
        features=feature_names(space.slots, reads_telemetry),
        hidden_dim=layout["hidden_dim"],
        head_dim=layout["head_dim"],
    )
    require_layout(layout, own, path)
    return policy, reads_telemetry


def _tell(
    population: Population, epoch: int, happened: list[list[Event]], counts: list[dict[str, int]], sink: Sink
) -> None:
    for host, (events, run) in enumerate(zip(happened, population.runs, strict=True)):
        for event in events:
            sink.write(event)
            if isinstance(event, StageChanged):
                counts[host][event.after] = counts[host].get(event.after, 0) + 1
        reading = run.reading
        assert reading is not None
        sink.write(
            GrownEpoch(
                host=host,
                epoch=epoch,
                train_loss=finite(reading.train_loss),
                held_out_loss=finite(reading.held_out_loss),
                held_out_accuracy=finite(reading.held_out_accuracy),
                params=run.model.total_params,
                flops=run.ledger.flops,
            )
        )


def _close(host: int, run: HostRun) -> LedgerClosed:
    costs = {name: cost for name, cost in run.ledger.phases.items() if cost.examples}
    return LedgerClosed(
        host=host,
        seed=run.seed,
        peak_params=run.ledger.peak_params,
        flops={name: cost.flops for name, cost in costs.items()},
        examples={name: cost.examples for name, cost in costs.items()},
        seconds={name: cost.seconds for name, cost in costs.items()},
    )


def _finish(config: GrowConfig, population: Population, counts: list[dict[str, int]], sink: Sink) -> list[ArmFinished]:
    """Harvest, read the test split, write the results down."""
    results, exported = [], []
    for host, final in enumerate(population.final_scores()):
        run = population.runs[host]
        seconds = sum(cost.seconds for cost in run.ledger.phases.values())
        start = run.model.host_params
        result = arm_result(config.policy, run, final, counts[host], start_params=start, seconds=seconds)
        exported.append(export_network(run.model, config.out / NETWORKS / f"host-{host}") / WEIGHTS)
        sink.write(_close(host, run))
        sink.write(result)
        results.append(result)
    sink.commit()
    list_files(config.out, exported)
    return results
