"""The grid of paper.experiments.layers, what of it is run, and what is shown.

    python -m pytest -q paper/tests/test_layers.py
"""
import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path

import pytest

import ser
from paper.experiments import layers, runs

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
PAPERS = ser.Config()
TOY = shlex.split("--image-size 16 --patch-size 4 --dim 16 --depth 2 --heads 2 --ratio 0.25 "
                  "--batch-size 8 --moco-hidden 16 --epochs 1 --warmup-epochs 0 --log-every 2")

def figure_runs(base):
    points = {panel: layers.grid(base)[panel] for panel in ("layer", "cls")}
    return layers.runs(base, points, Path("out"), [0])

def test_the_grid_of_the_papers_size_is_the_papers():
    points = layers.grid(PAPERS)
    assert list(points["layer"]) == ["1", "3", "6", "9", "12"]
    assert points["layer"]["9"] == {"equiv_layers": (9,), "cls_layer": 9}
    assert points["layer"]["12"] == {"equiv_layers": (12,), "cls_layer": 0}     # no block after it
    assert list(points["cls"]) == ["0", "1", "3", "6", "9"]
    assert points["cls"]["6"] == {"equiv_layers": (3,), "cls_layer": 6}
    assert points["all"]["all layers"] == {"equiv_layers": tuple(range(1, 13))}
    assert list(points["r"]) == ["0 (MoCo-v3)", "0.005", "0.01", "0.02"]
    assert points["r"]["0 (MoCo-v3)"] == {"ratio": 0.0, "cls_layer": 0}
    assert list(points["lambda"]) == ["0", "0.1", "0.5", "1", "5", "10"]
    assert points["group"]["- rot90 - scale"] == {"group": ("hflip",)}
    assert {tuple(one.get("group", ())) for one in points["group"].values()} == {
        (), ("hflip", "scale"), ("scale",), ("hflip",)}

def test_no_run_is_done_twice_and_none_is_lost():
    """l = c = 3 is in both panels of the figure, and the base run in every panel."""
    assert len(figure_runs(PAPERS)) == 5 + 5 - 1
    found = layers.runs(PAPERS, layers.grid(PAPERS), Path("out"), [0, 1])
    assert len(found) == 9 + 1 + 3 + 3 + 5
    for seed in (0, 1):
        configs = [json.dumps(vars(cfgs[seed]) | {"out": ""}) for cfgs in found.values()]
        assert len(set(configs)) == len(configs)
        assert all(cfgs[seed].seed == seed for cfgs in found.values())
    assert len({cfg.out for cfgs in found.values() for cfg in cfgs}) == 2 * len(found)
    assert found["base"][0].equiv_layers == (3,) and found["base"][0].cls_layer == 3

@pytest.mark.parametrize("argv, depth", [([], 6), (["--depth", "4"], 4), (["--depth", "12"], 12)])
def test_all_runs_of_drawn_images_are_valid_settings(argv, depth):
    _, base, points = layers.parse(argv)
    assert base.data == "" and base.depth == depth and base.image_size == 32
    found = layers.runs(base, points, Path("out"), [0])
    for cfgs in found.values():
        assert not runs.finished(cfgs[0], 100, "")     # checks the settings
    if depth == 6:
        assert len(found) == 21 and len(figure_runs(base)) == 9     # as the header says

@pytest.mark.parametrize("data, batch", [("", 64), ("somewhere", 1024)])
def test_heads_on_the_few_drawn_images_take_more_than_a_step_an_epoch(data, batch, monkeypatch):
    class Asked(Exception):
        pass

    def once(path, question, measure):
        raise Asked(question["batch_size"], question["epochs"])

    monkeypatch.setattr(runs, "once", once)
    with pytest.raises(Asked) as asked:
        runs.evaluate(dataclasses.replace(PAPERS, data=data), heads=("linear",))
    assert asked.value.args == (batch, 50)

def call(data, out, *more):
    """Exit code, stdout and the commands of the runs that were trained."""
    printed = io.StringIO()
    said = []
    argv = ["--data", str(data), "--out", str(out), *more, *TOY]
    settings = runs.Settings
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "Settings", lambda **how: settings(**how | {"epochs": 2}))
        patch.setattr(runs, "CPU", dict(workers=0, cls_layer=1, equiv_layers=(1,)))
        patch.setattr(runs, "GPU", runs.CPU)
        patch.setattr(layers, "grid", lambda base: toy_grid)
        patch.setattr(runs.tqdm, "write", lambda text, **_: said.append(text))
        code = layers.main(argv)
    return code, printed.getvalue(), said

toy_grid = {
    "layer": {
        "1": dict(equiv_layers=(1,), cls_layer=1),
        "2": dict(equiv_layers=(2,), cls_layer=0)},
    "cls": {
        "0": dict(equiv_layers=(1,), cls_layer=0),
        "1": dict(equiv_layers=(1,), cls_layer=1)}}

def test_each_run_is_trained_once_and_shown_where_it_belongs(data, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(10, 4))
    monkeypatch.setattr(layers, "empty_figure", lambda *_: figure)
    code, printed, said = call(data, tmp_path)
    assert code == 0, said
    assert len([line for line in said if line.startswith("python ser.py")]) == 3
    rows = json.loads((tmp_path / "layers-0.json").read_text())["rows"]
    assert list(rows) == ["layer: 1", "layer: 2", "cls: 0", "cls: 1"]
    assert rows["layer: 1"] == rows["cls: 1"] != rows["cls: 0"]
    of_base = json.loads((tmp_path / "base-0" / "linear-trained.json").read_text())
    for name, folder in (("layer: 2", "cls_layer-0-equiv_layers-2-0"), ("cls: 0", "cls_layer-0-0"),
                         ("layer: 1", "base-0")):
        folder = tmp_path / folder
        found = json.loads((folder / "linear-trained.json").read_text())
        assert rows[name]["linear, top-1 %"]["mean"] == found["linear"]["best"]["val"]["top1"]
        assert rows[name]["20-NN, top-1 %"]["values"] == [found["knn"]["val"]["top1"]]
        assert rows[name]["20-NN - base %"]["values"] == [
            found["knn"]["val"]["top1"] - of_base["knn"]["val"]["top1"]]
        assert rows[name]["linear - base %"]["mean"] == (
            found["linear"]["best"]["val"]["top1"] - of_base["linear"]["best"]["val"]["top1"])
        last = [row for row in found["equivariance"]["rows"] if row["block"] == 2]
        for row in last:
            for measure in ("score", "retrieval"):
                shown = rows[name][f"{row['element']} {measure}"]["mean"]
                assert shown == row["trained"][measure]
    assert printed.count("\n| ") == 4 + 1 and (tmp_path / "layers-0.png").exists()
    for axes, panel, places in zip(figure.axes[:2], ("layer", "cls"), ([1, 2], [0, 1])):
        shown = {line.get_label(): line for line in axes.lines}
        for name in ("linear, top-1 %", "20-NN, top-1 %"):
            assert list(shown[name].get_xdata()) == places
            assert list(shown[name].get_ydata()) == [
                rows[f"{panel}: {place}"][name]["mean"] for place in places]
    # Again: nothing is trained or measured, and the same is printed.
    assert call(data, tmp_path) == (0, printed, [])
    # A run that is not there is the only one that is done.
    (tmp_path / "cls_layer-0-equiv_layers-2-0" / "last.pt").unlink()
    _, again, said = call(data, tmp_path)
    assert len([line for line in said if line.startswith("python ser.py")]) == 1

@pytest.mark.parametrize("argv, words", [
    (["--panels", "layer", "colour"], "--panels colour"),
    (["--cls-layer", "1"], "--cls-layer"),
    (["--seeds", "0", "0"], "twice"),
    (["--ratio", "0"], "--ratio 0"),
    (["--seed=3"], "--seed"),
    (["--data", "/no/such"], "/no/such"), (["--data="], "--data"),
    (["--epochs", "nan"], "nan"),
    (["--batch-size", "8192"], "4096 images")])
def test_a_mistake_is_one_line_and_exit_code_2_before_any_training(argv, words, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert layers.main([*argv, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
