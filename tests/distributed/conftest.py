"""Processes that talk over gloo: started once for each number of them, and given one function after the other."""

import datetime
import importlib
import multiprocessing
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=20)  # that a rank waits for another


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(rank, size, port, limit=LIMIT):
    """Make this process a rank of the default group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)


def _serve(rank, size, port, pipe):
    join(rank, size, port)
    while True:
        module, name, arguments = pipe.recv()
        try:
            pipe.send((None, getattr(importlib.import_module(module), name)(rank, size, *arguments)))
        except BaseException:  # those of pytest among them
            pipe.send((traceback.format_exc(), None))


class Pool:
    """`size` processes."""

    def __init__(self, size):
        context, port, self.pipes, self.processes = multiprocessing.get_context("spawn"), free_port(), [], []
        for rank in range(size):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=_serve, args=(rank, size, port, there), daemon=True))
            self.processes[-1].start()

    def run(self, function, *arguments):
        """What function(rank, size, *arguments) returns in each process; it is one of a module's."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers = [pipe.recv() for pipe in self.pipes]
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank}:\n{error}"
        return [answer for _, answer in answers]

    def stop(self):
        """End the processes, at once: leaving a group in order takes seconds."""
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="session")
def pools():
    """A function of a number of processes that gives their Pool."""
    made = {}
    yield lambda size: made.setdefault(size, None) or made.update({size: Pool(size)}) or made[size]
    for pool in filter(None, made.values()):
        pool.stop()
