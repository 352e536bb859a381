"""Do forward and backward together keep up with each peer?    python -m fusedattn.bench.training"""

import sys

from .attention import Question, main

QUESTION = Question(__doc__, ("forward_backward",))

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
