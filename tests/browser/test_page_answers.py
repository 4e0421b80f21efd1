"""What users ask of a run, answered from the page that opens, in three clicks or fewer."""

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from viewed_runs import run_view

pytestmark = pytest.mark.extras


class Reader:
    """Opens the page of a run and counts clicks."""

    def __init__(self, page: Any):
        self.page = page
        self.clicks = 0

    def click(self, role: str, name: str) -> None:
        """Click on the first link, button or other control of that name."""
        self.page.get_by_role(role, name=name).first.click()
        self.clicks += 1

    def sees(self, text: str | re.Pattern[str]) -> None:
        """Wait for a text."""
        self.page.locator("main").get_by_text(text).first.wait_for()


@pytest.fixture
def reader(open_page, address):
    readers = []

    def read(view: str) -> Reader:
        readers.append(Reader(open_page(address, view)))
        return readers[-1]

    yield read
    assert all(reader.clicks <= 3 for reader in readers)


def test_why_did_a_step_teach_nothing(reader):
    read = reader(run_view("flat"))
    read.click("link", "Steps")
    read.sees("Step 6 learned nothing")
    read.sees("All 4 rewards are 0, so every advantage is 0")


def test_which_prompts_are_never_solved(reader, runs: Path):
    files = [pq.read_table(file) for file in (runs / "learns" / "completions").glob("eval-*.parquet")]
    rows = [row for file in files for row in file.select(["prompt_id", "reward"]).to_pylist()]
    never = {row["prompt_id"] for row in rows} - {row["prompt_id"] for row in rows if row["reward"] >= 1}
    assert never
    read = reader(run_view("learns"))
    read.click("link", "Questions")
    read.click("radio", f"Never right ({len(never)})")
    questions = read.page.locator("[data-question]")
    read.page.wait_for_function("(n) => document.querySelectorAll('[data-question]').length === n", arg=len(never))
    assert {int(row.get_attribute("data-question")) for row in questions.all()} == never


def test_is_it_hacking_the_reward(reader):
    read = reader(run_view("hacked"))
    assert "completions shrank" in read.page.locator(".banner.large").inner_text()
    read.sees("Read some")
    assert read.page.get_by_text("It learned").count() == 0  # folded


def test_what_changed_between_two_runs(reader):
    read = reader("#/runs")
    read.click("checkbox", "Select learns to compare")
    read.click("checkbox", "Select flat to compare")
    read.click("link", "Compare 2 runs")
    table = read.page.get_by_role("region", name="Runs, and the configuration keys in which they differ")
    table.get_by_text("rollout.num_generations").wait_for()
    generations = [row.split("\t") for row in table.inner_text().splitlines() if "\t" in row]
    place = generations[0].index("rollout.num_generations")
    assert {row[place].strip() for row in generations[1:]} == {"8", "4"}


def test_where_does_the_time_go(reader):
    page = reader(run_view("learns")).page
    said = page.locator("p", has_text=re.compile("Where the .* went:"))
    said.wait_for()
    shares = [int(share) for share in re.findall(r"\((\d+)%\)", said.inner_text())]
    assert len(shares) > 3
    assert 97 <= sum(shares) <= 103  # with evaluations, checkpoints and the rest


def test_does_memory_match_the_plan(reader):
    reader(run_view("learns")).sees(re.compile(r"\d+% (above|below) the plan|as planned"))


def test_which_tokens_were_pushed(reader):
    read = reader(run_view("learns"))
    read.click("link", "Steps")
    read.click("button", "advantage +")
    read.click("radio", "Push")
    tokens = read.page.locator(".tokens .token.is-tinted:not(.is-down)")
    tokens.first.wait_for()
    levels = tokens.evaluate_all("(all) => all.map((one) => one.style.getPropertyValue('--level'))")
    assert len(set(levels)) > 1


def test_which_tool_calls_fail(reader):
    read = reader(run_view("tools"))
    read.click("link", "Questions")
    row = read.page.get_by_role("row", name="LookupError: there is nothing about")
    assert re.search(r"look_up\s+failed", row.inner_text())
    row.get_by_role("link", name="Step").click()
    read.clicks += 1
    read.page.locator(".completion.is-open").get_by_text("there is nothing about").first.wait_for()
