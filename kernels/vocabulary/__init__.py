"""The nouns that kernels are written in: where a tile is, who sees whom, what a score is worth."""
