"""Drawing the Walker2D of MuJoCo from its observations, and making it take a few steps."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tasks.common.figures import legend_beside
from tasks.common.files import write_figure
from tasks.data.walker2d import FILE, GENERATED, walker2d_folder

if typing.TYPE_CHECKING:
    import gymnasium
    import numpy as np
    from matplotlib.axes import Axes

FRAME_SECONDS = 0.008
SHORTEST = 160  # frames of a rollout: a window with gaps and what is to follow it
TORSO, THIGH, LEG, FOOT = 0.4, 0.45, 0.5, 0.2  # lengths in m, of walker2d.xml in gymnasium
SHOWN = {0: "height in m", 3: "right knee in rad", 8: "speed in m/s"}  # channels of the figure


def skeleton(frames: Tensor) -> dict[str, Tensor]:
    """Return where the limbs are in the plane of the walk: x forwards from the torso's centre, z upwards, in m.

    The torso's angle leans it forwards; the angles of the joints turn the other way, and each carries what hangs on it.

    Arguments:
        frames: observations (..., 17).

    Returns:
        "torso": hip and neck (..., 2, 2); "right" and "left": hip, knee, ankle and toe (..., 4, 2).
    """
    height, lean = frames[..., 0], frames[..., 1]

    def turned(x: float, z: float, angle: Tensor) -> Tensor:
        """Return a vector turned about the y axis, which takes z towards x."""
        return torch.stack([x * angle.cos() + z * angle.sin(), -x * angle.sin() + z * angle.cos()], dim=-1)

    centre = torch.stack([torch.zeros_like(height), height], dim=-1)
    hip, neck = centre + turned(0.0, -TORSO / 2, lean), centre + turned(0.0, TORSO / 2, lean)
    limbs = {"torso": torch.stack([hip, neck], dim=-2)}
    for side, first in (("right", 2), ("left", 5)):
        thigh, leg, foot = (lean - frames[..., first : first + 3].cumsum(-1).movedim(-1, 0)).unbind()
        knee = hip + turned(0.0, -THIGH, thigh)
        ankle = knee + turned(0.0, -LEG, leg)
        limbs[side] = torch.stack([hip, knee, ankle, ankle + turned(FOOT, 0.0, foot)], dim=-2)
    return limbs


def draw_figure(ax: Axes, frame: Tensor, pale: float = 1.0) -> None:
    """Draw the walker on its floor."""
    limbs = skeleton(frame)
    for name, color in (("left", "C4"), ("torso", "0.25"), ("right", "C1")):
        ax.plot(*limbs[name].T, color=color, lw=3.5, solid_capstyle="round", alpha=pale)
    ax.axhline(0.0, color="0.6", lw=1)
    ax.set(xlim=(-0.75, 0.75), ylim=(-0.1, 1.85), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def draw_walks(true: Tensor, walk: Tensor, seen: Tensor, numbers: Tensor, title: str, folder: Path) -> None:
    """Draw, in ``forecast.png``, the walker as it went on and as it was predicted, and three channels over time.

    Arguments:
        true: frames after those seen, (frames, 17).
        walk: the predicted ones.
        seen: frames that the model was shown, (T, 17).
        numbers: of the frames seen, from 0 on, (T,).
        title: of the figure.
        folder: where to put it.
    """
    import matplotlib.pyplot as plt

    moments = torch.linspace(0, len(true) - 1, 8).round().long().unique().tolist()
    figure = plt.figure(figsize=(12, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.5, 1), squeeze=False)[:, 0]
    axes = above.subplots(2, len(moments), squeeze=False)
    for row, frames, name in zip(axes, (true, walk), ("simulator", "forecast"), strict=True):
        for ax, moment in zip(row, moments, strict=True):
            draw_figure(ax, frames[moment])
        row[0].set_ylabel(name)
    for ax, moment in zip(axes[0], moments, strict=True):
        ax.set_title(f"+{(moment + 1) * FRAME_SECONDS:.2f} s", fontsize="medium")
    above.suptitle(title)
    before = (numbers - numbers[-1]) * FRAME_SECONDS
    later = torch.arange(1, len(true) + 1) * FRAME_SECONDS
    for ax, (channel, label) in zip(below.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        ax.plot(before, seen[:, channel], ".", ms=3, color="0.6", label="frames seen")
        ax.plot(later, true[:, channel], color="k", label="simulator")
        ax.plot(later, walk[:, channel], color="C3", ls="--", label="forecast")
        ax.set(xlabel="time in s", ylabel=label)
        ax.axvline(0.0, color="0.8", lw=0.8)
    legend_beside(below)
    write_figure(figure, folder / "forecast.png")


def generate(episodes: int, seed: int) -> None:
    """Make rollouts of a scripted gait in HBNODE_DATA, in the layout of the published ones, all or none.

    There is no trained policy: the gait swings both legs like pendulums, with noise, and falls after a second or two.
    """
    import numpy as np

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
    import numpy as np

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
        import numpy as np

        angle = self.phase + 2 * math.pi * self.frequency * frame * FRAME_SECONDS + np.array([0.0, math.pi])
        lean = observation[1]
        hips = -0.4 + self.swing * np.sin(angle) - 1.5 * lean
        knees = -self.bend * (1 - np.cos(angle - 0.5)) / 2
        target = np.stack([hips, knees, np.zeros(2)], axis=1).reshape(6)  # right leg, left leg
        torque = 4.0 * (target - observation[2:8]) - 0.15 * observation[11:17] + 0.1 * self.random.standard_normal(6)
        return np.clip(torque, -1.0, 1.0).astype(np.float32)
