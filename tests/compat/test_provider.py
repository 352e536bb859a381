"""Tests `register` and `sdpa_provider` of fusedattn.compat.torch: torch's own attention by our kernels."""

from unittest import mock

import pytest
import torch
from torch import nn

import fusedattn as fa
import fusedattn.compat.torch as compat

from ..close import assert_like
from ..inside import differentiated, provider_on_cpu


@pytest.fixture
def registry():
    from torch.nn.attention import _registry

    before = dict(_registry._FLASH_ATTENTION_IMPLS)
    yield torch.nn.attention
    _registry._FLASH_ATTENTION_IMPLS.clear()
    _registry._FLASH_ATTENTION_IMPLS.update(before)


def test_register_adds_a_name_and_activates_nothing(registry):
    query = torch.randn(2, 3, 4, 8)
    want = nn.functional.scaled_dot_product_attention(query, query, query)
    active = registry.current_flash_attention_impl()
    for _ in range(2):
        compat.register()
        assert registry.list_flash_attention_impls().count("fusedattn") == 1
    assert registry.current_flash_attention_impl() == active
    assert torch.equal(nn.functional.scaled_dot_product_attention(query, query, query), want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_the_provider_names_cuda_where_there_is_none(registry):
    active = registry.current_flash_attention_impl()
    with pytest.raises(RuntimeError, match="CUDA"), compat.sdpa_provider():
        pass
    compat.register()
    with pytest.raises(RuntimeError, match="CUDA"):
        registry.activate_flash_attention_impl("fusedattn")
    assert registry.current_flash_attention_impl() == active


@pytest.fixture
def override(device):
    """Register our operators for CPU tensors, for which torch has none."""
    if device != "cpu":
        pytest.skip("on a GPU the provider itself is tested")
    # Torch's CUDA kernels of the operators raise if they are called.
    made = provider_on_cpu(lambda name, key: mock.Mock(**{"call_boxed.side_effect": LookupError(name)}))
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    yield operator
    made.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        operator(*[torch.randn(1, 1, 2, 8)] * 3)


def results(inputs, weight, out, *others):
    return out, *others, *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize(
    ("causal", "scale", "kv_heads", "order"),
    [(False, None, 2, (0, 1, 2, 3)), (True, 0.3, 2, (0, 2, 1, 3)), (False, -0.5, 1, (0, 1, 2, 3))],
)
def test_the_operators_of_the_provider_are_torchs(override, causal, scale, kv_heads, order):
    shapes = (1, 2, 4, 8), (1, kv_heads, 4 if causal else 5, 8), (1, kv_heads, 4 if causal else 5, 8)
    inputs = [torch.randn([s[axis] for axis in order]).permute(order).half().requires_grad_() for s in shapes]
    weight = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):  # torch casts above its operators
        out, lse, cum_q, cum_k, rows, keys, state, unused, debug = override(*inputs, is_causal=causal, scale=scale)
        got = results(inputs, weight, out, lse)
    assert out.dtype == torch.float16 and out.stride() == torch.empty_like(inputs[0]).stride()
    assert (rows, keys) == (4, shapes[1][2]) and state.shape == (2,) and state.dtype == unused.dtype == torch.uint64
    assert cum_q is None and cum_k is None and debug.numel() == 0
    options = dict(causal=causal, scale=scale, return_lse=True)
    assert_like(got, lambda: results(inputs, weight, *fa.reference.eager(*inputs, **options)))


def test_the_provider_drops_the_same_in_both_passes(override):
    inputs, weight = [torch.randn(1, 1, 4, 8).half().requires_grad_() for _ in range(3)], torch.arange(8)
    out, *_, state, _, _ = override(*inputs, 0.5)
    options = dict(dropout_p=0.5, seed=state.view(torch.int64)[:1])
    assert_like(results(inputs, weight, out), lambda: results(inputs, weight, fa.reference.eager(*inputs, **options)))
    assert not torch.equal(override(*inputs, 0.5)[0], out)


def test_what_the_kernels_do_not_take_goes_to_torch(override):
    wide, narrow = torch.randn(1, 1, 2, 520).half(), torch.randn(1, 1, 2, 8).half()
    with pytest.raises(LookupError, match="aten::_scaled_dot_product_flash_attention$"):
        override(wide, wide, wide)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        override(narrow, narrow, narrow, return_debug_mask=True)
    with fa.use_backend("naive"):
        assert override(narrow, narrow, narrow)[0].shape == narrow.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_provider_reaches_torchs_attention_on_a_gpu(registry):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [torch.randn(2, 4, n, 64, device="cuda").half().requires_grad_() for n in (70, 90, 90)]
    active = registry.current_flash_attention_impl()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), compat.sdpa_provider():
        got = differentiated(nn.functional.scaled_dot_product_attention, inputs)
    assert_like(got, differentiated, fa.reference.eager, inputs)
    assert registry.current_flash_attention_impl() == active
