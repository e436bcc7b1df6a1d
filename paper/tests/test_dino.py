import torch
from pytest import approx

import ser
from paper.methods import dino
from paper.tests.test_methods import check_gradients, layers, settings, toy, toy_on_views
from test_ser import close, noise, parametrize, trained


def test_each_view_learns_from_the_other_and_the_center_moves_after_its_use():
    model, views = toy_on_views("dino")
    base = model.base
    assert base.head.mlp[0].out_features == 24     # of --hidden
    base.update(0.05)
    before = 0.1 * noise(20, seed=3)
    base.center.copy_(before)

    cls = [ser.encode_view(base.encoder, view)[0] for view in views]
    s1, s2 = [base.head(x) for x in cls]
    t1, t2 = [base.teacher_head(ser.encode_view(base.teacher, view)[0]) for view in views]
    wanted = 0.0     # Caron et al., Eq. 1, 2 and 4, Algorithm 1
    for t, s in ((t1, s2), (t2, s1)):
        p_t = ((t - before) / base.tau_t).softmax(1).detach()
        wanted = wanted + torch.nn.functional.cross_entropy(s / 0.1, p_t) / 2
    center = 0.9 * before + 0.1 * torch.cat([t1, t2]).mean(0)

    check_gradients(base(views, cls), wanted, [*cls, *base.head.parameters()])
    close(base.state_dict()["center"], center)     # with which a run goes on


def test_the_head_begins_as_dinos_and_gives_cosines_in_full_precision():
    head = dino.Head(64, 128, 50)
    assert layers(head.mlp) == "Linear:2 GELU:0 Linear:2 GELU:0 Linear:2"
    for layer, width in zip(head.mlp[::2], (128, 128, 256)):
        assert layer.out_features == width
        assert layer.weight.std().item() == approx(0.02, rel=0.1)
        assert layer.weight.abs().max() > 0.05 and layer.bias.eq(0).all()

    _, rows = head.last.parametrizations.weight.parameters()
    x = noise(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        features = head.mlp(x).float()
        found = head(x)
    close(found, torch.cosine_similarity(features[:, None], rows[None], dim=-1))


@parametrize("progress, momentum, tau_t", [(5 / 18, 0.983572, 0.02 + 0.1 / 6), (1, 1, 0.06)])
def test_the_teacher_begins_as_the_student_and_follows_it(progress, momentum, tau_t):
    """Caron et al., 3.1: m from .98 to 1, and tau_t from .02 to .06, here in 6 of 9 epochs."""
    flags = ("--epochs 9 --teacher-temp-epochs 6 --first-teacher-temp 0.02 --teacher-temp 0.06 "
             "--momentum 0.98")
    base = dino.build(settings("dino", flags)).base
    student = torch.nn.ModuleList([base.encoder, base.head])
    teacher = torch.nn.ModuleList([base.teacher, base.teacher_head])
    wanted = {name: p + 1 - momentum for name, p in student.state_dict().items()}
    for p in student.parameters():
        p.data += 1

    base.update(progress)
    assert base.tau_t == approx(tau_t)
    close(teacher.state_dict(), wanted)


@parametrize("encoder, most", [("encoder", 0.5), ("teacher", 0.0)])
def test_the_student_alone_has_stochastic_depth(encoder, most):
    """In training, both branches of a block leave out a share of the images, and keep the mean."""
    torch.manual_seed(0)
    model = toy("dino", "--drop-path 0.5")
    for block, share in zip(getattr(model.base, encoder).blocks, (0, most / 2, most)):
        for layer in (block.attn.proj, block.mlp.fc2):
            x = noise(2000, 2, layer.in_features)
            branch = torch.nn.functional.linear(x, layer.weight, layer.bias)
            found = layer(x)
            left_out = found.eq(0).flatten(1).all(1)
            assert left_out.float().mean() == approx(share, abs=0.03)
            close(found[~left_out], branch[~left_out] / (1 - share))
            close(layer.eval()(x), branch)


@parametrize("epoch, rate, decay, frozen", [
    (1.5, 1.2e-4, 0.04019982, True), (2, 1.6e-4, 0.04035519, False), (99.999, 1e-5, 0.4, False)])
def test_a_step_has_the_rates_of_its_epoch_clips_and_freezes(epoch, rate, decay, frozen):
    args = settings("dino", "--data some --batch-size 2048 --freeze-epochs 2 --clip 0.2")
    model = dino.build(args)
    optimizer = dino.optimizer(model, args)
    dino.schedule(optimizer, args, epoch)

    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    for place, (name, p) in enumerate(trained(model).items(), 1):
        group = groups.pop(p)
        wanted = rate, decay if p.dim() > 1 else 0
        assert (group["lr"], group["weight_decay"]) == approx(wanted, rel=1e-4), name
        p.grad = torch.full(p.shape, 0.01 * place)     # norms from 0.1 to 46
    assert not groups

    optimizer.step()
    for place, (name, p) in enumerate(trained(model).items(), 1):
        rests = frozen and "head.last" in name
        assert p.equal(before[name]) == rests, name
        if not rests:
            gradient = torch.full(p.shape, 0.01 * place)
            close({name: p.grad}, {name: gradient * min(1, 0.2 / gradient.norm().item())})
