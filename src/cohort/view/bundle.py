"""Bundle the page's own files into one HTML document, which needs no server and no network.

Browsers load no modules from `file://`, so all modules become one script. Only the forms of `import` and `export` that
the page's modules use are known; anything else raises. The content policy of the document allows its own scripts and
styles by their hashes, and nothing else.
"""

import base64
import hashlib
import html
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

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
