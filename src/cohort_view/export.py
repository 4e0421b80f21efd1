"""`cohort view RUN --export FILE`: the page of one run as a file, with as much of its data as fits.

Browsers load no modules from `file://`, so all modules become one script. Only the forms of `import` and `export` that
the page's modules use are known; anything else raises. The content policy of the document allows its own scripts and
styles by their hashes, and nothing else.

Data has the paths of the server's answers as keys, so that the page's code is the same.
"""

import base64
import hashlib
import html
import itertools
import json
import posixpath
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
from cohort_view.completions import steps_on_disk
from cohort_view.groups import MAX_GROUPS
from cohort_view.records import to_json
from cohort_view.run import ViewedRun
from cohort_view.server.answers import STATIC, QueryParameters
from cohort_view.server.events import Watcher
from cohort_view.server.runs import Runs
from cohort_view.server.serve import ANSWERS, Asked

_IMPORT = re.compile(r"^import\s+(?:(?P<what>[^\"';]+?)\s+from\s+)?[\"'](?P<path>[^\"']+)[\"'];?[ \t]*$", re.M)
_EXPORT_LIST = re.compile(r"^export\s*\{(?P<names>[^}]*)\};?[ \t]*$", re.M)
_EXPORT_NAMED = re.compile(r"^export\s+(?=(?:async\s+)?(?:function\*?|class|const)\s+(?P<name>[\w$]+))", re.M)
_ANY_LEFT = re.compile(r"^(?:import|export)\b.*|\bimport\s*\(.*|\bimport\.meta\b.*", re.M)
_COMMENT = re.compile(r"^[ \t]*(?:/\*.*?\*/|//[^\n]*)", re.M | re.S)  # those at the start of a line
_TAG = re.compile(
    r'<link rel="stylesheet" href="/static/(?P<css>[^"]+)">'
    r'|<script(?P<module> type="module")? src="/static/(?P<js>[^"]+)"></script>'
    r'|<link rel="icon" href="/static/(?P<icon>[^"]+)"(?P<icon_type>[^>]*)>'
)


class BundleError(ValueError):
    """A file of the page uses a form that the bundle does not know."""


def bundle_page(static: Path, *, data: str, footer: str) -> str:
    """Return the page as one HTML document.

    Args:
        static: folder of the page's files, with `index.html`.
        data: what `embedded.js` reads instead of asking a server, in base64.
        footer: text below the page.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(tag: str, content: str) -> str:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"{content}</{tag}>"

    def replace(match: re.Match[str]) -> str:
        if css := match["css"]:
            return "<style>" + inline("style", _style(_read(static, css)))
        if icon := match["icon"]:
            encoded = base64.b64encode((static / icon).read_bytes()).decode()
            return f'<link rel="icon" href="data:image/svg+xml;base64,{encoded}"{match["icon_type"]}>'
        if match["module"]:
            script = bundle_modules(match["js"], lambda name: _read(static, name))
            return '<script type="module">' + inline("script", escape_script(script))
        return "<script>" + inline("script", escape_script(_read(static, match["js"])))

    page = _TAG.sub(replace, _read(static, "index.html"))
    if left := re.search(r'(?:src|href)="/[^"]*"', page):
        raise BundleError(f"index.html: {left[0]} would be loaded from a server")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
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
    page = _once(page, '<meta charset="utf-8">', lambda found: f"{found}\n{meta}")
    below = f'<footer class="footer muted">{html.escape(footer)}</footer>\n{embedded}'
    return _once(page, "</body>", lambda found: f"{below}\n{found}")


def bundle_modules(entry: str, read: Callable[[str], str]) -> str:
    """Return one script that runs the module `entry` after everything that it imports.

    Args:
        entry: path of a module.
        read: returns the text of the module at a path.

    Raises:
        BundleError: modules import each other in a circle, or use a form that is not known.
    """
    variables: dict[str, str] = {}
    scripts: list[str] = []

    def add(path: str, importers: tuple[str, ...]) -> str:
        if path in importers:
            raise BundleError(f"{' -> '.join((*importers, path))}: modules import each other in a circle")
        if path not in variables:
            body, exports = _rewrite(path, read(path), lambda target: add(target, (*importers, path)))
            listed = ", ".join(f"{json_key}: {name}" for json_key, name in exports.items())
            variables[path] = f"$module{len(variables)}"
            scripts.append(f"// {path}\nconst {variables[path]} = (() => {{\n{body}\nreturn {{ {listed} }};\n}})();\n")
        return variables[path]

    add(entry, ())
    return '"use strict";\n' + "".join(scripts)


def escape_script(text: str) -> str:
    """Escape what would end a script element, or hide its end. The script's meaning stays, in strings and in code."""
    return re.sub(r"</(?=script)", r"<\\/", text, flags=re.I).replace("<!--", "<\\!--")


def _rewrite(path: str, text: str, variable_of: Callable[[str], str]) -> tuple[str, Mapping[str, str]]:
    """Return a module's text without `import` and `export`, and the variables it exports by name."""
    exports: dict[str, str] = {}

    def replace_import(match: re.Match[str]) -> str:
        if not match["path"].startswith("."):
            raise BundleError(f"{path}: {match[0]!r} is not a relative path")
        module = variable_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"])))
        return "" if match["what"] is None else _binding(path, match["what"], module)

    def replace_list(match: re.Match[str]) -> str:
        for entry in filter(None, (part.strip() for part in match["names"].split(","))):
            local, _, name = entry.partition(" as ")
            exports[name.strip() or local.strip()] = local.strip()
        return ""

    def replace_named(match: re.Match[str]) -> str:
        exports[match["name"]] = match["name"]
        return ""

    # comments may name these forms; all others stay, as licenses are comments
    text = _COMMENT.sub(lambda match: "" if re.search(r"\b(?:import|export)\b", match[0]) else match[0], text)
    text = _IMPORT.sub(replace_import, text)
    text = _EXPORT_LIST.sub(replace_list, text)
    text = _EXPORT_NAMED.sub(replace_named, text)
    if left := _ANY_LEFT.search(text):
        raise BundleError(f"{path}: {left[0][:80]!r} is a form of import or export that an export of the page lacks")
    return text, exports


def _binding(path: str, what: str, module: str) -> str:
    """Return the declaration for what an import names: `a, b as c`, `* as all` or a default export."""
    what = " ".join(what.split())
    if match := re.fullmatch(r"\* as ([\w$]+)", what):
        return f"const {match[1]} = {module};"
    if match := re.fullmatch(r"\{(.*)\}", what):
        return f"const {{{match[1].replace(' as ', ': ')}}} = {module};"
    if re.fullmatch(r"[\w$]+", what):
        return f"const {what} = {module}.default;"
    raise BundleError(f"{path}: import of {what!r} is a form that an export of the page lacks")


def _style(text: str) -> str:
    if left := re.search(r"url\(\s*[\"']?(?!data:|#)[^)]*\)|@import[^;]*|</style", text, re.I):
        raise BundleError(f"a style sheet has {left[0]!r}, which a document of its own cannot load")
    return text


def _read(static: Path, name: str) -> str:
    """Read a file as a browser would: HTML parsers turn line ends into newlines before a hash is computed."""
    return (static / name).read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _once(text: str, part: str, replacement: Callable[[str], str]) -> str:
    if text.count(part) != 1:
        raise BundleError(f"index.html: {part} is there {text.count(part)} times instead of once")
    return text.replace(part, replacement(part))


MAX_BYTES = 5_000_000
_CURVES_SHARE = 0.35  # of the file
_POINTS = (800, 400, 200, 100, 50)  # per curve; the most that fits its share
_TOKENS_SHARE = 0.3  # of what the curves leave
_NUM_STEPS = 60
_NUM_TOKEN_VIEWS = 3_000  # at most: bounds the time
_VIEWS_PER_STEP = 10  # take about as long as a step's groups
_DIGITS = 6  # significant digits of numbers
_WHOLE = ("/api/runs", *(f"/api/runs/{{id}}/{name}" for name in ("now", "metrics", "config", "machine", "eval")))
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
        pairs = (f"{json.dumps(path)}:{_without_passwords(to_json(value))}" for path, value in answers.items())
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
    if not data.add(answers):
        raise UserError(f"--export: the run's metrics and configuration alone exceed {max_bytes / 1e6:.1f} MB")
    points = _add_curves(data, [metric["name"] for metric in answers[f"/api/runs/{run.id}/metrics"]["metrics"]])
    steps = _choose_steps(run)
    total = len(steps.wanted) + _NUM_TOKEN_VIEWS // _VIEWS_PER_STEP
    added = _add_steps(data, steps.wanted, lambda done: on_progress(done, total))
    num_rows, num_tokens = _add_tokens(data, added, lambda done: on_progress(len(steps.wanted) + done, total))
    note = _note(run, steps, list(added), points=points, num_tokens=num_tokens, num_rows=num_rows)
    page = bundle_page(static, data=data.base64(), footer=note)
    try:
        with write_file_atomically(file) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export: {str(file)!r} cannot be written: {error.strerror}") from error
    return Report(len(page.encode()), note)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of which completions are kept, and those to add, the most wanted first."""

    available: Sequence[int]
    wanted: Sequence[int]


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


def _choose_steps(run: ViewedRun) -> _Steps:
    """Choose the last and first step, those in which least was learned, and others evenly spread."""
    available = [step for step, kinds in steps_on_disk(run.path).items() if "step" in kinds]
    if not available:
        return _Steps([], [])
    metrics = run.metrics
    equal = dict(zip(metrics.steps.tolist(), metrics.column("frac_reward_zero_std").tolist(), strict=True))
    least = sorted(available, key=lambda step: -np.nan_to_num(equal.get(step, 0.0)))[: _NUM_STEPS // 5]
    places = np.unique(np.linspace(0, len(available) - 1, _NUM_STEPS).round().astype(int)).tolist()
    # first halves, then quarters, then eighths: whatever fits is evenly spread
    places.sort(key=lambda place: _bit_reversed(place, len(available)))
    wanted = dict.fromkeys([available[-1], available[0], *least[:2], *(available[place] for place in places), *least])
    return _Steps(available, list(wanted)[:_NUM_STEPS])


def _bit_reversed(index: int, length: int) -> int:
    bits = max(1, (length - 1).bit_length())
    return int(f"{index:0{bits}b}"[::-1], 2)


def _add_steps(data: _Data, wanted: Sequence[int], on_done: Callable[[int], object]) -> dict[int, list[int]]:
    """Add steps with all their groups while they fit. Returns the rows of completions of those that did."""
    keep = data.left_chars * _TOKENS_SHARE
    rows: dict[int, list[int]] = {}
    listed: dict[int, Any] = {}
    for num_done, step in enumerate(wanted, 1):
        path, of_step = data.ask("/api/runs/{id}/steps/{step}", f"sort=order&limit={MAX_GROUPS}", step=step)
        answers = {path.partition("?")[0]: of_step}
        for group in of_step["groups"]:
            answers.update([data.ask("/api/runs/{id}/steps/{step}/groups/{index}", step=step, index=group["index"])])
        if data.add(answers, keep_chars=keep):
            # the first of each group, then the second of each
            members = itertools.zip_longest(*(group["rows"] for group in of_step["groups"]))
            rows[step] = [row["row"] for turn in members for row in turn if row is not None]
            listed[step] = {"step": step, "kinds": ["step"], "rows": len(rows[step])}
        on_done(num_done)
    steps = sorted(rows)
    ends = {"first": steps[0], "last": steps[-1]} if steps else {"first": None, "last": None}
    data.add({f"/api/runs/{data.run.id}/steps": {"steps": [listed[step] for step in steps], **ends}})
    return {step: rows[step] for step in steps}


def _add_tokens(
    data: _Data, rows_of_steps: Mapping[int, Sequence[int]], on_done: Callable[[int], object]
) -> tuple[int, int]:
    """Add completions token by token, of each step in turn. Returns the number of completions, and of those added."""
    turns = itertools.zip_longest(*([(step, row) for row in rows] for step, rows in rows_of_steps.items()))
    wanted = [entry for turn in turns for entry in turn if entry is not None]
    for num_added, (step, row) in enumerate(wanted):
        if num_added == _NUM_TOKEN_VIEWS:
            return len(wanted), num_added
        path, value = data.ask("/api/runs/{id}/steps/{step}/completions/{row}", step=step, row=row)
        if not data.add({path: _round(value)}):
            return len(wanted), num_added
        on_done(num_added // _VIEWS_PER_STEP)
    return len(wanted), len(wanted)


def _note(run: ViewedRun, steps: _Steps, added: Sequence[int], *, points: int, num_tokens: int, num_rows: int) -> str:
    """Return the text below the page: what was exported when, and what was left out."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    sentences = [f"Exported from run {run.name} on {when}."]
    if len(added) < len(steps.available):
        which = f": {', '.join(map(str, added))}" if added else ""
        sentences.append(f"Completions: {len(added):,} of {len(steps.available):,} steps{which}.")
    if num_tokens < num_rows:
        sentences.append(f"Token by token: {num_tokens:,} of {num_rows:,} completions.")
    longest = max(len(run.metrics.steps), len(run.metrics.eval.steps))
    if points < longest:
        sentences.append(f"Curves: at most {points} of {longest:,} points, with the highest and lowest.")
    sentences.append("Search and live updates need `cohort view`.")
    return " ".join(sentences)


def _num_chars(num_bytes: int) -> int:
    """Return the length of bytes in base64."""
    return (num_bytes + 2) // 3 * 4


def _without_passwords(text: str) -> str:
    """Hide the passwords of URLs, which completions, messages and paths may hold."""
    return _URL_PASSWORD.sub(r"\1***@", text)


def _round(value: Any) -> Any:
    """Round numbers to what a chart shows."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, list):
        return [_round(v) for v in value]
    if isinstance(value, dict):
        return {key: _round(v) for key, v in value.items()}
    return value
