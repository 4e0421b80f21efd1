"""What the views do: charts of made-up metrics, steps with groups and tokens, questions, the list of runs."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from viewed_runs import STEPS, go, lengthen_first_completion, made_up_line, run_view, served, write_made_up_run
from waiting import until

pytestmark = pytest.mark.extras

MADE_UP_STEPS = 40


@pytest.fixture(scope="module")
def made_up(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the page of two runs of made-up metrics."""
    root = tmp_path_factory.mktemp("made_up")
    for name, rate in (("a", 1e-4), ("b", 3e-4)):
        write_made_up_run(root / name, learning_rate=rate, steps=MADE_UP_STEPS)
    with served("--list", root) as address:
        yield address


def card(page: Any, name: str) -> Any:
    return page.get_by_role("article", name=name, exact=True).first


def chart(page: Any, name: str) -> tuple[Any, float]:
    """The part of a drawn chart that takes the mouse, and its width."""
    over = card(page, name).locator(".u-over")
    over.wait_for()
    boxes: list[Any] = []
    until(lambda: boxes.append(over.bounding_box()) or boxes[-1])  # a chart is built anew when its data is there
    return over, boxes[-1]["width"]


def place_under(page: Any, name: str, x: float) -> float:
    """The step that a chart names at a share of its width."""
    over, width = chart(page, name)
    over.hover(position={"x": max(1, x * width - 1), "y": 40})
    return float(re.search(r"step ([\d,]+)", card(page, name).inner_text())[1].replace(",", ""))


def test_zoom_and_cursor_are_linked(open_page, made_up):
    page = open_page(made_up, run_view("a"))
    over, width = chart(page, "Reward and held-out accuracy")
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.5 * width, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * width, box["y"] + 50, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="Reset zoom")
    reset.wait_for()
    low, high = place_under(page, "Entropy", 0), place_under(page, "Entropy", 1)
    assert 18 <= low < high <= 32
    over.dblclick(position={"x": 30, "y": 30})
    reset.wait_for(state="hidden")
    assert (place_under(page, "Entropy", 0), place_under(page, "Entropy", 1)) == (1, MADE_UP_STEPS)
    assert page.url.endswith("#/run/a")  # no step was opened
    place_under(page, "Reward and held-out accuracy", 1)
    assert str(MADE_UP_STEPS + 4) in card(page, "Entropy").inner_text()  # its value at the same step


@pytest.mark.parametrize("x", ["step", "time"])
def test_a_click_on_a_point_opens_its_step(open_page, made_up, x):
    page = open_page(made_up, run_view("a", f"?x={x}&names=eval/accuracy"), allowed="404")  # they have no completions
    over, width = chart(page, "Entropy")
    over.click(position={"x": width - 1, "y": 40})
    page.wait_for_url(f"**/#/run/a/steps/{MADE_UP_STEPS}")
    page.go_back()
    over, width = chart(page, "Held-out accuracy")
    over.click(position={"x": width - 1, "y": 40})
    page.wait_for_url(f"**/#/run/a/steps/{MADE_UP_STEPS}?kind=eval")


def test_what_charts_show_is_in_the_address(open_page, made_up):
    page = open_page(made_up, run_view("a"))
    page.get_by_label("Log scale").check()
    page.get_by_role("radio", name="Time").click()
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_text("All metrics").click()
    page.get_by_label("Find a metric").fill("number_3")
    page.reload()
    chart(page, "Environment: number 39")
    assert page.get_by_label("Log scale").is_checked()
    assert page.get_by_role("radio", name="Time").get_attribute("aria-checked") == "true"
    assert page.get_by_label("Smoothing").input_value() == "0.9"
    assert page.get_by_label("Find a metric").input_value() == "number_3"
    assert card(page, "Environment: number 0").count() == 0


def test_only_charts_in_view_are_fetched(open_page, made_up):
    page = open_page(made_up)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/curves?" in request.url else None)
    go(page, made_up, run_view("a", "?open=metrics"))
    chart(page, "Entropy")
    assert not any("environment" in url for url in asked)
    page.locator("summary", has_text="Turns and tools").click()
    chart(page, "Environment: number 0")
    assert not any("number_39" in url for url in asked)
    page.mouse.wheel(0, 100_000)
    chart(page, "Environment: number 39")


def test_a_restart_is_named_under_the_cursor(open_page, made_up):
    page = open_page(made_up, run_view("a"))
    over, width = chart(page, "Entropy")
    over.hover(position={"x": width * (MADE_UP_STEPS / 2 - 1) / (MADE_UP_STEPS - 1), "y": 60})
    card(page, "Entropy").locator(".chart-mark", has_text="estart").wait_for()


def test_runs_are_compared(open_page, made_up):
    page = open_page(made_up, run_view("a", "?with=b"))
    table = page.get_by_role("region", name="Runs, and the configuration keys")
    table.get_by_text("0.0003").wait_for()
    chart(page, "Entropy")
    assert card(page, "Entropy").locator(".chart-value").count() == 2
    page.get_by_role("button", name="Remove b").click()
    table.wait_for(state="hidden")
    page.get_by_label("Add a run").select_option("b")
    table.wait_for()
    page.go_back()
    table.wait_for(state="hidden")


@pytest.fixture(scope="module")
def mixtures(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the page of `two`, with two sources, of `one`, with a single source, and of two runs that began.

    By their third step, `two` has sampled 5 of 10 prompts; `early` and `by_success`, of two steps, have sampled 4.
    """
    root = tmp_path_factory.mktemp("mixtures")
    outcomes = ("never_right", "sometimes_right", "always_right", "not_sampled")
    prompts = [
        {f"prompts/{name}": float(count) for name, count in zip(outcomes, counts, strict=True)}
        for counts in ((1, 0, 1, 8), (2, 1, 1, 6), (1, 2, 2, 5))
    ]
    of_two = [
        {"sources/web/reward": 0.25, "sources/web/accuracy": 0.5, "sources/web/mean_length": 20.0, **prompts[0]},
        {"sources/gsm8k/reward": 0.75, "sources/gsm8k/accuracy": 0.0, "sources/gsm8k/mean_length": 40.0, **prompts[1]},
        {"sources/web/reward": 0.5, "sources/web/accuracy": 1.0, "sources/web/mean_length": 30.0, **prompts[2]},
    ]
    heldout_of_two = {"eval/sources/web/accuracy": 0.125, "eval/sources/gsm8k/accuracy": 0.875}
    runs = {
        "two": (of_two, heldout_of_two),
        "one": ([{"sources/web/reward": 0.25}] * 3, {"eval/sources/web/accuracy": 0.125}),
        "early": (prompts[:2], {}),
        "by_success": (prompts[:2], {}),
    }
    for name, (rows, held_out) in runs.items():
        run = write_made_up_run(root / name, steps=0)
        (run / "config.yaml").write_text(f"data: {{sampling: {'by_success' if name == 'by_success' else 'uniform'}}}\n")
        with (run / "metrics.jsonl").open("w") as file:
            for step, row in enumerate(rows, 1):
                file.write(json.dumps({"step": step, "kind": "train", "reward": 0.5, **row}) + "\n")
            file.write(json.dumps({"step": 3, "kind": "eval", **held_out}) + "\n")
    with served("--list", root) as address:
        yield address


def test_sources_have_a_line_each_in_charts_of_their_own(open_page, mixtures):
    page = open_page(mixtures, run_view("two"))
    by_source = page.get_by_role("region", name="By source")
    by_source.locator(".u-over").nth(3).wait_for()
    cards = [" ".join(text.split()) for text in by_source.get_by_role("article").all_inner_texts()]
    assert cards == [
        "Reward gsm8k 0.75 at step 2 web 0.5",
        "Accuracy gsm8k 0% at step 2 web 100%",
        "Completion length gsm8k 40 at step 2 web 30",
        "Held-out accuracy gsm8k 87.5% web 12.5%",
    ]
    strokes = by_source.locator(".stroke").evaluate_all("(all) => all.map((one) => one.style.background)")
    assert strokes[:2] * 4 == strokes and strokes[0] != strokes[1]  # a source has one color
    page.get_by_label("Add a run").select_option("one")  # each run is one line then
    by_source.wait_for(state="hidden")


def test_a_run_of_one_source_looks_as_without(open_page, mixtures):
    page = open_page(mixtures, run_view("one"))
    chart(page, "Reward")
    assert page.get_by_role("region", name="By source").count() == 0
    assert page.get_by_role("article").count() == 1


def test_prompts_are_shown_by_outcome(open_page, mixtures):
    page = open_page(mixtures, run_view("two"))

    def said() -> str:
        return " ".join(card(page, "Prompts by outcome").locator(".chart-values").inner_text().split())

    assert place_under(page, "Prompts by outcome", 0) == 1
    assert said() == "Never right 1 Sometimes 0 Always 1 Not sampled yet 8"
    assert place_under(page, "Prompts by outcome", 1) == 3
    assert said() == "Never right 1 Sometimes 2 Always 2 Not sampled yet 5"
    go(page, mixtures, run_view("by_success"))  # 4 of 10 prompts
    until(lambda: said() == "Never right 2 Sometimes 1 Always 1 Not sampled yet 6")
    go(page, mixtures, run_view("early"))
    chart(page, "Reward")
    assert card(page, "Prompts by outcome").count() == 0


def test_new_steps_and_new_runs_appear_without_reload(open_page, tmp_path):
    with served("--list", tmp_path) as address:
        page = open_page(address)
        page.get_by_text("There are no runs in this folder yet").wait_for()
        run = write_made_up_run(tmp_path / "first", steps=10)
        chart(page, "Entropy")
        page.wait_for_url("**/#/run/first")  # which stays when there is another run
        page.evaluate("window.isSamePage = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(made_up_line(77))
        until(lambda: "0.77" in card(page, "Reward and held-out accuracy").inner_text())
        go(page, address, "#/runs")
        write_made_up_run(tmp_path / "second", steps=1)
        page.get_by_role("link", name="second").wait_for()
        assert page.evaluate("window.isSamePage")
        page.close()


def test_a_run_without_metrics_says_so(open_page, tmp_path):
    with served(write_made_up_run(tmp_path / "new", steps=0)) as address:
        page = open_page(address, run_view("new"))
        page.get_by_text("This run has no metrics").wait_for()
        go(page, address, run_view("new", "/steps"))
        page.get_by_text("No step of this run is done").wait_for()
        go(page, address, run_view("new", "/questions"))
        page.get_by_text("This run has no held-out evaluation yet").wait_for()
        page.close()


def test_any_step_is_reached_by_its_number_and_from_the_strip(open_page, address):
    page = open_page(address, run_view("learns", "/steps/3"))
    page.get_by_label("Go to step").fill("5")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 5").wait_for()
    steps = page.get_by_role("navigation", name="Steps")
    said = r"Step 5: (\d+)% of the groups mixed, (\d+)% all right, (\d+)% all wrong"
    shares = re.fullmatch(said, steps.locator(".is-current").get_attribute("title")).groups()
    assert sum(map(int, shares)) == 100
    background = steps.locator(".is-current").evaluate("(cell) => getComputedStyle(cell).backgroundImage")
    assert background.startswith("linear-gradient")
    steps.get_by_title("Step 2: ").click()
    page.get_by_role("heading", name="Step 2").wait_for()


def test_groups_sort_and_open_beside_the_list(open_page, address):
    page = open_page(address, run_view("learns", "/steps/3"))
    groups = page.locator("[data-group]")
    groups.nth(3).wait_for()
    page.get_by_label("Sort").select_option("order")
    page.wait_for_url("**sort=order**")
    page.wait_for_function("() => document.querySelector('[data-group]').dataset.group === '0'")
    groups.nth(2).click()
    page.get_by_role("heading", name="Group 2").wait_for()
    page.get_by_role("heading", name="Expected answer").wait_for()
    page.reload()
    page.get_by_role("heading", name="Group 2").wait_for()
    assert page.get_by_label("Sort").input_value() == "order"
    heads = page.locator(".completion-head")
    sizes = [int(times) for text in heads.all_inner_texts() for times in re.findall(r"× (\d+)", text)]
    assert sum(sizes) + heads.count() - len(sizes) == 8  # equal completions are shown once


def test_tokens_have_colors_numbers_and_a_place_in_the_address(open_page, address):
    page = open_page(address, run_view("learns", "/steps/3"))
    page.get_by_role("button", name="advantage +").first.click()
    tokens = page.locator(".tokens .token")
    tokens.first.wait_for()
    assert page.get_by_role("radio", name="Ratio").count() == 0  # trainer and sampler agree
    for quantity in ("Entropy", "Push", "Probability"):
        page.get_by_role("radio", name=quantity).click()
        page.wait_for_url(f"**color={quantity.lower()}**")
        page.get_by_role("img", name="Colors from").locator("i").nth(8).wait_for()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    numbers = page.locator(".token-numbers")
    assert re.search(r"Position\s*2\b", numbers.inner_text())
    page.keyboard.press("End")
    assert "<|end|>" in numbers.inner_text()
    assert "special" in numbers.inner_text().lower()


def test_a_long_completion_renders_in_pieces(open_page, runs, tmp_path):
    """20,000 tokens: the first are there at once, and recoloring makes no new nodes."""
    run = shutil.copytree(runs / "learns", tmp_path / "long")
    lengthen_first_completion(run, STEPS, 20_000)
    with served(run) as address:
        page = open_page(address, run_view("long", f"/steps/{STEPS}?group=0&row=0&color=probability"))
        page.wait_for_function("() => document.querySelectorAll('.tokens .token').length === 20000")
        page.evaluate("document.querySelectorAll('.tokens .token')[19999].isSameNode_ = true")
        page.get_by_role("radio", name="Entropy").click()
        page.wait_for_url("**color=entropy**")
        assert page.evaluate("document.querySelectorAll('.tokens .token')[19999].isSameNode_")
        page.close()


def test_a_filter_finds_completions_and_opens_them(open_page, address):
    page = open_page(address, run_view("learns", "/steps/3"))
    text, where = (page.get_by_label(name, exact=True) for name in ("Text", "Condition"))
    page.get_by_text("Columns and examples").click()
    page.get_by_role("button", name="reward", exact=True).click()
    page.keyboard.type(" >= 1 and lenght > 3")
    page.keyboard.press("Enter")
    said = page.locator(".filter-error")
    said.get_by_text("There is no column lenght; did you mean length?").wait_for()
    place, caret = said.locator("pre").inner_text().splitlines()
    assert place[caret.index("^") :].startswith("lenght")
    where.fill('kind == "step"')
    text.fill("####")
    page.keyboard.press("Enter")
    matches = page.locator("a.match")
    matches.locator("mark").first.wait_for()
    assert set(page.locator("mark").all_text_contents()) == {"####"}
    page.get_by_text(re.compile(r"^in \d+ files$")).wait_for()  # the search is done
    total = page.get_by_role("status").filter(has_text="matches").inner_text()
    matches.last.click()
    page.locator(".completion.is-open").wait_for()
    page.go_back()
    page.get_by_role("status").filter(has_text=total).wait_for()
    assert (text.input_value(), where.input_value()) == ("####", 'kind == "step"')


def test_questions_open_with_their_answers_by_step(open_page, address):
    page = open_page(address, run_view("learns", "/questions"))
    page.get_by_role("radio", name="Training (24)").click()
    page.get_by_label("Sort by").select_option("share")
    page.wait_for_url("**kind=step&sort=share")
    first = page.locator("[data-question]").first
    first.get_by_role("img", name="Right: ").wait_for()
    first.get_by_role("button").click()
    page.get_by_role("heading", name="Expected answer").wait_for()
    page.get_by_role("region", name="Answers by step").get_by_role("link", name="Step").first.click()
    page.wait_for_url("**/steps/*?group=*")
    page.locator(".completion-head").first.wait_for()
    page.go_back()
    page.locator("[data-question] [aria-expanded=true]").wait_for()
    page.go_back()
    page.locator("[data-question] [aria-expanded=true]").wait_for(state="hidden")
    assert page.get_by_label("Sort by").input_value() == "share"


def test_questions_keep_their_place_while_the_run_goes_on(open_page, runs, tmp_path):
    run = shutil.copytree(runs / "learns", tmp_path / "copy")
    last = run / "completions" / f"eval-{STEPS:06d}.parquet"
    last.rename(tmp_path / last.name)
    with served(run) as address:
        page = open_page(address, run_view("copy", "/questions"))
        page.get_by_text("Right, steps 0 to 3").wait_for()
        buttons = page.locator("[data-question] button")
        buttons.nth(5).click()
        page.get_by_role("heading", name="Expected answer").wait_for()
        buttons.nth(7).focus()
        focused = page.evaluate("document.activeElement.isSameButton_ = true, document.activeElement.textContent")
        (tmp_path / last.name).rename(last)
        page.get_by_text(f"Right, steps 0 to {STEPS}").wait_for()
        assert page.evaluate("document.activeElement.isSameButton_ && document.activeElement.textContent") == focused
        assert page.get_by_role("region", name="Answers by step").get_by_role("link").count() == 3
        page.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rewards/right/mean", "Reward “right”"),
        ("eval/turns/max", "Held-out: Turns: max"),
        ("constructor", "Constructor"),
        ("\u202ea", "⟨RLO⟩a"),
        ("eval/", "Eval: "),
        ("_s", "_s"),
        ("", ""),
    ],
)
def test_metrics_in_words(open_page, address, name, words):
    page = open_page(address)
    read = "(name) => import('cohort/run/words.js').then(({metricWords}) => metricWords(name))"
    assert page.evaluate(read, name) == words


def test_smoothing(open_page, address):
    page = open_page(address)
    smooth = "import('/static/js/smooth.js').then(({smooth}) => smooth(%s))"
    # a mean without the bias of its start: 0.5 of (1 + 0.5), then (0.25 * 0 + 0.5 * 0 + 1) / 1.75
    assert page.evaluate(smooth % "[1, 2, 3], [0, 0, 7], 0.5") == pytest.approx([0, 0, 4])
    assert page.evaluate(smooth % "[1, 2, 3], [5, null, 5], 0.9") == [pytest.approx(5), None, pytest.approx(5)]
    assert page.evaluate(smooth % "[1, 2], [1, 4], 0") == [1, 4]
    # a value two steps away weighs as much as if there were one between them
    assert page.evaluate(smooth % "[1, 3], [0, 5], 0.5") == pytest.approx([0, 4])
