"""A Cohort configuration that grows key by key, and what all conversions have in common."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from cohort.check.launch import Launch, Settings
from cohort.check.quantization import COHORT_NAMES, told
from cohort.check.rules.start import Start
from cohort.config import ALGORITHMS, COMPONENTS
from cohort.config.catalogue import parameters
from cohort.config.quantization import check_base, check_run
from cohort.config.rollout import ENGINES

Kind = Literal["text", "whole", "number", "flag"]

_REWARDS = {"accuracy": "math", "math": "math", "math_verify": "math", "format": "format"}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
# TRL's and ms-swift's loss_type as a policy loss and how it is summed; bnpo's sum is a micro-batch's there
LOSSES = {
    "grpo": ("clipped", "sequence_mean"),
    "dr_grpo": ("clipped", "constant"),
    "dapo": ("clipped", "token_mean"),
    "bnpo": ("clipped", "token_mean"),
    "luspo": ("clipped", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "token_mean"),
}
# and scale_rewards as an advantage
SCALES = {"group": "group_mean_std", "batch": "group_mean_batch_std", "none": "group_mean"}
_SECRET = re.compile(r"(token|api_key|secret|password)$")
_LOGS = ("tensorboard", "wandb", "trackio")
# what TRL and ms-swift both take from transformers' TrainingArguments
_OF_TRANSFORMERS: dict[str, tuple[str, Kind]] = {
    "train.learning_rate": ("learning_rate", "number"),
    "optim.weight_decay": ("weight_decay", "number"),
    "optim.beta1": ("adam_beta1", "number"),
    "optim.beta2": ("adam_beta2", "number"),
    "optim.epsilon": ("adam_epsilon", "number"),
    "train.max_grad_norm": ("max_grad_norm", "number"),
    "train.seed": ("seed", "whole"),
    "train.updates_per_rollout": ("num_iterations", "whole"),
    "model.gradient_checkpointing": ("gradient_checkpointing", "flag"),
    "algorithm.mask_truncated_completions": ("mask_truncated_completions", "flag"),
    "rollout.temperature": ("temperature", "number"),
    "rollout.top_p": ("top_p", "number"),
    "run.dir": ("output_dir", "text"),
}


def _optimizer_of(name: str) -> str | None:
    """Ours for one of transformers; None where there is none."""
    if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"):
        return "adamw_8bit"
    if name in ("adafactor", "sgd"):
        return name
    return "adamw" if name.startswith(("adamw_torch", "adamw_hf")) and not name.endswith("bit") else None


class Draft:
    """The configuration so far and the notes for its reader."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.settings = Settings(launch)
        self.config: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def processes(self) -> int:
        """Training processes of the launch; 0 where it does not say."""
        return int(self.launch.processes.value) if self.launch.processes else 0

    def put(self, key: str, value: Any) -> None:
        """Sets `section.key`, unless there is nothing to set."""
        if value is not None:
            section, name = key.split(".")
            self.config.setdefault(section, {})[name] = value

    def copy(self, table: Mapping[str, tuple[str, Kind]]) -> None:
        """Sets each of our keys from the one that means the same there, where that is said."""
        for ours, (theirs, kind) in table.items():
            if theirs in self.settings:
                readers = {"whole": self.settings.whole, "number": self.settings.number, "text": self.settings.text}
                value = self.settings.flag(theirs) if kind == "flag" else readers[kind](theirs, None)
                self.put(ours, value)

    def note(self, text: str) -> None:
        """A line for the reader of the new file."""
        self.notes.append(text)

    def path(self, key: str, *, named: Any, missing: str) -> None:
        """A path or an id, or a place to fill in."""
        if isinstance(named, list) and len(named) > 1:
            self.note(f"no equivalent: several of {key} ({named!r:.80}); the first one is taken")
        named = named[0] if isinstance(named, list) and named else named
        if not isinstance(named, str) or not named:
            self.note(f"to fill in: {key}")
            named = missing
        self.put(key, named)

    def rewards(self, names: Any, weights: Any) -> None:
        """Rewards by name: those that Cohort has as well, and a place for each of the others."""
        names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
        weights = weights if isinstance(weights, list) else [weights] if weights is not None else []
        entries: list[dict[str, Any]] = []
        for i, name in enumerate(names):
            short = str(name).rsplit(".", 1)[-1].removesuffix("_reward").replace("-", "_") or "reward"
            entry: dict[str, Any] = {"use": _REWARDS.get(short, f"rewards.py:{short}")}
            if short not in _REWARDS:
                self.note(f"to write: reward {name!r} as the function {short} of rewards.py (the signature is TRL's)")
            try:
                entry["weight"] = float(weights[i]) if weights else 1.0
            except (IndexError, TypeError, ValueError):
                self.note(f"the weight of reward {name!r} could not be read; it is 1")
            entries.append(entry)
        if not entries:
            entries = [{"use": "math"}]
            self.note("to fill in: rewards")
        if any(entry["use"] == "math" for entry in entries):
            self.note("reward math compares the answer with the column `answer` (args: {answer_column: ...})")
        self.config["rewards"] = entries

    def batch(self, start: Start | None, generations: int) -> None:
        """Completions of one optimizer step as prompts per step, and the processes."""
        self.put("rollout.num_generations", generations)
        if self.processes:
            self.put("hardware.processes", self.processes)
        if start is None or not start.global_batch_size or not start.generation_batch_size:
            return
        size = start.global_batch_size
        if size != start.generation_batch_size:
            self.note(
                f"no equivalent: {start.generation_batch_size} completions are sampled together there, and {size} are "
                f"trained in one optimizer step; here a step trains what it samples"
            )
        if size % generations:
            self.note(f"{size} completions of an optimizer step are no whole groups of {generations}; rounded up")
        self.put("train.prompts_per_step", -(-size // generations))

    def adapter(self, read: tuple[dict[str, Any], list[str]] | None) -> None:
        """The adapter that `cohort.check.lora` has read, with its notes."""
        if read is not None:
            self.put("model.adapter", read[0])
            self.notes += read[1]

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
            self.note(f"no equivalent: {told(bits)}; here the model's weights keep their dtype: {why}")
        else:
            self.put("model.quantization", kind)
            if kind == "int8":
                self.note(f"{told(bits)} there are torchao's int8 here")
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

    def reward_scale(self, default: str) -> str:
        """What TRL's and ms-swift's scale_rewards says: group, batch, none, or ms-swift's gdpo."""
        said = self.settings.said("scale_rewards")
        scale = default if said is None else str(said).lower()
        return {"true": "group", "yes": "group", "false": "none", "no": "none", "": "none"}.get(scale, scale)

    def ratio_level(self, loss: str, policy_loss: str) -> str:
        """The policy loss where TRL's and ms-swift's importance_sampling_level is another than token."""
        level = self.settings.text("importance_sampling_level", "token")
        losses = {"sequence": "gspo", "sequence_token": "gspo_token"}
        if policy_loss == "clipped" and level in losses:
            return losses[level]
        if level != "token" and policy_loss != "vespo":  # which is of whole completions anyway
            self.note(f"no equivalent: importance_sampling_level {level} with loss_type {loss}; its ratios are tokens'")
        return policy_loss

    def bounds(self, loss: str, policy_loss: str) -> dict[str, float | None]:
        """Bounds of the ratio where TRL and ms-swift keep them: epsilon, epsilon_high and delta."""
        settings = self.settings
        low = settings.number("epsilon", 0.2)
        high, delta = settings.number("epsilon_high", None), settings.number("delta", None)
        high = low if high is None else high
        if loss == "cispo":
            if high >= 1:
                return {"clip_high": high - 1}
            self.note(
                f"a cap of {high:g} on CISPO's weights multiplies what is on-policy by {high:g} there; here such a "
                f"weight is 1, and the cap is that of algorithm.clip_high"
            )
            return {}
        if delta is not None and (policy_loss != "clipped" or delta <= 1 + high):
            self.note(f"no equivalent: delta {delta:g}; it bounds policy_loss: clipped, from above 1 + clip_high")
            delta = None
        return {"clip_low": low, "clip_high": high, "delta": delta}

    def transformers_keys(self, *, epochs: float) -> None:
        """What TRL and ms-swift take from transformers' TrainingArguments."""
        settings = self.settings
        self.copy(_OF_TRANSFORMERS)
        self._optimizer()
        steps = settings.whole("max_steps", None, minimum=-1)
        if steps and steps > 0:
            self.put("train.steps", steps)
            settings.said("num_train_epochs")
        else:
            self.put("train.epochs", settings.number("num_train_epochs", epochs))
        schedule = settings.text("lr_scheduler_type", "linear")
        self.put("train.lr_schedule", _SCHEDULES.get(schedule, "cosine"))
        if schedule not in _SCHEDULES or schedule == "cosine_with_min_lr":
            self.note(f"no equivalent: lr_scheduler_type {schedule}; cosine stands in its place")
        warmup, ratio = settings.number("warmup_steps", None), settings.number("warmup_ratio", None)
        ratio = warmup if warmup is not None and 0 < warmup < 1 else ratio
        if warmup is not None and warmup >= 1:
            self.put("train.warmup_steps", int(warmup))
        elif ratio:
            if steps and steps > 0:
                self.put("train.warmup_steps", round(ratio * steps))
            else:
                self.note(f"to fill in: train.warmup_steps, {ratio:g} of all steps")
        saves = settings.text("save_strategy", "steps")
        if saves == "no":
            self.put("run.checkpoint_every", 0)
        elif saves == "steps":
            self.put("run.checkpoint_every", settings.whole("save_steps", None))
            self.put("run.keep_checkpoints", settings.whole("save_total_limit", None))
        logs = settings.said("report_to")
        logs = [logs] if isinstance(logs, str) else logs if isinstance(logs, list) else []
        self.put("run.log", [log for log in logs if log in _LOGS] or None)

    def _optimizer(self) -> None:
        """The optimizer by transformers' name for it."""
        said = self.settings.text("optim")
        name = _optimizer_of(said) if said is not None else "adamw"
        if name is None:
            self.note(f"no equivalent: optim {said}; adamw stands in its place")
            name = "adamw"
        self.put("optim.name", name if said is not None else None)
        if name == "adafactor":
            self.note("adafactor's learning rate is relative to the size of a weight here, and absolute there")
        if not name.startswith("adamw"):
            given = self.config["optim"]
            unused = [given.pop(key) for key in ("beta1", "beta2", "epsilon") if key in given]
            if unused:
                self.note(f"adam_beta1, adam_beta2 and adam_epsilon have no effect with optim {said}")

    def tell_the_rest(self) -> None:
        """Notes on everything that was said and has not been used."""
        for finding in self.settings.findings:
            self.note(finding.message)
        for unread in self.launch.unread:
            self.note(f"could not be read: {unread.key} ({unread.where}): {unread.reason}")
        for key, said in self.launch.settings.items():
            if key not in self.settings.used:
                shown = "..." if _SECRET.search(key) else f"{said.value!r:.60}"
                self.note(f"no equivalent: {key}: {shown} ({said.where})")
