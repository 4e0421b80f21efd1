"""The page's curves, list of runs and comparison in a real browser, over made-up metrics."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from viewed_runs import served
from waiting import until

pytestmark = pytest.mark.extras

STEPS = 40
METRICS = (
    *("reward", "reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "loss", "learning_rate", "step_time"),
    *(f"environment/number_{i}" for i in range(40)),
)


def write_run(folder: Path, *, learning_rate: float, steps: int = STEPS) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"train:\n  learning_rate: {learning_rate}\n  steps: {steps}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(as_line(step))
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "kind": "eval", "eval/accuracy": step / 50}) + "\n")
    start = {"timestamp": 1000.0, "step": 0, "event": "start", "steps_done": 0, "steps": steps}
    again = {"timestamp": 1000.0 + 2 * 20, "step": 20, "event": "start", "steps_done": 20, "steps": steps}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(again) + "\n")
    return folder


def as_line(step: int) -> str:
    values = {name: 1.0 + step + place for place, name in enumerate(METRICS)} | {"reward": step / 100}
    return json.dumps({"step": step, "kind": "train", "timestamp": 1000.0 + 2 * step, **values}) + "\n"


@pytest.fixture(scope="module")
def made_up(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made_up")
    write_run(root / "a", learning_rate=1e-4)
    write_run(root / "b", learning_rate=3e-4)
    return root


@pytest.fixture(scope="module")
def address(made_up: Path) -> Iterator[str]:
    with served("--list", made_up) as address:
        yield address


def card(page: Any, name: str) -> Any:
    return page.get_by_role("article", name=name, exact=True).first


def chart(page: Any, name: str) -> Any:
    """The part of a drawn chart that takes the mouse, and its size."""
    over = card(page, name).locator(".u-over")
    over.wait_for()
    return over, over.bounding_box()


def drag(page: Any, box: dict[str, float], start: float, stop: float) -> None:
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + stop * box["width"], y, steps=4)
    page.mouse.up()


def shown_range(page: Any, name: str) -> tuple[float, float]:
    """First and last step that the cursor finds in a chart."""
    over, box = chart(page, name)
    found = []
    for place in (1, box["width"] - 1):
        over.hover(position={"x": place, "y": 40})
        found.append(float(re.search(r"step ([\d,]+)", card(page, name).inner_text())[1].replace(",", "")))
    return found[0], found[1]


def test_zoom_and_cursor_are_linked(open_page, address):
    page = open_page(address, "#/run/a/curves")
    _, box = chart(page, "reward")
    drag(page, box, 0.5, 0.75)
    reset = page.get_by_role("button", name="Reset zoom")
    reset.wait_for()
    low, high = shown_range(page, "entropy")
    assert 18 <= low < high <= 32
    over, _ = chart(page, "reward")
    over.dblclick(position={"x": 30, "y": 30})
    reset.wait_for(state="hidden")
    assert shown_range(page, "entropy") == (1, STEPS)
    assert page.url.endswith("#/run/a/curves")  # no step was opened
    over.hover(position={"x": box["width"] - 1, "y": 40})
    assert "0.4" in card(page, "reward").inner_text()
    assert str(STEPS + 4) in card(page, "entropy").inner_text()  # its value at the same step


@pytest.mark.parametrize("x", ["step", "time"])
def test_a_click_on_a_point_opens_its_step(browser, address, x):
    page = browser.new_page()  # the made-up runs have no completions, so that the step itself is not found
    page.goto(address)
    page.goto(address.split("?")[0] + f"#/run/a/curves?x={x}")
    over, box = chart(page, "reward")
    over.click(position={"x": box["width"] - 1, "y": 40})
    page.wait_for_url(f"**/#/run/a/step/{STEPS}")
    page.go_back()
    over, box = chart(page, "eval/accuracy")
    over.click(position={"x": box["width"] - 1, "y": 40})
    page.wait_for_url(f"**/#/run/a/step/{STEPS}?kind=eval")
    page.close()


def test_options_are_in_the_address(open_page, address):
    page = open_page(address, "#/run/a/curves")
    chart(page, "reward")
    page.get_by_label("Log scale").check()
    page.get_by_role("radio", name="Time").click()
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_role("searchbox").fill("grad")
    page.reload()
    chart(page, "grad_norm")
    assert page.get_by_label("Log scale").is_checked()
    assert page.get_by_role("radio", name="Time").get_attribute("aria-checked") == "true"
    assert page.get_by_label("Smoothing").input_value() == "0.9"
    assert page.get_by_role("searchbox").input_value() == "grad"
    assert card(page, "reward").count() == 0


def test_only_charts_in_view_are_fetched(open_page, address):
    page = open_page(address)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/curves?" in request.url else None)
    page.goto(address.split("?")[0] + "#/run/a/curves")
    chart(page, "reward")
    assert not any("environment" in url for url in asked)
    page.locator("summary", has_text="Turns and tools").click()
    chart(page, "environment/number_0")
    assert not any("number_39" in url for url in asked)
    card(page, "environment/number_39").scroll_into_view_if_needed()
    chart(page, "environment/number_39")


def test_marks_are_named_under_the_cursor(open_page, address):
    page = open_page(address, "#/run/a/curves?names=reward")
    over, box = chart(page, "reward")
    over.hover(position={"x": box["width"] * (20 - 1) / (STEPS - 1), "y": 60})
    mark = card(page, "reward").locator(".chart-mark")
    mark.wait_for()
    assert "estart" in mark.inner_text()


def test_runs_are_compared(open_page, address):
    page = open_page(address, "#/runs")
    for run in "ab":
        page.get_by_label(f"Select {run} to compare").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    legend = page.get_by_role("list", name="Runs")
    legend.wait_for()
    texts = legend.get_by_role("listitem").all_inner_texts()
    assert ["0.0001" in texts[0], "0.0003" in texts[1]] == [True, True]
    chart(page, "reward")
    assert card(page, "reward").locator(".chart-value").count() == 2
    page.get_by_role("heading", name="Configuration keys that differ").wait_for()
    page.get_by_role("button", name="Remove b").click()
    until(lambda: legend.get_by_role("listitem").count() == 1)
    page.get_by_label("Add a run to the charts").select_option("b")
    until(lambda: legend.get_by_role("listitem").count() == 2)


def test_charts_are_files_of_values(open_page, address):
    page = open_page(address, "#/run/a/curves?names=reward")
    chart(page, "reward")
    with page.expect_download() as download:
        card(page, "reward").hover()
        page.get_by_role("link", name="CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "run,step,timestamp,reward"
    assert len(lines) == 1 + STEPS
    assert lines[-1] == "a,40,1080.0,0.4"


def test_new_steps_and_new_runs_appear_without_reload(open_page, tmp_path):
    run = write_run(tmp_path / "first", learning_rate=1e-4, steps=10)
    with served("--list", tmp_path) as address:
        page = open_page(address, "#/run/first/curves?names=reward")
        chart(page, "reward")
        page.evaluate("window.isSamePage = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(as_line(77))
        until(lambda: "0.77" in card(page, "reward").inner_text())
        page.goto(address.split("?")[0] + "#/runs")
        page.get_by_text("first").first.wait_for()
        write_run(tmp_path / "second", learning_rate=1e-4, steps=1)
        until(lambda: page.get_by_role("link", name="second").count() == 1)
        assert page.evaluate("window.isSamePage")


def test_a_lost_connection_is_told(browser, made_up):
    with served(made_up / "a") as address:
        page = browser.new_page()
        page.goto(address)
        page.locator("main h1").first.wait_for()
    page.get_by_text("The connection to `cohort view` was lost").wait_for()
    assert page.locator("main h1").first.is_visible()  # what was there stays
    page.close()


def test_an_error_is_shown_with_its_text(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.locator("main h1").first.wait_for()
    page.evaluate("setTimeout(() => { throw new Error('no such thing as <b>chart</b>'); })")
    page.get_by_text("no such thing as <b>chart</b>").wait_for()
    assert page.locator("main h1").first.is_visible()
    page.close()


def test_a_module_that_does_not_load_is_told(browser, address):
    page = browser.new_page()
    page.route("**/js/dom.js", lambda route: route.abort())
    page.goto(address)
    page.get_by_text("The page failed to load").wait_for()
    page.close()


def test_a_run_without_metrics_says_so(open_page, tmp_path):
    with served(write_run(tmp_path / "new", learning_rate=1e-4, steps=0)) as address:
        page = open_page(address, "#/run/new/curves")
        page.get_by_text("There are no metrics yet.").wait_for()
        page.goto(address.split("?")[0] + "#/run/new")
        page.get_by_text("first step").first.wait_for()


def test_the_theme_is_kept(open_page, address):
    page = open_page(address, "#/runs")
    page.get_by_role("heading", name="Runs").wait_for()
    background = (
        "getComputedStyle(document.body).backgroundColor, getComputedStyle(document.documentElement).colorScheme"
    )
    for expected in ("light", "dark"):
        page.keyboard.press("t")
        page.reload()
        page.get_by_role("heading", name="Runs").wait_for()
        assert page.evaluate(background) == expected


def test_the_focus_goes_with_the_view(open_page, address):
    page = open_page(address, "#/run/a")
    page.get_by_role("link", name="Curves").focus()
    page.keyboard.press("Enter")
    chart(page, "reward")
    assert page.evaluate("document.activeElement.textContent") == "Curves"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "reward"
    page.keyboard.press("Enter")
    page.get_by_text("All metrics").wait_for()
    page.locator("#main:focus").wait_for()


def test_smoothing(open_page, address):
    page = open_page(address)
    smooth = "import('/static/js/smooth.js').then(({smooth}) => smooth(%s))"
    # a mean without the bias of its start: 0.5 of (1 + 0.5), then (0.25 * 0 + 0.5 * 0 + 1) / 1.75
    assert page.evaluate(smooth % "[1, 2, 3], [0, 0, 7], 0.5") == pytest.approx([0, 0, 4])
    assert page.evaluate(smooth % "[1, 2, 3], [5, null, 5], 0.9") == [pytest.approx(5), None, pytest.approx(5)]
    assert page.evaluate(smooth % "[1, 2], [1, 4], 0") == [1, 4]
    # a value two steps away weighs as much as if there were one between them
    assert page.evaluate(smooth % "[1, 3], [0, 5], 0.5") == pytest.approx([0, 4])
