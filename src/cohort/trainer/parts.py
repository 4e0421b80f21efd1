"""The objects that a run is made of, loaded from what its configuration names."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from cohort.config import Config
from cohort.config.algorithm import CustomFunction
from cohort.config.user_code import is_user_code
from cohort.data import (
    OnProgress,
    RowStream,
    TrainingRows,
    first_rows,
    no_progress,
    open_stream,
    read_rows,
    read_sources,
    read_training_rows,
)
from cohort.errors import UserError
from cohort.models import load_tokenizer
from cohort.rewards import LoadedReward, load_rewards, read_trajectories
from cohort.rollout.environments.build import Environments
from cohort.rollout.workers.load_rollout import environments_of
from cohort.run.log import EVENTS
from cohort.sandbox import SharedSandbox

Rows = Sequence[dict[str, Any]]
_NUM_ROWS = 1024  # of an environment that brings its own


class Parts:
    """Tokenizer, rows, reward functions and environments of a run, each loaded when it is first used.

    Nothing else reads the paths of data and functions in the configuration, where Python objects may stand in their
    place. Weights are loaded by every rank, from `model.path`.
    """

    def __init__(self, config: Config, *, tokenizer: Any = None, engine: Any = None):
        """Load nothing yet.

        Args:
            config: configuration of the run.
            tokenizer: used instead of the one in `model.path`.
            engine: samples, with `rollout.engine: object`.
        """
        self._config = config
        self._tokenizer = tokenizer
        self.engine = engine
        self.on_progress: OnProgress = no_progress  # called while data take long
        self.sandbox = SharedSandbox(config.sandbox)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            UserError: the model has none that can be loaded.
        """
        return load_tokenizer(self._config.model) if self._tokenizer is None else self._tokenizer

    @cached_property
    def rewards(self) -> tuple[LoadedReward, ...]:
        """The user's reward functions, one per entry of `rewards`; None for built-in ones.

        Raises:
            UserError: a function cannot be loaded.
        """
        return load_rewards(self._config.rewards)

    @cached_property
    def environments(self) -> Environments | None:
        """The run's tools, environments or agent; None for single completions.

        Raises:
            UserError: something cannot be loaded, or the model's chat template has no tools.
        """
        if not self._config.rollout.has_turns:
            return None
        return environments_of(
            self._config,
            tokenizer=self.tokenizer,
            rewards_read_instances=read_trajectories(self.rewards),
            sandbox=self.sandbox,
        )

    @cached_property
    def stream(self) -> RowStream | None:
        """The rows of `data.stream`, in order.

        Raises:
            UserError: there are no such data.
        """
        data = self._config.data
        if not data.stream or data.path is None:
            return None
        return open_stream(data.path, field="data.path", split=data.split, name=data.name)

    @cached_property
    def rows(self) -> Rows:
        """Rows of the training data (of a stream, the first ones), or those of an environment, or one without columns.

        Raises:
            UserError: the data cannot be read, or are missing without `train.steps`.
        """
        config = self._config
        if self.stream is not None:
            return first_rows(self.stream, config.data.buffer_size)
        if config.data.is_given:
            return self.training_rows.train
        assert self.environments is not None, "checked in the configuration"
        brought = self.environments.rows(_NUM_ROWS, seed=config.train.seed)
        if brought is None and config.train.steps is None:
            raise UserError("train.steps: missing; a run without data.path needs it")
        return brought or [{}]

    @cached_property
    def training_rows(self) -> TrainingRows:
        """Rows of the data to train on, and those held out of them.

        Raises:
            UserError: the data cannot be read.
        """
        return read_training_rows(self._config, on_progress=self.on_progress)

    @cached_property
    def eval_rows(self) -> Rows:
        """Rows of the held-out data, or those that an environment brings, or some without columns; none without `eval`.

        Raises:
            UserError: the data cannot be read.
        """
        settings = self._config.eval
        if settings is None:
            return []
        if settings.rows is not None:
            return self.training_rows.held_out
        if settings.sources:
            return read_sources(
                settings.sources,
                prompt=settings.prompt or self._config.data.prompt,
                seed=self._config.train.seed,
                field="eval.sources",
                on_progress=self.on_progress,
            )
        if settings.path is not None:
            options: dict[str, Any] = {"split": settings.split, "name": settings.name, "on_progress": self.on_progress}
            return read_rows(settings.path, field="eval.path", **options)
        assert self.environments is not None and settings.max_prompts is not None, "checked in the configuration"
        brought = self.environments.rows(settings.max_prompts, seed=self._config.train.seed + 1)
        return brought or [{}] * settings.max_prompts


def user_files(config: Config) -> dict[str, str]:
    """Return file -> SHA-256 of the files with the run's own rewards, tools, environments, agent and algorithm.

    Of functions named by module, only those that this process has loaded are found; installed packages are left out.
    """
    hashes = {}
    for use in _uses(config):
        where = use.rpartition(":")[0]
        file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
        if file and is_user_code(file):
            with suppress(OSError):  # an error when the function is loaded
                hashes[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hashes


def _uses(config: Config) -> Iterator[str]:
    yield from (reward.use for reward in config.rewards)
    yield from (tool.use for tool in config.rollout.tools)
    yield from (spec.use for spec in config.rollout.environments.values())
    yield config.rollout.agent or ""
    yield from (data.map or "" for data in (config.data, *config.data.sources))
    yield from (data.map or "" for data in (config.eval.sources if config.eval else ()))
    yield getattr(config.optim, "use", "")
    yield from (choice.use for choice in dict(config.algorithm).values() if isinstance(choice, CustomFunction))


def changed_files(folder: Path, files: Mapping[str, str], *, steps_done: int) -> list[str]:
    """Return a warning for each file that is another than when the run last started.

    Args:
        folder: run folder, whose last start is compared.
        files: hashes of the files now.
        steps_done: steps of the checkpoint from which the run resumes.
    """
    before: Mapping[str, str] = {}
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(ValueError, AttributeError):  # a line that was cut off
                before = json.loads(line).get("files", before)
    return [
        f"warning: {file} has changed since the run last started: from step {steps_done + 1} on, its functions may "
        f"mean something else than in the steps before"
        for file, found in files.items()
        if before.get(file, found) != found
    ]
