"""Chooses the backend of a call, or replays the kernel launches of an earlier call."""
