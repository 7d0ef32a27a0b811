"""The one exception that a user's mistake raises."""


class InputError(ValueError):
    """A value from outside (argument, file, checkpoint) that cannot be used.

    Its message is one sentence that names the value, where it came from and what is allowed; the command-line programs print
    it without a traceback.
    """
