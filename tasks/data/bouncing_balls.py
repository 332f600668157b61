"""Three balls that bounce in a box, simulated from collision to collision, as videos."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BALLS = 3
RADIUS = 0.12  # radius of a ball in a box of side length 1
SPEED = 0.05  # root mean square speed of the balls in a video, per frame
SIDE = 18  # side length of a frame in pixels
PAIRS = tuple((i, j) for i in range(BALLS) for j in range(i + 1, BALLS))


class State(NamedTuple):
    """Positions and velocities of the balls.

    Attributes:
        position: centres of the balls, between radius and 1 - radius, (N, 3, 2).
        velocity: velocities per frame, (N, 3, 2).
    """

    position: Tensor
    velocity: Tensor


def start(count: int, generator: torch.Generator) -> State:
    """Return balls at uniform positions without overlaps, with normal velocities scaled to SPEED.

    Arguments:
        count: the number of boxes, N.
        generator: of the random numbers.
    """
    position = torch.empty(count, BALLS, 2, dtype=torch.float64)
    wrong = torch.ones(count, dtype=torch.bool)
    while wrong.any():
        drawn = torch.rand(int(wrong.sum()), BALLS, 2, generator=generator, dtype=torch.float64)
        position[wrong] = RADIUS + (1 - 2 * RADIUS) * drawn
        wrong = torch.stack([_distance(position, i, j) < 2 * RADIUS for i, j in PAIRS]).any(0)
    velocity = torch.randn(count, BALLS, 2, generator=generator, dtype=torch.float64)
    energy = velocity.square().sum((1, 2), keepdim=True)
    return State(position, velocity * (SPEED * (BALLS / energy).sqrt()))


def advance(state: State, duration: float = 1.0) -> State:
    """Return the balls some frames later.

    The balls move freely from one collision of their box to the next. At a wall the normal component of the velocity
    changes its sign. Two balls exchange their velocity components along the line between their centres. They have equal
    mass, so this conserves momentum and energy.

    Arguments:
        state: the balls of N boxes.
        duration: time in frames, not necessarily an integer.
    """
    position, velocity = state
    left = torch.full((len(position),), duration, dtype=position.dtype)
    while (left > 0).any():
        walls, pairs = _times_to_walls(position, velocity), _times_to_pairs(position, velocity)
        times = torch.cat([walls.flatten(1), pairs], dim=1)
        first, event = times.min(1)
        step = torch.minimum(first, left)
        position = position + velocity * step[:, None, None]
        event = event.where(first <= left, -1)  # no collision before the end
        left = left - step
        at_wall = torch.arange(walls[0].numel()) == event[:, None]
        velocity = torch.where(at_wall.reshape(velocity.shape), -velocity, velocity)
        for index, (i, j) in enumerate(PAIRS):
            collide = event == walls[0].numel() + index
            velocity = torch.where(collide[:, None, None], exchange(position, velocity, i, j), velocity)
    return State(position, velocity)


def exchange(position: Tensor, velocity: Tensor, i: int, j: int) -> Tensor:
    """Return the velocities (N, 3, 2) after a collision of the balls i and j in each box."""
    between = position[:, i] - position[:, j]
    line = between / between.norm(dim=1, keepdim=True)
    along = ((velocity[:, i] - velocity[:, j]) * line).sum(1, keepdim=True) * line
    after = velocity.clone()
    after[:, i] -= along
    after[:, j] += along
    return after


def _times_to_walls(position: Tensor, velocity: Tensor) -> Tensor:
    """Return the time in frames until each coordinate of each ball reaches a wall, (N, 3, 2); inf at rest."""
    wall = torch.where(velocity > 0, 1 - RADIUS, RADIUS)
    return torch.where(velocity == 0, torch.inf, ((wall - position) / velocity).clamp(min=0))


def _times_to_pairs(position: Tensor, velocity: Tensor) -> Tensor:
    """Return the time in frames until each pair of balls collides, (N, 3); inf for pairs that do not collide.

    The squared distance is |x|² + 2 b t + |v|² t², with b = x·v. The collision is the first time at which it equals (2
    r)². The formula below is also exact for pairs that already touch.
    """
    times = []
    for i, j in PAIRS:
        x, v = position[:, i] - position[:, j], velocity[:, i] - velocity[:, j]
        b, squared, gap = (x * v).sum(1), v.square().sum(1), x.square().sum(1) - (2 * RADIUS) ** 2
        root = b.square() - squared * gap
        time = gap.clamp(min=0) / (root.clamp(min=0).sqrt() - b)
        times.append(torch.where((b < 0) & (root > 0), time, torch.inf))
    return torch.stack(times, dim=1)


def _distance(position: Tensor, i: int, j: int) -> Tensor:
    return (position[:, i] - position[:, j]).norm(dim=1)


def trajectories(count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Return positions of the balls, (count, frames, 3, 2), from random starts.

    Arguments:
        count: the number of boxes.
        frames: the number of times, one unit apart.
        generator: of the random numbers.
    """
    state = start(count, generator)
    positions = [state.position]
    for _ in range(frames - 1):
        state = advance(state)
        positions.append(state.position)
    return torch.stack(positions, dim=1)


def render(position: Tensor) -> Tensor:
    """Return images of the balls as discs, (..., 18 · 18) float32 in [0, 1]. In the first image row the second
    coordinate is 0.

    The value of a pixel is approximately the share of it that the discs cover: 1/2 + (r - d) / w within [0, 1] for each
    disc, with the distance d between the centres of pixel and disc and the width w of a pixel. The sum over the discs
    is at most 1.

    Arguments:
        position: centres of the balls, (..., balls, 2).
    """
    centres = (torch.arange(SIDE, dtype=torch.float32) + 0.5) / SIDE
    covered = torch.zeros(*position.shape[:-2], SIDE, SIDE)
    for ball in position.float().unbind(-2):
        across, down = ((centres - x[..., None]).square() for x in ball.unbind(-1))
        distance = (down[..., :, None] + across[..., None, :]).sqrt_()
        covered += distance.sub_(RADIUS).mul_(-SIDE).add_(0.5).clamp_(0, 1)
    return covered.clamp_(max=1).flatten(-2)


def videos(count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Return videos (count, frames, 324), rendered from :func:`trajectories`."""
    moments = trajectories(count, frames, generator).unbind(1)
    return torch.stack([render(position) for position in moments], dim=1)
