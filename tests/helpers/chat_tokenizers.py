"""Small tokenizers with the chat templates and control tokens of real models."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Tokens = tuple[list[str], list[str]]  # special control tokens, then other added tokens

FIXTURES = Path(__file__).parent.parent / "chat" / "templates"

# Control tokens of the models, as their tokenizers have them.
CHATML: Tokens = (["<|im_end|>", "<|im_start|>", "<|endoftext|>"], ["<tool_call>", "</tool_call>"])
QWEN3: Tokens = (CHATML[0], [*CHATML[1], "<think>", "</think>", "<tool_response>", "</tool_response>"])
LLAMA3: Tokens = (
    ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
    [],
)
GLM: Tokens = (
    ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
)
GPT_OSS: Tokens = (
    ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"],
    [],
)
GEMMA: Tokens = (["<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>"], [])
MISTRAL: Tokens = (
    [
        *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    [],
)

# Pairs of characters that are merged, so that a text has more than one tokenization.
_MERGES = [
    ("t", "o"),
    ("e", "r"),
    ("Ġ", "t"),
    ("to", "o"),
    ("too", "l"),
    ("a", "n"),
    ("1", "2"),
    ("}", "}"),
    ("<", "/"),
]


def make_tokenizer(template: str, tokens: Tokens) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges. The first special token ends turns; the second is the BOS token."""
    special, other = tokens
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    bpe = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, _MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in other])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], bos_token=special[1])
    tokenizer.chat_template = template
    return tokenizer


@cache
def fixture_template(name: str) -> str:
    """A small template of tests/chat/templates."""
    return (FIXTURES / f"{name}.jinja").read_text(encoding="utf-8")


def trl_templates() -> dict[str, str]:
    """The chat templates that TRL ships, by name, read without importing TRL."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, whose chat templates this test reads, is not installed")
    files = (Path(spec.origin).parent / "chat_templates").glob("*.jinja")
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(files)}


def trl_template(name: str) -> str:
    """A chat template that TRL ships."""
    return trl_templates()[name]
