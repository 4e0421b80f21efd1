"""The sections `data` and `eval`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cohort.config.objects import is_unnamed
from cohort.config.section import DataPath, FunctionPath, MinP, RepetitionPenalty, Section, must_be, number_or

SOURCE = "source"  # the column that says which source of a mixture a row is of
_SOURCE_NAME = re.compile(r"[\w.+-]+")  # names of metrics have it as a part


def _check_condition(where: str) -> str:
    from cohort.config.condition import ConditionError, read_syntax  # pyarrow takes time to import

    try:
        read_syntax(where)
    except ConditionError as error:
        raise ValueError(str(error)) from error
    return where


Condition = Annotated[str, AfterValidator(_check_condition)]
NumRows = Annotated[
    int | float,
    number_or(
        rule="a whole number of rows from 1, or a share such as 0.1, above 0 and at most 1.0",
        is_valid=lambda x: x >= 1 if isinstance(x, int) else 0 < x <= 1,
        types=(int, float),
    ),
]


def _refuse_choice_of_split(section: "_RowsConfig | EvalConfig", field: str) -> None:
    for key in ("split", "name"):
        if section.path is None:
            section.refuse(key, "no path", f"remove it, or set {field}")
        elif is_unnamed(section.path):
            section.refuse(key, "rows that are a Python object", f"remove it, or give a path as {field}")


class _RowsConfig(Section):
    """Where rows come from, and what becomes of them."""

    path: DataPath | None = Field(
        None,
        description="JSONL, JSON, Parquet or CSV file, a folder of such files or one saved by `datasets`, or a "
        "`datasets` id. Only runs with `rollout.environment` or `rollout.agent` can do without data.",
    )
    split: str = Field("train", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Columns to rename: {final_answer: answer}. All other keys mean the new names.",
    )
    where: Condition | None = Field(
        None,
        description="Use only the rows of which this holds, such as `level >= 3 and subject == 'algebra'`: a condition "
        "as in the page's filter.",
    )
    map: FunctionPath | None = Field(
        None,
        description="Function `file.py:name` or `module:name` that takes a row, a dict, and returns the row to use, or "
        "None to leave it out. That of `data` is the default of all sources.",
    )
    rows: NumRows | None = Field(
        None, description="Use only this many rows, or this share of them, drawn by `train.seed`. Default: all."
    )


class SourceConfig(_RowsConfig):
    """One source of a mixture. Its rows have its name in the column `source`."""

    source: Annotated[
        str | None,
        must_be("letters, digits and any of _ . + -", lambda x: x is None or bool(_SOURCE_NAME.fullmatch(str(x)))),
    ] = Field(
        None,
        description="Its name. Default: the last part of `path`, without the ending.",
    )
    prompt: str | None = Field(
        None,
        min_length=1,
        description="Column with the prompt, which is renamed to `data.prompt`. Default: `data.prompt`.",
    )
    system_prompt: str | None = Field(
        None, description="System message for prompts that have none. Default: `data.system_prompt`."
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of its prompts in each stretch of training, relative to other sources. Default: the rows of "
        "all sources are joined.",
    )

    @property
    def label(self) -> str:
        """Its name."""
        if self.source is not None:
            return self.source
        end = PurePath(str(self.path)).name
        return re.sub(r"[^\w.+-]+", "_", re.sub(r"\.(jsonl?|ndjson|parquet|csv)$", "", end)) or "source"

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.path is None:
            raise ValueError("path: missing; this key is required")
        _refuse_choice_of_split(self, "path")
        return self


def _check_labels(sources: Sequence[SourceConfig]) -> None:
    labels = [source.label for source in sources]
    repeated = [label for label, count in Counter(labels).items() if count > 1]
    if repeated:
        places = [i for i, label in enumerate(labels) if label == repeated[0]]
        raise ValueError(
            f"sources.{places[1]}.source: {repeated[0]!r} is also the name of sources.{places[0]}; give each source a "
            f"name of its own, such as source: {repeated[0]}_2"
        )


class DataConfig(_RowsConfig):
    """The training prompts."""

    sources: tuple[SourceConfig, ...] = Field(
        (),
        description="Several sources instead of `path`, with the keys below. `data: [...]` is short for "
        "`data: {sources: [...]}`.",
    )
    prompt: str = Field(
        "prompt",
        min_length=1,
        description="Column with the prompt: text or chat messages. All other columns are passed to the rewards.",
    )
    system_prompt: str | None = Field(None, description="System message for prompts that have none.")
    apply_chat_template: bool = Field(
        True, description="Render prompts with the model's chat template. false: use the text as is."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the chat template, such as {enable_thinking: false}."
    )
    shuffle: bool = Field(True, description="Shuffle every epoch, seeded by `train.seed`. false: file order.")
    stream: bool = Field(
        False,
        description="Read rows as they are sampled, of a file, a Hub id or an `IterableDataset`; needs `train.steps` "
        "([data.md](data.md#streams)).",
    )
    buffer_size: int = Field(
        1000, ge=1, description="With `stream`: rows that are read at a time and shuffled among each other."
    )
    sampling: Literal["uniform", "by_success"] = Field(
        "uniform",
        description="`uniform`: every epoch samples each prompt once. `by_success`: an epoch passes over prompts whose "
        "completions would likely be all right or all wrong, judging by their results so far "
        "([data.md](data.md#prompts-worth-sampling)).",
    )
    exploration: float = Field(
        0.1, gt=0, le=1, description="With `by_success`: the least probability that an epoch samples a prompt."
    )
    pass_rate: str | None = Field(
        None,
        min_length=1,
        description="With `by_success`: column with the share of right answers of a similar model, from 0 to 1, which "
        "counts as much as a group.",
    )
    overlong_prompts: Literal["drop", "error"] = Field(
        "drop",
        description="What to do with prompts longer than `rollout.max_prompt_tokens`: drop and count them, or raise "
        "an error.",
    )

    @model_validator(mode="after")
    def _check_chat_keys(self) -> Self:
        if self.sources:
            self._check_sources()
        else:
            _refuse_choice_of_split(self, "data.path")
        for key in ("columns", "where", "map", "rows") if self.path is None and not self.sources else ():
            self.refuse(key, "no data", "remove it, or set data.path")
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, key) and not self.apply_chat_template:
                self.refuse(key, "apply_chat_template: false")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.sampling == "uniform":
            for key in ("exploration", "pass_rate"):
                self.refuse(key, "sampling: uniform", "remove it, or set sampling: by_success")
        if not self.stream:
            self.refuse("buffer_size", "stream: false", "remove it, or set stream: true")
        for key in ("sources", "columns", "where", "map", "rows") if self.stream else ():
            self.refuse(key, "stream: true", "change the rows where they are written, or leave out stream")
        if self.stream and self.sampling == "by_success":
            raise ValueError(
                "sampling: by_success needs rows that are seen again, and stream: true reads each once; use sampling: "
                "uniform, or leave out stream"
            )
        return self

    @property
    def is_given(self) -> bool:
        """Whether there is a path or a list of sources."""
        return self.path is not None or bool(self.sources)

    @property
    def is_plain(self) -> bool:
        """Whether the rows are those of one path, as they are."""
        changes = self.sources or self.columns or self.where is not None or self.map is not None
        return self.path is not None and not changes and self.rows is None

    @property
    def field(self) -> str:
        """The key that names the data, for messages."""
        return "data.sources" if self.sources else "data.path"

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the sources in a mixture; None: rows are joined."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return tuple(weights) or None

    @property
    def system_prompts(self) -> Mapping[str, str]:
        """System messages of the sources that have their own."""
        return {s.label: s.system_prompt for s in self.sources if s.system_prompt is not None}

    def _check_sources(self) -> None:
        for key in ("path", "split", "name", "columns", "where", "rows"):
            self.refuse(key, "sources", "say it of each source")
        _check_labels(self.sources)
        without = [i for i, source in enumerate(self.sources) if source.weight is None]
        if 0 < len(without) < len(self.sources):
            raise ValueError(f"sources.{without[0]}.weight: missing; either all sources have a weight, or none")
        for i, source in enumerate(self.sources):
            if source.system_prompt is not None and not self.apply_chat_template:
                raise ValueError(
                    f"sources.{i}.system_prompt: {source.system_prompt!r:.60} has no effect with apply_chat_template: "
                    f"false; remove one of the two"
                )


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling."""

    path: DataPath | None = Field(
        None,
        description="Held-out data; same formats as `data.path`. Environments that need no data can do without, for "
        "`max_prompts` trajectories.",
    )
    sources: tuple[SourceConfig, ...] = Field(
        (),
        description="Several sources instead of `path`, with the keys of `data.sources` except `weight` and "
        "`system_prompt`; those of the training sources of the same names hold. Accuracy, rewards and lengths are "
        "reported by source, too.",
    )
    split: str = Field("test", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    rows: NumRows | None = Field(
        None,
        description="Instead of `path`: hold this many rows of the training data out, or this share of them, drawn by "
        "`train.seed`. Rows with the same prompts are not trained on either.",
    )
    prompt: str | None = Field(None, min_length=1, description="Prompt column. Default: `data.prompt`.")
    every: int = Field(20, ge=0, description="Evaluate every N steps (0: only before and after training).")
    before_training: bool = Field(True, description="Also evaluate the initial model.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first N prompts.")
    num_samples: int = Field(1, ge=1, description="Completions per prompt (k); mean@k and pass@k are reported.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens; 0 is off.")
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest completion of a model call in tokens. Default: `rollout.max_completion_tokens`.",
    )
    success_reward: str | None = Field(
        None, description="Name of the reward that defines success (accuracy, pass@k). Default: the first reward."
    )
    success_threshold: float = Field(1.0, description="A completion succeeds if that reward is at least this.")

    @model_validator(mode="after")
    def _check_greedy(self) -> Self:
        if self.sources:
            self._check_sources()
        else:
            _refuse_choice_of_split(self, "eval.path")
        if self.path is not None:
            self.refuse("rows", "path", "remove one of the two, or use max_prompts for the first N")
        elif self.rows is not None:
            self.refuse("prompt", "rows, which are of the training data", "remove it")
        if self.temperature == 0:
            if self.num_samples > 1:
                raise ValueError(
                    f"num_samples: {self.num_samples} with temperature: 0 gives the same completion "
                    f"{self.num_samples} times; set a temperature above 0 (such as 0.6), or num_samples: 1"
                )
            for key in ("top_p", "top_k", "min_p"):
                self.refuse(key, "temperature: 0 (greedy)")
        return self

    @property
    def is_given(self) -> bool:
        """Whether there are held-out rows, and not only those that an environment brings."""
        return self.path is not None or bool(self.sources) or self.rows is not None

    @property
    def field(self) -> str:
        """The key that names the held-out rows, for messages."""
        return "eval.sources" if self.sources else "eval.path" if self.rows is None else "eval.rows"

    def _check_sources(self) -> None:
        for key in ("path", "split", "name", "rows"):
            self.refuse(key, "sources", "say it of each source")
        _check_labels(self.sources)
        for i, source in enumerate(self.sources):
            for key, reason in (
                ("weight", "every prompt is evaluated once; use rows for fewer of a source"),
                ("system_prompt", "the training source of the same name has it"),
            ):
                if (value := getattr(source, key)) is not None:
                    raise ValueError(f"sources.{i}.{key}: {value!r:.60} has no effect in eval: {reason}; remove it")
