"""The game in examples/: a player that draws conclusions from the hints finds the code."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest

from cohort.config import load_config
from playing import call, play

EXAMPLES = Path(__file__).parents[3] / "examples" / "games"
GAME = str(EXAMPLES / "code_breaker.py:CodeBreaker")


def hint(guess: str, code: str) -> tuple[int, int]:
    """Right letters, and letters at another place, counted one by one."""
    right = [a == b for a, b in zip(guess, code, strict=True)]
    rest = [letter for letter, is_right in zip(code, right, strict=True) if not is_right]
    misplaced = 0
    for letter, is_right in zip(guess, right, strict=True):
        if not is_right and letter in rest:
            rest.remove(letter)
            misplaced += 1
    return sum(right), misplaced


def player(context: str, key) -> str:
    """Guess the first code that agrees with all hints."""
    if "is the code!" in context:
        return "Done."
    guesses = re.findall(r'"code": "([A-F]{4})"', context)
    hints = [(int(a), int(b)) for a, b in re.findall(r"(\d) right, (\d) at another place", context)]
    codes = map("".join, product("ABCDEF", repeat=4))
    guess = next(c for c in codes if all(hint(g, c) == h for g, h in zip(guesses, hints, strict=True)))
    return call("guess", f'{{"code": "{guess}"}}')


def test_a_player_who_listens_finds_the_code(tmp_path: Path):
    groups = play(tmp_path, player, [{}, {}], environment=GAME, max_turns=10, num_generations=3)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert (
        len({trajectory.messages[-3]["tool_calls"][0]["function"]["arguments"]["code"] for trajectory in trajectories})
        > 3
    )
    for trajectory in trajectories:
        assert trajectory.end == "answer" and trajectory.stats is not None
        assert trajectory.messages[-2]["content"].endswith("is the code!")
        assert trajectory.rewards == {"CodeBreaker": 1.0 - 0.5 * (trajectory.stats.tool_calls - 1) / 8}


@pytest.mark.parametrize(
    ("guess", "reply"),
    [
        ("abc", "Error: ValueError: a guess has 4 letters from ABCDEF"),
        ("AABX", "Error: "),
        (" aabb ", " at another place"),
    ],
)
def test_guesses_of_the_wrong_form_are_errors_for_the_model(tmp_path: Path, guess: str, reply: str):
    def script(context: str, key) -> str:
        return "Done." if "tool\n" in context else call("guess", f'{{"code": "{guess}"}}')

    (group,) = play(tmp_path, script, [{}], environment=GAME)
    for trajectory in group.trajectories:
        assert reply in trajectory.messages[1]["content"]
        assert 0 <= trajectory.rewards["CodeBreaker"] < 1


def test_eight_wrong_guesses_end_the_game(tmp_path: Path):
    def script(context: str, key) -> str:
        return "Done." if context.count("The game is over") == 2 else call("guess", '{"code": "AAAA"}')

    (group,) = play(tmp_path, script, [{}], environment=GAME, max_turns=10)
    for trajectory in group.trajectories:
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"][8] == "The game is over."
        assert trajectory.rewards["CodeBreaker"] <= 0.3


def test_its_configuration_is_valid():
    sys.modules.pop("code_breaker", None)  # of other tests
    config = load_config(EXAMPLES / "code_breaker.yaml")
    assert config.rollout.environment.use == GAME
    assert "code_breaker" not in sys.modules
