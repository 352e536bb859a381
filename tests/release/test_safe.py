"""Tests that calls unpickle nothing, run no program and open no connection; ruff finds the names that could."""

from ..conftest import run_python

# Once torch and Triton are imported, nothing opens a connection, starts a program, unpickles, loads a library or writes
# a file.
PROGRAM = """
import os, sys
import torch
try:
    import triton.language
    from triton.runtime import interpreter
except ImportError:
    triton = None
REFUSED = ("socket.", "subprocess.", "pickle.find_class", "os.system", "os.exec", "os.spawn", "os.posix_spawn",
           "os.fork", "ctypes.dlopen", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.")

def refuse(event, arguments):
    written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event.startswith(REFUSED) or written:
        raise RuntimeError(f"refused: {event} {arguments}")

sys.addaudithook(refuse)
try:
    import socket
    socket.create_connection(("127.0.0.1", 9))
except RuntimeError:
    print("the watch is on")

import fusedattn as fa
from fusedattn.compat import flash_attn, torch as compat

query, key, value = (torch.randn(1, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
for backend in ("naive", "cpu", "triton") if triton else ("naive", "cpu"):
    out, lse = fa.attention(query, key, value, causal=True, return_lse=True, backend=backend)
    torch.autograd.grad(out.sum() + lse.sum(), (query, key, value))
    with torch.no_grad():
        lengths = torch.tensor([3], dtype=torch.int32)
        fa.attention_decode(query[:, :, :1], key, value, cache_seqlens=lengths, backend=backend)
offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
fa.attention_varlen(*(x.detach()[0].transpose(0, 1) for x in (query, key, value)), offsets, offsets)
layer = fa.MultiHeadAttention(32, 4, dropout=0.1, causal=True)
layer(torch.randn(2, 9, 32), need_weights=True)[0].sum().backward()
fa.plan(mask=torch.ones(9, 9, dtype=torch.bool).tril())
fa.explain(query, key, value)
compat.scaled_dot_product_attention(query, key, value, enable_gqa=True)
flash_attn.flash_attn_func(*(x.detach().transpose(1, 2) for x in (query, key, value)), causal=True)
print("all of it ran")
"""


def test_importing_and_calling_reach_nothing(tmp_path):
    printed = run_python("-B", "-c", PROGRAM, cwd=tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert printed.splitlines() == ["the watch is on", "all of it ran"]
