"""Asks processes that may hang, or die: each answer is a status, and the next request finds a process that works."""

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

COMMAND = (sys.executable, "-m", "fusedattn.cli.tune.child")
FIRST_S, SILENT_S = 180.0, 60.0  # until a process has begun; and between two lines of one that works


class Stopped(Exception):
    """A process was stopped while it worked; its candidate is not to blame."""


class Child:
    """A process that answers requests, one at a time; started when it is first asked, and again after it died."""

    def __init__(self, command: Sequence[str] = COMMAND, silent_s: float = SILENT_S):
        self.command, self.silent_s = command, silent_s
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"status", "why", "ms"}: the process's, or "hangs" or "crashes" with a sentence that says how.

        Raises: Stopped if another thread stops it; RuntimeError if no process starts.
        """
        if self.stopped:
            raise Stopped
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        what = "its first step"
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            while line := self.lines.get(timeout=self.silent_s):
                answer: dict[str, Any] = json.loads(line)
                if "status" in answer:
                    if answer.pop("ends"):
                        self._end()
                    return answer
                what = answer["at"]
        except queue.Empty:
            self._kill()
            return dict(status="hangs", why=f"{what}: nothing for {self.silent_s:.0f} s", ms={})
        except BrokenPipeError:
            pass
        if self.stopped:
            raise Stopped
        return dict(status="crashes", why=f"{what}: its process {self._end()}", ms={})

    def stop(self) -> None:
        """End the process, whatever it does, and for good."""
        self.stopped = True
        self._kill()

    def _kill(self):
        if self.process is not None:
            self.process.kill()
            self._end()

    def _start(self):
        """A process that says that it has begun, and what it says besides."""
        if self.stopped:
            raise Stopped
        # A session of its own: Ctrl-C is for who asks.
        streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(self.command, **streams, text=True, start_new_session=True)
        if self.stopped:  # meanwhile, by a thread that saw no process yet
            self._kill()
            raise Stopped
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_pass_on, args=(self.process.stdout, self.lines), daemon=True).start()
        try:
            begun = self.lines.get(timeout=FIRST_S)
        except queue.Empty:
            begun = ""
        if not begun:
            self._kill()
            raise RuntimeError("the process that runs candidates does not start: try `fusedattn check`")

    def _end(self):
        """How the process ended."""
        process, self.process = self.process, None
        try:
            status = process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # a process inside of a broken driver cannot be ended
            return "cannot be ended"
        finally:
            process.stdin.close()
            process.stdout.close()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _pass_on(stream, lines):
    """Put each line of a stream into a queue, and "" at its end."""
    try:
        for line in stream:
            lines.put(line)
    except ValueError:  # it was closed meanwhile
        pass
    lines.put("")
