"""Choice of a call's backend, or replay of the kernel launches of an earlier call."""
