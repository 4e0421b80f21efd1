"""The user's cache of converted data: files keyed by content, bounded in size, shared by runs that start at once."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from cohort.records import IntArray

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_BYTES = 20 << 30  # of all files; those that were not used for longest are removed
_ABANDONED_S = 24 * 3600  # age of an unfinished file whose writer must have died
_VERSION = b"1"  # of the formats; another one makes other keys
_BLOCK = 16 << 20


def cache_folder() -> Path:
    """Return the folder of the cache, `$XDG_CACHE_HOME/cohort/data`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home, as in containers
            base = f"{tempfile.gettempdir()}/cache-{os.getuid()}"
    return Path(base) / "cohort" / "data"


def content_key(*parts: Path | str | bytes, on_bytes: Callable[[int], None] = lambda num_read: None) -> str:
    """Return a key of the contents of files, and of texts. `on_bytes` is called with the bytes of files read so far."""
    digest, num_read = xxhash.xxh3_128(_VERSION), 0
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    on_bytes(num_read := num_read + len(block))
        else:
            digest.update(part if isinstance(part, bytes) else part.encode(errors="surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def cached_table(key: str | None, write: Callable[[Any], None]) -> tuple["pa.Table", dict[bytes, bytes]]:
    """Return the table of a key, memory-mapped, and the metadata of its last batch.

    Args:
        key: see `content_key`. None: the table is made in memory.
        write: called with a sink if the cache lacks the table: writes an Arrow IPC file. If the cache cannot be
            written, as on a full disk, the table is made in memory.
    """
    import pyarrow as pa

    if key is not None:
        file = cache_folder() / f"{key}.arrow"
        with suppress(OSError, pa.ArrowInvalid):  # missing, or damaged: it is written again
            table = _open(pa.memory_map(str(file)))
            _touch(file)
            return table
        failed = _write(file, lambda path: _write_to(pa.OSFile(str(path), "wb"), write))
        if not failed:
            with suppress(OSError, pa.ArrowInvalid):  # removed by another process
                return _open(pa.memory_map(str(file)))
    sink = pa.BufferOutputStream()
    write(sink)
    return _open(pa.BufferReader(sink.getvalue()))


def cached_numbers(key: str | None, find: Callable[[], IntArray]) -> IntArray:
    """Return the integers of a key, which `find` computes if the cache lacks them."""
    import pyarrow as pa

    def write(sink: Any) -> None:
        batch = pa.record_batch({"numbers": pa.array(find(), pa.int64())})
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

    numbers: IntArray = cached_table(key, write)[0]["numbers"].to_numpy()
    return numbers


def recall(key: str) -> Any:
    """Return the JSON value that was remembered under a key; None if there is none."""
    file = cache_folder() / f"{key}.json"
    with suppress(OSError, ValueError):
        value = json.loads(file.read_bytes())
        _touch(file)
        return value
    return None


def _touch(file: Path) -> None:
    """Note that a file was used. The cache may be one that this user cannot write."""
    with suppress(OSError):
        os.utime(file)


def remember(key: str, value: Any) -> None:
    """Keep a JSON value for later runs, if the cache can be written."""
    _write(cache_folder() / f"{key}.json", lambda path: path.write_text(json.dumps(value)))


def _open(source: Any) -> tuple["pa.Table", dict[bytes, bytes]]:
    import pyarrow as pa

    with pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
        metadata = dict(batches[-1].custom_metadata or {}) if batches else {}
        return pa.Table.from_batches([batch.batch for batch in batches], reader.schema), metadata


def _write_to(sink: Any, write: Callable[[Any], None]) -> None:
    with sink:
        write(sink)


def _write(file: Path, write: Callable[[Path], Any]) -> bool:
    """Write a file whole or not at all. Return whether that failed. Errors of what is written are raised."""
    unfinished = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".unfinished", dir=file.parent)
        os.close(handle)
        unfinished = Path(name)
        write(unfinished)
        os.replace(unfinished, file)
    except OSError:
        return True
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
    with suppress(OSError):  # such as a folder that others write to as well
        _bound(file)
    return False


def _bound(kept: Path) -> None:
    """Remove what exceeds the size of the cache. Processes that have mapped a removed file go on reading it."""
    found = []
    for file in kept.parent.iterdir():
        with suppress(OSError):  # removed by another process
            state = file.stat()
            if file.suffix == ".unfinished":
                if time.time() - state.st_mtime > _ABANDONED_S:
                    file.unlink()
            else:
                found.append((file != kept, -state.st_mtime, state.st_size, file))
    total = 0
    for is_other, _, size, file in sorted(found):
        total += size
        if is_other and total > _MAX_BYTES:
            file.unlink(missing_ok=True)
