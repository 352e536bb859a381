"""What a case costs, whoever computes it: operations, bytes that cross the memory bus, bytes held in memory."""

BACKWARD = 2.5  # five products where the forward has two
ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def flops(case, mode):
    """Floating-point operations of the matrix products; a causal mask halves them.

    Softmax and recomputation do not count, nor tokens past the end of a sequence of unequal lengths. Other masks and
    windows do not reduce the count: where they are skipped, the rate is higher than any GPU's.
    """
    pairs = int(case.lengths("cpu").square().sum()) if "lengths" in case.words else case.B * case.Sq * case.Sk
    forward = 2 * case.Hq * pairs * (case.D + case.Dv) / (2 if case.causal else 1)
    return forward * {"forward": 1.0, "backward": BACKWARD, "forward_backward": 1.0 + BACKWARD}[mode]


def _sizes(case):
    """Bytes of (query, key, value, output, lse)."""
    element, rows, keys = ELEMENT[case.dtype], case.Hq * case.B * case.Sq, case.Hkv * case.B * case.Sk
    if "lengths" in case.words:
        rows, keys = (heads * int(case.lengths("cpu").sum()) for heads in (case.Hq, case.Hkv))
    lse = rows * max(4, element)
    return rows * case.D * element, keys * case.D * element, keys * case.Dv * element, rows * case.Dv * element, lse


def weights(case):
    """Bytes of the weights, if the case returns them."""
    return ELEMENT[case.dtype] * case.B * case.Hq * case.Sq * case.Sk if "weights" in case.words else 0


def moved(case, mode):
    """Bytes of every input read once and every result written once; the loss is of the output alone."""
    query, key, value, out, lse = _sizes(case)
    pairs, words = case.Sq * case.Sk, case.words
    bias = ELEMENT[case.dtype] * case.Hq * pairs if "bias" in words else 0
    forward = query + key + value + out + lse + bias + (pairs if "documents" in words else 0)
    backward = forward + out + query + key + value + bias  # reads the output's gradient, writes those of the inputs
    forward += weights(case)
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[mode]


def held(case):
    """Bytes of query, key and value, which are in memory before a step."""
    return sum(_sizes(case)[:3])


def ideal(case, mode="forward_backward"):
    """The least bytes a step holds: query, key, value, output, lse and, with a backward, three gradients."""
    return sum(_sizes(case)) + (0 if mode == "forward" else held(case))
