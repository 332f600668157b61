"""Long Range Arena: ListOps against a parser and a plain generator, reviews, pairs of papers, Pathfinder, images."""

import statistics

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("PIL")

from PIL import Image

from tasks import lra
from tasks.data.files import pad_bytes
from tasks.data.listops import SYMBOLS, as_text, make_listops, trivial_accuracies
from tasks.data.long_range import LEVEL, read_aan, read_imdb, read_pathfinder
from tasks.lra import LRAConfig

EVALUATE = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def parse(words):
    """Return the value of an expression, its depth and the numbers of arguments of its operators."""
    word = words.pop(0)
    if word not in EVALUATE:
        return int(word), 1, []
    values, depths, arities = [], [], []
    while words[0] != "]":
        value, depth, below = parse(words)
        values.append(value)
        depths.append(depth)
        arities += below
    words.pop(0)
    return EVALUATE[word](values), 1 + max(depths), [len(values), *arities]


def tree(generator, depth, max_depth, max_args):
    """Return the words of a random tree, by the rules, one node after the other."""

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    if depth == max_depth or number(0, 4):
        return [str(number(0, 10))]
    arguments = [tree(generator, depth + 1, max_depth, max_args) for _ in range(number(2, max_args + 1))]
    return [SYMBOLS[number(11, 15)], *(word for argument in arguments for word in argument), "]"]


def words_of(samples):
    tokens, lengths, _ = samples
    return [as_text(row[:length]).split() for row, length in zip(tokens, lengths, strict=True)]


def test_values_are_those_of_a_parser():
    options = {"max_depth": 4, "max_args": 5}
    samples = make_listops(150, seed=1, min_length=10, max_length=300, **options)
    tokens, lengths, labels = samples
    assert tokens.dtype == torch.uint8
    assert tokens.shape == (150, int(lengths.max()))
    for words, length, label in zip(words_of(samples), lengths.tolist(), labels.tolist(), strict=True):
        assert 10 < len(words) == length < 300
        value, depth, arities = parse(words)
        assert not words
        assert value == label
        assert 2 <= depth <= 4
        assert all(2 <= arity <= 5 for arity in arities)
    assert torch.equal(tokens == 0, torch.arange(tokens.shape[1]) >= lengths[:, None])
    first, same, other = (make_listops(400, seed, min_length=4, max_length=12) for seed in (3, 3, 4))
    assert words_of(first) == words_of(same) != words_of(other)
    assert len({tuple(words) for words in words_of(first)}) == 400  # none twice
    assert [len(x) for x in make_listops(0, seed=0)] == [0, 0, 0]
    with pytest.raises(ValueError, match="found only 400 of 500 different expressions"):
        make_listops(500, seed=0, min_length=3, max_length=5, max_depth=2)


def test_trees_are_drawn_by_the_rules():
    """Lengths, depths, operators and values have the frequencies of trees drawn node by node."""
    limits, count = {"max_depth": 5, "max_args": 4}, 1500
    ours = words_of(make_listops(count, seed=0, min_length=12, max_length=40, **limits))
    generator, theirs = torch.Generator().manual_seed(0), set()
    while len(theirs) < count:
        words = tree(generator, 1, **limits)
        if 12 < len(words) < 40:
            theirs.add(tuple(words))

    def statistics_of(expressions):
        rows = []
        for words in expressions:
            value, depth, arities = parse(list(words))
            counts = [words.count(name) for name in EVALUATE]
            firsts = [words[0] == name for name in EVALUATE]
            rows.append([len(words), depth, value, max(arities), arities[0], *counts, *firsts])
        return torch.tensor(rows, dtype=torch.float64)

    a, b = statistics_of(ours), statistics_of(theirs)
    error = ((a.var(0) + b.var(0)) / count).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() / error).max() < 4
    torch.testing.assert_close(a.std(0), b.std(0), rtol=0.1, atol=0)


def test_published_lengths_and_trivial_accuracies():
    """17.5 and 37.2 % were found on the 2,000 test samples of the benchmark; chance moves them by a point."""
    samples = make_listops(8000, seed=0)
    assert 500 < samples[1].min() < samples[1].max() < 2000
    found = trivial_accuracies(samples, samples)
    assert found["majority_accuracy"] == pytest.approx(0.175, abs=0.015)
    assert found["root_accuracy"] == pytest.approx(0.372, abs=0.018)
    roots = torch.tensor([11, 11, 11, 12, 12, 13])
    train = roots[:, None].byte(), torch.ones(6), torch.tensor([1, 1, 0, 9, 9, 9])
    test = torch.tensor([[11], [11], [12], [13]]).byte(), torch.ones(4), torch.tensor([1, 9, 9, 3])
    assert trivial_accuracies(train, test) == {"majority_accuracy": 0.5, "root_accuracy": 0.5}
    assert trivial_accuracies(train, train)["root_accuracy"] == pytest.approx(5 / 6)


# Files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


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


def write_paths(folder, side=32, line="", damaged=None):
    path = folder / "lra_release" / "pathfinder32" / LEVEL
    (path / "metadata").mkdir(parents=True)
    (path / "imgs" / "0").mkdir(parents=True)
    lines = []
    for number in range(20):
        image = Image.new("L", (side, side), number)
        image.putpixel((1, 0), 255)
        image.save(path / "imgs" / "0" / f"sample_{number}.png")
        lines.append(f"imgs/0 sample_{number}.png {number} {number % 2} 1 2 3")
    (path / "metadata" / "0.npy").write_text("\n".join([*lines, *([line] if line else [])]))
    if damaged is not None:
        (path / "imgs" / "0" / "sample_4.png").write_bytes(damaged)


def load(**options):
    parts = lra.load_data(LRAConfig(**{"min_length": 5, "max_length": 40} | options))
    return parts, {name: len(part[2]) for name, part in parts.items()}


def test_texts_become_padded_bytes():
    rows, lengths = pad_bytes([b"abc", b"", b"d\0efgh"], 5)
    assert rows.tolist() == [[97, 98, 99, 0, 0], [0] * 5, [100, 32, 101, 102, 103]]
    assert lengths.tolist() == [3, 0, 5]
    assert [len(x) for x in pad_bytes([], 5)] == [0, 0]


def test_reviews(folder):
    write_reviews(folder)
    tokens, lengths, labels = read_imdb("test", 20)
    assert labels.tolist() == [0] * 10 + [1] * 10
    assert bytes(tokens[3][: lengths[3]].tolist()) == b"test neg 3 "
    assert bytes(tokens[11].tolist()) == b"test pos 1 \xe9 !" + bytes(6)
    parts, sizes = load(dataset="text", max_length=0)
    assert sizes == {"train": 18, "validation": 2, "test": 20}
    assert len({tuple(row) for name in ("train", "validation") for row in parts[name][0].tolist()}) == 20


def test_pairs_of_papers(folder):
    write_pairs(folder)
    tokens, lengths, labels = read_aan("validation", 8)
    assert tokens.shape == (6, 2, 8)
    assert labels.tolist() == [0, 1] * 3
    assert lengths[3].tolist() == [3, 8]
    assert [bytes(text.tolist()) for text in tokens[3]] == [b"aaa" + bytes(5), b"bbbbbb 3"]
    assert load(dataset="retrieval")[1] == {"train": 6, "validation": 6, "test": 6}


def test_pathfinder(folder, caplog):
    write_paths(folder, damaged=b"")  # the release has empty images
    tokens, labels = read_pathfinder()
    assert tokens.shape == (19, 1024)
    assert tokens[5, :3].tolist() == [6, 255, 6]
    assert labels.tolist() == [k % 2 for k in range(20) if k != 4]
    assert "1 empty images of 20" in caplog.text
    parts, sizes = load(dataset="pathfinder")
    assert sizes == {"train": 15, "validation": 2, "test": 2}
    assert sorted(int(row[0]) for part in parts.values() for row in part[0]) == [k for k in range(20) if k != 4]


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (None, {"dataset": "text"}, r"aclImdb.* HBNODE_DATA=.*Fix: set HBNODE_DATA to a folder and unpack"),
        (None, {"dataset": "retrieval"}, "aan_pairs.*Fix: set HBNODE_DATA"),
        (None, {"dataset": "pathfinder"}, f"{LEVEL}.*Fix: set HBNODE_DATA"),
        ((write_pairs, {"line": "2.0\ta\tb\tc\td"}), {"dataset": "retrieval"}, "line 7: expected a label"),
        ((write_pairs, {"line": "1.0\ta\tb\tc"}), {"dataset": "retrieval"}, "line 7: .* got 4 fields"),
        ((write_paths, {"line": "imgs/0 sample_1.png 3"}), {"dataset": "pathfinder"}, "line 21: expected folder"),
        ((write_paths, {"side": 16}), {"dataset": "pathfinder"}, "expected 32 x 32 pixels, got"),
        ((write_paths, {"damaged": b"no image"}), {"dataset": "pathfinder"}, r"sample_4\.png cannot be read"),
        (None, {"min_length": 500}, "got min_length 500, max_length 40"),
        (None, {"min_length": 38, "max_length": 39}, "got min_length 38, max_length 39"),
    ],
)
def test_what_cannot_be_made_or_read(write, options, message, folder):
    if write is not None:
        write[0](folder, **write[1])
    with pytest.raises(SystemExit, match=message):
        load(**options)


def test_listops_has_the_same_test_data_for_all_sizes_of_training_data():
    few, many = (load(train_size=size, test_size=20)[0] for size in (30, 60))
    for name in ("validation", "test"):
        assert all(torch.equal(a, b) for a, b in zip(few[name], many[name], strict=True))
    assert torch.equal(many["train"][0][:30, : few["train"][0].shape[1]], few["train"][0])
    assert [len(many[name][2]) for name in ("train", "validation", "test")] == [60, 20, 20]
    assert len({tuple(row) for part in many.values() for row in part[0].tolist()}) == 100
    lengths = many["test"][1]
    assert torch.equal(lengths, lengths.sort().values)


def test_images_are_grey_sequences(monkeypatch):
    colours = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    images = colours.repeat(5, 1)[:, :, None, None].expand(-1, -1, 32, 32).clone()
    images[:, :, 0, 1] = 0.5
    monkeypatch.setattr(lra, "read_cifar10", lambda split: (images, torch.arange(20) % 10))
    parts, sizes = load(dataset="image")
    assert sizes == {"train": 18, "validation": 2, "test": 20}
    tokens, lengths, labels = parts["test"]
    assert tokens.shape == (20, 1024)
    assert tokens[:4, 0].tolist() == [round(255 * x) for x in (0.299, 0.587, 0.114, 1.0)]
    assert (tokens[:, 1] == 128).all()
    assert (lengths == 1024).all()
    assert labels.tolist() == [k % 10 for k in range(20)]


def test_guesses():
    config = LRAConfig(min_length=5, max_length=40)
    data, _ = load(train_size=60, test_size=20)
    assert lra.trivial(config, data, "test") == trivial_accuracies(data["train"], data["test"])
    labels = {"train": torch.tensor([1, 1, 0, 1]), "test": torch.tensor([0, 1, 0, 0])}
    data = {name: (torch.zeros(4, 3), torch.ones(4), y) for name, y in labels.items()}
    assert lra.trivial(LRAConfig(dataset="text"), data, "test") == {"majority_accuracy": 0.25}
