"""What paper.experiments.overhead compares: both sides do the same work, and its counts are the
paper's.

    python -m pytest -q paper/tests/test_overhead.py
"""
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torchvision

import ser
from paper.experiments import macs, overhead, pieces, timing
from test_ser import TOY as SMALL
from test_ser import close

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
TOY = SMALL | dict(image_size=32, patch_size=4)

@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """In fp32, also where there is a GPU."""
    monkeypatch.setattr(timing, "CUDA", False)
    monkeypatch.setattr(timing, "DEVICE", torch.device("cpu"))

def test_counts_are_the_papers_and_the_command_writes_them_as_json(tmp_path, capsys):
    """Table "Computation overhead": 42.9 M, 43.4 M (43.35), 18.48 G, 18.63 G, 1.008x. True forward
    + backward of MoCo-v3: 36.7 GMAC; SER's late [CLS] saves what L_equiv adds."""
    path = tmp_path / "found.json"
    assert overhead.main(["--rows", "counts", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["counts"]
    moco = rows["MoCo-v3"]
    own = rows["SER"]
    paper = rows["SER, the paper's count"]
    assert moco["trainable"] == 42_890_368
    assert own["trainable"] == paper["trainable"] == 42_890_368 + 458_752 + 768
    assert moco["forward_macs"] == 18_475_782_144
    assert round(paper["forward_macs"] / 1e9, 2) == 18.63
    assert round(paper["forward_macs"] / moco["forward_macs"], 3) == 1.008
    assert moco["step_macs"] == pytest.approx(36.7e9, rel=0.005)
    assert own["step_macs"] == pytest.approx(moco["step_macs"], rel=0.005)
    assert "18.630 GMAC 1.0083x" in capsys.readouterr().out

def test_macs_of_b1_and_b2_add_up_to_those_of_the_step():
    """step_macs counts two images of b1 and all of b2: here, the whole on real tensors."""
    cfg = ser.Config(**TOY)
    grids = [(9, 7), (8, 10)]
    views = []
    for grid in grids:
        images = [torch.randn(4, 3, 32, 32), torch.randn(4, 3, 4 * grid[0], 4 * grid[1])]
        views.append(ser.View(images, None, None, ser.sample_geometry(4)._replace(grid=grid)))
    model = ser.build(cfg)
    whole = macs.macs(lambda: model(ser.Batch(views))["loss"].backward())
    assert macs.pass_macs(cfg, 4, *grids) == whole
    assert macs.step_macs(cfg, *grids) == pytest.approx(whole / 8, rel=0.005)

@pytest.mark.parametrize("chunk", [10, 36])
def test_bare_products_are_those_of_patch_ntxent(chunk):
    """Four images of nine tokens: 36 anchors in blocks of 10, computed again, or in one, once."""
    z, z_prime = (torch.randn(4, 9, 8, requires_grad=True) for _ in range(2))
    keys = torch.cat([z, z_prime]).detach().flatten(0, 1)
    bare = macs.macs(lambda: pieces.bare_products(keys[:36], keys, chunk))
    assert macs.macs(lambda: ser.patch_ntxent(z, z_prime, chunk=chunk).backward()) == bare > 0

def test_packed_and_separate_passes_give_equal_values_and_gradients():
    encoder = ser.ViT(224, 16, 16, 2, 2, 1)
    for one, several in pieces.packed_batches(2, 1, 2).values():
        found = []
        for calls in ([one], several):
            cls = pieces.encode(encoder, calls)
            gradients = [p.grad.clone() for p in encoder.parameters() if p.requires_grad]
            found.append([cls, *gradients])
        assert len(found[0][0]) == sum(map(len, one)) and len(several) > 1
        close(*found, tolerance=1e-4)

def test_a_step_trains_and_its_grids_do_not_depend_on_the_size_of_b2(monkeypatch):
    made = []
    make_views = ser.make_views

    def record(*arguments):
        made.append(make_views(*arguments))
        return made[-1]

    monkeypatch.setattr(ser, "make_views", record)
    grids = {}
    for ratio in (0.0, 0.25, 0.5):
        step = overhead.Step(dataclasses.replace(ser.Config(**TOY), ratio=ratio))
        encoder = step.model.base.encoder
        before = encoder.blocks[0].norm1.bias.clone()
        for turn in range(3):
            step(turn)
            drawn = [view.geometry.grid for view in made[-1].views if view.geometry]
            assert step.grids[turn] == drawn
        assert not torch.equal(before, encoder.blocks[0].norm1.bias)
        sizes = {0.0: [8], 0.25: [6, 2], 0.5: [4, 4]}
        assert [len(x) for x in made[-1].views[1].images] == sizes[ratio]
        grids[ratio] = step.grids
    assert grids[0.25] == grids[0.5] and grids[0.5][0] != grids[0.5][1]
    assert set(map(len, grids[0.0].values())) == {0}
    assert ser.sample_geometry is overhead.draw_geometry

@pytest.fixture
def small_methods(monkeypatch):
    """The settings of MoCo-v3 and of the add-ons at a toy size."""
    modules = [pytest.importorskip(f"paper.methods.{name}") for name in overhead.METHODS]
    monkeypatch.setattr(ser, "Config", lambda **how: REAL_CONFIG(**TOY | how))
    shape = {key: TOY[key] for key in ("image_size", "patch_size", "dim", "depth", "heads")}

    def small(settings):
        return lambda **how: settings(**shape, layer=3, moco_hidden=16, **how)

    for module in modules:
        monkeypatch.setattr(module, "Settings", small(module.Settings))

@pytest.mark.parametrize("name", ["MoCo-v3", *overhead.METHODS])
def test_the_step_of_an_add_on_trains_its_own_heads(name, small_methods):
    step = overhead.method_step(name, 4)
    before = [p.clone() for p in step.model.parameters() if p.requires_grad]
    step(0)
    after = [p for p in step.model.parameters() if p.requires_grad]
    assert sum(not torch.equal(a, b) for a, b in zip(before, after)) > len(before) / 2
    assert (len(step.model.heads) > 0) == (name != "MoCo-v3")
    assert len(step.loaded[0][0]) == 4

def test_the_row_of_the_add_ons_compares_each_with_moco_v3(
        small_methods, monkeypatch, tmp_path, capsys):
    asked = []

    def fresh(*what):
        asked.append(what)
        return {"peak_mb": 7.0}

    monkeypatch.setattr(timing, "IMAGES", 4)
    monkeypatch.setattr(timing, "in_turn", given_times)
    monkeypatch.setattr(timing, "fresh", fresh)
    path = tmp_path / "found.json"
    assert overhead.main(["--rows", "methods", "--pairs", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["methods"]
    assert list(rows) == ["MoCo-v3", *overhead.METHODS]
    assert asked == [("methods", name) for name in rows]
    for name in overhead.METHODS:
        assert rows[name]["ratio"] == [1.5, 1.5] and rows[name]["peak_mb"] == 7
        assert rows[name]["trainable"] > rows["MoCo-v3"]["trainable"]
        assert rows[name]["macs"] > rows["MoCo-v3"]["macs"] > 0
    assert capsys.readouterr().out.count("wall 1.5 x") == 4

REAL_CONFIG = ser.Config
REAL_BUILD = ser.build

def test_every_other_round_reverses_the_one_before():
    called = []
    sides = {name: lambda turn, n=name: called.append((turn, n)) for name in "abc"}
    times = timing.in_turn(4, sides, warm=2)
    rounds = [[n for turn, n in called if turn == t] for t in range(-2, 4)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert rounds[::2] == [names[::-1] for names in rounds[1::2]]
    assert all(len(seconds) == 4 for side in times.values() for seconds in side.values())
    assert timing.spread([2.0]) == "2 s (2-2)"
    assert timing.spread([3, 1, 2], "x") == "2 x (1.5-2.5)"

def test_the_order_of_the_sides_is_random():
    """A round and its reverse begin each side equally often only if the first is drawn."""
    first = []

    def side(name):
        return lambda turn: first.append((turn, name))

    timing.in_turn(40, {name: side(name) for name in "abc"})
    begins = [next(name for turn, name in first if turn == t) for t in range(0, 40, 2)]
    assert set(begins) == {"a", "b", "c"}

def test_the_clocks_are_the_wall_and_the_process(monkeypatch):
    """A side that sleeps takes wall time and no CPU time."""
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 10.0 * next(ticks))
    monkeypatch.setattr(timing.time, "process_time", lambda: 0.0)
    times = timing.in_turn(2, {"a": lambda turn: None})
    assert times["a"] == {"wall": [10.0, 10.0], "CPU": [0.0, 0.0]}

def given_times(rounds, sides, warm=1):
    """SER, the packed pass, the add-ons and moco-v3's loader take 1.5 as long as the other side;
    the second round is three times slower, for all."""
    found = {}
    for name in sides:
        slow = name.startswith("SER") or name in ("packed", "moco-v3", *overhead.METHODS)
        found[name] = {"wall": [2.0, 6.0], "CPU": [2.0, 6.0]}
        if slow:
            found[name] = {"wall": [3.0, 9.0], "CPU": [5.0, 15.0]}
    return found

class NoStep:
    """In place of a step, where times are given."""
    def __init__(self, cfg):
        self.grids = {}
        if cfg.ratio > 0:
            self.grids = {turn: [(14, 14), (14, 14)] for turn in range(2)}

@pytest.mark.parametrize("native", [False, True])
def test_a_cpu_with_bf16_products_is_timed_with_them_too(native, monkeypatch, capsys):
    """The rows are named for how their steps are set up."""
    made = []

    class Settings(NoStep):
        def __init__(self, cfg):
            super().__init__(cfg)
            made.append((cfg.bf16, cfg.compile))

    monkeypatch.setattr(timing, "in_turn", given_times)
    monkeypatch.setattr(timing, "fresh", lambda *_, **__: {"peak_mb": 1.0})
    monkeypatch.setattr(timing, "CUDA", False)
    monkeypatch.setattr(ser, "Config", lambda **how: REAL_CONFIG(**TOY | how | dict(batch_size=8)))
    monkeypatch.setattr(overhead, "Step", Settings)
    monkeypatch.setattr(overhead, "B2", (4, 8))
    monkeypatch.setattr(timing, "IMAGES", 8)
    monkeypatch.setattr(overhead, "multiplies_bf16", lambda: native)
    rows = overhead.step(overhead.parse(["--pairs", "2"]))
    assert made == [(False, False)] * 3 + [(True, False)] * (3 if native else 0)
    assert [name.rpartition(" ")[2] for name in rows] == ["eager"] * 3 + ["bf16"] * (3 * native)

@pytest.mark.parametrize("bf16", [False, True])
def test_a_timed_step_multiplies_as_its_settings_say(bf16):
    step = overhead.Step(ser.Config(**TOY, bf16=bf16))
    products = set()
    linear = step.model.base.encoder.blocks[0].attn.qkv
    linear.register_forward_hook(lambda _, given, out: products.add(out.dtype))
    step(0)
    assert products == {torch.bfloat16 if bf16 else torch.float32}

def test_a_ratio_is_our_time_over_the_others_and_the_loaders_how_much_faster_it_is(
        monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timing, "in_turn", given_times)
    monkeypatch.setattr(timing, "fresh", lambda *_, **__: {"peak_mb": 1.0})
    monkeypatch.setattr(overhead, "Step", NoStep)
    small = ser.Config(**TOY)
    plain = dataclasses.replace(small, ratio=0.0)
    monkeypatch.setattr(overhead, "step_settings",
                        lambda how: {"MoCo-v3": plain, "SER, 2": small, "SER, 4": small})
    monkeypatch.setattr(overhead, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(pieces, "packed_batches", lambda *_: {"2": ([], [[]]), "6": ([], [[]])})
    monkeypatch.setattr(pieces, "moco_v3_pipeline", lambda *_: None)
    monkeypatch.setattr(ser, "build", lambda cfg: REAL_BUILD(small))
    for i in range(16):
        torchvision.utils.save_image(torch.rand(3, 8, 8), tmp_path / f"{i}.png")
    path = tmp_path / "found.json"
    assert overhead.main(["--rows", "step", "packed", "loader", "--pairs", "2", "--data",
                          str(tmp_path), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    out = capsys.readouterr().out
    sides = [row for row in found["step"].values() if "ratio" in row]
    sides += list(found["packed"].values())
    assert len(sides) == 4
    assert all(row["ratio"] == [1.5, 1.5] for row in [*sides, found["loader"]])
    assert out.count("wall 1.5 x (1.5-1.5), CPU 2.5 x (2.5-2.5)") == 4
    assert "1.5 x (1.5-1.5)\n" in out
    for row in found["step"].values():
        assert "ratio" not in row or row["macs_ratio"] == row["macs_ratio_196"] > 1

@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss of a parent is Linux's")
def test_peak_is_that_of_the_process_and_not_of_the_one_that_started_it(monkeypatch):
    """ru_maxrss is: a step of 3.7 GB read 6.9 GB after the step row had filled the parent."""
    status = "VmPeak:\t 9000 kB\nVmHWM:\t    2000 kB\nVmRSS:\t 7 kB\n"
    assert timing.peak() > 50
    files = {"/proc/self/status": status}
    monkeypatch.setattr(timing.Path, "read_text", lambda path: files[str(path)])
    assert timing.peak() == 2.048

@pytest.mark.parametrize("argv, said", [
    (["--rows", "loader"], "needs --data"),
    (["--rows", "loader", "--data", "/no/such"], "/no/such"),
    (["--rows", "loader", "--data", "{broken}"], "cannot read"),
    (["--rows", "loader", "--data", "{few}"], "1 images are fewer"),
    (["--rows", "counts", "--pairs", "0"], "at least 1"), (["--rows", "nothing"], "nothing"),
    (["--rows", "counts", "--json", "/no/such/file"], "/no/such/file"), (["--pairs", "x"], "x"),
    (["--pair", "2"], "--pair")])
def test_mistakes_give_one_line_and_exit_code_2(argv, said, tmp_path, capsys):
    for i in range(16):
        for folder, name in (("broken", f"{i}.png"), ("few", "0.png")):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(b"no image")
    argv = [word.format(broken=tmp_path / "broken", few=tmp_path / "few") for word in argv]
    assert overhead.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1

def test_sides_with_a_process_of_their_own_run_and_the_loss_row_asks_for_all_of_them(monkeypatch):
    """The processes themselves take minutes: their sides run here, at a small size."""
    asked = []

    def run(command, **_):
        what, side = command[command.index("--alone") + 1:]
        assert what == "loss"
        asked.append(side)
        found = pieces.loss_alone(side, images=5, tokens=4, width=8)
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    monkeypatch.setattr(subprocess, "run", run)
    assert overhead.main(["--rows", "loss", "--pairs", "1"]) == 0
    assert sorted(asked) == ["bare", "blocks", "blocks", "whole", "whole"]

def test_the_jitter_row_sums_both_views_over_the_step(monkeypatch):
    def given(rounds, sides):
        for name in ("view 0", "view 1"):
            assert sides[name](0).shape == (8, 3, 32, 32)
        return {name: {"wall": [4.0 if name == "step" else 1.0]} for name in sides}

    moco = ser.Config(**TOY | dict(ratio=0.0))
    monkeypatch.setattr(timing, "IMAGES", 8)
    monkeypatch.setattr(overhead, "step_settings", lambda: {"MoCo-v3": moco})
    monkeypatch.setattr(timing, "in_turn", given)
    found = overhead.jitter(overhead.parse([]))
    assert found["share_percent"] == [50.0]
    assert found["ms_per_image"] == {"view 0": [125.0], "view 1": [125.0], "step": [500.0]}
