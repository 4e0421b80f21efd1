"""torchrun, without tracebacks: `python -m cohort.launch.torchrun OPTIONS -m cohort train CONFIG`.

After a signal it exits with 128 + the signal's number, as the ranks do, which have saved; after a user error with 2,
which another start would not mend; and otherwise with 1.
"""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from cohort.ranks.stopping import STOP_EXIT_CODES

USER_ERROR = 2  # exit code of `cohort train`


def main() -> None:
    """Run torchrun with the arguments of the command line."""
    try:
        torchrun()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes <= STOP_EXIT_CODES:
            sys.exit(max(codes))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR if USER_ERROR in codes else 1)


if __name__ == "__main__":
    main()
