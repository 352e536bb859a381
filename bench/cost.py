"""What a case must cost whoever computes it: operations, bytes moved, bytes held. One formula for every provider."""

BACKWARD = 2.5  # five products where the forward has two


def flops(case, mode):
    """Floating-point operations of the products; a causal mask halves them, softmax and recomputation do not count.

    Nor does what lies between sequences of unequal lengths, or past their ends. Other masks and windows do not lessen
    them: where they are skipped, the rate is higher than any GPU's.
    """
    pairs = int(case.lengths("cpu").square().sum()) if "lengths" in case.words else case.B * case.Sq * case.Sk
    forward = 2 * case.Hq * pairs * (case.D + case.Dv) / (2 if case.causal else 1)
    return forward * {"forward": 1.0, "backward": BACKWARD, "forward_backward": 1.0 + BACKWARD}[mode]


def _element(case):
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[case.dtype]


def _sizes(case):
    """Bytes of (query, key, value, output, lse); a gradient has the size of what it is the gradient of."""
    element, rows, keys = _element(case), case.Hq * case.B * case.Sq, case.Hkv * case.B * case.Sk
    if "lengths" in case.words:
        rows, keys = (heads * int(case.lengths("cpu").sum()) for heads in (case.Hq, case.Hkv))
    lse = rows * max(4, element)
    return rows * case.D * element, keys * case.D * element, keys * case.Dv * element, rows * case.Dv * element, lse


def _pairs(case):
    """Bytes of (the bias, the mask of pairs)."""
    grid, words = case.Sq * case.Sk, case.words
    return _element(case) * case.Hq * grid if "bias" in words else 0, grid if "documents" in words else 0


def moved(case, mode):
    """Bytes that cross the memory bus if everything is read once and written once; the loss is of the output alone."""
    query, key, value, out, lse = _sizes(case)
    bias, mask = _pairs(case)
    forward = query + key + value + out + lse + bias + mask
    backward = forward + out + query + key + value + bias  # the gradient of the output in, those of inputs out
    if "weights" in case.words:
        forward += _element(case) * case.B * case.Hq * case.Sq * case.Sk
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[mode]


def given(case):
    """Bytes of query, key and value, which are there before a step."""
    return sum(_sizes(case)[:3])


def ideal(case, mode="forward_backward"):
    """Bytes of query, key, value, output, lse and, but for the forward, three gradients: the least that can be held."""
    return sum(_sizes(case)) + (0 if mode == "forward" else given(case))


def projections(case, mode):
    """Operations of the four projections around attention of a width of Hq * D; backward has two products for one."""
    width = case.Hq * case.D
    return 2 * 4 * case.B * case.Sq * width**2 * {"forward": 1, "backward": 2, "forward_backward": 3}[mode]


def moved_by_module(case, mode):
    """Bytes of input, output and parameters of a module, read or written once, and again with their gradients."""
    width = case.Hq * case.D
    forward = _element(case) * (2 * case.B * case.Sq * width + 4 * (width + 1) * width)
    weights = _element(case) * case.B * case.Hq * case.Sq * case.Sk if "weights" in case.words else 0
    return forward * {"forward": 1, "forward_backward": 3}[mode] + weights
