"""The one error that means: the user can mend this."""


class InputError(ValueError):
    """Bad configuration or bad input; its message is one line: what is, what may be, what to change.

    The command prints the message alone and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """What an error says, short enough to stand in another's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
