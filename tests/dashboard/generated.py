"""Runs as they come from training, drawn at random: what their files hold, and views to compare."""

import json
from array import array

from hypothesis import strategies as st

from epoch_records import grown_epoch, taught_epoch
from esper.dashboard.reader import RunReader
from esper.dashboard.view import LOG_LINES, RunView
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    AnomalyFound,
    ArmFinished,
    CheckpointSaved,
    CostsBooked,
    GateJudged,
    HostRolledBack,
    LedgerClosed,
    RoundBegan,
    RoundFinished,
    SeedMeasured,
    StageChanged,
    to_record,
)

NEXT = {
    "GERMINATED": "BLENDING",
    "BLENDING": "PROBATIONARY",
    "CULLED": "EMBARGOED",
    "EMBARGOED": "RESETTING",
}
LIVE = ("GERMINATED", "BLENDING", "PROBATIONARY")
OPS = ("WAIT", "GERMINATE", "CULL", "FOSSILIZE")
LIKELY = {
    "DORMANT": ("WAIT", "GERMINATE", "GERMINATE"),
    "PROBATIONARY": ("WAIT", "FOSSILIZE", "FOSSILIZE", "CULL"),
}
FOREIGN = [
    {"type": "FromTheFuture", "x": 1},
    {"type": "ACTION_TAKEN", "round": 0, "env_id": 0, "op": "WAIT"},
    {},
]


class Host:
    """One host's slots, and the events of its epochs."""

    def __init__(self, number, draws, slots):
        self.number, self.draws = number, draws
        self.stages = dict.fromkeys(slots, "DORMANT")
        self.ages = dict.fromkeys(slots, 0)
        self.op = "WAIT"
        self.fossils = set()

    def move(self, epoch, slot, after):
        before, self.stages[slot] = self.stages[slot], after
        if after == "FOSSILIZED":
            self.fossils.add(slot)
        elif after == "GERMINATED":
            self.fossils.discard(slot)
        return StageChanged(
            self.number, epoch, slot, before, after, "norm", float(after in LIVE[1:])
        )

    def act(self, epoch):
        """What a policy does, refusals included."""
        slot = self.draws.choice(list(self.stages))
        stage = self.stages[slot]
        self.op = self.draws.choice(LIKELY.get(stage, OPS))
        if self.op == "WAIT":
            return []
        goes = {
            "GERMINATE": stage == "DORMANT",
            "CULL": stage in LIVE,
            "FOSSILIZE": stage == "PROBATIONARY",
        }
        if not goes[self.op]:
            return [ActionRefused(self.number, epoch, self.op, slot, "nicht möglich 🌱 \x1b[31m")]
        planted = ("norm", "linear") if self.op == "GERMINATE" else (None, None)
        happened = [ActionTaken(self.number, epoch, self.op, slot, *planted)]
        if self.op == "GERMINATE":
            self.ages[slot] = 0
            happened.append(self.judge(epoch, slot, "G0"))
        after = {"GERMINATE": "GERMINATED", "CULL": "CULLED", "FOSSILIZE": "FOSSILIZED"}[self.op]
        return [*happened, self.move(epoch, slot, after)]

    def judge(self, epoch, slot, gate):
        measured = self.draws.choice((None, 0.25))
        return GateJudged(self.number, epoch, slot, gate, measured, "≥ 0", "passed", "well ± so")

    def tick(self, epoch):
        happened = []
        for slot, stage in self.stages.items():
            if stage in NEXT and self.draws.random() < 0.7:
                if stage in LIVE:
                    happened.append(self.judge(epoch, slot, "G3"))
                happened.append(self.move(epoch, slot, NEXT[stage]))
            elif stage in ("FOSSILIZED", "RESETTING"):
                happened.append(self.move(epoch, slot, "DORMANT"))
        return happened

    def break_down(self, epoch):
        """Now and then the governor steps in; it may also bring back and cull what was a fossil."""
        if self.draws.random() < 0.9:
            return []
        culled = [
            slot for slot, stage in self.stages.items() if stage in LIVE or slot in self.fossils
        ]
        self.fossils.clear()
        reason = HostRolledBack(self.number, epoch, "held-out loss is NaN")
        return [reason, *(self.move(epoch, slot, "CULLED") for slot in culled)]

    def measure(self, epoch):
        happened = []
        for slot, stage in self.stages.items():
            if stage in LIVE:
                self.ages[slot] += 1
                gain, error = self.draws.choice(((None, None), (0.125, 0.5), (-1, 0)))
                seed = (slot, stage, "norm", 1.0, self.ages[slot], 32, gain, error)
                happened.append(SeedMeasured(self.number, epoch, *seed))
        return happened

    def readings(self):
        return [self.draws.choice((None, 0.5, 0.75)) for _ in range(3)]


def play_ppo(draws, ranks, hosts, rounds, epochs):
    """rank -> its events; rank 0 tells of rounds as a whole."""
    files = {rank: [] for rank in range(ranks)}
    for number in range(rounds):
        alive = [Host(host, draws, ("r0c10", "r0c2")) for host in range(hosts)]
        ops = dict.fromkeys(OPS, 0)
        for rank in files:
            files[rank].append(RoundBegan(number))
        for epoch in range(1, epochs):
            for host in alive:
                parts = {"rent": draws.random()} | ({"late": 1} if number else {})
                happened = [
                    *host.act(epoch),
                    *host.tick(epoch),
                    *host.break_down(epoch + 1),
                    *host.measure(epoch + 1),
                ]
                reading = (*host.readings(), 0.5, 438 + epoch, 10**12, 0.5, parts)
                files[host.number % ranks] += [
                    *happened,
                    taught_epoch(number, host.number, epoch + 1, *reading),
                ]
                ops[host.op] += 1
        heads = {"op": {"entropy": 0.5, "clip_fraction": None}}
        gaps = {"op": None, "joint": 0.5}
        update = (
            {"approx_kl": draws.choice((None, 0.1)), "heads": heads, "first_ratio_gap": gaps}
            if number
            else {}
        )
        accuracy, parts = draws.random(), {"rent": 0.5}
        whole = (
            number,
            (number + 1) * hosts,
            0.5,
            accuracy,
            0.5,
            1.5,
            parts,
            ops,
            1,
            2,
            3,
            0,
            update,
            1.25,
        )
        if draws.random() < 0.3:
            files[0].append(AnomalyFound(number, "kl", None, 0.2, "host 1", True))
        learning = {"learning": 8}
        files[0].append(CostsBooked("learning", number, learning, learning, {"learning": 0.5}))
        files[0] += [RoundFinished(*whole), CheckpointSaved(number + 1, f"round-{number + 1}")]
    return files


def play_grow(draws, ranks, hosts, rounds, epochs):
    files = {rank: [] for rank in range(ranks)}
    alive = [Host(host, draws, ("r0c0", "r0c1")) for host in range(hosts)]
    for epoch in range(1, epochs + 1):
        for host in alive:
            read = grown_epoch(host.number, epoch, *host.readings(), 438 + epoch, 10**9)
            happened = [
                *host.break_down(epoch),
                read,
                *host.measure(epoch),
                *host.act(epoch),
                *host.tick(epoch),
            ]
            files[host.number % ranks] += happened
    for host in alive if draws.random() < 0.5 else ():
        cost = {"training": 5}
        own = files[host.number % ranks]
        own.append(LedgerClosed(host.number, host.number, 500, cost, cost, {"training": 0.5}))
        score = (0.5 + host.number / 100, 0.25, 0.5, 9, 1.5, 1, 1, 0)
        own.append(ArmFinished("heuristic", host.number, epochs, 438, 500 + host.number, *score))
    return files


PLAYS = {"ppo": play_ppo, "run": play_grow}


@st.composite
def runs(draw, kinds=("ppo", "run"), most_ranks=2):
    """(kind, rank -> records)"""
    kind = draw(st.sampled_from(kinds))
    sizes = [draw(st.integers(1, most)) for most in (most_ranks, 3, 4, 8)]
    draws = draw(st.randoms(use_true_random=False))
    files = PLAYS[kind](draws, *sizes)
    records = {rank: [to_record(event) for event in events] for rank, events in files.items()}
    for own in records.values():
        for foreign in draw(st.lists(st.sampled_from(FOREIGN), max_size=2)):
            own.insert(draws.randrange(len(own) + 1), foreign)
    return kind, records


def config_of(kind, **values):
    return {
        "task": {"name": "digits"},
        **({"command": "run", "policy": "heuristic"} if kind == "run" else {}),
        **values,
    }


def write_config(folder, kind, **values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind, **values)))


def as_lines(records):
    """The bytes of an events file, letters beyond ASCII as they are."""
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def write_run(folder, kind, files, **values):
    write_config(folder, kind, **values)
    for rank, records in files.items():
        (folder / f"events-{rank}.jsonl").write_bytes(as_lines(records))
    return folder


def opened(folder):
    """A reader that has come to the end."""
    found = RunReader(folder)
    found.refresh()
    return found


def lived(number, host, epoch):
    return to_record(
        taught_epoch(number, host, epoch, 0.5, None, 0.75, 0.5, 438, 10**9, 0.25, {"rent": -0.5})
    )


def many_rounds(rounds, hosts=2, epochs=5):
    """Rounds of nothing but epochs."""
    records = []
    for number in range(rounds):
        records.append(to_record(RoundBegan(number)))
        records += [
            lived(number, host, epoch) for epoch in range(2, epochs) for host in range(hosts)
        ]
    return records


def folded(kind, files):
    """The view of all records, rank after rank."""
    view = RunView(kind, config_of(kind))
    for rank, records in files.items():
        for record in records:
            view.fold(record, rank)
    return view


def _comparable(value):
    return list(value) if isinstance(value, array) else vars(value)


def plain(view, ranks=1):
    """All that a view shows, to compare.

    The order between ranks is that of arrival, so there it does not count.
    """
    log = view.log
    shown = {**vars(view), "lines": log, "newest": [], "ops": view.ops}
    if ranks > 1:
        shown["lines"] = (
            [{**vars(line), "number": 0} for line in log] if view.events <= LOG_LINES else []
        )
        shown |= {name: sorted(shown[name], key=repr) for name in ("lines", "results", "ledgers")}
    return json.dumps(shown, default=_comparable, sort_keys=True, indent=1)
