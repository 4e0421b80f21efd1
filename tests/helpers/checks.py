"""Files of other trainers and of Cohort, as `cohort check` reads and judges them."""

from pathlib import Path
from typing import Any

from cohort_check import FileReport, check_file
from cohort_check.launch import Launch
from cohort_check.readers import read_launch

COHORT = "model: {path: m}\ndata: {path: org/d}\nrewards: [{use: math}]\n"
SEVEN = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
num_generations: 8
per_device_train_batch_size: 16
max_prompt_length: 1024
max_completion_length: 4096
gradient_checkpointing: true
beta: 0.0
"""


def read(tmp_path: Path, text: str, name: str) -> Launch:
    (tmp_path / name).write_text(text)
    return read_launch(tmp_path / name)


def report(tmp_path: Path, text: str, name: str = "run.sh", **options: Any) -> FileReport:
    (tmp_path / name).write_text(text)
    return check_file(tmp_path / name, **options)


def by_code(result: FileReport) -> dict[str, Any]:
    return {finding.code: finding for finding in result.findings}
