"""Adapters of the tests: made by peft itself, with random weights that matter."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

# Plain LoRA on everything in the layers; weights as magnitude and direction; the head and the embedding.
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"targets": "all-linear", "rank": 4, "alpha": 6},
    "dora": {"targets": ["q_proj", "v_proj", "down_proj"], "rank": 3, "alpha": 3, "dora": True},
    "outer": {"targets": ["embed_tokens", "lm_head", "up_proj"], "rank": 5, "alpha": 2, "rslora": True},
}
_NAMES = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "rslora": "use_rslora", "dora": "use_dora"}


def save_adapter(folder: Path, base: str, *, seed: int, **kind: Any) -> str:
    """A folder as peft saves it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", **{_NAMES.get(key, key): value for key, value in kind.items()})
    wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return str(folder)


def peft_model(base: str, adapter: str | None, *, dtype: torch.dtype = torch.float64) -> Any:
    """The model with the adapter as peft loads them, in one precision; only the adapter is trained."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).base_model.model
    return model.to(dtype)


def adapter_names(model: Any) -> dict[str, str]:
    """peft's name in a file of each parameter of an adapter, by its name in the model."""
    names = (name for name, _ in model.named_parameters() if "lora_" in name)
    return {n: "base_model.model." + n.replace(".default", "").replace("vector.weight", "vector") for n in names}
