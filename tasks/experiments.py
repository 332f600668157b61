"""What the pages of Results rest on: for each experiment its question, its commands, and what is read of their runs.

``python -m tasks.results`` lists, runs and collects them. Hours are of one thread, estimated from earlier runs. Where a
command has the papers' length, its table is named for it ("full").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.common.files import read_json
from tasks.result_rows import Command, Experiment, Reader, Row, both, environment, number, renamed, runs, study

ADJOINT = "--solver torchdiffeq --adjoint-norm full --tol 1e-5"
FIVE = "node,anode,sonode,hbnode,ghbnode"
RULES = "plain,gain,forget,momentum,nag,sr,adam,rmsprop"
DIGITS = "scikit-learn digits, 8 × 8"
F16 = "F-16 vibration, phase-disjoint split"
F16_PAPER = "F-16 vibration, the paper's split"
SEGMENTS = "491 training segments"
FSDD, RECORDINGS = "Free Spoken Digit Dataset", "2,400 recordings"
WALKER = "Walker2D, one frame in ten missing"
ATTACKS = {("noise", 0.0), ("noise", 0.3), ("noise", 0.5), ("fgsm", 0.1), ("pgd", 0.05), ("pgd", 0.1)}
PROBLEMS = {"addition": "addition", "temporal_order": "temporal-order", "memorization_5": "5-bit-memorization"}
HF = {"hf": "Hessian-free", "adam": "Adam, 1e-2"}
ESTIMATORS = {
    "default": "SeriesClassifier()",
    **{kind: f'SeriesClassifier("{kind}")' for kind in ("features", "rocket", "oscillators", "odernn", "gru")},
    "aeon": "aeon's MiniRocketClassifier",
}
RATES = ("1e-3", "3e-3", "1e-2")  # of which each model has the best by validation, where a table says so
SELECTIVE = ("real", "swinging")
DENSITIES = {"funnel": "funnel", "many_well": "many-well", "cancer": "logistic-regression"}
STAGES = {"False": "untrained", "True": "trained"}
SCORES = {"jsb": "JSB Chorales", "nottingham": "Nottingham", "piano": "Piano-midi.de"}
images = runs("test_accuracy", "test_loss", "train_loss", "nfe_forward_mean", "nfe_backward_mean", "seconds_per_epoch")
penalised = runs(
    *("test_accuracy", "train_cross_entropy", "nfe_forward_mean", "test_nfe", "seconds_per_epoch"),
    label=lambda c: c["model"] + ("" if c["regularize"] == "none" else f", λ = {c['penalty']:g}"),
    table=lambda c: "penalties",
)
VIBRATION = (
    *("train_forecast_mse", "validation_forecast_mse", "test_forecast_mse", "test_acceleration_mse"),
    *("nfe_forward_mean", "nfe_backward_mean", "seconds_per_epoch", "seconds"),
)
vibration = runs(*VIBRATION)
forecast_errors = runs(*VIBRATION[:4], "seconds")
frames = runs("train_loss", "test_mse", "walk_mse", "nfe_forward_mean", "nfe_backward_mean", "seconds_per_epoch")
VOLTAGES = (
    *("validation_rmse_mV", "multisine_rmse_mV", "arrow_no_extrapolation_rmse_mV", "arrow_full_rmse_mV"),
    "seconds_per_epoch",
)
voltages = runs(*VOLTAGES)
CLASSES = ("test_accuracy", "test_loss", "training_seconds")


def pair_of(config: Mapping[str, Any]) -> str:
    """Return what the pages call a model and its optimizer."""
    damped = {True: ", structural damping", False: ", undamped"}[bool(config["structural_damping"])]
    return f"{config['model']} {config['optimizer']}" + (
        damped if config["optimizer"] == "hf" and config["model"] == "tanh" else ""
    )


def positions_of(config: Mapping[str, Any]) -> str:
    """Return a model's name; that of softmax attention with its positions."""
    kind = "rotary" if config["positions"] == "auto" else config["positions"]
    return f"softmax, {kind}" if config["model"] == "softmax" else str(config["model"])


def images_per_second(folder: Path) -> Iterator[Row]:
    """Yield images per second of softmax attention, and the multiples of it that other models make."""
    path = folder / "throughput.json"
    if path.exists():
        found = read_json(path)
        for row in found["rows"]:
            metric = "images_per_second" if row["model"] == "softmax" else "over_softmax"
            told = {"model": row["model"], "case": f"{row['length']:,} pixels"}
            yield environment(found, path) | told | {"metric": metric, "value": number(row[metric])}


def recalled(share: str, metric: str, positions: str = "") -> Reader:
    """Return a reader of the answers of one kind in the table of recall; a model's name ends in its positions."""
    return renamed(
        study(
            "recall.csv",
            "mean",
            model=lambda row: row["model"] + (", equal heads" if row["equal"] == "heads" else "") + positions,
            case=recall_case,
            where=lambda row: row["share"] == share and is_shown(row),
            table=lambda row: row["kind"],
        ),
        mean={"metric": metric},
    )


def recall_case(row: Mapping[str, str]) -> str:
    """Return what tells the tests of recall apart: noise, or the number of pairs."""
    return f"noise {float(row['noise']):g}" if row["kind"] == "noisy" else f"{row['pairs']} pairs"


def is_shown(row: Mapping[str, str]) -> bool:
    """Whether a page shows a test of recall: those of most pairs."""
    return row["pairs"] in {"once": ("8", "16", "32"), "again": ("4", "8", "16"), "noisy": ("8",)}[row["kind"]]


def samples_of(row: Mapping[str, str]) -> str:
    """Return the number of samples of a row."""
    return f"{int(row['samples']):,} samples"


def forecasts(*metrics: str) -> Reader:
    """Return a reader of latent models: figures of rows held out and of forecasts, and other entries of a summary."""
    figures = {"log_likelihood": "log_likelihood", "mse": "squared_error", "coverage": "coverage"}
    columns = {
        f"final_{part}_{name}": {"metric": metric, "case": case}
        for part, case in (("held", "held out"), ("forecast", "forecast"))
        for name, metric in figures.items()
    }
    other = {"final_elbo": "bound", "final_kl_path": "paths_divergence", "train_nfe": "nfe_forward_mean"}
    return renamed(
        runs(
            *columns,
            *metrics,
            label=lambda c: {"hbsde": "heavy_ball", "sde": "first order"}.get(c["model"], c["model"]),
            table=lambda c: c["dataset"],
        ),
        **columns,
        **{name: {"metric": metric} for name, metric in other.items()},
    )


latent = forecasts("final_elbo", "final_kl_path", "train_nfe", "seconds_per_epoch")


def one(question: str, *commands: Command) -> Experiment:
    """Return an experiment."""
    return Experiment(question, commands)


def classified(dataset: str, options: str, hours: float, size: str, *metrics: str) -> Command:
    """Return the command of one set of classification, of all models."""
    line = f"tasks.classification --dataset {dataset} --model all --seeds 3 --jobs 1 {options}"
    return Command(dataset, (line,), hours, runs(*CLASSES, *metrics), dataset, size)


def tuning(line: str, hours: float, metric: str, data: str, size: str) -> Command:
    """Return the command that trains each model with each of :data:`RATES` on a seed of its own, for validation."""
    lines = tuple(f"{line} --lr {rate} --seed 10 --jobs 1 --out {{out}}/{rate}" for rate in RATES)
    return Command("rates", lines, hours, runs(metric, case=lambda c: f"rate {c['lr']:g}"), data, size)


def tuned(table: str, line: str, best: Mapping[str, str], hours: float, read: Reader, data: str, size: str) -> Command:
    """Return the command that trains each model at its best rate; ``best`` has the models of a rate, from "rates"."""
    lines = tuple(
        f"{line} --model {models} --lr {r} --seeds 3 --jobs 1 --out {{out}}/{r}" for r, models in best.items()
    )
    return Command(table, lines, hours, read, data, size)


EXPERIMENTS: dict[str, Experiment] = {
    "digits": one(
        "Do heavy-ball models need fewer function evaluations on images?",
        Command(
            "adjoint",
            (
                f"tasks.image_classification --small --model {FIVE},nesterovnode,adamnode --epochs 5 --batch-size 32 "
                f"{ADJOINT} --seeds 3 --jobs 1",
            ),
            3,
            images,
            DIGITS,
            "1,437 images",
        ),
        Command(
            "native",
            (f"tasks.image_classification --preset full --model {FIVE},nesterovnode,adamnode --seeds 3 --jobs 1",),
            1.5,
            images,
            DIGITS,
            "1,437 images",
        ),
    ),
    "regularisation": one(
        "Does regularising a NODE save as many evaluations as momentum?",
        *(
            Command(
                f"penalty-{penalty}",
                (
                    f"tasks.image_classification --small --model node --epochs 8 --regularize both --penalty {penalty} "
                    "--seeds 3 --jobs 1",
                ),
                0.1,
                penalised,
                DIGITS,
                "1,437 images",
            )
            for penalty in ("0.01", "0.1", "1")
        ),
        Command(
            "no-penalty",
            ("tasks.image_classification --small --model node,sonode,hbnode,ghbnode --epochs 8 --seeds 3 --jobs 1",),
            0.2,
            penalised,
            DIGITS,
            "1,437 images",
        ),
    ),
    "robustness": one(
        "Are heavy-ball models more robust to noise and attacks?",
        Command(
            "attacks",
            ("tasks.studies.robustness {runs}/digits/native --images 180 --pgd-steps 10 --out {out}",),
            0.5,
            study(
                "robustness.csv",
                "accuracy",
                model=lambda row: row["model"].lower(),
                case=("attack", "size"),
                where=lambda row: (row["attack"], float(row["size"])) in ATTACKS,
            ),
            DIGITS,
            "180 test images",
        ),
    ),
    "mnist": one(
        "Do the evaluations and accuracies of the digits hold on MNIST?",
        Command(
            "native",
            (
                f"tasks.image_classification --preset paper-mnist --solver native --tol 1e-3 --model {FIVE} --epochs 2 "
                "--subset 2000 --test-subset 1000 --jobs 1",
            ),
            0.3,
            images,
            "MNIST",
            "2,000 of 60,000 images",
        ),
        Command(
            "adjoint",
            (
                f"tasks.image_classification --preset paper-mnist --tol 1e-5 --model {FIVE} --epochs 1 --subset 640 "
                "--test-subset 1000 --jobs 1",
            ),
            0.5,
            images,
            "MNIST",
            "640 of 60,000 images",
        ),
    ),
    "cifar10": one(
        "Do NODE and HBNODE learn CIFAR-10 alike?",
        Command(
            "native",
            (
                "tasks.image_classification --dataset cifar10 --model node,hbnode --epochs 6 --subset 3000 "
                "--test-subset 1000 --tol 1e-2 --clip 1 --bfloat16 --jobs 1",
            ),
            0.3,
            images,
            "CIFAR-10",
            "3,000 of 50,000 images",
        ),
    ),
    "point-cloud": one(
        "Which models separate a disc from an annulus?",
        Command(
            "native",
            (f"tasks.point_cloud --model {FIVE} --tol 1e-4 --seeds 100 --jobs 1",),
            8,
            runs("separates", "train_loss", "nfe_forward_mean", "seconds_per_epoch"),
            "disc in an annulus",
            "120 points",
        ),
        Command(
            "adjoint",
            (f"tasks.point_cloud --preset paper --model {FIVE} --seeds 2 --jobs 1",),
            2,
            runs("separates", "train_loss", "nfe_forward_mean", "nfe_backward_mean"),
            "disc in an annulus",
            "120 points",
        ),
    ),
    "pendulum": one(
        "Does a learned energy last over 100 periods?",
        Command(
            "swings",
            ("tasks.pendulum --model all --seeds 3 --jobs 1",),
            0.5,
            runs("test_loss", "energy_error"),
            "simulated pendulum",
            "100 swings",
        ),
    ),
    "silverbox": one(
        "Which models simulate an electronic Duffing oscillator?",
        Command(
            "growth",
            ("tasks.studies.silverbox_growth --draws 100",),
            0.3,
            study("growth.csv", "median", "q10", "q90", "mean", log10=True, where=lambda row: float(row["t"]) == 63),
            "Silverbox, V1",
            "63 samples, 100 initialisations, tolerance 1e-7",
        ),
        Command(
            "simulation",
            (f"tasks.silverbox --model {FIVE} --epochs 60 --seeds 5 --jobs 1",),
            2,
            voltages,
            "Silverbox, official split",
        ),
        Command(
            "oscillators",
            (
                "tasks.silverbox --model oscillators --window 500 --stride 50 --batch-size 32 --epochs 120 --seeds 5 "
                "--jobs 1",
            ),
            0.4,
            runs(*VOLTAGES, "seconds", label=lambda c: f"oscillators, {c['epochs']} epochs"),
            "Silverbox, official split",
        ),
    ),
    "plane-vibration": one(
        "Which models forecast an aircraft's vibration from irregular samples?",
        Command(
            "24-epochs",
            ("tasks.plane_vibration --model all --seeds 3 --epochs 24 --jobs 1",),
            0.6,
            vibration,
            F16,
            SEGMENTS,
        ),
        Command(
            "paper-split",
            ("tasks.plane_vibration --protocol paper --model all --seeds 3 --epochs 24 --jobs 1",),
            0.6,
            vibration,
            F16_PAPER,
            SEGMENTS,
        ),
        Command(
            "200-epochs",
            (
                "tasks.plane_vibration --model node,sonode,hbnode,ghbnode,lstm,gru,gru-d,cfc --seeds 3 --epochs 200 "
                "--tol 1e-3 --jobs 1",
            ),
            1.2,
            vibration,
            F16,
            SEGMENTS,
        ),
        Command(
            "full",
            ("tasks.plane_vibration --model all --seeds 3 --epochs 500 --tol 1e-3 --jobs 1",),
            4,
            forecast_errors,
            F16,
            SEGMENTS,
        ),
        tuning(
            "tasks.plane_vibration --model all --epochs 48 --tol 1e-3", 0.4, "validation_forecast_mse", F16, SEGMENTS
        ),
        tuned(
            "tuned",
            "tasks.plane_vibration --epochs 100 --tol 1e-3",
            {"1e-2": "node,gru,lstm,gru-d,oscillators,kalman", "3e-3": "hbnode,sonode,ghbnode,anode,cfc"},
            0.8,
            runs("lr", *VIBRATION[:4], "seconds"),
            F16,
            SEGMENTS,
        ),
        Command(
            "rate-1e-2",  # the best of two models by "rates", at which other seeds diverge
            ("tasks.plane_vibration --epochs 100 --tol 1e-3 --model hbnode,sonode --lr 1e-2 --seeds 3 --jobs 1",),
            0.4,
            runs("train_forecast_mse", "test_forecast_mse"),
            F16,
            SEGMENTS,
        ),
        Command(
            "oscillators",
            ("tasks.plane_vibration --model oscillators --lr 0.03 --epochs 100 --seeds 5 --jobs 1",),
            0.1,
            runs(*VIBRATION[:4], "seconds", label=lambda c: "oscillators, linear", table=lambda c: "oscillators"),
            F16,
            SEGMENTS,
        ),
        Command(
            "kalman",
            ("tasks.plane_vibration --model kalman --lr 0.1 --epochs 13 --seeds 5 --jobs 1",),
            0.1,
            runs(
                *VIBRATION[:4],
                "seconds",
                label=lambda c: "oscillators in noise (Kalman filter)",
                table=lambda c: "oscillators",
            ),
            F16,
            SEGMENTS,
        ),
        Command(
            "adjoint",
            (
                f"tasks.plane_vibration --model {FIVE} --solver torchdiffeq --adjoint-norm full --tol 1e-7 --epochs 2 "
                "--jobs 1",
            ),
            0.4,
            runs("nfe_forward", "nfe_backward", "seconds", at={1: "epoch 1", 2: "epoch 2"}),
            F16,
            SEGMENTS,
        ),
    ),
    "walker2d": one(
        "Which models forecast a walking figure with frames missing?",
        Command(
            "10-epochs",
            ("tasks.walker2d --model all --seeds 3 --windows 2500 --epochs 10 --jobs 1",),
            0.5,
            frames,
            WALKER,
            "2,500 of 9,814 windows",
        ),
        Command(
            "full",
            ("tasks.walker2d --model all --seeds 1 --epochs 500 --tol 1e-3 --jobs 1",),
            60,
            frames,
            WALKER,
            "all 9,814 windows",
        ),
        Command(
            "adjoint",
            (
                f"tasks.walker2d --model {FIVE} --solver torchdiffeq --adjoint-norm full --tol 1e-7 --windows 512 "
                "--epochs 2 --jobs 1",
            ),
            0.1,
            runs("nfe_forward_mean", "nfe_backward_mean"),
            WALKER,
            "512 of 9,814 windows",
        ),
        Command(
            "gradients",
            ("tasks.studies.walker2d_gradients",),
            0.5,
            study(
                "adjoint_norms.csv",
                "ratio",
                case=("cell", "stage"),
                where=lambda row: float(row["frames_back"]) == 60,
            ),
            WALKER,
            "1,000 of 9,814 windows",
        ),
    ),
    "classification": one(
        "Which models classify irregular time series?",
        classified("clinic", "--epochs 30", 0.2, "1,200 patients", "test_auroc"),
        classified("ItalyPowerDemand", "--epochs 30 --drop 0.5", 0.2, "1,096 days", "test_auroc"),
        classified("BasicMotions", "--epochs 100 --batch-size 16 --drop 0.5 --samples 50", 0.2, "80 series"),
        classified("ACSF1", "--epochs 100 --batch-size 16", 0.6, "200 series"),
        classified("PLAID", "--epochs 60", 0.6, "1,074 series"),
        classified("PigCVP", "--epochs 100 --batch-size 16", 0.8, "312 series"),
    ),
    "ucr": one(
        "How does SeriesClassifier compare with published accuracies on the archive's own splits?",
        *(
            Command(
                table,
                (f"tasks.studies.archive {options}",),
                hours,
                both(
                    *(
                        study("accuracy.csv", metric, model=lambda row: ESTIMATORS[row["model"]], table=name)
                        for metric, name in (("test_accuracy", "accuracy"), ("seconds", "seconds"))
                    )
                ),
                "UEA and UCR archive, its own splits",
            )
            for table, options, hours in (
                ("shallow", "--models default,features,rocket,aeon", 0.3),
                (
                    "networks",
                    "--models oscillators,odernn,gru --sets ItalyPowerDemand,BasicMotions,GunPoint,JapaneseVowels",
                    1,
                ),
            )
        ),
    ),
    "selective": one(
        "Do oscillators that choose learn long memory?",
        *(
            Command(
                problem,
                (f"tasks.studies.selective --problem {problem} {options}",),
                hours,
                study(
                    f"{problem}.csv",
                    *(metric, "seconds", "steps", "lr"),
                    model=lambda row: f"selective, {row['model']}" if row["model"] in SELECTIVE else row["model"],
                ),
                data,
                "",
            )
            for problem, metric, options, hours, data in (
                ("adding", "test_error", "--seeds 5 --first-seed 10 --rates 5e-3", 0.5, "adding, T = 1,000, irregular"),
                ("tone", "test_accuracy", "--seeds 5 --first-seed 10 --seconds 67", 1.0, "tone, T = 200, irregular"),
            )
        ),
        *(
            Command(
                table,
                (f"tasks.classification --model selective,gru,gru-d,oscillators --seeds 3 --jobs 1 {options}",),
                0.1,
                runs("test_auroc", "test_accuracy", "training_seconds"),
                "clinic",
                "720 training patients",
            )
            for table, options in (("clinic", ""), ("clinic-mean", "--pool 'last and mean' --dropout 0.1"))
        ),
    ),
    "shallow-rows": one(
        "What do models that are no networks reach on the irregular series?",
        *(
            Command(data, (f"tasks.studies.shallow_rows --data {data}",), hours, study("errors.csv", *errors))
            for data, hours, errors in (
                ("vibration", 0.1, ("test_forecast_mse", "test_acceleration_mse")),
                ("vibration-paper", 0.1, ("test_forecast_mse", "test_acceleration_mse")),
                ("walker2d", 0.6, ("test_mse",)),
                ("speech", 0.01, ("test_mse",)),
            )
        ),
    ),
    "adding": one(
        "Which recurrent rules learn to add two marked numbers?",
        Command(
            "200",
            (f"tasks.adding --model {RULES},oscillators --epochs 12 --seeds 3 --jobs 1",),
            1.5,
            runs("test_loss", "trivial_loss", "seconds_per_epoch"),
            "adding, T = 200",
            "1,200 batches of 50",
        ),
        Command(
            "full",
            (f"tasks.adding --length 750 --hidden 128 --lr 2e-4 --model {RULES},oscillators --seeds 1 --jobs 1",),
            40,
            runs("test_loss", "trivial_loss", "seconds_per_epoch"),
            "adding, T = 750",
        ),
    ),
    "copying": one(
        "Which recurrent rules learn to copy?",
        Command(
            "100",
            (f"tasks.copying --length 100 --model {RULES},oscillators --epochs 12 --seeds 3 --jobs 1",),
            1,
            runs("test_loss", "trivial_loss", "seconds_per_epoch"),
            "copying, L = 100",
            "1,200 batches of 32",
        ),
        Command(
            "full",
            (f"tasks.copying --length 1000 --model {RULES},oscillators --seeds 1 --jobs 1",),
            40,
            runs("test_loss", "trivial_loss", "seconds_per_epoch"),
            "copying, L = 1,000",
        ),
    ),
    "pixels": one(
        "Which recurrent layers learn permuted pixels?",
        Command(
            "lstm",
            (
                "tasks.pixel_mnist --permuted --model plain,gain,forget,momentum,nag,sr,adam,rmsprop,oscillators "
                "--epochs 6 --jobs 1",
            ),
            0.5,
            runs("test_accuracy", "best_validation_accuracy", "seconds_per_epoch"),
            "MNIST 14 × 14, permuted",
            "10,000 of 60,000 images",
        ),
        Command(
            "dtriv",
            (
                "tasks.pixel_mnist --preset pmnist-dtriv-170 --side 14 --train-size 10000 --test-size 2000 --epochs 4 "
                "--model plain,gain,momentum,sr,adam,rmsprop --jobs 1",
            ),
            1,
            runs("test_accuracy", "best_validation_accuracy", "seconds_per_epoch"),
            "MNIST 14 × 14, permuted",
            "10,000 of 60,000 images",
        ),
    ),
    "speech": one(
        "Which recurrent layers predict the next frame of speech?",
        tuning("tasks.speech --model all --epochs 15", 0.4, "best_validation_mse", FSDD, RECORDINGS),
        Command(
            "15-epochs",
            ("tasks.speech --model all --epochs 15 --seeds 3 --jobs 1",),
            0.4,
            runs("test_mse", "best_validation_mse", "seconds_per_epoch"),
            FSDD,
            RECORDINGS,
        ),
        Command(
            "full",
            ("tasks.speech --model all --epochs 50 --seeds 3 --jobs 1",),
            1.2,
            runs("test_mse", "best_validation_mse", "seconds_per_epoch"),
            FSDD,
            RECORDINGS,
        ),
    ),
    "language-model": one(
        "Does momentum help a language model's LSTM?",
        Command(
            "lstm",
            (f"tasks.language_model --model {RULES} --layers 1 --epochs 3 --jobs 1",),
            1,
            runs("best_validation_perplexity", "test_perplexity", "seconds_per_epoch"),
            "WikiText-2",
            "200,000 words",
        ),
    ),
    "depth": one(
        "Does momentum over depth help a transformer?",
        Command(
            "3e-3",
            ("tasks.language_model --model transformer --connection all --lr 3e-3 --epochs 1 --seeds 3 --jobs 1",),
            2.5,
            runs("best_validation_perplexity", "test_loss", label=lambda c: c["connection"]),
            "Tiny Shakespeare, characters",
            "500,000 characters",
        ),
    ),
    "transformer-copy": one(
        "Does momentum attention learn faster than linear attention?",
        Command(
            "48-symbols",
            (
                "tasks.transformer_copy --model softmax,linear,linear_gain,momentum,momentum_connection,adaptive,"
                "gated_delta,heavy_ball --seeds 3 --jobs 1",
            ),
            6,
            runs("test_accuracy", at={5: "750 batches", 10: "1,500 batches", 20: "3,000 batches"}),
            "copying, 48 symbols",
            "3,000 batches of 32",
        ),
        Command(
            "sinusoidal",
            ("tasks.transformer_copy --model softmax --positions sinusoidal --seeds 3 --jobs 1",),
            0.6,
            runs(
                "test_accuracy",
                label=positions_of,
                table=lambda c: "48-symbols",
                at={5: "750 batches", 10: "1,500 batches", 20: "3,000 batches"},
            ),
            "copying, 48 symbols",
            "3,000 batches of 32",
        ),
    ),
    "recall": one(
        "Which memories recall what was bound to a key?",
        Command(
            "table",
            ("tasks.recall --preset table --jobs 1",),
            0.6,
            both(
                recalled("accuracy", "accuracy"),
                recalled("stale", "old_value_accuracy"),
                renamed(
                    study(
                        "recall.csv",
                        "counting",
                        model=lambda row: "counting",
                        case=recall_case,
                        where=lambda row: row["kind"] == "noisy" and row["model"] == "linear" and is_shown(row),
                        table=lambda row: row["kind"],
                    ),
                    counting={"metric": "accuracy"},
                ),
            ),
            "multi-query associative recall",
            "500 batches of 32",
        ),
        Command(
            "sinusoidal",
            ("tasks.recall --preset table --model softmax --positions sinusoidal --jobs 1",),
            0.1,
            both(
                recalled("accuracy", "accuracy", ", sinusoidal"),
                recalled("stale", "old_value_accuracy", ", sinusoidal"),
            ),
            "multi-query associative recall",
            "500 batches of 32",
        ),
        Command(
            "regression",
            ("tasks.studies.recall_regression",),
            0.2,
            study(
                "regression.csv",
                *("delta", "momentum_delta", "momentum"),
                model=lambda row: row["keys"],
                case=("length", "noise"),
                where=lambda row: row["settings"] == "safe" and float(row["noise"]) == 0.3,
            ),
            "linear regression, 8 features",
            "64 sequences",
        ),
    ),
    "image-generation": one(
        "Do attention layers with momentum model images better?",
        Command(
            "digits",
            (
                "tasks.image_generation --model all --jobs 1 --out {out}/auto",
                "tasks.image_generation --model softmax --positions sinusoidal --jobs 1 --out {out}/sinusoidal",
            ),
            1.7,
            runs("test_bits_per_dim", label=positions_of),
            DIGITS,
            "900 steps",
        ),
        Command(
            "mnist",
            (
                "tasks.image_generation --preset mnist-small --model softmax,linear,momentum,gated_delta,heavy_ball "
                "--jobs 1 --out {out}/auto",
                "tasks.image_generation --preset mnist-small --model softmax --positions sinusoidal --jobs 1 "
                "--out {out}/sinusoidal",
            ),
            7,
            runs("test_bits_per_dim", label=positions_of, at={1: "625 steps", 2: "1,250 steps"}),
            "MNIST 14 × 14",
            "10,000 of 60,000 images",
        ),
        Command(
            "throughput",
            (
                "tasks.studies.image_throughput --logistics 10 "
                "--model softmax,linear,momentum,adaptive,gated_delta,heavy_ball",
            ),
            1,
            images_per_second,
            size="batches of 16",
        ),
    ),
    "listops": one(
        "Do attention layers with momentum learn ListOps?",
        Command(
            "short",
            ("tasks.lra --preset listops-small --model softmax,linear,momentum,gated_delta --jobs 1",),
            1.5,
            runs("best_validation_accuracy", "test_accuracy", "majority_accuracy", "root_accuracy"),
            "ListOps, 33 to 127 tokens",
            "20,000 expressions",
        ),
    ),
    "translation": one(
        "Does momentum attention translate better than linear attention?",
        Command(
            "short",
            ("tasks.translation --model all --lr 2e-3 --epochs 5 --train-size 16000 --test-size 0 --jobs 1",),
            1,
            runs("test_bleu", "test_bleu_first_pass", "test_bleu_oracle", "best_validation_bleu"),
            "Tatoeba, sentences of at most five words",
            "13,871 pairs",
        ),
    ),
    "hessian-free": one(
        "Who needs Hessian-free optimization?",
        Command(
            "problems",
            ("tasks.pathological_table --lengths 50,100,200 --seeds 3 --jobs 1",),
            20,
            runs(
                *("solved", "seconds", "test_error", "iterations"),
                case=lambda c: f"T = {c['length']}",
                label=pair_of,
                table=lambda c: PROBLEMS[c["problem"]],
            ),
            size="300 s of one thread",
        ),
    ),
    "bouncing-balls": one(
        "Does Hessian-free optimization predict videos better than Adam?",
        *(
            Command(
                f"{cell}-{optimizer}",
                (f"tasks.bouncing_balls --cell {cell} --model plain --optimizer {optimizer} --seconds 120 --jobs 1",),
                0.05,
                runs(
                    *("test_kl", "test_squared_error"),
                    label=lambda c: c["cell"],
                    case=lambda c: HF[c["optimizer"]],
                    table=lambda c: "120-s",
                ),
                "three balls in a box, 18 × 18",
                "120 s of one thread",
            )
            for cell in ("rnn", "lstm", "gru")
            for optimizer in ("hf", "adam")
        ),
    ),
    "polyphonic-music": one(
        "Does Hessian-free optimization predict music better than Adam?",
        *(
            Command(
                f"{data}-{cell}-{optimizer}",
                (
                    f"tasks.polyphonic_music --data {data} --cell {cell} --model plain --hidden {hidden} "
                    f"--optimizer {optimizer} --seconds {seconds} --jobs 1",
                ),
                seconds / 3600,
                runs(
                    "test_nll",
                    label=lambda c: c["cell"],
                    case=lambda c: HF[c["optimizer"]].split(",")[0],
                    table=lambda c: SCORES[c["data"]],
                ),
                data,
                f"{seconds} s of one thread",
            )
            for data, seconds in (("jsb", 120), ("nottingham", 240), ("piano", 120))
            for cell, hidden in (("rnn", 100), ("lstm", 36), ("gru", 46))
            for optimizer in ("hf", "adam")
        ),
    ),
    "flows": one(
        "Are heavy-ball flows better densities than a CNF?",
        *(
            Command(
                f"{dataset}-{model}",
                (f"tasks.density --model {model} --dataset {dataset} --iterations 100 --lr {rate} --jobs 1",),
                hours,
                runs("test_nll", "seconds", case=lambda c: c["dataset"], table=lambda c: "densities"),
                dataset,
                "1,000 batches of 256",
            )
            for dataset in ("pinwheel", "checkerboard")
            for model, rate, hours in (("flow", "2e-2", 0.02), ("generalized", "2e-2", 0.02), ("cnf", "5e-3", 0.1))
        ),
    ),
    "annealing": one(
        "Does heavy-ball annealing estimate log Z better than overdamped Langevin dynamics?",
        Command(
            "bounds",
            ("tasks.annealing",),
            1,
            renamed(
                study(
                    "annealing.csv",
                    *("gap", "bound_error"),
                    model=lambda row: row["sampler"],
                    case=lambda row: f"{row['evaluations']} evaluations, {STAGES[row['trained']]}",
                    table=lambda row: DENSITIES[row["target"]],
                ),
                bound_error={"metric": "gap", "statistic": "stderr"},
            ),
            size="2,000 paths",
        ),
    ),
    "latent-sde": one(
        "Do latent SDEs with a heavy ball forecast better?",
        Command(
            "lorenz",
            ("tasks.latent_sde --model hbsde,sde --seeds 2 --jobs 1",),
            0.3,
            latent,
            "stochastic Lorenz",
            "4,096 windows",
        ),
        Command(
            "lorenz-kalman",
            ("tasks.latent_sde --model kalman --lr 0.1 --epochs 13 --seeds 3 --jobs 1",),
            0.1,
            forecasts(),
            "stochastic Lorenz",
            "4,096 windows",
        ),
        Command(
            "vibration",
            ("tasks.latent_sde --model hbsde,sde --dataset vibration --epochs 120 --batch-size 64 --jobs 1",),
            0.2,
            latent,
            "F-16 vibration",
            SEGMENTS,
        ),
        Command(
            "vibration-kalman",
            (
                "tasks.latent_sde --model kalman --dataset vibration --lr 0.1 --epochs 13 --batch-size 64 --seeds 3 "
                "--jobs 1",
            ),
            0.1,
            forecasts(),
            "F-16 vibration",
            SEGMENTS,
        ),
    ),
    "exactness": one(
        "What do reversible gradients store, and are the delta-rule memory and the Kalman filter exact?",
        Command(
            "study",
            ("tasks.studies.exactness",),
            0.02,
            both(
                study("reversible.csv", "gradient_error", "stored_mib", case=("steps",), table="reversible"),
                study("memory.csv", "relative_error", case=("decay",), table="memory"),
                study("likelihood.csv", "log_likelihood", "relative_error", case=samples_of, table="likelihood"),
            ),
        ),
    ),
}
