"""The model card of a trained model, and its upload to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData

from cohort.trl.checkpoints import EARLIER
from cohort.trl.config import GRPOConfig


def write_card(folder: Path, *, name: str, base: str, datasets: Any, tags: str | list[str] | None) -> None:
    """Write `README.md`.

    Args:
        folder: of the model.
        name: of the model.
        base: path or id of the model that was trained; an id goes into the card.
        datasets: ids of the training data.
        tags: more tags.
    """
    data = ModelCardData(
        base_model=base if base and not Path(base).exists() else None,
        datasets=datasets,
        library_name="transformers",
        model_name=name,
        tags=sorted({*([tags] if isinstance(tags, str) else tags or ()), "cohort", "grpo"}),
    )
    text = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nTrained with GRPO (arXiv:2402.03300) by Cohort.\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text, encoding="utf-8")


def upload(folder: Path, args: GRPOConfig, commit_message: str, *, token: str | None = None, **options: Any) -> Any:
    """Upload the output folder without checkpoints and runs."""
    api = HfApi(token=token or args.hub_token)
    repo = api.create_repo(args.hub_model_id or folder.name, private=args.hub_private_repo, exist_ok=True)
    return api.upload_folder(
        repo_id=repo.repo_id,
        folder_path=folder,
        ignore_patterns=["cohort*/*", "checkpoint-*/*", f"{EARLIER}*/*"],
        commit_message=commit_message,
        **options,
    )
