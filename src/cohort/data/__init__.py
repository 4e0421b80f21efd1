"""Load a dataset as prompts: files, chat template, order. Does not import torch, transformers or datasets."""

from cohort.data.files import Row, read_rows
from cohort.data.order import PromptStream
from cohort.data.prompts import Content, PromptRenderer, PromptSet, build_prompts

__all__ = ["Content", "PromptRenderer", "PromptSet", "PromptStream", "Row", "build_prompts", "read_rows"]
