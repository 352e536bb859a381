"""How much memory does a step take at its peak, beside each peer?    python -m fusedattn.bench.peak

The forward, and forward and backward; on a GPU alone, for torch counts what it allocates there and nowhere else. What
the naive path takes on a CPU is asked by memory.py.
"""

import sys

from . import table
from .attention import Question, main

QUESTION = Question(__doc__, ("forward", "forward_backward"), shown=table.peaks)

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
