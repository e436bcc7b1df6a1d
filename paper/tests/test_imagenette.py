"""paper.experiments.imagenette on drawn images in class folders: what differs, what is skipped, and
the arithmetic.

    python -m pytest -q paper/tests/test_imagenette.py
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
from torch.utils.data import default_collate
from torchvision.transforms.functional import to_pil_image

import eval_linear
import ser
from paper.evaluations import corruptions
from paper.experiments import curves, imagenette, measures, runs
from paper.experiments.runs import ELEMENTS

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
TOY = shlex.split("--image-size 16 --patch-size 4 --dim 16 --depth 2 --heads 2 --cls-layer 1 "
                  "--ratio 0.5 --equiv-layers 1 --batch-size 8 --moco-hidden 16 --epochs 2 "
                  "--warmup-epochs 0 --log-every 2")
STEPS = 6     # 2 epochs of 24 images in batches of 8
RUNS = ["moco-0", "control-0", "ser-0", "moco-1", "control-1", "ser-1"]
REAL_FIGURE = imagenette.empty_figure
REAL_DRAW = imagenette.draw
REAL_PNG = imagenette.write_png
REAL_BF16 = runs.multiplies_bf16

def call(data, out, *more, seeds=("0", "1"), without=("corruptions",)):
    """Exit code, stdout and messages (stderr without the bars) of the script, at a toy size."""
    printed = io.StringIO()
    said = []
    argv = ["--data", str(data), "--out", str(out), "--seeds", *seeds, *TOY, *more]
    argv += ["--without", *without] if without else []
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.tqdm, "write", lambda text, **_: said.append(text))
        code = imagenette.main(argv)
    # Of a toy's heads any rate may be the best.
    return code, printed.getvalue(), [line for line in said if not line.startswith("images ")
                                      and "the best rate" not in line]

def checkpoint(out, run):
    return ser.load_checkpoint(out / run / "last.pt")

def same_weights(a, b):
    return all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"] | b["model"])

def stamps(out, runs="*-*"):
    """When each file of the runs was written, by path."""
    return {path.relative_to(out): path.stat().st_mtime_ns for path in out.glob(f"{runs}/*")}

def read(path):
    return json.loads(path.read_text())

@pytest.fixture(autouse=True, scope="module")
def small_and_without_figure():
    """The figure has a test of its own; heads learn for 2 epochs in place of 50, and MLPs are 16
    wide in place of 1024."""
    settings = runs.Settings
    predicts = measures.transformations.Settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imagenette, "empty_figure", lambda *_: None)
        patch.setattr(imagenette, "draw", lambda *_: None)
        patch.setattr(imagenette, "write_png", lambda *_: None)
        patch.setattr(runs, "Settings", lambda **how: settings(**how | {"epochs": 2}))
        patch.setattr(runs, "multiplies_bf16", lambda: False)     # the same on every CPU
        patch.setattr(measures.transformations, "Settings",
                      lambda **how: predicts(**how, hidden=16))
        patch.setattr(eval_linear.MLPHeads, "hidden", (16, 16))
        yield

@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """The folder of a finished comparison, and its stdout and messages."""
    out = tmp_path_factory.mktemp("out")
    code, printed, said = call(data, out)
    assert code == 0, said
    return out, printed, said

# ==== Training ====================================================================================
def test_arms_differ_in_nothing_but_what_defines_them_and_seeds_in_the_seed(done):
    configs = {run: checkpoint(done[0], run)["config"] for run in RUNS}

    def differences(a, b):
        return {name: (value, configs[b][name]) for name, value in configs[a].items()
                if name != "out" and value != configs[b][name]}

    for seed in (0, 1):
        moco = differences(f"ser-{seed}", f"moco-{seed}")
        assert moco == {"ratio": (0.5, 0.0), "cls_layer": (1, 0)}
        assert differences(f"ser-{seed}", f"control-{seed}") == {"weight": (0.5, 0.0)}
    assert differences("ser-0", "ser-1") == {"seed": (0, 1)}
    assert all(checkpoint(done[0], run)["step"] == STEPS for run in RUNS)

@pytest.mark.parametrize("native", [False, True])
def test_a_cpu_that_has_bf16_products_is_told_to_use_them_on_images(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runs, "multiplies_bf16", lambda: native)
    assert runs.base_settings("somewhere", []).bf16 == native
    assert runs.base_settings("somewhere", ["--bf16"]).bf16
    assert not runs.base_settings(None, []).bf16

@pytest.mark.parametrize("flags, wanted", [("avx2 avx512_bf16", True), ("avx2 avx512f", False)])
def test_what_a_cpu_can_do_is_read_from_the_system(flags, wanted, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(runs, "Path", lambda _: path)
    assert not REAL_BF16()     # no such file: not Linux
    path.write_text(f"flags: {flags}")
    assert REAL_BF16() == wanted

def test_every_seed_is_done_before_the_next_by_commands_that_ser_py_takes(done):
    commands = [line for line in done[2] if line.startswith("python ser.py ")]
    configs = [ser.parse(shlex.split(line)[2:]) for line in commands]
    assert [os.path.basename(cfg.out) for cfg in configs] == RUNS
    assert [vars(cfg) for cfg in configs] == [checkpoint(done[0], run)["config"] for run in RUNS]

def test_a_second_call_trains_and_measures_nothing_and_prints_the_same(data, done):
    before = stamps(done[0])
    assert call(data, done[0]) == (0, done[1], [])
    assert stamps(done[0]) == before

def test_a_stopped_arm_continues_to_the_same_weights(data, done, tmp_path, monkeypatch):
    real = ser.train

    def stopped(cfg, build, stop):
        if cfg.out.endswith("control-0"):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(cfg, build, stop)

    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    with monkeypatch.context() as patch:
        patch.setattr(ser, "train", stopped)
        code, printed, said = call(data, tmp_path, seeds=["0"])
    assert (code, printed) == (143, "") and "stopped; the same command continues" in said[-1]
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert checkpoint(tmp_path, "control-0")["step"] == 1 and not (tmp_path / "ser-0").exists()
    moco = stamps(tmp_path, "moco-0")
    code, printed, _ = call(data, tmp_path, seeds=["0"])
    assert code == 0 and "±" not in printed and printed.count("\n") > 10
    for run in RUNS[:3]:
        assert same_weights(checkpoint(tmp_path, run), checkpoint(done[0], run))
    assert stamps(tmp_path, "moco-0") == moco

def test_a_stop_while_it_measures_is_one_line_and_loses_no_training(
        data, done, tmp_path, monkeypatch):
    out = shutil.copytree(done[0], tmp_path / "out")
    (out / "ser-1" / "linear-trained.json").unlink()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_linear, "evaluate", interrupted)
    code, printed, said = call(data, out, seeds=["1"])
    assert (code, printed, len(said)) == (130, "", 2) and "stopped" in said[-1]

def test_another_setting_is_refused_before_any_training(data, done, tmp_path):
    shutil.copytree(done[0] / "ser-0", tmp_path / "ser-0")     # the last arm of the seed
    code, printed, said = call(data, tmp_path, "--base-lr", "0.5")
    assert (code, printed, len(said)) == (2, "", 1) and "is of another run (base_lr" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ser-0"]

def test_a_run_on_other_images_or_of_another_program_is_refused(data, done, tmp_path):
    shutil.copytree(done[0] / "ser-0", tmp_path / "ser-0")
    state = checkpoint(tmp_path, "ser-0")
    for other in ({"images": "25, abc"}, {"program": "-m paper.methods.stl"}):
        ser.save_whole(tmp_path / "ser-0" / "last.pt", state | other)
        code, _, said = call(data, tmp_path)
        assert (code, len(said)) == (2, 1) and f"another run ({next(iter(other))}" in said[0]

def test_a_run_in_another_precision_is_refused_though_it_could_go_on(data, done, tmp_path):
    """An arm in float32 beside one in bfloat16 would be another comparison."""
    shutil.copytree(done[0] / "ser-0", tmp_path / "ser-0")
    code, _, said = call(data, tmp_path, "--bf16")
    assert (code, len(said)) == (2, 1) and "(bf16 False there, True here)" in said[0]

# ==== Measurements ================================================================================
@pytest.mark.parametrize("best, told", [(0.1, True), (0.3, False), (1.0, True)])
def test_a_best_rate_at_an_end_of_the_sweep_is_told(best, told, monkeypatch, capsys):
    result = {"linear": {"best": {"rate": best}, "rates": [{"rate": r} for r in (0.1, 1.0, 0.3)]}}
    monkeypatch.setattr(eval_linear, "evaluate", lambda how: result)
    assert runs.fitted(eval_linear.Settings(out="a/linear.json")) == result
    assert ("a/linear.json: the best rate" in capsys.readouterr().err) == told

def test_a_changed_checkpoint_or_setting_or_an_odd_file_is_measured_again(tmp_path):
    file = tmp_path / "found.json"
    calls = []

    def measured(number, *setting):
        def measure():
            calls.append(number)
            return {"number": number}
        return runs.once(file, {"n": setting}, measure)["number"]

    (tmp_path / "last.pt").write_bytes(b"one")
    assert [measured(1, 5, 6), measured(2, 5, 6)] == [1, 1]
    (tmp_path / "last.pt").write_bytes(b"two")
    assert [measured(3, 5, 6), measured(4, 5, 7), measured(5, 5, 7)] == [3, 4, 4]
    for number, text in ((6, "[1]"), (7, '{"number": 1}'), (8, '{"numb'), (9, "null")):
        file.write_text(text)
        assert measured(number, 5, 7) == number
    assert calls == [1, 3, 4, 6, 7, 8, 9]

def slow_mean_std(values):
    """From the formula, with n - 1."""
    total = 0.0
    for value in values:
        total += value / len(values)
    return total, math.sqrt(sum((value - total) ** 2 for value in values) / (len(values) - 1))

def slow_values(out, name, column):
    """The value of each seed, from the files of the measurements."""
    run = column
    which = "trained"
    if column == "untrained":
        run = "ser"
        which = "untrained"
    found = []
    for seed in (0, 1):
        linear = read(out / f"{run}-{seed}" / f"linear-{which}.json")
        mlp = read(out / f"{run}-{seed}" / f"mlp-{which}.json")
        assert linear["settings"]["select_split"] == mlp["settings"]["select_split"] == 0.1
        assert mlp["settings"]["mlp"] and linear["settings"]["cache"] and mlp["settings"]["cache"]
        if name.startswith("linear"):
            found.append(linear["linear"]["best"]["val"]["top1"])
        elif name.startswith("MLP"):
            found.append(mlp["linear"]["best"]["val"]["top1"])
        elif name.startswith("20-NN"):
            found.append(linear["knn"]["val"]["top1"])
        elif "told" in name:
            told = read(out / f"{run}-{seed}" / "transformations.json")
            assert told["settings"]["layers"] == [1, 2]
            found.append(told[which][name.split()[0]]["block 2" in name])
        else:
            element, measure, _, block = name.replace(":", "").replace(",", "").split()
            for row in linear["equivariance"]["rows"]:
                if (row["element"], row["block"]) == (element, int(block)):
                    found.append(row[which][measure])
    return found

def test_the_table_has_mean_and_std_of_the_seeds_and_of_the_paired_differences(done):
    out = done[0]
    lines = [line for line in done[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = ["", "untrained", "moco", "control", "ser", "ser - control", "ser - moco"]
    assert cells[0] == header
    assert all(set(cell) == {"-"} for cell in cells[1])
    names = ["linear, top-1 %", "20-NN, top-1 %", "MLP, top-1 %"]
    for task in ("rotation", "flip"):
        names += [f"{task} told from a pair, block {block}, %" for block in (1, 2)]
    for element in ELEMENTS:
        names += [f"{element}: retrieval, block 1", f"{element}: retrieval, block 2",
                  f"{element}: score, block 2"]
    assert [row[0] for row in cells[2:]] == names
    written = read(out / "imagenette-0-1.json")["rows"]
    for name, *row in cells[2:]:
        values = {column: slow_values(out, name, column) for column in header[1:5]}
        for other in ("control", "moco"):
            pairs = zip(values["ser"], values[other])
            values[f"ser - {other}"] = [a - b for a, b in pairs]
        for column, cell in zip(header[1:], row):
            mean, std = slow_mean_std(values[column])
            half = 0.006 if "%" in name else 0.0006     # of the last digit, and a little
            shown = [float(part) for part in cell.split(" ± ")]
            assert shown == pytest.approx([mean, std], abs=half)
            assert written[name][column]["mean"] == pytest.approx(mean, abs=1e-9)
            assert written[name][column]["std"] == pytest.approx(std, abs=1e-9)

def test_a_table_takes_every_number_from_its_own_place():
    """Numbers that all differ: what a run of a toy measures might be alike."""
    found = {column: [{"a": 100.0 * i, "b %": 10.0 * i}, {"a": 100.0 * i + 2, "b %": 10.0 * i + 4}]
             for i, column in enumerate(("untrained", "moco", "control", "ser"), 1)}
    found["ser"][1]["a"] = 409.0
    rows = imagenette.compare(found)
    assert rows["a"]["ser"] == {"values": [400.0, 409.0], "mean": 404.5,
                                "std": pytest.approx(math.sqrt(40.5))}
    assert rows["a"]["ser - control"]["values"] == [100.0, 107.0]
    assert rows["a"]["ser - moco"]["values"] == [200.0, 207.0]
    lines = runs.markdown(rows).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "b %", "12.00 ± 2.83", "22.00 ± 2.83", "32.00 ± 2.83", "42.00 ± 2.83", "10.00 ± 0.00",
        "20.00 ± 0.00"]
    assert len(set(map(len, lines))) == 1

def encoder_weights(state):
    return {name: weight for name, weight in state["model"].items()
            if name.startswith("base.encoder.")}

def test_the_encoder_is_kept_after_every_epoch_but_the_last(data, tmp_path, monkeypatch):
    saved = {}
    real = ser.save_whole

    def recorded(path, state):
        if path.name == "last.pt":
            saved[state["step"]] = {n: w.clone() for n, w in encoder_weights(state).items()}
        real(path, state)

    monkeypatch.setattr(ser, "save_whole", recorded)
    cfg = ser.parse(["--data", str(data), "--out", str(tmp_path), "--workers", "0", *TOY])
    ser.train(measures.Kept(**vars(cfg) | {"epochs": 3.0}))
    assert sorted(path.name for path in tmp_path.glob("epoch-*")) == ["epoch-1.pt", "epoch-2.pt"]
    for epoch in (1, 2):
        kept = ser.load_checkpoint(tmp_path / f"epoch-{epoch}.pt")
        assert kept["step"] == 3 * epoch and "optimizer" not in kept
        assert kept["model"].keys() == saved[3 * epoch].keys()
        assert all(torch.equal(kept["model"][name], saved[3 * epoch][name]) for name in saved[3])
    name = "base.encoder.norm.weight"
    assert not torch.equal(saved[3][name], saved[6][name])
    assert list(measures.Kept(epochs=100.0).kept) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    # A run that is begun anew leaves no encoder of the old one.
    (tmp_path / "last.pt").unlink()
    ser.train(measures.Kept(**vars(cfg) | {"epochs": 1.0}))
    assert not list(tmp_path.glob("epoch-*"))

def test_a_missing_encoder_is_named_and_the_curve_can_be_left_out(data, done, tmp_path):
    out = shutil.copytree(done[0], tmp_path / "out")
    (out / "control-1" / "epoch-1.pt").unlink()
    (out / "control-1" / "curve.json").unlink()
    code, _, said = call(data, out, seeds=["1"])
    assert code == 2 and "control-1/epoch-1.pt is missing" in said[-1]
    assert "--without curve" in said[-1]
    assert call(data, out, seeds=["1"], without=("corruptions", "curve"))[0] == 0

def test_the_curve_of_20_nn_is_that_of_the_encoders_from_the_untrained_to_the_last(
        data, done, tmp_path):
    for run in ("moco-0", "ser-1"):
        folder = done[0] / run
        curve = read(folder / "curve.json")["curve"]
        assert list(curve) == ["0", "1", "2"]
        for epoch, name, column in (("0", "last.pt", True), ("1", "epoch-1.pt", False),
                                    ("2", "last.pt", False)):
            how = eval_linear.Settings(
                data=str(data), checkpoint=str(folder / name), test=(), knn=True, workers=0,
                random_init=column, out=str(tmp_path / f"{run}-{epoch}.json"))
            # Fewer images than the curve takes, so that it has taken all of them.
            assert curve[epoch] == eval_linear.evaluate(how)["knn"]["val"]["top1"]

def test_corruptions_are_scored_by_severity_with_the_head_of_the_linear_probe(
        data, done, tmp_path):
    """Sets of uncorrupted images score what val does; in severity 5 the classes are exchanged."""
    for path in (data / "val").glob("*/*.png"):     # the crops, as C's images are crops
        crop = eval_linear.centre_crop(ser.read_image(str(path)), 16)
        target = tmp_path / "crops" / path.relative_to(data / "val")
        target.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(crop).save(target)
    for name in corruptions.CORRUPTIONS:
        for severity in range(1, 6):
            folder = shutil.copytree(tmp_path / "crops", tmp_path / "c" / name / str(severity))
            if severity == 5:
                first, second = sorted(folder.iterdir())
                first.rename(folder / "between")
                second.rename(first)
                (folder / "between").rename(second)
    run = shutil.copytree(done[0] / "ser-0", tmp_path / "ser-0")
    cfg = ser.Config(out=str(run), data=str(data), workers=0)
    for random_init, column in ((False, "trained"), (True, "untrained")):
        best = read(run / f"linear-{column}.json")["linear"]["best"]["val"]["top1"]
        found = measures.corrupted(cfg, tmp_path / "c", random_init)
        by_severity = [found[f"corrupted, severity {severity}, %"] for severity in range(1, 6)]
        assert by_severity == pytest.approx([best] * 4 + [100 - best])
        assert found["corrupted, mean, %"] == pytest.approx((4 * best + 100 - best) / 5)
    # A head that was fitted anew is scored anew: this one says every image's other class.
    path = run / "linear-trained-head.pt"
    head = torch.load(path)
    torch.save(head | {name: -head[name] for name in ("weight", "bias")}, path)
    found = measures.corrupted(cfg, tmp_path / "c")
    best = read(run / "linear-trained.json")["linear"]["best"]["val"]["top1"]
    assert found["corrupted, severity 1, %"] == pytest.approx(100 - best)

def test_corruptions_are_made_once_and_shown_as_their_mean(data, done, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(corruptions, "make", lambda *how: made.append(how))
    monkeypatch.setattr(imagenette.importlib.util, "find_spec", lambda name: name)
    strengths = {f"corrupted, severity {n}, %": 10.0 * n for n in range(1, 6)}
    monkeypatch.setattr(measures, "corrupted",
                        lambda *_: {"corrupted, mean, %": 30.0, **strengths})
    out = shutil.copytree(done[0], tmp_path / "out")
    code, printed, _ = call(data, out, "--workers", "0", without=())
    assert code == 0 and made == [(str(out / "corrupted" / data.name), str(data), 10, 0, 0)]
    assert "| corrupted, mean, %" in printed and "severity" not in printed
    assert "corrupted, severity 5, %" in read(out / "imagenette-0-1.json")["rows"]

@pytest.mark.parametrize("without, absent", [
    ("mlp", "MLP"), ("moved", "told"), ("corruptions", "corrupted")])
def test_what_is_left_out_is_not_measured(data, done, monkeypatch, without, absent):
    monkeypatch.setattr(measures, "corrupted", lambda *_: {"corrupted, mean, %": 30.0})
    cfg = ser.Config(**checkpoint(done[0], "ser-0")["config"])
    found = imagenette.measure(cfg, [without], lambda: None)
    every = imagenette.measure(cfg, [], lambda: None)
    assert set(every) - set(found) == {name for name in every if absent in name} != set()

def test_gradient_norms_are_those_of_the_two_terms_of_the_loss(data, done, monkeypatch):
    monkeypatch.setattr(measures, "BATCHES", 1)
    cfg = ser.Config(**checkpoint(done[0], "ser-1")["config"])
    path = done[0] / "ser-1" / "last.pt"
    paths = ser.list_images(str(data))
    for start in (None, path):
        model = ser.build(cfg)
        if start:
            model.load_state_dict(ser.load_checkpoint(path)["model"])
        keys = next(iter(ser.batch_keys(len(paths), cfg, 0, 1)))
        source = cfg.dataset(paths)
        loaded, _ = default_collate([source[key] for key in keys])
        batch = ser.make_views(loaded, cfg, 0)
        total = {}
        for weight in (0.0, 0.5):
            model.weight = weight
            model.zero_grad()
            model(batch)["loss"].backward()
            block = model.base.encoder.blocks[0]
            total[weight] = torch.cat([p.grad.flatten() for p in block.parameters()])
        inv = total[0.0]
        equiv = total[0.5] - inv
        cosine = (inv @ equiv / inv.norm() / equiv.norm()).item()
        found = measures.gradients(cfg, paths, start)
        expected = {"inv": inv.norm().item(), "equiv": equiv.norm().item(), "cosine": cosine}
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert found["inv"] > 0 and found["equiv"] > 0

def test_minutes_are_those_of_the_rates_between_records(tmp_path):
    lines = [{"config": {}}, {"step": 1, "images_per_s": 4.0}, {"step": 3, "images_per_s": 4.0},
             {"step": 4, "images_per_s": 2.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = ser.Config(out=str(tmp_path), batch_size=8)
    assert runs.minutes(cfg) == pytest.approx((8 / 4 + 2 * 8 / 4 + 8 / 2) / 60)

# ==== Mistakes ====================================================================================
@pytest.mark.parametrize("more, words", [
    (["--weight", "0"], "--weight 0"), (["--seed=3"], "--seed"), (["--seeds", "0", "0"], "twice"),
    (["--seeds", "-1"], "--seed -1"), (["--data", ""], "--data"),
    (["--data", "nowhere"], "nowhere"), (["--data", "{data}/train"], "no such folder"),
    (["--colour", "red"], "--colour"), (["--figure", "nowhere/a"], "nowhere"),
    (["--group", "spin"], "spin"), (["--save-every", "5"], "--save-every"),
    (["--without", "sleep"], "sleep"),
    (["--init", "a.pt"], "--init a.pt"), (["--crop-min", ""], "empty")])
def test_a_mistake_is_one_line_and_exit_code_2_before_any_training(data, tmp_path, more, words):
    check_mistake(data, tmp_path, more, words)

@pytest.mark.parametrize("flag, value", [
    ("--ratio", "0"), ("--heads", "3"), ("--epochs", "nan"), ("--batch-size", "64"),
    ("--equiv-layers", "3")])
def test_a_wrong_setting_is_one_line_and_exit_code_2_too(data, tmp_path, flag, value, monkeypatch):
    toy = list(TOY)
    toy[toy.index(flag) + 1] = value
    monkeypatch.setitem(globals(), "TOY", toy)
    check_mistake(data, tmp_path, [], value)

def check_mistake(data, tmp_path, more, words):
    more = [word.format(data=data) for word in more]
    code, printed, said = call(data, tmp_path / "out", *more)
    assert (code, printed, len(said)) == (2, "", 1), said
    assert words in said[0] and "\n" not in said[0] and not (tmp_path / "out").exists()

def test_data_must_be_named(capsys):
    assert imagenette.main([]) == 2
    assert "--data" in capsys.readouterr().err

@pytest.mark.parametrize("damage", ["deleted", "empty"])
def test_a_lost_log_is_one_line(data, done, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(imagenette, "measure", lambda *_, **__: {"a": 1.0})
    out = shutil.copytree(done[0], tmp_path / "out")
    log = out / "moco-1" / "log.jsonl"
    log.unlink()
    if damage == "empty":
        log.write_text('{"step": 1, "images_p')
    code, printed, said = call(data, out, seeds=["1"])
    assert (code, printed) == (2, "") and len(said) == 1 and "log.jsonl" in said[0]

def test_as_many_workers_as_one_likes_do_not_harm(data, done, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    out = shutil.copytree(done[0], tmp_path / "out")
    (out / "ser-0" / "linear-trained.json").unlink()
    code, printed, said = call(data, out, "--workers", "1000", seeds=["0"])
    assert code == 0 and said == [f"measuring {out}/ser-0/linear-trained.json"]

def test_missing_imagecorruptions_are_told_before_any_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenette.importlib.util, "find_spec", lambda name: None)
    code, _, said = call(data, tmp_path / "out", without=())
    assert code == 2 and len(said) == 1 and not (tmp_path / "out").exists()
    assert "or --without corruptions" in said[0]

def test_a_missing_matplotlib_is_told_before_any_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenette, "empty_figure", REAL_FIGURE)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)     # its import fails
    code, _, said = call(data, tmp_path / "out")
    assert code == 2 and len(said) == 1 and not (tmp_path / "out").exists()
    assert "pip install -r paper/requirements.txt" in said[0]

def test_the_figure_shows_every_arm_its_retrieval_and_no_cosine_and_is_small(
        data, done, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(10, 5.6))
    monkeypatch.setattr(imagenette, "empty_figure", lambda *_: figure)
    monkeypatch.setattr(imagenette, "draw", REAL_DRAW)
    monkeypatch.setattr(imagenette, "write_png", REAL_PNG)
    code, printed, _ = call(data, done[0], "--figure", str(tmp_path / "a.png"))
    assert (code, printed) == (0, done[1])
    labels = [[line.get_label() for line in axes.lines if not line.get_label().startswith("_")]
              for axes in figure.axes]
    every = ["untrained", "moco", "control", "ser"]
    assert labels == [every[1:], ["ser"], ["ser"], every[1:], every, every, every, []]
    assert [axes.get_title() for axes in figure.axes][4:7] == [
        f"{element}: patch retrieval" for element in ELEMENTS]
    rows = read(done[0] / "imagenette-0-1.json")["rows"]
    lines = {line.get_label(): line for line in figure.axes[4].lines}
    assert list(lines["ser"].get_ydata()) == [
        rows[f"rot90: retrieval, block {block}"]["ser"]["mean"] for block in (1, 2)]
    losses = {line.get_label(): line for line in figure.axes[1].lines}
    logs = [curves.records(done[0] / f"ser-{seed}") for seed in (0, 1)]
    expected = [(logs[0][step]["equiv"] + logs[1][step]["equiv"]) / 2 for step in logs[0]]
    assert list(losses["ser"].get_ydata()) == pytest.approx(expected)
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) < 150_000
