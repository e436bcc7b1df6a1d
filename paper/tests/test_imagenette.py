"""The comparison on imagenette: its runs, its file of rows, and what it shows of them."""
import json
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

import eval_linear
import ser
from paper.evaluations import robustness
from paper.experiments import imagenette
from paper.experiments.imagenette import NAMES
from paper.tests.toys import class_folders

VALUES = dict(zip(NAMES, (50, 51, 49, 53, 55, 54, 52, 56), strict=True))
TOY = ("--image-size 16 --patch-size 4 --dim 16 --depth 3 --heads 2 --moco-hidden 16 --epochs 1 "
       "--batch-size 8 --ratio 0.25 --warmup-epochs 0 --workers 0").split()


def rows_of(run, lost=False):
    """Rows of three seeds, value - 1, value and value + 1; retrieval is block + value / 100."""
    value = VALUES[run]
    found = [("linear top-1 %", 6, value, 1), ("20-NN top-1 %", 6, value / 2, 1)]
    found += [("rot90 retrieval", block, block + value / 100, 0.01) for block in (2, 4, 6)]
    rows = []
    for measure, block, mean, std in found:
        row = {"run": run, "epochs": 20, "b2": 16, "set": "val", "block": block,
               "measure": measure}
        if lost:
            rows.append(row | {"seed": None, "value": mean, "std": std, "lost": True})
        else:
            rows += [row | {"seed": seed, "value": mean + std * (seed - 1)} for seed in range(3)]
    return rows


def test_the_arms_differ_in_nothing_else_and_share_an_encoder_of_the_stated_size(tmp_path, capsys):
    """The defaults as one dictionary; and a training's command line, then those of its heads."""
    class_folders(tmp_path / "train")
    argv = ["--data", str(tmp_path), "--seeds", "1", "--print", "--bf16"]
    imagenette.main(imagenette.settings(argv))
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert "0.0 hours" in " ".join(lines[0])
    lines = [words[3:] for words in lines[2:]]     # after -m paper.experiments.imagenette --plain
    arms = [vars(ser.parse(words[1:])) for words in lines[::4]]
    own = arms[-1]
    arms = [{key: arm[key] for key in arm if arm[key] != own[key]} for arm in arms]
    assert [arm | {"out": 0} for arm in arms] == [{"out": 0} | differs for differs in (
        {"ratio": 0, "cls_layer": 0, "equiv_layers": []}, {"weight": 0}, {"weight": 0.02},
        {"weight": 0.1}, {"weight": 0.25}, {"equiv_layers": [4], "cls_layer": 4},
        {"equiv_layers": [6], "cls_layer": 0}, {})]
    assert own == vars(ser.parse([])) | dict(
        data=str(tmp_path), out="runs/imagenette/SER-1", image_size=64, patch_size=8, dim=128,
        depth=6, heads=4, cls_layer=2, equiv_layers=[2], ratio=0.125, weight=0.5, moco_hidden=1024,
        crop_min=0.2, batch_size=128, epochs=20, warmup_epochs=1, base_lr=2e-3, seed=1, bf16=True,
        workers=8, log_every=10)
    settings = ser.Namespace(**own)
    assert ser.b2_per_rank(settings, 1) == 16
    parameters = ser.seeded_encoder(settings).parameters()
    assert sum(p.numel() for p in parameters) == pytest.approx(1.2e6, rel=0.02)
    heads = [eval_linear.parse(words[1:]) for words in lines[1:4]]
    assert [(one.cache, one.equivariance, one.seed) for one in heads] == [
        (True, True, 0), (True, False, 1), (True, False, 2)]


def test_a_flag_that_runs_set_themselves_is_refused():
    for flags in (["--weight=0.3"], ["--cls-layer", "1"], ["--seed", "1"]):
        with pytest.raises(SystemExit, match=flags[0].split("=")[0]):
            imagenette.settings(["--data", "D", *flags])
    args = imagenette.settings(["--data", "D", "--ratio", "0.03125", "--epochs", "100"])
    assert (args.training.ratio, args.training.epochs) == (0.03125, 100)


def test_plain_attention_trains_the_weights_of_the_run(tmp_path):
    flags = [*TOY, "--cls-layer", "1", "--equiv-layers", "1", "--bf16", "--seed", "3"]
    class_folders(tmp_path / "train", per_class=3)
    flags += ["--data", str(tmp_path), "--out"]
    imagenette.plain_attention(["ser.py", *flags, str(tmp_path / "a")])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        ser.train(ser.parse([*flags, str(tmp_path / "b")]))
    states = [ser.load_encoder(tmp_path / run / "last.pt").state_dict() for run in "ab"]
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


def test_copies_are_centre_squares_and_made_once(tmp_path):
    Path(tmp_path, "D/train/n01").mkdir(parents=True)
    image = Image.new("RGB", (30, 20), "red")
    image.paste("blue", (5, 0, 25, 20))     # the square in the centre
    image.save(tmp_path / "D/train/n01/1.png")
    for _ in range(2):
        imagenette.make_copies(str(tmp_path / "D"), tmp_path / "out/copies", 8)
        files = [path.relative_to(tmp_path) for path in tmp_path.glob("out/**/*.*")]
        assert files == [Path("out/copies/train/n01/1.jpg")]
        copy = ser.read_image(str(tmp_path / files[0]))
        assert copy.shape == (3, 8, 8) and (copy[2] > 200).all() and (copy[0] < 60).all()


def test_rows_are_means_over_heads_and_replace_those_of_the_same_run(tmp_path):
    class_folders(tmp_path / "train", per_class=3)
    training = ser.parse([*TOY, "--data", "D"])
    found = [{"run": "SER", "seed": 0, "weights": "w", "set": "val", "classes": 6, "block": 3,
              "measure": "linear top-1 %", "value": value} for value in (10, 30, 20)]
    place = {"classes": None, "block": 2, "measure": "rot90 retrieval"}
    found += [found[0] | place | {"value": 0.5}, found[0] | place | {"block": 5}]
    rows = imagenette.means(found, training)
    assert [(row["value"], row["values"], row["epochs"], row["b2"]) for row in rows] == [
        (20, [10, 30, 20], 1, 2), (0.5, [0.5], 1, 2)]

    path = tmp_path / "rows.json"
    linear, turns = rows
    stays = [linear | {"run": "control"}, linear | {"epochs": 2}, linear | {"seed": 1}, turns]
    imagenette.add(path, [linear | {"value": 7}, *stays])
    imagenette.add(path, [linear])     # without the other measure, which stays
    assert json.loads(path.read_text()) == [*stays, linear]
    imagenette.add(path, [linear | {"weights": "others"}])
    assert json.loads(path.read_text()) == [*stays[:3], linear | {"weights": "others"}]


@pytest.mark.parametrize("lost", [(), ("control", "SER-0.1")])
def test_tables_and_pictures_are_drawn_from_a_file(lost, tmp_path, monkeypatch, capsys):
    """As known for each seed, or with the mean and the std of two runs alone."""
    figure = pytest.importorskip("matplotlib.figure")
    shown = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda one, path: shown.append((path, one)))
    rows = rows_of("layer-6") + [row | {"epochs": 100, "value": 0} for row in rows_of("SER")]
    for run in NAMES[:6] + NAMES[7:]:
        rows += rows_of(run, run in lost)
    rows += rows_of("SER", lost=True)     # does not count, as the seeds are known
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    imagenette.main(imagenette.settings(["--figures", str(path), "--out", str(tmp_path)]))
    known = imagenette.read(path)
    assert imagenette.table_of(known, "control", "linear top-1 %") == (51, 1)
    _, first, _ = capsys.readouterr().out.split("the difference to ")
    table = [line.strip("| ").split(" | ") for line in first.splitlines()[2:]]
    cells = {line[0]: dict(zip(["", *table[0]], line)) for line in table}
    own = cells["linear top-1 %, block 6"]
    assert own["control"].startswith("51.0 ± 1.0 (")
    assert own["SER"] == ("56.0 ± 1.0 (-)" if lost else "56.0 ± 1.0 (5.0 ± 0.0)")

    (first, trade), (second, bars) = shown
    assert (first.name, second.name) == ("tradeoff.png", "retrieval.png")
    left, right = trade.axes
    along = [[list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 2]
             for axes in (left, right)]
    assert along == [[[51, 49, 53, 55, 56]], [[25.5, 24.5, 26.5, 27.5, 28], [28, 27, 26]]]
    for axes, runs in ((left, [run for run in NAMES if run != "layer-4"]), (right, NAMES)):
        known = [run for run in runs if run not in lost]
        scattered = [dots for dots in axes.collections if len(dots.get_offsets()) == 3]
        assert len(scattered) == len(known) and len(axes.containers) == len(runs) - len(known)
        for run, dots in zip(known, scattered):
            block = imagenette.BLOCKS.get(run, 2) if axes is left else 6
            y = VALUES[run] / (1 if axes is left else 2)
            x = 100 * block + VALUES[run]
            wanted = [[pytest.approx(x + seed), y + seed] for seed in (-1, 0, 1)]
            assert dots.get_offsets().tolist() == wanted, run
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    methods = ("MoCo-v3", *imagenette.ALONG_LAMBDA)
    assert heights == [pytest.approx(200 + VALUES[run]) for run in methods]


def test_pictures_are_drawn_of_the_runs_that_are_there(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row | {"epochs": 100} for row in rows_of("MoCo-v3") if row["seed"] == 0]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    argv = ["--figures", str(path), "--out", str(tmp_path / "new"), "--epochs", "100"]
    imagenette.main(imagenette.settings(argv))
    pictures = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert pictures == ["retrieval.png", "tradeoff.png"]


def test_a_run_on_images_fills_the_file(tmp_path, monkeypatch):
    """Training, heads of three seeds, and corruptions, in this process."""
    pytest.importorskip("matplotlib")

    def run_here(command, check):
        if "robustness" in command[2]:
            words = command[3:]
            found = [{"set": f"C/fog/{n}", "measure": "linear top-1 %", "value": n} for n in (2, 4)]
            args = robustness.settings(words)
            heads.append(torch.load(args.head)["settings"]["seed"])
            path = Path(args.checkpoint).with_name("robustness.json")
            checkpoint = eval_linear.load(args)
            made = [row | {"encoder": "trained", "classes": 6, "block": 3} for row in found]
            eval_linear.write(path, made, args, checkpoint)
        else:
            imagenette.plain_attention(command[4:])

    heads = []
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(robustness, "make", lambda folder, data, per_class: None)
    monkeypatch.setattr(imagenette, "draw", lambda args: None)
    monkeypatch.setattr(imagenette, "FLAGS", " ".join(TOY[:-2]) + " --cls-layer 1 --equiv-layers 1")
    class_folders(tmp_path / "train", per_class=3)
    class_folders(tmp_path / "val", per_class=2, seed=6)
    argv = ["--data", str(tmp_path), "--out", str(tmp_path / "runs"), "--seeds", "4", "--names",
            "SER", "--bf16", "--workers", "0", "--corruptions"]
    imagenette.main(imagenette.settings(argv))
    rows = json.loads((tmp_path / "runs/imagenette.json").read_text())
    linear, = [row for row in rows if row["run"] == "SER" and row["measure"] == "linear top-1 %"]
    corrupted, = [row for row in rows if "corrupted" in row["measure"]]
    assert heads == [0, 1, 2]
    assert len(linear["values"]) == len(corrupted["values"]) == 3 and corrupted["value"] == 3
    assert {row["run"] for row in rows} == {"SER", "untrained"}
    assert {(row["seed"], row["epochs"], row["b2"]) for row in rows} == {(4, 1, 2)}
