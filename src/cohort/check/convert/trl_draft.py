"""What conversions from TRL and ms-swift share: both extend transformers' TrainingArguments and take TRL's losses."""

from cohort.check.convert.draft import Draft
from cohort.check.rules.start import Start
from cohort.check.tables import load_table
from cohort.config import COMPONENTS

_SAME = load_table("convert/equivalents/trl_and_swift.yaml")
LOSSES = {loss: tuple(parts.split()) for loss, parts in _SAME["losses"].items()}  # policy loss, loss weight
# scale_rewards as an advantage
SCALES = {"group": "group_mean_std", "batch": "group_mean_batch_std", "none": "group_mean"}
# what a step is made of
BATCH = ["per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"]


def same_keys(section: str) -> dict[str, str]:
    """Return a section of `equivalents/trl_and_swift.yaml`: Cohort's keys with theirs."""
    return dict(_SAME[section])


class TrlDraft(Draft):
    """A draft from TRL, Open-R1 or ms-swift."""

    def batch(self, start: Start | None, generations: int) -> None:
        """Set the batch, from all of its keys."""
        for key in BATCH if start is not None else ():
            self.settings.said(key)
        super().batch(start, generations)

    def reference(self, beta: float) -> None:
        """Set how TRL's and ms-swift's reference model follows the policy."""
        if self.settings.flag("sync_ref_model") and beta:
            self.config["reference"] = {"refresh_every": 512}
            self.copy(same_keys("trl_reference"))
        else:
            self.skip("there is no reference model to move", "ref_model_sync_steps ref_model_mixup_alpha")

    def reward_scale(self, default: str) -> str:
        """What TRL's and ms-swift's scale_rewards says: group, batch, none, or ms-swift's gdpo."""
        said = self.settings.said("scale_rewards")
        scale = default if said is None else str(said).lower()
        scale = {"true": "group", "yes": "group", "false": "none", "no": "none", "": "none"}.get(scale, scale)
        if scale not in (*SCALES, "gdpo"):
            self.differs(f"no equivalent: scale_rewards {said}")
        return scale

    def ratio_level(self, loss: str, policy_loss: str) -> str:
        """The policy loss where TRL's and ms-swift's importance_sampling_level is another than token."""
        level = self.settings.text("importance_sampling_level", "token")
        losses = {"sequence": "gspo", "sequence_token": "gspo_token"}
        if policy_loss == "clipped" and level in losses:
            return losses[level]
        if level != "token" and policy_loss != "vespo":  # which is of whole completions anyway
            self.differs(
                f"no equivalent: importance_sampling_level {level} with loss_type {loss}; its ratios are tokens'"
            )
        return policy_loss

    def bounds(self, loss: str, policy_loss: str) -> dict[str, float | None]:
        """Bounds of the ratio where TRL and ms-swift keep them: epsilon, epsilon_high and delta."""
        settings = self.settings
        low = settings.number("epsilon", 0.2)
        high, delta = settings.number("epsilon_high", None), settings.number("delta", None)
        if "clip_high" not in COMPONENTS["policy_loss"][policy_loss].parameters:
            self.skip(f"no effect with loss_type {loss}", "epsilon", "epsilon_high", "delta")
            return {}
        if loss == "cispo":
            self.skip("no effect with loss_type cispo", "delta", *(["epsilon"] if high is not None else []))
        high = low if high is None else high
        if loss == "cispo" and high >= 1:
            return {"clip_high": high - 1}
        if loss == "cispo":
            self.differs(
                f"a cap of {high:g} on CISPO's weights multiplies what is on-policy by {high:g} there; here such a "
                f"weight is 1, and the cap is that of algorithm.clip_high"
            )
            return {}
        if delta is not None and (policy_loss != "clipped" or delta <= 1 + high):
            self.differs(f"no equivalent: delta {delta:g}; it bounds policy_loss: clipped, from above 1 + clip_high")
            delta = None
        if low >= 1:
            self.differs(f"epsilon {low:g} leaves the ratio without a lower bound there; algorithm.clip_low is near 1")
        return {"clip_low": min(low, 0.999), "clip_high": high, "delta": delta}

    def transformers_keys(self, *, epochs: float, schedule: str = "linear") -> None:
        """What TRL and ms-swift take from transformers' TrainingArguments."""
        settings = self.settings
        self.copy(same_keys("transformers"))
        self._optimizer()
        steps = settings.whole("max_steps", None, minimum=-1)
        if steps and steps > 0:
            self.put("train.steps", steps)
            self.skip("train.steps is set", "num_train_epochs")
        else:
            self.put("train.epochs", settings.number("num_train_epochs", epochs))
        schedule = settings.text("lr_scheduler_type", schedule)
        self.put("train.lr_schedule", _SAME["schedules"].get(schedule, "cosine"))
        if schedule not in _SAME["schedules"]:
            self.differs(f"no equivalent: lr_scheduler_type {schedule}; cosine stands in its place")
        warmup, ratio = settings.number("warmup_steps", None), settings.number("warmup_ratio", None)
        ratio = warmup if warmup is not None and 0 < warmup < 1 else ratio
        if warmup is not None and warmup >= 1:
            self.put("train.warmup_steps", int(warmup))
            self.skip("train.warmup_steps is set", "warmup_ratio")
        elif ratio and steps and steps > 0:
            self.put("train.warmup_steps", round(ratio * steps))
        elif ratio:
            self.todo.append(f"train.warmup_steps: {ratio:g} of all steps")
        saves = settings.text("save_strategy", "steps")
        if saves == "no":
            self.put("run.checkpoint_every", 0)
            self.skip("save_strategy is no", "save_steps", "save_total_limit")
        else:
            self.put("run.checkpoint_every", settings.whole("save_steps", None, minimum=0, maximum=10**9))
            self.copy({"run.keep_checkpoints": "save_total_limit"})
        if saves not in ("no", "steps"):
            self.todo.append(f"run.checkpoint_every: the steps of save_strategy {saves}")
        self.logs("report_to")

    def _optimizer(self) -> None:
        """The optimizer by transformers' name for it."""
        said = self.settings.text("optim")
        name = _SAME["optimizers"].get(said or "adamw_torch")
        if name is None:
            self.differs(f"no equivalent: optim {said}; adamw stands in its place")
        name = name or "adamw"
        self.put("optim.name", name if said is not None else None)
        if name == "adafactor":
            self.differs("adafactor's learning rate is relative to the size of a weight here, and absolute there")
        if not name.startswith("adamw"):
            for key in ("beta1", "beta2", "epsilon"):
                self.config["optim"].pop(key, None)
            self.skip(f"no effect with optim {said}", "adam_beta1", "adam_beta2", "adam_epsilon")
