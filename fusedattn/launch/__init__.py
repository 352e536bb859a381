"""From tensors to kernels: tiles, arguments, launches. With replay.recording the only room that imports Triton."""
