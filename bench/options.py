"""What does an option cost: bias, mask, dropout, softcap, window, weights?    python -m fusedattn.bench.options"""

import sys

from .attention import Question, main

QUESTION = Question(__doc__, on_gpu="options", on_cpu="tiny-options")

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
