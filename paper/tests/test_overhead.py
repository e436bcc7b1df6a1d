"""What paper/overhead.py compares: that both sides do the same work, and that its counts are the paper's.

    python -m pytest -q paper/test_overhead.py
"""
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ser
from paper import overhead

TOY = dict(image_size=32, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1, equiv_layers=(1,), ratio=0.5,
           moco_hidden=16, batch_size=8)

@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """In fp32, also where there is a GPU."""
    monkeypatch.setattr(overhead, "CUDA", False)
    monkeypatch.setattr(overhead, "DEVICE", torch.device("cpu"))

def flops(function):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()

def test_counts_are_the_papers_and_the_command_writes_them_as_json(tmp_path, capsys):
    """Table "Computation overhead": 42.9 M less 75,648 position codes, 43.4 M, 18.48 G, 18.63 G, 1.008x. True
    forward + backward of MoCo-v3: 36.7 GMAC; SER's late [CLS] saves what L_equiv adds."""
    assert overhead.main(["--rows", "counts", "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["counts"]
    moco, own, paper = (rows[name] for name in ("MoCo-v3", "SER", "SER, the paper's count"))
    assert moco["trainable"] == 42_815_104 and own["trainable"] == paper["trainable"] == 43_274_624
    assert moco["macs"] == 18_475_782_144
    assert round(paper["macs"] / 1e9, 2) == 18.63 and round(paper["macs"] / moco["macs"], 3) == 1.008
    assert moco["true_macs"] == pytest.approx(36.7e9, rel=0.005)
    assert own["true_macs"] == pytest.approx(moco["true_macs"], rel=0.005)
    assert "18.630 GMAC 1.0083x" in capsys.readouterr().out

def test_macs_of_b1_and_b2_add_up_to_those_of_the_step():
    """step_macs counts two images of b1 and all of b2: here, a count of the whole on real tensors."""
    cfg, grids = ser.Config(**TOY), [(9, 7), (8, 10)]
    batch = ser.Batch([[torch.randn(4, 3, 32, 32), torch.randn(4, 3, 4 * h, 4 * w)] for h, w in grids],
                      [ser.sample_geometry(4)._replace(grid=grid) for grid in grids])
    whole = flops(lambda: ser.build(cfg)(batch)["loss"].backward()) / 2 / cfg.batch_size
    assert overhead.true_macs(cfg, 4, *grids) / cfg.batch_size == whole
    assert overhead.step_macs(cfg, *grids) == pytest.approx(overhead.true_macs(cfg, 4, *grids) / 8, rel=0.005)

@pytest.mark.parametrize("chunk", [10, 36])
def test_bare_products_are_those_of_patch_ntxent(chunk):
    """Four images of nine tokens: 36 anchors in blocks of 10, computed again, or in one, computed once."""
    z, z_prime = (torch.randn(4, 9, 8, requires_grad=True) for _ in range(2))
    keys = torch.cat([z, z_prime]).detach().flatten(0, 1)
    assert flops(lambda: ser.patch_ntxent(z, z_prime, chunk=chunk).backward()) == \
        flops(lambda: overhead.bare_products(keys[:36], keys, chunk)) > 0

def test_packed_and_separate_passes_give_equal_values_and_gradients():
    encoder = ser.ViT(224, 16, 16, 2, 2, 1)
    for one, several in overhead.packed_batches(2, 1, 2).values():
        found = []
        for calls in ([one], several):
            cls = overhead.encode(encoder, calls)
            found.append([cls, *(p.grad.clone() for p in encoder.parameters() if p.requires_grad)])
        assert len(found[0][0]) == sum(map(len, one)) and len(several) > 1
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

def test_sides_of_a_step_share_their_grids_and_the_macs_are_those_of_the_grids_drawn(monkeypatch):
    drawn, make_views = [], ser.make_views
    monkeypatch.setattr(ser, "make_views", lambda *a: drawn.append(make_views(*a)) or drawn[-1])
    for ratio in (0.0, 0.25, 0.5):
        cfg = dataclasses.replace(ser.Config(**TOY), ratio=ratio)
        step = overhead.make_step(cfg)
        for turn in range(3):
            step(turn)
            expected = overhead.step_grids(ser.Config(**TOY), turn) if ratio else []
            assert [g.grid for g in drawn[-1].geometry or ()] == overhead.step_grids(cfg, turn) == expected
    assert ser.sample_geometry is overhead.draw_geometry

def test_every_other_round_reverses_the_one_before():
    called = []
    sides = {name: lambda turn, n=name: called.append((turn, n)) for name in "abc"}
    times = overhead.in_turn(4, sides, warm=2)
    rounds = [[n for turn, n in called if turn == t] for t in range(-2, 4)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert rounds[::2] == [names[::-1] for names in rounds[1::2]]
    assert all(len(seconds) == 4 for side in times.values() for seconds in side.values())
    assert overhead.spread([2.0]) == "2 s (2-2)" and overhead.spread([3, 1, 2], "x") == "2 x (1.5-2.5)"

def test_a_ratio_is_the_time_of_ours_over_the_others_and_the_loaders_how_much_faster_it_is(
        monkeypatch, tmp_path, capsys):
    """With times that are given, by which SER's step and the packed pass take 1.5 as long, and ser.Views 2/3;
    the second round is three times slower, for all."""
    slow = lambda name: name.startswith("SER") or name in ("packed", "moco-v3")
    monkeypatch.setattr(overhead, "in_turn", lambda rounds, sides, warm=1: {name: {
        "wall": [3.0, 9.0] if slow(name) else [2.0, 6.0], "CPU": [5.0, 15.0] if slow(name) else [2.0, 6.0]}
        for name in sides})
    monkeypatch.setattr(overhead, "fresh", lambda *_, **__: {"peak_mb": 1.0})
    monkeypatch.setattr(overhead, "make_step", lambda *_: None)
    for i in range(16):
        torchvision.utils.save_image(torch.rand(3, 8, 8), tmp_path / f"{i}.png")
    assert overhead.main(["--rows", "step", "packed", "loader", "--pairs", "2", "--data", str(tmp_path),
                          "--json", str(tmp_path / "found.json")]) == 0
    found, out = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    sides = [row for row in found["step"].values() if "ratio" in row] + list(found["packed"].values())
    assert len(sides) == 4 and all(row["ratio"] == [1.5, 1.5] for row in [*sides, found["loader"]])
    assert out.count("wall 1.5 x (1.5-1.5), CPU 2.5 x (2.5-2.5)") == 4 and "1.5 x (1.5-1.5)\n" in out
    assert all(row["macs_ratio"] > 1 for row in found["step"].values() if "macs_ratio" in row)

@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss of a parent is Linux's")
def test_peak_is_that_of_the_process_and_not_of_the_one_that_started_it():
    """ru_maxrss is: a step of 3.7 GB read 6.9 GB after the step row had filled the parent."""
    torch.ones(400_000_000)
    code = "from paper import overhead; overhead.CUDA = False; print(overhead.peak())"
    child = subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE,
                           cwd=Path(ser.__file__).parent)
    assert 50 < float(child.stdout) < 1500 < overhead.peak()

@pytest.mark.parametrize("argv, said", [
    (["--rows", "loader"], "needs --data"), (["--rows", "loader", "--data", "/no/such"], "not a folder"),
    (["--rows", "counts", "--pairs", "0"], "at least 1"),
    (["--rows", "counts", "--json", "/no/such/file"], "/no/such/file")])
def test_mistakes_give_one_line_and_exit_code_2(argv, said, capsys):
    assert overhead.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1

@pytest.mark.parametrize("argv", [["--rows", "nothing"], ["--pairs", "x"], ["--pair", "2"]])
def test_wrong_flags_exit_with_code_2(argv):
    with pytest.raises(SystemExit) as stopped:
        overhead.main(argv)
    assert stopped.value.code == 2

def test_sides_with_a_process_of_their_own_run_and_the_loss_row_asks_for_all_of_them(monkeypatch):
    """The processes themselves take minutes: their sides run here, at a small size."""
    def run(command, **_):
        what, side = command[command.index("--alone") + 1:]
        assert what == "loss"
        asked.append(side)
        found = overhead.loss_alone(side, images=5, tokens=4, width=8)
        return subprocess.CompletedProcess(command, 0, json.dumps(found))
    asked = []
    monkeypatch.setattr(subprocess, "run", run)
    assert overhead.main(["--rows", "loss", "--pairs", "1"]) == 0
    assert sorted(asked) == ["bare", "blocks", "blocks", "whole", "whole"]
