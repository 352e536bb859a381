"""The tests of this folder that need compiled kernels, in one process without Triton's interpreter."""

from pathlib import Path

from ..inside import only_interpreted, passes_compiled


@only_interpreted
def test_without_the_interpreter(request):
    passes_compiled(Path(__file__).parent, marks=request.config.option.markexpr)
