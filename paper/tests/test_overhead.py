"""What is counted, and that the steps that are timed are those of training."""
import pytest
import torch
from torchvision.utils import save_image

import ser
from paper.experiments import overhead

TOY = ("--image-size 16 --patch-size 4 --dim 16 --depth 3 --heads 2 --moco-hidden 16 "
       "--batch-size 8 --equiv-layers 1").split()

def test_the_counts_are_the_papers():
    """42.9 M and 43.4 M; 18.48 G, 18.63 G, 1.008x. SER adds a projector and its LayerNorm."""
    assert overhead.count() == {
        "moco: parameters": 42_890_368, "ser: parameters": 42_890_368 + 458_752 + 768,
        "augself: parameters": 44_209_288, "equimod: parameters": 43_271_296,
        "stl: parameters": 62_175_872, "essl: parameters": 43_287_684,
        "moco: forward MACs": 18_475_782_144, "ser: forward MACs": 18_464_097_792,
        "ser: the paper's count": 18_630_054_912, "ser: the release's count": 18_543_651_840}

@pytest.mark.parametrize("name, flags, images, dtype", [
    ("moco", "--ratio 0.25 --bf16", [8, 8], torch.bfloat16),
    ("ser", "--ratio 0.25 --cls-layer 1", [6, 2, 6, 2], torch.float32)])
def test_a_timed_step_trains_the_whole_model(name, flags, images, dtype, monkeypatch):
    """On two views, MoCo-v3 without b2, and in bf16 if asked."""
    monkeypatch.setattr(overhead, "BATCH", 8)
    args, build = overhead.method(name, [*TOY, *flags.split()])
    model = build(args)
    before = {key: p.clone() for key, p in model.named_parameters() if "patch_embed" not in key}
    seen = []
    project = model.base.encoder.blocks[0].attn["qkv"]
    project.register_forward_hook(lambda _, given, out: seen.append((len(out), out.dtype)))
    step = overhead.training_step(args, lambda args: model)
    step(0)
    step(1)     # the first one leaves the momentum branch as it is
    assert seen == 2 * [(size, dtype) for size in images]
    assert not any(torch.equal(model.get_parameter(key), p) for key, p in before.items())


def test_both_loaders_make_two_views_of_each_image(tmp_path, monkeypatch):
    for number in range(3):
        save_image(torch.rand(3, 40, 30), tmp_path / f"{number}.png")
    made = {"moco-v3": 0, "ser": 0}

    def counting(name, function):
        def count(*given):
            made[name] += 1
            return function(*given)
        return count

    monkeypatch.setattr(overhead.T.Compose, "__call__", counting(
        "moco-v3", overhead.T.Compose.__call__))
    monkeypatch.setattr(ser, "sample_view", counting("ser", ser.sample_view))
    sides = {}
    monkeypatch.setattr(overhead, "compare", lambda named, rounds, n: sides.update(named))
    overhead.time_loader(str(tmp_path), 1)
    for side in sides.values():
        side(0)
    assert made == {"moco-v3": 6, "ser": 6}


def test_ratios_are_taken_within_a_round(monkeypatch, capsys):
    """b takes 1.5 and 2 times as long as a; the round that does not count, 100 s a side."""
    seconds = {("a", 1): 2.0, ("b", 1): 3.0, ("a", 2): 6.0, ("b", 2): 12.0}
    clock, called = [0.0], []
    def side(name, number):
        called.append(name)
        clock[0] += seconds.get((name, number), 100)
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: clock[0])
    overhead.compare({"a": lambda n: side("a", n), "b": lambda n: side("b", n)}, 2, 12)
    assert called == ["a", "b", "b", "a", "a", "b"]
    _, second = map(str.split, capsys.readouterr().out.splitlines())
    assert second[:7] == ["b", "7.5000", "s", "1.6", "images/s", "1.750x", "(1.500-2.000)"]

def test_the_rows_of_a_clock_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "BATCH", 8)
    save_image(torch.rand(3, 40, 30), tmp_path / "1.png")
    monkeypatch.setattr(overhead, "SIDES", [("moco", "0"), ("ser", "0.25")])
    overhead.main(overhead.settings(["--rows", "step", "loader", "--data", str(tmp_path),
                                     "--rounds", "1", "--cls-layer", "1", *TOY]))
    assert capsys.readouterr().out.count("images/s") == 4
