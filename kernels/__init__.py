"""What knows Triton: kernels, and the vocabulary they are written in.

span: which pairs.  tiles: where.  masks: who is hidden.  scores: product to score.  softmax: score to weight.
kept: what the backward gets to know of a row.
forward, backward: sentences made of these.
"""
