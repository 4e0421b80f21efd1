"""ms-swift to Cohort."""

from cohort.errors import UserError
from cohort_check.convert.data_sources import of_swift, put_sources
from cohort_check.convert.trl import TABLES, TrlDraft
from cohort_check.readers.files import find_text
from cohort_check.rules.common import Start, Version
from cohort_check.rules.swift import sampling_mode

_EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", "num_generations_eval", "split_dataset_ratio")
# by estimator: what it divides by if scale_rewards is not set, and both as an advantage
_ESTIMATORS = {"rloo": ("none", "leave_one_out"), "reinforce_plus_plus": ("batch", "group_mean_whitened")}


def from_swift(draft: TrlDraft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of ms-swift."""
    settings = draft.settings
    draft.model(settings.said("model") or settings.said("ckpt_dir"))
    put_sources(draft, of_swift(settings.said("dataset")))
    draft.put("data.prompt", "messages")
    draft.put("data.system_prompt", _system_prompt(draft))
    if settings.text("truncation_strategy", "left") != "delete":
        draft.differs("max_length cuts longer prompts from the left there; here they are dropped")
    draft.rewards(settings.said("reward_funcs"), settings.said("reward_weights"))
    if settings.said("external_plugins"):
        draft.todo.append(f"rewards.py: rewards that {settings.said('external_plugins')} defines become functions")
    tuner = settings.text("tuner_type", settings.text("train_type", "lora"))
    draft.put("train.learning_rate", 1e-5 if tuner == "full" else 1e-4)
    draft.training()
    draft.copy(TABLES["ms-swift"])
    _evaluation(draft)
    if draft.get("rollout.num_generations") == 1:
        draft.put("rollout.num_generations", 2)
        draft.decide.append("no equivalent: one completion per prompt, with a teacher; 2 are compared here")
    draft.batch(start)
    _engine(draft, sampling_mode(settings, draft.launch, version))
    _algorithm(draft)
    if draft.named({"full": "full", "lora": "lora"}, "tuner_type", tuner) == "lora":
        draft.adapter(TABLES["ms-swift_adapter"])
    bits = settings.whole("quant_bits", 4) if settings.text("quant_method") == "bnb" else None
    if bits in (4, 8):
        draft.quantized(bits)


def _system_prompt(draft: TrlDraft) -> str | None:
    """The system prompt; a path of a text file is replaced by its text."""
    given = draft.settings.said("system")  # several words where it stands without quotation marks
    said: str | None = " ".join(map(str, given)) if isinstance(given, list) else draft.settings.text("system")
    if said is None or not said.endswith((".txt", ".md")):
        return said
    try:
        return find_text(said, draft.folder)[1].rstrip("\n")
    except UserError as error:
        draft.decide.append(f"data.system_prompt: the text of {said} ({error})")
        return None


def _evaluation(draft: TrlDraft) -> None:
    settings = draft.settings
    strategy = settings.text("eval_strategy", settings.text("save_strategy", "steps"))
    data = of_swift(settings.said("val_dataset"))
    ratio = settings.number("split_dataset_ratio", draft.known["split_dataset_ratio"]["default"])
    if strategy != "no" and (data or ratio > 0):
        if data:
            put_sources(draft, data, section="eval")
        else:
            draft.put("eval.rows", ratio)
        draft.evaluation(strategy, None, settings.whole("eval_steps", settings.whole("save_steps", None)))
    else:
        draft.skip("nothing is evaluated there", " ".join(filter(settings.readable, _EVALUATION)))


def _engine(draft: TrlDraft, mode: str) -> None:
    settings, launch = draft.settings, draft.launch
    server = launch.server.get("vllm_tensor_parallel_size")
    parallel = int(server.value) if server and str(server.value).isdecimal() else 1
    if mode == "colocate":
        parallel = settings.whole("vllm_tensor_parallel_size", settings.whole("tensor_parallel_size", 1))
    draft.engine(mode, tensor_parallel=parallel)
    if mode not in ("none", "colocate"):
        draft.skip("Cohort starts, watches and restarts its own vLLM servers", "vllm_server_host num_infer_workers")
        draft.put("rollout.max_staleness", 1 if settings.flag("async_generate") else None)
        draft.put("hardware.rollout_gpus", len(launch.server_gpus) if launch.server_gpus else None)


def _algorithm(draft: TrlDraft) -> None:
    settings, given, scales = draft.settings, draft.config["algorithm"], TABLES["scales"]
    estimator, said = settings.text("advantage_estimator", "grpo"), settings.said("scale_rewards")
    usual, name = _ESTIMATORS.get(estimator, ("group", None))
    advantage = draft.named(scales, "scale_rewards", usual if said is None else said)
    if name and advantage == scales[usual]:
        advantage = name
    elif estimator != "grpo" and advantage != scales["gdpo"]:
        draft.decide.append(f"no equivalent: advantage_estimator {estimator} with scale_rewards {said}")
    given["advantage"] = advantage
    if given["beta"] > 0 and settings.flag("kl_in_reward", estimator != "grpo"):
        given |= {"kl_in": "reward", "kl_estimator": "k1"}
    draft.algorithm(settings.text("loss_type", "grpo"))
