"""The one error that means: the user can mend this."""


class InputError(ValueError):
    """Bad configuration or bad input; its message is one line: what is, what may be, what to change.

    The command prints the message alone and exits with status 2.
    """
