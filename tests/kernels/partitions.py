"""The partitions of a program's warps, in turns that a seed chooses, and what is asynchronous: see `gluon`."""

import threading

import numpy

from fusedattn.launch import interpreter

MOST_POLLS = 10_000  # of a number in memory, by one program


class Deadlock(Exception):
    pass


class Machine:
    """One program at a time: its partitions, and what is under way."""

    def __init__(self, random):
        self.random = random
        self.unfenced = []  # (partition, what it has written to shared memory)
        self.baton = threading.Condition()
        self.under_way = []  # copies: functions that end them
        self.polls = 0

    def run(self, partitions):
        """Run functions side by side, one of them at a time, until all have returned."""
        self.waiting = dict.fromkeys(range(len(partitions)))  # what each waits for
        self.late = set()  # who goes on when nobody else can
        self.turn, self.error = 0, None
        threads = [threading.Thread(target=self._run, args=x, daemon=True) for x in enumerate(partitions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.settle()

    def _run(self, number, function):
        with self.baton, interpreter.quiet():
            self.baton.wait_for(lambda: self.turn == number or self.error)
            try:
                if not self.error:
                    local.number, local.products, local.stores, local.writes = number, [], [], []
                    function()
                    assert not local.products, "a partition ended before its products"
                    assert not local.stores, "a partition ended before its stores"
                    del self.waiting[number]
                    self._pass_on()
            except BaseException as error:
                self.error = self.error or error
                self.baton.notify_all()

    def _pass_on(self):
        """Let a partition that need not wait go on."""
        while self.waiting:
            if self.under_way and self.random.random() < 0.5:
                self.arrive()
            ready = [number for number, condition in self.waiting.items() if condition is None or condition()]
            sooner = [number for number in ready if number not in self.late]
            if not sooner and self.under_way:
                self.arrive()
                continue
            if not ready:
                raise Deadlock(f"{len(self.waiting)} partitions wait for each other")
            self.turn = self.random.choice(sooner or ready)
            break
        self.baton.notify_all()

    def wait(self, condition=None, late=False):
        """Let others go on, until a condition holds; late, sometimes, is as long as they can without this partition."""
        number = local.number
        self.waiting[number] = condition
        if late and self.random.random() < 0.5:
            self.late.add(number)
        self._pass_on()
        self.baton.wait_for(lambda: self.turn == number or self.error)
        if self.error:
            raise SystemExit
        self.waiting[number] = None
        self.late.discard(number)

    def poll(self):
        """Let others go on, before a number in memory is read again."""
        self.polls += 1
        if self.polls > MOST_POLLS:
            raise Deadlock("a partition waits for each other program to change a number, and none does")
        self.wait(late=True)

    def arrive(self):
        """End something that is under way, whichever."""
        self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def check_seen(self, array):
        """What threads have written an asynchronous reader sees once they have fenced it."""
        assert not any(numpy.shares_memory(x, array) for _, x in self.unfenced), "read before a fence made it visible"

    def settle(self):
        while self.under_way:
            self.arrive()


local = threading.local()
