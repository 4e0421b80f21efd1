"""Pages: links, blocks of YAML, Python and commands are right; the site's navigation and the READMEs are in step."""

import ast
import re
import tomllib
from typing import Any

import pytest
import typer.main
import yaml

from cohort.cli.app import app
from cohort.config import Config, config_from_dict
from cohort.errors import UserError
from pages import FENCED, ROOT, anchors, prose

DOCS = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", *DOCS]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "d", "prompt": "p"},
    "rewards": [{"use": "math"}],
    "train": {"steps": 1},
}


def blocks(*languages: str) -> list[tuple[str, str]]:
    """The fenced blocks in these languages, each with its page."""
    return [(page, block) for page, text in TEXTS.items() for name, block in FENCED.findall(text) if name in languages]


def wrong_links(page: str, text: str) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            found.append(f"{page}: {target}")
    return found


def test_every_link_leads_somewhere():
    assert [link for page, text in TEXTS.items() for link in wrong_links(page, text)] == []
    assert wrong_links("README.md", "[a](docs/no.md) [b](docs/data.md#no) [c](#cohort)\n# Cohort") == [
        "README.md: docs/no.md",
        "README.md: docs/data.md#no",
    ]


def test_blocks_of_configuration_load():
    failed, count = [], 0
    for page, block in blocks("yaml"):
        loaded = yaml.safe_load(block)
        try:
            if isinstance(loaded, dict) and loaded.keys() <= Config.model_fields.keys():
                rewards = [{"use": "code" if "sandbox" in loaded else "math"}]
                partial = {
                    key: BASE[key] | loaded[key] if isinstance(loaded[key], dict) else loaded[key]
                    for key in ("data", "model", "train")
                    if key in loaded
                }
                config_from_dict({**BASE, "rewards": rewards, **loaded, **partial})
            elif isinstance(loaded, list) and "use" in loaded[0]:
                config_from_dict({**BASE, "rewards": loaded})
            else:
                continue
            count += 1
        except UserError as error:
            failed.append(f"{page}:\n{block}\n{error}")
    assert not failed, "\n".join(failed)
    assert count > 30


def test_blocks_of_python_are_python():
    for page, block in blocks("python"):
        if page == "docs/api.md":  # signatures
            continue
        try:
            ast.parse(block)
        except SyntaxError as error:
            raise AssertionError(f"{page}:\n{block}") from error


def problems(line: str) -> list[str]:
    """What is wrong with the options and keys of a line that runs `cohort`."""
    found = []
    for name, rest in re.findall(r"(?:^|[\s/])cohort ([a-z]+)\b([^|&>;]*)", line.partition(" # ")[0]):
        if name not in COMMANDS:
            return [f"no command {name}"]
        command = COMMANDS[name]
        if name == "launch":
            command = command.commands[rest.split()[0]]
        rest = re.split(r"\s--\s|(?<=\.py)\s", rest)[0] if name == "launch" else rest
        known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        found += [option for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest) if option not in known | {"--help"}]
        keys = re.findall(
            r"(?:^|\s)'?((?:model|data|rollout|algorithm|train|optim|eval|hardware|run)\.[\w.]+=[^\s']+)", rest
        )
        try:
            config_from_dict(BASE, [key for key in keys if not key.endswith("{kind:")])
        except UserError as error:
            found += [str(error)] if "unknown key" in str(error) else []
    return found


def test_commands_have_their_options():
    lines = [(page, line) for page, block in blocks("", "sh") for line in block.replace("\\\n", " ").splitlines()]
    assert [(page, line, found) for page, line in lines if (found := problems(line))] == []
    assert (
        problems("cohort trian run.yaml") and problems("cohort plan --nope") and problems("cohort train a train.step=1")
    )


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w-]+\.md", str(site["nav"]))
    assert sorted(f"docs/{name}" for name in named) == sorted(DOCS)
    assert [name for name in named if name != "index.md" and name not in TEXTS["docs/index.md"]] == []


def test_every_extra_is_documented():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[^|]*) \|", TEXTS["docs/start-install.md"], re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(extras)


@pytest.mark.parametrize("what", ["commands", "numbers", "links"])
def test_the_chinese_readme_says_the_same(what: str):
    def content(page: str) -> list[str]:
        text = TEXTS[page].partition("<!-- reference -->")[0]
        if what == "commands":
            return [re.sub(r"\s*#.*", "", line) for _, block in FENCED.findall(text) for line in block.splitlines()]
        if what == "links":
            return sorted(set(re.findall(r"\]\(([^)]*)\)", prose(text))) - {"README.md", "README.zh.md"})
        return sorted(re.findall(r"\d+(?:[.,]\d+)*", prose(text)))

    assert content("README.zh.md") == content("README.md")
