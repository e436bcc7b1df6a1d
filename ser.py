"""Soft Equivariance Regularization (SER) for self-supervised vision transformers.

SER keeps the loss of a self-supervised method, which acts on the final embedding, and adds a
second one at an intermediate layer, where the patch tokens still form a map of the image:

    f = f2 . f1    f1, the network up to block 3, makes a map of patch tokens; [CLS] enters with f2
    b1, b2         a batch has two parts, and b2 is a share r = .01 of it. Views of b1 are
                   made by crops, flips and photometric jitter (T), views of b2 by the
                   transforms of a group G and the same jitter (T_eq)
    L_inv          the loss of the base method, here MoCo-v3, on the final [CLS] of all images.
                   Unlike in Eq. 3, it is one mean over b1 and b2
    L_equiv        patch-wise NT-Xent on b2 with temperature tau = .3. The map rho_g(f1(x1)) is
                   to match f1(x2), after both maps are projected. Here x1 = rho_g1(x),
                   x2 = rho_g2(x) and g = g2 g1^-1
    loss           L_inv + lambda L_equiv with lambda = .5

Usage:
    python ser.py                                                    a tiny ViT, synthetic images
    python ser.py --data /imagenet --batch-size 256 --ratio 0.0625   one GPU (see --ratio)
    torchrun --nproc_per_node=8 ser.py --data /imagenet              the main setting

Sections 1 to 6 are the method. The lines of Algorithm 1 up to the loss, and what does them:
    split the batch into b1 and b2            batch_items, of section 2
    T on b1, T_eq on b2, for two views        ViewDataset and make_views, of section 2
    the embeddings, and f1's maps of b2       encode_view, of section 3
    L_inv                                     the base method, such as MoCoV3 of section 5
    g = g2 g1^-1                              relative, of section 1
    L_equiv of rho_g(f1(x1)) and f1(x2)       equiv_of_maps and patch_ntxent, of section 4
    L_inv + lambda L_equiv                    SER.forward, of section 6

References such as 3.1 or A.2 are to the paper, and those such as "section 2" to this file.
Where 4.1 names no setting, it keeps MoCo-v3's. We take those from MoCo-v3's code and the
ViT-S commands of its CONFIG.md, except where a comment says otherwise.

Comments and docstrings have three tags:
    Choice:             the paper leaves this open
    Choice, unlike X    here we depart from X, which the paper prescribes or keeps
    Paper:              the paper prescribes this

"The release" is the authors' code, github.com/aitrics-chris/SER at dbe5e93. Many choices
follow it. Its L_equiv has no gradient, as all tokens are detached when they are gathered
(builder/moco.py, lines 956 to 962), so the paper's results may come from another version.

Axes:
    B        images in a tensor; a rank has B1 of b1 and B2 of b2
    R        ranks, the processes of torchrun, one for each GPU
    C h w    channels (3 in images), rows and columns of any map; S x S for a square view
    N H W    patch tokens of a map, its rows and its columns; N = H W
    grid     the size (H, W) of a map, or the side of a square map
    D K      width of the encoder, width of a projection
"""
import copy
import glob
import json
import math
import os
import random
import sys
import time
import zlib
from argparse import (
    ArgumentDefaultsHelpFormatter, ArgumentParser, BooleanOptionalAction, Namespace)
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.optim import AdamW, Optimizer
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor, rgb_to_grayscale
from torchvision.utils import save_image
from tqdm import tqdm


# ==== 1. Group: one operator moves pixels and tokens (paper 3.1) ======================
# Sections 1 and 4 can be copied into other code. They need math, torch, nn, F, dist, NamedTuple.
Tensor = torch.Tensor                      # here, so that it is copied with the section
ELEMENTS = ("rot90", "hflip", "scale")     # the kinds of transforms in the group G


class Geometry(NamedTuple):
    """A transform g for each of B images, to a view, or from view 1 to view 2: a flip,
    then quarter turns, then a scaling. Choice: this order. The size of the result is kept,
    and not a factor (see `relative`)."""
    flip: Tensor             # (B,) bool, horizontal flip
    turns: Tensor            # (B,) int64, counter-clockwise quarter turns, modulo 4
    grid: tuple[int, int]    # one size for all maps, after the scaling


def sample_geometry(batch: int, grid: int = 14, elements: tuple = ELEMENTS,
                    generator: torch.Generator | None = None) -> Geometry:
    """Sample flips and turns for `batch` images, and one scaling for all. All kinds are always
    sampled, so a seed gives the same turns with any `elements`.
    grid: the side of a square map before the scaling; Geometry.grid is the size after it."""
    if not set(elements) <= set(ELEMENTS):
        raise ValueError(f"elements {elements} are not among {ELEMENTS}")

    # Choice: all flips and turns are equally likely.
    flip = torch.rand(batch, generator=generator) < 0.5
    turns = torch.randint(4, (batch,), generator=generator)
    u, v = torch.rand(2, generator=generator).tolist()     # for area and aspect

    # Choice: [0.7, 1.3] of 4.1 is a range of areas, sampled uniformly, as in the release.
    # Choice: the aspect, which 4.1 does not give, is log-uniform in the release's range.
    area = 0.7 + (1.3 - 0.7) * u
    aspect = 3 / 4 * (16 / 9) ** v     # columns / rows, from 3/4 to 4/3

    # Paper: sides are whole numbers of tokens (3.2). Choice, unlike 4.1: as in the release,
    # they are rounded, so areas of 14 x 14 tokens are scaled by 0.66 to 1.38.
    # Choice, unlike Algorithm 1: all images of a view scale alike, to stay one tensor.
    rows = round(grid * math.sqrt(area / aspect))
    columns = round(grid * math.sqrt(area * aspect))

    if "hflip" not in elements:
        flip[:] = False
    if "rot90" not in elements:
        turns[:] = 0
    if "scale" not in elements:
        rows = columns = grid
    return Geometry(flip, turns, (rows, columns))


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, h, w) -> (B, C, *size): pixels, maps and position embeddings."""
    if x.shape[-2:] == size:
        return x

    # On a CPU, PyTorch cannot antialias half precision, which other code may have. It is
    # resized in float32, and on GPUs as well, so that devices agree.
    source = x if x.dtype in (torch.uint8, torch.float64) else x.float()

    # Paper: one operator resizes images and maps (3.1, 3.2).
    # Choice, unlike MoCo-v3: PyTorch's bilinear resize. MoCo-v3 has Pillow's.
    resized = F.interpolate(source, size, mode="bilinear", antialias=True)
    return resized.to(x.dtype)


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """A value for each image, (B,) -> (B, 1, 1, 1), on the device of x; floats get x's dtype."""
    dtype = x.dtype if values.is_floating_point() else values.dtype
    return values.view(-1, 1, 1, 1).to(x.device, dtype, non_blocking=True)


def rho(g: Geometry, x: Tensor, cell: int = 1) -> Tensor:
    """The action rho_g (3.1): (B, C, h, w) -> (B, C, H * cell, W * cell), where
    (H, W) is g.grid. cell = 1 moves token maps, and cell = patch_size moves pixels."""
    if len(g.flip) != len(x):
        raise ValueError(f"a Geometry of {len(g.flip)} images for {len(x)}")

    # Each image has its own flip and turns. So every step is computed for all images, and
    # `where` keeps the result for images whose g has the step. The steps are a flip, a half turn
    # (two or three turns) and a quarter turn (one or three turns). All images are resized.
    x = torch.where(per_image(g.flip, x), x.flip(-1), x)
    x = torch.where(per_image(g.turns % 4 >= 2, x), x.flip((-2, -1)), x)

    # The quarter turn exchanges rows and columns, so a map and its turn are both resized
    # before one of them is taken. The turn is copied into the usual memory layout. Over
    # that of rot90, later sums of the same values would round in another way.
    turned = torch.rot90(x, 1, (-2, -1)).contiguous()
    size = (g.grid[0] * cell, g.grid[1] * cell)
    quarter = per_image(g.turns % 2 == 1, x)
    return torch.where(quarter, resize(turned, size), resize(x, size))


def relative(g2: Geometry, g1: Geometry) -> Geometry:
    """The transform that takes view 1 and its maps to view 2 (3.1): the flips and turns of
    g = g2 g1^-1, and the size of view 2."""
    # A view applies m = 0 or 1 flips M, then t quarter turns Q. Their product is Q^t M^m.
    # Two flips cancel: M M = 1. Also, M Q = Q^-1 M. So without the scalings of g1 and g2,
    #     g2 g1^-1 = Q^t2 M^m2 (Q^t1 M^m1)^-1
    #              = Q^t2 M^m2 M^m1 Q^-t1
    #              = Q^t2 M^m Q^-t1          where m is 1 if one view alone is flipped
    #              = Q^(t2 - sign t1) M^m    where sign is -1 if m is 1, else 1
    # Choice: the scaling of g is one resize, after the turns. Suppose view 1 scales 14 x 14
    # tokens to 12 x 15, and view 2 to 16 x 13. A quarter turn makes view 1's map 15 x 12. Then
    # it is resized once, to 16 x 13. A resize to 14 x 14 in between would blur the map twice.
    flip = g1.flip ^ g2.flip
    sign = torch.where(flip, -1, 1)
    turns = (g2.turns - sign * g1.turns) % 4
    return Geometry(flip, turns, g2.grid)


def ranks_and_rank() -> tuple[int, int]:
    """(R, this rank), which is (1, 0) in a single process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def sample_rank_geometry(batch: int, grid: int, shared: torch.Generator,
                         elements: tuple = ELEMENTS) -> Geometry:
    """Sample the transforms of this rank's `batch` images. `shared` has one seed on all ranks,
    so all have one scaling, and `gather` (section 4) gets equally many tokens from each."""
    ranks, rank = ranks_and_rank()
    g = sample_geometry(ranks * batch, grid, elements, shared)     # of all ranks
    return Geometry(g.flip.chunk(ranks)[rank], g.turns.chunk(ranks)[rank], g.grid)


# ==== 2. The batch: b1, b2 and their views (paper 3.2) ================================
# The partition of Algorithm 1: of a batch in random order, the first images are b1 and the
# rest are b2. Each rank takes its part of both. `args` are the flags of section 7. The path of
# a batch:
#
#     batch_items    an Item for each image of this rank
#     ViewDataset    in the loader, reads an image and makes a square of it for each view. It
#                    crops and flips images of b1, and samples the strength of the jitter
#     make_views     on the device, where it is much faster, moves b2 by rho and jitters all
#
# All that is random in a run comes from these seeds, so a run can be repeated, on a CPU bit
# for bit if the ranks, the threads and the PyTorch version are the same.
#
#     the first weights                 --seed
#     the order of the images           --seed and epoch
#     crops, flips and jitter           --seed, epoch and image
#     the order of colour operations    --seed, step and view
#     transforms                        --seed, step and view
#     what other methods sample         --seed, step and rank


def seed_of(*names: Any) -> int:
    """A seed from names and numbers, the same in all processes, unlike `hash`."""
    return random.Random(repr(names)).getrandbits(63)


def rng(*names: Any) -> torch.Generator:
    """A generator on the CPU with the seed of these names and numbers."""
    return torch.Generator().manual_seed(seed_of(*names))


def b2_per_rank(args: Namespace, ranks: int) -> int:
    """B2, how many images of b2 a rank has."""
    # Choice, unlike Algorithm 1: each rank rounds the share r of its own images, as `gather`
    # needs equally many from all ranks. For r = .01 of 2048, b2 has 24 images on 8 ranks, a
    # share of .0117, and 20 on one rank. Halves are rounded up.
    return math.floor(args.ratio * args.batch_size / ranks + 0.5)


class Item(NamedTuple):
    """Which image a loader asks the data set for, and how it is to be augmented."""
    epoch: int
    image_index: int
    in_b2: bool


def batch_items(n_images: int, args: Namespace, start: int, end: int) -> Iterator[list[Item]]:
    """The batch sampler of PyTorch's DataLoader. For each step from `start` to end - 1, yield
    this rank's batch as a list of items. The items of b1 come first. The last, incomplete
    batch of an epoch is dropped."""
    ranks, rank = ranks_and_rank()
    b1_total = args.batch_size - ranks * b2_per_rank(args, ranks)     # a multiple of R
    steps_per_epoch = n_images // args.batch_size

    for step in range(start, end):
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        if step_of_epoch == 0 or step == start:     # a run may go on in the middle of an epoch
            order = torch.randperm(n_images, generator=rng(args.seed, "order", epoch))
            batches = order.split(args.batch_size)

        batch = batches[step_of_epoch]
        b1 = batch[:b1_total].chunk(ranks)[rank].tolist()
        b2 = batch[b1_total:].chunk(ranks)[rank].tolist()     # empty with --ratio 0
        items = [Item(epoch, index, False) for index in b1]
        yield items + [Item(epoch, index, True) for index in b2]


# The operations of T are those of MoCo-v3.
#
#     T, for b1          probability  T_eq, for b2                applied by
#     a random crop      1            whole image, made a square  sample_view
#     a horizontal flip  P_FLIP       -                           sample_view
#     -                               flip, turns and a scaling   rho
#     a colour jitter    P_COLOUR     the same                    jitter_and_normalise
#     grayscale          P_GRAY       the same                    jitter_and_normalise
#     blur               P_BLUR       the same                    jitter_and_normalise
#     solarization       P_SOLARIZE   the same                    jitter_and_normalise
#
# The last four are the photometric jitter.
CROP_ASPECT = (3 / 4, 4 / 3)   # width / height; the area is --crop-min to 1 of the image
P_FLIP = 0.5
P_COLOUR = 0.8
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
P_GRAY = 0.2
P_BLUR = (1.0, 0.1)            # in view 1, in view 2
BLUR_SIGMA = (0.1, 2.0)        # from, to, in pixels of a view of 224
P_SOLARIZE = (0.0, 0.2)        # in view 1, in view 2
SOLARIZE_FROM = 128 / 255      # of values in [0, 1], those from this one on are inverted


class Policy(NamedTuple):
    """What may differ from view to view; paper/methods/multicrop.py has other sizes and areas."""
    size: int                       # side of the view, pixels
    area: tuple[float, float]       # of a crop, share of the image; not for T_eq
    p_blur: float
    p_solarize: float


class Augmentation(NamedTuple):
    """What was sampled for an image, as numbers; the defaults do nothing. In a batch, each
    field is a tensor (B,)."""
    # The crop and its flip, which b2 does not have. Baselines in paper/methods read the crop.
    top: float = 0.0           # shares of the image
    left: float = 0.0
    height: float = 1.0
    width: float = 1.0
    flip: bool = False

    # The photometric jitter.
    brightness: float = 1.0    # factors
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0           # shift, share of the colour circle
    gray: bool = False
    blur: float = 0.0          # standard deviation, pixels; 0 is none
    solarize: bool = False


def sample_view(image: Tensor, policy: Policy, in_b2: bool) -> tuple[Tensor, Augmentation]:
    """An image (3, h, w) uint8 -> the square (3, S, S) uint8 of which `make_views` makes
    a view, and what was sampled for it."""
    aug = Augmentation()
    if not in_b2:
        h, w = image.shape[-2:]
        top, left, height, width = RandomResizedCrop.get_params(image, policy.area, CROP_ASPECT)
        image = image[:, top:top + height, left:left + width]
        flip = random.random() < P_FLIP
        aug = Augmentation(top / h, left / w, height / h, width / w, flip)

    # Choice: b2, which 3.2 does not crop, is squashed to squares, to be one tensor with b1.
    # Its pixels are resized once more by rho.
    pixels = resize(image[None], (policy.size, policy.size))[0]
    if aug.flip:
        pixels = pixels.flip(-1)

    if random.random() < P_COLOUR:
        aug = aug._replace(
            brightness=random.uniform(1 - BRIGHTNESS, 1 + BRIGHTNESS),
            contrast=random.uniform(1 - CONTRAST, 1 + CONTRAST),
            saturation=random.uniform(1 - SATURATION, 1 + SATURATION),
            hue=random.uniform(-HUE, HUE))
    if random.random() < policy.p_blur:
        # Choice: sigma scales with the side of the square. Views of b2 keep it at any scaling.
        aug = aug._replace(blur=random.uniform(*BLUR_SIGMA) * policy.size / 224)
    gray = random.random() < P_GRAY
    solarize = random.random() < policy.p_solarize
    return pixels, aug._replace(gray=gray, solarize=solarize)


@dataclass
class ViewDataset(torch.utils.data.Dataset):
    """An Item -> for each view, pixels (3, S, S) uint8 and Augmentation.
    source: paths, or images (n, 3, h, w) uint8."""
    source: Sequence[str] | Tensor
    policies: Sequence[Policy]
    seed: int

    def __getitem__(self, item: Item) -> list:
        _, index, _ = item
        return self.sample_views(self.load(index), item)

    # `load` and `sample_views` are apart, as paper/methods/equimod.py and stl.py call both.
    def load(self, index: int) -> Tensor:
        """An image, (3, h, w) uint8."""
        image = self.source[index]
        return read_image(image) if isinstance(image, str) else image

    def sample_views(self, image: Tensor, item: Item) -> list:
        """The views of an image, sampled with the seed of an item."""
        epoch, index, in_b2 = item
        seed = seed_of(self.seed, "image", epoch, index)
        random.seed(seed)
        # For RandomResizedCrop. torch.manual_seed would be slow, as it seeds all devices.
        torch.default_generator.manual_seed(seed)
        return [sample_view(image, policy, in_b2) for policy in self.policies]


def two_view_dataset(source: Sequence[str] | Tensor, args: Namespace) -> ViewDataset:
    """The data set of a run, with the policies of view 1 and of view 2."""
    area = (args.crop_min, 1.0)
    policies = [Policy(args.image_size, area, p_blur, p_solarize)
                for p_blur, p_solarize in zip(P_BLUR, P_SOLARIZE)]
    return ViewDataset(source, policies, args.seed)


class View(NamedTuple):
    """One view of each image of this rank."""
    b1: Tensor                     # (B1, 3, S, S), normalised
    b2: Tensor | None              # (B2, 3, h, w), normalised; None if --ratio is 0
    geometry: Geometry | None      # of b2

    # How the view was made. Baselines in paper/methods read it.
    augmentation: Augmentation          # of b1, then b2; each field is a tensor (B,)
    order: Tensor = torch.arange(4)     # of the operations of jitter_and_normalise


def make_views(loaded: Sequence[tuple], args: Namespace, step: int) -> list[View]:
    """Move b2 by rho_g1 in view 1 and by rho_g2 in view 2, and jitter all images.

    loaded: for each view, pixels (B, 3, S, S) uint8 of b1, then b2, on the device, and their
        Augmentation on the CPU."""
    ranks, _ = ranks_and_rank()
    n_b2 = b2_per_rank(args, ranks)
    views = []
    for view_number, (pixels, aug) in enumerate(loaded):
        images = pixels / 255
        n_b1 = len(images) - n_b2     # `batch_items` puts b1 first

        # Choice, unlike MoCo-v3, for speed: one order of colour operations for a batch.
        order = torch.randperm(4, generator=rng(args.seed, "jitter", step, view_number))

        aug_b1 = Augmentation(*[field[:n_b1] for field in aug])
        b1 = jitter_and_normalise(images[:n_b1], aug_b1, order)

        b2 = geometry = None
        if n_b2 > 0:
            shared = rng(args.seed, "geometry", step, view_number)
            grid = pixels.shape[-1] // args.patch_size
            geometry = sample_rank_geometry(n_b2, grid, shared, tuple(args.group))
            # Choice: the transform comes before the photometric jitter.
            moved = rho(geometry, images[n_b1:], args.patch_size)
            aug_b2 = Augmentation(*[field[n_b1:] for field in aug])
            b2 = jitter_and_normalise(moved, aug_b2, order)

        views.append(View(b1, b2, geometry, aug, order))
    return views


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)     # of ImageNet, in [0, 1]
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def normalise(x: Tensor) -> Tensor:
    """Images in [0, 1] -> what the encoder takes. Raises ValueError for integer types."""
    if not x.is_floating_point():
        raise ValueError(f"images are {x.dtype}: divide them by 255")
    return (x - MEAN.to(x, non_blocking=True)) / STD.to(x, non_blocking=True)


def jitter_and_normalise(x: Tensor, aug: Augmentation, order: Tensor) -> Tensor:
    """The photometric jitter of images (B, 3, h, w) in [0, 1], then `normalise`. Fields of
    `aug` are (B,). The jitter is MoCo-v3's, except where a Choice says otherwise."""
    # This is torchvision's colour jitter, but each image has factors of its own. Factors of 1
    # and hue shifts of 0 leave values in [0, 1] as they are, bit for bit.
    # Choice, unlike MoCo-v3: floats are jittered. MoCo-v3 jitters bytes.
    for operation in order.tolist():
        if operation == 0:       # brightness: towards black, or away from it
            x = (per_image(aug.brightness, x) * x).clamp(0, 1)
        elif operation == 1:     # contrast: towards the mean gray, or away from it
            mean = rgb_to_grayscale(x).mean((2, 3), keepdim=True)
            x = mean.lerp(x, per_image(aug.contrast, x)).clamp(0, 1)
        elif operation == 2:     # saturation: towards the gray of each pixel, or away from it
            x = rgb_to_grayscale(x).lerp(x, per_image(aug.saturation, x)).clamp(0, 1)
        else:                    # hue
            x = shift_hue(x, per_image(aug.hue, x))

    x = torch.where(per_image(aug.gray, x), rgb_to_grayscale(x), x)

    # `aug` is on the CPU, so looking for what to blur does not wait for the GPU.
    to_blur = aug.blur.nonzero().flatten().to(x.device, non_blocking=True)
    if len(to_blur) > 0:
        x[to_blur] = gaussian_blur(x[to_blur], per_image(aug.blur, x)[to_blur])

    inverted = per_image(aug.solarize, x) & (x >= SOLARIZE_FROM)
    x = torch.where(inverted, 1 - x, x)
    return normalise(x)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of images (B, 3, h, w) by `shift` (B, 1, 1, 1), a share of the circle."""
    # The hue lies on a circle of length 6, where red is at 0, green at 2 and blue at 4.
    r, g, b = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)

    divisor = torch.where(chroma == 0, 1, chroma)     # gray gets hue 0
    hue = 4 + (r - g) / divisor                                      # if blue is the largest
    hue = torch.where(value == g, 2 + (b - r) / divisor, hue)        # if green is
    hue = torch.where(value == r, (g - b) / divisor, hue)            # if red is

    # From HSV to RGB, by the closed form of Wikipedia's "HSL and HSV": a channel is
    #     value - chroma max(0, min(1, k, 4 - k)),    k = (hue + offset) modulo 6,
    # with offset 5 for red, 3 for green and 1 for blue.
    offsets = torch.arange(5, 0, -2, device=x.device).view(3, 1, 1)     # 5, 3, 1
    k = (hue + 6 * shift + offsets) % 6
    shifted = value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)
    return torch.where(shift == 0, x, shifted)


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur images (B, 3, h, w) by sigma (B, 1, 1, 1) pixels; the borders are mirrored."""
    # Choice, unlike MoCo-v3: a Gaussian. MoCo-v3 blurs by Pillow, with boxes.
    B, _, h, w = x.shape

    # Choice: all kernels of a call have one radius, about three times sigma's upper limit.
    radius = math.ceil(3 * BLUR_SIGMA[1] * max(h, w) / 224)
    offsets = torch.arange(-radius, radius + 1, device=x.device)

    # A Gaussian for each image, (B, 1, 1, 2 radius + 1). Softmax makes its values sum to 1.
    kernel = torch.softmax(-(offsets ** 2) / (2 * sigma ** 2), dim=-1)

    # Images become channels, as a convolution in B groups has a kernel for each channel.
    x = F.pad(x, [radius] * 4, mode="reflect")
    x = x.transpose(0, 1)                       # (3, B, h + 2 radius, w + 2 radius)
    x = F.conv2d(x, kernel.mT, groups=B)        # (3, B, h, w + 2 radius)
    x = F.conv2d(x, kernel, groups=B)           # (3, B, h, w)
    return x.transpose(0, 1)


# ==== 3. Encoder: f1, then f2 (paper 3.1) =============================================
# Parameters have timm's names; `pos_embed` is a map here.
class Attention(nn.Module):
    """Self-attention on tokens (B, N, D), in f2 on (B, 1 + N, D), with [CLS] first."""
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # (B, heads, N, D / heads)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(OrderedDict(
            fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Encoded(NamedTuple):
    """What the encoder makes of images. Choice: only `cls` passes the final LayerNorm."""
    cls: Tensor                  # (B, D), the final [CLS] after the final LayerNorm
    maps: dict[int, Tensor]      # layer -> (B, D, H, W), patch tokens after that block
    cls_at: dict[int, Tensor]    # layer of f2 -> (B, D), [CLS] there, for evaluations and paper/


class ViT(nn.Module):
    """f = f2 . f1. The first `cls_layer` blocks are f1. [CLS] enters after them, and the other
    blocks are f2. With cls_layer 0, [CLS] enters at once, as in a plain ViT."""
    def __init__(self, image_size: int = 224, patch_size: int = 16, dim: int = 384,
                 depth: int = 12, heads: int = 6, cls_layer: int = 3):
        super().__init__()
        self.image_size = image_size     # for evaluations
        self.patch_size = patch_size
        self.dim = dim
        self.depth = depth
        self.cls_layer = cls_layer

        self.patch_embed = nn.Sequential(OrderedDict(
            proj=nn.Conv2d(3, dim, patch_size, patch_size)))
        side = image_size // patch_size     # of the map, in tokens
        self.pos_embed = nn.Parameter(torch.empty(1, dim, side, side))     # filled below
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 1e-6)     # as MoCo-v3
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

        # Paper: 4.1 keeps MoCo-v3's Xavier weights, where q, k, v are three matrices.
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                matrices = 3 if name.endswith("qkv") else 1
                for matrix in module.weight.flatten(1).chunk(matrices):     # filled in place
                    nn.init.xavier_uniform_(matrix)
                nn.init.zeros_(module.bias)

        # Choice, unlike 4.1: position embeddings are learned, as in the release, and resized
        # to the grids of b2. [CLS] has none. MoCo-v3, which 4.1 keeps, has sines and cosines.
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor, layers: Sequence[int] = ()) -> Encoded:
        """Encode images (B, 3, h, w). `layers` are blocks, counted from 1. The map after each
        of these blocks is kept. After blocks of f2, [CLS] is kept, too."""
        h, w = images.shape[-2:]
        if h % self.patch_size > 0 or w % self.patch_size > 0:
            raise ValueError(f"{h} x {w} pixels are not made of patches of {self.patch_size}")

        x = self.patch_embed(images)             # (B, D, H, W)
        H, W = x.shape[-2:]
        x = x + resize(self.pos_embed, (H, W))
        x = x.flatten(2).mT                      # (B, N, D)

        maps = {}
        cls_at = {}

        # f1: all tokens are patches, and form a map.
        for layer, block in enumerate(self.blocks[:self.cls_layer], start=1):
            x = block(x)
            if layer in layers:
                maps[layer] = x.mT.unflatten(2, (H, W))

        # f1 ends and f2 begins: [CLS] enters, and x becomes (B, 1 + N, D).
        cls = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([cls, x], dim=1)
        for layer, block in enumerate(self.blocks[self.cls_layer:], start=self.cls_layer + 1):
            x = block(x)
            if layer in layers:
                maps[layer] = x[:, 1:].mT.unflatten(2, (H, W))
                cls_at[layer] = x[:, 0]
        return Encoded(self.norm(x[:, 0]), maps, cls_at)


def encode_view(encoder: ViT, view: View, layers: Sequence[int] = ()) -> tuple[Tensor, dict]:
    """A view -> the final [CLS] of b1, then b2, (B, D), and the maps of b2 by layer."""
    encoded_b1 = encoder(view.b1)
    if view.b2 is None:
        return encoded_b1.cls, {}
    encoded_b2 = encoder(view.b2, layers)     # a pass of its own: its images may have another size

    # Choice, unlike 3.3: b1 and b2 are joined, as L_inv is one mean over all images (see
    # SER.forward). So BatchNorm, which the heads of a base method may have, sees both together.
    return torch.cat([encoded_b1.cls, encoded_b2.cls]), encoded_b2.maps


# ==== 4. L_equiv: NT-Xent over patches (paper 3.3) ====================================
def projector(dim: int, width: int = 512) -> nn.Sequential:
    """Tokens (B, N, dim) -> (B, N, width). Paper: 3.3, two layers with GELU, to 512."""
    # Choice, unlike 3.3: a LayerNorm first, as in the release, but with eps 1e-5, not 1e-6.
    # Choice: both layers have 512 features and no biases, as in the release.
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, width, bias=False),
        nn.GELU(),
        nn.Linear(width, width, bias=False))


class AllGather(torch.autograd.Function):
    """`dist.all_gather` with a gradient. PyTorch has deprecated dist.nn.functional's."""
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        # A rank's x entered the loss of every rank, so its gradients are summed. They are
        # not divided by R here, because DDP does it later, when it averages over ranks.
        ranks, rank = ranks_and_rank()
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(ranks)[rank]


def gather(x: Tensor) -> Tensor:
    """(B, ...) of each rank -> (R B, ...), with gradient. All ranks must have the same B."""
    ranks, _ = ranks_and_rank()
    return AllGather.apply(x) if ranks > 1 else x


def patch_ntxent(z: Tensor, z_prime: Tensor, temperature: float = 0.3) -> Tensor:
    """Patch-wise NT-Xent (paper 3.3 and Eq. 3), the mean over images i and places j of

        -log  exp s(z_ij, z'_ij)
              / (exp s(z_ij, z'_ij)
                 + sum_{m != i, n} (exp s(z_ij, z_mn) + exp s(z_ij, z'_mn)))

    where s is the cosine over the temperature.

    z and z_prime are projected tokens (B, N, K), of rho_g(f1(x1)) and of f1(x2).
    Paper: 3.3, only tokens of z are anchors. This rank's anchors are compared with z and z' of
    all ranks, so the mean over ranks is the loss of the whole batch. The loss is computed in
    fp32. Raises ValueError if the shapes differ, or if all ranks together have one image."""
    if z.shape != z_prime.shape:
        raise ValueError(f"z is of shape {tuple(z.shape)}, z_prime {tuple(z_prime.shape)}")

    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(z.float(), dim=-1)
        z_prime = F.normalize(z_prime.float(), dim=-1)

        # Choice: the gradient passes through anchors and keys, as 3.3 has no stop-gradient.
        keys = gather(torch.cat([z, z_prime], dim=1))                   # (R B, 2N, K)
        if len(keys) < 2:
            raise ValueError("b2 needs two or more images over all ranks, as negatives")

        positives = (z * z_prime).sum(-1) / temperature                 # (B, N)
        logits = torch.einsum("ijk,mnk->ijmn", z / temperature, keys)   # (B, N, R B, 2N)

        # Paper: negatives are tokens of *other* images alone (3.3). Algorithm 1 and A.4
        # can be read as if other tokens of image i were negatives, too. Of the keys, this
        # rank's image i is number rank * B + i.
        _, rank = ranks_and_rank()
        anchor_image = rank * len(z) + torch.arange(len(z), device=z.device)    # (B,)
        key_image = torch.arange(len(keys), device=z.device)                    # (R B,)
        same_image = anchor_image[:, None] == key_image                         # (B, R B)
        logits.masked_fill_(same_image[:, None, :, None], -torch.inf)

        # The mask also removed the positives, so they are added back. For a positive logit p,
        # -log(e^p / (e^p + sum)) = log(e^p + sum) - p.
        negatives = logits.flatten(2).logsumexp(2)                      # (B, N)
        return (torch.logaddexp(positives, negatives) - positives).mean()


def equiv_of_maps(project: nn.Module, g: Geometry, h1: Tensor, h2: Tensor,
                  temperature: float = 0.3) -> Tensor:
    """L_equiv of one layer, from its maps h1 of x1, (B, D, H1, W1), and h2 of x2,
    (B, D, H2, W2), where g takes view 1 to view 2."""
    aligned = rho(g, h1)                      # (B, D, H2, W2)
    if aligned.shape != h2.shape:
        raise ValueError(f"h2 is of shape {tuple(h2.shape)}, and should be {tuple(aligned.shape)}")
    z = project(aligned.flatten(2).mT)        # (B, N, K), projected after moving
    z_prime = project(h2.flatten(2).mT)       # (B, N, K)
    return patch_ntxent(z, z_prime, temperature)


# ==== 5. L_inv: MoCo-v3 (paper 4.1) ===================================================
# A base method is a module with
#     base.encoder             the online ViT. SER runs it, as L_equiv needs its maps
#     base(views, cls)         L_inv, a scalar. cls is a list, the final [CLS] (B, D) of each
#                              view, and views are for a momentum encoder or a teacher
#     base.update(progress)    called by `train` before every step, with step / steps
def mlp(*widths: int) -> nn.Sequential:
    """MoCo-v3's MLP. Its linear layers have no biases, its last BatchNorm no parameters."""
    layers = []
    for fan_in, fan_out in pairwise(widths[:-1]):
        layers += [
            nn.Linear(fan_in, fan_out, bias=False),
            nn.BatchNorm1d(fan_out),
            nn.ReLU(inplace=True)]
    layers += [nn.Linear(*widths[-2:], bias=False), nn.BatchNorm1d(widths[-1], affine=False)]
    return nn.Sequential(*layers)


def info_nce(q: Tensor, k: Tensor, temperature: float) -> Tensor:
    """InfoNCE of this rank's q (B, K) with k of all ranks, times MoCo-v3's 2 * temperature."""
    _, rank = ranks_and_rank()
    # Choice, unlike MoCo-v3: fp32. MoCo-v3 multiplies in half precision.
    with torch.autocast(q.device.type, enabled=False):
        q = F.normalize(q.float(), dim=1)
        k = gather(F.normalize(k.float(), dim=1))
        logits = q @ k.T / temperature                                     # (B, R B)
        labels = torch.arange(len(q), device=q.device) + rank * len(q)
        return 2 * temperature * F.cross_entropy(logits, labels)


class MoCoV3(nn.Module):
    """MoCo-v3 (Chen et al. 2021). Its defaults are for a ViT-S."""
    def __init__(self, encoder: ViT, out_dim: int = 256, hidden: int = 4096,
                 temperature: float = 0.2, momentum: float = 0.99):
        super().__init__()
        self.temperature = temperature
        self.momentum = momentum

        # Paper: 4.1 keeps MoCo-v3's settings. Those of its ViTs have --stop-grad-conv1, so the
        # patch embedding stays random.
        self.encoder = encoder
        self.encoder.patch_embed.requires_grad_(False)
        self.projector = mlp(encoder.dim, hidden, hidden, out_dim)
        self.predictor = mlp(out_dim, hidden, out_dim)
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the momentum branch, before keys are made; m rises to 1 on half a cosine."""
        m = 1 - (1 - self.momentum) * 0.5 * (1 + math.cos(math.pi * progress))
        for slow, fast in ((self.momentum_encoder, self.encoder),
                           (self.momentum_projector, self.projector)):
            for p_slow, p_fast in zip(slow.parameters(), fast.parameters()):
                p_slow.lerp_(p_fast, 1 - m)     # p_slow <- m p_slow + (1 - m) p_fast

    @torch.no_grad()
    def key(self, view: View) -> Tensor:
        """The keys of a view, (B, K), by the momentum branch."""
        cls, _ = encode_view(self.momentum_encoder, view)
        return self.momentum_projector(cls)

    def forward(self, views: Sequence[View], cls: Sequence[Tensor]) -> Tensor:
        """L_inv, symmetric in the two views."""
        q1, q2 = [self.predictor(self.projector(x)) for x in cls]
        k1, k2 = [self.key(view) for view in views]
        return info_nce(q1, k2, self.temperature) + info_nce(q2, k1, self.temperature)


# ==== 6. SER: Algorithm 1 around any base method ======================================
class SER(nn.Module):
    """The loss of a base method plus weight * L_equiv."""
    def __init__(self, base: nn.Module, layers: Sequence[int] = (3,), weight: float = 0.5,
                 temperature: float = 0.3):
        super().__init__()
        self.base = base
        self.layers = sorted(set(layers))     # each once
        self.weight = weight
        self.temperature = temperature

        # Choice: each layer has a projector of its own.
        self.projectors = nn.ModuleDict({
            str(layer): projector(base.encoder.dim) for layer in self.layers})

    def forward(self, views: Sequence[View]) -> dict[str, Tensor]:
        """Algorithm 1 on two views. Returns `loss`, and its parts without gradient."""
        view1, view2 = views
        cls1, maps1 = encode_view(self.base.encoder, view1, self.layers)
        cls2, maps2 = encode_view(self.base.encoder, view2, self.layers)

        # Choice, unlike Eq. 3: L_inv is one mean over all images, and each image is a key
        # for all images, as in the release. Eq. 3 adds a loss of b1 and a loss of b2. On 8
        # ranks, b1 has 2,024 images and b2 has 24. In a loss of its own, an image of b2
        # would have 24 keys, and would weigh 2,024 / 24 = 84 times as much as one of b1.
        inv = self.base(views, [cls1, cls2])
        if view1.b2 is None:     # --ratio 0, for which `parse` leaves no layers either
            return {"loss": inv, "inv": inv.detach()}

        # The control, of weight 0, computes L_equiv all the same, so nothing else differs.
        equiv = self.equiv_of_views(view1, view2, maps1, maps2)
        loss = inv + self.weight * equiv
        return {"loss": loss, "inv": inv.detach(), "equiv": equiv.detach()}

    def equiv_of_views(self, view1: View, view2: View, maps1: dict, maps2: dict) -> Tensor:
        """L_equiv of b2. maps1 and maps2: layer -> the map of view 1, and of view 2."""
        g = relative(view2.geometry, view1.geometry)
        losses = []
        for layer in self.layers:
            project = self.projectors[str(layer)]
            h1, h2 = maps1[layer], maps2[layer]
            losses.append(equiv_of_maps(project, g, h1, h2, self.temperature))
        return sum(losses) / len(losses)     # Choice: the mean over layers


# ==== 7. Settings: the paper's (3.3, 4.1, A.2), and what it leaves open ===============
# Types of flags. If one raises ValueError, argparse ends the program and names the type.
def nonnegative(text: str) -> float:
    """A number from 0 on."""
    if not 0 <= float(text) < math.inf:
        raise ValueError
    return float(text)


def positive(text: str) -> float:
    """A number above 0."""
    if nonnegative(text) == 0:
        raise ValueError
    return float(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    if nonnegative(text) > 1:
        raise ValueError
    return float(text)


def count(text: str) -> int:
    """A whole number from 1 on."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def arguments() -> ArgumentParser:
    """The flags of ser.py, to which another method adds its own."""
    parser = ArgumentParser(
        formatter_class=ArgumentDefaultsHelpFormatter,
        description="Without --data, other defaults hold: see SMALL in ser.py, or the function "
        "`settings` in the script of another method.")

    def add(flag: str, kind: Callable, default: Any, help: str, **more: Any) -> None:
        parser.add_argument(flag, type=kind, default=default, help=help, **more)

    # The run, and its images.
    add("--data", str, "", "folder of images, any depth, or with train/; none: synthetic ones")
    add("--out", str, "runs/ser", "folder of the run; a run already there is continued")
    add("--seed", int, 0, "seed of the run")
    add("--workers", int, 8, "loader processes of a rank")
    add("--log-every", count, 20, "steps between lines of the log")
    add("--save-every", int, 0, "steps between checkpoints; 0: an epoch")

    # The encoder.
    add("--image-size", count, 224, "side of a view, pixels")
    add("--patch-size", count, 16, "side of a patch, pixels")
    add("--dim", count, 384, "width of the tokens (ViT-S: 384)")
    add("--depth", count, 12, "transformer blocks (ViT-S: 12)")
    # Choice, unlike 4.1: 6 heads, as in the release. MoCo-v3, which 4.1 keeps, has 12.
    add("--heads", count, 6, "attention heads")

    # SER. Paper: layer 3, r = .01 and lambda = .5 are the best of its ablations (4.3, A.2),
    # and tau is given in 3.3. MoCo-v3 with our ViT is --ratio 0 --cls-layer 0.
    add("--cls-layer", int, 3, "last block of f1, after which [CLS] enters; 0: a plain ViT")
    add("--equiv-layers", count, [3], "blocks after which L_equiv acts", nargs="+")
    # Small batches need a larger share. Otherwise, a token of b2 has few negatives.
    add("--ratio", share, 0.01,
        "r, share of b2 in a batch; 0: no b2. For batches of 256, use .0625: b2 has 16 images")
    add("--weight", nonnegative, 0.5, "lambda; 0: the control")
    add("--temperature", positive, 0.3, "tau, of L_equiv (paper, with DINO: 0.5)")
    add("--group", str, list(ELEMENTS), "what moves b2", nargs="+", choices=ELEMENTS)

    # MoCo-v3, and T.
    add("--moco-hidden", count, 4096, "width of MoCo-v3's hidden layers")
    add("--crop-min", share, 0.08, "least share of the image in a crop")

    # Optimization.
    add("--batch-size", count, 2048, "images per step, over all ranks (4.1)")
    add("--epochs", positive, 100.0, "passes over the images, also fractions (4.1)")
    add("--warmup-epochs", nonnegative, 10.0,
        "epochs of linear warmup (4.1); if --epochs is not larger, a tenth of --epochs")
    # Choice, unlike 4.1: 3e-4, as in the release. MoCo-v3, which 4.1 keeps, has 1.5e-4.
    add("--base-lr", positive, 3e-4, "rate for 256 images")
    add("--weight-decay", nonnegative, 0.1, "on all parameters (MoCo-v3)")
    # Choice, unlike MoCo-v3: bfloat16, which needs no scaled loss. MoCo-v3 has fp16.
    parser.add_argument(
        "--bf16", action=BooleanOptionalAction, default=torch.cuda.is_available(),
        help="matrix products in bfloat16; by default, on a GPU")
    return parser


# The defaults for synthetic images, chosen so that two minutes show what the loss does.
# f1 has three of the four blocks.
SMALL = dict(image_size=32, patch_size=4, dim=64, depth=4, heads=2, ratio=0.25,
             crop_min=0.3, batch_size=64, epochs=3.0, warmup_epochs=0.5, base_lr=8e-3,
             moco_hidden=512, workers=0)


def parse(argv: Sequence[str] | None = None, parser: ArgumentParser | None = None,
          small: dict = SMALL) -> Namespace:
    """The settings of a command line. Without --data, `small` replaces the defaults. Other
    methods give a `parser` and `small` of their own."""
    parser = parser or arguments()
    if not parser.parse_known_args(argv)[0].data:     # a first look, for the defaults
        parser.set_defaults(**small)
    args = parser.parse_args(argv)

    if args.ratio == 0:
        # There is no L_equiv without b2, and DDP refuses projectors that nothing trains.
        args.equiv_layers = []
    if args.warmup_epochs >= args.epochs:     # Choice: a short run warms up for a tenth
        args.warmup_epochs = args.epochs / 10
    return args


# ==== 8. Training =====================================================================
def setup() -> torch.device:
    """The device of this process. Under torchrun, it also joins the other ranks."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda" if cuda else "cpu")


def leave_group() -> None:
    """Leave the group of processes that `setup` joined, if it joined one."""
    if dist.is_initialized():
        # Without this pause, gloo may hang in torch 2.6 and 2.7 (pytorch/pytorch#154976).
        time.sleep(0.1)
        dist.destroy_process_group()


def make_encoder(args: Namespace) -> ViT:
    """The encoder of these settings, untrained."""
    return ViT(args.image_size, args.patch_size, args.dim, args.depth, args.heads,
               args.cls_layer)


def seed_and_make_encoder(args: Namespace) -> ViT:
    """Seed torch's global generator, then make the encoder with the first weights of a run."""
    torch.manual_seed(args.seed)
    return make_encoder(args)


def build(args: Namespace) -> SER:
    """The model of a run, on the CPU: MoCo-v3 + SER."""
    encoder = seed_and_make_encoder(args)     # the heads below are sampled by this seed, too
    base = MoCoV3(encoder, hidden=args.moco_hidden)
    return SER(base, args.equiv_layers, args.weight, args.temperature)


def adamw(model: nn.Module, args: Namespace) -> Optimizer:
    """The optimizer of all that is trained. Its rate is set before every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, weight_decay=args.weight_decay, fused=True)


def learning_rate(args: Namespace, epoch: float, end: float = 0.0) -> float:
    """A linear warmup, then half a cosine to `end`, which only paper/methods need."""
    peak = args.base_lr * args.batch_size / 256
    if epoch < args.warmup_epochs:
        return peak * epoch / args.warmup_epochs
    progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, args: Namespace, epoch: float) -> None:
    """Set the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, epoch)


def save(path: Path, **state: Any) -> None:
    """Write beside `path`, then rename, so a crash leaves a whole file, old or new."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(path: str | Path) -> dict:
    """What a checkpoint holds. Exits if the settings of a run are not in it."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if "settings" not in state:
        sys.exit(f"{path} is no checkpoint of ser.py; paper/experiments/convert.py makes one "
                 "of timm's or moco-v3's weights")
    return state


def load_encoder(path: str | Path) -> ViT:
    """The encoder, in eval mode, from a checkpoint of any method."""
    state = load_checkpoint(path)
    encoder = make_encoder(Namespace(**state["settings"]))
    encoder.load_state_dict(state["encoder"])
    return encoder.eval()


def from_rank_0(value: Any) -> Any:
    """The value of rank 0, on all ranks, which call this together."""
    values = [value]     # `broadcast_object_list` fills a list
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def resume(path: Path, settings: dict, model: nn.Module, optimizer: Optimizer) -> int:
    """Load the checkpoint of a run, if there is one; return its step, or 0. Rank 0 reads it for
    all, as other nodes may not see its folder. Exits if the run had other settings."""
    _, rank = ranks_and_rank()
    begun = rank == 0 and path.exists()
    state = from_rank_0(load_checkpoint(path) if begun else None)
    if state is None:
        return 0

    may_differ = (
        "data", "out",     # folders may move, as the names of the images are compared
        "device",          # a run may move between CPU and GPU with the same --bf16
        "workers", "log_every", "save_every")     # they change no result
    saved = state["settings"]
    differ = [
        f"{name} {saved.get(name)} (now {settings.get(name)})"
        for name in saved | settings
        if name not in may_differ and saved.get(name) != settings.get(name)]
    if differ:
        sys.exit(f"{path} was trained with {', '.join(differ)}: use that, or a new --out")

    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# Other methods replace some of the four functions that `train` calls:
#     build(args)                         makes a module like `SER`, which returns a dict with
#                                         `loss`, and has a base method as `base`
#     make_dataset(source, args)          makes a data set like that of `two_view_dataset`
#     make_optimizer(model, args)         makes the optimizer
#     schedule(optimizer, args, epoch)    called before each step, sets its learning rates and
#                                         what else changes from step to step
def train(args: Namespace, build: Callable = build, make_dataset: Callable = two_view_dataset,
          make_optimizer: Callable = adamw, schedule: Callable = set_learning_rate) -> Path:
    """Run or continue a training; return its checkpoint's path. The caller then leaves the
    group of processes by `leave_group`."""
    # Images and steps.
    device = setup()
    ranks, rank = ranks_and_rank()
    source, names_checksum = find_images(args)
    check_settings(args, len(source), ranks)
    steps_per_epoch = len(source) // args.batch_size
    steps = max(1, round(args.epochs * steps_per_epoch))

    # Model and optimizer.
    model = build(args).to(device)
    if ranks > 1 and device.type == "cuda":     # as MoCo-v3 does; CPUs have no SyncBatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)

    # Given device_ids, DDP would copy the geometry and augmentations to the GPU, too.
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = make_optimizer(model, args)

    # What the checkpoint and the log say of the run.
    settings = Namespace(
        **vars(args), method=f"{type(model).__name__} on {type(model.base).__name__}",
        images=len(source), names_checksum=names_checksum, steps=steps, device=device.type,
        ranks=ranks, b2=ranks * b2_per_rank(args, ranks))
    path = Path(args.out, "last.pt")
    start = resume(path, vars(settings), model, optimizer)

    # One loader for all steps that are left. `batch_items` gives it an Item for each image.
    loader = torch.utils.data.DataLoader(
        make_dataset(source, args), batch_sampler=batch_items(len(source), args, start, steps),
        num_workers=args.workers, pin_memory=device.type == "cuda")

    log, bar = open_log(path.with_name("log.jsonl"), settings, start)
    if rank == 0:
        print_plan(settings, start)

    for step, loaded in enumerate(loader, start):
        # The seed is for base methods that sample.
        torch.manual_seed(seed_of(args.seed, "step", step, rank))
        schedule(optimizer, args, step / steps_per_epoch)
        model.base.update(step / steps)

        # Views. For each, `loaded` has pixels and Augmentation, as PyTorch collates them.
        loaded = [(pixels.to(device, non_blocking=True), aug) for pixels, aug in loaded]
        views = make_views(loaded, args, step)
        if step == 0 and rank == 0 and views[0].b2 is not None:
            save_views(path.with_name("views.png"), views, args.patch_size)

        # Forward.
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            losses = wrapped(views)

        # Backward and step.
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        bar.update(args.batch_size)

        # Log and save. A logged loss that is not finite ends the run, before weights are saved.
        # The encoder is also saved apart, as evaluations do not know the method.
        done = step + 1
        save_now = done == steps or done % (args.save_every or steps_per_epoch) == 0
        if save_now or step == start or done % args.log_every == 0:
            log_and_check(log, bar, done, losses, optimizer.param_groups[0]["lr"])
        if save_now and rank == 0:
            save(path, step=done, settings=vars(settings), model=model.state_dict(),
                 encoder=model.base.encoder.state_dict(), optimizer=optimizer.state_dict())

    return path


# ==== 9. Around it, not needed for the method: files, images, checks, output ==========
def find_images(args: Namespace) -> tuple[list[str] | Tensor, str]:
    """The images of a run, as sorted paths, and a checksum of their names. The images are
    below DATA/train or, without it, below DATA. Without --data, pixels of synthetic images."""
    if not args.data:
        images, _ = synthetic_images(4096, args.image_size, seed=0)
        return images, "synthetic"

    # If DATA has a folder train, the images are there. In a DATA that is itself called train,
    # such a folder is a class.
    root = Path(args.data)
    if os.path.basename(os.path.abspath(root)) != "train" and (root / "train").is_dir():
        root = root / "train"

    # This follows links, and leaves out hidden files and folders.
    found = glob.iglob("**/*", root_dir=root, recursive=True)
    names = sorted(name for name in found if name.lower().endswith(IMG_EXTENSIONS))
    if not names:
        sys.exit(f"--data {args.data}: no image ({', '.join(IMG_EXTENSIONS)}) below {root}")

    return [f"{root}/{name}" for name in names], checksum(names)


def checksum(texts: Sequence[str]) -> str:
    """The CRC-32 of a list of texts, as eight hexadecimal digits."""
    return f"{zlib.crc32(os.fsencode('/'.join(texts))):08x}"


def more_than_8_bits(image: Image.Image) -> bool:
    """Whether channels of an opened image have 16 bits or more, which Pillow would cut to 8."""
    # Gray images show it in their mode, such as "I;16". Colour images show it only in the file
    # format: "RGB;16B", or 65535 as the largest value of a PPM, or the tag 258 of a TIFF.
    formats = str([tile[3] for tile in image.tile])
    deep = any(mark in formats for mark in (";16B", ";16L", ";16N", "65535"))
    bits = getattr(image, "tag_v2", {}).get(258, (8,))
    return deep or max(bits) > 8 or image.mode.startswith(("I", "F"))


def read_image(path: str) -> Tensor:
    """An image file as (3, h, w) uint8 RGB."""
    # EXIF flags are ignored, as by torchvision's ImageFolder, which MoCo-v3 takes.
    try:
        with Image.open(path) as image:
            # Phones write MPO files, which are a photograph with others behind it.
            animated = getattr(image, "is_animated", False) and image.format != "MPO"
            if animated or more_than_8_bits(image):
                raise ValueError("it is an animation, or has more than 8 bits a channel")
            return pil_to_tensor(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:     # of many kinds, most of them without the path
        raise OSError(f"cannot read {path}: {error}. Put an image of the same name in its "
                      "place, and give the same command again") from None


def synthetic_images(n: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """n images of six textures, (n, 3, size, size) uint8, and labels 0 to 5, (n,)."""
    generator = rng("drawn", n, size, seed)
    left, top, direction, scale, contrast = torch.rand(5, n, 1, 1, generator=generator)

    axis = torch.linspace(-1, 1, size)
    x = axis + left - 0.5               # (n, 1, size)
    y = axis[:, None] + top - 0.5       # (n, size, 1)

    angle = 2 * math.pi * direction
    frequency = 7 + 7 * scale
    u = frequency * (x * angle.cos() + y * angle.sin())
    v = frequency * (y * angle.cos() - x * angle.sin())

    textures = torch.stack([                      # (6, n, size, size)
        u.sin(),                                  # stripes
        3 * u.sin() * v.sin(),                    # checks
        u.cos() + v.cos() - 1,                    # dots
        (1.5 * u.hypot(v)).sin(),                 # rings
        (u + 1.5 * v.sin()).sin(),                # waves
        4 * torch.maximum(u.cos(), v.cos()) - 3])     # nets
    numbers = torch.arange(n)
    labels = numbers % len(textures)
    ink = (3 * textures[labels, numbers]).sigmoid()     # (n, size, size)

    # Light from above and a smooth random tint make each place of an image distinct.
    light = 0.2 * (1 - axis[:, None]) + (0.3 + 0.3 * contrast) * ink
    tint = torch.randn(n, 3, 7, 7, generator=generator)
    tint -= tint.mean(1, keepdim=True)     # colour without brightness
    tint = F.interpolate(tint, (size, size), mode="bicubic")

    noise = torch.randn(n, 3, size, size, generator=generator)
    images = light[:, None] + 0.1 * tint + 0.08 * noise
    return (255 * images.clamp(0, 1)).to(torch.uint8), labels


def check_settings(args: Namespace, n_images: int, ranks: int) -> None:
    """Exit with one sentence if settings do not fit each other, the images or ranks."""
    batch = args.batch_size
    b2_total = ranks * b2_per_rank(args, ranks)
    least_b2 = max(2, ranks)     # two images for L_equiv, and one on each rank

    if args.image_size % args.patch_size > 0:
        sys.exit(f"--image-size {args.image_size}: should be a multiple of --patch-size")
    if args.dim % args.heads > 0:
        sys.exit(f"--dim {args.dim}: should be a multiple of --heads")
    if not 0 <= args.cls_layer < args.depth:
        sys.exit(f"--cls-layer {args.cls_layer}: should be 0 or more, and below --depth")
    if max(args.equiv_layers, default=0) > args.depth:
        sys.exit(f"--equiv-layers {args.equiv_layers}: should be at most --depth")
    if batch <= least_b2:     # it would leave no image for b1; refused without b2, too
        sys.exit(f"--batch-size {batch}: should be above {least_b2}")
    if batch > n_images or batch % ranks > 0:
        largest = min(batch, n_images) // ranks * ranks
        sys.exit(f"--batch-size {batch}: should be {largest}, or a smaller multiple of the "
                 f"{ranks} ranks; there are {n_images} images")
    if args.ratio > 0 and not least_b2 <= b2_total < batch:
        sys.exit(f"--ratio {args.ratio}: should be {least_b2 / batch:.3g} to below 1, or 0; "
                 f"now b2 has {b2_total} of {batch} images")


def print_plan(settings: Namespace, start: int) -> None:
    """Say what is trained, and what L_equiv would be at chance."""
    precision = "bfloat16" if settings.bf16 else "float32"
    print(f"{settings.images:,} images of {settings.data or 'synthetic textures'}; steps {start} "
          f"to {settings.steps} on {settings.ranks} x {settings.device}, in {precision}")

    line = f"a batch has {settings.batch_size} images, {settings.b2} of them moved (b2)"
    if settings.equiv_layers:
        # At chance, all logits are equal. The tokens are counted in unscaled views.
        tokens = (settings.image_size // settings.patch_size) ** 2
        chance = math.log(1 + 2 * tokens * (settings.b2 - 1))
        line += f"; L_equiv is {chance:.1f} at chance"
    print(line)


def open_log(path: Path, settings: Namespace, start: int) -> tuple[TextIO, tqdm]:
    """A log, which gets a line of all settings, and a bar of images, both for rank 0 alone."""
    _, rank = ranks_and_rank()
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "a" if start > 0 else "w"     # a run that begins anew replaces the log
    log = open(path if rank == 0 else os.devnull, mode, buffering=1)     # line by line
    print(json.dumps(vars(settings)), file=log)

    batch = settings.batch_size
    bar = tqdm(total=settings.steps * batch, initial=start * batch, disable=rank > 0,
               unit=" images", unit_scale=True)
    return log, bar


def save_views(path: Path, views: Sequence[View], cell: int) -> None:
    """Draw rho_g(x1) and x2 of up to eight images, alike up to their jitter and resampling."""
    view1, view2 = views[:2]
    moved = rho(relative(view2.geometry, view1.geometry), view1.b2, cell)
    pairs = torch.stack([moved, view2.b2], dim=1)[:8].flatten(0, 1)
    save_image(pairs.cpu() * STD + MEAN, path, nrow=2)


def log_and_check(log: TextIO, bar: tqdm, step: int, losses: dict, lr: float) -> None:
    """Show and log means over ranks. All ranks call this. Exits if `loss` is not finite."""
    ranks, _ = ranks_and_rank()
    values = torch.stack(list(losses.values())).detach()
    if ranks > 1:
        dist.all_reduce(values)

    means = dict(zip(losses, (values / ranks).tolist())) | {"lr": lr}
    bar.set_postfix(means)
    line = {"step": step, **means, "images_per_s": bar.format_dict["rate"]}
    print(json.dumps(line), file=log)
    if not math.isfinite(means["loss"]):
        sys.exit(f"step {step}: the loss is {means['loss']}: lower --base-lr, in a new --out")


if __name__ == "__main__":
    train(parse())
    leave_group()
