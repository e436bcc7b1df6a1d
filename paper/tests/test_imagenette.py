import json
import re
import subprocess

import pytest
import torch

import eval_linear
import ser
from paper.evaluations import load_several
from paper.experiments import imagenette, sweep
from paper.tests.toys import FLAGS, having, parsed, readme_table, run_main
from paper.tests.toys import run_scripts_here, table_of, train_and_val
from test_ser import parametrize, paste, sentence, write_image

FOLDER = ser.Path(imagenette.__file__).parent


def rows_of(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_the_runs_differ_in_nothing_else_and_have_the_flags_of_the_rows(capsys):
    line = "--data D --seeds 1 --print --workers 3"
    run_main(imagenette, line, "--bf16")
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    measured = {row["run"]: row["own"] for row in rows_of("imagenette-10")}
    flags = " ".join(imagenette.FLAGS.split()).replace("--epochs 10", "--epochs 20")     # as then
    assert rows_of("tiny")[0]["flags"].startswith(flags)
    for own, words in zip(imagenette.RUNS, lines[::4], strict=True):
        assert f"{own.script} {own.flags}" == measured[own.name]
        flags = f"{imagenette.FLAGS} {own.flags} --data D --workers 3 --seed 1 --bf16"
        wanted = ser.parse([*flags.split(), "--out", f"runs/imagenette/{own.name}-1"])
        assert ser.parse(words[words.index("--image-size"):]) == wanted, own.name

    common = "--checkpoint runs/imagenette/MoCo-v3-1/last.pt --data D --workers 3 --cache"
    for (_, *words), own in zip(lines[1:4], ("--equivariance", "--seed 1", "--seed 2")):
        assert eval_linear.parse(words) == eval_linear.parse(f"{common} {own}".split())

    assert parsed(imagenette, line, "--names SER --depth 12 --equiv-layers 3").blocks == (3, 6, 12)
    assert parsed(sweep, "--data D --list lambda --equiv-layers 2 5").blocks == (5, 12)


def test_readmes_copies_are_centre_squares(tmp_path, monkeypatch):
    image = torch.zeros(3, 140, 200, dtype=torch.uint8)
    image[2, :, 30:170] = 255     # the square in the centre is blue
    write_image(tmp_path / "imagenette2-160/train/n01/1.JPEG", image)
    monkeypatch.chdir(tmp_path)
    paste("from pathlib")
    path, = tmp_path.glob("imagenette-128/train/n01/*")
    copy = ser.read_image(str(path))
    assert copy.shape == (3, 128, 128) and copy[2].min() > 200 and copy[0].max() < 60


def test_a_run_on_images_is_trained_measured_and_shown(tmp_path, monkeypatch, capsys):
    run_scripts_here(monkeypatch)
    monkeypatch.setattr(imagenette, "FLAGS", " ".join([*FLAGS, "--ratio 0.25"]))
    train_and_val(tmp_path / "D", 3, 2)
    line = f"--out {tmp_path} --names SER --bf16 --workers 0"
    run_main(imagenette, f"--data {tmp_path}/D --seeds 4", line)
    assert re.search(rf"in {tmp_path}/D\n(?s:.)*\| untrained \| SER \|", capsys.readouterr().out)
    path = tmp_path / "SER-4/rows.json"
    rows = json.loads(path.read_text())
    linear, = having(rows, run="SER", measure="linear top-1 %", ranks=1, data=f"{tmp_path}/D")
    assert len(linear["values"]) == 3 and linear["own"] == "ser.py --weight 0.5" and linear["bf16"]
    assert {row["block"] for row in having(rows, classes=None)} == {1, 2, 3}

    # Two rows of one run and seed are refused, and so are those of other runs, or older ones.
    both = f"{line} --seeds 4 5 --show {path}"
    assert "one run and seed" in sentence(run_main, imagenette, both, path)
    changed = {f"{name}: ": {name: None} for name in ("flags", "images", "ranks", "bf16", "heads")}
    changed["weight 0.3"] = {"own": "ser.py --weight 0.3"}
    others = tmp_path / "others.json"
    for told, changes in changed.items():
        others.write_text(json.dumps([row | {"seed": 5} | changes for row in rows]))
        assert told in sentence(run_main, imagenette, both, others)
    shown = {"--seeds 4": " untrained | SER |", "--seeds 5": "", "--names control": " untrained |"}
    kept = [len(rows), 0, len(having(rows, run="untrained"))]
    for (flags, titles), n in zip(shown.items(), kept):
        run_main(imagenette, line, "--seeds 4", flags, "--show", path)
        told = capsys.readouterr().out
        assert f"\n|  |{titles}\n" in told and f"{n} of {len(rows)} rows" in told


def tables(capsys, flags=""):
    run_main(imagenette, f"--show {FOLDER}/imagenette-10.json", flags)
    _, *texts = capsys.readouterr().out.split("the difference to")
    return [table_of(text) for text in texts]


def words_of(title):     # those in which README's agrees with the one that is printed
    return set(title.replace("rotated images", "turned").replace(",", "").split())


def numbers(cell):
    return [float(number) for number in re.findall(r"-?\d*\.\d+", cell)]


TABLES = {     # of paper/README: what their headers begin with, and files of their rows
    "| 10 epochs |": "imagenette-10", "| 100 epochs |": "imagenette-100",
    "| in float32": "imagenette-100-float32", "| 200 cl": "tiny", "| ViT-S": "vit-s",
    "| ten ep": "lambda", "| Barlow Twins, ten": "barlow", "| L_equiv": "imagenette-10 layers"}
RUNS = {"block 2": "SER"} | {title: run for run, title in imagenette.TITLES.items()}


@parametrize("header", TABLES)
def test_readmes_tables_are_what_is_printed_of_runs_with_weights_of_their_own(header):
    rows = sum(map(rows_of, TABLES[header].split()), [])
    runs = {(row["weights"], row["run"]) for row in rows}
    assert len(dict(runs)) == len(runs) >= (3 if "Barlow" in header else 4)
    assert None not in dict(runs)
    printed = table_of(sweep.table(rows, "MoCo-v3"))
    for title, cells in readme_table("paper/README.md", header).items():
        line = next(line for line in printed if words_of(title) <= words_of(line))
        for run, cell in cells.items():
            wanted = numbers(printed[line][RUNS.get(run, run)])     # mean and std, and more
            assert numbers(cell) == pytest.approx(wanted[:2 if "±" in cell else 1]), (title, run)


def test_readmes_first_run_on_photographs_has_the_layout_and_values_of_our_rows(capsys):
    printed, = tables(capsys, "--seeds 0 --names control SER-0.1")
    for title, cells in readme_table("paper/README.md", "|  | control |").items():
        for run, cell in cells.items():
            assert numbers(cell) == pytest.approx(numbers(printed[title][run]), abs=0.5)


def test_readme_repeats_tables_of_the_index():
    sizes = ["| 100 epochs |", "| in float", "| 10 epochs |", "| ViT-S/16", "| 200", "| ten ep"]
    hundred, *others = [readme_table("paper/README.md", size) for size in sizes]
    lines = [hundred[f"retrieval with jitter %, {kind}, block 6"] for kind in ("rot90", "hflip")]
    lines += [hundred["linear, top-1 %"], hundred["linear, rotated images, top-1 %"]]
    for run, row in readme_table("README.md", "| % | rotated patches").items():
        assert [*row.values()] == [line[run] for line in lines], run

    text = (FOLDER / "../../README.md").read_text()
    linear = [table["linear, top-1 %"] for table in (hundred, *others)]
    for runs in (["SER, λ = 0.5", "SER"], ["SER, λ = 0.1", "lambda-0.1"]):
        gaps = [numbers(row["MoCo-v3"])[0] - numbers(row[run])[0]
                for row in linear for run in runs if run in row]
        assert f"{runs[0][5:]} is {round(min(gaps))} to {round(max(gaps))} points behind" in text

    for title, cells in readme_table("README.md", "| registered").items():
        assert cells.items() < readme_table("paper/README.md", "| registered")[title].items()
    for title, cells in readme_table("README.md", "| pasted").items():
        assert {*cells.values()} < {*readme_table("paper/README.md", "| pasted")[title].values()}


def test_the_figure_has_what_is_printed(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    printed, _ = tables(capsys, f"--figure {tmp_path}/figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 9999

    every = rows_of("imagenette-10")
    assert "accuracy, upright" in sentence(imagenette.draw, every[1:])     # one lacks a seed
    rows = [row for row in every if row["run"] != "turned-control"]
    panels = imagenette.draw(rows).axes
    titles = [[f"{kind} retrieval with jitter %, block {block}" for block in (2, 6)]
              for kind in ("rot90", "hflip", "scale")]
    titles += [["linear top-1 %, block 6"], ["turned linear top-1 %, block 6"]]
    runs = ["MoCo-v3", "control", "SER-0.1", "SER", "turned", "turned-SER"]
    for axes, of_panel in zip(panels, titles, strict=True):
        wanted = [numbers(printed[title][run])[0] for run in runs for title in of_panel]
        bars = sorted(axes.patches, key=lambda bar: -bar.get_window_extent().y0)     # from above
        assert [bar.get_width() for bar in bars] == pytest.approx(wanted, abs=0.06)
        assert [bar.get_alpha() for bar in bars] == len(runs) * [1, 0.5][:len(of_panel)]
    assert [bar.get_facecolor()[0] > 0.6 for bar in bars] == ["SER" in run for run in runs]
    assert [RUNS.get(y.get_text(), y.get_text()) for y in panels[0].get_yticklabels()] == runs
    upright = [row for row in rows if "turned" not in row["measure"]]
    shown = [axes.get_title("left").split(", ")[1] for axes in imagenette.draw(upright).axes]
    assert shown == ["rotated", "flipped", "scaled", "upright"]


def test_the_encoders_that_are_here_are_those_of_the_rows():
    args = ser.Namespace(checkpoint=None, label=None, out="", data="any")
    for encoder, label in zip(load_several(args), args.label, strict=True):
        name = RUNS.get(label, label)
        rows = rows_of("imagenette-100-float32" if name == "SER-0.1" else "imagenette-100")
        assert {row["weights"] for row in having(rows, run=name)} == {encoder.fingerprint}


def test_the_gains_that_are_claimed_are_the_differences_that_are_printed(capsys):
    over_control, over_moco = tables(capsys)
    control, moco = [table["linear top-1 %, block 6"] for table in (over_control, over_moco)]
    printed = [moco["SER"], moco["SER-0.1"], control["SER"], control["SER-0.1"],
               moco["control"], over_moco["20-NN top-1 %, block 6"]["SER"]]
    claims = readme_table("paper/README.md", "| claim | the paper, ImageNet |").values()
    assert [numbers(row["here"]) for row in claims][:6] == [numbers(cell)[2:] for cell in printed]


def test_readmes_line_sorts_the_images_of_tiny_imagenet(tmp_path):
    line, = re.findall(r"^\(cd tiny.*", (FOLDER / "../README.md").read_text(), re.M)
    val = tmp_path / "tiny-imagenet-200" / "val"
    wanted = {"n02/val_0.JPEG", "n01/val_1.JPEG", "n02/val_2.JPEG"}
    for label, name in [path.split("/") for path in wanted]:
        write_image(val / "images" / name, torch.zeros(3, 8, 8))
        with open(val / "val_annotations.txt", "a") as file:
            print(name, label, 0, 32, 44, 62, sep="\t", file=file)

    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert {str(path.relative_to(val)) for path in val.rglob("*.JPEG")} == wanted
    assert not (val / "images").exists()
