"""The tokenizers of the demos: byte-level BPE with a few hundred tokens, and one token per digit."""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, ASSISTANT = "<|pad|>", "<|end|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, "<|system|>", "<|user|>", ASSISTANT, END)
TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

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

# The same with tools: their signatures first, calls as Hermes models write them, and results between turns.
TOOLS_CHAT_TEMPLATE = """\
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- for tool in tools -%}
        {%- set function = tool.function -%}
        {{- function.name ~ '(' ~ function.parameters.properties | join(', ') ~ '): ' ~ function.description -}}
        {{- '' if loop.last else '\\n' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<tool_response>' ~ message.content ~ '</tool_response>' -}}
    {%- elif message.role in ('system', 'user', 'assistant') -%}
        {{- '<|' ~ message.role ~ '|>' ~ (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = {'name': call.function.name, 'arguments': call.function.arguments} -%}
            {{- '<tool_call>' ~ function | tojson ~ '</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- else -%}
        {{- raise_exception("the roles are system, user, assistant and tool, not " ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

# A word includes the space before it, and before a number also the one after it: " has |1|7| shells". Each digit is its
# own token, and no token is wasted on a lone space.
_PIECES = r"[0-9]| ?[A-Za-z]+(?: (?=[0-9]))?| ?[^\sA-Za-z0-9]+(?: (?=[0-9]))?|\s+"


def train_tokenizer(
    texts: Iterable[str], *, chat_template: str, vocab_size: int, markers: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer. Every byte is in the vocabulary, so any text round-trips.

    Args:
        texts: texts without special tokens and markers.
        chat_template: template of conversations.
        vocab_size: maximum number of tokens, without markers.
        markers: more strings that are single tokens, but part of the text.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
