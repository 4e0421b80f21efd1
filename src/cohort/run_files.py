"""The files of a run, as they are found: which checkpoints there are, whether they are whole, and the metrics.

A checkpoint has a manifest of the sizes and checksums (XXH3, 128 bits) of its files, so that a byte that has changed
since is noticed before anything is made of it. No torch here: what only looks at a run should start at once.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.config import WRITTEN_BY_COHORT

STATE = "trainer_state.json"
MANIFEST = "manifest.json"
DAMAGED = "damaged-"  # before the name of a checkpoint that is
_THREADS = 4
_CHUNK_BYTES = 4 << 20

Checksums = Mapping[str, tuple[int, str]]  # path inside of the folder -> size in bytes, checksum in hexadecimal


def holds_run(path: Path) -> bool:
    """Whether the folder is a run's: its `config.yaml` was written by a run, and not by a person."""
    try:
        with (path / "config.yaml").open(encoding="utf-8") as file:
            return file.readline() == WRITTEN_BY_COHORT
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return False


def has_begun(run_dir: Path) -> bool:
    """Whether a run has got to its first number; nothing is lost by starting another one where it has not."""
    metrics = run_dir / "metrics.jsonl"
    return bool(checkpoints(run_dir / "checkpoints")) or (metrics.is_file() and metrics.stat().st_size > 0)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints under `root`, oldest first, whole or not."""
    found = [
        p
        for p in root.glob("step-*")
        if p.name.removeprefix("step-").isdecimal() and ((p / STATE).is_file() or (p / MANIFEST).is_file())
    ]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def goes_on_from(run_dir: Path) -> str:
    """What the same command would go on from, in words."""
    found = checkpoints(run_dir / "checkpoints")
    if found:
        return f"the same command goes on from {found[-1].name}"
    return "there is no checkpoint to continue from: the same command begins anew"


@contextmanager
def checksums_of(folder: Path, files: Collection[Path]) -> Iterator[Callable[[], Checksums]]:
    """Take the checksums of files in threads, beside what is done inside; what this gives waits for them.

    Args:
        folder: that their names are to be relative to.
        files: in it.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksums") as pool:
        futures: dict[str, Future[tuple[int, str]]] = {
            file.relative_to(folder).as_posix(): pool.submit(_checksum, file) for file in files
        }
        yield lambda: {name: future.result() for name, future in futures.items()}


def write_manifest(folder: Path, checksums: Checksums) -> None:
    """Write the manifest of a checkpoint's folder."""
    files = {name: {"bytes": size, "xxh3": checksum} for name, (size, checksum) in sorted(checksums.items())}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Checksums | None:
    """The manifest of a checkpoint's folder; None where it has none, as those of earlier versions.

    Raises:
        ValueError: it says nothing that could be.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): (int(of["bytes"]), str(of["xxh3"])) for name, of in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error


def shared_out(checksums: Checksums, num_shares: int) -> Sequence[Checksums]:
    """A manifest's files in shares of about the same size."""
    shares: list[dict[str, tuple[int, str]]] = [{} for _ in range(num_shares)]
    sizes = [0] * num_shares
    for name, (size, checksum) in sorted(checksums.items(), key=lambda entry: (-entry[1][0], entry[0])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += size
        shares[smallest][name] = (size, checksum)
    return shares


def find_damage(folder: Path, expected: Checksums) -> list[str]:
    """What is wrong with the files of a checkpoint's folder, in words: a line for each file that is not as expected."""
    wrong, to_read = [], []
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}")
            continue
        if found != size:
            wrong.append(f"{name} has {found:,} bytes instead of {size:,}")
        else:
            to_read.append(folder / name)
    with checksums_of(folder, to_read) as checksums:
        found_sums = _results(checksums)
    if isinstance(found_sums, OSError):
        return [*wrong, f"{found_sums.filename}: {found_sums.strerror}"]
    return [*wrong, *(f"{name} has changed" for name, found_sum in found_sums.items() if found_sum != expected[name])]


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a `metrics.jsonl`, and the numbers of the lines that cannot be read; nothing where it is not there.

    A last line without an end is not counted among these: it was being written when the run was killed.
    """
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    rows, bad = [], []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError):  # a UnicodeDecodeError is a ValueError
            bad.append(number)
    return rows, bad


def read_summary(file: Path) -> dict[str, Any] | None:
    """What a `summary.json` says; None where it is not there or does not say how many steps there were."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        return {**summary, "steps": int(summary["steps"])}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _results(checksums: Callable[[], Checksums]) -> Checksums | OSError:
    try:
        return checksums()
    except OSError as error:  # of a disk that is failing
        return error


def _checksum(file: Path) -> tuple[int, str]:
    import xxhash

    total, checksum = 0, xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            total += len(chunk)
            checksum.update(chunk)
    return total, checksum.hexdigest()


def line_numbers(numbers: Sequence[int]) -> str:
    """Numbers of lines in words, the first few of many."""
    shown = ", ".join(map(str, numbers[:5]))
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{f' and {len(numbers) - 5} more' if len(numbers) > 5 else ''}"
