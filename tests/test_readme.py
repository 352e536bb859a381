"""Tests that the examples of the READMEs run, and that their links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_examples_run(capsys):
    names = {}
    for example in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("takes ")


def test_every_link_leads_somewhere():
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_rooms_of_the_architecture_are_there():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for room in ("call", "naive", "cpu", "launch", "operators", "dispatch", "distributed", "testing"):
        (row,) = re.findall(rf"^\| `{room}/` \| (.*) \|$", page, re.M)
        files = {path.stem for path in (ROOT / "fusedattn" / room).glob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"`(\w+)`", row)), room
