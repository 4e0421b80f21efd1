"""The examples of docs/tools.md, docs/environments.md and docs/programs.md work as they are printed."""

import re
from pathlib import Path
from typing import Any

import yaml

from cohort.config import config_from_dict
from cohort.trainer.parts import Parts
from playing import call, play, turns_tokenizer

DOCS = Path(__file__).parents[3] / "docs"


def write_examples(page: str, folder: Path) -> list[dict[str, Any]]:
    """Write the page's Python files to `folder` and return its configurations."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(code)
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def test_the_tool_of_the_page(tmp_path: Path):
    (raw,) = write_examples("tools.md", tmp_path)
    (sandboxed,) = [block for block in write_examples("sandbox.md", tmp_path) if "rollout" in block]
    assert [tool.use for tool in config_from_dict({**raw, **sandboxed}).rollout.tools] == ["python"]
    environments = Parts(config_from_dict(raw, base_dir=tmp_path), tokenizer=turns_tokenizer()).environments
    assert environments is not None and len(environments.schemas) == 1
    texts = [call("stock", '{"item": "apples"}') + call("stock", '{"item": "plums"}'), "3"]
    (group,) = play(
        tmp_path, lambda context, key: texts[key.turn], [{"prompt": "How many?"}], tools=raw["rollout"]["tools"]
    )
    assert [m["content"] for m in group.trajectories[0].messages[1:3]] == ["3", "Error: KeyError: 'plums'"]


def test_the_environments_of_the_page(tmp_path: Path):
    game, mixture = write_examples("environments.md", tmp_path)
    (program,) = write_examples("programs.md", tmp_path)
    config_from_dict(game, base_dir=tmp_path)
    with_model = {"model": {"path": "m"}, **mixture}
    assert set(config_from_dict(with_model, base_dir=tmp_path).rollout.environments) == {"wordle", "guess"}

    def search(context: str, key: Any) -> str:
        """Binary search by what the tool has answered."""
        low, high = 1, 50
        for number, answer in re.findall(
            r'"number": (\d+)\}\}</tool_call><\|im_end\|>\n<\|im_start\|>tool\n(\w+)', context
        ):
            if answer == "right":
                return "Got it."
            low, high = (int(number) + 1, high) if answer == "higher" else (low, int(number) - 1)
        return call("guess", f'{{"number": {(low + high) // 2}}}')

    (group,) = play(tmp_path, search, [{}], environment=game["rollout"]["environment"], max_completion_tokens=300)
    for trajectory in group.trajectories:
        assert trajectory.rewards == {"GuessNumber": 1 / trajectory.environment.guesses}, trajectory
    script = lambda context, key: "Thanks" if "customer" in context else "Hello"  # noqa: E731
    (group,) = play(tmp_path, script, [{"prompt": "Hi"}], **program["rollout"])
    assert group.trajectories[0].rewards == {"Interview": 1.0}
    assert [c.trained for c in group.trajectories[0].calls] == [True, False] * 3
