"""Repeats the kernel launches of an earlier, similar call, without checks and preparation."""
