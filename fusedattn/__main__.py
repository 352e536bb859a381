"""Runs the command line, as `python -m fusedattn`."""

import sys

from .cli import main

sys.exit(main())
