"""The runs of paper.experiments.decoupling, what of them is done when, and every number it shows.

    python -m pytest -q paper/tests/test_decoupling.py
"""
import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from statistics import mean

import pytest

import eval_linear
import ser
from paper.experiments import decoupling, runs
from paper.methods import augself, equimod, essl, stl

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
TOY = shlex.split("--image-size 16 --patch-size 4 --dim 16 --depth 2 --heads 2 --cls-layer 1 "
                  "--equiv-layers 1 --ratio 0.25 --batch-size 8 --moco-hidden 16 --epochs 2 "
                  "--warmup-epochs 0 --log-every 1 --base-lr 0.3")
STEPS = 6     # 2 epochs of 24 images in batches of 8
SCRIPTS = {"AugSelf": augself, "EquiMod": equimod, "STL": stl, "E-SSL": essl}
TITLES = ["MoCo-v3", "SER", "AugSelf, layer 2", "AugSelf, layer 1", "EquiMod, layer 2",
          "EquiMod, layer 1", "STL, layer 2", "STL, layer 1", "E-SSL, layer 2", "E-SSL, layer 1"]
FOLDERS = ["moco-v3", "ser", "augself-2", "augself-1", "equimod-2", "equimod-1", "stl-2", "stl-1",
           "e-ssl-2", "e-ssl-1"]
REAL_TRAIN = ser.train

def call(data, out, *more, seeds=("0", "1"), figure=None):
    """Exit code, stdout and messages (stderr without the bars) of the script, at a toy size."""
    printed = io.StringIO()
    said = []
    argv = ["--data", str(data), "--out", str(out), "--seeds", *seeds, *TOY, *more]
    settings = eval_linear.Settings
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "Settings", lambda **how: settings(**how | {"epochs": 2}))
        patch.setattr(runs, "CPU", dict(workers=0))
        patch.setattr(runs, "GPU", dict(workers=0))
        patch.setattr(decoupling, "empty_figure", lambda *_: figure)
        if figure is None:
            patch.setattr(decoupling, "draw", lambda *_: None)
            patch.setattr(decoupling, "write_png", lambda *_: None)
        patch.setattr(runs.tqdm, "write", lambda text, **_: said.append(text))
        code = decoupling.main(argv)
    return code, printed.getvalue(), [line for line in said if not line.startswith("images ")]

def commands(said):
    return [line for line in said if line.startswith("python ")]

def stamps(out, folders="*"):
    """When each file of the runs was written, by path."""
    return {path.relative_to(out): path.stat().st_mtime_ns for path in out.glob(f"{folders}/*")}

def read(path):
    return json.loads(path.read_text())

@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """Seed 1 from begin to end while seed 0 is at its fourth run, in one folder; then both are
    collected. The folder, the messages of seeds 0 and 1, and all that the collection said."""
    out = tmp_path_factory.mktemp("out")
    inside = []

    def interleaved(cfg, *how):
        if Path(cfg.out).name == "augself-1-0":
            inside.append(call(data, out, seeds=["1"]))
        return REAL_TRAIN(cfg, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ser, "train", interleaved)
        code, _, said = call(data, out, seeds=["0"])
    assert code == inside[0][0] == 0, (said, inside)
    before = stamps(out)
    collected = call(data, out)
    assert stamps(out) == before
    return out, {0: said, 1: inside[0][2]}, collected

# ==== The runs ====================================================================================
def configs(argv):
    _, base = decoupling.parse(argv)
    return base, decoupling.runs(base, Path("out"), [0, 3])

@pytest.mark.parametrize("argv, last, layer", [
    ([], 6, 2), (["--depth", "12", "--equiv-layers", "3", "--cls-layer", "3"], 12, 3)])
def test_an_add_on_is_at_the_last_layer_and_at_sers_and_its_cls_is_there_before(argv, last, layer):
    base, found = configs(argv)
    places = {"1": f"{layer}", "2": f"{last}"}
    assert list(found) == [title[:-1] + places.get(title[-1], title[-1]) for title in TITLES]
    assert found["MoCo-v3"][0].ratio == 0 and found["MoCo-v3"][0].cls_layer == 0
    assert found["SER"][0] == dataclasses.replace(base, out="out/ser-0", seed=0)
    assert found["SER"][0].cls_layer == layer and found["SER"][0].equiv_layers == (layer,)
    for method, module in SCRIPTS.items():
        for at in (last, layer):
            cfg = found[f"{method}, layer {at}"][0]
            assert isinstance(cfg, module.Settings)
            assert (cfg.layer, cfg.cls_layer, cfg.ratio, cfg.base) == (at, 0, 0, "moco")
            assert cfg.weight == module.Settings().weight

def test_all_runs_have_one_budget_and_folders_of_their_own():
    base, found = configs(["--epochs", "3", "--batch-size", "64", "--weight", "7"])
    methods = ("out", "seed", "ratio", "weight", "cls_layer", "equiv_layers", "group",
               "temperature")
    alike = [name for name in vars(base) if name not in methods]
    for cfgs in found.values():
        assert [cfg.seed for cfg in cfgs] == [0, 3]
        for cfg in cfgs:
            assert [getattr(cfg, name) for name in alike] == [getattr(base, n) for n in alike]
    assert {title for title, cfgs in found.items() if cfgs[0].weight == 7} == {"SER", "MoCo-v3"}
    every = [cfg.out for cfgs in found.values() for cfg in cfgs]
    assert len(set(every)) == len(every) == 20
    assert [cfgs[0].out for cfgs in configs(TOY)[1].values()] == [f"out/{f}-0" for f in FOLDERS]

@pytest.mark.parametrize("argv", [[], ["--depth", "12"], ["--depth", "4"]])
def test_every_printed_command_gives_its_run_and_the_settings_are_valid(argv):
    for title, cfgs in configs(argv)[1].items():
        words = runs.flags(cfgs[1])
        assert ser.parse(words, type(cfgs[1])) == cfgs[1], words
        assert not runs.finished(cfgs[1], 10, "", decoupling.builder(title))

@pytest.mark.parametrize("size, patch, crop", [(112, 8, 48), (224, 16, 96), (64, 16, 32)])
def test_e_ssls_small_crop_keeps_its_share_of_a_view(size, patch, crop):
    base = ser.Config(data="x", image_size=size, patch_size=patch)
    assert decoupling.add_on(essl, base, 12).local_size == crop
    assert configs([])[1]["E-SSL, layer 6"][0].local_size == 16     # as its script, drawn images

# ==== What is done when ===========================================================================
def test_seeds_side_by_side_train_every_run_once_by_its_own_program(done):
    for seed, said in done[1].items():
        trained = [shlex.split(line)[1:] for line in commands(said)]
        outs = [Path(words[words.index("--out") + 1]).name for words in trained]
        assert outs == [f"{folder}-{seed}" for folder in FOLDERS]
        programs = [" ".join(words[:2]) for words in trained[2:]]
        assert programs == [f"-m paper.methods.{name}" for name in
                            ("augself", "augself", "equimod", "equimod", "stl", "stl", "essl",
                             "essl")]
        assert [words[0] for words in trained[:2]] == ["ser.py", "ser.py"]
    for folder in FOLDERS:
        for seed in (0, 1):
            state = ser.load_checkpoint(done[0] / f"{folder}-{seed}" / "last.pt")
            assert state["step"] == STEPS and state["config"]["seed"] == seed
    assert {path.name for path in done[0].glob("*.json")} == {
        "decoupling-0.json", "decoupling-1.json", "decoupling-0-1.json"}

def test_a_call_with_both_seeds_only_collects(done):
    code, printed, said = done[2]
    assert (code, said) == (0, [])
    assert printed == read(done[0] / "decoupling-0-1.json")["text"] + "\n"
    assert "±" in printed and "Seeds 0 1; 24 images, 6 steps of 8" in printed

def test_all_runs_of_a_seed_come_before_the_next():
    order = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "finished", lambda cfg, *_: cfg.out == "out/stl-1-0")
        patch.setattr(runs, "train", lambda cfg, build: order.append((cfg.out, build)))
        base, found = configs(TOY)
        measured = runs.complete(found, 6, "", lambda cfg: cfg.out, decoupling.builder)
    expected = [f"out/{folder}-{seed}" for seed in (0, 3) for folder in FOLDERS]
    assert measured == {title: [f"out/{folder}-0", f"out/{folder}-3"]
                        for title, folder in zip(TITLES, FOLDERS)}
    expected.remove("out/stl-1-0")
    assert [out for out, _ in order] == expected
    assert order[1][1] is ser.build and order[2][1] is augself.build

def test_a_stopped_run_goes_on_and_none_before_it_is_repeated(data, tmp_path, monkeypatch):
    monkeypatch.setattr(decoupling, "METHODS", {"AugSelf": augself})
    names = ["moco-v3", "ser", "augself-2", "augself-1"]

    def stopped(cfg, *how):
        if Path(cfg.out).name == "augself-1-0":
            os.kill(os.getpid(), signal.SIGTERM)
        return REAL_TRAIN(cfg, *how)

    with monkeypatch.context() as patch:
        patch.setattr(ser, "train", stopped)
        code, printed, said = call(data, tmp_path, seeds=["0"])
    assert (code, printed) == (143, "") and len(commands(said)) == 4
    assert [line for line in said if line.startswith("stopped;")] == said[-1:]
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}-0" for name in names}
    before = stamps(tmp_path, "[ms]*") | stamps(tmp_path, "augself-2*")
    code, printed, said = call(data, tmp_path, seeds=["0"])
    assert code == 0 and "±" not in printed and printed.count("\n| AugSelf") == 2 + 1 + 4
    assert len(commands(said)) == 1 and "/augself-1-0 " in commands(said)[0]
    after = stamps(tmp_path)
    assert {path: after[path] for path in before} == before
    state = ser.load_checkpoint(tmp_path / "augself-1-0" / "last.pt")
    assert state["step"] == STEPS

def test_a_stop_while_it_measures_is_one_line_too(data, done, tmp_path, monkeypatch):
    out = shutil.copytree(done[0], tmp_path / "out")
    (out / "stl-2-1" / "linear-trained.json").unlink()
    monkeypatch.setattr(eval_linear, "evaluate", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    ours = []
    before = signal.signal(signal.SIGTERM, lambda *_: ours.append(1))
    try:
        code, printed, said = call(data, out, seeds=["1"])
        os.kill(os.getpid(), signal.SIGTERM)     # afterwards it is the caller's again
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, printed, len(said)) == (143, "", 2) and said[-1].startswith("stopped;")
    assert ours == [1]

# ==== Numbers =====================================================================================
def slow_values(out, folder, which="trained"):
    """The columns of a row, from the files: for each seed."""
    found = {name: [] for name in ("linear, %", "20-NN, %", "rot90", "hflip", "scale")}
    for seed in (0, 1):
        one = read(out / f"{folder}-{seed}" / f"linear-{which}.json")
        found["linear, %"].append(one["linear"]["best"]["val"]["top1"])
        found["20-NN, %"].append(one["knn"]["val"]["top1"])
        for row in one["equivariance"]["rows"]:
            if row["block"] == 1:
                found[row["element"]].append(row[which]["retrieval"])
    return found

def log(out, folder, seed):
    """The head of a run's log, and its records."""
    lines = (out / f"{folder}-{seed}" / "log.jsonl").read_text().splitlines()
    head, *records = map(json.loads, lines)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return head, records

def cells(printed):
    """The printed tables, one after the other: title -> column -> text."""
    tables = []
    for block in printed.split("\n\n")[:3]:
        lines = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        tables.append({line[0]: dict(zip(lines[0], line)) for line in lines[2:]})
    return tables

def slow_seconds(records):
    """Of a run: the rate of a record is that of the steps since the one before."""
    total = 0.0
    before = 0
    for record in records:
        total += 8 * (record["step"] - before) / record["images_per_s"]
        before = record["step"]
    return total

def test_every_number_of_the_main_table_is_that_of_the_files(done):
    rows = read(done[0] / "decoupling-0-1.json")["runs"]
    shown = cells(done[2][1])[0]
    assert list(rows) == list(shown) == ["untrained", *TITLES]
    columns = ["linear, %", "linear, % - MoCo-v3", "20-NN, %", "20-NN, % - MoCo-v3", "rot90",
               "hflip", "scale", "s/step", "parameters, M"]
    assert all(list(row)[1:] == columns for row in shown.values())
    plain = slow_values(done[0], "moco-v3")
    for title, folder in [("untrained", "moco-v3"), *zip(TITLES, FOLDERS)]:
        values = slow_values(done[0], folder, "untrained" if title == "untrained" else "trained")
        for name in ("linear", "20-NN"):
            pairs = zip(values[f"{name}, %"], plain[f"{name}, %"])
            if title != "MoCo-v3":
                values[f"{name}, % - MoCo-v3"] = [own - other for own, other in pairs]
        if title != "untrained":
            logs = [log(done[0], folder, seed) for seed in (0, 1)]
            values["s/step"] = [slow_seconds(records) / STEPS for _, records in logs]
            values["parameters, M"] = [logs[0][0]["trainable"] / 1e6]
        for column in columns:
            if column not in values:
                assert rows[title][column] is None and shown[title][column] == "-"
                continue
            assert rows[title][column]["values"] == pytest.approx(values[column])
            digits = 0.006 if "%" in column else 0.0006
            text = shown[title][column].split(" ± ")
            assert float(text[0]) == pytest.approx(mean(values[column]), abs=digits)
            assert len(text) == len(values[column])

def test_every_task_is_shown_with_its_own_chance(done):
    tasks = read(done[0] / "decoupling-0-1.json")["tasks"]
    keys = {"MoCo-v3": ["inv"], "SER": ["equiv"], "AugSelf": ["crop", "color"],
            "EquiMod": ["eqgain", "equiv_top1"], "STL": ["action_top1", "reading_top1"],
            "E-SSL": ["turns_top1"]}
    places = iter(tasks.items())
    for title, folder in zip(TITLES, FOLDERS):
        for key in keys[title.split(",")[0]]:
            name, row = next(places)
            assert name.startswith(f"{title}: ")
            for seed in (0, 1):
                late = log(done[0], folder, seed)[1][-2:]     # steps 5 and 6: beyond 3/4 of 6
                value = mean(record[key] for record in late)
                chance = mean(record[f"{key}_chance"] for record in late)
                if "of chance" in name:
                    value = 100 * value / chance
                    chance = 100
                assert row["reached"]["values"][seed] == pytest.approx(value)
                assert row["chance"]["mean"] == pytest.approx(chance)
    assert next(places, None) is None
    assert tasks["E-SSL, layer 1: turn top-1"]["chance"]["mean"] == 0.25
    assert tasks["EquiMod, layer 2: eqgain"]["chance"]["mean"] == 0

def test_what_the_layer_changed_is_sers_layer_minus_the_last(done):
    rows = read(done[0] / "decoupling-0-1.json")["decoupled"]
    assert list(rows) == [f"{method}, layer 1 - layer 2" for method in SCRIPTS]
    for place, row in enumerate(rows.values()):
        last = slow_values(done[0], FOLDERS[2 + 2 * place])
        early = slow_values(done[0], FOLDERS[3 + 2 * place])
        assert early != last
        for name, found in row.items():
            pairs = zip(early[name], last[name])
            assert found["values"] == pytest.approx([a - b for a, b in pairs])

def test_columns_and_signs_of_numbers_that_all_differ(monkeypatch):
    """What a toy measures might be alike."""
    monkeypatch.setattr(decoupling, "step_seconds", lambda cfg: cfg + 0.5)
    monkeypatch.setattr(decoupling, "parameters", lambda title, cfg: 1e6 * len(title))
    names = ("linear, %", "20-NN, %", "rot90", "hflip", "scale")
    found = {}
    for row, title in enumerate(["untrained", *TITLES]):
        found[title] = [{name: 10 * row + column + seed * row ** 2 / 100
                         for column, name in enumerate(names)} for seed in (0, 1)]
    table = decoupling.summary(found, {title: [7, 9] for title in TITLES})
    linear = table["SER"]["linear, % - MoCo-v3"]
    assert linear["values"] == pytest.approx([10, 10.03])
    assert linear["std"] == pytest.approx(0.03 / 2 ** 0.5)     # n - 1, of the differences
    assert table["untrained"]["20-NN, % - MoCo-v3"]["values"] == pytest.approx([-10, -10.01])
    assert table["SER"]["scale"]["values"] == pytest.approx([24, 24.04])
    assert table["SER"]["s/step"]["values"] == [7.5, 9.5]
    assert table["SER"]["parameters, M"]["mean"] == 3
    changed = decoupling.decoupled(found, layer=1, last=2)
    row = changed["AugSelf, layer 1 - layer 2"]
    assert row["20-NN, %"]["values"] == pytest.approx([10, 10.07])

def test_the_figure_joins_the_two_layers_of_each_seed(data, done):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(12, 6))
    code, printed, _ = call(data, done[0], figure=figure)
    assert (code, printed) == (0, done[2][1])
    assert (done[0] / "decoupling-0-1.png").read_bytes().startswith(b"\x89PNG")
    rows = read(done[0] / "decoupling-0-1.json")["runs"]
    columns = ["linear, %", "20-NN, %", "s/step", "rot90", "hflip", "scale"]
    for axes, column in zip(figure.axes, columns):
        assert axes.get_title().startswith(column)
        joined = [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "-"]
        expected = []
        for titles in (TITLES[:1], TITLES[1:2], *(TITLES[i:i + 2] for i in (2, 4, 6, 8))):
            for seed in (0, 1):
                expected.append([rows[title][column]["values"][seed] for title in titles])
        assert joined == expected
        hollow = [line.get_ydata()[0] for line in axes.lines if line.get_fillstyle() == "none"]
        assert hollow == [rows[title][column]["mean"] for title in TITLES if "layer 2" in title]

# ==== Mistakes ====================================================================================
@pytest.mark.parametrize("argv, words", [
    (["--seeds", "0", "0"], "twice"),
    (["--seed=3"], "--seed"),
    (["--seeds", "-1"], "-1"),
    (["--ratio", "0"], "--ratio 0"),
    (["--equiv-layers", "6"], "--equiv-layers 6"),
    (["--batch-size", "8192"], "4096 images"),
    (["--batch-size", "7", "--ratio", ".5"], "STL needs pairs"),
    (["--data", "/no/such"], "/no/such"), (["--data="], "--data"),
    (["--colour", "red"], "--colour")])
def test_a_mistake_is_one_line_and_exit_code_2_before_any_training(argv, words, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert decoupling.main([*argv, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "out").exists()

def test_a_lost_log_is_one_line(data, done, tmp_path):
    out = shutil.copytree(done[0], tmp_path / "out")
    path = out / "e-ssl-1-1" / "log.jsonl"
    path.write_text(path.read_text().replace("turns_top1", "x"))
    code, printed, said = call(data, out, seeds=["1"])
    assert (code, printed, len(said)) == (2, "", 1) and "has no turns_top1: remove" in said[0]

def test_other_settings_are_refused_before_any_training(data, done, tmp_path):
    shutil.copytree(done[0] / "e-ssl-1-0", tmp_path / "e-ssl-1-0")
    code, _, said = call(data, tmp_path, "--crop-min", "0.5", seeds=["0"])
    assert (code, len(said)) == (2, 1) and "is of another run (crop_min" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["e-ssl-1-0"]
