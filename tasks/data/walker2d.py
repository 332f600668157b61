"""Rollouts of MuJoCo's Walker2d."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import check_record, data_folder, missing

CHANNELS = 17
FRAME_SECONDS = 0.008


def read_walker2d() -> tuple[list[Tensor], str]:
    """Return rollouts of MuJoCo's Walker2d: ``walker/rollout_*.npy`` in ``HBNODE_DATA``, an array (frames, 17) each.

    400 rollouts of a trained policy are published, with 0.008 s per frame. Channels: height of the torso in m, its
    angle, the angles of the right thigh, leg and foot and of the left ones in rad; then the velocities of the torso
    forwards and upwards in m/s and of the seven angles in rad/s, all clipped to 10. M. Lechner and R. Hasani, Learning
    Long-Term Dependencies in Irregularly-Sampled Time Series, 2020, arXiv:2006.04418.

    Returns:
        The rollouts in the order of their names, in float32, and a description.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file is damaged.
    """
    root = data_folder()
    files = sorted((root / "walker").glob("rollout_*.npy")) if root else []
    if not files:
        raise missing(
            "walker/rollout_*.npy",
            "Fix: put the rollouts of the folder data/walker of github.com/raminmh/CfC into a folder walker and set "
            "HBNODE_DATA to the folder above it.",
        )
    # earlier versions of this task could write simulated rollouts, in a folder with a marker file
    kind = "the scripted gait" if files[0].with_name("generated.json").is_file() else "a trained policy"
    return [_read_rollout(file) for file in files], f"{len(files)} rollouts of {kind}"


def _read_rollout(path: Path) -> Tensor:
    fix = "Fix: delete the file and get it anew."
    with readable(path, f"Expected is an array of (frames, {CHANNELS}). {fix}"):
        rollout = torch.from_numpy(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False).astype(np.float32))
    return check_record(rollout, (len(rollout) if rollout.dim() else 0, CHANNELS), str(path), fix)
