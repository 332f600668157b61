"""A progress bar for loops, which needs tqdm."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(steps: Any, progress: bool | None, name: str) -> Any:
    """Wrap the iterable ``steps`` in a progress bar; None shows the bar only in a terminal and if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress:
            raise ImportError("progress=True needs tqdm. Fix: pip install tqdm, or progress=False.") from error
        return steps
    is_shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(steps, desc=name, leave=False, disable=not is_shown)
