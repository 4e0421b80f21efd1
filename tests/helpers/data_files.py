"""Rows of data, and files of them as a run reads them."""

from contextlib import chdir
from pathlib import Path
from typing import Any

from cohort.data import read_rows

ROWS = [{"prompt": "two plus two", "answer": "007"}, {"prompt": "one", "answer": "1.0"}]


def read(folder: Path, path: str, **options: Any) -> list[dict]:
    with chdir(folder):
        return read_rows(path, field="data.path", **options)
