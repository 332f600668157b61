"""What the benchmarks share: a clock, timing in turn, ratios, peaks of memory, the command line, and the report."""

from __future__ import annotations

import argparse
import gc
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.common.files import write_json
from tasks.common.run import environment


def seconds(function: Callable[[], object]) -> float:
    """Return the processor time of one call, without Python's garbage collector, as ``timeit`` does.

    Other processes disturb it less than the time of the wall.
    """
    gc.collect(0)
    gc.disable()
    try:
        start = time.process_time()
        function()
        return time.process_time() - start
    finally:
        gc.enable()


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each function in each round, after some rounds that do not count.

    The order changes from round to round, because what ran before, in another library's threads or caches, is felt.
    """
    shuffle = random.Random(0)
    order = list(functions)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warm + repeats):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(seconds(functions[name]))
    return {name: found[warm:] for name, found in times.items()}


def milliseconds(times: Sequence[float]) -> float:
    """Return the median, in ms."""
    return 1e3 * statistics.median(times)


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def peak_bytes(device: torch.device) -> int:
    """Return the peak of memory, since :func:`reset_peak` if there was one: on a GPU that of PyTorch's allocator.

    On Linux this is not ``ru_maxrss``, because a process inherits that from its parent.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def reset_peak(device: torch.device) -> int:
    """Set the peak of memory back to what is in use, and return it; macOS cannot do so, and keeps its peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def command(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return the command line of a benchmark, with ``--out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"runs/benchmarks/{name}.json"), help="where to write JSON")
    return parser


def write(out: Path, report: Mapping[str, Any], device: torch.device | None = None) -> str:
    """Write a report with the machine in it, and return the machine's name and the version of torch."""
    machine = environment(device or torch.device("cpu"))
    write_json(out, {"machine": machine, **report})
    print(f"written: {out}")
    return f"{machine['device']}, PyTorch {machine['torch']}"
