"""The functions that kernels share.

memory: where data lies.  span: which rows, keys and blocks.  masks: who is hidden.  walk: which blocks a loop visits.
scores: from a product to a score.  softmax: from scores to weights.  dropout: which weights are dropped.
saved_stats: what the forward leaves for the backward.
gradient, row_sums: what the backward makes of a tile, and of a row.
pages, rotary, partials: where a cache lies, what turns its keys, and what programs that share them leave.
"""
