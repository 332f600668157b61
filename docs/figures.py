"""Draw the pictures of the guides that no benchmark or task draws: ``python -m docs.figures``."""

import re
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import hbnode
from hbnode.diagnostics import nfe_vs_tolerance, plot, record_steps

HERE = Path(__file__).parent


def save(figure, name):
    figure.tight_layout()
    figure.savefig(HERE / "images" / name, dpi=110)
    plt.close(figure)


def plots():
    torch.manual_seed(0)
    figure, axes = plt.subplots(2, 2, figsize=(9, 7))
    duffing = hbnode.HeavyBallODEBlock(
        lambda h: h - h**3, damping=0.2, t_span=(0.0, 25.0)
    )
    start = torch.tensor([[0.1], [1.6]])
    plot.phase_portrait(duffing, start, ax=axes[0, 0])
    plot.vector_field(duffing, ax=axes[0, 0])
    axes[0, 0].set_title("phase_portrait, vector_field")

    def pulse(t, h):
        return 50 * torch.exp(-(((t - 6) / 0.1) ** 2)) - h

    block = hbnode.HeavyBallODEBlock(pulse, t_span=(0.0, 10.0))
    plot.steps(block, torch.zeros(1, 1), ax=axes[0, 1])
    axes[0, 1].set_title("steps")
    f = hbnode.nn.MLP(4, [32], 4)
    x, tolerances = torch.randn(8, 4), [1e-1, 1e-2, 1e-3, 1e-4, 1e-5]
    curves = {
        method: nfe_vs_tolerance(
            hbnode.HeavyBallODEBlock(f, method=method), x, tolerances
        )
        for method in ("dopri5", "nystrom8")
    }
    plot.tolerance_curve(curves, ax=axes[1, 0])
    plot.spectrum(hbnode.HeavyBallODEBlock(f, damping=0.6), x, ax=axes[1, 1])
    axes[1, 1].set_title("spectrum")
    save(figure, "plots.png")


def stiff():
    """y' = -1000 (y - cos t): the solution is close to cos t."""

    def field(t, y):
        return -1000 * (y - torch.cos(t))

    y0 = torch.zeros(1, 1, dtype=torch.float64)
    t = torch.linspace(0, 3, 300, dtype=torch.float64)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True)
    for method in ("rodas5p", "tsit5"):
        with (
            record_steps(field) as record,
            hbnode.count_nfe(field) as nfe,
            torch.no_grad(),
        ):
            y = hbnode.odeint(field, y0, t, method=method, rtol=1e-4, atol=1e-4)
        above.plot(t, y[:, 0, 0])
        label = f"{method}: {nfe.forward:,} evaluations"
        below.semilogy(record.t, record.size, ".", ms=3, label=label)
    above.set_ylabel("y")
    below.set(xlabel="t", ylabel="step size")
    below.legend()
    save(figure, "stiff.png")


def irregular():
    """The predictions that the code of the page makes, in five bins."""
    page = (HERE / "irregular.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {"__name__": "snippet"}
    exec("\n".join(code), names)
    target = names["targets"][names["test"]]
    figure, ax = plt.subplots(figsize=(4.5, 4))
    ax.plot([0, 1], [0, 1], "k:", lw=1)
    said = names["probability"]
    parts = said.argsort().tensor_split(5)
    ax.plot(
        [said[p].mean() for p in parts],
        [target[p].mean() for p in parts],
        "o-",
    )
    ax.set(xlabel="predicted risk", ylabel="observed share", aspect="equal")
    save(figure, "calibration.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    plots()
    stiff()
    irregular()
