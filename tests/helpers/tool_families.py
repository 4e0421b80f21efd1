"""Families of models that call tools: templates, how a turn is written, and replies with what must come of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import call_syntaxes as syntaxes
from call_syntaxes import CATS, Calls, Syntax
from chat_tokenizers import Tokens, fixture_template, make_tokenizer
from cohort.chat import ChatTemplate, ResponseParser, tool_schema
from cohort.records import FinishReason, Message

Outcome = Literal["answer", "calls", "malformed", "cut off"]


def search(query: str, limit: int = 3) -> str:
    """Search the web.

    Args:
        query: what to look for
        limit: maximum number of results
    """
    return query * limit


def note(text: str, tags: list[str] | None = None, meta: dict | None = None) -> str:
    """Take a note.

    Args:
        text: what to note
        tags: words to find it by
        meta: anything else
    """
    return text


def now() -> str:
    """Say what time it is."""
    return "noon"


TOOLS = [tool_schema(function) for function in (search, note, now)]
USER: Message = {"role": "user", "content": "find cats"}

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'|｜]+[|｜]?>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]+\]|\[\|[a-z]+\|\]|<SPECIAL_\d+>|\]~!b\[|\]~b\]|\[e~\[|"
    r"<seed:[be]os>|</?s>|<(?:start|end)_of_turn>|<(?:start|end)_function_[a-z]+>|<escape>|</longcat_s>"
)
_OTHER = re.compile(r"</?(?:seed:|minimax:|longcat_)?(?:think|tool_calls?|tool_response|arg_key|arg_value|TOOLCALL)>")


@dataclass(frozen=True, kw_only=True)
class ToolFamily:
    """A chat template with a way to think, and what models write in it."""

    name: str
    syntax: Syntax
    template: str = ""  # name of its file, if it is not the family's
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    end: str = "<|im_end|>"  # what a model ends an answer with
    end_of_calls: str | None = None  # and a turn of calls
    bos: str = "<s>"
    other_tokens: tuple[str, ...] = ()  # special tokens that the template does not write
    thought: tuple[str, str] | None = None  # what the model writes around a thought
    content: str = "{}"  # and around an answer
    glue: str = ""  # between text and calls
    # Whether the template changes what was sampled: after calls, further calls, an answer and a user message.
    rewrites: tuple[bool, bool, bool] = (False, False, False)
    parser: str = ""  # vLLM's

    def reply(self, thought: str, content: str, calls: Calls) -> str:
        """A turn as the model was trained to write it, with its end."""
        return self.turn(thought, content, self.syntax.write(calls) if calls else "")

    def turn(self, thought: str, content: str, calls: str) -> str:
        if self.syntax is syntaxes.HARMONY:
            return _harmony_turn(thought, content, calls)
        start, end = self.thought or ("", "")
        # where the prompt has opened the thought, it must be closed
        text = f"{start}{thought}{end}" if thought or (self.thought and not start) else ""
        said = self.content.format(content) if content else ""
        glue = self.glue if content and calls else ""
        return text + said + glue + calls + (self.end if not calls or self.end_of_calls is None else self.end_of_calls)

    def without_control_tokens(self, text: str) -> list[str]:
        """What stands between control tokens."""
        return re.split("|".join(map(re.escape, self.tokens[0])), text)

    @cached_property
    def tokens(self) -> Tokens:
        """The control tokens, of which the first ends turns, and the other added tokens."""
        calls = self.syntax.write([CATS]) + " ".join(self.syntax.malformed)
        text = " ".join([fixture_template(self.template or self.name), calls, *(self.thought or ()), self.content])
        ends = [self.end, self.bos, *filter(None, [self.end_of_calls]), *self.other_tokens]
        special = dict.fromkeys([*ends, *_SPECIAL.findall(text)])
        return list(special), [token for token in dict.fromkeys(_OTHER.findall(text)) if token not in special]


def _harmony_turn(thought: str, content: str, calls: str) -> str:
    parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
    if content:
        channel = "commentary" if calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{content}" + ("<|end|>" if calls else "<|return|>"))
    return "<|start|>assistant".join([*parts, *filter(None, [calls])])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reply and what must come of it."""

    name: str
    text: str  # what the model samples after the generation prompt
    outcome: Outcome
    content: str | None = None  # None: whatever; the text of malformed calls belongs to it
    thought: str | None = ""
    calls: Calls = ()
    finish: FinishReason = "stop"
    quoted: str = ""  # words of the model that the error repeats


VALUES: dict[str, Calls] = {
    "one call": [CATS],
    "two calls": [CATS, ("search", {"query": "too lazy"})],
    "nested": [("note", {"text": "x", "tags": ["a", "b c"], "meta": {"a": {"b": [1, -2.5, True, False]}, "c": {}}})],
    "braces in a string": [("note", {"text": 'if (a[0] == "}") { return "]"; } // ), {"'})],
    "unicode": [("note", {"text": "Größe 猫 🐈‍⬛ ½\n\n\ttab \\ back, 'one'"})],
    "no arguments": [("now", {})],
    "like other types": [("search", {"query": "12", "limit": 12}), ("note", {"text": "true"})],
}


def cases(family: ToolFamily) -> list[Case]:
    """At least twelve replies of each family."""
    syntax, found = family.syntax, []
    inside = {"end in a string": [("note", {"text": f"a {syntax.inside} b"})]} if syntax.inside else {}
    for name, calls in {**VALUES, **inside}.items():
        if syntax.single and len(calls) > 1:
            calls = calls[:1]
        found.append(Case(name=name, text=family.reply("", "", calls), outcome="calls", calls=calls, content=""))
    found.append(Case(name="answer", text=family.reply("", "Two.", []), outcome="answer", content="Two."))
    if not syntax.alone:
        text = family.reply("", "Let me see.", [CATS])
        found.append(Case(name="text before", text=text, outcome="calls", content="Let me see.", calls=[CATS]))
    for number, (text, calls) in enumerate(syntax.also, start=1):
        reply = family.turn("", "", text)
        found.append(Case(name=f"other spelling {number}", text=reply, outcome="calls", calls=calls, content=""))
    if syntax is syntaxes.HARMONY:
        text = "<|channel|>commentary<|message|>Two.<|end|>"
        found.append(Case(name="commentary", text=text, outcome="answer", content="Two."))
    for number, text in enumerate(syntax.malformed, start=1):
        quoted = max(family.without_control_tokens(text), key=len).strip()
        reply = family.turn("", "", text)
        found.append(Case(name=f"malformed {number}", text=reply, outcome="malformed", quoted=quoted))
    whole = family.reply("", "", [CATS])
    found.append(
        Case(name="cut", text=whole[: whole.index("cats") + 2], outcome="cut off", finish="length"),
    )
    return found + (_thoughts(family, family.thought[0]) if family.thought else [])


def _thoughts(family: ToolFamily, start: str) -> list[Case]:
    # in harmony, a call's control tokens end the thought
    call = "to=functions.search" if family.syntax is syntaxes.HARMONY else family.syntax.write([CATS])
    inside = f"perhaps {call} or not"
    kept = "".join(family.without_control_tokens(inside))  # as in all messages
    unended = start + "why"
    return [
        Case(name="thought and call", text=family.reply("why", "", [CATS]), outcome="calls", thought="why",
             calls=[CATS], content=""),
        Case(name="thought, text and call", text=family.reply("why\nnot", "Look.", [CATS]), outcome="calls",
             thought="why\nnot", calls=[CATS], content="Look."),
        Case(name="thought and answer", text=family.reply("why", "Two.", []), outcome="answer", thought="why",
             content="Two."),
        Case(name="thought without end", text=unended + family.end, outcome="answer", thought="why", content=""),
        Case(name="cut thought", text=unended, outcome="answer", finish="length", thought="why", content=""),
        Case(name="call in a thought", text=family.reply(inside, "Two.", []), outcome="answer", content="Two.",
             thought=kept),
        Case(name="call in a thought without end", text=start + inside + family.end, outcome="answer", content="",
             thought=kept),
        Case(name="malformed in a thought", text=family.reply(family.syntax.malformed[0].replace("<|call|>", ""),
             "Two.", []), outcome="answer", content="Two.", thought=None),
    ]  # fmt: skip


def chatml(name: str, syntax: Syntax = syntaxes.HERMES, **kwargs: Any) -> ToolFamily:
    return ToolFamily(name=name, syntax=syntax, bos="<|im_start|>", **{"glue": "\n", **kwargs})


DROPS = (False, False, True)  # thoughts, once a user message follows
ALWAYS = (True, True, True)
FIRST = (True, False, False)  # there is no thought after a tool's result
OFF = {"enable_thinking": False}
THINK = ("<think>\n", "\n</think>\n\n")
OPENED = ("", "\n</think>\n\n")  # by the prompt
LLAMA_BOS = {"end": "<|eot_id|>", "bos": "<|begin_of_text|>", "other_tokens": ("<|python_tag|>", "<|eom_id|>")}
LLAMA4_BOS = {"end": "<|eot|>", "bos": "<|begin_of_text|>", "other_tokens": ("<|python_tag|>", "<|eom|>")}
GLM_ENDS = {"end": "<|user|>", "end_of_calls": "<|observation|>", "bos": "<|endoftext|>"}
DEEPSEEK = {"end": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>"}
COHERE_ENDS = {"end": "<|END_OF_TURN_TOKEN|>", "bos": "<BOS_TOKEN>"}
MISTRAL_ENDS = {"end": "</s>", "bos": "<s>"}
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
COHERE_THOUGHT = ("<|START_THINKING|>", "<|END_THINKING|>")

FAMILIES = [
    chatml("qwen2_5", parser="hermes"),
    chatml("qwen3", thought=THINK, rewrites=DROPS, parser="hermes"),
    chatml("qwen3_off", template="qwen3", kwargs=OFF, rewrites=ALWAYS),
    chatml("qwen3_instruct_2507"),
    chatml("qwen3_thinking_2507", thought=OPENED, rewrites=DROPS),
    chatml("qwq", thought=OPENED, rewrites=ALWAYS),
    chatml("qwen3_coder", syntaxes.XML, parser="qwen3_xml"),
    chatml("qwen3_5", syntaxes.XML, thought=OPENED, glue="\n\n", rewrites=DROPS, parser="qwen3_xml"),
    chatml("qwen3_5_off", syntaxes.XML, template="qwen3_5", kwargs=OFF, glue="\n\n", rewrites=DROPS),
    chatml("qwen3_5_small", syntaxes.XML, glue="\n\n", rewrites=DROPS),
    chatml("qwen3_5_small_on", syntaxes.XML, template="qwen3_5_small", kwargs={"enable_thinking": True}, thought=OPENED,
           glue="\n\n", rewrites=DROPS),
    chatml("qwen3_5_think", syntaxes.XML, thought=OPENED, glue="\n\n", rewrites=DROPS),
    chatml("qwen3_6", syntaxes.XML, thought=OPENED, glue="\n\n", rewrites=DROPS),
    chatml("qwen3_6_preserve", syntaxes.XML, template="qwen3_6", kwargs={"preserve_thinking": True}, thought=OPENED,
           glue="\n\n"),
    ToolFamily(name="glm4_5", syntax=syntaxes.GLM, thought=("\n<think>", "</think>"), content="\n{}", rewrites=DROPS,
               parser="glm45", **GLM_ENDS),
    ToolFamily(name="glm4_5_off", template="glm4_5", kwargs=OFF, syntax=syntaxes.GLM, content="\n{}", **GLM_ENDS),
    ToolFamily(name="glm4moe", syntax=syntaxes.GLM, thought=("\n<think>", "</think>"), content="\n{}", rewrites=DROPS,
               **GLM_ENDS),
    ToolFamily(name="glm4_7", syntax=syntaxes.GLM_TIGHT, thought=("", "</think>"), rewrites=DROPS, parser="glm47",
               **GLM_ENDS),
    ToolFamily(name="glm4_7_keep", template="glm4_7", kwargs={"clear_thinking": False}, syntax=syntaxes.GLM_TIGHT,
               thought=("", "</think>"), **GLM_ENDS),
    ToolFamily(name="glm4_7_off", template="glm4_7", kwargs=OFF, syntax=syntaxes.GLM_TIGHT, **GLM_ENDS),
    ToolFamily(name="gptoss", syntax=syntaxes.HARMONY, thought=ANALYSIS, end="<|return|>", end_of_calls="",
               bos="<|startoftext|>", rewrites=DROPS, parser="openai"),
    ToolFamily(name="llama3_1", syntax=syntaxes.LLAMA, parser="llama3_json", **LLAMA_BOS),
    ToolFamily(name="llama3_2", syntax=syntaxes.LLAMA, **LLAMA_BOS),
    ToolFamily(name="llama3_2_pythonic", syntax=syntaxes.PYTHONIC, parser="pythonic", **LLAMA_BOS),
    ToolFamily(name="llama3_groq", syntax=syntaxes.GROQ, **LLAMA_BOS),
    ToolFamily(name="hermes4", syntax=syntaxes.HERMES, thought=("<think>\n", "\n</think>\n"), glue="\n", **LLAMA_BOS),
    ToolFamily(name="llama_nemotron", syntax=syntaxes.NEMOTRON, **LLAMA_BOS),
    ToolFamily(name="xlam_llama", syntax=syntaxes.XLAM, parser="xlam", **LLAMA_BOS),
    ToolFamily(name="llama4", syntax=syntaxes.LLAMA4, parser="llama4_pythonic", **LLAMA4_BOS),
    ToolFamily(name="llama4_json", syntax=syntaxes.LLAMA4_JSON, parser="llama4_json", **LLAMA4_BOS),
    ToolFamily(name="mistral", syntax=syntaxes.MISTRAL, content=" {}", rewrites=DROPS, parser="mistral",
               **MISTRAL_ENDS),  # tools move to the last user message
    ToolFamily(name="mistral_v7", syntax=syntaxes.MISTRAL, **MISTRAL_ENDS),
    ToolFamily(name="mistral_small_3_2", syntax=syntaxes.MISTRAL_IDS, **MISTRAL_ENDS),
    ToolFamily(name="devstral", syntax=syntaxes.MISTRAL_ARGS, parser="mistral", **MISTRAL_ENDS),
    ToolFamily(name="magistral", syntax=syntaxes.MISTRAL_ARGS, thought=("[THINK]", "[/THINK]"), parser="mistral",
               **MISTRAL_ENDS),
    ToolFamily(name="deepseek_v3", syntax=syntaxes.DEEPSEEK_V3, parser="deepseek_v3", **DEEPSEEK),
    ToolFamily(name="deepseek_r1", syntax=syntaxes.DEEPSEEK_V3, thought=OPENED, rewrites=FIRST, **DEEPSEEK),
    ToolFamily(name="deepseek_r1_0528", syntax=syntaxes.DEEPSEEK_V3, thought=THINK, rewrites=ALWAYS, **DEEPSEEK),
    ToolFamily(name="deepseek_v3_1", syntax=syntaxes.DEEPSEEK_V3_1, parser="deepseek_v31", **DEEPSEEK),
    ToolFamily(name="deepseek_v3_1_thinking", template="deepseek_v3_1", kwargs={"thinking": True}, rewrites=FIRST,
               syntax=syntaxes.DEEPSEEK_V3_1, thought=("", "</think>"), **DEEPSEEK),
    ToolFamily(name="deepseek_v3_2", syntax=syntaxes.DSML, parser="deepseek_v32", **DEEPSEEK),
    ToolFamily(name="deepseek_v3_2_thinking", template="deepseek_v3_2", kwargs={"thinking": True}, rewrites=DROPS,
               syntax=syntaxes.DSML, thought=("", "</think>"), **DEEPSEEK),
    ToolFamily(name="deepseek_v4", kwargs={"thinking": True}, syntax=syntaxes.DSML_V4, thought=("", "</think>"),
               parser="deepseek_v4", **DEEPSEEK),
    ToolFamily(name="gemma4", syntax=syntaxes.GEMMA4, end="<turn|>", end_of_calls="<|tool_response>", bos="<bos>",
               parser="gemma4"),
    ToolFamily(name="gemma4_thinking", template="gemma4", kwargs={"enable_thinking": True}, syntax=syntaxes.GEMMA4,
               thought=("<|channel>thought\n", "\n<channel|>"), end="<turn|>", end_of_calls="<|tool_response>",
               bos="<bos>", rewrites=DROPS),
    ToolFamily(name="functiongemma", syntax=syntaxes.FUNCTION_GEMMA, end="<end_of_turn>",
               end_of_calls="<start_function_response>", bos="<bos>", parser="functiongemma"),
    ToolFamily(name="kimi_k2", syntax=syntaxes.KIMI, bos="[BOS]", parser="kimi_k2"),
    ToolFamily(name="kimi_k2_thinking", syntax=syntaxes.KIMI, thought=("<think>", "</think>"), bos="[BOS]",
               rewrites=DROPS),
    ToolFamily(name="minimax_m2", syntax=syntaxes.MINIMAX, thought=OPENED, glue="\n", end="[e~[", bos="]~!b[",
               rewrites=DROPS, parser="minimax_m2"),
    ToolFamily(name="phi4_mini", syntax=syntaxes.PHI4_MINI, end="<|end|>"),
    ToolFamily(name="phi4_mini_functools", syntax=syntaxes.FUNCTOOLS, end="<|end|>", parser="phi4_mini_json"),
    ToolFamily(name="command_r7b", syntax=syntaxes.COHERE, thought=COHERE_THOUGHT,
               content="<|START_RESPONSE|>{}<|END_RESPONSE|>", **COHERE_ENDS),
    ToolFamily(name="command_a_reasoning", syntax=syntaxes.COHERE, thought=("", "<|END_THINKING|>"),
               content="<|START_TEXT|>{}<|END_TEXT|>", **COHERE_ENDS),
    ToolFamily(name="command_a_reasoning_off", template="command_a_reasoning", kwargs={"reasoning": False},
               syntax=syntaxes.COHERE, content="<|START_TEXT|>{}<|END_TEXT|>", **COHERE_ENDS),
    chatml("smollm3", thought=("<think>\n", "\n</think>\n")),
    chatml("smollm3_off", template="smollm3", kwargs=OFF),
    chatml("lfm2", syntaxes.LFM2, glue="", parser="lfm2"),
    chatml("lfm2_5", syntaxes.LFM2, glue="", thought=("<think>", "</think>"), rewrites=DROPS),
    ToolFamily(name="granite3_0", syntax=syntaxes.GRANITE_3_0, end="<|end_of_text|>", parser="granite"),
    ToolFamily(name="granite3_3", syntax=syntaxes.GRANITE_3_3, end="<|end_of_text|>"),
    ToolFamily(name="granite4", syntax=syntaxes.HERMES, glue="\n", end="<|end_of_text|>", parser="granite4"),
    ToolFamily(name="nemotron_nano_v2", syntax=syntaxes.NEMOTRON, thought=OPENED, end="<SPECIAL_12>", rewrites=ALWAYS),
    ToolFamily(name="nemotron_nano_v2_off", template="nemotron_nano_v2", kwargs=OFF, syntax=syntaxes.NEMOTRON,
               end="<SPECIAL_12>", rewrites=ALWAYS),
    chatml("nemotron3", syntaxes.XML, thought=("", "\n</think>\n"), rewrites=DROPS),
    chatml("nemotron3_off", syntaxes.XML, template="nemotron3", kwargs=OFF),
    ToolFamily(name="seed_oss", syntax=syntaxes.SEED, thought=("<seed:think>", "</seed:think>"), end="<seed:eos>",
               bos="<seed:bos>", parser="seed_oss"),
    chatml("xlam_qwen", syntaxes.XLAM, glue=""),
    ToolFamily(name="apertus", syntax=syntaxes.APERTUS, thought=("<|inner_prefix|>", "<|inner_suffix|>"),
               end="<|assistant_end|>", end_of_calls="", parser="apertus"),
    ToolFamily(name="hunyuan_a13b", syntax=syntaxes.TOOL_CALLS, thought=("<think>\n", "\n</think>\n"), rewrites=ALWAYS,
               content="<answer>\n{}\n</answer>", end="<|eos|>", bos="<|startoftext|>", parser="hunyuan_a13b"),
    chatml("internlm3", syntaxes.INTERNLM, glue="", parser="internlm"),
    ToolFamily(name="step3", syntax=syntaxes.STEP3, thought=OPENED, end="<|EOT|>", rewrites=ALWAYS, parser="step3"),
    chatml("step3_5", syntaxes.XML, thought=("", "\n</think>\n"), rewrites=DROPS, parser="step3p5"),
    chatml("mimo", thought=THINK, rewrites=ALWAYS),
    chatml("mimo_v2", syntaxes.XML_INLINE, kwargs={"enable_thinking": True}, thought=("<think>", "</think>"), glue="",
           rewrites=DROPS, parser="mimo"),
    chatml("olmo3", syntaxes.OLMO3, glue="", parser="olmo3"),
    chatml("olmo3_think", syntaxes.OLMO3, glue="", thought=("", "</think>"), rewrites=ALWAYS),
    ToolFamily(name="exaone4", syntax=syntaxes.HERMES_TIGHT, glue="\n", end="[|endofturn|]", bos="[BOS]",
               kwargs={"enable_thinking": True}, thought=OPENED, rewrites=DROPS),
    chatml("hermes2_pro", parser="hermes"),
    chatml("ernie4_5_thinking", syntaxes.ERNIE, glue="", thought=OPENED, content="<response>\n{}\n</response>\n",
           rewrites=DROPS, parser="ernie45"),
    ToolFamily(name="ling2", syntax=syntaxes.HERMES, glue="\n", end="<|role_end|>", bos="<|startoftext|>"),
    ToolFamily(name="ring2", syntax=syntaxes.HERMES, glue="\n", end="<|role_end|>", bos="<|startoftext|>",
               thought=OPENED, rewrites=DROPS),
    chatml("falcon_h1"),
    chatml("nanbeige4", thought=OPENED, rewrites=DROPS),
    ToolFamily(name="jamba", syntax=syntaxes.TOOL_CALLS, end="<|eom|>", bos="<|startoftext|>", parser="jamba"),
    ToolFamily(name="longcat", syntax=syntaxes.LONGCAT, glue="\n", end="</longcat_s>", parser="longcat"),
]  # fmt: skip


@cache
def tokenizer_of(name: str) -> Any:
    family = next(family for family in FAMILIES if family.name == name)
    return make_tokenizer(fixture_template(family.template or name), family.tokens)


@cache
def reader_of(name: str) -> tuple[Any, ResponseParser]:
    """The prompt of a first turn with tools, and what reads replies to it."""
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = tokenizer_of(name)
    return ChatTemplate(tokenizer, kwargs=family.kwargs).render([USER], TOOLS), ResponseParser(tokenizer)
