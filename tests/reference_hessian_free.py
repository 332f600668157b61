"""Algorithm 1 of the supplement to Martens and Sutskever (2011), written out step by step, and dense matrices."""

import torch


def algorithm_1(weights, v, x, lam, mu, loss):
    """The structurally damped Gauss-Newton product of a tanh RNN, without lambda v, averaged over cases.

    Arguments:
        weights: W_hx, W_hh, b_h, b_init, W_ph, b_p.
        v: likewise, of the vector.
        x: inputs (cases, T, n).
        lam: lambda.
        mu: the share of it that damps the states.
        loss: "bce" as in the listing, "mse" or "cross_entropy".
    """
    w_hx, w_hh, b_h, b_init, w_ph, b_p = weights
    v_hx, v_hh, v_h, v_init, v_ph, v_p = v
    cases, steps, _ = x.shape
    t, h = [], []
    for i in range(steps):
        before = b_init if i == 0 else h[-1] @ w_hh.T
        t.append(x[:, i] @ w_hx.T + b_h + before)
        h.append(torch.tanh(t[-1]))
    rt, rh, ry = [], [], []
    for i in range(steps):
        if i == 0:
            rt.append(v_h + v_init + x[:, 0] @ v_hx.T)
        else:
            rt.append(v_h + x[:, i] @ v_hx.T + h[i - 1] @ v_hh.T + rh[i - 1] @ w_hh.T)
        rh.append((1 + h[i]) * (1 - h[i]) * rt[i])
        rs = v_p + h[i] @ v_ph.T + rh[i] @ w_ph.T
        s = h[i] @ w_ph.T + b_p
        if loss == "bce":
            p = torch.sigmoid(s)
            ry.append(p * (1 - p) * rs)
        elif loss == "cross_entropy":
            p = torch.softmax(s, 1)
            ry.append(p * rs - p * (p * rs).sum(1, keepdim=True))
        else:
            ry.append(rs)
    d_hx, d_hh, d_h, d_init, d_ph, d_p = (torch.zeros_like(z) for z in weights)
    dt_later = torch.zeros_like(h[0])
    for i in reversed(range(steps)):
        ds = ry[i]
        dh = dt_later @ w_hh + ds @ w_ph
        dt = (1 + h[i]) * (1 - h[i]) * dh
        dt = dt + lam * mu * (1 + h[i]) * (1 - h[i]) * rt[i]
        d_ph += ry[i].T @ h[i]
        d_hh += dt_later.T @ h[i]
        d_hx += dt.T @ x[:, i]
        d_h += dt.sum(0)
        d_p += ry[i].sum(0)
        dt_later = dt
    d_init += dt_later.sum(0)
    return [z / cases for z in (d_hx, d_hh, d_h, d_init, d_ph, d_p)]
