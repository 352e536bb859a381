"""Random calls, drawn by hypothesis, each of which must meet the tolerance and the other rules of all calls."""
