"""python -m fusedattn.bench [QUESTION]: asks a question of dev/, which only a checkout of the repository has."""

import sys

try:
    from .dev.questions import main
except ModuleNotFoundError as error:
    if error.name != "fusedattn.bench.dev":
        raise
    sys.exit("fusedattn.bench: its questions are in the repository; what is installed is `fusedattn bench`")

sys.exit(main())
