"""What conversions from TRL and ms-swift share: both extend transformers' TrainingArguments and take TRL's losses."""

from typing import Any

from cohort.check.convert.draft import Draft, Rows
from cohort.check.rules.start import Start
from cohort.config.trl_keys import trl_keys

TABLES: dict[str, Rows] = trl_keys()
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")


class TrlDraft(Draft):
    """A draft from TRL, Open-R1 or ms-swift."""

    def training(self) -> None:
        """Set what TRL and ms-swift take from transformers' TrainingArguments, and GRPO's own settings."""
        self.copy(TABLES["transformers"], defaults=True)
        self.warmup("warmup_steps", "warmup_ratio")
        self.logs("report_to")
        saves = self.settings.text("save_strategy", "steps")
        if saves == "no":
            self.drop("save_strategy is no", ["run.keep_checkpoints", "run.checkpoint_every"])
            self.put("run.checkpoint_every", 0)
        elif saves != "steps":
            self.todo.append(f"run.checkpoint_every: the steps of save_strategy {saves}")
        optimizer = self.get("optim.name")
        if optimizer == "adafactor":
            self.differs("adafactor's learning rate is relative to the size of a weight here, and absolute there")
        if not optimizer.startswith("adamw"):
            self.drop(f"no effect with optim {optimizer}", ["optim.beta1", "optim.beta2", "optim.epsilon"])

    def batch(self, start: Start | None) -> None:
        """Set the batch, from all of its keys that this version has."""
        self.settings.used |= {key for key in _BATCH if start is not None and key in self.known}
        super().batch(start)

    def evaluation(self, strategy: str, path: Any, every: int | None) -> None:
        """Set the held-out data and how often it is used; `every` counts optimizer steps."""
        if "eval" not in self.config:
            self.path("eval.path", named=path, missing="eval.jsonl")
        self.put("eval.every", every)
        self.copy(TABLES["evaluation"])
        if strategy != "steps":
            self.todo.append(f"eval.every: the steps of eval_strategy {strategy}")

    def engine(self, mode: str, *, tensor_parallel: int) -> None:
        """Set where completions are sampled: none (in the training processes), colocate, or servers of their own."""
        if mode == "none":
            self.put("rollout.engine", "local")
            self.skip("use_vllm is false", "vllm_*")
            return
        self.skip("hardware.rollout_gpus reserves the servers' GPUs", "vllm_device")
        self.gpus(shared=mode == "colocate", tensor_parallel=tensor_parallel)
        if mode != "server":
            self.copy({"rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization"})
        if mode in ("server", "workers"):
            named = self.settings.text("vllm_mode", mode)
            self.differs(f"vllm_mode {named}: others start what samples there; here the run does, or set rollout.urls")

    def algorithm(self, loss: str) -> None:
        """Name the algorithm, after what TRL and ms-swift say in other ways than Cohort."""
        given, level = self.config["algorithm"], self.settings.text("importance_sampling_level", "token")
        levels = {"sequence": "gspo", "sequence_token": "gspo_token"}
        if given["policy_loss"] == "clipped" and level in levels:
            given["policy_loss"] = levels[level]
            if given["policy_loss"] == "gspo" and (
                given.get("kl_in") == "reward" or given.get("top_entropy_quantile", 1) < 1
            ):
                given["policy_loss"] = "gspo_token"
                self.differs("gspo_token stands in the place of gspo, as tokens have weights of their own")
        elif level != "token" and loss != "vespo":  # which is of whole completions anyway
            self.differs(f"no equivalent: importance_sampling_level {level} with loss_type {loss}; ratios are tokens'")
        if "delta" in given and given["policy_loss"].startswith("gspo"):
            self.no_dual_clip()
        if loss == "cispo":
            cap = given.pop("clip_high")
            if cap >= 1:
                given["clip_high"] = cap - 1
            else:
                self.differs(
                    f"a cap of {cap:g} on CISPO's weights multiplies what is on-policy by {cap:g} there; here such a "
                    f"weight is 1, and the cap is that of algorithm.clip_high"
                )
        self.copy(TABLES["reference"])
        if not given["beta"]:
            self.drop("there is no KL term", ["algorithm.kl_unbiased", "reference.refresh_every", "reference.mix"])
        super().algorithm(loss)
