"""Every claim of ser.py and eval_linear.py, each on the smallest input that can break it.

Fast code is compared with slow oracles, a whole run of ser.train with a plain re-implementation.
Sections 1 to 9 are those of ser.py, 10 is eval_linear.py, 11 README.md.
"""
import os
if "TEST_ON_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # before torch looks: tests compare CPU tensors

import contextlib
import copy
import io
import itertools
import json
import math
import multiprocessing
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import RandomResizedCrop, v2

import eval_linear
import ser
from ser import Augmentation, Geometry, ViewSettings, patch_ntxent, relative, rho, sample_geometry

torch.set_num_threads(1)     # sums depend on the number of threads; runs are compared bit for bit

HERE = Path(ser.__file__).resolve().parent
TOY = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1, equiv_layers=[1],
           ratio=0.5, moco_hidden=16, batch_size=8, epochs=2.0, warmup_epochs=0.4, crop_min=0.3,
           workers=0, log_every=1)


def toy(data="", out="", **changes):
    return ser.parse([], small=TOY | dict(data=str(data), out=str(out)) | changes)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same(a, b):
    """Equal to the last bit, in all that dicts, lists and tuples hold."""
    a, form_a = tree_flatten(a)
    b, form_b = tree_flatten(b)
    return form_a == form_b and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def shake(module, seed=0):
    """Random weights: initially [CLS] is 1e-6 and biases are zero, which hides mistakes."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.3, generator=generator)
    return module


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def value_and_gradients(function, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*inputs)
    return value.detach(), torch.autograd.grad(value, inputs)


def last(out):
    return torch.load(Path(out, "last.pt"), weights_only=True)


def log_of(out):
    """The lines of a log, but for the clock's."""
    lines = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    assert all("images_per_s" in line for line in lines if "step" in line)
    return [{key: line[key] for key in line if key != "images_per_s"} for line in lines]


def sentence(function, *arguments):
    """The one sentence with which it ends the program."""
    with pytest.raises(SystemExit) as left:
        function(*arguments)
    assert isinstance(left.value.code, str) and "\n" not in left.value.code
    return left.value.code


@pytest.fixture(autouse=True)
def no_bar_is_left():
    """The bar of a run that failed would print behind pytest's last line."""
    yield
    for bar in list(getattr(ser.tqdm, "_instances", ())):
        bar.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """43 image files of several sizes, in two folders."""
    root = tmp_path_factory.mktemp("images")
    for i, image in enumerate(ser.synthetic_images(43, 30, seed=1)[0]):
        path = root / ("a/deep" if i % 3 else "b") / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        TF.to_pil_image(image[:, :20 + i % 5, :24 + i % 7]).save(path)
    return root


# ==== Processes =========================================================================
def begin(main, *arguments):
    """A process that runs main(*arguments), from a server that has imported torch once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=main, args=arguments)
    process.start()
    return process


def become_rank(main, rank, ranks, port, *folders):
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))     # as torchrun does
    try:
        torch.save(main(rank, ranks, *folders), f"{folders[0]}/{rank}.pt")
    except BaseException:
        Path(folders[0], f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally, all work done


def run_ranks(main, ranks, *folders, seconds=100):
    """What main(rank, ranks, *folders) returns in a process for every rank. All are killed as soon
    as one fails, or when time is over; the failure names the rank and has its traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [begin(become_rank, main, rank, ranks, port, *folders) for rank in range(ranks)]
    end = time.monotonic() + seconds
    codes = [None]
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.02)
        codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    for rank, code in enumerate(codes):
        if code:
            told = Path(folders[0], f"{rank}.txt")
            pytest.fail(f"rank {rank} of {ranks} ended with {code}\n"
                        + (told.read_text() if told.exists() else ""))
    assert None not in codes, f"after {seconds} s, exit codes of the ranks are {codes}"
    return [torch.load(f"{folders[0]}/{rank}.pt") for rank in range(ranks)]


# ==== 1. Group (paper 3.1) ==============================================================
D4 = list(itertools.product((False, True), range(4)))     # (flip, turns), flip first


def element(flip, turns, grid, batch=1):
    return Geometry(torch.full((batch,), flip), torch.full((batch,), turns), grid)


def turned(grid, turns):
    return grid if turns % 2 == 0 else grid[::-1]


def slow_move(x, flip, turns):
    """A flip, then counter-clockwise quarter turns, of one array (C, h, w)."""
    x = x.flip(2) if flip else x
    for _ in range(turns):     # the right-hand column, read downwards, becomes the top row
        x = x.transpose(1, 2).flip(1)
    return x


def slow_rho(g, x, cell=1):
    """rho_g image by image, resampled by torchvision."""
    size = [g.grid[0] * cell, g.grid[1] * cell]
    moved = []
    for image, flip, turns in zip(x, g.flip, g.turns):
        image = slow_move(image, bool(flip), int(turns))
        moved.append(TF.resize(image, size, antialias=True))
    return torch.stack(moved)


def test_a_flip_comes_first_and_turns_go_counter_clockwise():
    """Every element on the literal array 123 / 456, by rho and by the oracle."""
    wanted = ("123 456", "36 25 14", "654 321", "41 52 63",
              "321 654", "14 25 36", "456 123", "63 52 41")     # the last four flipped first
    x = torch.arange(1, 7).view(1, 1, 2, 3)
    for (flip, turns), text in zip(D4, wanted):
        moved = rho(element(flip, turns, turned((2, 3), turns)), x)
        rows = moved[0, 0].tolist()
        assert " ".join("".join(map(str, row)) for row in rows) == text
        assert torch.equal(moved[0], slow_move(x[0], flip, turns))


def test_turns_of_a_hand_made_element_count_modulo_four():
    x = torch.arange(6).view(1, 1, 2, 3)
    for turns, equal in ((4, 0), (-1, 3), (6, 2)):
        grid = turned((2, 3), equal)
        assert torch.equal(rho(element(False, turns, grid), x), rho(element(False, equal, grid), x))


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_relative_element_takes_view_1_to_view_2_for_all_64_pairs(grid, scaled):
    """g = g2 g1^-1, bit for bit, also where g2 scales; the eight elements are eight."""
    x = torch.randn(1, 2, *grid, generator=seeded())
    seen = set()
    for (f2, t2), (f1, t1) in itertools.product(D4, D4):
        g1 = element(f1, t1, turned(grid, t1))
        g2 = element(f2, t2, (5, 2) if scaled else turned(grid, t2))
        assert torch.equal(rho(relative(g2, g1), rho(g1, x)), rho(g2, x))
        seen.add(str(rho(g2, x).tolist()))
    assert len(seen) == 8


def test_draws_of_g_follow_the_stated_distribution():
    """Eight elements alike and independent of the neighbour; 51 grids, of which two are rare."""
    g = sample_geometry(64000, generator=seeded())
    number = 4 * g.flip + g.turns
    pairs = torch.bincount(8 * number[:-1] + number[1:], minlength=64) / 1000
    assert (pairs - 1).abs().max() < 0.15
    generator = seeded()
    grids = [sample_geometry(1, generator=generator).grid for _ in range(8000)]
    assert set(itertools.chain(*grids)) == set(range(10, 19)) and 49 <= len(set(grids)) <= 51
    areas = [h * w for h, w in grids]
    assert min(areas) == 10 * 13 and max(areas) <= 15 * 18     # .7 and 1.3 times 196, rounded
    assert abs(sum(areas) / len(areas) - 196) < 1
    assert abs(sum((h < w) - (h > w) for h, w in grids)) < 300     # wide as often as high


def test_an_ablated_element_stays_at_the_identity_and_moves_no_other_draw():
    """--group takes any subset of the elements."""
    full = sample_geometry(200, generator=seeded(3))
    assert full.grid != (14, 14)
    for n in range(4):
        for kept in itertools.combinations(ser.ELEMENTS, n):
            part = sample_geometry(200, elements=kept, generator=seeded(3))
            assert torch.equal(part.turns, full.turns * ("rot90" in kept))
            assert torch.equal(part.flip, full.flip & ("hflip" in kept))
            assert part.grid == (full.grid if "scale" in kept else (14, 14))
    assert same(toy_views(toy(group=[]))[0].geometry, element(False, 0, (4, 4), 4))


def test_sections_1_and_4_work_where_they_are_copied_to():
    """Below the imports that section 1 names, by the three lines of use that it prints."""
    source = Path(ser.__file__).read_text()
    pieces = ["import math, torch", "import torch.nn as nn", "import torch.nn.functional as F",
              "import torch.distributed as dist", "from typing import NamedTuple"]
    for number in (1, 4):
        pieces += re.findall(rf"^# ==== {number}\. .*?(?=^# ==== )", source, re.M | re.S)
    copied = {}
    exec(compile("\n".join(pieces), "copied.py", "exec", dont_inherit=True), copied)
    g1, g2 = (copied["sample_geometry"](5, 6, generator=seeded(view)) for view in (1, 2))
    h1, h2 = torch.randn(5, 8, 6, 6), torch.randn(5, 8, *g2.grid)
    copied |= dict(g1=g1, g2=g2, h1=h1, h2=h2, project=copied["projector"](8))
    exec("\n".join(re.findall(r"^#     (\w[\w, ]* = .*)", pieces[5], re.M)), copied)
    z = [copied["project"](h.flatten(2).mT) for h in (slow_rho(relative(g2, g1), h1), h2)]
    close(copied["loss"], slow_ntxent(*z, 0.3), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_copied_takes_half_precision_and_refuses_what_cannot_be(dtype):
    """On a CPU, which has no kernel to resize such maps, and under autocast: the values of fp32."""
    g = sample_geometry(3, 4, generator=seeded(5))
    x = torch.randn(3, 2, 4, 4, generator=seeded()).to(dtype)
    assert g.grid != (4, 4) and rho(g, x).dtype == dtype
    assert torch.equal(rho(g, x), rho(g, x.float()).to(dtype))
    assert ser.gather(x) is x
    halves = [each.to(dtype) for each in tokens()]
    with torch.autocast("cpu", torch.bfloat16):
        low = patch_ntxent(*halves), ser.info_nce(halves[0][:, 0], halves[1][:, 0], 0.2)
    z, z_prime = (half.float() for half in halves)
    assert same(low, (patch_ntxent(z, z_prime), ser.info_nce(z[:, 0], z_prime[:, 0], 0.2)))
    for mistake in (lambda: rho(g, x[:2]), lambda: patch_ntxent(x[:1, 0], x[:1, 0]),
                    lambda: patch_ntxent(x[:, 0], x[:, 0, :2]),
                    lambda: sample_geometry(3, elements=("rot45",))):
        with pytest.raises(ValueError):
            mistake()


# ==== 2. The batch and its views (paper 3.2) ============================================
def plain_jitter(image, drawn, order):
    """One image (3, h, w) in [0, 1], jittered by torchvision and normalised."""
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
    factors = (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue)
    for number in order.tolist():
        image = adjust[number](image, float(factors[number]))
    if drawn.gray:
        image = TF.rgb_to_grayscale(image, 3)
    if drawn.blur > 0:
        sigma = float(drawn.blur)
        image = TF.gaussian_blur(image, [13, 13], [sigma, sigma])     # 13 of 224 pixels
    if drawn.solarize:
        image = TF.solarize(image, 128 / 255)
    return TF.normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def plain_cut(image, drawn, size):
    """A crop of uint8 (3, h, w) as recorded, uint8 (3, size, size), mirrored if that says so."""
    h, w = image.shape[1:]
    box = (drawn.top * h, drawn.left * w, drawn.height * h, drawn.width * w)
    part = TF.crop(image, *[round(float(side)) for side in box])
    part = F.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0]
    return part.flip(-1) if drawn.flip else part


def rows_of(columns):
    return [Augmentation(*row) for row in zip(*columns)]


def nearly_all_close(x, y):
    """Rounding takes a few values over the threshold of solarization."""
    assert (~torch.isclose(x, y, 1e-4, 1e-4)).sum() < 4


def check_view(view, images, size, cell):
    """A view is made of these images (uint8; b1, then b2) as its own record says."""
    x = []
    rows = rows_of(view.augmentation)
    for image, drawn in zip(images, rows, strict=True):
        x.append(plain_cut(image, drawn, size) / 255)
    n_b1 = len(view.b1)
    b1 = [plain_jitter(*pair, view.order) for pair in zip(x[:n_b1], rows)]
    nearly_all_close(view.b1, torch.stack(b1))
    if view.b2 is not None:
        moved = slow_rho(view.geometry, torch.stack(x[n_b1:]), cell)
        b2 = [plain_jitter(*pair, view.order) for pair in zip(moved, rows[n_b1:])]
        nearly_all_close(view.b2, torch.stack(b2))


def toy_views(args, step=0):
    """The views of a batch of random images, by the data path of a run."""
    shape = (args.batch_size, 3, 20, 24)
    images = torch.randint(256, shape, generator=seeded(step), dtype=torch.uint8)
    dataset = ser.two_views(images, args)
    n_b1 = len(images) - ser.b2_per_rank(args, 1)
    loaded = default_collate([dataset[step, i, i >= n_b1] for i in range(len(images))])
    return ser.make_views(loaded, args, step)


def test_jitter_is_torchvisions_with_draws_of_its_own_for_every_image():
    """In any order of the view; what is not jittered, and the caller's images, stay bit for bit."""
    x = torch.rand(64, 3, 16, 224, generator=seeded())
    x[:, :, 0] = x[:, :1, 0]
    x[:, :, 1, :8] = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3))).T
    settings = ViewSettings(224, (0.08, 1.0), blur=0.5, solarize=0.5)
    dataset = ser.Dataset(torch.zeros(64, 3, 2, 2, dtype=torch.uint8), [settings], seed=0)
    aug = default_collate([dataset[0, i, True][0][1] for i in range(64)])
    before = x.clone()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        order = torch.tensor(order)
        wanted = [plain_jitter(*pair, order) for pair in zip(x, rows_of(aug))]
        close(ser.photometric(x, aug, order), torch.stack(wanted), 1e-4)
    assert torch.equal(x, before)
    plain = default_collate([Augmentation()] * 64)
    assert torch.equal(ser.photometric(x, plain, order), ser.normalise(x))
    x.fill_(128 / 255)     # the least value that solarization inverts
    plain = plain._replace(solarize=torch.ones(64, dtype=torch.bool))
    assert torch.equal(ser.photometric(x, plain, order), ser.normalise(1 - x))


def check_jitter(drawn, blur, solarize, scale):
    """MoCo-v3's distribution over 1000 images; scale: side of the view over 224."""
    changed = drawn.brightness != 1
    for flags, wanted in ((changed, 0.8), (drawn.gray, 0.2), (drawn.blur > 0, blur),
                          (drawn.solarize, solarize)):
        assert abs(flags.double().mean() - wanted) < 0.04
    for name, least, most in (("brightness", 0.6, 1.4), ("contrast", 0.6, 1.4),
                              ("saturation", 0.8, 1.2), ("hue", -0.1, 0.1)):
        values = (getattr(drawn, name)[changed] - least) / (most - least)
        assert 0 <= values.min() < 0.02 and 0.98 < values.max() <= 1
        assert abs(values.mean() - 0.5) < 0.05
    names = ("brightness", "contrast", "saturation", "hue", "gray", "solarize")
    columns = torch.stack([getattr(drawn, name)[changed].double() for name in names])
    assert columns.corrcoef().nan_to_num().triu(1).abs().max() < 0.2     # none is another's draw
    sigma = drawn.blur[drawn.blur > 0] / scale
    assert 0.1 <= sigma.min() < 0.2 and 1.9 < sigma.max() <= 2.0


@pytest.mark.parametrize("in_b2", [False, True])
def test_b1_gets_t_and_b2_gets_t_without_crop_in_both_views(in_b2):
    """Both parts, each view by its own settings and independent; crops and mirrors in b1 only."""
    images = torch.zeros(1, 3, 40, 50, dtype=torch.uint8).expand(1000, -1, -1, -1)
    dataset = ser.two_views(images, toy(image_size=56, crop_min=0.2))
    (_, first), (_, second) = default_collate([dataset[0, i, in_b2] for i in range(1000)])
    check_jitter(first, 1.0, 0.0, 56 / 224)
    check_jitter(second, 0.1, 0.2, 56 / 224)
    for drawn in (first, second):
        if in_b2:
            assert all((column == value).all() for column, value in zip(drawn[:5], Augmentation()))
            continue
        area = drawn.height * drawn.width
        aspect = drawn.width * 50 / (drawn.height * 40)
        # Uniform in [.2, 1]; what does not fit is drawn again, large areas first.
        assert 0.19 < area.min() < 0.22 and 0.9 < area.max() <= 1 and 0.5 < area.mean() < 0.62
        assert 0.68 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.5
        assert abs(drawn.flip.double().mean() - 0.5) < 0.05
    for name in ("brightness", "hue", "gray") if in_b2 else ("contrast", "top", "width", "flip"):
        pair = torch.stack([getattr(view, name).double() for view in (first, second)])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.1, name


def test_draws_of_an_image_depend_on_seed_epoch_and_image_alone():
    """Not on the worker, the rest of the batch or what was drawn before; and on each of them."""
    args = toy()
    images, _ = ser.synthetic_images(1, 16, seed=0)
    images = images.expand(12, -1, -1, -1)
    dataset = ser.two_views(images, args)
    keys = [(1, i, i % 3 == 0) for i in range(12)]
    alone = [dataset[key] for key in reversed(keys)][::-1]
    loader = DataLoader(dataset, batch_sampler=[keys[:5], keys[5:]], num_workers=2)
    assert same(list(loader), [default_collate(alone[:5]), default_collate(alone[5:])])
    drawn = [dataset[1, 5, False], dataset[1, 6, False], dataset[2, 5, False],
             ser.two_views(images, toy(seed=1))[1, 5, False]]
    crops = {view[1][:4] for item in drawn for view in item}
    assert len(crops) == 8     # of two views each


def test_geometry_and_order_are_sampled_anew_for_each_step_view_and_seed():
    """Over ranks, they are one: see test_ranks_equal_one_process."""
    aug = default_collate([Augmentation()] * 64)
    loaded = [(torch.zeros(64, 3, 16, 16, dtype=torch.uint8), aug)] * 2
    orders = []
    grids = []
    seen = []
    for step, seed in itertools.product(range(100), (0, 1)):
        for view in ser.make_views(loaded, toy(batch_size=64, seed=seed, patch_size=1), step):
            orders.append(view.order.tolist())
            grids.append(view.geometry.grid)
            seen.append(4 * view.geometry.flip + view.geometry.turns)
    assert len(orders) == 400 and len(set(map(tuple, orders))) == 24
    assert orders[::4] != orders[1::4] and orders[::4] != orders[2::4]     # other view, other seed
    assert sum(a == b for a, b in zip(grids, grids[1:])) < 40 < len(set(grids))
    for a, b in itertools.combinations(seen[:20], 2):
        assert (a == b).float().mean() < 0.5


def test_an_epoch_takes_each_image_once_and_ranks_share_its_batches(monkeypatch):
    """A new order every epoch, which depends on the seed; the last, incomplete batch is dropped."""
    args = toy()
    whole = list(ser.batch_keys(43, args, 0, 10))
    orders = []
    for first in (0, 5):
        keys = sum(whole[first:first + 5], [])
        assert {epoch for epoch, _, _ in keys} == {first // 5}
        orders.append([index for _, index, _ in keys])
        assert len(set(orders[-1])) == 40 and set(orders[-1]) < set(range(43))
    assert orders[0] != orders[1]
    assert whole[0] != next(ser.batch_keys(43, toy(seed=1), 0, 1))
    b2 = [i for keys in ser.batch_keys(43, args, 0, 1000) for _, i, in_b2 in keys if in_b2]
    assert 60 < min(map(b2.count, range(43))) and max(map(b2.count, range(43))) < 130     # mean: 93
    shares = []
    for rank in range(4):
        monkeypatch.setattr(ser, "ranks_and_rank", lambda: (4, rank))
        shares += next(ser.batch_keys(43, args, 7, 10))     # also after an interruption
    assert shares[0::2] + shares[1::2] == whole[7]     # of a rank: one image of b1, one of b2


# ==== 3. Encoder (paper 3.1) ============================================================
def toy_vit(seed=0, **shape):
    small = dict(image_size=16, patch_size=4, dim=16, depth=4, heads=2, cls_layer=2)
    return shake(ser.ViT(**small | shape), seed)


def plain_block(block):
    """torch's own pre-norm block with the same weights."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, F.gelu, 1e-6, True, norm_first=True)
    names = {"attn.qkv.": "self_attn.in_proj_", "attn.proj": "self_attn.out_proj",
             "mlp.fc1": "linear1", "mlp.fc2": "linear2"}
    weights = {}
    for name, weight in block.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    layer.load_state_dict(weights)
    return layer


@torch.no_grad()
def plain_vit(encoder, x):
    """The tokens after block 0..depth of an encoder of width 16 with two heads, a list."""
    kernel = encoder.patch_embed["proj"]
    t = F.conv2d(x, kernel.weight, kernel.bias, stride=4)
    t = t + TF.resize(encoder.pos_embed, list(t.shape[-2:]), antialias=True)
    t = t.flatten(2).transpose(1, 2)
    found = []
    for layer in range(encoder.depth + 1):
        if layer > 0:
            t = plain_block(encoder.blocks[layer - 1])(t)
        found.append(t)
        if layer == encoder.cls_layer:
            t = torch.cat([encoder.cls_token.expand(len(t), -1, -1), t], dim=1)
    return found


@pytest.mark.parametrize("cls_layer", [0, 2, 3])
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_the_encoder_is_a_plain_vit_into_which_cls_enters_after_its_block(cls_layer, size):
    """On squares and rectangles; maps up to the layer do not see [CLS], later ones do."""
    encoder = toy_vit(cls_layer=cls_layer)
    x = torch.randn(3, 3, *size, generator=seeded())
    plain = plain_vit(encoder, x)
    found = encoder(x, range(1, 5))
    close(found.cls, encoder.norm(plain[-1][:, 0]), 1e-4)
    assert list(found.cls_at) == list(range(cls_layer + 1, 5))
    with torch.no_grad():
        encoder.cls_token.add_(1)
    moved = encoder(x, range(1, 5)).maps
    for layer in range(1, 5):
        assert found.maps[layer].shape == (3, 16, size[0] // 4, size[1] // 4)
        patches = plain[layer][:, 1:] if layer > cls_layer else plain[layer]
        close(found.maps[layer].flatten(2).mT, patches, 1e-4)
        if layer > cls_layer:
            close(found.cls_at[layer], plain[layer][:, 0], 1e-4)
        assert torch.equal(moved[layer], found.maps[layer]) == (layer <= cls_layer)


def test_parameter_counts_are_the_papers():
    """Table 1: 43.4 M with SER, 42.9 M for MoCo-v3."""
    for flags, count in (([], 43_349_888), (["--ratio", "0", "--cls-layer", "0"], 42_890_368)):
        with torch.device("meta"):
            model = ser.build(ser.parse(["--data", "imagenet", *flags]))
        assert sum(p.numel() for p in trained(model).values()) == count


def test_initial_weights_are_moco_v3s_and_come_from_the_seed_alone():
    """The momentum branch begins as the online one; MoCo-v3's MLPs have their layers."""
    layers = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    assert [type(layer) for layer in ser.build(toy()).base.predictor] == layers
    model = ser.build(toy(dim=64))
    assert same(model.state_dict(), ser.build(toy(dim=64)).state_dict())
    assert not same(model.state_dict(), ser.build(toy(dim=64, seed=1)).state_dict())
    weights = dict(model.base.encoder.named_parameters())
    for name, square in (("blocks.0.attn.qkv", 6 / 128), ("blocks.0.mlp.fc1", 6 / 320),
                         ("patch_embed.proj", 6 / 112)):
        assert 0.95 * square ** 0.5 < weights[name + ".weight"].abs().max() <= square ** 0.5
        assert weights[name + ".bias"].eq(0).all()
    assert [name for name, p in weights.items() if not p.requires_grad] == [
        "patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert abs(weights["pos_embed"].std() - 0.02) < 2e-3
    assert 0 < weights["cls_token"].std() < 2e-6
    for part in ("encoder", "projector"):
        slow = getattr(model.base, f"momentum_{part}")
        assert same(slow.state_dict(), getattr(model.base, part).state_dict())


# ==== 4 to 6. L_equiv, L_inv and SER (paper 3.3, 4.1) ===================================
def tokens(B=3, N=4, K=6, seed=0):
    return [torch.randn(B, N, K, generator=seeded(2 * seed + v)) for v in (0, 1)]


def slow_ntxent(z, z_prime, tau):
    """L_equiv as the paper writes it: loops over i, j and m, and a sum over n (3.3 and Eq. 3)."""
    def s(anchor, tokens):
        return tokens @ anchor / (anchor.norm() * tokens.norm(dim=-1)) / tau

    total = 0
    B, N, _ = z.shape
    for i, j in itertools.product(range(B), range(N)):
        positive = s(z[i, j], z_prime[i, j]).exp()
        negatives = 0
        for m in range(B):
            if m != i:
                negatives = negatives + s(z[i, j], z[m]).exp().sum()
                negatives = negatives + s(z[i, j], z_prime[m]).exp().sum()
        total = total - (positive / (positive + negatives)).log()
    return total / (B * N)


@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_patch_ntxent_equals_the_papers_loops(tau):
    """Value and both gradients; finite also where exp(1000) is not."""
    z = tokens()
    double = [x.double() for x in z]
    slow, slow_gradients = value_and_gradients(lambda *z: slow_ntxent(*z, tau), *double)
    fast, gradients = value_and_gradients(lambda *z: patch_ntxent(*z, tau), *z)
    close(fast, slow.float(), 1e-6)
    close(gradients, tuple(gradient.float() for gradient in slow_gradients), 1e-6)
    assert torch.equal(patch_ntxent(*z), patch_ntxent(*z, 0.3))
    assert patch_ntxent(*z, 0.001).isfinite()


def covariance(q, k):
    """A loss that someone else writes with `gather`, as VICReg's: its value is that of all rows."""
    q, k = ser.gather(q), ser.gather(k)
    return ((q - q.mean(0)).T @ (k - k.mean(0))).square().mean() / len(q) ** 2

SEEDS = []     # torch's seed at each forward pass of without_batch_norm


def without_batch_norm(args):
    """Random weights, and no BatchNorm, whose statistics are a rank's own on CPUs."""
    model = shake(ser.build(args))
    model.base.momentum = 0.5     # so that the momentum branch goes far
    for head in (model.base.projector, model.base.predictor, model.base.momentum_projector):
        for i, module in enumerate(head):
            if isinstance(module, nn.BatchNorm1d):
                head[i] = nn.Identity()
    model.register_forward_pre_hook(lambda *_: SEEDS.append(torch.initial_seed()))
    return model


def sgd(model, args):
    """Plain steps, as long as the gradients: AdamW's say little of their size."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)

RANK_RUN = dict(epochs=1.15, base_lr=8.0, equiv_layers=[1, 2], log_every=4)


def rank_main(rank, ranks, out, folder):
    """What a rank finds: losses of its rows and their gradients; then a run of six steps."""
    if ranks > 1:
        ser.setup()
    if rank > 0:     # only rank 0 writes
        ser.save = ser.save_views = lambda *_, **__: os._exit(3)
    z = [x.chunk(ranks)[rank] for x in tokens(8, 3, 6)]
    k = torch.randn(16, 6, generator=seeded(8)).chunk(ranks)[rank]
    q = torch.randn(16, 6, generator=seeded(7)).chunk(ranks)[rank]
    found = {"equiv": value_and_gradients(patch_ntxent, *z),
             "moco": value_and_gradients(lambda *qk: ser.info_nce(*qk, 0.2), q, k),
             "own": value_and_gradients(covariance, q, k)}
    args = toy(folder, Path(out, str(ranks)), **RANK_RUN)
    printed, bar = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(bar):
        ser.train(args, without_batch_norm, make_optimizer=sgd)
    return found | {"seeds": SEEDS, "printed": printed.getvalue(), "bar": bar.getvalue()}


def check_same_way(ours, theirs, start, tolerance):
    """Two states have gone the same way from a start, in trained and in momentum weights."""
    for slow in (False, True):
        names = [name for name, _ in start.named_parameters() if ("momentum" in name) == slow]
        begin = start.state_dict()
        way = torch.cat([(theirs[name] - begin[name]).flatten() for name in names])
        gap = torch.cat([(theirs[name] - ours[name]).flatten() for name in names])
        assert way.norm() > 0.01 and gap.norm() < tolerance * way.norm(), (gap.norm(), way.norm())


@pytest.fixture(scope="session")
def one_rank(folder, tmp_path_factory):
    """The findings of one process, and where its run is."""
    out = tmp_path_factory.mktemp("one")
    return rank_main(0, 1, out, folder), out / "1"


@pytest.fixture(scope="session", params=[2, 4])
def several_ranks(request, folder, tmp_path_factory):
    """The findings of each rank, and where their run is."""
    out = tmp_path_factory.mktemp("ranks")
    return run_ranks(rank_main, request.param, out, folder), out / str(request.param)


@pytest.mark.parametrize("name", ["equiv", "moco", "own"])
def test_ranks_have_the_losses_and_gradients_of_one_process(name, one_rank, several_ranks):
    value, gradients = one_rank[0][name]
    found = [each[name] for each in several_ranks[0]]
    close(sum(own for own, _ in found) / len(found), value)
    for i, gradient in enumerate(gradients):
        close(torch.cat([own[i] for _, own in found]) / len(found), gradient, 1e-6)


def test_ranks_train_as_one_process(one_rank, several_ranks):
    """On files, with DDP."""
    whole, out = one_rank[1], several_ranks[1]
    start = without_batch_norm(toy(**RANK_RUN))
    check_same_way(last(out)["model"], last(whole)["model"], start, 1e-3)


def test_ranks_log_as_one_process_and_one_of_them_prints(one_rank, several_ranks):
    found, out = several_ranks
    for ours, theirs in zip(log_of(out), log_of(one_rank[1]), strict=True):
        if "step" in ours:
            assert ours == pytest.approx(theirs, rel=1e-4)
    assert [record["step"] for record in log_of(out)[1:]] == [1, 4, 5, 6]
    assert log_of(out)[0]["b2"] == 4
    for stream in ("printed", "bar"):
        assert [each[stream] > "" for each in found] == [True] + [False] * (len(found) - 1), stream


def test_ranks_and_steps_share_no_seed(several_ranks):
    seeds = sum([each["seeds"] for each in several_ranks[0]], [])
    assert len(set(seeds)) == len(seeds) == 6 * len(several_ranks[0])
    assert ser.rng(0, "step", 5, 1).initial_seed() in seeds     # the last of rank 1


def plain_moco(base, views, m):
    """MoCo-v3's step in the order of its code."""
    def encode(encoder, view):
        return torch.cat([encoder(x).cls for x in (view.b1, view.b2) if x is not None])

    def contrast(q, k):
        cosine = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T
        return F.cross_entropy(cosine / 0.2, torch.arange(len(q))) * (2 * 0.2)

    queries = [base.predictor(base.projector(encode(base.encoder, view))) for view in views]
    with torch.no_grad():
        for part in ("encoder", "projector"):
            fast = getattr(base, part).parameters()
            slow = getattr(base, "momentum_" + part).parameters()
            for p, p_slow in zip(fast, slow):
                p_slow.copy_(p_slow * m + p * (1 - m))
        keys = [base.momentum_projector(encode(base.momentum_encoder, view)) for view in views]
    return contrast(queries[0], keys[1]) + contrast(queries[1], keys[0])


def plain_equiv(encoder, head, layer, first, second, tau):
    """L_equiv of one layer and one pair of views by Algorithm 1, image by image."""
    norm, linear1, _, linear2 = head
    g1, g2 = (view.geometry for view in (first, second))
    flip = g1.flip != g2.flip
    turns = (g2.turns + torch.where(flip, g1.turns, -g1.turns)) % 4
    h1 = encoder(first.b2, [layer]).maps[layer]
    h2 = encoder(second.b2, [layer]).maps[layer]
    z = []
    for h in (slow_rho(Geometry(flip, turns, g2.grid), h1), h2):
        t = F.layer_norm(h.flatten(2).mT, norm.weight.shape, norm.weight, norm.bias)
        z.append(F.gelu(t @ linear1.weight.T) @ linear2.weight.T)
    return slow_ntxent(*z, tau)


@pytest.fixture(scope="session", ids=["moco", "ser"], params=[
    dict(ratio=0.0, cls_layer=0),
    dict(ratio=0.375, equiv_layers=[2, 1, 2], temperature=0.4, weight=3.0)])
def plain_run(request, folder, tmp_path_factory):
    """A run of seven steps, over the end of an epoch, and its re-implementation from files to
    weights. The first settings are MoCo-v3 and nothing else. A layer named twice counts once."""
    out = tmp_path_factory.mktemp("run")
    args = toy(folder, out, **request.param, epochs=1.4, base_lr=1.0)
    start = shake(ser.build(args))
    start.base.momentum = 0.7     # so that the momentum branch goes far
    views = []
    model = copy.deepcopy(start)
    model.register_forward_pre_hook(lambda _, inputs: views.append(inputs[0]))
    ser.train(args, lambda _: model, make_optimizer=sgd)
    plain = copy.deepcopy(start)
    losses = []
    for step, (first, second) in enumerate(views):
        m = 1 - 0.3 * 0.5 * (1 + math.cos(math.pi * step / 7))
        loss = plain_moco(plain.base, (first, second), m)
        for layer in (1, 2) if args.ratio else ():
            head = plain.projectors[str(layer)]
            loss = loss + 3.0 / 2 * plain_equiv(plain.base.encoder, head, layer, first, second, 0.4)
        loss.backward()
        # 8 images at a base rate of 1 for 256: the peak is 1/32 after two of seven steps. BatchNorm
        # over 8 images multiplies rounding at every step, the more so the larger the rate.
        rate = step / 64 if step < 2 else (1 + math.cos(math.pi * (step - 2) / 5)) / 64
        with torch.no_grad():
            for p in trained(plain).values():
                p -= rate * p.grad
                p.grad = None
        losses.append(loss.item())
    return ser.Namespace(args=args, out=out, start=start, views=views, plain=plain, losses=losses)


def test_a_run_makes_its_views_of_its_images_as_they_record(plain_run, folder):
    paths = sorted(map(str, folder.rglob("*.png")))
    keys = list(ser.batch_keys(43, plain_run.args, 0, 7))
    n_b2 = 3 if plain_run.args.ratio else 0
    for own, pair in zip(keys, plain_run.views, strict=True):
        assert [in_b2 for _, _, in_b2 in own] == [False] * (8 - n_b2) + [True] * n_b2
        images = [TF.pil_to_tensor(Image.open(paths[index])) for _, index, _ in own]
        for view in pair:
            check_view(view, images, 16, 4)


def test_a_run_has_the_losses_of_its_reimplementation(plain_run):
    found = [record["loss"] for record in log_of(plain_run.out)[1:]]
    assert len(found) == 7 and found == pytest.approx(plain_run.losses, rel=1e-3)


def test_a_run_has_the_weights_of_its_reimplementation(plain_run):
    check_same_way(last(plain_run.out)["model"], plain_run.plain.state_dict(), plain_run.start, 2e-3)


def test_views_png_shows_view_1_moved_onto_view_2(monkeypatch):
    shown = []
    monkeypatch.setattr(ser, "save_image", lambda x, path, nrow: shown.extend(x))
    first, second = toy_views(toy())
    ser.save_views("", (first, second), 4)
    moved = slow_rho(relative(second.geometry, first.geometry), first.b2, 4)
    wanted = torch.stack([moved, second.b2], dim=1).flatten(0, 1)
    close(ser.normalise(torch.stack(shown)), wanted)


def test_adamw_decays_all_that_is_trained_and_nothing_else():
    model = ser.build(toy())
    optimizer = ser.adamw(model, toy(weight_decay=0.2))
    group, = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.2, (0.9, 0.999), 1e-8)
    assert list(map(id, group["params"])) == list(map(id, trained(model).values()))


def test_every_trainable_parameter_gets_a_gradient_and_weight_0_is_the_control():
    """Eq. 3, with two layers: L_equiv is computed on the same views, and adds gradients of zero."""
    model, control = [shake(ser.build(toy(equiv_layers=[1, 3], weight=w))) for w in (0.5, 0.0)]
    base = copy.deepcopy(model)
    views = toy_views(toy())
    found = model(views)
    found["loss"].backward()
    model.base.update(0.5)     # also where gradients are recorded
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.ne(0).any()) == p.requires_grad, name
    assert same(control(views)["equiv"], found["equiv"])
    control(views)["loss"].backward()
    cls = [ser.encode_view(base.base.encoder, view)[0] for view in views]
    close(cls[0][:4], base.base.encoder(views[0].b1).cls)     # b1 comes first
    base.base(views, cls).backward()
    for (name, p), q in zip(trained(control).items(), trained(base).values()):
        close(p.grad, torch.zeros_like(p) if name.startswith("projectors") else q.grad, 1e-4)


def test_a_run_begins_with_facts_and_chance(folder, tmp_path, capsys, monkeypatch):
    """Chance is the value for embeddings that tell nothing. Synthetic images have one seed."""
    monkeypatch.setattr(ser, "synthetic_images", lambda n, size, seed: sys.exit(f"{n} {size} {seed}"))
    assert sentence(ser.train, toy(seed=7)) == "4096 16 0"
    ser.train(toy(folder, tmp_path, epochs=0.1, warmup_epochs=0.1))
    alike = torch.ones(4, 16, 5)
    printed = capsys.readouterr().out
    assert f"43 images of {folder};" in printed and "0 of 1 steps are done" in printed
    chance = float(re.search(r"L_equiv is (\d+\.\d) at chance", printed)[1])
    assert chance == pytest.approx(patch_ntxent(alike, alike).item(), abs=0.06)


# ==== 7. Settings =======================================================================
def test_the_defaults_are_the_papers_and_small_is_for_synthetic_images():
    """4.1 and A.2; --data alone decides, and a flag that is given always counts."""
    paper = dict(image_size=224, patch_size=16, dim=384, depth=12, cls_layer=3, equiv_layers=[3],
                 ratio=0.01, weight=0.5, temperature=0.3, group=list(ser.ELEMENTS), batch_size=2048,
                 epochs=100.0, warmup_epochs=10.0, moco_hidden=4096, weight_decay=0.1,
                 crop_min=0.08, base_lr=3e-4, heads=6)
    found = vars(ser.parse(["--data", "imagenet"]))
    assert {name: found[name] for name in paper} == paper
    small = vars(ser.parse(["--depth", "5"]))
    assert small == found | ser.SMALL | dict(data="", depth=5)
    assert [ser.b2_per_rank(ser.Namespace(**found), ranks) for ranks in (1, 8)] == [20, 3]
    assert ser.b2_per_rank(toy(ratio=0.25, batch_size=10), 1) == 3     # 2.5
    base = ser.build(toy()).base
    widths = [base.projector[0], base.predictor[0], base.predictor[3]]
    assert [layer.out_features for layer in widths] == [16, 16, 256]
    assert (base.temperature, base.momentum) == (0.2, 0.99)
    heads = eval_linear.arguments().parse_args([])
    assert (heads.epochs, heads.batch_size, min(heads.lr), max(heads.lr)) == (50, 1024, 0.003, 10)


@pytest.mark.parametrize("images, ranks, changes, flag, way_out", [
    (41, 4, dict(batch_size=64), "--batch-size 64", "batch_size"),
    (900, 3, dict(batch_size=64), "--batch-size 64", "batch_size"),
    (5000, 1, dict(batch_size=128, ratio=0.01), "--ratio 0.01", "ratio"),
    (5000, 1, dict(batch_size=64, ratio=0.999), "--ratio 0.999", "ratio"),
    (5000, 8, dict(batch_size=2048, ratio=0.0001), "--ratio 0.0001", "ratio")])
def test_a_wrong_batch_is_told_with_a_way_out(images, ranks, changes, flag, way_out):
    """Too few images, no equal shares for ranks, |b2| < 2, no image in b1; the advice works."""
    args = toy(**changes)
    told = sentence(ser.check_settings, args, images, ranks)
    assert flag in told
    setattr(args, way_out, type(getattr(args, way_out))(re.search(r"be ([\d.]+)", told)[1]))
    ser.check_settings(args, images, ranks)


@pytest.mark.parametrize("name, value", [
    ("image_size", 18), ("dim", 17), ("cls_layer", 3), ("cls_layer", -1), ("equiv_layers", [4]),
    ("ratio", 1.0), ("batch_size", 1), ("batch_size", 2)])
def test_a_setting_that_cannot_be_is_one_sentence_with_its_value(name, value):
    told = sentence(ser.check_settings, toy(**{name: value}), 40, 1)
    assert told.startswith(f"--{name.replace('_', '-')} {value}: ")


@pytest.mark.parametrize("parse, flag, value", [
    (ser.parse, "--base-lr", "-0.01"), (ser.parse, "--warmup-epochs", "-1"),
    (ser.parse, "--ratio", "1.5"), (ser.parse, "--crop-min", "nan"), (ser.parse, "--epochs", "0"),
    (ser.parse, "--weight", "inf"), (ser.parse, "--equiv-layers", "0"),
    (eval_linear.parse, "--lr", "-1"), (eval_linear.parse, "--lr", "nan"),
    (eval_linear.parse, "--epochs", "0"), (eval_linear.parse, "--batch-size", "0")])
def test_numbers_are_checked_where_they_enter(parse, flag, value, capsys):
    with pytest.raises(SystemExit):
        parse([f"{flag}={value}"])
    assert f"argument {flag}: invalid" in capsys.readouterr().err


def test_a_run_as_short_as_its_warmup_warms_up_for_a_tenth():
    for epochs, warmup in ((1.0, 0.1), (0.5, 0.05), (1.5, 1.0)):
        assert toy(epochs=epochs, warmup_epochs=1.0).warmup_epochs == warmup


@pytest.mark.parametrize("gpu", [False, True])
def test_bf16_is_for_gpus_unless_a_flag_says_otherwise(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = [ser.parse(flags).bf16 for flags in ([], ["--bf16"], ["--no-bf16"])]
    assert found == [gpu, True, False]


# ==== 8. Training =======================================================================
@pytest.fixture(scope="session")
def whole_run(folder, tmp_path_factory):
    """The folder of an uninterrupted run of ten steps, with a loader process."""
    out = tmp_path_factory.mktemp("whole")
    ser.train(toy(folder, out, workers=1))
    return out


def killed_run(folder, out):
    """The same, killed while it writes its second checkpoint."""
    write = torch.save

    def write_half(state, file):
        if state["step"] == 6:
            file.write(b"half a checkpoint")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(state, file)

    torch.save = write_half
    ser.train(toy(folder, out, save_every=3))


def test_a_killed_run_continues_bit_for_bit(whole_run, folder, tmp_path):
    """Killed within an epoch, while it writes a checkpoint."""
    process = begin(killed_run, folder, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL and last(tmp_path)["step"] == 3
    ser.train(toy(folder, tmp_path, save_every=3))
    ours = last(tmp_path)
    theirs = last(whole_run)
    for part in ("step", "model", "optimizer"):
        assert same(ours[part], theirs[part]), part
    assert (tmp_path / "views.png").read_bytes() == (whole_run / "views.png").read_bytes()
    lines = log_of(tmp_path)
    _, continued = [i for i, line in enumerate(lines) if "step" not in line]
    assert lines[continued + 1:] == log_of(whole_run)[4:]


def test_the_log_holds_every_setting_both_losses_and_the_rate(whole_run, folder):
    first, *rest = log_of(whole_run)
    facts = dict(method="SER on MoCoV3", images=43, ranks=1, steps=10, b2=4)
    assert (vars(toy(folder, whole_run, workers=1)) | facts).items() <= first.items()
    for step, record in enumerate(rest):
        assert set(record) == {"step", "loss", "inv", "equiv", "lr"} and record["step"] == step + 1
        assert record["lr"] == ser.learning_rate(ser.Namespace(**first), step / 5)
    assert len(rest) == 10 and (whole_run / "views.png").exists()


def test_a_checkpoint_gives_its_encoder_back_in_eval_mode(whole_run):
    """And its reader's random numbers go on as before."""
    state = last(whole_run)
    before = torch.get_rng_state()
    encoder = ser.load_encoder(whole_run / "last.pt")
    assert torch.equal(torch.get_rng_state(), before)
    model = ser.build(ser.Namespace(**state["settings"]))
    model.load_state_dict(state["model"])
    x = torch.randn(2, 3, 16, 16, generator=seeded())
    assert torch.equal(encoder(x).cls, model.base.encoder(x).cls) and not encoder.training


class Exploding(ser.MoCoV3):
    """Its loss is infinite from the fourth step on."""
    def update(self, progress):
        self.factor = 1.0 if progress < 0.3 else math.inf

    def forward(self, views, cls):
        return super().forward(views, cls) * self.factor


def exploding(args):
    return ser.SER(Exploding(ser.seeded_encoder(args), 8, 16), args.equiv_layers)


def exploding_equiv(args):
    """L_equiv is infinite instead."""
    model = ser.build(args)
    model.base.update = lambda progress: Exploding.update(model, progress)
    model.equivariance = lambda *pair: ser.SER.equivariance(model, *pair) * model.factor
    return model


def test_a_run_refuses_what_changes_it_and_nothing_else(whole_run, folder, tmp_path, capsys):
    """A moved folder, other workers and intervals continue it; a run that is done says so."""
    before = last(whole_run)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    shutil.copytree(whole_run, tmp_path / "run")
    free = dict(workers=0, log_every=7, save_every=2)
    ser.train(toy(moved, tmp_path / "run", **free))
    assert "10 of 10 steps are done" in capsys.readouterr().out
    assert same(last(tmp_path / "run")["model"], before["model"])

    image = next(moved.rglob("*.png"))
    image.rename(image.with_name("other.png"))
    told = sentence(ser.train, toy(moved, tmp_path / "run"))
    assert "image_names" in told and "images 43" not in told
    image.with_name("other.png").unlink()
    args = toy(moved, tmp_path / "run", weight=0.25)
    del args.group
    args.extra = 1
    told = sentence(ser.train, args, exploding)
    for change in ("weight 0.5 (now 0.25)", "extra None (now 1)", "images 43 (now 42)",
                   "'scale'] (now None)", "method SER on MoCoV3 (now SER on Exploding)", "--out"):
        assert change in told
    told = sentence(ser.resume, tmp_path / "run/last.pt", {}, None, None)
    names = before["settings"].keys() - {"data", "out", "workers", "log_every", "save_every"}
    assert set(re.findall(r"(\w+) [^()]* \(now None\)", told.split(" with ")[1])) == names


def test_a_file_of_other_weights_is_told_by_one_sentence(tmp_path):
    torch.save({"cls_token": torch.zeros(1)}, tmp_path / "timm.pt")
    assert "convert" in sentence(ser.load_encoder, tmp_path / "timm.pt")


@pytest.mark.parametrize("build", [exploding, exploding_equiv])
def test_a_loss_that_is_not_finite_is_one_sentence_and_saves_nothing(build, folder, tmp_path):
    """It names the step at which that was found, and the last good checkpoint stays."""
    args = toy(folder, tmp_path, save_every=2, log_every=20)
    told = sentence(ser.train, args, build)
    assert told.startswith("step 4: ") and "--base-lr" in told
    assert last(tmp_path)["step"] == 2


def on_gpu(folder, out):
    """A GPU's jitter, rho and L_equiv, and losses of `train`, are those of a CPU to rounding."""
    x = torch.rand(3, 3, 16, 16, generator=seeded())
    aug = default_collate([Augmentation(0, 0, 1, 1, False, 1.2, 0.7, 1.1, 0.05, blur=1.0)] * 3)
    g = sample_geometry(3, 4, generator=seeded())
    order = torch.tensor([2, 0, 3, 1])
    for function in (lambda x: ser.photometric(x, aug, order), lambda x: rho(g, x.bfloat16(), 4).float(),
                     lambda x: patch_ntxent(x[:, 0], x[:, 1])):
        close(function(x.cuda()).cpu(), function(x), 1e-3)
    ser.train(toy(folder, Path(out, "gpu"), epochs=0.2, workers=1))
    torch.cuda.is_available = lambda: False
    ser.train(toy(folder, Path(out, "cpu"), epochs=0.2, bf16=True))
    assert log_of(Path(out, "gpu"))[1] == pytest.approx(log_of(Path(out, "cpu"))[1], rel=0.02)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU")
def test_a_gpu_computes_what_a_cpu_does(folder, tmp_path):
    """In a process that sees it."""
    sees = {name: os.environ[name] for name in os.environ if name != "CUDA_VISIBLE_DEVICES"}
    call = f"import test_ser; test_ser.on_gpu({str(folder)!r}, {str(tmp_path)!r})"
    sees["TEST_ON_GPU"] = "1"
    subprocess.run([sys.executable, "-c", call], cwd=HERE, check=True, env=sees)


@pytest.mark.parametrize("bf16", [False, True])
def test_bf16_multiplies_in_bfloat16_and_keeps_fp32_weights(bf16, folder, tmp_path, monkeypatch):
    seen = []
    nce = ser.info_nce
    monkeypatch.setattr(ser, "info_nce", lambda q, *rest: seen.append(q.dtype) or nce(q, *rest))
    state = last(ser.train(toy(folder, tmp_path, epochs=0.2, bf16=bf16)).parent)
    assert set(seen) == {torch.bfloat16 if bf16 else torch.float32}
    assert all(x.dtype != torch.bfloat16 for x in state["model"].values())


@pytest.mark.parametrize("kind, ranks", [("cuda", 2), ("cuda", 1), ("cpu", 2)])
def test_batch_norm_is_that_of_all_gpus(kind, ranks, folder, tmp_path, monkeypatch):
    """A stub names the device: there may be no GPU."""
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(ser, "setup", lambda: torch.device(kind))
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (ranks, 0))

    def stop(model, args):
        several = [isinstance(module, nn.SyncBatchNorm) for module in model.base.projector]
        sys.exit(str(sum(several)))

    told = sentence(ser.train, toy(folder, tmp_path), ser.build, ser.two_views, stop)
    assert told == ("3" if (kind, ranks) == ("cuda", 2) else "0")


def test_training_raises_retrieval_over_its_control(tmp_path):
    """Of quarter turns, on images of another seed; weight 0 is the control."""
    images, _ = ser.synthetic_images(64, 16, seed=5)
    shares = []
    for weight in (0.0, 0.5):
        args = ser.parse([], small=ser.SMALL | dict(
            image_size=16, depth=3, cls_layer=2, equiv_layers=[2], ratio=0.5, group=["rot90"],
            moco_hidden=64, epochs=0.25, warmup_epochs=0.1, base_lr=4e-2, weight=weight,
            out=str(tmp_path / str(weight))))
        encoder = ser.load_encoder(ser.train(args))
        shares.append(eval_linear.retrieval(
            lambda x: encoder(x, [2]).maps[2], ser.normalise(images / 255), 4, "rot90"))
    control, trained = shares
    assert trained > 2 * control, (control, trained)


# ==== 9. Around it: data ================================================================
def test_any_tree_of_images_is_a_data_set(folder, tmp_path):
    """At any depth, also behind links, sorted; train/ alone if it is there; no "._NAME"."""
    (tmp_path / "b" / "empty").mkdir(parents=True)
    for name in ("b/2.JPEG", "b/notes.txt", "b/._2.JPEG", "a.webp"):
        (tmp_path / name).touch()
    assert ser.list_images(str(tmp_path))[0] == [f"{tmp_path}/a.webp", f"{tmp_path}/b/2.JPEG"]
    (tmp_path / "train").symlink_to(folder)
    inside = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    images, checksum = ser.list_images(str(tmp_path))
    assert images == [f"{tmp_path}/train/{name}" for name in inside]
    assert checksum == ser.list_images(str(folder))[1]     # of the names below the folder
    empty = tmp_path / "b" / "empty"
    assert str(empty) in sentence(ser.train, toy(empty, tmp_path / "out"))
    assert "--batch-size 64" in sentence(ser.train, toy(folder, tmp_path, batch_size=64))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "P"])
def test_an_image_is_read_as_pillow_shows_it(mode, tmp_path):
    """ImageNet has gray, CMYK and PNG files among its JPEGs."""
    image = TF.to_pil_image(ser.synthetic_images(1, 19, seed=0)[0][0, :, :12]).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6     # a viewer would turn it
    image.save(tmp_path / "a.JPEG", "JPEG" if mode in ("L", "CMYK") else "PNG", exif=exif)
    found = ser.read_image(str(tmp_path / "a.JPEG"))
    assert torch.equal(found, TF.pil_to_tensor(Image.open(tmp_path / "a.JPEG").convert("RGB")))


def test_16_bits_and_animations_are_refused_with_their_path(tmp_path):
    Image.new("I;16", (9, 7), 20000).save(tmp_path / "0.png")
    frame = Image.new("RGB", (9, 7), "blue")
    frame.save(tmp_path / "1.png", "GIF", save_all=True, append_images=[Image.new("RGB", (9, 7))])
    for path in map(str, tmp_path.iterdir()):
        with pytest.raises(OSError, match=path):
            ser.read_image(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_line_of_an_unreadable_image_is_its_path(workers, tmp_path):
    """Also from a process of the loader, whose traceback stands above."""
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(b"no image")
    args = toy(tmp_path, tmp_path / "run", workers=workers)
    with pytest.raises(OSError) as error:
        ser.train(args)
    *above, final = str(error.value).splitlines()
    assert re.search(rf"cannot read {tmp_path}/\d.jpg: ", final) and bool(above) == (workers > 0)


def test_synthetic_images_differ_within_a_class_and_between_classes(monkeypatch):
    def most_alike(n):
        images, labels = ser.synthetic_images(n, 16, seed=0)
        assert labels.tolist() == [i % 6 for i in range(n)]
        correlation = images.flatten(1).double().corrcoef()
        return correlation.fill_diagonal_(0).max()

    assert most_alike(600) < 0.95
    # Now the class is all that is not the same.
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, 0.3))
    monkeypatch.setattr(torch, "randn", lambda *shape, generator: torch.zeros(shape))
    assert most_alike(6) < 0.95


# ==== 10. eval_linear.py (4.1, A.2) =====================================================
@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """train/, val/ and held/ of three classes, synthetic images of 24 x 30 pixels. few/ has two of
    them, 1 and 2; in 2 are images of 0: what is good on val is bad there."""
    root = tmp_path_factory.mktemp("tree")
    for part, n in (("train", 11), ("val", 5), ("held", 6), ("few", 7)):
        images, labels = ser.synthetic_images(6 * n, 30, seed=n)
        for i, label in enumerate(labels.tolist()):
            if label < (2 if part == "few" else 3):
                shown = 2 - label if part == "few" else label
                path = root / part / f"class{shown}" / f"{i:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                TF.to_pil_image(images[i, :, :24]).save(path)
    return root


def write_checkpoint(folder, **changes):
    """A checkpoint of a shaken encoder; returns its path."""
    args = toy(**changes)
    weights = shake(ser.seeded_encoder(args)).state_dict()
    ser.save(folder / "last.pt", step=7, settings=vars(args), encoder=weights)
    return folder / "last.pt"


@pytest.fixture
def checkpoint(tmp_path):
    """Of an encoder with five blocks after [CLS], of which the last four are read."""
    return write_checkpoint(tmp_path, depth=6)


def eval_args(tree, checkpoint, *flags):
    argv = ["--data", tree, "--checkpoint", checkpoint, "--test", f"few={tree}/few", "--workers", 0,
            "--epochs", 2, "--batch-size", 8, "--lr", 0.3, 10, *flags]
    return eval_linear.parse(list(map(str, argv)))


def head_of(folder):
    """The only head in a folder."""
    path, = folder.glob("head-*.pt")
    return torch.load(path)


def plain_split(folder):
    """The images of class folders in order, and the places of their classes."""
    paths = sorted(folder.glob("*/*.png"))
    labels = torch.tensor([int(path.parent.name[-1]) for path in paths])
    return [TF.pil_to_tensor(Image.open(path)) for path in paths], labels


def plain_centre(image):
    """16 pixels of the centre, of 18 x 22 (the longer side is rounded down)."""
    resized = F.interpolate(image[None], (18, 22), mode="bicubic", antialias=True)[0]
    return TF.center_crop(resized, 16)


def plain_crop(image, *key):
    """torchvision's RandomResizedCrop and flip, seeded by the key."""
    torch.manual_seed(ser.rng("eval", *key).initial_seed())
    box = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    part = v2.functional.resized_crop(image, *box, [16, 16])     # rounds by version
    return part.flip(-1) if torch.rand(1) < 0.5 else part


@torch.no_grad()
def plain_features(encoder, images):
    """The final LayerNorm of the [CLS] after each of the last four blocks, in order."""
    x = torch.stack(images) / 255
    x = TF.normalize(x, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    found = plain_vit(encoder, x)[-4:]
    return torch.cat([encoder.norm(t[:, 0]) for t in found], dim=1)


def plain_training(head, tables, lr, batch):
    """One head by torch's own tools: SGD with momentum .9 and a cosine over all steps, --seed 2.
    Returns the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(head.parameters(), momentum=0.9)
    steps = len(tables[0][1]) // batch
    for epoch, (x, y) in enumerate(tables):
        order = torch.randperm(len(y), generator=ser.rng(2, "eval", epoch))
        losses = []
        for step in range(steps):
            rows = order[step * batch:][:batch]
            progress = (epoch * steps + step) / (len(tables) * steps)
            optimizer.param_groups[0]["lr"] = lr * batch / 512 * (1 + math.cos(math.pi * progress))
            loss = F.cross_entropy(head(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / steps


def plain_knn(train, labels, test, truth, k):
    """Percent of right votes, by a loop over test images and their neighbours."""
    right = 0
    for x, y in zip(test, truth.tolist()):
        cosines = F.cosine_similarity(x[None], train).tolist()
        near = sorted(zip(cosines, labels.tolist()))[-k:]
        votes = dict.fromkeys(range(10), 0.0)
        for s, c in near:
            votes[c] += math.exp(s / 0.07)
        right += max(votes, key=votes.get) == y
    return 100 * right / len(truth)


def value_of(rows, **keys):
    """The value of the only row with these keys."""
    row, = [row for row in rows if all(row[key] == value for key, value in keys.items())]
    return row["value"]


def top1(logits, labels):
    return 100 * (logits.argmax(1) == labels).double().mean().item()


@pytest.mark.parametrize("cached", [False, True])
def test_an_evaluation_is_the_protocol_written_plainly(cached, tree, checkpoint):
    """4.1, from files to rows and to head.pt, with random crops or (--cache) centre crops, the
    latter of fewer images than a batch has."""
    flags = ["--cache", "--val", tree / "held", "--batch-size", 64] if cached else []
    args = eval_args(tree, checkpoint, "--seed", 2, *flags)
    rows = eval_linear.evaluate(args)
    encoder = ser.load_encoder(checkpoint)
    images, labels = plain_split(tree / "train")
    centres = plain_features(encoder, [plain_centre(image) for image in images])
    tables = []
    for epoch in range(2):
        crops = [plain_crop(image, 2, epoch, i) for i, image in enumerate(images)]
        tables.append((centres if cached else plain_features(encoder, crops), labels))
    sets = {}
    for name, folder in (("val", "held" if cached else "val"), ("few", "few")):
        tests, truth = plain_split(tree / folder)
        sets[name] = (plain_features(encoder, [plain_centre(image) for image in tests]), truth)
    x, y = sets["val"]
    x_few, y_few = sets["few"]
    trained = []
    for lr in args.lr:
        torch.manual_seed(2)
        head = eval_linear.Heads(1, 64, 3)[0]
        assert abs(head[0].weight.std() - 0.01) < 2e-3 and head[0].bias.eq(0).all()
        loss = plain_training(head, tables, lr, 33 if cached else 8)
        head.requires_grad_(False)
        trained.append((top1(head(x), y), top1(head(x_few), y_few), lr, loss, head[0]))
    accuracy, _, lr, loss, best = max(trained, key=lambda one: one[0])
    assert max(trained, key=lambda one: one[1])[2] != lr     # few would choose another
    kept = head_of(checkpoint.parent)
    close([kept.pop("weight"), kept.pop("bias")], [best.weight, best.bias], 1e-4)
    assert kept == dict(classes=["class0", "class1", "class2"], blocks=4, lr=lr,
                        weights=eval_linear.fingerprint(encoder), settings=vars(args))
    _, line = map(json.loads, checkpoint.with_name("eval.jsonl").read_text().splitlines())
    assert line.pop("heads") == f"linear heads of {eval_linear.fingerprint(encoder)}"
    assert line == pytest.approx(
        {"epoch": 2, "loss": loss, "val top-1 %": accuracy, "lr": lr}, rel=1e-4)
    only = torch.tensor([-torch.inf, 0.0, 0.0])     # the classes of few
    near = labels != 0
    voted = plain_knn(centres[:, -16:], labels, x[:, -16:], y, 20)
    voted_few = plain_knn(centres[near, -16:], labels[near], x_few[:, -16:], y_few, 20)
    for name, classes, measure, wanted in (
            ("val", 3, "linear top-1 %", top1(best(x), y)),
            ("few", 3, "linear top-1 %", top1(best(x_few), y_few)),
            ("few", 2, "linear top-1 %", top1(best(x_few) + only, y_few)),
            ("val", 3, "20-NN top-1 %", voted), ("few", 2, "20-NN top-1 %", voted_few)):
        found = value_of(rows, set=name, classes=classes, measure=measure, block=6)
        assert found == pytest.approx(wanted, abs=0.01), (name, classes, measure)
    assert len(rows) == 9     # val once, few twice


def test_all_rates_at_once_train_each_mlp_as_if_it_were_alone(tmp_path):
    """Of three layers, over two epochs with features of their own."""
    tables = []
    for epoch in range(2):
        y = torch.randint(3, (21,), generator=seeded(epoch))
        tables.append((torch.randn(21, 5, generator=seeded(epoch)), y))
    args = ser.Namespace(lr=[0.5, 8.0, 30.0], epochs=2, batch_size=6, seed=2)
    heads = eval_linear.Heads(3, 5, 3, mlp=True)
    first = copy.deepcopy(heads[0].state_dict())

    def batches(epoch, shares):
        x, y = tables[epoch]
        return ((x[rows], y[rows]) for rows in shares)

    eval_linear.train_heads(heads, batches, 21, tables[0], args, tmp_path / "eval.jsonl", "")
    for lr, head in zip(args.lr, heads):
        alone = nn.Sequential(nn.Linear(5, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                              nn.Linear(1024, 3))
        alone.load_state_dict(first)
        plain_training(alone, tables, lr, 6)
        close(head.state_dict(), alone.state_dict())


def test_top_1_and_top_5_are_counted_among_the_classes_of_a_set():
    logits = torch.randn(60, 9, generator=seeded())
    labels = torch.arange(60) % 7 + 1
    for among in (range(9), range(1, 8), range(1, 4)):
        ranked = [sorted(among, key=lambda c: -scores[c]) for scores in logits.tolist()]
        wanted = [sum(y in row[:k] for y, row in zip(labels, ranked)) / 0.6 for k in (1, 5)]
        assert eval_linear.accuracy(logits, labels, torch.tensor(among)) == pytest.approx(wanted)


def test_knn_is_a_loop_over_twenty_neighbours_with_exponential_votes():
    """Of features that are alike, so that many votes count; blocks of tests change nothing."""
    generator = seeded(4)
    train, test = (torch.randn(n, 9, generator=generator) + 3 for n in (90, 300))
    labels, truth = (torch.randint(5, (n,), generator=generator) for n in (90, 300))
    found = eval_linear.knn(train, labels, test, truth)
    assert found == pytest.approx(plain_knn(train, labels, test, truth, 20))


def test_test_sets_are_matched_by_class_name_and_numbered_ones_by_place(tmp_path):
    """"10" sorts before "2"; where the classes of training are numbers, too, they are names."""
    for i in range(12):
        (tmp_path / "v2" / str(i)).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "v2" / str(i) / f"{i}.png")
    for names in ([f"name{i:02}" for i in range(12)], sorted(map(str, range(12)))):
        folder = eval_linear.class_folder(tmp_path / "v2", None, names)
        for (path, _), (_, label) in zip(folder.samples, folder):
            name = Path(path).stem
            assert label == (names.index(name) if name in names else int(name))


@torch.no_grad()
@pytest.mark.parametrize("kind, layer", [("rot90", 2), ("hflip", 4), ("scale", 1)])
def test_equivariance_is_that_of_the_appendix_written_as_loops(kind, layer):
    """A.2, on a part of 32 images and one of 2, which have a g of their own."""
    encoder = toy_vit()
    images = torch.randint(256, (34, 3, 16, 16), generator=seeded(), dtype=torch.uint8)

    def tokens_of(x):
        h = encoder(x, [layer]).maps[layer]
        return encoder.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if layer == 4 else h

    wanted = {f"{kind} cosine": 0.0, f"{kind} retrieval": 0.0}
    for part, x in enumerate(ser.normalise(images / 255).split(32)):
        g1, g2 = (sample_geometry(len(x), 4, [kind], ser.rng(kind, part, v)) for v in (1, 2))
        g = relative(g2, g1)
        cosines = F.cosine_similarity(slow_rho(g, tokens_of(x)), tokens_of(slow_rho(g, x, 4)))
        if kind != "scale":
            flip = torch.full((len(x),), kind == "hflip")
            turns = torch.arange(len(x)) % 3 + 1 if kind == "rot90" else torch.zeros(len(x))
            g = Geometry(flip, turns, (4, 4))
        z = slow_rho(g, tokens_of(x)).movedim(1, -1).flatten(0, 2)
        z_prime = tokens_of(slow_rho(g, x, 4)).movedim(1, -1).flatten(0, 2)
        nearest = [F.cosine_similarity(token, z_prime).argmax().item() for token in z]
        right = sum(place == i for i, place in enumerate(nearest))
        wanted[f"{kind} cosine"] += cosines.mean().item() * len(x) / 34
        wanted[f"{kind} retrieval"] += right / len(z) * len(x) / 34
    found = eval_linear.equivariances(encoder, images, [layer], kind)[layer]
    assert found == pytest.approx(wanted, abs=1e-4)


def eval_rank(rank, ranks, out, tree):
    if rank > 0:     # only rank 0 writes
        ser.save = eval_linear.write = lambda *_, **__: os._exit(3)
    return eval_linear.evaluate(eval_args(tree, Path(out, "last.pt")))


def test_two_ranks_evaluate_as_one_process(tree, checkpoint, tmp_path):
    """Each encodes half of a batch of crops, and of val's 15 images; the heads are the same."""
    wanted = eval_rank(0, 1, tmp_path, tree)
    head = head_of(tmp_path)
    first, second = run_ranks(eval_rank, 2, tmp_path, tree)
    assert first == second == wanted
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 2 + 2     # rank 0's alone
    close(head_of(tmp_path)["weight"], head["weight"], 1e-4)


def test_without_data_untrained_and_trained_are_measured_on_synthetic_images(tmp_path, capsys):
    """Equivariance is that of 512 images, spread over val, after the block where [CLS] enters."""
    path = write_checkpoint(tmp_path, image_size=8, cls_layer=2)
    eval_linear.main(["--checkpoint", str(path), "--epochs", "1"])
    rows = json.loads(path.with_name("eval.json").read_text())["rows"]
    table = capsys.readouterr().out
    trained = ser.load_encoder(path)
    untrained = ser.seeded_encoder(toy(image_size=8, cls_layer=2)).eval()
    train, train_labels = ser.synthetic_images(2048, 8, seed=101)
    val, labels = ser.synthetic_images(1000, 8, seed=102)
    spread = torch.linspace(0, 999, 512).long()
    for name, encoder in (("untrained", untrained), ("trained", trained)):
        features = eval_linear.cls_features(encoder, val, 1)
        near = eval_linear.cls_features(encoder, train, 1)
        wanted = {"20-NN top-1 %": eval_linear.knn(near, train_labels, features, labels)}
        for element in ser.ELEMENTS:
            wanted |= eval_linear.equivariances(encoder, val[spread], [2], element)[2]
        for measure, value in wanted.items():
            found = value_of(rows, measure=measure, encoder=name)
            assert found == pytest.approx(value, abs=1e-4), (measure, name)
            assert f"{found:.4g}" in table
    head = head_of(tmp_path)
    assert eval_linear.fingerprint(untrained) != head["weights"] == eval_linear.fingerprint(trained)
    right = top1(F.linear(features, head["weight"], head["bias"]), labels)
    assert value_of(rows, measure="linear top-1 %", encoder="trained") == pytest.approx(right)


@pytest.mark.parametrize("flags, accuracies, blocks", [
    ("--knn", {"20-NN"}, 0), ("--equivariance", set(), 6), ("--mlp", {"mlp", "20-NN"}, 0),
    ("--equivariance --cache", {"linear", "20-NN"}, 6)])
def test_flags_choose_what_is_measured(flags, accuracies, blocks, tree, checkpoint):
    rows = eval_linear.evaluate(eval_args(tree, checkpoint, *flags.split()))
    measures = {row["measure"] for row in rows}
    assert {measure.split()[0] for measure in measures if " top-" in measure} == accuracies
    assert {row["block"] for row in rows if row["classes"] is None} == set(range(1, blocks + 1))
    assert ("untrained" in {row["encoder"] for row in rows}) == (blocks > 0)


def test_results_name_what_made_them_and_other_results_stay(tree, checkpoint):
    """The same command replaces its own rows alone, at the end; other heads replace no head. Other
    weights in the same file leave all rows of the first."""
    folder = checkpoint.parent
    first = eval_linear.evaluate(eval_args(tree, checkpoint))
    head_of(folder)
    other = [*eval_linear.evaluate(eval_args(tree, checkpoint, "--mlp")),
             *eval_linear.evaluate(eval_args(tree, checkpoint, "--cache"))]
    assert len(list(folder.glob("head-*.pt"))) == 2     # no MLP
    eval_linear.evaluate(eval_args(tree, checkpoint))
    written = json.loads((folder / "eval.json").read_text())
    made_by = {"weights", "settings"}
    assert [{key: row[key] for key in row if key not in made_by} for row in written["rows"]] == (
        json.loads(json.dumps(other + first)))
    weights = eval_linear.fingerprint(ser.load_encoder(checkpoint))
    assert {row["weights"] for row in written["rows"]} == {weights}
    assert written["rows"][-1]["settings"] == json.loads(
        json.dumps(vars(eval_args(tree, checkpoint))))
    assert written["checkpoints"][weights]["step"] == 7
    assert written["checkpoints"][weights]["settings"]["depth"] == 6

    write_checkpoint(folder, depth=6, seed=1)
    with_other_weights = torch.load(checkpoint)
    with_other_weights["encoder"]["norm.bias"] += 1
    ser.save(checkpoint, **with_other_weights)
    eval_linear.evaluate(eval_args(tree, checkpoint))
    again = json.loads((folder / "eval.json").read_text())
    assert again["rows"][:len(written["rows"])] == written["rows"]
    assert len(again["checkpoints"]) == 2 and len(list(folder.glob("head-*.pt"))) == 3


@pytest.mark.parametrize("test", ["train=few", "val=few", "crops=few", "few", "few=a few=b"])
def test_a_set_that_would_replace_another_is_refused(test, tree, checkpoint):
    args = eval_linear.parse(["--data", str(tree), "--checkpoint", str(checkpoint),
                              "--test", *test.replace("=", f"={tree}/").split()])
    assert sentence(eval_linear.load_sets, args, 16).startswith("--test")


def test_a_missing_val_and_a_class_that_train_lacks_are_told(tree, tmp_path):
    shutil.copytree(tree / "few", tmp_path / "train")
    args = eval_linear.parse(["--data", str(tmp_path)])
    assert "--val" in sentence(eval_linear.load_sets, args, 16)
    args.val = str(tree / "val")
    assert "class0" in sentence(eval_linear.load_sets, args, 16)


@pytest.mark.parametrize("kind", ser.ELEMENTS)
def test_retrieval_takes_any_f1(kind):
    """It is the share that `equivariances` measures."""
    encoder = toy_vit()
    images = torch.randint(256, (34, 3, 16, 16), generator=seeded(), dtype=torch.uint8)
    found = eval_linear.retrieval(lambda x: encoder(x, [2]).maps[2], ser.normalise(images / 255), 4,
                                  kind)
    wanted = eval_linear.equivariances(encoder, images, [2], kind)[2][f"{kind} retrieval"]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_an_evaluation_refuses_before_the_work(tree, checkpoint, tmp_path, monkeypatch):
    """--data without --checkpoint, a run on files without --data, a folder that is not ours."""
    monkeypatch.setattr(eval_linear, "load_sets", lambda *_: pytest.fail("it began"))
    of_files = write_checkpoint(tmp_path, data=tree, depth=6)
    locked = tmp_path / "locked"
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and writable(path, mode))
    data = ["--data", str(tree)]
    assert "needs --checkpoint" in sentence(eval_linear.main, data)
    run = ["--checkpoint", str(of_files)]
    assert "add --data" in sentence(eval_linear.main, run)
    assert str(locked) in sentence(eval_linear.main, data + run + ["--out", str(locked)])


def test_an_evaluation_writes_before_it_prints(tree, checkpoint, monkeypatch, capsys):
    """A terminal that closes loses nothing. Where the best rate is an end of the list, it says so."""
    monkeypatch.setattr(eval_linear, "print_table", lambda rows: sys.exit("closed"))
    assert sentence(eval_linear.evaluate, eval_args(tree, checkpoint)) == "closed"
    assert len(json.loads(checkpoint.with_name("eval.json").read_text())["rows"]) == 9
    head_of(checkpoint.parent)
    assert "--lr" in capsys.readouterr().out


# ==== 11. READMEs =======================================================================
def paste(*starts):
    """The names of the READMEs' python blocks that begin so, pasted into one file and run."""
    text = (HERE / "README.md").read_text() + (HERE / "paper" / "README.md").read_text()
    names = {"__name__": "pasted"}
    for start in starts:
        block, = re.findall(rf"^```python\n({start}.*?)^```", text, re.M | re.S)
        exec(compile(block, "pasted.py", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copied_loss_trains_a_vit_of_timm(dtype):
    """As printed, and on images of another shape, with all modules in half precision."""
    pytest.importorskip("timm")
    names = paste("import torch", "import timm")
    modules = nn.ModuleList([names["vit"], names["project"]]).to(dtype)
    modules.zero_grad()     # README's own step
    images = torch.rand(2, 3, 64, 96, generator=seeded()).to(dtype)
    names["equivariance_loss"](names["f1"], modules[1], images, 16, seeded()).backward()
    reached = [p.grad.ne(0).any() for p in modules.parameters() if p.grad is not None]
    assert len(reached) > 30 and all(reached)     # three blocks of twelve tensors, and more


def pasted_rank(rank, ranks, out):
    ser.setup()
    torch.manual_seed(rank)
    names = paste("import torch", "import timm")
    sample = names["sample_geometry"]
    seen = []
    names["sample_geometry"] = lambda *a, **k: seen.append(sample(*a, **k)) or seen[-1]

    class Model(nn.Sequential):
        def forward(self, images):
            own = names["f2"](names["f1"](images)).square().mean()
            return own + names["equivariance_loss"](names["f1"], self[1], images, 16, seeded(5))

    module = Model(names["vit"], names["project"])
    module.zero_grad()     # README's own step
    model = nn.parallel.DistributedDataParallel(module)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.rand(4, 3, 64, 64))
    loss.backward()
    return [tuple(g) for g in seen], [p.grad for p in model.parameters()]


def test_the_copied_loss_trains_two_ranks_of_other_seeds(tmp_path):
    """With DDP and autocast. They share the elements of G, and get one gradient."""
    pytest.importorskip("timm")
    (ours, gradients), (theirs, same_gradients) = run_ranks(pasted_rank, 2, tmp_path)
    assert same(gradients, same_gradients) and all(g.ne(0).any() for g in gradients)
    assert same(ours, theirs) and len(ours) == 2


def test_features_are_two_lines_away(whole_run, monkeypatch):
    """README's lines, on the encoder of a toy run."""
    encoder = ser.load_encoder(whole_run / "last.pt")
    monkeypatch.setattr(ser, "load_encoder", lambda path: encoder)
    x = torch.rand(2, 3, 16, 16, generator=seeded())
    block, = re.findall(r"```python\n(import ser\n.*?)```", (HERE / "README.md").read_text(), re.S)
    names = {"x": x}
    exec(block, names)
    assert torch.equal(names["cls"], encoder(ser.normalise(x)).cls)
    assert names["tokens"].shape == (2, 16, 4, 4)
