"""Build the base models that `cohort demo` ships as package data. Takes about 3 minutes.

    python tools/demo_model/build.py [--task words|tools|code] [--out FOLDER]

Without --out, the model of the package is replaced.
"""

import argparse
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template

import habits
from cohort.chat import tool_schema
from cohort.config import Config
from cohort.demo import tools
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import TASKS, DemoTask
from cohort.models import quiet_transformers
from cohort.records import Message
from cohort.trainer.without_training import evaluate_model
from pretrain import WarmStart, build_model, warm_start
from tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, TOOL_MARKERS, TOOLS_CHAT_TEMPLATE, train_tokenizer

_NUM_TOKENIZER_PROBLEMS = 3000
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the base model of a task is made."""

    demonstration: Callable[[Any], list[Message]]  # problem -> conversation that solves it
    habit: Callable[[Any, random.Random], list[Message]]  # problem -> conversation as the base model's
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    chat_template: str = CHAT_TEMPLATE
    vocab_size: int = 512
    markers: tuple[str, ...] = ()  # see `train_tokenizer`
    warm_start: WarmStart = field(default_factory=WarmStart)


RECIPES = {
    "words": Recipe(demonstration=habits.words_demonstration, habit=habits.words_habit),
    "tools": Recipe(
        demonstration=habits.tools_demonstration,
        habit=habits.tools_habit,
        tool_schemas=(tool_schema(tools.look_up),),
        chat_template=TOOLS_CHAT_TEMPLATE,
        vocab_size=640,
        markers=TOOL_MARKERS,
        warm_start=WarmStart(clean_steps=800),
    ),
    "code": Recipe(
        demonstration=habits.code_demonstration, habit=habits.code_habit, warm_start=WarmStart(clean_steps=700)
    ),
}


def main() -> None:
    """Build one model and print how good it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="words")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    folder = arguments.out or task.base_path
    accuracy = build_base(task, RECIPES[arguments.task], folder)["greedy_accuracy"]
    problems = "held-out" if task.development is None else "development"
    print(f"written to {folder}; greedy accuracy on {problems} problems {accuracy:.1%}")


def build_base(task: DemoTask, recipe: Recipe, out: Path) -> dict[str, float]:
    """Train the tokenizer and the base model and save both as a Hugging Face folder of about 1 MB.

    The folder is the same on every machine of the same kind with the same number of threads; elsewhere rounding may
    differ in the last digits.

    Returns:
        `greedy_accuracy` on 256 development problems (held-out ones if the task has none), and `pass_at_1` and
        `pass_at_8` at temperature 1 on 128 of them.
    """
    tokenizer = train_tokenizer(
        _tokenizer_texts(task, recipe),
        chat_template=recipe.chat_template,
        vocab_size=recipe.vocab_size,
        markers=recipe.markers,
    )
    print(f"tokenizer: {len(tokenizer)} tokens")
    model = build_model(tokenizer, seed=_SEED)
    print(f"model: {model.num_parameters():,} parameters")
    rng, settings = random.Random(_SEED), recipe.warm_start
    warm_start(
        model,
        tokenizer,
        settings,
        demonstrations=[recipe.demonstration(p) for p in task.generate(_SEED, settings.num_clean, "train")],
        habits=[recipe.habit(p, rng) for p in task.generate(_SEED + 1, settings.num_habits, "train")],
        tools=recipe.tool_schemas,
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


def _tokenizer_texts(task: DemoTask, recipe: Recipe) -> list[str]:
    """Texts between special tokens; questions once each."""
    rng = random.Random(_SEED)
    texts: list[str] = []
    for problem in task.generate(_SEED, _NUM_TOKENIZER_PROBLEMS, "train"):
        texts += _texts(recipe, recipe.demonstration(problem))
        texts += [text for text in _texts(recipe, recipe.habit(problem, rng)) if text != problem.question]
    return texts


def _texts(recipe: Recipe, conversation: Sequence[Message]) -> list[str]:
    rendered, _ = render_jinja_template(
        [list(conversation)], tools=list(recipe.tool_schemas) or None, chat_template=recipe.chat_template
    )
    pieces = re.split("|".join(map(re.escape, (*SPECIAL_TOKENS, *recipe.markers))), rendered[0])
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


if __name__ == "__main__":
    main()
