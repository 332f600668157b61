"""Bouncing balls: the simulator's physics, the pictures, the loss, free running, training and resuming."""

import itertools
import math

import pytest
import torch

from tasks import bouncing_balls
from tasks.data import bouncing_balls as balls
from tasks.data.bouncing_balls import RADIUS, SIDE

# The simulator


def started(count, seed=0):
    return balls.start(count, torch.Generator().manual_seed(seed))


def energy(velocity):
    return velocity.square().sum((1, 2))


def test_a_collision_keeps_momentum_and_energy_and_what_is_across_the_line():
    state = started(200)
    after = balls.exchange(*state, 0, 2)
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
    torch.testing.assert_close(balls.exchange(state.position, after, 0, 2), state.velocity)  # and back again


# The pictures


def test_pixels_are_the_part_of_them_that_discs_cover():
    position = balls.trajectories(2, 3, torch.Generator().manual_seed(0))
    found = balls.render(position)
    assert found.dtype == torch.float32
    assert torch.equal(balls.videos(2, 3, torch.Generator().manual_seed(0)), found)
    for n, t, row, column in itertools.product(range(2), range(3), range(SIDE), range(SIDE)):
        total = 0.0
        for x, y in position[n, t].tolist():
            distance = math.hypot((column + 0.5) / SIDE - x, (row + 0.5) / SIDE - y)
            total += min(max(0.5 + (RADIUS - distance) * SIDE, 0.0), 1.0)
        assert found[n, t, SIDE * row + column].item() == pytest.approx(min(total, 1.0), abs=1e-5)


# The loss


def cross_entropy(p, q):
    return torch.nn.functional.binary_cross_entropy(p, q, reduction="sum").item()


def test_the_loss_is_of_the_frames_after_the_first():
    videos = balls.videos(4, 12, torch.Generator().manual_seed(0))
    model = torch.nn.Linear(324, 324)
    loss, means = bouncing_balls.Divergence()(model, (videos,))
    before, after = videos[:, :-1], videos[:, 1:]
    p = model(before).sigmoid()
    assert loss.item() == pytest.approx(cross_entropy(p, after) / 4, rel=1e-5)
    assert means["kl"] == pytest.approx((cross_entropy(p, after) - cross_entropy(after, after)) / 4, rel=1e-4)
    assert means["squared_error"] == pytest.approx(((p - after) ** 2).sum().item() / (4 * 11), rel=1e-5)
    exact = bouncing_balls.divergence(after.double().logit(eps=1e-12), after.double())
    torch.testing.assert_close(exact, torch.zeros(4).double(), rtol=0, atol=1e-6)


# Free running


class Fading(torch.nn.Module):
    """Predicts half of what it saw last, and remembers how much it was shown."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def forward(self, x):
        self.lengths.append(x.shape[1])
        return (x / 2).logit(eps=1e-12)


def test_free_running_sees_the_first_frames_only():
    video = torch.rand(6, 4, dtype=torch.float64)
    model = Fading()
    found = bouncing_balls.free_running(model, video, given=3)
    torch.testing.assert_close(found[:3], video[:3] / 2)
    torch.testing.assert_close(found[3:], torch.stack([video[2] / 4, video[2] / 8]))
    assert model.lengths == [3, 4, 5, 5]


# Runs
