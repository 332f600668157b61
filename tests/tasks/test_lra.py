"""The Long Range Arena: data of its tasks, the classifier, the learning rate, training and resuming."""

import json
import math
import os

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("PIL")

from PIL import Image

from tasks import lra
from tasks.common.config import parse
from tasks.data.aan import read_aan
from tasks.data.arrays import pad_bytes
from tasks.data.imdb import read_imdb
from tasks.data.listops import trivial_accuracies
from tasks.data.pathfinder import LEVEL, read_pathfinder
from tasks.lra import PRESETS, LRAConfig
from tasks.models.transformers import CONTENDERS
from tests.tasks.small_runs import names_in, read_metrics

SMALL = {"d_model": 8, "heads": 2, "layers": 1, "feedforward": 8}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
SHORT = ["--min-length", "5", "--max-length", "40", "--train-size", "60", "--test-size", "20"]
QUICK = [*FLAGS, *SHORT, *"--device cpu --batch-size 8 --iterations 3 --warmup 2 --lr 0.01".split()]


def tiny(**options):
    """A configuration of a small model and short sequences."""
    sizes = {"min_length": 5, "max_length": 40, "train_size": 60, "test_size": 20}
    return LRAConfig(**SMALL | sizes | options)


# Files


def write_reviews(folder):
    for split in ("train", "test"):
        for label, kind in enumerate(("neg", "pos")):
            (folder / "aclImdb" / split / kind).mkdir(parents=True)
            for number in range(10):
                text = f"{split} {kind} {number} ".encode() + b"\xe9\0!" * number * label
                (folder / "aclImdb" / split / kind / f"{number}_7.txt").write_bytes(text)


def write_pairs(folder, line=""):
    path = folder / "lra_release" / "tsv_data"
    path.mkdir(parents=True)
    lines = [f"{k % 2}.0\tP{k}\tQ{k}\t{'a' * k}\t{'b' * (2 * k)} {k}" for k in range(6)]
    for part in ("train", "eval", "test"):
        (path / f"new_aan_pairs.{part}.tsv").write_text("\n".join([*lines, *([line] if line else []), ""]))


def write_paths(folder, count=20, side=32, line=""):
    path = folder / "lra_release" / "pathfinder32" / LEVEL
    (path / "metadata").mkdir(parents=True)
    (path / "imgs" / "0").mkdir(parents=True)
    lines = []
    for number in range(count):
        image = Image.new("L", (side, side), number)
        image.putpixel((1, 0), 255)
        image.save(path / "imgs" / "0" / f"sample_{number}.png")
        lines.append(f"imgs/0 sample_{number}.png {number} {number % 2} 1 2 3")
    (path / "metadata" / "0.npy").write_text("\n".join([*lines, *([line] if line else [])]))
    return path


WRITE = {"text": write_reviews, "retrieval": write_pairs, "pathfinder": write_paths}


def test_texts_become_padded_bytes():
    rows, lengths = pad_bytes([b"abc", b"", b"d\0efgh"], 5)
    assert rows.tolist() == [[97, 98, 99, 0, 0], [0] * 5, [100, 32, 101, 102, 103]]
    assert lengths.tolist() == [3, 0, 5]
    rows, lengths = pad_bytes([], 5)
    assert rows.shape == (0, 0)
    assert len(lengths) == 0


def test_reviews(tmp_path, monkeypatch):
    write_reviews(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    tokens, lengths, labels = read_imdb("test", 20)
    assert labels.tolist() == [0] * 10 + [1] * 10
    assert tokens.shape == (20, 20)
    assert bytes(tokens[3][: lengths[3]].tolist()) == b"test neg 3 "
    assert bytes(tokens[11].tolist()) == b"test pos 1 \xe9 !" + bytes(6)
    parts = lra.load_data(tiny(dataset="text", max_length=0, train_size=0, test_size=0))
    assert {name: len(part[2]) for name, part in parts.items()} == {"train": 18, "validation": 2, "test": 20}
    seen = {tuple(row) for name in ("train", "validation") for row in parts[name][0].tolist()}
    assert len(seen) == 20


def test_pairs(tmp_path, monkeypatch):
    write_pairs(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    tokens, lengths, labels = read_aan("validation", 8)
    assert tokens.shape == (6, 2, 8)
    assert labels.tolist() == [0, 1] * 3
    assert lengths[3].tolist() == [3, 8]
    assert bytes(tokens[3, 0].tolist()) == b"aaa" + bytes(5)
    assert bytes(tokens[3, 1].tolist()) == b"bbbbbb 3"


def test_paths(tmp_path, monkeypatch, caplog):
    path = write_paths(tmp_path)
    (path / "imgs" / "0" / "sample_4.png").write_bytes(b"")  # as in the release
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    tokens, labels = read_pathfinder()
    assert tokens.shape == (19, 1024)
    assert tokens[5, :3].tolist() == [6, 255, 6]
    assert labels.tolist() == [k % 2 for k in range(20) if k != 4]
    assert "1 empty images of 20 are left out" in caplog.text
    parts = lra.load_data(tiny(dataset="pathfinder"))
    assert {name: len(part[2]) for name, part in parts.items()} == {"train": 15, "validation": 2, "test": 2}
    numbers = [int(row[0]) for part in parts.values() for row in part[0]]
    assert sorted(numbers) == [k for k in range(20) if k != 4]


@pytest.mark.parametrize(
    ("dataset", "missing"), [("text", "aclImdb"), ("retrieval", "aan_pairs"), ("pathfinder", LEVEL)]
)
@pytest.mark.parametrize("is_set", [True, False])
def test_without_the_files_it_says_what_to_do(dataset, missing, is_set, tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    if not is_set:
        monkeypatch.delenv("HBNODE_DATA")
    config = tiny(dataset=dataset)
    with pytest.raises(SystemExit, match=rf"{missing}.* HBNODE_DATA=.*Fix: set HBNODE_DATA to a folder and unpack"):
        lra.load_data(config)
    if is_set:
        WRITE[dataset](tmp_path)  # which is the advice
        assert set(lra.load_data(config)) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("retrieval", {"line": "2.0\ta\tb\tc\td"}, "line 7: expected a label"),
        ("retrieval", {"line": "1.0\ta\tb\tc"}, "line 7: .* got 4 fields"),
        ("pathfinder", {"line": "imgs/0 sample_1.png 3"}, "line 21: expected folder"),
        ("pathfinder", {"side": 16}, "expected 32 x 32 pixels, got"),
    ],
)
def test_damaged_files_are_named(dataset, options, message, tmp_path, monkeypatch):
    WRITE[dataset](tmp_path, **options)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=message):
        lra.load_data(tiny(dataset=dataset))


def test_an_image_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write_paths(tmp_path)
    (path / "imgs" / "0" / "sample_4.png").write_bytes(b"no image")
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"sample_4\.png cannot be read .* Fix: get it anew"):
        lra.load_data(tiny(dataset="pathfinder"))


# Data


def test_listops_has_the_same_test_data_for_all_sizes_of_training_data():
    few, many = (lra.load_data(tiny(train_size=size)) for size in (30, 60))
    for name in ("validation", "test"):
        assert all(torch.equal(a, b) for a, b in zip(few[name], many[name], strict=True))
    width = few["train"][0].shape[1]
    assert torch.equal(many["train"][0][:30, :width], few["train"][0])
    assert [len(many[name][2]) for name in ("train", "validation", "test")] == [60, 20, 20]
    rows = [tuple(row) for part in many.values() for row in part[0].tolist()]
    assert len(set(rows)) == 100
    lengths = many["test"][1]
    assert torch.equal(lengths, lengths.sort().values)


def test_images_are_grey_sequences(monkeypatch):
    colours = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    images = colours.repeat(5, 1)[:, :, None, None].expand(-1, -1, 32, 32).clone()
    images[:, :, 0, 1] = 0.5
    monkeypatch.setattr(lra, "read_cifar10", lambda split: (images, torch.arange(20) % 10))
    parts = lra.load_data(tiny(dataset="image", train_size=0, test_size=0))
    assert {name: len(part[2]) for name, part in parts.items()} == {"train": 18, "validation": 2, "test": 20}
    tokens, lengths, labels = parts["test"]
    assert tokens.shape == (20, 1024)
    assert tokens[:4, 0].tolist() == [round(255 * x) for x in (0.299, 0.587, 0.114, 1.0)]
    assert (tokens[:, 1] == 128).all()
    assert (lengths == 1024).all()
    assert labels.tolist() == [k % 10 for k in range(20)]


def test_guesses():
    config = tiny()
    data = lra.load_data(config)
    for part in ("validation", "test"):
        assert lra.trivial(config, data, part) == trivial_accuracies(data["train"], data[part])
    tokens, lengths = torch.zeros(4, 3), torch.ones(4)
    labels = {"train": torch.tensor([1, 1, 0, 1]), "test": torch.tensor([0, 1, 0, 0])}
    data = {name: (tokens, lengths, y) for name, y in labels.items()}
    assert lra.trivial(tiny(dataset="text"), data, "test") == {"majority_accuracy": 0.25}


# Model


@pytest.mark.parametrize("model", CONTENDERS)
@pytest.mark.parametrize("dataset", ["listops", "retrieval"])
def test_padding_and_other_samples_change_nothing(model, dataset):
    torch.manual_seed(0)
    net = lra.SequenceClassifier(tiny(dataset=dataset, model=model)).double().eval()
    pair = () if dataset == "listops" else (2,)
    tokens = torch.randint(1, 15, (3, *pair, 9))
    lengths = torch.tensor([9, 4, 1]) if not pair else torch.tensor([[9, 3], [1, 9], [4, 4]])
    scores = net(tokens, lengths)
    assert scores.shape == (3, lra.TASKS[dataset].classes)
    other = torch.where(torch.arange(9) >= lengths.unsqueeze(-1), torch.tensor(0), tokens)
    longer = torch.cat([other, torch.ones_like(other[..., :4])], dim=-1)
    for changed in (other, longer):
        torch.testing.assert_close(net(changed, lengths), scores, rtol=1e-10, atol=1e-12)
    for index in range(3):
        alone = net(tokens[index : index + 1, ..., : int(lengths[index].max())], lengths[index : index + 1])
        torch.testing.assert_close(alone, scores[index : index + 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", CONTENDERS)
def test_an_encoder_sees_later_tokens_where_it_can(model):
    torch.manual_seed(0)
    net = lra.SequenceClassifier(tiny(model=model)).double().eval()
    tokens = torch.randint(1, 15, (1, 6))
    changed = tokens.clone()
    changed[0, -1] = 15
    first, second = (net.encoder(x)[0, 0] for x in (tokens, changed))
    assert torch.allclose(first, second, rtol=0, atol=1e-12) == CONTENDERS[model].causal_only
    assert not torch.equal(net(tokens, torch.tensor([6])), net(changed, torch.tensor([6])))


def test_the_mean_is_over_the_tokens_that_count():
    torch.manual_seed(0)
    net = lra.SequenceClassifier(tiny()).double().eval()
    tokens, lengths = torch.randint(1, 15, (2, 7)), torch.tensor([3, 0])
    pooled = net.pooled(tokens, lengths)
    torch.testing.assert_close(pooled[0], net.encoder(tokens[:1, :3])[0].mean(0), rtol=1e-10, atol=1e-12)
    assert not pooled[1].any()


def test_pairs_are_compared():
    torch.manual_seed(0)
    net = lra.SequenceClassifier(tiny(dataset="retrieval")).double().eval()
    tokens, lengths = torch.randint(1, 200, (3, 2, 5)), torch.full((3, 2), 5)
    a, b = (net.pooled(tokens[:, k], lengths[:, k]) for k in (0, 1))
    torch.testing.assert_close(net(tokens, lengths), net.head(torch.cat([a, b, a * b, a - b], dim=1)))


def test_the_loss_reads_no_further_than_the_longest_sequence():
    seen = []

    def model(tokens, lengths):
        seen.append(tokens)
        return torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])

    batch = torch.zeros(3, 10, dtype=torch.uint8), torch.tensor([4, 2, 1]), torch.tensor([1, 1, 0])
    loss, means = lra.cross_entropy(model, batch)
    assert seen[0].shape == (3, 4)
    assert seen[0].dtype == torch.long
    expected = [math.log(1 + math.exp(-2)), math.log(1 + math.e), math.log(2)]
    assert loss.item() == pytest.approx(sum(expected) / 3)
    assert means["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("model", ["softmax", "momentum", "heavy_ball"])
def test_contenders_learn_the_first_operator(model):
    torch.manual_seed(0)
    net = lra.SequenceClassifier(tiny(model=model, d_model=16, feedforward=32, dropout=0.0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        tokens, lengths = torch.randint(1, 11, (32, 6)), torch.randint(2, 7, (32,))
        tokens[:, 0] = torch.randint(11, 15, (32,))
        loss, means = lra.cross_entropy(net, (tokens.byte(), lengths, tokens[:, 0] - 11))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert means["accuracy"] > 0.9


# Training


@pytest.mark.parametrize(("steps", "warmup"), [(20, 5), (20, 2), (7, 6)])
def test_the_learning_rate_is_torchs_one_cycle(steps, warmup):
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    options = {"pct_start": warmup / steps, "anneal_strategy": "linear", "cycle_momentum": False}
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps, **options)
    for step in range(steps):
        assert lra.one_cycle(step, steps, warmup) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        if step + 1 < steps:
            theirs.step()
    assert lra.one_cycle(0, steps, 1) == 1  # without a warm-up


@pytest.mark.parametrize("model", ["momentum", "gated_delta"])
def test_a_run_resumes_to_the_same_numbers(model, tmp_path, capsys, monkeypatch):
    options = [*QUICK, "--model", model, "--epochs", "4", "--checkpoint-seconds", "0"]
    lra.main([*options, "--out", str(tmp_path / "whole")])
    out = capsys.readouterr().out
    assert "60/20/20 samples of at most" in out
    assert ("each token sees those before it" in out) == CONTENDERS[model].causal_only
    assert out.count("without reading: majority accuracy 0.") == 2
    assert out.count("root accuracy 0.") == 2
    loss, calls = lra.cross_entropy, []

    def interrupted(model, batch):
        if len(calls) == 8:
            raise KeyboardInterrupt
        calls.append(0)
        return loss(model, batch)

    monkeypatch.setattr(lra, "cross_entropy", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        lra.main([*options, "--out", str(tmp_path / "parts")])
    monkeypatch.setattr(lra, "cross_entropy", loss)
    lra.main([*options, "--out", str(tmp_path / "parts")])
    rows = read_metrics(tmp_path / "whole")
    assert rows == read_metrics(tmp_path / "parts")
    assert {"train_accuracy", "validation_accuracy", "validation_loss"} <= rows[0].keys()
    assert names_in(tmp_path / "whole") == {"config.json", "metrics.csv", "summary.json", "checkpoint.pt"}
    whole, parts = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
    guesses = {f"{part}{guess}_accuracy" for part in ("", "validation_") for guess in ("majority", "root")}
    for name in ("test_accuracy", "test_loss", "best_epoch", "training_samples", *guesses):
        assert whole[name] == parts[name]
    assert whole["causal"] == CONTENDERS[model].causal_only
    with pytest.raises(SystemExit, match="epochs: 4 there, 5 wanted"):  # the rate's cycle would be another
        lra.main([*options[:-4], "--epochs", "5", "--out", str(tmp_path / "parts")])


@pytest.mark.parametrize("dataset", WRITE)
def test_tasks_from_files_run(dataset, tmp_path, monkeypatch):
    data = tmp_path / "data"
    WRITE[dataset](data)
    monkeypatch.setenv("HBNODE_DATA", str(data))
    options = [*QUICK, "--dataset", dataset, "--epochs", "1", "--out", str(tmp_path / "run")]
    lra.main(options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["test_accuracy"] <= 1
    assert 0 <= summary["majority_accuracy"] <= 1
    assert "root_accuracy" not in summary


def test_pixel_cifar_of_the_data_folder():
    root = os.environ.get("HBNODE_DATA")
    if not root or not os.path.isdir(os.path.join(root, "cifar10-subset")):
        pytest.skip("no CIFAR-10 in HBNODE_DATA")
    parts = lra.load_data(tiny(dataset="image", train_size=0, test_size=0))
    train, validation = len(parts["train"][2]), len(parts["validation"][2])
    assert train == 9 * validation
    assert parts["test"][0].shape[1] == 1024
    assert lra.trivial(tiny(dataset="image"), parts, "test")["majority_accuracy"] == pytest.approx(0.1, abs=0.02)


PUBLISHED = """
listops     32   5000   1000
text        32   20000  8000
retrieval   32   30000  800
image       256  35000  175
pathfinder  256  62400  312
"""


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines())
def test_presets(line):
    name, batch_size, steps, warmup = line.split()
    config = parse(LRAConfig, PRESETS, "", ["--preset", name])
    assert (config.dataset, config.batch_size, config.steps, config.warmup) == (
        name,
        *map(int, (batch_size, steps, warmup)),
    )
    sizes = (config.layers, config.d_model, config.heads, config.feedforward, config.lr, config.longest)
    assert sizes == (2, 64, 2, 128, 1e-4, {"listops": 2000, "text": 4000, "retrieval": 4000}.get(name, 1024))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "cosine"], "--schedule is the cycle that --warmup describes, got cosine"),
        (
            ["--epochs", "1", "--iterations", "5", "--warmup", "5"],
            "--warmup must be below the 5 steps of the run, got 5",
        ),
        (["--warmup", "0"], "--warmup must be positive"),
        (["--dataset", "lists"], "invalid choice: 'lists'"),
    ],
)
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        lra.main(options)
    assert message in capsys.readouterr().err


def test_lengths_that_no_expression_has():
    with pytest.raises(SystemExit, match="got min_length 500, max_length 40"):
        lra.load_data(tiny(min_length=500))
