"""Runs the tests that need compiled kernels in one process, without Triton's interpreter."""

from pathlib import Path

from ..inside import only_interpreted, passes_compiled


@only_interpreted
def test_without_the_interpreter(request):
    folder = Path(__file__).parent
    replays = folder.parent / "dispatch" / "test_launch_path.py"
    passes_compiled(folder, replays, marks=request.config.option.markexpr)
