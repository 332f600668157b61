"""Rollouts of MuJoCo's Walker2d, found in ``HBNODE_DATA``."""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
from torch import Tensor

CHANNELS = 17
FILE = "rollout_{:03d}.npy"
GENERATED = "generated.json"  # marks rollouts that are not the published ones


def read_walker2d() -> tuple[list[Tensor], str]:
    """Rollouts of MuJoCo's Walker2d: ``walker/rollout_*.npy`` in ``HBNODE_DATA``, one array (frames, 17) an episode.

    Published are 400, of a trained policy, at 0.008 s a frame. Channels: height of the torso in m, its angle, the
    angles of the right thigh, leg and foot and of the left ones in rad; then the velocities of the torso forwards and
    upwards in m/s and of the seven angles in rad/s, all clipped to 10. M. Lechner and R. Hasani, Learning Long-Term
    Dependencies in Irregularly-Sampled Time Series, 2020, arXiv:2006.04418.

    Returns:
        The rollouts in the order of their names, in float32, and what they are, in words.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file holds anything else.
    """
    folder = walker2d_folder()
    files = sorted(folder.glob("rollout_*.npy")) if folder else []
    if not folder or not files:
        raise FileNotFoundError(
            f"walker/rollout_*.npy is not in HBNODE_DATA={os.environ.get('HBNODE_DATA')!r}. Fix: put the rollouts of "
            "the folder data/walker of github.com/raminmh/CfC into a folder walker and set HBNODE_DATA to the folder "
            "above it; or make some of a simple gait with python -m tasks.walker2d --generate 100."
        )
    made = (folder / GENERATED).is_file()
    source = f"{len(files)} rollouts " + ("of the scripted gait" if made else "of a trained policy")
    return [_read_rollout(file) for file in files], source


def walker2d_folder() -> Path | None:
    """Return where the rollouts are or belong; None without ``HBNODE_DATA``."""
    root = os.environ.get("HBNODE_DATA")
    return Path(root) / "walker" if root else None


def _read_rollout(path: Path) -> Tensor:
    import numpy as np

    fix = "Fix: delete the file and get it anew."
    try:
        rollout = torch.from_numpy(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False).astype(np.float32))
    except (OSError, EOFError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); expected an array of (frames, 17). {fix}") from error
    if rollout.dim() != 2 or rollout.shape[1] != CHANNELS or not bool(rollout.isfinite().all()):
        raise ValueError(
            f"{path}: expected (frames, {CHANNELS}) finite numbers, got shape {tuple(rollout.shape)}"
            f"{'' if bool(rollout.isfinite().all()) else ' with others among them'}. {fix}"
        )
    return rollout
