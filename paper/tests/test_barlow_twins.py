"""Every claim of paper/methods/barlow_twins.py as an executable sentence.

    python -m pytest -q paper/tests/test_barlow_twins.py
"""
import itertools

import pytest
import torch
from torch import nn

import ser
from paper.methods import barlow_twins
from paper.tests import base_methods as shared
from test_ser import close, seeded, value_and_gradients
from test_ser import signals_stay_pytests     # noqa: F401, a fixture for every test here too

pytestmark = pytest.mark.usefixtures("drawn_once")
SMALL = shared.SMALL | dict(hidden=16, base_lr=1e-2)

def toy(**changes):
    return shared.toy(barlow_twins, SMALL, **changes)

# ==== The loss ====================================================================================
def slow_loss(z1, z2, off_diagonal):
    """Zbontar et al., Eq. 1 and 2, as loops over features and images."""
    images, features = z1.shape
    total = 0
    for i, j in itertools.product(range(features), range(features)):
        c = sum(z1[b, i] * z2[b, j] for b in range(images)) / images
        total = total + ((1 - c) ** 2 if i == j else off_diagonal * c ** 2)
    return total

def test_the_loss_is_the_papers():
    """Zbontar et al., Eq. 1 and 2, value and gradient."""
    z1, z2 = torch.randn(2, 6, 5, generator=seeded(), dtype=torch.float64)

    def fast(z1, z2):
        return barlow_twins.barlow_loss(barlow_twins.cross_correlation(z1, z2), 0.0051)

    value, gradients = value_and_gradients(fast, z1, z2)
    wanted, slow_gradients = value_and_gradients(lambda a, b: slow_loss(a, b, 0.0051), z1, z2)
    close(value, wanted, 1e-9)
    close(gradients, slow_gradients, 1e-9)

def test_the_projections_are_standardised():
    """Zbontar et al.: mean 0 and variance 1 over the batch, so that |C_ij| <= 1, and equal views
    have a diagonal of 1. Three layers of one width, no biases."""
    _, model = toy()
    cls = torch.randn(32, 16, generator=seeded())
    z = model.base.projector(cls)
    close(z.mean(0), torch.zeros(16))
    close(z.var(0, unbiased=False), torch.ones(16), 1e-2)
    close(barlow_twins.cross_correlation(z, z), torch.corrcoef(z.T), 1e-2)
    model.base([], [cls, cls])
    assert model.base.diagnostics["diagonal"].item() == pytest.approx(1, abs=1e-2)
    with torch.device("meta"):
        projector = barlow_twins.build(barlow_twins.Settings()).base.projector
    linears = [module for module in projector if isinstance(module, nn.Linear)]
    widths = [(linear.in_features, linear.out_features, linear.bias) for linear in linears]
    assert widths == [(384, 8192, None), (8192, 8192, None), (8192, 8192, None)]

def test_forward_is_the_loss_between_the_two_views_by_feature():
    """Zbontar et al., Algorithm 1, on two different views, over the 16 features, as documented."""
    _, model = toy(off_diagonal=0.3)
    cls = [*torch.randn(2, 32, 16, generator=seeded())]
    z1, z2 = (model.base.projector(x) for x in cls)
    close(model.base([], cls), slow_loss(z1, z2, 0.3) / 16, 1e-4)

def test_the_log_tells_the_diagonal_from_the_rest_and_knows_chance():
    """Features that have nothing to do with one another give inv_chance on average; the logged root
    mean square of the rest is then 1 / sqrt(B)."""
    _, model = toy(off_diagonal=0.3)
    base = model.base
    base.projector = nn.BatchNorm1d(64, affine=False)
    losses, rest = [], []
    for seed in range(20):
        cls = [*torch.randn(2, 100, 64, generator=seeded(seed))]
        losses.append(base([], cls).item())
        rest.append(base.diagnostics["off_diagonal_rms"].item())
    assert base.diagnostics["inv_chance"] == pytest.approx(sum(losses) / 20, rel=0.02)
    assert sum(rest) / 20 == pytest.approx(0.1, rel=0.02)
    base([], [cls[0], cls[0]])
    assert base.diagnostics["diagonal"].item() == pytest.approx(1, abs=1e-3)

# ==== The weight of L_inv beside L_equiv ==========================================================
def balance(script, **changes):
    """Norm of the gradient of lambda * L_equiv over that of L_inv, at the parameters that lie below
    the regularised layer, for a run's first batch of drawn images."""
    cfg = script(**script.drawn | {"batch_size": 32} | changes)
    build = ser.build if script is ser.Config else barlow_twins.build
    model = build(cfg)
    images, _ = ser.draw_images(32, cfg.image_size, seed=0)
    keys = next(ser.batch_keys(32, cfg, 0, 1))
    data = cfg.dataset(images)
    loaded, _ = torch.utils.data.default_collate([data[key] for key in keys])
    batch = ser.make_views(loaded, cfg, 0)
    below = [p for block in model.base.encoder.blocks[:2] for p in block.parameters()]
    both = torch.autograd.grad(model(batch)["loss"], below)
    model.weight = 0.0
    alone = torch.autograd.grad(model(batch)["loss"], below)
    equiv = torch.cat([(a - b).flatten() for a, b in zip(both, alone)])
    inv = torch.cat([gradient.flatten() for gradient in alone])
    return (equiv.norm() / inv.norm()).item()

def test_l_equiv_has_the_weight_beside_l_inv_that_it_has_with_moco_v3():
    """The reason for dividing by K: on drawn images the balance is MoCo-v3's within a factor of
    three, for 512 features, and for 64."""
    wanted = balance(ser.Config, moco_hidden=64)
    assert wanted / 3 < balance(barlow_twins.Settings) < 3 * wanted
    assert wanted / 3 < balance(barlow_twins.Settings, hidden=64) < 3 * wanted

def test_weight_and_ratio_mean_what_they_say():
    """Eq. 3 and Table 2's baseline."""
    shared.check_weight_and_ratio(barlow_twins, SMALL)

def test_every_trained_parameter_gets_a_gradient():
    """The patch embedding too, which MoCo-v3 keeps as it is."""
    shared.check_gradients(barlow_twins, SMALL, ("nothing",))

# ==== Settings and schedule =======================================================================
def test_the_settings_and_the_schedule_are_as_stated():
    """The release: lr 8e-4 at batch 2048, down to a thousandth of it; weight decay .1; clip .3 for
    each parameter. Barlow Twins: 8192 features, w = .0051."""
    cfg = barlow_twins.Settings()
    found = (cfg.weight, cfg.temperature, cfg.hidden, cfg.off_diagonal)
    assert found == (0.5, 0.3, 8192, 0.0051)
    for epoch, lr in ((0, 0), (10, 8e-4), (100, 8e-7)):
        assert shared.rates(cfg, nn.Linear(1, 1), epoch) == ([pytest.approx(lr)], [0.1])
    layer = nn.Linear(2, 1)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    layer.bias.grad = torch.tensor([0.1])
    cfg.before_step(cfg.optimizer(layer), 20)
    close(layer.weight.grad, torch.tensor([[0.18, 0.24]]))
    close(layer.bias.grad, torch.tensor([0.1]))

# ==== Ranks, runs, command line ===================================================================
def rank_main(rank, ranks, folder):
    shared.save_one_step(barlow_twins, SMALL, rank, ranks, folder)

def test_two_ranks_equal_one_process(tmp_path):
    """The cross-correlation is that of all ranks, and so is its gradient, so that the weight of
    L_inv does not depend on their number."""
    shared.check_ranks(barlow_twins, SMALL, rank_main, tmp_path)

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shared.whole_run(barlow_twins, SMALL, tmp_path_factory.mktemp("barlow"))

def test_a_run_resumes_bit_for_bit(run, tmp_path):
    """The statistics of BatchNorm included."""
    shared.check_resume(barlow_twins, run, tmp_path)

def test_its_checkpoint_evaluates(run, tmp_path, capsys):
    """As one of ser.py's own."""
    shared.check_evaluates(run, tmp_path, capsys)

def test_a_run_of_another_program_is_not_continued(run, monkeypatch, capsys):
    """Bad input: one line, and the checkpoint stays."""
    shared.check_other_program(barlow_twins, run, monkeypatch, capsys)

@pytest.mark.parametrize("change, words", [
    ({"momentum": 0.9}, "--momentum"), ({"off_diagonal": -1}, "--off-diagonal"),
    ({"hidden": 1}, "--hidden 1")])
def test_a_wrong_flag_is_one_line_and_exit_code_2(change, words, tmp_path, capsys):
    """Bad input: nothing is trained."""
    shared.check_bad_flag(barlow_twins, SMALL, change, words, tmp_path, capsys)

def test_it_runs_as_a_module(monkeypatch, capsys):
    """`python -m paper.methods.barlow_twins --help` prints header and flags."""
    shared.check_module(barlow_twins, monkeypatch, capsys)

def test_the_commands_of_its_header_parse():
    """They are what they say."""
    shared.check_header(barlow_twins)
