"""Checks what a caller passed, brings it into one form, shapes the results. Imports only torch."""
