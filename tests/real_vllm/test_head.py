"""What a server in bfloat16 rounds last: its logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cohort.models import Policy
from cohort.packing.micro_batches import collate
from cohort.records import TrainSequence
from cohort.rollout.engines.vllm.server import ServerProcess
from serving import SECRET, Server, options_for, random_prompt, serving_folder, serving_model, start


def headed_model(*, tie: bool, seed: int) -> Any:
    """A model in bfloat16 steps whose layers add nothing, so that all rounding is in the head."""
    model = serving_model(tie=tie, seed=seed)
    with torch.no_grad():
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return model.bfloat16().float().eval()


def differences(server: Server, model: Any) -> list[float]:
    """Between the server's logprobs and the trainer's, of some completions."""
    policy = Policy(model, device=torch.device("cpu"), compute_dtype=torch.bfloat16, pad_token_id=0)
    found = []
    for seed in range(4):
        prompt = random_prompt(20, seed=seed)
        (choice,) = server.generate(prompt, n=1, max_tokens=64, seed=seed, temperature=2.0)
        sequence = TrainSequence.single_turn(np.array(prompt), np.array(choice.token_ids), index=0, group=0)
        with torch.no_grad():
            micro_batch = collate([sequence], share_prompts=policy.shares_prompts)
            own, _ = policy.logprobs(micro_batch, temperature=2.0, entropy=False)
        found += (own - torch.tensor(choice.logprobs)).abs().tolist()
    return found


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_logits_are_not_rounded(tmp_path: Path, vllm_python: str, tie: bool):
    """Of weights that arrived after the start, and unlike those of a server with vLLM's own default."""
    folder = serving_folder(tmp_path / "model", tie=tie)
    means = {}
    for head in ("float32", "model"):
        overrides = {"hf_overrides": {"head_dtype": "model"}} if head == "model" else {}
        extra = {"kv_cache_memory_bytes": 64 << 20, **overrides}
        options = options_for(vllm_python, folder, dtype="bfloat16", extra=extra)
        process = ServerProcess(options, secret=SECRET, log_file=tmp_path / f"{head}.log")
        try:
            start(process)
            server = Server(process=process, tie=tie)
            model = headed_model(tie=tie, seed=1)
            server.publish(model, 1)
            means[head] = np.mean(differences(server, model))
            server.close()
        finally:
            process.stop()
    assert means["float32"] < means["model"] / 100
