"""The commands that produce the pages of Results, and the results that are collected from each.

``python -m tasks.results`` lists and runs the commands and collects their results. A command is named EXPERIMENT/TABLE.
Hours are CPU hours of one thread, estimated from earlier runs. The runs in tables named "full" are as long as those of
the papers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tasks.readers import compared, forecasts, images_per_second, pair_of, positions_of, recalled
from tasks.rows import Reader, Row, both, number, renamed, runs, study

T = TypeVar("T")
ONE_PROCESS = ("studies.", "annealing")  # commands without the option --jobs


@dataclass(frozen=True)
class Command:
    """A command of an experiment, or several commands that run one after another.

    Attributes:
        hours: CPU hours of one thread, estimated.
        line: the task and its options; several are joined by "&&". ``{out}`` stands for the folder of the command, and
            ``{runs}`` for the folder of all experiments. ``--out {out}`` and ``--jobs 1`` are added.
        read: function that yields the results in the folder.
        data: name of the data set, and of its subset or the length of the runs.
    """

    hours: float
    line: str
    read: Reader
    data: tuple[str, str] = ("", "")

    def arguments(self, out: Path) -> list[list[str]]:
        """Return the arguments of ``python -m`` for each of the commands."""
        lines = [line if " --out " in line else line + " --out {out}" for line in self.line.split(" && ")]
        single = [
            line if line.startswith(ONE_PROCESS) else line.replace(" --out ", " --jobs 1 --out ") for line in lines
        ]
        return [shlex.split(f"tasks.{line}".format(out=out, runs=out.parents[1])) for line in single]

    def text(self, out: Path) -> str:
        """Return the command as a user would type it."""
        return " && ".join(shlex.join(["python", "-m", *line]) for line in self.arguments(out))


FIVE = "node,anode,sonode,hbnode,ghbnode"
SEVEN = f"{FIVE},nesterovnode,adamnode"
RULES = "plain,gain,forget,momentum,nag,sr,adam,rmsprop"
DOPRI5 = "--solver torchdiffeq --adjoint-norm full"
PENALISED = "image_classification --small --model node --epochs 8 --regularize both"
RATES = ("1e-3", "3e-3", "1e-2")  # learning rates in tables "rates"; tables "tuned" use the best of them by validation

ATTACKS = {("noise", 0.0), ("noise", 0.3), ("noise", 0.5), ("fgsm", 0.1), ("pgd", 0.05), ("pgd", 0.1)}
PROBLEMS = {"addition": "addition", "temporal_order": "temporal-order", "memorization_5": "5-bit-memorization"}
PAIRS = ["tanh-hf", "tanh-adam", "lstm-adam", "lstm_chrono-adam", "gru-adam", "dtriv-adam", "adam_lstm-adam", "gru-hf"]
PAIRS += ["tanh-soap", "gru-soap", "tanh-hf --structural-damping 0"]  # pairs of model and optimizer
OPTIMIZERS = {"hf": "Hessian-free", "adam": "Adam, 1e-2"}
ESTIMATORS = {
    "default": "SeriesClassifier()",
    **{kind: f'SeriesClassifier("{kind}")' for kind in ("features", "rocket", "oscillators", "odernn", "gru")},
    "aeon": "aeon's MiniRocketClassifier",
}
DENSITIES = {"funnel": "funnel", "many_well": "many-well", "cancer": "logistic-regression"}
STAGES = {"False": "untrained", "True": "trained"}
SCORES = {"jsb": "JSB Chorales", "nottingham": "Nottingham", "piano": "Piano-midi.de"}
BATCHES = {5: "750 batches", 10: "1,500 batches", 20: "3,000 batches"}  # case by epoch of transformer_copy

LIKELIHOODS = ("log_likelihood", "relative_error")
NFE = ("nfe_forward_mean", "nfe_backward_mean")
CLASSES = ("test_accuracy", "test_loss", "training_seconds")
FORECASTS = ("train_forecast_mse", "validation_forecast_mse", "test_forecast_mse", "test_acceleration_mse")
vibration = (*FORECASTS, "seconds")
images = runs("test_accuracy", "test_loss", "train_loss", *NFE, "seconds_per_epoch")
penalised = runs(
    *("test_accuracy", "train_cross_entropy", "nfe_forward_mean", "test_nfe", "seconds_per_epoch"),
    label=lambda c: c["model"] + ("" if c["regularize"] == "none" else f", λ = {c['penalty']:g}"),
    table="penalties",
)
frames = runs("train_loss", "test_mse", "walk_mse", *NFE, "seconds_per_epoch")
arrow = ("arrow_no_extrapolation_rmse_mV", "arrow_full_rmse_mV")
voltages = ("validation_rmse_mV", "multisine_rmse_mV", *arrow, "seconds_per_epoch")
archived = both(
    *(
        study("accuracy.csv", metric, model=lambda row: ESTIMATORS[row["model"]], table=table)
        for metric, table in (("test_accuracy", "accuracy"), ("seconds", "seconds"))
    )
)

# For each table: the CPU hours of its command, and the command
LINES = f"""
digits/adjoint 3 image_classification --small --model {SEVEN} --epochs 5 --batch-size 32 --seeds 3 \
--tol 1e-5 {DOPRI5}
digits/native 1.5 image_classification --preset full --model {SEVEN} --seeds 3
regularisation/penalty-0.01 0.1 {PENALISED} --penalty 0.01 --seeds 3
regularisation/penalty-0.1 0.1 {PENALISED} --penalty 0.1 --seeds 3
regularisation/penalty-1 0.1 {PENALISED} --penalty 1 --seeds 3
regularisation/no-penalty 0.2 image_classification --small --model node,sonode,hbnode,ghbnode --epochs 8 --seeds 3
robustness/attacks 0.5 studies.robustness {{runs}}/digits/native --images 180 --pgd-steps 10 --out {{out}}
mnist/native 0.3 image_classification --preset paper-mnist --solver native --tol 1e-3 --model {FIVE} --epochs 2 \
--subset 2000 --test-subset 1000
mnist/adjoint 0.5 image_classification --preset paper-mnist --tol 1e-5 --model {FIVE} --epochs 1 --subset 640 \
--test-subset 1000
cifar10/native 0.3 image_classification --dataset cifar10 --model node,hbnode --epochs 6 --subset 3000 \
--test-subset 1000 --tol 1e-2 --clip 1 --bfloat16
point-cloud/native 8 point_cloud --model {FIVE} --tol 1e-4 --seeds 100
point-cloud/adjoint 2 point_cloud --preset paper --model {FIVE} --seeds 2
pendulum/swings 0.5 pendulum --model all --seeds 3
silverbox/growth 0.3 studies.silverbox_growth --draws 100
silverbox/simulation 2 silverbox --model {FIVE} --epochs 60 --seeds 5
silverbox/oscillators 0.4 silverbox --model oscillators --window 500 --stride 50 --batch-size 32 --epochs 120 \
--seeds 5
plane-vibration/24-epochs 0.6 plane_vibration --model all --seeds 3 --epochs 24
plane-vibration/paper-split 0.6 plane_vibration --protocol paper --model all --seeds 3 --epochs 24
plane-vibration/200-epochs 1.2 plane_vibration --model node,sonode,hbnode,ghbnode,lstm,gru,gru-d,cfc --seeds 3 \
--epochs 200 --tol 1e-3
plane-vibration/full 4 plane_vibration --model all --seeds 3 --epochs 500 --tol 1e-3
plane-vibration/tuned 0.8 plane_vibration --epochs 100 --tol 1e-3 --model node,gru,lstm,gru-d,oscillators,kalman \
--lr 1e-2 --seeds 3 --out {{out}}/1e-2 \
&& plane_vibration --epochs 100 --tol 1e-3 --model hbnode,sonode,ghbnode,anode,cfc --lr 3e-3 --seeds 3 \
--out {{out}}/3e-3
plane-vibration/rate-1e-2 0.4 plane_vibration --epochs 100 --tol 1e-3 --model hbnode,sonode --lr 1e-2 --seeds 3
plane-vibration/oscillators 0.1 plane_vibration --model oscillators --lr 0.03 --epochs 100 --seeds 5
plane-vibration/kalman 0.1 plane_vibration --model kalman --lr 0.1 --epochs 13 --seeds 5
plane-vibration/adjoint 0.4 plane_vibration --model {FIVE} {DOPRI5} --tol 1e-7 --epochs 2
walker2d/10-epochs 0.5 walker2d --model all --seeds 3 --windows 2500 --epochs 10
walker2d/full 60 walker2d --model all --seeds 1 --epochs 500 --tol 1e-3
walker2d/adjoint 0.1 walker2d --model {FIVE} {DOPRI5} --tol 1e-7 --windows 512 --epochs 2
walker2d/gradients 0.5 studies.walker2d_gradients
classification/clinic 0.2 classification --dataset clinic --model all --seeds 3 --epochs 30
classification/ItalyPowerDemand 0.2 classification --dataset ItalyPowerDemand --model all --seeds 3 --epochs 30 \
--drop 0.5
classification/BasicMotions 0.2 classification --dataset BasicMotions --model all --seeds 3 --epochs 100 \
--batch-size 16 --drop 0.5 --samples 50
classification/ACSF1 0.6 classification --dataset ACSF1 --model all --seeds 3 --epochs 100 --batch-size 16
classification/PLAID 0.6 classification --dataset PLAID --model all --seeds 3 --epochs 60
classification/PigCVP 0.8 classification --dataset PigCVP --model all --seeds 3 --epochs 100 --batch-size 16
ucr/shallow 0.3 studies.archive --models default,features,rocket,aeon
ucr/networks 1 studies.archive --models oscillators,odernn,gru \
--sets ItalyPowerDemand,BasicMotions,GunPoint,JapaneseVowels
selective/adding 0.5 studies.selective --problem adding --seeds 5 --first-seed 10 --rates 5e-3
selective/tone 1 studies.selective --problem tone --seeds 5 --first-seed 10 --seconds 67
selective/clinic 0.1 classification --model selective,gru,gru-d,oscillators --seeds 3
selective/clinic-mean 0.1 classification --model selective,gru,gru-d,oscillators --seeds 3 --pool 'last and mean' \
--dropout 0.1
shallow-rows/vibration 0.1 studies.shallow_rows --data vibration
shallow-rows/vibration-paper 0.1 studies.shallow_rows --data vibration-paper
shallow-rows/walker2d 0.6 studies.shallow_rows --data walker2d
shallow-rows/speech 0.01 studies.shallow_rows --data speech
adding/200 1.5 adding --model {RULES},oscillators --epochs 12 --seeds 3
adding/full 40 adding --length 750 --hidden 128 --lr 2e-4 --model {RULES},oscillators --seeds 1
copying/100 1 copying --length 100 --model {RULES},oscillators --epochs 12 --seeds 3
copying/full 40 copying --length 1000 --model {RULES},oscillators --seeds 1
pixels/lstm 0.5 pixel_mnist --permuted --model {RULES},oscillators --epochs 6
pixels/dtriv 1 pixel_mnist --preset pmnist-dtriv-170 --side 14 --train-size 10000 --test-size 2000 --epochs 4 \
--model plain,gain,momentum,sr,adam,rmsprop
speech/15-epochs 0.4 speech --model all --epochs 15 --seeds 3
speech/full 1.2 speech --model all --epochs 50 --seeds 3
language-model/lstm 1 language_model --model {RULES} --layers 1 --epochs 3
depth/3e-3 2.5 language_model --model transformer --connection all --lr 3e-3 --epochs 1 --seeds 3
transformer-copy/48-symbols 6 transformer_copy \
--model softmax,linear,linear_gain,momentum,momentum_connection,adaptive,gated_delta,heavy_ball --seeds 3
transformer-copy/sinusoidal 0.6 transformer_copy --model softmax --positions sinusoidal --seeds 3
recall/table 0.6 recall --preset table
recall/sinusoidal 0.1 recall --preset table --model softmax --positions sinusoidal
recall/regression 0.2 studies.recall_regression
image-generation/digits 1.7 image_generation --model all --out {{out}}/auto \
&& image_generation --model softmax --positions sinusoidal --out {{out}}/sinusoidal
image-generation/mnist 7 image_generation --preset mnist-small --model softmax,linear,momentum,gated_delta,heavy_ball \
--out {{out}}/auto \
&& image_generation --preset mnist-small --model softmax --positions sinusoidal --out {{out}}/sinusoidal
image-generation/throughput 1 studies.image_throughput --logistics 10 \
--model softmax,linear,momentum,adaptive,gated_delta,heavy_ball
listops/short 1.5 lra --preset listops-small --model softmax,linear,momentum,gated_delta
translation/short 1 translation --model all --lr 2e-3 --epochs 5 --train-size 16000 --test-size 0
flows/pinwheel-flow 0.02 density --model flow --dataset pinwheel --iterations 100 --lr 2e-2
flows/pinwheel-generalized 0.02 density --model generalized --dataset pinwheel --iterations 100 --lr 2e-2
flows/pinwheel-cnf 0.1 density --model cnf --dataset pinwheel --iterations 100 --lr 5e-3
flows/checkerboard-flow 0.02 density --model flow --dataset checkerboard --iterations 100 --lr 2e-2
flows/checkerboard-generalized 0.02 density --model generalized --dataset checkerboard --iterations 100 --lr 2e-2
flows/checkerboard-cnf 0.1 density --model cnf --dataset checkerboard --iterations 100 --lr 5e-3
annealing/bounds 1 annealing
latent-sde/lorenz 0.3 latent_sde --model hbsde,sde --seeds 2
latent-sde/lorenz-kalman 0.1 latent_sde --model kalman --lr 0.1 --epochs 13 --seeds 3
latent-sde/vibration 0.2 latent_sde --model hbsde,sde --dataset vibration --epochs 120 --batch-size 64
latent-sde/vibration-kalman 0.1 latent_sde --model kalman --dataset vibration --lr 0.1 --epochs 13 --batch-size 64 \
--seeds 3
exactness/study 0.02 studies.exactness
"""
DATA = {  # name of the data set, and of its subset or the length of the runs
    "": ("", ""),
    "digits": ("scikit-learn digits, 8 × 8", "1,437 images"),
    "regularisation": ("scikit-learn digits, 8 × 8", "1,437 images"),
    "robustness": ("scikit-learn digits, 8 × 8", "180 test images"),
    "mnist/native": ("MNIST", "2,000 of 60,000 images"),
    "mnist/adjoint": ("MNIST", "640 of 60,000 images"),
    "cifar10": ("CIFAR-10", "3,000 of 50,000 images"),
    "point-cloud": ("disc in an annulus", "120 points"),
    "pendulum": ("simulated pendulum", "100 swings"),
    "silverbox": ("Silverbox, official split", ""),
    "silverbox/growth": ("Silverbox, V1", "63 samples, 100 initialisations, tolerance 1e-7"),
    "plane-vibration": ("F-16 vibration, phase-disjoint split", "491 training segments"),
    "plane-vibration/paper-split": ("F-16 vibration, the paper's split", "491 training segments"),
    "walker2d/10-epochs": ("Walker2D, one frame in ten missing", "2,500 of 9,814 windows"),
    "walker2d/full": ("Walker2D, one frame in ten missing", "all 9,814 windows"),
    "walker2d/adjoint": ("Walker2D, one frame in ten missing", "512 of 9,814 windows"),
    "walker2d/gradients": ("Walker2D, one frame in ten missing", "1,000 of 9,814 windows"),
    "classification/clinic": ("clinic", "1,200 patients"),
    "classification/ItalyPowerDemand": ("ItalyPowerDemand", "1,096 days"),
    "classification/BasicMotions": ("BasicMotions", "80 series"),
    "classification/ACSF1": ("ACSF1", "200 series"),
    "classification/PLAID": ("PLAID", "1,074 series"),
    "classification/PigCVP": ("PigCVP", "312 series"),
    "ucr": ("UEA and UCR archive, its own splits", ""),
    "selective": ("clinic", "720 training patients"),
    "selective/adding": ("adding, T = 1,000, irregular", ""),
    "selective/tone": ("tone, T = 200, irregular", ""),
    "adding/200": ("adding, T = 200", "1,200 batches of 50"),
    "adding/full": ("adding, T = 750", ""),
    "copying/100": ("copying, L = 100", "1,200 batches of 32"),
    "copying/full": ("copying, L = 1,000", ""),
    "pixels": ("MNIST 14 × 14, permuted", "10,000 of 60,000 images"),
    "speech": ("Free Spoken Digit Dataset", "2,400 recordings"),
    "language-model": ("WikiText-2", "200,000 words"),
    "depth": ("Tiny Shakespeare, characters", "500,000 characters"),
    "transformer-copy": ("copying, 48 symbols", "3,000 batches of 32"),
    "recall": ("multi-query associative recall", "500 batches of 32"),
    "recall/regression": ("linear regression, 8 features", "64 sequences"),
    "image-generation/digits": ("scikit-learn digits, 8 × 8", "900 steps"),
    "image-generation/mnist": ("MNIST 14 × 14", "10,000 of 60,000 images"),
    "image-generation/throughput": ("", "batches of 16"),
    "listops": ("ListOps, 33 to 127 tokens", "20,000 expressions"),
    "translation": ("Tatoeba, sentences of at most five words", "13,871 pairs"),
    "flows": ("pinwheel", "1,000 batches of 256"),
    "flows/checkerboard": ("checkerboard", "1,000 batches of 256"),
    "annealing": ("", "2,000 paths"),
    "latent-sde": ("stochastic Lorenz", "4,096 windows"),
    "latent-sde/vibration": ("F-16 vibration", "491 training segments"),
}


def of(table: Mapping[str, T], key: str) -> T:
    """Return the entry of the longest key in ``table`` with which ``key`` begins."""
    return table[max((name for name in table if key.startswith(name)), key=len)]


def tuning(name: str, line: str, hours: float, metric: str) -> dict[str, Command]:
    """Return the command for the table "rates": each model is trained with each of :data:`RATES` and its own seed."""
    lines = " && ".join(f"{line} --lr {rate} --seed 10 --out {{out}}/{rate}" for rate in RATES)
    return {f"{name}/rates": Command(hours, lines, runs(metric, case="rate {lr:g}"), DATA[name])}


def selected(problem: str, metric: str) -> Reader:
    """Return a reader of the results for one problem in the study of selective oscillators."""
    names = {name: f"selective, {name}" for name in ("real", "swinging")}
    columns = (metric, "seconds", "steps", "lr")
    return study(f"{problem}.csv", *columns, model=lambda row: names.get(str(row["model"]), str(row["model"])))


def log10(reader: Reader) -> Reader:
    """Return a reader that replaces values by their decimal logarithms."""

    def read(folder: Path) -> Iterator[Row]:
        for row in reader(folder):
            yield row | {"metric": f"log10_{row['metric']}", "value": number(math.log10(float(row["value"])))}

    return read


READERS: dict[str, Reader] = {
    **dict.fromkeys(("digits", "mnist", "cifar10"), images),
    "regularisation": penalised,
    "robustness": study(
        "robustness.csv",
        "accuracy",
        model=lambda row: row["model"].lower(),
        case="attack {attack}, size {size}",
        where=lambda row: (row["attack"], float(row["size"])) in ATTACKS,
    ),
    "point-cloud/native": runs("separates", "train_loss", "nfe_forward_mean", "seconds_per_epoch"),
    "point-cloud/adjoint": runs("separates", "train_loss", *NFE),
    "pendulum": runs("test_loss", "energy_error"),
    "silverbox/growth": log10(study("growth.csv", "median", "q10", "q90", "mean", where=lambda r: float(r["t"]) == 63)),
    "silverbox/simulation": runs(*voltages),
    "silverbox/oscillators": runs(*voltages, "seconds", label="oscillators, {epochs} epochs"),
    "plane-vibration": runs(*FORECASTS, *NFE, "seconds_per_epoch", "seconds"),
    "plane-vibration/full": runs(*vibration),
    "plane-vibration/tuned": runs("lr", *vibration),
    "plane-vibration/rate-1e-2": runs("train_forecast_mse", "test_forecast_mse"),
    "plane-vibration/oscillators": runs(*vibration, label="oscillators, linear", table="oscillators"),
    "plane-vibration/kalman": runs(*vibration, label="oscillators in noise (Kalman filter)", table="oscillators"),
    "plane-vibration/adjoint": runs("nfe_forward", "nfe_backward", "seconds", at={1: "epoch 1", 2: "epoch 2"}),
    "walker2d": frames,
    "walker2d/adjoint": runs(*NFE),
    "walker2d/gradients": study(
        "adjoint_norms.csv",
        "ratio",
        case="cell {cell}, stage {stage}",
        where=lambda row: float(row["frames_back"]) == 60,
    ),
    "classification": both(runs(*CLASSES), compared),
    **dict.fromkeys(
        ("classification/clinic", "classification/ItalyPowerDemand"), both(runs(*CLASSES, "test_auroc"), compared)
    ),
    "ucr": archived,
    "selective": runs("test_auroc", "test_accuracy", "training_seconds"),
    "selective/adding": selected("adding", "test_error"),
    "selective/tone": selected("tone", "test_accuracy"),
    "shallow-rows": study("errors.csv", "test_mse"),
    "shallow-rows/vibration": study("errors.csv", *FORECASTS[2:]),
    **dict.fromkeys(("adding", "copying"), runs("test_loss", "trivial_loss", "seconds_per_epoch")),
    "pixels": runs("test_accuracy", "best_validation_accuracy", "seconds_per_epoch"),
    "speech": runs("test_mse", "best_validation_mse", "seconds_per_epoch"),
    "language-model": runs("best_validation_perplexity", "test_perplexity", "seconds_per_epoch"),
    "depth": runs("best_validation_perplexity", "test_loss", label="{connection}"),
    "transformer-copy/48-symbols": runs("test_accuracy", at=BATCHES),
    "transformer-copy/sinusoidal": runs("test_accuracy", label=positions_of, table="48-symbols", at=BATCHES),
    "recall/table": recalled(),
    "recall/sinusoidal": recalled(", sinusoidal"),
    "recall/regression": study(
        "regression.csv",
        *("delta", "momentum_delta", "momentum"),
        model="{keys}",
        case="length {length}, noise {noise}",
        where=lambda row: row["settings"] == "safe" and float(row["noise"]) == 0.3,
    ),
    "image-generation/digits": runs("test_bits_per_dim", label=positions_of),
    "image-generation/mnist": runs("test_bits_per_dim", label=positions_of, at={1: "625 steps", 2: "1,250 steps"}),
    "image-generation/throughput": images_per_second,
    "listops": runs("best_validation_accuracy", "test_accuracy", "majority_accuracy", "root_accuracy"),
    "translation": runs("test_bleu", "test_bleu_first_pass", "test_bleu_oracle", "best_validation_bleu"),
    "flows": runs("test_nll", "seconds", case="{dataset}", table="densities"),
    "annealing": renamed(
        study(
            "annealing.csv",
            *("gap", "bound_error"),
            model="{sampler}",
            case=lambda row: f"{row['evaluations']} evaluations, {STAGES[row['trained']]}",
            table=lambda row: DENSITIES[row["target"]],
        ),
        bound_error={"metric": "gap", "statistic": "stderr"},
    ),
    "latent-sde": forecasts("final_elbo", "final_kl_path", "train_nfe", "seconds_per_epoch"),
    **dict.fromkeys(("latent-sde/lorenz-kalman", "latent-sde/vibration-kalman"), forecasts()),
    "exactness": both(
        study("reversible.csv", "gradient_error", "stored_mib", case="steps {steps}", table="reversible"),
        study("memory.csv", "relative_error", case="decay {decay}", table="memory"),
        study("likelihood.csv", *LIKELIHOODS, case=lambda row: f"{int(row['samples']):,} samples", table="likelihood"),
    ),
}

COMMANDS: dict[str, Command] = {
    **{
        key: Command(float(hours), line, of(READERS, key), of(DATA, key))
        for key, hours, line in (entry.split(maxsplit=2) for entry in LINES.strip().splitlines())
    },
    **tuning("plane-vibration", "plane_vibration --model all --epochs 48 --tol 1e-3", 0.4, FORECASTS[1]),
    **tuning("speech", "speech --model all --epochs 15", 0.4, "best_validation_mse"),
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
}
