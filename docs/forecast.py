# %% [markdown]
# # From a CSV file to a forecast
#
# Heart rates of 120 made-up patients at irregular times. The cells can be run in an editor or as a script.

# %%
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from hbnode.estimators import SeriesForecaster

random = np.random.default_rng(0)
rows = []
for patient in range(120):
    hours = np.cumsum(0.1 + random.exponential(0.8, random.integers(20, 60)))
    level, decay = (
        80 + 12 * random.normal(),
        np.exp(-np.diff(hours, prepend=0.0) / 6),
    )
    drift = 0.0
    for hour, share in zip(hours, decay, strict=True):
        drift = share * drift + np.sqrt(1 - share**2) * 6 * random.standard_t(4)
        time = pd.Timestamp("2024-01-01") + pd.Timedelta(
            hours=24 * patient + hour
        )
        day = 5 * np.sin(2 * np.pi * hour / 24)
        rows.append(
            (
                patient,
                time.round("s"),
                round(level + drift + day + 2 * random.standard_t(3), 1),
            )
        )
pd.DataFrame(rows, columns=["patient", "time", "pulse"]).to_csv(
    "pulse.csv", index=False
)

# %% [markdown]
# ## Six lines
#
# The forecaster holds out a third of the patients at a time. It chooses a model by its errors on them, and sets the
# width of the bands so that they hold 50 % and 90 % of the values. Then it fits the model to all patients.

# %%
table = pd.read_csv("pulse.csv", parse_dates=["time"])
train, new = table[table["patient"] < 100], table[table["patient"] >= 100]
past = new[new.groupby("patient").cumcount() < 15]
forecaster = SeriesForecaster(
    id="patient", time="time", level=(50, 90), random_state=0
).fit(train)
forecast = forecaster.predict(
    past, ahead=pd.timedelta_range("30min", "12h", periods=24)
)
print(forecast.head(3).to_string())

# %% [markdown]
# ## What was chosen, and how it looks

# %%
print(
    forecaster.model_,
    {name: round(loss, 3) for name, loss in forecaster.cv_loss_.items()},
)

figure, axes = plt.subplots(
    2, 2, figsize=(9, 5), sharey=True, layout="constrained"
)
for ax, patient in zip(axes.flat, [101, 104, 107, 110], strict=True):
    whole, seen = (
        new[new["patient"] == patient],
        past[past["patient"] == patient],
    )
    one = forecast[forecast["patient"] == patient]
    start = seen["time"].iloc[-1]
    hours = (one["time"] - start) / pd.Timedelta("1h")
    for level, alpha in ((90, 0.15), (50, 0.3)):
        ax.fill_between(
            hours,
            one[f"lower_{level}"],
            one[f"upper_{level}"],
            color="tab:blue",
            alpha=alpha,
            lw=0,
            label=f"{level} %",
        )
    ax.plot(hours, one["mean"], color="tab:blue", label="mean")
    later = whole[
        (whole["time"] > start) & (whole["time"] < start + pd.Timedelta("12h"))
    ]
    for part, color, label in (
        (seen, "black", "seen"),
        (later, "tab:red", "observed later"),
    ):
        ax.plot(
            (part["time"] - start) / pd.Timedelta("1h"),
            part["pulse"],
            "o",
            ms=3,
            color=color,
            label=label,
        )
    ax.set_title(f"patient {patient}")
figure.legend(
    *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5
)
for ax in axes[1]:
    ax.set_xlabel("hours after the last measurement")
for ax in axes[:, 0]:
    ax.set_ylabel("pulse")
figure.savefig("forecast.png", dpi=120)
