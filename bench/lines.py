"""Count lines of code by folder: without blank lines, comments and docstrings.

python bench/lines.py [FOLDER ...]   (default: the packages in src, and tests)
python bench/lines.py --check        (`make check`: no package has more lines than bench/line_budgets.toml allows)
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

BUDGETS = Path("bench/line_budgets.toml")
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


def count(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return folder -> (files, lines, lines of code) of the Python files below `root`; "." for those in it."""
    files, lines, code = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        folder = parts[0] if len(parts) > 1 else "."
        source = path.read_text()
        files[folder] += 1
        lines[folder] += source.count("\n")
        code[folder] += lines_of_code(source)
    return {folder: (files[folder], lines[folder], code[folder]) for folder in sorted(files)}


def print_table(root: Path) -> None:
    """Print files, lines and lines of code of each folder."""
    counted = count(root)
    print(f"{root}\n  {'folder':<14}{'files':>6}{'lines':>8}{'code':>8}")
    total = tuple(map(sum, zip(*counted.values(), strict=True)))
    for folder, (files, lines, code) in [*counted.items(), ("all", total)]:
        print(f"  {folder:<14}{files:>6}{lines:>8}{code:>8}")


def over_budget() -> list[str]:
    """Compare the lines of code of each package with `line_budgets.toml`, and return what exceeds it."""
    found = []
    for root, budgets in tomllib.loads(BUDGETS.read_text(encoding="utf-8")).items():
        for folder, (_, _, code) in count(Path(root)).items():
            if code > (budget := budgets.get(folder, 0)):
                found.append(f"{root}/{folder}: {code} lines of code, and the budget is {budget}")
    return found


def main() -> None:
    """Print tables, or with --check compare with the budgets."""
    if sys.argv[1:] == ["--check"]:
        if found := over_budget():
            sys.exit("\n".join([*found, f"Delete or merge; or raise {BUDGETS} in the same commit, which says why"]))
        return
    for root in sys.argv[1:] or ["src/cohort", "src/cohort_check", "src/cohort_view", "tests"]:
        print_table(Path(root))


if __name__ == "__main__":
    main()
