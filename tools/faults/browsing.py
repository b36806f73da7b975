"""Hostile content in a real browser: no script of a stranger runs, no other server is asked, nothing breaks."""

import shutil
from collections import Counter
from urllib.parse import quote

from dashboard.web_runs import append, grow_run, seed_events
from esper.dashboard.report import write_report
from faults.commands import Bad
from tools.faults.driver import WORKS, Group, Skipped
from tools.faults.pages import served

BAD_TEXTS = (
    "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>",
    '"><svg onload=window.hacked=1>',
    "javascript:window.hacked=1",
    "</script><script>window.hacked=1</script><!--",
    "{{constructor.constructor('document.title=1')()}}",
    "\u202egnp.exe\u2028\u2029\ufeff\x07",
    "x" * 20_000,
)


def hostile_runs(folder):
    """Runs whose every text is hostile."""
    for number, text in enumerate(BAD_TEXTS):
        name = f"run {number} {text[:40].replace('/', '_')}"
        run = grow_run(
            folder / name, epochs=3, policy=text, out=text, data_root=text, imports={text: text}
        )
        append(
            run,
            *(event for batch in seed_events(0, 2, text[:99], "CULLED", text) for event in batch),
        )
        append(run, {"type": "HostRolledBack", "host": 0, "epoch": 2, "reason": text})
        append(
            run,
            {"type": text, "host": text, "epoch": [text]},
            {text: text},
            {"type": "RoundBegan", "round": text},
        )
        yield run, name


def browser(draw, number, place):
    """Every page and the report, in Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise Skipped("Playwright is not installed") from None
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        raise Skipped("Chromium is not installed")
    runs = list(hostile_runs(place / "runs"))
    write_report([run for run, _ in runs], place / "report.html")
    found, wrong = Counter(), []
    with served(place / "runs", place, 10.0) as (port, _), sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        address = f"http://127.0.0.1:{port}/"
        places = ["#/", *(f"#/run/{quote(name, safe='')}" for _, name in runs)]
        places += ["#/compare?" + "&".join(f"run={quote(name, safe='')}" for _, name in runs[:3])]
        for where in [*(address + hash_ for hash_ in places), (place / "report.html").as_uri()]:
            page = window.new_page()
            page.on("pageerror", lambda error, where=where: wrong.append(f"{where}: {error}"))
            page.on("dialog", lambda dialog, where=where: wrong.append(f"{where}: a dialog"))
            page.on(
                "request", lambda request, where=where: _ours(request.url, address, where, wrong)
            )
            page.goto(where)
            page.wait_for_selector("main")
            page.wait_for_timeout(700)
            if page.evaluate("window.hacked"):
                wrong.append(f"{where}: a stranger's script was run")
            page.close()
            found[WORKS] += 1
        window.close()
    if wrong:
        raise Bad("; ".join(wrong[:5]))
    return found


def _ours(url, address, where, wrong):
    if not url.startswith((address, "data:", "file:")):
        wrong.append(f"{where} asks {url}")


GROUPS = [Group("page", "hostile content in a browser", browser, seconds=240)]
