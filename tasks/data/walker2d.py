"""Rollouts of MuJoCo's Walker2d, found in ``HBNODE_DATA``, or made with a scripted gait."""

from __future__ import annotations

import io
import itertools
import json
import math
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tasks.data.files import check_record, data_folder, missing, readable

if typing.TYPE_CHECKING:
    import gymnasium

CHANNELS = 17
FILE = "rollout_{:03d}.npy"
GENERATED = "generated.json"  # marks rollouts that are not the published ones
FRAME_SECONDS = 0.008
SHORTEST = 160  # frames of a rollout: a window with gaps and what is to follow it


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
        raise missing(
            "walker/rollout_*.npy",
            "Fix: put the rollouts of the folder data/walker of github.com/raminmh/CfC into a folder walker and set "
            "HBNODE_DATA to the folder above it; or make some of a simple gait with python -m tasks.walker2d "
            "--generate 100.",
        )
    made = (folder / GENERATED).is_file()
    source = f"{len(files)} rollouts " + ("of the scripted gait" if made else "of a trained policy")
    return [_read_rollout(file) for file in files], source


def walker2d_folder() -> Path | None:
    """Return where the rollouts are or belong; None without ``HBNODE_DATA``."""
    root = data_folder()
    return root / "walker" if root else None


def _read_rollout(path: Path) -> Tensor:
    fix = "Fix: delete the file and get it anew."
    with readable(path, f"Expected is an array of (frames, {CHANNELS}). {fix}"):
        rollout = torch.from_numpy(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False).astype(np.float32))
    return check_record(rollout, (len(rollout) if rollout.dim() else 0, CHANNELS), str(path), fix)


def generate(episodes: int, seed: int) -> None:
    """Make rollouts of a scripted gait in HBNODE_DATA, in the layout of the published ones, all or none.

    There is no trained policy: the gait swings both legs like pendulums, with noise, and falls after a second or two.
    """
    folder = walker2d_folder()
    if folder is None:
        raise SystemExit("HBNODE_DATA is not set. Fix: set it to the folder that shall hold walker/rollout_*.npy.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder} is there already. Fix: move it away, or set HBNODE_DATA to another folder.")
    try:
        import gymnasium

        environment = gymnasium.make("Walker2d-v5")
    except Exception as error:  # gymnasium has its own for what is missing, and its parts raise ImportErrors
        raise SystemExit(
            f"Walker2d-v5 cannot be simulated ({type(error).__name__}: {error}). "
            "Fix: pip install -e '.[walker]', which is gymnasium with mujoco."
        ) from error
    rollouts = list(itertools.islice(_rollouts(environment, seed, 50 * episodes), episodes))
    if len(rollouts) < episodes:
        raise SystemExit(
            f"only {len(rollouts)} of {50 * episodes} episodes lasted {SHORTEST} frames. Fix: --seed another."
        )
    about = {"environment": "Walker2d-v5", "policy": "scripted gait", "seed": seed, "gymnasium": gymnasium.__version__}
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for number, rollout in enumerate(rollouts):
            np.save(partial / FILE.format(number), rollout)
        (partial / GENERATED).write_text(json.dumps(about, indent=2))
        partial.replace(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SystemExit(
            f"{folder} cannot be written: {error.strerror}. Fix: make room or allow it, or set HBNODE_DATA to another "
            "folder."
        ) from error
    print(f"{episodes} rollouts of a scripted gait, no trained policy, {sum(map(len, rollouts))} frames: {folder}")


def _rollouts(environment: gymnasium.Env, seed: int, attempts: int) -> Iterator[np.ndarray]:
    """Episodes (frames, 17) in float32 that are long enough."""
    for attempt in range(attempts):
        random = np.random.default_rng([seed, attempt])
        observation, _ = environment.reset(seed=int(random.integers(2**31)))
        frames, is_over = [observation], False
        gait = Gait(random)
        while not is_over:
            observation, _, has_fallen, is_out_of_time, _ = environment.step(gait(observation, len(frames)))
            frames.append(observation)
            is_over = has_fallen or is_out_of_time
        if len(frames) >= SHORTEST:
            yield np.asarray(frames, dtype=np.float32)


class Gait:
    """Torques that pull the joints after swinging targets, a little different in every episode, with noise."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.frequency, self.phase = random.uniform(1.3, 1.9), random.uniform(0, 2 * math.pi)  # in 1/s, in rad
        self.swing, self.bend = random.uniform(0.15, 0.35), random.uniform(0.1, 0.6)  # in rad

    def __call__(self, observation: np.ndarray, frame: int) -> np.ndarray:
        """Return torques of the six joints, within [-1, 1], as the environment scales them."""
        angle = self.phase + 2 * math.pi * self.frequency * frame * FRAME_SECONDS + np.array([0.0, math.pi])
        lean = observation[1]
        hips = -0.4 + self.swing * np.sin(angle) - 1.5 * lean
        knees = -self.bend * (1 - np.cos(angle - 0.5)) / 2
        target = np.stack([hips, knees, np.zeros(2)], axis=1).reshape(6)  # right leg, left leg
        torque = 4.0 * (target - observation[2:8]) - 0.15 * observation[11:17] + 0.1 * self.random.standard_normal(6)
        return np.clip(torque, -1.0, 1.0).astype(np.float32)
