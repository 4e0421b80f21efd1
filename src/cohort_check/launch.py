"""Types that readers return and rules check: one run of a launch file, whatever its framework."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cohort_check.findings import Finding

Framework = Literal["cohort", "trl", "open-r1", "unsloth", "ms-swift", "verl", "prime-rl", "openrlhf", "other"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its place in the file."""

    value: Any  # as YAML, Python or the shell gives it: a number may still be text
    where: str  # NAME:LINE of the file that says it; `--launch` for that option
    added: bool | str = False  # by the file itself (a class of its own, Hydra's + or ++): it need not be known


# keys of an `Unread` that may hold any setting: whether the run starts cannot be checked without
ANY_SETTING = frozenset(("(recipe)", "(config)", "(options)", "(**arguments)"))


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is only known when the file is run."""

    key: str  # in brackets where it is none: those of ANY_SETTING, and "(arguments)", the script's own "$@"
    where: str  # NAME:LINE
    reason: str  # such as "$MODEL is set outside of this file"
    added: bool = False  # as of a `Setting`


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run of a launch file.

    `settings` has the framework's own keys, dotted where they are nested. A Python script adds, of what its trainer is
    given:

    - `trainer.model`, `trainer.dtype`, `trainer.load_in_4bit`, `trainer.load_in_8bit`;
    - `trainer.peft_config` ("LoraConfig") and `trainer.peft_config.KEY`;
    - `trainer.reward_funcs`, the names in order, and for each `trainer.reward_funcs.NAME`: where it is defined, as
      NAME:LINE of this file or as the module that it is imported from; `trainer.reward_funcs.NAME.KEY`: the keyword
      arguments of a call that makes it;
    - `trainer.train_dataset.KEY` and `trainer.eval_dataset.KEY`, the arguments of their `load_dataset`: `path`, `name`,
      `split`, `data_files` and what else is there.
    """

    framework: Framework
    form: Literal["yaml", "python", "shell", "toml"]
    reason: str  # why it was taken for this
    settings: Mapping[str, Setting]
    program: str | None = None  # the module that a command starts, such as verl.trainer.main_ppo
    unread: tuple[Unread, ...] = ()
    not_checked: str | None = None  # why the rules do not hold for this run, such as Megatron or an unknown framework
    todo: tuple[Setting, ...] = ()  # code to carry over by hand: `dataset.map(...)`, arguments of the trainer
    processes: Setting | None = None  # training processes, or GPUs that train; None: the file does not say
    processes_per_node: int | None = None
    training_gpus: tuple[str, ...] | None = None  # CUDA_VISIBLE_DEVICES of the training command
    server_gpus: tuple[str, ...] | None = None  # of the command that starts the sampling server, in the same file
    server: Mapping[str, Setting] = field(default_factory=dict)  # that command's settings
    # of the framework (for those in `WRAPS`: of TRL), as pinned; `added`: that of a copy of it
    version: Setting | None = None
    findings: tuple[Finding, ...] = ()  # what the reader itself noticed
    others: "tuple[Launch, ...]" = ()  # further runs of the same file


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested mapping, unless a value stands in the place of a section."""
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        tree = inner if isinstance(inner, dict) else {}
    tree[name] = value


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Settings:
    """Typed access to a launch's settings. A value of the wrong type becomes a finding, and its default is returned."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self.framework = launch, launch.framework
        self._unread = {unread.key for unread in launch.unread}
        self.findings: list[Finding] = []
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._launch.settings

    def said(self, key: str) -> Any:
        """The value as written; None if it is not set."""
        self.used.add(key)
        entry = self._launch.settings.get(key)
        return entry.value if entry else None

    def readable(self, *keys: str) -> bool:
        """Whether each of the keys is absent, or has a value of the right type that could be read."""
        return not {*keys} & (self._unread | {finding.field for finding in self.findings})

    def whole(self, key: str, default: Any, *, minimum: int = 1, maximum: int = 100_000) -> Any:
        """A whole number in these bounds, or the default (which may be None)."""
        number = _as_number(self._given(key))
        if number is not None and number == int(number) and minimum <= number <= maximum:
            return int(number)
        near = (default,) if number is None else (math.floor(number), math.ceil(number))
        bounded = dict.fromkeys(one if one is None else min(max(one, minimum), maximum) for one in near)
        return self._default(key, f"a whole number from {minimum} to {maximum:,}", tuple(bounded), default)

    def number(self, key: str, default: Any) -> Any:
        """A number, or the default (which may be None)."""
        number = _as_number(self._given(key))
        return self._default(key, "a number", (default,), default) if number is None else number

    def flag(self, key: str, default: Any = False) -> Any:
        """True or false, or the default (which may be None)."""
        truth = _TRUTHS.get(str(self._given(key)).lower())
        return self._default(key, "true or false", ("true", "false"), default) if truth is None else truth

    def text(self, key: str, default: Any = None) -> Any:
        """Text, or the default (which may be None)."""
        value = self._given(key)
        if isinstance(value, bool):  # YAML 1.1 reads an unquoted `no` as false
            return "yes" if value else "no"
        return default if value is None else str(value)

    def _given(self, key: str) -> Any:
        """The value; None if there is none, or the text of none."""
        value = self.said(key)
        return None if isinstance(value, str) and value.lower() in ("none", "null", "") else value

    def _default(self, key: str, rule: str, near: tuple[Any, ...], default: Any) -> Any:
        """Return the default. A value that is there is wrong: report it with the nearest valid ones (None: no key)."""
        if self._given(key) is None:
            return default
        said = self._launch.settings[key]
        nearest = tuple(f"without {key}" if one is None else f"{key}={one}" for one in near)
        finding = Finding("CHK010", key, f"{key}: {said.value!r:.60} ({said.where}): must be {rule}", nearest)
        if finding not in self.findings:
            self.findings.append(finding)
        return default


def parse_number(value: Any) -> Any:
    """The number of a text that is one; anything else is returned unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _as_number(value: Any) -> float | int | None:
    number = parse_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if isinstance(number, int) or math.isfinite(number) else None
