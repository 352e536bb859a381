"""The names that are registered with transformers, and the configs whose models call us throughout."""

NAMES: set[str] = set()
WHOLE: set[type] = set()  # classes of configs all of whose attention calls the interface: a mask of None may be causal
