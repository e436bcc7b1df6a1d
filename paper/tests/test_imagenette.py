"""The comparison on imagenette: its runs, its file of rows, and what it shows of them."""
import fcntl
import json
import re
import subprocess
from pathlib import Path
from threading import Thread

import pytest
import torch
from PIL import Image

import eval_linear
import ser
from paper.experiments import imagenette, sweep
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
            rows.append(row | {"seed": None, "value": mean, "std": std, "seeds": 3})
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
    imagenette.main(imagenette.settings(argv[:-1]))     # without --bf16
    assert "--plain" not in capsys.readouterr().out


def test_a_flag_that_runs_set_themselves_is_refused():
    for flags in (["--weight=0.3"], ["--cls-layer", "1"], ["--seed", "1"]):
        with pytest.raises(SystemExit, match=flags[0].split("=")[0]):
            imagenette.settings(["--data", "D", *flags])
    args = imagenette.settings(["--data", "D", "--ratio", "0.03125", "--epochs", "100"])
    assert (args.training.ratio, args.training.epochs) == (0.03125, 100)


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

    with open(path) as file:     # by another process, which has not written yet
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = Thread(target=imagenette.add, args=(path, [turns]))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "adds rows to a file that another writes"
    thread.join()


@pytest.mark.parametrize("lost", [(), ("control", "SER-0.1")])
def test_tables_and_pictures_are_drawn_from_a_file(lost, tmp_path, monkeypatch, capsys):
    """As known for each seed, or with the mean and the std of two runs alone."""
    figure = pytest.importorskip("matplotlib.figure")
    shown = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda one, path: shown.append((path.name, one)))
    rows = [row | {"epochs": 100, "value": 0} for row in rows_of("SER")]
    for run in NAMES:
        found = rows_of(run, run in lost)
        # A lost row does not count where all seeds are known, and counts where one is.
        rows += found + rows_of(run, True) if run == "SER" else found
        rows += rows_of(run)[:1] if run in lost else []
    rows = [row | {"minus control": {"value": 9, "std": 8}} if row["seed"] is None else row
            for row in rows]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    imagenette.main(imagenette.settings(["--figures", str(path), "--out", str(tmp_path / "new")]))
    known = imagenette.read(path)
    assert imagenette.table_of(known, "control", "linear top-1 %") == (51, 1)
    _, first, _ = capsys.readouterr().out.split("the difference to ")
    table = [line.strip("| ").split(" | ") for line in first.splitlines()[2:]]
    cells = {line[0]: dict(zip(["", *table[0]], line)) for line in table}
    own = cells["linear top-1 %, block 6"]
    assert own["SER"] == ("56.0 ± 1.0 (-)" if lost else "56.0 ± 1.0 (5.0 ± 0.0)")
    assert own["SER-0.1"] == ("53.0 ± 1.0 (9.0 ± 8.0)" if lost else "53.0 ± 1.0 (2.0 ± 0.0)")

    (first, trade), (second, bars) = shown
    assert (first, second) == ("tradeoff.png", "retrieval.png")
    for axes, block, factor in zip(trade.axes, (2, 6), (1, 2)):
        line, = [line for line in axes.lines if len(line.get_ydata()) > 2]
        assert list(line.get_ydata()) == [y / factor for y in (51, 49, 53, 55, 56)]
        runs = [run for run in NAMES if run != "layer-4" or block == 6]
        dots = {one.get_label(): one.get_offsets().tolist() for one in axes.collections
                if hasattr(one, "get_sizes")}     # the others are bars of stds
        assert len(dots) == len(runs) and len(axes.containers) == len(lost)
        for run in runs:
            own = imagenette.BLOCKS.get(run, 2) if block == 2 else 6
            x = own + VALUES[run] / 100
            wanted = [[pytest.approx(x + seed / 100), VALUES[run] / factor + seed]
                      for seed in ((0,) if run in lost else (-1, 0, 1))]
            assert dots[imagenette.LABELS.get(run, run)] == wanted, run
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    assert heights == [pytest.approx(2 + VALUES[run] / 100)
                       for run in ("MoCo-v3", *imagenette.ALONG_LAMBDA)]


def test_a_run_on_images_fills_the_file(tmp_path, monkeypatch):
    """Training by plain attention, heads of three seeds, and pictures of the one run."""
    pytest.importorskip("matplotlib")
    plain = []

    def run_here(command, check):     # python -m paper.experiments.imagenette --plain ...
        imagenette.plain_attention(command[4:])

    def attention(*given, **more):
        plain.append(not torch.backends.cuda.flash_sdp_enabled())
        return attend(*given, **more)

    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(imagenette, "FLAGS", " ".join(TOY[:-2]) + " --cls-layer 1 --equiv-layers 1")
    class_folders(tmp_path / "D/train", per_class=3)
    class_folders(tmp_path / "D/val", per_class=2, seed=6)
    out = tmp_path / "runs"
    argv = ["--data", str(tmp_path / "D"), "--out", str(out), "--seeds", "4", "--names", "SER",
            "--bf16", "--workers", "0", "--side", "18"]
    imagenette.main(imagenette.settings(argv))
    rows = json.loads((out / "imagenette.json").read_text())
    linear, = [row for row in rows if row["run"] == "SER" and row["measure"] == "linear top-1 %"]
    assert len(linear["values"]) == 3 and plain and all(plain)
    assert {row["run"] for row in rows} == {"SER", "untrained"}
    assert {(row["seed"], row["epochs"], row["b2"]) for row in rows} == {(4, 1, 2)}
    assert ser.load(out / "SER-4/last.pt")["settings"]["data"] == str(out / "images-18")
    assert {path.name for path in out.glob("*.png")} == {"retrieval.png", "tradeoff.png"}


def markdown_tables(text):
    """(heading above, header, rows) of each table, in cells."""
    heading = ""
    table = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            yield heading, table[0], table[2:]
            table = []
        if line.startswith("#"):
            heading = line


def run_of(name):
    """That of `control, λ = 0`, of `SER, .02` or `.1`, or of 4, the block of L_equiv."""
    if name in ("2", "4", "6"):
        return {"2": "SER"}.get(name, f"layer-{name}")
    known, weight = re.search(r"(untrained|MoCo-v3|control)|(\.\d+)$", name).groups()
    return known or {".5": "SER"}.get(weight, f"SER-0{weight}")


def measure_of(name, run):
    """The measure and the block of `20-NN, top-1 %`, or of `retrieval, rot90, block 2`."""
    for part, measure in (("MLP", "mlp"), ("corrupted", "corrupted linear"), ("20-NN", "20-NN"),
                          ("linear", "linear")):
        if part in name:
            return f"{measure} top-1 %", 6
    element = re.search("hflip|scale|$", name)[0] or "rot90"
    kind = "cosine" if "cosine" in name else "retrieval"
    block = re.search(r"\d$", name)
    own = imagenette.BLOCKS.get(run, 2)
    return f"{element} {kind}", int(block[0]) if block else own


@pytest.mark.parametrize("name", ["README.md", "paper/README.md"])
def test_readmes_tables_are_what_the_file_says(name):
    """Those with a column for the control, or a row for each block of L_equiv. The heading tells
    epochs and images of b2, `4 of 128`; rows of the paper's numbers are left out."""
    root = Path(ser.__file__).parent
    checked = 0
    wrong = []
    for heading, header, lines in markdown_tables((root / name).read_text()):
        runs = [cell for cell in header if cell.startswith("control")]
        if not runs and header[0] != "L_equiv":
            continue
        epochs = re.search(r"(\d+) epochs", heading)
        b2 = re.search(r"(\d+) of 128", heading)
        rows = imagenette.read(root / "paper/experiments/imagenette.json",
                               int(epochs[1]) if epochs else 20, int(b2[1]) if b2 else 16)
        for line in lines:
            for column, cell in list(zip(header, line))[1:]:
                if "paper" in line[0]:
                    continue
                run, title = (column, line[0]) if runs else (line[0], column)
                run = run_of(run)
                place = measure_of(title, run)
                own = imagenette.select(rows, run, *place)
                base = imagenette.select(rows, "control", *place)

                digits = len(re.search(r"\.(\d+)", cell)[1])
                percent = 100 if "%" in title and "%" not in place[0] else 1
                own = {seed: row | {"value": percent * row["value"]} for seed, row in own.items()}
                text = sweep.spread(own.values(), digits)
                if "(" in cell:
                    gains = sweep.differences(own, base, "control")
                    text = f"{text} ({sweep.spread(gains, digits)})"
                if cell.startswith((".", "-.")):
                    text = re.sub(r"\b0\.", ".", text)
                checked += 1
                if cell != text:
                    wrong.append(f"{heading}: {title}, {run}: {cell}, the file says {text}")
    assert checked >= 12
    assert not wrong, "\n".join(wrong)
