"""Every claim of paper/methods/multicrop.py: `python -m pytest paper/tests/test_multicrop.py`."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import ser
from paper.methods import multicrop
from paper.tests.test_dino import SHAPE, shake, toy_views, train

FLAGS = [*SHAPE, "--moco-hidden", "16", "--local-size", "8"]
PAIRS = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]

def toy():
    args = multicrop.settings(FLAGS)
    return shake(multicrop.build(args)), toy_views(args, multicrop.six_views)

def test_the_views_are_two_global_and_four_local_crops():
    """A.1 and DINO: 2 x 224, then 4 x 96 pixels of 5% to 25% of the image."""
    args = multicrop.settings(["--data", "some"])
    local = ser.ViewSettings(96, [0.05, 0.25], 0.5, 0.0)
    wanted = [*ser.two_views([], args).view_settings, local, local, local, local]
    assert list(multicrop.six_views([], args).view_settings) == wanted
    assert [view.b1.shape[-1] for view in toy()[1]] == [16, 16, 8, 8, 8, 8]
    with pytest.raises(SystemExit, match="--local-size 9: "):
        multicrop.settings(["--local-size", "9"])

def test_l_inv_is_the_sum_of_infonce_over_the_ten_pairs():
    """A.1: each of six queries against the keys of the global views but its own."""
    base = toy()[0].base
    cls = torch.randn(6, 64, 16, generator=ser.rng(0))
    keys = torch.randn(2, 64, 256, generator=ser.rng(1))
    base.key = lambda view: keys[view]     # of view 0 and of view 1 alone
    wanted = 0.0
    for i, j in PAIRS:
        query = base.predictor(base.projector(cls[i]))
        logits = F.normalize(query) @ F.normalize(keys[j]).T / 0.2
        wanted = wanted + 0.4 * F.cross_entropy(logits, torch.arange(64))
    assert_close(base(range(6), cls), wanted)

def test_l_equiv_is_taken_within_the_global_pair_and_the_two_local_pairs():
    """A.1: the sum of three terms, each as that of two views alone."""
    model, views = toy()
    alone = [model(views[first:first + 2])["equiv"] for first in (0, 2, 4)]
    assert_close(model(views)["equiv"], sum(alone))

def test_it_trains_from_the_command_line(tmp_path, monkeypatch, capsys):
    """With ten terms and three pairs; it tells what they are for equal embeddings."""
    train(multicrop, FLAGS, tmp_path, monkeypatch)
    equiv = sum(ser.patch_ntxent(x, x) for x in (torch.ones(32, n, 5) for n in (16, 4, 4)))
    assert f"is {4 * math.log(64):.3f}, L_equiv about {equiv:.1f}\n" in capsys.readouterr().out
