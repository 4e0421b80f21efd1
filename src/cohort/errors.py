"""What a user can mend, as one exception type."""


class UserError(ValueError):
    """Something the user gave does not work: the message names the field, the value, the rule and what works.

    The command line prints the message alone and exits with code 2.
    """


class TrainingError(RuntimeError):
    """A run cannot go on, and nothing in its configuration was wrong to begin with. Exit code 1."""


class StopRequested(TrainingError):  # noqa: N818
    """The run was asked to end, and this is a place where it can. The training loop catches it."""


class OutOfStepError(TrainingError):
    """This rank alone has failed, in the midst of something that all do together: only the end of the process helps."""
