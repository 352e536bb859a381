"""An emulator of GPUs: runs the PTX that Triton compiles, for whole calls of the package, on a CPU.

text      parse; emit and program, which translate each basic block into a Python function of all lanes
machine   lanes, clocks (races), shared, copies (cp.async), warp, products (wgmma), mbarriers, boxes (tensor copies),
          tensor_cores (sums truncated as on a GPU, on request)
calls     cases, device (executes the package's launches), calls (compares results with the package's tolerance)
"""
