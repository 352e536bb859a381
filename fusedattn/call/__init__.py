"""Checks the arguments of a call, brings them into one form (a Call), and shapes results. Imports only torch."""
