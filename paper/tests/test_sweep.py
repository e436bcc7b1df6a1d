"""Lists of runs: their command lines, and the table of what was found."""
import importlib
import json
import subprocess

import pytest
import torch

import eval_linear
import ser
from paper.experiments import sweep
from paper.tests.toys import class_folders

def run_here(command, check):
    """In place of a process: ser.py, a method or eval_linear.py, in this one."""
    _, script, *words = command
    if script == "eval_linear.py":
        eval_linear.main([*words, "--epochs", "2", "--lr", "0.1"])
    elif script == "ser.py":
        ser.train(ser.parse(words))
    else:
        module = importlib.import_module(words[0])
        ser.train(module.settings(words[1:]), module.build, module.dataset)

@pytest.mark.parametrize("name", sweep.LISTS)
def test_a_list_has_different_runs_of_the_papers_size(name, capsys):
    """Each line is one that its program takes, and whose model can be built."""
    sweep.main(["--list", name, "--data", "D", "--seeds", "3", "--print", "--launcher", "python"])
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    trained = set()
    for training, evaluation in zip(lines[::2], lines[1::2]):
        program = importlib.import_module(training.pop(1)) if training[0] == "-m" else ser
        settings = getattr(program, "settings", ser.parse)(training[1:])
        with torch.device("meta"):
            model = program.build(settings)
        assert (settings.depth, settings.dim, settings.seed) == (12, 384, 3)
        trained.add(str((program, vars(settings) | {"out": ""})))
        known = eval_linear.arguments().parse_args(evaluation[1:])
        assert (known.checkpoint, known.data) == (f"{settings.out}/last.pt", "D")
        if settings.out.endswith("layer-9-3"):
            assert settings.cls_layer == 9 and list(model.heads) == ["9"]
    assert len(trained) == len(lines) / 2 >= 4

def test_drawn_images_have_twelve_blocks_and_a_ratio_that_fills_b2(capsys):
    sweep.main(["--list", "r", "--seeds", "0", "--print", "--ratio", "0.5"])
    training = capsys.readouterr().out.splitlines()[::2]
    settings = [ser.parse(line.split()[2:]) for line in training]
    assert [ser.b2_images(one, 1) / one.depth for one in settings] == [0, 16 / 12, 64 / 12, 32 / 12]

def test_a_sweep_trains_evaluates_and_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(sweep, "SER", "\nSER 69.28 ser --equiv-layers 1 --cls-layer 1 --ratio .25")
    monkeypatch.setitem(sweep.LISTS, "r", "equi 69.51 equimod --layer 1")
    class_folders(tmp_path / "train", per_class=3)
    class_folders(tmp_path / "val", per_class=1, seed=6)
    argv = (f"--list r --data {tmp_path} --out {tmp_path}/runs --workers 0 --seeds 4 5 --depth 2 "
            "--image-size 16 --patch-size 4 --dim 16 --heads 2 --moco-hidden 16 --batch-size 8 "
            "--epochs 1 --warmup-epochs 0 --base-lr 0.1").split()
    sweep.main(argv)
    found = json.loads((tmp_path / "runs" / "r.json").read_text())
    assert list(found) == ["equi", "untrained", "SER"]
    rows = json.loads((tmp_path / "runs" / "SER-5" / "eval.json").read_text())["rows"]
    for name, column in (("SER", "trained"), ("untrained", "untrained")):
        assert [one["5"] for one in found[name].values()][-12:] == [
            row[column] for row in rows.values()][-12:]
    assert "| val, 6 answers: linear, top-1 % | " in capsys.readouterr().out
    sweep.main(argv)
    log = (tmp_path / "runs" / "SER-4" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in log] == [None, 1, 2, None]
    assert json.loads((tmp_path / "runs" / "r.json").read_text()) == found

def test_the_table_has_means_and_differences_within_a_seed():
    """The differences -1, -1 have no spread, though the values have."""
    own = {"20-NN, top-1 %": {0: 50.0, 1: 52.0}, "hflip after block 2: cosine": {0: 0.5, 1: 0.75},
           "hflip after block 22: cosine": {0: 0.5, 1: 0.75}, "best rate": {0: 1, 1: 1}}
    other = {title: {seed: value - 1 for seed, value in one.items()} for title, one in own.items()}
    assert sweep.table({"a": other, "b": own}, "b", (1, 2)).splitlines()[2:] == [
        "| 20-NN, top-1 % | 50.0 ± 1.4 (-1.0 ± 0.0) | 51.0 ± 1.4 (0.0 ± 0.0) |",
        "| hflip after block 2: cosine | -0.375 ± 0.177 (-1.000 ± 0.000) "
        "| 0.625 ± 0.177 (0.000 ± 0.000) |"]
