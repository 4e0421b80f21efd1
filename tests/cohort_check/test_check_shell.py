"""What is taken from shell scripts: words, variables, branches, functions, several runs, Slurm. Nothing is run."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import read
from cohort_check.readers.shell import Command, parse_shell
from selection import examples, slow


def commands(text: str) -> tuple[Command, ...]:
    return parse_shell(text, "run.sh")


def words(text: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in commands(text)]


def missing(text: str) -> list[str]:
    """Why words of the last command are not known."""
    return [reason for word in commands(text)[-1].words for reason in word.missing]


# --- words


def test_continued_lines_quotes_defaults_and_arithmetic():
    text = (
        '#!/bin/bash\nset -e  # a comment with \'a quote\nexport MODEL="a b"\nN=4\n'
        "python x.py \\\n  --model \"$MODEL\" \\\n  --n $((N * 2)) --p=${PORT:-8000} --q ${N:-1} 'lit $N' \\\n  "
        '--last "$((10 / 4))" ${Y:-c} $HOME/x\n'
    )
    assert words(text)[-1] == [
        *("python", "x.py", "--model", "a b", "--n", "8", "--p=8000", "--q", "4", "lit $N", "--last", "2", "c", "~/x")
    ]
    assert [word.where for word in commands(text)[-1].words[:5:2]] == ["run.sh:5", "run.sh:6", "run.sh:7"]


def test_what_cannot_be_resolved_is_named_and_the_rest_is_kept():
    (command,) = commands('run --a $X/x --b `date` --c $(nproc) --d ${X%%y} --e $1 --f 3 "$@" $((Z + 1))')
    assert [word.missing for word in command.words] == [
        *((), (), ("$X is set outside of this file",)),
        *((), ("`date` is the output of a command, and nothing is run",)),
        *((), ("$(nproc) is the output of a command, and nothing is run",)),
        *((), ("${X%%y} is not worked out",), (), ("$1 is set outside of this file",), (), ()),
        *(("$@ is set outside of this file",), ("$((Z + 1)) is not worked out",)),
    ]
    assert command.words[2].text == "/x"


def test_environment_prefixes_and_exports():
    text = "PLAIN=1\nexport NPROC_PER_NODE=2\nNPROC_PER_NODE=3\nA=5 CUDA_VISIBLE_DEVICES=0,$PLAIN run > log 2>&1 &\n"
    (command,) = commands(text)
    assert {name: word.text for name, word in command.env.items()} == {
        "NPROC_PER_NODE": "3",
        "A": "5",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_arrays_are_words_with_their_own_lines():
    text = 'A=(--x 1  # a comment\n  --y "two words")\nA+=(--z)\nNONE=()\nrun "${A[@]}" ${NONE[@]} "${NONE[@]}" $B\n'
    command = commands(text)[-1]
    assert [word.text for word in command.words] == ["run", "--x", "1", "--y", "two words", "--z", ""]
    assert [word.where for word in command.words[3:]] == ["run.sh:2", "run.sh:2", "run.sh:3", "run.sh:5"]
    assert missing(text) == ["$B is set outside of this file"]


def test_commands_in_quotes_and_added_text():
    text = 'DIR="$(cd "$(dirname "$0")" && pwd)"\nARGS="--x 1"\nARGS+=" --y 2"\nrun $ARGS --dir "$DIR/data"\n'
    assert words(text) == [["run", "--x", "1", "--y", "2", "--dir", "./data"]]
    up = 'ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nrun "$ROOT/a" "$(dirname "$0")/b"\n'
    assert words(up) == [["run", "./../a", "./b"]] and missing(text + up) == []


def test_a_backslash_before_a_blank_ends_a_command():
    for end in ("\\ ", "\\  # note", "\\ # note"):
        assert words(f"run --a 1 {end}\n--b 2\n")[0][:4] == ["run", "--a", "1", ""], end
        assert "ends on this line" in missing(f"run --a 1 {end}\n")[0]
    assert words("run my\\ file \\\n --b 2 # note\n") == [["run", "my file", "--b", "2"]]


def test_here_documents_redirections_and_several_commands_on_a_line():
    text = "cat <<EOF > file.txt\nrun --inside 1\nEOF\na 1 > log 2>&1 && b 2 | tee x; c 3 &\n"
    assert words(text) == [["cat"], ["a", "1"], ["b", "2"], ["tee", "x"], ["c", "3"]]


# --- branches


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("X=1\nif a; then X=2; fi\n", "$X is 1 or 2, which a branch decides"),
        ("if a; then X=3; elif b; then X=4; else X=3; fi\n", "$X is 3 or 4, which a branch decides"),
        ("case $A in a) X=5 ;; *) X=6 ;; esac\n", "$X is 5 or 6, which a branch decides"),
        ("X=1\n[ -z $A ] && X=2\n", "$X is 1 or 2, which a branch decides"),
        ("X=1\nfor i in 1 2; do X=$i; done\n", "$X is 1 or $i, which a branch decides"),
        ("X=1\nwhile a; do case $1 in --x) X=$2 ;; esac; done\n", "$X is 1 or $2, which a branch decides"),
        ("X=1\nif a; then X=2; else X=3; fi\n", "$X is 2 or 3, which a branch decides"),
        ("if a; then Y=2; fi\nX=${Y:-8}\n", "$Y is 8 or 2, which a branch decides"),
        ("if a; then Y=8; fi\nX=${Y:-8}\n", None),
        ("Y=1\nif a; then Y=2; fi\nX=$((4 * Y))\n", "$Y is 1 or 2, which a branch decides"),
        ("for X in 1 2; do echo; done\n", "$X is set by a loop"),
        ("while a; do X=$(b); done\n", "$(b) is the output of a command, and nothing is run"),
        ("X[1]=2\n", "$X is assigned in parts"),
        ("if [ -z $X ]; then X=7; fi\n", None),  # the only value that the file has for it
        ("X=7\nif a; then X=7; fi\n", None),
    ],
)
def test_a_variable_with_more_than_one_value_is_unknown(text: str, after: str | None):
    assert missing(f"{text}run $X\n") == ([after] if after else [])


@pytest.mark.parametrize("loop", ["for N in ; do", "L=\nfor N in $L; do"])
def test_a_loop_over_nothing_runs_nothing(loop: str):
    assert missing(f"{loop} run 1; done\nrun 2\n") == []
    assert words(f"{loop} run 1; done\nrun 2\n") == [["run", "2"]]


def test_in_a_branch_its_own_values_hold():
    assert words("X=1\nif a; then X=2; run $X; else run $X; fi\n")[1:] == [["run", "2"], ["run", "1"]]


def test_words_that_a_branch_adds_to_an_array_are_unknown_one_by_one():
    text = 'A=(x=1)\nif a; then A+=(y=2); else A+=(z=3); fi\nA+=(w=4)\nrun "${A[@]}"\n'
    assert words(text)[-1] == ["run", "x=1", "y=2", "z=3", "w=4"]
    assert [bool(word.missing) for word in commands(text)[-1].words] == [False, False, True, True, False]


# --- agreement with a real shell

PLAIN = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=12)


@given(st.dictionaries(st.from_regex(r"\A[A-Z]{1,4}\Z"), PLAIN, min_size=1, max_size=4), st.booleans())
def test_variables_come_back_as_they_were_assigned(values: dict[str, str], braces: bool):
    assigned = "".join(f"V{name}={shlex.quote(value)}\n" for name, value in values.items())
    used = " ".join(f'"${{V{name}}}"' if braces else f'"$V{name}"' for name in values)
    assert words(f"{assigned}run {used} {shlex.quote(used)}\n")[-1] == ["run", *values.values(), used]


PIECES = (
    "a",
    "'b c'",
    '"d e"',
    "$X",
    '"$X"',
    "${Y:-f g}",
    "\\$h",
    '"i\\"j"',
    "${X}k",
    "$((Z * 3))",
    '"${Y:-l}"',
    "m'n'\"o\"",
    "''",
    "'n\\\\o\\$p'",
    '" $X "',
    '"${X} ${Y:-q r} s"',
    "[1,'x']",
    '"$((Z / 3))"',
    "--x='[\"c\"]'",
)


@examples(40)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5))
def test_a_real_shell_sees_the_same_words(parts: list[str]):
    """Pieces of shell written here, given to /bin/sh as well."""
    text = "X='p q'\nZ=4\n" + "show " + " ".join(parts) + "\n"
    script = 'show() { for word in "$@"; do printf \'%s\\0\' "$word"; done; }\n' + text
    real = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={}).stdout
    assert words(text)[-1] == ["show", *real.split("\0")[:-1]]


BITS = "$X|${X:-a b}|'|\"|\\|\n|\\\n|$(|)|`|((|))|${|}|<<E|E|#|a=| |;|(|if|fi|a=(|case x in"


@examples(300)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(BITS.split("|")), max_size=30).map("".join)))
def test_any_text_is_read_without_an_error_and_to_its_end(text: str):
    for command in commands(text):
        assert 1 <= int(command.where.removeprefix("run.sh:")) <= text.count("\n") + 1


@pytest.mark.parametrize(
    "text",
    [
        "a=xxxxxxxx\n" + "a=$a$a\n" * 60 + "run --x $a --y 1\n",
        pytest.param("a=(x)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 60, marks=slow("a million words")),
    ],
)
def test_a_variable_that_doubles_is_refused(text: str):
    with pytest.raises(ValueError, match="variables expand to more than 1,000,000 characters"):
        commands(text + "run --x ${a[@]} --y 1\n")


# --- several runs, functions, shells in shells, Slurm
TRL_RUN = "accelerate launch --num_processes {} grpo.py --per_device_train_batch_size {} --num_generations 8\n"


def test_every_run_of_a_script_is_read(tmp_path: Path):
    launch = read(tmp_path, "swift rlhf --rlhf_type sft\n" + TRL_RUN.format(3, 8) + TRL_RUN.format(7, 4), "a.sh")
    assert [run.processes.value for run in (launch, *launch.others) if run.processes] == [3, 7]
    assert launch.others[0].reason.endswith("a.sh:3")
    verl = "python -m verl.trainer.main_ppo data.train_batch_size={} actor_rollout_ref.rollout.n=5\n"
    launch = read(tmp_path, verl.format(8) + verl.format(16), "b.sh")
    assert [run.settings["data.train_batch_size"].value for run in (launch, *launch.others)] == [8, 16]
    launch = read(tmp_path, "a = GRPOConfig(num_generations=8)\nb = GRPOConfig(num_generations=2)\n", "c.py")
    assert [run.settings["num_generations"].value for run in (launch, *launch.others)] == [8, 2]


def test_a_function_is_read_once_and_not_with_its_arguments(tmp_path: Path):
    text = (
        "GENERATIONS=8\ntrain() {\n  local n=$1\n  accelerate launch --num_processes $n grpo.py "
        '--num_generations $GENERATIONS --beta 0.1 "$@"\n}\ntrain 3 --x 1\nGENERATIONS=4\ntrain 7\n'
    )
    launch = read(tmp_path, text, "run.sh")
    assert not launch.others and launch.processes is None
    assert launch.settings["num_generations"].value == "8" and launch.settings["beta"].where == "run.sh:4"
    assert [(u.key, u.reason) for u in launch.unread] == [
        ("(arguments)", "$@ is set outside of this file"),
        ("num_processes", "$1 is set outside of this file"),
    ]
    for text in ("go() {\n" + TRL_RUN.format(5, 8) + "}\n", "go() {\n  go\n" + TRL_RUN.format(5, 8) + "}\ngo\n"):
        launch = read(tmp_path, text, "run.sh")
        assert launch.processes and launch.processes.value == 5 and not launch.others


@pytest.mark.parametrize("command", ["bash -c '{}'", 'srun --nodes=2 bash -lc "{}"', 'eval "{}"', "sh -c 'cd x && {}'"])
def test_a_text_that_a_shell_runs_is_read_as_it_stands(tmp_path: Path, command: str):
    launch = read(tmp_path, f"\n{command.format(TRL_RUN.format(6, 8).strip())}\n", "run.sh")
    assert launch.processes and (launch.processes.value, launch.processes.where) == (6, "run.sh:2")


@pytest.mark.parametrize("options", [("--nodes=2", "--gres=gpu:h100:4  # four"), ("-N 2", "--gpus-per-node=4")])
def test_slurm_sets_variables_for_its_nodes_and_gpus(tmp_path: Path, options: tuple[str, str]):
    head = f"#!/bin/bash\n#SBATCH --job-name=x {options[0]}\n#SBATCH {options[1]}\n\n"
    run = "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE grpo.py --num_generations 8\n"
    launch = read(tmp_path, head + run, "run.slurm")
    assert launch.processes and launch.processes.value == 8
