"""How many prompts a data file has, where that can be told at once; and which of a run's files are not there."""

from collections.abc import Iterator
from pathlib import Path

from cohort.config import Config

# of a path that is meant as a file, and not as the id of a dataset
_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_BEGINNINGS = ("/", "./", "../", "~")
_MOST_BYTES = 200 << 20  # larger files are not read for a plan


def count_prompts(path: str) -> int | None:
    """Rows of a JSONL or Parquet file; None for anything else, and for files that take long to read.

    Prompts that the run itself will drop, as they are too long, are counted.
    """
    file = Path(path)
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return int(pq.read_metadata(file).num_rows)
        if file.suffix == ".jsonl" and file.stat().st_size <= _MOST_BYTES:
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip()) or None
    except (OSError, ValueError):
        pass  # the run itself says what is wrong with it
    return None


def missing_files(config: Config, base_dir: Path) -> Iterator[tuple[str, str]]:
    """The keys whose files are not there, each with a message that begins with it.

    Args:
        config: of a run.
        base_dir: folder of its file, in which relative paths are looked up first.
    """
    places = (base_dir, Path.cwd())
    for field, path in (("data.path", config.data.path), ("eval.path", config.eval.path if config.eval else None)):
        meant = path is not None and (path.endswith(_ENDINGS) or path.startswith(_BEGINNINGS))
        if path is not None and meant and not any((place / path).exists() for place in places):
            yield field, f"{field}: {path!r}: no such file; `cohort train` would refuse to start"
    for number, reward in enumerate(config.rewards):
        file, colon, _ = reward.use.partition(":")
        if colon and file.endswith(".py") and not any((place / file).is_file() for place in places):
            field = f"rewards.{number}.use"
            yield field, f"{field}: {reward.use!r}: no such file; `cohort train` would refuse to start"
