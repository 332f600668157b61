"""The C library's allocator, and how soon it gives memory back."""

from __future__ import annotations

import torch

_MOST = 31 * 2**20  # bytes; glibc follows freed blocks of up to 32 MiB
_is_told = False


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc keep memory that is freed, once for the process, for work on the CPU.

    It gives memory back to the system block by block, until a large block has been freed: then it raises the sizes from
    which it does, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), to that of the block and twice that. Before, a
    pass whose intermediate values come and go by megabytes can spend half of its time in page faults. Here a block of
    31 MiB is taken and freed, untouched. It changes nothing for other allocators, nor for thresholds that the
    environment sets.
    """
    global _is_told
    if device.type == "cpu" and not _is_told:
        _is_told = True
        torch.UntypedStorage(_MOST)  # which deterministic mode does not fill, as it does tensors
