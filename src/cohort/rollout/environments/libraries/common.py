"""What the adapters of libraries share."""

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from cohort.errors import UserError, describe_error
from cohort.records import Message
from cohort.rollout.environments.handle import InstanceHandle
from cohort.rollout.environments.model import EnvironmentFailure

Call = Callable[..., Any]  # (name of a method, keyword arguments) -> awaitable result


def import_library(module: str, *, extra: str, field: str) -> ModuleType:
    """Import a library.

    Args:
        module: name of the module.
        extra: Cohort's extra that installs it.
        field: key of the environment in messages.

    Raises:
        UserError: it is not installed, or does not import.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field}: there is no module {error.name!r}; install it with: pip install 'cohort-rl[{extra}]'"
        ) from error
    except Exception as error:
        raise UserError(f"{field}: {module} does not import: {describe_error(error)}") from error


@asynccontextmanager
async def opened(constructor: Callable[[], Any], *, name: str) -> AsyncIterator[Call]:
    """Construct an object whose methods block, and call them in a daemon thread of its own; close it at the end.

    The trajectory's deadline is the only one.
    """
    handle = await InstanceHandle.create(constructor, name=name, timeout_s=None)
    try:

        async def call(method: str, **arguments: Any) -> Any:
            return await handle.call(method, arguments, timeout_s=None)

        yield call
    finally:
        handle.close()


def seed_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with a random seed each, so that all trajectories of a group play the same game."""
    generator = random.Random(seed)
    return [{"seed": generator.getrandbits(31)} for _ in range(count)]


def with_system(system_prompt: str | None, text: str) -> list[Message]:
    """Return the first messages of a conversation."""
    messages: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*messages, {"role": "user", "content": text}]


def column(row: Mapping[str, Any], name: str, *, library: str) -> Any:
    """Return the value of a column that a library needs. Raises EnvironmentFailure if the row lacks it."""
    if row.get(name) is None:
        columns = ", ".join(row) or "none"
        raise EnvironmentFailure(f"{library} needs rows with a column {name!r}; the columns of this row: {columns}")
    return row[name]
