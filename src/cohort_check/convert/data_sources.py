"""Several data sets of a source as `data.sources`, and one as `data.path`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from cohort.config.data import SourceConfig
from cohort_check.convert.draft import Draft

_KEYS = {"id": "path", "path": "path", "data_files": "path", "config": "name", "name": "name", "split": "split"}
_SWIFT = re.compile(r"(?:HF::)?([^#:]+)(?::([^#/]+))?(?:#(\d+))?")


def put_sources(draft: Draft, sources: Sequence[Mapping[str, Any]], *, section: str = "data") -> None:
    """Set `path` and keys beside it in `data` or `eval`, or `sources`, whose names are made different."""
    if len(sources) < 2 and not (section == "eval" and sources and "rows" in sources[0]):  # eval.rows holds out
        missing = {"data": "train.jsonl", "eval": "eval.jsonl"}[section]
        draft.path(f"{section}.path", named=sources[0]["path"] if sources else None, missing=missing)
        for key, value in sources[0].items() if sources else ():
            draft.put(f"{section}.{key}", value)
        return
    labels = [SourceConfig(path=str(source["path"])).label for source in sources]
    named = []
    for i, source in enumerate(sources):
        label = labels[i]
        if labels.count(label) > 1:
            folder = PurePath(str(source["path"])).parent.name
            others = Counter(PurePath(str(other["path"])).parent.name for other in sources)
            label = f"{folder}_{label}" if folder and others[folder] == 1 else f"{label}_{labels[: i + 1].count(label)}"
        own = {} if label == labels[i] else {"source": re.sub(r"[^\w.+-]", "_", label)}
        named.append({**source, **own})
    draft.put(f"{section}.sources", named)


def files_of(said: object) -> list[dict[str, Any]]:
    """Read one path or a list of them."""
    return [{"path": path} for path in (said if isinstance(said, list) else [said]) if path]


def of_swift(said: object) -> list[dict[str, Any]]:
    """Read names of ms-swift: `HF::name:subset#1000` is 1000 rows of a subset."""
    sources = []
    for name in said if isinstance(said, list) else [said] if said else []:
        match = _SWIFT.fullmatch(str(name))
        values = (match[1], match[2], int(match[3]) if match[3] else None) if match else (str(name), None, None)
        found = zip(("path", "name", "rows"), values, strict=True)
        sources.append({key: value for key, value in found if value is not None})
    return sources


def of_mixture(draft: Draft, entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Read entries of Open-R1's `dataset_mixture`, whose weights are shares of rows to use, or of TRL's `datasets`."""
    sources = []
    for entry in entries:
        said = entry if isinstance(entry, dict) else {"path": entry}
        source = {_KEYS[key]: value for key, value in said.items() if key in _KEYS and value is not None}
        weight = said.get("weight")
        if isinstance(weight, int | float) and 0 < weight < 1:
            source["rows"] = float(weight)
        elif weight is not None and weight != 1:
            share = f"weight {weight!r:.40} of {source.get('path')!r}, the share of its rows to use"
            draft.decide.append(f"no equivalent: {share}")
        if isinstance(files := source.get("path"), list):
            sources += [{**source, "path": file} for file in files]
        elif source.get("path"):
            sources.append(source)
    return sources
