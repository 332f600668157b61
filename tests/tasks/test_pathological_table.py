"""The table of the pathological problems: from made-up runs, and from runs of its own."""

import json

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import pathological, pathological_table
from tasks.pathological import PathologicalConfig
from tests.tasks.small_runs import names_in


def make_up(root, pair, seed, *, solved, seconds, problem="addition", length=50, error=0.9, **own):
    """The files of a finished run."""
    options = {"clock": "cpu", **pathological_table.PAIRS[pair], **own}
    config = PathologicalConfig(problem=problem, length=length, seed=seed, **options).filled()
    folder = root / "".join(f"{name}{value}-" for name, value in own.items()) / pathological.folder_name(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"task": "pathological", **vars(config)}))
    summary = {"task": "pathological", "parameters": 10501, "solved": solved, "diverged": False, "seconds": seconds}
    summary["test_error"] = error
    (folder / "summary.json").write_text(json.dumps(summary))
    names = "epoch,train_loss,damping,ratio,test_error"
    lines = [f"{epoch},{0.5**epoch},{0.1 / epoch},{0.3 * epoch},{0.9 / epoch}" for epoch in range(1, 6)]
    (folder / "metrics.csv").write_text("\n".join([names, *lines, ""]))


def test_the_table_of_made_up_runs(tmp_path, capsys):
    for seed, seconds in enumerate((40.0, 60.0, 50.0)):
        make_up(tmp_path, "tanh-hf", seed, solved=True, seconds=seconds, error=0.005)
    make_up(tmp_path, "tanh-hf-undamped", 0, solved=False, seconds=301.0, error=0.84)
    make_up(tmp_path, "gru-adam", 0, solved=True, seconds=20.0, error=0.005)
    make_up(tmp_path, "gru-adam", 1, solved=True, seconds=303.0, error=0.005)  # too late
    make_up(tmp_path, "gru-adam", 0, solved=True, seconds=70.4, length=100, problem="temporal_order")
    pathological_table.main(["--report", "--out", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == [
        "|  | addition, T = 50 | temporal order, T = 100 |",
        "|---|---|---|",
        "| tanh RNN, HF | 3/3, 50 s |  |",
        "| tanh RNN, HF, undamped | 0/1, 84 % wrong |  |",
        "| GRU, Adam | 1/2, 20 s | 1/1, 70 s |",
    ]
    assert (tmp_path / "pathological.md").read_text().splitlines() == printed[:5]
    rows = (tmp_path / "pathological.csv").read_text().splitlines()
    assert rows[0] == "problem,length,pair,options,parameters,runs,solved,seconds,test_error"
    assert rows[1] == "addition,50,tanh-hf,,10501,3,3,50.0,0.005"
    for name in ("pathological.png", "damping.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_a_table_without_both_kinds_of_damping_has_no_figure_of_it(tmp_path):
    make_up(tmp_path, "tanh-hf", 0, solved=True, seconds=1.0)
    pathological_table.main(["--report", "--out", str(tmp_path)])
    assert not (tmp_path / "damping.png").exists()


def test_runs_with_options_of_their_own_have_lines_of_their_own(tmp_path, capsys, caplog):
    for own in ({}, {"lr": 0.5}, {"hidden": 50, "clock": "wall"}):
        make_up(tmp_path, "gru-adam", 0, solved=True, seconds=20.0, **own)
    make_up(tmp_path, "gru-adam", 1, solved=True, seconds=20.0, damping=0.5)  # which Adam does not read
    make_up(tmp_path, "tanh-hf-undamped", 0, solved=False, seconds=300.0)
    make_up(tmp_path, "tanh-hf", 0, solved=True, seconds=30.0, structural_damping=0.5)
    make_up(tmp_path, "tanh-hf", 1, solved=False, seconds=30.0)  # of a smaller budget
    pathological_table.main(["--report", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:7] == [
        "| tanh RNN, HF, structural_damping=0.5 | 1/1, 30 s |",
        "| tanh RNN, HF, undamped | 0/1, 90 % wrong |",
        "| GRU, Adam | 2/2, 20 s |",
        "| GRU, Adam, clock=wall, hidden=50 | 1/1, 20 s |",
        "| GRU, Adam, lr=0.5 | 1/1, 20 s |",
    ]
    assert "addition,50,gru-adam,lr=0.5," in (tmp_path / "pathological.csv").read_text()
    assert "addition-50-tanh-hf-seed1 ended without success after 30 seconds of 300" in caplog.text
    pathological_table.main(["--report", "--hidden", "50", "--out", str(tmp_path)])
    assert "| GRU, Adam, lr=0.5, hidden=100 |" in capsys.readouterr().out


def test_a_run_counts_once(tmp_path):
    make_up(tmp_path / "one", "gru-adam", 0, solved=True, seconds=20.0)
    make_up(tmp_path / "copy", "gru-adam", 0, solved=True, seconds=20.0)
    with pytest.raises(SystemExit, match=r"are runs of the same options and seed. Fix: move one"):
        pathological_table.main(["--report", "--out", str(tmp_path)])


def test_a_table_of_nothing_says_so(tmp_path, caplog):
    pathological_table.main(["--report", "--out", str(tmp_path)])
    assert "no finished run of the pathological problems" in caplog.text
    assert not (tmp_path / "pathological.md").exists()


def test_the_table_makes_its_runs_and_skips_what_is_finished(tmp_path, monkeypatch, capsys):
    options = "--pairs gru-adam --problems temporal_order --lengths 10 --seeds 1 --hidden 3 --test-size 20".split()
    options += ["--out", str(tmp_path)]
    pathological_table.main([*options, "--seconds", "0.01"])
    assert "| GRU, Adam | " in capsys.readouterr().out
    assert names_in(tmp_path) == {
        "temporal_order-10-gru-adam-seed0",
        *("pathological.md", "pathological.csv", "pathological.png"),
    }
    asked = []
    monkeypatch.setattr(pathological_table, "train", asked.append)
    pathological_table.main([*options, "--seconds", "0.01"])
    assert asked == []
    pathological_table.main([*options, "--seconds", "1000"])
    assert [config.model for config in asked] == ["gru"]


def test_the_table_has_eleven_pairs_in_the_order_of_their_need():
    options = pathological_table.parse(["--seeds", "2", "--lengths", "50,100,50"])
    made = list(pathological_table.configs(options))
    assert len(made) == 11 * 3 * 2 * 2
    assert len({config.out for config in made}) == len(made)
    assert [(config.seed, config.length) for config in made[::33]] == [(0, 50), (0, 100), (1, 50), (1, 100)]
    assert [pathological.pair_name(vars(config)) for config in made[:11]] == list(pathological_table.PAIRS)
    undamped = made[1]
    assert (undamped.structural_damping, undamped.filled().damping) == (0, 0.03)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pairs", "mlp-adam"], "'mlp-adam' is not one of tanh-hf"),
        (["--problems", "adding"], "'adding' is not one of addition"),
        (["--lengths", "5"], "length must be 10 or more, got 5"),
        (["--lengths", "short"], "invalid literal"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--seeds", "0"], "--seeds must be positive, got 0"),
    ],
)
def test_bad_options_of_the_table(argv, message, capsys):
    with pytest.raises(SystemExit):
        pathological_table.parse(argv)
    assert message in capsys.readouterr().err
