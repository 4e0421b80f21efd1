"""Build a Cohort configuration key by key: what conversions from all frameworks share."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from cohort.check.launch import Launch, Settings
from cohort.check.quantization import COHORT_NAMES, describe_bits
from cohort.check.readers.files import read_text
from cohort.check.rules.keys import Version, key_tables, known_keys
from cohort.check.rules.start import Start
from cohort.check.tables import load_table
from cohort.config import ALGORITHMS, COMPONENTS
from cohort.config.catalogue import parameters
from cohort.config.quantization import check_base, check_run
from cohort.config.rollout import ENGINES
from cohort.errors import UserError
from cohort.plan.shape import try_read_shape

_REWARDS = load_table("convert/equivalents/trl_and_swift.yaml")["rewards"]
_BUILDERS = ("json", "parquet", "csv", "arrow", "text")  # of `datasets`
_LARGEST_ON_ONE_GPU = 40e9  # bytes of weights: half of an 80 GB GPU
_SECRET = re.compile(r"(token|api_key|secret|password)$")
_LOGS = ("tensorboard", "wandb", "trackio")


class Draft:
    """The configuration so far, and the comments for its reader."""

    def __init__(self, launch: Launch, folder: Path, version: Version) -> None:
        self.launch = launch
        framework = "trl" if launch.framework == "open-r1" else launch.framework
        self.known = known_keys(framework, version)
        self._older = {key: entry for table in key_tables(framework).values() for key, entry in table.items()}
        self.folder = folder  # of the file that is converted
        self.settings = Settings(launch)
        self.config: dict[str, Any] = {}
        self.todo: list[str] = []  # what a person has to do
        self.differences: list[str] = []  # what Cohort does otherwise
        self.unneeded: dict[str, str] = {}  # settings that need no equivalent in this run, with the reason

    @property
    def processes(self) -> int:
        """Training processes of the launch; 0 if it does not say."""
        return int(self.launch.processes.value) if self.launch.processes else 0

    def put(self, key: str, value: Any) -> None:
        """Set `section.key`, unless the value is None."""
        if value is not None:
            section, name = key.split(".")
            self.config.setdefault(section, {})[name] = value

    def skip(self, reason: str, *keys: str) -> None:
        """List settings, of which a text may name several, as not needed in this run."""
        self.unneeded.update(dict.fromkeys(" ".join(keys).split(), reason))

    def skip_defaults(self) -> None:
        """List settings that say no more than the framework's own default."""
        for key, said in self.launch.settings.items():
            default = self.known.get(key, {}).get("default", ...)
            if key not in self.settings.used and str(said.value).lower() == str(default).lower():
                self.skip("its default there", key)

    def copy(self, names: Mapping[str, str], *, defaults: bool = False, minimum: float | None = None) -> None:
        """Set each of Cohort's keys from the one with the same meaning, read by its type in the framework.

        Args:
            names: Cohort's keys, with theirs.
            defaults: also set those that the file does not set, to the framework's default.
            minimum: what smaller numbers become.
        """
        settings = self.settings
        read: dict[str, Callable[[str, Any], Any]] = {
            "int": partial(settings.whole, minimum=-1, maximum=10**9),
            "bool": settings.flag,
            "float": settings.number,
            "str": settings.text,
        }
        for ours, theirs in names.items():
            entry = self.known.get(theirs) or {**self._older.get(theirs, {"type": "any"}), "default": None}
            if theirs in settings or defaults:
                reader = read.get(entry["type"]) if isinstance(entry["type"], str) else settings.text
                value = reader(theirs, entry["default"]) if reader else settings.said(theirs)
                self.put(ours, max(value, minimum) if minimum is not None else value)

    def named(self, names: Mapping[str, str], key: str, value: str | None) -> str:
        """Our name for a value; the first one, and a difference, if there is none."""
        first = next(iter(names))
        if value is not None and value not in names:
            self.differs(f"no equivalent: {key} {value}; {first} stands in its place")
        return names.get(value or first, names[first])

    def logs(self, key: str) -> None:
        """Set the trackers that metrics are sent to."""
        said = self.settings.said(key)
        logs = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        self.put("run.log", [log for log in logs if log in _LOGS] or None)
        lacking = [str(log) for log in logs if log not in (*_LOGS, "none", "console")]
        self.differences += [f"no equivalent: {key} {', '.join(lacking)}"] if lacking else []

    def differs(self, text: str) -> None:
        """Add a difference to the comments."""
        self.differences.append(text)

    def path(self, key: str, *, named: Any, missing: str) -> None:
        """Set a path or an id, or leave a placeholder."""
        if isinstance(named, list) and len(named) > 1:
            self.todo.append(f"{key}: several in the source ({named!r:.80}); the first one is used")
        named = named[0] if isinstance(named, list) and named else named
        if not isinstance(named, str) or not named:
            self.todo.append(f"{key}: fill it in")
            named = missing
        self.put(key, named)

    def dataset(self, section: str, source: str) -> bool:
        """Set the path, name and split of a section from the arguments of `load_dataset`, if they are known.

        A builder, as in `load_dataset("json", data_files="train.jsonl")`, is replaced by its files.
        """
        loaded = {key: self.settings.said(f"{source}.{key}") for key in ("path", "name", "split", "data_files")}
        files, split = loaded["data_files"], loaded["split"]
        if isinstance(files, dict):
            files = files.get(split) or next(iter(files.values()), None)
        if not any(loaded.values()):
            return False
        self.path(f"{section}.path", named=files or loaded["path"], missing="train.jsonl")
        if files and loaded["path"] not in (None, *_BUILDERS):
            self.todo.append(f"{section}.path: {loaded['path']} with data_files; only the files are used")
        self.put(f"{section}.name", loaded["name"])
        match = re.fullmatch(r"(\w+)(\[.*\])?", str(split)) if split else None
        if split and (match is None or match[2]):
            self.todo.append(f"{section}.split: {split} is a part of a split; save that part as a file")
        if match and not files:
            self.put(f"{section}.split", match[1])
        return True

    def system_prompt(self, value: Any) -> None:
        """Set the system prompt; a path of a text file, which ms-swift allows, is replaced by its text."""
        if isinstance(value, str) and value.endswith((".txt", ".md")):
            try:
                value = read_text(self.folder / value).rstrip("\n")
            except UserError as error:
                self.todo.append(f"data.system_prompt: the text of {value} ({error})")
                value = None
        self.put("data.system_prompt", value)

    def evaluation(self, path: Any, every: int | None) -> None:
        """Set the held-out data and how often it is used; `every` counts optimizer steps."""
        if path and "eval" not in self.config:
            self.path("eval.path", named=path, missing="eval.jsonl")
        if "eval" in self.config:
            self.put("eval.every", every)
            self.copy({"eval.before_training": "eval_on_start"})
        else:
            self.todo.append(f"eval.path: the held-out data, and eval.every: {every or 'its steps'}")

    def gpus(self, *, shared: bool, tensor_parallel: int) -> None:
        """Set how training and vLLM share the GPUs.

        Several GPUs of one server that also train are a layout that Cohort lacks. The nearest one is a server on each
        GPU if the model fits on one (by its bfloat16 weights), else GPUs of their own for the servers.
        """
        self.put("rollout.engine", "vllm")
        per_node = self.launch.processes_per_node or self.processes
        if not shared:
            self.put("rollout.tensor_parallel", tensor_parallel if tensor_parallel > 1 else None)
            return
        shape = try_read_shape(self.config["model"]["path"])
        small = shape is None or 2 * shape.num_parameters <= _LARGEST_ON_ONE_GPU
        if tensor_parallel == 1 or per_node <= tensor_parallel or small:
            self.put("hardware.rollout_gpus", "shared")
            layout = (
                "here every GPU has its own server (if the model does not fit on one, reserve GPUs: "
                "rollout.tensor_parallel and hardware.rollout_gpus)"
            )
        else:
            reserved = max(per_node // 2 // tensor_parallel, 1) * tensor_parallel
            self.put("rollout.tensor_parallel", tensor_parallel)
            self.put("hardware.rollout_gpus", reserved)
            self.put("hardware.processes", per_node - reserved)
            layout = (
                f"the model is too large for a server on each GPU, so {reserved} GPUs of each node sample here and "
                f"{per_node - reserved} train"
            )
        if tensor_parallel > 1:
            self.differs(f"servers of {tensor_parallel} GPUs that also train there; {layout}")

    def rewards(self, names: Any, weights: Any) -> None:
        """Rewards by name: those that Cohort has as well, and a place for each of the others."""
        names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
        weights = weights if isinstance(weights, list) else [weights] if weights is not None else []
        entries: list[dict[str, Any]] = []
        for i, name in enumerate(names):
            short = str(name).rsplit(".", 1)[-1].removesuffix("_reward").replace("-", "_") or "reward"
            place = self.settings.said(f"trainer.reward_funcs.{name}")
            known = _REWARDS.get(short) if str(place or "trl").startswith(("trl", "open_r1")) else None
            entry: dict[str, Any] = {"use": known or f"rewards.py:{short}"}
            if known is None:
                origin = f", from {place}" if place else ""
                self.todo.append(f"rewards.py: reward {name!r} as the function {short} (TRL's signature){origin}")
            try:
                entry["weight"] = float(weights[i]) if weights else 1.0
            except (IndexError, TypeError, ValueError):
                self.todo.append(f"rewards: the weight of {name!r} is not known; it is 1")
            entries.append(entry)
        if not entries:
            entries = [{"use": "math"}]
            self.todo.append("rewards: fill them in")
        if any(entry["use"] == "math" for entry in entries):
            self.todo.append("rewards: math compares with the column `answer`, or args: {answer_column: ...}")
        self.config["rewards"] = entries

    def batch(self, start: Start | None, generations: int) -> None:
        """Set the prompts per step from the completions of one optimizer step, and the processes of each machine."""
        self.put("rollout.num_generations", generations)
        per_node = self.launch.processes_per_node or self.processes
        if self.processes:
            self.put("hardware.processes", per_node)
        if self.processes > per_node:
            self.differs(f"{self.processes // per_node} machines of {per_node}: see `cohort launch slurm --nodes`")
        if start is None or not start.global_batch_size or not start.generation_batch_size:
            return
        size = start.global_batch_size
        if size != start.generation_batch_size:
            self.differs(
                f"{start.generation_batch_size} completions are sampled together there, and {size} are trained in one "
                f"optimizer step; here a step trains what it samples"
            )
        if size % generations:
            self.differs(f"{size} completions of an optimizer step are no whole groups of {generations}; rounded up")
        self.put("train.prompts_per_step", -(-size // generations))

    def adapter(self, read: tuple[dict[str, Any], list[str]] | None) -> None:
        """The adapter that `cohort.check.lora` has read, with its notes."""
        if read is not None:
            self.put("model.adapter", read[0])
            self.differences += read[1]

    def quantized(self, bits: int | None) -> None:
        """The bits that `cohort.check.quantization` has read, after adapter, processes and engine are set."""
        if bits is None:
            return
        kind = COHORT_NAMES[bits]
        model, rollout = self.config["model"], self.config.get("rollout", {})
        try:
            check_base(kind, has_adapter="adapter" in model, dtype=model.get("dtype", "float32"))
            engine = rollout.get("engine", "auto")
            shares_weights = ENGINES[engine].shares_weights
            check_run(
                "model.quantization", kind, processes=self.processes or 1, engine=engine, shares_weights=shares_weights
            )
        except ValueError as why:
            self.differs(f"no equivalent: {describe_bits(bits)}; here the model's weights keep their dtype: {why}")
        else:
            self.put("model.quantization", kind)
            if kind == "int8":
                self.differs(f"{describe_bits(bits)} there are torchao's int8 here")
            form = self.launch.settings.get("bnb_4bit_quant_type")
            if form is not None and form.value == kind:
                self.settings.said("bnb_4bit_quant_type")

    def algorithm(self, loss: str, parts: Mapping[str, str], *, beta: float, **keys: Any) -> None:
        """The named algorithm that has most of these components, and what differs from it.

        Args:
            loss: their name, which decides between algorithms of the same components.
            parts: advantage, policy loss and loss weight.
            beta: weight of the KL term.
            keys: of the `algorithm` section; those of other components are left out.
        """

        def fits(name: str) -> tuple[int, bool]:
            return sum(getattr(ALGORITHMS[name], kind) == part for kind, part in parts.items()), name == loss

        name = max(ALGORITHMS, key=fits)
        self.put("algorithm.name", name)
        for kind, part in parts.items():
            self.put(f"algorithm.{kind}", part if getattr(ALGORITHMS[name], kind) != part else None)
        self.put("algorithm.beta", beta)
        for key, value in keys.items():
            of_components = key in parameters()
            if not of_components or any(key in COMPONENTS[kind][part].parameters for kind, part in parts.items()):
                self.put(f"algorithm.{key}", value)

    def comments(self, not_needed: Mapping[str, str]) -> dict[str, list[str]]:
        """The comments by heading. Every setting that was not used is to do, or in `not_needed` with the reason."""
        todo = [finding.message for finding in self.settings.findings] + self.todo
        todo += [f"{unread.key.strip('()')} ({unread.where}): {unread.reason}" for unread in self.launch.unread]
        todo += [f"{entry.where}: {entry.value}" for entry in self.launch.todo]
        unneeded: dict[str, list[str]] = {}
        for key, said in self.launch.settings.items():
            reason = self.unneeded.get(key)
            if reason is None and key not in self.settings.used:
                reason = next((reason for name, reason in not_needed.items() if fnmatchcase(key, name)), None)
            if reason:
                unneeded.setdefault(reason, []).append(key)
            elif key not in self.settings.used:
                shown = "..." if _SECRET.search(key) else f"{said.value!r:.60}"
                todo.append(f"{key}: {shown} ({said.where}) has no equivalent")
        return {
            "To do": todo,
            "Differences": self.differences,
            "Not needed": [f"{reason}: {', '.join(keys)}" for reason, keys in unneeded.items()],
        }
