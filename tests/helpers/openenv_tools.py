"""OpenEnv servers with tools (MCP), and with actions of several fields. Arguments: the kind and the port."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("tools")

        @server.tool
        def look(key: str) -> str:
            """Look a key up."""
            return f"{key} is 7"

        super().__init__(server)
        self._state = State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Observation:
        return Observation(metadata={})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **others: Any) -> Observation:
        raise ValueError(action)

    @property
    def state(self) -> State:
        return self._state


class Move(Action):
    x: int
    y: int


class Field(Observation):
    seen: str


class Board(Environment[Move, Field, State]):
    SUPPORTS_CONCURRENT_SESSIONS = False  # one session at a time

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Field:
        self._treasure = random.Random(seed).randrange(2), 1
        return Field(seen="dig")

    def step(self, action: Move, timeout_s: float | None = None) -> Field:
        found = (action.x, action.y) == self._treasure
        return Field(seen="gold" if found else "sand", reward=float(found), done=found)

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    if sys.argv[1] == "tools":
        app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=64)
    else:
        app = create_fastapi_app(Board, Move, Field)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
