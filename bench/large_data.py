"""Time to a run's second step, and its memory, for small and large data: Cohort, and TRL if it is installed.

    python bench/large_data.py [--rows 1000000] [--wide 60000] [--folder DIR] [--only NAME]

- `thousand`: 1,000 short rows; `million`: a million of them as JSON lines, first with an empty cache, then again.
- `wide`: 4 GB of Parquet, 60,000 rows of 81 kB in columns that nobody reads, as in OpenR1-Math-220k.
- `long`: 100,000 prompts of about 200 tokens and more bytes than `max_prompt_tokens`, with the chat template.
- `mixture`: the million and the thousand as two sources with weights; TRL has them from `interleave_datasets`.
- `mapped`: the million, each row changed by a function (`data.map`, `Dataset.map`).

Each run is a process of its own: two steps of the demo's model with the reward `math`, without an evaluation. CPU time
is user and system time of the process and its children; on a busy machine it says more than wall time. TRL, with the
same model, data and reward, is one process as well. Data are written once into `--folder` and kept.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

FILES = {  # of each case
    "thousand": ("thousand",),
    "million": ("million",),
    "wide": ("wide",),
    "long": ("long",),
    "mixture": ("million", "thousand"),
    "mapped": ("million",),
}
WEIGHTS = (3, 1)  # of the mixture
WORDS = ("adding", "two", "numbers", "is", "a", "thing", "of", "joy", "and", "so", "on", "then")
STEPS, PROMPTS, GENERATIONS, LIMIT = 2, 4, 4, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the million")
    parser.add_argument("--wide", type=int, default=60_000, help="rows of the Parquet file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cohort-large-data")
    parser.add_argument("--only", choices=FILES)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # trainer, case, files
    args = parser.parse_args()
    if args.run:
        run(*args.run[:2], args.run[2:])
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    trainers = ["cohort", "trl"] if find_spec("trl") and not args.quick else ["cohort"]
    if args.quick:
        args.rows = 2000
    names = [args.only] if args.only else ["mixture", "mapped"] if args.quick else [*FILES]
    print(f"{'':10}{'trainer':9}{'cache':7}{'wall s':>8}{'CPU s':>8}{'peak GB':>9}", flush=True)
    for name in names:
        files = [str(make(file, args)) for file in FILES[name]]
        for trainer in trainers:
            cache = args.folder / f"cache-{name}-{trainer}"
            shutil.rmtree(cache, ignore_errors=True)
            for seen in ("empty", "filled"):
                wall, cpu, peak = measure(trainer, name, files, cache)
                print(f"{name:10}{trainer:9}{seen:7}{wall:8.1f}{cpu:8.1f}{peak:9.2f}", flush=True)


def measure(trainer: str, name: str, files: list[str], cache: Path) -> tuple[float, float, float]:
    """Train in a process of its own. Return wall seconds, CPU seconds and the peak of memory in GB."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--run", trainer, name, *files], env=environment, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, json.loads(done.stdout.splitlines()[-1])["peak_gb"]


def to_row(row: dict[str, str]) -> dict[str, str]:
    """Change a row, for `mapped`."""
    return {**row, "answer": row["answer"].strip()}


def run(trainer: str, name: str, files: list[str]) -> None:
    """Train two steps, and print the peak of this process."""
    base = Path(__file__).parents[1] / "src" / "cohort" / "demo" / "base"
    with tempfile.TemporaryDirectory() as folder:
        if trainer == "cohort":
            with_cohort(base, name, files, folder)
        else:
            with_trl(base, name, files, folder)
    print(json.dumps({"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))


def with_cohort(base: Path, name: str, files: list[str], folder: str) -> None:
    import cohort
    from cohort.display import Display

    data: object = {"path": files[0]}
    if name == "mapped":
        data = {"path": files[0], "map": f"{Path(__file__).resolve()}:to_row"}
    elif name == "mixture":
        data = [
            {"path": file, "weight": weight, "columns": {"source": "origin"}}
            for file, weight in zip(files, WEIGHTS, strict=True)
        ]
    config = {
        "model": {"path": str(base)},
        "data": data,
        "rewards": [{"use": "math"}],
        "rollout": {"num_generations": GENERATIONS, "max_prompt_tokens": LIMIT, "max_completion_tokens": 8},
        "train": {"steps": STEPS, "prompts_per_step": PROMPTS},
        "run": {"dir": f"{folder}/run", "checkpoint_every": 0},
    }
    cohort.train(config, display=Display())


def with_trl(base: Path, name: str, files: list[str], folder: str) -> None:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    def is_right(completions, answer, **kwargs):
        return [float(str(a) in str(c)) for c, a in zip(completions, answer, strict=True)]

    kind = "parquet" if name == "wide" else "json"
    data, *others = (datasets.load_dataset(kind, data_files=file, split="train") for file in files)
    if name == "mapped":
        data = data.map(to_row)
    elif name == "mixture":
        shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
        data = datasets.interleave_datasets([data, *others], shares, seed=0, stopping_strategy="all_exhausted")
    config = GRPOConfig(
        output_dir=f"{folder}/run",
        max_steps=STEPS,
        num_generations=GENERATIONS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        max_completion_length=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    GRPOTrainer(model=str(base), reward_funcs=is_right, args=config, train_dataset=data).train()


def make(name: str, args: argparse.Namespace) -> Path:
    """Write the data of a case, unless they are there."""
    size = {"thousand": 1000, "million": args.rows, "wide": args.wide, "long": min(100_000, args.rows)}[name]
    file = args.folder / f"{name}-{size}.{'parquet' if name == 'wide' else 'jsonl'}"
    if file.exists():
        return file
    unfinished = file.with_suffix(".unfinished")
    if name == "wide":
        write_wide(unfinished, size)
    else:
        with unfinished.open("w") as out:
            for number in range(size):
                out.write(json.dumps(row(number, 70 if name == "long" else 5)) + "\n")
    unfinished.rename(file)
    return file


def row(number: int, words: int) -> dict[str, object]:
    rng = random.Random(number)
    prompt = " ".join(rng.choice(WORDS) for _ in range(words))
    a, b = rng.randrange(1000), rng.randrange(1000)
    return {
        "prompt": f"{prompt}: {a} + {b} = ?",
        "answer": str(a + b),
        "source": "sums",
        "level": number % 7,
        "note": f"row {number} " + "x" * 180,
    }


def write_wide(file: Path, size: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    letters = random.Random(0).randbytes(2 << 20).hex()
    writer = None
    for start in range(0, size, 1000):
        rows = []
        for number in range(start, min(start + 1000, size)):
            of_row = row(number, 5)
            place = number * 7919 % (len(letters) - 54_000)
            texts = [letters[place : place + 27_000], letters[place + 27_000 : place + 54_000]]
            rows.append({**of_row, "solution": texts[0], "generations": texts})
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


if __name__ == "__main__":
    main()
