"""Frames that were tampered with, in the parsers themselves: a child process for each batch, so that a crash is a finding.

A batch has a number, from which its mutations follow; the child notes in shared memory which it is at.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH = 5000
_BATCH_S = 60
"""Of processor time, as ``_FRAME_S``: how long a batch takes says little where others are at work, too."""
_FRAME_S = 5.0
_MEMORY = 2 << 30
"""More address space than the process has, for parsers to allocate."""
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1, 1 << 40)


def mutated(samples: list[bytes], chance: random.Random) -> bytes:
    """One of the samples with a few changes: bits, bytes, lengths, cuts, pieces of itself and of others."""
    data = bytearray(chance.choice(samples))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        kind, at = chance.randrange(8), chance.randrange(len(data) + 1)
        if kind <= 1 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2 and at < len(data):
            data[at] = chance.randrange(256)
        elif kind <= 4:
            width = chance.choice((1, 2, 4, 8))
            at -= at % width if chance.randrange(2) else 0
            value = chance.choice(_EXTREMES) if chance.randrange(3) else chance.randrange(1 << 16)
            data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 5:
            del data[at : at + chance.choice((1, 2, 4, 8, 64, len(data)))]
        elif kind == 6:
            other = chance.choice(samples)
            start = chance.randrange(len(other))
            data[at:at] = other[start : start + chance.choice((1, 4, 8, 32, 200))]
        else:
            other = chance.choice(samples)
            start = chance.randrange(len(other))
            piece = other[start : start + chance.choice((4, 8, 32))]
            data[at : at + len(piece)] = piece
        del data[8192:]
    return bytes(data)


class Batches:
    """Runs batches one after the other. ``problems``: one line each, as they are found."""

    def __init__(self) -> None:
        from .parsers import parsers

        self._parsers = parsers()
        self._note = mmap.mmap(-1, 4096)
        self.names = [parser.name for parser in self._parsers]

    def run(self, number: int, count: int = BATCH) -> tuple[int, list[str]]:
        """How many frames were tried, and what was wrong."""
        parser = self._parsers[number % len(self._parsers)]
        ours, theirs = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._child(number, count, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            told = pipe.read().decode(errors="replace")
        _, status = os.waitpid(pid, 0)
        (at,) = struct.unpack_from("<q", self._note)
        again = f"again: python -m tests.campaign --only frames --batch {number}"
        problems = [f"frames of {parser.name}: {line}; {again}" for line in told.splitlines() if line]
        if status:
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
            ended = (
                "hung"
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF)
                else f"ended by {ended}"
            )
            problems.append(f"frames of {parser.name}: {ended} at frame {at} of its batch; {again}")
        return at + 1, problems

    def _child(self, number: int, count: int, pipe: int) -> None:
        """Never returns."""
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
            for number_, timer, seconds in ((signal.SIGALRM, signal.ITIMER_REAL, 10), (signal.SIGPROF, signal.ITIMER_PROF, 1)):
                signal.signal(number_, signal.SIG_DFL)
                signal.setitimer(timer, seconds * _BATCH_S)
            for line in _distinct(self._attack(number, count)):
                os.write(pipe, (line + "\n").encode())
            code = 0
        except BaseException:
            os.write(pipe, traceback.format_exc()[-500:].replace("\n", " | ").encode())
        finally:
            os._exit(code)

    def _attack(self, number: int, count: int) -> Iterator[str]:
        parser = self._parsers[number % len(self._parsers)]
        chance = random.Random(number)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for at in range(count):
                struct.pack_into("<q", self._note, 0, at)
                data = mutated(parser.samples, chance)
                began = time.process_time()
                problem = self._one(parser, data)
                if not problem and time.process_time() - began > _FRAME_S:
                    problem = f"took longer than {_FRAME_S} s"
                if problem:
                    yield f"{problem} (frame {at}, {data[:48].hex()})"

    @staticmethod
    def _one(parser: Any, data: bytes) -> str:
        from .parsers import Escaped

        try:
            parser.parse(data)
        except Escaped as error:
            return f"out of bounds: {error}"
        except parser.allowed:
            return ""
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {str(error)[:80]} at {os.path.basename(frame.filename)}:{frame.lineno}"
        return ""


def _distinct(lines: Iterator[str]) -> Iterator[str]:
    """The first of each kind: lines that end in other frames are the same."""
    seen: set[str] = set()
    for line in lines:
        key = line.split(" (frame")[0].rsplit(":", 1)[-1] + line[:30]
        if key not in seen:
            seen.add(key)
            yield line
