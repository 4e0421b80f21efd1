"""The demos' base models, shipped as package data, and how to rebuild them (`cohort demo --rebuild-base`)."""

import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template

from cohort.config import Config
from cohort.demo.pretrain import build_model, warm_start
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import DemoTask, find_task
from cohort.demo.tokenizer import SPECIAL_TOKENS, train_tokenizer
from cohort.models import quiet_transformers
from cohort.processes.this_process import resume_gc
from cohort.records import Message
from cohort.trainer.without_training import evaluate_model

_NUM_TOKENIZER_PROBLEMS = 3000
_SEED = 0


def rebuild(task: str, out: Path | None) -> None:
    """Rebuild the base model of a task in `out`, or in place of the packaged one."""
    resume_gc()
    chosen = find_task(task)
    folder = out or chosen.base_path
    accuracy = build_base(chosen, folder)["greedy_accuracy"]
    problems = "held-out" if chosen.development is None else "development"
    print(f"written to {folder}; greedy accuracy on {problems} problems {accuracy:.1%}")


def build_base(task: DemoTask, out: Path) -> dict[str, float]:
    """Train the tokenizer and the base model and save both as a Hugging Face folder of about 1 MB.

    The folder is the same on every machine of the same kind with the same number of threads; elsewhere rounding may
    differ in the last digits.

    Returns:
        `greedy_accuracy` on 256 development problems (held-out ones if the task has none), and `pass_at_1` and
        `pass_at_8` at temperature 1 on 128 of them.
    """
    tokenizer = train_tokenizer(
        _tokenizer_texts(task), chat_template=task.chat_template, vocab_size=task.vocab_size, markers=task.markers
    )
    print(f"tokenizer: {len(tokenizer)} tokens")
    model = build_model(tokenizer, seed=_SEED)
    print(f"model: {model.num_parameters():,} parameters")
    rng, settings = random.Random(_SEED), task.warm_start
    warm_start(
        model,
        tokenizer,
        settings,
        demonstrations=[task.demonstration(p) for p in task.generate(_SEED, settings.num_clean, "train")],
        habits=[task.habit(p, rng) for p in task.generate(_SEED + 1, settings.num_habits, "train")],
        tools=task.tool_schemas,
    )
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    with quiet_transformers():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner may read
    results = _measure(task, out)
    print(", ".join(f"{name} {value:.3f}" for name, value in results.items()))
    return results


def _tokenizer_texts(task: DemoTask) -> list[str]:
    """Texts between special tokens; questions once each."""
    rng = random.Random(_SEED)
    texts: list[str] = []
    for problem in task.generate(_SEED, _NUM_TOKENIZER_PROBLEMS, "train"):
        texts += _texts(task, task.demonstration(problem))
        texts += [text for text in _texts(task, task.habit(problem, rng)) if text != problem.question]
    return texts


def _texts(task: DemoTask, conversation: Sequence[Message]) -> list[str]:
    rendered, _ = render_jinja_template(
        [list(conversation)], tools=list(task.tool_schemas) or None, chat_template=task.chat_template
    )
    pieces = re.split("|".join(map(re.escape, (*SPECIAL_TOKENS, *task.markers))), rendered[0])
    return [piece for piece in pieces if piece]


def _measure(task: DemoTask, base: Path) -> dict[str, float]:
    """Evaluate as the demo does: greedy accuracy, and pass@1 and pass@8 at temperature 1."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = demo_config(folder, task=task, base=base, seed=_SEED)
        write_data(folder, config, task=task, seed=_SEED)
        if task.development is not None:
            config = _changed(config, path=str(folder / "data" / "development.jsonl"))
        greedy = evaluate_model(config)
        sampled = evaluate_model(_changed(config, num_samples=8, temperature=1.0, max_prompts=128))
    return {
        "greedy_accuracy": greedy.accuracy,
        "pass_at_1": sampled.accuracy,
        "pass_at_8": sampled.metrics["eval/pass@8"],
    }


def _changed(config: Config, **eval_keys: object) -> Config:
    assert config.eval is not None
    return config.model_copy(update={"eval": config.eval.model_copy(update=eval_keys)})
