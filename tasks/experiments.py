"""The commands behind the pages of Results, named EXPERIMENT/TABLE, and which of their results become rows.

``python -m tasks.results`` lists, runs and collects them. The hours are those of one thread, estimated from earlier
runs. The tables named "full" have runs as long as those of the papers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.readers import compared, forecasts, images_per_second, pair_of, positions_of, recalled
from tasks.rows import Reader, Row, both, number, renamed, runs, study

ONE_PROCESS = ("studies.", "annealing")  # commands without the option --jobs


@dataclass(frozen=True)
class Command:
    """One command of an experiment, or several that follow one another.

    Attributes:
        hours: CPU hours of one thread, estimated.
        line: the task and its options, several joined by "&&". ``{out}`` is the folder of the command, and ``{runs}``
            that of all experiments. ``--out {out}`` and ``--jobs 1`` are added.
        read: yields the rows of the folder.
        data: the data set, and the part of it or the length of the runs.
    """

    hours: float
    line: str
    read: Reader
    data: tuple[str, str] = ("", "")

    def arguments(self, out: Path) -> list[list[str]]:
        """Return the arguments of ``python -m`` for each line."""
        lines = [line if " --out " in line else line + " --out {out}" for line in self.line.split(" && ")]
        single = [
            line if line.startswith(ONE_PROCESS) else line.replace(" --out ", " --jobs 1 --out ") for line in lines
        ]
        return [shlex.split(f"tasks.{line}".format(out=out, runs=out.parents[1])) for line in single]

    def text(self, out: Path) -> str:
        """Return the command as a reader would type it."""
        return " && ".join(shlex.join(["python", "-m", *line]) for line in self.arguments(out))


FIVE = "node,anode,sonode,hbnode,ghbnode"
SEVEN = f"{FIVE},nesterovnode,adamnode"
RULES = "plain,gain,forget,momentum,nag,sr,adam,rmsprop"
DOPRI5 = "--solver torchdiffeq --adjoint-norm full"
RATES = ("1e-3", "3e-3", "1e-2")  # learning rates of the tables "rates"; "tuned" has the best of them by validation

DIGITS = ("scikit-learn digits, 8 × 8", "1,437 images")
CLOUD = ("disc in an annulus", "120 points")
SILVERBOX = ("Silverbox, official split", "")
F16 = ("F-16 vibration, phase-disjoint split", "491 training segments")
WALKER = "Walker2D, one frame in ten missing"
PIXELS = ("MNIST 14 × 14, permuted", "10,000 of 60,000 images")
SPEECH = ("Free Spoken Digit Dataset", "2,400 recordings")
COPYING = ("copying, 48 symbols", "3,000 batches of 32")
RECALL = ("multi-query associative recall", "500 batches of 32")
LORENZ = ("stochastic Lorenz", "4,096 windows")
ARCHIVE = ("UEA and UCR archive, its own splits", "")
VIBRATION = ("F-16 vibration", "491 training segments")
ATTACKS = {("noise", 0.0), ("noise", 0.3), ("noise", 0.5), ("fgsm", 0.1), ("pgd", 0.05), ("pgd", 0.1)}
PROBLEMS = {"addition": "addition", "temporal_order": "temporal-order", "memorization_5": "5-bit-memorization"}
PAIRS = ["tanh-hf", "tanh-adam", "lstm-adam", "lstm_chrono-adam", "gru-adam", "dtriv-adam", "adam_lstm-adam", "gru-hf"]
PAIRS += ["tanh-soap", "gru-soap", "tanh-hf --structural-damping 0"]  # models with their optimizers
OPTIMIZERS = {"hf": "Hessian-free", "adam": "Adam, 1e-2"}
ESTIMATORS = {
    "default": "SeriesClassifier()",
    **{kind: f'SeriesClassifier("{kind}")' for kind in ("features", "rocket", "oscillators", "odernn", "gru")},
    "aeon": "aeon's MiniRocketClassifier",
}
SELECTIVE = {name: f"selective, {name}" for name in ("real", "swinging")}
DENSITIES = {"funnel": "funnel", "many_well": "many-well", "cancer": "logistic-regression"}
STAGES = {"False": "untrained", "True": "trained"}
SCORES = {"jsb": "JSB Chorales", "nottingham": "Nottingham", "piano": "Piano-midi.de"}
BATCHES = {5: "750 batches", 10: "1,500 batches", 20: "3,000 batches"}  # by the epoch of transformer_copy

LIKELIHOODS = ("log_likelihood", "relative_error")
NFE = ("nfe_forward_mean", "nfe_backward_mean")
CLASSES = ("test_accuracy", "test_loss", "training_seconds")
FORECASTS = ("train_forecast_mse", "validation_forecast_mse", "test_forecast_mse", "test_acceleration_mse")
images = runs("test_accuracy", "test_loss", "train_loss", *NFE, "seconds_per_epoch")
penalised = runs(
    *("test_accuracy", "train_cross_entropy", "nfe_forward_mean", "test_nfe", "seconds_per_epoch"),
    label=lambda c: c["model"] + ("" if c["regularize"] == "none" else f", λ = {c['penalty']:g}"),
    table="penalties",
)
vibration = runs(*FORECASTS, *NFE, "seconds_per_epoch", "seconds")
frames = runs("train_loss", "test_mse", "walk_mse", *NFE, "seconds_per_epoch")
arrow = ("arrow_no_extrapolation_rmse_mV", "arrow_full_rmse_mV")
voltages = ("validation_rmse_mV", "multisine_rmse_mV", *arrow, "seconds_per_epoch")
memories = runs("test_loss", "trivial_loss", "seconds_per_epoch")
pixels = runs("test_accuracy", "best_validation_accuracy", "seconds_per_epoch")
spoken = runs("test_mse", "best_validation_mse", "seconds_per_epoch")
archived = both(
    *(
        study("accuracy.csv", metric, model=lambda row: ESTIMATORS[row["model"]], table=table)
        for metric, table in (("test_accuracy", "accuracy"), ("seconds", "seconds"))
    )
)
latent = forecasts("final_elbo", "final_kl_path", "train_nfe", "seconds_per_epoch")


def tuning(name: str, line: str, hours: float, metric: str, data: tuple[str, str]) -> dict[str, Command]:
    """Return the command of the table "rates": each model with each of :data:`RATES`, on a seed of its own."""
    lines = " && ".join(f"{line} --lr {rate} --seed 10 --out {{out}}/{rate}" for rate in RATES)
    return {f"{name}/rates": Command(hours, lines, runs(metric, case="rate {lr:g}"), data)}


def classified(dataset: str, options: str, hours: float, size: str, *metrics: str) -> dict[str, Command]:
    """Return the command of one data set of classification, for all models."""
    line = f"classification --dataset {dataset} --model all --seeds 3 {options}"
    read = both(runs(*CLASSES, *metrics), compared)
    return {f"classification/{dataset}": Command(hours, line, read, (dataset, size))}


def log10(reader: Reader) -> Reader:
    """Return a reader of the logarithms of the values."""

    def read(folder: Path) -> Iterator[Row]:
        for row in reader(folder):
            yield row | {"metric": f"log10_{row['metric']}", "value": number(math.log10(float(row["value"])))}

    return read


COMMANDS: dict[str, Command] = {
    "digits/adjoint": Command(
        3,
        f"image_classification --small --model {SEVEN} --epochs 5 --batch-size 32 --seeds 3 --tol 1e-5 {DOPRI5}",
        images,
        DIGITS,
    ),
    "digits/native": Command(1.5, f"image_classification --preset full --model {SEVEN} --seeds 3", images, DIGITS),
    **{
        f"regularisation/penalty-{penalty}": Command(
            0.1,
            f"image_classification --small --model node --epochs 8 --regularize both --penalty {penalty} --seeds 3",
            penalised,
            DIGITS,
        )
        for penalty in ("0.01", "0.1", "1")
    },
    "regularisation/no-penalty": Command(
        0.2, "image_classification --small --model node,sonode,hbnode,ghbnode --epochs 8 --seeds 3", penalised, DIGITS
    ),
    "robustness/attacks": Command(
        0.5,
        "studies.robustness {runs}/digits/native --images 180 --pgd-steps 10 --out {out}",
        study(
            "robustness.csv",
            "accuracy",
            model=lambda row: row["model"].lower(),
            case="attack {attack}, size {size}",
            where=lambda row: (row["attack"], float(row["size"])) in ATTACKS,
        ),
        (DIGITS[0], "180 test images"),
    ),
    "mnist/native": Command(
        0.3,
        f"image_classification --preset paper-mnist --solver native --tol 1e-3 --model {FIVE} --epochs 2 "
        "--subset 2000 --test-subset 1000",
        images,
        ("MNIST", "2,000 of 60,000 images"),
    ),
    "mnist/adjoint": Command(
        0.5,
        f"image_classification --preset paper-mnist --tol 1e-5 --model {FIVE} --epochs 1 "
        "--subset 640 --test-subset 1000",
        images,
        ("MNIST", "640 of 60,000 images"),
    ),
    "cifar10/native": Command(
        0.3,
        "image_classification --dataset cifar10 --model node,hbnode --epochs 6 --subset 3000 --test-subset 1000 "
        "--tol 1e-2 --clip 1 --bfloat16",
        images,
        ("CIFAR-10", "3,000 of 50,000 images"),
    ),
    "point-cloud/native": Command(
        8,
        f"point_cloud --model {FIVE} --tol 1e-4 --seeds 100",
        runs("separates", "train_loss", "nfe_forward_mean", "seconds_per_epoch"),
        CLOUD,
    ),
    "point-cloud/adjoint": Command(
        2, f"point_cloud --preset paper --model {FIVE} --seeds 2", runs("separates", "train_loss", *NFE), CLOUD
    ),
    "pendulum/swings": Command(
        0.5, "pendulum --model all --seeds 3", runs("test_loss", "energy_error"), ("simulated pendulum", "100 swings")
    ),
    "silverbox/growth": Command(
        0.3,
        "studies.silverbox_growth --draws 100",
        log10(study("growth.csv", "median", "q10", "q90", "mean", where=lambda row: float(row["t"]) == 63)),
        ("Silverbox, V1", "63 samples, 100 initialisations, tolerance 1e-7"),
    ),
    "silverbox/simulation": Command(2, f"silverbox --model {FIVE} --epochs 60 --seeds 5", runs(*voltages), SILVERBOX),
    "silverbox/oscillators": Command(
        0.4,
        "silverbox --model oscillators --window 500 --stride 50 --batch-size 32 --epochs 120 --seeds 5",
        runs(*voltages, "seconds", label="oscillators, {epochs} epochs"),
        SILVERBOX,
    ),
    "plane-vibration/24-epochs": Command(0.6, "plane_vibration --model all --seeds 3 --epochs 24", vibration, F16),
    "plane-vibration/paper-split": Command(
        0.6,
        "plane_vibration --protocol paper --model all --seeds 3 --epochs 24",
        vibration,
        ("F-16 vibration, the paper's split", F16[1]),
    ),
    "plane-vibration/200-epochs": Command(
        1.2,
        "plane_vibration --model node,sonode,hbnode,ghbnode,lstm,gru,gru-d,cfc --seeds 3 --epochs 200 --tol 1e-3",
        vibration,
        F16,
    ),
    "plane-vibration/full": Command(
        4, "plane_vibration --model all --seeds 3 --epochs 500 --tol 1e-3", runs(*FORECASTS, "seconds"), F16
    ),
    **tuning("plane-vibration", "plane_vibration --model all --epochs 48 --tol 1e-3", 0.4, FORECASTS[1], F16),
    "plane-vibration/tuned": Command(
        0.8,
        " && ".join(
            f"plane_vibration --epochs 100 --tol 1e-3 --model {models} --lr {rate} --seeds 3 --out {{out}}/{rate}"
            for rate, models in (
                ("1e-2", "node,gru,lstm,gru-d,oscillators,kalman"),
                ("3e-3", "hbnode,sonode,ghbnode,anode,cfc"),
            )
        ),
        runs("lr", *FORECASTS, "seconds"),
        F16,
    ),
    "plane-vibration/rate-1e-2": Command(  # the best rate of two models by "rates", at which other seeds diverge
        0.4,
        "plane_vibration --epochs 100 --tol 1e-3 --model hbnode,sonode --lr 1e-2 --seeds 3",
        runs("train_forecast_mse", "test_forecast_mse"),
        F16,
    ),
    **{
        f"plane-vibration/{model}": Command(
            0.1,
            f"plane_vibration --model {model} {options} --seeds 5",
            runs(*FORECASTS, "seconds", label=label, table="oscillators"),
            F16,
        )
        for model, options, label in (
            ("oscillators", "--lr 0.03 --epochs 100", "oscillators, linear"),
            ("kalman", "--lr 0.1 --epochs 13", "oscillators in noise (Kalman filter)"),
        )
    },
    "plane-vibration/adjoint": Command(
        0.4,
        f"plane_vibration --model {FIVE} {DOPRI5} --tol 1e-7 --epochs 2",
        runs("nfe_forward", "nfe_backward", "seconds", at={1: "epoch 1", 2: "epoch 2"}),
        F16,
    ),
    "walker2d/10-epochs": Command(
        0.5, "walker2d --model all --seeds 3 --windows 2500 --epochs 10", frames, (WALKER, "2,500 of 9,814 windows")
    ),
    "walker2d/full": Command(
        60, "walker2d --model all --seeds 1 --epochs 500 --tol 1e-3", frames, (WALKER, "all 9,814 windows")
    ),
    "walker2d/adjoint": Command(
        0.1,
        f"walker2d --model {FIVE} {DOPRI5} --tol 1e-7 --windows 512 --epochs 2",
        runs(*NFE),
        (WALKER, "512 of 9,814 windows"),
    ),
    "walker2d/gradients": Command(
        0.5,
        "studies.walker2d_gradients",
        study(
            "adjoint_norms.csv",
            "ratio",
            case="cell {cell}, stage {stage}",
            where=lambda row: float(row["frames_back"]) == 60,
        ),
        (WALKER, "1,000 of 9,814 windows"),
    ),
    **classified("clinic", "--epochs 30", 0.2, "1,200 patients", "test_auroc"),
    **classified("ItalyPowerDemand", "--epochs 30 --drop 0.5", 0.2, "1,096 days", "test_auroc"),
    **classified("BasicMotions", "--epochs 100 --batch-size 16 --drop 0.5 --samples 50", 0.2, "80 series"),
    **classified("ACSF1", "--epochs 100 --batch-size 16", 0.6, "200 series"),
    **classified("PLAID", "--epochs 60", 0.6, "1,074 series"),
    **classified("PigCVP", "--epochs 100 --batch-size 16", 0.8, "312 series"),
    "ucr/shallow": Command(0.3, "studies.archive --models default,features,rocket,aeon", archived, ARCHIVE),
    "ucr/networks": Command(
        1,
        "studies.archive --models oscillators,odernn,gru --sets ItalyPowerDemand,BasicMotions,GunPoint,JapaneseVowels",
        archived,
        ARCHIVE,
    ),
    **{
        f"selective/{problem}": Command(
            hours,
            f"studies.selective --problem {problem} --seeds 5 --first-seed 10 {options}",
            study(
                f"{problem}.csv",
                *(metric, "seconds", "steps", "lr"),
                model=lambda row: SELECTIVE.get(str(row["model"]), str(row["model"])),
            ),
            (data, ""),
        )
        for problem, metric, options, hours, data in (
            ("adding", "test_error", "--rates 5e-3", 0.5, "adding, T = 1,000, irregular"),
            ("tone", "test_accuracy", "--seconds 67", 1.0, "tone, T = 200, irregular"),
        )
    },
    **{
        f"selective/{table}": Command(
            0.1,
            f"classification --model selective,gru,gru-d,oscillators --seeds 3 {options}",
            runs("test_auroc", "test_accuracy", "training_seconds"),
            ("clinic", "720 training patients"),
        )
        for table, options in (("clinic", ""), ("clinic-mean", "--pool 'last and mean' --dropout 0.1"))
    },
    **{
        f"shallow-rows/{data}": Command(hours, f"studies.shallow_rows --data {data}", study("errors.csv", *errors))
        for data, hours, errors in (
            ("vibration", 0.1, FORECASTS[2:]),
            ("vibration-paper", 0.1, FORECASTS[2:]),
            ("walker2d", 0.6, ("test_mse",)),
            ("speech", 0.01, ("test_mse",)),
        )
    },
    "adding/200": Command(
        1.5,
        f"adding --model {RULES},oscillators --epochs 12 --seeds 3",
        memories,
        ("adding, T = 200", "1,200 batches of 50"),
    ),
    "adding/full": Command(
        40,
        f"adding --length 750 --hidden 128 --lr 2e-4 --model {RULES},oscillators --seeds 1",
        memories,
        ("adding, T = 750", ""),
    ),
    "copying/100": Command(
        1,
        f"copying --length 100 --model {RULES},oscillators --epochs 12 --seeds 3",
        memories,
        ("copying, L = 100", "1,200 batches of 32"),
    ),
    "copying/full": Command(
        40, f"copying --length 1000 --model {RULES},oscillators --seeds 1", memories, ("copying, L = 1,000", "")
    ),
    "pixels/lstm": Command(0.5, f"pixel_mnist --permuted --model {RULES},oscillators --epochs 6", pixels, PIXELS),
    "pixels/dtriv": Command(
        1,
        "pixel_mnist --preset pmnist-dtriv-170 --side 14 --train-size 10000 --test-size 2000 --epochs 4 "
        "--model plain,gain,momentum,sr,adam,rmsprop",
        pixels,
        PIXELS,
    ),
    **tuning("speech", "speech --model all --epochs 15", 0.4, "best_validation_mse", SPEECH),
    "speech/15-epochs": Command(0.4, "speech --model all --epochs 15 --seeds 3", spoken, SPEECH),
    "speech/full": Command(1.2, "speech --model all --epochs 50 --seeds 3", spoken, SPEECH),
    "language-model/lstm": Command(
        1,
        f"language_model --model {RULES} --layers 1 --epochs 3",
        runs("best_validation_perplexity", "test_perplexity", "seconds_per_epoch"),
        ("WikiText-2", "200,000 words"),
    ),
    "depth/3e-3": Command(
        2.5,
        "language_model --model transformer --connection all --lr 3e-3 --epochs 1 --seeds 3",
        runs("best_validation_perplexity", "test_loss", label="{connection}"),
        ("Tiny Shakespeare, characters", "500,000 characters"),
    ),
    "transformer-copy/48-symbols": Command(
        6,
        "transformer_copy --model softmax,linear,linear_gain,momentum,momentum_connection,adaptive,gated_delta,"
        "heavy_ball --seeds 3",
        runs("test_accuracy", at=BATCHES),
        COPYING,
    ),
    "transformer-copy/sinusoidal": Command(
        0.6,
        "transformer_copy --model softmax --positions sinusoidal --seeds 3",
        runs("test_accuracy", label=positions_of, table="48-symbols", at=BATCHES),
        COPYING,
    ),
    "recall/table": Command(0.6, "recall --preset table", recalled(), RECALL),
    "recall/sinusoidal": Command(
        0.1, "recall --preset table --model softmax --positions sinusoidal", recalled(", sinusoidal"), RECALL
    ),
    "recall/regression": Command(
        0.2,
        "studies.recall_regression",
        study(
            "regression.csv",
            *("delta", "momentum_delta", "momentum"),
            model="{keys}",
            case="length {length}, noise {noise}",
            where=lambda row: row["settings"] == "safe" and float(row["noise"]) == 0.3,
        ),
        ("linear regression, 8 features", "64 sequences"),
    ),
    "image-generation/digits": Command(
        1.7,
        "image_generation --model all --out {out}/auto "
        "&& image_generation --model softmax --positions sinusoidal --out {out}/sinusoidal",
        runs("test_bits_per_dim", label=positions_of),
        (DIGITS[0], "900 steps"),
    ),
    "image-generation/mnist": Command(
        7,
        "image_generation --preset mnist-small --model softmax,linear,momentum,gated_delta,heavy_ball "
        "--out {out}/auto && "
        "image_generation --preset mnist-small --model softmax --positions sinusoidal --out {out}/sinusoidal",
        runs("test_bits_per_dim", label=positions_of, at={1: "625 steps", 2: "1,250 steps"}),
        ("MNIST 14 × 14", "10,000 of 60,000 images"),
    ),
    "image-generation/throughput": Command(
        1,
        "studies.image_throughput --logistics 10 --model softmax,linear,momentum,adaptive,gated_delta,heavy_ball",
        images_per_second,
        ("", "batches of 16"),
    ),
    "listops/short": Command(
        1.5,
        "lra --preset listops-small --model softmax,linear,momentum,gated_delta",
        runs("best_validation_accuracy", "test_accuracy", "majority_accuracy", "root_accuracy"),
        ("ListOps, 33 to 127 tokens", "20,000 expressions"),
    ),
    "translation/short": Command(
        1,
        "translation --model all --lr 2e-3 --epochs 5 --train-size 16000 --test-size 0",
        runs("test_bleu", "test_bleu_first_pass", "test_bleu_oracle", "best_validation_bleu"),
        ("Tatoeba, sentences of at most five words", "13,871 pairs"),
    ),
    **{
        f"hessian-free/{table}-{pair.replace(' --structural-damping 0', '-undamped')}": Command(
            0.6,
            " && ".join(
                f"pathological --problem {problem} --length {length} --seconds 300 --seeds 3 "
                f"--model {pair.replace('-', ' --optimizer ', 1)} --out {{out}}/{length}"
                for length in (50, 100, 200)
            ),
            runs(*("solved", "seconds", "test_error", "iterations"), case="T = {length}", label=pair_of, table=table),
            ("", "300 s of one thread"),
        )
        for problem, table in PROBLEMS.items()
        for pair in PAIRS
    },
    **{
        f"bouncing-balls/{cell}-{optimizer}": Command(
            0.05,
            f"bouncing_balls --cell {cell} --model plain --optimizer {optimizer} --seconds 120",
            runs("test_kl", "test_squared_error", label="{cell}", case=OPTIMIZERS[optimizer], table="120-s"),
            ("three balls in a box, 18 × 18", "120 s of one thread"),
        )
        for cell in ("rnn", "lstm", "gru")
        for optimizer in OPTIMIZERS
    },
    **{
        f"polyphonic-music/{data}-{cell}-{optimizer}": Command(
            seconds / 3600,
            f"polyphonic_music --data {data} --cell {cell} --model plain --hidden {hidden} --optimizer {optimizer} "
            f"--seconds {seconds}",
            runs("test_nll", label="{cell}", case=OPTIMIZERS[optimizer].split(",")[0], table=SCORES[data]),
            (data, f"{seconds} s of one thread"),
        )
        for data, seconds in (("jsb", 120), ("nottingham", 240), ("piano", 120))
        for cell, hidden in (("rnn", 100), ("lstm", 36), ("gru", 46))
        for optimizer in OPTIMIZERS
    },
    **{
        f"flows/{dataset}-{model}": Command(
            hours,
            f"density --model {model} --dataset {dataset} --iterations 100 --lr {rate}",
            runs("test_nll", "seconds", case=dataset, table="densities"),
            (dataset, "1,000 batches of 256"),
        )
        for dataset in ("pinwheel", "checkerboard")
        for model, rate, hours in (("flow", "2e-2", 0.02), ("generalized", "2e-2", 0.02), ("cnf", "5e-3", 0.1))
    },
    "annealing/bounds": Command(
        1,
        "annealing",
        renamed(
            study(
                "annealing.csv",
                "gap",
                "bound_error",
                model="{sampler}",
                case=lambda row: f"{row['evaluations']} evaluations, {STAGES[row['trained']]}",
                table=lambda row: DENSITIES[row["target"]],
            ),
            bound_error={"metric": "gap", "statistic": "stderr"},
        ),
        ("", "2,000 paths"),
    ),
    "latent-sde/lorenz": Command(0.3, "latent_sde --model hbsde,sde --seeds 2", latent, LORENZ),
    "latent-sde/lorenz-kalman": Command(
        0.1, "latent_sde --model kalman --lr 0.1 --epochs 13 --seeds 3", forecasts(), LORENZ
    ),
    "latent-sde/vibration": Command(
        0.2, "latent_sde --model hbsde,sde --dataset vibration --epochs 120 --batch-size 64", latent, VIBRATION
    ),
    "latent-sde/vibration-kalman": Command(
        0.1,
        "latent_sde --model kalman --dataset vibration --lr 0.1 --epochs 13 --batch-size 64 --seeds 3",
        forecasts(),
        VIBRATION,
    ),
    "exactness/study": Command(
        0.02,
        "studies.exactness",
        both(
            study("reversible.csv", "gradient_error", "stored_mib", case="steps {steps}", table="reversible"),
            study("memory.csv", "relative_error", case="decay {decay}", table="memory"),
            study(
                "likelihood.csv", *LIKELIHOODS, case=lambda row: f"{int(row['samples']):,} samples", table="likelihood"
            ),
        ),
    ),
}
