"""Checks the arguments of a call, converts them to a Call, and gives results the rank of query. Imports only torch."""
