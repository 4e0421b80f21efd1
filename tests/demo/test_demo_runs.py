"""Runs of the demos, and what all of their tasks have. tests/display has what they print and gain."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import CODE, TASKS, TOOLS, WORDS, DemoTask
from runs import stop_after
from selection import slow


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_problems_and_longer_streams_extend_shorter_ones(task: str):
    generate = TASKS[task].generate
    for split in ("train", "heldout"):
        assert generate(3, 50, split) == generate(3, 80, split)[:50] != generate(4, 50, split)


@pytest.mark.parametrize(
    ("task", "num_tokens", "num_bytes"), [("words", 512, 3e6), ("tools", 644, 1e6), ("code", 512, 1e6)]
)
def test_base_is_small_and_ends_its_turns(task: str, num_tokens: int, num_bytes: float):
    path = TASKS[task].base_path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.vocab_size == len(tokenizer) <= num_tokens
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(file.stat().st_size for file in path.iterdir()) < num_bytes
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # weights are as readable as the rest


@pytest.mark.parametrize(
    ("task", "text"),
    [
        *((task, "Ärger, 你好, 🐐 don't 'll `` ...") for task in (WORDS, TOOLS, CODE)),
        (WORDS, "2*3=6\n6-5=1\n#### 1"),
        (WORDS, "Mia has 17 shells. A goat eats 5."),
        (WORDS, "  two  spaces , and a space before a comma\n\n\ttab 1 2  3"),
        (WORDS, "####24 #### 24 -7"),
        (TOOLS, "<tool_call>a</tool_call> 12 "),
        (TOOLS, '{"name": "look_up"}\n#### 24'),
        (CODE, "def f(n):\n    return n"),
        (CODE, "\tmax( n,7 )-12\n\n"),
    ],
)
def test_tokens_decode_to_the_same_text(task: DemoTask, text: str):
    tokenizer = AutoTokenizer.from_pretrained(task.base_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@slow("a dozen steps of the tools demo; test_turn_runs has a smaller run")
def test_a_resumed_run_with_tools_has_the_same_trajectories(tmp_path: Path):
    """Interrupted after step 5, resumed from the checkpoint of step 4."""
    configs = {}
    for name in ("whole", "parts"):
        config = demo_config(tmp_path / name, task=TOOLS, seed=0)
        changes = {"train": {"steps": 8, "prompts_per_step": 8}, "run": {"checkpoint_every": 4}, "eval": {"every": 0}}
        sections = {key: getattr(config, key).model_copy(update=update) for key, update in changes.items()}
        configs[name] = config.model_copy(update=sections)
        write_data(tmp_path / name, configs[name], task=TOOLS, seed=0)
    cohort.train(configs["whole"])
    with pytest.raises(KeyboardInterrupt):
        cohort.train(configs["parts"], display=stop_after(5))
    cohort.train(configs["parts"], resume=True)
    for step in range(1, 9):
        whole, parts = (
            pq.read_table(tmp_path / name / "completions" / f"step-{step:06d}.parquet") for name in ("whole", "parts")
        )
        assert max(len(calls) for calls in whole["calls"].to_pylist()) > 1
        for column in ("prompt_id", "sequence_token_ids", "loss_mask", "reward", "advantage"):
            assert whole[column].to_pylist() == parts[column].to_pylist(), (step, column)
