"""Time and memory of one training step of models that other trainers pad: padded rows, TRL's step, shared prompts.

    python bench/windows.py [--model gpt_oss|qwen3_5] [--prompts 64 512 2048] [--completions 64 256 1024]
                            [--repeats 3] [--quick]

Forward and backward of one group of 8 completions after a prompt, without the optimizer. TRL's step is that of
`bench/baselines.py`: padded rows, and the head and loss of TRL 1.16. Needs the extra `bench` for it.
The models have hidden size 512 and the shape of

- GPT-OSS: 2 layers, of which the first has a window of 128 tokens, sinks, 8 query and 2 key heads of 64, and 8 experts
  of which a token has 2;
- Qwen3.5: 4 layers, of which the first three have the gated delta rule with 2 key and 4 value heads of 128, and the
  last has attention with 2 query heads and 1 key head of 256.

Every measurement is in a process of its own with two threads, all ways in turn; of `--repeats` rounds the least
counts. Memory is the peak resident set above the loaded weights, gradients included. All ways must give the same
gradient, or nothing is reported.
"""

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3_5TextConfig

from baselines import trl_fused
from cohort.models import quiet_transformers
from cohort.records import TrainSequence
from harness import (
    disagreement,
    do_job,
    forward_backward,
    limit_memory,
    load,
    machine,
    make_engine,
    make_group,
    markdown,
    measure,
    run_apart,
    sketch,
)

VOCABULARY = 32_768
SAME_GRADIENT = 1e-4
OWN_ATTENTION = {"gpt_oss": "eager", "qwen3_5": "sdpa"}
WAYS = {"padded": "padded", "trl": "TRL 1.16", "shared": "shared prompts"}


def config_of(model: str, hidden: int) -> PreTrainedConfig:
    """The config of a model."""
    if model == "qwen3_5":
        return Qwen3_5TextConfig(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=4,
            num_attention_heads=max(1, hidden // 256),
            num_key_value_heads=1,
            head_dim=256,
            linear_num_key_heads=max(1, hidden // 256),
            linear_num_value_heads=hidden // 128,
            vocab_size=VOCABULARY,
            pad_token_id=0,
            eos_token_id=1,
        )
    return GptOssConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        eos_token_id=1,
    )


def write_model(folder: Path, config: PreTrainedConfig) -> None:
    """A model folder of random weights."""
    torch.manual_seed(0)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):  # states that decay as fast as random ones leave no gradient but rounding
                    parameter.fill_(-4.0)
        model.save_pretrained(folder)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One way at one length of the prompt."""
    torch.set_num_threads(2)
    limit_memory()
    policy = load(job["folder"])
    assert policy.layout == "shared", policy.traits.reason
    way, sequences = job["way"], make_group(job["prompt_tokens"], job["completion_tokens"], VOCABULARY)
    if way != "shared":
        policy.model.set_attn_implementation(job["own"])
    if way == "trl":

        def step(group: list[TrainSequence] = sequences) -> None:
            trl_fused(policy.model, group)
    else:
        policy.traits = replace(policy.traits, layout=way)
        engine = make_engine(policy, micro_batch_tokens=1 << 30)

        def step(group: list[TrainSequence] = sequences) -> None:
            forward_backward(engine, group)

    tiny = make_group(8, [4, 6], VOCABULARY)
    measured = measure(step, lambda: policy.model.zero_grad(set_to_none=True), lambda: step(tiny))
    return {**measured, "gradient": sketch(policy.model)}


def run_point(job: dict[str, Any], repeats: int) -> list[list[str]]:
    """The rows of one prompt's and completions' length; none where a way was not measured, which is said."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for way in list(WAYS) * repeats:
        found[way].append(run_apart(__file__, {**job, "way": way}))
    for way in WAYS:
        if skipped := [r["skipped"] for r in found[way] if "skipped" in r]:
            print(f"P={job['prompt_tokens']}, {WAYS[way]}: {skipped[0]}", flush=True)
            del found[way]
    if "shared" not in found:
        return []
    for way, (first, *_) in found.items():
        error, whose = disagreement(found["shared"][0]["gradient"], first["gradient"])
        if error > SAME_GRADIENT:
            raise SystemExit(f"P={job['prompt_tokens']}: the gradients of {way} differ: {whose} by {error:.1g}")
    least = {way: [min(r[key] for r in rs) for key in ("peak_bytes", "wall_s", "seconds")] for way, rs in found.items()}
    rows = []
    for way, (peak, wall, seconds) in least.items():
        cells = [f"{peak / 2**20:,.0f} MiB", f"{wall:.2f} s", f"{seconds:.2f} s"]
        cells += [f"{number / own:.1f}x" for number, own in zip((peak, wall, seconds), least["shared"], strict=True)]
        rows.append([f"{job['prompt_tokens']:,}", f"{job['completion_tokens'][0]:,}", WAYS[way], *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=OWN_ATTENTION, default="gpt_oss")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048], help="tokens")
    parser.add_argument("--completions", type=int, nargs="+", default=[256], help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(work, args.job)
        return
    group, hidden = 8, 512
    if args.quick:
        args.prompts, args.completions, args.repeats, group, hidden = [64], [256], 1, 2, 128
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config_of(args.model, hidden))
        job = {"folder": folder, "own": OWN_ATTENTION[args.model]}
        for length, prompt in itertools.product(args.completions, args.prompts):
            rows += run_point({**job, "prompt_tokens": prompt, "completion_tokens": [length] * group}, args.repeats)
            print(rows[-len(WAYS) :], flush=True)
    print(f"\n{machine('trl')}; two threads, float32, least of {args.repeats}\n")
    header = ["prompt tokens", "completion tokens", "computed as", "memory", "time", "processor time"]
    print(markdown([*header, "memory of shared", "time of shared", "processor time of shared"], rows))


if __name__ == "__main__":
    main()
