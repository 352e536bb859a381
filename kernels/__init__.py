"""What knows Triton: kernels, and the vocabulary they are written in.

span: which pairs.  tiles: where.  masks: who is hidden.  scores: product to score.  softmax: score to weight.
forward, backward: sentences made of these.
"""
