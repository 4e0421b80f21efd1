"""Search for changes that make a run fit or run faster, and for the largest model or size that fits (`--max`).

`advice.toml` lists the changes. Every proposal is verified by planning the changed run as the command line would.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.plan.memory import PHASES
from cohort.plan.predict import CHECKPOINTING, Plan, predict_run, predict_wanted
from cohort.plan.shape import PRESETS, ModelShape, preset_shape
from cohort.plan.step import largest_number

Changes = Mapping[str, Any]  # by configuration key, or --gpus and --nodes

_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
_CHECKPOINTING = "model.gradient_checkpointing"
_ON_HOST = {"optim.offload", "model.parameter_offload"}  # updates on the CPU take a time that is not predicted
_MAX_LINES = 5
NODE_GPUS = 8  # of a machine, at most
_TOLERANCE = 1.01  # times within 1 % count as equal
_CLOSE = 0.05  # a line is left out that gives up more for less


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of configuration and its predicted effect."""

    changes: dict[str, Any]
    costs: str  # "same gradient", or what changes, in words
    saved_bytes: int  # off the peak
    saved_seconds: float | None  # per step; negative: slower; None on a CPU without --like
    fits: bool
    step_s: float | None = None
    layout: str = ""  # GPUs that train and sample, in words
    num_gpus: int = 1

    @property
    def keeps_experiment(self) -> bool:
        """Whether the gradient stays the same."""
        return self.costs.startswith(_TABLE["trades"][0]["costs"])

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU updates the weights."""
        return bool(_ON_HOST & self.changes.keys())

    @property
    def arguments(self) -> list[str]:
        """The change as arguments of `cohort plan`."""
        return [_as_argument(key, value) for key, value in self.changes.items()]

    def as_arguments(self) -> str:
        """The change as text for a command line."""
        return " ".join(f"'{text}'" if "{" in text else text for text in self.arguments)


def _as_argument(key: str, value: Any) -> str:
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{name}: {inner}" for name, inner in value.items()) + "}"
    return f"{key}{' ' if key.startswith('--') else '='}{str(value).lower() if isinstance(value, bool) else value}"


def advise(plan: Plan, *, by_cost: bool = False) -> list[Advice]:
    """Suggest at most five changes that make a run fit or, if it fits, run faster.

    First the fastest with the same gradient, then those that are faster still and give something up, by their time per
    step, or with `by_cost` by the time of all GPUs.
    """

    def rank(advice: Advice) -> float:
        return (advice.step_s or 0.0) * (advice.num_gpus if by_cost else 1)

    search = _Search(plan)
    first, *others = (search.best(trade["values"], trade["costs"]) for trade in [*_TABLE["trades"], _more_gpus(plan)])
    bar = rank(first or search.advice({}, "")) if (first or plan.fits) and plan.timing else float("inf")
    found = [] if first is None else [first]
    for advice in others:
        if advice is None:
            continue
        # left out: what is no faster than a line that gives up less, unless that one's time is not all predicted
        rivals = [line for line in found if advice.updates_on_host or not line.updates_on_host]
        is_faster = rank(advice) * _TOLERANCE < bar or (first is not None and first not in rivals)
        if is_faster and not any(_is_close(advice, line) for line in rivals):
            found.append(advice)
    return [*found[: first is not None], *sorted(found[first is not None :], key=rank)][:_MAX_LINES]


def _is_close(one: Advice, other: Advice) -> bool:
    return bool(one.step_s and other.step_s) and abs(one.step_s / other.step_s - 1) < _CLOSE  # type: ignore[operator]


def _more_gpus(plan: Plan) -> dict[str, Any]:
    hardware = plan.hardware
    everywhere = {"--gpus": NODE_GPUS} if hardware.gpus_per_node < NODE_GPUS else {}
    values: list[Changes] = [{"--gpus": number} for number in (2, 4, 8) if number > hardware.gpus_per_node]
    values += [{"--nodes": hardware.nodes * factor, **everywhere} for factor in (2, 4, 8)]
    return {"costs": "same gradient, on more GPUs", "values": [] if plan.fits or not hardware.on_gpu else values}


class _Search:
    """Plans of changed runs. Changes are without those that change nothing."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.config = plan.configured
        self._plans: dict[str, Plan | None] = {}

    def best(self, values: list[Changes], costs: str) -> Advice | None:
        """Fastest run with one of these changes, or with an earlier one if that is close; None without gain."""
        candidates = []
        for own in values:
            key = next(iter(own), "--")
            if not key.startswith("--") and self._is_set(key):
                continue
            ways = [way for layout in _TABLE["layouts"] for way in self._fitting({**layout, **own})]
            if ways:
                fastest = min(map(self._step_s, ways)) * _TOLERANCE
                changes = next(way for way in ways if self._step_s(way) <= fastest)
                candidates.append(self._drop_unneeded(changes, own))
                if key.startswith("--"):  # more GPUs would always be faster
                    break
        if not candidates:
            return None
        fastest = min(map(self._step_s, candidates)) * (1 + _CLOSE)
        changes = next(changes for changes in candidates if self._step_s(changes) <= fastest)
        is_faster = self._step_s(changes) * _TOLERANCE < self._step_s({})
        return self.advice(changes, costs) if changes and (is_faster or not self.plan.fits) else None

    def advice(self, changes: Changes, costs: str) -> Advice:
        """A change and its effect."""
        plan, other = self.plan, self._plan(changes) or self.plan
        return Advice(
            changes=dict(changes),
            costs="; ".join([costs, *(text for key, text in _TABLE["costs"].items() if changes.get(key))]),
            saved_bytes=plan.memory.peak_bytes - other.memory.peak_bytes,
            saved_seconds=_step_s(plan) - _step_s(other) if plan.timing else None,
            fits=other.fits,
            step_s=_step_s(other) if other.timing else None,
            layout=other.layout.in_words,
            num_gpus=other.layout.num_used,
        )

    def _fitting(self, changes: Changes) -> Iterator[dict[str, Any]]:
        """Yield a change with all kinds of checkpointing that fit or, if none does, with the first saving that does."""
        smaller = {**changes, "train.micro_batch_tokens": "auto"}
        # on a CPU auto means none
        kinds: tuple[Any, ...] = ("auto",) if self.plan.hardware.on_gpu else CHECKPOINTING
        ways = [{**some, _CHECKPOINTING: kind} for some in (changes, smaller) for kind in kinds]
        fitting = [self._changed(way) for way in ways if self._fits(way)]
        yield from fitting
        if fitting or self._plan(changes) is None:
            return
        merged = ways[-1]
        for saving in _TABLE["savings"]:
            if self._plan({**merged, **saving}) is not None:
                merged = {**merged, **saving}
            if self._fits(merged):
                yield self._changed(merged)
                return

    def _drop_unneeded(self, changes: dict[str, Any], own: Changes) -> dict[str, Any]:
        """Drop or weaken the changes without which the run fits as well and is as fast, but not those of `own`."""
        for key in [key for key in reversed(changes) if key not in own]:
            weaker = [saving[key] for saving in _TABLE["savings"] if key in saving]
            for value in [self._present(key), *weaker]:
                fewer = self._changed({**changes, key: value})
                if self._fits(fewer) and self._step_s(fewer) <= self._step_s(changes) * _TOLERANCE:
                    changes = fewer
                    break
        return changes

    def _plan(self, changes: Changes) -> Plan | None:
        """The changed plan; None if the changes contradict the configuration or the hardware."""
        changes = self._changed(changes)
        if (key := repr(sorted(changes.items()))) not in self._plans:
            try:
                self._plans[key] = replan(self.plan, changes) if changes else self.plan
            except UserError:
                self._plans[key] = None
        return self._plans[key]

    def _fits(self, changes: Changes) -> bool:
        plan = self._plan(changes)
        return plan is not None and plan.fits

    def _step_s(self, changes: Changes) -> float:
        plan = self._plan(changes)
        return float("inf") if plan is None else _step_s(plan)

    def _changed(self, changes: Changes) -> dict[str, Any]:
        return {key: value for key, value in changes.items() if key[:2] == "--" or self._present(key) != value}

    def _present(self, key: str) -> Any:
        """Value of a key of the configuration; None if its section is missing or has no such key."""
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name, None)
        return value

    def _is_set(self, key: str) -> bool:
        section, _, name = key.rpartition(".")
        field = getattr(type(self._present(section)), "model_fields", {}).get(name)
        return self._present(key) not in (None, field.default if field else None)


def _step_s(plan: Plan) -> float:
    return plan.timing["step_s"].value if plan.timing else 0.0


def replan(plan: Plan, changes: Changes) -> Plan:
    """Predict the run with some keys changed, or `--gpus` and `--nodes`.

    Raises:
        UserError: as `predict_run`, or the changes contradict the configuration.
    """
    hardware = plan.hardware
    for key, name in (("--gpus", "gpus_per_node"), ("--nodes", "nodes")):
        hardware = replace(hardware, **{name: changes[key]}) if key in changes else hardware
    arguments = [_as_argument(key, value) for key, value in changes.items() if not key.startswith("--")]
    config = plan.configured
    if arguments:
        config = config_from_dict(config.model_dump(exclude_unset=True), arguments)
    predict = predict_wanted if plan.wanted is not None else predict_run
    return predict(config, plan.shape, hardware, num_prompts=plan.num_prompts)


Limit = Literal["model", "length", "generations"]
_MAX_VALUE = 1 << 22  # upper bound of the search, in tokens or generations


def largest(plan: Plan, limit: Limit) -> str | int | None:
    """Largest value that fits with `train.micro_batch_tokens: auto` and all else unchanged; None if nothing fits.

    Lengths are bounded by the model's positions.

    Returns:
        Name of a preset, number of completion tokens, or number of generations.
    """

    def fits(plan: Plan, changes: Changes) -> bool:
        try:
            return _replan(plan, changes).fits
        except UserError:
            return False

    if limit == "model":
        return next((m.name for m in _presets_by_size() if fits(replace(plan, shape=m), {})), None)
    key, low, high = _range(plan, limit)
    return largest_number(lambda n: fits(plan, {key: n}), low, high)


def explain_no_limit(plan: Plan, limit: Limit) -> str:
    """Explain why not even the smallest value fits, after `largest` has returned None (same arguments)."""
    changes: dict[str, int] = {}
    if limit == "model":
        plan = replace(plan, shape=_presets_by_size()[-1])
        smallest = f"the smallest known model, {plan.shape.name},"
    else:
        key, low, high = _range(plan, limit)
        if high < low:
            return f"prompts of {plan.config.rollout.max_prompt_tokens} tokens leave no positions for completions"
        changes, smallest = {key: low}, f"{key}: {low}"
    try:
        other = _replan(plan, changes)
    except UserError as error:
        return str(error)
    if other.layout.problem is not None:
        return f"even with {smallest} {other.layout.problem}"
    return (
        f"even {smallest} needs {other.memory.peak_bytes / 1e9:.1f} GB per GPU in "
        f"{PHASES[other.memory.peak_phase]}, of {plan.hardware.gpu_memory_bytes / 1e9:.1f} GB available"
    )


def _replan(plan: Plan, changes: Changes) -> Plan:
    return replan(plan, {"train.micro_batch_tokens": "auto", **changes})


def _presets_by_size() -> list[ModelShape]:
    """All presets, largest first."""
    return sorted(map(preset_shape, PRESETS), key=lambda m: -m.num_parameters)


def _range(plan: Plan, limit: Literal["length", "generations"]) -> tuple[str, int, int]:
    """Key of a limit, its smallest possible value and the largest to try."""
    if limit == "generations":
        return "rollout.num_generations", plan.config.algorithm.min_generations, _MAX_VALUE
    positions = plan.shape.max_positions
    high = _MAX_VALUE if positions is None else positions - plan.config.rollout.max_prompt_tokens
    return plan.config.rollout.max_new_tokens_key, 1, high


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse `--sweep`: KEY=a,b,c or KEY=a..b, which doubles a up to b.

    Raises:
        UserError: neither, or no such number of GPUs.
    """
    key, _, values = text.partition("=")
    chosen = values.split(",")
    if ends := re.fullmatch(r"(\d+)\.\.(\d+)", values):
        low, high = int(ends[1]), int(ends[2])
        is_range = 0 < low <= high <= _MAX_VALUE
        chosen = [str(low << n) for n in range(high.bit_length()) if low << n <= high] if is_range else []
    if not key or not values or not chosen:
        raise UserError(f"--sweep: {text!r} is neither a list such as gpus=2,4,6 nor a range such as gpus=1..64")
    if key == "gpus" and (wrong := [value for value in chosen if not _is_number_of_gpus(value)]):
        raise UserError(
            f"--sweep: gpus={wrong[0]} is not a number of GPUs; use 1 to {NODE_GPUS}, or a multiple of {NODE_GPUS}"
        )
    return key, chosen


def _is_number_of_gpus(text: str) -> bool:
    return text.isdecimal() and int(text) > 0 and (int(text) <= NODE_GPUS or int(text) % NODE_GPUS == 0)
