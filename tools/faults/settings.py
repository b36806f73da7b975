"""Settings that no user can mean, by option, by --set, by file: one line and exit code 2, or a run that works.

A setting within its bounds may ask for a run of days: what has begun, in little memory, works, and is ended.
"""

import json
import os
import resource
import signal
import time

from esper.leyline.configuration import leaves
from esper.simic.config import TrainingConfig
from esper.trials.config import CompareConfig, RunConfig
from faults.commands import Bad, no_waiting
from simic.tiny_runs import Forked
from tools.faults import world
from tools.faults.driver import CLEAR, WORKS, Group

MODELS = {"ppo": TrainingConfig, "run": RunConfig, "compare": CompareConfig}
BEGINNING = 4.0
"""seconds after which what is still at work must have begun"""
MEMORY = 4 << 30
"""bytes beyond what a process has when it is forked"""
MARKUP = (
    "[/b]",
    "[red]",
    "[link=file:///etc/passwd]x[/link]",
    "\x1b[2J",
    "a\nb",
    "<script>",
    "{0.__class__}",
    "%s%n",
)
NUMBERS = (
    *(
        0,
        -1,
        1,
        2,
        3,
        0.5,
        -0.5,
        1e-300,
        1e300,
        -1e300,
        4e38,
        1e19,
        10**7,
        10**9,
        10**10,
        10**30,
        -(10**30),
    ),
    *(
        2**14,
        2**31,
        2**31 - 1,
        2**32,
        2**53,
        2**63,
        2**64,
        2**63 - 1,
        1.0000000001,
        5e-324,
        10**400,
    ),
)
RAW = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "inf",
        "1e999",
        "0x10",
        "1_000",
        "٣",
        "1e400",
        "--1",
        "",
        " ",
        "null",
        "true",
    ),
    *(
        "[]",
        "{}",
        "[null]",
        "[[1]]",
        '{"a":1}',
        "[" * 2000,
        '"' + "x" * 5000 + '"',
        "'",
        '"\\ud800"',
        "\\",
        "'; rm -rf /",
    ),
)
NAMES = (
    "digits",
    "blobs",
    "code",
    "cifar10",
    "cpu",
    "cuda:7",
    "cuda:99999999999",
    "mps",
    "r0c0",
    "r999c999",
    "conv_light",
)
POLICIES = (
    *(
        "greedy:share=nan",
        "greedy:share=1e400",
        "greedy:unknown=1",
        "schedule:epochs=-1",
        "schedule:epochs=" + "1," * 3000,
    ),
    *(
        "search:episodes=0",
        "search:episodes=-5",
        "search:hosts=1e9",
        "search:seed=x",
        "heuristic:",
        ":",
        "heuristic::::",
    ),
    *(
        "random:seed=99999999999999999999",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        "/etc",
        "never",
        "sham",
        "copy",
    ),
)
PATHS = (
    "",
    ".",
    "..",
    "/dev/null/x",
    "/proc/self/x",
    "/dev/null",
    "a" * 300,
    "a/" * 2100,
    "a\udcff",
    "~",
    "-",
    "--",
    "a//b/../c",
)


def value_for(draw):
    """Text of a value, as somebody would type it after `=`."""
    kind = draw.randrange(6)
    if kind <= 1:
        return str(draw.choice(NUMBERS))
    if kind == 2:
        return draw.choice(RAW)
    if kind == 3:
        return draw.choice([*NAMES, *MARKUP, *POLICIES, *PATHS])
    if kind == 4:
        return json.dumps(
            [
                draw.choice([*NUMBERS[:-1], *NAMES, *MARKUP, None, True, []])
                for _ in range(draw.randint(0, 4))
            ]
        )
    return "".join(
        chr(draw.choice([*range(32, 127), 0x202E, 0x1F600, 27, 10, 0xE9]))
        for _ in range(draw.randint(1, 40))
    )


def by_key(kind):
    """`--set KEY=VALUE`, of a key that there is, or of one that there is not."""

    def arguments(draw, number, place):
        keys = [key for key in leaves(MODELS[kind]) if key not in ("out", "imports")]
        changes = []
        for _ in range(draw.choice([1, 1, 1, 2])):
            key = draw.choice(keys)
            if draw.random() < 0.08:
                key = draw.choice(
                    [
                        key + ".x",
                        key[:-1],
                        key.split(".")[0],
                        draw.choice(MARKUP),
                        "",
                        ".",
                        "task..name",
                    ]
                )
            changes += ["--set", f"{key}={value_for(draw)}"]
        return [*world.command(kind, place / "run"), *(changes if number else [])]

    return arguments


def by_option(kind):
    names = {
        "ppo": ("--hosts", "--rounds", "--reward-family", "--preset"),
        "run": ("--policy", "--hosts", "--preset"),
        "compare": (
            "--policies",
            "--static",
            "--seeds",
            "--rates",
            "--final-of",
            "--pretrain",
            "--preset",
        ),
    }[kind]
    shared = (
        "--task",
        "--epochs",
        "--compute",
        "--slots",
        "--budget",
        "--max-seeds",
        "--seed",
        "--devices",
        "--executor",
    )
    more = (
        "--amp",
        "--compile",
        "--graph-memory",
        "--data-root",
        "--out",
        "--config-json",
        "--unknown",
    )

    def arguments(draw, number, place):
        option = draw.choice([*names, *names, *shared, *more])
        values = (
            PATHS
            if option in ("--out", "--data-root", "--config-json") and draw.random() < 0.6
            else None
        )
        values = (
            POLICIES if option in ("--policy", "--policies") and draw.random() < 0.6 else values
        )
        value = draw.choice(values) if values else value_for(draw)
        return [*world.command(kind, place / "run"), *([option, value] if number else [])]

    return arguments


def by_file(kind):
    """`--config-json`: a configuration with a value of another type, or no configuration at all."""

    def arguments(draw, number, place):
        path = place / "config.json"
        if number and draw.random() < 0.2:
            path.write_bytes(
                draw.choice(
                    [
                        b"",
                        b"[]",
                        b"null",
                        b"\xff",
                        b"[" * 10**5,
                        b'{"seed":1e999}',
                        draw.randbytes(99),
                    ]
                )
            )
        else:
            values = json.loads((world.finished(kind) / "config.json").read_text())
            for name in ("sha256", "command", "files", "code"):
                values.pop(name, None)
            place_of = values
            key = draw.choice(
                [key for key in leaves(MODELS[kind]) if key not in ("out", "imports")]
            ).split(".")
            for part in key[: draw.randint(0, len(key) - 1)]:
                place_of = place_of[part] if isinstance(place_of.get(part), dict) else place_of
            wrong = draw.choice(
                [*NUMBERS, *MARKUP, None, True, [], {}, [[None]], "text", "x" * 5000]
            )
            if number:
                place_of[draw.choice([key[-1], key[0], "unknown", ""])] = wrong
            path.write_text(json.dumps(values))
        return [kind, "--config-json", str(path), "--out", str(place / "run")]

    return arguments


def by_other_command(draw, number, place):
    """Commands that look, fetch, export."""
    text = draw.choice([*PATHS, *MARKUP, *NAMES, "/etc/passwd"])
    return draw.choice(
        [
            ["report", text, "--out", str(place / "page.html")],
            ["report", str(world.finished("run")), "--out", text or "x"],
            ["report"],
            ["runs", text],
            ["export", text, "--to", str(place / "to")],
            ["export", str(world.finished("run")), "--to", text or "/dev/null"],
            ["export", str(world.finished("ppo"))],
            ["data", "fetch", text, "--data-root", str(place)],
            ["--import", text, "runs", str(place)],
            [
                "demo",
                "--epochs",
                value_for(draw) if draw.random() < 0.5 else "7",
                "--out",
                "/dev/null/x",
            ],
            [
                "serve",
                text,
                "--port",
                value_for(draw),
                "--host",
                draw.choice(["", "x y", "999.1.1.1", "[/b]"]),
            ],
            ["watch", text],
            [text or "?"],
        ]
    )


def few_gigabytes(place):
    def prepare():
        no_waiting()
        os.chdir(place)
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))

    return prepare


def tried(make):
    """A case; the first is sound."""

    def play(draw, number, place):
        given = [argument.replace("\0", "") for argument in make(draw, number, place)]
        given = [
            argument.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
            for argument in given
        ]
        try:
            found = _ended(given, place)
            if not number and found == CLEAR and make is not by_other_command:
                raise Bad("sound settings are refused")
            return found
        except Bad as problem:
            raise Bad(f"{json.dumps(given[-4:])[:600]}: {problem}") from problem

    return play


def _ended(given, place):
    (place / "here").mkdir()
    process, ends = (
        Forked(place / "process", given, few_gigabytes(place / "here")),
        time.monotonic() + BEGINNING,
    )
    while not (done := os.waitpid(process.pid, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            return _begun(process, place)
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(done[1])
    said = process.err.read_text(errors="replace")
    if code == 0 or (
        code == 130 and "Continue with" in process.out.read_text(errors="replace")
    ):  # a short time limit
        return WORKS
    if code != 2 or "Traceback" in said:
        raise Bad(f"exit code {code}: {said[-1500:]}")
    if "Usage:" in said or "Usage:" in process.out.read_text(
        errors="replace"
    ):  # of an option, by the parser
        return CLEAR
    lines = said.splitlines()
    if len(lines) != 1 or not lines[0].startswith("esper: ") or "\x1b" in said:
        raise Bad(f"it is not one line: {said[-1500:]!r}")
    return CLEAR


def _begun(process, place):
    """What is still at work must have been accepted, and says so."""
    if not list(place.rglob("config.json")) and not process.out.stat().st_size:
        raise Bad(
            f"nothing has begun after {BEGINNING:g} seconds: {process.err.read_text()[-500:]}"
        )
    return WORKS


GROUPS = [
    *(
        Group("settings", f"esper {kind} --set", tried(by_key(kind)), 220, seconds=40)
        for kind in MODELS
    ),
    *(
        Group("settings", f"options of esper {kind}", tried(by_option(kind)), 100, seconds=40)
        for kind in MODELS
    ),
    *(
        Group("settings", f"esper {kind} --config-json", tried(by_file(kind)), 80, seconds=40)
        for kind in MODELS
    ),
    Group("settings", "other commands", tried(by_other_command), 100, seconds=40),
]
