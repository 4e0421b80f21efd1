"""The page of `cohort view` in a real browser: every view, live updates, hostile and damaged runs, reports."""

import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from viewed_runs import HOSTILE_NAME, LARGE, STEPS, go, run_view, served, start_training, steps_done
from waiting import PATIENCE_S, free_port, until

pytestmark = pytest.mark.extras

# Hash of each view of a run, and a text that is only there
VIEWS = {
    "": f"Step {STEPS} of {STEPS}",
    "?open=metrics,config,memory,warnings,log&names=reward": "Default",
    "/steps/3": "4 groups",
    "/steps/3?group=0&row=0&color=probability": "Color by",
    "/steps/3?where=reward+%3E%3D+0": "matches",
    "/questions?question=0": "Answers by step",
    "/questions?kind=step&question=0": "Training (24)",
}
HAS_AXE = find_spec("axe_playwright_python") is not None
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True}


def violations(page: Any) -> list[str]:
    """What axe-core finds wrong with the accessibility of the page; nothing where it is not installed."""
    if not HAS_AXE:
        return []
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("options", [{}, PHONE], ids=["wide", "narrow"])
def test_every_view_fits_the_screen_and_is_accessible(open_page, address, theme, options):
    page = open_page(address, color_scheme=theme, **options)
    wrong = []
    for view, text in [*((run_view("learns", view), text) for view, text in VIEWS.items()), ("#/runs", "Select two")]:
        main = go(page, address, view)
        main.get_by_text(text).or_(main.get_by_role("region", name=text)).or_(main.get_by_label(text)).first.wait_for()
        page.wait_for_load_state("networkidle")
        assert main.locator(".failure").count() == 0, view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        wrong += [f"{view}: {each}" for each in violations(page)]
    assert wrong == []
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(17, 20, 23)") == (theme == "dark")
    if not HAS_AXE:
        pytest.skip("the views fit, but axe-playwright-python, which checks their accessibility, is not installed")


def test_back_returns_to_the_same_place(open_page, address):
    page = open_page(address, run_view("learns"), viewport={"width": 1280, "height": 300})
    page.locator(".u-over").first.wait_for()
    page.get_by_text("Changed keys and command").click()
    page.get_by_text("Default", exact=True).wait_for()
    page.evaluate("scrollTo(0, 500)")
    page.wait_for_function("() => history.state?.top === 500")
    page.get_by_role("link", name="Questions").click()
    page.locator("[data-question]").first.wait_for()
    assert page.evaluate("scrollY") == 0
    page.go_back()
    page.get_by_text("Default", exact=True).wait_for()
    page.wait_for_function("() => scrollY === 500")


def test_the_page_follows_a_training_process(open_page, tmp_path):
    process = start_training(tmp_path / "live", "train.steps=500", "eval.every=0")
    try:
        until(lambda: steps_done(tmp_path / "live") >= 1)
        with served(tmp_path / "live") as address:
            page = open_page(address)
            page.get_by_text("Running").first.wait_for()
            seen = steps_done(tmp_path / "live")
            page.wait_for_function(
                "(seen) => Number(/Step (\\d+)/.exec(document.querySelector('main').innerText)?.[1]) > seen",
                arg=seen + 1,
                timeout=PATIENCE_S * 1000,
            )
            page.close()
    finally:
        process.kill()
        process.wait()


def test_hostile_text_is_only_ever_text(open_page, address):
    page = open_page(address)
    listed = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["runs"]
    (run,) = [run["id"] for run in listed if run["name"] == HOSTILE_NAME]
    last = f"/steps/{STEPS}?group=0"
    for view in [*VIEWS, last, f"{last}&row=0", f"?names=reward,{HOSTILE_NAME}", "?open=metrics,metrics Other"]:
        main = go(page, address, run_view(run, view))
        page.wait_for_load_state("networkidle")
        until(lambda main=main: len(main.inner_text()) > 40)
        assert main.locator("script, svg[onload], img, iframe, a[href^=javascript]").count() == 0, view
    go(page, address, run_view(run, last))
    page.get_by_text("<script>window.pwned=1</script>").first.wait_for()
    page.locator(".chip-warning", has_text="<b>unbroken</b>").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.body.innerText.length") < LARGE / 10
    go(page, address, run_view(run, "/steps/3?group=0&row=4&color=entropy"))
    token = page.locator(".tokens .token").first
    token.wait_for()
    assert token.inner_text() == "<img·src=x·onerror=window.pwned=1>⟨RLO⟩"
    go(page, address, run_view(run, "/questions"))
    page.get_by_text("⟨RLO⟩gnirts desrever").first.wait_for()
    page.locator("[data-question] button").first.click()
    page.locator(".text-block", has_text="⟨RLO⟩gnirts desrever⟨LRI⟩\u200b␀␛[31m").first.wait_for()
    go(page, address, run_view(run, "?open=metrics,warnings&find=gnirts"))
    read = "⟨RLO⟩gnirts desrever⟨LRI⟩⟨ZWSP⟩␀␛[31m"
    page.get_by_role("article", name=read, exact=True).get_by_role("heading", name=read, exact=True).wait_for()
    page.get_by_role("listitem").get_by_text(read, exact=True).wait_for()
    assert "\u202e" not in page.locator("html").inner_html()
    assert page.evaluate("typeof pwned") == "undefined"


def test_a_damaged_run_is_shown_with_what_is_wrong(open_page, address):
    page = open_page(address, allowed="Failed to load resource")
    for view in [*VIEWS, f"/steps/{STEPS}", f"/steps/{STEPS}?group=0&row=0", "/steps/99"]:
        main = go(page, address, run_view("broken", view))
        page.wait_for_load_state("networkidle")
        until(lambda main=main: len(main.inner_text()) > 40)
        assert page.get_by_text("failed").count() == 0, view
    go(page, address, run_view("broken", f"/steps/{STEPS}"))
    page.get_by_text(f"step-{STEPS:06d}.parquet").first.wait_for(state="attached")
    go(page, address, run_view("broken", "/questions"))
    page.get_by_text(f"eval-{STEPS:06d}.parquet").first.wait_for(state="attached")
    go(page, address, run_view("broken", "?open=config"))
    page.get_by_text("config.yaml is missing, empty or cannot be read").first.wait_for()


def test_every_view_says_that_the_folder_is_gone(open_page, runs: Path, tmp_path):
    run = tmp_path / "gone"
    shutil.copytree(runs / "learns", run)
    with served(run) as address:
        page = open_page(address, run_view("gone", "/questions"), allowed="404")
        page.locator("[data-question]").first.wait_for()
        shutil.rmtree(run)
        said = page.locator("main").get_by_text(f"The folder {run} is gone")
        said.wait_for()
        for view in VIEWS:
            go(page, address, run_view("gone", view))
            said.wait_for()
        shutil.copytree(runs / "learns", run)
        page.get_by_text("Training (24)").wait_for()
        page.close()


LEAVE_AT_ONCE = """
new MutationObserver((_, observer) => {
  if (!document.getElementById("main")) return;
  observer.disconnect();
  location.hash = "#/run/learns/questions";
}).observe(document, { childList: true, subtree: true });
"""


def test_a_link_followed_at_once_is_not_taken_back(open_page, runs: Path):
    with served(runs / "learns") as address:
        page = open_page("about:blank")
        page.add_init_script(LEAVE_AT_ONCE)  # before the page has made its one run the address
        page.goto(address)
        page.locator("[data-question]").first.wait_for()
        assert page.evaluate("location.hash") == "#/run/learns/questions"
        page.close()


def test_the_keyboard_is_enough(open_page, address):
    page = open_page(address, run_view("learns", "/steps/3"))
    page.locator("[data-group]").nth(3).wait_for()
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.matches('[data-group]')")
    page.keyboard.press("Enter")
    page.locator(".pane-group h2:focus").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("]")
    page.get_by_role("heading", name="Step 4").wait_for()
    page.keyboard.press("[")
    page.get_by_role("heading", name="Step 3").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("Next step").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Questions").focus()
    page.keyboard.press("Enter")
    page.locator("[data-question]").nth(1).wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator("[data-question]").nth(1).locator("[aria-expanded=true]:focus").wait_for()
    page.keyboard.press("/")  # on to the filter of the steps
    page.locator("input[type=search]:focus").first.wait_for()
    assert "/steps" in page.url


def test_the_theme_is_kept_and_the_token_is_not(open_page, address):
    page = open_page(address)
    for expected in ("light", "dark"):
        page.get_by_role("heading", name="Runs").wait_for()
        assert "token" not in page.url
        page.keyboard.press("t")
        page.reload()
        page.get_by_role("heading", name="Runs").wait_for()
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == expected


def test_runs_are_found_and_sorted(open_page, address):
    page = open_page(address, "#/runs")
    names = page.locator("a.run-link")
    page.get_by_label("Sort by").select_option("name")
    page.get_by_label("Find a run").fill("EARN")
    page.wait_for_url("**#/runs?sort=name&find=EARN")
    until(lambda: names.all_inner_texts() == ["learns"])
    page.get_by_label("Find a run").fill("nothing")
    page.get_by_text("No run matches “nothing”").wait_for()
    page.get_by_label("Find a run").fill("")
    until(lambda: names.count() > 3)
    assert names.all_inner_texts() == sorted(names.all_inner_texts())


def test_what_is_slow_or_fails_is_told(browser, address):
    page = browser.new_page()  # it has errors
    page.goto(address)
    held: list[Any] = []
    page.route("**/api/runs/learns/questions*", lambda route: held.append(route))
    go(page, address, run_view("learns", "/questions"))
    page.get_by_text("Loading…").wait_for()
    until(lambda: page.wait_for_timeout(10) or len(held) == 2)
    for route in held:
        route.abort()
    page.get_by_text("The server cannot be reached").wait_for()
    page.unroute("**/api/runs/learns/questions*")
    page.get_by_role("button", name="Try again").click()
    page.locator("[data-question]").first.wait_for()
    page.evaluate("setTimeout(() => { throw new Error('no such thing as <b>chart</b>'); })")
    page.get_by_text("no such thing as <b>chart</b>").wait_for()
    assert page.locator("[data-question]").first.is_visible()
    page.close()


def test_a_module_that_does_not_load_is_told(browser, address):
    page = browser.new_page()
    page.route("**/js/hooks.js", lambda route: route.abort())
    page.goto(address)
    page.get_by_text("The page failed to load").wait_for()
    page.close()


def test_a_lost_and_a_refused_connection_are_told(browser, runs):
    port = free_port()
    command = [sys.executable, "-m", "cohort", "view", str(runs / "learns"), "--port", str(port), "--no-open"]
    page = browser.new_page()
    for said in ("The connection to `cohort view` was lost", "open the new address that it printed"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+token=\S+", line)))
            if page.url == "about:blank":
                page.goto(address)
                page.locator(".u-over").first.wait_for()
                process.send_signal(signal.SIGINT)
            page.get_by_text(said).wait_for(timeout=PATIENCE_S * 1000)
            assert page.locator(".u-over").first.is_visible()  # what was there stays
            process.send_signal(signal.SIGINT)
    page.close()


def test_a_report_opens_from_disk_and_links_only_to_what_it_has(open_page, runs: Path, tmp_path, cohort):
    file = tmp_path / "report.html"
    assert cohort("view", runs / "learns", "--export", file).code == 0
    address = file.as_uri()
    page = open_page(address)
    page.locator(".u-over").first.wait_for()
    page.get_by_text("Exported from run learns").wait_for()
    go(page, address, run_view("learns", "?open=config"))
    page.get_by_text("Default", exact=True).wait_for()
    go(page, address, run_view("learns", f"/steps/{STEPS}"))
    page.locator(".completion-head").first.click()
    page.locator(".completion.is-open").wait_for()
    go(page, address, run_view("learns", "/questions?show=never"))
    page.locator("[data-question]").first.wait_for()
    assert page.locator("[data-question] button").count() == 0  # answers are not part of it
    go(page, address, run_view("learns", "/steps/77"))
    page.get_by_text("not part of the exported report").wait_for()
    assert violations(page) == []


def test_a_report_of_a_hostile_run_is_only_text(open_page, runs: Path, tmp_path, cohort):
    file = tmp_path / "report.html"
    assert cohort("view", runs / HOSTILE_NAME, "--export", file).code == 0
    page = open_page(file.as_uri())
    page.locator(".u-over").first.wait_for()
    assert page.evaluate("typeof pwned") == "undefined"
