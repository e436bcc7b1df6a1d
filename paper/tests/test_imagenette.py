"""The comparison on imagenette: its runs, and what it shows of them."""
import json
import subprocess
from pathlib import Path

import pytest

import eval_linear
import ser
from paper.evaluations import robustness
from paper.experiments import imagenette

VALUES = dict(zip(imagenette.NAMES, (50, 51, 49, 53, 55, 54, 52, 56), strict=True))

def fake_run(command, check):
    """In place of a process: writes what an evaluation would. A seed is added to its values."""
    if "--checkpoint" not in command:
        return
    folder = Path(command[command.index("--checkpoint") + 1]).parent
    folder.mkdir(parents=True, exist_ok=True)
    run, _, seed = folder.name.rpartition("-")
    value = VALUES[run] + int(seed)
    kinds = [("mlp top-1 %", 10, 6, value + 3), ("linear top-1 %", 10, 6, value),
             ("20-NN top-1 %", 10, 6, value / 2)]
    for b in (2, 4, 6):
        kinds += [("rot90 retrieval", None, b, b + value / 100), ("rot90 cosine", None, b, 9)]
    rows = [dict(zip(("measure", "classes", "block", "value"), kind), set="val") for kind in kinds]
    rows = [row | {"encoder": "trained"} for row in rows] + [
        row | {"encoder": "untrained", "value": VALUES[run] - 20} for row in rows]
    (folder / "eval.json").write_text(json.dumps({"rows": rows}))
    if "--imagenet-c" in command:
        assert command[command.index("--head") + 1] == str(folder / "head-cache.pt")
        sets = [rows[1] | {"set": f"C/fog/{i}", "value": value - 10 * i} for i in (2, 3)]
        (folder / "robustness.json").write_text(json.dumps({"rows": sets}))

def test_the_arms_differ_in_nothing_else_and_share_an_encoder_of_the_stated_size(capsys):
    imagenette.main(imagenette.settings(["--data", "D", "--seeds", "1", "--print", "--bf16"]))
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    arms = [vars(ser.parse(words[1:])) for words in lines[::3]]
    own = arms[-1]
    arms = [{key: arm[key] for key in arm if arm[key] != own[key]} for arm in arms]
    assert [arm | {"out": 0} for arm in arms] == [{"out": 0} | differs for differs in (
        {"ratio": 0, "cls_layer": 0, "equiv_layers": []}, {"weight": 0}, {"weight": 0.02},
        {"weight": 0.1}, {"weight": 0.25}, {"equiv_layers": [4], "cls_layer": 4},
        {"equiv_layers": [6], "cls_layer": 0}, {})]
    settings = ser.Namespace(**own)
    assert settings.bf16 and settings.seed == 1 and ser.b2_per_rank(settings, 1) == 16
    assert (settings.weight, settings.equiv_layers, settings.cls_layer) == (0.5, [2], 2)
    parameters = ser.new_encoder(settings).parameters()
    assert sum(p.numel() for p in parameters) == pytest.approx(1.2e6, rel=0.02)
    heads = [eval_linear.arguments().parse_args(words[1:]) for words in (lines[1], lines[2])]
    assert [(one.cache, one.equivariance, one.mlp) for one in heads] == [(1, 1, 0), (1, 1, 1)]

def test_tables_corruptions_and_picture(tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure")
    made, shown = [], []
    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(robustness, "make", lambda *where, **how: made.append((where, how)))
    monkeypatch.setattr(figure.Figure, "savefig", lambda one, path: shown.append(one))
    out = tmp_path / "runs"
    argv = ["--data", "D", "--out", str(out), "--seeds", "0", "2", "--corruptions"]
    imagenette.main(imagenette.settings(argv))
    assert made == [((str(out / "corrupted"), "D/val"), {"per_class": 10})]
    _, first, _ = capsys.readouterr().out.split("the difference to ")
    table = [line.strip("| ").split(" | ") for line in first.splitlines()[2:]]
    cells = {line[0]: dict(zip(["", *table[0]], line)) for line in table}
    assert cells["linear top-1 %, block 6"]["SER"] == "57.0 ± 1.4 (5.0 ± 0.0)"
    assert cells["linear top-1 %, block 6"]["untrained"] == "36.0 ± 0.0 (-16.0 ± 1.4)"
    assert cells["mlp top-1 %, block 6"]["layer-6"] == "56.0 ± 1.4 (1.0 ± 0.0)"
    assert cells["corrupted linear top-1 %, block 6"]["SER-0.1"] == "29.0 ± 1.4 (2.0 ± 0.0)"
    assert len([title for title in cells if "rot90" in title]) == 2 * 3
    for axes, blocks, of in zip(shown[0].axes, ([2, 2, 2, 2, 2, 4, 6, 2], [6] * 8), (1, 2)):
        for run, block, dots in zip(imagenette.NAMES, blocks, axes.collections, strict=True):
            own = [VALUES[run], VALUES[run] + 2]
            wanted = [[pytest.approx(block + value / 100), value / of] for value in own]
            assert dots.get_offsets().tolist() == wanted
        means = [[y * of for y in line.get_ydata()] for line in axes.lines]
        assert means == [[52, 50, 54, 56, 57], [57, 55, 53]]
