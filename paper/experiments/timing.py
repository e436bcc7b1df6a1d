"""How the scripts of paper.experiments compare the time and memory of two ways to do a thing.

Sides are timed in rounds: every side once, in random order, and in the next round in reverse, so
that a drift of the machine cancels. Ratios are taken within a round.
"""
from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

import ser

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
IMAGES = 256 if CUDA else 16             # of a step

Times = dict[str, dict[str, list[float]]]     # side -> "wall" or "CPU" -> seconds of every round

def now() -> tuple[float, float]:
    """The clock and the CPU time of this process, once the device is done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()

def in_turn(rounds: int, sides: dict[str, Callable[[int], Any]], warm: int = 1) -> Times:
    """Time every side once a round, after `warm` rounds that do not count. A side is called with
    the number of the round, which is negative while warming up."""
    times: Times = {name: {"wall": [], "CPU": []} for name in sides}
    draw = random.Random(0)
    order = list(sides)
    for turn in range(-warm, rounds):
        order = order[::-1] if turn % 2 else draw.sample(order, len(order))
        for name in order:
            wall, cpu = now()
            sides[name](turn)
            wall_after, cpu_after = now()
            if turn >= 0:
                times[name]["wall"].append(wall_after - wall)
                times[name]["CPU"].append(cpu_after - cpu)
    return times

def spread(values: Sequence[float], unit: str = "s") -> str:
    """Median and quartiles, for a table."""
    if len(values) == 1:
        values = [values[0], values[0]]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4g} {unit} ({low:.4g}-{high:.4g})"

def ratios(times: Times, name: str, base: str, clock: str = "wall") -> list[float]:
    """Time of `name` over that of `base`, round by round."""
    return [a / b for a, b in zip(times[name][clock], times[base][clock])]

def compared(times: Times, name: str, base: str) -> str:
    """`ratios` on the wall clock, and in CPU time unless that is spent waiting for a GPU."""
    clocks = ("wall",) if CUDA else ("wall", "CPU")
    return ", ".join(f"{clock} {spread(ratios(times, name, base, clock), 'x')}" for clock in clocks)

def peak() -> float:
    """MB: the most that CUDA's allocator held, or the most that was resident. Linux hands ru_maxrss
    down from the process that starts this one, so there it is VmHWM."""
    if CUDA:
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6     # from kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6       # bytes on a Mac

def fresh(*what: str, memory: bool = False) -> dict[str, float]:
    """What `--alone WHAT` prints in a process of its own. memory: glibc gives blocks above 1 MB
    back, which it otherwise keeps, so that no more is resident than in use. That costs time, so
    times are taken without it."""
    changed = {"MALLOC_MMAP_THRESHOLD_": "1048576"} if memory else {}
    torch.cuda.empty_cache()     # the other process needs the GPU's memory; nothing without one
    command = [sys.executable, "-m", "paper.experiments.overhead", "--alone", *what]
    run = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE,
                         env=os.environ | changed, cwd=Path(ser.__file__).parent)
    return json.loads(run.stdout)
