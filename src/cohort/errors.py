"""Exceptions for user errors and failed runs."""


class UserError(ValueError):
    """An error in what the user gave. The message names the field, the value, the rule and what works.

    The command line prints only the message and exits with code 2.
    """


class TrainingError(RuntimeError):
    """The run cannot continue, but its configuration was valid. Exit code 1."""


class StopRequested(TrainingError):  # noqa: N818
    """A requested stop of the run, raised where it is safe. The training loop catches it."""


class RankDesyncError(TrainingError):
    """This rank failed while other ranks may be waiting in a collective; the process must exit."""


class DoesNotFitError(RankDesyncError):
    """Memory ran out on this rank, and no smaller micro-batch would help."""
