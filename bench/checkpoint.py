"""What the checksums of a checkpoint cost: seconds of writing one with and without them, in turn.

    python bench/checkpoint.py [--megabytes 2000] [--repeats 5] [--folder .] [--quick]

The folder's disk is what is measured; a tmpfs writes at the speed of memory, where checksums show most.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from cohort.config import ModelConfig
from cohort.demo.tasks import WORDS
from cohort.models import LoadRequest, load_policy, load_tokenizer
from cohort.trainer import checkpoint
from cohort.trainer.checkpoint import TrainerState, save_checkpoint
from harness import ModelShape, machine, markdown, write_model

WIDTH, VOCAB = 1024, 32_768
BYTES_OF_LAYER = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * 3 * WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of a checkpoint: weights and two moments")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.megabytes, args.repeats = 500, 1
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        times, size = measure(Path(folder), args.megabytes, args.repeats)
    middle = {name: statistics.median(found) for name, found in times.items()}
    rows = [[name, f"{middle[name]:.2f}", f"{size / 1e6 / middle[name]:,.0f}"] for name in times]
    print(markdown(["checkpoint", "seconds", "MB/s"], rows))
    ratio = statistics.median(a / b for a, b in zip(times["with checksums"], times["without"], strict=True))
    print(f"\n{size / 1e6:,.0f} MB; with checksums a save takes {ratio:.2f} times as long (of {args.repeats} pairs)")


def measure(folder: Path, megabytes: int, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each save by way, and the bytes of one."""
    layers = max(1, round((megabytes * 1e6 / 3 - 4 * VOCAB * WIDTH) / BYTES_OF_LAYER))
    shape = ModelShape(hidden=WIDTH, layers=layers, intermediate=3 * WIDTH, vocab=VOCAB)
    write_model(shape, folder / "model")
    config = ModelConfig(path=str(folder / "model"))
    tokenizer = load_tokenizer(ModelConfig(path=str(WORDS.base_path)))
    policy = load_policy(LoadRequest(config, device=torch.device("cpu"), tokenizer=tokenizer))
    moments = {
        f"{name}.{moment}": torch.rand_like(weight)
        for name, weight in policy.model.named_parameters()
        for moment in ("exp_avg", "exp_avg_sq")
    }

    def save(steps_done: int) -> Path:
        state = TrainerState(
            steps_done=steps_done,
            data={},
            pending=[],
            num_tokens=0,
            seconds=0.0,
            micro_batch_tokens=1,
            micro_batch_tokens_wanted=1,
            processes=1,
            control={},
        )
        return save_checkpoint(
            folder / "checkpoints", policy=policy, tokenizer=tokenizer, engine_state=moments, state=state, keep=1
        )

    path = save(1)  # warms up
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    times: dict[str, list[float]] = {"without": [], "with checksums": []}
    for repeat in range(repeats):
        for n, name in enumerate(times):
            with without_checksums() if name == "without" else mock.MagicMock():
                start = time.perf_counter()
                save(2 + 2 * repeat + n)
                times[name].append(time.perf_counter() - start)
    return times, size


@contextmanager
def without_checksums() -> Iterator[None]:
    """Files are flushed as with them, and not read again."""

    @contextmanager
    def none(_folder: Path, _files: list[Path]) -> Iterator[Callable[[], dict[str, tuple[int, str]]]]:
        yield dict

    with mock.patch.object(checkpoint, "checksums_in_background", none):
        yield


if __name__ == "__main__":
    main()
