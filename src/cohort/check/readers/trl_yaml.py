"""TRL's and Open-R1's YAML recipes."""

import re
from functools import lru_cache
from pathlib import Path

from cohort.check.findings import Finding
from cohort.check.launch import Framework, Launch, Said
from cohort.check.readers.launcher import sharding_of
from cohort.check.readers.yaml_tree import YamlTree, read_yaml_tree

SIGNS = (  # keys that TRL has for GRPO and not for other ways of training
    "num_generations",
    "reward_funcs",
    "max_completion_length",
    "generation_batch_size",
    "steps_per_generation",
    "reward_weights",
    "scale_rewards",
    "epsilon_high",
    "num_iterations",
    "vllm_mode",
)
_OPEN_R1_ONLY = (
    "benchmarks callbacks chat_template code_eval_scoring_mode code_eval_test_batch_size code_language "
    "code_provider cosine_max_len cosine_max_value_correct cosine_max_value_wrong cosine_min_value_correct "
    "cosine_min_value_wrong dataset_mixture dataset_prompt_column e2b_router_url ioi_provider max_completion_len "
    "morph_router_url overwrite_hub_revision parallel_code_exec_per_proc push_to_hub_revision "
    "repetition_max_penalty repetition_n_grams soft_punish_cache system_prompt wandb_run_group"
)
OPEN_R1_ONLY = frozenset(_OPEN_R1_ONLY.split())  # keys of Open-R1 that TRL does not have

cached_tree = lru_cache(maxsize=8)(read_yaml_tree)


def read(path: Path, text: str) -> Launch | None:
    """A recipe for GRPO, or None where the text is not one.

    Raises:
        ValueError: not valid YAML.
    """
    tree = cached_tree(text)
    signs = [key for key in SIGNS if tree and key in tree.values]
    if tree is None or not signs:
        return None
    special = sorted(OPEN_R1_ONLY & set(tree.values))
    return Launch(
        framework="open-r1" if special else "trl",
        form="yaml",
        reason=f"YAML with {special[0]}, a key of Open-R1" if special else f"YAML with {', '.join(signs)}",
        settings=nested_once(tree),
        sharding=sharding_of(tree.values, path.parent),
        version=pinned_version(text),
        findings=duplicates(tree),
    )


def nested_once(tree: YamlTree) -> dict[str, Said]:
    """The settings with one level of keys: what is nested (`model_init_kwargs`) stays one value."""
    flat = {key: said for key, said in tree.values.items() if "." not in key}
    for key, said in tree.values.items():
        if "." in key:
            flat.setdefault(key.split(".")[0], Said({}, said.where)).value[key.split(".", 1)[1]] = said.value
    return flat


def duplicates(tree: YamlTree) -> tuple[Finding, ...]:
    """A key that is there twice: YAML readers keep the last one."""
    return tuple(
        Finding("CHK005", key, f"{key} is there twice; the value on line {line} counts and the earlier one is dropped")
        for key, line in tree.twice
    )


def pinned_version(text: str) -> Said | None:
    """`trl==0.18.0`, anywhere in the text."""
    match = re.search(r"\btrl(?:\[[^\]\n]*\])?\s*==\s*(\d+(?:\.\d+)+)", text)
    return Said(match[1], f"line {text.count(chr(10), 0, match.start()) + 1}") if match else None


def framework_of(settings: dict[str, Said]) -> Framework:
    """Open-R1 where a key of its own is there."""
    return "open-r1" if OPEN_R1_ONLY & set(settings) else "trl"
