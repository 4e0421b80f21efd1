"""The run folders that a server shows, found once or, with a root, whenever the list is asked for."""

import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cohort.errors import UserError
from cohort.run.files import is_run_folder
from cohort_view.run import ViewedRun

MAX_DEPTH = 4
_MAX_FOLDERS = 20_000  # looked into below a root
_MAX_RUNS = 2_000
_SCAN_EVERY_S = 5.0
# Files that only runs write: a folder with one of them is a run even if its config.yaml is gone.
_TRACES = ("metrics.jsonl", "events.jsonl", "status.json")
_NEVER_ENTERED = {"checkpoints", "completions", "tokens", "final", "logs", "adapters", "node_modules", "__pycache__"}


class Runs:
    """The runs by id. Thread-safe."""

    def __init__(self, folders: Sequence[Path], *, root: Path | None = None):
        """Show `folders`, and all runs below `root`."""
        self.root = root
        self._runs: dict[str, ViewedRun] = {}
        self._ids: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._scanned = -_SCAN_EVERY_S
        for folder in folders:
            self._add(folder)
        self._scan()

    def all(self) -> list[ViewedRun]:
        """Return all runs, in the order in which they were found."""
        self._scan()
        return list(self._runs.values())

    def find(self, run_id: str) -> ViewedRun | None:
        """Return a run by its id."""
        if run_id not in self._runs:
            self._scan()
        return self._runs.get(run_id)

    def _scan(self) -> None:
        if self.root is None:
            return
        with self._lock:
            if time.monotonic() - self._scanned < _SCAN_EVERY_S:
                return
            for folder in find_run_folders(self.root):
                self._add(folder)
            self._scanned = time.monotonic()

    def _add(self, folder: Path) -> None:
        path = folder.resolve()
        if path in self._ids:
            return
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-.") or "run"
        run_id, number = name, 2
        while run_id in self._runs:
            run_id, number = f"{name}-{number}", number + 1
        self._ids[path] = run_id
        self._runs = {**self._runs, run_id: ViewedRun(path, run_id)}


def find_run_folders(root: Path, *, max_depth: int = MAX_DEPTH) -> list[Path]:
    """Return the run folders at most `max_depth` levels below `root`, in the order of their paths."""
    found: list[Path] = []
    for count, (path, below, _) in enumerate(os.walk(root)):  # links are not followed, and runs are not entered
        folder = Path(path)
        is_run = looks_like_run(folder)
        found += [folder] if is_run else []
        may_enter = not is_run and len(folder.parts) - len(root.parts) < max_depth
        below[:] = [n for n in sorted(below) if may_enter and not n.startswith(".") and n not in _NEVER_ENTERED]
        if count >= _MAX_FOLDERS or len(found) >= _MAX_RUNS:
            break
    return sorted(found)


def check_is_run(folder: Path) -> None:
    """Check that `folder` holds a run.

    Raises:
        UserError: it does not; the message names run folders near it.
    """
    if looks_like_run(folder):
        return
    if not folder.exists():
        what = "does not exist"
    elif not folder.is_dir():
        what = "is a file; give the run's folder"
    else:
        what = "holds no run (neither a config.yaml written by a run nor a metrics.jsonl)"
    near, where = (find_run_folders(folder, max_depth=2), "below it") if folder.is_dir() else ([], "")
    above = folder.parent
    while not near and above != above.parent and len(above.parts) >= len(folder.parts) - 2:
        near, where = (find_run_folders(above, max_depth=1), f"in {str(above)!r}") if above.is_dir() else ([], "")
        above = above.parent
    hint = f". Run folders {where}: {', '.join(map(str, near[:5]))}" if near else ""
    more = f" and {len(near) - 5} more; `cohort view --list` shows them all" if len(near) > 5 else ""
    raise UserError(f"RUN_FOLDER: {str(folder)!r} {what}{hint}{more}")


def looks_like_run(folder: Path) -> bool:
    """Whether a folder holds a run, also one that lost its `config.yaml`."""
    try:
        is_file = {name: (folder / name).is_file() for name in ("config.yaml", *_TRACES)}  # to open a pipe would wait
        return (is_file.pop("config.yaml") and is_run_folder(folder)) or any(is_file.values())
    except OSError:
        return False
