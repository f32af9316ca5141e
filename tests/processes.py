"""Runs a function in several processes that form one gloo group, as Ray Train would start them.

All are forked from a server that has imported the heavy libraries once, so each group is as fresh as a new
interpreter and starts in a fraction of a second.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
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


class Group:
    """``size`` processes in ``function(world, *arguments)``.

    Args:
        size: of the group; a single process gets a Solo world.
        function: top-level; its result is picklable.
        arguments: picklable.
    """

    def __init__(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        _start_server()
        port = _free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = _fresh.Pipe(duplex=False)
            work = pickle.dumps((function, arguments))
            process = _fresh.Process(target=_work, args=(there, rank, size, port, work), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def results(self, timeout: float = 300.0) -> list[Any]:
        """What each rank returned; the first error of any of them ends all and is raised, with its traceback."""
        results: dict[int, Any] = {}
        try:
            while len(results) < len(self._pipes):
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
                ready = wait(waiting, timeout)
                if not ready:
                    raise TimeoutError(f"ranks {set(range(len(self._pipes))) - set(results)} are still busy")
                for pipe in ready:
                    rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                    try:
                        results[rank], error, trace = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    except EOFError:
                        raise ChildProcessError(f"rank {rank} died") from None
                    if error is not None:
                        raise error from RuntimeError(f"on rank {rank}:\n{trace}")
        finally:
            self.kill()
        return [results[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        """Kill what still runs, as a node that is taken away would be."""
        for process in self.processes:
            process.kill()
            process.join()


def in_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``[function(world, *arguments) for every rank]``, each in a process of its own."""
    return Group(size, function, *arguments).results()


@cache
def _start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def _work(pipe: Connection, rank: int, size: int, port: int, work: bytes) -> None:
    import torch

    gc.freeze()                                                # else each collection copies the server's memory
    from cluster.world import Solo, TorchWorld, init_process_group

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        function, arguments = pickle.loads(work)
        init_process_group("gloo", timeout=120.0)
        result = function(TorchWorld() if size > 1 else Solo(), *arguments)
        pipe.send_bytes(pickle.dumps((result, None, "")))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((None, error, traceback.format_exc())))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)                                            # no tear-down of groups whose peers may be gone


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
