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


class Kepler(nn.Module):
    """Two bodies, h'' = -h / |h|³: class D of Hull et al., in Hairer, Norsett and Wanner, Solving ODEs I, II.10."""

    def forward(self, h):
        return -h / h.norm(dim=-1, keepdim=True) ** 3


def kepler_start(eccentricity):
    """H and m of D1 to D5 (eccentricities 0.1 to 0.9), at the pericentre; shape (bodies, 2)."""
    e = torch.as_tensor(eccentricity, dtype=torch.float64)
    zero = torch.zeros_like(e)
    return torch.stack([1 - e, zero], -1), torch.stack([zero, ((1 + e) / (1 - e)).sqrt()], -1)


def kepler_exact(eccentricity, t):
    """H and m at the time t, by Kepler's equation u - e sin u = t."""
    e = np.asarray(eccentricity)
    u = t + e * np.sin(t)
    for _ in range(100):
        u = u - (u - e * np.sin(u) - t) / (1 - e * np.cos(u))
    r, root = 1 - e * np.cos(u), np.sqrt(1 - e**2)
    return np.stack([np.cos(u) - e, root * np.sin(u)], -1), np.stack([-np.sin(u), root * np.cos(u)], -1) / r[..., None]


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
    """The force of h'' + gamma h' + kappa h = kappa h0 + sum of a sin(2 pi f t) and b exp(-((t - c) / s)² / 2).

    Without the sum, (h0, 0) is an equilibrium.
    """

    def __init__(self, gamma=0.0, kappa=0.0, h0=0.0, sines=(), bumps=()):
        super().__init__()
        self.gamma, self.kappa, self.h0, self.sines, self.bumps = gamma, kappa, h0, sines, bumps

    def drive(self, t, xp=torch):
        bumps = sum(b * xp.exp(-(((t - c) / s) ** 2) / 2) for b, c, s in self.bumps)
        return bumps + sum(a * xp.sin(2 * math.pi * f * t) for a, f in self.sines)

    def forward(self, t, h):
        return self.kappa * (self.h0 - h) + self.drive(t)

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
            solution[:, i] += (response * self.drive(end - s, np) * weights * end).sum(1)
        return solution
