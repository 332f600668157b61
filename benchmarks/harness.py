"""Code that the benchmarks share: command line, interleaved timing, ratios, peak memory, tables, JSON and figures."""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import multiprocessing
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.common.files import write_figure, write_json
from tasks.common.run import environment

Row = dict[str, Any]
Options = argparse.Namespace
MISSING = "{name} is not installed, and the benchmark compares with it. Fix: pip install 'hbnode[bench]'."


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Return the processor time of a call, without Python's garbage collector, as ``timeit`` does.

    Other processes affect processor time less than wall-clock time.
    """
    gc.collect(0)
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(calls):
            function()
        return (time.process_time() - start) / calls
    finally:
        gc.enable()


def interleaved(
    functions: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2, at_least: float = 0.0
) -> dict[str, list[float]]:
    """Return the time in seconds of each function in each round, after some warm-up rounds.

    The order changes from round to round, because the previous function can affect threads and caches. In each round a
    function is called repeatedly, for about ``at_least`` seconds.
    """
    shuffle = random.Random(0)
    order = list(functions)
    times: dict[str, list[float]] = {name: [] for name in functions}
    calls = dict.fromkeys(functions, 1)
    for turn in range(warm + repeats):
        if turn == warm and at_least:
            calls = {name: max(1, round(at_least / min(found))) for name, found in times.items()}
        shuffle.shuffle(order)
        for name in order:
            times[name].append(seconds(functions[name], calls[name]))
    return {name: found[warm:] for name, found in times.items()}


def milliseconds(times: Sequence[float]) -> float:
    """Return the median time in milliseconds."""
    return 1e3 * statistics.median(times)


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio of two times."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def training_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a training step without the optimizer step."""

    def step() -> None:
        module.zero_grad()
        loss().backward()

    return step


def gradient(step: Callable[[], object], parameters: Iterable[Tensor]) -> Tensor:
    """Return the gradient of a training step as one vector."""
    step()
    return torch.cat([p.grad.flatten() for p in parameters])


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the relative error of a tensor in the Euclidean norm."""
    return ((x - exact).norm() / exact.norm()).item()


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes.

    On Linux this is not ``ru_maxrss``, because a process inherits that value from its parent.
    """
    if sys.platform == "linux":
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS reports bytes


def added_memory(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the MiB by which each function, after those before it, raises the peak memory of this fresh process."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use; not possible on macOS
    start, found = peak_bytes(), {}
    for name, function in functions.items():
        function()
        found[f"{name}_MiB"] = (peak_bytes() - start) / 2**20
    return found


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process with one thread, and return its result."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as pool:
        return pool.submit(function, *arguments).result()


def command(
    doc: str | None, name: str, repeats: int | None = None, quick: str = "", sections: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark: ``--out``, and the options that the benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"runs/benchmarks/{name}.json"), help="path of the JSON file")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"timed rounds [{repeats}]")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if sections:
        parser.add_argument("--sections", nargs="+", default=list(sections), choices=list(sections))
    return parser


def table(rows: Sequence[Row]) -> str:
    """Format rows as a table with column names; numbers have three digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if any(isinstance(row.get(name), str) for row in rows) else ">" for name in names]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return str(value) if not isinstance(value, float) else f"{value:{',.0f' if 100 <= value < 1e6 else '.3g'}}"


def panels(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).flatten()


def program(
    doc: str | None,
    name: str,
    measured: Callable[[Options], Iterable[tuple[str, Any]]],
    shown: Callable[[Row], Row] = dict,
    draw: Callable[[dict[str, Any], str], Any] | None = None,
    **options: Any,
) -> Callable[..., None]:
    """Return the ``main`` function of a benchmark.

    It measures section by section on one thread and prints each section as a table. It writes a JSON file, which
    includes a description of the machine, and a figure.

    Arguments:
        doc: text at the start of the help.
        name: name of the output files.
        measured: function of the options that yields (section name, result). A result is a list of rows, a single row
            or a number. The rows of a section can be yielded in several lists.
        shown: function that selects the columns of a row for the table.
        draw: function of the whole report and the name of the machine that returns a figure; None: no figure.
        options: keyword arguments of :func:`command`.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        parsed = command(doc, name, **options).parse_args(arguments)
        torch.set_num_threads(1)
        report: dict[str, Any] = {}
        for section, found in measured(parsed):
            rows = found if isinstance(found, list) else [found if isinstance(found, dict) else {section: found}]
            print(f"{section}\n{table([shown(row) for row in rows])}\n", flush=True)
            report[section] = report.get(section, []) + found if isinstance(found, list) else found
        machine = write(parsed.out, report)
        figure = draw and draw(report, machine)
        if figure:
            write_figure(figure, parsed.out.with_suffix(".png"))

    return main


def write(out: Path, report: Mapping[str, Any]) -> str:
    """Write a report with a description of the machine, and return the machine's name and the version of torch."""
    machine = environment(torch.device("cpu"))
    write_json(out, {"machine": machine, **report})
    print(f"written: {out}")
    return f"{machine['device']}, PyTorch {machine['torch']}"
