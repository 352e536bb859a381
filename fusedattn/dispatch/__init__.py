"""Chooses the backend of a call, or replays an earlier one."""
