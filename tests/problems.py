"""Initial value problems with exact solutions, in float64."""

import numpy as np
import torch
from scipy.linalg import expm
from torch import nn

import hbnode


def block_matrix(a, gamma, xi=0.0):
    """The matrix of (h, m)' for a linear f(h) = A h: equation (42), with xi equation (50) for sigma the identity."""
    d = a.shape[0]
    return np.block([[np.zeros((d, d)), np.eye(d)], [a - xi * np.eye(d), -gamma * np.eye(d)]])


def linear_exact(matrix, state, t):
    """exp(matrix t) applied to the rows of state."""
    return state @ expm(matrix * t).T


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
