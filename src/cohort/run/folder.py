"""The run folder: its layout, whether a run may start or resume there, and writing its files.

config.yaml  metrics.jsonl  events.jsonl  status.json  completions/step-N.parquet  tokens/step-N.parquet
checkpoints/step-N/  final/  summary.json  logs/  adapters/
"""

import fcntl
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.config import Config, load_config, to_yaml
from cohort.config.schema import RECENT_STEP_TOKENS, RECENT_STEPS, RECENT_TOKENS_SIZE
from cohort.config.section import parse_size
from cohort.errors import TrainingError, UserError
from cohort.records import ForwardOnlyOutputs, ScoredGroup, TrainSequence
from cohort.run.atomic import remove_leftovers, write_file_atomically
from cohort.run.completions import are_single_turn, num_sampled_tokens, prepare_completions_file
from cohort.run.files import (
    SECRET_FILE,
    checkpoints,
    format_line_numbers,
    has_progress,
    is_run_folder,
    read_metrics,
    read_summary,
)
from cohort.run.tokens import TokenRecords, prepare_tokens_file

# Keys that may change when a run resumes, beside those that the rollout engine names: they affect neither what is
# learned nor in which order.
_MAY_CHANGE = (
    "hardware.",
    "run.",
    "eval.every",
    "eval.before_training",
    "train.micro_batch_tokens",
    "optim.offload",
    "model.gradient_checkpointing",
    "model.parameter_offload",
    # where code is judged, and how much at a time
    *(f"sandbox.{key}" for key in ("backend", "url", "container", "confinement", "max_concurrent")),
)
# Arguments of a reward that may change: its server, and how it is asked.
_SERVER = ("url", "api_key_env", "max_concurrent", "request_timeout_s", "retries")
_REWARD_MAY_CHANGE = {"judge": (*_SERVER, "cache"), "model": (*_SERVER, "device", "batch_tokens")}
JUDGE_PROMPTS = "judge_prompts.json"  # hashes of the judges' prompt files
ADAPTERS = "adapters"  # the trained adapter, for servers to load
GIVEN_MODEL = "given-model"  # begins the name of the folder of a model that was given as an object
LOGS = "logs"  # output of the run's processes; created before the run starts
_MAY_CHANGE_IF_CONSTANT_RATE = ("train.steps", "train.epochs")

_MANY_TOKENS = 1 << 20  # sampled tokens of a step whose files are compressed while the run goes on

_locks: set[int] = set()  # descriptors of this process's open folders


def _release_in_child() -> None:
    """Let go of the folders in a forked process: it may outlive the run, which could not resume while it does."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_release_in_child)


class RunFolder:
    """An open run folder. Only one process can hold it; the lock is released when the process exits."""

    def __init__(self, config: Config, *, resume: bool, judge_prompts: Mapping[str, str] | None = None):
        """Open `config.run.dir` for a new run, or for the run that is in it.

        Args:
            config: configuration of the run.
            resume: require an existing run to resume.
            judge_prompts: hashes of the judges' prompt files by key; a run does not go on with another text.

        Raises:
            UserError: the folder holds another run or other files, another process uses it, or there is nothing to
                resume.
        """
        self.path = Path(config.run.dir)
        self._config = config
        self._judge_prompts = dict(judge_prompts or {})
        check_folder(self.path, resume=resume)
        self._refuse_other_run()
        make_folder(self.path)
        self._lock = self._take_lock()
        _locks.add(self._lock)
        tokens = self.path / "tokens"
        for folder in (self.path, self.checkpoints_path, self.path / "completions", tokens):
            remove_leftovers(folder)
        is_recent = config.run.record_tokens == "auto"
        self._tokens = TokenRecords(
            tokens,
            max_bytes=parse_size(RECENT_TOKENS_SIZE if is_recent else config.run.record_tokens_max_size),
            max_recent=RECENT_STEPS if is_recent else None,
            max_step_tokens=RECENT_STEP_TOKENS if is_recent else math.inf,
        )
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._unwritten: list[Future[None]] = []  # files of the last step
        self._last_step = 0

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def final_path(self) -> Path:
        """Folder of the trained model."""
        return self.path / "final"

    def summary(self) -> dict[str, Any] | None:
        """Read `summary.json`, which has at least the number of `steps`; None if the run is not finished."""
        return read_summary(self.path / "summary.json")

    def rewind(self, steps_done: int, notify: Callable[[str], None] = lambda _: None) -> None:
        """Write `config.yaml` and remove everything written after `steps_done` steps, before a run resumes.

        Args:
            steps_done: steps of the checkpoint to resume from.
            notify: called with messages about unreadable lines and about steps that are replaced.

        Raises:
            UserError: starting over would delete a finished run.
        """
        finished = self.summary()
        if steps_done == 0 and (self.final_path.exists() or finished is not None):
            what = "a trained model" if finished is None else f"a finished run of {finished['steps']} steps"
            raise UserError(
                f"run.dir: {str(self.path)!r} holds {what} and no checkpoint to resume from; use a new run.dir"
            )
        self._write("config.yaml", to_yaml(self._config))
        if self._judge_prompts:
            self._write(JUDGE_PROMPTS, json.dumps(self._judge_prompts, indent=1) + "\n")
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            rows, bad = read_metrics(metrics)
            if rows and steps_done == 0:
                notify(f"no checkpoint in {self.path}: starting over, replacing {rows[-1]['step']} steps")
            if bad and steps_done > 0:
                notify(f"metrics.jsonl: {format_line_numbers(bad)} cannot be read and will be dropped")
            kept = [json.dumps(row) + "\n" for row in rows if steps_done > 0 and row["step"] <= steps_done]
            self._write("metrics.jsonl", "".join(kept))
        self._tokens.delete_after(steps_done)
        for file in (self.path / "completions").glob("*-[0-9]*.parquet"):
            if steps_done == 0 or int(file.stem.rpartition("-")[2]) > steps_done:
                file.unlink()
        (self.path / "summary.json").unlink(missing_ok=True)
        if self.final_path.exists():
            shutil.rmtree(self.final_path)

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write the predicted plan as `plan.json`."""
        self._write("plan.json", json.dumps(plan, indent=2) + "\n")

    def metric_history(self, name: str) -> dict[int, float]:
        """Return one metric by step, from `metrics.jsonl`."""
        return {row["step"]: row[name] for row in self.metrics() if row.get(name) is not None}

    def last_metrics(self, count: int) -> list[dict[str, float]]:
        """Return the metrics of the last `count` steps and evaluations, each with its "step"."""
        rows = self.metrics()[-count:]
        return [{name: v for name, v in row.items() if isinstance(v, int | float)} for row in rows]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`."""
        return read_metrics(self.path / "metrics.jsonl")[0]

    def write_completions(
        self, name: str, step: int, groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence] | None = None
    ) -> None:
        """Write one step's completions as `completions/{name}-N.parquet`; many of them in a thread (`wait_for_files`).

        Args:
            name: "step" for training, "eval" for evaluation.
            step: steps done.
            groups: P groups of G completions.
            sequences: P x G in the same order; they have the advantages. None for evaluation.

        Raises:
            TrainingError: the disk is full, if only for the files before, or the folder was deleted.
        """
        self.check_is_there()
        file = self.path / "completions" / f"{name}-{step:06d}.parquet"
        write = prepare_completions_file(file, step=step, groups=groups, sequences=sequences)
        self._write_soon(step, groups, write)

    def recorded(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Return those of a step's sequences whose tokens `write_tokens` shall record."""
        return self._tokens.chosen(sequences)

    def write_tokens(
        self, step: int, groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence], outputs: ForwardOnlyOutputs
    ) -> None:
        """Write what training knew of the tokens of `completions/step-N.parquet` as `tokens/step-N.parquet`.

        Many of them are written in a thread (`wait_for_files`).

        Args:
            step: steps done.
            groups: P groups of G completions.
            sequences: those that are `recorded`.
            outputs: their logprobs and entropies, as far as they were computed.

        Raises:
            TrainingError: the disk is full, if only for the files before, or the folder was deleted.
        """
        self.check_is_there()
        write = prepare_tokens_file(
            self._tokens.file(step),
            num_trajectories=sum(len(group.trajectories) for group in groups),
            sequences=sequences,
            outputs=outputs,
            with_context=not are_single_turn(groups),
        )

        def write_and_count() -> None:
            write()
            self._tokens.add(step)

        self._write_soon(step, groups, write_and_count)

    def _write_soon(self, step: int, groups: Sequence[ScoredGroup], write: Callable[[], None]) -> None:
        """Write a file of a step; in a thread if it is large, of one step at a time."""
        if step != self._last_step:
            self.wait_for_files()
            self._last_step = step
        if self._unwritten or num_sampled_tokens(groups) >= _MANY_TOKENS:
            self._unwritten.append(self._writer.submit(write))
        else:
            write()

    def wait_for_files(self) -> None:
        """Wait until all files are written. Called before a checkpoint says that the steps so far are complete.

        Raises:
            TrainingError: the disk is full.
        """
        unwritten, self._unwritten = self._unwritten, []
        wait(unwritten)
        for file in unwritten:
            file.result()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, which marks the run as finished."""
        self._write("summary.json", json.dumps(dict(summary), indent=1) + "\n")

    def check_is_there(self) -> None:
        """Check that the folder still exists: files would be written nowhere, or to a new folder.

        Raises:
            TrainingError: it was deleted.
        """
        if os.fstat(self._lock).st_nlink == 0:
            raise TrainingError(
                f"run.dir: {str(self.path)!r} was deleted during the run, with everything saved in it; the same "
                f"command starts over"
            )

    def close(self) -> None:
        """Wait until all files are written, and release the folder.

        Raises:
            TrainingError: the disk is full, and nothing else has ended the run.
        """
        ending = sys.exception()
        try:
            self.wait_for_files()
        except TrainingError as error:
            if ending is None:
                raise
            ending.add_note(str(error))
        finally:
            self._writer.shutdown()
            _locks.discard(self._lock)
            os.close(self._lock)

    def _write(self, name: str, text: str) -> None:
        with write_file_atomically(self.path / name) as partial:
            partial.write_text(text, encoding="utf-8")

    def _refuse_other_run(self) -> None:
        if not is_run_folder(self.path) or not has_progress(self.path):
            return
        try:
            saved = load_config(self.path / "config.yaml", base_dir=Path())
        except UserError as error:
            raise UserError(
                f"run.dir: {str(self.path)!r} holds a run whose config.yaml this version cannot read; use a "
                f"new run.dir. Error: {error}"
            ) from error
        changes = config_changes(saved, self._config) | self._prompt_changes()
        if changes:
            listed = "\n".join(f"  {key}: {old!r} there, {new!r} here" for key, (old, new) in changes.items())
            raise UserError(
                f"run.dir: {str(self.path)!r} already holds another run. It differs in\n{listed}\n"
                f"Use a new run.dir to start a new run, or the same configuration to resume that one"
            )

    def _prompt_changes(self) -> dict[str, tuple[str, str]]:
        """Return the judges' prompt files whose text is another than when the run began."""
        try:
            before = json.loads((self.path / JUDGE_PROMPTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        now = self._judge_prompts
        return {
            f"{key}, the text of the file": (f"sha256 {before[key][:12]}", f"sha256 {now[key][:12]}")
            for key in sorted(before.keys() & now.keys())
            if before[key] != now[key]
        }

    def _take_lock(self) -> int:
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"run.dir: {str(self.path)!r} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode().strip()
            os.close(descriptor)
            raise UserError(
                f"run.dir: {str(self.path)!r} is in use by process {owner or '(unknown)'}; wait for it, stop it, or "
                f"use another folder"
            ) from None
        with suppress(OSError):  # on a full disk the owner's id is not recorded
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor


def check_folder(path: Path, *, resume: bool) -> None:
    """Check a run folder before anything is written to it.

    Args:
        path: the folder, which may not exist yet.
        resume: require an existing run with a checkpoint, or a finished one.

    Raises:
        UserError: not a folder, holds other files, or holds nothing to resume.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"run.dir: {str(path)!r} is a file; use a folder")
    if resume and not is_run_folder(path):
        raise UserError(f"run.dir: {str(path)!r} holds no run to resume; leave out --resume to start one")
    if resume and not checkpoints(path / "checkpoints") and read_summary(path / "summary.json") is None:
        raise UserError(
            f"run.dir: {str(path)!r} holds a run that has saved no checkpoint, so there is nothing to resume; leave "
            f"out --resume to start over in this folder, or use a new run.dir to keep what is in it"
        )
    if not path.is_dir() or is_run_folder(path):
        return
    early = (".lock", ".config.yaml.partial", SECRET_FILE, LOGS)
    contents = sorted(p.name for p in path.iterdir() if p.name not in early and not p.name.startswith(GIVEN_MODEL))
    if contents:
        raise UserError(
            f"run.dir: {str(path)!r} is not empty and holds no run ({', '.join(contents[:5])}); use a new folder"
        )


def free_folder(path: Path) -> Path:
    """Return `path`, or the first of `path`-2, `path`-3, ... that does not exist."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def make_folder(path: Path) -> None:
    """Create a folder of the run, with its parents.

    Raises:
        UserError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        link = next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)
        why = error.strerror if link is None else f"{link} is a link to {link.readlink()}, which does not exist"
        raise UserError(f"run.dir: {str(path)!r} cannot be created: {why}") from error


def config_changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys that make two configurations different runs, with both values."""
    # `algorithm` with all its keys: its dump leaves out what the name implies
    before, after = (_flat({**c.model_dump(mode="json"), "algorithm": dict(c.algorithm)}) for c in (old, new))
    allowed: tuple[str, ...] = (*_MAY_CHANGE, *(f"rollout.{key}" for c in (old, new) for key in c.rollout.may_change))
    if old.train.lr_schedule == new.train.lr_schedule == "constant" and not old.train.warmup_ratio:
        allowed += _MAY_CHANGE_IF_CONSTANT_RATE
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and not _may_change_of_reward(key, old, new)
        and not any(key == a or (a.endswith(".") and key.startswith(a)) for a in allowed)
    }


def _may_change_of_reward(key: str, old: Config, new: Config) -> bool:
    """Whether a key of a reward affects none of its values."""
    if re.fullmatch(r"rewards\.\d+\.(timeout_s|isolate)", key):
        return True
    match = re.fullmatch(r"rewards\.(\d+)\.args\.(\w+)", key)
    if match is None or int(match[1]) >= min(len(old.rewards), len(new.rewards)):
        return False
    of_both = (config.rewards[int(match[1])] for config in (old, new))
    return all(match[2] in _REWARD_MAY_CHANGE.get(reward.use, ()) for reward in of_both)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, sub in value.items() for k, v in _flat(sub, f"{prefix}{key}.").items()}
    if isinstance(value, list) and value:
        return {k: v for i, sub in enumerate(value) for k, v in _flat(sub, f"{prefix}{i}.").items()}
    return {prefix.removesuffix("."): value}
