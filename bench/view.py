"""The page (`cohort view`) of a run with 10,000 steps and 1 million completions, and beside a run that trains.

    python bench/view.py [--folder FOLDER] [--steps 10000] [--rows 100] [--train-steps 800] [--quick]

Times are those of a client of the HTTP server, from request to last byte; the browser's work comes on top. Cold: the
first requests to a server that just started. The run is synthetic: random text, tokens and curves, with the columns and
the compression of a real one; the text of a step's completions is one of 16 templates, and one completion of step 100
holds a word that no other has. FOLDER keeps the run for the next time.
"""

import argparse
import http.client
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import WORDS
from harness import machine, markdown
from view_run import GENERATIONS, NEEDLE, write_run

CHARTS = ("reward", "eval/accuracy", "frac_all_wrong", "frac_all_right", "completions/mean_length", "entropy",
          "grad_norm", "step_time")  # fmt: skip
TOGETHER_S = 0.25  # changes within this time are one update, as in the page
BLOCK_STEPS = 4  # training steps measured with the page open, then closed, and so on
BETWEEN_STEPS = 2  # steps in which the page opens or closes, which are not measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the run is, or is made (default: a temporary folder)")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=100, help="completions per step")
    parser.add_argument("--train-steps", type=int, default=800, help="steps of the demo with and without the page")
    parser.add_argument("--repeats", type=int, default=15, help="requests per view")
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.rows, args.train_steps, args.repeats = 120, 20, 24, 3
    print(machine("pyarrow", "starlette", "uvicorn"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "large"
        if not (folder / "metrics.jsonl").exists():
            write_run(folder, args.steps, args.rows)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        print(f"{args.steps:,} steps, {args.steps * args.rows:,} completions, {size / 1e6:,.0f} MB\n")
        measure_views(folder, args.steps, args.rows, args.repeats)
        measure_training(Path(temporary) / "demo", args.train_steps)


# The page


class Page:
    """A client with the page's cookie, on one connection."""

    def __init__(self, address: str, pid: int):
        found = re.match(r"http://([\d.]+):(\d+)(/.*)", address)
        assert found is not None, address
        self._host, self._port, self.pid = found[1], int(found[2]), pid
        self._connection = self._connect()
        self._connection.request("GET", found[3])
        answer = self._connection.getresponse()
        answer.read()
        self._cookie = {"Cookie": answer.headers["Set-Cookie"].split(";")[0]}

    def get(self, path: str) -> bytes:
        """The body of a route."""
        self._connection.request("GET", path, headers=self._cookie)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {body[:300]!r}")
        return body

    def milliseconds(self, *paths: str) -> float:
        """Time of requests, one after the other."""
        start = time.perf_counter()
        for path in paths:
            self.get(path)
        return 1000 * (time.perf_counter() - start)

    def events(self, path: str, until: Callable[[], bool] = lambda: False) -> Iterator[tuple[str, Any]]:
        """Server-sent events on a connection of their own, which is closed at the end."""
        connection = self._connect(timeout=60.0)
        try:
            connection.request("GET", path, headers=self._cookie)
            answer = connection.getresponse()
            name = ""
            while not until() and (line := answer.readline()):
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
        finally:
            connection.close()

    def status(self, field: str) -> float:
        """A field of the server's /proc/PID/status in MB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1000
        return float("nan")

    def cpu_seconds(self) -> float:
        """Processor time of the server so far."""
        return cpu_seconds(self.pid)

    def _connect(self, timeout: float = 600.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(folder: Path) -> Iterator[Page]:
    """`cohort view FOLDER` and a client of it."""
    command = [sys.executable, "-m", "cohort", "view", str(folder), "--no-open", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+token=\S+", line):
                yield Page(found[0], process.pid)
                return
        raise SystemExit(f"{' '.join(command)} ended without an address")
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def measure_views(folder: Path, steps: int, rows: int, repeats: int) -> None:
    """Print the time of the first paint's data, of every view and of searches, and the server's memory after each."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    with server(folder) as page:
        started, cpu = time.perf_counter(), page.cpu_seconds()
        (run,) = json.loads(page.get("/api/runs"))["runs"]
        first = first_paint(run["id"])
        page.milliseconds(*first)
        cold, cpu = 1000 * (time.perf_counter() - started), 1000 * (page.cpu_seconds() - cpu)
        print(f"The server is up after {started - start:.1f} s.")
        print(f"Data of the first paint, cold: {cold:.0f} ms ({cpu:.0f} ms of the processor)\n")
        timed = [measure(page, "first paint, warm", [first] * repeats)]
        for name, paths in views(run["id"], steps, rows, rng, repeats).items():
            timed.append(measure(page, name, [[path] for path in paths]))
        print(markdown(["ms", "p50", "max", "CPU time", "kB", "memory, MB"], timed))
        queries = (("", "reward < 0.2 and length > 300"), ("answer", ""), (NEEDLE, ""), ("", "reward > 2"))
        found = [search(page, run["id"], *query) for query in queries]
        print()
        print(
            markdown(
                ["search", "first match, s", "end, s", "CPU time, s", "matches", "ended by", "memory, MB"],
                found,
            )
        )
        print(f"\nThe server's memory at most: {page.status('VmHWM'):.0f} MB\n")


def measure(page: Page, name: str, requests: Sequence[Sequence[str]]) -> list[str]:
    """Ask the first once, then all, and return a row of the table."""
    size = sum(len(page.get(path)) for path in requests[0])
    cpu = page.cpu_seconds()
    times = [page.milliseconds(*paths) for paths in requests]
    cpu = 1000 * (page.cpu_seconds() - cpu) / len(requests)
    values = [statistics.median(times), max(times), cpu, size / 1000, page.status("VmRSS")]
    return [name, *(f"{value:.0f}" for value in values)]


def first_paint(run_id: str) -> list[str]:
    """What the page asks for before it shows a run, and the curves of its charts."""
    run = f"/api/runs/{quote(run_id)}"
    return ["/", "/api/runs", f"{run}/now", f"/api/curves?runs={quote(run_id)}&names={quote(','.join(CHARTS))}"]


def views(run_id: str, steps: int, rows: int, rng: np.random.Generator, repeats: int) -> Mapping[str, list[str]]:
    """Requests of each view: of other steps, groups and completions each time."""
    run = f"/api/runs/{quote(run_id)}"
    several = rng.integers(1, steps + 1, (repeats, 3)).tolist()
    all_names = quote(",".join(CHARTS))
    sorts = ["spread", "length", "equal", "staleness", "reward"]
    return {
        "now": [f"{run}/now"] * repeats,
        "list of metrics": [f"{run}/metrics"] * repeats,
        "8 curves of 800 points": [f"/api/curves?runs={quote(run_id)}&names={all_names}"] * repeats,
        "8 curves, zoomed": [f"/api/curves?names={all_names}&from={a // 2}&to={a // 2 + 99}" for a, *_ in several],
        "list of steps": [f"{run}/steps?around={a}" for a, *_ in several],
        "a step": [f"{run}/steps/{a}?sort={sorts[b % 5]}" for a, b, _ in several],
        "a group": [f"{run}/steps/{a}/groups/{b % (rows // GENERATIONS)}" for a, b, _ in several],
        "a completion": [f"{run}/steps/{a}/completions/{b % rows}" for a, b, _ in several],
        "held-out questions": [f"{run}/questions?kind=eval"] * repeats,
        "training questions": [f"{run}/questions?kind=step"] * repeats,
        "config": [f"{run}/config"] * repeats,
    }


def search(page: Page, run_id: str, text: str, where: str) -> list[str]:
    """Search to the end: a row of the table."""
    start, first, matches, reason, cpu = time.perf_counter(), None, 0, "?", page.cpu_seconds()
    query = urlencode({"text": text, "where": where, "limit": 200})
    for name, data in page.events(f"/api/runs/{quote(run_id)}/search?{query}"):
        if name == "match":
            first = first or time.perf_counter() - start
            matches += 1
        elif name in ("done", "error"):
            reason = data.get("reason") or data.get("error")
            break
    end = time.perf_counter() - start
    times = ["none" if first is None else f"{first:.2f}", f"{end:.1f}", f"{page.cpu_seconds() - cpu:.1f}"]
    return [f"`{text or where}`", *times, str(matches), str(reason), f"{page.status('VmRSS'):.0f}"]


# A run that trains


def measure_training(folder: Path, steps: int) -> None:
    """Train the demo twice; where the page is closed in the first run it is open in the second. Print what it costs.

    Both runs sample the same completions, so a block of steps differs from that of the other run by the page only.
    """
    runs = [train_with_page(folder / str(n), steps, first_open=n) for n in (0, 1)]
    pairs = [(a, b) if a.is_open else (b, a) for a, b in zip(*runs, strict=True)]
    more = {}
    for name, field in (("of the clock", "clock_s"), ("of the processor", "training_s")):
        logs = [math.log(getattr(opened, field) / getattr(closed, field)) for opened, closed in pairs]
        error = statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else math.nan
        more[name] = f"{100 * math.expm1(statistics.mean(logs)):+.2f} % {name} (standard error {100 * error:.2f} %)"
    step = statistics.median(closed.clock_s for _, closed in pairs) / BLOCK_STEPS
    print(f"A demo step takes {', '.join(more.values())} with the page open; {step:.2f} s without.")
    clock, server, updates = (sum(getattr(a, f) for a, _ in pairs) for f in ("clock_s", "server_s", "updates"))
    print(
        f"The server used {server:.1f} s of a processor in the {clock:.0f} s with the page open, for {updates} updates."
    )


@dataclass
class Block:
    """Steps of training, measured together."""

    is_open: bool
    clock_s: float
    training_s: float  # processor time of the run's process
    server_s: float  # processor time of the page's server
    updates: float  # how often the page asked for new data


def train_with_page(folder: Path, steps: int, *, first_open: int) -> list[Block]:
    """Train the demo, with the page open for a few steps, then closed, and so on.

    Args:
        folder: new folder of the run.
        steps: training steps.
        first_open: number of the first block with the page open, 0 or 1.
    """
    folder.mkdir(parents=True)
    config = demo_config(folder, task=WORDS, seed=0)
    write_data(folder, config, task=WORDS, seed=0)
    changed = (f"train.steps={steps}", "train.learning_rate=1e-12", "eval.every=0", "eval.before_training=false")
    command = [sys.executable, "-m", "cohort", "train", str(folder / "config.yaml"), *changed, "run.checkpoint_every=0"]
    log = (folder / "train.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    progress, tab = Progress(folder / "metrics.jsonl", process), Tab()

    def read(page: Page) -> tuple[float, ...]:
        return time.perf_counter(), cpu_seconds(process.pid), page.cpu_seconds(), tab.num_updates

    blocks = []
    try:
        progress.wait_for(BETWEEN_STEPS)
        with server(folder) as page:
            (run,) = json.loads(page.get("/api/runs"))["runs"]
            for number, last in enumerate(range(2 * BETWEEN_STEPS + BLOCK_STEPS, steps, BETWEEN_STEPS + BLOCK_STEPS)):
                is_open = number % 2 == first_open
                if is_open:
                    tab.open(page, run["id"])
                else:
                    tab.close()
                progress.wait_for(last - BLOCK_STEPS)
                before = read(page)
                progress.wait_for(last)
                blocks.append(Block(is_open, *(b - a for a, b in zip(before, read(page), strict=True))))
        process.wait()
    finally:
        tab.close()
        process.kill()
        process.wait()
        log.close()
    if process.returncode != 0:
        raise SystemExit((folder / "train.log").read_text()[-3000:])
    shutil.rmtree(folder)
    return blocks


class Progress:
    """Counts the steps of a run that trains."""

    def __init__(self, metrics: Path, process: subprocess.Popen[bytes]):
        self._metrics, self._process = metrics, process
        self._read = self._steps = 0

    def wait_for(self, step: int) -> None:
        """Wait until this step is written."""
        while self._steps < step:
            if self._process.poll() is not None:
                raise SystemExit(f"training ended with {self._process.returncode} before step {step}")
            time.sleep(0.01)
            if self._metrics.exists() and self._metrics.stat().st_size > self._read:
                with self._metrics.open("rb") as file:
                    file.seek(self._read)
                    new = file.read()
                self._read += len(new)
                self._steps += new.count(b'"kind": "train"')


class Tab:
    """An open page: it listens to events, and asks for what it shows after each change."""

    def __init__(self) -> None:
        self.num_updates = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def open(self, page: Page, run_id: str) -> None:
        """Open it, in a thread."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(page, run_id, self._closed), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close it, and wait until its requests are answered."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(20)
        self._thread = None

    def _live(self, page: Page, run_id: str, closed: threading.Event) -> None:
        asked, paths = 0.0, first_paint(run_id)[2:]
        with suppress(OSError, http.client.HTTPException):  # the server has ended
            for name, _ in page.events(f"/events?runs={quote(run_id)}", closed.is_set):
                if name == "changed" and time.perf_counter() - asked > TOGETHER_S:
                    asked = time.perf_counter()
                    page.milliseconds(*paths)
                    self.num_updates += 1


if __name__ == "__main__":
    main()
