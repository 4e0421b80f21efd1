"""Writes `docs/check.md` from the table of findings: `python -m cohort.check.docs > docs/check.md`."""

from cohort.check.findings import RULES

_INTRO = """# Checking and converting configurations

Made from the table of findings in `src/cohort/check/findings.py` by `make docs`; do not edit it here.

`cohort check FILE...` judges a configuration before it costs anything: without GPUs, models or torch, and without
running or fetching anything that the files name. `cohort convert FILE > run.yaml` makes a Cohort configuration of it.

| file | read as |
| --- | --- |
| YAML with `model`, `data`, `rewards` | Cohort |
| YAML with `num_generations`, `reward_funcs` or another key of GRPO | a recipe of TRL, of Open-R1 if a key is its own |
| Python with `GRPOConfig(...)`, or a class made from it | TRL, as a syntax tree: literals, constants, arithmetic |
| shell with `trl grpo`, or a launcher and a GRPO script or option | TRL or Open-R1, with recipe and accelerate file |
| shell with `swift rlhf` or `megatron rlhf`, YAML, both with `rlhf_type` `grpo` | ms-swift |
| shell with `actor_rollout_ref.key=value`, YAML with `actor_rollout_ref` | verl |

- **Versions.** Rules are those of TRL 0.15 to 1.16 (`--trl-version`, else `trl==...` in the file, else 0.18.0 for
  Open-R1, which pins it, else 1.16; of another version those of the nearest, CHK020), of ms-swift 4.6 and of verl 0.9.
- **GPUs.** `--launch` says how the files are started, where they do not:
  `--launch "accelerate launch --config_file zero3.yaml --num_processes 7"`,
  `--launch "sbatch --nodes=2 slurm/train.slurm"`, `--launch "NPROC_PER_NODE=4 swift rlhf"`. `--world-sizes 1,2,3`
  chooses the numbers of training processes that the table has.
- **Shell** is read and not run: continued lines, quotes, variables assigned in the file, `${X:-default}`, `$((...))`,
  functions with their arguments, `bash -c '...'`, and the nodes and GPUs of `#SBATCH` lines. What only a running shell
  knows is named (CHK004), and the rest is checked. `sbatch slurm/train.slurm --model M --task grpo --config C` is read
  as Open-R1's script does it, `--args` included; of that script itself the arguments are named that it waits for.
- **Python** takes names that are assigned once, outside of branches. The model may come from `from_pretrained`, its
  quantization from `BitsAndBytesConfig`; what a command line or a caller decides is named (CHK004).
- **Several runs** of a file are all judged, and so is every `GRPOConfig(...)`; `--json` has those after the first in
  `other_runs`. `cohort convert` takes the first.
- **Exit codes.** 0: no errors (warnings do not count); 1: at least one error; 2: the command itself is wrong. So it
  fits pre-commit and CI: `cohort check recipes/*.yaml`.
- **A refusal that does not depend on numbers** (CHK008) stands in the table at every number of GPUs that would start
  otherwise.
- **`--json`** prints a list with one object per file: `file`, `framework`, `version`, `starts` (by number of training
  processes: `starts`, `message`, `generation_batch_size`, `steps_per_generation`) and `findings` (`code`, `severity`,
  `field`, `message`, `nearest`). `starts` is empty where a number that decides could not be read;
  where only evaluation's could not, training is judged.
- **Nearest values** change one number each (batch size, accumulation, generations, GPUs; two where no single one
  helps) and were tried by the same rule, with what nobody has set where that is refused too. The distance is that of
  the logarithms.
- **Memory** is judged where the GPU and the model are known: `--gpu 4090` or `--gpu-memory 24GB`, or Slurm's options
  in the file; a folder with config.json, or a common model by its id. Without a GPU only what the largest known one
  does not hold is told. For Cohort `cohort plan` is asked, for the
  processes of the file or of `--launch`, or for as many GPUs as a single number in `--world-sizes`. For the
  others the phases of training and, with an engine on the same GPUs that sleeps, of sampling are added up: the state
  in its sharding (accelerate's file, `deepspeed`, `fsdp`, verl's `fsdp_config`; what is offloaded left out),
  activations and logits of rows of full length, and vLLM's share. Defaults are those of TRL 0.15 to 1.16, ms-swift
  4.6.0 (LoRA of rank 8 on all linear layers, checkpointing, vLLM's share 0.9) and verl 0.9.1 (FSDP of float32 weights,
  the reference in host memory). The finding says what is assumed (`assumes ...`): bfloat16 weights in shards have
  float32 master weights and moments; where nothing says how processes share the state, ZeRO-3; logits are bfloat16
  under DeepSpeed and in verl, float32 under accelerate's autocast, in three copies (none for Liger and TRL 1.16; one
  in verl, where flash-attn's gradient takes their place). verl's `param_offload` and `optimizer_offload` help while
  sampling only: both come back to train. Not counted: Megatron, other tuners and quantizations than LoRA and
  bitsandbytes', quantized experts, critics, verl's passes for logprobs.
- **Conversion** takes adapters (`use_peft`, `LoraConfig(...)`, ms-swift's tuner, verl's `lora_rank`) to
  `model.adapter`, `optim` to `optim.name`, and weights that bitsandbytes quantizes to `model.quantization`, unless
  several processes train or vLLM samples. What cannot be read or has no equivalent is a comment, and so is what Cohort
  refuses.
- **Not checked**: data and rewards; keys of verl outside `data`, `actor_rollout_ref`, `algorithm` and `trainer`, and
  those of its YAML files.

## Findings

Codes keep their meaning.

| code | severity | finding | explanation |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The whole page."""
    rows = [f"| `{code}` | {rule.severity} | {rule.title} | {rule.explanation} |" for code, rule in RULES.items()]
    return _INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(render(), end="")
