"""Pools of processes that communicate by gloo; a pool starts once and runs one test after another."""

import datetime
import functools
import importlib
import inspect
import multiprocessing.connection
import os
import socket
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=120)  # maximum time that a rank waits for another
# Ranks fork from a process that has imported the modules of the first tests, and has computed nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.conftest", "tests.distributed.test_calls", "torch._dynamo"])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(rank, size, port, limit=LIMIT):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)


def answers(target, size, ranks):
    """Start target(rank, port, queue) in `size` processes, and return what these ranks put: (rank, answer)."""
    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=target, args=(rank, port, queue), daemon=True) for rank in range(size)]
    for process, seed in zip(processes, "0314", strict=False):  # torchrun's processes hash strings with their own seeds
        with mock.patch.dict(os.environ, PYTHONHASHSEED=seed):
            process.start()
    answers = dict(queue.get(timeout=120) for _ in ranks)
    for process in processes:
        process.kill()
    assert answers.keys() == set(ranks)
    return answers.values()


def _serve(rank, size, port, pipe):
    join(rank, size, port)
    while True:
        module, name, arguments = pipe.recv()
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name).of_rank(rank, size, **arguments)
            pipe.send(None)
        except BaseException:  # includes pytest's failures
            pipe.send(traceback.format_exc())


class Pool:
    def __init__(self, size):
        self.size = size
        self.start()

    def start(self):
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(self.size):
            here, there = FORKS.Pipe()
            self.pipes.append(here)
            self.processes.append(FORKS.Process(target=_serve, args=(rank, self.size, port, there), daemon=True))
            self.processes[-1].start()

    def run(self, module, name, arguments):
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        waiting = dict(zip(self.pipes, range(self.size), strict=True))
        while waiting:
            for pipe in multiprocessing.connection.wait(list(waiting)):
                rank, error = waiting.pop(pipe), pipe.recv()
                if error is not None:
                    self.stop()  # the other ranks may wait for this one forever
                    self.start()
                    pytest.fail(f"rank {rank}: {error}")

    def stop(self):
        """Kill the processes; leaving a process group in order takes seconds."""
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="session")
def pool_of():
    """Return a function: pool_of(size) returns the Pool of that many processes."""
    pools = {}

    def pool_of(size):
        if size not in pools:
            pools[size] = Pool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.stop()


def on_ranks(size):
    """Return a decorator that runs a test, a function of (rank, size, parameters), in each of `size` processes."""

    def decorate(function):
        @functools.wraps(function)
        def test(pool_of, **parameters):
            pool_of(size).run(function.__module__, function.__name__, parameters)

        names = [name for name in inspect.signature(function).parameters if name not in ("rank", "size")]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pool_of", *names)]
        )
        test.of_rank = function
        return test

    return decorate
