"""Count lines of code by folder: without blank lines, comments and docstrings.

python bench/lines.py [FOLDER ...]   (default: src/cohort tests)
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Count the lines that hold a token other than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print files, lines and lines of code of each folder, and of all but `check/`."""
    for root in [Path(name) for name in sys.argv[1:] or ["src/cohort", "tests"]]:
        files, lines, code = Counter[str](), Counter[str](), Counter[str]()
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            folder = parts[0] if len(parts) > 1 else "."
            source = path.read_text()
            files[folder] += 1
            lines[folder] += source.count("\n")
            code[folder] += lines_of_code(source)
        print(f"{root}\n  {'folder':<14}{'files':>6}{'lines':>8}{'code':>8}")
        for folder in sorted(files):
            print(f"  {folder:<14}{files[folder]:>6}{lines[folder]:>8}{code[folder]:>8}")
        print(f"  {'all':<14}{files.total():>6}{lines.total():>8}{code.total():>8}")
        if "check" in files:
            print(f"  {'without check':<14}{'':>14}{code.total() - code['check']:>8}")


if __name__ == "__main__":
    main()
