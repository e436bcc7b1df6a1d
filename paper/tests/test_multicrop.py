"""Every claim of paper/methods/multicrop.py."""
import itertools

import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import ser
from paper.methods import multicrop
from paper.tests.test_addon import check_defaults
from paper.tests.test_dino import SHAPE, check_ranks, toy_views, train
from test_ser import close, seeded, sentence, shake

FLAGS = [*SHAPE, "--moco-hidden", "16", "--local-size", "8"]
PAIRS = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]


def toy(*flags):
    args = multicrop.settings([*FLAGS, *flags])
    return shake(multicrop.build(args)), toy_views(args, multicrop.six_views)


def test_the_views_are_two_global_and_four_local_crops():
    """A.1 and DINO: 2 x 224, then 4 x 96 pixels of 5% to 25% of the image."""
    check_defaults(multicrop, dict(out="runs/multicrop", local_size=96, local_area=[0.05, 0.25]))
    args = multicrop.settings(["--data", "some", "--local-area", "0.1", "0.3"])
    local = ser.ViewSettings(96, [0.1, 0.3], 0.5, 0.0, flip=0.5, jitter=0.8, gray=0.2)
    wanted = [*ser.two_views([], args).view_settings, local, local, local, local]
    assert list(multicrop.six_views([], args).view_settings) == wanted
    assert [view.b1.shape[-1] for view in toy()[1]] == [16, 16, 8, 8, 8, 8]
    assert "--local-size 9: " in sentence(multicrop.settings, ["--local-size", "9"])


def test_each_of_six_views_has_a_geometry_and_an_order_of_its_own():
    """Turns, flips, grids and orders of the jitter of 40 steps; sizes are equal, to compare."""
    args = multicrop.settings([*SHAPE, "--patch-size", "1", "--batch-size", "32"])
    aug = default_collate([ser.Augmentation()] * 32)
    loaded = [(torch.zeros(32, 3, 16, 16, dtype=torch.uint8), aug)] * 6
    steps = [ser.make_views(loaded, args, step) for step in range(40)]
    for a, b in itertools.combinations(range(6), 2):
        names = f"views {a} and {b}"
        pairs = [(views[a], views[b]) for views in steps]
        assert sum(x.order.equal(y.order) for x, y in pairs) < 10, f"orders of {names}"
        grids = [x.geometry.grid == y.geometry.grid for x, y in pairs]
        assert sum(grids) < 10, f"grids of {names}"
        for field in ("turns", "flip"):
            equal = [getattr(x.geometry, field) == getattr(y.geometry, field) for x, y in pairs]
            share = torch.stack(equal).double().mean()
            chance = 0.25 if field == "turns" else 0.5
            assert abs(share - chance) < 0.1, f"{field} of {names}"


def test_l_inv_is_the_sum_of_infonce_over_the_ten_pairs():
    """A.1: each of six queries against the keys of the global views but its own."""
    model, views = toy()
    base = model.base
    cls = torch.randn(6, 12, 16, generator=seeded())
    keys = torch.randn(2, 12, 256, generator=seeded(1))
    base.key = lambda view: keys[[view is each for each in views].index(True)]
    wanted = 0.0
    for i, j in PAIRS:
        query = base.predictor(base.projector(cls[i]))
        logits = F.normalize(query) @ F.normalize(keys[j]).T / 0.2
        wanted = wanted + 0.4 * F.cross_entropy(logits, torch.arange(12))
    close({"loss": base(views, cls)}, {"loss": wanted})


def test_l_equiv_is_added_over_the_global_pair_and_the_two_local_pairs():
    """A.1: each pair as ser.SER has it. Every trained parameter gets a gradient; ratio 0 has
    the same L_inv on b1 alone."""
    model, views = toy("--weight", "0.7")
    plain = ser.SER(model.base, [1], 0.7, model.temperature)
    plain.projectors = model.projectors
    equiv = sum(plain(views[first:first + 2])["equiv"] for first in (0, 2, 4))
    found = model(views)
    cls = [ser.encode_view(model.base.encoder, view)[0] for view in views]
    inv = model.base(views, cls)
    close(found, {"loss": inv + 0.7 * equiv, "inv": inv.detach(), "equiv": equiv})
    found["loss"].backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.ne(0).any()) == p.requires_grad, name

    only_b1 = [view._replace(b2=None, geometry=None) for view in views]
    cls = [model.base.encoder(view.b1).cls for view in views]
    inv = model.base(only_b1, cls)
    close(model(only_b1), {"loss": inv, "inv": inv.detach()})


def test_it_trains_from_the_command_line(tmp_path, monkeypatch):
    log, _ = train(multicrop, FLAGS, tmp_path, monkeypatch)
    assert log[0]["method"] == "MultiCropSER on MultiCrop"


def test_two_ranks_train_as_one_process(tmp_path):
    """Keys and tokens of all six views are those of both ranks."""
    check_ranks("multicrop", tmp_path)
