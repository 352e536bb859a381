"""Checks of a random call (Dense) by several backends: tolerance, dtypes, unchanged inputs, repeatable bits."""

import torch

import fusedattn as fa
from fusedattn import reference
from fusedattn.testing import compare
from fusedattn.testing.compare import INPUTS, LEARNED, in_float64
from fusedattn.testing.tolerance import verdicts

from ..guard import whole
from ..sequences import by_sequence
from .routes import ROUTES

RESULTS = "out", "lse", "weights"
LARGEST = 2.0**20  # with larger scores results must only be finite
LARGEST_ON_CPU = 16.0  # larger float32 scores: PyTorch's backward sums a score in another order than its forward
LARGEST_IN_FLOAT64 = 20.0  # with larger scores the float64 oracle is not exact enough
LARGEST_TO_MERGE = 16.0  # with larger scores the float32 lse of a part rounds too coarsely
OTHERS = 7  # more draws of values, judged together if a draw exceeds the tolerance


class Wrong(AssertionError):
    pass


def of_backend(function, case, backend):
    """Return a function that calls `function` with a backend, by keyword or by `use_backend`."""

    def attend(*tensors, **options):
        if backend is not None and case.by_keyword and case.route in ("attention", "attention_varlen"):
            return function(*tensors, **options, backend=backend)
        with fa.use_backend(backend):
            return function(*tensors, **options)

    return attend


def computed(function, tensors, options, case, lse):
    inputs = {name: tensors[name].detach() for name in INPUTS}
    inputs |= {name: options[name].detach() for name in LEARNED if name in options}
    wanted = [name for name in case.wanted if name in inputs]
    for name in wanted:
        inputs[name].requires_grad_()
    results = function(**options | inputs, return_lse=lse, return_weights=case.weights)
    results = results if isinstance(results, tuple) else (results,)
    names = [name for name, there in zip(RESULTS, (True, lse, case.weights), strict=True) if there]
    outputs = dict(zip(names, results, strict=True))
    losses = {name: outputs[name] for name in case.loss if outputs[name].requires_grad}
    grads = [None] * len(wanted)
    if wanted and losses:
        given = [tensors[name].to(x.dtype) for name, x in losses.items()]
        leaves = [inputs[name] for name in wanted]
        grads = torch.autograd.grad(list(losses.values()), leaves, given, allow_unused=True)
    found = {name: x.detach() for name, x in outputs.items()}
    pairs = zip(wanted, grads, strict=True)
    return found | {name: torch.zeros_like(inputs[name]) if grad is None else grad for name, grad in pairs}


def peak(tensors, options, case):
    """Return (largest |query| |key|, which bounds the unscaled scores; bound of the scores) of a case."""
    query, key = (tensors[name].double().nan_to_num(0, 0, 0) for name in ("query", "key"))
    if not query.numel() or not key.numel():
        return 0.0, 0.0
    products = query.norm(dim=3).max().item() * key.norm(dim=3).max().item()
    score = products * abs(case.D**-0.5 if case.scale is None else case.scale)
    if case.softcap is not None and case.dtype != torch.float64:  # a float64 oracle is no more exact
        score = min(score, case.softcap)
    if "alibi_slopes" in options:
        score += options["alibi_slopes"].double().abs().max().item() * (case.Sq + case.Sk)
    if "bias" in options:
        bias = options["bias"].double()
        score += bias.where(bias.isfinite() & (bias > -1e30), 0.0).abs().max().item() if bias.numel() else 0.0
    return products, score


class Truth:
    """Results of eager PyTorch and of float64 for one draw of a case."""

    def __init__(self, case, more=0):
        self.case, self.more = case, more
        tensors, options = case.draw(more)
        self.apply = lambda function: function
        if case.lengths is not None:
            self.apply = lambda function: by_sequence(function, *case.lengths)
        exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
        self.eager = computed(self.apply(reference.eager), tensors, options, case, True)
        self.oracle = computed(self.apply(reference.attention), in_float64(tensors), exact, case, True)
        self.terms = self._terms(tensors, options)
        self.products, self.score = peak(tensors, options, case)

    def _terms(self, tensors, options):
        case = self.case
        if not case.wanted or 0 in (case.B, case.Hq, case.Sq, case.Sk):
            return {}
        terms = {}
        if any(name in case.wanted for name in LEARNED):
            terms = compare._sizes_of_terms(tensors, options, " ".join(case.loss), self.apply, case.lengths)
        # The terms that a gradient sums may be far from size 1, which the tolerance expects by default.
        if case.spread > 1.0 or case.alike or case.scale is not None or case.dropout:
            for name, size in self._sizes_of_cancelling(tensors, options).items():
                terms[name] = max(size, terms.get(name, 1.0))
        return terms

    def _sizes_of_cancelling(self, tensors, options):
        """Return {input: size of the terms that may cancel in its gradient}, weights times incoming gradients.

        In a row with one weight of 1, the gradient of the score is a difference of two equal products.
        """
        case, inputs = self.case, in_float64({name: tensors[name] for name in INPUTS})
        with torch.no_grad():
            weights = self.apply(reference.attention)(**inputs, **options, return_lse=True, return_weights=True)[2]
        query, key, value, out = (in_float64(tensors)[x].nan_to_num(0, 0, 0) for x in (*INPUTS, "out"))
        key, value = (x.repeat_interleave(case.group, 1) for x in (key, value))
        back = weights * (out.norm(dim=3)[..., None] * value.norm(dim=3)[:, :, None])
        scale = abs(case.D**-0.5 if case.scale is None else case.scale)
        of_query = (back.square() @ key.square().sum(3, keepdim=True)).sqrt().max().item()
        of_key = (back.square().mT @ query.square().sum(3, keepdim=True)).sqrt().max().item()
        found = dict(query=scale * of_query, key=scale * of_key)
        if "bias" in options:
            found["bias"] = back.square().sum_to_size(options["bias"].shape).sqrt().max().item()
        if "alibi_slopes" in options:
            found["alibi_slopes"] = back.square().sum((0, 2, 3)).sqrt().max().item() * (case.Sq + case.Sk)
        if "sinks" in options:
            found["sinks"] = back.square().sum((0, 2, 3)).sqrt().max().item()
        return found

    @property
    def lonely(self):
        """Return True if dropout leaves a row of 16-bit numbers one key: its score's gradient is rounding, not 0."""
        if self.case.dtype.itemsize != 2 or not self.case.dropout:
            return False
        tensors, options = self.case.draw(self.more)
        with torch.no_grad():
            given = {name: tensors[name] for name in INPUTS}
            weights = self.apply(reference.attention)(**given, **options, return_lse=True, return_weights=True)[2]
        return bool(((weights != 0).sum(-1) == 1).any())


def judged(found, truths):
    """Return {result: fault} of a case, for one draw of values or several draws together."""

    def stacked(each):
        return each[0] if len(each) == 1 else {name: torch.stack([x[name] for x in each]) for name in each[0]}

    got, eager, oracle = map(stacked, (found, [x.eager for x in truths], [x.oracle for x in truths]))
    names = [name for name in oracle if name in got or name == "lse"]  # lse tells which rows are empty
    filled = {name: got.get(name, oracle[name].to(eager[name].dtype)) for name in names}
    terms = {name: max(x.terms[name] for x in truths) for name in truths[0].terms}
    eager, oracle = ({name: x[name] for name in names} for x in (eager, oracle))
    result = verdicts(filled, eager, oracle, terms)
    return {name: verdict.why for name, verdict in result.items() if not verdict.ok}


def run(case, backend, more=0):
    """Compute a case by a backend; raise Wrong if inputs changed or dtypes are wrong."""
    tensors, options = case.draw(more)
    given = {**tensors, **{name: x for name, x in options.items() if isinstance(x, torch.Tensor)}}
    before = {name: whole(x) for name, x in given.items()}
    found = computed(of_backend(ROUTES[case.route].make(case), case, backend), tensors, options, case, case.lse)
    changed = [name for name, x in given.items() if not torch.equal(whole(x), before[name])]
    if changed:
        raise Wrong(f"{backend}: {changed} changed")
    for name, x in found.items():
        expected = case.wide if name == "lse" else case.dtype if name in RESULTS else given[name].dtype
        if x.dtype != expected:
            raise Wrong(f"{backend}: {name} has {x.dtype}, not {expected}")
    return found


def _finite(found, backend):
    """Raise Wrong unless results are finite and no gradient is NaN, for scores too large for the tolerance."""
    for name, x in found.items():
        if x.isnan().any() or name in ("out", "weights") and not x.isfinite().all():
            raise Wrong(f"{backend}: {name} is not finite")


def is_coarse(case, truth):
    """Return True if gradients come from PyTorch's kernel and are less exact than the tolerance."""
    if case.softcap is not None or case.dropout or case.dtype == torch.float64:
        return False
    if case.dtype == torch.bfloat16:
        return case.alike > 1
    return truth.score > LARGEST_ON_CPU and (case.Sk > 64 or case.sinks is not None or case.alike > 4.0)


def hold_draws(compute, judge):
    """Raise Wrong for a fault of a backend; a large error counts only if several draws, judged together, have it.

    Args:
        compute: function of (backend, number of a draw) that returns a draw.
        judge: function of a list of draws that returns {result: fault}.
    """
    for backend in ("triton", None):
        draws = [compute(backend, 0)]
        wrong = judge(draws)
        if wrong and all("error" in why for why in wrong.values()):
            draws += [compute(backend, n) for n in range(1, OTHERS + 1)]
            wrong = judge(draws)
        if wrong:
            raise Wrong(f"{backend}: {wrong}")


def hold(case):
    """Check a case by several backends; raise Wrong for the first backend with a fault."""
    truth = Truth(case)
    for backend in ["triton", None] + ([case.backend] if case.backend else []):
        try:
            found = run(case, backend)
        except NotImplementedError as error:
            if backend == "cpu" and str(error).startswith("backend: "):
                continue
            raise
        half = case.dtype == torch.float16 and truth.products > 3e4
        double = case.dtype == torch.float64 and truth.score > LARGEST_IN_FLOAT64
        merged = case.route == "merge" and truth.score > LARGEST_TO_MERGE
        if truth.score > LARGEST or half or double or merged:
            _finite(found, backend)
            continue
        if backend in (None, "cpu") and is_coarse(case, truth):
            _finite(found, backend)
            found = {name: x for name, x in found.items() if name in RESULTS}
        wrong = judged([found], [truth])
        truths, every = [], []
        for count in (OTHERS + 1, 4 * (OTHERS + 1)):
            # Errors of few values vary by chance, so judge more draws together.
            if not wrong or not all("error" in why for why in wrong.values()):
                break
            more = range(len(truths), count)
            truths += [Truth(case, n) for n in more]
            every += [{name: x for name, x in run(case, backend, n).items() if name in found} for n in more]
            wrong = judged(every, truths)
            if any(each.lonely for each in truths):
                wrong = {name: why for name, why in wrong.items() if name in (*RESULTS, "value")}
        if wrong:
            raise Wrong(f"{backend}: {wrong}")
        if case.again:
            again = run(case, backend)
            if other := [name for name, x in found.items() if not torch.equal(x, again[name])]:
                raise Wrong(f"{backend}: {other} have other bits in the second call")
