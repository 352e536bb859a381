"""The command line of a benchmark: what all of them take."""

import argparse

import torch


def parser(doc, csv=True):
    """Of a file whose first line is its question, four spaces and the command that answers it."""
    question, _, command = doc.partition("\n")[0].partition("    ")
    found = argparse.ArgumentParser(prog=command.strip(), description=question)
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--repeat-ms", type=float, default=100.0, help="how long a row is timed, about")
    if csv:
        found.add_argument("--csv", help="append to this file")
        found.add_argument("--commit", help="what the rows say, where git cannot tell")
    return found
