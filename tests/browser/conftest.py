"""A real browser, real runs made by the trainer, and the page that `cohort view` serves of them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from viewed_runs import (
    HOSTILE_NAME,
    break_files,
    fill_with_hostile_text,
    go,
    served,
    start_training,
    write_made_up_run,
)
from waiting import PATIENCE_S

TIMEOUT_MS = 60_000  # the server has a low priority, and other work may go first
OWN = '''
def constant(completions, **columns):
    return [0.0] * len(completions)


def look_up(name: str) -> str:
    """Look up what a person wants, or what a thing costs in dollars.

    Args:
        name: a person, or a thing
    """
    raise LookupError(f"there is nothing about {name!r}")
'''
FINDINGS = [
    {"rule": "any", "level": level, "text": text, "advice": "Read some", "step": 20, "evidence": ["reward"]}
    for level, text in (("warning", "Reward 'short' rose while completions shrank"), ("good", "It learned"))
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; COHORT_CHROMIUM names another one than PATH."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra `bench`)")
    found = os.environ.get("COHORT_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed; Debian's package is `chromium`")
    return found


@pytest.fixture(scope="module")  # Playwright has an event loop running, in which other tests cannot start their own
def browser(chromium: str) -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def runs(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs: `learns`, `flat` (a constant reward), `tools` (each call fails), damaged copies, `hacked`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.py").write_text(OWN)
    constant = f"rewards=[{{use: '{folder}/own.py:constant'}}]"
    tool = f"rollout.tools=['{folder}/own.py:look_up']"
    started = [
        start_training(folder / "learns", "rollout.num_generations=8"),
        start_training(folder / "flat", constant, "eval.every=0", "run.record_tokens=false"),
        start_training(folder / "tools", tool, "train.steps=2", "eval.every=0", task="tools"),
    ]
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0, 0]
    write_made_up_run(folder / "hacked", steps=20, findings=FINDINGS)
    fill_with_hostile_text(shutil.copytree(folder / "learns", folder / HOSTILE_NAME))
    break_files(shutil.copytree(folder / "learns", folder / "broken"))
    return folder


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    """Address, with the token, of the page of all of `runs`."""
    with served("--list", runs) as address:
        yield address


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a new window; at the end, no window may have had an error or a violation of the policy."""
    windows = []
    errors: list[str] = []

    def open_at(address: str, view: str = "", *, allowed: str | None = None, **options: Any) -> Any:
        def note(error: str) -> None:
            if allowed is None or allowed not in error:
                errors.append(error)

        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        windows.append(browser.new_context(**{**usual, **options}))
        page = windows[-1].new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("console", lambda said: note(said.text) if said.type in ("error", "warning") else None)
        page.goto(address)
        if view:
            go(page, address, view)
        return page

    yield open_at
    for window in windows:
        window.close()
    assert errors == []
