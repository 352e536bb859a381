"""Tests that the package unpickles nothing, evaluates nothing, runs no shell and opens no connection."""

import ast
from pathlib import Path

from ..conftest import run_python

ROOT = Path(__file__).parents[2]
# modules that read objects from bytes, run text as code, or reach other machines
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "pty", "commands"}
MODULES |= {"socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc"}
MODULES |= {"socketserver", "webbrowser", "huggingface_hub", "wandb"}
CALLS = {"eval", "exec", "compile", "__import__"}  # builtins only: re.compile and torch.compile are allowed
# functions of other modules, by the last parts of their names
METHODS = {"os.system", "os.popen", "torch.load", "torch.package", "torch.hub", "np.load", "numpy.load", "yaml.load"}
METHODS |= {"cpp_extension.load", "cpp_extension.load_inline", "load_state_dict_from_url", "runpy.run_path"}
METHODS |= {f"os.{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
# {(file, module or function): the reason why it is used}
NAMED = {
    ("fusedattn/launch/failures.py", "subprocess"): "knows the error of a C compiler that Triton calls",
    ("bench/rows.py", "subprocess"): "asks git for the commit of a row, and nvidia-smi for the driver",
}


def sources():
    for folder in ("fusedattn", "kernels", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def found(tree):
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name.split(".")[0] in MODULES | {"subprocess", "ctypes"}:
                yield node.lineno, name.split(".")[0]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.lineno, node.func.id
        if isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            if any(written == method or written.endswith(f".{method}") for method in METHODS):
                yield node.lineno, written
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code", "allow_pickle"):
            yield node.value.lineno, node.arg


def test_no_line_of_it_does_and_each_exception_has_a_reason():
    there = {(file, what): line for file, tree in sources() for line, what in found(tree)}
    assert not {f"{file}:{line}: {what}" for (file, what), line in there.items() if (file, what) not in NAMED}
    assert set(NAMED) <= set(there), "a reason that nothing needs any more"


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
