"""`cohort init`: a folder with a first run that trains at once: configuration, reward, rows and a README."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import yaml

from cohort.demo import tools
from cohort.demo.tasks import TASKS
from cohort.demo.word_problems import write_jsonl
from cohort.errors import UserError

_STARTER = Path(__file__).parent / "starter"
_TASK_OF = {"math": "words", "tools": "tools", "code": "code"}
_NUM_ROWS = 20
_NEXT = "Then, one at a time: your rows into `train.jsonl`, your reward into `rewards.py`, your model into `run.yaml`."
_NEXT_CONVERTED = (
    "First settle what `run.yaml` lists under `decide_first` and `To do`, and read `Different here`. `run.dir` must be "
    "a folder that the script has not used."
)
_WHAT = {
    "run.yaml": "the configuration",
    "rewards.py": "the reward",
    "tools.py": "the tool that the model may call",
    "train.jsonl": f"{_NUM_ROWS} rows of data",
}


def write_starter(folder: Path, *, task: str) -> list[str]:
    """Write a first run on the demo's own model; return the names of its files.

    Raises:
        UserError: the folder has files already, or there is no such task.
    """
    if task not in _TASK_OF:
        raise UserError(f"--task: {task!r} is no task; must be one of {', '.join(_TASK_OF)}")
    chosen = TASKS[_TASK_OF[task]]
    files = {name: (_STARTER / task / name).read_text(encoding="utf-8") for name in ("run.yaml", "rewards.py")}
    model = json.dumps(str(chosen.base_path))  # a quoted string in YAML too
    files["run.yaml"] = Template(files["run.yaml"]).substitute(model=model, run=f"runs/{task}")
    if task == "tools":
        files["tools.py"] = Path(tools.__file__).read_text(encoding="utf-8")
    _write(folder, files, "train.jsonl", advice=_NEXT)
    write_jsonl(folder / "train.jsonl", chosen.generate(0, _NUM_ROWS, "train"))
    return [*files, "train.jsonl"]


def write_converted(folder: Path, script: Path, converted: str) -> list[str]:
    """Write what `cohort convert` made of a script, and the reward functions that it names.

    Raises:
        UserError: the folder has files already.
    """
    rewards = yaml.safe_load(converted).get("rewards") or ()
    names = [use.partition(":")[2] for use in (str(r["use"]) for r in rewards) if use.startswith("rewards.py:")]
    files = {"run.yaml": converted}
    if script.suffix == ".py" and names:
        source = script.read_text(encoding="utf-8")
        files["rewards.py"] = "\n\n\n".join(_sources_of(source, names)) + "\n"
        defined = {name for node in ast.parse(source).body for name in _names_of(node)}
        for name in defined.intersection(names):  # the file has them
            files["run.yaml"] = re.sub(rf"(?m)^# - rewards\.py: .* as the function {name} .*\n", "", files["run.yaml"])
        files["run.yaml"] = re.sub(r"# To do:\n(?!# - )", "", files["run.yaml"])
    _write(folder, files, advice=_NEXT_CONVERTED)
    return [*files]


def _write(folder: Path, files: Mapping[str, str], *others: str, advice: str) -> None:
    """Write the files and a README: what they are, and the `others` that the caller writes, and what to do next."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"FOLDER: {str(folder)!r} exists and is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"| `{name}` | {_WHAT[name]} |" for name in (*files, *others))
    run_dir = yaml.safe_load(files["run.yaml"])["run"]["dir"]
    template = Template((_STARTER / "README.md").read_text(encoding="utf-8"))
    readme = template.substitute(files=listed, folder=folder, run=run_dir, next=advice)
    for name, text in {**files, "README.md": readme}.items():
        (folder / name).write_text(text, encoding="utf-8")


def _sources_of(source: str, names: Sequence[str]) -> list[str]:
    """Return the sources of functions with what they need of a script: imports, functions, classes and constants."""
    body = ast.parse(source).body
    defined = {name: node for node in body for name in _names_of(node)}
    needed, left = set[ast.stmt](), [*names]
    while left:
        node = defined.get(left.pop())
        if node is not None and node not in needed:
            needed.add(node)
            left += [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
    found = [(node, ast.get_source_segment(source, node) or "") for node in body if node in needed]
    imports = [text for node, text in found if isinstance(node, ast.Import | ast.ImportFrom)]
    return ["\n".join(imports)] * bool(imports) + [text for node, text in found if text not in imports]


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []
