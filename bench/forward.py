"""Does the forward keep up with each peer, from 512 tokens to 16384?    python -m fusedattn.bench.forward"""

import sys

from .attention import Question, main

QUESTION = Question(__doc__, ("forward",))

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
