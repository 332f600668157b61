"""Memory that is freed is kept."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from hbnode._torch import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory(torch.device("cpu"))
for turn in range(4):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**18) for _ in range(24)]  # a mebibyte each
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_blocks_that_come_and_go_are_not_taken_from_the_system_again(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 0.3 * faults["leave"]  # near 0, but for pages that the system moves
