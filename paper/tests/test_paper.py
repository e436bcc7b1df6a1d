"""Every claim of paper/dino.py, paper/barlow_twins.py and paper/multicrop.py as an executable sentence.

Losses against loops written from the papers' formulas, gloo ranks against one process, schedules at their end
points, and each script from its command line: it trains, resumes bit for bit, and its checkpoint evaluates.

    python -m pytest -q paper/test_paper.py
"""
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import eval_linear
import ser
from paper import barlow_twins, dino, multicrop
from test_ser import TOY, close, flags, records, run_ranks, same_run, seeded, shake, value_and_gradients
from test_ser import signals_stay_pytests   # noqa: F401, a fixture for every test here too

HERE = Path(ser.__file__).resolve().parent
COMMON = {k: v for k, v in TOY.items() if k != "moco_hidden"}
SCRIPTS = {   # module, and what makes it small
    "dino": (dino, {**COMMON, "hidden": 16, "prototypes": 24, "base_lr": 1e-2, "freeze_epochs": 0.1}),
    "barlow_twins": (barlow_twins, {**COMMON, "hidden": 16, "base_lr": 1e-2}),
    "multicrop": (multicrop, {**TOY, "local_size": 8})}

def toy(name, seed=0, **changes):
    """(settings, model) of a script, small, with random weights."""
    module, small = SCRIPTS[name]
    cfg = module.Settings(**{**small, "out": "", **changes})
    return cfg, shake(module.build(cfg), seed)

def toy_batch(cfg, step=0, rows=slice(None), rank=0, ranks=1):
    """A batch of random images, one size for each view, of which a rank takes `rows`."""
    g = seeded(step)
    images = [torch.randint(256, (cfg.batch_size, 3, view.size, view.size), generator=g, dtype=torch.uint8)
              for view in cfg.views]
    draws = torch.rand(cfg.batch_size, len(cfg.views), 13, generator=g)
    return ser.make_views([x[rows] for x in images], draws[rows], cfg, step, rank, ranks)

def schedule(cfg, model, epoch):
    """(learning rates, weight decays) of the optimizer's groups after before_step."""
    optimizer = cfg.optimizer(model)
    cfg.before_step(optimizer, epoch)
    return [[group[key] for group in optimizer.param_groups] for key in ("lr", "weight_decay")]


# ==== DINO ==================================================================================================
def test_dinos_loss_is_the_papers_cross_entropy_over_pairs_of_different_views():
    """Caron et al., Eq. 1 to 3: loops over pairs, images, prototypes; value and gradient, for 2 views of the
    teacher and 3 of the student."""
    def slow(*student):
        total, pairs = 0, 0
        for k, q in itertools.product(range(2), range(3)):
            if k != q:
                pairs += 1
                for t, s in zip(teacher[k], student[q]):
                    p = [math.exp((a - c) / 0.05) for a, c in zip(t.tolist(), center.tolist())]
                    for i in range(7):
                        log = s[i] / 0.2 - (s / 0.2).exp().sum().log()
                        total = total - p[i] / sum(p) * log / 4
        return total / pairs

    teacher = torch.randn(2, 4, 7, generator=seeded(1)).mul(0.1).double()
    student = torch.randn(3, 4, 7, generator=seeded(2)).double()
    center = torch.randn(7, generator=seeded(3)).mul(0.1).double()
    targets = [dino.dino_targets(t, center, 0.05) for t in teacher]
    ours = value_and_gradients(lambda *s: dino.dino_loss(s, targets, 0.2), *student)
    theirs = value_and_gradients(slow, *student)
    close(ours[0], theirs[0], 1e-9)
    for a, b in zip(ours[1], theirs[1]):
        close(a, b, 1e-9)

def test_dinos_head_is_normalised_twice_and_its_last_layer_begins_with_unit_rows():
    """Caron et al., 3.1 and the code: three layers, L2, weight norm; so the first outputs are cosines."""
    head, x = dino.Head(16, 32, 50), torch.randn(5, 16, generator=seeded())
    y = x
    for layer in (head.mlp[0], head.mlp[2]):
        y = F.gelu(F.linear(y, layer.weight, layer.bias))
    y = F.linear(y, head.mlp[4].weight, head.mlp[4].bias)
    rows = head.last.parametrizations.weight.original1
    wanted = F.cosine_similarity(y[:, None], rows[None], dim=-1)
    close(head(x), wanted)
    assert sum(p.numel() for p in dino.Head(384, 2048, 65536).parameters()) == (
        384 * 2048 + 2048 + 2048 ** 2 + 2048 + 2048 * 256 + 256 + 65536 * 256 + 65536)

def test_dinos_center_is_a_moving_mean_of_the_teacher_and_moves_after_its_use():
    """Caron et al., Eq. 4: c <- m c + (1 - m) mean over views and images of the teacher's outputs."""
    cfg, model = toy("dino", center_momentum=0.75)
    base, batch = model.base, toy_batch(cfg)
    base.center.copy_(torch.randn(24, generator=seeded(5)))
    before = base.center.clone()
    with torch.no_grad():
        outputs = [base.teacher_head(torch.cat([e.cls for e in base.teacher(view)])) for view in batch.views]
    torch.manual_seed(7)   # the student's stochastic depth
    losses = model(batch)
    close(base.center, 0.75 * before + 0.25 * torch.cat(outputs).mean(0))
    torch.manual_seed(7)
    encoded = iter(base.encoder([x for view in batch.views for x in view], cfg.equiv_layers))
    student = [base.head(torch.cat([next(encoded).cls for _ in view])) for view in batch.views]
    targets = [dino.dino_targets(t, before, base.sharpness) for t in outputs]
    close(losses["inv"], dino.dino_loss(student, targets, 0.1))
    used = torch.cat(targets).mean(0).double().tolist()
    entropy = -sum(p * math.log(p) for p in used if p > 0)
    assert losses["teacher_entropy"].item() == pytest.approx(entropy, rel=1e-4)

def test_dino_pairs_each_views_student_with_the_other_views_teacher_image_by_image():
    """Caron et al., Algorithm 1: H(t1, s2) / 2 + H(t2, s1) / 2, at the teacher's present temperature. Heads
    are scaled so that images differ: crossed views or images would show."""
    _, model = toy("dino", drop_path=0.0)
    base, generator = model.base, seeded(5)
    base.sharpness = 0.055
    with torch.no_grad():
        for head in (base.head, base.teacher_head):
            for name, p in head.named_parameters():
                p.zero_() if name.endswith("bias") else p.mul_(9 if "original0" in name else 3)
    cls, features = torch.randn(2, 2, 8, 16, generator=generator)
    center = base.center.copy_(torch.randn(24, generator=generator) * 0.02).clone()
    base.teacher.forward = lambda view: [ser.Encoded(view[0], {})]
    with torch.no_grad():
        targets = [((base.teacher_head(x) - center) / 0.055).softmax(-1) for x in features]
    found = base([[x] for x in features], [*cls])
    close(found, dino.dino_loss([base.head(c) for c in cls], targets, 0.1))
    for wrong in (targets[::-1], [t.roll(1, 0) for t in targets]):
        assert abs(found - dino.dino_loss([base.head(c) for c in cls], wrong, 0.1)) > 1e-3

def test_dinos_teacher_follows_the_student_which_stays():
    """Caron et al., 3.1: teacher <- m teacher + (1 - m) student, encoder and head, m = .982 at the start."""
    base = toy("dino")[1].base
    slow, fast = ([*base.teacher.parameters(), *base.teacher_head.parameters()],
                  [*base.encoder.parameters(), *base.head.parameters()])
    before = [[p.clone() for p in branch] for branch in (slow, fast)]
    base.update(0.0)
    for p, s, f in zip(slow, *before):
        close(p, 0.982 * s + 0.018 * f)
    assert all(map(torch.equal, fast, before[1]))

def test_dinos_schedules_have_their_stated_end_points():
    """FACTS of DINO and of the release: lr 8e-4 -> 1e-5 at batch 2048, weight decay .04 -> .4 without biases
    and norms, teacher temperature .04 -> .07 in 10 epochs, momentum .982 -> 1."""
    cfg = dino.Settings()
    assert (cfg.weight, cfg.temperature, cfg.lr) == (0.3, 0.5, pytest.approx(8e-4))
    model = toy("dino")[1]
    for epoch, lr, decay in ((0, 0, 0.04), (5, 4e-4, None), (10, 8e-4, None), (50, None, 0.22),
                             (100, 1e-5, 0.4)):
        lrs, decays = schedule(cfg, model, epoch)
        assert lr is None or lrs == [pytest.approx(lr)] * 3
        assert decays[1] == 0 and (decay is None or [decays[0], decays[2]] == [pytest.approx(decay)] * 2)
    kinds = {group["kind"]: group["params"] for group in cfg.optimizer(model).param_groups}
    assert all(p.dim() > 1 for p in kinds["matrices"]) and all(p.dim() == 1 for p in kinds["vectors"])
    assert sum(map(len, kinds.values())) == sum(p.requires_grad for p in model.parameters())
    base = model.base
    base.cfg = cfg
    for progress, temperature, momentum in ((0, 0.04, 0.982), (0.05, 0.055, None), (0.1, 0.07, None),
                                            (0.5, 0.07, 0.991), (1, 0.07, 1)):
        base.update(progress)
        assert base.sharpness == pytest.approx(temperature)
        assert momentum is None or base.diagnostics["momentum"] == pytest.approx(momentum)

def test_dinos_gradients_are_limited_one_by_one_and_the_last_layer_waits():
    """DINO: a parameter's gradient has norm .3 at most; in the first epoch the last layer takes no step."""
    cfg, model = toy("dino", freeze_epochs=1.0, clip=0.3)
    optimizer, norms = cfg.optimizer(model), []
    before = {name: torch.randn(p.shape, generator=seeded(i)) * 0.1
              for i, (name, p) in enumerate(model.named_parameters()) if p.requires_grad}
    for epoch in (1.0, 0.99):
        for name, p in model.named_parameters():
            p.grad = before[name].clone() if p.requires_grad else None
        cfg.before_step(optimizer, epoch)
        for name, gradient in before.items():
            p = model.get_parameter(name)
            if "head.last" in name and epoch < 1:
                assert p.grad is None
            else:
                close(p.grad, gradient * min(1, 0.3 / (gradient.norm().item() + 1e-6)))
                norms.append(gradient.norm().item())
    assert min(norms) < 0.3 < max(norms)   # both cases were met

def test_the_student_alone_has_stochastic_depth_growing_to_a_tenth():
    """DINO: drop path 0 to .1 over the student's blocks; none in the teacher, none in evaluation."""
    _, model = toy("dino", depth=5, cls_layer=2, drop_path=0.1)
    assert [b.drop_path for b in model.base.encoder.blocks] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert not any(b.drop_path for b in model.base.teacher.blocks)
    x = torch.rand(16, 3, 16, 16, generator=seeded())
    model.base.encoder.blocks[-1].drop_path = 0.5
    torch.manual_seed(0)
    assert not torch.equal(model.base.encoder([x])[0].cls, model.base.encoder([x])[0].cls)
    assert torch.equal(model.base.teacher([x])[0].cls, model.base.teacher([x])[0].cls)
    model.eval()
    assert torch.equal(model.base.encoder([x])[0].cls, model.base.encoder([x])[0].cls)

def test_stochastic_depth_drops_branches_of_whole_images_and_keeps_the_mean():
    """ser.Block: an image's tokens lose a branch together, at the stated rate; what stays is scaled up."""
    block = ser.Block(8, 2)
    block.drop_path, shapes = 0.25, [(300, 4), (500, 2)]
    torch.manual_seed(0)
    out = block.survive(torch.ones(2200, 8), shapes)
    assert sorted(out.unique().tolist()) == pytest.approx([0, 4 / 3])
    images = [*out[:1200].view(300, -1), *out[1200:].view(500, -1)]
    assert all((image == image[0]).all() for image in images)
    assert abs(sum(image[0] == 0 for image in images) / 800 - 0.25) < 0.05


# ==== Barlow Twins ==========================================================================================
def test_barlow_twins_loss_is_the_papers():
    """Zbontar et al., Eq. 1 and 2: loops over features and images, value and gradient."""
    def slow(a, b):
        total = 0
        for i, j in itertools.product(range(5), range(5)):
            c = sum(a[n, i] * b[n, j] for n in range(6)) / 6
            total = total + ((c - 1) ** 2 if i == j else 0.0051 * c ** 2)
        return total

    a, b = torch.randn(2, 6, 5, generator=seeded(), dtype=torch.float64)
    ours = value_and_gradients(
        lambda a, b: barlow_twins.barlow_loss(barlow_twins.cross_correlation(a, b), 0.0051), a, b)
    theirs = value_and_gradients(slow, a, b)
    close(ours[0], theirs[0], 1e-9)
    for x, y in zip(ours[1], theirs[1]):
        close(x, y, 1e-9)

def test_barlow_twins_correlates_standardised_projections():
    """Zbontar et al.: c of features with mean 0 and variance 1 over the batch, so that |c| <= 1; equal views
    have a diagonal of 1. Three layers of one width, no biases."""
    cfg, model = toy("barlow_twins")
    cls = torch.randn(32, 16, generator=seeded())
    z = model.base.projector(cls)
    close(z.mean(0), torch.zeros(16)), close(z.var(0, unbiased=False), torch.ones(16), 1e-2)
    c = barlow_twins.cross_correlation(z, z)
    close(c, torch.corrcoef(z.T), 1e-2)
    model.base([[]], [cls, cls])
    assert model.base.diagnostics["diagonal"].item() == pytest.approx(1, abs=1e-2)
    linears = [m for m in ser.build(barlow_twins.Settings(), lambda encoder, cfg: barlow_twins.BarlowTwins(
        encoder, dataclasses.replace(cfg, hidden=64))).base.projector if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features, m.bias) for m in linears] == [
        (384, 64, None), (64, 64, None), (64, 64, None)]

def test_barlow_twins_loss_is_taken_between_the_two_views_with_its_weight():
    """Zbontar et al., Algorithm 1, forward as a whole, on two different views."""
    _, model = toy("barlow_twins", off_diagonal=0.3)
    cls = [*torch.randn(2, 32, 16, generator=seeded())]
    a, b = (model.base.projector(c) for c in cls)
    close(model.base([[], []], cls), barlow_twins.barlow_loss(a.T @ b / 32, 0.3))

def test_barlow_twins_schedule_has_its_stated_end_points():
    """FACTS of the release: lr 8e-4 at batch 2048, down to a thousandth of it; weight decay .1; clip .3."""
    cfg = barlow_twins.Settings()
    assert (cfg.weight, cfg.temperature, cfg.hidden, cfg.off_diagonal) == (0.5, 0.3, 8192, 0.0051)
    for epoch, lr in ((0, 0), (10, 8e-4), (100, 8e-7)):
        assert schedule(cfg, nn.Linear(1, 1), epoch) == [[pytest.approx(lr)], [0.1]]
    layer = nn.Linear(2, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([0.1])
    cfg.before_step(cfg.optimizer(layer), 20)
    close(layer.weight.grad, torch.tensor([[0.18, 0.24]])), close(layer.bias.grad, torch.tensor([0.1]))


# ==== 2 + 4 views ===========================================================================================
def test_local_views_are_queries_only():
    """A.1, the list of (query view, key view) for 2 + 4: ten pairs, keys from the global views alone."""
    pairs = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]
    cfg, model = toy("multicrop")
    assert sorted(model.base.pairs) == sorted(multicrop.query_key_pairs(6)) == pairs
    assert multicrop.query_key_pairs(2) == [*ser.MoCoV3.pairs]
    seen, forward = [], ser.ViT.forward
    model.base.momentum_encoder.forward = lambda images, *rest: (
        seen.extend(x.shape[-1] for x in images), forward(model.base.momentum_encoder, images, *rest))[1]
    batch = toy_batch(cfg)
    losses = model(batch, diagnose=True)
    assert sorted(seen) == sorted(x.shape[-1] for view in batch.views[:2] for x in view)
    assert losses["inv_chance"] == pytest.approx(10 * 2 * 0.2 * math.log(8))

def test_l_inv_of_2_and_4_views_is_the_sum_of_infonce_over_the_ten_pairs():
    """A.1, value: each of six queries against the keys of the global views but its own; inv_top1 is that of
    the global pair."""
    cfg, model = toy("multicrop")
    batch, base = toy_batch(cfg), model.base
    cls = [torch.cat([e.cls for e in base.encoder(view)]) for view in batch.views]
    q = [F.normalize(base.predictor(base.projector(c)), dim=1) for c in cls]
    k = [F.normalize(base.momentum_projector(torch.cat([e.cls for e in base.momentum_encoder(view)])), dim=1)
         for view in batch.views[:2]]
    wanted = sum(0.4 * F.cross_entropy(q[i] @ k[j].T / 0.2, torch.arange(8))
                 for i in range(6) for j in range(2) if i != j)
    close(base(batch.views, cls), wanted, 1e-4)
    assert base.diagnostics["inv_top1"] == ((q[0] @ k[1].T).argmax(1) == torch.arange(8)).float().mean()

def test_the_views_are_two_global_and_four_local_crops():
    """A.1 and DINO: 2 x 224, 4 x 96 pixels of 5% to 25% of the image; b2 sees the whole one at each size."""
    views = multicrop.Settings().views
    assert [v.size for v in views] == [224] * 2 + [96] * 4
    assert views[:2] == ser.Config().views and views[2:] == (ser.View(96, (0.05, 0.25), 0.5, 0.0),) * 4
    cfg, ramp = toy("multicrop")[0], torch.arange(0, 256, 2, dtype=torch.uint8).expand(128, -1)
    data = ser.Views(torch.stack([ramp, ramp.T, torch.zeros_like(ramp)]).expand(60, -1, -1, -1), cfg)
    locals_ = torch.stack([x for i in range(60) for x in data[0, i, False][0][2:]]).int()   # (240, 3, 8, 8)
    width, height = ((x[:, 7] - x[:, 0]).abs() / 2 * 8 / 7 for x in (locals_[:, 0, 4], locals_[:, 1, :, 4]))
    area = width * height / 128 ** 2
    assert 0.035 < area.min() < 0.08 and 0.2 < area.max() < 0.28
    assert [x.shape[-1] for x in data[0, 1, True][0]] == [16, 16, 8, 8, 8, 8]

def test_l_equiv_of_a_pair_uses_only_that_pair():
    """A.1: within each pair. Three terms, each the loss of its pair alone, and another pair's images change
    nothing."""
    cfg, model = toy("multicrop", group=("rot90", "hflip"))
    batch = toy_batch(cfg)
    whole = model(batch)["equiv"]
    alone = []
    for v in (0, 2, 4):
        pair = ser.Batch([[view[-1]] for view in batch.views[v:v + 2]], batch.geometry[v:v + 2])
        maps = [model.base.encoder(view, cfg.equiv_layers)[0].maps[1] for view in pair.views]
        tokens = [x.flatten(2).mT for x in (ser.rho(ser.relative(*pair.geometry[::-1]), maps[0]), maps[1])]
        alone.append(ser.patch_ntxent(*map(model.heads["1"], tokens), cfg.temperature))
    close(whole, sum(alone), 1e-4)
    batch.views[2][-1].normal_(generator=seeded(9))   # a local view of the second pair
    changed = model(batch)["equiv"]
    close(changed - whole, changed - sum(alone), 1e-4)
    pair = ser.Batch([[view[-1]] for view in batch.views[2:4]], batch.geometry[2:4])
    maps = [model.base.encoder(view, cfg.equiv_layers)[0].maps[1] for view in pair.views]
    tokens = [x.flatten(2).mT for x in (ser.rho(ser.relative(*pair.geometry[::-1]), maps[0]), maps[1])]
    second = ser.patch_ntxent(*map(model.heads["1"], tokens), cfg.temperature)
    close(changed, alone[0] + second + alone[2], 1e-4)
    assert abs(changed - whole) > 1e-3

def test_without_local_pairs_it_is_moco_v3_with_ser():
    """Table 1: --local-pairs 0 leaves the two-view run, to the last bit."""
    cfg, model = toy("multicrop", local_pairs=0)
    plain = shake(ser.build(ser.Config(**TOY)))
    batch = toy_batch(cfg)
    assert torch.equal(model(batch)["loss"], plain(batch)["loss"])


# ==== All three =============================================================================================
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_trained_parameter_gets_a_gradient_and_no_other(name):
    """A teacher and a momentum branch get none; everything trained does, from the loss as a whole."""
    cfg, model = toy(name)
    model(toy_batch(cfg))["loss"].backward()
    for parameter, p in model.named_parameters():
        assert (p.grad is not None and p.grad.abs().sum() > 0) == p.requires_grad, parameter
        assert p.requires_grad != any(word in parameter for word in ("teacher", "momentum")) or (
            name == "multicrop" and "patch_embed" in parameter)

@pytest.mark.parametrize("name", SCRIPTS)
def test_weight_0_and_ratio_0_are_the_control_and_the_plain_method(name):
    """Table 2: with weight 0 the loss is the base method's own on b1 and b2; with ratio 0 there is no b2."""
    cfg, model = toy(name, weight=0.0)
    losses = model(toy_batch(cfg))
    assert torch.equal(losses["loss"], losses["inv"]) and losses["equiv"] > 0
    cfg, model = toy(name, ratio=0.0, cls_layer=0)
    batch = toy_batch(cfg)
    assert len(model.heads) == 0 and batch.geometry is None and "equiv" not in model(batch)

def without_batchnorm(name):
    """A model without BatchNorm, whose statistics are a rank's own on gloo, and without stochastic depth."""
    cfg, model = toy(name, batch_size=16, **({"drop_path": 0.0} if name == "dino" else {}))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm1d):
            model.get_submodule(path.rpartition(".")[0])[int(path.rpartition(".")[2])] = nn.Identity()
    return cfg, model

def rank_results(rank, ranks):
    """Loss, gradients and buffers of each script's model after one step on this rank's rows."""
    found = {}
    for name in SCRIPTS:
        cfg, model = without_batchnorm(name)
        rows = torch.cat([part.chunk(ranks)[rank] for part in (torch.arange(8), torch.arange(8, 16))])
        batch = toy_batch(cfg, 0, rows, rank, ranks)
        parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        losses = parallel(batch)
        losses["loss"].backward()
        found[name] = {"loss": losses["loss"].detach(),
                       "center": getattr(model.base, "center", torch.zeros(1)),
                       "gradients": {n: p.grad for n, p in model.named_parameters() if p.requires_grad}}
    return found

def rank_main(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.save(rank_results(rank, ranks), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)   # gloo's threads can abort an interpreter that ends normally, all work done

def test_two_ranks_equal_one_process(tmp_path):
    """Centering, cross-correlation and InfoNCE under DDP: the mean over ranks of losses and gradients is that
    of one process, and the center is the same everywhere."""
    run_ranks(rank_main, 2, tmp_path)
    ranks, one = [torch.load(tmp_path / f"{r}.pt") for r in range(2)], rank_results(0, 1)
    for name, whole in one.items():
        close(sum(found[name]["loss"] for found in ranks) / 2, whole["loss"])
        scale = max(g.abs().max() for g in whole["gradients"].values())
        for found in ranks:
            close(found[name]["center"], whole["center"])
            for parameter, gradient in whole["gradients"].items():
                error = (found[name]["gradients"][parameter] - gradient).abs().max()
                assert error < 1e-5 * scale, (name, parameter)

@pytest.fixture(scope="module")
def toy_runs(tmp_path_factory):
    """A run of each script from its command line, on drawn images: 6 steps of 256 images."""
    runs = {}
    for name, (module, small) in SCRIPTS.items():
        out = tmp_path_factory.mktemp(name)
        settings = {**small, "batch_size": 256, "ratio": 1 / 64, "epochs": 0.375, "warmup_epochs": 0.1,
                    "out": out}
        assert ser.main(flags(**settings), module.Settings, module.build) == 0
        runs[name] = settings
    return runs

@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_resumes_bit_for_bit_and_reports(name, toy_runs, tmp_path, capsys):
    """A run stopped in its middle goes on to the weights, optimizer and buffers of the uninterrupted one,
    stochastic depth included; the loss fell, or DINO's center moved."""
    (module, _), settings = SCRIPTS[name], toy_runs[name]
    cfg = ser.parse(flags(**{**settings, "out": tmp_path}), module.Settings)
    with pytest.raises(SystemExit):
        ser.train(dataclasses.replace(cfg, log_every=3), module.build, Late())
    assert 0 < ser.load_checkpoint(tmp_path / "last.pt")["step"] < 6
    assert ser.main(flags(**{**settings, "out": tmp_path}), module.Settings, module.build) == 0
    assert same_run(tmp_path, settings["out"])
    assert "patch retrieval" in (said := capsys.readouterr().out) and module.Settings.program in said
    rows = [r for r in records(settings["out"]) if "step" in r]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and all(math.isfinite(r["loss"]) for r in rows)
    assert {"loss", "inv", "equiv", "patch_top1", "grad_encoder", "grad_equiv", "lr"} <= set(rows[0])

class Late(list):
    """Signals seen so far: none on the first look, SIGTERM on the following ones."""
    def __len__(self):
        self.looks = getattr(self, "looks", 0) + 1
        return int(self.looks > 4)

    def __getitem__(self, index):
        return 15

@pytest.mark.parametrize("name", SCRIPTS)
def test_its_checkpoint_evaluates(name, toy_runs, tmp_path, capsys):
    """eval_linear.py needs to know nothing of the method: encoder, k-NN and heads as for ser.py's own."""
    path = Path(toy_runs[name]["out"]) / "last.pt"
    assert ser.load_encoder(path).shape["dim"] == 16
    code = eval_linear.main(["--checkpoint", str(path), "--knn", "--out", str(tmp_path / "eval.json")])
    assert code == 0 and "20-NN" in capsys.readouterr().out

BAD = [   # script, flags, what the one line on stderr must hold
    ("dino", {"moco_hidden": 8}, "--moco-hidden"), ("dino", {"drop_path": 1.5}, "--drop-path 1.5"),
    ("dino", {"student_temperature": 0.0}, "--student-temperature 0.0"),
    ("barlow_twins", {"momentum": 0.9}, "--momentum"),
    ("barlow_twins", {"off_diagonal": -1}, "--off-diagonal"), ("multicrop", {"local_size": 10}, "try 12"),
    ("multicrop", {"local_crop_min": 0.5}, "--local-crop-min 0.5"),
    ("multicrop", {"local_pairs": -1}, "--local-pairs -1")]

@pytest.mark.parametrize("name, change, words", BAD)
def test_a_wrong_flag_is_one_line_and_exit_code_2(name, change, words, tmp_path, capsys):
    """Bad input: one line that begins with the script and names the value; nothing is trained."""
    module, small = SCRIPTS[name]
    assert ser.main(flags(**{**small, "out": tmp_path / "o", **change}), module.Settings, module.build) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and error.startswith(f"{module.Settings.program}: ") and words in error
    assert not (tmp_path / "o").exists()

def test_a_run_of_another_head_or_program_is_not_continued(toy_runs, capsys, monkeypatch):
    """Bad input: the code of the method has changed since, or another program has the same settings."""
    settings = toy_runs["barlow_twins"]
    before = (Path(settings["out"]) / "last.pt").read_bytes()
    argv = flags(**settings)

    def wider(encoder, cfg):
        return barlow_twins.BarlowTwins(encoder, dataclasses.replace(cfg, hidden=32))

    assert ser.main(argv, barlow_twins.Settings, lambda cfg: ser.build(cfg, wider)) == 2
    assert "another model" in capsys.readouterr().err
    monkeypatch.setattr(barlow_twins.Settings, "program", "mine.py")
    assert ser.main(argv, barlow_twins.Settings, barlow_twins.build) == 2
    assert "program -m paper.barlow_twins there, mine.py here" in capsys.readouterr().err
    assert (Path(settings["out"]) / "last.pt").read_bytes() == before

def test_a_run_of_another_method_is_not_overwritten(toy_runs, capsys):
    """Bad input: --out of a DINO run given to Barlow Twins: one line, and the checkpoint stays."""
    out = Path(toy_runs["dino"]["out"])
    before = (out / "last.pt").read_bytes()
    small = {**SCRIPTS["barlow_twins"][1], "out": out}
    assert ser.main(flags(**small), barlow_twins.Settings, barlow_twins.build) == 2
    assert "of another run" in capsys.readouterr().err and (out / "last.pt").read_bytes() == before

@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_of_its_header_parse(name):
    """Each script begins with its commands: on drawn images, with data, plain, control, evaluation."""
    module, _ = SCRIPTS[name]
    commands = re.findall(rf"-m paper\.{name}((?: --[\w-]+(?: [\w./]+)+)*)", module.__doc__)
    assert len(commands) == 4
    found = [ser.parse(command.split(), module.Settings) for command in commands]
    assert [(c.ratio > 0, c.weight > 0) for c in found[1:]] == [(True, True), (False, True), (True, False)]
    assert f"--checkpoint {found[1].out}/last.pt" in module.__doc__ and found[0].image_size == 32

def test_torchrun_runs_a_script_as_a_module(tmp_path):
    """Two real ranks: `torchrun -m paper.multicrop`, views of two sizes under DDP."""
    small = {**SCRIPTS["multicrop"][1], "batch_size": 256, "ratio": 1 / 64, "epochs": 0.125, "out": tmp_path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m",
               "paper.multicrop", *flags(**small)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert ser.load_checkpoint(tmp_path / "last.pt")["step"] == 2 and records(tmp_path)[0]["ranks"] == 2
