"""What to say when a worker runs out of memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CPU_ALLOCATION = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What PyTorch's allocator on the CPU says, in a bare RuntimeError."""


@contextmanager
def explained_memory(remedies: str) -> Iterator[None]:
    """Turn an allocator's error into one that says what was used and what lowers it.

    Args:
        remedies: the settings that lower it.

    Raises:
        MemoryError: instead of what the allocators of GPU and CPU raise.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise MemoryError(f"a training worker ran out of memory; {_used()}; {remedies}") from error


def _is_of_memory(error: BaseException) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in CPU_ALLOCATION)


def _used() -> str:
    """The peak so far, and of how much."""
    if torch.cuda.is_available():
        held, whole = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties().total_memory
        return f"at its peak it held {held / 1e9:.2f} GB of the GPU's {whole / 1e9:.2f} GB"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"at its peak it held {peak / 1e9:.2f} GB of main memory"
