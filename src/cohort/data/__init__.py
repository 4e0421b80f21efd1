"""Load a dataset as prompts: files, chat template, order. Does not import torch, transformers or datasets."""

from cohort.data.files import read_rows
from cohort.data.order import PromptStream
from cohort.data.prompts import PromptRenderer, PromptSet, build_prompts, describe_lost_text, read_content

__all__ = [
    "PromptRenderer",
    "PromptSet",
    "PromptStream",
    "build_prompts",
    "describe_lost_text",
    "read_content",
    "read_rows",
]
