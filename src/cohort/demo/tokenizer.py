"""The demo's tokenizer: byte-level BPE with at most 512 tokens, and one token per digit."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, "<|system|>", "<|user|>", "<|assistant|>", END)

# <|user|>question<|end|><|assistant|>completion<|end|>, any number of turns
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) -}}
    {%- endif -%}
    {{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

# A word includes the space before it, and before a number also the one after it: " has |1|7| shells". Each digit is its
# own token, and no token is wasted on a lone space.
_PIECES = r"[0-9]| ?[A-Za-z]+(?: (?=[0-9]))?| ?[^\sA-Za-z0-9]+(?: (?=[0-9]))?|\s+"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer. Every byte is in the vocabulary, so any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
