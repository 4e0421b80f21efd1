"""How many prompts a data file has, where that can be told at once."""

from pathlib import Path

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
