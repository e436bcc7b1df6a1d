"""Every claim of paper/methods/multicrop.py as an executable sentence.

    python -m pytest -q paper/tests/test_multicrop.py
"""
import math

import pytest
import torch
import torch.nn.functional as F

import ser
from paper.methods import multicrop
from paper.tests import base_methods as shared
from test_ser import TOY, close, seeded, shake
from test_ser import signals_stay_pytests     # noqa: F401, a fixture for every test here too

pytestmark = pytest.mark.usefixtures("drawn_once")
SMALL = TOY | dict(local_size=8)
PAIRS = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]

def toy(**changes):
    return shared.toy(multicrop, SMALL, **changes)

# ==== Views =======================================================================================
def test_the_views_are_two_global_and_four_local_crops():
    """A.1 and DINO: 2 x 224 as MoCo-v3's, then 4 x 96 pixels of 5% to 25% of the image, blurred
    half of the time, never solarized."""
    policies = multicrop.Settings().policies
    assert policies[:2] == ser.Config().policies
    assert policies[2:] == (ser.Policy(96, (0.05, 0.25), 0.5, 0.0),) * 4

def test_local_views_are_small_crops_and_b2_sees_the_whole_image_at_each_size():
    """A.1: what the data set cuts, at its sizes and areas."""
    cfg, _ = toy()
    data = cfg.dataset(torch.zeros(60, 3, 128, 128, dtype=torch.uint8))
    areas = []
    for i in range(60):
        views, _ = data[ser.Key(0, i, i, False)]
        assert [pixels.shape[-1] for pixels, _, _ in views] == [16, 16, 8, 8, 8, 8]
        areas += [crop.height * crop.width for _, crop, _ in views[2:]]
    assert 0.04 < min(areas) < 0.08 and 0.22 < max(areas) < 0.26
    views, _ = data[ser.Key(0, 1, 1, True)]
    assert [pixels.shape[-1] for pixels, _, _ in views] == [16, 16, 8, 8, 8, 8]
    assert all(tuple(crop) == (0, 0, 1, 1, False) for _, crop, _ in views)

# ==== L_inv =======================================================================================
def test_keys_come_from_the_global_views_alone():
    """A.1: local views do not pass the momentum encoder; chance is that of ten terms."""
    cfg, model = toy()
    momentum = model.base.momentum_encoder
    seen = []
    forward = momentum.forward

    def spy(images, *rest):
        seen.extend(x.shape for x in images)
        return forward(images, *rest)

    momentum.forward = spy
    batch = shared.toy_batch(cfg)
    losses = model(batch)
    assert seen == [x.shape for view in batch.views[:2] for x in view.images]
    assert losses["inv_chance"] == pytest.approx(10 * 2 * 0.2 * math.log(8))

def test_the_chance_of_l_equiv_is_that_of_its_three_pairs_and_the_mean_over_layers():
    """Projectors that give 0 make all similarities equal, which is chance."""
    cfg, model = toy(equiv_layers=(1, 2))
    for head in model.heads.values():
        torch.nn.init.zeros_(head[-1].weight)
    losses = model(shared.toy_batch(cfg), diagnose=True)
    close(losses["equiv"], torch.tensor(losses["equiv_chance"]))

def test_l_inv_is_the_sum_of_infonce_over_the_ten_pairs():
    """A.1: each of six queries against the keys of the global views but its own. Six against the
    two would be twelve; inv_top1 is that of the global pair."""
    cfg, model = toy()
    base = model.base
    batch = shared.toy_batch(cfg)
    queries = []
    keys = []
    for view in batch.views:
        cls = shared.encoded_cls(base.encoder, view)
        queries.append(F.normalize(base.predictor(base.projector(cls)), dim=1))
    for view in batch.views[:2]:
        cls = shared.encoded_cls(base.momentum_encoder, view)
        keys.append(F.normalize(base.momentum_projector(cls), dim=1))
    wanted = 0
    for i, j in PAIRS:
        wanted = wanted + 0.4 * F.cross_entropy(queries[i] @ keys[j].T / 0.2, torch.arange(8))
    losses = model(batch)
    close(losses["inv"], wanted, 1e-4)
    nearest = (queries[0] @ keys[1].T).argmax(1)
    assert losses["inv_top1"] == (nearest == torch.arange(8)).float().mean()

def test_inv_top1_is_that_of_the_global_pair():
    """The log: the first global view finds its key in the second, and the local ones do not."""
    _, model = toy()
    base = model.base
    base.projector = base.predictor = torch.nn.Identity()
    base.key = lambda view: torch.eye(8)
    other = torch.eye(8).roll(1, 0)
    base([None] * 6, [torch.eye(8), other, other, other, other, other])
    assert base.diagnostics["inv_top1"] == 1

# ==== L_equiv =====================================================================================
def pair_loss(cfg, model, first, second):
    """L_equiv of two views by themselves, by the steps of Algorithm 1."""
    maps = []
    for view in (first, second):
        maps.append(model.base.encoder([view.images[-1]], cfg.equiv_layers)[0].maps[1])
    aligned = ser.rho(ser.relative(second.geometry, first.geometry), maps[0])
    z = model.heads["1"](aligned.flatten(2).mT)
    z_prime = model.heads["1"](maps[1].flatten(2).mT)
    return ser.patch_ntxent(z, z_prime, cfg.temperature)

def pair_losses(cfg, model, views):
    return torch.stack([pair_loss(cfg, model, views[v], views[v + 1]) for v in (0, 2, 4)])

def test_l_equiv_is_taken_within_the_global_pair_and_the_two_local_pairs():
    """A.1: the sum of three terms, each of its pair alone; other images in one view change only the
    term of its pair."""
    cfg, model = toy()
    assert list(model.pairs) == [(0, 1), (2, 3), (4, 5)]
    batch = shared.toy_batch(cfg)
    before = pair_losses(cfg, model, batch.views)
    close(model(batch)["equiv"], before.sum(), 1e-4)
    batch.views[2].images[-1].normal_(generator=seeded(9))
    after = pair_losses(cfg, model, batch.views)
    close(model(batch)["equiv"], after.sum(), 1e-4)
    assert abs(after[1] - before[1]) > 1e-3 and torch.equal(after[[0, 2]], before[[0, 2]])

def test_the_class_of_ser_keeps_its_one_pair():
    """Building this model changes nothing for others."""
    toy()
    assert ser.SER.pairs == ((0, 1),)

def test_without_local_pairs_it_is_moco_v3_with_ser():
    """Table 1: --local-pairs 0 leaves the two-view run, to the last bit."""
    cfg, model = toy(local_pairs=0)
    plain = shake(ser.build(ser.Config(**TOY)))
    batch = shared.toy_batch(cfg)
    with torch.no_grad():
        found = model(batch, diagnose=True)
        wanted = plain(batch, diagnose=True)
    assert found.keys() == wanted.keys()
    assert all(float(found[name]) == float(wanted[name]) for name in wanted)

def test_every_trained_parameter_gets_a_gradient():
    """The momentum branch gets none, nor the frozen patch embedding."""
    untrained = ("momentum", "encoder.patch_embed")
    shared.check_gradients(multicrop, SMALL, untrained)

def test_weight_and_ratio_mean_what_they_say():
    """Eq. 3 and Table 1's baseline."""
    shared.check_weight_and_ratio(multicrop, SMALL)

# ==== Runs, ranks, command line ===================================================================
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shared.whole_run(multicrop, SMALL, tmp_path_factory.mktemp("multicrop"))

def test_a_run_resumes_bit_for_bit(run, tmp_path):
    """The momentum branch included."""
    shared.check_resume(multicrop, run, tmp_path)

def test_its_checkpoint_evaluates(run, tmp_path, capsys):
    """As one of ser.py's own."""
    shared.check_evaluates(run, tmp_path, capsys)

@pytest.mark.parametrize("change, words", [
    ({"local_size": 10}, "try 12"), ({"local_crop_min": 0.5}, "--local-crop-min 0.5"),
    ({"local_pairs": -1}, "--local-pairs -1")])
def test_a_wrong_flag_is_one_line_and_exit_code_2(change, words, tmp_path, capsys):
    """Bad input: nothing is trained."""
    shared.check_bad_flag(multicrop, SMALL, change, words, tmp_path, capsys)

def test_the_commands_of_its_header_parse():
    """They are what they say."""
    shared.check_header(multicrop)

def test_it_runs_as_a_module(monkeypatch, capsys):
    """`python -m paper.methods.multicrop --help` prints header and flags."""
    shared.check_module(multicrop, monkeypatch, capsys)

def rank_main(rank, ranks, folder):
    shared.save_one_step(multicrop, SMALL, rank, ranks, folder)

def test_two_ranks_equal_one_process(tmp_path):
    """Ten terms of L_inv and three of L_equiv, each over all ranks, views of two sizes under
    DDP."""
    shared.check_ranks(multicrop, SMALL, rank_main, tmp_path)
