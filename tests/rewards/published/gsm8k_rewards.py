"""Grade-school math in XML tags: several small rewards that add up."""

import re

STRICT = re.compile(r"\A<reasoning>\n.+?\n</reasoning>\n<answer>\n.+?\n</answer>\n?\Z", re.DOTALL)
SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
TAGS = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")


def xml_answer(text: str) -> str:
    after = text.rpartition("<answer>")[2]
    return after.partition("</answer>")[0].strip()


def hash_answer(solution: str) -> str | None:
    if "####" not in solution:
        return None
    return solution.split("####")[1].strip().replace(",", "").replace("$", "")


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    extracted = [xml_answer(response) for response in responses]
    print("-" * 20, f"Question:\n{question}\nAnswer:\n{answer[0]}\nResponse:\n{responses[0]}\nTaken:\n{extracted[0]}")
    return [2.0 if e == hash_answer(a) else 0.0 for e, a in zip(extracted, answer, strict=True)]


def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if xml_answer(completion[0]["content"]).isdigit() else 0.0 for completion in completions]


def strict_format_reward_func(completions, **kwargs) -> list[float]:
    matches = [STRICT.match(completion[0]["content"]) for completion in completions]
    return [0.5 if match else 0.0 for match in matches]


def soft_format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 * bool(SOFT.search(completion[0]["content"])) for completion in completions]


def count_xml(text: str) -> float:
    score = 0.125 * sum(text.count(tag) == 1 for tag in TAGS)
    if TAGS[-1] in text:
        score -= 0.001 * len(text.split(TAGS[-1])[-1].strip())
    return score


def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [count_xml(completion[0]["content"]) for completion in completions]
