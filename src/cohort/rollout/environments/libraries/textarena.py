"""Games of TextArena (https://github.com/LeonGuertler/TextArena).

Its games use Python's global random numbers: without `rollout.isolate`, games that are played at the same time take
them from each other, and runs are not reproducible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cohort.errors import UserError, describe_error, suggest
from cohort.records import Message
from cohort.rollout.environments.libraries.common import column, import_library, opened, seed_rows, with_system
from cohort.rollout.environments.model import RolloutModel, TrajectoryEnded
from cohort.rollout.environments.sources import EnvironmentSource

_TRAINED_PLAYER = 0


def load(name: str, args: Mapping[str, Any], *, field: str) -> EnvironmentSource:
    """Return the environment of a game. `args` are those of the game, and `num_players` and `system_prompt`.

    Raises:
        UserError: the library or the game does not exist, or `args` are wrong.
    """
    library = import_library("textarena", extra="textarena", field=field)
    games = library.envs.registration.ENV_REGISTRY
    if name not in games:
        raise UserError(f"{field}: TextArena has no {name!r}{suggest(name, sorted(games), 'Games')}")
    own = {key: args[key] for key in ("num_players", "system_prompt") if key in args}
    make = partial(library.make, name, **{key: value for key, value in args.items() if key not in own})
    try:
        make().reset(num_players=args.get("num_players", 1), seed=0)
    except Exception as error:  # of the game: an argument, a number of players, or a word list that is missing
        raise UserError(f"{field}: {name} cannot be played: {describe_error(error)}") from error
    create = partial(TextArena, make=make, name=name, **own)
    return EnvironmentSource(kind=TextArena, name=name, create=create, rows=seed_rows)


@dataclass(eq=False, kw_only=True)
class TextArena:
    """Plays a game against the game, or with several players, of which only the first is trained."""

    make: Callable[[], Any]  # creates a game
    name: str
    num_players: int = 1  # the policy plays all of them
    system_prompt: str | None = None  # of all players

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> dict[str, float]:
        """Play one row. A game that a limit has ended gives 0."""
        seed = column(row, "seed", library="textarena")
        messages: dict[int, list[Message]] = {player: [] for player in range(self.num_players)}
        rewards: Mapping[int, float] | None = None
        num_moves = 0
        async with opened(lambda: _Game(self.make()), name=self.name) as game:
            player, text = await game("reset", num_players=self.num_players, seed=seed)
            try:
                while rewards is None:
                    messages[player] += with_system(None if messages[player] else self.system_prompt, text)
                    reply = await model.chat(messages[player], train=player == _TRAINED_PLAYER)
                    messages[player].append(reply.message)
                    num_moves += player == _TRAINED_PLAYER
                    player, text, rewards = await game("step", action=reply.content)
            except TrajectoryEnded:
                if not num_moves:
                    raise
        return {"reward": float((rewards or {}).get(_TRAINED_PLAYER, 0.0)), "finished": float(rewards is not None)}


class _Game:
    """A game whose observations are only what is new to the player."""

    def __init__(self, game: Any):
        self._game = game
        self._inner = game
        while hasattr(self._inner, "env"):  # wrappers, which would repeat the conversation in each observation
            self._inner = self._inner.env

    def reset(self, num_players: int, seed: int) -> tuple[int, str]:
        """Start a game, and return the player whose turn it is and what it sees."""
        self._game.reset(num_players=num_players, seed=seed)
        return self._observe()

    def step(self, action: str) -> tuple[int, str, Mapping[int, float] | None]:
        """Move, and return the next player, what it sees, and the rewards by player if the game is over."""
        done, _ = self._game.step(action=action)
        if done:
            rewards, _ = self._game.close()
            return 0, "", rewards or {}
        return *self._observe(), None

    def _observe(self) -> tuple[int, str]:
        player, observations = self._inner.get_observation()
        return player, "\n".join(self._texts(player, observations))

    def _texts(self, player: int, observations: Sequence[tuple[int, str, Any]]) -> list[str]:
        names = self._inner.state.role_mapping
        return [
            message if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, _ in observations
            if sender != player
        ]
