"""examples/rewards: the command of docs/rewards.md and its result."""

import subprocess
import sys
from pathlib import Path

from cohort.cli.rescore import rescore
from cohort.config import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"
PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_example_gives_what_the_page_shows(tmp_path):
    server = subprocess.Popen([sys.executable, str(FOLDER / "judge_stub.py"), "--port", "0"], stdout=subprocess.PIPE)
    try:
        url = server.stdout.readline().split()[-1].decode()
        overrides = [f"rewards.0.url={url}", f"run.dir={tmp_path / 'run'}"]
        config = load_config(FOLDER / "judge.yaml", overrides)
        assert config.rewards[0].args["prompt"] == str(FOLDER / "judge_prompt.txt")
        lines = rescore(config, FOLDER / "answers.jsonl").as_text().splitlines()
        assert lines[0] == "4 completions of 2 prompts"
        values = lines[3].split()[:-1]  # without the seconds
        assert values == ["judge", "4", "0.7963", "0.274", "0.3333", "1", "1/2"]
        assert [line.split()[:-1] for line in PAGE.splitlines() if line.startswith("judge   ")] == [values]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_paths_among_arguments_are_found_beside_the_file(tmp_path):
    (tmp_path / "rm").mkdir()
    sections = "model: {path: m}\ndata: {path: d}\ntrain: {steps: 1}\n"
    (tmp_path / "run.yaml").write_text(f"{sections}rewards: [{{use: model, args: {{path: rm}}}}]\n")
    assert load_config(tmp_path / "run.yaml").rewards[0].args == {"path": str(tmp_path / "rm")}
    (tmp_path / "run.yaml").write_text(
        f"{sections}rewards: [{{use: judge, url: u, model: m, args: {{cache: c.jsonl, prompt: none}}}}]\n"
    )
    args = load_config(tmp_path / "run.yaml").rewards[0].args
    assert args == {"url": "u", "model": "m", "cache": str(tmp_path / "c.jsonl"), "prompt": "none"}
