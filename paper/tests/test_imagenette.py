"""paper/imagenette.py on drawn images in class folders: what differs, what is skipped, and the arithmetic.

    python -m pytest -q paper/test_imagenette.py
"""
import contextlib
import io
import json
import math
import os
import shlex
import shutil
import signal
import sys

import pytest
import torch
from torchvision.utils import save_image

import eval_linear
import ser
from paper import imagenette
from paper.imagenette import ELEMENTS

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
TOY = shlex.split("--image-size 16 --patch-size 4 --dim 16 --depth 2 --heads 2 --cls-layer 1 --ratio 0.5 "
                  "--equiv-layers 1 --batch-size 8 --moco-hidden 16 --epochs 2 --warmup-epochs 0 "
                  "--log-every 2")
STEPS = 6   # 2 epochs of 24 images in batches of 8
REAL_FIGURE, REAL_DRAW = imagenette.empty_figure, imagenette.draw

def call(data, out, *more, seeds=("0", "1")):
    """Exit code, stdout and messages (stderr without the bars) of the script at a toy size, in-process."""
    printed, said, told = io.StringIO(), [], pytest.MonkeyPatch()
    with contextlib.redirect_stdout(printed), told.context() as patch:
        patch.setattr(imagenette.tqdm, "write", lambda text, **_: said.append(text))
        code = imagenette.main(["--data", str(data), "--out", str(out), "--seeds", *seeds, *TOY, *more])
    return code, printed.getvalue(), said

def checkpoint(out, run):
    return ser.load_checkpoint(out / run / "last.pt")

def same_weights(a, b):
    return all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"] | b["model"])

def stamps(out):
    """When each checkpoint, log and measurement was written, by path."""
    return {path.relative_to(out): path.stat().st_mtime_ns for path in out.glob("*-*/*")}

def read(path):
    return json.loads(path.read_text())

@pytest.fixture(autouse=True, scope="module")
def without_figure():
    """The figure has a test of its own; all others need no matplotlib."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imagenette, "empty_figure", lambda: None)
        patch.setattr(imagenette, "draw", lambda *_: None)
        yield

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """24 training and 10 validation images of two classes."""
    root = tmp_path_factory.mktemp("data")
    for part, n, seed in (("train", 24, 1), ("val", 10, 2)):
        for i, image in enumerate(ser.draw_images(n, 20, seed)[0]):
            (root / part / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            save_image(image.float() / 255, root / part / "ab"[i % 2] / f"{i}.png")
    return root

@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """The folder of a finished comparison, and its stdout and messages."""
    out = tmp_path_factory.mktemp("out")
    code, printed, said = call(data, out)
    assert code == 0
    return out, printed, said

def test_arms_differ_in_nothing_but_what_defines_them_and_seeds_in_the_seed(done):
    configs = {run: checkpoint(done[0], run)["config"] for run in
               (f"{arm}-{seed}" for arm in ("moco", "control", "ser") for seed in (0, 1))}
    def differences(a, b):
        return {name: (value, configs[b][name]) for name, value in configs[a].items()
                if name != "out" and value != configs[b][name]}
    for seed in (0, 1):
        assert differences(f"ser-{seed}", f"moco-{seed}") == {"ratio": (0.5, 0.0), "cls_layer": (1, 0)}
        assert differences(f"ser-{seed}", f"control-{seed}") == {"weight": (0.5, 0.0)}
    assert differences("ser-0", "ser-1") == {"seed": (0, 1)}
    assert all(checkpoint(done[0], run)["step"] == STEPS for run in configs)

def test_every_seed_is_done_before_the_next_by_commands_that_ser_py_takes(done):
    commands = [line for line in done[2] if line.startswith("python ser.py ")]
    configs = [ser.parse(shlex.split(line)[2:]) for line in commands]
    runs = ["moco-0", "control-0", "ser-0", "moco-1", "control-1", "ser-1"]
    assert [os.path.basename(cfg.out) for cfg in configs] == runs
    assert [vars(cfg) for cfg in configs] == [checkpoint(done[0], run)["config"] for run in runs]

def test_a_second_call_trains_and_measures_nothing_and_prints_the_same(data, done):
    before = stamps(done[0])
    assert call(data, done[0]) == (0, done[1], [])
    assert stamps(done[0]) == before

def test_a_stopped_arm_continues_to_the_same_weights(data, done, tmp_path, monkeypatch):
    real = ser.train
    def stopped(cfg, stop):
        if cfg.out.endswith("control-0"):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(cfg, stop=stop)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(ser, "train", stopped)
        code, printed, said = call(data, tmp_path, seeds=["0"])
    assert (code, printed) == (143, "") and "stopped; the same command continues" in said[-1]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert checkpoint(tmp_path, "control-0")["step"] == 1 and not (tmp_path / "ser-0").exists()
    moco = stamps(tmp_path / "moco-0" / "..")
    code, printed, _ = call(data, tmp_path, seeds=["0"])
    assert code == 0 and "±" not in printed and printed.count("\n") > 10
    for run in ("moco-0", "control-0", "ser-0"):
        assert same_weights(checkpoint(tmp_path, run), checkpoint(done[0], run))
    assert {path: when for path, when in stamps(tmp_path).items() if path.parts[0] == "moco-0"} == {
        path: when for path, when in moco.items() if "moco-0" in path.parts}

def test_a_stop_while_it_measures_is_one_line_and_loses_no_training(data, done, tmp_path, monkeypatch):
    out = shutil.copytree(done[0], tmp_path / "out")   # another checkpoint path: measured anew
    def interrupted(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(eval_linear, "evaluate", interrupted)
    code, printed, said = call(data, out)
    assert (code, printed, len(said)) == (130, "", 2) and "stopped" in said[-1]

def test_a_changed_checkpoint_or_setting_is_measured_again(tmp_path):
    file, calls = tmp_path / "found.json", []
    def measured(number, *setting):
        found = imagenette.once(file, {"n": setting}, lambda: calls.append(number) or {"number": number})
        return found["number"]
    (tmp_path / "last.pt").write_bytes(b"one")
    assert [measured(1, 5, 6), measured(2, 5, 6)] == [1, 1]
    (tmp_path / "last.pt").write_bytes(b"two")
    assert [measured(3, 5, 6), measured(4, 5, 7), measured(5, 5, 7)] == [3, 4, 4] and calls == [1, 3, 4]

def test_another_setting_is_refused_before_any_training(data, done, tmp_path):
    shutil.copytree(done[0] / "ser-0", tmp_path / "ser-0")   # the last arm of the seed
    code, printed, said = call(data, tmp_path, "--base-lr", "0.5")
    assert (code, printed, len(said)) == (2, "", 1) and "is of another run (base_lr" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ser-0"]

def slow_mean_std(values):
    """From the formula, with n - 1."""
    mean = 0.0
    for value in values:
        mean += value / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

def slow_values(out, row, column):
    """The value of each seed, from the files of the measurements."""
    run, suffix, found = ("ser", "-random-init", []) if column == "untrained" else (column, "", [])
    for seed in (0, 1):
        probe = read(out / f"{run}-{seed}" / f"eval-cache{suffix}.json")
        scores = read(out / f"{run}-{seed}" / f"equivariance{suffix}.json")
        assert probe["settings"]["select_split"] == 0.1 and probe["linear"]["chosen_on"] == "held-out"
        if row.startswith("linear"):
            found.append(probe["linear"]["best"]["val"]["top1"])
        elif row.startswith("20-NN"):
            found.append(probe["knn"]["val"]["top1"])
        else:
            element, measure, _, block = row.replace(":", "").replace(",", "").split()
            found.append(scores[element][int(block) - 1][("cosine", "retrieval").index(measure)])
    return found

def test_the_table_has_mean_and_std_of_the_seeds_and_of_the_paired_differences(done):
    out, lines = done[0], done[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["", "untrained", "moco", "control", "ser", "ser - control", "ser - moco"]
    assert all(set(cell) == {"-"} for cell in cells[1])
    assert [row[0] for row in cells[2:]] == ["linear, top-1 %", "20-NN, top-1 %", *(
        f"{element}: {measure}" for element in ELEMENTS for measure in
        ("cosine, block 1", "retrieval, block 1", "cosine, block 2"))]
    written, distinct = read(out / "imagenette.json")["rows"], set()
    for name, *row in cells[2:]:
        values = {column: slow_values(out, name, column) for column in cells[0][1:5]}
        for other in ("control", "moco"):
            values[f"ser - {other}"] = [values["ser"][s] - values[other][s] for s in (0, 1)]
        for column, cell in zip(cells[0][1:], row):
            mean, std = slow_mean_std(values[column])
            half = 0.006 if "%" in name else 0.0006   # of the last digit, and a little
            assert [float(number) for number in cell.split(" ± ")] == pytest.approx([mean, std], abs=half)
            assert written[name][column]["mean"] == pytest.approx(mean, abs=1e-9)
            assert written[name][column]["std"] == pytest.approx(std, abs=1e-9)
            distinct.add(cell)
    assert len(distinct) > 30   # a table of one number would pass the rest

def test_scores_are_those_of_eval_linear_after_every_block(data):
    encoder, images = eval_linear.untrained(0, dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2,
                                                    cls_layer=1)), torch.randn(40, 3, 16, 16)
    for element in ELEMENTS:
        found = imagenette.scores(encoder, images, element)
        assert len(found) == 3
        for block in (1, 2, 3):
            expected = eval_linear.equivariance(encoder, images, block, element)
            assert found[block - 1] == pytest.approx(list(expected), abs=1e-6)

def test_gradient_norms_are_those_of_the_two_terms_of_the_loss(data, done, monkeypatch):
    monkeypatch.setattr(imagenette, "BATCHES", 1)
    cfg = ser.Config(**checkpoint(done[0], "ser-1")["config"])
    path, paths = done[0] / "ser-1" / "last.pt", ser.list_images(str(data))
    for start in (None, path):
        model = ser.build(cfg)
        if start:
            model.load_state_dict(ser.load_checkpoint(path)["model"])
        keys = next(iter(ser.batch_keys(len(paths), cfg, 0, 1, 0, 1)))
        items = [ser.Views(paths, cfg)[key] for key in keys]
        views = [torch.stack([item[0][v] for item in items]) for v in (0, 1)]
        batch, total = ser.make_views(views, torch.stack([item[1] for item in items]), cfg, 0, 0, 1), {}
        for weight in (0.0, 0.5):
            model.weight = weight
            model.zero_grad()
            model(batch)["loss"].backward()
            total[weight] = torch.cat([p.grad.flatten() for p in model.base.encoder.blocks[0].parameters()])
        inv, equiv = total[0.0], total[0.5] - total[0.0]
        found = imagenette.gradients(cfg, paths, start)
        cosine = (inv @ equiv / inv.norm() / equiv.norm()).item()
        assert found == pytest.approx({"inv": inv.norm().item(), "equiv": equiv.norm().item(),
                                       "cosine": cosine}, rel=1e-3, abs=1e-4)
        assert found["inv"] > 0 and found["equiv"] > 0

def test_a_resumed_log_counts_each_step_once(tmp_path):
    rate = {"images_per_s": 4.0}
    lines = [{"config": {}}, {"step": 1, "x": 0, **rate}, {"step": 4, "x": 1, **rate}, {"config": {}},
             {"step": 3, "x": 2, **rate}, {"step": 4, "x": 3, "images_per_s": 2.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = ser.Config(out=str(tmp_path), batch_size=8)
    assert {step: record["x"] for step, record in imagenette.records(cfg).items()} == {1: 0, 3: 2, 4: 3}
    assert imagenette.minutes(cfg) == pytest.approx((8 / 4 + 2 * 8 / 4 + 8 / 2) / 60)

@pytest.mark.parametrize("more, words", [
    (["--weight", "1"], "--weight"), (["--seed=3"], "--seed"), (["--ratio", "0"], "--ratio 0"),
    (["--seeds", "0", "0"], "twice"), (["--seeds", "-1"], "--seed -1"), (["--data", ""], "--data"),
    (["--data", "nowhere"], "nowhere"), (["--data", "{data}/train"], "no such folder"),
    (["--colour", "red"], "--colour"), (["--heads", "3"], "heads 3"), (["--figure", "nowhere/a"], "nowhere")])
def test_a_mistake_is_one_line_and_exit_code_2_before_any_training(data, tmp_path, more, words):
    code, printed, said = call(data, tmp_path / "out", *(word.format(data=data) for word in more))
    assert (code, printed, len(said)) == (2, "", 1)
    assert words in said[0] and "\n" not in said[0] and not (tmp_path / "out").exists()

def test_data_must_be_named(capsys):
    assert imagenette.main([]) == 2
    assert "--data" in capsys.readouterr().err

def test_a_missing_matplotlib_is_told_before_any_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenette, "empty_figure", REAL_FIGURE)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)   # its import fails
    code, _, said = call(data, tmp_path / "out")
    assert code == 2 and len(said) == 1 and not (tmp_path / "out").exists()
    assert "pip install -r paper/requirements.txt" in said[0]

def test_the_figure_shows_every_arm_and_is_small(data, done, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(imagenette, "empty_figure", lambda: figures.append(REAL_FIGURE()) or figures[0])
    monkeypatch.setattr(imagenette, "draw", REAL_DRAW)
    code, printed, _ = call(data, done[0], "--figure", str(tmp_path / "a.png"))
    assert (code, printed) == (0, done[1])
    labels = [[line.get_label() for line in axes.lines if not line.get_label().startswith("_")]
              for axes in figures[0].axes]
    some, all_of_them = ["control", "ser"], ["untrained", "moco", "control", "ser"]
    assert labels == [all_of_them[1:], some, some, all_of_them, all_of_them, all_of_them]
    written, thick = read(done[0] / "imagenette.json")["rows"], figures[0].axes[3].lines
    ser_line = next(line for line in thick if line.get_label() == "ser")
    assert list(ser_line.get_ydata()) == [written[f"rot90: cosine, block {b}"]["ser"]["mean"] for b in (1, 2)]
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) < 150_000
