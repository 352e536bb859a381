"""Calls that nobody chose: hypothesis draws them whole, and each is held to what must be true of any call."""
