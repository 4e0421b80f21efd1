"""An OpenEnv server: guess a number. `python examples/libraries/openenv_server.py` serves it on port 8000."""

import argparse
import random
import re

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """The only required field of this action is text, so a reply is the action."""

    number: str


class Hint(Observation):
    """What the model sees."""

    text: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    """One game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Hint:
        """Start a game."""
        self._secret = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="Guess a number from 1 to 9. Reply with the number only.")

    def step(self, action: Guess, timeout_s: float | None = None) -> Hint:
        """Answer a guess."""
        self._state.step_count += 1
        numbers = re.findall(r"\d+", action.number)
        if not numbers:
            return Hint(text="That is not a number.", reward=0.0)
        guess = int(numbers[-1])
        if guess == self._secret:
            return Hint(text="Right!", reward=1.0, done=True)
        return Hint(text="Higher." if guess < self._secret else "Lower.", reward=0.0)

    @property
    def state(self) -> State:
        """State of the session."""
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=256)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
