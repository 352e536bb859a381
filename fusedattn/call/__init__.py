"""Checks of a call's arguments, and the Call that they become. This package imports only torch."""
