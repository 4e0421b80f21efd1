"""`python -m cohort.train CONFIG [KEY.SUB=VALUE ...] [--resume]`: one rank of a run started by torchrun.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m cohort.train CONFIG

Do not import this module: `cohort.train` is the function.
"""

import argparse
import sys
from pathlib import Path

import cohort.cli  # noqa: F401  (sets the environment before torch is imported)
from cohort.config import load_config
from cohort.crash_report import report_crash, set_run_dir
from cohort.errors import TrainingError, UserError
from cohort.startup import run_and_exit
from cohort.stopping import dedicate_process


def main() -> None:
    """Run one rank. Exit codes are those of `cohort`."""
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = argparse.ArgumentParser(prog="python -m cohort.train", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    dedicate_process()
    try:
        with report_crash(UserError, TrainingError):
            record(_train)(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except TrainingError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _train(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)  # report configuration errors before importing torch
    set_run_dir(Path(config.run.dir))

    from cohort.launch import train
    from cohort.rendezvous import started_by_torchrun
    from cohort.trainer import run_rank

    run = run_rank if started_by_torchrun() else train
    run(config, resume=arguments.resume)


if __name__ == "__main__":
    run_and_exit(main)
