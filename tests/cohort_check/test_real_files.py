"""Launch files of other projects, reduced to what decides, with the verdict of the framework itself (`real_files/`)."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.plan.shape import try_read_shape
from cohort_check import FileReport, check_file
from cohort_check.convert import convert_file, convert_launch
from cohort_check.launch import Launch, Unread
from cohort_check.readers import read_launch
from plans import without_advice
from selection import slow

FOLDER = Path(__file__).with_name("real_files")
CASES: dict[str, list[dict[str, Any]]] = {
    path.stem: yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(FOLDER.glob("*.yaml"))
}
SAME_RULES = (
    {"trl", "open-r1"},
    {"trl", "unsloth"},
)  # a recipe without a key of Open-R1's own cannot be told from one of TRL's
PLANNED = {
    "trl": 58 / 59,  # 72 billion parameters need servers of several GPUs, of which the file says nothing
    "open-r1": 1.0,
    "ms-swift": 50 / 58,
    "verl": 80 / 92,
}  # share of what is converted and starts that `cohort plan` fits on GPUs
SAMPLED = {"trl": 60, "open-r1": 20, "ms-swift": 60, "verl": 100}  # one of so many files
CONVERTED = [
    ("open-r1", 4),  # one of so many files
    *(pytest.param(framework, 1, marks=slow("some of one framework's files")) for framework in PLANNED),
]
MINIMUM = {"trl": 0.95, "open-r1": 0.95, "ms-swift": 0.95, "verl": 0.90, "prime-rl": 1.0, "openrlhf": 1.0}
UNREAD = (  # change no training, or what they change is to decide in other words
    "output_dir",
    "trainer.default_local_dir",
    "report_to",
    "trainer.logger",
    "per_device_eval_batch_size",
    "generation_batch_size",
    "steps_per_generation",
    "num_infer_workers",
    "vllm_device",
)
SIZES = (1, 2, 3, 4, 6, 7, 8, 16)
OUTCOMES = {"not judged": "not checked", "recognized": "not checked"}


def write(case: dict[str, Any], folder: Path) -> Path:
    """The case's file, with those beside it, in a folder of its own."""
    for name, text in {case["file"]: case["text"], **case.get("beside", {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / str(case["file"])


def checked(case: dict[str, Any], path: Path, framework: str) -> FileReport:
    launched_with = case.get("launched_with") if framework in ("trl", "open-r1") else None
    version = case["version"] if framework in PLANNED else None
    return check_file(path, world_sizes=SIZES, framework_version=version, launched_with=launched_with)


def disagreement(case: dict[str, Any], found: FileReport, framework: str) -> str | None:
    """How our verdict differs from the framework's own; None if it does not."""
    expected = OUTCOMES.get(case["verdict"], case["verdict"])
    read_as = found.launch.framework if found.launch else None
    if read_as != framework and {read_as, framework} not in SAME_RULES:
        return f"read as {found.launch.framework if found.launch else found.findings[0].message}"
    if found.outcome != expected:
        return f"{found.outcome}, expected {expected}: {found.verdict}; {[str(f.message) for f in found.findings][:3]}"
    if expected == "refused":
        words = {str(text)[:40] for f in found.findings for text in (f.says, f.message) if text}
        if not any(str(case["says"])[:40] in text or text in str(case["says"]) for text in words):
            return f"refused with other words: {words}, expected {case['says']!r}"
    if expected == "depends":
        starts = [size for size, start in found.starts.items() if start.starts]
        if starts != list(case["starts_with"]):
            return f"starts with {starts}, expected {case['starts_with']}"
    if expected == "starts" and case.get("processes"):
        assert found.rules is not None
        start = found.rules.start(case["processes"], found.rules.sizes)
        numbers = {key: getattr(start, key) for key in ("global_batch_size", "generation_batch_size")}
        wrong = {key: value for key, value in numbers.items() if case.get("numbers", {}).get(key, value) != value}
        if wrong:
            return f"{wrong}, expected {case['numbers']}"
    return None


@lru_cache
def results(framework: str, folder: Path) -> list[tuple[dict[str, Any], FileReport, str | None]]:
    found = []
    for i, case in enumerate(CASES[framework]):
        report = checked(case, write(case, folder / str(i)), framework)
        found.append((case, report, disagreement(case, report, framework)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real_files")


def test_there_are_enough_files() -> None:
    counts = Counter({name: len(cases) for name, cases in CASES.items()})
    assert set(counts) == set(MINIMUM) and counts.total() >= 180
    assert len({case["origin"] for cases in CASES.values() for case in cases}) >= 170


@pytest.mark.parametrize("framework", MINIMUM)
def test_files_are_checked_as_the_framework_itself_would(framework: str, folder: Path) -> None:
    found = results(framework, folder / framework)
    wrong = [f"{case['origin']} ({case['file']}): {text}" for case, _, text in found if text]
    assert len(wrong) <= (1 - MINIMUM[framework]) * len(found), "\n".join([f"{len(wrong)} of {len(found)}", *wrong])


@pytest.mark.parametrize("framework", MINIMUM)
def test_there_is_no_false_error(framework: str, folder: Path) -> None:
    false = [
        f"{case['origin']}: {finding.code} {finding.message} {finding.says}"
        for case, report, _ in results(framework, folder / framework)
        for run in (report, *report.others)
        for finding in run.findings
        if finding.severity == "error" and case["verdict"] != "refused"
    ]
    assert false == []


@lru_cache
def launches(framework: str, folder: Path) -> list[tuple[dict[str, Any], Launch]]:
    """What is read of each case that the framework itself would start or can say something about."""
    found = []
    for i, case in enumerate(CASES[framework]):
        path = write(case, folder / str(i))
        if case["verdict"] in ("starts", "depends"):
            found.append((case, read_launch(path, launched_with=case.get("launched_with"))))
    return found


@pytest.mark.slow("a few files of each framework")
@pytest.mark.parametrize("framework", PLANNED)
def test_every_setting_of_all_files_is_used_or_told(framework: str, folder: Path) -> None:
    assert dropped(launches(framework, folder / framework)) == []


@pytest.mark.parametrize("framework", PLANNED)
def test_every_setting_is_used_or_told(framework: str, folder: Path) -> None:
    assert dropped(launches(framework, folder / framework)[:: SAMPLED[framework]]) == []


def dropped(cases: list[tuple[dict[str, Any], Launch]]) -> list[str]:
    """Settings of which another value (or, without one, the removal) changes neither the configuration nor a comment.

    A setting that is listed as not needed may have any value.
    """
    found = []
    for case, launch in cases:

        def convert(settings: Any, case: Any = case, launch: Launch = launch) -> Any:
            return convert_launch(replace(launch, settings=settings), FOLDER, framework_version=case["version"])

        converted = convert(launch.settings)
        config_from_dict(converted[0])
        listed = " ".join(converted[1].get("Not needed", ())).replace(",", " ").split()
        for key, said in launch.settings.items():
            others = [{**launch.settings, key: replace(said, value=value)} for value in others_than(said.value)]
            # of an unknown value, and of one that says that it is not set, nothing is lost
            if not others and said.value is not ... and str(said.value).lower() not in ("none", "null", ""):
                others = [{name: value for name, value in launch.settings.items() if name != key}]
            if key not in listed and any(convert(settings) == converted for settings in others):
                found.append(f"{case['origin']}: {key}={said.value!r}")
    return found


@pytest.mark.parametrize("framework", PLANNED)
def test_what_changes_the_configuration_and_cannot_be_read_is_to_decide(framework: str, folder: Path) -> None:
    found = []
    for case, launch in launches(framework, folder / framework)[:: SAMPLED[framework]]:

        def convert(changed: Launch, case: Any = case) -> Any:
            return convert_launch(changed, FOLDER, framework_version=case["version"])[0]

        config = convert(launch)
        for key, said in launch.settings.items():
            others = [{**launch.settings, key: replace(said, value=value)} for value in others_than(said.value)]
            if all(convert(replace(launch, settings=settings)) == config for settings in others):
                continue
            rest = {name: value for name, value in launch.settings.items() if name != key}
            unread = Unread(key.removeprefix("trainer."), "a:1", "computed")
            told = convert(replace(launch, settings=rest, unread=(*launch.unread, unread))).get("decide_first", ())
            if key not in UNREAD and not any(unread.key.strip("()") in text for text in told):
                found.append(f"{case['origin']}: {key}={said.value!r}")
    assert found == []


def others_than(value: Any) -> list[Any]:
    """Another value of the same type; none for what has no other of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list) and value:
        changed = [*map(another, value)]
        return [changed] if changed != value else []
    if not isinstance(value, int | float | str) or str(value).lower() in ("none", "null", ""):
        return []
    if str(value).lower() in ("true", "false", "yes", "no"):
        return ["false" if str(value).lower() in ("true", "yes") else "true"]
    return [another(value)]


def another(value: Any) -> Any:
    if not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return "other"
    return type(value)(int(number) * 2 + 3 if number == int(number) else number * 2)


@pytest.mark.parametrize(("framework", "one_of"), CONVERTED)
def test_what_is_converted_can_be_planned(framework: str, one_of: int, folder: Path) -> None:
    failed = []
    planned = launches(framework, folder / framework)[::one_of]
    for i, (case, launch) in enumerate(planned):
        path = folder / framework / str(i) / "converted.yaml"
        config, _ = convert_launch(launch, path.parent, framework_version=case["version"])
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(config))
        hardware = config.get("hardware", {})
        processes, reserved = hardware.get("processes", 8), hardware.get("rollout_gpus", 0)
        gpus = processes if reserved == "shared" else processes + reserved
        known = try_read_shape(config["model"]["path"])
        arguments = ["plan", str(path), "--gpu", "b200", "--gpus", str(gpus)]
        arguments += [] if known else ["--model-shape", "qwen2.5-1.5b"]
        with without_advice():
            fits = any(not CliRunner().invoke(app, [*arguments, "--nodes", n]).exit_code for n in ("1", "4", "8"))
        if not fits:
            failed.append(f"{case['origin']} ({case['file']})")
    total = len(planned)
    assert total - len(failed) >= round(PLANNED[framework] * total), "\n".join([f"{len(failed)} of {total}", *failed])


@pytest.mark.parametrize("framework", ["prime-rl", "openrlhf"])
def test_what_is_only_recognized_is_not_converted(framework: str, folder: Path) -> None:
    for i, case in enumerate(CASES[framework]):
        with pytest.raises(UserError, match="only TRL, Open-R1, ms-swift and verl are converted"):
            convert_file(write(case, folder / framework / str(i)))
