"""The one tolerance rule, as an assertion: `fusedattn.testing.tolerance` holds the rule itself."""

from fusedattn.testing.compare import compare


def assert_close(got, tensors, options, grads="out and lse", **of):
    """`got`, from `with_gradients`, is as good as eager PyTorch in the inputs' dtype, measured against float64."""
    found = compare(got, tensors, options, grads, **of)
    wrong = {name: verdict.why for name, verdict in found.items() if not verdict.ok}
    assert not wrong, wrong
