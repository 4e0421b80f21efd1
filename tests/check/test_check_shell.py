"""What is taken from shell scripts: words, variables, functions, several runs, shells in shells, Slurm."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import read
from cohort.check import check_file
from cohort.check.readers.shell import parse_shell
from selection import examples


def words(text: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in parse_shell(text)]


# --- shell


def test_continued_lines_quotes_defaults_and_arithmetic():
    text = (
        '#!/bin/bash\nset -e  # a comment with \'a quote\nexport MODEL="a b"\nN=4\n'
        "python x.py \\\n  --model \"$MODEL\" \\\n  --n $((N * 2)) --p=${PORT:-8000} --q ${N:-1} 'lit $N' \\\n  "
        "--last\n"
    )
    assert words(text)[-1] == [
        *("python", "x.py", "--model", "a b", "--n", "8", "--p=8000", "--q", "4", "lit $N", "--last")
    ]
    assert parse_shell(text)[-1].line == 5


def test_what_cannot_be_resolved_is_named_and_the_rest_is_kept():
    (command,) = parse_shell("run --a $HOME/x --b `date` --c $(nproc) --d ${X%%y} --e $1 --f 3")
    assert [word.missing for word in command.words] == [
        *((), (), ("$HOME",), (), ("`date`",), (), ("$(nproc)",), (), ("${X%%y}",), (), ("$1",), (), ())
    ]
    assert command.words[2].text == "/x"


def test_environment_prefixes_exports_arrays_and_branches():
    text = (
        'PLAIN=1\nexport A=2\nargs=(--x 1\n  --y "two words")\nargs+=(--z)\n'
        'if [ -z "$Q" ]; then\n  B=3\nelse\n  B=4\nfi\n'
        'C=5 NPROC_PER_NODE=$A run "${args[@]}" "$B" "$@"\n'
    )
    command = parse_shell(text)[-1]
    assert {name: word.text for name, word in command.env.items()} == {"A": "2", "C": "5", "NPROC_PER_NODE": "2"}
    assert [word.text for word in command.words] == ["run", "--x", "1", "--y", "two words", "--z", ""]
    assert command.words[-1].missing == ("$B (assigned in a branch)",)


def test_commands_in_quotes_added_text_and_exports_that_change():
    text = (
        'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nexport GPUS=0\nARGS="--x 1"\nARGS+=" --y 2"\nGPUS=0,1\n'
        'run $ARGS --dir "$DIR/data"\n'
    )
    (command,) = parse_shell(text)
    assert [word.text for word in command.words] == ["run", "--x", "1", "--y", "2", "--dir", "/data"]
    assert command.words[-1].missing == ('$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',)
    assert command.env["GPUS"].text == "0,1"


def test_here_documents_redirections_and_several_commands_on_a_line():
    text = "cat <<EOF > file.txt\nrun --inside 1\nEOF\na 1 > log 2>&1 && b 2 | tee x; c 3 &\n"
    assert words(text) == [["cat"], ["a", "1"], ["b", "2"], ["tee", "x"], ["c", "3"]]


PLAIN = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=12)


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_quoted_words_come_back_as_they_were(parts: list[str]):
    quoted = " ".join(shlex.quote(part) for part in parts)
    (command,) = parse_shell(f"run {quoted}\n")
    assert [word.text for word in command.words] == ["run", *parts]
    assert not any(word.missing for word in command.words)


@given(st.dictionaries(st.from_regex(r"\A[A-Z]{1,4}\Z"), PLAIN, min_size=1, max_size=4), st.booleans())
def test_variables_come_back_as_they_were_assigned(values: dict[str, str], braces: bool):
    assigned = "".join(f"V{name}={shlex.quote(value)}\n" for name, value in values.items())
    used = " ".join(f'"${{V{name}}}"' if braces else f'"$V{name}"' for name in values)
    assert words(f"{assigned}run {used}\n")[-1] == ["run", *values.values()]


@examples(300)
@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error_and_to_its_end(text: str):
    commands = parse_shell(text)
    assert all(1 <= command.line <= text.count("\n") + 1 for command in commands)


SHELL_BITS = st.sampled_from(
    [
        "$X",
        "${X:-a b}",
        "'",
        '"',
        "\\",
        "\n",
        "\\\n",
        "$(",
        ")",
        "`",
        "((",
        "))",
        "${",
        "}",
        "<<E",
        "E",
        "#",
        "a=",
        " ",
        ";",
        "(",
        "if",
        "fi",
    ]
)


@examples(300)
@given(st.lists(SHELL_BITS, max_size=30).map("".join))
def test_any_mixture_of_shell_syntax_is_read_to_its_end(text: str):
    parse_shell(text)


@pytest.mark.skipif(not os.path.exists("/bin/sh"), reason="needs /bin/sh")
@examples(40)
@given(
    st.lists(
        st.sampled_from(
            [
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
            ]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_real_shell_sees_the_same_words(parts: list[str]):
    """Pieces of shell written here, given to /bin/sh as well."""
    text = "X='p q'\nZ=4\n" + "show " + " ".join(parts) + "\n"
    script = 'show() { for word in "$@"; do printf \'%s\\0\' "$word"; done; }\n' + text
    real = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={}).stdout
    assert words(text)[-1] == ["show", *real.split("\0")[:-1]]


# --- several runs, functions, shells in shells, Slurm
TRL_RUN = "accelerate launch --num_processes {} grpo.py --per_device_train_batch_size {} --num_generations 8\n"


def test_every_run_of_a_script_is_read(tmp_path: Path):
    launch = read(tmp_path, "swift rlhf --rlhf_type sft\n" + TRL_RUN.format(3, 8) + TRL_RUN.format(7, 4), "a.sh")
    assert [run.processes.value for run in (launch, *launch.others) if run.processes] == [3, 7]
    assert launch.others[0].reason.endswith("line 3")
    verl = "python -m verl.trainer.main_ppo data.train_batch_size={} actor_rollout_ref.rollout.n=5\n"
    launch = read(tmp_path, verl.format(8) + verl.format(16), "b.sh")
    assert [run.settings["data.train_batch_size"].value for run in (launch, *launch.others)] == [8, 16]
    launch = read(tmp_path, "a = GRPOConfig(num_generations=8)\nb = GRPOConfig(num_generations=2)\n", "c.py")
    assert [run.settings["num_generations"].value for run in (launch, *launch.others)] == [8, 2]


def test_a_function_is_read_with_the_arguments_of_each_call(tmp_path: Path):
    text = (
        "GENERATIONS=8\n"
        "train() {\n"
        "  local n=$1\n"
        "  accelerate launch --num_processes $n grpo.py --num_generations $GENERATIONS "
        '--run_name ${2:-none} "${@:3}"\n'
        "}\n"
        "function other {\n  echo nothing\n}\n"
        "train 3 first --beta 0.1\n"
        "GENERATIONS=4\n"
        "train 7\n"
    )
    launch = read(tmp_path, text, "run.sh")
    runs = (launch, *launch.others)
    assert [int(run.processes.value) for run in runs if run.processes] == [3, 7]
    assert [run.settings["num_generations"].value for run in runs] == ["8", "4"]
    assert [run.settings["run_name"].value for run in runs] == ["first", "none"]
    assert launch.settings["beta"].value == "0.1"
    assert launch.reason.endswith("line 9")


def test_a_function_that_is_not_called_or_calls_itself_is_read_once(tmp_path: Path):
    launch = read(tmp_path, "go() {\n" + TRL_RUN.format(5, 8) + "}\n", "run.sh")
    assert launch.processes and launch.processes.value == 5 and not launch.others
    launch = read(tmp_path, "go() {\n  go\n" + TRL_RUN.format(5, 8) + "}\ngo\n", "run.sh")
    assert launch.processes and launch.processes.value == 5


@pytest.mark.parametrize(
    "command",
    ["bash -c '{}'", 'srun --nodes=2 bash -lc "{}"', "docker run image sh -c '{}'", "bash -c 'cd x && {}'"],
)
def test_a_shell_in_a_shell_is_read(tmp_path: Path, command: str):
    run = TRL_RUN.format("$N", 8).strip()
    launch = read(tmp_path, f"export N=6\n{command.format(run)}\n", "run.sh")
    assert launch.processes and launch.processes.value == 6
    # what was not exported is not there in single quotes
    launch = read(tmp_path, f"bash -c '{TRL_RUN.format(2, '$B').strip()}'\n", "run.sh")
    assert launch.unread[0].key == "per_device_train_batch_size"


def test_slurm_says_how_many_gpus_there_are(tmp_path: Path):
    head = "#!/bin/bash\n#SBATCH --job-name=x --nodes=2\n#SBATCH --gres=gpu:h100:4  # four\n\n"
    run = "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE grpo.py --num_generations 8\n"
    launch = read(tmp_path, head + run, "run.slurm")
    assert launch.processes and launch.processes.value == 8
    assert launch.node_gpus and (launch.node_gpus.value, launch.gpu) == (4, "h100")
    launch = read(tmp_path, head + "accelerate launch grpo.py --num_generations 8\n", "run.slurm")
    assert launch.processes and launch.processes.value == 8
    assert launch.processes.where == "line 3: #SBATCH --gres=gpu:h100:4"
    late = "echo\n#SBATCH --gres=gpu:2\n" + TRL_RUN.format(4, 8)
    assert read(tmp_path, late, "run.sh").node_gpus is None  # sbatch has stopped reading


@pytest.mark.parametrize(
    ("option", "each"),
    [("--gpus=a100:16", 8), ("-G 16", 8), ("--gpus-per-node=8", 8), ("--gres=gpu:2,tmpfs:1", 2), ("--gpus=3", None)],
)
def test_ways_to_ask_slurm(tmp_path: Path, option: str, each: int | None):
    launch = read(tmp_path, f"#!/bin/sh\n#SBATCH -N 2\n#SBATCH {option}\n{TRL_RUN.format(4, 8)}", "run.sh")
    assert (launch.node_gpus.value if launch.node_gpus else None) == each


def test_gpus_of_a_job_that_stand_idle_or_are_missing(tmp_path: Path):
    def codes(processes: int) -> set[str]:
        file = tmp_path / "run.sh"
        file.write_text(f"#!/bin/sh\n#SBATCH --gpus-per-node=4\n{TRL_RUN.format(processes, 8)}")
        return {finding.code for finding in check_file(file).findings} & {"CHK011", "CHK012"}

    assert (codes(4), codes(3), codes(5)) == (set(), {"CHK011"}, {"CHK012"})
