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


def names_of(page):
    """The names that the code of a page defines."""
    text = (HERE / page).read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names = {"__name__": "snippet"}
    exec("\n".join(code), names)
    return names


def irregular():
    """The predictions that the code of the page makes, in five bins."""
    names = names_of("irregular.md")
    figure, ax = plt.subplots(figsize=(4.5, 4))
    ax.plot([0, 1], [0, 1], "k:", lw=1)
    ax.plot(names["predicted"], names["observed"], "o-")
    ax.set(xlabel="predicted risk", ylabel="observed share", aspect="equal")
    save(figure, "calibration.png")


@torch.no_grad()
def forecasting():
    """Four forecasts of the page's models, and errors of more models by horizon."""
    names = names_of("forecasting.md")
    test, cut, models = names["test"], names["cut"], names["models"]
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharey=True, sharex=True)
    dt = torch.linspace(0, 12, 200, dtype=torch.float64)
    for ax, k in zip(axes.flat, range(4), strict=True):
        one = test.select([k])
        now = float(one.t[0, 19])
        ax.plot(one.t[0] - now, one.x[0], "k.", ms=4, label="samples")
        ax.axvline(0, color="gray", ls=":")
        for name, model in models.items():
            _, state = model.rnn(**cut(one, 20).inputs())
            ax.plot(dt, model.forecast(state, dt)[0], label=name)
        ax.set(ylim=(-3.5, 3.5), xlim=(-8, 12))
    for ax in axes[1]:
        ax.set_xlabel("time after the last sample that was read")
    for ax in axes[:, 0]:
        ax.set_ylabel("angle")
    axes[0, 0].legend(loc="lower left", fontsize=8)
    save(figure, "forecasting.png")
    with torch.enable_grad():
        models["next sample, twice the epochs"] = names["trained"](
            [(names["next_sample"], 48)]
        )
        models["later samples, without the last stage"] = names["trained"](
            names["stages"][:2]
        )
    later = test.x[:, 20:]
    ahead = test.t[:, 20:] - test.t[:, 19:20]
    for name, model in models.items():
        _, state = model.rnn(**cut(test, 20).inputs())
        free = (model.forecast(state, ahead) - later)[..., 0]
        fed = []
        for i in range(20, 50):
            y = model.forecast(state, (test.t[:, i] - state.t).unsqueeze(1))
            _, state = model.rnn(y, test.t[:, i : i + 1], state)
            fed.append(y)
        back = (torch.cat(fed, 1) - later)[..., 0]
        errors = [names["root_mean_square"](e, ahead) for e in (free, back)]
        print(f"{name}: {errors[0]}, fed back {errors[1]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    plots()
    stiff()
    irregular()
    forecasting()
