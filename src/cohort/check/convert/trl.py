"""TRL and Open-R1 to Cohort."""

import re

from cohort.check.convert.trl_draft import TABLES, TrlDraft
from cohort.check.rules.keys import Version
from cohort.check.rules.start import Start
from cohort.check.rules.trl_run import sampling_mode

_BUILDERS = ("json", "parquet", "csv", "arrow", "text")  # of `datasets`


def from_trl(draft: TrlDraft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of TRL."""
    settings = draft.settings
    model = settings.text("model_name_or_path") or settings.said("trainer.model")
    draft.path("model.path", named=model, missing="MODEL")
    if not _dataset(draft, "data", "trainer.train_dataset"):
        draft.path("data.path", named=_data(draft), missing="train.jsonl")
    _evaluation(draft)
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    draft.rewards(rewards, settings.said("reward_weights"))
    draft.training()
    draft.copy(TABLES["trl"])
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
    for bits in (4, 8):
        if settings.flag(f"load_in_{bits}bit") or settings.flag(f"trainer.load_in_{bits}bit"):
            draft.quantized(bits)


def _data(draft: TrlDraft) -> object:
    """The name of the training data, or the names of those that are mixed."""
    settings = draft.settings
    mixture = settings.said("dataset_mixture")
    mixed = mixture.get("datasets") if isinstance(mixture, dict) else settings.said("datasets")
    if not isinstance(mixed, list) or not mixed:
        return settings.text("dataset_name")
    draft.todo.append(f"data: mix them into one file, as dataset_mixture and datasets do there: {mixed!r:.200}")
    return mixed[0].get("path", mixed[0].get("id")) if isinstance(mixed[0], dict) else mixed[0]


def _dataset(draft: TrlDraft, section: str, source: str) -> bool:
    """Set the path, name and split of a section from the arguments of `load_dataset`, if they are known.

    A builder, as in `load_dataset("json", data_files="train.jsonl")`, is replaced by its files.
    """
    loaded = {key: draft.settings.said(f"{source}.{key}") for key in ("path", "name", "split", "data_files")}
    files, split = loaded["data_files"], loaded["split"]
    if isinstance(files, dict):
        files = files.get(split) or next(iter(files.values()), None)
    if not any(loaded.values()):
        return False
    draft.path(f"{section}.path", named=files or loaded["path"], missing="train.jsonl")
    if files and loaded["path"] not in (None, *_BUILDERS):
        draft.todo.append(f"{section}.path: {loaded['path']} with data_files; only the files are used")
    draft.put(f"{section}.name", loaded["name"])
    match = re.fullmatch(r"(\w+)(\[.*\])?", str(split)) if split else None
    if split and (match is None or match[2]):
        draft.todo.append(f"{section}.split: {split} is a part of a split; save that part as a file")
    if match and not files:
        draft.put(f"{section}.split", match[1])
    return True


def _evaluation(draft: TrlDraft) -> None:
    settings = draft.settings
    strategy = settings.text("eval_strategy", settings.text("evaluation_strategy", "no"))
    found = _dataset(draft, "eval", "trainer.eval_dataset")
    if strategy != "no":
        draft.evaluation(strategy, settings.text("dataset_name"), settings.whole("eval_steps", None))
        draft.copy({"eval.split": "dataset_test_split"})
    elif found:
        draft.put("eval.every", 0)


def _algorithm(draft: TrlDraft) -> None:
    settings, scales = draft.settings, TABLES["scales"]
    said = settings.said("scale_rewards")
    advantage = draft.named(scales, "scale_rewards", "group" if said is None else said)
    if settings.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "per_reward_mean_std"
    draft.put("algorithm.advantage", advantage)
    draft.algorithm(settings.text("loss_type", draft.known.get("loss_type", {}).get("default")))
