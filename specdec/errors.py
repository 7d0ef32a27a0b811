"""The exceptions of this library."""


class InputError(ValueError):
    """A value from outside (argument, file, checkpoint) that cannot be used.

    Its message is one sentence that names the value, where it came from and what is allowed; the command-line programs print
    it without a traceback.
    """


class InvariantError(AssertionError):
    """A cache does not hold what it should: the program is at fault, not its input. Raised by debugging checks only."""
