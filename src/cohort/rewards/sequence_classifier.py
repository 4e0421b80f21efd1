"""Score conversations with a sequence-classification model of transformers, in this process.

N texts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cohort.config.rewards import ModelSettings
from cohort.errors import UserError, suggest
from cohort.rewards.completion_text import Message, plain_text

if TYPE_CHECKING:
    import torch

TRAIN = "train"  # the device of the policy
_HEAD = "ForSequenceClassification"
_UNLIMITED = 1 << 30  # tokenizers without a limit have a huge one


def check_classifier(settings: ModelSettings) -> None:
    """Check device and model folder without loading weights; of a Hub id, only its config is downloaded.

    Raises:
        ValueError: there is no such device, or the model has no classification head or no such label.
        UserError: the folder is not a model.
    """
    from cohort.models import check_model_folder

    assert settings.path is not None
    _check_device(settings.device)
    try:
        check_model_folder(settings.path, field="path")
    except UserError as error:
        raise ValueError(str(error)) from error
    config = _read_config(settings)
    architectures = getattr(config, "architectures", None) or ["none"]
    if not any(name.endswith(_HEAD) for name in architectures):
        raise ValueError(
            f"path: {settings.path!r} is {' and '.join(architectures)}, which has no classification head; give a model "
            f"whose architecture ends with {_HEAD}"
        )
    label_index(settings.label, config.id2label)
    _check_head(settings, config)


def label_index(label: str | int | None, labels: Mapping[int, str]) -> int:
    """Return the index of the output that is the score.

    Raises:
        ValueError: no such label, or none given and several to choose from.
    """
    names = [labels[i] for i in sorted(labels)]
    if label is None:
        if len(names) == 1:
            return 0
        raise ValueError(f"label: the model has {len(names)} outputs; choose one of {', '.join(names)}")
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    raise ValueError(f"label: the model has no output {label!r}{suggest(str(label), names, 'Outputs')}")


class Classifier:
    """A frozen model on a device. Its scores do not depend on how texts are batched, up to rounding."""

    def __init__(self, settings: ModelSettings, device: "torch.device") -> None:
        """Load the model.

        Raises:
            UserError: it cannot be loaded, or its files lack weights.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        dtype = {} if settings.dtype == "auto" and device.type == "cpu" else {"dtype": settings.dtype}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
            self.model, info = AutoModelForSequenceClassification.from_pretrained(
                settings.path,
                trust_remote_code=settings.trust_remote_code,
                output_loading_info=True,
                **(dtype or {"dtype": "float32"}),
            )
        except Exception as error:  # transformers raises many types of errors
            raise UserError(f"args.path: {settings.path!r} cannot be loaded: {error}") from error
        if info["missing_keys"]:
            raise UserError(
                f"args.path: {settings.path!r} has no weights for {', '.join(sorted(info['missing_keys'])[:3])}; its "
                "scores would be random"
            )
        self.model.requires_grad_(False).eval().to(device)
        self.device = device
        self.label = label_index(settings.label, self.model.config.id2label)
        self.max_tokens = settings.max_tokens or self._longest()
        self.batch_tokens = settings.batch_tokens
        self.num_truncated = 0  # texts of the last `score` that were too long
        self.tokenizer.truncation_side = settings.truncate

    def score(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[float]:
        """Return the model's output for each conversation; equal texts get equal scores.

        Args:
            conversations: messages of each.
            on_progress: called with the number of texts that have a score and of all different texts.
        """
        texts = [self.render(messages) for messages in conversations]
        whole = {text: self._token_ids(text) for text in dict.fromkeys(texts)}
        self.num_truncated = sum(len(whole[text]) > self.max_tokens for text in texts)
        ids = {text: self._token_ids(text, truncate=len(of_one) > self.max_tokens) for text, of_one in whole.items()}
        by_length = sorted(ids, key=lambda text: len(ids[text]))
        scores: dict[str, float] = {}
        for batch in self._batches([ids[text] for text in by_length]):
            values = self._forward_with_retry([ids[by_length[i]] for i in batch])
            scores |= dict(zip((by_length[i] for i in batch), values, strict=True))
            on_progress(len(scores), len(ids))
        return [scores[text] for text in texts]

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation by the model's own chat template; plain text without one.

        Raises:
            UserError: the template refuses it.
        """
        if self.tokenizer.chat_template is None:
            return plain_text(messages)
        try:
            return str(self.tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except Exception as error:  # templates raise errors of their own
            raise UserError(f"the chat template of the reward model refuses a conversation: {error}") from error

    def _token_ids(self, text: str, *, truncate: bool = False) -> list[int]:
        """Tokens of a text, at least one; the chat template has the special ones already."""
        options = {"truncation": True, "max_length": self.max_tokens} if truncate else {}
        special = self.tokenizer.chat_template is None
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False, **options)["input_ids"]
        return list(ids) or [self.tokenizer.eos_token_id or 0]

    def _batches(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split sequences, shortest first, into batches of at most `batch_tokens`, padding included."""
        # without a padding token, transformers cannot tell where the text of a batch's row ends
        most_rows = len(ids) if self._pad_token_id is not None else 1
        batches: list[list[int]] = []
        for i, sequence in enumerate(ids):
            rows = len(batches[-1]) + 1 if batches else 0
            if rows and rows <= most_rows and rows * len(sequence) <= self.batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _forward_with_retry(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Compute a batch; if memory runs out, in halves, which later batches keep to."""
        import torch

        try:
            return self._forward(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise UserError(
                    f"the reward model runs out of memory on {self.device} with one text of {len(rows[0])} tokens; set "
                    "args.max_tokens, args.dtype: bfloat16 or args.device"
                ) from None
        torch.cuda.empty_cache()
        half = len(rows) // 2
        return self._forward_with_retry(rows[:half]) + self._forward_with_retry(rows[half:])

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        pad = self._pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        return [float(value) for value in logits[:, self.label].float().cpu()]

    @property
    def _pad_token_id(self) -> int | None:
        """The padding token; None if there is none, which the first Llama models write as -1."""
        token_id = self.model.config.get_text_config().pad_token_id
        return None if token_id is None or token_id < 0 else int(token_id)

    def _longest(self) -> int:
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return min(int(positions or _UNLIMITED), int(min(self.tokenizer.model_max_length, _UNLIMITED)))


def pick_device(wanted: str, train_device: str) -> "torch.device":
    """Return the device of a reward model.

    Args:
        wanted: the argument `device`.
        train_device: `hardware.device`, for "train".
    """
    from cohort.models import resolve_device

    return resolve_device(train_device if wanted == TRAIN else wanted)


def _check_device(device: str) -> None:
    import torch

    if device in (TRAIN, "cpu"):
        return
    if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: {device!r}: this process sees {torch.cuda.device_count()} CUDA devices; use {TRAIN} or cpu"
        )


def _read_config(settings: ModelSettings) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # transformers raises many types of errors
        raise ValueError(f"path: {settings.path!r}: its config cannot be read: {error}") from error


def _check_head(settings: ModelSettings, config: Any) -> None:
    """Check that the files of a local model hold the weights of its head.

    Raises:
        ValueError: they do not.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from cohort.models.loading.safetensors_files import stored_weights

    folder = Path(str(settings.path))
    stored = stored_weights(folder, field="path") if folder.is_dir() else {}
    if not stored or settings.trust_remote_code:
        return  # other formats: an error when the model is loaded
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    body = f"{model.base_model_prefix}."
    missing = [name for name, _ in model.named_parameters() if not name.startswith(body) and name not in stored]
    if missing:
        raise ValueError(
            f"path: {settings.path!r} has no weights for {', '.join(missing[:3])}; its scores would be random"
        )
