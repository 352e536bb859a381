"""The functions that kernels share.

memory: loads and stores.  span: rows, keys and blocks of a program.  masks: hidden rows, keys and pairs.
walk: the blocks that a loop visits.  scores: a score from a product.  softmax: weights from scores.
dropout: the weights that are dropped.  saved_stats: statistics that the forward saves for the backward.
gradient, row_sums: the backward of a tile, and its sums by row.
pages, rotary, partials: the keys of a cache, their rotation, and the results of programs that split them.
"""
