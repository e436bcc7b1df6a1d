"""STL: pairs that share a transformation, the hypernetwork's product, and the two losses.

    python -m pytest -q paper/tests/test_stl.py
"""
import math

import pytest
import torch
import torch.nn.functional as F

import ser
from paper.methods import stl
from paper.tests.test_addon import drawn, settings, toy
from ser import Key
from test_ser import close, seeded, value_and_gradients

# ==== Pairs =======================================================================================
def pairs(n=60, **changes):
    """[(draws of image 2i, draws of image 2i + 1)], each [(Crop, Jitter) of view 1, of view 2]."""
    data = settings("stl", **changes).dataset(torch.zeros(1))
    tall = torch.zeros(3, 90, 30)
    wide = torch.zeros(3, 20, 50)
    found = []
    for i in range(n):
        even = data.draw(Key(0, 2 * i, 2 * i, False), tall)
        odd = data.draw(Key(0, 2 * i + 1, 2 * i, False), wide)
        found.append((even, odd))
    return found

def test_a_pair_shares_box_jitter_and_gray_view_by_view():
    """In shares of the sides, also for images of different shapes; the two views of an image and
    different pairs share nothing."""
    boxes = set()
    for even, odd in pairs():
        for (box, jitter), (other_box, other) in zip(even, odd):
            assert box[:4] == other_box[:4]
            assert jitter[:4] == other[:4]     # the factors
            assert torch.equal(jitter.order, other.order)
            assert jitter.gray == other.gray
            boxes.add(box[:4])
    assert len(boxes) == 120

def test_flip_blur_and_solarization_are_an_images_own():
    """As often alike as independent draws are: flips in half of the pairs; and blur, once it is
    drawn for both, has another sigma."""
    flips = []
    solarized = []
    sigmas = []
    for even, odd in pairs(200, solarize=(0.5, 0.5)):
        for (box, jitter), (other_box, other) in zip(even, odd):
            flips.append(box.flip == other_box.flip)
            solarized.append(jitter.solarize == other.solarize)
            if jitter.blur > 0 and other.blur > 0:
                sigmas.append(jitter.blur == other.blur)
    assert abs(sum(flips) / 400 - 0.5) < 0.1
    assert abs(sum(solarized) / 400 - 0.5) < 0.1
    assert len(sigmas) > 50
    assert not any(sigmas)

def test_the_shared_crop_is_drawn_on_a_square():
    """So its aspect, in shares, is 3/4 to 4/3 for the tall and the wide image alike."""
    for even, _ in pairs(40):
        for box, _ in even:
            assert 0.74 < box.width / box.height < 1.35

def test_the_batches_of_a_run_hold_such_pairs():
    """Through ser.batch_keys, on two ranks: rows 2i and 2i + 1 have the same box."""
    cfg = settings("stl", batch_size=8)
    data = cfg.dataset(torch.zeros(20, 3, 32, 24, dtype=torch.uint8))
    for rank in range(2):
        for keys in ser.batch_keys(20, cfg, 0, 3, rank, 2):
            boxes = [data[key][0][0][1][:4] for key in keys]
            assert boxes[0] == boxes[1] != boxes[2] == boxes[3]

def test_exchange_swaps_the_rows_of_each_pair():
    x = torch.arange(12.).view(6, 2)
    assert torch.equal(stl.exchange(x), x[[1, 0, 3, 2, 5, 4]])

# ==== The hypernetwork's product ==================================================================
def test_the_regrouped_product_equals_bmm_with_each_images_matrix():
    """Value and gradient, W(t) = (hyper t) as D rows of D."""
    def plain(f, t, hyper):
        W = (t @ hyper.T).view(5, 6, 6)
        return torch.bmm(W, f[:, :, None])[:, :, 0].square().sum()

    inputs = [torch.randn(*shape, generator=seeded(i), dtype=torch.float64)
              for i, shape in enumerate([(5, 6), (5, 3), (36, 3)])]
    ours = value_and_gradients(lambda *x: stl.move(*x).square().sum(), *inputs)
    theirs = value_and_gradients(plain, *inputs)
    close(ours[0], theirs[0], 1e-10)
    for a, b in zip(ours[1], theirs[1]):
        close(a, b, 1e-10)

def test_the_images_matrices_are_never_stored():
    """Nothing of B x D x D numbers is made, forwards or backwards, nor kept in between."""
    f = torch.randn(8, 64, requires_grad=True)
    t = torch.randn(8, 2, requires_grad=True)
    hyper = torch.randn(64 * 64, 2, requires_grad=True)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Watch():
        stl.move(f, t, hyper).sum().backward()
    assert f.grad is not None and hyper.grad is not None
    assert 0 < max(sizes) <= hyper.numel() < 8 * 64 * 64

# ==== Losses ======================================================================================
def slow_contrast(a, b, temperature):
    """InfoNCE of a list of rows with another, one way: 2T times the mean of -log softmax."""
    total = 0.0
    for i in range(len(a)):
        s = [(F.cosine_similarity(a[i], b[j], 0) / temperature).exp() for j in range(len(b))]
        total = total - 2 * temperature * (s[i] / sum(s)).log() / len(a)
    return total

def test_the_losses_equal_slow_loops():
    """Image by image: the transformation of an image is read from its partner."""
    cfg, model = toy("stl", batch_size=4, trans_weight=0.3, temperature=0.4)
    model.eval()     # so that a row can be told alone
    f1, f2 = torch.randn(2, 4, 16, generator=seeded(2))

    def head(name, x):
        return model.heads[name](x[None])[0]

    t12 = [head("read", torch.cat([f1[i], f2[i]])) for i in range(4)]
    t21 = [head("read", torch.cat([f2[i], f1[i]])) for i in range(4)]
    z = []
    z_moved = []
    for start, end, codes in ((f2, f1, t21), (f1, f2, t12)):
        for i, partner in ((0, 1), (1, 0), (2, 3), (3, 2)):
            W = head("hyper", codes[partner]).view(16, 16)
            z.append(head("embed", end[i]))
            z_moved.append(head("embed", W @ start[i]))
    u = [head("embed_code", t) for t in (t12[0], t12[2], t21[0], t21[2])]
    v = [head("embed_code", t) for t in (t12[1], t12[3], t21[1], t21[3])]
    action = slow_contrast(z, z_moved, 0.4) + slow_contrast(z_moved, z, 0.4)
    reading = slow_contrast(u, v, 0.4) + slow_contrast(v, u, 0.4)
    loss, found = model.equivariance_loss([f1, f2], [])
    close(loss, action + 0.3 * reading, 1e-4)
    assert found["equiv_chance"] == pytest.approx(1.6 * math.log(8) + 0.3 * 1.6 * math.log(4))
    assert (found["action_top1_chance"], found["reading_top1_chance"]) == (1 / 8, 1 / 4)

@pytest.mark.parametrize("order", [[4, 5, 0, 1, 6, 7, 2, 3], [1, 0, 3, 2, 5, 4, 7, 6]])
def test_neither_the_order_of_pairs_nor_that_within_all_pairs_matters(order):
    cfg, model = toy("stl")
    f1, f2 = torch.randn(2, 8, 16, generator=seeded(2), dtype=torch.float64)
    model.double()
    loss, _ = model.equivariance_loss([f1, f2], [])
    other, _ = model.equivariance_loss([f1[order], f2[order]], [])
    close(other, loss, 1e-6)     # info_nce is in fp32, whatever the features are
    torn = [0, 2, 1, 3, 4, 5, 6, 7]     # pairs of other images
    other, _ = model.equivariance_loss([f1[torn], f2[torn]], [])
    assert abs(other - loss) > 1e-3

def test_all_is_found_where_the_transformation_explains_the_views():
    """Features that are the image plus the view's transformation, and a network that moves by the
    difference: both top-1 are 1, and a partner with another transformation breaks the first."""
    cfg, model = toy("stl")
    image = torch.randn(8, 16, generator=seeded(1))
    t1, t2 = torch.randn(2, 4, 16, generator=seeded(2)).repeat_interleave(2, 1)
    features = [image + t1, image + t2]
    model.heads["embed"] = torch.nn.Identity()
    model.heads["embed_code"] = torch.nn.Identity()
    model.heads["read"] = torch.nn.Linear(32, 16, bias=False)
    # t12 = f_2 - f_1 = t2 - t1, hence f_1 + (the partner's t12) = f_2, and back.
    model.heads["read"].weight.data = torch.cat([-torch.eye(16), torch.eye(16)], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stl, "move", lambda f, t, hyper: f + t)
        found = model.equivariance_loss(features, [])[1]
        other = model.equivariance_loss([f.roll(1, 0) for f in features], [])[1]     # other pairs
    assert found["action_top1"] == 1 and found["reading_top1"] == 1
    assert other["action_top1"] < 1 and other["reading_top1"] < 1

def test_the_heads_have_the_releases_shapes():
    with torch.device("meta"):
        heads = stl.build(stl.Settings()).heads
    shapes = {}
    for name, head in heads.items():
        layers = [m for m in head.modules() if isinstance(m, torch.nn.Linear)]
        assert all(m.bias is None for m in layers)
        shapes[name] = [tuple(m.weight.shape) for m in layers]
    assert shapes == {"read": [(128, 768), (128, 128)], "hyper": [(384 * 384, 128)],
                      "embed": [(512, 384), (128, 512)], "embed_code": [(128, 128), (128, 128)]}
