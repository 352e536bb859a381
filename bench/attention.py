"""What is timed of a case: a Workload; the first of them is attention itself."""

import contextlib
import functools

from . import accuracy, calls, cost, providers


class Workload:
    """A case on a device, for each of its providers. A subclass has setup(name) -> whatever its `step` then takes."""

    def __init__(self, case, device):
        self.case, self.device = case, device

    def label(self, name):
        """The provider that a row names: ours with the backend that takes the case."""
        return name

    def unchecked(self, name):
        """Why the tolerance does not apply to a provider's answer, or ""."""
        return ""

    def work(self, mode):
        """(operations, bytes or None) of a step, for its rates; None where these say nothing."""

    @contextlib.contextmanager
    def step(self, mode, provider):
        """The context in which the function that it yields is timed: entering it is no part of the step."""
        raise NotImplementedError

    def judge(self, mode, provider, result):
        """(error, eager PyTorch's error, what is wrong or "") of the result of a step."""
        raise NotImplementedError


class Attention(Workload):
    """Attention of query, key and value as they are drawn."""

    def __init__(self, case, device):
        super().__init__(case, device)
        self.tensors = case.draw(device)

    @functools.cached_property
    def truth(self):
        """What the head that is compared should be."""
        return accuracy.truth(self.case, self.tensors)

    def label(self, name):
        return providers.label(name, self.case, self.tensors)

    def unchecked(self, name):
        return providers.unchecked(self.case, name)

    def setup(self, name):
        call = providers.find(name)(self.case, self.tensors)
        return call if isinstance(call, calls.Call) else calls.Call(call)

    def work(self, mode):
        return cost.flops(self.case, mode), cost.moved(self.case, mode)

    def step(self, mode, provider):
        return calls.step(mode, provider, self.tensors)

    def judge(self, mode, provider, result):
        return accuracy.judge(self.case, mode, calls.unpacked(provider, result), self.truth)
