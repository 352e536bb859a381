"""Kernels that did not compile or load on this machine at their first call, with the reason and advice."""

import errno
import subprocess  # noqa: TID251 - knows the error of a C compiler that Triton calls
import sys
import warnings

# Errors that may be temporary: a full disk, too many open files, no memory for a process, a network folder.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM}
_PASSING |= {errno.ESTALE, errno.EIO, errno.ETIMEDOUT}
_ORIGINS = {*sys.stdlib_module_names, "torch", "triton"}  # packages of the exceptions that Triton raises
failed_kernels: dict[tuple, str] = {}  # {run.kind_of(kernel, call) or (kernel, device): why it failed}
passed: dict[tuple, str] = {}  # failures that may be temporary, as in `failed_kernels`
_warned: set[str] = set()


class KernelUnavailable(Exception):
    """Error of a kernel that cannot run on this machine. The message names the kernel, the cause and a remedy."""


class Unrecordable(Exception):
    """Error of a call that needs more than kernel launches. A replay repeats only kernel launches."""


def forget() -> None:
    failed_kernels.clear()
    passed.clear()
    _warned.clear()


def known(key: tuple, maybe: bool = False) -> "KernelUnavailable | None":
    """Return the error of a kernel that has failed before, or None. maybe: also one that may be temporary."""
    why = failed_kernels.get(("every kernel", key[1])) or failed_kernels.get(key) if failed_kernels else None
    why = passed.get(key) if why is None and maybe else why
    return None if why is None else KernelUnavailable(why)


def is_passing(error: BaseException | None, outer: BaseException | None) -> bool:
    """Return whether a failure may be temporary. Raise an exception from outside of Triton, as of a time limit."""
    # A signal handler raises anywhere. Triton wraps what it catches, so follow the chain to what the caller handles.
    if error is None or error is outer:
        return False
    if type(error).__module__.partition(".")[0] not in _ORIGINS or (type(error) is TimeoutError and not error.errno):
        raise error
    passing = isinstance(error, (MemoryError, RecursionError)) or getattr(error, "errno", None) in _PASSING
    killed = isinstance(error, subprocess.CalledProcessError) and error.returncode in (-9, -15)  # SIGKILL, SIGTERM
    return is_passing(error.__context__, outer) or passing or killed


def remember(key: tuple, error: Exception, outer: BaseException | None = None) -> "KernelUnavailable":
    """Return the error to raise for a failed kernel. Keep it for later calls, unless its cause may be temporary."""
    # outer: the exception that the caller was handling before.
    name, device, *_ = key
    whole, what, advice = _judge(name, error)
    message = f"{what} on {device} ({cause(error)}); {advice}"
    if is_passing(error, outer):
        passed[key] = message
    else:
        failed_kernels[("every kernel", device) if whole else key] = message
    return KernelUnavailable(message)


def fall_back(why: "KernelUnavailable", named: bool) -> None:
    """Warn once that another backend takes calls, because a kernel failed. Raise if the caller named the backend."""
    if named:
        raise NotImplementedError(f"backend: the named one cannot take this call: {why}") from why
    warn_once(str(why), str(why), stacklevel=2)


def warn_once(reason: str, sentence: str, stacklevel: int) -> None:
    """Warn, once for each reason, that another backend takes the calls."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"fusedattn takes a slower path: {sentence}", stacklevel=stacklevel + 1)


def cause(error: Exception) -> str:
    """Return the type of an error and the most telling line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    text = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _judge(name: str, error: Exception) -> tuple[bool, str, str]:
    """Return (whether every kernel fails this way, what fails, what to do)."""
    if isinstance(error, subprocess.SubprocessError) or "C compiler" in str(error):
        advice = "install a C compiler and Python's headers (apt install gcc python3-dev)"
        return True, "Triton cannot build its kernel launcher", advice
    if isinstance(error, ImportError):
        advice = "check that NVIDIA's driver is installed, and empty Triton's cache, ~/.triton/cache"
        return True, "Triton cannot load its kernel launcher", advice
    if isinstance(error, OSError):
        advice = "give Triton access to that file or folder, or set TRITON_CACHE_DIR to a folder that it may write"
        return True, "Triton cannot compile kernels", advice
    what = f"the kernel {name!r} does not compile or load"
    if type(error).__name__ == "OutOfResources":
        return False, what, "no tile fits this GPU: leave backend unset"
    return False, what, "leave backend unset, and report this with the output of `fusedattn info`"
