"""Plain twins of the SDE methods: loops from the equations, in float64, with Cholesky factors of covariances."""

import torch

from hbnode.solve.tableaus import RKN4


def covariance(gamma, tau):
    """That of I and J over a time, written without regard to rounding: fine where γτ is not small."""
    a = (1 - torch.exp(-gamma * tau)) / gamma
    of_i = (1 - torch.exp(-2 * gamma * tau)) / (2 * gamma)
    of_j = (tau - 2 * a + of_i) / gamma**2
    return torch.stack([torch.stack([of_i, a**2 / 2]), torch.stack([a**2 / 2, of_j])])


def flight(h, m, gamma, eta, tau, normals):
    """U over a time with the noise I, J."""
    i, j = torch.einsum("ij,j...->i...", torch.linalg.cholesky(covariance(gamma, tau)), normals)
    s = torch.sqrt(2 * gamma * eta)
    a, b = (1 - torch.exp(-gamma * tau)) / gamma, torch.exp(-gamma * tau)
    return h + a * m + s * j, b * m + s * i


def ubu(f, h, m, gamma, eta, t, size, normals):
    h, m = flight(h, m, gamma, eta, size / 2, normals[:2])
    m = m + size * f(t + size / 2, h)
    return flight(h, m, gamma, eta, size / 2, normals[2:])


def baoab(f, h, m, gamma, eta, t, size, normals):
    b = torch.exp(-gamma * size)
    m = m + size / 2 * f(t, h)
    h = h + size / 2 * m
    m = b * m + torch.sqrt(eta * (1 - b**2)) * normals[0]
    h = h + size / 2 * m
    return h, m + size / 2 * f(t + size, h)


def nystrom4(f, h, m, gamma, eta, t, size, normals):
    s = torch.sqrt(2 * gamma * eta)
    w, bridge, skew = (x * (size * v) ** 0.5 for x, v in zip(normals, (1, 1 / 12, 1 / 720), strict=True))
    push = s * (w - 12 * skew) / size

    start = m + s * (bridge + 6 * skew)
    h, m = nystrom_step(lambda t, h: f(t, h) + push, h, start, gamma, t, size)
    return h, m - s * (bridge - 6 * skew)


def nystrom_step(f, h, m, gamma, t, size):
    """One step for h'' + γh' = f in the gauge u = e^{γs/2} h, in which u'' = (γ²/4) u + e^{γs/2} f."""
    slope = m + gamma / 2 * h
    values = []
    for c, row in zip(RKN4.c, [(), *RKN4.a], strict=True):
        u = h + c * size * slope + size**2 * sum(x * g for x, g in zip(row, values, strict=False))
        grown = torch.exp(gamma * c * size / 2)
        values.append(gamma**2 / 4 * u + grown * f(t + c * size, u / grown))
    u = h + size * slope + size**2 * sum(x * g for x, g in zip(RKN4.b, values, strict=True))
    slope = slope + size * sum(x * g for x, g in zip(RKN4.b_velocity, values, strict=True))
    decay = torch.exp(-gamma * size / 2)
    return decay * u, decay * (slope - gamma / 2 * u)


STEPS = {"ubu": ubu, "baoab": baoab, "nystrom4": nystrom4}


def solve(method, f, h, m, gamma, eta, noise, start=0.0):
    """The state after all steps of a noise, without outputs between."""
    t = torch.tensor(start, dtype=torch.float64)
    for size, normals in zip(noise.sizes, noise.normals, strict=True):
        h, m = STEPS[method](f, h, m, gamma, eta, t, size, normals)
        t = t + size
    return h, m
