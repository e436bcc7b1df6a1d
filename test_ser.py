"""Every claim of ser.py and eval_linear.py as an executable sentence, each naming its source.

Fast code is compared with slow oracles, which are loops written from the formula, with closed
forms, with torchvision and Pillow, and with real gloo ranks; a whole run of ser.train, from image
files to weights, is compared with a plain re-implementation. The order is that of ser.py:

    1  Group            direction and exactness of rho, the eight elements as a group, relative
                        elements, distribution of the draws, resize, copyability
    2  Views            T and T_eq as a user's images get them, jitter, crops, b1 and b2, partners,
                        one geometry per step, the picture
    3  Encoder          one packed pass, where [CLS] enters, timm's ViT, codes, initial weights
    4  Loss             L_equiv as four loops, masks, closed forms, what is refused
    5  Base method      MoCo-v3 step for step, its momentum branch
    6  SER              Algorithm 1, which weights it reaches, the control, diagnostics, counts of
                        parameters and multiply-adds
    R  Ranks            2 and 4 gloo ranks are one process, in a loss and in a whole run
    7  Config           defaults, schedules, warmup of short runs, the share of b2
    8  Data             trees of images, odd and broken files, drawn images, the order of a run
    9  Training         the recorded run, log, resume, stop, kill, full disk, damage, --init,
                        torchrun and its restarts
    10 Command line     mistakes in one line, flags, crashes in one line
    11 eval_linear.py   layouts, crops, the protocol, sweeps, k-NN, equivariance, resume, results
    12 README.md        its commands and its code

    pip install -r requirements.txt && python -m pytest -q test_ser.py
"""
import contextlib
import copy
import dataclasses
import errno
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import torchvision.transforms.functional as TF
from PIL import Image, ImageOps
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, default_collate
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms import InterpolationMode, RandomResizedCrop

import eval_linear
import ser
from eval_linear import Crops, Frozen, Heads, MLPHeads, Settings, Split
from eval_linear import accuracy, collect, evaluate, fit, knn
from ser import Batch, Config, Crop, Geometry, Jitter, Key, Policy, UserError, View
from ser import patch_ntxent, relative, rho, sample_geometry

# pytest undoes the filter of ser.py for torchvision's announcement of TorchCodec.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")

torch.set_num_threads(1)     # sums depend on the number of threads; runs are compared bit for bit

HERE = Path(ser.__file__).resolve().parent
TOY = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1, equiv_layers=(1,),
           ratio=0.5, moco_hidden=16, batch_size=8, epochs=14.0, warmup_epochs=2.0, crop_min=0.3,
           workers=0, log_every=1)

def toy(**settings):
    """TOY with some changes; paths may be of any kind."""
    settings = TOY | settings
    for name, value in settings.items():
        if isinstance(value, Path):
            settings[name] = str(value)
    return Config(**settings)

def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

def seeded(seed=0):
    return torch.Generator().manual_seed(seed)

# ==== 1. Group (paper 3.1) ========================================================================
D4 = list(itertools.product((False, True), range(4)))     # (flip, turns), flip first

def element(flip, turns, grid, batch=1):
    return Geometry(torch.full((batch,), flip), torch.full((batch,), turns), grid)

def inverse(g, grid):
    return relative(element(False, 0, grid, len(g.flip)), g)

def turned(grid, turns):
    return grid if turns % 2 == 0 else grid[::-1]

def slow_move(x, flip, turns):
    """A flip, then counter-clockwise quarter turns, of one array (C, h, w), element by element."""
    if flip:
        out = torch.empty_like(x)
        for i, j in itertools.product(range(x.shape[1]), range(x.shape[2])):
            out[:, i, j] = x[:, i, x.shape[2] - 1 - j]
        x = out
    for _ in range(turns):     # the right-hand column, read downwards, becomes the top row
        out = x.new_empty(x.shape[0], x.shape[2], x.shape[1])
        for i, j in itertools.product(range(x.shape[2]), range(x.shape[1])):
            out[:, i, j] = x[:, j, x.shape[2] - 1 - i]
        x = out
    return x

def slow_rho(g, x, cell=1):
    """rho_g image by image, resampled by torchvision."""
    size = [g.grid[0] * cell, g.grid[1] * cell]
    moved = []
    for image, flip, turns in zip(x, g.flip, g.turns):
        image = slow_move(image, bool(flip), int(turns))
        moved.append(TF.resize(image, size, antialias=True))
    return torch.stack(moved)

def smooth(n, size, seed=0):
    """Images without detail below a fifth of their side, in [0, 1]."""
    coarse = torch.randn(n, 3, 5, 5, generator=seeded(seed))
    return F.interpolate(coarse, (size, size), mode="bicubic").sigmoid()

@pytest.mark.parametrize("flip, turns, wanted", [
    (False, 0, "123 456"),
    (False, 1, "36 25 14"),
    (False, 2, "654 321"),
    (False, 3, "41 52 63"),
    (True, 0, "321 654"),
    (True, 1, "14 25 36"),
    (True, 2, "456 123"),
    (True, 3, "63 52 41")])
def test_a_flip_comes_first_and_turns_go_counter_clockwise(flip, turns, wanted):
    """3.1: the direction of every element on the literal 2 x 3 array 123 456."""
    x = torch.arange(1, 7).view(1, 1, 2, 3)
    g = element(flip, turns, turned((2, 3), turns))
    rows = rho(g, x)[0, 0].tolist()
    assert " ".join("".join(map(str, row)) for row in rows) == wanted

@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (5, 2)])
@pytest.mark.parametrize("cell", [1, 3])
def test_rotations_and_flips_are_exact_token_permutations(grid, cell):
    """3.1: bit for bit what loops give, on squares and rectangles, tokens (cell 1) and pixels."""
    x = torch.randn(1, 2, grid[0] * cell, grid[1] * cell, generator=seeded())
    for flip, turns in D4:
        g = element(flip, turns, turned(grid, turns))
        assert torch.equal(rho(g, x, cell), slow_move(x[0], flip, turns)[None])

@pytest.mark.parametrize("size, grid", [
    ((6, 6), (6, 6)), ((6, 6), (5, 8)), ((4, 7), (7, 4)), ((4, 7), (6, 3))])
def test_each_image_of_a_batch_moves_by_its_own_element(size, grid):
    """3.1: 24 images, three of each element in mixed order, against one at a time."""
    order = torch.randperm(24, generator=seeded(1))
    g = Geometry(order % 2 == 1, order // 2 % 4, grid)
    x = torch.randn(24, 3, *size, generator=seeded(2))
    close(rho(g, x), slow_rho(g, x))

@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_the_eight_elements_are_a_group_for_all_64_pairs(grid):
    """3.1: g2 g1^-1 takes view 1 to view 2; rho of a product is the product of the rhos."""
    x = torch.randn(1, 2, *grid, generator=seeded())
    seen = set()
    for (f2, t2), (f1, t1) in itertools.product(D4, D4):
        g1 = element(f1, t1, turned(grid, t1))
        g2 = element(f2, t2, turned(grid, t2))
        assert torch.equal(rho(relative(g2, g1), rho(g1, x)), rho(g2, x))
        final = turned(grid, t1 + t2)
        after = element(f2, t2, final)     # g2, acting on what g1 gives
        product = element(f2 ^ f1, (t2 + (-t1 if f2 else t1)) % 4, final)
        assert torch.equal(rho(after, rho(g1, x)), rho(product, x))
        assert relative(after, inverse(g1, grid)) == product     # g2 (g1^-1)^-1
        seen.add(str(rho(g2, x).tolist()))
    assert len(seen) == 8

@pytest.mark.parametrize("flip, turns", D4)
def test_any_patch_embedding_commutes_when_its_kernel_turns_along(flip, turns):
    """3.1: embed_K(rho_g x) = rho_g embed_{rho_g^-1 K}(x), on 3 x 5 patches. Pooling and a
    symmetric K need no turned kernel; a free one fails without, and that is why equivariance is
    learned."""
    def embed(x, kernel):
        return F.conv2d(x, kernel, stride=4)

    g = element(flip, turns, turned((3, 5), turns))
    x = torch.randn(1, 3, 12, 20, generator=seeded(1), dtype=torch.float64)
    K = torch.randn(6, 3, 4, 4, generator=seeded(2), dtype=torch.float64)
    back = inverse(element(flip, turns, (1, 1), 6), (1, 1))
    moved = rho(g, x, 4)
    close(embed(moved, K), rho(g, embed(x, rho(back, K, 4))), 1e-12)
    turned_kernels = [rho(element(*each, (1, 1), 6), K, 4) for each in D4]
    symmetric = sum(turned_kernels) / 8
    close(embed(moved, symmetric), rho(g, embed(x, symmetric)), 1e-12)
    close(F.avg_pool2d(moved, 4), rho(g, F.avg_pool2d(x, 4)), 1e-12)
    gap = (embed(moved, K) - rho(g, embed(x, K))).abs().mean()
    assert gap == 0 if (flip, turns) == (False, 0) else gap > 1

def test_the_relative_element_takes_view_1_to_view_2_exactly_without_scale():
    """3.1: x2 = rho_g(x1) with g = g2 g1^-1, in pixels and in tokens, for 64 independent pairs."""
    exact = ("rot90", "hflip")
    g1 = sample_geometry(64, 6, elements=exact, generator=seeded(1))
    g2 = sample_geometry(64, 6, elements=exact, generator=seeded(2))
    for cell in (1, 4):
        x = torch.randn(64, 2, 6 * cell, 6 * cell, generator=seeded())
        aligned = rho(relative(g2, g1), rho(g1, x, cell), cell)
        assert torch.equal(aligned, rho(g2, x, cell))

def test_the_relative_element_takes_view_1_to_view_2_within_a_bound_with_scale():
    """3.1: with scale x2 = rho_g(x1) holds up to resampling. On smooth images in [0, 1], 20 pairs:
    measured mean error 0.0003, largest 0.0054, where a turn too many errs by 0.22."""
    x = smooth(8, 224)
    for seed in range(20):
        g1 = sample_geometry(8, generator=seeded(2 * seed))
        g2 = sample_geometry(8, generator=seeded(2 * seed + 1))
        g = relative(g2, g1)
        x1 = rho(g1, x, 16)
        x2 = rho(g2, x, 16)
        error = (rho(g, x1, 16) - x2).abs()
        too_far = g._replace(turns=(g.turns + 1) % 4)
        wrong = (rho(too_far, x1, 16) - x2).abs()
        assert error.mean() < 0.001
        assert error.max() < 0.01
        assert wrong.mean() > 0.2

def test_scaled_grids_follow_the_stated_distribution():
    """4.1: area uniform in [0.7, 1.3], aspect log-uniform in [3/4, 4/3]: 10..18 tokens a side,
    130..270 in all, 196 on average. A fine mesh knows 51 grids, the two rarest with probability
    6e-5."""
    generator = seeded()
    grids = [sample_geometry(1, generator=generator).grid for _ in range(12000)]
    areas = [h * w for h, w in grids]
    mesh = [(i + 0.5) / 400 for i in range(400)]
    formula = set()
    for u, v in itertools.product(mesh, mesh):
        tokens = 196 * (0.7 + 0.6 * u)
        aspect = 0.75 * (16 / 9) ** v
        height = round(math.sqrt(tokens / aspect))
        width = round(math.sqrt(tokens * aspect))
        formula.add((height, width))
    assert len(formula) == 51
    assert formula - {(15, 18), (18, 15)} <= set(grids) <= formula
    assert set(itertools.chain(*grids)) == set(range(10, 19))
    assert (min(areas), max(areas)) == (130, 270)
    assert abs(sum(areas) / len(areas) - 196) < 1
    tall = sum(h > w for h, w in grids)
    wide = sum(h < w for h, w in grids)
    assert abs(tall / wide - 1) < 0.06

def test_flips_and_turns_are_uniform_and_one_image_does_not_tell_the_next():
    """3.1: each of the eight elements has probability 1/8, and each pair of neighbours 1/64."""
    g = sample_geometry(64000, generator=seeded())
    number = 4 * g.flip + g.turns
    single = torch.bincount(number, minlength=8) / 8000
    pairs = torch.bincount(8 * number[:-1] + number[1:], minlength=64) / 1000
    assert (single - 1).abs().max() < 0.05
    assert (pairs - 1).abs().max() < 0.15

ELEMENTS = ("rot90", "hflip", "scale")
SUBSETS = [kept for n in range(4) for kept in itertools.combinations(ELEMENTS, n)]

@pytest.mark.parametrize("elements", SUBSETS)
def test_an_ablated_element_stays_at_the_identity_and_moves_no_other_draw(elements):
    """Table of group elements: --group takes any subset."""
    full = sample_geometry(200, 14, generator=seeded(3))
    part = sample_geometry(200, 14, elements=elements, generator=seeded(3))
    assert torch.equal(part.turns, full.turns * ("rot90" in elements))
    assert torch.equal(part.flip, full.flip & ("hflip" in elements))
    assert full.grid != (14, 14)
    assert part.grid == (full.grid if "scale" in elements else (14, 14))
    with pytest.raises(ValueError, match="rot45"):
        sample_geometry(2, elements=elements + ("rot45",))

@pytest.mark.parametrize("size", [(40, 56), (31, 17), (90, 25), (100, 130)])
def test_resize_is_the_data_pipelines_operator(size):
    """3.2, "the same resize operator": torchvision's antialiased one; Pillow's to a gray level."""
    image = (smooth(1, 64) * 255).to(torch.uint8)
    lines = torch.randint(256, (3, 10, 64), generator=seeded(), dtype=torch.uint8)
    image[0, :, ::7] = lines     # sharp ones
    theirs = TF.resize(image / 255, list(size), antialias=True)
    close(ser.resize(image / 255, size), theirs, 0)
    pillow = TF.to_pil_image(image[0]).resize(size[::-1], Image.Resampling.BILINEAR)
    pillow = TF.pil_to_tensor(pillow).int()
    integers = ser.resize(image, size)[0].int()
    floats = (255 * ser.resize(image / 255, size)[0]).round()
    assert (integers - pillow).abs().max() <= 1
    assert (floats - pillow).abs().max() <= 1

@pytest.mark.parametrize("chunk", [None, 5])
def test_rho_and_patch_ntxent_work_alone_with_import_torch(chunk):
    """Copying them is promised: their source runs in a module that imports nothing but torch."""
    pieces = map(inspect.getsource, (patch_ntxent, Geometry, ser.resize, rho))
    source = "import torch\nfrom typing import NamedTuple\n" + "\n".join(pieces)
    alone = {}
    exec(compile(source, "copied.py", "exec", dont_inherit=True), alone)
    g = sample_geometry(5, 6, generator=seeded())
    x = torch.randn(5, 2, 6, 6)
    close(alone["rho"](alone["Geometry"](*g), x), slow_rho(g, x))
    slow, slow_gradients = value_and_gradients(lambda *z: slow_ntxent(*z, 0.5), *tokens())
    copied = functools.partial(alone["patch_ntxent"], temperature=0.5, chunk=chunk)
    value, gradients = value_and_gradients(copied, *tokens())
    close(value, slow)
    close(gradients, slow_gradients)

# ==== 2. Views (paper 3.2) ========================================================================
WHOLE = Crop(0.0, 0.0, 1.0, 1.0, False)
EXACT_GROUP = dict(group=("rot90", "hflip"))     # without scale

def jitters(n, policy, seed=0):
    """n draws of the policy as one Jitter of rows."""
    ser.seed_draws("test", seed)
    return default_collate([ser.sample_jitter(policy) for _ in range(n)])

def no_jitter(n):
    return default_collate([Jitter()] * n)

def toy_loaded(cfg, seed=0):
    """What a loader hands to make_views: of each view random pixels, crops and drawn jitter. The
    base image of b2 is the same in views of the same size."""
    loaded = []
    n_b2 = cfg.b2_images(1)
    for v, policy in enumerate(cfg.policies):
        shape = (cfg.batch_size, 3, policy.size, policy.size)
        pixels = torch.randint(256, shape, generator=seeded(10 * seed + v), dtype=torch.uint8)
        if v > 0 and n_b2 > 0 and pixels.shape == loaded[0][0].shape:
            pixels[-n_b2:] = loaded[0][0][-n_b2:]
        crops = default_collate([WHOLE] * cfg.batch_size)
        loaded.append((pixels, crops, jitters(cfg.batch_size, policy, 10 * seed + v)))
    return loaded

def toy_batch(cfg, step=0):
    return ser.make_views(toy_loaded(cfg, step), cfg, step)

def uncoloured(loaded):
    """The same without jitter."""
    return [(pixels, crop, no_jitter(len(pixels))) for pixels, crop, _ in loaded]

def of_rank(loaded, n_b2, rank, ranks):
    """The rows of a rank: its part of b1, then of b2."""
    rows = torch.arange(len(loaded[0][0]))
    b1 = rows[:len(rows) - n_b2].chunk(ranks)[rank]
    b2 = rows[len(rows) - n_b2:].chunk(ranks)[rank]
    own = torch.cat([b1, b2])
    mine = []
    for pixels, crop, jitter in loaded:
        crop = Crop(*(field[own] for field in crop))
        jitter = Jitter(*(field[own] for field in jitter))
        mine.append((pixels[own], crop, jitter))
    return mine

def colours(n=12, height=19, width=23):
    """Random images in [0, 1] whose first rows hold grays, black, white and pure colours."""
    x = torch.rand(n, 3, height, width, generator=seeded(5))
    x[:, :, 0] = x[:, :1, 0]
    x[:, :, 1, :8] = torch.tensor(list(itertools.product((0., 1.), repeat=3))).T
    return x

def plain_jitter(image, jitter):
    """One image (3, h, w) in [0, 1], jittered by torchvision and normalised."""
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
    factors = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    for number in jitter.order.tolist():
        image = adjust[number](image, float(factors[number]))
    if jitter.gray:
        image = TF.rgb_to_grayscale(image, 3)
    if jitter.blur > 0:
        image = blurred(image, float(jitter.blur))
    if jitter.solarize:
        image = TF.solarize(image, 128 / 255)
    return TF.normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

def plain_jitters(x, jitter):
    """plain_jitter row by row."""
    rows = (Jitter(*row) for row in zip(*jitter))
    return torch.stack([plain_jitter(image, row) for image, row in zip(x, rows)])

def blurred(image, sigma):
    return TF.gaussian_blur(image, [13, 13], [sigma, sigma])

@pytest.mark.parametrize("name, torchvisions, least, most", [
    ("brightness", TF.adjust_brightness, 0.6, 1.4),
    ("contrast", TF.adjust_contrast, 0.6, 1.4),
    ("saturation", TF.adjust_saturation, 0.8, 1.2),
    ("hue", TF.adjust_hue, -0.1, 0.1),
    ("hue", TF.adjust_hue, -0.5, 0.5),
    ("blur", blurred, 0.1, 2.0)])
def test_each_photometric_operation_equals_torchvisions_image_by_image(
        name, torchvisions, least, most):
    """3.2, "the full photometric pipeline of T": a parameter of its own for every image."""
    x = colours()
    values = torch.linspace(least, most, len(x))
    jitter = no_jitter(len(x))._replace(**{name: values})
    wanted = [torchvisions(image, v) for image, v in zip(x, values.tolist())]
    close(ser.photometric(x, jitter), ser.normalise(torch.stack(wanted)), 3e-5)

@pytest.mark.parametrize("name, torchvisions", [
    ("gray", lambda x: TF.rgb_to_grayscale(x, 3)),
    ("solarize", lambda x: TF.solarize(x, 128 / 255))])
def test_a_flag_of_the_jitter_reaches_its_rows_and_no_other(name, torchvisions):
    """3.2: gray and solarize, on every third image."""
    x = colours()
    chosen = torch.arange(len(x)) % 3 == 0
    jitter = no_jitter(len(x))._replace(**{name: chosen})
    wanted = torch.where(chosen[:, None, None, None], torchvisions(x), x)
    before = x.clone()
    close(ser.photometric(x, jitter), ser.normalise(wanted))
    assert torch.equal(x, before)     # the caller's images stay as they were

def test_an_image_smaller_than_the_blurs_radius_is_blurred_as_far_as_it_reaches():
    """3.2 at the smallest views: 4 x 9 pixels, as torchvision's with a kernel of 7 taps."""
    x = colours(3)[..., :4, :9].contiguous()
    sigma = torch.tensor([0.3, 1.0, 2.0])
    jitter = no_jitter(3)._replace(blur=sigma)
    wanted = [TF.gaussian_blur(image, [7, 7], [s] * 2) for image, s in zip(x, sigma.tolist())]
    close(ser.photometric(x, jitter), ser.normalise(torch.stack(wanted)))
    assert ser.photometric(x[..., :1, :1], jitter).shape == (3, 3, 1, 1)

@pytest.mark.parametrize("policy", Config().policies)
def test_jitter_equals_torchvisions_with_parameters_of_its_own_for_every_image(policy):
    """3.2 and 4.1: 64 images with the policy's own draws, order included, against a loop."""
    x = colours(64)
    jitter = jitters(64, policy._replace(blur=0.5, solarize=0.5))
    close(ser.photometric(x, jitter), plain_jitters(x, jitter), 1e-4)

def test_equal_images_of_a_batch_get_different_jitter():
    """torchvision gives a whole batch one draw (vision#8484); here no two of 16 results agree."""
    policy = Policy(16, (0.3, 1.0), 1.0, 0.0)     # all are blurred
    alike = colours(1).expand(16, -1, -1, -1)
    out = ser.photometric(alike, jitters(16, policy))
    for a, b in itertools.combinations(out, 2):
        assert (a - b).abs().max() > 1e-3

def share(flags_of_images):
    return flags_of_images.double().mean().item()

COLOUR_RANGES = (
    ("brightness", 0.6, 1.4),
    ("contrast", 0.6, 1.4),
    ("saturation", 0.8, 1.2),
    ("hue", -0.1, 0.1))

def check_jitter(jitter, blur, solarize):
    """MoCo-v3's distribution over some 1500 draws; blur, solarize: the wanted probabilities."""
    changed = jitter.brightness != 1
    assert abs(share(changed) - 0.8) < 0.04
    assert abs(share(jitter.gray) - 0.2) < 0.04
    assert abs(share(jitter.blur > 0) - blur) < 0.03
    assert abs(share(jitter.solarize) - solarize) < 0.04
    for name, least, most in COLOUR_RANGES:
        values = getattr(jitter, name)[changed]
        reach = most - least
        assert least <= values.min() < least + 0.02 * reach
        assert most - 0.02 * reach < values.max() <= most
        assert abs(values.mean() - (least + most) / 2) < 0.05 * reach
    sigma = jitter.blur[jitter.blur > 0]
    assert 0.1 <= sigma.min() < 0.2
    assert 1.9 < sigma.max() <= 2.0
    assert abs(sigma.mean() - 1.05) < 0.2
    places = F.one_hot(jitter.order[changed], 4).double().mean(0)     # [place, operation]
    assert (places - 0.25).abs().max() < 0.05
    assert len(jitter.order[changed].unique(dim=0)) == 24

def correlation(a, b):
    pair = torch.stack([a.double(), b.double()])
    return torch.corrcoef(pair)[0, 1].abs().item()

@pytest.mark.parametrize("in_b2", [False, True])
def test_a_users_images_get_t_in_b1_and_t_eq_in_b2_independently_in_both_views(in_b2):
    """3.2 and 4.1, over 1500 draws of the data set of the main setting: MoCo-v3's probabilities in
    both parts, each view by its own policy, nothing of one view telling of the other; crops in b1
    only."""
    dataset = Config().dataset(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    image = torch.zeros(3, 400, 500, dtype=torch.uint8)
    draws = [dataset.draw(Key(0, i, i, in_b2), image) for i in range(1500)]
    (crop1, jitter1), (crop2, jitter2) = default_collate(draws)
    check_jitter(jitter1, 1.0, 0.0)
    check_jitter(jitter2, 0.1, 0.2)
    for name in ("brightness", "contrast", "saturation", "hue", "gray", "blur"):
        assert correlation(getattr(jitter1, name), getattr(jitter2, name)) < 0.1, name
    for crop in (crop1, crop2):
        if in_b2:
            assert all((field == value).all() for field, value in zip(crop, WHOLE))
            continue
        area = crop.height * crop.width
        aspect = crop.width * 500 / (crop.height * 400)
        # Uniform in [.08, 1]; what does not fit is drawn again, large areas first.
        assert 0.079 < area.min() < 0.1
        assert 0.9 < area.max() <= 1
        assert 0.4 < area.mean() < 0.56
        assert 0.73 < aspect.min() < 0.78
        assert 1.28 < aspect.max() < 1.37
        assert abs(share(crop.flip) - 0.5) < 0.05
    if not in_b2:
        for name in Crop._fields:
            assert correlation(getattr(crop1, name), getattr(crop2, name)) < 0.1, name

def test_the_largest_blur_follows_its_flag_and_changes_no_other_draw():
    """--blur-max, for views that are smaller than MoCo-v3's: the same draws, less blur."""
    image = torch.zeros(3, 40, 50, dtype=torch.uint8)
    datasets = [Config(blur_max=most).dataset(image[None]) for most in (2.0, 0.5)]
    largest = 0.0
    for index in range(200):
        wide, narrow = (each.draw(Key(0, index, index, True), image) for each in datasets)
        for (crop1, jitter1), (crop2, jitter2) in zip(wide, narrow):
            assert crop1 == crop2 and same(jitter1._replace(blur=0.0), jitter2._replace(blur=0.0))
            share_of_range = (jitter1.blur - 0.1) / 1.9
            assert jitter2.blur == pytest.approx(0.1 + 0.4 * share_of_range if jitter1.blur else 0)
            largest = max(largest, jitter2.blur)
    assert 0.45 < largest <= 0.5

@pytest.mark.parametrize("h, w", [(40, 64), (64, 40), (48, 48)])
def test_a_policy_without_area_is_the_plain_centre_crop_without_jitter(h, w):
    """A view that nothing was done to: the centre, 224 of 256 of the shorter side."""
    image = (smooth(1, 64)[0, :, :h, :w] * 255).to(torch.uint8)
    plain = Policy(16, None, 1.0, 1.0)
    dataset = ser.Dataset(image[None], (plain, plain), seed=0)
    for index in range(20):
        for crop, jitter in dataset.draw(Key(0, index, index, False), image):
            assert not crop.flip and same(jitter, Jitter())
    side = min(h, w) * 7 // 8
    wanted = ser.resize(TF.center_crop(image, [side, side])[None], (16, 16))[0]
    ((pixels, _, _), _), _ = dataset[Key(0, 0, 0, False)]
    assert torch.equal(pixels, wanted)

def test_b1_gets_two_crops_as_recorded_and_b2_the_whole_image():
    """3.2: the image is a ramp of columns in red and of rows in green, so that a crop shows where
    it lies: where Crop says, mirrored if it says so. Crop is disabled for b2."""
    ramp = torch.arange(0, 256, 2, dtype=torch.uint8).expand(128, -1)
    image = torch.stack([ramp, ramp.T, torch.zeros_like(ramp)])
    dataset = toy().dataset(image.expand(100, -1, -1, -1))
    for i in range(100):
        views, broken = dataset[Key(0, i, i, False)]
        assert broken == ""
        for pixels, crop, _ in views:
            box = [round(128 * side) for side in crop[:4]]     # top, left, height, width
            wanted = ser.resize(TF.crop(image, *box)[None], (16, 16))[0]
            if crop.flip:
                wanted = wanted.flip(-1)
            assert torch.equal(pixels, wanted)
    whole = ser.resize(image[None], (16, 16))[0]
    for i in range(4):
        for pixels, crop, _ in dataset[Key(0, i, i, True)][0]:
            assert torch.equal(pixels, whole) and crop == WHOLE

@pytest.mark.parametrize("group", [("rot90", "hflip"), ELEMENTS])
def test_a_view_is_geometry_first_then_jitter_and_holds_all_that_made_it(group):
    """3.2: b1 keeps its crop, b2 moves by the recorded geometry, and both are jittered by their own
    rows, image by image."""
    cfg = toy(group=group, batch_size=16)
    loaded = toy_loaded(cfg)
    batch = ser.make_views(loaded, cfg, 5)
    for view, (pixels, crop, jitter) in zip(batch.views, loaded):
        b1, b2 = view.images
        b1_rows = Jitter(*(field[:8] for field in jitter))
        b2_rows = Jitter(*(field[8:] for field in jitter))
        close(b1, plain_jitters(pixels[:8] / 255, b1_rows), 1e-4)
        close(b2, plain_jitters(slow_rho(view.geometry, pixels[8:] / 255, 4), b2_rows), 1e-4)
        assert same(view.crop, crop)
        assert same(view.jitter, jitter)
        assert (view.geometry.grid != (4, 4)) == ("scale" in group)

def test_pixels_and_recorded_elements_agree():
    """3.1 and 3.2: the b2 views of a batch are related by g2 g1^-1."""
    cfg = toy(**EXACT_GROUP)
    first, second = ser.make_views(uncoloured(toy_loaded(cfg)), cfg, 0).views
    g = relative(second.geometry, first.geometry)
    close(rho(g, first.images[1], 4), second.images[1])

@pytest.mark.parametrize("ratio, sizes", [(0.0, [8]), (1.0, [8]), (0.5, [4, 4])])
def test_a_view_has_no_empty_part_and_without_b2_no_geometry(ratio, sizes):
    """3.2: the baseline has b1 alone, ratio 1 has b2 alone."""
    batch = toy_batch(toy(ratio=ratio))
    for view in batch.views:
        assert [len(part) for part in view.images] == sizes
        assert (view.geometry is None) == (ratio == 0)

@dataclasses.dataclass(frozen=True)
class Locals(Config):
    """Two global views and a small one."""
    @property
    def policies(self):
        return *super().policies, Policy(8, (0.05, 0.3), 0.5, 0.0)

def test_a_smaller_view_gets_a_grid_of_its_own_size():
    """3.2 with views of several sizes: the geometry of a local view scales the local grid."""
    cfg = Locals(**TOY | dict(patch_size=2))
    for step in range(5):
        batch = toy_batch(cfg, step)
        assert [view.images[0].shape[-1] for view in batch.views] == [16, 16, 8]
        for view, grid in zip(batch.views, (8, 8, 4)):
            H, W = view.geometry.grid
            assert 0.6 * grid ** 2 < H * W < 1.45 * grid ** 2
            assert view.images[1].shape[-2:] == (2 * H, 2 * W)

def test_geometry_is_one_draw_per_step_of_which_each_rank_takes_its_rows():
    """3.1: ranks share the grid and split one draw without talking."""
    cfg = toy(batch_size=32)
    loaded = toy_loaded(cfg)
    whole = ser.make_views(loaded, cfg, 3)
    for ranks in (2, 4):
        parts = []
        for rank in range(ranks):
            parts.append(ser.make_views(of_rank(loaded, 16, rank, ranks), cfg, 3, rank, ranks))
        for v, view in enumerate(whole.views):
            own = [part.views[v] for part in parts]
            assert {part.geometry.grid for part in own} == {view.geometry.grid}
            flips = torch.cat([part.geometry.flip for part in own])
            turns = torch.cat([part.geometry.turns for part in own])
            assert torch.equal(flips, view.geometry.flip)
            assert torch.equal(turns, view.geometry.turns)
            for kind in (0, 1):
                close(torch.cat([part.images[kind] for part in own]), view.images[kind])

def test_geometry_differs_between_steps_views_and_seeds():
    """3.1: drawn anew for each, and the same again for the same."""
    cfg = toy(batch_size=32)
    loaded = toy_loaded(cfg)
    seen = []
    for config, step in ((cfg, 3), (cfg, 4), (dataclasses.replace(cfg, seed=1), 3)):
        views = ser.make_views(loaded, config, step).views
        again = ser.make_views(loaded, config, step).views
        for view, repeated in zip(views, again):
            assert same(list(view.geometry), list(repeated.geometry))
            seen.append(view.geometry.turns)
    for a, b in itertools.combinations(seen, 2):
        assert not torch.equal(a, b)

def test_g1_and_g2_are_independent():
    """3.1: all 64 pairs of elements occur, and all relative elements equally often (the release has
    reflections only); the grids of the two views differ."""
    settings = dict(batch_size=1600, ratio=1.0, image_size=16, patch_size=16)
    cfg = toy(**EXACT_GROUP | settings)
    blank = torch.zeros(1600, 3, 16, 16, dtype=torch.uint8)
    loaded = [(blank, default_collate([WHOLE] * 1600), no_jitter(1600))] * 2
    g1, g2 = (view.geometry for view in ser.make_views(loaded, cfg, 0).views)
    pairs = 8 * (4 * g1.flip + g1.turns) + 4 * g2.flip + g2.turns
    assert torch.bincount(pairs, minlength=64).min() > 8
    g = relative(g2, g1)
    single = torch.bincount(4 * g.flip + g.turns, minlength=8) / 200
    assert (single - 1).abs().max() < 0.25
    fine = toy(patch_size=1)
    grids = []
    for step in range(12):
        first, second = toy_batch(fine, step).views
        grids.append((first.geometry.grid, second.geometry.grid))
    assert sum(a == b for a, b in grids) < 3
    assert len({a for a, _ in grids}) > 6

@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_steps_one_b1_and_one_b2(ranks):
    """3.2: which images are in b2 does not depend on the number of ranks, nor does their order;
    each rank has its share of both, b1 first."""
    indices = torch.randperm(100, generator=seeded())[:32].tolist()
    alone = ser.partition(indices, 7, 8, 0, 1)
    keys = [ser.partition(indices, 7, 8 // ranks, rank, ranks) for rank in range(ranks)]
    for own in keys:
        n_b1 = 24 // ranks
        assert [key.in_b2 for key in own] == [False] * n_b1 + [True] * (8 // ranks)
        assert {key.epoch for key in own} == {7}
    together = [key for own in keys for key in own]
    for part in (False, True):
        ours = [key.index for key in together if key.in_b2 == part]
        assert ours == [key.index for key in alone if key.in_b2 == part]
    assert [key.index for key in alone] == indices

@pytest.mark.parametrize("rank, ranks, n_b2", [(0, 1, 8), (1, 2, 4), (0, 1, 3), (0, 1, 0)])
def test_a_key_names_its_partner_in_the_batch(rank, ranks, n_b2):
    """For methods that share draws: images 2i and 2i + 1 of a rank's batch name the same image,
    2i."""
    keys = ser.partition(list(range(50, 82)), 0, n_b2, rank, ranks)
    assert len(keys) == 32 // ranks
    for first, second in zip(keys[::2], keys[1::2]):
        assert first.partner == second.partner == first.index

def test_draws_depend_on_seed_epoch_and_index_alone():
    """Whatever was drawn before, in whatever order or process; others for another key or seed."""
    cfg = toy()
    images = (smooth(6, 32) * 255).to(torch.uint8)
    dataset = cfg.dataset(images)
    key = Key(1, 2, 2, False)
    first = dataset[key]
    torch.rand(7)
    dataset[Key(0, 3, 3, False)]
    assert same(first, dataset[key])
    other_seed = dataclasses.replace(cfg, seed=1).dataset(images)
    others = (dataset[key._replace(epoch=2)], dataset[key._replace(index=3)], other_seed[key])
    for other in others:
        for (pixels, crop, _), (_, other_crop, _) in zip(first[0], other[0]):
            assert crop != other_crop and pixels.shape == (3, 16, 16)
    keys = [[key, Key(0, 5, 5, True)], [Key(1, 0, 0, False), Key(2, 4, 4, True)]]
    here = list(DataLoader(dataset, batch_sampler=keys))
    there = list(DataLoader(dataset, batch_sampler=keys, num_workers=2))
    assert same(here, there)

def test_the_picture_shows_the_aligned_view_equal_to_view_2(tmp_path):
    """3.1 for the eye: under a caption each, columns of enlarged images; the last two are alike."""
    cfg = toy(**EXACT_GROUP)
    loaded = uncoloured(toy_loaded(cfg))
    images = (smooth(4, 16) * 255).to(torch.uint8)
    for pixels, _, _ in loaded:
        pixels[4:] = images
    batch = ser.make_views(loaded, cfg, 0)
    ser.save_views(tmp_path / "views.png", batch, images, 4)
    picture = TF.pil_to_tensor(Image.open(tmp_path / "views.png")).int()
    columns = torch.stack(picture.chunk(4, dim=2))                      # (4, 3, height, width)
    caption = columns[:, :, :14]
    below = columns[:, :, -4 * columns.shape[3]:]
    assert columns.shape[3] > 64     # from images of 16 pixels
    assert (caption.amin((1, 2, 3)) < 100).all()
    assert (caption.amax((1, 2, 3)) > 200).all()
    base, x1, aligned, x2 = below
    assert (aligned - x2).abs().max() <= 1
    assert (x1 - x2).abs().max() > 50
    assert (x1 - base).abs().max() > 50

def test_only_cuda_is_copied_to_without_waiting(monkeypatch):
    """A Mac's GPU may read a "non-blocking" copy after its source was freed."""
    waited = []
    to = torch.Tensor.to

    def watched(x, *given, **named):
        waited.append(not named.get("non_blocking", False))
        return to(x, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    cfg, model = toy_model()
    model(toy_batch(cfg))
    eval_linear.encode(model.base.encoder, torch.zeros(2, 3, 16, 16, dtype=torch.uint8), 1)
    assert len(waited) > 10 and all(waited)

# ==== 3. Encoder (paper 3.1) ======================================================================
def shake(module, seed=0):
    """Random weights: at the initial ones, [CLS] is 1e-6 and biases are zero, which hides
    mistakes."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.3, generator=generator)
    return module

def toy_vit(seed=0, **shape):
    small = dict(image_size=16, patch_size=4, dim=16, depth=4, heads=2, cls_layer=2)
    return shake(ser.ViT(**small | shape), seed)

def slow_codes(grid, dim):
    """MoCo-v3's codes as loops: sin and cos of the row, then of the column, dim / 4 frequencies."""
    quarter = dim // 4
    table = torch.empty(1, dim, grid, grid)
    for i, j, d in itertools.product(range(grid), range(grid), range(quarter)):
        omega = 1 / 10000 ** (d / quarter)
        table[0, d, i, j] = math.sin(i * omega)
        table[0, quarter + d, i, j] = math.cos(i * omega)
        table[0, 2 * quarter + d, i, j] = math.sin(j * omega)
        table[0, 3 * quarter + d, i, j] = math.cos(j * omega)
    return table

def plain_block(w, prefix, t, heads):
    """One pre-norm transformer block on tokens (B, N, D), by timm's names."""
    def linear(name, x):
        return F.linear(x, w[f"{prefix}.{name}.weight"], w[f"{prefix}.{name}.bias"])

    def norm(name, x):
        weight = w[f"{prefix}.{name}.weight"]
        return F.layer_norm(x, weight.shape, weight, w[f"{prefix}.{name}.bias"], 1e-6)

    B, N, D = t.shape
    qkv = linear("attn.qkv", norm("norm1", t))
    q, k, v = qkv.reshape(B, N, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    attention = (q @ k.transpose(-2, -1) / math.sqrt(D / heads)).softmax(-1)
    t = t + linear("attn.proj", (attention @ v).transpose(1, 2).reshape(B, N, D))
    return t + linear("mlp.fc2", F.gelu(linear("mlp.fc1", norm("norm2", t))))

def plain_vit(encoder, x):
    """timm's ViT but for where [CLS] enters: the tokens after block 0..depth, a list."""
    w = dict(encoder.named_parameters())
    shape = encoder.shape
    kernel = w["patch_embed.proj.weight"]
    t = F.conv2d(x, kernel, w["patch_embed.proj.bias"], stride=shape["patch_size"])
    t = t + TF.resize(w["pos_embed"], list(t.shape[-2:]), antialias=True)
    t = t.flatten(2).transpose(1, 2)
    found = []
    for layer in range(shape["depth"] + 1):
        if layer > 0:
            t = plain_block(w, f"blocks.{layer - 1}", t, shape["heads"])
        found.append(t)
        if layer == shape["cls_layer"]:
            t = torch.cat([w["cls_token"].expand(len(t), -1, -1), t], dim=1)
    return found

def plain_cls(encoder, x, layer=-1):
    norm = encoder.norm
    cls = plain_vit(encoder, x)[layer][:, 0]
    return F.layer_norm(cls, norm.weight.shape, norm.weight, norm.bias, 1e-6)

@pytest.mark.parametrize("cls_layer", [0, 2, 3])
def test_a_packed_pass_equals_a_pass_per_batch(cls_layer):
    """3.1: four batches of different sizes and shapes in one pass, embeddings and maps of every
    block, on grids to which the position codes are resized."""
    encoder = toy_vit(cls_layer=cls_layer)
    layers = (1, 2, 3, 4)
    sizes = ((3, 16, 16), (2, 12, 20), (1, 24, 8), (4, 16, 16))
    batches = [torch.randn(n, 3, h, w, generator=seeded(n)) for n, h, w in sizes]
    for x, packed in zip(batches, encoder(batches, layers)):
        alone = encoder([x], layers)[0]
        plain = plain_vit(encoder, x)
        close(packed.cls, alone.cls)
        close(packed.cls, plain_cls(encoder, x), 1e-4)
        for layer in layers:
            found = packed.maps[layer]
            assert found.shape == (len(x), 16, x.shape[2] // 4, x.shape[3] // 4)
            close(found, alone.maps[layer])
            patches = plain[layer][:, -found[0, 0].numel():]
            close(found.flatten(2).mT, patches, 1e-4)

def test_cls_enters_after_its_block():
    """3.1, f = f2 . f1: maps up to the layer do not see [CLS], later ones do, and hold it apart."""
    encoder = toy_vit(cls_layer=2)
    x = torch.randn(2, 3, 16, 20, generator=seeded())
    before = encoder([x], range(1, 5))[0]
    with torch.no_grad():
        encoder.cls_token.add_(1)
    after = encoder([x], range(1, 5))[0]
    for layer in range(1, 5):
        assert torch.equal(before.maps[layer], after.maps[layer]) == (layer <= 2)
    assert set(after.early) == {3, 4} and after.early[3].shape == (2, 16)
    close(encoder.norm(after.early[4]), after.cls)

def test_cls_layer_0_is_timms_vit():
    """4.1: from the same weights under timm's names, to rounding; no parameter has another name."""
    encoder = toy_vit(cls_layer=0, dim=24, heads=3)
    x = torch.randn(3, 3, 16, 16, generator=seeded())
    close(encoder([x])[0].cls, plain_cls(encoder, x), 1e-4)
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    names = {"cls_token", "pos_embed"}
    for module in ("patch_embed.proj", "norm"):
        names |= {f"{module}.weight", f"{module}.bias"}
    for i, part in itertools.product(range(4), parts):
        names |= {f"blocks.{i}.{part}.weight", f"blocks.{i}.{part}.bias"}
    assert set(encoder.state_dict()) == names

def test_learned_codes_are_trained_and_sincos_codes_are_moco_v3s_and_fixed():
    """Deviations: the paper's parameter counts imply learned codes, std .02; --position sincos."""
    learned = ser.ViT(56, 4, 64, 1, 2, 0)
    assert learned.pos_embed.shape == (1, 64, 14, 14) and learned.pos_embed.requires_grad
    assert abs(learned.pos_embed.std() - 0.02) < 1e-3
    assert abs(learned.pos_embed.mean()) < 1e-3
    fixed = ser.ViT(56, 4, 32, 1, 2, 0, position="sincos").pos_embed
    close(fixed, slow_codes(14, 32))
    assert not fixed.requires_grad
    wanted = math.sin(5 * 10000 ** -(3 / 8))     # row 5, frequency 3 of 8
    assert fixed[0, 3, 5, 2].item() == pytest.approx(wanted, abs=1e-5)

@pytest.mark.parametrize("H, W", [(4, 4), (3, 6), (7, 5)])
def test_position_codes_go_to_another_grid_as_the_map_does(H, W):
    """3.1: by the resize of pixels and tokens; a map of one value stays so."""
    encoder = toy_vit()
    blank = torch.zeros(1, 3, 4 * H, 4 * W)
    with torch.no_grad():
        encoder.patch_embed["proj"].bias.zero_()
    codes = encoder([blank], (0,))[0].maps[0]
    close(codes, TF.resize(encoder.pos_embed, [H, W], antialias=True))
    assert torch.equal(codes, encoder.pos_embed) == ((H, W) == (4, 4))

@pytest.mark.parametrize("n", [1, 3, 4])
def test_last_cls_is_the_normalised_cls_of_the_last_blocks(n):
    """4.1, linear probe: oldest block first; where a block has no [CLS], an error."""
    encoder = toy_vit(depth=5, cls_layer=1)
    x = torch.randn(2, 3, 16, 16, generator=seeded())
    wanted = [plain_cls(encoder, x, layer) for layer in range(6 - n, 6)]
    close(encoder.last_cls(x, n), torch.cat(wanted, dim=1), 1e-4)
    with pytest.raises(ValueError, match="after block 1"):
        encoder.last_cls(x, 5)

def test_the_encoder_says_what_it_takes():
    """A tensor in place of a list would be read as a list of images; a size off the grid is cut."""
    encoder = toy_vit()
    with pytest.raises(TypeError, match=r"list .*\[x\]"):
        encoder(torch.zeros(2, 3, 16, 16))
    with pytest.raises(ValueError, match="patch.* 4"):
        encoder([torch.zeros(2, 3, 16, 18)])

def test_initial_weights_are_moco_v3s_and_come_from_the_seed_alone():
    """4.1: Xavier-uniform with qkv as three matrices, zero biases, a frozen patch embedding."""
    cfg = toy(dim=64)
    torch.rand(3)
    model = ser.build(cfg)
    other = ser.build(dataclasses.replace(cfg, seed=1))
    assert same(model.state_dict(), ser.build(cfg).state_dict())
    weights = dict(model.base.encoder.named_parameters())
    assert not torch.equal(weights["pos_embed"], other.base.encoder.pos_embed)
    bounds = (("blocks.0.attn.qkv", 6 / 128), ("blocks.0.mlp.fc1", 6 / 320),
              ("patch_embed.proj", 6 / 112))
    for name, square in bounds:
        assert 0.95 * square ** 0.5 < weights[name + ".weight"].abs().max() <= square ** 0.5
    for name, p in weights.items():
        assert p.requires_grad != name.startswith("patch_embed")
        if name.endswith("bias") and "norm" not in name:
            assert p.eq(0).all()
    assert 0 < weights["cls_token"].std() < 2e-6
    for part in ("encoder", "projector"):
        slow = getattr(model.base, "momentum_" + part)
        fast = getattr(model.base, part)
        assert same(slow.state_dict(), fast.state_dict())
        assert not any(p.requires_grad for p in slow.parameters())

# ==== 4. Loss (paper 3.3) =========================================================================
def tokens(B=3, N=4, K=6, seed=0):
    return [torch.randn(B, N, K, generator=seeded(2 * seed + v)) for v in (0, 1)]

def value_and_gradients(function, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*inputs)
    return value.detach(), torch.autograd.grad(value, inputs)

def slow_ntxent(z, z_prime, tau):
    """L_equiv as the paper writes it: four nested loops over i, j and m, n (3.3 and Eq. 3)."""
    def s(a, b):
        return a @ b / (a.norm() * b.norm()) / tau

    total = 0
    B, N, _ = z.shape
    for i, j in itertools.product(range(B), range(N)):
        positive = s(z[i, j], z_prime[i, j]).exp()
        negatives = 0
        for m, n in itertools.product(range(B), range(N)):
            if m != i:
                negatives = negatives + s(z[i, j], z[m, n]).exp()
                negatives = negatives + s(z[i, j], z_prime[m, n]).exp()
        total = total - (positive / (positive + negatives)).log()
    return total / (B * N)

@pytest.mark.parametrize("tau", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("chunk", [None, 1, 5, 12, 100])
def test_patch_ntxent_equals_the_papers_four_loops_at_any_chunk(tau, chunk):
    """3.3 and Eq. 3, value and both gradients; blocks of any size change neither."""
    slow, slow_gradients = value_and_gradients(lambda *z: slow_ntxent(*z, tau), *tokens())
    fast, gradients = value_and_gradients(lambda *z: patch_ntxent(*z, tau, chunk), *tokens())
    close(fast, slow)
    close(gradients, slow_gradients)

def test_the_mask_of_three_images_is_the_literal_one():
    """3.3: two tokens each of three images; negatives are all tokens of z and z' but the
    image's."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1],     # columns: z, then z',
                         [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1],     # of images 0 0 1 1 2 2
                         [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1],
                         [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1],
                         [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0],
                         [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]])
    z, z_prime = tokens(3, 2, 5)
    a = F.normalize(z.flatten(0, 1), dim=1)
    b = F.normalize(z_prime.flatten(0, 1), dim=1)
    positive = (a * b).sum(1).div(0.3).exp()
    keys = (a @ torch.cat([a, b]).T).div(0.3).exp()
    wanted = -(positive / (positive + (keys * mask).sum(1))).log().mean()
    close(patch_ntxent(z, z_prime), wanted)

@pytest.mark.parametrize("B, N", [(2, 1), (3, 6), (5, 2)])
@pytest.mark.parametrize("tau", [0.05, 0.3])
def test_equal_features_give_the_closed_form(B, N, tau):
    """3.3: log(1 + 2 N (B - 1)), which is the chance level in the log."""
    z = torch.randn(4, generator=seeded()).expand(B, N, 4)
    wanted = math.log(1 + 2 * N * (B - 1))
    assert patch_ntxent(z, z, tau).item() == pytest.approx(wanted, rel=1e-5)

@pytest.mark.parametrize("alike", [True, False])
def test_tokens_of_the_own_image_are_no_negatives(alike):
    """3.3, after van den Oord: with images in orthogonal subspaces, log(1 + 2N(B-1) exp(-1/tau)),
    whether the tokens within an image are all equal or orthogonal to each other."""
    B, N = 3, 4
    z = torch.eye(B * N).view(B, N, -1)
    if alike:
        z = z[:, :1].expand(-1, N, -1)
    wanted = math.log(1 + 2 * N * (B - 1) * math.exp(-1 / 0.3))
    assert patch_ntxent(z, z, 0.3).item() == pytest.approx(wanted, rel=1e-5)

def test_tokens_of_both_views_are_negatives():
    """3.3: sums over z_mn and over z'_mn; with only one of them these closed forms fail."""
    tau, N = 0.3, 4
    hot = math.exp(1 / tau)
    e0, e1 = torch.eye(2)

    def z(*images):
        return torch.stack([image.expand(N, -1) for image in images])

    first = math.log(1 + N * (1 + hot) / hot)     # anchor e0, positive e0, negatives e0 and e1
    e0_e1 = z(e0, e1)
    e0_e0 = z(e0, e0)
    for pair, second in (((e0_e1, e0_e0), 1), ((e0_e0, e0_e1), hot)):
        wanted = (first + math.log(1 + 2 * N * second)) / 2
        assert patch_ntxent(*pair, tau).item() == pytest.approx(wanted)

@pytest.mark.parametrize("chunk", [None, 3])
def test_patch_ntxent_does_not_overflow(chunk):
    """3.3 at tau = 1e-3, where exp(1000) is infinite."""
    value, gradients = value_and_gradients(lambda *z: patch_ntxent(*z, 1e-3, chunk), *tokens())
    assert value.isfinite() and value > 100
    assert all(gradient.isfinite().all() for gradient in gradients)

def test_patch_ntxent_stays_in_fp32():
    """Under bf16 autocast the value is that of fp32; bf16 tokens are raised."""
    with torch.autocast("cpu", torch.bfloat16):
        low = patch_ntxent(*tokens(), chunk=5)
    assert low.dtype == torch.float32
    assert torch.equal(low, patch_ntxent(*tokens(), chunk=5))
    halves = [x.bfloat16() for x in tokens()]
    assert torch.equal(patch_ntxent(*halves), patch_ntxent(*(x.float() for x in halves)))

@pytest.mark.parametrize("shape, other, options, message", [
    ((1, 4, 5), (1, 4, 5), {}, "other images"),
    ((2, 4, 5), (2, 3, 5), {}, "equal"),
    ((2, 4, 5), (2, 4, 5), {"temperature": 0.0}, "0.0"),
    ((2, 4, 5), (2, 4, 5), {"chunk": 0}, "chunk 0")])
def test_patch_ntxent_refuses_what_has_no_meaning(shape, other, options, message):
    """3.3: a single image has no negatives; shapes, tau and chunk are checked."""
    with pytest.raises(ValueError, match=message):
        patch_ntxent(torch.randn(shape), torch.randn(other), **options)

# ==== 5. Base method: MoCo-v3 (paper 4.1) =========================================================
def same(a, b):
    """Equal to the last bit, through dicts, lists and tuples."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

def toy_model(seed=0, **settings):
    """(cfg, SER model) with random weights; the momentum branch differs from the online one."""
    cfg = toy(**settings)
    return cfg, shake(ser.build(cfg), seed)

def plain_head(head, x):
    """MoCo-v3's head on batch statistics: linear without bias, BatchNorm, ReLU; the last BatchNorm
    without affine, and no ReLU after it."""
    linears = [m for m in head if isinstance(m, nn.Linear)]
    norms = [m for m in head if isinstance(m, nn.BatchNorm1d)]
    assert len(head) == 3 * len(linears) - 1
    for i, (linear, norm) in enumerate(zip(linears, norms)):
        last = i == len(linears) - 1
        assert linear.bias is None and (norm.weight is None) == last
        x = F.linear(x, linear.weight)
        x = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.1, 1e-5)
        x = x if last else x.relu()
    return x

def plain_moco(base, views, m):
    """MoCo-v3's step in the order of its code: queries, momentum update, keys, both directions
    times 2T. views: for each the list of its image batches."""
    def encode(encoder, view):
        return torch.cat([plain_cls(encoder, x) for x in view])

    def contrast(q, k):
        cosine = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T
        return F.cross_entropy(cosine / 0.2, torch.arange(len(q))) * (2 * 0.2)

    queries = []
    for view in views:
        z = plain_head(base.projector, encode(base.encoder, view))
        queries.append(plain_head(base.predictor, z))
    keys = []
    with torch.no_grad():
        for part in ("encoder", "projector"):
            fast = getattr(base, part).parameters()
            slow = getattr(base, "momentum_" + part).parameters()
            for p, p_slow in zip(fast, slow):
                p_slow.copy_(p_slow * m + p * (1 - m))
        for view in views:
            k = encode(base.momentum_encoder, view)
            keys.append(plain_head(base.momentum_projector, k))
    return contrast(queries[0], keys[1]) + contrast(queries[1], keys[0])

def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}

@pytest.mark.parametrize("ratio, cls_layer", [(0.0, 0), (0.5, 1)])
def test_ratio_0_and_cls_layer_0_are_moco_v3_step_for_step(ratio, cls_layer):
    """4.1: value and gradient over three steps against a transcription of MoCo-v3, with its order
    of the momentum update. With b2, the invariance loss is MoCo-v3's on b1 and b2 together."""
    cfg, model = toy_model(ratio=ratio, cls_layer=cls_layer, moco_momentum=0.5, weight=0.0)
    reference = copy.deepcopy(model.base)
    for step in range(3):
        batch = toy_batch(cfg, step)
        model.base.update(step / 3)
        loss = model(batch)["loss"]
        m = 1 - 0.5 * (1 - 0.5) * (1 + math.cos(math.pi * step / 3))
        wanted = plain_moco(reference, [view.images for view in batch.views], m)
        close(loss, wanted, 1e-4)
        for value, base in ((loss, model.base), (wanted, reference)):
            base.zero_grad()
            value.backward()
        for (name, p), q in zip(trained(model.base).items(), trained(reference).values()):
            close(p.grad, q.grad, 1e-3)
            with torch.no_grad():     # so large that one momentum update more or less shows
                p -= 0.1 * q.grad
                q -= 0.1 * q.grad

def test_the_momentum_branch_moves_on_a_cosine_and_gets_no_gradient():
    """4.1: m rises from .99 to 1; at progress 0 a slow weight keeps 99% of itself."""
    cfg, model = toy_model()
    slow = model.base.momentum_encoder
    before = copy.deepcopy(slow)
    model.base.update(0.0)
    rows = zip(before.parameters(), model.base.encoder.parameters(), slow.parameters())
    for old, fast, new in rows:
        close(new, 0.99 * old + 0.01 * fast, 1e-6)
    for progress, m in ((0, 0.99), (0.5, 0.995), (1, 1.0)):
        model.base.update(progress)
        assert model.base.diagnostics["momentum"] == pytest.approx(m)
    model(toy_batch(cfg))["loss"].backward()
    for part in (model.base.momentum_encoder, model.base.momentum_projector):
        assert all(p.grad is None for p in part.parameters())

# ==== 6. SER (Algorithm 1) ========================================================================
class Nothing(nn.Module):
    """A base method without a loss, by the interface of MoCoV3: leaves L_equiv alone."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.diagnostics = {}

    def forward(self, views, cls):
        return torch.zeros(())

def plain_equiv(encoder, head, layer, views, geometries, tau):
    """(L_equiv, retrieval) of one layer by Algorithm 1: image by image, align the first map,
    LayerNorm and GELU projector, four loops. views: images of b2 in the two views."""
    g1, g2 = geometries
    norm, first, _, second = head

    def project(h):
        h = F.layer_norm(h, norm.weight.shape, norm.weight, norm.bias)
        return F.gelu(h @ first.weight.T) @ second.weight.T

    z = []
    z_prime = []
    for i in range(len(g1.flip)):
        h1, h2 = (plain_vit(encoder, view[i:i + 1])[layer] for view in views)
        h1 = h1[:, -g1.grid[0] * g1.grid[1]:]
        h2 = h2[:, -g2.grid[0] * g2.grid[1]:]
        flip = bool(g1.flip[i]) != bool(g2.flip[i])
        turns = int(g2.turns[i] + (g1.turns[i] if flip else -g1.turns[i])) % 4
        aligned = slow_rho(element(flip, turns, g2.grid), h1.mT.unflatten(2, g1.grid))
        z.append(project(aligned.flatten(2).mT))
        z_prime.append(project(h2))
    z = torch.cat(z)
    z_prime = torch.cat(z_prime)
    cosines = F.cosine_similarity(z.flatten(0, 1)[:, None], z_prime.flatten(0, 1)[None], dim=2)
    nearest = cosines.argmax(1) == torch.arange(len(cosines))
    return slow_ntxent(z, z_prime, tau), share(nearest)

@pytest.mark.parametrize("layers, cls_layer", [((1,), 1), ((2,), 0), ((1, 2, 3), 2)])
def test_the_equivariance_term_is_algorithm_1_line_by_line(layers, cls_layer):
    """Algorithm 1, averaged over layers, each with its own head. The grids of the two views differ,
    so that projecting before aligning, or aligning the other view, gives another value."""
    settings = dict(equiv_layers=layers, cls_layer=cls_layer, batch_size=6, temperature=0.02)
    cfg, model = toy_model(**settings)
    for step in range(100):     # until the grids differ and some g is not its own inverse
        views = toy_batch(cfg, step).views
        geometries = [view.geometry for view in views]
        g = relative(*geometries[::-1])
        quarter = ~g.flip & (g.turns % 2 == 1)
        if geometries[0].grid != geometries[1].grid and quarter.any():
            break
    terms = []
    for layer in layers:
        head = model.heads[str(layer)]
        b2 = [view.images[1] for view in views]
        with torch.no_grad():
            plain = plain_equiv(model.base.encoder, head, layer, b2, geometries, cfg.temperature)
        terms.append(plain[0])
        assert head[3].weight.shape == (512, 512)
        assert head[1].bias is head[3].bias is None
    losses = model(Batch(views), diagnose=True)
    close(losses["equiv"], sum(terms) / len(layers), 1e-5)
    close(losses["loss"], losses["inv"] + cfg.weight * losses["equiv"])
    assert losses["patch_top1"].item() == pytest.approx(plain[1])     # of the last layer
    assert losses["patch_top1"] < 1

def test_every_trainable_parameter_gets_a_gradient():
    """Eq. 3: why find_unused_parameters stays False; the release's head has no gradient at all."""
    cfg, model = toy_model(equiv_layers=(1, 3))
    model(toy_batch(cfg))["loss"].backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and p.grad.abs().sum() > 0, name
        else:
            assert p.grad is None, name

@pytest.mark.parametrize("layer, cls_layer", [(1, 1), (2, 2), (2, 1), (3, 0)])
def test_the_equivariance_term_alone_reaches_its_layer_and_nothing_after(layer, cls_layer):
    """3.1, soft equivariance at f1: position codes, projector and blocks up to the layer have a
    gradient; later blocks, the final LayerNorm and a [CLS] that enters later have none."""
    model = ser.SER(Nothing(toy_vit(depth=3, cls_layer=cls_layer)), (layer,), 0.5, 0.3)
    model(toy_batch(toy()))["loss"].backward()
    wanted = {"base.encoder.pos_embed"}
    if cls_layer < layer:
        wanted.add("base.encoder.cls_token")
    for name, p in model.named_parameters():
        number = re.match(r"base\.encoder\.blocks\.(\d)", name)
        if name.startswith("heads.") or (number and int(number[1]) < layer):
            wanted.add(name)
    reached = set()
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.abs().sum() > 0 and "patch_embed" not in name:
            reached.add(name)
    assert len(wanted) >= 1 + 4 + 12 * layer
    assert reached == wanted

def test_both_sides_of_the_equivariance_term_carry_their_gradient():
    """3.3: z and z' are online features; a finite difference along a random direction agrees."""
    model = ser.SER(Nothing(toy_vit(depth=3, cls_layer=1)), (1,), 1.0, 0.3)
    batch = toy_batch(toy())
    parameters = list(trained(model).values())
    model(batch)["loss"].backward()
    slope = 0.0
    direction = []
    for i, p in enumerate(parameters):
        direction.append(torch.randn(p.shape, generator=seeded(i)) * 0.1)
        if p.grad is not None:
            slope += (p.grad * direction[-1]).sum().item()
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, direction):
                p += sign * 2e-3 * d
        values.append(model(batch)["loss"].item())
    assert (values[0] - values[1]) / 4e-3 == pytest.approx(slope, rel=0.03)

def test_weight_0_is_the_control_that_differs_in_nothing_else():
    """Eq. 3, lambda = 0: L_equiv is computed, its heads get gradients of zero, the rest L_inv's."""
    gradients = {}
    for weight in (0.0, 0.7):
        cfg, model = toy_model(weight=weight)
        losses = model(toy_batch(cfg))
        losses["loss"].backward()
        gradients[weight] = {name: p.grad for name, p in trained(model).items()}
        close(losses["loss"], losses["inv"] + weight * losses["equiv"])
    later = re.compile(r"base\.(projector|predictor|encoder\.(blocks\.[12]|norm|cls))")
    for name, control in gradients[0.0].items():
        if name.startswith("heads."):
            assert control.eq(0).all()
        gap = (control - gradients[0.7][name]).abs().max()
        alike = gap <= 1e-4 * control.abs().max()
        assert alike == bool(later.match(name)), name

def test_diagnostics_have_their_stated_end_points():
    """Metrics of the log: retrieval 1 for equal tokens, spread 0 if collapsed, chance in closed
    form."""
    z, _ = tokens(3, 5, 8)
    assert ser.retrieval(z, 2 * z) == 1
    assert ser.retrieval(z, z.flip(0)).item() == pytest.approx(1 / 3)
    alike = 20 + torch.randn(4, 50, 16, generator=seeded())     # cosines of almost 1
    with torch.autocast("cpu", torch.bfloat16):
        assert ser.retrieval(alike, alike) == 1
    cfg, model = toy_model()
    blank = View([torch.zeros(8, 3, 16, 16)], None, None, None)
    assert model(Batch([blank, blank]), diagnose=True)["feature_std"] < 1e-4
    batch = toy_batch(cfg)
    losses = model(batch, diagnose=True)
    H, W = batch.views[1].geometry.grid
    assert losses["feature_std"] > 0.1
    assert losses["equiv_chance"] == pytest.approx(math.log(1 + 2 * H * W * 3))
    assert losses["inv_chance"] == pytest.approx(4 * 0.2 * math.log(8))

def meta_model(**settings):
    with torch.device("meta"):
        return ser.build(Config(**settings)).eval()

def macs(function, *shapes, device="meta"):
    """Multiply-adds of a forward pass, by torch's own counter."""
    inputs = [torch.ones(shape, device=device) for shape in shapes]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        function(*inputs)
    return counter.get_total_flops() // 2

@pytest.mark.parametrize("settings, count, papers", [
    (dict(ratio=0.0, cls_layer=0), 42_890_368, 42.9), ({}, 43_349_888, 43.4),
    (dict(ratio=0.0, cls_layer=0, position="sincos"), 42_815_104, None),
    (dict(position="sincos"), 43_274_624, None)])
def test_parameter_counts_are_the_papers(settings, count, papers):
    """Main table: 42.9 M for MoCo-v3 and 43.4 M with SER (43.35), of which 75,264 are learned
    codes, a token for each of 196 places; the base methods' own codes have one more, for [CLS]."""
    found = sum(p.numel() for p in trained(meta_model(**settings)).values())
    assert found == count
    if papers:
        assert round(round(count / 1e6, 2) + 1e-9, 1) == papers

def test_multiply_adds_are_the_papers():
    """Table "Computation overhead": 18.48 G, and 18.63 G or 1.008x with SER. Forward passes only:
    two online, two momentum, heads. The paper's ratio needs the loss of all 24 x 196 anchors, in
    both directions, on each of 8 GPUs with 256 images; ser.py takes a rank's own 3 x 196 anchors in
    one direction and is cheaper."""
    per_image = []
    for settings in (dict(ratio=0.0, cls_layer=0), {}):
        model = meta_model(**settings)
        base = model.base
        heads = 4 * macs(base.projector, (1, 384)) + 2 * macs(base.predictor, (1, 256))
        assert heads == 4 * 19_398_656 + 2 * 2_097_152
        encoder = macs(lambda x: base.encoder([x]), (1, 3, 224, 224))
        per_image.append(4 * encoder + heads)
    assert per_image == [18_475_782_144, 18_450_926_592]
    projector = macs(model.heads["3"], (1, 3 * 196, 384))
    assert projector == 3 * 196 * 458_752
    assert macs(patch_ntxent, (3, 4, 5), (3, 4, 5), device="cpu") == 12 * 24 * 5
    all_anchors = (24 * 196) * (2 * 24 * 196) * 512
    paper = per_image[1] + (2 * projector + 2 * all_anchors) / 256
    assert round(paper / 1e9, 2) == 18.63 and round(paper / per_image[0], 3) == 1.008
    ours = per_image[1] + (2 * projector + all_anchors / 8) / 256
    assert ours < per_image[0]

# ==== R. Ranks: 2 and 4 gloo ranks are one process ================================================
def run_ranks(main, ranks, folder):
    """Run main(rank, ranks, folder) in a process for every rank; all must end well."""
    workers = [started(main, rank, ranks, str(folder)) for rank in range(ranks)]
    for worker in workers:
        worker.join(100)
        worker.kill()     # only one that still waits for a rank that failed notices
    assert [worker.exitcode for worker in workers] == [0] * ranks

def started(main, *arguments):
    """A process that runs main(*arguments), from a server that has imported torch once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    process = context.Process(target=main, args=arguments)
    process.start()
    return process

@pytest.fixture(scope="session", autouse=True)
def ahead(request, folder, tmp_path_factory):
    """What takes long while a core is idle begins before the first test here, if its own test is
    to run: a word of the test's name -> (process, folder)."""
    begun = {}
    for word, begin in (("torchrun", begin_torchrun), ("compiler", begin_without_compiler)):
        if any(word in item.name for item in request.session.items):
            out = tmp_path_factory.mktemp(word)
            begun[word] = (begin(folder, out), out)
    yield begun
    for process, _ in begun.values():
        process.kill()

def without_batch_norm(cfg):
    """The model of cfg with random weights, less BatchNorm, whose statistics are a rank's own on
    gloo."""
    model = shake(ser.build(cfg))
    for head in (model.base.projector, model.base.predictor, model.base.momentum_projector):
        for i, module in enumerate(head):
            if isinstance(module, nn.BatchNorm1d):
                head[i] = nn.Identity()
    return model

def rank_results(rank, ranks):
    """What a rank finds: losses of its rows, their gradients, and DDP's gradients of SER."""
    z = [x.chunk(ranks)[rank] for x in tokens(8, 3, 6)]
    found = {}
    for chunk in (None, 2):
        found[chunk] = value_and_gradients(lambda *z: patch_ntxent(*z, 0.3, chunk), *z)
    k = torch.randn(16, 6, generator=seeded(8)).chunk(ranks)[rank]
    q = torch.randn(16, 6, generator=seeded(7)).chunk(ranks)[rank]
    found["moco"] = value_and_gradients(lambda q: ser.info_nce(q, k, 0.2)[0], q)
    cfg = toy(batch_size=16, equiv_layers=(1, 2))     # layer 2 sees [CLS]
    model = without_batch_norm(cfg)
    loaded = of_rank(toy_loaded(cfg), 8, rank, ranks)
    batch = ser.make_views(loaded, cfg, 0, rank, ranks)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    losses = parallel(batch, diagnose=True)
    losses["loss"].backward()
    found["ser"] = {name: torch.as_tensor(value).detach() for name, value in losses.items()}
    found["gradients"] = {name: p.grad for name, p in trained(model).items()}
    return found

def unequal_shapes():
    """The errors of patch_ntxent where B, N or K differ between two ranks, and that of a run where
    they see other images."""
    errors = []
    larger = dist.get_rank()
    for shape in ((2 + larger, 3, 4), (2, 3 + larger, 4), (2, 3, 4 + larger)):
        try:
            errors.append(f"a number: {patch_ntxent(torch.rand(shape), torch.rand(shape))}")
        except ValueError as error:
            errors.append(str(error))
    try:
        identity = dict(images=f"{larger} images")
        errors.append(f"a step: {ser.resume(Path('none'), identity, None, None)}")
    except UserError as error:
        errors.append(f"data differ: {error}")
    return errors

class Stopping(Config):
    """The last rank hears a stop signal in the fourth step; no other does."""
    stop = []

    def before_step(self, optimizer, epoch):
        super().before_step(optimizer, epoch)
        ranks, rank = ser.ranks_and_rank()
        if rank == ranks - 1 and round(epoch * 5) == 3:
            self.stop.append(signal.SIGTERM)

RANK_RUN = dict(epochs=1.2, warmup_epochs=0.4, base_lr=0.3, weight_decay=2.0, equiv_layers=(1, 2))

def train_ranks(folder, out):
    """A run of six steps, stopped in the fourth and continued; returns the stop's exit code and
    step."""
    settings = TOY | RANK_RUN | dict(data=f"{folder}/images", out=out, log_every=3)
    with pytest.raises(SystemExit) as stopped:
        ser.train(Stopping(**settings), without_batch_norm, Stopping.stop)
    if dist.is_initialized():
        dist.barrier()     # rank 0 has saved
    step = ser.load_checkpoint(Path(out, "last.pt"))["step"]
    last = ser.train(Config(**settings), without_batch_norm)
    if dist.is_initialized():
        dist.barrier()
    assert ser.load_checkpoint(last)["step"] == 6
    return stopped.value.code, step

def rank_main(rank, ranks, folder):
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    found = rank_results(rank, ranks)
    if ranks == 2:
        found["unequal"] = unequal_shapes()
    if rank > 0:     # only rank 0 writes
        ser.save_whole = lambda *_: os._exit(3)
    found["stopped"] = train_ranks(folder, f"{folder}/ranks")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally, all work done

def check_same_displacement(ours, theirs, start, names=()):
    """Two states have gone the same way from a start, in the weights of these names, or all that
    are trained. AdamW divides a gradient by its size, so that rounding shows where there is nearly
    none: the way is compared as one vector, and must agree to a hundredth; that of the encoder, a
    small part of it, once more alone. Left out are the biases on which nothing depends: of the
    keys, which softmax ignores, and of the last LayerNorm, where BatchNorm follows."""
    begin = start.state_dict()
    ways = {"all": [], "encoder": []}
    gaps = {"all": [], "encoder": []}
    for name in names or trained(start):
        way = theirs[name] - begin[name]
        gap = theirs[name] - ours[name]
        if name.endswith("encoder.norm.bias"):
            continue
        if name.endswith("qkv.bias"):     # queries and values alone
            way, gap = (x.unflatten(0, (3, -1))[[0, 2]] for x in (way, gap))
        for part in ("all", "encoder") if "encoder." in name else ("all",):
            ways[part].append(way.flatten())
            gaps[part].append(gap.flatten())
    for part in ways:
        way = torch.cat(ways[part]).norm()
        assert way > 0.1 and torch.cat(gaps[part]).norm() < 0.01 * way, part

@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks, folder, tmp_path):
    """Eq. 3 across ranks: patch_ntxent, InfoNCE and SER under DDP: the mean over ranks of losses
    and gradients is that of one process. So is a whole run of ser.train on the same image files,
    with the same b1, b2 and geometry, although one rank alone heard a stop signal in the middle, at
    the end of which step all stopped. Ranks whose shapes differ all get one clear error."""
    (tmp_path / "images").symlink_to(folder)
    run_ranks(rank_main, ranks, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    one = rank_results(0, 1)
    for key in (None, 2, "moco"):
        value, gradients = one[key]
        close(sum(f[key][0] for f in found) / ranks, value)
        for i, gradient in enumerate(gradients):
            close(torch.cat([f[key][1][i] for f in found]) / ranks, gradient, 1e-6)
    for name in ("loss", "inv", "equiv", "inv_chance", "equiv_chance"):
        close(sum(f["ser"][name] for f in found) / ranks, one["ser"][name])
    for name, gradient in one["gradients"].items():
        for f in found:
            error = (f["gradients"][name] - gradient).abs().max()
            assert error < 1e-4 * gradient.abs().max(), name
    if ranks == 2:
        for f in found:
            assert all("differ" in error for error in f["unequal"]), f["unequal"]
    assert [f["stopped"] for f in found] == [(143, 4)] * ranks
    cfg = toy(**RANK_RUN, data=folder, out=tmp_path / "one")
    ser.train(cfg, without_batch_norm)
    states = [ser.load_checkpoint(tmp_path / out / "last.pt") for out in ("ranks", "one")]
    check_same_displacement(states[0]["model"], states[1]["model"], without_batch_norm(cfg))

# ==== 7. Config (paper 4.1) =======================================================================
DEFAULTS = dict(
    data="", out="runs/ser", init="", image_size=224, patch_size=16, dim=384, depth=12, heads=6,
    position="learned", cls_layer=3, ratio=0.01, weight=0.5, temperature=0.3, equiv_layers=(3,),
    group=("rot90", "hflip", "scale"), crop_min=0.08, blur_max=2.0, batch_size=2048, epochs=100.0,
    warmup_epochs=10.0, base_lr=3e-4, weight_decay=0.1, seed=0, workers=8, log_every=20,
    save_every=0, compile=False, bf16=False, moco_temperature=0.2, moco_momentum=0.99,
    moco_hidden=4096)

def test_the_defaults_are_the_papers():
    """4.1, setting by setting; where the paper is silent, the release's or MoCo-v3's."""
    assert vars(Config()) == DEFAULTS
    assert Config().lr == pytest.approx(2.4e-3)
    assert Config().policies == (
        (224, (0.08, 1.0), 1.0, 0.0, 2.0), (224, (0.08, 1.0), 0.1, 0.2, 2.0))

def test_a_help_text_that_names_the_papers_value_names_the_default():
    """4.1: "(paper: 0.01)" beside a setting is its default."""
    named = 0
    for field in dataclasses.fields(Config):
        value = re.search(r"\(paper: ([\d.]+)", field.metadata["help"])
        if value:
            default = field.default
            default = default[0] if isinstance(default, tuple) else default
            assert float(value[1]) == default, field.name
            named += 1
    assert named >= 8

def test_the_model_gets_its_settings():
    """4.1: what a flag says arrives, also at the heads of MoCo-v3."""
    cfg = toy(weight=0.7, temperature=0.4, moco_temperature=0.3, moco_momentum=0.9,
                              equiv_layers=(1, 3), patch_size=8, dim=8, heads=4)
    model = ser.build(cfg)
    assert (model.weight, model.temperature, set(model.heads)) == (0.7, 0.4, {"1", "3"})
    assert (model.base.temperature, model.base.momentum) == (0.3, 0.9)
    widths = [m.out_features for m in model.base.projector if isinstance(m, nn.Linear)]
    assert widths == [16, 16, 256]
    assert [m.out_features for m in model.base.predictor if isinstance(m, nn.Linear)] == [16, 256]
    assert model.base.encoder.shape == dict(image_size=16, patch_size=8, dim=8, depth=3, heads=4,
                                            cls_layer=1, position="learned")
    assert len(ser.build(dataclasses.replace(cfg, ratio=0.0)).heads) == 0

def rate(cfg, epoch):
    """The learning rate that cfg gives an optimizer at a fractional epoch."""
    optimizer = cfg.optimizer(nn.Linear(1, 1))
    cfg.before_step(optimizer, epoch)
    return optimizer.param_groups[0]["lr"]

@pytest.mark.parametrize("epoch, part", [
    (0, 0), (5, 0.5), (10, 1), (32.5, 0.5 + 0.5 ** 1.5), (55, 0.5), (100, 0)])
def test_schedules_have_their_stated_end_points(epoch, part):
    """4.1: base lr x B / 256, 10 epochs of linear warmup from 0, then half a cosine to 0."""
    cfg = Config()
    assert cfg.lr == pytest.approx(3e-4 * 2048 / 256)
    assert rate(cfg, epoch) == pytest.approx(part * cfg.lr, abs=1e-12)

def test_a_run_without_warmup_begins_at_the_peak():
    assert rate(Config(warmup_epochs=0), 0) == Config().lr

@pytest.mark.parametrize("epochs, warmup", [(100.0, 10.0), (10.0, 1.0), (1.0, 0.1), (12.0, 10.0)])
def test_a_warmup_that_does_not_fit_the_run_becomes_a_tenth(epochs, warmup):
    """Short runs reach the peak rate: --epochs 1 with ten epochs of warmup never passed a tenth."""
    cfg = Config(epochs=epochs)
    assert cfg.warmup == pytest.approx(warmup)
    assert rate(cfg, warmup) == pytest.approx(cfg.lr)
    assert rate(cfg, warmup / 2) == pytest.approx(cfg.lr / 2)
    assert rate(cfg, epochs) == pytest.approx(0, abs=1e-12)

def test_the_optimizer_is_adamw_with_its_decay_on_all_that_is_trained():
    """4.1, after MoCo-v3: decay 0.1 on norms and biases too; nothing that is frozen is there."""
    cfg, model = toy_model(weight_decay=0.3)
    optimizer = cfg.optimizer(model)
    assert type(optimizer) is torch.optim.AdamW
    group, = optimizer.param_groups
    assert group["weight_decay"] == 0.3 and group["betas"] == (0.9, 0.999)
    wanted = [id(p) for p in trained(model).values()]
    assert [id(p) for p in group["params"]] == wanted

def test_b2_is_r_of_the_batch_with_the_same_number_on_every_rank():
    """3.2: 3 of 256 on each of 8 GPUs at the paper's setting."""
    assert [Config().b2_images(ranks) for ranks in (1, 2, 4, 8)] == [20, 10, 5, 3]

@pytest.mark.parametrize("batch, ratio, ranks", [
    (64, 0.01, 1), (64, 0.01, 4), (256, 0.001, 8), (30, 0.02, 1), (6000, 1e-4, 1)])
def test_a_batch_too_small_for_b2_names_a_ratio_that_works(batch, ratio, ranks):
    """3.2: fewer than two images have no negatives."""
    cfg = Config(batch_size=batch, ratio=ratio)
    with pytest.raises(UserError) as error:
        ser.check(cfg, ranks)
    better = re.search(r"try --ratio ([\d.e-]+)", str(error.value))[1]
    ser.check(dataclasses.replace(cfg, ratio=float(better)), ranks)

@pytest.mark.parametrize("batch, ranks", [(1, 1), (1, 4), (9, 2), (31, 8), (2, 3)])
def test_a_batch_the_ranks_cannot_share_names_one_that_works_at_once(batch, ranks):
    """The first answer is good: no "try 1", then "try 2"."""
    cfg = Config(batch_size=batch, ratio=0.0)
    with pytest.raises(UserError) as error:
        ser.check(cfg, ranks)
    better = int(re.search(r"try (\d+)", str(error.value))[1])
    ser.check(dataclasses.replace(cfg, batch_size=better), ranks)
    assert better - batch < 2 * ranks

# ==== 8. Data =====================================================================================
def picture(size=(24, 20), seed=0):
    return TF.to_pil_image(smooth(1, max(size), seed)[0][:, :size[1], :size[0]])

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """40 small images, not made in the order of their names."""
    path = tmp_path_factory.mktemp("images")
    for i in torch.randperm(40, generator=seeded()).tolist():
        picture(seed=i).save(path / f"{i:02}.png")
    return path

@pytest.mark.parametrize("layout", [
    "{i}.jpg", "class{i}/a/{i}.PNG", "train/class{i}/{i}.JPEG", "train/{i}.webp"])
def test_any_tree_of_images_is_a_data_set(layout, tmp_path):
    """Flat or nested, with or without train/; other files play no part, nor val/ beside train/."""
    for i in range(3):
        path = tmp_path / layout.format(i=i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.with_suffix(".txt").touch()
    if "train" in layout:
        (tmp_path / "val").mkdir()
        (tmp_path / "val/held_out.jpg").touch()
    wanted = [str(tmp_path / layout.format(i=i)) for i in range(3)]
    assert ser.list_images(str(tmp_path)) == wanted

def test_files_are_in_the_order_of_their_names_wherever_they_lie(tmp_path, monkeypatch):
    """A run takes the same order on every machine, whatever its file system lists first."""
    names = ["b/2.png", "b/1.png", "a/3.png", "a/10.png", "c.png"]
    walk = [("x", ["b", "a"], ["c.png"]), ("x/b", [], ["2.png", "1.png"]),
            ("x/a", [], ["3.png", "10.png"])]
    monkeypatch.setattr(os, "walk", lambda *_, **__: walk)
    assert ser.list_images("x") == sorted(f"x/{name}" for name in names)

def test_a_folder_to_which_several_links_lead_is_visited_once(tmp_path):
    """Links to folders are followed; loops end, and no image counts twice."""
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/a/1.png").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/2.png").touch()
    (tmp_path / "data/linked").symlink_to(tmp_path / "other")
    (tmp_path / "data/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "other/back").symlink_to(tmp_path / "data/a")
    found = ser.list_images(str(tmp_path / "data"))
    assert sorted(Path(path).name for path in found) == ["1.png", "2.png"]

def test_of_several_links_to_a_folder_the_first_by_name_is_followed(tmp_path, monkeypatch):
    """In whatever order the system lists them: all machines have the same paths."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b/1.png").touch()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    walk = os.walk

    def reversed_walk(*given, **named):
        for where, folders, names in walk(*given, **named):
            folders.sort(reverse=True)
            yield where, folders, names

    found = ser.list_images(str(tmp_path))
    monkeypatch.setattr(os, "walk", reversed_walk)
    assert ser.list_images(str(tmp_path)) == found == [str(tmp_path / "a/1.png")]

@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_without_permission_is_named(tmp_path):
    """Half of the data is never left out without a word."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
    (tmp_path / "b").chmod(0)
    with pytest.raises(UserError, match=f"{tmp_path}/b"):
        ser.list_images(str(tmp_path))
    (tmp_path / "b").chmod(0o700)

def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    """The same for those whom permissions do not stop: whatever error the system gives."""
    (tmp_path / "a").mkdir()
    (tmp_path / "1.png").touch()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/a"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=f"{tmp_path}/a.*Permission denied"):
        ser.list_images(str(tmp_path))

ODD_FILES = [("png.JPEG", 0), ("cmyk.JPEG", 12), ("gray.JPEG", 2), ("exif.JPEG", 2),
             ("palette.png", 0), ("alpha.png", 0), ("exif.png", 0), ("plain.jpg", 2),
             ("exif.webp", 0)]

@pytest.mark.parametrize("decoder", ["torchvision", "failing", "missing"])
@pytest.mark.parametrize("kind, tolerance", ODD_FILES)
def test_imagenets_odd_files_decode_as_pillow_shows_them(
        kind, tolerance, decoder, tmp_path, monkeypatch):
    """A PNG named .JPEG, CMYK and gray JPEGs, EXIF, palettes become (3, h, w) uint8 RGB, upright;
    also by Pillow, where torchvision has no decoder."""
    def fail(*_, **__):
        raise RuntimeError("no decoder")

    if decoder == "failing":
        monkeypatch.setattr(torchvision.io, "decode_image", fail)
    if decoder == "missing":
        monkeypatch.delattr(torchvision.io, "decode_image")
    path = tmp_path / kind
    modes = {"cmyk": "CMYK", "gray": "L", "palette": "P", "alpha": "RGBA"}
    image = picture((48, 32)).convert(modes.get(kind.split(".")[0], "RGB"))
    exif = Image.Exif()
    upright = image.convert("RGB")
    if kind.startswith("exif"):
        exif[0x0112] = 6     # the camera was turned by a quarter
        upright = upright.transpose(Image.Transpose.ROTATE_270)
    coding = next((name for name in ("PNG", "WEBP") if name.lower() in kind), "JPEG")
    image.save(path, format=coding, exif=exif, quality=95)
    ours = ser.read_image(str(path))
    with Image.open(path) as file:
        pillow = TF.pil_to_tensor(ImageOps.exif_transpose(file).convert("RGB"))
    assert ours.dtype == torch.uint8
    assert ours.shape == pillow.shape == (3, upright.height, upright.width)
    assert (ours.int() - pillow.int()).abs().max() <= tolerance
    assert (ours.int() - TF.pil_to_tensor(upright).int()).abs().float().mean() < 8

def spoil(path, kind):
    """Put something that is no readable image where an image was."""
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("I;16", "I", "F"):
        image = Image.new("L", (24, 20), 99).convert("F" if kind == "F" else "I")
        image.convert(kind).save(path, format="TIFF")
    else:
        spoiled = {"short": content[:len(content) // 3], "empty": b"", "text": b"no"}
        path.write_bytes(spoiled[kind])

@pytest.mark.parametrize("kind", ["short", "empty", "text", "pipe", "folder", "I;16", "I", "F"])
def test_a_broken_file_is_replaced_by_its_neighbour_and_named(kind, tmp_path):
    """Cut short, empty, no image, a pipe that would be waited for, more than 8 bits, which would be
    white: the draws stay those of the key, the pixels are the neighbour's; after the last the
    first."""
    for i in range(5):
        picture(seed=i).save(tmp_path / f"{i}.jpg")
    for broken in (1, 2, 4):
        spoil(tmp_path / f"{broken}.jpg", kind)
    dataset = toy().dataset([str(tmp_path / f"{i}.jpg") for i in range(5)])
    for index, neighbour in ((1, 3), (2, 3), (4, 0)):
        views, broken = dataset[Key(0, index, index, True)]
        good, none = dataset[Key(0, neighbour, neighbour, True)]
        assert f"{index}.jpg" in broken and none == ""
        for (pixels, _, jitter), (wanted, _, other) in zip(views, good):
            assert torch.equal(pixels, wanted) and not same(list(jitter), list(other))

def test_sixteen_bits_are_refused_from_a_png_too(tmp_path):
    """A ramp of 16 bits would become white: better no image than a wrong one."""
    ramp = torch.arange(24 * 20, dtype=torch.int32).view(20, 24) * 130
    Image.fromarray(ramp.numpy()).convert("I;16").save(tmp_path / "ramp.png")
    with pytest.raises(ValueError, match="bits"):
        ser.read_image(str(tmp_path / "ramp.png"))

def test_a_name_that_is_no_utf_8_is_read_as_any_other(tmp_path):
    picture().save(tmp_path / "1.png")
    os.rename(tmp_path / "1.png", os.fsencode(tmp_path) + b"/\xff\xfe.png")
    path, = ser.list_images(str(tmp_path))
    assert ser.read_image(path).shape == (3, 20, 24)

@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_epoch_takes_each_image_once_over_the_ranks(ranks):
    """43 images in batches of 8 are 5 steps an epoch; whatever the ranks, a step takes the images
    that one process takes, with the same b2."""
    cfg = toy()
    runs = [list(ser.batch_keys(43, cfg, 0, 15, rank, ranks)) for rank in range(ranks)]
    alone = list(ser.batch_keys(43, cfg, 0, 15))
    for epoch in range(3):
        taken = []
        for run in runs:
            taken += itertools.chain(*run[5 * epoch:5 * epoch + 5])
        assert {key.epoch for key in taken} == {epoch}
        assert len(taken) == len({key.index for key in taken}) == 40
    for step in range(15):
        batch = list(itertools.chain(*(run[step] for run in runs)))
        for part in (False, True):
            ours = [key.index for key in batch if key.in_b2 == part]
            assert ours == [key.index for key in alone[step] if key.in_b2 == part]

def order(cfg, epoch):
    """The images of an epoch of 43, in order."""
    keys = ser.batch_keys(43, cfg, 5 * epoch, 5 * epoch + 5)
    return [key.index for batch in keys for key in batch]

def test_the_order_comes_from_the_seed_and_the_epoch():
    """Shuffled, each epoch anew, for each seed anew, and the same again."""
    cfg = toy()
    first = order(cfg, 0)
    others = [sorted(first), order(cfg, 1), order(dataclasses.replace(cfg, seed=1), 0)]
    assert first == order(cfg, 0)
    assert all(sum(a == b for a, b in zip(first, other)) < 10 for other in others)

@pytest.mark.parametrize("start", [3, 5, 11])
def test_a_resumed_run_continues_the_order(start):
    cfg = toy()
    whole = list(ser.batch_keys(43, cfg, 0, 15, 1, 2))
    assert list(ser.batch_keys(43, cfg, start, 15, 1, 2)) == whole[start:]

def test_drawn_images_are_the_same_everywhere():
    """The embedded default: deterministic, six classes in equal parts, other images for another
    seed, gray to a noise, and lighter above than below, so that a turn shows."""
    state = torch.get_rng_state()
    images, labels = ser.draw_images(60, 32, 0)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(images, ser.draw_images(60, 32, 0)[0])
    assert not torch.equal(images, ser.draw_images(60, 32, 1)[0])
    assert images.shape == (60, 3, 32, 32) and images.dtype == torch.uint8
    assert torch.bincount(labels).tolist() == [10] * 6
    x = images.float()
    assert x.flatten(1).std(1).min() > 5
    assert (x[:, 0] - x[:, 1]).mean((1, 2)).abs().max() < 5
    above = x[:, :, :16].mean((1, 2, 3))
    below = x[:, :, 16:].mean((1, 2, 3))
    assert share(above > below) > 0.9

# ==== 9. Training =================================================================================
def flags(**settings):
    """Settings -> command-line flags."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words

def records(out):
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]

def steps(out):
    """step -> losses and gradient norms: what a resumed run has to repeat bit for bit."""
    names = ("loss", "inv", "equiv", "lr", "momentum", "grad_encoder", "grad_equiv")
    found = {}
    for record in records(out):
        if "step" in record:
            found[record["step"]] = [record[name] for name in names]
    return found

def last_state(out):
    return torch.load(Path(out) / "last.pt", weights_only=True)

def same_run(a, b):
    """The checkpoints of two runs agree in weights, buffers, momentum branch, optimizer and
    step."""
    a = last_state(a)
    b = last_state(b)
    return all(same(a[key], b[key]) for key in ("model", "optimizer", "step", "shape"))

@pytest.fixture(autouse=True)
def signals_stay_pytests():
    """ser.main takes over SIGTERM and SIGINT; pytest needs them back."""
    before = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)

RUN = TOY | dict(epochs=6.0)     # 30 steps

@pytest.fixture(scope="session")
def whole_run(folder, tmp_path_factory):
    """The output of an uninterrupted run of RUN."""
    out = tmp_path_factory.mktemp("whole")
    ser.train(Config(**RUN | dict(data=str(folder), out=str(out))))
    return out

def one_line(capsys):
    """The one line of ser.py on stderr, beside what it says of the run."""
    error = capsys.readouterr().err
    lines = own_lines(error)
    assert len(lines) == 1 and "Traceback (most" not in error, error
    return lines[0]

def own_lines(error):
    """The lines of ser.py among those of the bar."""
    lines = re.split(r"\x1b\[A|[\r\n]", error)
    return [line for line in lines if line.startswith("ser.py: ")]

class Recorder:
    """What a run of ser.train draws and reads: of each step the keys of its images, their crops and
    jitter, and the geometry of each view."""

    def __init__(self, monkeypatch):
        self.draws = []
        self.geometries = []
        draw = ser.Dataset.draw
        sample = ser.sample_geometry

        def record_draw(dataset, key, image):
            drawn = draw(dataset, key, image)
            self.draws.append((key, drawn))
            return drawn

        def record_geometry(*args, **options):
            self.geometries.append(sample(*args, **options))
            return self.geometries[-1]

        monkeypatch.setattr(ser.Dataset, "draw", record_draw)
        monkeypatch.setattr(ser, "sample_geometry", record_geometry)

def plain_cut(path, crop, size):
    """The crop of an image file, as uint8 (3, size, size)."""
    with Image.open(path) as file:
        image = TF.pil_to_tensor(file.convert("RGB"))
    h, w = image.shape[1:]
    top = round(crop.top * h)
    left = round(crop.left * w)
    part = image[:, top:top + round(crop.height * h), left:left + round(crop.width * w)]
    part = F.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0]
    return part.flip(-1) if crop.flip else part

def plain_views(paths, draws, geometries, n_b1, size, cell):
    """The images [b1, b2] of each view from the files on disk."""
    views = []
    for v, geometry in enumerate(geometries):
        x = [plain_cut(paths[key.index], drawn[v][0], size) / 255 for key, drawn in draws]
        rows = [drawn[v][1] for _, drawn in draws]
        b1 = [plain_jitter(*pair) for pair in zip(x[:n_b1], rows[:n_b1])]
        moved = slow_rho(geometry, torch.stack(x[n_b1:]), cell)
        b2 = [plain_jitter(*pair) for pair in zip(moved, rows[n_b1:])]
        views.append([torch.stack(b1), torch.stack(b2)])
    return views

class PlainAdamW:
    """Loshchilov and Hutter 2019, Algorithm 2, with decay on everything."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    @torch.no_grad()
    def step(self, lr, decay):
        self.t += 1
        for p, m, v in zip(self.parameters, self.first, self.second):
            m.copy_(0.9 * m + 0.1 * p.grad)
            v.copy_(0.999 * v + 0.001 * p.grad ** 2)
            size = (v / (1 - 0.999 ** self.t)).sqrt() + 1e-8
            p.sub_(lr * decay * p)
            p.sub_(lr * (m / (1 - 0.9 ** self.t)) / size)
            p.grad = None

def test_a_recorded_run_equals_a_plain_reimplementation_from_files_to_weights(
        folder, tmp_path, monkeypatch):
    """Everything together: seven steps of ser.train, over the end of an epoch, against MoCo-v3,
    SER's Algorithm 1 and AdamW written plainly, on the same files and random draws."""
    settings = dict(patch_size=8, epochs=1.4, warmup_epochs=0.4, base_lr=0.16, weight_decay=2.0,
                    weight=3.0, temperature=0.4, equiv_layers=(1, 2), moco_momentum=0.7)
    cfg = toy(**settings, data=folder, out=tmp_path)
    start = shake(ser.build(cfg))
    recorder = Recorder(monkeypatch)
    ser.train(cfg, lambda cfg: copy.deepcopy(start))
    assert len(recorder.draws) == 7 * 8 and len(recorder.geometries) == 7 * 2
    plain = copy.deepcopy(start)
    optimizer = PlainAdamW(trained(plain).values())
    paths = sorted(map(str, folder.iterdir()))
    losses = []
    for step in range(7):
        draws = recorder.draws[8 * step:8 * step + 8]
        geometries = recorder.geometries[2 * step:2 * step + 2]
        assert [key.in_b2 for key, _ in draws] == [False] * 4 + [True] * 4
        views = plain_views(paths, draws, geometries, 4, 16, 8)
        m = 1 - (1 - 0.7) * 0.5 * (1 + math.cos(math.pi * step / 7))
        loss = plain_moco(plain.base, views, m)
        b2 = [view[1] for view in views]
        for layer in (1, 2):
            head = plain.heads[str(layer)]
            term, _ = plain_equiv(plain.base.encoder, head, layer, b2, geometries, 0.4)
            loss = loss + 3.0 * term / 2
        loss.backward()
        lr = 0.16 * 8 / 256
        if step < 2:     # the warmup is .4 epochs of 5 steps, the cosine the other 5 steps
            lr = lr * step / 2
        else:
            lr = lr * 0.5 * (1 + math.cos(math.pi * (step - 2) / 5))
        optimizer.step(lr, 2.0)
        losses.append(loss.item())
    found = [record["loss"] for record in records(tmp_path)[1:]]
    assert found == pytest.approx(losses, rel=2e-3)
    state = last_state(tmp_path)["model"]
    check_same_displacement(state, plain.state_dict(), start)
    slow = [name for name, _ in start.named_parameters() if "momentum" in name]
    check_same_displacement(state, plain.state_dict(), start, slow)

def test_every_step_of_a_run_draws_anew(folder, tmp_path, monkeypatch):
    """Orders, crops, jitter and geometry of seven steps: no step, view or image repeats
    another's."""
    recorder = Recorder(monkeypatch)
    ser.train(toy(data=folder, out=tmp_path, epochs=1.4))
    for a, b in itertools.combinations(recorder.geometries, 2):
        assert not (torch.equal(a.flip, b.flip) and torch.equal(a.turns, b.turns))
    keys = [key for key, _ in recorder.draws]
    assert {key.index for key in keys[:40]} == set(range(40))
    assert [key.index for key in keys[:16]] != [key.index for key in keys[40:]]
    crops = [crop for key, drawn in recorder.draws for crop, _ in drawn if not key.in_b2]
    assert len(set(crops)) == len(crops) == 7 * 4 * 2

class Dicing(nn.Module):
    """A base method that draws at random in its forward pass, and shows what."""

    def __init__(self, encoder, cfg):
        super().__init__()
        self.encoder = encoder
        self.diagnostics = {}

    def forward(self, views, cls):
        self.diagnostics = {"dice": torch.rand(())}
        return sum(c.square().mean() for c in cls)

    def update(self, progress):
        pass

def test_what_a_method_draws_in_a_step_depends_on_the_step_alone(folder, tmp_path):
    """A resumed run repeats it, whoever loads the images; no two steps share it; another seed has
    others."""
    thrown = {}
    for name, change in (("a", {}), ("b", dict(workers=1)), ("c", dict(seed=1))):
        out = tmp_path / name
        cfg = toy(data=folder, out=out, epochs=1.0, **change)
        build = functools.partial(ser.build, method=Dicing)
        if name == "b":     # it stops after a step and is continued
            with pytest.raises(SystemExit):
                ser.train(cfg, build, [signal.SIGINT])
        ser.train(cfg, build)
        thrown[name] = [record["dice"] for record in records(out) if "step" in record]
    assert thrown["a"] == thrown["b"]
    assert len(set(thrown["a"] + thrown["c"])) == 10

LOGGED = {"loss", "inv", "equiv", "inv_chance", "inv_top1", "equiv_chance", "patch_top1",
          "feature_std", "grad_encoder", "images_per_s", "waiting", "memory_gib"}

def test_the_log_holds_what_a_person_decides_by(whole_run, folder):
    """The whole setting first, with the share of b2 that was possible; then a record per log step,
    by that step's schedules; a picture."""
    setting, *rest = records(whole_run)
    assert {"command", "trainable", "lr", "torch", "warmup"} <= set(setting)
    assert setting["config"]["temperature"] == 0.3 and setting["config"]["data"] == str(folder)
    assert setting["b2"] == 4 and setting["steps"] == 30 and setting["ratio"] == 0.5
    assert str(setting["images"]).startswith("40")
    assert [record["step"] for record in rest] == list(range(1, 31))
    for record in rest:
        assert LOGGED <= set(record)
        progress = (record["step"] - 1) / 30
        m = 1 - 0.01 * 0.5 * (1 + math.cos(math.pi * progress))
        assert record["lr"] == pytest.approx(rate(Config(**RUN), 6 * progress), rel=1e-5)
        assert record["momentum"] == pytest.approx(m) and record["grad_equiv"] > 0
    with Image.open(whole_run / "views.png") as views:
        assert views.width > views.height / 2 > 16

def test_the_effective_ratio_is_in_the_first_record_and_on_the_screen(folder, tmp_path, capsys):
    """r is rounded to whole images: 0.3 of 8 is 2, which is .25."""
    settings = TOY | dict(data=folder, out=tmp_path, ratio=0.3, epochs=0.2)
    assert ser.main(flags(**settings)) == 0
    setting = records(tmp_path)[0]
    assert (setting["b2"], setting["ratio"], setting["config"]["ratio"]) == (2, 0.25, 0.3)
    assert "0.25" in capsys.readouterr().err

@pytest.mark.parametrize("ratio, warned", [(0.23, False), (0.3, True), (0.25, False), (0.0, False)])
def test_a_ratio_that_is_off_by_more_than_a_tenth_is_told(folder, tmp_path, capsys, ratio, warned):
    """Of 8 images 2 are in b2, which is .25, at .23 and at .3; .25 is off by a sixth of .3."""
    settings = TOY | dict(data=folder, out=tmp_path, ratio=ratio, epochs=0.2)
    assert ser.main(flags(**settings)) == 0
    said = f"r is 0.25 in place of --ratio {ratio}"
    assert (said in capsys.readouterr().err) == warned

def run_main(settings, errors):
    """ser.main in a process of its own, as the head of a session, with its stderr in a file."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)     # of the loader, as in a fresh process
    sys.stderr = open(errors, "w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    update = ser.MoCoV3.update

    def slow_update(base, progress):
        time.sleep(0.03)     # so that signals come in the middle
        update(base, progress)

    ser.MoCoV3.update = slow_update
    os._exit(ser.main(flags(**settings)))

def wait_for_log(out, lines, process):
    """Until the log of a run has so many lines."""
    log = Path(out) / "log.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < lines:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)

def children(process):
    """The process ids of a process's own processes."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in listed.read_text().split()]

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")

@needs_proc
def test_sigterm_saves_and_the_resumed_run_is_bit_for_bit_the_uninterrupted_one(
        whole_run, folder, tmp_path):
    """SIGTERM to a real process and its loader's processes, which alone ignore it; exit code 143;
    then the same command goes on to the same weights, optimizer, momentum branch and losses."""
    settings = RUN | dict(data=folder, out=tmp_path)
    process = started(run_main, settings | dict(workers=2), tmp_path / "errors")
    try:
        wait_for_log(tmp_path, 3, process)
        for pid in children(process):
            os.kill(pid, signal.SIGTERM)
        wait_for_log(tmp_path, len(records(tmp_path)) + 6, process)     # past all that was loaded
        os.killpg(process.pid, signal.SIGTERM)     # as a scheduler does
        process.join(60)
        assert process.exitcode == 143
    finally:
        process.kill()
    step = ser.load_checkpoint(tmp_path / "last.pt")["step"]
    errors = (tmp_path / "errors").read_text()
    assert f"saved at step {step}" in errors and "same command" in errors
    assert 8 <= step < 30 and max(steps(tmp_path)) == step
    assert ser.main(flags(**settings)) == 0
    assert records(tmp_path)[step + 1]["start"] == step
    assert steps(tmp_path) == steps(whole_run) and same_run(tmp_path, whole_run)

@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_loader_process_ends_the_run_with_one_line(number, folder, tmp_path):
    """What an out-of-memory killer does, or a system whose shared memory is full: no hang, exit
    code 2, and the way out."""
    settings = TOY | dict(data=folder, out=tmp_path, workers=2)
    process = started(run_main, settings, tmp_path / "errors")
    try:
        wait_for_log(tmp_path, 3, process)
        os.kill(children(process)[0], number)
        process.join(30)
        assert process.exitcode == 2
    finally:
        process.kill()
    errors = (tmp_path / "errors").read_text()
    line, = own_lines(errors)
    assert "--workers" in line and "Traceback (most" not in errors

def run_without_shared_memory(settings, errors):
    """run_main, whose loader processes may make no file, in memory or elsewhere."""
    leave_signals = ser.leave_signals

    def confined(worker):
        leave_signals(worker)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ser.leave_signals = confined
    run_main(settings, errors)

def run_without_compiler(settings, errors):
    """run_main on a machine that has no C++ compiler and has never had one."""
    os.environ.pop("CXX", None)
    os.environ |= {"PATH": "", "TORCHINDUCTOR_CACHE_DIR": settings["out"] + "/cache"}
    run_main(settings, errors)

def begin_without_compiler(folder, out):
    """A process that trains on such a machine."""
    settings = TOY | dict(data=folder, out=str(out), workers=2, compile=())
    return started(run_without_compiler, settings, out / "errors")

def check_ends_with_one_line(process, errors, words):
    """Also with loader processes: no hang, exit code 2, and what is missing."""
    try:
        process.join(100)
        assert process.exitcode == 2
    finally:
        process.kill()
    line, = own_lines(errors.read_text())
    assert all(word in line for word in words) and "Traceback (most" not in errors.read_text()

def test_a_machine_without_shared_memory_ends_the_run_with_one_line(folder, tmp_path):
    settings = TOY | dict(data=folder, out=tmp_path, workers=2)
    process = started(run_without_shared_memory, settings, tmp_path / "errors")
    check_ends_with_one_line(process, tmp_path / "errors", ["--workers", "/torch_"])

@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles")
def test_a_machine_without_a_compiler_ends_the_run_with_one_line(ahead):
    process, out = ahead["compiler"]
    check_ends_with_one_line(process, out / "errors", ["compiler"])

def test_loader_processes_that_cannot_begin_are_one_line(folder, tmp_path, monkeypatch, capsys):
    """As where shared memory is full from the start, or no further process is allowed."""
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DataLoader, "__iter__", full)
    monkeypatch.chdir(tmp_path)
    assert ser.main(flags(**TOY | dict(data=folder, out=tmp_path, workers=2))) == 2
    line = one_line(capsys)
    assert "--workers" in line and "No space left" in line

def test_an_error_with_loader_processes_ends_the_run(folder, tmp_path, monkeypatch, capsys):
    """Whatever is raised in a step: the loader's processes are let go, and the run does not
    hang."""
    def boom(*_):
        raise KeyError("boom")

    monkeypatch.setattr(Config, "before_step", boom)
    monkeypatch.chdir(tmp_path)
    settings = TOY | dict(data=folder, out=tmp_path / "out", workers=1)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyError) as held:     # its traceback holds the loader
        ser.train(Config(**settings | dict(data=str(folder), out=str(tmp_path / "held"))))
    assert held.traceback and set(multiprocessing.active_children()) <= before
    assert ser.main(flags(**settings)) == 2
    line = one_line(capsys)
    assert "boom" in line
    assert set(multiprocessing.active_children()) <= before
    report = re.search(r"\S+\.txt", line.replace(")", ""))[0]
    text = Path(report).read_text()
    assert "Traceback" in text and "in boom" in text

@pytest.mark.parametrize("heard, saved", [(0, 1), (3, 4)])
def test_a_stop_is_noticed_at_the_end_of_the_very_step(heard, saved, folder, tmp_path, capsys):
    """Whether or not the step is one to log or to save."""
    settings = TOY | dict(data=str(folder), out=str(tmp_path), log_every=50, save_every=50)
    stop = []

    class Heard(Config):
        def before_step(self, optimizer, epoch):
            super().before_step(optimizer, epoch)
            if round(epoch * 5) == heard:
                stop.append(signal.SIGINT)

    with pytest.raises(SystemExit) as stopped:
        ser.train(Heard(**settings), stop=stop)
    assert stopped.value.code == 128 + signal.SIGINT
    assert last_state(tmp_path)["step"] == saved == records(tmp_path)[-1]["step"]
    assert f"saved at step {saved}" in capsys.readouterr().err

def test_a_finished_run_stays_so_and_says_so(whole_run, folder, tmp_path, capsys):
    """Nothing is trained, and the next command is named."""
    shutil.copytree(whole_run, tmp_path / "copy")
    state = (tmp_path / "copy/last.pt").read_bytes()
    settings = RUN | dict(data=folder, out=tmp_path / "copy")
    assert ser.main(flags(**settings)) == 0
    shown = capsys.readouterr()
    assert re.search("(?i)done|finished|complete", shown.out + shown.err)
    assert f"eval_linear.py --checkpoint {tmp_path}/copy/last.pt --data {folder}" in shown.out
    assert (tmp_path / "copy/last.pt").read_bytes() == state
    assert len(steps(tmp_path / "copy")) == 30

class Died(BaseException):
    """The end of a process."""

@pytest.mark.parametrize("error", [Died(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_save_that_fails_half_way_leaves_the_last_checkpoint_whole(
        error, whole_run, folder, tmp_path, monkeypatch, capsys):
    """A kill or a full disk at the third save: the second checkpoint loads, and the same command
    goes on from there; a full disk is one line."""
    settings = RUN | dict(data=folder, out=tmp_path)
    calls = []
    save = torch.save

    def half(state, file):
        calls.append(state["step"])
        if len(calls) < 3:
            return save(state, file)
        buffer = io.BytesIO()
        save(state, buffer)
        with contextlib.ExitStack() as stack:
            if isinstance(file, (str, Path)):
                file = stack.enter_context(open(file, "wb"))
            file.write(buffer.getvalue()[:len(buffer.getvalue()) // 2])
        raise error

    monkeypatch.setattr(torch, "save", half)
    monkeypatch.chdir(tmp_path)
    assert ser.main(flags(**settings)) == 2
    line = one_line(capsys)
    if isinstance(error, OSError):
        assert "No space left" in line
    monkeypatch.undo()
    assert calls == [5, 10, 15] and ser.load_checkpoint(tmp_path / "last.pt")["step"] == 10
    assert ser.main(flags(**settings)) == 0 and same_run(tmp_path, whole_run)

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_really_full_device_is_one_line(folder, tmp_path, monkeypatch, capsys):
    """What torch raises when the system has no room, whatever it is; nothing half is left in
    place."""
    (tmp_path / "last.tmp").symlink_to("/dev/full")
    monkeypatch.chdir(tmp_path)
    settings = TOY | dict(data=folder, out=tmp_path, epochs=0.2)
    assert ser.main(flags(**settings)) == 2
    assert re.search("No space left|full", one_line(capsys))
    assert not (tmp_path / "last.pt").exists()

def hold_run(settings, ready, leave):
    """A run that waits in its first step."""
    def wait(*_):
        ready.set()
        leave.wait(60)
        os._exit(0)

    ser.make_views = wait
    ser.train(Config(**settings))

def test_two_runs_in_one_folder_do_not_mix(folder, tmp_path, monkeypatch, capsys):
    """The second one is refused in one line that names the folder; the first notices nothing."""
    context = multiprocessing.get_context("forkserver")
    ready, leave = context.Event(), context.Event()
    settings = TOY | dict(data=str(folder), out=str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    process = started(hold_run, settings, ready, leave)
    try:
        assert ready.wait(30)
        log = (tmp_path / "out/log.jsonl").read_text()
        assert ser.main(flags(**settings)) == 2
        line = one_line(capsys)
        assert str(tmp_path / "out") in line and "run" in line
        assert (tmp_path / "out/log.jsonl").read_text() == log
        leave.set()
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()

def test_a_checkpoint_is_tensors_and_numbers_and_gives_the_encoder_back(whole_run):
    """It loads with weights_only=True; load_encoder builds the shape it names, in eval mode."""
    state = last_state(whole_run)
    assert set(state) == {"step", "program", "shape", "config", "images", "model", "optimizer"}
    encoder = ser.load_encoder(whole_run / "last.pt")
    x = torch.randn(2, 3, 16, 16)
    assert not encoder.training and encoder.shape == state["shape"] and encoder.cls_layer == 1
    for name, weight in encoder.state_dict().items():
        assert torch.equal(weight, state["model"]["base.encoder." + name])
    close(encoder([x])[0].cls, plain_cls(encoder, x), 1e-4)

WEIGHT = "base.encoder.blocks.2.mlp.fc2.bias"

@pytest.mark.parametrize("change", [
    {WEIGHT: None}, {WEIGHT: torch.zeros(3)}, {"base.encoder.blocks.9.extra": torch.zeros(3)}])
def test_an_encoder_with_missing_or_other_weights_is_refused(change, whole_run, tmp_path):
    """Strictly: every weight must be there, and no other."""
    state = last_state(whole_run)
    model = state["model"] | change
    state["model"] = {name: w for name, w in model.items() if w is not None}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match="other.pt"):
        ser.load_encoder(tmp_path / "other.pt")

@pytest.mark.parametrize("part, value", [
    ("step", None), ("step", "seven"), ("program", None), ("shape", [16]), ("config", 3),
    ("model", None), ("model", [1]), ("model", {}), ("images", 7), ("optimizer", None),
    ("optimizer", {"state": 3})])
def test_a_checkpoint_with_missing_or_mistyped_parts_is_refused_in_one_line(
        part, value, whole_run, folder, tmp_path, monkeypatch, capsys):
    """Whichever part it is; the file stays as it is, and the line names it."""
    state = last_state(whole_run)
    state[part] = value
    if value is None:
        del state[part]
    torch.save(state, tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    monkeypatch.chdir(tmp_path)
    settings = RUN | dict(data=folder, out=tmp_path)
    assert ser.main(flags(**settings)) == 2
    assert "last.pt" in one_line(capsys)
    assert (tmp_path / "last.pt").read_bytes() == before

@pytest.mark.parametrize("shape", [
    {"image_size": 16}, {"depth": "x"}, {"width": 3}, {"dim": 10 ** 12}])
def test_a_checkpoint_whose_shape_is_none_is_refused(shape, whole_run, tmp_path):
    torch.save(last_state(whole_run) | dict(shape=shape), tmp_path / "last.pt")
    with pytest.raises(UserError, match="last.pt"):
        ser.load_encoder(tmp_path / "last.pt")

def test_a_damaged_checkpoint_is_refused_with_a_way_out(whole_run, folder, tmp_path, capsys):
    """Bytes flipped in the middle, which torch.load does not notice."""
    content = bytearray((whole_run / "last.pt").read_bytes())
    middle = len(content) // 2
    for i in range(middle, middle + 4000):
        content[i] ^= 0xff
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(UserError, match="last.pt.*damaged.*remove"):
        ser.load_encoder(tmp_path / "last.pt")
    assert ser.main(flags(**RUN | dict(data=folder, out=tmp_path))) == 2
    assert "damaged" in one_line(capsys)

@pytest.mark.parametrize("change", ["another name", "one image more"])
def test_another_data_set_in_a_folder_with_a_run_is_refused(
        change, whole_run, folder, tmp_path, capsys):
    """Its count and the names of its files are compared, not where it lies."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copytree(whole_run, tmp_path / "out")
    settings = RUN | dict(data=other, out=tmp_path / "out")
    assert ser.main(flags(**settings)) == 0     # a copy elsewhere is the same data
    if change == "another name":
        (other / "07.png").rename(other / "7.png")
    else:
        picture().save(other / "99.png")
    capsys.readouterr()
    assert ser.main(flags(**settings)) == 2
    line = one_line(capsys)
    assert "images" in line and "last.pt" in line and "--out" in line

def test_init_begins_with_the_given_encoder(whole_run, folder, tmp_path, capsys):
    """--init: the encoder and its momentum copy; heads are new; another shape is refused."""
    given = ser.load_encoder(whole_run / "last.pt")
    model = ser.build(toy(init=whole_run / "last.pt", seed=5))
    assert same(model.base.encoder.state_dict(), given.state_dict())
    assert same(model.base.momentum_encoder.state_dict(), given.state_dict())
    trained_heads = last_state(whole_run)["model"]["heads.1.1.weight"]
    assert not torch.equal(model.heads["1"][1].weight, trained_heads)
    settings = TOY | dict(data=folder, out=tmp_path, init=whole_run / "last.pt", epochs=0.2)
    assert ser.main(flags(**settings)) == 0
    assert ser.main(flags(**settings | dict(out=tmp_path / "b", depth=4))) == 2
    assert "--init" in one_line(capsys)
    assert ser.main(flags(**settings | dict(init=tmp_path / "gone.pt"))) == 0     # continues

def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
        folder, tmp_path, monkeypatch, capsys):
    """NaN at step 8 is seen at 9, before that step is saved; last.pt is from step 6 and finite."""
    calls = []
    loss = ser.patch_ntxent

    def spoiled(*args):
        calls.append(1)
        return loss(*args) * (math.nan if len(calls) == 8 else 1)

    monkeypatch.setattr(ser, "patch_ntxent", spoiled)
    settings = TOY | dict(data=folder, out=tmp_path, log_every=50, save_every=3)
    assert ser.main(flags(**settings)) == 2
    line = one_line(capsys)
    assert "step 9" in line and "nan" in line
    state = last_state(tmp_path)
    assert state["step"] == 6
    assert all(value.isfinite().all() for value in state["model"].values())

def test_a_gradient_that_is_not_finite_spoils_no_checkpoint(folder, tmp_path, monkeypatch, capsys):
    """The loss of the step that saves is finite, its gradient is NaN: last.pt stays as it was."""
    calls = []
    loss = ser.patch_ntxent

    def spoiled(z, *rest):
        calls.append(1)
        spoil = (z * 0).sum().abs().sqrt() if len(calls) == 6 else 0     # 0, of slope infinity * 0
        return loss(z, *rest) + spoil

    monkeypatch.setattr(ser, "patch_ntxent", spoiled)
    assert ser.main(flags(**TOY | dict(data=folder, out=tmp_path, save_every=3))) == 2
    line = one_line(capsys)
    assert "step 6: the grad_encoder is nan" in line and "the loss" not in line
    state = last_state(tmp_path)
    assert state["step"] == 3
    assert all(value.isfinite().all() for value in state["model"].values())

def test_a_continued_run_has_the_optimizer_of_its_own_device(folder, tmp_path):
    """A checkpoint of a GPU, whose AdamW is fused, goes on with that of the new device."""
    settings = TOY | dict(data=folder, out=str(tmp_path), epochs=0.2)
    path = ser.train(toy(**settings))
    state = ser.load_checkpoint(path)
    state["optimizer"]["param_groups"][0]["fused"] = True
    identity = {name: state[name] for name in ("program", "images", "config")}
    torch.save(state, path)
    model = ser.build(toy(**settings))
    optimizer = toy().optimizer(model, fused=False)
    assert ser.resume(path, identity, model, optimizer) == 1
    assert optimizer.param_groups[0]["fused"] is False

@pytest.mark.parametrize("broken", [3, 4])
def test_broken_files_are_named_once_and_counted_and_too_many_stop_the_run(
        broken, folder, tmp_path, capsys):
    """Three are tolerated in however small a run; more, if over one in 1000, stop it with code
    2."""
    images = tmp_path / "images"
    shutil.copytree(folder, images)
    for i in range(broken):
        (images / f"{i:02}.png").write_bytes(b"\xff\xd8\xff cut short")
    settings = TOY | dict(data=images, out=tmp_path / "out", epochs=2.0)
    assert ser.main(flags(**settings)) == (0 if broken == 3 else 2)
    error = capsys.readouterr().err
    assert records(tmp_path / "out")[-1]["broken"] >= 3
    for i in range(5):
        assert error.count(f"cannot read {images}/{i:02}.png") == (i < broken)
    assert ("4 images" in error and "cannot be read" in error) == (broken == 4)

@pytest.mark.parametrize("broken", [4, 5])
def test_the_tolerance_for_broken_files_follows_the_data_set(
        broken, folder, tmp_path, monkeypatch):
    """1 in 1000 of the 4000 images, also where the first eight hold all that are broken."""
    cfg = toy(data=folder, out=tmp_path, epochs=0.002)
    paths = sorted(map(str, folder.iterdir())) * 100
    first, = ser.batch_keys(4000, cfg, 0, 1)
    for key in first[:broken]:
        paths[key.index] = f"gone/{key.index}.png"
    monkeypatch.setattr(ser, "list_images", lambda _: paths)
    if broken == 4:
        ser.train(cfg)
    else:
        with pytest.raises(UserError, match="5 images"):
            ser.train(cfg)

@pytest.mark.parametrize("change", [
    dict(ratio=0.0, cls_layer=0), dict(ratio=0.0, equiv_layers=(9,)), dict(ratio=1.0),
    dict(equiv_layers=(1, 3)), dict(position="sincos"), dict(group=("hflip",)), dict(weight=0.0)])
def test_the_baseline_and_the_ablations_train_too(change, folder, tmp_path):
    """4.1: each is a command line; without b2 there is no equivariance term and no head."""
    settings = TOY | dict(data=folder, out=tmp_path, epochs=0.4) | change
    assert ser.main(flags(**settings)) == 0
    setting, first, last = records(tmp_path)
    assert setting["b2"] == 8 * settings["ratio"] and last["step"] == 2
    assert ("equiv" in first) == (settings["ratio"] > 0)
    assert (first["grad_equiv"] > 0) == (change.get("weight") != 0 and settings["ratio"] > 0)

def test_bf16_multiplies_in_bfloat16_and_keeps_weights_and_losses_whole(
        folder, tmp_path, monkeypatch):
    """--bf16: on a CPU, too, products are bfloat16 and attention is not the slow flash one; a run
    may go on with it. Losses stay close to those of float32."""
    made = []
    feed_forward = ser.Block.feed_forward

    def spy(block, x):
        out = feed_forward(block, x)
        made.append((out.dtype, torch.backends.cuda.flash_sdp_enabled()))
        return out

    monkeypatch.setattr(ser.Block, "feed_forward", spy)
    losses = {}
    for bf16 in (True, False):
        cfg = toy(data=folder, out=tmp_path / str(bf16), epochs=0.4, bf16=bf16)
        state = ser.load_checkpoint(ser.train(cfg))
        assert all(v.dtype != torch.bfloat16 for v in state["model"].values())
        losses[bf16] = torch.tensor(list(steps(cfg.out).values()))[:, :3]
        assert set(made) == {(torch.bfloat16 if bf16 else torch.float32, not bf16)}
        made.clear()
    assert not torch.equal(losses[True], losses[False])
    close(losses[True], losses[False], 0.02)
    ser.train(dataclasses.replace(cfg, bf16=True))

def converted_on(device, ranks, monkeypatch, tmp_path):
    """Whether train hands the optimizer a model with SyncBatchNorm on this device."""
    class Reached(BaseException):
        pass

    def optimizer(cfg, model, **options):
        found.append(any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()))
        found.append(options)
        raise Reached

    found = []
    monkeypatch.setattr(ser, "setup", lambda: (torch.device(device), 0, ranks))
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(Config, "optimizer", optimizer)
    with pytest.raises(Reached):
        ser.train(toy(out=tmp_path))
    monkeypatch.undo()
    assert found[1] == {"fused": device == "cuda"}
    return found[0]

def test_batch_norm_is_over_all_ranks_on_gpus(monkeypatch, tmp_path):
    """4.1, as MoCo-v3: SyncBatchNorm with several GPUs; on a CPU there is none."""
    assert converted_on("cuda", 2, monkeypatch, tmp_path)
    assert not converted_on("cuda", 1, monkeypatch, tmp_path)
    assert not converted_on("cpu", 2, monkeypatch, tmp_path)

ELASTIC = TOY | dict(batch_size=64, ratio=1 / 16, epochs=10 / 64, save_every=2)     # ten steps
DYING = """
import os, runpy, signal, sys, torch
step = torch.optim.AdamW.step
begun = []
def dying(optimizer, *given, **named):
    begun.append(None)
    life = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], len(begun)
    if life == ("0", "1", 6):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(optimizer, *given, **named)
torch.optim.AdamW.step = dying
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

def undisturbed(rank, ranks, folder):
    """A rank of a run that is not killed."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    ser.train(ser.parse(flags(**ELASTIC, out=f"{folder}/whole"), Config))
    dist.barrier()     # rank 0 has saved
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def begin_torchrun(folder, out):
    """torchrun with two ranks of ser.py on drawn images, of which rank 1 is killed in step 6."""
    (out / "dying.py").write_text(DYING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max_restarts=3", str(out / "dying.py"), str(HERE / "ser.py"),
               *flags(**ELASTIC, out=out / "killed")]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(out / "said", "w") as said, open(out / "errors", "w") as errors:
        return subprocess.Popen(command, stdout=said, stderr=errors, env=environment)

def test_torchrun_restarts_a_killed_rank_to_the_bits_of_the_uninterrupted_run(
        ahead, tmp_path):
    """Two real ranks, by the elastic recipe of paper/README.md: rank 1 is killed in step 6, rank 0,
    which saves, cannot go on, and both begin again after step 4, the last that was saved. One log,
    of one run."""
    torchrun, out = ahead["torchrun"]
    run_ranks(undisturbed, 2, tmp_path)
    assert torchrun.wait(timeout=200) == 0, (out / "errors").read_text()
    found = records(out / "killed")
    begins = [record for record in found if "start" in record]
    assert [record["start"] for record in begins] == [0, 4]
    for setting in begins:
        assert (setting["ranks"], setting["b2"], setting["steps"]) == (2, 4, 10)
        assert str(setting["images"]).startswith("4096")
    assert found[1]["step"] == 1 and found[1]["inv_chance"] == pytest.approx(4 * 0.2 * math.log(64))
    assert {"loss", "inv", "equiv", "patch_top1", "grad_equiv", "lr", "momentum"} <= set(found[1])
    assert (out / "said").read_text().count("eval_linear.py --checkpoint") == 1
    assert last_state(out / "killed")["step"] == 10
    assert same_run(out / "killed", tmp_path / "whole")
    assert list(steps(out / "killed")) == list(range(1, 11))
    assert steps(out / "killed") == steps(tmp_path / "whole")

# ==== 10. Command line ============================================================================
BAD = {     # settings that differ from a good command -> what the one line on stderr must hold
    "no such folder": (dict(data="{tmp}/nowhere"), "{tmp}/nowhere"),
    "a file for a folder": (dict(data="{images}/00.png"), "{images}/00.png"),
    "an empty folder": (dict(data="{tmp}/empty"), "no image"),
    "a folder without images": (dict(data="{tmp}/text"), "no image"),
    "fewer images than a batch": (dict(batch_size=48), "40 images"),
    "a batch the ranks cannot share": (dict(batch_size=9, ranks=2), "try 10"),
    "fewer than two b2 images": (dict(ratio=0.1), "--ratio 0.25"),
    "an image off the patch grid": (dict(image_size=18), "try 20"),
    "heads that do not divide the width": (dict(heads=3), "--heads 3"),
    "a width without position codes": (dict(dim=18), "--dim 18"),
    "a width that cannot be allocated": (dict(dim=10 ** 12), "alloc"),
    "a [CLS] layer out of range": (dict(cls_layer=3), "--cls-layer 3"),
    "an equivariance layer out of range": (dict(equiv_layers=(1, 4)), "1..3"),
    "an equivariance layer 0": (dict(equiv_layers=(0,)), "--equiv-layers 0"),
    "an unknown element": (dict(group=("rot90", "rot45")), "rot45"),
    "an unknown position code": (dict(position="fourier"), "--position fourier"),
    "an unknown flag": (dict(learning_rate=1), "--learning-rate"),
    "no number": (dict(epochs="many"), "many"),
    "an output below a file": (dict(out="{images}/00.png/out"), "{images}/00.png/out"),
    "a missing encoder": (dict(init="{tmp}/none.pt"), "{tmp}/none.pt"),
    "a checkpoint of another shape": (dict(out="{whole}", dim=32), "dim 16 there, 32 here"),
    "a checkpoint of another run": (dict(out="{whole}", temperature=0.4), "temperature 0.3 there"),
    "a checkpoint of another seed": (dict(out="{whole}", seed=1), "seed 0 there, 1 here"),
    "a checkpoint cut short": (dict(out="{tmp}/cut"), "cut/last.pt"),
    "an empty checkpoint": (dict(out="{tmp}/zero"), "zero/last.pt"),
    "a checkpoint that is a folder": (dict(out="{tmp}/folder"), "folder/last.pt")}

OUT_OF_RANGE = [
    ("temperature", 0.0), ("temperature", -0.3), ("ratio", 1.5), ("ratio", -0.1), ("weight", -1.0),
    ("weight", "nan"), ("epochs", 0.0), ("epochs", "inf"), ("batch_size", 0), ("workers", -1),
    ("log_every", 0), ("moco_momentum", 1.1), ("crop_min", 0.0), ("base_lr", "nan"), ("depth", 0)]

@pytest.fixture
def places(whole_run, folder, tmp_path):
    """Where the settings of BAD point, by the names in their braces."""
    state = (whole_run / "last.pt").read_bytes()
    for name in ("cut", "zero", "folder", "empty", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut/last.pt").write_bytes(state[:len(state) // 2])
    (tmp_path / "zero/last.pt").touch()
    (tmp_path / "folder/last.pt").mkdir()
    (tmp_path / "text/notes.txt").touch()
    return dict(tmp=tmp_path, images=folder, whole=whole_run)

def mistake(settings, capsys):
    """The one line with which a command is answered, beside exit code 2; no bar was begun."""
    assert ser.main(flags(**settings)) == 2
    error = capsys.readouterr().err
    assert error.startswith("ser.py: ") and error.count("\n") == 1 and error.endswith("\n"), error
    return error

@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_answered_by_one_line_and_exit_code_2(
        case, places, folder, tmp_path, monkeypatch, capsys):
    """The value and the way out, no traceback, before anything is trained; nothing is lost."""
    change, words = BAD[case]
    before = (places["whole"] / "last.pt").read_bytes()
    settings = TOY | dict(data=folder, out=tmp_path / "out") | change
    if "ranks" in settings:
        found = (torch.device("cpu"), 0, settings.pop("ranks"))
        monkeypatch.setattr(ser, "setup", lambda: found)
    for name, value in settings.items():
        if isinstance(value, str):
            settings[name] = value.format(**places)
    assert words.format(**places) in mistake(settings, capsys)
    assert (places["whole"] / "last.pt").read_bytes() == before
    assert (tmp_path / "cut/last.pt").stat().st_size == len(before) // 2

@pytest.mark.parametrize("name, value", OUT_OF_RANGE)
def test_a_number_out_of_range_is_named_with_its_flag(name, value, folder, tmp_path, capsys):
    settings = TOY | dict(data=folder, out=tmp_path) | {name: value}
    assert f"--{name.replace('_', '-')} {value}" in mistake(settings, capsys)

@pytest.mark.parametrize("argv, words", [
    (["--epochs", "1", "--epochs", "2"], "--epochs is given"),
    (["--epochs=1", "--epochs", "2"], "--epochs is given"),
    (["--group", "hflip", "--group", "scale"], "--group is given"),
    (["--out", ""], "empty argument"),
    (["--data="], "empty argument"),
    (["--epoch", "1"], "--epoch"),
    (["--batch-size"], "--batch-size"),
    (["data"], "data")])
def test_a_command_that_does_not_parse_is_one_line(argv, words):
    """A repeated flag would win silently, an unset shell variable would be an empty name."""
    with pytest.raises(UserError) as error:
        ser.parse(argv)
    assert words in str(error.value) and "\n" not in str(error.value)

@pytest.mark.parametrize("rank, local_rank, lines", [
    ("0", "0", 1), ("1", "1", 0), ("8", "0", 1), ("1", None, 0)])
def test_a_mistake_is_told_once_on_every_machine(rank, local_rank, lines, monkeypatch, capsys):
    """The data may be missing on the second machine alone, where no rank 0 would tell."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert ser.guard("ser.py", lambda: ser.require(False, "no such folder")) == 2
    assert capsys.readouterr().err.count("no such folder") == lines

def test_half_a_torchrun_is_one_line(folder, tmp_path, monkeypatch, capsys):
    """RANK without its companions, as in a stale shell."""
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "WORLD_SIZE" in mistake(TOY | dict(data=folder, out=tmp_path), capsys)

@pytest.mark.parametrize("name", ["last.tmp", "views.png", "log.jsonl"])
def test_a_folder_where_a_file_belongs_is_one_line(name, folder, tmp_path, capsys):
    """Whatever is in the way in --out is named."""
    (tmp_path / name).mkdir()
    assert ser.main(flags(**TOY | dict(data=folder, out=tmp_path, epochs=0.2))) == 2
    assert name in one_line(capsys)

def test_flags_and_config_agree():
    """A flag per field; without --data a small model on drawn images."""
    assert ser.parse(["--data", "x"]) == Config(data="x")
    drawn = Config.drawn
    assert ser.parse([]) == Config(**drawn)
    assert ser.parse(flags(**TOY)) == Config(**drawn | TOY)
    words = ["--group", "hflip", "scale", "--equiv-layers", "3", "9", "--compile"]
    several = ser.parse(words)
    assert several.group == ("hflip", "scale")
    assert several.equiv_layers == (3, 9)
    assert several.compile is True
    ser.check(Config(**drawn), 1)

def test_the_help_names_every_flag_with_its_default(capsys):
    """--help ends well, and begins with what the program is."""
    assert ser.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Soft Equivariance Regularization" in text
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in text
    assert "[rot90 hflip scale]" in text and "[0.08]" in text

@pytest.mark.parametrize("rank, lines", [("0", 1), ("1", 0)])
def test_ctrl_c_is_one_line_and_exit_code_130(rank, lines, monkeypatch, capsys):
    """What does not save on a signal ends at once, and one rank of a machine says so."""
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setenv("LOCAL_RANK", rank)
    assert ser.guard("x.py", interrupted) == 130
    assert capsys.readouterr().err.count("x.py: stopped; the same command") == lines

@pytest.mark.parametrize("code, calls", [(0, ["left", 0]), (143, ["left", 143]), (2, [2])])
def test_after_an_error_a_rank_ends_without_waiting_for_the_others(code, calls, monkeypatch):
    """NCCL's farewell waits for all ranks; those that had no error would never come."""
    found = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("left"))
    monkeypatch.setattr(os, "_exit", found.append)
    ser.leave(code)
    assert found == calls

# ==== 11. eval_linear.py (paper 4.1, A.2) =========================================================
# Checkpoints, folders of images, and a slow evaluation written from the protocol.
TINY_VIT = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1)

def eval_checkpoint(folder, **changes):
    """The checkpoint of a tiny encoder, as ser.py writes it; random_init gives other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "last.pt").write_bytes(eval_checkpoint_bytes(**changes))
    return folder / "last.pt"

@functools.cache
def eval_checkpoint_bytes(**changes):
    cfg = Config(**TINY_VIT | dict(moco_hidden=8, equiv_layers=(1,)) | changes)
    model = ser.build(cfg)
    for p in model.base.encoder.parameters():
        p.data.mul_(1.5)
    file = io.BytesIO()
    torch.save(dict(step=7, program="ser.py", config=vars(cfg), images="24, 0", optimizer={},
                    shape=model.base.encoder.shape, model=model.state_dict()), file)
    return file.getvalue()

def eval_tree(root, train=11, val=5, classes=3, prefix="class"):
    """root/train/CLASS/*.png and root/val/CLASS/*.png of drawn textures, 24 x 30 pixels."""
    for part, n in (("train", train), ("val", val)):
        images, _ = ser.draw_images(6 * n, 30, seed=len(part))
        for i in range(n * classes):
            path = root / part / f"{prefix}{i % classes}" / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = images[6 * (i // classes) + i % classes % 6, :, :24]
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return root

@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return eval_tree(tmp_path_factory.mktemp("eval"))

@pytest.fixture
def checkpoint(tmp_path):
    return eval_checkpoint(tmp_path / "run")

def eval_settings(tree, checkpoint, **changes):
    """Settings of a linear evaluation of two epochs."""
    small = dict(test=(), batch_size=8, epochs=2, workers=0, lr=(1.0, 30.0))
    return Settings(**dict(data=str(tree), checkpoint=str(checkpoint)) | small | changes)

def eval_frozen(n=20, **settings):
    """A frozen random encoder, and a train and a val split of drawn images."""
    torch.manual_seed(0)
    encoder = ser.ViT(**TINY_VIT).eval()
    splits = {}
    for seed, name in enumerate(("train", "val")):
        splits[name] = Split(*ser.draw_images(n, 20, seed), list(range(6)))
    return Frozen(encoder, 2, Settings(**dict(workers=0, batch_size=8) | settings), splits)

def eval_command(argv, capsys):
    """The one line on stderr of a command that must end with code 2."""
    assert eval_linear.main([str(word) for word in argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if line and "it/s" not in line]     # less progress bars
    assert len(lines) == 1 and lines[0].startswith("eval_linear.py: "), lines
    return lines[0]

def plain_image(path):
    return TF.pil_to_tensor(Image.open(path).convert("RGB"))

def plain_resize(image, h, w, mode="bilinear"):
    """On uint8; torchvision's functional goes through floats, and is a gray level off."""
    return F.interpolate(image[None], (h, w), mode=mode, antialias=True)[0]

def plain_centre(image, size):
    """torchvision's CenterCrop after its Resize, whose longer side is rounded down."""
    short = round(size * 256 / 224)
    h, w = image.shape[1:]
    sides = (short, int(short * w / h)) if h < w else (int(short * h / w), short)
    return TF.center_crop(plain_resize(image, *sides, "bicubic"), size)

def plain_crop(image, size, *key):
    """torchvision's RandomResizedCrop and flip, drawn by the key."""
    ser.seed_draws(*key)
    box = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    flip = random.random() < 0.5
    image = plain_resize(TF.crop(image, *box), size, size)
    return TF.hflip(image) if flip else image

@torch.no_grad()
def plain_features(encoder, images):
    """The final LayerNorm of the [CLS] after each block that has one, block by block, in order."""
    x = torch.stack(images).float() / 255
    x = TF.normalize(x, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    t = (encoder.patch_embed["proj"](x) + encoder.pos_embed).flatten(2).mT
    norm = encoder.norm
    found = []
    for layer, block in enumerate(encoder.blocks):
        if layer == encoder.cls_layer:
            t = torch.cat([encoder.cls_token.expand(len(t), -1, -1), t], dim=1)
        t = block([t])[0]
        if layer >= encoder.cls_layer:
            found.append(F.layer_norm(t[:, 0], (encoder.dim,), norm.weight, norm.bias, 1e-6))
    return torch.cat(found[-4:], dim=1)

def plain_training(encoder, images, labels, rate, epochs, batch, seed=0):
    """One linear layer by torch's own tools, an image at a time: (weight, bias)."""
    width = encoder.dim * min(4, encoder.depth - encoder.cls_layer)
    head = torch.nn.Linear(width, 3)
    head.weight.data = 0.01 * torch.randn(3, width, generator=ser.rng(seed, "heads"))
    head.bias.data.zero_()
    optimizer = torch.optim.SGD(head.parameters(), rate * batch / 256, momentum=0.9)
    per_epoch = len(images) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=ser.rng(seed, "eval", epoch)).tolist()
        for step in range(per_epoch):
            rows = order[step * batch:(step + 1) * batch]
            crops = [plain_crop(images[i], 16, seed, "eval", epoch, i) for i in rows]
            optimizer.zero_grad()
            F.cross_entropy(head(plain_features(encoder, crops)), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return head.weight.detach(), head.bias.detach()

def plain_top1(logits, labels):
    return 100 * (logits.argmax(1) == labels).double().mean().item()

def plain_knn(train, labels, test, truth, k):
    """The share of right votes, by a loop over test images and their neighbours."""
    right = 0
    for x, y in zip(test, truth.tolist()):
        cosines = F.cosine_similarity(x[None], train).tolist()
        near = sorted(zip(cosines, labels.tolist()))[-k:]
        votes = {}
        for s, c in near:
            votes[c] = votes.get(c, 0) + math.exp(s / 0.07)
        right += max(votes, key=votes.get) == y
    return right / len(truth)

def plain_split(folder):
    """The images of class folders in order, and the places of their classes."""
    paths = sorted(folder.glob("*/*.png"))
    classes = sorted({path.parent.name for path in paths})
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    return [plain_image(path) for path in paths], labels

@pytest.mark.parametrize("cls_layer, blocks", [(1, 2), (2, 1)])
def test_an_evaluation_is_the_protocol_written_plainly(tree, tmp_path, cls_layer, blocks):
    """4.1, from files to heads: crops, order, features, rates, momentum, schedule, choice, k-NN."""
    checkpoint = eval_checkpoint(tmp_path, cls_layer=cls_layer)
    cfg = eval_settings(tree, checkpoint, epochs=3)
    result = evaluate(cfg)
    encoder = ser.load_encoder(checkpoint)
    images, labels = plain_split(tree / "train")
    val, truth = plain_split(tree / "val")
    features = plain_features(encoder, [plain_centre(image, 16) for image in val])
    trained = [plain_training(encoder, images, labels, rate, 3, 8) for rate in cfg.lr]
    found = [plain_top1(features @ weight.T + bias, truth) for weight, bias in trained]
    rates = result["linear"]["rates"]
    assert [row["val"]["top1"] for row in rates] == pytest.approx(found)
    assert [row["lr"] for row in rates] == [rate * 8 / 256 for rate in cfg.lr]
    head = eval_linear.load_head(tmp_path / "eval-head.pt", result["sha256"])
    weight, bias = trained[found.index(max(found))]
    close(head.weight, weight, 2e-4)
    close(head.bias, bias, 2e-4)
    assert (head.classes, head.blocks) == (["class0", "class1", "class2"], blocks)
    # The vote, on centre crops of the training images, by the last [CLS] alone.
    bank = plain_features(encoder, [plain_centre(image, 16) for image in images])
    voted = evaluate(dataclasses.replace(cfg, knn=True))["knn"]
    share = plain_knn(bank[:, -16:], labels, features[:, -16:], truth, 20)
    assert voted == {"k": 20, "val": {"top1": pytest.approx(100 * share)}}

def test_each_part_of_the_plain_protocol_moves_its_result(tree, checkpoint):
    """The oracle above can fail: another rate, seed, batch or number of epochs is far away."""
    encoder = ser.load_encoder(checkpoint)
    images, labels = plain_split(tree / "train")
    weight, _ = plain_training(encoder, images, labels, 3.0, 2, 8)
    for change in (dict(rate=3.3), dict(seed=1), dict(batch=7), dict(epochs=3)):
        how = dict(rate=3.0, epochs=2, batch=8) | change
        other, _ = plain_training(encoder, images, labels, **how)
        assert (weight - other).abs().max() > 0.01, change

def test_features_are_the_normalised_cls_of_the_last_blocks():
    """Protocol: final LayerNorm on the outputs of the last blocks, their [CLS], in order."""
    frozen = eval_frozen()
    images = [plain_centre(image, 16) for image in frozen.splits["val"].source[:5]]
    features, labels = next(frozen.read("val", [[(None, i) for i in range(5)]]))
    close(features, plain_features(frozen.encoder, images))
    assert labels.tolist() == [0, 1, 2, 3, 4]
    x = ser.normalise(torch.stack(images) / 255)
    close(features[:, 16:], frozen.encoder([x])[0].cls)

# ---- Images --------------------------------------------------------------------------------------
def torchvision_centre(image, size):
    """Resize and CenterCrop on a tensor, or on an image of Pillow's, as the release has it."""
    short = round(size * 256 / 224)
    image = TF.resize(image, short, InterpolationMode.BICUBIC, antialias=True)
    return TF.center_crop(image, size)

def test_centre_crops_are_where_torchvision_puts_them_for_every_size():
    """Protocol: Resize(256), CenterCrop(224); 368 x 500 is cut at 62, not at 61. On noise, a pixel
    aside is 80 gray levels away; on equal places floats and integers differ by single ones."""
    noise = torch.randint(256, (3, 120, 120), dtype=torch.uint8, generator=seeded())
    sizes = [(h, w) for h in range(16, 60, 3) for w in range(16, 120, 7)]
    images = [noise[:, :h, :w] for h, w in sizes]
    crops = [(eval_linear.centre_crop(x, 16), torchvision_centre(x, 16)) for x in images]
    large = noise.repeat(1, 4, 5)[:, :368, :500]
    crops.append((eval_linear.centre_crop(large, 224), torchvision_centre(large, 224)))
    for (h, w), (ours, theirs) in zip([*sizes, (368, 500)], crops):
        assert (ours.float() - theirs.float()).abs().mean() < 1, (h, w)

@pytest.mark.parametrize("h, w", [(24, 40), (40, 24), (16, 16), (31, 47)])
def test_centre_crops_are_pillows_bicubic_to_one_gray_level(h, w):
    """torchvision on tensors against Pillow, which the release uses."""
    image = torch.randint(256, (3, h, w), dtype=torch.uint8, generator=seeded())
    pillow = torchvision_centre(Image.fromarray(image.permute(1, 2, 0).numpy()), 16)
    difference = eval_linear.centre_crop(image, 16).int() - TF.pil_to_tensor(pillow).int()
    assert difference.abs().max() <= 1

def test_images_that_are_ready_are_resized_and_not_cropped():
    """ImageNet-C and -P are cropped already: a second crop changes every number."""
    images, labels = ser.draw_images(2, 20, 0)
    split = Split(images, labels, list(range(6)), ready=True)
    assert torch.equal(Crops(split, 20, 0)[None, 1][0], images[1])
    assert torch.equal(Crops(split, 16, 0)[None, 1][0], plain_resize(images[1], 16, 16))

def test_training_crops_depend_on_seed_epoch_and_index_alone():
    """Every draw comes from its key: workers, ranks and a resumed run see the same crops."""
    split = Split(*ser.draw_images(4, 40, 0), list(range(6)))
    crops = Crops(split, 16, seed=3)
    first = crops[2, 1][0]
    torch.rand(9)
    assert torch.equal(Crops(split, 16, seed=3)[2, 1][0], first)
    assert not torch.equal(crops[3, 1][0], first)
    assert not torch.equal(Crops(split, 16, seed=4)[2, 1][0], first)

def test_training_crops_have_any_area_from_a_twelfth_up_and_half_are_flipped():
    """Protocol: RandomResizedCrop (.08, 1) and a flip, on an image whose pixels are places."""
    columns = torch.arange(200, dtype=torch.uint8).expand(200, 200)
    image = torch.stack([columns, columns.T, columns])
    crops = Crops(Split(image[None], torch.tensor([0]), [0]), 100, seed=0)
    drawn = torch.stack([crops[epoch, 0][0] for epoch in range(300)]).float()
    across = drawn[:, 0, 0, -1] - drawn[:, 0, 0, 0]
    down = drawn[:, 1, -1, 0] - drawn[:, 1, 0, 0]
    area = across.abs() * down / 200 ** 2
    assert 0.06 < area.min() < 0.12
    assert 0.9 < area.max() <= 1
    assert 0.43 < area.mean() < 0.53
    assert 0.4 < (across < 0).float().mean() < 0.6

def test_an_epoch_permutes_the_images_anew_and_leaves_the_last_part_out():
    """Protocol: shuffled by (seed, epoch); 11 images in batches of 4 are two batches."""
    cfg = Settings(epochs=3, seed=5)
    batches = list(eval_linear.training_keys(11, 4, 1, cfg))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    orders = {1: [], 2: []}
    for epoch, index in sum(batches, []):
        orders[epoch].append(index)
    assert orders[1] != orders[2]
    assert len(set(orders[1])) == len(set(orders[2])) == 8

def test_test_sets_are_matched_by_class_name_and_scored_among_their_own_and_all(tree, tmp_path):
    """ImageNet-R has 200 of the 1000 classes; a label is that of the training class of its name."""
    (tmp_path / "few").mkdir()
    for name in ("class2", "class0"):
        os.symlink(tree / "val" / name, tmp_path / "few" / name)
    argv = ["--data", str(tree), "--test", f"few={tmp_path}/few", f"all={tree}/val"]
    cfg = ser.parse(argv, Settings, repeatable=("--test",))
    again = [*argv[:4], "--test", argv[4]]
    assert cfg == ser.parse(again, Settings, repeatable=("--test",))
    classes, splits = collect(cfg, 16)
    assert classes == ["class0", "class1", "class2"]
    assert list(splits) == ["train", "val", "few", "few, of 3", "all"]
    for name, among in (("few", [0, 2]), ("few, of 3", [0, 1, 2])):
        assert splits[name].labels.tolist() == [0] * 5 + [2] * 5
        assert splits[name].among == among
    assert "'few, of 3' is what the paper" in splits["few, of 3"].note
    assert splits["all"].among == [0, 1, 2] and splits["all"].note == ""

def test_a_set_that_is_scored_twice_is_read_once(tree, checkpoint, tmp_path, monkeypatch):
    """Two rows of ImageNet-R, one table of features; its broken file is named once."""
    few = tmp_path / "few" / "class1"
    few.mkdir(parents=True)
    for path in (tree / "val" / "class1").iterdir():
        os.symlink(path, few / path.name)
    (few / "broken.png").write_bytes(b"")
    read = []
    decode = ser.read_image

    def counting(path):
        read.append(path)
        return decode(path)
    monkeypatch.setattr(ser, "read_image", counting)
    cfg = eval_settings(tree, checkpoint, test=(f"few={few.parent}",), knn=True)
    result = evaluate(cfg)
    assert len(read) == 33 + 15 + 6
    assert result["knn"]["few"]["top1"] == pytest.approx(100 * 5 / 6)     # one class to vote for
    assert result["knn"]["few, of 3"]["top1"] < 100 * 5 / 6
    assert list(result["broken"]) == ["few"]

def test_numbered_folders_are_places_in_the_sorted_classes(tmp_path):
    """ImageNet-V2 as downloaded: 0..11, of which "10" sorts before "2"; 11 of 12 are an error."""
    data = eval_tree(tmp_path / "data", train=1, val=1, classes=12, prefix="name")
    names = sorted(f"name{i}" for i in range(12))
    for number in torch.randperm(12, generator=seeded()).tolist():
        folder = tmp_path / "v2" / str(number)
        folder.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / f"{names[number]}.png")
    cfg = Settings(data=str(data), test=(f"v2={tmp_path}/v2",))
    _, splits = collect(cfg, 16)
    found = [Path(path).stem for path in splits["v2"].source]
    assert found == [names[label] for label in splits["v2"].labels.tolist()]
    assert len(found) == 12 and "as in ImageNet-V2" in splits["v2"].note
    (tmp_path / "v2" / "11").rename(tmp_path / "v2" / "12")
    with pytest.raises(UserError, match="12 folders match no training class: 0 1 10 12 2"):
        collect(cfg, 16)

def test_training_classes_that_are_numbers_are_matched_by_name(tmp_path):
    """A data set whose classes are called 0..11 sorts them as text, and so its test sets."""
    data = eval_tree(tmp_path / "data", train=1, val=1, classes=12, prefix="")
    classes, splits = collect(Settings(data=str(data), test=(f"again={data}/val",)), 16)
    assert classes[:3] == ["0", "1", "10"]
    names = [Path(path).parent.name for path in splits["again"].source]
    assert names == [classes[label] for label in splits["again"].labels.tolist()]

def test_select_split_holds_out_training_images_and_chooses_on_them(
        tree, checkpoint, monkeypatch):
    """The release chooses the rate on a part of train; none is on both sides; k-NN has all."""
    cfg = eval_settings(tree, checkpoint, select_split=0.3, cache=True, lr=(1e-9, 3.0))
    _, splits = collect(cfg, 16)
    assert len(splits["train"].labels) == 23 and len(splits["held-out"].labels) == 10
    both = set(splits["train"].source) | set(splits["held-out"].source)
    assert len(both) == 33
    for split in (splits["train"], splits["held-out"]):
        names = [f"class{label}" for label in split.labels.tolist()]
        assert names == [Path(path).parent.name for path in split.source]
    neighbours = []

    def counting(train, *rest):
        neighbours.append(len(train))
        return knn(train, *rest)
    monkeypatch.setattr(eval_linear, "knn", counting)
    result = evaluate(cfg)
    rates = result["linear"]["rates"]
    assert result["linear"]["best"] == max(rates, key=lambda row: row["held-out"]["top1"])
    assert result["linear"]["chosen_on"] == "held-out"
    assert neighbours == [33]

# ---- Heads ---------------------------------------------------------------------------------------
def toy_batches(n, width=5, classes=3):
    g = seeded()
    return [(torch.randn(6, width, generator=g), torch.randint(classes, (6,), generator=g))
            for _ in range(n)]

def fitted(heads, data):
    optimizer = torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9)
    assert list(fit(heads, optimizer, data, 0, len(data))) == list(range(1, len(data) + 1))
    return heads

@pytest.mark.parametrize("kind, hidden", [(Heads, ()), (MLPHeads, (7, 4))])
def test_a_sweep_trains_each_rate_as_torch_would_train_it_alone(kind, hidden, monkeypatch):
    """SGD, momentum .9, no weight decay, cosine to zero per step without warmup, for every rate."""
    monkeypatch.setattr(kind, "hidden", hidden)
    data = toy_batches(12)
    lrs = [0.02, 0.3, 1.0]
    heads = kind(lrs, 3, 5, seed=1)
    alone = []
    for _ in lrs:
        layers = []
        for weight, bias in zip(heads.weights, heads.biases):
            layer = torch.nn.Linear(weight.shape[2], weight.shape[1])
            layer.load_state_dict({"weight": weight[0].clone(), "bias": bias[0, 0].clone()})
            layers += [layer, torch.nn.ReLU()]
        alone.append(torch.nn.Sequential(*layers[:-1]))
    fitted(heads, data)
    for model, lr in zip(alone, lrs):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    x = data[0][0]
    expected = torch.stack([model(x) for model in alone], dim=1)
    assert (expected[:, 1] - expected[:, 2]).abs().max() > 0.1
    close(heads(x), expected, 1e-4)

def test_one_rate_equals_the_same_rate_within_a_sweep():
    """The batched product changes no head."""
    found = {}
    for rates in ((3.0,), (0.1, 3.0, 10.0)):
        frozen = eval_frozen(lr=rates, epochs=2, cache=True, out="/nowhere/x.json")
        heads = fitted(Heads(rates, 6, 32, 0), toy_batches(6, 32, 6))
        found[rates] = accuracy(heads, *frozen.table("val"), range(6))
    assert found[(3.0,)][0] == found[(0.1, 3.0, 10.0)][1]

def test_a_rate_that_diverges_harms_no_other(monkeypatch):
    """Nothing joins the heads: beside a head of not-a-numbers, the other is the one it is alone."""
    monkeypatch.setattr(MLPHeads, "hidden", (8, 8))
    data = toy_batches(30)
    both = fitted(MLPHeads([0.1, 1e30], 3, 5, seed=0), data)
    alone = fitted(MLPHeads([0.1], 3, 5, seed=0), data)
    assert not both(data[0][0])[:, 1].isfinite().all()
    close(both(data[0][0])[:, :1], alone(data[0][0]))

def test_heads_start_from_normal_weights_and_zero_biases():
    """N(0, .01), bias 0, alike for each rate; He's N(0, 2 / fan-in) before a ReLU."""
    heads = Heads([1.0, 2.0], 100, 200, seed=0)
    assert len(heads.weights) == 1 and heads.weights[0].shape == (2, 100, 200)
    assert heads.weights[0].std().item() == pytest.approx(0.01, rel=0.02)
    assert torch.equal(heads.weights[0][0], heads.weights[0][1])
    mlp = MLPHeads([1.0], 100, 200, seed=0)
    stds = [weight.std().item() for weight in mlp.weights]
    assert stds == pytest.approx([0.1, math.sqrt(2 / 1024), 0.01], rel=0.02)
    assert [weight.shape[1] for weight in mlp.weights] == [1024, 1024, 100]
    for bias in (*heads.biases, *mlp.biases):
        assert bias.abs().max() == 0

def test_a_linear_problem_with_a_known_solution_is_solved():
    """Classes that a hyperplane separates are told apart, and the weights point its way."""
    g = seeded()
    normal = F.normalize(torch.randn(6, generator=g), dim=0)
    x = torch.randn(400, 6, generator=g)
    y = (x @ normal > 0).long()
    x += (2 * y[:, None] - 1) * normal     # a margin
    batches = [(x[i:i + 50], y[i:i + 50]) for i in range(0, 400, 50)] * 40
    heads = fitted(Heads([0.001, 1.0], 2, 6, seed=0), batches)
    assert accuracy(heads, x, y, [0, 1])[1] == {"top1": 100.0, "top5": 100.0}
    found = heads.weights[0][1, 1] - heads.weights[0][1, 0]
    assert F.cosine_similarity(found, normal, dim=0) > 0.95

def test_accuracy_counts_by_rank_among_the_given_classes_only():
    """Top-1 and top-5; a set with fewer classes is scored among its own; label -1 is wrong."""
    heads = Heads([1.0], 8, 8, seed=0)
    heads.weights[0].data = torch.eye(8)[None]
    x = torch.arange(8.0).flip(0).expand(4, 8)     # class 0 first, 7 last
    y = torch.tensor([0, 4, 5, -1])
    assert accuracy(heads, x, y, range(8)) == [{"top1": 25.0, "top5": 50.0}]
    few = torch.tensor([4, 5, 7, 4])
    assert accuracy(heads, x, few, [4, 5, 7]) == [{"top1": 50.0, "top5": 100.0}]

def test_the_kept_head_gives_the_accuracy_of_the_table(tree, checkpoint, tmp_path):
    """ImageNet-C and -P are scored by it: features @ weight.T + bias."""
    cfg = eval_settings(tree, checkpoint)
    result = evaluate(cfg)
    encoder, _, digest = eval_linear.frozen_encoder(cfg)
    head = eval_linear.load_head(checkpoint.with_name("eval-head.pt"), digest)
    val, truth = plain_split(tree / "val")
    crops = torch.stack([plain_centre(image, 16) for image in val])
    features = eval_linear.encode(encoder, crops, head.blocks)
    top1 = plain_top1(features @ head.weight.T + head.bias, truth)
    assert top1 == pytest.approx(result["linear"]["best"]["val"]["top1"])
    other = eval_linear.frozen_encoder(dataclasses.replace(cfg, random_init=True))[2]
    for name, wanted, why in (("eval-head.pt", other, "is of the encoder"),
                              ("none.pt", digest, "missing"), ("last.pt", digest, "no head")):
        with pytest.raises(UserError, match=why):
            eval_linear.load_head(checkpoint.with_name(name), wanted)

def test_mlp_heads_are_trained_by_the_command_and_other_protocols_bring_their_own(tree, checkpoint):
    """--mlp has files of its own; heads= and collect= serve the scripts of paper/evaluations."""
    cfg = eval_settings(tree, checkpoint, mlp=True, cache=True, lr=(0.3,), epochs=5)
    result = evaluate(cfg)
    assert cfg.result.name == "eval-cache-mlp.json" and "MLP heads on" in result["protocol"]
    assert not cfg.beside("head").exists()

    class Small(MLPHeads):
        name = "small"
        hidden = (4,)

    def swapped(cfg, size):
        classes, splits = collect(cfg, size)
        return classes, splits | {"val": splits["train"]}
    cfg = eval_settings(tree, checkpoint)
    result = evaluate(cfg, collect=swapped, heads=Small)
    assert "small heads on" in result["protocol"] and result["images"]["val"] == 33

class Dark(Crops):
    """Sees every image as the first one, half as bright."""

    def __getitem__(self, key):
        image, label = super().__getitem__((key[0], 0))
        return image // 2, int(self.split.labels[key[1]])

def test_every_part_of_an_evaluation_takes_the_crops_of_the_protocol(fewer, checkpoint):
    """crops= reaches the neighbours, the untrained encoder's, and the token maps."""
    cfg = Settings(checkpoint=str(checkpoint), workers=0, test=(), knn=True, equivariance=True)
    result = evaluate(cfg, crops=Dark)
    first = plain_centre(ser.draw_images(1000, 16, 102)[0][0], 16) // 2
    x = ser.normalise(first / 255).expand(125, -1, -1, -1)
    found = eval_linear.equivariance(ser.load_encoder(checkpoint), x, 1, "rot90")
    row = result["equivariance"]["rows"][0]
    assert (row["element"], row["block"]) == ("rot90", 1)
    assert row["trained"] == pytest.approx(found, abs=1e-4)
    for name in ("knn", "knn_untrained"):     # all features are equal: every vote is the same
        assert result[name]["val"]["top1"] == pytest.approx(100 / 6, abs=1)

# ---- k-NN ----------------------------------------------------------------------------------------
def test_knn_is_a_loop_over_neighbours_with_exponential_votes():
    """Cosine, k = 20, weights exp(s / .07), as DINO; 5, 10 or 60 neighbours vote otherwise."""
    g = seeded(4)
    train = torch.randn(90, 9, generator=g) + 3     # alike, so that many votes count
    labels = torch.randint(5, (90,), generator=g)
    test = torch.randn(60, 9, generator=g) + 3
    truth = torch.randint(5, (60,), generator=g)
    shares = {k: plain_knn(train, labels, test, truth, k) for k in (5, 10, 20, 60)}
    assert knn(train, labels, test, truth) == pytest.approx(shares[20])
    assert shares[20] not in (shares[5], shares[10], shares[60])
    assert knn(train, labels, train, labels, k=1) == 1.0
    truth[:30] = -1
    assert knn(train, labels, test, truth) <= 0.5
    labels[::3] = -1     # unreadable images are nobody's neighbours
    share = plain_knn(train[labels >= 0], labels[labels >= 0], test, truth, 20)
    assert knn(train, labels, test, truth) == pytest.approx(share)

def test_knn_of_the_command_takes_twenty_neighbours_by_the_last_block():
    """On random labels another k, or another block, would be seen."""
    frozen = eval_frozen(n=120)
    for seed, name in enumerate(("train", "val")):
        labels = torch.randint(6, (120,), generator=seeded(seed))
        frozen.splits[name] = frozen.splits[name]._replace(labels=labels)
    train, labels = frozen.table("train")
    test, truth = frozen.table("val")
    shares = [plain_knn(train[:, -16:], labels, test[:, -16:], truth, k) for k in (20, 10, 60)]
    shares.append(plain_knn(train[:, :16], labels, test[:, :16], truth, 20))
    assert shares[0] not in shares[1:]
    assert eval_linear.knn_splits(frozen) == {"val": {"top1": pytest.approx(100 * shares[0])}}
    # A set of two classes has neighbours of those alone.
    frozen.splits["val"] = frozen.splits["val"]._replace(among=[1, 4])
    near = (labels == 1) | (labels == 4)
    share = plain_knn(train[near][:, -16:], labels[near], test[:, -16:], truth, 20)
    assert eval_linear.knn_splits(frozen)["val"]["top1"] == pytest.approx(100 * share)

# ---- Equivariance --------------------------------------------------------------------------------
class Pixels:
    """An encoder whose map after block 1 is the image itself, plus `same` everywhere."""
    grid, patch_size, depth = 8, 1, 2

    def __init__(self, same=0.0, size=1.0):
        self.same = same
        self.size = size

    def __call__(self, images, layers):
        return [ser.Encoded(x[:, :, 0, 0], {1: self.size * x + self.same}, {}) for x in images]

def test_the_equivariance_of_an_equivariant_map_is_one():
    """A.2: exact for flips and turns when the map is the pixels themselves."""
    images = torch.randn(40, 3, 8, 8, generator=seeded())
    chance = (32 / 32 + 8 / 8) / 40 / 64     # 32 images, then 8
    for element in ("hflip", "rot90"):
        found = eval_linear.equivariance(Pixels(), images, 1, element)
        expected = dict(retrieval=1, score=1, centred=1, chance=chance)
        assert found == pytest.approx(expected, abs=1e-5)

def test_the_score_misleads_where_all_tokens_are_alike():
    """Maps that do not move: the score is 1, retrieval at chance, the centred cosine zero."""
    class Still(Pixels):
        def __call__(self, images, layers):
            shapes = [x.shape for x in images]
            noise = [torch.randn(shape, generator=seeded(i)) for i, shape in enumerate(shapes)]
            return super().__call__(noise, layers)

    images = torch.randn(64, 3, 8, 8, generator=seeded())
    found = eval_linear.equivariance(Still(100.0), images, 1, "rot90")
    assert found["score"] > 0.999 and found["retrieval"] < 0.005 and abs(found["centred"]) < 0.05

@torch.no_grad()
def plain_score(encoder, images, layer, element):
    """A.2 an image at a time: mean cos(rho_g f(x), f(rho_g x)), g = g2 g1^-1, as a loop."""
    cosines = []
    still = 0
    for part, x in enumerate(images.split(32)):
        g1, g2 = (ser.sample_geometry(len(x), encoder.grid, elements=(element,),
                                      generator=ser.rng(element, part, view)) for view in (1, 2))
        for i in range(len(x)):
            one = [ser.Geometry(g.flip[i:i + 1], g.turns[i:i + 1], g.grid) for g in (g1, g2)]
            g = ser.relative(one[1], one[0])
            f = [encoder([image], [layer])[0].maps[layer][0] for image in
                 (x[i:i + 1], rho(g, x[i:i + 1], encoder.patch_size))]
            if layer == encoder.depth:
                f = [encoder.norm(z.permute(1, 2, 0)).permute(2, 0, 1) for z in f]
            moved = rho(g, f[0][None])[0]
            cosines.append(F.cosine_similarity(moved, f[1], dim=0).mean().item())
            still += not (g.flip or g.turns) and g.grid == (encoder.grid, encoder.grid)
    return sum(cosines) / len(cosines), still / len(cosines)

@pytest.mark.parametrize("element, identity", [("rot90", 1 / 4), ("hflip", 1 / 2), ("scale", 0)])
def test_the_score_is_that_of_the_appendix(element, identity):
    """A.2: g1 and g2 from G, the identity among them; the final LayerNorm after the last block."""
    torch.manual_seed(3)
    encoder = ser.ViT(**TINY_VIT).eval()
    encoder.norm.weight.data.uniform_(-1, 3)
    images = torch.randn(70, 3, 16, 16, generator=seeded())
    for layer in (1, 3):
        found = eval_linear.equivariance(encoder, images, layer, element)
        score, still = plain_score(encoder, images, layer, element)
        assert found["score"] == pytest.approx(score, abs=1e-5)
    assert abs(still - identity) < 0.15 or element == "scale"

@pytest.mark.parametrize("element", ["rot90", "hflip"])
def test_retrieval_and_centred_cosine_are_never_of_the_identity(element):
    """Token by token over 32 images that are turned by 90, 180, 270 degrees in turn, or flipped."""
    torch.manual_seed(3)
    encoder = ser.ViT(**TINY_VIT).eval()
    x = torch.randn(32, 3, 16, 16, generator=seeded())
    flip = torch.full((32,), element == "hflip")
    turns = torch.tensor([1, 2, 3] * 11)[:32] if element == "rot90" else torch.zeros(32).long()
    h = ser.Geometry(flip, turns, (4, 4))
    with torch.no_grad():
        z = rho(h, encoder([x], [2])[0].maps[2]).flatten(2).mT
        z_prime = encoder([rho(h, x, 4)], [2])[0].maps[2].flatten(2).mT
    nearest = 0
    for token, own in zip(z.flatten(0, 1), range(32 * 16)):
        cosine = F.cosine_similarity(token[None], z_prime.flatten(0, 1))
        nearest += cosine.argmax().item() == own
    a = z.flatten(0, 1) - z.flatten(0, 1).mean(0)
    b = z_prime.flatten(0, 1) - z_prime.flatten(0, 1).mean(0)
    found = eval_linear.equivariance(encoder, x, 2, element)
    assert found["retrieval"] == pytest.approx(nearest / (32 * 16))
    assert found["centred"] == pytest.approx(F.cosine_similarity(a, b).mean().item(), abs=1e-5)

def test_the_chance_of_retrieval_counts_the_tokens_that_are_searched():
    """Scaling draws a grid for every 32 images; the last part is shorter."""
    images = torch.randn(70, 3, 8, 8, generator=seeded())
    found = eval_linear.equivariance(Pixels(), images, 1, "scale")
    chance = 0.0
    for part, n in enumerate((32, 32, 6)):
        generator = ser.rng("scale", part, 2)
        H, W = ser.sample_geometry(n, 8, elements=("scale",), generator=generator).grid
        chance += n / 70 / (n * H * W)
    assert found["chance"] == pytest.approx(chance)
    assert abs(chance - 3 / 70 / 64) > 1e-5

def test_unreadable_images_are_left_out_of_the_equivariance_and_counted(tmp_path, capsys):
    """A black picture would be an image of its own; without any, there is nothing to measure."""
    tree = eval_tree(tmp_path / "data")
    checkpoint = eval_checkpoint(tmp_path / "run")
    argv = ["--data", tree, "--checkpoint", checkpoint, "--workers", 0, "--equivariance"]
    argv = [str(word) for word in argv]
    assert eval_linear.main(argv) == 0
    whole = json.loads(checkpoint.with_name("eval-equivariance.json").read_text())
    (tree / "val" / "class1" / "999.png").write_bytes(b"no image")
    capsys.readouterr()
    assert eval_linear.main(argv) == 0
    result = json.loads(checkpoint.with_name("eval-equivariance.json").read_text())
    assert result["equivariance"] == whole["equivariance"] | {"unreadable": 1}
    assert "1 images cannot be read and are left out" in capsys.readouterr().out
    for path in (tree / "val").glob("*/*.png"):
        path.write_bytes(b"")
    assert "none of 16 images of val can be read" in eval_command(argv, capsys)

def test_the_untrained_encoder_alone_has_one_column(fewer, checkpoint, capsys):
    """--random-init has nothing trained to stand beside it, in no table."""
    argv = ["--checkpoint", str(checkpoint), "--knn", "--random-init"]
    assert eval_linear.main(argv) == 0
    result = json.loads(checkpoint.with_name("eval-knn-random-init.json").read_text())
    assert "knn_untrained" not in result
    for row in result["equivariance"]["rows"]:
        assert set(row) == {"element", "block", "untrained"}
    out = capsys.readouterr().out
    assert " -> " not in out and "20-NN, untrained" not in out

def test_equivariance_of_any_data_is_printed_for_every_block_beside_the_untrained(
        tree, checkpoint, capsys):
    """--equivariance: a row per element and block; nothing is trained."""
    argv = ["--data", tree, "--checkpoint", checkpoint, "--workers", 0, "--equivariance"]
    assert eval_linear.main([str(word) for word in argv]) == 0
    result = json.loads(checkpoint.with_name("eval-equivariance.json").read_text())
    found = result["equivariance"]
    assert "linear" not in result and "knn" not in result
    assert (found["images"], found["unreadable"]) == (15, 0)
    places = [(row["element"], row["block"]) for row in found["rows"]]
    assert places == [(e, b) for e in ("rot90", "hflip", "scale") for b in (1, 2, 3)]
    val, _ = plain_split(tree / "val")
    x = ser.normalise(torch.stack([plain_centre(image, 16) for image in val]) / 255)
    trained = ser.load_encoder(checkpoint)
    torch.manual_seed(0)
    untrained = ser.ViT(**trained.shape)
    out = capsys.readouterr().out
    for row in found["rows"]:
        for name, encoder in (("untrained", untrained), ("trained", trained)):
            expected = eval_linear.equivariance(encoder, x, row["block"], row["element"])
            assert row[name] == pytest.approx(expected, abs=1e-4)
        before, after = row["untrained"], row["trained"]
        shown = [f"{before[m]:.3f} -> {after[m]:.3f}" for m in ("retrieval", "score", "centred")]
        shown.append(f"{before['chance']:.5f}")
        title = f"{row['element']}, after block {row['block']}"
        line = next(line for line in out.splitlines() if title in line)
        assert line.replace(title, "").split() == " ".join(shown).split()
    assert "0.00417" in out and "proves nothing" in out

# ---- The command ---------------------------------------------------------------------------------
@pytest.fixture
def fewer(monkeypatch):
    """An eighth of the drawn images."""
    draw = ser.draw_images
    monkeypatch.setattr(ser, "draw_images", lambda n, size, seed: draw(n // 8, size, seed))

def test_drawn_images_show_untrained_trained_and_chance(fewer, checkpoint, capsys):
    """README's first command: retrieval, A.2's score, 20-NN on images held out, and the heads."""
    argv = ["--checkpoint", str(checkpoint), "--epochs", "1"]
    assert eval_linear.main(argv) == 0
    out = capsys.readouterr().out
    result = json.loads(checkpoint.with_name("eval.json").read_text())
    train, val = (ser.draw_images(n, 16, seed) for n, seed in ((2048, 101), (1000, 102)))
    shares = []
    trained = ser.load_encoder(checkpoint)
    for encoder in (eval_linear.untrained(0, trained.shape), trained):
        tables = []
        for images, labels in (train, val):
            crops = torch.stack([plain_centre(image, 16) for image in images])
            tables += [eval_linear.encode(encoder, crops, 1), labels]
        shares.append(100 * knn(*tables))
    shown = [line.split() for line in out.splitlines() if "20-NN" in line]
    assert shown == [["20-NN", f"{shares[1]:.2f}"], ["20-NN,", "untrained", f"{shares[0]:.2f}"]]
    assert shares[0] != shares[1]
    assert result["images"] == {"train": 256, "val": 125} and result["classes"] == 6
    assert "rot90, after block 1" in out and "rate 0.003" in out
    assert "16.67 / 83.33" in out and "(best)" in out

def test_the_result_says_what_was_evaluated_on_what_and_how(tree, checkpoint, capsys):
    """JSON beside the checkpoint, one per protocol; chance in it and in the table."""
    argv = ["--data", str(tree), "--checkpoint", str(checkpoint), "--workers", "0", "--epochs", "2"]
    assert eval_linear.main([*argv, "--cache"]) == 0
    assert eval_linear.main([*argv, "--knn", "--random-init"]) == 0
    screen = capsys.readouterr().out
    assert screen.count("chance") == 2 and "33.33" in screen
    assert "not the paper's protocol" in screen and "val itself, which flatters it" in screen
    assert "of the last 2 blocks, 2 epochs (of 4: [CLS] enters after block 1 of 3)" in screen
    linear = json.loads(checkpoint.with_name("eval-cache.json").read_text())
    vote = json.loads(checkpoint.with_name("eval-knn-random-init.json").read_text())
    assert linear["step"] == 7 and linear["images"] == {"train": 33, "val": 15}
    assert linear["settings"]["epochs"] == 2 and linear["settings"]["data"] == str(tree)
    assert linear["chance"] == {"val": {"top1": pytest.approx(100 / 3), "top5": 100.0}}
    assert len(linear["linear"]["rates"]) == 8
    assert linear["linear"]["best"] in linear["linear"]["rates"]
    assert {"ranks", "minutes", "protocol"} <= set(linear)
    assert "linear" not in vote and vote["knn"]["k"] == 20 and vote["step"] == 0
    assert not list(checkpoint.parent.glob("*.tmp"))

def test_random_init_is_the_encoder_that_the_run_began_with(tmp_path):
    """The comparison differs in training alone: same shape, same seed, same draws."""
    checkpoint = eval_checkpoint(tmp_path, seed=5)
    cfg = Settings(checkpoint=str(checkpoint), random_init=True)
    encoder, step, _ = eval_linear.frozen_encoder(cfg)
    began = ser.build(Config(**TINY_VIT, moco_hidden=8, equiv_layers=(1,), seed=5)).base.encoder
    for (name, p), q in zip(encoder.named_parameters(), began.parameters()):
        assert torch.equal(p, q), name
    assert step == 0 and not encoder.training

def test_an_interrupted_run_continues_to_the_same_result(tree, checkpoint, monkeypatch, capsys):
    """Heads, momentum, order and crops go on as if nothing had happened; the state is removed."""
    cfg = eval_settings(tree, checkpoint, epochs=4)
    whole = evaluate(cfg)["linear"]
    save = ser.save_whole
    saved = []

    def killed(path, state):     # after the third epoch, before it is saved
        saved.append(path)
        if len(saved) == 3:
            raise KeyboardInterrupt
        save(path, state)
    monkeypatch.setattr(ser, "save_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(cfg)
    monkeypatch.undo()
    state = checkpoint.with_name("eval-state.pt")
    assert torch.load(state)["step"] == 2 * 4
    checkpoint.with_name("eval.json").unlink()
    for change in (dict(epochs=5), dict(seed=1), dict(lr=(1.0,)), dict(batch_size=4)):
        name = next(iter(change))
        with pytest.raises(UserError, match=f"of an interrupted evaluation with another {name}:"):
            evaluate(dataclasses.replace(cfg, **change))
    with pytest.raises(UserError, match="of an interrupted evaluation with another heads:"):
        evaluate(cfg, heads=type("Others", (Heads,), {"name": "other"}))
    steps = []
    counted = eval_linear.fit

    def counting(*arguments):
        for done in counted(*arguments):
            steps.append(done)
            yield done
    monkeypatch.setattr(eval_linear, "fit", counting)
    assert evaluate(dataclasses.replace(cfg, workers=1))["linear"] == whole
    assert steps == list(range(9, 17)) and not state.exists()

def test_a_broken_image_of_an_interrupted_training_is_still_named(tmp_path, monkeypatch):
    """Also where all epochs were done, so that nothing reads the training images again."""
    tree = eval_tree(tmp_path / "data")
    broken = tree / "train" / "class1" / "999.png"
    broken.write_bytes(b"no image")
    cfg = eval_settings(tree, eval_checkpoint(tmp_path / "run"))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(eval_linear, "accuracy", interrupted)
        evaluate(cfg)
    assert evaluate(cfg)["broken"] == {"train": [str(broken)]}

def eval_rank(rank, ranks, folder):
    """Two evaluations on one of several ranks; only the first may write."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    if rank > 0:
        ser.save_whole = eval_linear.write_json = lambda *_: os._exit(3)
    for cfg in rank_settings(Path(folder), "ranks"):
        evaluate(cfg)
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def rank_settings(folder, name):
    shared = dict(batch_size=7, test=(f"again={folder}/data/val",))
    cfg = eval_settings(folder / "data", folder / "last.pt", **shared)
    yield dataclasses.replace(cfg, out=f"{folder}/{name}.json")
    yield dataclasses.replace(cfg, out=f"{folder}/{name}-cache.json", cache=True, select_split=0.3)

def test_two_gloo_ranks_give_the_accuracy_of_one_process_exactly(tmp_path):
    """Validation of 15 images in batches of 7: none is counted twice, none is left out."""
    eval_tree(tmp_path / "data")
    eval_checkpoint(tmp_path)
    run_ranks(eval_rank, 2, tmp_path)
    for cfg in rank_settings(tmp_path, "one"):
        evaluate(cfg)
        one = json.loads(cfg.result.read_text())
        two = json.loads(Path(cfg.out.replace("one", "ranks")).read_text())
        assert (one["ranks"], two["ranks"]) == (1, 2) and one["images"]["val"] == 15
        assert one["linear"] == two["linear"] and one.get("knn") == two.get("knn")
        for row in two["linear"]["rates"]:
            assert row["val"] == row["again"]

def test_a_broken_image_teaches_nothing_counts_as_wrong_and_is_named_once(tmp_path, capfd):
    """A corrupt file stays in the denominator; more than three, or 1 in 1000, stop it."""
    tree = eval_tree(tmp_path / "data")
    checkpoint = eval_checkpoint(tmp_path / "run")
    for part in ("train", "val"):
        (tree / part / "class1" / "999.png").write_bytes(b"no image")
    argv = ["--data", str(tree), "--checkpoint", str(checkpoint), "--workers", "0", "--epochs", "2"]
    assert eval_linear.main(argv) == 0
    out, err = capfd.readouterr()
    assert out.count("1 broken images in val, for example") == 1 and "Traceback" not in err
    result = json.loads(checkpoint.with_name("eval.json").read_text())
    assert result["images"]["val"] == 16
    assert [len(files) for files in result["broken"].values()] == [1, 1]
    for row in result["linear"]["rates"]:
        assert row["val"]["top5"] == pytest.approx(100 * 15 / 16)
    for n in range(4):
        (tree / "val" / "class2" / f"x{n}.png").write_bytes(b"")
    assert eval_linear.main([*argv, "--knn"]) == 2
    assert "5 of the 20 images of val cannot be read" in capfd.readouterr().err

@pytest.mark.parametrize("flags, words", [
    ("--nonsense 1", "--nonsense"), ("--lr 0.1 -1", "--lr -1"), ("--lr nan", "--lr nan"),
    ("--lr fast", "--lr"), ("--epochs 0", "--epochs 0"),
    ("--epochs 1 --epochs 2", "--epochs is given"),
    ("--select-split 1.5", "--select-split 1.5"), ("--test =x", "NAME=DIR"),
    ("--select-split 0.01", "--select-split 0.01"), ("--test nothing", "NAME=DIR"),
    ("--select-split 0.9", "--select-split 0.9"), ("--test val=TREE/val", "val is taken"),
    ("--test rate=TREE/val", "rate is taken"),
    ("--test a=TREE/nowhere", "no such folder"), ("--data TREE/nowhere", "no such folder"),
    ("--test a=TREE/val --test a=TREE/val", "a is taken"),
    ("--test flat=TREE/val/class1", "no class folders")])
def test_a_mistake_is_one_line_that_names_the_value_and_exit_code_2(
        flags, words, tree, checkpoint, capsys):
    """DESIGN: bad input gets a clear sentence, no traceback."""
    good = ["--checkpoint", checkpoint]
    if "--data" not in flags:
        good += ["--data", tree]
    given = flags.replace("TREE", str(tree)).split()
    assert words in eval_command([*good, *given], capsys)

def test_a_layout_that_cannot_be_evaluated_is_one_line(tmp_path, capsys):
    """Classes of val and of test sets are those of train, by name, and there are two or more."""
    tree = eval_tree(tmp_path / "data", train=2, val=1)
    good = ["--data", tree, "--checkpoint", eval_checkpoint(tmp_path / "run")]
    one = eval_tree(tmp_path / "one", train=1, val=1, classes=1)
    assert "only one class" in eval_command(["--data", one, *good[2:]], capsys)
    (tree / "val" / "class2").rename(tree / "val" / "class9")
    assert "match no training class: class9" in eval_command(good, capsys)
    (tree / "val" / "class9").rename(tmp_path / "away")
    assert "val lacks classes of train: class2" in eval_command(good, capsys)
    (tree / "val" / "class2").mkdir()
    assert "--data" in eval_command(good, capsys)
    (tmp_path / "away").rename(tree / "val" / "class2" / "below")
    (tmp_path / "test" / "class1").mkdir(parents=True)
    message = eval_command([*good, "--test", f"v2={tmp_path}/test"], capsys)
    assert "--test v2" in message and "no image" in message and "--data" not in message

@pytest.mark.parametrize("spoil", [
    lambda state: state.pop("shape"),
    lambda state: state.pop("config"),
    lambda state: state.clear(),
    lambda state: state.update(step="seven"),
    lambda state: state.update(shape={"dim": "wide"}),
    lambda state: state["shape"].update(depth=2),
    lambda state: state["model"].pop("base.encoder.norm.weight")])
def test_a_bad_checkpoint_is_one_line(spoil, tree, checkpoint, capsys):
    """Missing and mistyped parts are found before any work."""
    state = torch.load(checkpoint)
    spoil(state)
    torch.save(state, checkpoint)
    line = eval_command(["--data", tree, "--checkpoint", checkpoint], capsys)
    assert str(checkpoint) in line and "traceback" not in line

def test_no_checkpoint_and_a_damaged_one_are_one_line(tree, checkpoint, capsys):
    """The path is named, and what to do."""
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 255
    checkpoint.write_bytes(data)
    for path in (checkpoint, checkpoint.with_name("none.pt"), checkpoint.parent):
        assert str(path) in eval_command(["--data", tree, "--checkpoint", path], capsys)

def test_an_out_that_would_destroy_something_is_refused_before_any_work(
        tree, checkpoint, capsys, monkeypatch):
    """The checkpoint, a folder, a text, a head that is the checkpoint, a folder of no existence."""
    monkeypatch.setattr(eval_linear, "collect", None)
    folder = checkpoint.parent
    (folder / "text.json").write_text("notes")
    (folder / "folder.json").mkdir()
    os.link(checkpoint, folder / "my-head.pt")
    before = checkpoint.read_bytes()
    for out, words in (("last.pt", ".json"), ("res.pt", ".json"), ("text.json", "no result"),
                       ("folder.json", "no result"), ("no/x.json", "cannot write in")):
        argv = ["--data", tree, "--checkpoint", checkpoint, "--out", folder / out]
        assert words in eval_command(argv, capsys)
    argv = ["--data", tree, "--checkpoint", folder / "my-head.pt", "--out", folder / "my.json"]
    assert "is the checkpoint" in eval_command(argv, capsys)
    assert checkpoint.read_bytes() == before and (folder / "text.json").read_text() == "notes"

def test_a_result_of_something_else_is_not_overwritten(tree, checkpoint, tmp_path, monkeypatch):
    """Another data set, test set, split, seed or checkpoint: refused before any work."""
    cfg = eval_settings(tree, checkpoint, cache=True)
    evaluate(cfg)
    evaluate(dataclasses.replace(cfg, epochs=1, workers=1, data=f"{tree}/"))     # the same question
    before = cfg.result.read_text()
    monkeypatch.setattr(eval_linear, "collect", None)
    for change in (dict(data=str(tmp_path)), dict(test=("v2=x",)), dict(select_split=0.1),
                   dict(seed=1), dict(knn=True), dict(cache=False), dict(mlp=True)):
        name, = change
        with pytest.raises(UserError, match=f"--out .*another {name} .*remove it or choose"):
            evaluate(dataclasses.replace(cfg, out=str(cfg.result), **change))
    torch.save(torch.load(checkpoint) | {"step": 8}, checkpoint)
    with pytest.raises(UserError, match="--out .*another checkpoint"):
        evaluate(cfg)
    for other in ([1], {"settings": {"data": ""}, "sha256": "a"},
                  {"settings": {"test": []}, "sha256": "a"}):
        cfg.result.write_text(json.dumps(other))
        with pytest.raises(UserError, match="is no result"):
            evaluate(cfg)
    cfg.result.write_text(before)

def test_a_checkpoint_that_a_training_replaces_meanwhile_is_not_evaluated(checkpoint, monkeypatch):
    """Its weights, its step and its digest could be of three epochs."""
    load = ser.load_encoder

    def replaced(path):
        torch.save(torch.load(path) | {"step": 8}, path)
        return load(path)
    cfg = Settings(checkpoint=str(checkpoint))
    before = eval_linear.frozen_encoder(cfg)
    monkeypatch.setattr(ser, "load_encoder", replaced)
    with pytest.raises(UserError, match="was replaced while it was read"):
        eval_linear.frozen_encoder(cfg)
    monkeypatch.setattr(ser, "load_encoder", load)
    after = eval_linear.frozen_encoder(cfg)
    assert after[1] == 8 and after[2] != before[2]

class Dying(Crops):
    """Its loader processes die at the third image."""

    def __getitem__(self, key):
        if key[1] % 3 == 2:
            os._exit(9)
        return super().__getitem__(key)

def test_a_lost_loader_process_is_one_line(tree, checkpoint, monkeypatch, capsys):
    """What an out-of-memory killer does; there are no more of them than CPUs."""
    monkeypatch.setattr(evaluate, "__defaults__", (collect, Heads, Dying))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    argv = ["--data", tree, "--checkpoint", checkpoint, "--workers", 1000, "--knn"]
    line = eval_command(argv, capsys)
    assert "DataLoader worker" in line and "--workers" in line
    assert multiprocessing.active_children() == []

@pytest.mark.parametrize("place", ["encode", "fit"])
def test_loader_processes_are_released_on_every_way_out(place, tree, checkpoint, monkeypatch):
    """An error inside the reading of features, or of who reads them, whose traceback is kept."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    children = []

    def failing(*arguments):
        if place == "fit":
            next(arguments[2])
        children.extend(multiprocessing.active_children())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(eval_linear, place, failing)
    with pytest.raises(RuntimeError) as error:
        evaluate(eval_settings(tree, checkpoint, workers=1000))
    assert error.tb is not None and len(children) == 1
    assert multiprocessing.active_children() == []

def test_an_evaluation_without_training_leaves_the_state_of_an_interrupted_one(tree, checkpoint):
    """The same --out with --knn or --cache in between loses nothing."""
    for flag in ("knn", "cache"):
        out = str(checkpoint.with_name(f"{flag}.json"))
        cfg = eval_settings(tree, checkpoint, out=out, **{flag: True})
        cfg.beside("state").write_bytes(b"hours of work")
        evaluate(cfg)
        assert cfg.beside("state").read_bytes() == b"hours of work"

def test_a_damaged_state_is_one_line_with_the_way_out(tree, checkpoint):
    cfg = eval_settings(tree, checkpoint)
    cfg.beside("state").write_bytes(b"hours of work")
    with pytest.raises(UserError, match="eval-state.pt is damaged .*remove it"):
        evaluate(cfg)
    torch.save({"step": 1}, cfg.beside("state"))
    with pytest.raises(UserError, match="eval-state.pt is damaged .*remove it"):
        evaluate(cfg)

def test_the_commands_of_the_header_are_accepted():
    """What eval_linear.py says one can type, less what it says beside it."""
    header = re.sub(r"(?<=\S)   .*", "", eval_linear.__doc__).replace("\\\n", " ")
    commands = re.findall(r"\beval_linear\.py\b([^\n]*)", header)
    for command in commands:
        cfg = ser.parse(shlex.split(command), Settings, repeatable=("--test",))
        ser.check_ranges(cfg)
    assert len(commands) == 5

def test_the_table_shows_notes_and_the_end_of_the_sweep():
    """How V2 was labelled, among which classes R is scored, a best rate that lies at the end."""
    rates = [{"rate": rate, "val": {"top1": rate, "top5": 9.0}} for rate in (1.0, 2.0)]
    chance = {"val": {"top1": 10.0, "top5": 50.0}, "r, of 10": {"top1": 10.0, "top5": 50.0}}
    linear = {"rates": rates, "best": rates[1], "chosen_on": "val"}
    result = {"chance": chance, "notes": ["v2: places"], "broken": {}, "protocol": "heads"}
    shown = eval_linear.table(result | {"linear": linear}).splitlines()
    assert "  v2: places" in shown and "r, of 10" in shown[1]
    assert any("2.00 / 9.00" in line and "(best)" in line for line in shown)
    assert any("end of the sweep" in line for line in shown)
    middle = {"rate": 1.5, "val": {"top1": 3.0, "top5": 9.0}}
    for best, ends in ((middle, False), (rates[1], True)):     # the last one given is no end
        linear = {"rates": [*rates, middle], "best": best, "chosen_on": "val"}
        assert ("end of the sweep" in eval_linear.table(result | {"linear": linear})) == ends

def test_a_result_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A kill in the middle, or what JSON cannot hold, leaves the old result."""
    path = tmp_path / "eval.json"
    eval_linear.write_json(path, {"a": (1, 2)})
    with pytest.raises(TypeError):
        eval_linear.write_json(path, {"a": torch.zeros(1)})
    write = Path.write_text

    def killed(path, text):
        write(path, text[:len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        eval_linear.write_json(path, {"b": (3, 4)})
    assert json.loads(path.read_text()) == {"a": [1, 2]}

# ==== 12. README.md ===============================================================================
def readme_blocks(language, name="README.md"):
    """The fenced blocks of README.md in this language."""
    text = (HERE / name).read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)

def readme_commands(program, name="README.md"):
    """(ranks, words) of every command of README.md that runs what the pattern `program` says: in
    blocks, and in the text where it has a flag, there often without its "python"."""
    lines = "".join(readme_blocks(r"\w*", name)).replace("\\\n", " ").splitlines()
    text = re.sub(r"^ *```.*?^ *```", "", (HERE / name).read_text(), flags=re.M | re.S)
    for span in re.findall(r"`([^`]+ --[^`]+)`", text):
        if "..." not in span and "--help" not in span:
            lines.append("python " + " ".join(span.split()).removeprefix("python "))
    pattern = rf"\b(?:python3?|torchrun)\b([^#;|&>`]*?)(?<!\w){program}([^#;|&>`]*)"
    found = []
    for line in lines:
        for before, after in re.findall(pattern, line):
            ranks = re.search(r"--nproc_per_node[= ](\d+)", before)
            found.append((int(ranks[1]) if ranks else 1, shlex.split(after)))
    return found

def test_every_training_command_of_the_readme_parses_and_is_within_range():
    """What it tells to type is accepted, on as many ranks as it says."""
    commands = readme_commands(r"ser\.py(?!\w)")
    assert len(commands) >= 4
    for ranks, argv in commands:
        ser.check(ser.parse(argv), ranks)

def test_every_evaluation_command_of_the_readme_parses_and_is_within_range():
    """The same for eval_linear.py."""
    commands = readme_commands(r"eval_linear\.py(?!\w)")
    assert len(commands) >= 2
    for _, argv in commands:
        cfg = ser.parse(argv, eval_linear.Settings, repeatable=("--test",))
        ser.check_ranges(cfg)

@pytest.mark.parametrize("name", ["README.md", "paper/README.md"])
def test_every_command_that_runs_a_script_of_paper_parses_and_is_within_range(name, monkeypatch):
    """python -m paper...: by the parser or the settings of its module, whatever is installed."""
    if not (HERE / name).exists():
        pytest.skip(f"no {name} here")
    commands = readme_commands(r"-m(?= paper)", name)
    assert len(commands) >= (20 if name.startswith("paper") else 2)
    for ranks, argv in commands:
        module = importlib.import_module(argv[0])
        if hasattr(module, "parse"):
            with monkeypatch.context() as patch:
                patch.setattr(importlib.util, "find_spec", lambda _: True)
                module.parse(argv[1:])
            continue
        kind = module.Settings
        if "--base" in argv:     # an add-on has the flags of its base method
            addon = importlib.import_module("paper.methods.addon")
            own = kind.__mro__[1]     # without those of the base method
            kind = addon.settings_on(argv[argv.index("--base") + 1], own)
        cfg = ser.parse(argv[1:], kind)
        if isinstance(cfg, ser.Common):
            ser.check(cfg, ranks)
        else:
            ser.check_ranges(cfg)

def test_every_python_block_of_the_readme_runs(whole_run, tmp_path, monkeypatch):
    """What it tells to copy works as it stands, with a tiny checkpoint for runs/ser/last.pt."""
    blocks = readme_blocks("python")
    assert len(blocks) >= 3 and "runs/ser/last.pt" in "".join(blocks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    for block in blocks:
        block = block.replace("runs/ser/last.pt", str(whole_run / "last.pt"))
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})

def test_the_method_that_the_readme_plugs_in_trains_and_its_checkpoint_loads(
        folder, tmp_path, monkeypatch):
    """"Plug in another method": at most 25 lines, run by ser.main with flags of their own."""
    block, = (block for block in readme_blocks("python") if "class Align" in block)
    assert block.count("\n") <= 25
    found = {"__name__": "align"}
    monkeypatch.setitem(sys.modules, "align", ser)     # --help reads its docstring
    exec(compile(block, "README.md", "exec"), found)
    settings = TOY | dict(data=folder, out=tmp_path, epochs=1.0)
    del settings["moco_hidden"]
    method = functools.partial(ser.build, method=found["Align"])
    assert ser.main(flags(**settings), found["Settings"], method) == 0
    log = records(tmp_path)[1:]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5] and "equiv" in log[0]
    assert ser.load_encoder(tmp_path / "last.pt").dim == 16
