import pytest
from fusedattn.bench import peers


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Compiling FlexAttention for a CPU takes half a minute a case."""
    monkeypatch.setattr(peers, "COMPILERS", ("no such compiler",))
