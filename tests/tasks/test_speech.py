"""Speech: reading recordings, the splits, the spectra, the loss, training and resuming."""

import io
import json
import os
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import speech
from tasks.data import speech as speech_data
from tasks.models.recurrent import RuleOptions
from tests.tasks.small_runs import names_in, read_metrics

# Files


def riff(samples, rate=8000, channels=1):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, dtype="<i2").tobytes())
    return buffer.getvalue()


def sphere(samples, rate=16000, order="01", coding="pcm"):
    header = (
        "NIST_1A\n   1024\ndatabase_id -s5 TIMIT\n; a comment\nchannel_count -i 1\n"
        f"sample_count -i {len(samples)}\nsample_rate -i {rate}\nsample_n_bytes -i 2\n"
        f"sample_byte_format -s2 {order}\nsample_coding -s{len(coding)} {coding}\nend_head\n"
    )
    content = np.asarray(samples, dtype="<i2" if order == "01" else ">i2").tobytes()
    return header.encode().ljust(1024, b" ") + content


SAMPLES = [0, 1, -1, 255, 256, -256, 32767, -32768]


@pytest.mark.parametrize(
    ("content", "rate"), [(riff(SAMPLES), 8000), (sphere(SAMPLES), 16000), (sphere(SAMPLES, order="10"), 16000)]
)
def test_both_kinds_of_files_and_orders_of_bytes(content, rate):
    samples, found = speech_data.read_wave(content, "a.wav")
    assert found == rate
    assert samples.dtype == torch.float32
    assert torch.equal(samples, torch.tensor(SAMPLES) / 32768)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no sound",
        riff(SAMPLES)[:-3],
        riff(SAMPLES, channels=2),
        riff([]),
        sphere(SAMPLES)[:-2],
        sphere(SAMPLES)[:900],
        sphere(SAMPLES, coding="pcm,embedded-shorten-v2.00"),
        sphere(SAMPLES).replace(b"sample_rate", b"sample_rat_"),
        b"NIST_1A\n   size\n" + bytes(2000),
    ],
)
def test_files_that_cannot_be_read(content):
    with pytest.raises(ValueError, match=r"a\.wav cannot be read .*expected a RIFF or NIST SPHERE file of one channel"):
        speech_data.read_wave(content, "a.wav")


def test_16_khz_become_8_khz():
    """A tone well below 4 kHz is sampled at half the rate; what is above 4 kHz is filtered out."""
    t = torch.arange(1600, dtype=torch.float64) / 16000
    low, high = (torch.sin(2 * torch.pi * f * t) for f in (500, 6000))
    found = speech_data.to_8_khz(low + high, 16000, "a.wav")
    torch.testing.assert_close(found[50:-50], low[::2][50:-50], rtol=0, atol=2e-3)
    assert speech_data.to_8_khz(low, 8000, "a.wav") is low


# Data sets


def digit_files(recordings=12):
    """A file for each digit, speaker and recording, whose only sample tells the three."""
    return {
        f"{digit}_{speaker}_{index}.wav": riff([1000 * digit + 100 * number + index])
        for digit in (0, 7)
        for number, speaker in enumerate(("ann", "bob"))
        for index in range(recordings)
    }


def write_zip(folder, files):
    (folder / "fsdd").mkdir()
    with zipfile.ZipFile(folder / "fsdd" / "recordings.zip", "w") as archive:
        archive.writestr("recordings/", "")
        for name, content in files.items():
            archive.writestr(f"recordings/{name}", content)


@pytest.mark.parametrize("zipped", [True, False])
def test_digits_are_split_by_the_recording(zipped, tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    if zipped:
        write_zip(tmp_path, digit_files())
    else:
        (tmp_path / "fsdd" / "recordings").mkdir(parents=True)
        for name, content in digit_files().items():
            (tmp_path / "fsdd" / "recordings" / name).write_bytes(content)
    waves, source = speech_data.read_speech()
    assert source == "digits"
    numbers = {part: sorted(round(32768 * x.item()) for x in of_it) for part, of_it in waves.items()}
    sets = {"test": range(5), "validation": range(5, 10), "train": range(10, 12)}
    for part, indices in sets.items():
        assert numbers[part] == sorted(1000 * d + 100 * s + i for d in (0, 7) for s in (0, 1) for i in indices)


def test_the_real_digits_when_they_are_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / "fsdd" / "recordings.zip").is_file():
        pytest.skip("the digits are not in HBNODE_DATA")
    waves, source = speech_data.read_speech("digits")
    assert source == "digits"
    assert {part: len(of_it) for part, of_it in waves.items()} == {"train": 2400, "validation": 300, "test": 300}
    assert len({x.numpy().tobytes() for of_it in waves.values() for x in of_it}) == 3000  # none in two parts


def test_damaged_digits(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"fsdd/recordings\.zip is not in HBNODE_DATA=.*Fix: put the folder"):
        speech_data.read_speech("digits")
    with pytest.raises(ValueError, match="source must be one of auto, digits, timit, generated, got 'speech'"):
        speech_data.read_speech("speech")
    write_zip(tmp_path, digit_files() | {"noise.wav": riff(SAMPLES)})
    with pytest.raises(ValueError, match=r"noise\.wav: expected a name such as 7_jackson_32\.wav"):
        speech_data.read_speech()
    path = tmp_path / "fsdd" / "recordings.zip"
    for files, message in (
        (digit_files() | {"1_ann_0.wav": riff(SAMPLES, rate=16000)}, "expected 8000 samples a second, got 16000"),
        (digit_files(5), "expected recordings of each part, got .*'validation': 0"),
    ):
        path.unlink()
        path.parent.rmdir()
        write_zip(tmp_path, files)
        with pytest.raises(ValueError, match=message):
            speech_data.read_speech("digits")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"recordings\.zip cannot be read"):
        speech_data.read_speech("auto")


def test_speakers_of_timit():
    core, development = speech_data.TIMIT_CORE.split(), speech_data.TIMIT_DEVELOPMENT.split()
    assert (len(set(core)), len(set(development))) == (24, 50)
    assert not set(core) & set(development)
    assert [sum(name[0] == sex for name in core) for sex in "mf"] == [16, 8]  # two men, one woman from each region


def test_timit(tmp_path, monkeypatch):
    """Sentences SA, other speakers of the test folder, and second copies are left out; 16 kHz becomes 8 kHz."""

    def put(path, samples, content=sphere):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(samples))

    put("TRAIN/DR1/FCJF0/SA1.WAV", [9] * 8)
    put("TRAIN/DR1/FCJF0/SI1027.WAV", [1] * 8)
    put("TRAIN/DR1/FCJF0/SX37.WAV", [1] * 8)
    put("TRAIN/DR1/FCJF0/SX37.WAV.wav", [1] * 8, lambda x: riff(x, 16000))
    put("TEST/DR1/MDAB0/SX49.WAV", [2] * 10)
    put("TEST/DR1/MDAB0/SA2.WAV", [9] * 10)
    put("TEST/DR1/FAKS0/SX43.WAV", [3] * 12)
    put("TEST/DR2/FAAA0/SX43.WAV", [9] * 12)
    (tmp_path / "TRAIN/DR1/FCJF0/SX37.TXT").write_text("0 8 words")
    monkeypatch.setattr(speech_data, "TIMIT_SIZES", {"train": 2, "validation": 1, "test": 1})
    waves, source = speech_data.read_speech("timit", str(tmp_path))
    assert source == "timit"
    assert {part: [len(x) for x in of_it] for part, of_it in waves.items()} == {
        "train": [4, 4],
        "validation": [5],
        "test": [6],
    }
    put("TEST/DR1/FAKS0/SX223.WAV", [3] * 12)
    with pytest.raises(ValueError, match=r"expected \{'train': 2.*\} utterances, got \{'train': 2.*'test': 2\}\. Fix:"):
        speech_data.read_speech("timit", str(tmp_path))
    put("TEST/DR1/FAKS0/SX223.WAV", [3] * 12, lambda x: sphere(x, rate=22050))
    with pytest.raises(ValueError, match="expected 8000 or 16000 samples a second, got 22050"):
        speech_data.read_speech("timit", str(tmp_path))


def test_without_timit_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"TIMIT is not in .*timit\. Fix: --timit FOLDER"):
        speech.main(["--preset", "timit-84", "--epochs", "1", "--out", str(tmp_path / "run")])


def test_tones_are_the_same_every_time():
    one, another = speech_data.tones((3, 2, 1)), speech_data.tones((3, 2, 1))
    assert [len(one[part]) for part in speech_data.PARTS] == [3, 2, 1]
    for part in one:
        for x, y in zip(one[part], another[part], strict=True):
            assert torch.equal(x, y)
            assert 2000 <= len(x) <= 4800
            assert x.abs().max() < 1


# Spectra


def test_spectra_are_the_formula():
    samples = torch.randn(300, dtype=torch.float64)
    padded = np.concatenate([np.zeros(256), samples.numpy(), np.zeros(84), np.zeros(256)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    k, n = np.arange(129), np.arange(256)
    transform = np.exp(-2j * np.pi * np.outer(n, k) / 256)
    frames = [(padded[s : s + 256] * window) @ transform for s in range(0, len(padded) - 255, 128)]
    expected = 10 * np.log10(1e-5 + np.abs(np.array(frames)) ** 2)
    found = speech_data.log_spectra(samples)
    assert found.shape == (6, 129)
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_a_tone_and_silence():
    t = torch.arange(1280) / 8000
    spectra = speech_data.log_spectra(0.5 * torch.sin(2 * torch.pi * 1000 * t))  # bin 32
    assert spectra.argmax(1)[3:-3].unique().tolist() == [32]
    assert spectra[5, 32].item() == pytest.approx(20 * np.log10(0.5 * 64), abs=1e-3)
    assert torch.equal(spectra[[0, -1]], torch.full((2, 129), -50.0))


# Loss


def batch_of(waves):
    return speech.as_batch([speech_data.log_spectra(x) for x in waves])


def test_the_loss_is_the_mean_over_valid_frames():
    x, lengths, share = batch_of(speech_data.tones((5, 1, 1))["train"])
    model = torch.nn.Linear(129, 129)
    errors = []
    for rows, length in zip(x, lengths.tolist(), strict=True):
        assert not rows[length + 1 :].any()
        errors.append((model(rows[:length]) - rows[1 : length + 1]).square().flatten())
    expected = torch.cat(errors).mean()
    loss, means = speech.frame_loss(model, (x, lengths, share))
    torch.testing.assert_close(loss, expected)
    assert means["mse"] == pytest.approx(expected.item(), rel=1e-5)
    parts = [[0, 3], [1, 2, 4]]  # in batches of unequal size
    of_parts = [speech.frame_loss(model, (x[p], lengths[p], share[p]))[1]["mse"] * len(p) / 5 for p in parts]
    assert sum(of_parts) == pytest.approx(expected.item(), rel=1e-5)
    x[0, lengths[0] + 1 :] = torch.nan
    assert speech.frame_loss(model, (x, lengths, share))[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_a_hessian_free_optimizer_minimises_is_half_the_error_of_a_recording():
    batch = batch_of(speech_data.tones((4, 1, 1))["train"])
    model = make(model="plain", cell="rnn").double()
    batch = batch[0].double(), *batch[1:]
    objective = speech.FrameError()
    predicted, frames = objective.outputs(model, batch)
    total = objective.value(predicted, frames)
    loss, _ = objective(model, batch)
    assert total.item() == pytest.approx(loss.item() * batch[1].sum().item() * 129 / 2 / 4)
    again, _, (hidden, weight) = objective.outputs(model, batch, with_hidden=True)
    assert torch.equal(again, predicted)
    padding = torch.arange(hidden.shape[1]) >= batch[1][:, None]
    assert weight[padding].eq(0).all()
    assert weight[~padding].ge(1).all()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    batch[0][0, batch[1][0] + 1 :] = 9.0  # padding of another kind
    others = torch.autograd.grad(objective.value(*objective.outputs(model, batch)), list(model.parameters()))
    torch.testing.assert_close(gradients, others)


@pytest.mark.parametrize(("size", "chosen"), [(0, range(12)), (4, [0, 3, 6, 9]), (5, [0, 2, 4, 7, 9]), (99, range(12))])
def test_fewer_recordings_are_from_everywhere(size, chosen, monkeypatch):
    waves = speech_data.tones((12, 1, 1))
    monkeypatch.setattr(speech_data, "tones", lambda: dict(waves))
    batches, _ = speech.read_batches(speech.SpeechConfig(data="generated", train_size=size))
    frames = [-(-len(waves["train"][k]) // 128) + 2 for k in chosen]
    assert batches["train"][1].tolist() == frames


def test_yardsticks():
    waves = speech_data.tones((4, 1, 3))
    train, test = batch_of(waves["train"]), batch_of(waves["test"])
    known = torch.cat([speech_data.log_spectra(x)[1:] for x in waves["train"]]).mean(0)
    spectra = [speech_data.log_spectra(x) for x in waves["test"]]
    found = speech.yardsticks(train, test)
    repeated = torch.cat([(x[1:] - x[:-1]).square().flatten() for x in spectra]).mean().item()
    assert found["repeat_mse"] == pytest.approx(repeated, rel=1e-5)
    mean = torch.cat([(x[1:] - known).square().flatten() for x in spectra]).mean().item()
    assert found["mean_mse"] == pytest.approx(mean, rel=1e-5)


# Models


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("timit-84", 83_205),
        ("timit-120", 136_089),
        ("timit-158", 203_159),
        ("timit-dtriv-224", 108_321),  # with all entries of the orthogonal weight's parameter
        ("timit-dtriv-322", 187_211),
    ],
)
def test_the_papers_sizes(preset, count):
    config = speech.SpeechConfig(preset=preset, model="momentum", **speech.PRESETS[preset])
    model = speech.make_model(config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert config.rule_options(speech.TABLE) == RuleOptions(momentum=0.3, step_size=0.1)


def test_the_papers_tables():
    for preset in speech.PRESETS:
        config = speech.SpeechConfig(preset=preset, **speech.PRESETS[preset]).filled()
        wanted = (128, 1e-3, 2e-4, 1.0) if config.cell == "dtriv" else (32, 1e-4, 2e-4, 0.0)
        assert (config.batch_size, config.lr, config.orthogonal_lr, config.clip) == wanted
        assert (config.epochs, config.init, config.forget_bias, config.data) == (700, "henaff", -4, "timit")


def make(**options):
    return speech.make_model(speech.SpeechConfig(hidden=6, **options))


@pytest.mark.parametrize("options", [{"model": "momentum"}, {"model": "sr"}, {"model": "adam", "cell": "dtriv"}])
def test_a_prediction_has_seen_the_frames_before_it_only(options):
    model, x = make(**options), torch.randn(2, 9, 129)
    other = x.clone()
    other[:, 5:] += 1
    with torch.no_grad():
        one, another = model(x), model(other)
    torch.testing.assert_close(one[:, :5], another[:, :5])
    assert (one[:, 5] - another[:, 5]).abs().max() > 1e-6


def test_the_forget_gates_biases():
    layer = make(model="forget").layer
    expected = -4 * (1 + 0.1 / 0.7) / 2
    for bias in (layer.bias_ih_l0, layer.bias_hh_l0):
        assert bias[6:12].tolist() == pytest.approx([expected] * 6)


def test_an_orthogonal_weight_has_a_rate_of_its_own():
    config = speech.SpeechConfig(model="momentum", cell="dtriv", hidden=6, lr=1e-3, orthogonal_lr=2e-4)
    model = speech.make_model(config)
    others, orthogonal = speech.make_optimizer(config, model).param_groups
    assert (others["lr"], orthogonal["lr"]) == (1e-3, 2e-4)
    assert (others["betas"], orthogonal["betas"]) == ((0.9, 0.999), (0.0, 0.99))
    assert [p.shape for p in orthogonal["params"]] == [(6, 6)]
    assert len(others["params"]) + 1 == len(list(model.parameters()))


def test_adam_without_its_momentum_is_rmsprop_but_for_the_bias():
    """The gradient is divided by the root of an unbiased mean square."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    adam = torch.optim.Adam([weights[0]], lr=0.1, betas=(0.0, speech.RMSPROP_ALPHA))
    rmsprop = torch.optim.RMSprop([weights[1]], lr=0.1, alpha=speech.RMSPROP_ALPHA)
    for step in range(1, 6):
        before = [p.detach().clone() for p in weights]
        gradient = torch.randn(3, dtype=torch.float64)
        for p, optimizer in zip(weights, (adam, rmsprop), strict=True):
            p.grad = gradient
            optimizer.step()
        steps = [(p - x).detach() for p, x in zip(weights, before, strict=True)]
        unbiased = (1 - speech.RMSPROP_ALPHA**step) ** 0.5
        torch.testing.assert_close(steps[0], steps[1] * unbiased, rtol=1e-6, atol=0)


# Runs

QUICK = "--device cpu --data generated --hidden 5 --batch-size 4".split()


@pytest.fixture
def few(monkeypatch):
    """A few made-up voices."""
    whole = speech_data.tones
    monkeypatch.setattr(speech_data, "tones", lambda: whole((6, 3, 3)))


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "momentum"],
        ["--model", "sr", "--cell", "dtriv", "--clip", "1"],
        ["--model", "plain", "--cell", "gru", "--optimizer", "hf", "--max-cg", "4"],
    ],
    ids=["adam", "dtriv", "hf"],
)
def test_a_run_resumes_to_the_same_numbers_and_writes_its_files(options, few, tmp_path, capsys, monkeypatch):
    options = [*options, *QUICK]
    speech.main([*options, "--epochs", "2", "--out", str(tmp_path / "whole")])
    output = capsys.readouterr().out
    assert "data: generated, 6/3/3 recordings; repeat_mse" in output
    monkeypatch.setattr(speech, "draw_prediction", lambda *args: None)  # it takes longer than the training
    speech.main([*options, "--epochs", "1", "--out", str(tmp_path / "parts")])
    speech.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt", "prediction.png"}
    assert names_in(tmp_path / "whole") == names
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for name in ("test_mse", "best_epoch", "best_validation_mse", "repeat_mse", "mean_mse"):
        assert summaries[0][name] == summaries[1][name]
    errors = [float(row["validation_mse"]) for row in read_metrics(tmp_path / "whole")]
    assert summaries[0]["best_validation_mse"] == pytest.approx(min(errors))
    before = (tmp_path / "parts" / "summary.json").read_bytes()
    speech.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    assert (tmp_path / "parts" / "summary.json").read_bytes() == before  # finished already


def test_the_best_epochs_weights_are_tested(few, tmp_path, monkeypatch):
    monkeypatch.setattr(speech, "draw_prediction", lambda *args: None)
    folder = tmp_path / "run"
    options = [*QUICK, "--model", "plain", "--epochs", "4", "--lr", "0.5", "--out", str(folder)]
    speech.main(options)
    summary = json.loads((folder / "summary.json").read_text())
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    config = speech.SpeechConfig(hidden=5, model="plain", data="generated")
    model = speech.make_model(config)
    model.load_state_dict(checkpoint["best"]["model"])
    with torch.no_grad():
        batches, _ = speech.read_batches(config)
        assert speech.frame_loss(model, batches["test"])[0].item() == pytest.approx(summary["test_mse"], rel=1e-5)
        best = speech.frame_loss(model, batches["validation"])[0].item()
    assert best == pytest.approx(summary["best_validation_mse"], rel=1e-5)
    assert checkpoint["best"]["epoch"] == summary["best_epoch"]


def test_a_run_is_not_resumed_with_other_data(few, tmp_path, monkeypatch):
    options = [*QUICK, "--data", "auto", "--model", "gain", "--epochs", "1", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(speech, "draw_prediction", lambda *args: None)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    speech.main(options)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["source"] == "generated"
    write_zip(tmp_path, digit_files())
    with pytest.raises(SystemExit, match=r"data: 'generated' there, 'digits' wanted"):
        speech.main(options)
