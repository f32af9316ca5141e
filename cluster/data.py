"""Ray Data for stages: readers feed workers in bounded memory, and results come back as they are ready."""

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import ray  # ray.data takes half a second to import: done where needed

from cluster.errors import InputError

Item = TypeVar("Item")
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")

BUFFER = 16 * 2**20                                            # bytes of chunks that may wait in memory, a CPU


def stream(
    items: Sequence[Item], read: Callable[[Item], Iterable[Chunk]], work: Callable[[Chunk], Result]
) -> Iterator[Result]:
    """Compute ``work(chunk)`` for every chunk in ``read(item)`` of every item, all over the cluster.

    An item is read by one task, yet its chunks are worked on by as many tasks as there are CPUs, while the
    item is still being read. Readers wait when the workers lag behind, so memory stays bounded.

    Args:
        items: small and picklable.
        read: splits an item into chunks of a few megabytes; light work, as it claims no CPU.
        work: its result depends on the chunk alone, and is small.

    Yields:
        The results in no particular order.

    Raises:
        InputError: as raised by ``read`` or ``work``.
    """
    import ray.data

    # Were a reader to hold a CPU while it waits for its workers, they would never get the only free one.
    readers = max(2, _cpus() // 4)                                     # one keeps several workers busy
    reading = {"num_cpus": 0, "compute": ray.data.TaskPoolStrategy(min(readers, len(items)))}
    chunks = _numbered(items).map_batches(_Reader(items, read), batch_size=1, batch_format="pyarrow", **reading)
    return _results(chunks.map_batches(_Worker(work), batch_size=1, batch_format="pyarrow", num_cpus=1))


def each(items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """Compute ``work(item)`` for every item, all over the cluster; otherwise as ``stream``."""
    reader = _Reader(items, lambda item: (work(item),))
    return _results(_numbered(items).map_batches(reader, batch_size=1, batch_format="pyarrow", num_cpus=1))


class _Reader:
    """From the number of an item to a block for each of its chunks."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        self.items = items
        self.read = read

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        try:
            for chunk in self.read(self.items[batch["item"][0].as_py()]):
                yield _pack(chunk)
        except InputError as error:
            yield _pack(error)


class _Worker:
    """From the block of a chunk to the block of its result."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __call__(self, batch: pa.Table) -> pa.Table:
        chunk = _unpack(batch)
        if isinstance(chunk, InputError):                      # a reader's, on its way to the caller
            return batch
        try:
            return _pack(self.work(chunk))
        except InputError as error:
            return _pack(error)


def _cpus() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _pack(value: Any) -> pa.Table:
    return pa.table({"pickle": pa.array([pickle.dumps(value, protocol=5)], pa.large_binary())})


def _unpack(table: pa.Table) -> Any:
    return pickle.loads(table["pickle"][0].as_buffer())


def _numbered(items: Sequence[Any]) -> Any:
    import ray.data

    return ray.data.from_items([{"item": at} for at in range(len(items))], override_num_blocks=len(items))


def _results(data: Any) -> Iterator[Any]:
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)           # errors are raised; the rest is progress
    data.context.enable_progress_bars = False                          # stages report their own
    data.context.target_max_block_size = 1                             # one chunk, one block, one task
    options = data.context.execution_options
    options.resource_limits = options.resource_limits.copy(object_store_memory=BUFFER * _cpus())
    for batch in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        result = _unpack(batch)
        if isinstance(result, InputError):                     # a value until here: Ray wraps what a task raises
            raise result
        yield result
