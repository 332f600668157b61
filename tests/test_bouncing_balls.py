"""Bouncing balls: the simulator's physics, the pictures, the loss, free running, training and resuming."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks.data import bouncing_balls as balls
from tasks.data.bouncing_balls import BALLS, RADIUS, SIDE, SPEED, State

# The simulator


def started(count, seed=0):
    return balls.start(count, torch.Generator().manual_seed(seed))


def energy(velocity):
    return velocity.square().sum((1, 2))


def gaps(position):
    """How far apart the edges of two balls are, (N, pairs)."""
    pairs = [(position[:, i] - position[:, j]).norm(dim=1) for i in range(BALLS) for j in range(i)]
    return torch.stack(pairs, dim=1) - 2 * RADIUS


def box(*rows):
    """One box; rows of x, y and their velocities, the last balls at rest out of the way."""
    rest = [(0.88, 0.88, 0, 0), (0.12, 0.88, 0, 0)]
    table = torch.tensor([*rows, *rest][:BALLS], dtype=torch.float64)
    return State(table[None, :, :2], table[None, :, 2:])


def test_starts_have_no_overlap_and_the_same_energy():
    state = started(500)
    assert (gaps(state.position) >= 0).all()
    assert state.position.min() >= RADIUS
    assert state.position.max() <= 1 - RADIUS
    torch.testing.assert_close(energy(state.velocity), torch.full((500,), BALLS * SPEED**2, dtype=torch.float64))
    assert torch.equal(state.position, started(500).position)
    assert not torch.equal(state.position, started(500, seed=1).position)


def test_a_collision_keeps_momentum_and_energy_and_what_is_across_the_line():
    state = started(200)
    after = balls.exchanged(*state, 0, 2)
    torch.testing.assert_close(after.sum(1), state.velocity.sum(1))
    torch.testing.assert_close(energy(after), energy(state.velocity))
    assert torch.equal(after[:, 1], state.velocity[:, 1])
    line = state.position[:, 0] - state.position[:, 2]
    line = line / line.norm(dim=1, keepdim=True)
    across = torch.stack([-line[:, 1], line[:, 0]], dim=1)
    for ball, other in ((0, 2), (2, 0)):
        along = [(v * line).sum(1) for v in (after[:, ball], state.velocity[:, other])]
        torch.testing.assert_close(*along)  # exchanged
        kept = [(v[:, ball] * across).sum(1) for v in (after, state.velocity)]
        torch.testing.assert_close(*kept)
    torch.testing.assert_close(balls.exchanged(state.position, after, 0, 2), state.velocity)  # and back again


def test_balls_stay_in_the_box_and_keep_their_energy():
    state = started(300)
    for _ in range(120):
        state = balls.advance(state)
        assert state.position.min() >= RADIUS - 1e-12
        assert state.position.max() <= 1 - RADIUS + 1e-12
        assert gaps(state.position).min() >= -1e-12
    expected = torch.full((300,), BALLS * SPEED**2, dtype=torch.float64)
    torch.testing.assert_close(energy(state.velocity), expected, rtol=1e-12, atol=0)


def test_a_ball_reflects_at_the_walls():
    state = balls.advance(box((0.2, 0.3, -0.1, 0.0)), 2.0)  # 0.08 to the wall, 0.12 back
    torch.testing.assert_close(state.position[0, 0], torch.tensor([0.24, 0.3], dtype=torch.float64))
    assert state.velocity[0, 0].tolist() == [0.1, 0.0]
    state = balls.advance(box((0.8, 0.8, 0.1, 0.2), (0.12, 0.5, 0, 0), (0.12, 0.2, 0, 0)), 1.0)  # into a corner
    torch.testing.assert_close(state.position[0, 0], torch.tensor([0.86, 0.76], dtype=torch.float64))
    assert state.velocity[0, 0].tolist() == [-0.1, -0.2]


def test_a_ball_stops_where_it_hits_one_at_rest():
    state = balls.advance(box((0.2, 0.5, 0.1, 0.0), (0.54, 0.5, 0.0, 0.0)), 2.0)  # they touch after 0.1
    torch.testing.assert_close(state.position[0, :2, 0], torch.tensor([0.3, 0.64], dtype=torch.float64))
    torch.testing.assert_close(state.velocity[0, :2, 0], torch.tensor([0.0, 0.1], dtype=torch.float64))


def test_time_can_be_run_backwards():
    begin = started(50)
    end = begin
    for _ in range(10):
        end = balls.advance(end)
    back = balls.advance(State(end.position, -end.velocity), 10.0)
    torch.testing.assert_close(back.position, begin.position, rtol=0, atol=1e-8)
    torch.testing.assert_close(back.velocity, -begin.velocity, rtol=0, atol=1e-8)


def test_many_small_steps_of_a_plain_simulator_agree():
    """Straight lines, and a velocity that is changed after the balls have begun to overlap."""
    state, steps, frames = started(3, seed=4), 3_000, 5
    for box_number in range(3):
        x, v = state.position[box_number].numpy().copy(), state.velocity[box_number].numpy().copy()
        for _ in range(frames * steps):
            x += v / steps
            v = np.where((x < RADIUS) & (v < 0) | (x > 1 - RADIUS) & (v > 0), -v, v)
            for i, j in ((0, 1), (0, 2), (1, 2)):
                apart, relative = x[i] - x[j], v[i] - v[j]
                if apart @ apart < 4 * RADIUS**2 and apart @ relative < 0:
                    change = (apart @ relative) / (apart @ apart) * apart
                    v[i], v[j] = v[i] - change, v[j] + change
        found = balls.advance(State(state.position[box_number, None], state.velocity[box_number, None]), float(frames))
        np.testing.assert_allclose(found.position[0].numpy(), x, rtol=0, atol=1e-3)


# The pictures


def test_pixels_are_the_plain_twins():
    position = balls.trajectories(2, 3, torch.Generator().manual_seed(0))
    found = balls.render(position)
    assert found.shape == (2, 3, SIDE * SIDE)
    assert found.dtype == torch.float32
    for n in range(2):
        for t in range(3):
            for row in range(SIDE):
                for column in range(SIDE):
                    total = 0.0
                    for x, y in position[n, t].tolist():
                        distance = math.hypot((column + 0.5) / SIDE - x, (row + 0.5) / SIDE - y)
                        total += min(max(0.5 + (RADIUS - distance) * SIDE, 0.0), 1.0)
                    assert found[n, t, SIDE * row + column].item() == pytest.approx(min(total, 1.0), abs=1e-5)


def test_a_picture_holds_the_discs_areas():
    found = balls.render(started(500).position).double()
    area = found.sum(1) / SIDE**2
    torch.testing.assert_close(area, torch.full_like(area, BALLS * math.pi * RADIUS**2), rtol=0.04, atol=0)
    assert found.min() == 0
    assert found.max() == 1
    assert ((found > 0) & (found < 1)).double().mean() > 0.1  # real numbers, not bits


def test_videos_are_pictures_of_trajectories():
    moments = balls.trajectories(4, 6, torch.Generator().manual_seed(1))
    assert torch.equal(balls.videos(4, 6, torch.Generator().manual_seed(1)), balls.render(moments))
    assert balls.videos(0, 6, torch.Generator()).shape == (0, 6, SIDE * SIDE)
    assert balls.videos(2, 1, torch.Generator()).shape == (2, 1, SIDE * SIDE)
