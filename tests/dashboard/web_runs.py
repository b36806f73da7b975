"""Small run folders, written by hand, for the tests of the browser and the report."""

import json

from epoch_records import grown_epoch as told_epoch
from epoch_records import taught_epoch
from esper.runtime.tasks.task import training_fields
from esper.storage import runfolder
from esper.telemetry.events import (
    ActionTaken,
    AnomalyFound,
    ArmFinished,
    CostsBooked,
    GateJudged,
    LedgerClosed,
    RoundBegan,
    RoundFinished,
    SeedMeasured,
    StageChanged,
    to_record,
)
from esper.trials.config import CompareConfig
from esper.trials.results import ArmRow, CurvePoint, Trials, summarise

TASK = {
    "name": "digits",
    "epoch_examples": None,
    "held_out": None,
    "batch": None,
    "epochs": 6,
    "budget": None,
}


def append(folder, *events):
    """Write events, or records, behind those that are there."""
    with open(folder / "events-0.jsonl", "a") as file:
        for event in events:
            file.write(json.dumps(event if isinstance(event, dict) else to_record(event)) + "\n")


def seed_events(host, epoch, slot, fate, blueprint="conv_light"):
    """A seed that is planted at an epoch and judged three epochs later, as four batches of
    events.
    """
    gate = {
        "host": host,
        "slot": slot,
        "needed": "alpha 1",
        "verdict": "passed",
        "reason": "alpha is 1",
    }
    verdict = "passed" if fate == "FOSSILIZED" else "failed"
    reading = SeedMeasured(host, epoch, slot, "BLENDING", blueprint, 1.0, 1, 97, 0.25, 0.05)
    end = {"needed": "a paired counterfactual", "reason": "contribution +0.2500 ± 0.0500"}

    def move(epoch, before, after):
        return StageChanged(host, epoch, slot, before, after, blueprint, 1.0)

    return [
        [
            ActionTaken(host, epoch, "GERMINATE", slot, blueprint, "linear"),
            move(epoch, "DORMANT", "GERMINATED"),
            move(epoch, "GERMINATED", "BLENDING"),
        ],
        [
            GateJudged(epoch=epoch + 1, gate="G3", measured=1.0, **gate),
            move(epoch + 1, "BLENDING", "PROBATIONARY"),
            to_record(reading) | {"epoch": epoch + 1, "stage": "PROBATIONARY"},
        ],
        [
            to_record(reading)
            | {"epoch": epoch + 2, "stage": "PROBATIONARY", "age": 2, "contribution": None}
        ],
        [
            GateJudged(
                epoch=epoch + 3, gate="G5", measured=0.25, **(gate | end | {"verdict": verdict})
            ),
            move(epoch + 3, "PROBATIONARY", fate),
        ],
    ]


def grown_epoch(host, epoch, accuracy=None):
    params = 438 + 97 * (epoch > 0)
    return told_epoch(
        host,
        epoch + 1,
        2.0 / (epoch + 1),
        2.2 / (epoch + 1),
        accuracy or 0.5 + 0.05 * epoch * (2 - epoch / 5),
        params,
        10**6 * epoch,
    )


def config_of(kind, **changes):
    config = {
        "task": TASK,
        "hosts": 2,
        "seed": 0,
        "out": "somewhere",
        "deterministic": False,
        **changes,
    }
    if kind == "ppo":
        return {"rounds": 2, **config}
    training = json.dumps([config["task"].get(name) for name in training_fields()])
    return {"command": "run", "policy": "heuristic", "training": training, **config}


def grow_run(folder, policy="heuristic", seeds=(0, 1), test=0.9, epochs=6, **changes):
    """A run of `esper run`; host h has test accuracy `test` + h / 100."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(config_of("run", policy=policy, hosts=len(seeds), **changes))
    )
    append(folder)
    for host in range(len(seeds)):
        planted = {
            0: seed_events(host, 0, "r0c0", "FOSSILIZED"),
            1: seed_events(host, 1, "r0c1", "CULLED", "depthwise"),
        }
        for epoch in range(epochs):
            for start, batches in planted.items() if policy != "never" else ():
                if 0 <= epoch - start < len(batches):
                    append(folder, *batches[epoch - start])
            append(folder, grown_epoch(host, epoch))
    if epochs < TASK["epochs"]:
        return folder
    for host, seed in enumerate(seeds):
        flops = {"training": 4 * 10**6, "validation": 10**6}
        ledger = LedgerClosed(
            host, seed, 535, flops, dict.fromkeys(flops, 100), dict.fromkeys(flops, 0.5)
        )
        scores = {"validation_accuracy": 0.75, "test_accuracy": test + host / 100, "test_loss": 0.2}
        counts = {"flops": 5 * 10**6, "seconds": 1.0, "germinated": 2, "fossilized": 1, "culled": 1}
        append(folder, ledger, ArmFinished(policy, seed, 6, 438, 535 + host, **scores, **counts))
    return folder


def bend(round_, step):
    """A factor that is 1 in the first two rounds and no straight line in those behind."""
    return 1 + (7 * step % 5) / 20 if round_ > 1 else 1


def host_epoch(round_, host, epoch, accuracy=None):
    bent = bend(round_, epoch)
    reading = 0.4 + 0.05 * epoch + 0.1 * round_ if accuracy is None else accuracy
    parts = {"accuracy_beyond_twin": 0.1 * bent, "rent": -0.01 * bent}
    return taught_epoch(
        round_,
        host,
        epoch,
        1.0 * bent,
        1.1 * bent,
        reading / bent,
        0.4,
        round(535 * bent),
        round(10**6 * epoch * bent),
        0.09 * bent,
        parts,
    )


def booked(what, round_, phase, flops):
    return CostsBooked(what, round_, {phase: flops}, {phase: 10}, {phase: 0.25})


def ppo_round(round_, hosts=2):
    """All events of one round of six epochs."""
    bent = bend(round_, round_)
    yield RoundBegan(round_)
    for host in range(hosts):
        batches = seed_events(host, 1, "r0c1" if round_ else "r0c0", "CULLED")
        for epoch in range(1, 6):
            yield from batches[epoch - 1] if epoch <= len(batches) else ()
            yield host_epoch(round_, host, epoch + 1)
        flops = {"training": 10**6, "policy": 10**5}
        yield LedgerClosed(
            host, host, 535, flops, dict.fromkeys(flops, 100), dict.fromkeys(flops, 0.5)
        )
    yield booked("learning", round_, "learning", 5 * 10**5)
    update = {
        "approx_kl": 0.01 * bent,
        "clip_fraction": 0.1 * bent,
        "explained_variance": 0.5 * bent,
        "value_loss": 0.3 * bent,
        "policy_loss": 0.1 * bent,
    }
    heads = {
        "op": {"entropy": 0.9 * bent, "clip_fraction": 0.1},
        "slot": {"entropy": 0.5 * bent, "clip_fraction": 0.1},
    }
    update |= {"first_ratio_gap": {"op": 1e-7 * (bent - 1)}, "heads": heads}
    ops = {"WAIT": 8, "GERMINATE": 2 + round(20 * (bent - 1)), "CULL": 0, "FOSSILIZE": 0}
    numbers = {
        "mean_return": 0.4 + round_ * bent,
        "accuracy": (0.7 + 0.1 * round_) / bent,
        "twin_accuracy": 0.4,
        "params_share": 1.2 * bent,
    }
    yield RoundFinished(
        round_,
        10 * (round_ + 1),
        **numbers,
        reward_parts={"accuracy_beyond_twin": 0.5 * bent, "rent": -0.1 * bent},
        ops=ops,
        germinated=2,
        fossilized=0,
        culled=2,
        refused=0,
        update=update,
        seconds=2.0,
    )


def ppo_run(folder, rounds=2, rounds_planned=2, **changes):
    """A run of `esper ppo` with an anomaly in its first round."""
    folder.mkdir(parents=True)
    config = config_of("ppo", rounds=rounds_planned, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    append(folder, booked("twins", 0, "training", 10**5))
    for round_ in range(rounds):
        append(folder, *ppo_round(round_))
        if round_ == 0:
            append(folder, AnomalyFound(0, "kl", 0.5, 0.1, "op", False))
    return folder


TAUGHT = "runs/first/checkpoints/round-000006.safetensors"
"""An arm that is a checkpoint, as a comparison names it."""

ACCURACIES = {
    "never": (0.5, 0.52, 0.49, 0.51, 0.5),
    "heuristic": (0.8, 0.79, 0.83, 0.78, 0.81),
    TAUGHT: (0.6, 0.9, 0.55, 0.7, 0.65),
}


def trials_of_arm(arm, accuracies, rate=1.0, validation=0.5):
    """An arm whose host seed s reached its accuracy, and whose loss fell with its FLOPs."""
    rows = [
        ArmRow(
            type="ArmFinished",
            arm=arm,
            seed=seed,
            epochs=6,
            start_params=100,
            final_params=200,
            validation_accuracy=validation,
            test_accuracy=accuracy,
            test_loss=1 - accuracy,
            flops=6 * 10**6,
            seconds=1.0,
            germinated=2,
            fossilized=1,
            culled=1,
            peak_params=300,
        )
        for seed, accuracy in enumerate(accuracies)
    ]
    points = [CurvePoint(epoch, 10**6 * epoch, 2.0 / epoch) for epoch in range(1, 7)]
    count = len(rows)
    return Trials(
        arm,
        rate,
        tuple(rows),
        ((),) * count,
        ((),) * count,
        curves=(tuple(points),) * count,
    )


def comparison(folder, accuracies=ACCURACIES, more=(), is_finished=True):
    """The folder of `esper compare`, with the arms' files and, once it is over, its results."""
    (folder / runfolder.ARMS).mkdir(parents=True)
    policies = [arm for arm in accuracies if arm != TAUGHT]
    config = CompareConfig.of({"task": {"name": "blobs"}, "seeds": 5, "policies": policies})
    start = config.model_dump(mode="json", exclude={"out", "data_root"})
    start |= {"command": "compare", "policies": list(accuracies)}
    runfolder.write_json(folder / runfolder.CONFIG, start)
    trials = [trials_of_arm(arm, reached) for arm, reached in accuracies.items()]
    trials += more
    for number, _ in enumerate(trials):
        (folder / runfolder.ARMS / f"{number}.json").write_text("{}")
    if is_finished:
        results = summarise(config, {(one.arm, one.rate): one for one in trials})
        runfolder.write_json(folder / runfolder.RESULTS, results)
    return folder
