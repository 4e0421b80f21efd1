"""Count the prompts of a data file cheaply, and find files that cannot be read."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cohort.config import Config

# A path with one of these is a file, not a dataset id.
_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_BEGINNINGS = ("/", "./", "../", "~")
_MAX_BYTES = 200 << 20  # do not read larger files
_FORBIDDEN = "permission denied"


def count_prompts(path: str) -> int | None:
    """Number of rows of a JSONL or Parquet file; None for other formats and large files.

    Includes prompts that the run will drop as too long.
    """
    file = Path(path)
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return int(pq.read_metadata(file).num_rows)
        if file.suffix == ".jsonl" and file.stat().st_size <= _MAX_BYTES:
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip()) or None
    except (OSError, ValueError):
        pass  # the run reports what is wrong
    return None


def missing_files(config: Config, base_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield each configuration key whose file is missing or may not be read, with a message.

    Args:
        config: configuration of a run.
        base_dir: folder of the configuration file; relative paths are tried there and in the working directory.
    """
    places = (base_dir, Path.cwd())
    if _problem(f"{config.model.path}/config.json", places) == _FORBIDDEN:  # missing: perhaps a Hub id
        yield "model.path", f"model.path: {config.model.path!r}: {_FORBIDDEN}; `cohort train` will not start"
    paths: list[tuple[str, str | None]] = []
    for name, section in (("data", config.data), ("eval", config.eval)):
        if section is not None:
            paths.append((f"{name}.path", section.path))
            paths += ((f"{name}.sources.{i}.path", source.path) for i, source in enumerate(section.sources))
    for field, path in paths:
        meant = path is not None and (path.endswith(_ENDINGS) or path.startswith(_BEGINNINGS))
        if path is not None and meant and (problem := _problem(path, places)) is not None:
            yield field, f"{field}: {path!r}: {problem}; `cohort train` will not start"
    for field, use in _functions(config):
        file, colon, _ = use.partition(":")
        if colon and file.endswith(".py") and (problem := _problem(file, places)) is not None:
            yield field, f"{field}: {use!r}: {problem}; `cohort train` will not start"


def _problem(path: str, places: Iterable[Path]) -> str | None:
    """Why a file or folder cannot be read in any of these places; None if it can be."""
    problem = "no such file"
    for place in places:
        try:
            os.close(os.open(place / path, os.O_RDONLY | os.O_NONBLOCK))
            return None
        except PermissionError:
            problem = _FORBIDDEN
        except (OSError, ValueError):  # ValueError: a name that no file can have
            continue
    return problem


def _functions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that name the user's functions and classes, with their values."""
    rollout = config.rollout
    maps = [
        ("data.map", config.data.map),
        *((f"data.sources.{i}.map", s.map) for i, s in enumerate(config.data.sources)),
    ]
    yield from ((field, use) for field, use in maps if use is not None)
    yield from ((f"rewards.{i}.use", reward.use) for i, reward in enumerate(config.rewards))
    yield from ((f"rollout.tools.{i}", tool.use) for i, tool in enumerate(rollout.tools))
    yield from (
        (f"rollout.environment.{name}.use" if name else "rollout.environment.use", spec.use)
        for name, spec in rollout.environments.items()
    )
    if rollout.agent is not None:
        yield "rollout.agent", rollout.agent
