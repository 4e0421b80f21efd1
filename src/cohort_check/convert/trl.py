"""TRL and Open-R1 to Cohort, and what ms-swift shares with them: transformers' TrainingArguments."""

import re
from typing import Any

from cohort.config.other_trainers import equivalents
from cohort_check.convert.data_sources import files_of, of_mixture, put_sources
from cohort_check.convert.draft import Draft, Rows
from cohort_check.rules.common import Start, Version
from cohort_check.rules.trl import sampling_mode

TABLES: dict[str, Rows] = equivalents()["trl"]
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")


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
        self.settings.used |= {key for key in BATCH if start is not None and key in self.known}
        super().batch(start)

    def evaluation(self, strategy: str, path: Any, every: int | None) -> None:
        """Set the held-out data and how often it is used; `every` counts optimizer steps."""
        if "eval" not in self.config:
            self.path("eval.path", named=path, missing="eval.jsonl")
        self.put("eval.every", every)
        self.sampled_evaluation()
        if strategy != "steps":
            self.todo.append(f"eval.every: the steps of eval_strategy {strategy}")

    def sampled_evaluation(self) -> None:
        """Set how evaluation samples: as training does, which has to be set before."""
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            self.put(f"eval.{key}", self.get(f"rollout.{key}"))
        self.put("eval.num_samples", self.get("rollout.num_generations"))
        self.copy(TABLES["evaluation"], defaults=True)

    def engine(self, mode: str, *, tensor_parallel: int) -> None:
        """Set where completions are sampled: none (in the training processes), colocate, or servers of their own."""
        if mode == "none":
            self.put("rollout.engine", "local")
            # Unsloth samples with vLLM all the same, and with its `vllm_sampling_params`
            self.skip("use_vllm is false", "vllm_[!s]* vllm_s[!a]*")
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
            weighted = given.get("kl_in") == "reward" or given.get("top_entropy_quantile", 1) < 1
            if weighted and given["policy_loss"] == "gspo":
                given["policy_loss"] = "gspo_token"
                self.differs("gspo_token stands in the place of gspo, as tokens have weights of their own")
        elif level != "token" and loss != "vespo":  # which is of whole completions anyway
            text = f"importance_sampling_level {level} with loss_type {loss}; ratios are tokens'"
            self.decide.append(f"no equivalent: {text}")
        if "delta" in given and given["policy_loss"].startswith("gspo"):
            self.no_dual_clip()
        if loss == "cispo":
            cap = given.pop("clip_high")
            if cap >= 1:
                given["clip_high"] = cap - 1
            else:
                text = f"a cap of {cap:g} on CISPO's weights multiplies what is on-policy by {cap:g} there"
                self.differs(f"{text}; here such a weight is 1, and the cap is that of algorithm.clip_high")
        self.copy(TABLES["reference"])
        if not given["beta"]:
            self.skip("there is no KL term", "sync_ref_model")
            self.drop("there is no KL term", ["algorithm.kl_unbiased", "reference.refresh_every", "reference.mix"])
        super().algorithm(loss)
        self.rescale(1, self.get("train.updates_per_rollout") or 1, "optimizer steps there")


_LORA = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
_BUILDERS = ("json", "parquet", "csv", "arrow", "text")  # of `datasets`


def from_trl(draft: TrlDraft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of TRL."""
    settings = draft.settings
    draft.model(settings.text("model_name_or_path") or settings.said("trainer.model"))
    if not _dataset(draft, "data", "trainer.train_dataset"):
        put_sources(draft, _data(draft))
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    draft.rewards(rewards, settings.said("reward_weights"))
    draft.training()
    draft.copy(TABLES["trl"])
    _evaluation(draft)
    draft.batch(start)
    if "max_prompt_length" not in settings and version >= (0, 26):
        draft.differs("prompts have no limit there; here rollout.max_prompt_tokens drops longer ones")
    mode = sampling_mode(settings, version)
    parallel = settings.whole("vllm_tensor_parallel_size", 1) if mode == "colocate" else 1
    draft.engine(mode, tensor_parallel=parallel)
    if mode != "none":
        draft.copy(TABLES["trl_vllm"])
    _algorithm(draft)
    if settings.said("trainer.peft_config") == "LoraConfig":
        draft.adapter(TABLES["peft_adapter"])
    elif settings.flag("use_peft"):
        draft.adapter(TABLES["trl_adapter"])
    elif lora := [key for key in _LORA if key in settings and "use_peft" not in settings]:
        draft.decide.append(f"adapter: {', '.join(lora)} without use_peft, which a loader of the source's own may read")
    for bits in (4, 8):
        if settings.flag(f"load_in_{bits}bit") or settings.flag(f"trainer.load_in_{bits}bit"):
            draft.quantized(bits)


def _data(draft: TrlDraft) -> list[dict[str, Any]]:
    """The training data, or those that are mixed."""
    settings = draft.settings
    mixture = settings.said("dataset_mixture")
    mixed = mixture.get("datasets") if isinstance(mixture, dict) else settings.said("datasets")
    if mixed and not isinstance(mixed, list):
        draft.decide.append(f"data: datasets is no list of data sets: {mixed!r:.200}")
    if not isinstance(mixed, list) or not mixed:
        return files_of(settings.text("dataset_name"))
    size = mixture.get("test_split_size") if isinstance(mixture, dict) else None
    if isinstance(size, int | float) and settings.text("eval_strategy", "no") != "no":
        draft.put("eval.rows", size)
    return of_mixture(draft, mixed)


def _dataset(draft: TrlDraft, section: str, source: str) -> bool:
    """Set the data of a section from the arguments of its `load_dataset`, if they are known."""
    one = {key: draft.settings.said(f"{source}.{key}") for key in ("path", "name", "split", "data_files")}
    put = _loaded(draft, section, one) if any(one.values()) else []
    if put:
        put_sources(draft, put, section=section)
    return bool(put)


def _loaded(draft: TrlDraft, section: str, loaded: dict[str, Any]) -> list[dict[str, Any]]:
    """The path, name and split of a `load_dataset`; once for each of its files, which replace a builder like "json"."""
    files, split = loaded.get("data_files"), loaded.get("split")
    path = None if loaded.get("path") in _BUILDERS else loaded.get("path")
    if isinstance(files, dict):
        files = files.get(split) or next(iter(files.values()), None)
    if files and path:
        draft.decide.append(f"{section}.path: {path} with data_files; only the files are used")
    match = re.fullmatch(r"(\w+)(\[.*\])?", str(split)) if split else None
    if split and (match is None or match[2]):
        draft.decide.append(f"{section}.split: {split} is a part of a split; save that part as a file")
    own = {"name": loaded.get("name"), "split": match[1] if match and not files else None}
    places = files if isinstance(files, list) else [files or path]
    return [{"path": place, **{key: value for key, value in own.items() if value is not None}} for place in places]


def _evaluation(draft: TrlDraft) -> None:
    settings = draft.settings
    strategy = settings.text("eval_strategy", settings.text("evaluation_strategy", "no"))
    found = _dataset(draft, "eval", "trainer.eval_dataset")
    if strategy != "no":
        draft.evaluation(strategy, settings.text("dataset_name"), settings.whole("eval_steps", None))
        draft.copy({"eval.split": "dataset_test_split"})
    elif found:
        draft.put("eval.every", 0)
        draft.sampled_evaluation()


def _algorithm(draft: TrlDraft) -> None:
    settings, scales = draft.settings, TABLES["scales"]
    said = settings.said("scale_rewards")
    advantage = draft.named(scales, "scale_rewards", "group" if said is None else said)
    if settings.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "per_reward_mean_std"
    draft.put("algorithm.advantage", advantage)
    draft.algorithm(settings.text("loss_type", draft.known.get("loss_type", {}).get("default")))
