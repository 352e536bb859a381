"""Tests that handwritten signatures agree with the table of options in call/options.py."""

import inspect

import pytest

import fusedattn as fa
from fusedattn.call.options import Arguments

FLAGS = {"return_lse": False, "return_weights": False, "backend": None}
OPTIONS = {name: Arguments._field_defaults[name] for name in Arguments._fields[3:]}
# {public function: options that it lacks, or takes in another form}
ABSENT = {
    fa.attention: (), fa.attention_varlen: (), fa.attention_decode: ("dropout_p", "seed"),
    fa.distributed.ring_attention: ("mask", "bias", "query_mask"), fa.distributed.gather_attention: (),
    fa.distributed.gather_attention_varlen: (), fa.distributed.ulysses_attention: (),
}  # fmt: skip


def parameters(function):
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("function", ABSENT, ids=lambda function: function.__name__)
def test_a_public_function_has_the_options_and_defaults_of_the_table(function):
    found = parameters(function)
    for name, default in OPTIONS.items():
        assert (name in found) == (name not in ABSENT[function]), name
        assert name not in found or found[name] == default, name


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_decode"])
def test_the_reference_has_the_signature_of_the_function_less_backend(name):
    want = parameters(getattr(fa, name))
    assert want.keys() >= FLAGS.keys() and want.pop("backend") is None
    assert parameters(getattr(fa.reference, name)) == want
