"""Signals that ask a run to end: what is saved, and that the run which goes on from there is the uninterrupted one."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch

import cohort
from cohort.display import Display, StepReport
from cohort.errors import StopRequested
from cohort.ranks.stopping import StopSignals
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import load_trainer_state
from commands import set_up, start_command
from forked import fork
from runs import assert_same_weights, changed, make_inputs, metric, train
from selection import mostly_slow, slow
from test_launched_ranks import LaunchedRank
from waiting import PATIENCE_S, free_port, until

STEPS = 6

# What is called first in each part of a step, and whether the step is finished before the run ends.
PARTS = {
    "loading": ("cohort.trainer.run.build_worker", False),
    "sampling": ("cohort.rollout.engines.local.sampler.sample_tokens", False),
    "rewards": ("cohort.trainer.collect_groups.RewardRunner.score", False),
    "forward": ("cohort.learner.forward_backward.ForwardBackward.micro_batch", False),
    "before the update": ("cohort.trainer.worker.Worker.optim_step", True),
    "publishing": ("cohort.trainer.loop.publish_weights", True),
    "evaluation": ("cohort.trainer.loop.evaluate", True),
    "saving": ("cohort.trainer.worker.Worker.save", True),
}


class Told(Display):
    """Prints what a person is told, and after how many steps the run is."""

    steps_done = 0

    def notify(self, text: str) -> None:
        print(text, flush=True)

    def step(self, report: StepReport) -> None:
        self.steps_done = report.steps_done


def trained_with(config: dict[str, Any], part: str, steps_done: int, *numbers: int, then: Callable[[], None]) -> None:
    """Train; a part of the step after so many gets signals, and does something then."""
    display = Told()
    name = PARTS[part][0]
    owner, attribute = name.rsplit(".", 1)
    original = resolve_name(name)
    moments = ["once"]

    @wraps(original)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if display.steps_done == steps_done and moments:
            moments.clear()
            try:
                for number in numbers:
                    os.kill(os.getpid(), number)
                    time.sleep(0.1)
            except StopRequested as error:  # as libraries do
                raise cohort.UserError("it cannot be read") from error
            then()
        return original(*args, **kwargs)

    with mock.patch(f"{owner}.{attribute}", interrupted):
        cohort.train(config, display=display)


def go_on() -> None:
    pass


def hang() -> None:
    time.sleep(PATIENCE_S)


def end_a_child() -> None:
    """As a reward that runs code in a process of its own, which takes too long."""
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE_S)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def leave_a_child() -> None:
    """As a reward that keeps a pool of processes."""
    run = os.getpid()
    if os.fork() == 0:
        while os.getppid() == run:
            time.sleep(0.05)
        os._exit(0)


def ignore_and_train(config: dict[str, Any], part: str, steps_done: int, number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    trained_with(config, part, steps_done, number, then=go_on)


def ended(target: Callable[..., None], config: dict[str, Any], *arguments: Any, **more: Any) -> tuple[int | None, str]:
    """The exit code of a process of its own, and what it printed."""
    said = Path(config["run"]["dir"]).with_name("said")
    said.unlink(missing_ok=True)
    process = fork(_call, target, config, arguments, more, out=said, OMP_NUM_THREADS=torch.get_num_threads())
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    return process.exitcode, said.read_text()


def _call(target: Callable[..., None], config: dict[str, Any], arguments: tuple[Any, ...], more: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # as in a shell's foreground
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    target(config, *arguments, **more)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stopping")
    return changed(make_inputs(folder), train={"steps": STEPS}, run={"checkpoint_every": 50, "completions_every": 1})


@pytest.fixture(scope="module")
def whole(config: dict[str, Any]) -> Path:
    """The run that nothing has interrupted."""
    return train(changed(config, run={"dir": f"{config['run']['dir']}-whole"})).run_dir


def of_its_own(config: dict[str, Any], tmp_path: Path, **run: Any) -> dict[str, Any]:
    return changed(config, run={"dir": str(tmp_path / "run"), **run})


def assert_goes_on_to(whole: Path, config: dict[str, Any]) -> None:
    """The same command gives the weights, bit for bit, and the metrics of the uninterrupted run."""
    run = train(config).run_dir
    assert_same_weights(run / "final", whole / "final")
    for name in ("reward", "loss", "eval/accuracy", "num_tokens"):
        assert metric(run, name) == metric(whole, name), name
    assert sorted(p.name for p in (run / "completions").iterdir()) == sorted(
        p.name for p in (whole / "completions").iterdir()
    )


@pytest.mark.parametrize(
    ("part", "steps_done", "name"),
    mostly_slow(
        [
            ("rewards", 2, "SIGTERM"),
            ("before the update", 2, "SIGUSR1"),
            ("evaluation", 3, "SIGINT"),
            ("sampling", 3, "SIGHUP"),
            ("sampling", 1, "SIGINT"),
            ("forward", 1, "SIGTERM"),
            ("forward", 4, "SIGHUP"),
            ("publishing", 3, "SIGTERM"),
            ("saving", 6, "SIGTERM"),
        ],
        ("rewards", 2, "SIGTERM"),
        ("before the update", 2, "SIGUSR1"),
        ("evaluation", 3, "SIGINT"),
        reason="three of the parts, with three of the signals",
    ),
)
def test_a_signal_saves_the_last_whole_step(config, whole, tmp_path, part: str, steps_done: int, name: str):
    own = of_its_own(config, tmp_path)
    number = signal.Signals[name]
    code, said = ended(trained_with, own, part, steps_done, number, then=go_on)
    step_is_finished = PARTS[part][1] and part not in ("evaluation", "saving")  # where it is logged already
    saved = steps_done + step_is_finished
    if part == "saving":  # the last one: there is nothing left to do but to write the model
        assert code == 0, said
    else:
        assert code == 128 + number, said
        assert f"stopped by {name} after step {saved}: saved; run the same command to resume" in said
        assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == [f"step-{saved}"]
    assert_goes_on_to(whole, own)


@pytest.mark.parametrize("part", ["loading", "sampling"])
def test_with_nothing_new_nothing_is_saved(config, tmp_path, part: str):
    own = of_its_own(config, tmp_path)
    code, said = ended(trained_with, own, part, 0, signal.SIGTERM, then=go_on)
    assert code == 143
    assert "stopped by SIGTERM, with nothing new to save; there is no checkpoint to resume from" in said
    assert not checkpoints(tmp_path / "run" / "checkpoints")


@slow("the messages are those of the loop")
@pytest.mark.parametrize(
    ("every", "said_then"),
    [
        (2, "stopped by SIGTERM after step 2: already saved; run the same command to resume"),
        (0, "stopped by SIGTERM after step 2: not saved (run.checkpoint_every: 0); there is no checkpoint"),
    ],
)
def test_what_is_saved_already_or_never(config, tmp_path, every: int, said_then: str):
    own = of_its_own(config, tmp_path, checkpoint_every=every)
    code, said = ended(trained_with, own, "rewards", 2, signal.SIGTERM, then=go_on)
    assert code == 143
    assert said_then in said
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == (1 if every else 0)


def test_a_signal_that_is_ignored_stays_ignored(config, tmp_path):
    """As `nohup` does it."""
    code, said = ended(ignore_and_train, of_its_own(config, tmp_path), "rewards", 2, signal.SIGHUP)
    assert (code, "stopped" in said) == (0, False), said


def test_a_signal_to_a_forked_child_is_not_the_runs(config, tmp_path):
    code, said = ended(trained_with, of_its_own(config, tmp_path), "rewards", 2, then=end_a_child)
    assert (code, "stopped" in said) == (0, False), said


def test_a_forked_child_that_lives_on_does_not_hold_the_run_up(config, tmp_path):
    own = of_its_own(config, tmp_path)
    code, said = ended(trained_with, own, "rewards", 2, signal.SIGTERM, then=leave_a_child)
    assert (code, said.count("stopped by SIGTERM")) == (143, 1), said


def test_a_second_signal_ends_it_at_once(config, tmp_path):
    own = of_its_own(config, tmp_path, checkpoint_every=2)
    code, said = ended(trained_with, own, "before the update", 3, signal.SIGINT, signal.SIGINT, then=hang)
    assert code == 130
    assert said.endswith("stopped immediately by a second SIGINT; run the same command to resume from step-2\n")


def test_there_is_an_end_to_the_grace(config, tmp_path):
    own = changed(of_its_own(config, tmp_path, checkpoint_every=2), hardware={"grace_s": 0.5})
    code, said = ended(trained_with, own, "before the update", 3, signal.SIGTERM, then=hang)
    assert code == 143
    assert said.endswith(
        "stopped: saving did not finish within hardware.grace_s (0.5 s); run the same command to resume from step-2\n"
    )


@pytest.mark.usefixtures("in_foreground")
def test_a_second_signal_in_a_program_that_has_more_to_do_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt, match="within"), StopSignals("guest") as stop:
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested(within_s=PATIENCE_S) == signal.SIGINT
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(PATIENCE_S)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("within") from None


def test_a_rank_acts_later_on_a_signal_that_came_after_the_last_check():
    stop = StopSignals("rank")
    with stop:
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested, match="SIGTERM"), stop:
        stop.check()


SIGNALS_AT_ANY_TIME = """
import os, signal, threading, time
from cohort.errors import StopRequested
from cohort.ranks.stopping import StopSignals

signal.signal(signal.SIGINT, signal.default_int_handler)
num_seen, ready = 0, threading.Event()

def send():
    while True:
        ready.wait()
        ready.clear()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0007)  # no multiple of what a context takes

stop = StopSignals("guest")
threading.Thread(target=send, daemon=True).start()
deadline = time.monotonic() + 250
while num_seen < 300:
    try:
        ready.set()
        while time.monotonic() < deadline:
            with stop:
                stop.can_save = True
                for _ in range(20):
                    stop.check()
        break
    except (KeyboardInterrupt, StopRequested):
        num_seen += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert num_seen == 300, f"signal {num_seen + 1} was lost"
left = threading.active_count(), os.listdir("/proc/self/fd")
assert left[0] == 2 and len(left[1]) < 10, left
"""


def test_no_signal_is_lost_between_two_steps():
    """A step of a small model takes no longer than it takes to set the handlers and to give them back."""
    done = subprocess.run([sys.executable, "-c", SIGNALS_AT_ANY_TIME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_handlers_are_as_before(config, tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    train(changed(of_its_own(config, tmp_path), train={"steps": 1}))
    assert before == {number: signal.getsignal(number) for number in before}
    assert signal.set_wakeup_fd(-1) == -1


FORKS = """
import os, signal
from cohort.ranks.stopping import StopSignals
with StopSignals() as stop:
    for _ in range(200):
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert stop.number is None
"""


def test_a_signal_to_a_child_that_was_just_forked_is_the_childs():
    """As when a pool of processes ends at once: the child has this process's pipe until it has forgotten it."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SLOW_REWARD = """
import pathlib, time

def judge(completions, **kw):
    seen = pathlib.Path(__file__).with_name("judged")
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    if len(seen.read_text()) == 3:
        time.sleep(3600)
    return [float(len(c)) for c in completions]
"""


def slow_run(folder: Path, **sections: Any) -> Path:
    """A run whose third step waits for its rewards until it is stopped."""
    return set_up(
        folder,
        files={"judge.py": SLOW_REWARD},
        rewards=[{"use": f"{folder}/judge.py:judge", "timeout_s": 3600}],
        **{"run": {"checkpoint_every": 50}, **sections},
    )


def waits(folder: Path) -> bool:
    file = folder / "judged"
    return file.exists() and len(file.read_text()) == 3


def test_a_signal_to_one_rank_stops_all(tmp_path):
    """Rank 0 waits for its rewards, the others for it, and they save together."""
    path = slow_run(tmp_path)
    place = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": free_port()}
    ranks = [LaunchedRank(path, RANK=rank, LOCAL_RANK=rank, **place) for rank in range(3)]
    until(lambda: waits(tmp_path) or not all(rank.is_alive() for rank in ranks))
    ranks[2].signal(signal.SIGUSR1)
    first, *others = [rank.end() for rank in ranks]
    assert first.code == 138, first
    assert {other.code for other in others} <= {0, 138}
    assert "stopped by SIGUSR1 after step 2: saved; run the same command to resume" in first.out
    (found,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert load_trainer_state(found).steps_done == 2


@slow("one process, and ranks that are signalled themselves")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_launcher_hands_a_signal_on(tmp_path, name: str):
    path = slow_run(tmp_path, hardware={"processes": 2})
    with start_command("train", path) as process:
        until(lambda: waits(tmp_path) or process.poll() is not None)
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.Signals[name], (out, err)
    assert f"stopped by {name} after step 2: saved; run the same command to resume" in out
    assert "Traceback" not in err
    assert not _is_locked(tmp_path / "run")


STUBBORN_REWARD = SLOW_REWARD.replace(
    "        time.sleep(3600)\n",
    """
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass
""",
)


@slow("one process, whose second signal is handled in the same way")
def test_a_second_signal_to_the_launcher_ends_all_at_once(tmp_path):
    path = slow_run(tmp_path, hardware={"processes": 2})
    (tmp_path / "judge.py").write_text(STUBBORN_REWARD)
    with start_command("train", path) as process:
        until(lambda: waits(tmp_path) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        second = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    took_s = time.monotonic() - second
    assert process.returncode == 130, (out, err)
    assert "stopped immediately by a second SIGINT; there is no checkpoint to resume from" in out
    assert took_s < 30, "half of the time that the ranks may take"
    until(lambda: not _is_locked(tmp_path / "run"))


@slow("processes of a launcher, which is killed")
def test_ranks_end_with_their_launcher(tmp_path):
    path = slow_run(tmp_path, hardware={"processes": 2})
    with start_command("train", path) as process:
        until(lambda: waits(tmp_path) or process.poll() is not None)
        process.kill()
    until(lambda: not _is_locked(tmp_path / "run"))


def _is_locked(run: Path) -> bool:
    with (run / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
