"""Dataset -> prompts: files, chat template, order. Importing this loads neither torch, transformers nor datasets."""

from cohort.data.files import Row, read_rows
from cohort.data.order import PromptStream
from cohort.data.prompts import Content, PromptRenderer, PromptSet, build_prompts

__all__ = ["Content", "PromptRenderer", "PromptSet", "PromptStream", "Row", "build_prompts", "read_rows"]
