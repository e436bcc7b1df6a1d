"""Every claim of paper/methods/dino.py, and what the tests of the other base methods share."""
import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

import ser
from paper.methods import barlow_twins, dino, multicrop
from paper.tests.test_addon import check_defaults
from paper.tests.toys import class_folders
from test_ser import close, last, log_of, run_ranks, seeded, shake, trained

SHAPE = """--image-size 16 --patch-size 4 --dim 16 --depth 3 --heads 2 --cls-layer 1
    --equiv-layers 1 --batch-size 12 --ratio 0.33 --log-every 1 --workers 0""".split()
FLAGS = [*SHAPE, "--hidden", "16", "--outputs", "24", "--drop-path", "0"]


def toy_views(args, dataset=ser.two_views):
    """Views of 12 synthetic images, made as a run makes them: 8 in b1, 4 in b2."""
    images, _ = ser.synthetic_images(12, 20, seed=0)
    loaded = default_collate([dataset(images, args)[0, i, i >= 8] for i in range(12)])
    return ser.make_views(loaded, args, step=0)


def train(script, flags, out, monkeypatch):
    """Two steps of 31 images from the command line; returns the log and the last.pt."""
    images = ser.synthetic_images(31, 16, seed=0)
    monkeypatch.setattr(ser, "synthetic_images", lambda n, size, seed: images)
    monkeypatch.setattr("sys.argv", ["", *flags, "--epochs", "1", "--out", str(out)])
    runpy.run_path(script.__file__, run_name="__main__")
    assert len(ser.load_encoder(out / "last.pt").blocks) == 3
    model = script.build(script.settings([*flags, "--weight", "0.7", "--temperature", "0.4"]))
    assert (model.weight, model.temperature) == (0.7, 0.4)
    log = log_of(out)
    assert [line["step"] for line in log[1:]] == [1, 2]
    return log, last(out)


def without_batch_norm(module):
    """BatchNorm leaves, as each rank has statistics of its own on a CPU."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d):
            setattr(module, name, nn.Identity())
        else:
            without_batch_norm(child)
    return module


RECIPES = {"dino": (dino, FLAGS + ["--freeze-epochs", "0.5"], ser.two_views,
                    dino.optimizer, dino.schedule),
           "barlow_twins": (barlow_twins, SHAPE + ["--hidden", "16"], ser.two_views,
                            barlow_twins.optimizer, barlow_twins.schedule),
           "multicrop": (multicrop, SHAPE + ["--moco-hidden", "16", "--local-size", "8"],
                         multicrop.six_views, ser.adamw, ser.set_learning_rate)}


def rank_main(rank, ranks, out, data, name):
    """Two steps by ser.train on files, with random weights."""
    script, flags, *recipe = RECIPES[name]
    args = script.settings([*flags, "--data", data, "--out", f"{out}/{ranks}", "--epochs", "1",
                            "--warmup-epochs", "0.4"])
    ser.train(args, lambda args: shake(without_batch_norm(script.build(args))), *recipe)


def check_ranks(name, tmp_path):
    """Losses, teachers and buffers, and AdamW's mean of gradients after the clip. AdamW's
    own steps say little, as they have one length for gradients of any size."""
    data = class_folders(tmp_path / "data", per_class=5)
    rank_main(0, 1, tmp_path, data, name)
    run_ranks(rank_main, 2, tmp_path, data, name)
    one = last(tmp_path / "1")
    two = last(tmp_path / "2")
    close(log_of(tmp_path / "2")[1:], log_of(tmp_path / "1")[1:], 1e-4)
    moments = [state["optimizer"]["state"] for state in (one, two)]
    assert len(moments[0]) > 20
    largest = max(state["exp_avg"].norm() for state in moments[0].values())
    for i, state in moments[0].items():
        gap = moments[1][i]["exp_avg"] - state["exp_avg"]
        assert gap.norm() < 2e-3 * state["exp_avg"].norm() + 1e-4 * largest, f"parameter {i}"
    for key, value in one["model"].items():
        if "momentum" in key or "teacher" in key or "center" in key:
            assert (two["model"][key] - value).norm() < 1e-3 * value.norm(), key


def slow_head(head, x):
    """Caron et al., 3.1: three layers with GELU; then cosines times the lengths of rows."""
    for i in (0, 2, 4):
        x = x @ head.mlp[i].weight.T + head.mlp[i].bias
        x = F.gelu(x) if i < 4 else x
    rows = head.last.parametrizations.weight
    cosines = F.cosine_similarity(x[:, None], rows.original1[None], dim=-1)
    return cosines * rows.original0[:, 0]


def slow_cross_entropy(t, s, center, tau_t):
    """The mean over images of H(P_t, P_s), as written (Caron et al., Eq. 1 and 2)."""
    teacher = ((t - center) / tau_t).exp()
    student = (s / 0.1).exp()
    p_t = teacher / teacher.sum(1, keepdim=True)
    p_s = student / student.sum(1, keepdim=True)
    return -(p_t * p_s.log()).sum() / len(t)


def test_each_view_learns_from_the_other_and_the_center_moves_after_its_use():
    """Caron et al., Algorithm 1, Eq. 4. DDP demands a gradient for all that is trained."""
    args = dino.settings(FLAGS)
    model = shake(dino.build(args))
    base = model.base
    views = toy_views(args)
    base.update(0.05)
    before = torch.randn(24, generator=seeded(3)) * 0.1
    base.center.copy_(before)

    s = []
    t = []
    for view in views:
        x = [view.b1, view.b2]
        s.append(slow_head(base.head, torch.cat([base.encoder(part).cls for part in x])))
        t.append(slow_head(base.teacher_head, torch.cat([base.teacher(part).cls for part in x])))
    t = torch.cat(t).detach()
    wanted = slow_cross_entropy(t, torch.cat([s[1], s[0]]), before, base.tau_t)

    losses = model(views)
    close({"inv": losses["inv"]}, {"inv": wanted.detach()})
    close({"center": base.center}, {"center": 0.9 * before + 0.1 * t.mean(0)})
    slow = torch.autograd.grad(wanted, base.head.parameters())
    losses["loss"].backward()
    close([p.grad for p in base.head.parameters()], list(slow))
    for name, p in model.named_parameters():
        assert (p.grad is None) == ("teacher" in name), name


def test_the_head_begins_as_dinos_and_gives_cosines_in_full_precision():
    """Truncated normal weights of deviation .02, no biases, and rows of length 1."""
    head = dino.Head(64, 128, 50)
    for layer in head.mlp[::2]:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert layer.weight.abs().max() > 0.05 and layer.bias.eq(0).all()
    assert head.last.parametrizations.weight.original0.eq(1).all()
    x = torch.randn(5, 64, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        features = head.mlp(x).float()
        found = head(x)
    rows = head.last.parametrizations.weight.original1
    close(found, F.cosine_similarity(features[:, None], rows[None], dim=-1))


@pytest.mark.parametrize("progress, momentum, tau_t", [
    (0, 0.982, 0.04), (1 / 3, 0.9865, 0.055), (0.5, 0.991, 0.0625), (1, 1, 0.07)])
def test_the_teacher_begins_as_the_student_and_follows_it(progress, momentum, tau_t):
    """Caron et al., 3.1: m from .982 to 1, and tau_t from .04 to .07, here in 6 of 9 epochs."""
    base = dino.build(dino.settings([*FLAGS, "--epochs", "9", "--teacher-temp-epochs", "6"])).base
    for slow, fast in ((base.teacher, base.encoder), (base.teacher_head, base.head)):
        for (name, p), q in zip(slow.named_parameters(), fast.parameters()):
            assert torch.equal(p, q), name
            q.data += 1
    before = {name: p.clone() for name, p in base.named_parameters() if not p.requires_grad}
    base.update(progress)
    after = {name: p for name, p in base.named_parameters() if not p.requires_grad}
    assert len(after) == len(trained(base))
    assert base.tau_t == pytest.approx(tau_t)
    close(after, {name: p + 1 - momentum for name, p in before.items()})


def test_stochastic_depth_drops_a_branch_of_whole_images_and_keeps_the_mean():
    """Attention, here 1, and MLP, 10, each by itself, later blocks more; the teacher has none."""
    base = dino.build(dino.settings([*SHAPE, "--drop-path", "0.5"])).base
    torch.manual_seed(0)
    for encoder, kept in ((base.encoder, (1.0, 0.75, 0.5)), (base.teacher, (1.0, 1.0, 1.0))):
        for block, p in zip(encoder.blocks, kept, strict=True):
            for branch, value in ((block.attn["proj"], 1.0), (block.mlp["fc2"], 10.0)):
                nn.init.zeros_(branch.weight)
                nn.init.constant_(branch.bias, value)
            x = block(torch.zeros(4000, 3, 16))
            assert (x == x[:, :1, :1]).all(), "tokens of an image differ"
            images = (p * x[:, 0, 0]).round()
            close(p * x[:, 0, 0], images)
            shares = [(images == value).float().mean().item() for value in (0, 1, 10, 11)]
            wanted = [(1 - p) ** 2, (1 - p) * p, (1 - p) * p, p * p]
            assert shares == pytest.approx(wanted, abs=0.025)
            assert (block.eval()(x * 0) == 11).all(), "dropped in eval mode"


@pytest.mark.parametrize("epoch, rate, decay, frozen", [
    (0.5, 4e-5, 0.0400222, True), (1, 8e-5, 0.0400888, False),
    (10, 8e-4, 0.04880983, False), (99.999, 1e-5, 0.4, False)])
def test_a_step_has_the_rates_of_its_epoch_clips_and_freezes(epoch, rate, decay, frozen):
    """Vectors do not decay; .3 bounds each gradient's norm; the last layer rests at first."""
    args = dino.settings([*FLAGS, "--data", "some", "--batch-size", "2048"])
    model = dino.build(args)
    names = {p: name for name, p in model.named_parameters()}
    optimizer = dino.optimizer(model, args)
    dino.schedule(optimizer, args, epoch)
    decays = {}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(rate, rel=1e-4)
        decays |= {names[p]: group["weight_decay"] for p in group["params"]}
    wanted = {name: decay * (p.dim() > 1) for name, p in trained(model).items()}
    assert decays == pytest.approx(wanted, rel=1e-4)

    for i, p in enumerate(trained(model).values()):
        p.grad = torch.full(p.shape, 0.01 * (i + 1))     # norms from 0.1 to 46
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in trained(model).items()}
    optimizer.step()
    for name, p in trained(model).items():
        weight, gradient = before[name]
        rests = frozen and "head.last" in name
        assert torch.equal(p, weight) == rests, name
        if not rests:
            norm = gradient.norm().item()
            close({name: p.grad}, {name: gradient * min(1, 0.3 / norm)})


def test_the_defaults_are_those_of_the_paper_the_release_and_dino():
    check_defaults(dino, dict(
        out="runs/dino", weight=0.3, temperature=0.5, weight_decay=0.04, base_lr=1e-4,
        crop_min=0.25, final_lr=1e-5, final_weight_decay=0.4, clip=0.3, drop_path=0.1,
        hidden=2048, outputs=65536, first_teacher_temp=0.04, teacher_temp=0.07,
        teacher_temp_epochs=10.0, momentum=0.982, freeze_epochs=1.0))


def test_it_trains_from_the_command_line(tmp_path, monkeypatch):
    """The optimizer follows DINO's schedules: half-way, the decay is half-way."""
    log, state = train(dino, FLAGS, tmp_path, monkeypatch)
    assert (log[0]["method"], log[0]["out"]) == ("SER on DINO", str(tmp_path))
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == pytest.approx(0.22)


def test_two_ranks_train_as_one_process(tmp_path):
    check_ranks("dino", tmp_path)
