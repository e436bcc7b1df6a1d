"""The comparison on imagenette: its runs, and what it shows of them."""
import json
import subprocess
from pathlib import Path

import pytest

import eval_linear
import ser
from paper.evaluations import robustness
from paper.experiments import imagenette

VALUES = {"MoCo-v3": 50.0, "control": 51.0, "SER-0.1": 53.0, "SER": 56.0}

def fake_run(command, check):
    """In place of a process: writes what an evaluation would. A seed is added to its values."""
    if "--checkpoint" not in command:
        return
    folder = Path(command[command.index("--checkpoint") + 1]).parent
    folder.mkdir(parents=True, exist_ok=True)
    name, _, seed = folder.name.rpartition("-")
    value = VALUES[name] + int(seed)
    head = "MLP" if "--mlp" in command else "linear"
    rows = {f"{head} on {len(name)} [CLS], top-1 %": value + len(head)}
    for block in range(1, 7):
        for element in ("rot90", "hflip", "scale"):
            rows[f"{element} after block {block}: cosine (A.2)"] = 9
            rows[f"{element} after block {block}: retrieval (chance 0.1)"] = block + value / 100
    rows = {title: {"untrained": 40.0, "trained": one} for title, one in rows.items()}
    (folder / "eval.json").write_text(json.dumps({"rows": rows}))
    sets = {"fog/1": {"top-1": value - 20}, "fog/2": {"top-1": value - 30}}
    (folder / "robustness-c.json").write_text(json.dumps({"found": sets}))

def test_the_arms_differ_in_nothing_else_and_share_an_encoder_of_the_stated_size(capsys):
    imagenette.main(["--data", "D", "--seeds", "1", "--print", "--bf16"])
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    arms = [ser.parse(words[1:]) for words in lines[::3]]
    assert [(one.ratio, one.weight, one.cls_layer) for one in arms] == [
        (0, 0.5, 0), (0.03125, 0, 2), (0.03125, 0.1, 2), (0.03125, 0.5, 2)]
    own = vars(arms[3])
    assert all(vars(one) | {"weight": 0.5, "out": own["out"]} == own for one in arms[1:])
    assert own["bf16"] and own["seed"] == 1 and ser.b2_images(arms[3], 1) == 4
    parameters = ser.new_encoder(arms[3]).parameters()
    assert sum(p.numel() for p in parameters) == pytest.approx(1.2e6, rel=0.02)
    heads = [eval_linear.arguments().parse_args(words[1:]) for words in (lines[1], lines[2])]
    assert [(one.cache, one.equivariance, one.mlp) for one in heads] == [(1, 1, 0), (1, 1, 1)]

def test_tables_corruptions_and_picture(tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure")
    made = []
    shown = []
    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(robustness, "make", lambda *where, **how: made.append((where, how)))
    monkeypatch.setattr(figure.Figure, "savefig", lambda one, path: shown.append(one))
    out = tmp_path / "runs"
    imagenette.main(["--data", "D", "--out", str(out), "--seeds", "0", "2", "--corruptions"])
    assert made == [((str(out / "corrupted"), "D/val"), {"per_class": 10})]
    _, first, second = capsys.readouterr().out.split("the difference to ")
    assert first.startswith("control\n") and second.startswith("MoCo-v3\n")
    cells = {line.split(" | ")[0]: line.split(" | ")[1:] for line in first.splitlines()}
    assert cells["| linear, top-1 %"] == [
        "57.0 ± 1.4 (-1.0 ± 0.0)", "40.0 ± 0.0 (-18.0 ± 1.4)", "58.0 ± 1.4 (0.0 ± 0.0)",
        "60.0 ± 1.4 (2.0 ± 0.0)", "63.0 ± 1.4 (5.0 ± 0.0) |"]
    assert cells["| MLP, top-1 %"][4].startswith("60.0 ± 1.4 (5.0 ")
    assert cells["| corrupted: linear, top-1 %"][3].startswith("32.0 ± 1.4 (5.0 ")
    assert len([title for title in cells if "rot90 after" in title]) == 2 * 2     # blocks 2 and 6
    *_, seed, mean = shown[0].axes[0].lines     # of SER
    assert list(seed.get_ydata()) == pytest.approx([block + 0.58 for block in range(1, 7)])
    assert list(mean.get_ydata()) == pytest.approx([block + 0.57 for block in range(1, 7)])
