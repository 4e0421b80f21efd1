"""`cohort view RUN --export FILE`: the page of one run as a file, with as much of its data as fits.

Browsers load no modules from `file://`, so the import map of the document has each module as a `data:` URL. The content
policy allows the document's own scripts and styles by their hashes, and the modules that those import.

`js/embedded.js` reads the data: base64 of deflated JSON, an object with the paths of the server's answers as keys:
- "/api/runs", "/api/runs/ID/now", ".../metrics", ".../config"
- "/api/runs/ID/questions?kind=step" and "?kind=eval": the first 100 questions
- "/api/curves?x=step" and "?x=time": all curves of the run
- "/api/runs/ID/steps": the steps that are part of the report
- "/api/runs/ID/steps/N": all groups of a step in the order of the file
- "/api/runs/ID/steps/N/groups/I": each group of these steps
"""

import base64
import hashlib
import html
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from starlette.datastructures import QueryParams

from cohort.errors import UserError
from cohort.run.atomic import write_file_atomically
from cohort_view.groups import MAX_GROUPS
from cohort_view.run import ViewedRun, steps_on_disk
from cohort_view.server.answers import STATIC, QueryParameters
from cohort_view.server.events import Watcher
from cohort_view.server.runs import Runs
from cohort_view.server.serve import ANSWERS, Asked
from cohort_view.values import to_json

_TAG = re.compile(
    r'<link rel="stylesheet" href="/static/(?P<css>[^"]+)">'
    r'|<link rel="icon" href="/static/(?P<icon>[^"]+)"(?P<icon_type>[^>]*)>'
    r'|<script type="importmap">(?P<map>[^<]*)</script>'
    r'|<script type="module" src="/static/js/(?P<entry>[^"]+)"></script>'
    r'|<script src="/static/(?P<js>[^"]+)"></script>'
)

# A script element that a trusted script makes is trusted under 'strict-dynamic', and with it all that it imports.
_START = """
const { imports } = JSON.parse(document.querySelector("script[type=importmap]").textContent);
document.head.append(Object.assign(document.createElement("script"), { type: "module", src: imports[%s] }));
"""


def bundle_page(static: Path, *, data: str, footer: str) -> str:
    """Return the page as one HTML document.

    Args:
        static: folder of the page's files, with `index.html`.
        data: what `embedded.js` reads instead of asking a server, in base64.
        footer: text below the page.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(tag: str, content: str, attributes: str = "") -> str:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}{attributes}>{content}</{tag}>"

    def replace(match: re.Match[str]) -> str:
        if css := match["css"]:
            return inline("style", _read(static, css))
        if icon := match["icon"]:
            return f'<link rel="icon" href="{_data_url(static / icon, "image/svg+xml")}"{match["icon_type"]}>'
        if imports := match["map"]:
            return inline("script", json.dumps({"imports": _modules(static, imports)}), ' type="importmap"')
        if entry := match["entry"]:
            return inline("script", _START % json.dumps(f"cohort/{entry}"))
        return inline("script", _read(static, match["js"]))

    page = _TAG.sub(replace, _read(static, "index.html"))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'strict-dynamic' {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    meta = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">'
    )
    embedded = f'<script type="text/plain" id="cohort-data">{html.escape(data)}</script>'
    below = f'<footer class="footer muted">{html.escape(footer)}</footer>\n{embedded}\n</body>'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}').replace("</body>", below)


def _modules(static: Path, imports: str) -> dict[str, str]:
    """Return the `data:` URLs of the modules of an import map, by the names that modules import them with."""
    found = {}
    for name, path in json.loads(imports)["imports"].items():
        target = static / path.removeprefix("/static/")
        files = sorted(target.rglob("*.js")) if name.endswith("/") else [target]
        for file in files:
            full_name = f"{name}{file.relative_to(target).as_posix()}" if name.endswith("/") else name
            found[full_name] = _data_url(file, "text/javascript")
    return found


def _data_url(file: Path, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _read(static: Path, name: str) -> str:
    """Read a file as a browser would: HTML parsers turn line ends into newlines before a hash is computed."""
    return (static / name).read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")


MAX_BYTES = 5_000_000
_CURVES_SHARE = 0.35  # of the file
_POINTS = (800, 400, 200, 100, 50)  # per curve; the most that fits its share
_NUM_STEPS = 60
_SPREAD = (3, 5, 9, 17, 33, _NUM_STEPS)  # numbers of steps, each spread over the run
_LIST_CHARS = 2000  # kept for the list of steps
_DIGITS = 6  # significant digits of numbers
_WHOLE = ("/api/runs", *(f"/api/runs/{{id}}/{name}" for name in ("now", "metrics", "config")))
# which completions, messages and paths may hold
_HIDDEN = r"\1***@"
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^/@\s\"\\]{1,200}@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and what was left out."""

    num_bytes: int
    note: str


class _Data:
    """Answers by path: one JSON object, compressed as it grows, within a number of characters of base64."""

    def __init__(self, watcher: Watcher, run: ViewedRun, max_chars: int):
        self.run = run
        self._watcher = watcher
        self._max_chars = max_chars
        self._packer = zlib.compressobj(9)
        self._packed = self._packer.compress(b"{") + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._separator = ""

    @property
    def left_chars(self) -> int:
        """Characters left."""
        return self._max_chars - _num_chars(len(self._packed))

    def ask(self, route: str, query: str = "", **path: object) -> tuple[str, Any]:
        """Return the path of an answer, and the answer as plain JSON values."""
        parts = {"id": self.run.id, **{name: str(value) for name, value in path.items()}}
        asked = Asked(self._watcher, parts, QueryParameters(QueryParams(query)))
        value = json.loads(to_json(ANSWERS[route](asked)))
        return route.format(**parts) + (f"?{query}" if query else ""), value

    def add(self, answers: Mapping[str, Any], *, keep_chars: float = 0) -> bool:
        """Add all answers if at least `keep_chars` characters remain afterwards. Return whether they were added."""
        pairs = (f"{json.dumps(path)}:{_URL_PASSWORD.sub(_HIDDEN, to_json(value))}" for path, value in answers.items())
        packer = self._packer.copy()
        text = (self._separator + ",".join(pairs)).encode()
        more = packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)
        if self._max_chars - _num_chars(len(self._packed) + len(more)) < keep_chars:
            return False
        self._packer, self._packed, self._separator = packer, self._packed + more, ","
        return True

    def base64(self) -> str:
        """Return everything."""
        packer = self._packer.copy()
        return base64.b64encode(self._packed + packer.compress(b"}") + packer.flush()).decode()


def export_run(
    run_dir: Path,
    file: Path,
    *,
    max_bytes: int = MAX_BYTES,
    static: Path = STATIC,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Report:
    """Write the page of a run to an HTML file.

    Args:
        run_dir: the run folder.
        file: file to write; one that is there is replaced.
        max_bytes: most bytes of the file.
        static: folder of the page's files.
        on_progress: called with the number of parts done, and of all.

    Raises:
        UserError: the file cannot be written, or nothing fits.
    """
    watcher = Watcher(Runs([run_dir]))
    watcher.stop()  # nobody listens
    [run] = watcher.runs.all()
    empty = len(bundle_page(static, data="", footer="x" * 2000).encode())
    data = _Data(watcher, run, max_bytes - empty - 100)
    answers = dict(data.ask(route) for route in _WHOLE)
    answers |= dict(data.ask("/api/runs/{id}/questions", f"kind={kind}") for kind in ("step", "eval"))
    if not data.add(answers):
        raise UserError(f"--export: the run's metrics and configuration alone exceed {max_bytes / 1e6:.1f} MB")
    points = _add_curves(data, [metric["name"] for metric in answers[f"/api/runs/{run.id}/metrics"]["metrics"]])
    available = [step for step, kinds in steps_on_disk(run.path).items() if "step" in kinds]
    wanted = _choose_steps(run, available)
    added = _add_steps(data, wanted, lambda done: on_progress(done, len(wanted)))
    note = _note(run, len(available), added, points=points)
    page = bundle_page(static, data=data.base64(), footer=note)
    try:
        with write_file_atomically(file) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export: {str(file)!r} cannot be written: {error.strerror}") from error
    return Report(len(page.encode()), note)


def _add_curves(data: _Data, names: Sequence[str]) -> int:
    """Add all curves by step and by time with as many points as fit; returns the number of points per curve."""
    keep = data.left_chars * (1 - _CURVES_SHARE)
    listed = {"runs": quote(data.run.id), "names": ",".join(map(quote, names))}
    for points in _POINTS:
        answers = {}
        for x in ("step", "time"):
            query = QueryParams({**listed, "x": x, "points": points})
            answers[f"/api/curves?x={x}"] = _round(data.ask("/api/curves", str(query))[1])
        if data.add(answers, keep_chars=keep):
            return points
    data.add({f"/api/curves?x={x}": {"curves": [], "marks": {}} for x in ("step", "time")})
    return 0


def _choose_steps(run: ViewedRun, available: Sequence[int]) -> list[int]:
    """Choose the last and first step, those in which least was learned, and others evenly spread, also if few fit."""
    metrics = run.metrics
    equal = dict(zip(metrics.steps.tolist(), metrics.column("frac_reward_zero_std").tolist(), strict=True))
    least = sorted(available, key=lambda step: -np.nan_to_num(equal.get(step, 0.0)))[: _NUM_STEPS // 5]
    spread = [place for n in _SPREAD for place in np.linspace(0, len(available) - 1, n).round().astype(int).tolist()]
    wanted = [*available[-1:], *available[:1], *least[:2], *(available[place] for place in spread if available), *least]
    return list(dict.fromkeys(wanted))[:_NUM_STEPS]


def _add_steps(data: _Data, wanted: Sequence[int], on_done: Callable[[int], object]) -> list[int]:
    """Add steps with all their groups while they fit. Returns those that did."""
    steps: list[int] = []
    for num_done, step in enumerate(wanted, 1):
        path, of_step = data.ask("/api/runs/{id}/steps/{step}", f"sort=order&limit={MAX_GROUPS}", step=step)
        answers = {path.partition("?")[0]: of_step}
        for group in of_step["groups"]:
            answers.update([data.ask("/api/runs/{id}/steps/{step}/groups/{index}", step=step, index=group["index"])])
        if data.add(_round(answers), keep_chars=_LIST_CHARS):
            steps.append(step)
        on_done(num_done)
    listed = [{"step": step, "kinds": ["step"]} for step in sorted(steps)]
    ends = {"first": min(steps, default=None), "last": max(steps, default=None)}
    data.add({f"/api/runs/{data.run.id}/steps": {"steps": listed, **ends}})
    return sorted(steps)


def _note(run: ViewedRun, num_steps: int, added: Sequence[int], *, points: int) -> str:
    """Return the text below the page: what was exported when, and what was left out."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    sentences = [f"Exported from run {run.name} on {when}."]
    if len(added) < num_steps:
        which = f": {', '.join(map(str, added))}" if added else ""
        sentences.append(f"Completions: {len(added):,} of {num_steps:,} steps{which}.")
    longest = max(len(run.metrics.steps), len(run.metrics.eval.steps))
    if points < longest:
        sentences.append(f"Curves: at most {points} of {longest:,} points, with the highest and lowest.")
    sentences.append("Tokens, tool calls, questions beyond 100, the filter, logs and live updates need `cohort view`.")
    return " ".join(sentences)


def _num_chars(num_bytes: int) -> int:
    """Return the length of bytes in base64."""
    return (num_bytes + 2) // 3 * 4


def _round(value: Any) -> Any:
    """Round numbers to what a chart shows."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, list):
        return [_round(v) for v in value]
    if isinstance(value, dict):
        return {key: _round(v) for key, v in value.items()}
    return value
