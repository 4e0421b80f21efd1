"""A launch of verl: its numbers, and everything besides the batch rules that goes wrong with it."""

from dataclasses import replace
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings
from cohort.check.rules.gpus import gpu_findings, length_finding
from cohort.check.rules.start import Judged, Knobs, Start
from cohort.check.rules.verl import DEFAULT_VERSION, VerlBatch, missing_sizes, verl_start
from cohort.check.rules.verl_keys import verl_key_findings

_ACTOR, _ROLLOUT, _REFERENCE = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
_FIELDS = {
    "data.train_batch_size": "train_batch_size",
    f"{_ROLLOUT}.n": "generations",
    f"{_ACTOR}.ppo_mini_batch_size": "mini_batch_size",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout_tensor_parallel",
}
BATCH_KEYS = tuple(_FIELDS)[:3]  # prompts that are sampled, completions of each, prompts of one optimizer step
_GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "grpo_vectorized", "rloo_vectorized", "gdpo")
_NEW_NAMES = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_REFERENCE}.log_prob_micro_batch_size": f"{_REFERENCE}.log_prob_micro_batch_size_per_gpu",
}


def judge_verl(launch: Launch) -> Judged:
    """Judges a launch by the rules of verl 0.9."""
    settings = Settings(launch)
    batch = _batch(settings)
    decides = frozenset(settings.used)
    findings = [*_keys(settings), *verl_key_findings(launch), *_groups(settings, batch)]
    blocked = next((f.message for f in findings if f.code == "CHK006"), None)
    lengths = ("data.max_prompt_length", "data.max_response_length")
    prompt, completion = (settings.whole(key, 512, maximum=10**9) for key in lengths)
    context = settings.whole(f"{_ROLLOUT}.max_model_len", None, maximum=10**9)
    findings += length_finding(
        prompt,
        completion,
        context if settings.readable(*lengths) else None,
        prompt_key="data.max_prompt_length",
        completion_key="data.max_response_length",
        context_key=f"{_ROLLOUT}.max_model_len",
    )
    per_node = settings.whole("trainer.n_gpus_per_node", 8)
    findings += gpu_findings(replace(launch, processes_per_node=per_node), local_server=False)

    knobs = {key: getattr(batch, name) for key, name in _FIELDS.items()}

    def with_knobs(changed: Knobs) -> VerlBatch:
        fields: dict[str, Any] = {_FIELDS[key]: value for key, value in changed.items()}
        return replace(batch, **fields)

    def start(num_gpus: int, changed: Knobs) -> Start:
        return verl_start(with_knobs(changed), num_gpus)

    def missing(num_gpus: int, changed: Knobs) -> tuple[str, ...]:
        return missing_sizes(with_knobs(changed), num_gpus)

    return Judged(
        version=DEFAULT_VERSION,
        version_reason="the version whose rules are known",
        knobs=knobs,
        decides=decides,
        start=start,
        usual_field="data.train_batch_size",
        missing=missing,
        sampling=f"by {settings.text(f'{_ROLLOUT}.name', 'vllm')} on the training GPUs, in turn with training",
        findings=(*settings.findings, *findings),
        blocked=blocked,
    )


def _batch(settings: Settings) -> VerlBatch:
    def micro(section: str) -> tuple[int | None, int | None]:
        key = f"{section}.log_prob_micro_batch_size"
        return settings.whole(key, None), settings.whole(f"{key}_per_gpu", None)

    megatron = settings.text(f"{_ACTOR}.strategy", "fsdp") == "megatron"
    sizes = [settings.whole(f"{_ACTOR}.megatron.{name}_model_parallel_size", 1) for name in ("tensor", "pipeline")]
    rollout = [
        settings.whole(f"{_ROLLOUT}.{name}_parallel_size", default)
        for name, default in (("tensor_model", 2), ("data", 1), ("pipeline_model", 1))
    ]
    return VerlBatch(
        train_batch_size=settings.whole("data.train_batch_size", 1024),
        generations=settings.whole(f"{_ROLLOUT}.n", 1),
        mini_batch_size=settings.whole(f"{_ACTOR}.ppo_mini_batch_size", 256),
        micro_batch_size=settings.whole(f"{_ACTOR}.ppo_micro_batch_size", None),
        micro_batch_size_per_gpu=settings.whole(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", None),
        rollout_micro=micro(_ROLLOUT),
        reference_micro=micro(_REFERENCE),
        dynamic=settings.flag(f"{_ACTOR}.use_dynamic_bsz"),
        uses_reference=settings.flag(f"{_ACTOR}.use_kl_loss") or settings.flag("algorithm.use_kl_in_reward"),
        sequence_parallel=settings.whole(f"{_ACTOR}.ulysses_sequence_parallel_size", 1),
        model_parallel=sizes[0] * sizes[1] if megatron else None,
        context_parallel=settings.whole(f"{_ACTOR}.megatron.context_parallel_size", 1),
        rollout_tensor_parallel=rollout[0],
        rollout_other_parallel=rollout[1] * rollout[2],
    )


def _keys(settings: Settings) -> list[Finding]:
    """Keys that are gone or on their way out."""
    found = [
        Finding("CHK007", old, f"{old} counts all GPUs together and is deprecated; {new} counts one", (new,))
        for old, new in _NEW_NAMES.items()
        if settings.said(old) is not None
    ]
    if settings.said("data.val_batch_size") is not None:
        message = "data.val_batch_size has no effect: validation goes to the sampling engine as a whole"
        found.append(Finding("CHK005", "data.val_batch_size", message))
    if settings.text(f"{_ROLLOUT}.mode") == "sync":
        message = (
            "Rollout mode 'sync' has been removed. Please set `actor_rollout_ref.rollout.mode=async` or remove the "
            "mode setting entirely."
        )
        found.append(Finding("CHK006", f"{_ROLLOUT}.mode", message, (f"{_ROLLOUT}.mode=async",)))
    return found


def _groups(settings: Settings, batch: VerlBatch) -> list[Finding]:
    """A group of one, which verl does not refuse."""
    estimator = settings.text("algorithm.adv_estimator", "gae")
    if batch.generations > 1 or estimator not in _GROUP_ESTIMATORS or not settings.readable(f"{_ROLLOUT}.n"):
        return []
    message = (
        f"{_ROLLOUT}.n is 1 with algorithm.adv_estimator {estimator}, and nothing refuses it: a completion without "
        f"peers has no group to be judged against (GRPO takes its reward itself as its advantage, without a baseline)"
    )
    return [Finding("CHK014", f"{_ROLLOUT}.n", message, (f"{_ROLLOUT}.n=8",))]
