"""Every claim of ser.py and eval_linear.py, each on the smallest input that can break it.

Fast code is compared with slow oracles, a run with a plain re-implementation. Sections 1 to 9
are those of ser.py, 10 is eval_linear.py, 11 the READMEs.
"""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""     # before torch looks: tests compare CPU tensors

import contextlib
import copy
import io
import itertools
import json
import math
import multiprocessing
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from PIL import Image
from pytest import approx
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate
from torchvision.ops import MLP
from torchvision.transforms import RandomResizedCrop, v2

import eval_linear
import ser
from ser import Augmentation, Geometry, Policy, patch_ntxent, relative, rho, sample_geometry

parametrize = pytest.mark.parametrize
torch.set_num_threads(1)     # sums depend on the number of threads; runs are compared bit for bit

HERE = Path(ser.__file__).resolve().parent
TOY = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, moco_hidden=16, cls_layer=1,
           equiv_layers=[1], ratio=0.5, crop_min=0.3, batch_size=8, epochs=2.0, warmup_epochs=0.4,
           workers=0, log_every=1)


def toy(data="", out="", **changes):
    return ser.parse([], small=TOY | changes | dict(data=str(data), out=str(out)))


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def equal(x, y):
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def same(a, b):
    leaves, form = tree_flatten(a)
    others, other_form = tree_flatten(b)
    return form == other_form and all(map(equal, leaves, others))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed))


def pixels(*shape, seed=0):
    return torch.randint(256, shape, generator=seeded(seed), dtype=torch.uint8)


def shake(module, seed=0):
    """Random weights: initially [CLS] is 1e-6 and biases are zero, which hides mistakes."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.3, generator=generator)
    return module


def write_image(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    TF.to_pil_image(image).save(path)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def last(out):
    return torch.load(Path(out, "last.pt"), weights_only=True)


def log_of(out, name="log.jsonl"):
    lines = list(map(json.loads, Path(out, name).read_text().splitlines()))
    for line in lines:
        line.pop("images_per_s", None)     # the only number that no run repeats
    return lines


def sentence(function, *arguments):
    told = pytest.raises(SystemExit, function, *arguments).value.code
    assert isinstance(told, str) and "\n" not in told
    return told


@pytest.fixture(autouse=True)
def no_bar_is_left():
    yield     # the bar of a run that failed would print behind pytest's last line
    for bar in list(getattr(ser.tqdm, "_instances", ())):
        bar.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    images, _ = ser.synthetic_images(43, 30, seed=1)
    for i, image in enumerate(images):
        part = image[:, :20 + i % 5, :24 + i % 7]
        write_image(root / ("a/deep" if i % 3 else "b") / f"{i:02}.png", part)

    return root


# ==== Processes =========================================================================
multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])     # once for all


def become_rank(rank, main, ranks, port, *folders):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.save(main(rank, ranks, *folders), f"{folders[0]}/{rank}.pt")
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally, all work done


def run_ranks(main, ranks, *folders, seconds=100):
    """What main(rank, ranks, *folders) returns in a process for every rank. An error ends all."""
    workers = start_processes(become_rank, (main, ranks, get_free_port(), *folders), ranks,
                              join=False, daemon=True, start_method="forkserver")
    for _ in range(ranks):
        done = workers.join(seconds)     # returns when one more of them has ended
    assert done, f"of {ranks} ranks none has ended for {seconds} s"

    return [torch.load(f"{folders[0]}/{rank}.pt") for rank in range(ranks)]


# ==== 1. Group (paper 3.1) ==============================================================
D4 = list(itertools.product((False, True), range(4)))     # (flip, turns), flip first


def element(flip, turns, grid):     # of two images; the second is flipped if the first is not
    if turns % 2 == 1:
        grid = grid[::-1]
    return Geometry(torch.tensor([flip, not flip]), torch.tensor([turns, turns]), grid)


def slow_rho(g, x, cell=1):
    size = [cell * side for side in g.grid]
    moved = []
    for image, flip, turns in zip(x, g.flip, g.turns):
        if flip:
            image = image.flip(2)
        for _ in range(turns):     # the right-hand column, read downwards, becomes the top row
            image = image.mT.flip(1)
        moved.append(TF.resize(image, size))
    return torch.stack(moved)


def test_a_flip_comes_first_and_turns_go_counter_clockwise():
    wanted = ("123 456", "36 25 14", "654 321", "41 52 63",
              "321 654", "14 25 36", "456 123", "63 52 41")     # the last four flipped first
    x = torch.arange(1, 7).view(2, 3).expand(2, 1, 2, 3)
    for (flip, turns), text in zip(D4, wanted):
        rows = [list(map(int, row)) for row in text.split()]
        for circle in (0, 4, -4):
            moved = rho(element(flip, turns + circle, (2, 3)), x)
            assert moved[0, 0].tolist() == rows


def test_the_relative_element_takes_view_1_to_view_2_for_all_64_pairs():
    x = noise(2, 2, 3, 5)
    for first in D4:
        g1 = element(*first, (3, 5))
        x1 = rho(g1, x)
        assert x1.is_contiguous()     # or sums would round otherwise
        for flip, turns in D4:
            g2 = Geometry(torch.tensor([flip, flip]), torch.tensor([turns, turns]), (5, 2))
            moved = rho(relative(g2, g1), x1)
            assert same(moved, rho(g2, x)), (first, flip, turns)


def test_flips_and_turns_are_alike_and_independent_of_the_neighbour():
    g = sample_geometry(64000, generator=seeded())
    number = 4 * g.flip + g.turns
    pairs = 8 * number[:-1] + number[1:]
    counts = torch.bincount(pairs, minlength=64)
    assert 850 < counts.min() and counts.max() < 1150


def test_grids_are_those_of_the_stated_areas_and_aspects():
    grids = [sample_geometry(1, generator=one).grid for one in 8000 * [seeded()]]
    height, width = torch.tensor(grids).T
    area = height * width

    assert grids[0] == (14, 11)     # u = .089, v = .132: a small and narrow one
    assert 49 <= len(set(grids)) <= 51
    assert area.min() == 10 * 13 and area.max() <= 15 * 18     # .7 and 1.3 times 196, rounded
    assert abs(area.double().mean() - 196) < 1
    assert abs((width - height).sign().sum()) < 300     # wide as often as high


@parametrize("number, kept", [(0, "hflip"), (1, "rot90"), (2, "scale")])
def test_an_element_that_group_lacks_stays_at_the_identity_and_moves_no_other_draw(number, kept):
    _, full = toy_views(batch_size=80)     # of 40 images, with a grid of (3, 4)
    _, part = toy_views(batch_size=80, group=[kept])
    wanted = [torch.zeros(40).bool(), torch.zeros(40).long(), (4, 4)]
    wanted[number] = full.geometry[number]
    assert same(list(part.geometry), wanted)


@parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_values_of_fp32(dtype):
    """On a CPU, which has no kernel to resize such maps, and under autocast."""
    g = sample_geometry(3, 4, generator=seeded(5))
    x = noise(3, 2, 4, 4).to(dtype)
    assert same(rho(g, x), rho(g, x.float()).to(dtype))
    almost_1 = torch.ones(1, 1, 4, 4).double() - 1e-9     # of floats, this is 1
    assert ser.resize(almost_1, (3, 3)).max() < 1

    z = noise(2, 3, 4, 6).to(dtype)     # z and z'
    qk = noise(2, 9, 6).to(dtype)
    l_equiv = patch_ntxent(*z.float())
    l_inv = ser.info_nce(*qk.float(), 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(patch_ntxent(*z), l_equiv)
        assert same(ser.info_nce(*qk, 0.2), l_inv)


def refused(function, *arguments, error=ValueError):
    return str(pytest.raises(error, function, *arguments).value)


def test_what_does_not_fit_is_a_value_error():
    z = noise(3, 4, 6)
    assert "negatives" in refused(patch_ntxent, z[:1], z[:1])
    assert "of shape" in refused(patch_ntxent, z, z[:, :2])

    g = element(False, 0, (3, 2))
    h = noise(2, 4, 2, 3)
    assert "for 1" in refused(rho, g, h[:1])     # of 2 images
    assert "h2 is" in refused(ser.equiv_of_maps, None, g, h, h)
    assert "not among" in refused(sample_geometry, 2, 14, ("rot",))
    assert "255" in refused(ser.normalise, pixels(1, 3, 8, 8))

    assert "patches of 4" in refused(toy_vit(), noise(1, 3, 16, 18))
    assert "patches of 4" in refused(toy_vit(), noise(1, 3, 18, 16))
    for told, width, side in (("square", 4, 4), ("patch size", 8, 4), ("patches of 3", 8, 3)):
        assert told in refused(eval_linear.retrieval, nn.Identity(), noise(1, 3, 8, width), side)


# ==== 2. The batch and its views (paper 3.2) ============================================
def plain_jitter(image, drawn, order):
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
    factors = drawn[5:9]     # of these four
    for number in order.tolist():
        image = adjust[number](image, factors[number])

    if drawn.gray:
        image = TF.rgb_to_grayscale(image, 3)
    if drawn.blur > 0:
        image = TF.gaussian_blur(image, 13, float(drawn.blur))     # 13 of 216 pixels
    if drawn.solarize:
        image = TF.solarize(image, 128 / 255)
    return TF.normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def plain_cut(image, drawn):
    sides = torch.stack(drawn[:4]) * torch.tensor(2 * image.shape[1:])     # of h, w, h, w
    part = TF.crop(image, *sides.round().int().tolist())
    part = F.interpolate(part[None], 16, mode="bilinear", antialias=True)[0]
    return part.flip(-1) if drawn.flip else part


def rows_of(columns):
    return [Augmentation(*row) for row in zip(*columns)]


def load(dataset, n_b1):
    return default_collate([dataset[0, i, i >= n_b1] for i in range(len(dataset.source))])


def toy_views(step=0, pairs=1, **changes):
    args = toy(**changes)
    dataset = ser.two_view_dataset(pixels(args.batch_size, 3, 20, 24), args)
    loaded = load(dataset, args.batch_size // 2)
    return ser.make_views(pairs * loaded, args, step)


def test_jitter_is_torchvisions_with_draws_of_its_own_for_every_image():
    """Also of gray, of pure colours and of 128, the least that solarization inverts."""
    x = torch.rand(64, 3, 16, 216, generator=seeded())
    x[:, :, 0] = x[:, :1, 0]
    x[:, :, 1].round_()
    x[:, :, 15] = 128 / 255

    policy = Policy(224, (0.08, 1.0), p_blur=0.5, p_solarize=0.5)
    dataset = ser.ViewDataset(pixels(64, 3, 2, 2), [policy], seed=3)
    (_, aug), = load(dataset, 0)

    order = torch.tensor([2, 0, 3, 1])
    for images in (x, x.mT):
        found = ser.jitter_and_normalise(images, aug, order)
        for image, drawn, jittered in zip(images, rows_of(aug), found, strict=True):
            close(jittered, plain_jitter(image, drawn, order), 1e-4)

    still = default_collate([Augmentation()] * 64)
    assert same(ser.jitter_and_normalise(x, still, order), ser.normalise(x))

    wide = (torch.arange(448) == 200).float().expand(1, 3, 30, 448)
    blurred = ser.gaussian_blur(wide, torch.full((1, 1, 1, 1), 4.0))
    assert blurred[0, 0, 0].count_nonzero() == 25     # three sigma to each side


@pytest.fixture(scope="module")
def draws():
    images = [pixels(3, 40, 50)] * 1000
    dataset = ser.two_view_dataset(images, toy(image_size=56, crop_min=0.2))
    return {"b1": load(dataset, 1000), "b2": load(dataset, 0)}


def correlation(rows):
    return rows.corrcoef().nan_to_num().abs()     # 0 where a row is constant


@parametrize("part", ["b1", "b2"])
@parametrize("number, blur, solarize", [(0, 1.0, 0.0), (1, 0.1, 0.2)])
def test_both_parts_get_moco_v3s_jitter(number, blur, solarize, part, draws):
    _, drawn = draws[part][number]
    blurred = drawn.blur > 0
    flags = torch.stack([drawn.brightness != 1, drawn.gray, blurred, drawn.solarize])
    assert flags.double().mean(1).tolist() == approx([0.8, 0.2, blur, solarize], abs=0.04)
    assert drawn.blur[blurred].aminmax() == approx((0.025, 0.5), abs=0.02)     # of 56 pixels
    assert drawn.blur[blurred].mean() == approx(0.26, abs=0.04)     # uniform

    assert drawn.hue.ne(0).equal(drawn.brightness.ne(1))     # one draw for all four
    factors = torch.stack(drawn[5:9])
    least, most = factors.aminmax(dim=1)
    assert list(least) == approx([0.6, 0.6, 0.8, -0.1], abs=0.01)
    assert list(most) == approx([1.4, 1.4, 1.2, 0.1], abs=0.01)
    rows = torch.cat([factors, flags, drawn.flip[None]])
    assert correlation(rows).triu(1).max() < 0.2     # none is another's draw


def test_b1_is_cropped_and_mirrored_and_b2_is_not(draws):
    """Areas are uniform in [.2, 1]; what does not fit is drawn again, large areas first."""
    for _, drawn in draws["b1"]:
        area = drawn.height * drawn.width
        aspect = drawn.width * 50 / (drawn.height * 40)
        assert 0.19 < area.min() < 0.22 and 0.5 < area.mean() < 0.62
        assert 0.68 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.5
        assert abs(drawn.flip.double().mean() - 0.5) < 0.05
        assert drawn.top.max() > 0.4 and drawn.left.max() > 0.4     # not always in the centre

    for _, drawn in draws["b2"]:
        for column, wanted in zip(drawn[:5], Augmentation()):
            assert column.eq(wanted).all()


def test_the_two_views_of_an_image_are_independent(draws):
    for (_, first), (_, second) in draws.values():
        assert correlation(torch.stack([*first, *second]))[:12, 12:].max() < 0.15     # all columns


def test_draws_depend_on_seed_epoch_and_image():
    found = []
    for seed, epoch, index in ((0, 1, 5), (1, 1, 5), (0, 2, 5), (0, 1, 6)):
        dataset = ser.two_view_dataset([pixels(3, 20, 24)] * 7, toy(seed=seed))
        (_, drawn), _ = dataset[epoch, index, False]
        found.append((drawn[:4], drawn.blur))     # by torch's generator, and by Python's
    crops, blurs = map(set, zip(*found))
    assert len(crops) == len(blurs) == 4


def test_geometry_and_order_are_sampled_anew_for_each_step_view_and_seed():
    views = toy_views(pairs=3) + toy_views(step=1) + toy_views(seed=1)
    assert len({str(view.geometry.turns) for view in views}) == 10
    assert len({view.geometry.grid for view in views[:6]}) > 1     # of one step
    orders = [view.order.tolist() for view in views]
    assert sorted(orders[0]) == [0, 1, 2, 3]
    assert orders[:2] not in (orders[2:4], orders[6:8], orders[8:])
    # Not those of the sum of step and view, or of seed and view.
    assert orders[1:3] != orders[6:8] and orders[1] != orders[8]
    assert len({str(view.geometry.flip) for view in views[:6]}) > 1

    for view in toy_views(image_size=24):     # 6 x 6 patches of 4 pixels, then scaled
        assert view.b2.shape[2:] == tuple(4 * side for side in view.geometry.grid)
        assert 23 < math.prod(view.geometry.grid) < 50


def test_an_epoch_takes_each_image_once_in_an_order_of_its_own():
    batches = list(ser.batch_items(43, toy(), 0, 10))
    epochs, index, _ = torch.tensor(batches).view(80, 3).T
    assert epochs.tolist() == [0] * 40 + [1] * 40

    first, second = index.view(2, 40).tolist()
    assert len(set(first)) == len(set(second)) == 40
    assert set(first) != set(second) and first[:8] != sorted(first[:8])
    others = sum(ser.batch_items(43, toy(seed=1), 0, 5), [])     # an epoch of another seed
    assert [index for _, index, _ in others] not in (first, second)


# ==== 3. Encoder (paper 3.1) ============================================================
def toy_vit(cls_layer=2):
    return shake(ser.make_encoder(toy(depth=4, cls_layer=cls_layer)))


def plain_block(block):
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, F.gelu, 1e-6, True, norm_first=True)
    ours = list(block.parameters())
    weights = ours[2:6] + ours[8:] + ours[:2] + ours[6:8]     # torch has the norms at the end
    for p, weight in zip(layer.parameters(), weights, strict=True):
        p.copy_(weight)
    return layer


@torch.no_grad()
def plain_vit(encoder, x):
    kernel = encoder.patch_embed.proj
    t = F.conv2d(x, kernel.weight, kernel.bias, stride=4)
    t = t + TF.resize(encoder.pos_embed, t.shape[-2:])
    t = t.flatten(2).mT
    found = [t]
    for layer, block in enumerate(encoder.blocks):
        if layer == encoder.cls_layer:
            t = torch.cat([encoder.cls_token.expand(len(t), -1, -1), t], dim=1)
        t = plain_block(block)(t)
        found.append(t)
    return found


@parametrize("cls_layer", [0, 2, 3])
@parametrize("height, width", [(16, 16), (12, 20)])
def test_the_encoder_is_a_plain_vit_whose_cls_enters_after_its_block(height, width, cls_layer):
    encoder = toy_vit(cls_layer)
    x = noise(3, 3, height, width)
    plain = plain_vit(encoder, x)
    found = encoder(x, range(1, 5))
    close(found.cls, encoder.norm(plain[4][:, 0]), 1e-4)

    for layer in range(1, 5):
        patches = plain[layer]
        if layer > cls_layer:
            close(found.cls_at[layer], patches[:, 0], 1e-4)
            patches = patches[:, 1:]
        close(found.maps[layer], patches.mT.unflatten(2, (height // 4, width // 4)), 1e-4)


@parametrize("flags, wanted", [("", 43_349_888), ("--ratio 0 --cls-layer 0", 42_890_368)])
def test_parameter_counts_are_the_papers(flags, wanted):
    args = ser.parse(f"--data imagenet {flags}".split())
    with torch.device("meta"):
        assert sum(p.numel() for p in trained(ser.build(args)).values()) == wanted


@parametrize("name, fans", [("blocks.0.attn.proj", 128), ("blocks.0.attn.qkv", 128),
                            ("blocks.0.mlp.fc1", 320), ("patch_embed.proj", 112)])
def test_initial_weights_are_moco_v3s_and_depend_on_the_seed(name, fans):
    encoder = ser.build(toy(dim=64)).base.encoder
    layer = encoder.get_submodule(name)
    most = math.sqrt(6 / fans)
    shares = [part.abs().max() / most for part in layer.weight.chunk(3)]
    assert 0.95 < min(shares) and max(shares) <= 1
    assert layer.bias.eq(0).all()
    assert abs(encoder.pos_embed.std() - 0.02) < 2e-3
    assert 0 < encoder.cls_token.std() < 2e-6
    assert not same(ser.build(toy()).state_dict(), ser.build(toy(seed=1)).state_dict())


def test_both_branches_begin_alike_and_have_moco_v3s_mlps():
    base = ser.build(toy()).base
    assert same(base.momentum_encoder.state_dict(), base.encoder.state_dict())
    assert same(base.momentum_projector.state_dict(), base.projector.state_dict())

    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 3
    assert list(map(type, base.projector)) == kinds[:-1]
    assert list(map(type, base.predictor)) == kinds[:-4]
    assert base.projector[0].out_features == base.predictor[0].out_features == 16
    norm, _, gelu, _ = ser.projector(8)     # of L_equiv
    assert norm.eps == 1e-5 and same(gelu(noise(5)), F.gelu(noise(5)))


# ==== 4 to 6. L_equiv, L_inv and SER (paper 3.3, 4.1) ===================================
def slow_ntxent(z, z_prime, tau):
    """L_equiv as the paper writes it (3.3 and Eq. 3), in loops over images i and places j."""
    def exp_s(anchor, tokens):
        return (F.cosine_similarity(anchor, tokens, dim=-1) / tau).exp()

    losses = []
    for i, anchors in enumerate(z):
        others = [m for m in range(len(z)) if m != i]
        tokens = torch.cat([z[others], z_prime[others]])
        for anchor, match in zip(anchors, z_prime[i]):
            positive = exp_s(anchor, match)
            negatives = exp_s(anchor, tokens).sum()
            losses.append(-(positive / (positive + negatives)).log())
    return torch.stack(losses).mean()


@parametrize("tau", [0.3, 2.0])
def test_patch_ntxent_equals_the_papers_loops(tau):
    z = noise(2, 3, 4, 6).double().requires_grad_()     # z and z'
    slow = slow_ntxent(*z, tau)
    fast = patch_ntxent(*z, tau)
    close(fast.double(), slow, 1e-6)
    close(torch.autograd.grad(fast, z), torch.autograd.grad(slow, z), 1e-6)
    assert patch_ntxent(*z, 0.001).isfinite()     # where exp is not


SEEDS = []     # torch's seed at each forward pass of without_batch_norm


def without_batch_norm(args):
    """Random weights, and no BatchNorm, whose statistics are a rank's own on CPUs."""
    with patch.object(nn, "BatchNorm1d", nn.Identity):     # of any arguments
        model = shake(ser.build(args))
    model.base.momentum = 0.5     # so that the momentum branch goes far
    model.register_forward_pre_hook(lambda *_: SEEDS.append(torch.initial_seed()))
    return model


def sgd(model, args):
    """Plain steps, as long as the gradients: AdamW's say little of their size."""
    return torch.optim.SGD(trained(model).values(), lr=0.0)


RANK_RUN = dict(epochs=1.25, base_lr=8.0, equiv_layers=[1, 2], log_every=4, seed=3)


def rank_main(rank, ranks, out, folder):
    ser.setup()
    if rank > 0:     # only rank 0 writes
        ser.save = ser.save_views = lambda *_, **__: os._exit(3)

    args = toy(folder, f"{out}/{ranks}", **RANK_RUN)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        ser.train(args, without_batch_norm, make_optimizer=sgd)
        assert ser.ranks_and_rank() == (ranks, rank)     # the group is its caller's

    return told.getvalue(), SEEDS


def distance(a, b, names):
    return math.hypot(*[(a[name] - b[name]).norm() for name in names])


def check_same_way(ours, theirs, start, tolerance):
    for part in ("base.encoder", "base.projector", "base.momentum_encoder"):
        names = [name for name, _ in start.named_parameters() if name.startswith(part)]
        way = distance(theirs, start.state_dict(), names)
        assert way > 0.001, part
        assert distance(theirs, ours, names) < tolerance * way, part


@pytest.fixture(scope="session", params=[2, 4])
def several_ranks(request, folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    told, seeds = zip(*run_ranks(rank_main, request.param, out, folder))
    return ser.Namespace(out=f"{out}/{request.param}", told=told, seeds=seeds)


def test_ranks_train_and_log_as_one_process(several_ranks, folder, tmp_path):
    rank_main(0, 1, tmp_path, folder)
    ours = last(several_ranks.out)["model"]
    theirs = last(tmp_path / "1")["model"]
    check_same_way(ours, theirs, without_batch_norm(toy(**RANK_RUN)), 1e-3)

    _, *lines = log_of(several_ranks.out)
    _, *lines_of_one = log_of(tmp_path / "1")
    assert [line["step"] for line in lines] == [1, 4, 5, 6]
    for line, line_of_one in zip(lines, lines_of_one, strict=True):
        assert line == approx(line_of_one, rel=1e-4)


def test_one_rank_prints(several_ranks):
    first, *others = several_ranks.told
    chance = f"{math.log(1 + 2 * 16 * 3):.1f} at chance"     # of 4 images with 16 tokens
    assert chance in first and "100%" in first and "images/s" in first
    assert set(others) == {""}


def test_ranks_and_steps_share_no_seed(several_ranks):
    found = set().union(*several_ranks.seeds)
    assert len(found) == 6 * len(several_ranks.seeds)
    assert ser.seed_of(3, "step", 0, 0) in found     # 3 is --seed


def plain_cls(encoder, views):
    for view in views:
        yield torch.cat([encoder(x).cls for x in view[:2] if x is not None])     # b1, b2


def slow_info_nce(q, k, tau):
    cosines = F.cosine_similarity(q[:, None], k, dim=2)
    return 2 * tau * F.cross_entropy(cosines / tau, torch.arange(len(q)))


def plain_moco(base, views, m):
    for name, slow in base.named_parameters():
        if name.startswith("momentum_"):
            fast = base.get_parameter(name.removeprefix("momentum_"))
            slow.copy_(slow * m + fast.data * (1 - m))

    cls = plain_cls(base.encoder, views)
    slow_cls = plain_cls(base.momentum_encoder, views)
    q1, q2 = [base.predictor(base.projector(x)) for x in cls]
    k1, k2 = [base.momentum_projector(x) for x in slow_cls]
    return slow_info_nce(q1, k2, 0.2) + slow_info_nce(q2, k1, 0.2)


def plain_equiv(encoder, head, layer, first, second):
    norm, linear1, _, linear2 = head
    h1, h2 = [encoder(view.b2, [layer]).maps[layer] for view in (first, second)]
    aligned = slow_rho(relative(second.geometry, first.geometry), h1)
    tokens = torch.stack([aligned, h2]).flatten(3).mT
    t = F.layer_norm(tokens, [16], norm.weight, norm.bias)
    t = F.gelu(t @ linear1.weight.T)
    z, z_prime = t @ linear2.weight.T
    return slow_ntxent(z, z_prime, 0.4)


def plain_rate(step):
    """8 images at a base rate of 1 for 256: the peak is 1/32 after two of seven steps."""
    if step < 2:
        return step / 64
    return (1 + math.cos(math.pi * (step - 2) / 5)) / 64


def plain_steps(model, views, layers):
    losses = []
    for step, pair in enumerate(views):
        m = 1 - 0.3 * 0.5 * (1 + math.cos(math.pi * step / 7))
        loss = plain_moco(model.base, pair, m)
        for layer in layers:
            head = model.projectors[str(layer)]
            loss = loss + 3.0 / len(layers) * plain_equiv(model.base.encoder, head, layer, *pair)
        losses.append(loss.item())

        weights = list(trained(model).values())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.data -= plain_rate(step) * gradient

    return losses


@pytest.fixture(scope="module", ids=["moco", "ser"], params=[
    dict(ratio=0.0, cls_layer=0),
    dict(ratio=0.375, equiv_layers=[2, 1, 2], temperature=0.4, weight=3.0)])
def plain_run(request, folder, tmp_path_factory):
    """A run over the end of an epoch, and the same plainly. A repeated layer counts once."""
    out = tmp_path_factory.mktemp("run")
    args = toy(folder, out, **request.param, epochs=1.4, base_lr=1.0)
    start = shake(ser.build(args))
    start.base.momentum = 0.7     # so that the momentum branch goes far
    views = []
    model = copy.deepcopy(start)
    model.register_forward_pre_hook(lambda _, inputs: views.append(inputs[0]))
    ser.train(args, lambda _: model, make_optimizer=sgd)

    plain = copy.deepcopy(start)
    losses = plain_steps(plain, views, (1, 2) if args.ratio else ())
    return ser.Namespace(args=args, start=start, views=views, plain=plain, losses=losses)


def test_a_run_makes_its_views_of_its_images_as_they_record(plain_run, folder):
    paths = sorted(map(str, folder.rglob("*.png")))
    keys = ser.batch_items(43, plain_run.args, 0, 7)
    n_b1 = 5 if plain_run.args.ratio else 8
    assert len({str([view.order for view in pair]) for pair in plain_run.views}) == 7
    for own, pair in zip(keys, plain_run.views, strict=True):
        _, places, in_b2 = zip(*own)
        assert in_b2 == tuple(i >= n_b1 for i in range(8))
        images = [TF.pil_to_tensor(Image.open(paths[place])) for place in places]
        for view in pair:
            drawn = rows_of(view.augmentation)
            x = torch.stack(list(map(plain_cut, images, drawn))) / 255
            jittered = ser.jitter_and_normalise(x, view.augmentation, view.order)
            close(view.b1, jittered[:n_b1])
            if view.b2 is not None:
                moved = slow_rho(view.geometry, x[n_b1:], 4)
                of_b2 = default_collate(drawn[n_b1:])
                close(view.b2, ser.jitter_and_normalise(moved, of_b2, view.order))


def test_a_run_has_the_losses_and_weights_of_its_reimplementation(plain_run):
    _, *lines = log_of(plain_run.args.out)
    losses = [line["loss"] for line in lines]
    assert losses == approx(plain_run.losses, rel=1e-3)     # BatchNorm over 8 images adds rounding
    for step, line in enumerate(lines):
        assert line["lr"] == approx(plain_rate(step))

    ours = last(plain_run.args.out)["model"]
    check_same_way(ours, plain_run.plain.state_dict(), plain_run.start, 2e-3)


def test_adamw_decays_all_that_is_trained_and_nothing_else():
    model = ser.build(toy())
    ours = ser.adamw(model, toy(weight_decay=0.2))
    plain = torch.optim.AdamW(trained(model).values(), weight_decay=0.2, fused=True)
    assert type(ours) is type(plain) and ours.param_groups == plain.param_groups


def test_weight_0_is_the_control():
    model = shake(ser.build(toy(weight=0.0)))
    model(toy_views())["loss"].backward()
    for p in model.projectors.parameters():
        assert p.grad.eq(0).all()     # and not None, as L_equiv is computed


def test_every_trainable_parameter_gets_a_gradient_and_no_other():
    model = shake(ser.build(toy(equiv_layers=[1, 3])))
    losses = model(toy_views())
    losses["loss"].backward()
    assert not losses["inv"].requires_grad and not losses["equiv"].requires_grad
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.ne(0).any()) == p.requires_grad, name
    assert len(list(model.projectors.parameters())) == 8     # four for each layer


def test_views_png_shows_view_1_moved_onto_view_2(monkeypatch):
    monkeypatch.setattr(ser, "save_image", Mock())
    x1, x2 = toy_views(batch_size=20)
    ser.save_views("", (x1, x2), 4)

    moved = slow_rho(relative(x2.geometry, x1.geometry), x1.b2, 4)
    ((images, _), columns), = ser.save_image.call_args_list
    shown = ser.normalise(images)
    assert columns == {"nrow": 2}
    close(shown[0::2], moved[:8])     # of ten
    close(shown[1::2], x2.b2[:8])


# ==== 7. Settings =======================================================================
PAPER = """--image-size 224 --patch-size 16 --dim 384 --depth 12 --heads 6 --cls-layer 3
    --equiv-layers 3 --ratio .01 --weight .5 --temperature .3 --group rot90 hflip scale
    --moco-hidden 4096 --crop-min .08 --batch-size 2048 --epochs 100 --warmup-epochs 10 --seed 0
    --base-lr 3e-4 --weight-decay .1 --workers 8 --log-every 20 --save-every 0 --out runs/ser"""
SMALL = """--image-size 32 --patch-size 4 --dim 64 --depth 4 --heads 2 --ratio .25 --crop-min .3
    --batch-size 64 --epochs 3 --warmup-epochs .5 --base-lr 8e-3 --moco-hidden 512 --workers 0"""


@parametrize("data, wanted", [("--data=imagenet", PAPER), ("", f"{PAPER} {SMALL}")])
def test_the_defaults_are_the_papers_or_those_of_synthetic_images(data, wanted):
    assert ser.parse(data.split()) == ser.parse(f"{data} {wanted}".split())


def test_constants_and_defaults_of_functions_are_the_papers():
    assert ser.CROP_ASPECT == (3 / 4, 4 / 3)
    assert (ser.P_FLIP, ser.P_COLOUR, ser.P_GRAY) == (0.5, 0.8, 0.2)
    assert (ser.P_BLUR, ser.P_SOLARIZE) == ((1, 0.1), (0, 0.2))
    assert ser.BLUR_SIGMA == (0.1, 2)
    assert ser.ViT.__init__.__defaults__ == (224, 16, 384, 12, 6, 3)
    assert ser.SER.__init__.__defaults__ == ((3,), 0.5, 0.3)
    assert patch_ntxent.__defaults__ == ser.equiv_of_maps.__defaults__ == (0.3,)

    assert ser.MoCoV3.__init__.__defaults__ == (256, 4096, 0.2, 0.99)
    base = ser.build(toy()).base
    assert (base.temperature, base.momentum) == (0.2, 0.99)
    for module in base.encoder.modules():
        assert getattr(module, "eps", 1e-6) == 1e-6     # of LayerNorm


def test_the_defaults_of_an_evaluation_are_those_of_its_protocol():
    wanted = ("--data imagenet --checkpoint runs/ser/last.pt --epochs 50 --batch-size 1024 "
              "--seed 0 --workers 8 --lr .003 .01 .03 .1 .3 1 3 10")
    assert eval_linear.parse(["--data", "imagenet"]) == eval_linear.parse(wanted.split())
    assert eval_linear.parse([]) == eval_linear.parse("--batch-size 64 --epochs 50".split())
    assert eval_linear.eval_transform(32).transforms[0].size == [37]
    assert eval_linear.autocast(torch.empty(0)).fast_dtype == torch.bfloat16


def test_the_share_of_b2_is_rounded_on_each_rank(monkeypatch):
    assert ser.b2_per_rank(toy(ratio=0.01, batch_size=2048), 8) == 3
    assert ser.b2_per_rank(toy(ratio=0.25, batch_size=10), 1) == 3
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (4, 3))
    (first, second), = ser.batch_items(43, toy(ratio=0.3), 0, 1)     # .6 a rank, 2.4 of the batch
    assert not first.in_b2 and second.in_b2
    assert [len(own) for own in ser.batch_items(43, toy(ratio=0.0), 0, 1)] == [2]


@parametrize("images, ranks, size, ratio, flag", [
    (41, 4, 64, 0.5, "--batch-size"), (900, 3, 64, 0.5, "--batch-size"),
    (5000, 1, 128, 0.01, "--ratio"), (5000, 8, 2048, 0.0001, "--ratio")])
def test_a_wrong_batch_is_told_with_a_way_out(images, ranks, size, ratio, flag):
    args = toy(batch_size=size, ratio=ratio)
    told = sentence(ser.check_settings, args, images, ranks)
    advice, = re.findall(rf"^{flag} .* should be ([\d.]+)", told)
    args = ser.parse([flag, advice], small=vars(args))
    ser.check_settings(args, images, ranks)
    if flag == "--ratio":     # of which less than a half is rounded to fewer images
        args.ratio *= 0.49
        sentence(ser.check_settings, args, images, ranks)


@parametrize("flag", ["--image-size 18", "--dim 17", "--cls-layer 3", "--cls-layer -1",
                      "--equiv-layers 1 4", "--ratio 0.999", "--batch-size 2"])
def test_a_setting_that_cannot_be_is_one_sentence_with_its_value(flag, folder, tmp_path):
    args = ser.parse(flag.split(), small=vars(toy(folder, tmp_path)))
    begin, _ = sentence(ser.train, args).split(": ")
    assert begin.replace("[1, 4]", "1 4") == flag


@parametrize("module, flags", [
    (ser, "--base-lr=-0.01 --warmup-epochs=-1 --ratio=1.5 --crop-min=1.1 --epochs=0 --weight=inf "
          "--temperature=0 --weight-decay=-1 --equiv-layers=0 --image-size=0 --patch-size=0 "
          "--dim=0 --depth=0 --heads=0 --moco-hidden=0 --batch-size=0 --log-every=0 --group=rot"),
    (eval_linear, "--lr=-1 --lr=nan --epochs=0 --batch-size=0")])
def test_numbers_are_checked_where_they_enter(module, flags, capsys):
    for flag in flags.split():
        pytest.raises(SystemExit, module.parse, [flag])
        assert f"argument {flag.split('=')[0]}: invalid" in capsys.readouterr().err
    ser.parse("--crop-min 1 --ratio 0 --weight 0 --workers 0".split())     # the ends are allowed


@parametrize("epochs, ask, warmup", [
    (1.0, 1.0, 0.1), (0.5, 1.0, 0.05), (1.5, 1.0, 1.0), (1, 0, 0)])
def test_a_run_as_short_as_its_warmup_warms_up_for_a_tenth(epochs, ask, warmup):
    assert toy(epochs=epochs, warmup_epochs=ask).warmup_epochs == warmup


@parametrize("gpu", [False, True])
def test_bf16_is_for_gpus_unless_a_flag_says_otherwise(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert ser.parse([]).bf16 == gpu
    assert not ser.parse(["--no-bf16"]).bf16

    emulated = lambda including_emulation=True: including_emulation
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    assert not eval_linear.has_bf16()
    monkeypatch.setattr(eval_linear, "has_bf16", lambda: True)
    assert eval_linear.autocast(Mock(is_cuda=gpu, device=torch.device("cpu")))._enabled == gpu

    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "3")
    assert ser.setup().type == ("cuda" if gpu else "cpu")
    assert taken == ([3, "nccl"] if gpu else ["gloo"])


# ==== 8. Training =======================================================================
@pytest.fixture(scope="session")
def whole_run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    (out / "log.jsonl").write_text("of another run, killed before its first checkpoint")
    ser.train(toy(folder, out, workers=1))
    return out


def killed_run(_, folder, out):
    def sync(file):
        if (out / "last.pt").exists():
            os.ftruncate(file, 9)
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = sync
    ser.train(toy(folder, out, save_every=3))


def test_a_killed_run_continues_bit_for_bit(whole_run, folder, tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start_processes(killed_run, (folder, tmp_path), start_method="forkserver")
    views = (tmp_path / "views.png").read_bytes()
    assert views == (whole_run / "views.png").read_bytes()

    ser.train(toy(folder, tmp_path, save_every=3, log_every=5))
    assert torch.initial_seed() == ser.seed_of(0, "step", 9, 0)     # of the last step
    assert views == (tmp_path / "views.png").read_bytes()
    lines = log_of(tmp_path)
    assert [line.get("step") for line in lines] == [None, 1, 2, 3, 4, 5, 6, None, 4, 5, 6, 9, 10]
    assert all(line in log_of(whole_run) for line in lines[-5:])

    for part in ("model", "optimizer"):
        assert same(last(tmp_path)[part], last(whole_run)[part]), part


def test_the_log_holds_every_setting_and_both_losses(whole_run, folder):
    first, *lines = log_of(whole_run)
    wanted = vars(toy(folder, whole_run, workers=1))
    wanted |= dict(method="SER on MoCoV3", images=43, ranks=1, steps=10, b2=4, device="cpu")
    assert wanted.items() <= first.items()
    for line in lines:
        assert line.keys() == {"step", "loss", "inv", "equiv", "lr"}
        assert line["loss"] == approx(line["inv"] + 0.5 * line["equiv"])


def test_the_log_has_the_rate_of_the_bar_and_a_loss_of_any_rank_ends_all(
        capsys, monkeypatch, tmp_path):
    _, bar = ser.open_log(tmp_path / "log", ser.Namespace(steps=9, batch_size=8), start=3)
    assert bar.initial == 24     # images that are not seen now
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, 0))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))
    bar = Mock(format_dict={"rate": 7.5})
    given = sys.stdout, bar, 1, {"loss": torch.ones(())}, 0.1
    ser.log_and_check(*given)
    bar.set_postfix.assert_called_with({"loss": 1, "lr": 0.1})
    assert json.loads(capsys.readouterr().out)["images_per_s"] == 7.5

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(math.nan))
    assert "nan" in sentence(ser.log_and_check, *given)


def test_a_checkpoint_gives_its_encoder_back_in_eval_mode(whole_run):
    weights = last(whole_run)["model"]
    encoder = ser.load_encoder(whole_run / "last.pt")
    assert not encoder.training
    for name, weight in encoder.state_dict().items():
        assert same(weight, weights["base.encoder." + name]), name


@parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_ends_the_run_unsaved(value, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ser, "equiv_of_maps", Mock(side_effect=torch.tensor([1, 1, 1, value])))
    told = sentence(ser.train, toy(folder, tmp_path, save_every=2, log_every=20))

    assert told.startswith("step 4: ") and "--base-lr" in told
    assert last(tmp_path)["step"] == 2


def test_a_moved_run_goes_on_with_its_images(whole_run, folder, tmp_path, capsys):
    moved = shutil.copytree(folder, tmp_path / "moved")
    run = shutil.copytree(whole_run, tmp_path / "run")
    args = toy(moved, run, log_every=7, save_every=2)     # with fewer workers, too
    ser.train(args)
    assert re.search(f"(?s){moved}.*10 to 10.*100%", "".join(capsys.readouterr()))

    (moved / "b").rename(moved / "c")     # which changes neither the names nor their order
    told = sentence(ser.train, args)
    assert "names_checksum" in told and "images 43" not in told


def test_all_settings_but_six_are_compared_and_those_that_differ_are_listed(whole_run):
    told = sentence(ser.resume, whole_run / "last.pt", dict(weight=0.25, extra=1), None, None)
    assert "weight 0.5 (now 0.25)" in told and "extra None (now 1)" in told
    free = {"data", "out", "workers", "log_every", "save_every", "device"}
    for name, value in last(whole_run)["settings"].items():
        assert (f" {name} {value} (now " in told) == (name not in free)


def test_a_file_of_other_weights_from_a_gpu_is_told_by_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = tmp_path / "timm.pt"
    torch.save({"cls_token": torch.zeros(1)}, path)
    assert "convert" in sentence(ser.load_encoder, path)
    torch.save({"settings": nn.Identity()}, path)     # it might run code
    pytest.raises(pickle.UnpicklingError, ser.load_encoder, path)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU")
def test_a_gpu_computes_what_a_cpu_does(folder, tmp_path):
    lines = []
    for visible in ("0", ""):
        args = toy(folder, tmp_path / f"gpu{visible}", epochs=0.2, bf16=True)
        call = f"import ser; ser.train(ser.Namespace(**{vars(args)}))"
        sees = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        subprocess.run([sys.executable, "-c", call], cwd=HERE, check=True, env=sees)
        lines.append(log_of(args.out)[1])
    assert lines[0] == approx(lines[1], rel=0.02)


@parametrize("bf16, wanted", [(False, torch.float32), (True, torch.bfloat16)])
def test_bf16_multiplies_in_bfloat16_and_keeps_fp32_weights(bf16, wanted, folder, tmp_path):
    seen = set()
    model = ser.build(toy())
    model.base.predictor.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    ser.train(toy(folder, tmp_path, epochs=0.35, bf16=bf16), lambda _: model)
    assert seen == {wanted} and log_of(tmp_path)[0]["steps"] == 2     # of 1.75
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@parametrize("kind, ranks, wanted", [("cuda", 2, "SyncBatchNorm("), ("cuda", 1, "BatchNorm1d("),
                                     ("cpu", 2, "BatchNorm1d("), ("cpu", 3, "the 3 ranks")])
def test_ranks_share_batch_and_batch_norm(kind, ranks, wanted, folder, tmp_path, monkeypatch):
    def stop(path, settings, model, optimizer):
        assert settings["b2"] == 2 + ranks     # 3.2 images would be .4 of the batch
        sys.exit(repr(model).replace("\n", ""))

    monkeypatch.setattr(ser, "setup", lambda: torch.device(kind))
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (ranks, 0))
    monkeypatch.setattr(ser, "resume", stop)
    monkeypatch.setattr(nn.Module, "to", lambda model, device: model)
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda model: model)
    told = sentence(ser.train, toy(folder, tmp_path, ratio=0.4))     # the modules, or a refusal
    assert {*re.findall(r"\w*BatchNorm\w*\(|the 3 ranks", told)} == {wanted}


def test_training_raises_retrieval_over_its_control(tmp_path):
    images = ser.normalise(ser.synthetic_images(64, 16, seed=5)[0] / 255)
    shares = []
    flags = ("--image-size 16 --depth 3 --cls-layer 2 --equiv-layers 2 --group rot90 --ratio 0.5 "
             "--moco-hidden 64 --epochs 0.25 --warmup-epochs 0.1 --base-lr 0.04")
    for weight in ("0", "0.5"):
        args = ser.parse(f"{flags} --weight {weight} --out {tmp_path}/{weight}".split())
        encoder = ser.load_encoder(ser.train(args))
        f1 = lambda x: encoder(x, [2]).maps[2]
        shares.append(eval_linear.retrieval(f1, images, 4, "rot90"))

    assert shares[1] > 2 * shares[0]
    assert shares[1] == eval_linear.retrieval(f1, images, 4)     # turns are the default
    with torch.autocast("cpu", torch.bfloat16):     # where mean colours would tie
        assert eval_linear.retrieval(lambda x: F.avg_pool2d(x, 4).bfloat16(), images, 4) > 0.95


# ==== 9. Around it: data ================================================================
def test_any_tree_of_images_is_a_data_set(folder, tmp_path, monkeypatch):
    assert str(tmp_path) in sentence(ser.train, toy(tmp_path, tmp_path))     # which is empty
    root = tmp_path / "images[1]"
    for name in ("b/latest/val.JPEG", "b/a.txt", "b/._2.JPEG", ".trash/3.png", "\udcff.bmp"):
        path = root / name     # the last is no UTF-8
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    (root / "c").symlink_to(root / "b")
    names = ("b/latest/val.JPEG", "c/latest/val.JPEG", "\udcff.bmp")
    assert ser.find_images(toy(root))[0] == [f"{root}/{name}" for name in names]

    for place in ("train", "train/train", "train/val"):     # the last two are classes
        shutil.copytree(folder, root / place)
    found = ser.find_images(toy(root))
    assert found == ser.find_images(toy(root / "train"))
    monkeypatch.chdir(root / "train")
    assert found[1] == ser.find_images(toy("."))[1]


@parametrize("kind", ["RGB PNG", "L JPEG", "RGBA PNG", "CMYK TIFF", "P PNG", "L MPO"])
def test_an_image_is_read_as_pillow_shows_it(kind, tmp_path):
    mode, form = kind.split()
    image = Image.linear_gradient("L").resize((19, 12)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6     # a viewer would turn it
    path = tmp_path / "a.JPEG"
    image.save(path, form, exif=exif, save_all=form == "MPO", append_images=[image])
    assert same(ser.read_image(str(path)), TF.pil_to_tensor(Image.open(path).convert("RGB")))


@parametrize("kind", "I;16 PNG,I TIFF,F TIFF,L PNG,L TIFF,L WEBP".split(","))
def test_more_bits_and_animations_are_refused_with_their_path(kind, tmp_path):
    mode, form = kind.split()
    path = str(tmp_path / "a.png")
    image = Image.new(mode, (9, 7))
    image.save(path, form, save_all=mode == "L", append_images=[Image.new(mode, (9, 7), 99)])
    assert path in refused(ser.read_image, path, error=OSError)

    rgb16 = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000011002000000"
                          "c0e78f9d0000000b49444154789c636000030000070001b286acf4")     # a PNG
    for deep in (rgb16, b"P6 1 1 65535\n" + bytes(6), b"P5 1 1 4095\n" + bytes(2)):
        Path(path).write_bytes(deep)
        pytest.raises(OSError, ser.read_image, path)
    for raw, bits in (("RGB", 16), ("LA;16B", 8)):     # of a TIFF, and of a PNG
        opened = Mock(tile=[(0, 0, 0, raw)], mode="RGB", tag_v2={258: (bits,)})
        assert ser.more_than_8_bits(opened)


@parametrize("workers, begin", [(0, "^"), (1, "(?s)in DataLoader worker process.*")])
def test_the_last_line_of_an_unreadable_image_is_its_path(workers, begin, tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(b"no image")
    with pytest.raises(OSError, match=rf"{begin}cannot read {tmp_path}/\d.jpg: [^\n]*$"):
        ser.train(toy(tmp_path, tmp_path / "run", workers=workers))


def test_synthetic_images_depend_on_no_flag_but_their_size():
    images, _ = ser.synthetic_images(4096, 16, seed=0)
    assert same(ser.find_images(toy(seed=1)), (images, "synthetic"))


def test_synthetic_images_differ_within_a_class_and_all_are_as_in_measured_runs():
    sets = [ser.synthetic_images(300, 16, seed)[0].double() for seed in (0, 1)]
    assert torch.cat(sets).flatten(1).corrcoef().fill_diagonal_(0).max() < 0.95
    assert sets[0].std() == approx(60.8, abs=0.01)
    assert sets[1][:7].std() == approx(61.56, abs=0.01)
    assert ser.seed_of(0, "image", 1, 2) == 4653677487691878300
    assert ser.checksum(["a", "b"]) == "07f4401c"


# ==== 10. eval_linear.py (4.1, A.2) =====================================================
@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """few/ has classes 1 and 2 of three; in 2 are images of 0: what is good on val is bad there."""
    root = tmp_path_factory.mktemp("c=tree") / ".hidden"     # neither = nor this has an effect
    for part, n in (("train", 33), ("val", 15)):
        images, _ = ser.synthetic_images(n, 30, seed=n)
        for i, image in enumerate(images):
            write_image(root / f"{part}/class{i % 3}/{i:02}.png", image[:, :24])

    shutil.copytree(root / "val/class0", root / "val/class1/.trash")     # is not read
    shutil.copytree(root / "val/class1", root / "few/class1")
    shutil.copytree(root / "val/class0", root / "few/class2")
    return root


def write_checkpoint(folder, **changes):
    args = toy(**changes)
    weights = shake(ser.seed_and_make_encoder(args), args.seed).state_dict()
    ser.save(folder / "last.pt", step=7, settings=vars(args), encoder=weights)
    return folder / "last.pt"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path, depth=6)


def eval_args(tree, checkpoint, flags=""):
    paths = f"--data {tree} --test few={tree}/few/ --checkpoint {checkpoint}"
    common = "--workers 0 --epochs 2 --batch-size 8 --lr 10 0.3"
    return eval_linear.parse(f"{paths} {common} {flags}".split())


def evaluate(tree, checkpoint, flags=""):
    return eval_linear.evaluate(eval_args(tree, checkpoint, flags))


def head_of(folder):
    return torch.load(*folder.glob("head-*.pt"))


def evaluate_by(path, flags):
    return eval_linear.evaluate(eval_linear.parse(f"--checkpoint {path} {flags}".split()))


def results_of(folder):
    return json.loads((folder / "eval.json").read_text())


def check_values(rows, wanted, **keys):
    for measure, value in wanted.items():
        keys["measure"] = measure
        row, = [row for row in rows if keys.items() <= row.items()]
        assert row["value"] == approx(value, abs=1e-4), measure


def plain_split(folder):
    paths = sorted(folder.glob("*/*.png"))
    labels = [int(path.parent.name[-1]) for path in paths]
    images = [TF.pil_to_tensor(Image.open(path)) for path in paths]
    return torch.stack(images), torch.tensor(labels)


def plain_crop(image, *key):
    torch.manual_seed(ser.seed_of("eval", *key))
    box = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    part = v2.functional.resized_crop(image, *box, [16, 16])     # rounds by version
    return part.flip(-1) if torch.rand(1) < 0.5 else part


@torch.no_grad()
def plain_features(encoder, images):
    x = ser.normalise(images / 255)
    cls = [t[:, 0] for t in plain_vit(encoder, x)[-4:]]
    return encoder.norm(torch.stack(cls, dim=1)).flatten(1)


def plain_training(args, lr, tables, labels):
    torch.manual_seed(2)
    head = MLP(64, [1024, 1024, 3] if args.mlp else [3])     # with dropouts of 0
    nn.init.normal_(head[-2].weight, std=0.01)
    nn.init.zeros_(head[-2].bias)
    optimizer = torch.optim.SGD(head.parameters(), momentum=0.9)
    batch = min(args.batch_size, len(labels))
    steps = len(labels) // batch
    for epoch, x in enumerate(tables):
        order = torch.randperm(len(labels), generator=ser.rng(2, "eval", epoch))
        for step, rows in enumerate(order.split(batch)[:steps]):
            progress = (epoch + step / steps) / 2
            rate = lr * batch / 256 * (1 + math.cos(math.pi * progress)) / 2
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), labels[rows]).backward()
            optimizer.step()
    return head


def top1(logits, labels):
    return 100 * (logits.argmax(1) == labels).double().mean().item()


@pytest.fixture(scope="module", params=["", "--cache --batch-size 64", "--mlp"])
def protocol(request, tree, tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("protocol"), depth=6)
    args = eval_args(tree, path, f"--seed 2 {request.param}")
    rows = eval_linear.evaluate(args)

    encoder = ser.load_encoder(path)
    sets = {}
    for name in ("train", "val", "few"):
        images, labels = plain_split(tree / name)
        resized = F.interpolate(images, (18, 22), mode="bicubic", antialias=True)
        sets[name] = (plain_features(encoder, TF.center_crop(resized, 16)), labels)

    x, labels = sets["train"]
    tables = [x, x]     # of two epochs
    if not args.cache:
        images, _ = plain_split(tree / "train")
        for epoch in range(2):
            crops = [plain_crop(image, 2, epoch, i) for i, image in enumerate(images)]
            tables[epoch] = plain_features(encoder, torch.stack(crops))

    x, y = sets["val"]
    heads = [plain_training(args, lr, tables, labels) for lr in args.lr]
    right = [top1(head(x), y) for head in heads]
    best = right.index(max(right))

    return ser.Namespace(folder=path.parent, encoder=encoder, args=args, rows=rows, sets=sets,
                         right=right, best_lr=args.lr[best], best_head=heads[best])


def test_the_best_head_is_that_of_the_protocol(protocol):
    if protocol.args.mlp:
        return     # MLPs are not kept
    kept = head_of(protocol.folder)
    close([kept["weight"], kept["bias"]], list(protocol.best_head.parameters()))

    assert kept["lr"] == protocol.best_lr
    assert kept["classes"] == ["class0", "class1", "class2"]
    assert kept["settings"] == vars(protocol.args)


def test_eval_jsonl_has_the_accuracy_of_every_rate(protocol):
    _, line = log_of(protocol.folder, "eval.jsonl")
    assert line["epoch"] == 2 and line["weights"] == eval_linear.fingerprint(protocol.encoder)
    assert line["settings"] == vars(protocol.args)
    assert line["val top-1 %"] == approx(dict(zip(["10.0", "0.3"], protocol.right)))


@parametrize("name, lacks", [("val", 0), ("few", 0), ("few", 1)])
def test_sets_are_scored_among_all_classes_and_among_their_own(name, lacks, protocol):
    """few lacks the first class. 20-NN reads the last block, of training images of the classes."""
    x, y = protocol.sets[name]
    train, labels = protocol.sets["train"]
    near = labels >= lacks
    votes = eval_linear.knn(train[near, -16:], labels[near], x[:, -16:], y)
    right = top1(protocol.best_head(x)[:, lacks:], y - lacks)
    kind = "mlp" if protocol.args.mlp else "linear"
    wanted = {"20-NN top-1 %": votes, f"{kind} top-1 %": right, f"{kind} top-5 %": 100}
    check_values(protocol.rows, wanted, set=name, classes=3 - lacks, block=6)


def test_the_head_is_chosen_among_the_classes_of_val(tree, checkpoint, capsys):
    flags = f"--val {tree}/few --cache --lr 10 3"     # 0 % of three classes, half of two
    rows = evaluate(tree, checkpoint, flags)
    best = max(log_of(checkpoint.parent, "eval.jsonl")[-1]["val top-1 %"].values())
    for name in ("val", "few"):     # which are the same images
        check_values(rows, {"linear top-1 %": best}, set=name, classes=2)
    assert "few, 2 classes: linear" in capsys.readouterr().out


def test_top_1_and_top_5_are_counted_among_the_classes_of_a_set():
    logits = torch.arange(8.0).repeat(6, 1)
    logits[:, 0] = 9     # of no class of the set
    logits[3, 2], logits[4, 5], logits[5, 0] = math.inf, math.nan, math.inf
    labels = torch.tensor([7, 0, 3, 2, 5, 7])     # topk would find the last three
    assert eval_linear.accuracy(logits, labels, torch.arange(1, 8)) == approx((100/6, 200/6))


@parametrize("firsts, others, cosine, wanted", [
    (1, 2, 0.945, 0),      # two votes of exp(-.055 / .07) = .46
    (1, 2, 0.958, 1),      # two of .55
    (10, 40, 0.995, 0),    # ten of .93 are near enough, an eleventh would win
    (9, 40, 0.995, 1)])    # eleven of them, which nine would not beat
def test_the_20_nearest_vote_with_weights_exp_s_over_07(firsts, others, cosine, wanted):
    points = torch.tensor([[3.0, 0.0], [cosine, math.sqrt(1 - cosine ** 2)]])
    labels = torch.tensor([0] * firsts + [1] * others)
    test = torch.tensor(64 * [[0.0, 1.0]] + 201 * [[2.0, 0.0]] + 3 * [[6.0, 0.0]])
    truth = torch.tensor(64 * [0] + 204 * [wanted])     # the first are of class 1, by all votes
    assert eval_linear.knn(points[labels], labels, test, truth) == approx(100 * 204 / 268)


@parametrize("classes, wanted", [("a b c d e f g h i j k", [0, 10, 2]), ("2 0 10", [1, 2, 0])])
def test_test_sets_are_matched_by_class_name_and_numbered_ones_by_place(
        classes, wanted, tmp_path, capsys):
    """"10" sorts before "2"; where the classes of training are numbers, too, they are names."""
    for name in ("2/a.png", "10/a.png", "0/a.png"):
        write_image(tmp_path / name, pixels(3, 9, 9))
    given = (tmp_path, None, classes.split())
    assert [label for _, label in eval_linear.ClassFolder(*given)] == wanted
    assert ("taken for the labels" in capsys.readouterr().out) == ("a" in classes)
    assert "no class 0" in sentence(eval_linear.ClassFolder, tmp_path, None, ["10", "2"])
    (tmp_path / "0").rename(tmp_path / "1")     # numbers from 1 on, or a class that is none
    assert "no class 1" in sentence(eval_linear.ClassFolder, *given)


def plain_colours(images, generator):
    draws = 2 * torch.rand(4, len(images), generator=generator) - 1
    jittered = []
    for image, (b, c, s, h) in zip(images, draws.T):
        drawn = Augmentation(brightness=1 + 0.4 * b, contrast=1 + 0.4 * c,
                             saturation=1 + 0.2 * s, hue=0.1 * h)
        jittered.append(plain_jitter(image, drawn, torch.arange(4)))
    return torch.stack(jittered)


def tokens_found(h, h_prime):
    """For each image, the share of tokens whose nearest of h_prime is at the same place."""
    tokens, others = [x.flatten(2).mT.flatten(0, 1) for x in (h, h_prime)]
    found = [F.cosine_similarity(t, others).argmax() == place for place, t in enumerate(tokens)]
    return torch.stack(found).view(len(h), -1).double().mean(1)


def both_ways(f, g, x):
    return slow_rho(g, f(x)), f(slow_rho(g, x, 4))


@torch.no_grad()
def plain_equivariance(f, images, kind):
    """The values of the rows of a transform, in parts of 32 images (A.2)."""
    cosines = []
    found = []
    found_jittered = []
    generator = ser.rng("jitter", kind)
    f_jittered = lambda pixels: f(plain_colours(pixels, generator))
    for part, pixels in enumerate(images.split(32)):
        x = ser.normalise(pixels)
        g1, g2 = [sample_geometry(len(x), 5, [kind], ser.rng(kind, part, view))
                  for view in (1, 2)]
        g = relative(g2, g1)
        cosines += F.cosine_similarity(*both_ways(f, g, x)).flatten(1).mean(1)

        if kind == "hflip":
            g2.flip[:] = True
        if kind == "rot90":
            g2.turns[:] = torch.arange(len(x)) % 3 + 1
        found += tokens_found(*both_ways(f, g2, x))
        found_jittered += tokens_found(*both_ways(f_jittered, g2, pixels))
    return [torch.stack(each).mean().item() for each in (cosines, found, found_jittered)]


@parametrize("kind, layer, n", [("rot90", 2, 34), ("hflip", 4, 9), ("scale", 1, 64)])
def test_equivariance_is_that_of_the_appendix_written_as_loops(kind, layer, n):
    encoder = toy_vit()
    images = pixels(n, 3, 20, 20)     # 5 x 5 patches of 4 pixels

    def f(x):
        h = encoder(x, [layer]).maps[layer].movedim(1, -1)
        h = encoder.norm(h) if layer == 4 else h
        return h.movedim(-1, 1)

    given = (f, ser.normalise(images / 255), 4, kind)
    measured = [measure(*given) for measure in (eval_linear.cosine, eval_linear.retrieval)]
    assert measured == approx(plain_equivariance(f, images / 255, kind)[:2])

    val = [(image, 0) for image in images]
    rows = eval_linear.equivariance_rows(encoder, val, [(kind, 3), (kind, layer)])
    if n == 34:     # of which `equivariance_rows` takes 32, spread evenly
        images = images[[33 * i // 31 for i in range(32)]]
    values = plain_equivariance(f, images / 255, kind)
    names = (f"{kind} cosine", f"{kind} retrieval", f"{kind} retrieval with jitter")
    check_values(rows, dict(zip(names, values)), set="val", block=layer)


def eval_rank(rank, ranks, out, tree):
    if rank > 0:     # only rank 0 reads the checkpoint, and writes
        ser.load_checkpoint = ser.save = eval_linear.add_rows = lambda *_, **__: os._exit(3)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        rows = evaluate(tree, f"{out}/last.pt")
    assert "results are in" in told.getvalue() if rank == 0 else not told.getvalue()

    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    adamw = torch.optim.AdamW(model.parameters(), 5 + rank)
    run = Path(out, f"run-{rank}.pt")
    if rank == 0:
        weights, state = model.state_dict(), adamw.state_dict()
        ser.save(run, step=4, settings={}, model=weights, optimizer=state)
    assert ser.resume(run, {}, model, adamw) == 4
    start = ser.seed_and_make_encoder(toy()).state_dict()     # depends on no rank
    ser.leave_group()
    assert not torch.distributed.is_initialized()
    return rows, start, model.state_dict(), adamw.state_dict()


def test_two_ranks_evaluate_as_one_process(tree, checkpoint, tmp_path):
    wanted = eval_rank(0, 1, tmp_path, tree)
    head = head_of(tmp_path)
    assert same(run_ranks(eval_rank, 2, tmp_path, tree), [wanted, wanted])
    close(head_of(tmp_path)["weight"], head["weight"], 1e-4)
    assert len(log_of(tmp_path, "eval.jsonl")) == 4     # two of the first, of rank 0

    assert results_of(tmp_path)["rows"][0]["images"] == head["images"] == (
        "train: 33 images 526c72ec, val: 15 images 33ec3f57, few: 10 images 3041b4e2")


@parametrize("load", [ser.load_encoder, lambda path: evaluate_by(path, ""),
                      lambda path: ser.resume(path, vars(toy()), toy_vit(), None)])
def test_missing_weights_are_an_error(load, tmp_path):
    ser.save(tmp_path / "last.pt", settings=vars(toy()), encoder={}, model={}, step=0)
    assert "Missing key" in refused(load, tmp_path / "last.pt", error=RuntimeError)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    shape = dict(image_size=8, depth=4, cls_layer=3, seed=3)
    path = write_checkpoint(tmp_path_factory.mktemp("synthetic"), **shape)
    evaluate_by(path, "--epochs 1")
    untrained = ser.seed_and_make_encoder(toy(**shape)).eval()
    encoders = dict(untrained=untrained, trained=ser.load_encoder(path))
    return results_of(path.parent), head_of(path.parent), encoders


@parametrize("name", ["untrained", "trained"])
def test_without_data_each_encoder_is_measured_on_synthetic_images(name, synthetic):
    results, _, encoders = synthetic
    encoder = encoders[name]
    images, labels = ser.synthetic_images(2048, 8, seed=101)
    val, truth = ser.synthetic_images(1000, 8, seed=102)
    train = eval_linear.cls_features(encoder, images)
    x = eval_linear.cls_features(encoder, val)

    spread_val = [(image, 0) for image in val[torch.linspace(0, 999, 512).long()]]
    rows = eval_linear.equivariance_rows(encoder, spread_val, [("rot90", 3)])
    wanted = {row["measure"]: row["value"] for row in rows}
    wanted["20-NN top-1 %"] = eval_linear.knn(train, labels, x, truth)
    check_values(results["rows"], wanted, encoder=name)


def test_head_and_rows_name_the_weights_that_they_are_of(synthetic):
    results, head, encoders = synthetic
    own = {name: eval_linear.fingerprint(encoder) for name, encoder in encoders.items()}
    for row in results["rows"]:
        assert row["weights"] == own[row["encoder"]]
    assert own["trained"][16:] == "-2-3"     # heads and --cls-layer, which no weight tells
    assert head["weights"] == own["trained"]

    # Every digit of every weight counts.
    layer = nn.Linear(40, 40)
    before = eval_linear.fingerprint(layer)
    layer.weight.data[20, 20] += 1e-6
    assert eval_linear.fingerprint(layer) != before

    made_by = results["checkpoints"]
    assert [made_by[own[name]]["step"] for name in encoders] == [0, 7]
    assert made_by[own["trained"]]["settings"]["cls_layer"] == 3


@parametrize("flags, blocks", [("--knn", {1}), ("--equivariance", {1, 2, 3})])
def test_without_data_and_f1_block_1_is_measured_if_no_flag_asks_for_all(flags, blocks, tmp_path):
    path = write_checkpoint(tmp_path, image_size=8, cls_layer=0)
    rows = evaluate_by(path, flags)
    assert {row["block"] for row in rows if not row["classes"]} == blocks


def test_readmes_output_is_what_the_commands_print(synthetic, capsys):
    text = (HERE / "README.md").read_text()
    args = ser.parse([])
    vars(args).update(images=4096, steps=192, b2=16, ranks=1, device="cpu")
    ser.print_plan(args, 0)

    rows = copy.deepcopy(synthetic[0]["rows"])
    untrained, trained = zip(*re.findall(r"  ([\d.]+)  +([\d.]+)\n", text)[:6])
    for row, value in zip(rows, untrained + trained, strict=True):
        unit = 100 if "retrieval" in row["measure"] else 1
        row["value"] = float(value) / unit
    eval_linear.print_table(rows)
    assert f"```\n{capsys.readouterr().out}" in text


@parametrize("flags, accuracies, blocks", [
    ("--knn", "20-NN", 0), ("--equivariance", "", 6), ("--mlp --knn", "mlp 20-NN", 0),
    ("--knn --cache", "linear 20-NN", 0), ("--knn --equivariance", "20-NN", 6),
    ("--equivariance --cache", "linear 20-NN", 6)])
def test_flags_choose_what_is_measured(flags, accuracies, blocks, tree, checkpoint):
    rows = evaluate(tree, checkpoint, flags)
    measured = {(row["block"], row["measure"].split()[0]) for row in rows}
    wanted = {(6, kind) for kind in accuracies.split()}
    wanted.update(itertools.product(range(1, blocks + 1), ser.ELEMENTS))
    assert measured == wanted
    assert any(row["encoder"] == "untrained" for row in rows) == (blocks > 0)


def test_equivariance_is_that_of_images_of_val(tree, checkpoint, monkeypatch):
    measure = Mock(return_value=[])
    monkeypatch.setattr(eval_linear, "equivariance_rows", measure)
    evaluate(tree, checkpoint, "--equivariance")
    _, images, _ = measure.call_args.args
    assert images.root == f"{tree}/val"
    assert len(eval_linear.spread(images, 99)) == 15     # all


def add_row(folder, value, weights, seed, images):
    args = ser.Namespace(seed=seed)
    made_by = eval_linear.Checkpoint(None, weights, value, {})
    eval_linear.add_rows(folder / "eval.json", [{"value": value}], args, made_by, images)


def test_evaluations_that_end_at_once_lose_no_rows(tmp_path, monkeypatch):
    # It is called between reading and writing, when the others would have read the same.
    monkeypatch.setattr(eval_linear, "provenance", lambda args, *_: time.sleep(0.05) or vars(args))
    with ThreadPoolExecutor() as threads:
        for seed in range(4):
            threads.submit(add_row, tmp_path, 0, "a", seed, "x")
    assert len(results_of(tmp_path)["rows"]) == 4


def test_a_new_value_replaces_the_old_one_at_the_end(tmp_path, monkeypatch):
    """Also on a file system without locks; and a stop while rows are written loses none."""
    monkeypatch.setattr(eval_linear.fcntl, "flock", Mock(side_effect=OSError))
    for value, made_of in enumerate(["a0x", "a1x", "b0x", "a0y", "a0x"], start=1):
        add_row(tmp_path, value, *made_of)
    results = results_of(tmp_path)
    assert [row["value"] for row in results["rows"]] == [2, 3, 4, 5]
    assert {name: run["step"] for name, run in results["checkpoints"].items()} == {"a": 1, "b": 3}

    monkeypatch.setattr(Path, "write_text", lambda path, text: path.write_bytes(b"half") / 0)
    pytest.raises(ZeroDivisionError, add_row, tmp_path, 6, *"a0x")
    assert results_of(tmp_path) == results


def test_other_heads_weights_and_images_replace_no_head(tree, checkpoint, monkeypatch):
    for flags in ("", "--mlp", "--cache", ""):
        evaluate(tree, checkpoint, flags)
    monkeypatch.setattr(eval_linear, "describe_sets", lambda sets: "other images")
    evaluate(tree, checkpoint)
    assert len(list(checkpoint.parent.glob("head-????????.pt"))) == 3

    state = torch.load(checkpoint)
    state["encoder"]["blocks.2.norm1.bias"] += 1
    ser.save(checkpoint, **state)
    evaluate(tree, checkpoint)
    assert len(list(checkpoint.parent.glob("head-*.pt"))) == 4
    for value in (torch.inf, torch.nan):
        state["encoder"]["blocks.2.norm1.bias"][0] = value
        ser.save(checkpoint, **state)
        assert "not finite" in sentence(evaluate, tree, checkpoint)


@parametrize("test", ["train=few", "val=few", "crops=few", "=few", "few", "few=few"])
def test_a_set_that_would_replace_another_is_refused(test, tree, checkpoint):
    flags = "--test " + test.replace("=", f"={tree}/")
    args = eval_args(tree, checkpoint, flags)
    assert sentence(eval_linear.load_sets, args, 16).startswith("--test")
    for needy in (flags, "--val x"):
        assert "--test need --data" in sentence(eval_linear.parse, needy.split())


def test_a_missing_val_and_a_class_that_train_lacks_are_told(tree, tmp_path):
    train = tmp_path / "train"
    shutil.copytree(tree / "few", train)
    args = eval_linear.parse(f"--data {tmp_path}".split())
    assert "--val" in sentence(eval_linear.load_sets, args, 16)
    (tmp_path / "link").symlink_to(train)
    for args.val, told in ((tree / "val", "class0"), (tmp_path / "link", "training images")):
        assert told in sentence(eval_linear.load_sets, args, 16)

    (train / "class1").rename(train / ".class1")
    data = eval_linear.ClassFolder(f"{train}/")     # with a slash at its end
    assert data.classes == ["class2"] and {label for _, label in data} == {0}
    (train / "class3").mkdir()
    assert "below class3" in sentence(eval_linear.ClassFolder, train)


@parametrize("flags, told", [("", "add --data"), ("--data . --out LOCKED", "LOCKED")])
def test_an_evaluation_refuses_before_the_work(flags, told, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_linear, "load_sets", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "LOCKED")
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path, data=tmp_path)
    assert told in sentence(evaluate_by, "last.pt", flags)
    Path("eval.json").write_text("damaged")
    pytest.raises(json.JSONDecodeError, evaluate_by, "last.pt", "--data .")


@parametrize("step", ["add_rows", "print_table"])
def test_a_head_then_rows_are_in_out_first(step, tree, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_linear, step, lambda *_: sys.exit("closed"))
    out = tmp_path / "new/out"
    assert sentence(evaluate, tree, checkpoint, f"--out {out}") == "closed"
    assert set(tmp_path.iterdir()) == {checkpoint, out.parent}
    assert log_of(out, "eval.jsonl") and head_of(out)
    assert step == "add_rows" or len(results_of(out)["rows"]) == 9


# ==== 11. READMEs =======================================================================
def paste(start, **names):
    text = (HERE / "README.md").read_text() + (HERE / "paper/README.md").read_text()
    block, = re.findall(rf"^```python\n({start}.*?)^```", text, re.M | re.S)
    exec(block, names)
    return names


@parametrize("elements", [ser.ELEMENTS, ("hflip",)])
def test_sections_1_and_4_do_the_same_in_another_file(elements):
    sections = re.split("^(?=# ==== )", Path(ser.__file__).read_text(), flags=re.M)
    imports = {name: vars(ser)[name] for name in "math torch nn F dist NamedTuple".split()}
    exec(sections[1] + sections[4], imports)
    copied = ser.Namespace(**imports)

    losses = []
    for code in (ser, copied):
        torch.manual_seed(0)
        project = code.projector(8, 16)
        g1, g2 = [code.sample_rank_geometry(3, 4, seeded(view), elements) for view in (1, 2)]
        h1, h2 = [code.rho(g, noise(3, 8, 4, 4)) for g in (g1, g2)]
        losses.append(code.equiv_of_maps(project, code.relative(g2, g1), h1, h2))
    assert same(*losses)


def test_features_are_two_lines_away(monkeypatch):
    monkeypatch.chdir(HERE)
    names = paste("import ser")
    encoder = ser.load_encoder("paper/encoders/SER.pt")
    assert torch.equal(names["cls"], encoder(ser.normalise(names["x"])).cls)
    assert names["tokens"].shape == (2, 128, 8, 8)
