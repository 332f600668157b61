"""Initial value problems with exact solutions, in float64."""

import math

import numpy as np
import torch
from torch import nn

import hbnode


def block_matrix(a, gamma, xi=0.0):
    """The matrix of (h, m)' for a linear f(h) = A h: equation (42), with xi equation (50) for sigma the identity."""
    d = a.shape[0]
    return np.block([[np.zeros((d, d)), np.eye(d)], [a - xi * np.eye(d), -gamma * np.eye(d)]])


def linear_func(a):
    """F(h) = A h as a module."""
    layer = nn.Linear(a.shape[0], a.shape[0], bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(a))
    return layer


def damped_oscillator(omega, gamma, h0, m0, t):
    """H and m of h'' + gamma h' + omega^2 h = 0 for gamma < 2 omega."""
    w = np.sqrt(omega**2 - gamma**2 / 4)
    b = (m0 + gamma / 2 * h0) / w
    decay, cos, sin = np.exp(-gamma * t / 2), np.cos(w * t), np.sin(w * t)
    h = decay * (h0 * cos + b * sin)
    return h, -gamma / 2 * h + decay * w * (b * cos - h0 * sin)


def identity_ghbnode(func, **options):
    return hbnode.GHBNODE(func, activation=nn.Identity(), **options)


def driven_exact(gamma, t):
    """H, m of h'' + gamma h' + h = sin 2t + (the drive that makes this exact) for h = exp(-t/3) + cos 2t."""
    return np.exp(-t / 3) + np.cos(2 * t), -np.exp(-t / 3) / 3 - 2 * np.sin(2 * t)


class Driven(nn.Module):
    """The time-dependent force of :func:`driven_exact`, not linear in h."""

    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def forward(self, t, h):
        decay, cos, sin = torch.exp(-t / 3), torch.cos(2 * t), torch.sin(2 * t)
        exact = decay + cos
        acceleration = decay / 9 - 4 * cos + self.gamma * (-decay / 3 - 2 * sin)
        return acceleration - torch.sin(h) + torch.sin(exact)


class Forced(nn.Module):
    """The force of h'' + gamma h' + kappa h = kappa h0 + sum of a sin(2 pi f t).

    Without the sum, (h0, 0) is an equilibrium.
    """

    def __init__(self, gamma=0.0, kappa=0.0, h0=0.0, sines=()):
        super().__init__()
        self.gamma, self.kappa, self.h0, self.sines = gamma, kappa, h0, sines

    def forward(self, t, h):
        return self.kappa * (self.h0 - h) + sum(a * torch.sin(2 * math.pi * f * t) for a, f in self.sines)

    def field(self):
        return hbnode.HBNODE(self, damping=self.gamma, learn_damping=False)

    def exact(self, t):
        """(h, m) at the times, from (h0, 0), by Duhamel's integral."""
        omega = np.emath.sqrt(self.kappa - self.gamma**2 / 4)
        nodes, weights = np.polynomial.legendre.leggauss(40)
        places, weights = (np.arange(200)[:, None] + (nodes + 1) / 2).ravel() / 200, np.tile(weights, 200) / 400
        solution = np.tile([[float(self.h0)], [0.0]], len(t))
        for i, end in enumerate(t):
            s = end * places  # since a unit kick of m
            sine, cosine = np.real(s * np.sinc(omega * s / np.pi)), np.real(np.cos(omega * s))
            response = np.exp(-self.gamma * s / 2) * np.stack([sine, cosine - self.gamma / 2 * sine])
            drive = sum(a * np.sin(2 * math.pi * f * (end - s)) for a, f in self.sines)
            solution[:, i] += (response * drive * weights * end).sum(1)
        return solution
