"""The functions that kernels share, and the words in their names.

A plane is one head of one batch. A View is a pointer with strides. A table is a contiguous buffer (planes, rows, a few
columns). The band is the stripe of (row, key) pairs that causal and window leave visible. A walk is a kernel's loop
over blocks; some walks apply no mask. A slot is a program's (sequence, block) among packed sequences.

memory: loads and stores.  columns: wide heads in parts.  span: rows, keys and blocks of a program.  masks: hidden rows,
keys and pairs.  walk: the blocks that a loop visits.  scores: a score from a product.  softmax: weights from scores.
dropout: random bits and scale of the weights.  saved_stats: statistics that the forward saves for the backward.
gradient, row_sums: the backward of a tile, and its sums by row.  attend: a step of the forward.  rules: all options.
pages, rotary: keys of a cache, and their rotation.  partials: results of programs that split keys.  copies: fences.
"""
