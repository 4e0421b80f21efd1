"""The page of `cohort view` in a real browser: every view, live updates, hostile and damaged runs, keyboard, phones."""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from cohort_view import export
from viewed_runs import (
    HOSTILE_NAME,
    LARGE,
    STEPS,
    lengthen_first_completion,
    metrics_lines,
    served,
    start_training,
    steps_done,
)
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.extras

# Address of each view within a run, and what must be visible there
VIEWS = {
    "": "Step 6",
    "/curves": "Reward",
    "/step/3": "Step 3",
    "/step/3/group/0": "Prompt",
    "/step/3/completion/0": "Probability",
    "/search?where=reward+%3E%3D+0": "matches",
    "/eval": "Accuracy after step 6",
    "/machine": "Time by phase",
    "/config": "Changed from the defaults",
}
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True}


def go(page: Any, address: str, view: str) -> Any:
    """Open another view in an open page and return the element that it is in."""
    page.locator("main > section").first.evaluate("(section) => section.setAttribute('data-left', '')")
    page.goto(address.split("?")[0] + view)
    page.locator("main > section:not([data-left])").wait_for()
    return page.locator("main")


def run_view(run: str, view: str = "") -> str:
    """Address of a run's view."""
    return f"#/run/{quote(run, safe='')}{view}"


@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, PHONE],
    ids=["light", "dark", "narrow"],
)
def test_every_view_renders_and_fits_the_screen(open_page, address, options):
    page = open_page(address, **options)
    for view, text in [*((run_view("learns", view), text) for view, text in VIEWS.items()), ("#/runs", "learns")]:
        main = go(page, address, view)
        main.get_by_text(text).first.wait_for()
        assert main.locator(".failure").count() == 0, view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(17, 20, 23)") == (options.get("color_scheme") == "dark")


def test_the_token_leaves_the_address(open_page, address):
    page = open_page(address)
    page.locator("main h1").first.wait_for()
    assert "token" not in page.url


def test_why_a_step_learned_nothing_takes_three_clicks(open_page, address):
    """From the start page: the banner, a step of it, a group."""
    page = open_page(address, "#/run/flat")
    page.get_by_text("All rewards are 0").first.click()
    point = page.locator(".chart .u-over, .u-over").first
    point.wait_for()
    box = point.bounding_box()
    point.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.locator(".banner-text", has_text="learned nothing").wait_for()
    page.locator(".group-prompt").first.click()
    page.get_by_text("All 4 rewards are 0, so every advantage is 0").wait_for()


def test_any_step_is_reached_by_its_number_and_from_the_strip(open_page, address):
    page = open_page(address, run_view("learns", "/step/3"))
    page.get_by_label("Go to step").fill("5")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 5").wait_for()
    assert page.locator(".step-cells .is-current").get_attribute("title").startswith("Step 5: ")
    assert page.locator(".step-cells a").count() == STEPS
    page.locator(".step-cells a").nth(1).click()
    page.get_by_role("heading", name="Step 2").wait_for()


def test_groups_open_in_place_and_sort(open_page, address):
    page = open_page(address, run_view("learns", "/step/3"))
    rows = page.locator("summary.group-row")
    rows.first.wait_for()
    assert rows.count() == 4
    with page.expect_response("**sort=length**"):
        page.locator("label", has_text="Sort by").locator("select").select_option("length")
    page.wait_for_url("**sort=length**")
    page.wait_for_timeout(100)
    page.locator(".group-prompt").first.click()
    cards = page.locator(".completion-card")
    cards.first.wait_for()
    sizes = [int(text[1:]) for text in page.locator(".completion-times").all_inner_texts()]
    assert sum(sizes) + cards.count() - len(sizes) == 8  # identical completions share a card
    page.reload()
    page.locator("summary.group-row").first.wait_for()
    assert page.locator(".step-controls label", has_text="Sort by").locator("select").input_value() == "length"


def test_back_returns_to_the_same_place(open_page, address):
    page = open_page(address, run_view("learns", "/step/3"), viewport={"width": 1280, "height": 300})
    page.locator(".group-prompt").first.click()
    page.locator(".completion-card").first.wait_for()
    page.evaluate("scrollTo(0, 400)")
    page.wait_for_function("() => history.state?.top === 400")
    page.locator(".completion-foot a").first.evaluate("(link) => link.click()")
    page.locator(".token-view").wait_for()
    page.go_back()
    page.locator("details.group[open] .completion-card").first.wait_for()
    page.wait_for_function("() => scrollY === 400")


def test_held_out_questions_are_filtered_and_lead_to_their_answers(open_page, address):
    page = open_page(address, run_view("learns", "/eval"))
    show = page.locator("label", has_text="Show").locator("select")
    show.select_option("never")
    page.wait_for_url("**/eval?show=never")
    page.reload()
    show.wait_for()
    assert show.input_value() == "never"
    show.select_option("all")
    page.locator("th.question a").first.click()
    page.get_by_text("3 matches in").wait_for()  # one of each evaluation


def test_a_list_of_runs_shows_its_first_run(open_page, runs, tmp_path):
    with served("--list", tmp_path) as address:
        page = open_page(address)
        page.get_by_text("There are no runs in this folder yet").wait_for()
        shutil.copytree(runs / "learns", tmp_path / "learns")
        page.locator("a.run-link").wait_for()
        page.close()


def test_completions_are_compared_word_by_word(open_page, address):
    page = open_page(address, run_view("learns", "/step/3/group/0"))
    page.locator(".completion-card").first.wait_for()
    compare = page.locator("label", has_text="Compare with").locator("select")
    compare.select_option(index=1)
    assert page.locator(".completion-card.is-reference").count() == 1
    page.get_by_label("Mark words").check()
    page.locator(".completion-card ins").first.wait_for()
    assert page.locator(".completion-card del").count() > 0


def test_tokens_have_colors_numbers_and_copies(open_page, address):
    page = open_page(address, run_view("learns", "/step/3"), permissions=["clipboard-read", "clipboard-write"])
    trained = page.evaluate(
        """async () => {
          const step = await (await fetch("/api/runs/learns/steps/3?limit=50")).json();
          return step.groups.flatMap((group) => group.rows).find((row) => row.advantage > 0)?.row
            ?? step.groups[0].rows[0].row;
        }"""
    )
    go(page, address, run_view("learns", f"/step/3/completion/{trained}"))
    tokens = page.locator(".token-sequences .token")
    tokens.first.wait_for()
    assert page.locator("[data-value=ratio]").count() == 0  # trainer and sampler agree
    for quantity in ("entropy", "push", "probability"):
        page.locator(f"[data-value={quantity}]").click()
        assert page.locator(".legend-bar .token").count() >= 9, quantity
    page.locator("[data-value=push]").click()
    assert page.locator(".token-sequences .token.q8").count() >= 1  # the advantage is positive
    assert len({*page.locator(".token-sequences .token").evaluate_all("(all) => all.map((one) => one.className)")}) > 2
    text_color = page.locator("body").evaluate("(node) => getComputedStyle(node).color")
    colored = '.token-sequences .token:is([class*=" q"], [class*=" n"])'
    colors: set[str] = set()
    for quantity in ("entropy", "probability", "push"):
        page.locator(f"[data-value={quantity}]").click()
        colors |= {
            *page.locator(f"{colored}, {colored} i").evaluate_all(
                "(all) => all.map((one) => getComputedStyle(one).color)"
            )
        }
    assert colors == {text_color}, "signs are as dark as text where they are on a color"
    tokens.first.hover()
    numbers = page.locator(".token-numbers")
    assert "Entropy" in numbers.inner_text()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert "Position\n2" in numbers.inner_text()
    page.keyboard.press("End")
    assert "<|end|>" in numbers.inner_text()
    assert "special" in numbers.inner_text()
    page.get_by_role("button", name="Copy JSON").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert len(copied["sequences"][0]["tokens"]) == tokens.count()
    assert copied["sequences"][0]["tokens"][0]["loss_weights"] > 0


def test_missing_token_values_name_the_setting(open_page, address):
    page = open_page(address, run_view("flat", "/step/2/completion/0?color=entropy"))
    page.get_by_text("Set run.record_tokens: true").wait_for()


def test_the_page_follows_a_run_without_reload(open_page, runs, tmp_path):
    run = shutil.copytree(runs / "learns", tmp_path / "copy")
    lines = metrics_lines(run)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    (run / "status.json").unlink()
    with served(run) as address:
        page = open_page(address)
        page.get_by_text("Step 2", exact=False).first.wait_for()
        page.evaluate("window.isSamePage = true")
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write("".join(lines[3:]))
        page.get_by_text(f"Step {STEPS}", exact=False).first.wait_for()
        assert page.evaluate("window.isSamePage")
        page.close()


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
            go(page, address, run_view("live", "/curves"))
            page.locator(".u-over").first.wait_for()
            page.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("view", "place"), [("machine", 0.4), ("eval", 0.5)])
def test_a_restart_is_marked_on_charts(open_page, runs, tmp_path, view, place):
    run = shutil.copytree(runs / "learns", tmp_path / "restarted")
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"timestamp": 2e9, "step": 3, "event": "start", "steps_done": 3}) + "\n")
    with served(run) as address:
        page = open_page(address, run_view("restarted", f"/{view}"))
        chart = page.locator(".band-chart").first
        over = chart.locator(".u-over")
        over.wait_for()
        over.hover(position={"x": over.bounding_box()["width"] * place, "y": 50})
        chart.get_by_text("Restarted after step 3").wait_for()
        page.close()


def test_charts_beside_tables_are_saved_as_csv(open_page, address):
    for view, first in (("machine", '"Step","Rollout","Reward"'), ("eval", '"Step","Accuracy"')):
        page = open_page(address, run_view("learns", f"/{view}"))
        chart = page.locator(".band-chart").first
        chart.hover()
        with page.expect_download() as download:
            chart.get_by_role("button", name="CSV").click()
        header, *rows = Path(download.value.path()).read_text().splitlines()
        assert header.startswith(first) and len(rows) > 1 and all("," in row for row in rows)


def test_search_finds_completions_and_opens_them(open_page, address):
    page = open_page(address, run_view("learns", "/search"))
    text, where = (page.get_by_label(name, exact=True) for name in ("Text", "Condition"))
    page.get_by_role("button", name="reward", exact=True).click()  # of the list of columns
    page.keyboard.type(" >= 1 and length > 3")
    page.keyboard.press("Enter")
    page.locator("a.search-match").first.wait_for()
    assert "where=reward" in page.url
    where.fill("reward >= 1 and lenght > 3")
    page.keyboard.press("Enter")
    said = page.locator(".search-error")
    said.get_by_text("There is no column lenght; did you mean length?").wait_for()
    place, caret = said.locator("pre").inner_text().splitlines()
    assert place[caret.index("^") :].startswith("lenght")
    where.fill('kind == "step"')
    text.fill("####")
    page.keyboard.press("Enter")
    page.locator("a.search-match mark").first.wait_for()
    page.get_by_role("button", name="Search", exact=True).wait_for()  # it is Cancel until the end
    assert set(page.locator("mark").all_text_contents()) == {"####"}
    num_found = page.locator("a.search-match").count()
    page.locator("a.search-match").first.click()
    page.locator(".token-view").wait_for()
    page.go_back()
    page.locator("a.search-match").first.wait_for()
    assert (text.input_value(), where.input_value()) == ("####", 'kind == "step"')
    assert page.locator("a.search-match").count() == num_found


def test_hostile_text_is_only_ever_text(open_page, address):
    page = open_page(address)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    runs = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["runs"]
    (run,) = [run["id"] for run in runs if run["name"] == HOSTILE_NAME]
    last = f"/step/{STEPS}"
    for view in [*VIEWS, last, f"{last}/group/0", f"{last}/completion/0", f"/curves?names=reward,{HOSTILE_NAME}"]:
        main = go(page, address, run_view(run, view))
        until(lambda main=main: len(main.inner_text()) > 40)  # search fills in later
        assert main.locator("script, svg[onload], img, iframe, a[href^=javascript]").count() == 0, view
    go(page, address, run_view(run, f"{last}/group/0"))
    page.get_by_text("<script>window.pwned=1</script>").first.wait_for()
    page.locator(".chip-warning", has_text="<b>unbroken</b>").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.body.innerText.length") < LARGE / 10
    go(page, address, run_view(run, "/step/3/completion/4"))
    token = page.locator(".token-sequences .token").first
    token.wait_for()
    assert token.inner_text() == "<img·src=x·onerror=window.pwned=1>⟨RLO⟩"
    assert page.evaluate("typeof pwned") == "undefined"
    assert dialogs == []


def test_a_damaged_run_is_shown_with_what_is_wrong(open_page, address):
    page = open_page(address, allowed="Failed to load resource")
    for view in [*VIEWS, f"/step/{STEPS}", f"/step/{STEPS}/group/0", f"/step/{STEPS}/completion/0", "/step/99"]:
        main = go(page, address, run_view("broken", view))
        until(lambda main=main: len(main.inner_text()) > 40)  # search fills in later
        assert main.get_by_text("The page failed to load").count() == 0
    go(page, address, run_view("broken", f"/step/{STEPS}"))
    page.get_by_text(f"step-{STEPS:06d}.parquet").first.wait_for(state="attached")
    go(page, address, run_view("broken", "/config"))
    page.get_by_text("config.yaml is missing, empty or cannot be read").wait_for()
    assert page.get_by_text("Every key has its default value").count() == 0


def test_every_view_says_that_the_folder_is_gone(open_page, runs: Path, tmp_path):
    run = tmp_path / "gone"
    shutil.copytree(runs / "learns", run)
    with served(run) as address:
        page = open_page(address, run_view("gone", "/eval"), allowed="404")
        page.get_by_text("Accuracy by step").wait_for()
        shutil.rmtree(run)
        said = page.locator("main").get_by_text(f"The folder {run} is gone")
        said.wait_for()
        for view in VIEWS:
            go(page, address, run_view("gone", view))
            said.wait_for()
        shutil.copytree(runs / "learns", run)
        page.get_by_text("Changed from the defaults").wait_for()


def test_the_keyboard_is_enough(open_page, address):
    page = open_page(address, run_view("learns", "/step/3"))
    page.locator("summary.group-row").first.wait_for()
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.matches('summary.group-row')")
    page.keyboard.press("Enter")
    page.locator(".completion-card").first.wait_for()
    page.keyboard.press("]")
    page.get_by_role("heading", name="Step 4").wait_for()
    page.keyboard.press("[")
    page.get_by_role("heading", name="Step 3").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("Next step").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("h")
    page.get_by_role("heading", name="Held-out").wait_for()
    before = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t")  # system, light, dark
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != before


def test_a_long_completion_renders_in_pieces(open_page, runs, tmp_path):
    """20,000 tokens: the first are there at once, and recoloring makes no new nodes."""
    run = shutil.copytree(runs / "learns", tmp_path / "long")
    lengthen_first_completion(run, STEPS, 20_000)
    with served(run) as address:
        page = open_page(address, run_view("long", f"/step/{STEPS}/completion/0"))
        page.locator(".token").nth(10).wait_for()
        page.wait_for_function("() => document.querySelectorAll('.tokens .token').length === 20000")
        page.evaluate("document.querySelectorAll('.tokens .token')[19999].isSameNode_ = true")
        page.locator("[data-value=entropy]").click()
        assert page.evaluate("document.querySelectorAll('.tokens .token')[19999].isSameNode_")
        page.close()


def test_an_export_opens_from_disk(open_page, runs: Path, tmp_path, cohort):
    file = tmp_path / "report.html"
    assert cohort("view", runs / "learns", "--export", file).code == 0
    assert file.stat().st_size < 5_000_000
    page = open_page(file.as_uri())
    page.get_by_text(f"Step {STEPS}", exact=False).first.wait_for()
    for view in ("/curves", "/eval", "/machine", "/config"):
        page.goto(f"{file.as_uri()}#/run/learns{view}")
        page.get_by_text(VIEWS[view]).first.wait_for()
    page.goto(f"{file.as_uri()}#/run/learns/step/{STEPS}")
    page.locator(".group-prompt").first.click()
    page.locator(".completion-foot a").first.click()
    page.locator(".token-sequences .token").first.wait_for()


def test_a_hostile_run_exported_is_only_text(open_page, runs: Path, tmp_path, cohort):
    file = tmp_path / "report.html"
    assert cohort("view", runs / HOSTILE_NAME, "--export", file).code == 0
    page = open_page(file.as_uri())
    until(lambda: len(page.locator("main").inner_text()) > 40)
    assert page.evaluate("typeof pwned") == "undefined"


def test_an_export_links_only_to_what_it_has(open_page, runs: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_NUM_TOKEN_VIEWS", 1)
    export.export_run(runs / "learns", tmp_path / "report.html")
    address = (tmp_path / "report.html").as_uri()
    page = open_page(f"{address}#/run/learns/step/1/group/0")
    page.locator(".completion-foot").first.wait_for()
    assert page.locator(".completion-foot a").count() == 1
    page.locator(".completion-foot a").click()
    page.locator(".token-sequences .token").first.wait_for()
    assert page.locator(".step-nav a.button").count() == 0
    page.goto(f"{address}#/run/learns/eval")
    page.get_by_text(VIEWS["/eval"]).first.wait_for()
    assert page.locator("th a[href]").count() == 0
    page.goto(f"{address}#/run/learns/step/1/completion/5")
    page.get_by_text("not part of the exported report").wait_for()
    assert page.get_by_role("button", name="Try again").count() == 0
