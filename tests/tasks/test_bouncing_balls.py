"""Bouncing balls: the simulator's physics, the pictures, the loss, free running, training and resuming."""

import itertools
import math

import pytest
import torch

from tasks import bouncing_balls
from tasks.data import bouncing_balls as balls
from tasks.data.bouncing_balls import RADIUS, SIDE

# The simulator


def test_a_collision_keeps_momentum_and_energy_and_what_is_across_the_line():
    position, velocity = balls.start(200, torch.Generator().manual_seed(0))
    after = balls.exchange(position, velocity, 0, 2)
    torch.testing.assert_close(after.sum(1), velocity.sum(1))
    torch.testing.assert_close(after.square().sum((1, 2)), velocity.square().sum((1, 2)))
    line = torch.nn.functional.normalize(position[:, 0] - position[:, 2])
    change = after - velocity
    torch.testing.assert_close(change[:, 0], (change[:, 0] * line).sum(1, keepdim=True) * line)
    assert torch.equal(change[:, 1], torch.zeros_like(change[:, 1]))


# The pictures


def test_pixels_are_the_part_of_them_that_discs_cover():
    position = balls.trajectories(2, 3, torch.Generator().manual_seed(0))
    found = balls.render(position)
    for n, t, row, column in itertools.product(range(2), range(3), range(SIDE), range(SIDE)):
        total = 0.0
        for x, y in position[n, t].tolist():
            distance = math.hypot((column + 0.5) / SIDE - x, (row + 0.5) / SIDE - y)
            total += min(max(0.5 + (RADIUS - distance) * SIDE, 0.0), 1.0)
        assert found[n, t, SIDE * row + column].item() == pytest.approx(min(total, 1.0), abs=1e-5)


# The loss


def test_the_loss_is_of_the_frames_after_the_first():
    videos = balls.videos(4, 12, torch.Generator().manual_seed(0))
    model = torch.nn.Linear(324, 324)
    loss, means = bouncing_balls.Divergence()(model, (videos,))
    before, after = videos[:, :-1], videos[:, 1:]
    p = model(before).sigmoid()
    cross, own = (torch.nn.functional.binary_cross_entropy(x, after, reduction="sum").item() for x in (p, after))
    assert loss.item() == pytest.approx(cross / 4, rel=1e-5)
    assert means["kl"] == pytest.approx((cross - own) / 4, rel=1e-4)
    assert means["squared_error"] == pytest.approx(((p - after) ** 2).sum().item() / (4 * 11), rel=1e-5)


# Free running


def test_free_running_sees_the_first_frames_only():
    """By a model that predicts half of what it saw last."""
    video, lengths = torch.rand(6, 4, dtype=torch.float64), []

    def fading(x):
        lengths.append(x.shape[1])
        return (x / 2).logit(eps=1e-12)

    found = bouncing_balls.free_running(fading, video, given=3)
    torch.testing.assert_close(found[:3], video[:3] / 2)
    torch.testing.assert_close(found[3:], torch.stack([video[2] / 4, video[2] / 8]))
    assert lengths == [3, 4, 5, 5]
