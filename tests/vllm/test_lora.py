"""An adapter travels alone, and is what a server samples with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from serving import (
    LONG_PROMPT,
    Server,
    largest_difference,
    models,
    options_for,
    random_prompt,
    serving_folder,
    serving_model,
    start,
)

from cohort.rollout.vllm.adapter import publish_adapter
from cohort.rollout.vllm.api import ServerError
from cohort.rollout.vllm.server import ServerProcess


def adapted(seed: int) -> Any:
    """The served model with a random adapter that matters."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(serving_model(tie=True), config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def test_completions_are_those_of_the_adapter_that_was_published_last(tmp_path: Path, vllm_python: str):
    folder = serving_folder(tmp_path / "model", tie=True)
    process = ServerProcess(options_for(vllm_python, folder, lora_rank=4), log_file=tmp_path / "server.log")
    try:
        start(process)
        server = Server(process=process, tie=True)
        assert models(process.url) == ["policy-base"]
        with pytest.raises(ServerError, match="policy"):  # no adapter, no policy
            server.generate(random_prompt(5), n=1, max_tokens=2)
        for version in (1, 2):
            model = adapted(version)
            assert publish_adapter([server.api], model, tmp_path / "adapters", version) == {}
            server.assert_serves(model, version)
            assert [path.name for path in (tmp_path / "adapters").iterdir()] == [f"version-{version}"]
        prompt = random_prompt(LONG_PROMPT)
        (choice,) = server.generate(prompt, n=1, max_tokens=12, seed=3)
        assert largest_difference(adapted(1), prompt, choice) > 0.1

        class Broken:
            def save_pretrained(self, path: Path) -> None:
                path.mkdir()

        (error,) = publish_adapter([server.api], Broken(), tmp_path / "adapters", 3).values()
        assert "/v1/load_lora_adapter" in str(error)
        publish_adapter([server.api], adapted(4), tmp_path / "adapters", 4)
        server.assert_serves(adapted(4), 4)
        server.close()
    finally:
        process.stop()
