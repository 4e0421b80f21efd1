"""verl with FSDP: what stops a run before or when its workers start. The rules of versions 0.5 to 0.10.

A batch is `train_batch_size` prompts with n completions each; a mini-batch is one optimizer step. Hydra refuses
overrides first, then verl validates its configuration, then the workers assert what depends on the GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cohort_check.findings import Finding, load_table
from cohort_check.launch import ANY_SETTING, Launch, Settings
from cohort_check.rules import common
from cohort_check.rules.common import ENGINE, VERL, BatchSizes, Keys, RunRules, Start, Version, parse_version, refused

_ACTOR, _ROLLOUT, _REFERENCE = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
_FIELDS: dict[str, str] = common.FRAMEWORKS["verl"]["sizes"]  # by key: the field of VerlBatch
BATCH_KEYS = tuple(_FIELDS)[:3]  # prompts that are sampled, completions of each, prompts of one optimizer step
_MICRO_FIELDS: dict[str, str] = common.FRAMEWORKS["verl"]["micro_sizes"]
_MESSAGES: dict[str, str] = load_table("rules/messages.yaml")["verl"]
# with verl's rules; the recipes' configurations have keys of their own
_PROGRAMS = (VERL, "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo", "recipe.entropy.main_entropy")

Micro = tuple[int | None, int | None]  # a micro-batch over all GPUs (deprecated), and of one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlBatch:
    """The numbers that verl's rules look at."""

    version: Version = (0, 9, 1)
    train_batch_size: int = 1024  # prompts
    generations: int = 1
    mini_batch_size: int = 256  # prompts
    micro: Micro = (None, None)
    rollout_micro: Micro = (None, None)  # of log-probabilities
    reference_micro: Micro = (None, None)
    dynamic: bool = False  # use_dynamic_bsz
    rollout_dynamic: bool = False  # its log_prob_use_dynamic_bsz
    uses_reference: bool = False
    sequence_parallel: int = 1  # Ulysses
    rollout_tensor_parallel: int = 2  # of the sampling engine
    rollout_other_parallel: int = 1  # its data x pipeline parallel


def verl_start(batch: VerlBatch, num_gpus: int) -> Start:
    """Return what verl does with `num_gpus` GPUs in total."""
    workers = _workers if batch.version >= (0, 8) else _old_workers
    message = next(_validated(batch, num_gpus), None) or next(workers(batch, num_gpus), None)
    if message:
        return refused(message)
    return Start(
        starts=True,
        generation_batch_size=batch.train_batch_size * batch.generations,
        steps_per_generation=max(batch.train_batch_size // batch.mini_batch_size, 1),
        global_batch_size=batch.mini_batch_size * batch.generations,
        prompts=batch.train_batch_size,
    )


def _validated(batch: VerlBatch, num_gpus: int) -> Iterator[str]:
    """What verl's own validation complains about, before anything is started."""
    old, completions = batch.version < (0, 6), batch.train_batch_size * batch.generations
    if completions % num_gpus and (old or not batch.dynamic):
        yield f"real_train_batch_size ({completions}) must be divisible by minimal possible batch size ({num_gpus})"
    if batch.dynamic:
        return
    if old:
        yield from _exclusive(batch.micro, _ACTOR, "micro_batch_size")
    else:
        kind = "AssertionError: " if batch.micro == (None, None) else "ValueError: "
        texts = _exclusive(batch.micro, "actor", "ppo_micro_batch_size", " if use_dynamic_bsz is not enabled")
        yield from (_MESSAGES["in_class"].format(name="FSDPActorConfig", error=kind + text) for text in texts)
    mini, (micro, _) = batch.mini_batch_size, batch.micro
    if batch.train_batch_size < mini:
        yield f"train_batch_size ({batch.train_batch_size}) must be >= actor.ppo_mini_batch_size ({mini})"
    if micro is not None and mini % micro:
        yield f"ppo_mini_batch_size ({mini}) must be divisible by ppo_micro_batch_size ({micro})"
    if micro is not None and micro * batch.sequence_parallel < num_gpus:
        parallel = f"ulysses_sequence_parallel_size ({batch.sequence_parallel})"
        yield f"ppo_micro_batch_size ({micro}) * {parallel} must be >= n_gpus ({num_gpus})"
    if batch.uses_reference:
        yield from _exclusive(batch.reference_micro, _REFERENCE, "log_prob_micro_batch_size")
    yield from _exclusive(batch.rollout_micro, _ROLLOUT, "log_prob_micro_batch_size")


def _exclusive(micro: Micro, section: str, key: str, needed: str = "") -> Iterator[str]:
    """One of a micro-batch over all GPUs and one of each GPU must be set."""
    if micro == (None, None) or None not in micro:
        message = _MESSAGES["none_set" if None in micro else "both_set"]
        yield message.format(section=section, key=key, needed=needed)


def _engines(batch: VerlBatch, num_gpus: int) -> Iterator[str]:
    engine = batch.rollout_tensor_parallel * batch.rollout_other_parallel
    if num_gpus % engine:
        yield f"rollout world_size: {num_gpus} is not divisible by infer_world_size: {engine}"


def _workers(batch: VerlBatch, num_gpus: int) -> Iterator[str]:
    """What the workers assert from 0.8 on."""
    if batch.dynamic != batch.rollout_dynamic:
        yield "assert self.config.actor.use_dynamic_bsz == self.config.rollout.log_prob_use_dynamic_bsz"
    for micro, key in ((batch.rollout_micro, "rollout.log_prob"), (batch.micro, "actor.ppo")):
        if not batch.dynamic and micro[1] is None:
            yield f"assert self.config.{key}_micro_batch_size_per_gpu is not None"
    yield from _engines(batch, num_gpus)
    ranks, mini_batch_size = num_gpus // batch.sequence_parallel, batch.mini_batch_size * batch.generations
    if ranks == 0 or mini_batch_size % ranks:
        yield f"Got {mini_batch_size=} and self.engine.get_data_parallel_size()={ranks}"


def _old_workers(batch: VerlBatch, num_gpus: int) -> Iterator[str]:
    """What they assert before 0.8."""
    ranks = max(num_gpus // batch.sequence_parallel, 1)
    mini, (micro, size) = batch.mini_batch_size * batch.generations // ranks, batch.micro
    if mini == 0:
        yield "ppo_mini_batch_size 0 should be larger than 0 after normalization"
    size = size if micro is None else max(micro // ranks, 1)
    if size is not None and mini % size:
        yield f"normalized ppo_mini_batch_size {mini} should be divisible by ppo_micro_batch_size_per_gpu {size}"
    yield from _engines(batch, num_gpus)
    completions = batch.train_batch_size * batch.generations
    if completions % ranks:
        yield f"only support equal chunk. Got size of DataProto {completions} and chunk {ranks}."


def verl_rules(launch: Launch, version: str | None = None) -> RunRules:
    """Apply verl's rules to a launch. `version` overrides the file's own and the default."""
    name, reason = common.choose_version(launch, version)
    number, settings = parse_version(name), Settings(launch)
    table = common.known_keys("verl", number)
    batch = _batch(settings, number, table)
    decides = frozenset(settings.used)
    # else a configuration of its own says how many
    per_node = settings.whole("trainer.n_gpus_per_node", 8) if launch.processes else None
    stops = [*_overrides(launch, number, table), *common.contradictions("verl", settings, number)]
    gpus = common.gpu_findings(replace(launch, processes_per_node=per_node), local_server=False)

    def start(num_gpus: int, changed: BatchSizes) -> Start:
        fields: dict[str, Any] = {_FIELDS[key]: value for key, value in changed.items()}
        return verl_start(replace(batch, **fields), num_gpus)

    return RunRules(
        version=name,
        version_reason=reason,
        sizes={key: getattr(batch, name) for key, name in _FIELDS.items()},
        decides=decides,
        start=start,
        usual_field="data.train_batch_size",
        sampling=f"by {settings.text(f'{_ROLLOUT}.name', 'vllm')} on the training GPUs, in turn with training",
        findings=(*settings.findings, *common.version_findings("verl", name), *stops, *gpus),
        blocked=next((finding.says for finding in stops if finding.says), None),
        foreign=_foreign(launch, is_release=bool(version or (launch.version and launch.version.added is not True))),
    )


def _foreign(launch: Launch, *, is_release: bool) -> str | None:
    """Why the program is not verl's: its module, or keys that no version has, unless a release of verl is pinned."""
    if launch.program not in (None, *_PROGRAMS):
        return f"{launch.program} is a program of its own, with rules and defaults that are not known here"
    if is_release or launch.program != VERL or any(unread.key == "(config)" for unread in launch.unread):
        return None
    tables = common.key_tables("verl").values()
    plain = (key for key, said in launch.settings.items() if _is_plain(key) and not said.added)
    own = [key for key in plain if not any(common.is_in(key, table) for table in tables)]
    shown = ", ".join(own[:2]) + (f" and {len(own) - 2} more" if len(own) > 2 else "")
    told = "a program of its own, or a mistake that --framework-version shows"
    return f"no version of verl has {shown}, so this is {told}" if own else None


def _batch(settings: Settings, version: Version, table: Keys) -> VerlBatch:
    sizes = {name: settings.whole(key, table[key]["default"]) for key, name in _FIELDS.items()}
    keys = {name: (key, f"{key}_per_gpu") for key, name in _MICRO_FIELDS.items()}
    micro: dict[str, Any] = {name: tuple(settings.whole(key, None) for key in both) for name, both in keys.items()}
    parallel = [settings.whole(f"{_ROLLOUT}.{name}_parallel_size", 1) for name in ("data", "pipeline_model")]
    dynamic = settings.flag(f"{_ACTOR}.use_dynamic_bsz")
    ulysses = f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    return VerlBatch(
        version=version,
        **sizes,
        **micro,
        dynamic=dynamic,
        rollout_dynamic=settings.flag(f"{_ROLLOUT}.log_prob_use_dynamic_bsz", dynamic),
        uses_reference=settings.flag(f"{_ACTOR}.use_kl_loss") or settings.flag("algorithm.use_kl_in_reward"),
        sequence_parallel=max(settings.whole(key, 1) for key in ulysses[: 1 + (version >= (0, 8))]),
        rollout_other_parallel=parallel[0] * parallel[1],
    )


def _is_plain(key: str) -> bool:
    """Whether Hydra looks a key up in verl's configuration, rather than in its own or in groups of files."""
    return "." in key and not {"@", "/"} & {*key} and not key.startswith("hydra.")


def _overrides(launch: Launch, version: Version, table: Keys) -> Iterator[Finding]:
    """Keys that Hydra refuses, and fields that the class of the policy loss does not have.

    Other entry points than verl's own have configurations of their own, whose keys are not known here.
    """
    sections = {key[:i] for key in table for i, letter in enumerate(key) if letter == "."}
    loss = f"{_ACTOR}.policy_loss."
    has_own = any(unread.key == "(config)" for unread in launch.unread)  # configuration, whose keys are not known
    is_copy = launch.version is not None and launch.version.added is True  # of verl, which may lack keys
    for key, said in launch.settings.items():
        known = key in table or key in sections
        field = key.removeprefix(loss)
        if key.startswith(loss) and not known and f"{loss}_target_" in table and "rollout_correction" not in field:
            says = _MESSAGES["no_field"].format(field=field)
            yield Finding("CHK006", key, f"its policy loss has no {field}", says=says)
        elif launch.program != VERL or has_own or not _is_plain(key):
            continue
        elif said.added == "+" and not is_copy and table.get(key, {}).get("default") is not None:
            says = f"Could not append to config. An item is already at '{key}'."
            yield Finding("CHK006", key, f"verl has {key}; + adds new keys", (f"{key}={said.value}",), says=says)
        elif not said.added and not known:
            text, nearest = common.unknown_key("verl", version, key, table)
            says = f"Could not override '{key}'. To append to your config use +{key}={said.value}"
            yield Finding("CHK006", key, text, (*nearest, f"+{key}"), says=says)
    unknown = {entry.key for entry in launch.unread} & {*ANY_SETTING, "(arguments)", ENGINE}
    if launch.program == VERL and "required" in table[ENGINE] and ENGINE not in launch.settings and not unknown:
        says = f"Missing mandatory value: {ENGINE}"
        yield Finding("CHK006", ENGINE, "verl has no default engine", (f"{ENGINE}=vllm",), says=says)
