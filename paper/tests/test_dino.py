"""Every claim of paper/methods/dino.py as an executable sentence.

    python -m pytest -q paper/tests/test_dino.py
"""
import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ser
from paper.methods import dino
from paper.tests import base_methods as shared
from test_ser import close, flags, seeded, value_and_gradients
from test_ser import signals_stay_pytests     # noqa: F401, a fixture for every test here too

pytestmark = pytest.mark.usefixtures("drawn_once")
SMALL = shared.SMALL | dict(hidden=16, outputs=24, base_lr=1e-2, freeze_epochs=0.1)

def toy(**changes):
    return shared.toy(dino, SMALL, **changes)

# ==== The loss ====================================================================================
def slow_cross_entropy(t, s, center, tau_t, tau_s):
    """H(P_t, P_s) of one image as loops over outputs (Caron et al., Eq. 1 to 4)."""
    exponentials = [math.exp((a - c) / tau_t) for a, c in zip(t.tolist(), center.tolist())]
    total = sum((x / tau_s).exp() for x in s)
    entropy = 0
    for exponential, x in zip(exponentials, s):
        p_t = exponential / sum(exponentials)
        p_s = (x / tau_s).exp() / total
        entropy = entropy - p_t * p_s.log()
    return entropy

def test_the_cross_entropy_is_the_papers():
    """Caron et al., Eq. 1 and 2, value and gradient: the mean over images."""
    t, s = torch.randn(2, 4, 7, generator=seeded(), dtype=torch.float64).mul(0.1)
    center = torch.randn(7, generator=seeded(3), dtype=torch.float64).mul(0.1)

    def fast(s):
        return dino.cross_entropy(dino.teacher_says(t, center, 0.05), s, 0.2)

    def slow(s):
        return sum(slow_cross_entropy(a, b, center, 0.05, 0.2) for a, b in zip(t, s)) / len(s)

    value, gradients = value_and_gradients(fast, s)
    wanted, slow_gradients = value_and_gradients(slow, s)
    close(value, wanted, 1e-9)
    close(gradients[0], slow_gradients[0], 1e-9)

def spread(base):
    """Scale the heads so that images differ: crossed views or images show."""
    with torch.no_grad():
        for head in (base.head, base.teacher_head):
            for name, p in head.named_parameters():
                if name.endswith("bias"):
                    p.zero_()
                else:
                    p.mul_(9 if "original0" in name else 3)

def test_each_views_student_learns_from_the_other_views_teacher_image_by_image():
    """Caron et al., Algorithm 1 and Eq. 3, as loops over images, at the present tau_t and center;
    then views or images exchanged, which give another value."""
    cfg, model = toy(drop_path=0.0)
    base = model.base
    spread(base)
    base.tau_t = 0.055
    cls, features = torch.randn(2, 2, 8, 16, generator=seeded(5))
    base.center.copy_(torch.randn(24, generator=seeded(6)) * 0.02)
    center = base.center.clone()
    base.teacher.forward = lambda images: [ser.Encoded(images[0], {}, {})]
    views = [ser.View([x], None, None, None) for x in features]
    found = base(views, [*cls])
    s1, s2 = base.head(cls[0]), base.head(cls[1])
    t1, t2 = base.teacher_head(features[0]), base.teacher_head(features[1])

    def both_directions(t1, t2):
        terms = [slow_cross_entropy(t, s, center, 0.055, 0.1)
                 for t, s in [*zip(t1, s2), *zip(t2, s1)]]
        return sum(terms) / len(terms)

    close(found, both_directions(t1, t2), 1e-4)
    assert abs(found - both_directions(t2, t1)) > 1e-3
    assert abs(found - both_directions(t1.roll(1, 0), t2.roll(1, 0))) > 1e-3

def test_the_center_is_a_moving_mean_of_the_teacher_and_moves_after_its_use():
    """Caron et al., Eq. 4: c <- m c + (1 - m) mean over views and images of the teacher's outputs;
    the logged entropy is that of the teacher's mean distribution."""
    cfg, model = toy(center_momentum=0.75, drop_path=0.0)
    base = model.base
    batch = shared.toy_batch(cfg)
    base.center.copy_(torch.randn(24, generator=seeded(5)))
    before = base.center.clone()
    with torch.no_grad():
        t = [base.teacher_head(shared.encoded_cls(base.teacher, view)) for view in batch.views]
        s = [base.head(shared.encoded_cls(base.encoder, view)) for view in batch.views]
    losses = model(batch)
    close(base.center, 0.75 * before + 0.25 * torch.cat(t).mean(0))
    targets = [dino.teacher_says(x, before, 0.04) for x in t]
    wanted = dino.cross_entropy(targets[0], s[1], 0.1) + dino.cross_entropy(targets[1], s[0], 0.1)
    close(losses["inv"], wanted / 2, 1e-4)
    used = torch.cat(targets).mean(0).double().tolist()
    entropy = -sum(p * math.log(p) for p in used if p > 0)
    assert losses["teacher_entropy"].item() == pytest.approx(entropy, rel=1e-4)

def test_at_chance_the_loss_is_ln_k_and_the_teacher_uses_all_outputs():
    """The log's inv_chance: student and teacher that say the same of every output."""
    cfg, model = toy()
    with torch.no_grad():
        model.base.head.last.parametrizations.weight.original0.zero_()
        model.base.teacher_head.last.parametrizations.weight.original0.zero_()
    losses = model(shared.toy_batch(cfg))
    assert losses["inv"].item() == pytest.approx(math.log(24), rel=1e-5)
    assert losses["inv_chance"] == pytest.approx(losses["teacher_entropy"].item(), rel=1e-5)

# ==== The head and the teacher ====================================================================
def test_the_heads_first_outputs_are_cosines():
    """Caron et al., 3.1: three layers with GELU, L2, weight norm; rows of length 1 at the start."""
    head = dino.Head(16, 32, 50)
    x = torch.randn(5, 16, generator=seeded())
    y = x
    for layer in (head.mlp[0], head.mlp[2]):
        y = F.gelu(F.linear(y, layer.weight, layer.bias))
    y = F.linear(y, head.mlp[4].weight, head.mlp[4].bias)
    rows = head.last.parametrizations.weight.original1
    close(head(x), F.cosine_similarity(y[:, None], rows[None], dim=-1))
    with torch.device("meta"):
        count = sum(p.numel() for p in dino.Head(384, 2048, 65536).parameters())
    biases = 2048 + 2048 + 256
    assert count == 384 * 2048 + 2048 * 2048 + 2048 * 256 + biases + 65536 * 256 + 65536

def test_the_heads_initial_weights_are_truncated_normal():
    """DINO's code: standard deviation 0.02, biases zero."""
    torch.manual_seed(0)
    head = dino.Head(64, 128, 50)
    for layer in head.mlp[::2]:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.any()

def test_the_outputs_are_of_full_precision_under_autocast():
    """The last layer, whose outputs tau_t divides, is computed in fp32."""
    head = dino.Head(16, 32, 50)
    x = torch.randn(5, 16, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        features = head.mlp(x)
        found = head(x)
    assert found.dtype == torch.float32 and features.dtype == torch.bfloat16
    assert torch.equal(found, head.last(F.normalize(features.float(), dim=-1)))

def test_the_teacher_follows_the_student_which_stays():
    """Caron et al., 3.1: teacher <- m teacher + (1 - m) student, encoder and head, m = .982 at
    first."""
    base = toy()[1].base
    slow = [*base.teacher.parameters(), *base.teacher_head.parameters()]
    fast = [*base.encoder.parameters(), *base.head.parameters()]
    slow_before = [p.clone() for p in slow]
    fast_before = [p.clone() for p in fast]
    base.update(0.0)
    for p, teacher, student in zip(slow, slow_before, fast_before):
        close(p, 0.982 * teacher + 0.018 * student)
    assert all(map(torch.equal, fast, fast_before))

def test_the_teacher_begins_as_the_student():
    """Caron et al., Algorithm 1; the patch embedding is trained."""
    base = dino.build(dino.Settings(**SMALL)).base
    assert base.encoder.patch_embed["proj"].weight.requires_grad
    for student, teacher in ((base.encoder, base.teacher), (base.head, base.teacher_head)):
        weights = teacher.state_dict()
        for name, weight in student.state_dict().items():
            assert torch.equal(weight, weights[name])

def test_every_trained_parameter_gets_a_gradient_and_the_teacher_none():
    """The loss as a whole; nothing is left without use."""
    shared.check_gradients(dino, SMALL | {"drop_path": 0.0}, ("teacher",))

# ==== Stochastic depth ============================================================================
def test_the_student_alone_has_stochastic_depth_growing_to_a_tenth():
    """DINO: drop path 0 to .1 over the student's blocks; none in the teacher, none in
    evaluation."""
    _, model = toy(depth=5, cls_layer=2, drop_path=0.1)
    student = model.base.encoder
    teacher = model.base.teacher
    assert [block.drop for block in student.blocks] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert all(type(block) is ser.Block for block in teacher.blocks)
    student.blocks[-1].drop = 0.5
    x = torch.rand(16, 3, 16, 16, generator=seeded())
    torch.manual_seed(0)
    assert not torch.equal(student([x])[0].cls, student([x])[0].cls)
    assert torch.equal(teacher([x])[0].cls, teacher([x])[0].cls)
    model.eval()
    teacher.load_state_dict(student.state_dict())     # the same names
    assert torch.equal(student([x])[0].cls, teacher([x])[0].cls)

def test_stochastic_depth_drops_a_branch_of_whole_images_and_keeps_the_mean():
    """Huang et al.: an image's tokens lose a branch together, at the stated rate; the others' is
    scaled up; attention and MLP are dropped independently of each other."""
    block = dino.StochasticBlock(ser.Block(4, 2), 4, 0.25)
    block.attention = lambda x, batches: torch.full_like(x, 1.0)
    block.feed_forward = lambda x: torch.full_like(x, 10.0)
    torch.manual_seed(0)
    images = []
    for out in block([torch.zeros(3000, 4, 4), torch.zeros(1000, 2, 4)]):
        assert (out == out[:, :1, :1]).all()
        images.append(out[:, 0, 0])
    found = torch.cat(images)
    for value, share in ((0, 1 / 16), (4 / 3, 3 / 16), (40 / 3, 3 / 16), (44 / 3, 9 / 16)):
        assert (found - value).abs().lt(1e-4).float().mean().item() == pytest.approx(share,
        abs=0.025)

def test_without_drop_path_the_student_is_the_plain_encoder():
    """--drop-path 0: the same function in training too."""
    _, model = toy(drop_path=0.0)
    plain = ser.ViT(**model.base.encoder.shape)
    plain.load_state_dict(model.base.encoder.state_dict())
    x = torch.rand(4, 3, 16, 16, generator=seeded())
    assert model.training
    close(model.base.encoder([x])[0].cls, plain([x])[0].cls)

# ==== Settings and schedules ======================================================================
def test_the_settings_are_the_papers_and_the_releases():
    """4.1 for tau; the release for lambda, rates, temperatures; DINO for the rest."""
    cfg = dino.Settings()
    assert (cfg.weight, cfg.temperature, cfg.lr) == (0.3, 0.5, pytest.approx(8e-4))
    assert (cfg.crop_min, cfg.clip, cfg.drop_path, cfg.freeze_epochs) == (0.25, 0.3, 0.1, 1.0)
    assert (cfg.student_temp, cfg.center_momentum) == (0.1, 0.9)

def test_the_schedules_have_their_stated_end_points():
    """lr 8e-4 -> 1e-5 at batch 2048, weight decay .04 -> .4 without biases and norms, tau_t .04 ->
    .07 in 10 epochs, momentum .982 -> 1."""
    cfg = dino.Settings()
    model = toy()[1]
    for epoch, lr in ((0, 0), (5, 4e-4), (10, 8e-4), (100, 1e-5)):
        assert shared.rates(cfg, model, epoch)[0] == [pytest.approx(lr)] * 3
    for epoch, decay in ((0, 0.04), (50, 0.22), (100, 0.4)):
        wanted = [pytest.approx(decay), 0, pytest.approx(decay)]
        assert shared.rates(cfg, model, epoch)[1] == wanted
    base = model.base
    base.cfg = cfg
    for progress, tau_t, momentum in ((0, 0.04, 0.982), (0.05, 0.055, None), (0.1, 0.07, None),
                                      (0.5, 0.07, 0.991), (1, 0.07, 1)):
        base.update(progress)
        assert base.tau_t == pytest.approx(tau_t) == base.diagnostics["teacher_temp"]
        if momentum is not None:
            assert base.diagnostics["momentum"] == pytest.approx(momentum)
    base.cfg = dataclasses.replace(cfg, teacher_temp_epochs=0.0)     # no rise
    base.update(0)
    assert base.tau_t == 0.07

def test_phases_that_a_run_is_too_short_for_take_a_tenth_of_it():
    """The rise of tau_t and the frozen last layer, as the warmup: at the end of a run that is not
    longer than they are, tau_t has risen and the last layer takes steps."""
    for epochs, rise, freeze in ((100.0, 10, 1), (10.0, 1, 1), (1.0, 0.1, 0.1), (0.5, 0.05, 0.05)):
        cfg = dino.Settings(epochs=epochs)
        assert (cfg.teacher_temp_rise, cfg.freeze) == (pytest.approx(rise), pytest.approx(freeze))
        assert cfg.teacher_temp_rise == pytest.approx(cfg.warmup)     # 10 epochs, both
    model = toy(epochs=0.5, teacher_temp_epochs=10.0, freeze_epochs=1.0)[1]
    base = model.base
    for progress, tau_t in ((0.05, 0.055), (0.1, 0.07), (0.9, 0.07)):
        base.update(progress)
        assert base.tau_t == pytest.approx(tau_t)
    optimizer = base.cfg.optimizer(model)
    last = base.head.last.parametrizations.weight.original1
    for epoch, frozen in ((0.049, True), (0.051, False)):
        last.grad = torch.ones_like(last)
        base.cfg.before_step(optimizer, epoch)
        assert (last.grad is None) == frozen

def test_weight_decay_spares_vectors_and_the_last_layer_is_a_group_of_its_own():
    """DINO: biases and norms are not decayed; every trained parameter is in one group."""
    cfg, model = toy()
    groups = cfg.optimizer(model).param_groups
    kinds = {group["kind"]: group["params"] for group in groups}
    assert list(kinds) == ["matrices", "vectors", "last"]
    assert all(p.dim() > 1 for p in kinds["matrices"])
    assert all(p.dim() == 1 for p in kinds["vectors"])
    last = model.base.head.last.parametrizations.weight
    assert {id(p) for p in kinds["last"]} == {id(last.original0), id(last.original1)}
    found = [id(p) for params in kinds.values() for p in params]
    wanted = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(found) == sorted(wanted)

def test_gradients_are_limited_one_by_one_and_the_last_layer_waits():
    """DINO: a parameter's gradient has a norm of .3 at most; in the first epoch the last layer
    takes no step."""
    cfg, model = toy(freeze_epochs=1.0, clip=0.3)
    optimizer = cfg.optimizer(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: torch.randn(p.shape, generator=seeded(i)) * 0.1
              for i, (name, p) in enumerate(trained.items())}
    norms = [gradient.norm().item() for gradient in before.values()]
    assert min(norms) < 0.3 < max(norms)     # both cases are met
    for epoch in (1.0, 0.99):
        for name, p in trained.items():
            p.grad = before[name].clone()
        cfg.before_step(optimizer, epoch)
        for name, p in trained.items():
            if "base.head.last" in name and epoch < 1:
                assert p.grad is None
            else:
                norm = before[name].norm().item()
                close(p.grad, before[name] * min(1, 0.3 / (norm + 1e-6)))

def test_weight_and_ratio_mean_what_they_say():
    """Eq. 3 and Table 2's baseline."""
    shared.check_weight_and_ratio(dino, SMALL)

# ==== Ranks, runs, command line ===================================================================
def rank_main(rank, ranks, folder):
    shared.save_one_step(dino, SMALL, rank, ranks, folder)

def test_two_ranks_equal_one_process(tmp_path):
    """The center is that of all ranks, losses and gradients too."""
    shared.check_ranks(dino, SMALL, rank_main, tmp_path)

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shared.whole_run(dino, SMALL, tmp_path_factory.mktemp("dino"))

def test_a_run_resumes_bit_for_bit(run, tmp_path):
    """Stochastic depth, center, teacher and schedules included."""
    shared.check_resume(dino, run, tmp_path)

def test_its_checkpoint_evaluates(run, tmp_path, capsys):
    """The student, as a plain encoder."""
    shared.check_evaluates(run, tmp_path, capsys)

def test_a_run_of_another_program_or_head_is_not_continued(run, monkeypatch, capsys):
    """Bad input: one line, and the checkpoint stays."""
    def wider(cfg):
        return dino.build(dataclasses.replace(cfg, outputs=32))

    before = Path(run["out"], "last.pt").read_bytes()
    assert ser.main(flags(**run), dino.Settings, wider) == 2
    assert "size mismatch" in capsys.readouterr().err
    assert Path(run["out"], "last.pt").read_bytes() == before
    shared.check_other_program(dino, run, monkeypatch, capsys)

@pytest.mark.parametrize("change, words", [
    ({"moco_hidden": 8}, "--moco-hidden"), ({"drop_path": 1.5}, "--drop-path 1.5"),
    ({"student_temp": 0.0}, "--student-temp 0.0")])
def test_a_wrong_flag_is_one_line_and_exit_code_2(change, words, tmp_path, capsys):
    """Bad input: nothing is trained."""
    shared.check_bad_flag(dino, SMALL, change, words, tmp_path, capsys)

def test_the_commands_of_its_header_parse():
    """They are what they say."""
    shared.check_header(dino)

def test_it_runs_as_a_module(monkeypatch, capsys):
    """`python -m paper.methods.dino --help` prints header and flags."""
    shared.check_module(dino, monkeypatch, capsys)
