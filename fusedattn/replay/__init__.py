"""Launches a call again that is like an earlier one, without checking and preparing it again."""
