"""Runs a function in several processes that form one gloo group, as Ray Train would start them.

All are forked from a server that has imported the heavy libraries once, so each group is as fresh as a new
interpreter and starts in a fraction of a second.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import pytest

IMPORTED_ONCE = [
    "deepspeed.runtime.zero.muon.muon_optimizer",              # seconds of torch.compile at the first ZeRO engine
    "deepspeed.runtime.zero.stage3",
    "stages.train",
    "transformers.models.bert.modeling_bert",
]

_fresh = multiprocessing.get_context("forkserver")
_fresh.set_forkserver_preload(IMPORTED_ONCE)


def in_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``[function(world, *arguments) for every rank]``, each in a process of its own.

    Args:
        size: of the group; a single process gets a Solo world.
        function: picklable, as its arguments and results.
        arguments: the same for all.

    Raises:
        ChildProcessError: a rank died.
        Whatever the first rank to fail raised, from its traceback; the others are killed.
    """
    _start_server()
    processes: list[Any] = []
    pipes: list[Connection] = []
    results: dict[int, Any] = {}
    with TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                here, there = _fresh.Pipe(duplex=False)
                work = pickle.dumps((function, arguments))
                processes.append(_fresh.Process(target=_work, args=(there, rank, size, f"{folder}/store", work)))
                processes[-1].start()
                there.close()
                pipes.append(here)
            while len(results) < size:
                for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
                    rank = pipes.index(pipe)  # type: ignore[arg-type]
                    results[rank] = _received(pipes[rank], rank)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(size)]


def _received(pipe: Connection, rank: int) -> Any:
    try:
        result, error, trace = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise ChildProcessError(f"rank {rank} died") from None
    if error is not None:
        raise error from RuntimeError(f"on rank {rank}:\n{trace}")
    return result


@cache
def _start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def _work(pipe: Connection, rank: int, size: int, meeting: str, work: bytes) -> None:
    import torch
    import torch.distributed as dist

    from cluster.world import Solo, TorchWorld

    gc.freeze()                                                # else each collection copies the server's memory
    torch.set_num_threads(1)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}.items():
        os.environ[name] = str(value)                          # as Ray Train sets them
    try:
        function, arguments = pickle.loads(work)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
        )
        result = function(TorchWorld() if size > 1 else Solo(), *arguments)
        pipe.send_bytes(pickle.dumps((result, None, "")))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((None, error, traceback.format_exc())))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)                                            # no tear-down of groups whose peers may be gone
