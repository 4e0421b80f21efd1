"""Load a dataset as prompts: files, cache, chat template, order. Does not import torch, transformers or datasets."""

from cohort.data.content import read_content
from cohort.data.files import read_rows
from cohort.data.order import PromptStream
from cohort.data.prompts import (
    PromptRenderer,
    PromptSet,
    SampledPrompts,
    build_prompt,
    build_prompts,
    describe_lost_text,
    longest_tokens,
)
from cohort.data.rows import OnProgress, columns_of, describe_row, no_progress, values_of
from cohort.data.sources import TrainingRows, read_sources, read_training_rows
from cohort.data.stream import RowStream, StreamedPrompts, first_rows, numbered_rows, open_stream
from cohort.data.successes import Successes

__all__ = [
    "OnProgress",
    "PromptRenderer",
    "PromptSet",
    "PromptStream",
    "RowStream",
    "SampledPrompts",
    "StreamedPrompts",
    "Successes",
    "TrainingRows",
    "build_prompt",
    "build_prompts",
    "columns_of",
    "describe_lost_text",
    "describe_row",
    "first_rows",
    "longest_tokens",
    "no_progress",
    "numbered_rows",
    "open_stream",
    "read_content",
    "read_rows",
    "read_sources",
    "read_training_rows",
    "values_of",
]
