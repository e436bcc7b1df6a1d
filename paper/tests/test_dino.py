"""Every claim of paper/methods/dino.py: `python -m pytest paper/tests/test_dino.py`."""
import json
import math
import runpy

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.data import default_collate

import ser
from paper.methods import dino

SHAPE = """--image-size 16 --patch-size 4 --dim 16 --depth 3 --heads 2 --cls-layer 1
    --equiv-layers 1 --batch-size 64 --ratio 0.5""".split()
FLAGS = [*SHAPE, "--hidden", "16", "--outputs", "24", "--drop-path", "0"]

def shake(model):
    for i, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, 0, 0.3, generator=ser.rng(i))     # else teacher = student
    return model

def toy_views(args, dataset=ser.two_views):
    """Views of 64 synthetic images, made as a run makes them: 32 in b1, 32 in b2."""
    images, _ = ser.synthetic_images(64, 32, seed=0)
    loaded = default_collate([dataset(images, args)[0, i, i >= 32] for i in range(64)])
    return ser.make_views(loaded, args, step=0)

def train(script, flags, out, monkeypatch):
    """Two steps from the command line; returns the log and the state of the optimizer."""
    images = ser.synthetic_images(128, 16, seed=0)
    monkeypatch.setattr(ser, "synthetic_images", lambda n, size, seed: images)
    monkeypatch.setattr("sys.argv", ["", *flags, "--epochs", "1", "--out", str(out)])
    runpy.run_path(script.__file__, run_name="__main__")
    assert len(ser.load_encoder(out / "last.pt").blocks) == 3
    state = torch.load(out / "last.pt", weights_only=True)
    log = [json.loads(line) for line in open(out / "log.jsonl")]
    model = script.build(script.settings([*flags, "--weight", "0.7", "--temperature", "0.4"]))
    assert (model.weight, model.temperature) == (0.7, 0.4)
    assert log[-1]["step"] == 2
    return log, state["optimizer"]["param_groups"][0]

def slow_cross_entropy(t, s, center, tau_t):
    """The mean over images of H(P_t, P_s), as written (Caron et al., Eq. 1 and 2)."""
    teacher = ((t - center) / tau_t).exp()
    student = (s / 0.1).exp()
    p_t = teacher / teacher.sum(1, keepdim=True)
    p_s = student / student.sum(1, keepdim=True)
    return -(p_t * p_s.log()).sum() / len(t)

@pytest.mark.parametrize("ranks", [1, 2])
def test_each_view_learns_from_the_other_and_the_center_moves_after_its_use(monkeypatch, ranks):
    """Caron et al., Algorithm 1, Eq. 4; two ranks with the same images have the center of one."""
    args = dino.settings(FLAGS)
    model = shake(dino.build(args))
    views = toy_views(args)
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (ranks, 0))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))
    base = model.base
    base.update(0.05)
    before = torch.randn(24, generator=ser.rng(3)) * 0.1
    base.center.copy_(before)
    losses = model(views)
    s = []
    t = []
    for view in views:
        t.append(base.teacher_head(ser.encode_view(base.teacher, view)[0]))
        s.append(base.head(ser.encode_view(base.encoder, view)[0]))
    t = torch.cat(t)
    wanted = slow_cross_entropy(t, torch.cat([s[1], s[0]]), before, base.tau_t)
    assert_close(losses["inv"], wanted.detach())
    assert base.chance(64) == pytest.approx(math.log(24))
    assert_close(base.center, 0.9 * before + 0.1 * t.mean(0))
    losses["loss"].backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == ("teacher" in name), name     # DDP demands all others

def test_the_head_gives_cosines_in_full_precision():
    """Caron et al., 3.1: L2 and weight norm at the end, and at the start lengths of 1."""
    head = dino.Head(64, 128, 50)
    x = torch.randn(5, 64, generator=ser.rng(0))
    rows = head.last.parametrizations.weight.original1
    with torch.autocast("cpu", torch.bfloat16):
        features = head.mlp(x).float()
        found = head(x)
    assert_close(found, F.cosine_similarity(features[:, None], rows[None], dim=-1))

@pytest.mark.parametrize("progress, momentum, tau_t", [
    (0, 0.982, 0.04), (1 / 3, 0.9865, 0.055), (0.5, 0.991, 0.0625), (1, 1, 0.07)])
def test_the_teacher_begins_as_the_student_and_follows_it(progress, momentum, tau_t):
    """Caron et al., 3.1: m from .982 to 1, and tau_t from .04 to .07, here in 6 of 9 epochs."""
    base = dino.build(dino.settings([*FLAGS, "--epochs", "9", "--teacher-temp-epochs", "6"])).base
    for slow, fast in ((base.teacher, base.encoder), (base.teacher_head, base.head)):
        for p, q in zip(slow.parameters(), fast.parameters()):
            assert torch.equal(p, q)
            q.data += 1
    before = [p.clone() for p in base.parameters() if not p.requires_grad]
    base.update(progress)
    after = [p for p in base.parameters() if not p.requires_grad]
    assert base.tau_t == pytest.approx(tau_t)
    assert_close(after, [p + 1 - momentum for p in before], rtol=1e-5, atol=1e-6)

def test_stochastic_depth_drops_a_branch_of_whole_images_and_keeps_the_mean():
    """Attention, here 1, and MLP, 10, each by itself, later blocks more; the teacher has none."""
    base = dino.build(dino.settings([*SHAPE, "--drop-path", "0.5"])).base
    torch.manual_seed(0)
    for encoder, kept in ((base.encoder, (1.0, 0.75, 0.5)), (base.teacher, (1.0, 1.0, 1.0))):
        for block, p in zip(encoder.blocks, kept, strict=True):
            for branch, value in ((block.attn["proj"], 1.0), (block.mlp["fc2"], 10.0)):
                torch.nn.init.zeros_(branch.weight)
                torch.nn.init.constant_(branch.bias, value)
            x = block(torch.zeros(4000, 3, 16))
            assert (x == x[:, :1, :1]).all()
            images = (p * x[:, 0, 0]).round()
            assert_close(p * x[:, 0, 0], images)
            shares = [(images == value).float().mean() for value in (0, 1, 10, 11)]
            wanted = torch.tensor([(1 - p) ** 2, (1 - p) * p, (1 - p) * p, p * p])
            assert_close(torch.stack(shares), wanted, rtol=0, atol=0.025)
            assert (block.eval()(x * 0) == 11).all()

@pytest.mark.parametrize("epoch, rate, decay", [
    (0.5, 4e-5, 0.0400222), (10, 8e-4, 0.04880983), (99.999, 1e-5, 0.4)])
def test_a_step_sets_the_rates_clips_and_freezes(epoch, rate, decay):
    """Both schedules, and .3 for a gradient's norm; the last layer rests in the first epoch."""
    args = dino.settings([*FLAGS, "--data", "some", "--batch-size", "2048"])
    assert args.crop_min == 0.25
    model = dino.build(args)
    optimizer = dino.optimizer(model, args)
    matrices, vectors = optimizer.param_groups
    assert all(p.dim() == 1 for p in vectors["params"])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(matrices["params"]) + len(vectors["params"]) == len(trained)
    for i, p in enumerate(trained):
        p.grad = torch.full(p.shape, 0.01 * (i + 1))     # norms from 0.1 to 46
    before = [p.grad.clone() for p in trained]
    last = model.base.head.last.weight.clone()
    model.base.update(epoch / 100)
    optimizer.step()
    assert matrices["lr"] == vectors["lr"] == pytest.approx(rate, rel=1e-4)
    assert matrices["weight_decay"] == pytest.approx(decay)
    assert vectors["weight_decay"] == 0
    assert torch.equal(last, model.base.head.last.weight) == (epoch < 1)
    for p, old in zip(trained, before):
        if p.grad is not None:
            assert_close(p.grad, old * min(1, 0.3 / old.norm().item()))

def test_it_trains_from_the_command_line(tmp_path, monkeypatch):
    """With the paper's tau and the release's lambda; the optimizer follows DINO's schedules."""
    log, group = train(dino, FLAGS, tmp_path, monkeypatch)
    assert (log[0]["weight"], log[0]["temperature"]) == (0.3, 0.5)
    assert group["weight_decay"] == pytest.approx(0.22)     # half-way
