"""Files of a run: find checkpoints, verify their integrity, read metrics.

A checkpoint has a manifest with the sizes and checksums (XXH3, 128 bits) of its files, so that corruption is noticed
before anything is loaded. No torch here, so that commands which only inspect a run start fast.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.config import CONFIG_HEADER, Config, load_config
from cohort.errors import UserError

STATE = "trainer_state.json"
MANIFEST = "manifest.json"
SECRET_FILE = ".secret"  # of the servers of a Slurm job; created before the run starts
DAMAGED = "damaged-"  # prefix of damaged checkpoints
_THREADS = 4
_CHUNK_BYTES = 4 << 20

Checksums = Mapping[str, tuple[int, str]]  # path inside of the folder -> size in bytes, checksum in hexadecimal


def is_run_folder(path: Path) -> bool:
    """Whether `path` is a run folder: its `config.yaml` was written by a run, not by a person."""
    try:
        with (path / "config.yaml").open(encoding="utf-8") as file:
            return file.readline() == CONFIG_HEADER
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return False


def has_progress(run_dir: Path) -> bool:
    """Whether a run has saved metrics or a checkpoint; otherwise nothing is lost by starting over."""
    metrics = run_dir / "metrics.jsonl"
    return bool(checkpoints(run_dir / "checkpoints")) or (metrics.is_file() and metrics.stat().st_size > 0)


def recorded_config(run_dir: Path) -> Config | None:
    """The resolved configuration of the run in `run_dir`; None without a readable run that has progress."""
    if not is_run_folder(run_dir) or not has_progress(run_dir):
        return None
    try:
        return load_config(run_dir / "config.yaml", base_dir=Path())
    except UserError:
        return None


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints under `root`, oldest first, damaged or not."""
    found = [
        p
        for p in root.glob("step-*")
        if p.name.removeprefix("step-").isdecimal() and ((p / STATE).is_file() or (p / MANIFEST).is_file())
    ]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def resume_hint(run_dir: Path) -> str:
    """Say what the same command would resume from."""
    found = checkpoints(run_dir / "checkpoints")
    if found:
        return f"run the same command to resume from {found[-1].name}"
    return "there is no checkpoint to resume from: the same command starts over"


@contextmanager
def checksums_in_background(folder: Path, files: Collection[Path]) -> Iterator[Callable[[], Checksums]]:
    """Compute checksums in threads while the body runs; call the yielded function to wait for them.

    Args:
        folder: folder that names are relative to.
        files: files in it.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksums") as pool:
        futures: dict[str, Future[tuple[int, str]]] = {
            file.relative_to(folder).as_posix(): pool.submit(_checksum, file) for file in files
        }
        yield lambda: {name: future.result() for name, future in futures.items()}


def write_manifest(folder: Path, checksums: Checksums) -> None:
    """Write a checkpoint's manifest."""
    files = {name: {"bytes": size, "xxh3": checksum} for name, (size, checksum) in sorted(checksums.items())}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Checksums | None:
    """Read a checkpoint's manifest; None if it has none, as in earlier versions.

    Raises:
        ValueError: the manifest is invalid.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): (int(of["bytes"]), str(of["xxh3"])) for name, of in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error


def split_by_size(checksums: Checksums, num_shares: int) -> Sequence[Checksums]:
    """Split a manifest's files into shares of similar total size."""
    shares: list[dict[str, tuple[int, str]]] = [{} for _ in range(num_shares)]
    sizes = [0] * num_shares
    for name, (size, checksum) in sorted(checksums.items(), key=lambda entry: (-entry[1][0], entry[0])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += size
        shares[smallest][name] = (size, checksum)
    return shares


def find_damage(folder: Path, expected: Checksums) -> list[str]:
    """Compare a checkpoint's files with its manifest; returns one message per damaged file."""
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
    try:
        with checksums_in_background(folder, to_read) as checksums:
            found_sums = checksums()
    except OSError as error:  # such as a failing disk
        return [*wrong, f"{error.filename}: {error.strerror}"]
    return [*wrong, *(f"{name} has changed" for name, found_sum in found_sums.items() if found_sum != expected[name])]


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of a `metrics.jsonl` and the numbers of unreadable lines; both empty if there is no file.

    An incomplete last line is ignored: the run was killed while writing it.
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
    """Read a `summary.json`; None if it is missing or has no number of steps."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        return {**summary, "steps": int(summary["steps"])}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _checksum(file: Path) -> tuple[int, str]:
    import xxhash

    total, checksum = 0, xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            total += len(chunk)
            checksum.update(chunk)
    return total, checksum.hexdigest()


def format_line_numbers(numbers: Sequence[int]) -> str:
    """Format line numbers, shortening long lists."""
    shown = ", ".join(map(str, numbers[:5]))
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{f' and {len(numbers) - 5} more' if len(numbers) > 5 else ''}"
