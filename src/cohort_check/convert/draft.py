"""Build a Cohort configuration key by key: what conversions from all frameworks share."""

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from cohort.config import ALGORITHMS, COMPONENTS
from cohort.config.catalogue import parameters
from cohort.config.model import Quantization, check_base, check_run
from cohort.config.other_trainers import equivalents, grpo_config_fields
from cohort.config.rollout import ENGINES
from cohort_check.findings import load_table
from cohort_check.launch import Launch, Settings, parse_number, put
from cohort_check.rules.common import WRAPS, Start, Version, key_tables, keys_of, known_keys

NEEDS_ARGUMENTS = ("trl.cosine", "trl.soft_overlong", "open_r1.soft_overlong", "open_r1.repetition_penalty")
_TABLES = equivalents()["rewards"]


def short_name(name: str) -> str:
    """The name without its module, `get_` and `_reward`."""
    return name.rsplit(".", 1)[-1].removeprefix("get_").removesuffix("_reward").replace("-", "_") or "reward"


Rows = Mapping[str, Any]  # of `config/other_trainers.yaml`, by Cohort's key: see `Draft.copy`

_USUAL_TARGETS = ["q_proj", "v_proj"]  # peft's own for Llama, Qwen, Mistral and most others
_SECRET = re.compile(r"(token|api_key|secret|password)$")
_LOGS = ("tensorboard", "wandb", "trackio")
_OUTPUT = ("output_dir", "trainer.default_local_dir", "report_to")  # say where to write, and change no training
_BESIDES = ("callbacks=",)  # code to carry over that changes no training
_COUNTS = "train.steps train.warmup_steps run.checkpoint_every eval.every reference.refresh_every critic.warmup_steps"
_VISION = re.compile(r"(?i)vl(?=$|[-_.\d])|vlm|ocr|vision|llava|paligemma|idefics|pixtral|minicpm-[vo]|omni")


class Draft:
    """The configuration so far, and the comments for its reader."""

    def __init__(self, launch: Launch, folder: Path, version: Version) -> None:
        self.launch = launch
        self.framework = WRAPS.get(launch.framework, launch.framework)
        keys = keys_of(launch.framework)
        self.known = known_keys(keys, version)
        self._older = {key: entry for table in key_tables(keys).values() for key, entry in table.items()}
        self.folder = folder  # of the file that is converted
        self.processes = int(launch.processes.value) if launch.processes else 0  # that train; 0: unknown
        self.per_node = launch.processes_per_node or self.processes
        self.settings = Settings(launch)
        self.config: dict[str, Any] = {}
        self.decide: list[str] = []  # what changes the training and could not be carried over
        self.todo: list[str] = []  # what a person has to do besides
        self.differences: list[str] = []  # what Cohort does otherwise
        self.unneeded: dict[str, str] = {}  # settings (* stands for anything) without need of an equivalent, and why
        self._origins: dict[str, str] = {}  # the setting that each key is from

    def put(self, key: str, value: Any) -> None:
        """Set `section.key`, unless the value is None."""
        if value is not None:
            put(self.config, key, value)

    def get(self, key: str) -> Any:
        """Value of `section.key`; None if it is not set."""
        section, name = key.split(".")
        return self.config.get(section, {}).get(name)

    def skip(self, reason: str, keys: str) -> None:
        """List settings, separated by spaces, as not needed in this run."""
        self.unneeded.update(dict.fromkeys(keys.split(), reason))

    def drop(self, reason: str, keys: Iterable[str]) -> None:
        """Take keys of Cohort back, and list the settings that they are from as not needed."""
        for key in keys:
            section, name = key.split(".")
            self.config.get(section, {}).pop(name, None)
            theirs = self._origins.pop(key, None)
            if theirs and theirs not in self._origins.values():
                self.skip(reason, theirs)

    def differs(self, text: str) -> None:
        """Add a difference to the comments."""
        if text not in self.differences:
            self.differences.append(text)

    def flag(self, key: str) -> bool:
        """Whether a switch is on. The default is that of the framework."""
        entry = self.known.get(key) or self._older.get(key, {})
        return self.settings.flag(key, bool(entry.get("default")))

    def copy(self, rows: Rows, *, defaults: bool = False) -> None:
        """Set Cohort's keys from settings of the same meaning.

        A row is the setting, or a mapping:

        - `from`: the setting, or several: the first one that is set counts;
        - `type`, if it is another than the framework's (`texts`: one or several);
        - `default`, if it is set nowhere and the framework has none of its own, which counts with `defaults` too;
        - `values`: their names of values and ours; the first one stands in the place of all others;
        - `over`: what this number and smaller ones say is none; `least`: what smaller numbers become;
        - `if`: a switch, or `unless`: keys of Cohort, without and with which it has no effect;
        - `else`: the value then.
        """
        for ours, row in rows.items():
            row = {"from": row} if isinstance(row, str) else row
            if ("if" in row and not self.flag(row["if"])) or any(map(self.get, row.get("unless", "").split())):
                self.put(ours, row.get("else"))
                continue
            keys = row["from"].split()
            theirs = next((key for key in keys if self.settings.text(key) is not None), keys[0])
            if theirs in self.settings or "default" in row or defaults:
                self.put(ours, self._read(theirs, row))
                self._origins[ours] = theirs

    def _read(self, key: str, row: Rows) -> Any:
        """A setting as its row says."""
        settings, entry = self.settings, self.known.get(key) or {**self._older.get(key, {}), "default": None}
        kind = row.get("type", entry.get("type"))
        value = row.get("default") if entry["default"] is None else entry["default"]
        whole = partial(settings.whole, minimum=-1, maximum=10**9)
        typed: dict[Any, Any] = {"int": whole, "float": settings.number, "bool": settings.flag}
        if settings.text(key) is None:
            pass  # not set, or null
        elif str(kind) in typed:
            value = typed[kind](key, value)
        elif kind == "texts":
            said = settings.said(key)
            value = [str(text) for text in (said if isinstance(said, list | tuple) else [said])] or None
        else:
            value = settings.text(key) if kind == "str" or isinstance(kind, list) else settings.said(key)
        if value is None or ("over" in row and value <= row["over"]):
            return None
        if "values" in row:
            return self.named(row["values"], key, value)
        return max(value, row["least"]) if "least" in row else value

    def named(self, names: Mapping[str, str], key: str, value: Any) -> str:
        """Our name for a value; the first one, and a difference, if there is none."""
        first, name = next(iter(names)), str(value).lower()
        if name not in names:
            self.decide.append(f"no equivalent: {key.rpartition('.')[2]} {value}; {first} stands in its place")
        return names.get(name, names[first])

    def model(self, named: Any) -> None:
        """Set the model, and note if its name or its type is that of one with a vision encoder."""
        self.path("model.path", named=named, missing="MODEL")
        kinds = [str(said.value) for key, said in self.launch.settings.items() if key == "model_type"]
        if any(map(_VISION.search, (self.config["model"]["path"].rpartition("/")[2], *kinds))):
            self.decide.append(f"images: {self.config['model']['path']} reads images there; here only text is trained")

    def path(self, key: str, *, named: Any, missing: str) -> None:
        """Set a path or an id, or leave a placeholder."""
        if not isinstance(named, str) or not named:
            (self.todo if key.startswith("eval.") else self.decide).append(f"{key}: fill it in")
            named = missing
        self.put(key, named)

    def logs(self, key: str) -> None:
        """Set the trackers that metrics are sent to."""
        said = self.settings.said(key)
        logs = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        self.put("run.log", [log for log in logs if log in _LOGS] or None)
        for log in logs:
            if log not in (*_LOGS, "none", "console"):
                self.differs(f"no equivalent: {key} {log}")

    def warmup(self, count_key: str, ratio_key: str) -> None:
        """Set the steps of the warmup from their number (below 1: their part of all steps) or their part."""
        count = self.settings.number(count_key, 0)
        ratio = count if count > 0 else self.settings.number(ratio_key, 0)
        if count >= 1:
            self.put("train.warmup_steps", int(count))
        elif ratio > 0:
            self.put("train.warmup_ratio", ratio)

    def gpus(self, *, shared: bool, tensor_parallel: int) -> None:
        """Set how training and vLLM share the GPUs. A server cannot span machines."""
        size = math.gcd(tensor_parallel, self.per_node) if shared else tensor_parallel
        self.put("rollout.engine", "vllm")
        self.put("rollout.tensor_parallel", size if size > 1 else None)
        if shared:
            self.put("hardware.rollout_gpus", "shared")
        if size != tensor_parallel:
            self.differs(f"servers of {tensor_parallel} GPUs, which {self.per_node} per machine do not divide into")

    def rewards(self, names: Any, weights: Any) -> None:
        """Rewards by name: those that Cohort has as well, and a place for each of the others."""
        names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
        weights = weights if isinstance(weights, list) else [weights] if weights is not None else []
        entries: list[dict[str, Any]] = []
        for i, name in enumerate(names):
            known = self._built_in(str(name))
            weight = parse_number(weights[i]) if i < len(weights) else 1.0
            function = re.sub(r"\W", "_", str(name).rpartition(".")[2]) or "reward"
            entries.append({**(known or {"use": f"rewards.py:{function}"}), "weight": weight})
            if known is None:
                place = self.settings.said(f"trainer.reward_funcs.{name}")
                origin = f", from {place}" if place else ""
                self.todo.append(f"rewards.py: reward {name!r} as the function {function} (TRL's signature){origin}")
        if not entries:
            entries = [{"use": "math"}]
            said = f", with reward_weights {weights}" if weights else ""
            self.decide.append(f"rewards: fill them in{said}; math stands in their place")
        if any(entry["use"] == "math" for entry in entries):
            self.todo.append("rewards: math compares with the column `answer`, or args: {answer_column: ...}")
        unread = [entry["use"] for entry in entries if entry["use"] in NEEDS_ARGUMENTS and "args" not in entry]
        self.decide += [f"rewards: the arguments of {use} (docs/rewards.md)" for use in unread]
        self.config["rewards"] = entries

    def _built_in(self, name: str) -> dict[str, Any] | None:
        """The keys `use` and `args` of the built-in reward that is the same; None if there is none."""
        use = _TABLES[self._source(name)].get(short_name(name))
        if use is None:
            return None
        args: dict[str, Any] = {}
        if use in _TABLES["settings"] and self.launch.form != "python":
            known = known_keys("open-r1", ())
            args = {argument: self._read(key, known[key]) for argument, key in _TABLES["settings"][use].items()}
        elif self.launch.form != "python":
            args = dict(_TABLES["script"].get(use if "." in use else short_name(name), {}))
        return {"use": use, "args": args} if args else {"use": use}

    def _source(self, name: str) -> str:
        """Whose reward it is: `open_r1`, `trl` or `others`; a reward of the user's own is in no table."""
        if self.framework != "trl":
            return "others"
        module = str(self.settings.said(f"trainer.reward_funcs.{name}") or (name.rpartition(".")[0]))
        if module:
            package = module.partition(".")[0]
            return package if package in ("open_r1", "trl") else "own"
        # TRL's script takes the names of its functions, Open-R1's recipes take short ones.
        is_function = name.startswith("get_") or name.endswith("_reward")
        return "trl" if self.launch.framework != "open-r1" and is_function else "open_r1"

    def batch(self, start: Start | None) -> None:
        """Set the prompts per step from the completions of one optimizer step, and the processes of each machine."""
        generations = self.get("rollout.num_generations")
        self.put("hardware.processes", self.per_node if self.processes else None)
        if self.processes > self.per_node:
            machines = f"{self.processes // self.per_node} machines of {self.per_node}"
            self.differs(f"{machines}: see `cohort launch slurm --nodes`")
        if start is None or not start.global_batch_size or not start.generation_batch_size:
            return
        size, together = start.global_batch_size, start.generation_batch_size
        if size != together:
            text = f"{together} completions are sampled together there, and {size} are trained in one optimizer step"
            self.differs(f"{text}; here a step trains what it samples")
        if size % generations:
            self.differs(f"{size} completions of an optimizer step are no whole groups of {generations}; rounded up")
        self.put("train.prompts_per_step", -(-size // generations))

    def adapter(self, rows: Rows) -> None:
        """Set the adapter. A single text as its targets is a pattern to peft, unless it is a plain name."""
        self.copy(rows, defaults=True)
        said = self.config["model"]["adapter"].pop("targets", None)
        targets = said or _USUAL_TARGETS
        names = list(map(str, targets if isinstance(targets, list | tuple | set) else [targets]))
        if not said:
            self.differs(f"target_modules is not set; using {' and '.join(names)}, peft's default for most models")
        elif "all-linear" not in names and not all(re.fullmatch(r"[\w.]+", name) for name in names):
            self.decide.append(f"no equivalent: target_modules {said!r:.80} is a pattern; all linear layers are taken")
            names = ["all-linear"]
        self.put("model.adapter.targets", "all-linear" if "all-linear" in names else names)

    def quantized(self, bits: int) -> None:
        """Set weights of so many bits by bitsandbytes, after adapter, processes and engine."""
        kind: Quantization = "nf4" if bits == 4 else "int8"
        engine = self.get("rollout.engine") or "auto"
        model, shares_weights = self.config["model"], ENGINES[engine].shares_weights
        weights = f"{bits}-bit weights by bitsandbytes"
        try:
            check_base(kind, has_adapter="adapter" in model, dtype=model.get("dtype", "float32"))
            processes = self.processes or 1
            check_run("model.quantization", kind, processes=processes, engine=engine, shares_weights=shares_weights)
        except ValueError as why:
            self.decide.append(f"no equivalent: {weights}; here the model's weights keep their dtype: {why}")
            return
        self.put("model.quantization", kind)
        if kind == "int8":
            self.differs(f"{weights} there are torchao's int8 here")

    def algorithm(self, loss: str) -> None:
        """Name the algorithm with most of the components that are set, else like `loss`; drop what has no effect."""
        given = self.config["algorithm"]
        parts = {kind: given.pop(kind) for kind in COMPONENTS}

        def fits(name: str) -> tuple[int, bool]:
            return sum(getattr(ALGORITHMS[name], kind) == part for kind, part in parts.items()), name == loss

        name = max(ALGORITHMS, key=fits)
        changed = {kind: part for kind, part in parts.items() if getattr(ALGORITHMS[name], kind) != part}
        effective = {key for kind, part in parts.items() for key in COMPONENTS[kind][part].parameters}
        without = [f"algorithm.{key}" for key in given if key in parameters() and key not in effective]
        self.drop(f"no effect with policy_loss: {parts['policy_loss']}", without)
        if given.get("clip_low", 0) >= 1:
            key = self._origins["algorithm.clip_low"]
            self.differs(f"{key} {given['clip_low']:g} is no bound; 0.999 is the nearest")
            given["clip_low"] = 0.999
        if "delta" in given and given["delta"] <= 1 + given["clip_high"]:
            self.no_dual_clip()
        self.config["algorithm"] = {"name": name, **changed, **given}

    def no_dual_clip(self) -> None:
        """Take back the bound of ratios where the advantage is negative."""
        value, key = self.config["algorithm"].pop("delta"), self._origins["algorithm.delta"]
        self.decide.append(f"no equivalent: {key} {value:g}; it bounds policy_loss: clipped, from above 1 + clip_high")

    def rescale(self, times: int, per: int, unit: str) -> None:
        """Turn counts of another unit into Cohort's steps, of which `times` are as many as `per` of that unit."""
        for key in _COUNTS.split() if times != per else ():
            section, name = key.split(".")
            if theirs := self.config.get(section, {}).get(name):
                ours = math.ceil(theirs * times / per)
                self.put(key, ours)
                arithmetic = f"{theirs} {unit}" + (f" x {times // math.gcd(times, per)}" if times % per == 0 else "")
                arithmetic += f" x {times} / {per}" if times % per and times > 1 else f" / {per}" if times % per else ""
                self.differs(f"{key}: {arithmetic} = {ours} steps here")

    def comments(self) -> dict[str, list[str]]:
        """The comments by heading. Every setting is used, or in `not_needed/` with the reason, or to decide."""
        table = load_table(f"convert/not_needed/{self.framework}.yaml")
        not_needed = {key: reason for reason, keys in table.items() for key in keys.split()}
        fields = grpo_config_fields() if self.framework == "trl" else {}
        not_needed |= fields.get("no_effect", {})
        unneeded: dict[str, list[str]] = {}

        def reason_for(key: str, *, used: bool) -> str | None:
            reasons = self.unneeded if used else {**self.unneeded, **not_needed}
            return next((reason for name, reason in reasons.items() if fnmatchcase(key, name)), None)

        decide = [finding.message for finding in self.settings.findings] + self.decide
        for unread in self.launch.unread:
            reason = reason_for(unread.key, used=unread.key in self.settings.used)
            if reason or unread.key in _OUTPUT:
                unneeded.setdefault(reason or "only known when the source runs", []).append(unread.key)
            else:
                decide.append(f"{unread.key.strip('()')} ({unread.where}): {unread.reason}")
        for entry in self.launch.todo:
            (self.todo if str(entry.value).startswith(_BESIDES) else decide).append(f"{entry.where}: {entry.value}")
        for key, said in self.launch.settings.items():
            value, default = str(said.value).lower(), str(self.known.get(key, {}).get("default", ...)).lower()
            used = key in self.settings.used
            if value == default and self.launch.framework == "verl" and self.launch.form == "yaml":
                continue  # Hydra has written it
            reason = reason_for(key, used=used)
            if (value == default or (value == "none" and ".peft_config." in key)) and not used:
                reason = "its default there"
            if reason:
                unneeded.setdefault(reason, []).append(key)
            elif not used:
                shown = "..." if _SECRET.search(key) else f"{said.value!r:.60}"
                advice = f": {fields['refused'][key]}" if key in fields.get("refused", {}) else ""
                decide.append(f"{key}: {shown} ({said.where}) has no equivalent{advice}")
        self.config["decide_first"] = list(dict.fromkeys(" ".join(text.split()) for text in decide))
        not_used = [f"{reason}: {', '.join(dict.fromkeys(keys))}" for reason, keys in unneeded.items()]
        return {"To do": self.todo, "Different here": self.differences, "Not needed": not_used}
