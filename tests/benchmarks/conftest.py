"""The machine in pytest-benchmark's files, as in the rows of the CSV."""

import pytest
import torch
from fusedattn.bench import rows


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info):
    machine = rows.machine("cuda" if torch.cuda.is_available() else "cpu")
    machine_info |= {name: value for name, value in machine.items() if name != "date"}


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny steps on a CPU spend their time waiting for the other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _anew():
    """Nothing is forgotten and nothing patched: a benchmark times the calls that a user makes."""
