"""Which policy leads by how much over its control, by the runs that are on screen.

Runs are joined where they differ in nothing but their hosts. No files, no drawing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from statistics import mean
from typing import Any

from esper.dashboard.view import RunView
from esper.storage.runfolder import label_policies
from esper.telemetry.statistics import compare_pairs, estimate_mean

CONTROL = "never"
"""The policy that grows nothing."""

_PRECISION = ("amp", "compile")  # settings of a run that change a host that never grows, too
_CODE = ("imports", "files")  # a user's own code and checkpoints, which act on growth alone


@dataclass
class Arm:
    """What episodes reached under a policy.

    They are of one run, or of several that differ in nothing but their hosts.
    """

    policy: str
    task: str
    epochs: float | None
    measure: str  # which examples the accuracy is of
    settings: str  # equal where two runs differ in nothing but their hosts
    training: str  # equal where a host that never grows would be trained alike
    accuracy: dict[int, float] = field(default_factory=dict)  # by host seed (run) or host (ppo)
    twins: dict[int, float] = field(default_factory=dict)
    params: list[float] = field(default_factory=list)


def arms_of(view: RunView, run: str) -> list[Arm]:
    """Return a run's results on test examples (run), or its newest finished round (ppo)."""
    if view.kind == "ppo":
        return [_taught_arm(view, run)] if view.rounds.rows else []
    results = [result for result in view.results if isfinite(result["test_accuracy"])]
    return [_tested_arm(view.config, result, run) for result in results]


def _taught_arm(view: RunView, run: str) -> Arm:
    task = str(view.config.get("task", {}).get("name"))
    arm = Arm(
        policy=f"ppo ({run})",
        task=task,
        epochs=None,
        measure="held-out",
        settings=f"ppo {run}",
        training="",
    )
    # episode by episode as long as the finished round is the newest, else its means
    if view.closed.round == view.round:
        for host, episode in view.episodes.items():
            grown = episode.epochs.last("accuracy")
            twin = episode.epochs.last("twin_accuracy")
            params = episode.epochs.last("params")
            if grown is None or twin is None or params is None:
                continue
            arm.accuracy[host] = grown
            arm.twins[host] = twin
            arm.epochs = episode.epochs.last("epoch")
            arm.params.append(params)
    if not arm.accuracy:
        arm.accuracy[0] = view.rounds.last("accuracy") or 0.0
        arm.twins[0] = view.rounds.last("twin_accuracy") or 0.0
    return arm


def _tested_arm(config: Mapping[str, Any], result: Mapping[str, Any], run: str) -> Arm:
    task = config.get("task", {})
    precision = [config.get(name) for name in _PRECISION]
    code = [config.get(name) for name in _CODE]
    # `esper run` records what of its settings a host feels that never grows; a folder without that
    # note has no control but itself
    training = config.get("training", f"run {run}")
    return Arm(
        policy=label_policies([result["arm"]])[result["arm"]],
        task=str(task.get("name")),
        epochs=result["epochs"],
        measure="test",
        settings=json.dumps(
            [result["arm"], task, result["epochs"], *precision, *code], sort_keys=True
        ),
        training=json.dumps([training, result["epochs"], *precision]),
        accuracy={result["seed"]: result["test_accuracy"]},
        params=[result["final_params"]],
    )


def standings(arms: Iterable[Arm]) -> list[dict[str, Any]]:
    """Return the accuracy of each policy, and its lead.

    The lead is over `never` on the same host seeds, or over each episode's twin.
    """
    joined: dict[str, Arm] = {}
    for arm in arms:
        whole = joined.setdefault(arm.settings, replace(arm, accuracy={}, params=[]))
        whole.accuracy |= arm.accuracy
        whole.params += arm.params
    controls = {arm.training: arm.accuracy for arm in joined.values() if arm.policy == CONTROL}
    rows = []
    for arm in joined.values():
        control = {} if arm.policy == CONTROL else controls.get(arm.training, {})
        rows.append(_standing(arm, arm.twins or control))
    return rows


def _standing(arm: Arm, control: Mapping[int, float]) -> dict[str, Any]:
    accuracy = dict(sorted(arm.accuracy.items()))
    shared = [host for host in accuracy if host in control]
    gain = None
    if shared:
        grown = [accuracy[host] for host in shared]
        gain = asdict(compare_pairs(grown, [control[host] for host in shared]))
    return {
        "policy": arm.policy,
        "task": arm.task,
        "epochs": arm.epochs,
        "measure": arm.measure,
        "accuracy": asdict(estimate_mean(list(accuracy.values()))),
        "control": "its twin" if arm.twins else CONTROL,
        "gain": gain,
        "params": mean(arm.params) if arm.params else None,
    }
