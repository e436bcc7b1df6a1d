"""Every claim of paper/methods/multicrop.py."""
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import ser
from paper.methods import multicrop
from paper.tests.test_methods import settings, toy, toy_views
from test_ser import close, noise, sentence


def test_the_views_are_two_global_and_four_local_crops():
    """A.1 and DINO: 2 of MoCo-v3, then 4 small ones."""
    words = "--local-size 64 --local-area 0.1 0.3"
    args = multicrop.settings(words.split())
    local = ser.ViewSettings(64, [0.1, 0.3], blur=0.5, solarize=0.0)
    wanted = [*ser.two_views([], args).view_settings, local, local, local, local]
    assert list(multicrop.six_views([], args).view_settings) == wanted
    assert "--local-size 9: " in sentence(multicrop.settings, ["--local-size", "9"])


def test_each_of_six_views_has_a_geometry_and_an_order_of_its_own():
    """Flips, turns, grids and orders of the jitter of ten steps; sizes are equal, to compare."""
    args = settings("multicrop", "--patch-size 1 --batch-size 32")
    aug = default_collate([ser.Augmentation()] * 32)
    loaded = [(torch.zeros(32, 3, 16, 16, dtype=torch.uint8), aug)] * 6
    steps = [ser.make_views(loaded, args, step) for step in range(10)]
    distinct = {"flip": set(), "turns": set(), "grid": set(), "order": set()}
    for number in range(6):
        views = [step[number] for step in steps]
        distinct["order"].add(str([view.order for view in views]))
        for name in ("flip", "turns", "grid"):
            drawn = [getattr(view.geometry, name) for view in views]
            distinct[name].add(str(drawn))
    for name, sequences in distinct.items():
        assert len(sequences) == 6, f"views share their {name}"


def test_l_inv_is_the_sum_of_infonce_over_the_ten_pairs():
    """A.1: each of six queries against the keys of the global views but its own."""
    args, model = toy("multicrop")
    views = toy_views("multicrop", args)
    base = model.base
    assert base.projector[0].out_features == 32
    cls = noise(6, 12, 16)
    keys = noise(2, 12, 256, seed=1)
    base.key = lambda view: keys[[view is each for each in views].index(True)]
    wanted = 0.0
    for i in range(6):
        query = F.normalize(base.predictor(base.projector(cls[i])))
        for j in (0, 1):
            if i != j:
                logits = query @ F.normalize(keys[j]).T / 0.2
                wanted = wanted + 0.4 * F.cross_entropy(logits, torch.arange(12))
    close({"loss": base(views, cls)}, {"loss": wanted})


def test_l_equiv_is_added_over_the_global_pair_and_the_two_local_pairs():
    """A.1: each pair as ser.SER has it."""
    args, model = toy("multicrop", "--weight 0.7")
    views = toy_views("multicrop", args)
    plain = ser.SER(model.base, [1], temperature=model.temperature)
    plain.projectors = model.projectors
    equiv = 0.0
    for pair in (views[0:2], views[2:4], views[4:6]):
        equiv = equiv + plain(pair)["equiv"]
    cls = [ser.encode_view(model.base.encoder, view)[0] for view in views]
    inv = model.base(views, cls)

    loss = inv + 0.7 * equiv
    close(model(views), {"loss": loss, "inv": inv.detach(), "equiv": equiv})
