"""What a case must cost whoever computes it: operations, bytes moved, bytes held. One formula for every provider."""

BACKWARD = 2.5  # five products where the forward has two


def flops(case, mode):
    """Floating-point operations of the products; a causal mask halves them, softmax and recomputation do not count."""
    forward = 2 * case.B * case.Hq * case.Sq * case.Sk * (case.D + case.Dv) / (2 if case.causal else 1)
    return forward * {"forward": 1.0, "backward": BACKWARD, "forward_backward": 1.0 + BACKWARD}[mode]


def _sizes(case):
    """Bytes of (query, key, value, output, lse); a gradient has the size of what it is the gradient of."""
    element = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[case.dtype]
    rows, keys = case.B * case.Hq * case.Sq, case.B * case.Hkv * case.Sk
    lse = rows * max(4, element)
    return rows * case.D * element, keys * case.D * element, keys * case.Dv * element, rows * case.Dv * element, lse


def moved(case, mode):
    """Bytes that cross the memory bus if everything is read once and written once."""
    query, key, value, out, lse = _sizes(case)
    forward = query + key + value + out + lse
    backward = forward + out + query + key + value  # the gradient of the output in, three gradients out
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[mode]


def given(case):
    """Bytes of query, key and value, which are there before a step."""
    return sum(_sizes(case)[:3])


def ideal(case):
    """Bytes of query, key, value, output, lse and three gradients: the least that forward and backward can hold."""
    return sum(_sizes(case)) + given(case)
