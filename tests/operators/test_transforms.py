"""Tests nested transforms of PyTorch, inside and around torch.compile, against eager PyTorch."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fusedattn as fa

from ..close import assert_like
from ..inside import HKV, HQ, OPTIONS, D, by
from ..sample import product
from ..sequences import offsets

SQ, SK, DV = 3, 4, 2  # small, because a Jacobian has a row for each element


@pytest.fixture(params=["triton", "naive", None], ids=str)
def backend(request, device):
    return request.param


def _draw(device, dtype):
    shapes = (1, HQ, SQ, D), (1, HKV, SK, D), (1, HKV, SK, DV), (1, HQ, SQ, D)
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


def _total(backend, options, dtype):
    options = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    options = {name: x.to(dtype) if name in ("bias", "alibi_slopes", "sinks") else x for name, x in options.items()}

    def compute(query, key, value):
        results = by(backend)(query, key, value, return_lse=True, return_weights=True, **options)
        return sum(x.nan_to_num(0, 0, 0).pow(3).sum() for x in results)

    return compute


TRANSFORMS = {
    "vectorized": lambda f, q, k, v, t: torch.autograd.functional.hessian(
        lambda x: f(x.mT, k[..., :3], v), q[..., :3].mT, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jacfwd": lambda f, q, k, v, t: jacfwd(f, argnums=(0, 1, 2))(q[..., :3], k[..., :3], v),
    "jacrev": lambda f, q, k, v, t: jacrev(f, argnums=(0, 1, 2))(q, k, v),
    "hessian": lambda f, q, k, v, t: hessian(f)(q[..., :3], k[..., :3], v),
    "jacrev of jacrev": lambda f, q, k, v, t: jacrev(jacrev(f))(q[..., :3], k[..., :3], v),
    "jacrev of jacfwd": lambda f, q, k, v, t: jacrev(jacfwd(f))(q[..., :3], k[..., :3], v),
    "hvp, forward over reverse": lambda f, q, k, v, t: jvp(lambda x: grad(f, argnums=(0, 1, 2))(x, k, v), (q,), (t,)),
    "hvp, reverse over forward": lambda f, q, k, v, t: grad(
        lambda *x: jvp(lambda y: f(y, *x[1:]), (x[0],), (t,))[1], argnums=(0, 1, 2)
    )(q, k, v),
    "vmap of jvp": lambda f, q, k, v, t: vmap(lambda d: jvp(lambda x: f(x, k, v), (q,), (d,))[1])(torch.stack([t, q])),
    # The error of eager for a single number would be up to chance, so many calls are mapped.
    "jvp of vmap": lambda f, q, k, v, t: jvp(
        lambda x: vmap(f, (0, None, 2), randomness="same")(x, k, torch.stack([v, -v] * D, 2)),
        (torch.stack([x.roll(n, -1) for x in (q, t) for n in range(D)]),),
        (torch.stack([x.roll(n, -1) for x in (t, q) for n in range(D)]),),
    ),
    "vmap of grad": lambda f, q, k, v, t: vmap(grad(f, argnums=(0, 1)), (-1, None, None), randomness="same")(
        torch.stack([q, t], -1), k, v
    ),
    "vmap of vmap": lambda f, q, k, v, t: vmap(
        vmap(f, (0, None, None), randomness="same"), (None, 0, None), randomness="same"
    )(torch.stack([q, t]), torch.stack([k, -k]), v),
    "vmap by the piece": lambda f, q, k, v, t: vmap(grad(f), (0, None, None), chunk_size=2, randomness="same")(
        torch.stack([q, t, -q]), k, v
    ),
}
COMPILED = "jacrev", "hvp, forward over reverse", "hvp, reverse over forward", "vmap of jvp", "vmap of grad"
# torch refuses to compile functions of dual numbers.
AROUND = "jacrev", "hvp, forward over reverse", "vmap of grad"
SOME = "plain", "masks", "dropout", "added"


def _transformed(transform, backend, options, *inputs):
    return TRANSFORMS[transform](_total(backend, options, torch.float32), *inputs)


@pytest.mark.parametrize(("transform", "name"), product(TRANSFORMS, OPTIONS)[::5])
@pytest.mark.one_in(16)
def test_transforms(transform, name, backend, device):
    options, inputs = OPTIONS[name](SQ, SK, device), _draw(device, torch.float32)
    got = _transformed(transform, backend, options, *inputs)
    assert_like(got, _transformed, transform, "eager", options, *inputs)


def _derivative(function, mode):
    return grad(function) if mode == "reverse" else lambda a: jvp(function, (a,), (torch.ones_like(a),))[1]


def test_a_direction_may_depend_on_the_point(backend, device):
    """The derivative of a JVP along x * along has a term for each x, also if calls are mapped and it is taken again."""
    options = {name: x.detach() for name, x in OPTIONS["added"](SQ, SK, device).items() if name in ("bias", "sinks")}
    query, key, value, along = _draw(device, torch.float32)

    def again(function):
        return lambda x: jvp(function, (x,), (x * along,))[1]

    def derive(query, backend):
        return vmap(again(again(again(lambda x: by(backend)(x, key, value, **options)))))(torch.stack([query, -query]))

    assert_like(derive(query, backend), derive, query, "eager")


@pytest.mark.parametrize(("first", "second", "third", "name"), product(*[("forward", "reverse")] * 3, OPTIONS)[::5])
@pytest.mark.one_in(13)
def test_third_derivatives(first, second, third, name, backend, device):
    """Third derivatives are right in each order of forward and reverse mode; a lost derivative would be 0."""

    def derive(backend, dtype, inputs, options, lines):
        return torch.stack([on_line(backend, dtype, inputs, options, n) for n in range(lines)])

    def on_line(backend, dtype, inputs, options, line):
        query, key, value, moved = (x.to(dtype) for x in inputs)
        moved = moved.roll(line, -1)

        def along(a):
            return _total(backend, options, dtype)(query + a * moved, key - a * moved[:, :1, :1], value * (1 + a))

        for mode in (third, second, first):
            along = _derivative(along, mode)
        return along(query.new_zeros(()))

    # On a GPU kernels take no float64. In float32 the error of eager for one number is up to chance, so there are 16.
    dtype, lines = (torch.float64, 1) if device == "cpu" else (torch.float32, 16)
    options, inputs = OPTIONS[name](SQ, SK, device), _draw(device, dtype)
    assert_like(derive(backend, dtype, inputs, options, lines), derive, "eager", dtype, inputs, options, lines)


SECOND = {
    "reverse over reverse": lambda f, x, t: vjp(grad(f), x)[1](t)[0],
    "forward over reverse": lambda f, x, t: jvp(grad(f), (x,), (t,))[1],
    "reverse over forward": lambda f, x, t: grad(lambda y: jvp(f, (y,), (t,))[1])(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("transform", "name", "compiler"), product(COMPILED, SOME, ("eager", "aot_eager"))[::11])
@pytest.mark.one_in(12)
def test_transforms_inside_of_compiled_functions(transform, name, compiler, backend, device):
    options, inputs = OPTIONS[name](SQ, SK, device), _draw(device, torch.float32)
    total = _total(backend, options, torch.float32)

    def step(*inputs):
        return TRANSFORMS[transform](total, *inputs)

    got = torch.compile(step, fullgraph=True, backend=compiler)(*inputs)
    assert_like(got, _transformed, transform, "eager", options, *inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("transform", "name"), product(AROUND, SOME)[::5])
@pytest.mark.one_in(4)
def test_transforms_of_compiled_functions(transform, name, backend, device):
    options, inputs = OPTIONS[name](SQ, SK, device), _draw(device, torch.float32)
    total = _total(backend, options, torch.float32)
    compiled = torch.compile(total, fullgraph=True, backend="eager")
    assert_like(TRANSFORMS[transform](compiled, *inputs), _transformed, transform, "eager", options, *inputs)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_by_sample(dropout, backend, device):
    layer = fa.MultiHeadAttention(D, HQ, num_kv_heads=HKV, causal=True, backend=backend, device=device)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = torch.randn(3, SK, D, device=device)

    def total(parameters, x):
        layer.dropout = dropout
        return torch.func.functional_call(layer, parameters, (x,))[0].pow(2).sum()

    def by_formula(parameters, x):
        torch.manual_seed(3)
        with fa.use_backend("naive"):
            return grad(total)(parameters, x)

    samples = x[:, None]
    if not dropout:
        got = vmap(grad(total), (None, 0))(parameters, samples)
        layer.backend = None
        for number, sample in enumerate(samples):
            assert_like({name: x[number] for name, x in got.items()}, by_formula, parameters, sample)
        return
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(total), (None, 0))(parameters, samples)
    torch.manual_seed(3)
    alike = vmap(grad(total), (None, 0), randomness="same")(parameters, x[:1].expand(3, -1, -1)[:, None])
    layer.backend = None
    assert_like({name: x[2] for name, x in alike.items()}, by_formula, parameters, x[:1])
    layer.backend = backend
    unlike = vmap(grad(total), (None, 0), randomness="different")(parameters, x[:1].expand(3, -1, -1)[:, None])
    assert not torch.allclose(unlike["v_proj.weight"][0], unlike["v_proj.weight"][1])


LENGTHS = {"rows": ((5, 3), (4, 4), (0, 8)), "keys": ((4, 5), (6, 3), (9, 0))}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.one_in(5)
def test_mapped_derivatives_of_packed_sequences(dropout, second, backend, device):
    generator = torch.Generator().manual_seed(4)
    dtype, error = (torch.float32, 1e-4) if (backend, device) == ("triton", "cuda") else (torch.float64, 1e-9)
    drawn = (torch.randn(3, n, HQ, 4, generator=generator).to(device, dtype) for n in (8, 9, 9, 8))
    starts = [torch.stack([offsets(lengths, device) for lengths in LENGTHS[name]]) for name in LENGTHS]

    def derive(query, key, value, moved, rows, keys, backend=backend):
        options = dict(max_seqlen_q=8, max_seqlen_k=9, causal=True, dropout_p=dropout, backend=backend)
        options |= dict(seed=7) if dropout else {}
        return SECOND[second](
            lambda x: fa.attention_varlen(x, key, value, rows, keys, **options).pow(3).sum(), query, moved
        )

    inputs = [*drawn, *starts]
    joined = [x.flatten(0, 1) for x in inputs[:4]]
    for x in starts:
        firsts = x[:, :-1] + x[:, -1:] * torch.arange(3, device=device)[:, None]
        joined.append(torch.cat([firsts.flatten(), 3 * x[0, -1:]]).int())
    assert_like(vmap(derive)(*inputs).flatten(0, 1), derive, *joined, "naive")
