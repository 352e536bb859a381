"""Executes the PTX that Triton makes of the kernels, on a CPU: whole calls of the package, on a GPU that is not there.

text      parse, and emit with program: each basic block becomes a function of Python on the registers of many lanes
machine   lanes, clocks (races), shared, copies (cp.async), warp, products (wgmma), mbarriers, boxes (tensor copies),
          tensor_cores (sums that are cut off as on a GPU, where it is told to)
calls     cases, device (the package's launches, executed), calls (held to the package's rule), replay (launches
          executed again, by other code)
"""
