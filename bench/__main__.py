"""python -m fusedattn.bench is the benchmark most people mean: attention against its peers."""

import sys

from .attention import main

sys.exit(main())
