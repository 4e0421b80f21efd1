"""Runs that are killed, told to end or left without a disk at random instants, and what of them is lost.

    python bench/campaign.py [--kills 60] [--terms 30] [--full-disks 10] [--seed 0] [--children] [--quick]

A small run is interrupted at a random instant, and the same run is started again until it has finished. Each must have
the weights, bit for bit, the metrics and the completions of the run that nothing happened to. After SIGTERM, SIGINT,
SIGHUP or SIGUSR1 no step that was logged may be done again. With `--children` half of the runs have an isolated reward
and an isolated environment, the others a rollout server, which samples by chance: five seconds after a SIGKILL no
process of the run may be left. Disks are filled with a file while the run goes on, on a tmpfs, which takes root to
mount.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import psutil
from safetensors.numpy import load_file

import cohort
from cohort.config import config_from_dict
from cohort.demo import run as demo
from cohort.display import Display
from cohort.errors import TrainingError
from cohort.rollout.engines.servers.process import GuardedServer
from cohort.rollout.engines.servers.secret import Secret
from cohort.run.files import checkpoints, read_metrics
from harness import machine
from stub_engine.setup import StubSetup
from third_engine import known_engine

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
STEPS = 16
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME = ("reward", "loss", "grad_norm", "num_tokens", "eval/accuracy")  # metrics that depend on no clock
_DISK_BYTES = 64 << 20
CHILDREN = ("isolated code", "servers")
ORPHANS_S = 5.0
OF_RUN = "COHORT_CAMPAIGN_RUN"  # environment variable of the run's child processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--terms", type=int, default=30)
    parser.add_argument("--full-disks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", action="store_true", help="runs with child processes, which are to end with them")
    parser.add_argument("--quick", action="store_true", help="one of each, seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.kills = args.terms = 1
        args.full_disks = int(os.geteuid() == 0)
    print(machine(), flush=True)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder, known_engine(f"{__name__}:Setup"):
        kinds = [Campaign(Path(folder) / kind, rng, kind) for kind in (CHILDREN if args.children else ("plain",))]
        for name, number, interrupt in (
            ("kills", args.kills, Campaign.kill),
            ("terms", args.terms, Campaign.term),
            ("full disks", args.full_disks, Campaign.fill),
        ):
            for index, campaign in enumerate(kinds):
                campaign.repeat(name, len(range(index, number, len(kinds))), interrupt)
        if lost := [line for campaign in kinds for line in campaign.lost]:
            raise SystemExit("\n".join(lost))


class Campaign:
    """Interruptions of one run, each in a folder of its own."""

    def __init__(self, folder: Path, rng: random.Random, kind: str):
        folder.mkdir()
        self.folder = folder
        self.kind = kind
        self.rng = rng
        self.lost: list[str] = []
        start = time.monotonic()
        self.whole = folder / "whole"
        assert self.wait(self.start(self.whole)) == 0, "the run that nothing happens to has to finish"
        self.seconds = time.monotonic() - start

    def repeat(self, name: str, number: int, interrupt: Callable[["Campaign", Path], str]) -> None:
        """Interrupt so many runs, and say how that went."""
        if number == 0:
            return
        ways: Counter[str] = Counter()
        before = len(self.lost)
        for n in range(number):
            run = self.folder / f"{name.replace(' ', '-')}-{n}"
            ways[interrupt(self, run)] += 1
            shutil.rmtree(run, ignore_errors=True)
            if n % 20 == 19:
                print(f"  {n + 1} {name}, lost: {len(self.lost) - before}", flush=True)
        what = ", ".join(f"{count} {way}" for way, count in ways.most_common())
        kind = "" if self.kind == "plain" else f" of runs with {self.kind}"
        print(f"{name}{kind}: {number} ({what}); lost: {len(self.lost) - before}", flush=True)

    def kill(self, run: Path) -> str:
        """SIGKILL, and again with some probability."""
        times = 0
        while True:
            process = self.start(run)
            time.sleep(self.rng.uniform(0, self.seconds))
            os.kill(process, signal.SIGKILL)
            times += self.wait(process) != 0
            self.look_for_orphans(run)
            if self.rng.random() < 0.7:
                self.finish(run)
                return "under way" if times else "too late"

    def look_for_orphans(self, run: Path) -> None:
        """Look for processes of a run that was killed, until there are none, or five seconds have passed."""
        deadline = time.monotonic() + ORPHANS_S
        while found := [process for process in psutil.process_iter() if is_child_of(run, process)]:
            if time.monotonic() > deadline:
                self.lost.append(f"{run.name}: processes were left: {', '.join(map(str, found))}")
                return
            time.sleep(0.1)

    def term(self, run: Path) -> str:
        """One of the signals that a run saves at."""
        number = self.rng.choice(SIGNALS)
        process = self.start(run)
        time.sleep(self.rng.uniform(0, self.seconds))
        os.kill(process, number)
        code = self.wait(process)
        if code == 0:
            self.finish(run)
            return "too late"
        logged = max((row["step"] for row in read_metrics(run / "metrics.jsonl")[0]), default=0)
        found = checkpoints(run / "checkpoints")
        saved = int(found[-1].name.removeprefix("step-")) if found else 0
        if code not in (128 + number, -number) or saved < logged:
            self.lost.append(f"{run.name}: {number.name} ended with {code}, {logged} steps logged, {saved} saved")
        self.finish(run)
        return "before the first step" if saved == 0 else "under way"

    def fill(self, run: Path) -> str:
        """Fill the disk while the run goes on, and make room again."""
        run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(run)], check=True)
        try:
            process = self.start(run / "run")
            time.sleep(self.rng.uniform(0, self.seconds))
            filler = run / "filler"
            try:
                with filler.open("wb", buffering=0) as file:
                    while file.write(bytes(1 << 16)):
                        pass
            except OSError:
                pass
            code = self.wait(process)
            filler.unlink()
            if code not in (0, 1, 2):
                self.lost.append(f"{run.name}: a full disk ended with {code}: {self.said()}")
            self.finish(run / "run")
        finally:
            subprocess.run(["umount", str(run)], check=True)
        return "too late" if code == 0 else "under way"

    def finish(self, run: Path) -> None:
        """Start the run again, and look for what it has lost."""
        if self.wait(self.start(run)) == 0:
            self.compare(run)
            return
        self.lost.append(f"{run.name}: it does not finish: {self.said()}")

    def compare(self, run: Path) -> None:
        """Compare a finished run with the one that nothing happened to."""
        (first, bad), (second, _) = (read_metrics(path / "metrics.jsonl") for path in (self.whole, run))
        wanted, found = ([{key: row.get(key) for key in ("step", *SAME)} for row in rows] for rows in (first, second))
        weights = [load_file(path / "final" / "model.safetensors") for path in (self.whole, run)]
        files = [sorted(p.name for p in (path / "completions").iterdir()) for path in (self.whole, run)]
        if bad or wanted != found:
            self.lost.append(f"{run.name}: other metrics")
        if any((weights[1][key] != weight).any() for key, weight in weights[0].items()):
            self.lost.append(f"{run.name}: other weights")
        if files[0] != files[1]:
            self.lost.append(f"{run.name}: other completions")

    def said(self) -> str:
        """The last words of the processes."""
        return (self.folder / "said").read_text()[-2000:]

    def start(self, run: Path) -> int:
        """The number of a process that trains, forked from this one, which has imported all and computed nothing."""
        config = configuration(run, self.folder / "data", self.kind)
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            os.environ[OF_RUN] = str(run)
            sys.stdout = sys.stderr = (self.folder / "said").open("a")
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            cohort.train(config, display=Display())
            code = 0
        except (TrainingError, cohort.UserError) as error:
            print(error, flush=True)
            code = 1 if isinstance(error, TrainingError) else 2
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, process: int) -> int:
        """The exit code; negative for the signal that has ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def is_child_of(run: Path, process: psutil.Process) -> bool:
    """Whether a process was started by a run. The run itself was forked from this process, with its environment."""
    try:
        return process.environ().get(OF_RUN) == str(run) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class ServerInProcess(GuardedServer):
    """The server of the tests' stub engine, whose tokens do not depend on weights, as a process."""

    def __init__(self, *, log_file: Path, **settings: Any):
        super().__init__(secret=Secret.new(), log_file=log_file)
        self.settings = settings

    def command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """Return its command line."""
        program = (
            f"import sys; sys.path.insert(0, {str(HELPERS)!r}); from stub_engine.server import StubServer; "
            f"StubServer(**{self.settings}, port={port}).serve_forever()"
        )
        return [sys.executable, "-c", program], {}


class Setup(StubSetup):
    """The stub engine with processes."""

    def make_server(self, gpus: str, log_file: Path) -> ServerInProcess:
        """Create a server."""
        return ServerInProcess(log_file=log_file, **super().make_server(gpus, log_file).settings)


CODE = """
def score(completions, answer, **kwargs):
    return [float(text.strip() == str(wanted)) + len(text) / 1000 for text, wanted in zip(completions, answer)]

async def play(row, model):
    await model.chat([{"role": "user", "content": row["question"]}])
"""


def configuration(run: Path, data: Path, kind: str) -> dict[str, Any]:
    """The demo's task, small, with child processes of a kind."""
    raw = demo.demo_config(data, seed=0).model_dump(mode="json")
    if not data.exists():
        demo.write_data(data, config_from_dict(raw), seed=0)
        (data / "code.py").write_text(CODE)
    raw["run"] |= {"dir": str(run), "checkpoint_every": 3, "completions_every": 1}
    raw["train"] |= {"steps": STEPS, "prompts_per_step": 2}
    raw["rollout"] |= {"num_generations": 4}
    raw["eval"] |= {"every": 4, "max_prompts": 8}
    if kind == "isolated code":
        raw["rewards"] = [{"use": f"{data}/code.py:score", "isolate": True}]
        raw["rollout"] |= {"environment": {"use": f"{data}/code.py:play"}, "isolate": True}
    if kind == "servers":
        own = {key: raw["rollout"][key] for key in ("num_generations", "max_prompt_tokens", "max_completion_tokens")}
        raw["rollout"] = {"engine": "stub", "servers": 1, "parity_tolerance": 100.0, **own}
        raw["hardware"] |= {"device": "cpu"}
    return json.loads(json.dumps(raw))


if __name__ == "__main__":
    main()
