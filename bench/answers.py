"""How long it takes until configurations that would never end are refused.

    python bench/answers.py [--quick]

Each is loaded as `cohort plan` loads it, in this process, once.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cohort.config import load_config
from cohort.data import read_rows
from cohort.errors import UserError
from harness import machine, markdown

MINIMAL = "model: {path: m}\ndata: {path: d.jsonl}\n"
REWARDS = "rewards: [{use: math}]\n"
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9))


def configurations(size: int) -> dict[str, str]:
    """Texts by name, with `size` of what there is much of."""
    return {
        "nine levels of aliases": MINIMAL + REWARDS + BOMB,
        f"{size:,} unknown keys": MINIMAL + REWARDS + "train: {" + ", ".join(f"k{n}: 1" for n in range(size)) + "}\n",
        f"{size // 5:,} rewards": MINIMAL + "rewards:\n" + "  - {use: math}\n" * (size // 5),
        f"a comment of {size // 10_000} MB": MINIMAL + REWARDS + "#" * (100 * size) + "\n",
        "3,000 brackets": "[" * 3000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of all: to see that it runs")
    size = 10_000 if parser.parse_args().quick else 100_000
    print(machine(), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, text in configurations(size).items():
            file = folder / "run.yaml"
            file.write_text(text)
            rows.append([what, *answer(lambda file=file: load_config(file))])  # type: ignore[misc]
        many = folder / "many"
        many.mkdir()
        for number in range(size // 4):
            (many / f"{number}").touch()
        find = lambda: read_rows(str(many), field="eval.path")  # noqa: E731
        rows.append([f"eval.path: a folder of {size // 4:,} files", *answer(find)])
    print(markdown(["what", "seconds", "answer"], rows))


def answer(ask: Callable[[], object]) -> list[str]:
    """Seconds until an answer, and its beginning."""
    start = time.perf_counter()
    try:
        ask()
        said = "accepted"
    except UserError as error:
        said = str(error).splitlines()[0].rpartition("/")[-1][:90]
    return [f"{time.perf_counter() - start:.2f}", said.replace("|", " ")]


if __name__ == "__main__":
    main()
