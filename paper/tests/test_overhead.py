from unittest.mock import create_autospec, patch

import pytest
import torch

import ser
from paper.experiments import overhead
from paper.tests.toys import CLASSES, FLAGS, class_folders, parsed


def test_the_counts_are_the_papers():
    assert overhead.count_costs() == {
        "moco: parameters": 42_890_368, "ser: parameters": 42_890_368 + 458_752 + 768,
        "moco: forward MACs": 18_475_782_144, "ser: forward MACs": 18_464_097_792,
        "ser: all GPUs' anchors": 18_630_054_912, "ser: the release's count": 18_543_651_840}


@pytest.mark.parametrize("flags, images, dtype", [
    ("--ratio 0 --cls-layer 0 --bf16", [8, 8], torch.bfloat16),
    ("--ratio 0.25", [6, 2, 6, 2], torch.float32)])
def test_a_timed_step_trains_the_whole_model(flags, images, dtype, monkeypatch):
    waits, seen = [], []
    monkeypatch.setattr(overhead, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    flags = [*FLAGS, *flags.split()]
    model = ser.build(ser.parse(["--data", "given", *flags]))
    monkeypatch.setattr(ser, "build", lambda args: args.data and model)
    before = {key: p.clone() for key, p in model.named_parameters() if "patch_embed" not in key}
    project = model.base.encoder.blocks[0].attn.qkv
    project.register_forward_hook(lambda _, given, out: seen.append(out))
    step = overhead.training_step(flags)
    step(0)
    project.weight.grad.fill_(torch.nan)     # a gradient of the last step does not stay
    step(1)     # the first one leaves the momentum branch as it is
    assert [(len(out), out.dtype) for out in seen] == 2 * [(size, dtype) for size in images]
    assert len({out.shape for out in seen}) == len(images) - 1 and len(waits) == 2     # b2 moves
    assert project.weight.isfinite().all()
    assert not any(torch.equal(model.get_parameter(key), p) for key, p in before.items())
    pytest.raises(SystemExit, overhead.training_step, [*flags, "--ratio", "0.01"])     # no b2


def test_both_loaders_make_two_views_of_each_image(tmp_path, capsys):
    data = class_folders(tmp_path, per_class=1, classes=CLASSES[:3])
    line = f"--rows loader --data {data} --rounds 1"
    pytest.raises(SystemExit, parsed, overhead, line, "--bf16")     # of steps alone
    T, recipe = overhead.T, overhead.T.Compose
    with (patch.object(recipe, "__call__", autospec=True, side_effect=recipe.__call__) as theirs,
          patch.object(ser, "sample_view", wraps=ser.sample_view) as ours,
          patch.object(overhead.Image, "open", wraps=overhead.Image.open) as opened,
          patch.object(torch, "set_num_threads") as threads):
        overhead.time_loader(parsed(overhead, line))
    assert theirs.call_count == ours.call_count == opened.call_count == 2 * 2 * 3
    threads.assert_called_with(1)     # of one core
    assert {(call.args[1].size, call.args[2]) for call in ours.call_args_list} == {(224, False)}
    crops = {str(made.args[0].transforms[0]) for made in theirs.call_args_list}
    assert crops == {str(T.RandomResizedCrop(224, (0.08, 1.0)))}
    drawn = [made.args[0].transforms[1:5] for made in theirs.call_args_list]
    assert {jitter.transforms[0].hue for jitter, *_ in drawn} == {(-0.1, 0.1)}
    shares = {tuple(change.p for change in changes) for changes in drawn}
    assert shares == {(0.8, 0.2, 1.0, 0.0), (0.8, 0.2, 0.1, 0.2)}     # jitter to solarization
    last = [T.RandomHorizontalFlip, T.ToTensor, T.Normalize]
    assert [*map(type, theirs.call_args.args[0].transforms[-3:])] == last
    _, seconds, _, rate, *_ = capsys.readouterr().out.split()
    assert float(seconds) * float(rate) == pytest.approx(3, rel=0.1)


def test_ratios_are_taken_within_a_round(monkeypatch, capsys):
    seconds = dict(a1=2.0, b1=3.0, a2=6.0, b2=12.0, a3=1.0, b3=9.0)     # 1.5, 2 and 9 times
    called = []
    clock = lambda: sum(seconds.get(name, 100) for name in called)
    monkeypatch.setattr(overhead.time, "perf_counter", clock)
    sides = {name: lambda number, name=name: called.append(f"{name}{number}") for name in "ab"}
    overhead.compare(sides, 3, 12)
    assert called == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]
    _, second = capsys.readouterr().out.splitlines()
    assert second.startswith("b              9.0000 s      1.3 images/s  2.000x (1.500-9.000)")


def test_the_steps_of_moco_v3_and_of_ser_with_each_ratio_are_compared(monkeypatch, capsys):
    made = create_autospec(overhead.training_step, return_value=lambda number: None)
    monkeypatch.setattr(overhead, "training_step", made)
    monkeypatch.setattr(overhead, "compare", lambda steps, *numbers: print(*steps, *numbers))
    overhead.time_steps(parsed(overhead, "--rows=step --rounds=3 --bf16 --batch=24"))
    for call, wanted in zip(made.call_args_list, ((0, 0), (0.125, 3), (0.25, 3)), strict=True):
        side = ser.parse(["--data", "given", *call.args[0]])
        assert (side.ratio, side.cls_layer, side.batch_size, side.bf16) == (*wanted, 24, True)
    assert capsys.readouterr().out == "moco ser 0.125 ser 0.25 3 24\n"
