"""A folder that is saved here, in several files, is one that vLLM starts from."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import tiny
from cohort.models import SaveOptions, save_policy
from cohort.rollout.engines.vllm.server import ServerProcess
from selection import mostly_slow
from serving import SECRET, SIZES, Server, options_for, serving_model, start


def experts() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, **SIZES, "vocab_size": tiny.VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 1}
    config = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.15
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    "kind", mostly_slow(["tied", "untied", "experts"], "untied", "experts", reason="read as untied")
)
def test_its_logprobs_are_the_models_own(tmp_path: Path, vllm_python: str, kind: str):
    model = experts() if kind == "experts" else serving_model(tie=kind == "tied")
    folder = tmp_path / "saved"
    save_policy(tiny.policy_of(model), tiny.make_tokenizer(), folder, save_options=SaveOptions(max_shard_bytes=50_000))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    process = ServerProcess(options_for(vllm_python, folder), secret=SECRET, log_file=tmp_path / "server.log")
    try:
        start(process)
        server = Server(process=process, tie=kind == "tied")
        server.assert_serves(model, None)
        server.close()
    finally:
        process.stop()
