"""Soft Equivariance Regularization (SER) for self-supervised vision transformers, in one file.

Self-supervised learning makes the final embedding of an image invariant to augmentations, and so
erases geometric structure. SER leaves that objective as it is and adds another one at an
intermediate layer, where the patch tokens still form a map of the image:

    f = f2 . f1    f1: the first blocks, which give a map of patch tokens; [CLS] enters with f2
    b1, b2         each batch has two parts: b1 gets the usual crops (policy T), b2, about 1% of
                   the images, gets invertible geometry from a group G in place of a crop (T_eq)
    L_inv          the base method's loss (here MoCo-v3's) on the final [CLS] of b1 and b2 together
    L_equiv        patch-wise NT-Xent on b2 between rho_g(f1(x1)) and f1(x2), where
                   x1 = rho_g1(x) and x2 = rho_g2(x) are its two views and g = g2 g1^-1
    loss           L_inv + lambda * L_equiv

    python ser.py                                                   a small ViT on drawn images
    python ser.py --data /imagenet --batch-size 256 --ratio 0.06    one GPU, or a CPU, or a Mac
    torchrun --nproc_per_node=8 ser.py --data /imagenet             the paper's main setting

1 Group (paper 3.1), 2 Views (3.2), 3 Encoder (3.1), 4 Equivariance loss (3.3), 5 Base method (4.1),
6 SER (Algorithm 1), 7 Config (4.1), 8 Data, 9 Training, 10 Command line. `# Paper:` marks what the
paper prescribes, `# Choice:` where it is silent, or the release (github.com/aitrics-chris/SER)
differs from it. Axes: B images (B1 of b1, B2 of b2), 3 x h x w pixels (S x S if square), N tokens
on a grid of H x W (rows first), D width, K projection, R ranks.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterator, NamedTuple, Sequence

os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")   # before torch; for a Mac's GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor, rgb_to_grayscale, to_pil_image
from tqdm import tqdm

class UserError(ValueError):
    """A mistake that a person can mend: one line on stderr and exit code 2."""

def require(ok: bool, message: str) -> None:
    """Raise UserError(message), which names the value and the way out, unless `ok`."""
    if not ok:
        raise UserError(message)

def setting(default: Any, least: float, most: float, text: str) -> Any:
    """A field of Config: its default, its range (ignored for a text) and its help."""
    return dataclasses.field(default=default, metadata={"range": (least, most), "help": text})

# ==== 1. Group: one operator moves pixels and tokens (paper 3.1) ==================================
# G holds quarter turns, horizontal flips and anisotropic scaling. Its action rho_g is the same for
# an image and for its token map: turns and flips permute pixels or tokens, scaling resizes. Nothing
# of it is learned. Functions meant to be copied into other code write torch.Tensor in full.

class Geometry(NamedTuple):
    """An element of G for each image of a batch; scaling is stored as the grid that it leads to.
    flip and turns stay on the CPU, where reading them does not wait for a GPU."""
    # Choice: one grid for all images of a view, so that they form one tensor, as in the release.
    flip: torch.Tensor       # (B,) bool, horizontal flip, applied first
    turns: torch.Tensor      # (B,) int64 in 0..3, counter-clockwise quarter turns, applied second
    grid: tuple[int, int]    # (H, W) of the result in tokens, rows first

def sample_geometry(batch: int, grid: int = 14, area: tuple[float, float] = (0.7, 1.3),
                    aspect: tuple[float, float] = (3 / 4, 4 / 3),
                    elements: tuple[str, ...] = ("rot90", "hflip", "scale"),
                    generator: torch.Generator | None = None) -> Geometry:
    """Draw a flip and turns per image, and one grid for all; `grid`: side of the unscaled map.

    The grid has grid^2 tokens times a uniform `area`, at a log-uniform W / H; its sides are
    rounded, each 10 to 18 for grid 14. An element that `elements` lacks stays the identity, and the
    draws of the others do not change. Raises ValueError for an unknown element."""
    if not set(elements) <= {"rot90", "hflip", "scale"}:
        raise ValueError(f"group {' '.join(elements)}: choose among rot90 hflip scale")
    flip = (torch.rand(batch, generator=generator) < 0.5) & ("hflip" in elements)
    turns = torch.randint(4, (batch,), generator=generator) * ("rot90" in elements)
    u, v = torch.rand(2, generator=generator).tolist()
    if "scale" not in elements:
        return Geometry(flip, turns, (grid, grid))
    # Choice: [0.7, 1.3] (4.1) bounds the area, [3/4, 4/3] the aspect, both as in the release.
    tokens = grid ** 2 * (area[0] + u * (area[1] - area[0]))
    width_to_height = aspect[0] * (aspect[1] / aspect[0]) ** v
    height = max(1, round(math.sqrt(tokens / width_to_height)))
    width = max(1, round(math.sqrt(tokens * width_to_height)))
    return Geometry(flip, turns, (height, width))

def relative(g2: Geometry, g1: Geometry) -> Geometry:
    """The element g = g2 g1^-1 that takes view 1 to view 2 (paper 3.1), on the grid of g2.

    Let Q be a quarter turn and M the flip, so that an element is Q^t M^m. A mirror image turns the
    other way round, M Q = Q^-1 M, hence
        Q^t2 M^m2 (Q^t1 M^m1)^-1 = Q^(t2 - s t1) M^(m1 xor m2),   s = -1 if m1 != m2, else 1.
    Scaling drops out: turns and flips commute with resizing (an odd turn swaps H and W), so that
    rho resizes once, last, to g.grid, whatever size g1 gave. So x2 = rho_g(x1), exactly where
    nothing is scaled, else up to resampling."""
    flip = g1.flip ^ g2.flip
    s = torch.where(flip, -1, 1)
    return Geometry(flip, (g2.turns - s * g1.turns) % 4, g2.grid)

def resize(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resample (B, C, h, w), float or uint8, to (B, C, *size): one operator for crops, b2, tokens
    and position codes (3.2). antialias=True does to a tensor what Pillow does to an image."""
    if x.shape[-2:] == size:
        return x
    return torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)

def rho(g: Geometry, x: torch.Tensor, cell: int = 1) -> torch.Tensor:
    """The action rho_g (paper 3.1): (B, C, h, w) -> (B, C, H * cell, W * cell), (H, W) = g.grid.

    cell=1 moves token maps, cell=patch_size moves pixels, by the same code. Flips and turns are
    permutations, exact bit for bit; only a change of size resamples. Gradients flow through."""
    size = (g.grid[0] * cell, g.grid[1] * cell)
    moved = x.new_empty(*x.shape[:2], *size)
    for flip in (False, True):     # each image is in one of eight branches, moved as one batch
        for turns in range(4):
            members = ((g.flip == flip) & (g.turns == turns)).nonzero().flatten()
            if len(members) > 0:
                members = members.to(x.device, non_blocking=x.is_cuda)     # a GPU is not waited for
                part = x[members].flip(-1) if flip else x[members]
                part = torch.rot90(part, turns, (-2, -1))
                moved[members] = resize(part, size)
    return moved

# ==== 2. Views: T for b1, T_eq for b2 (paper 3.2) =================================================
# The loader's processes decode an image once and cut its views; the device moves b2 and jitters all
# images. Crop and jitter are drawn from (seed, epoch, image), geometry from (seed, step, view), so
# that a resumed run goes on with the same draws. They travel with the view that they made: SER
# reads the geometry alone, and methods in paper/methods learn from the others.

class Policy(NamedTuple):
    """What T draws one view from (flip, colour jitter and grayscale are alike for all views)."""
    size: int                            # side of the view, pixels
    area: tuple[float, float] | None     # of the crop, share of the image; None: plain centre crop
    blur: float                          # probability
    solarize: float                      # probability
    blur_max: float = 2.0                # largest standard deviation of the blur, pixels

class Crop(NamedTuple):
    """Where a view was cut, in shares of the image's height and width, so that it holds at any
    size. The data loader collates the Crops of a batch into one Crop of (B,) tensors."""
    top: float = 0.0
    left: float = 0.0
    height: float = 1.0
    width: float = 1.0
    flip: bool = False     # mirrored after the cut

class Jitter(NamedTuple):
    """What is done to a view's colours; the defaults do nothing. Collated as Crop is."""
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0                    # shift, share of the colour circle
    order: Tensor = torch.arange(4)     # order[k]: which of the four above is applied k-th
    gray: bool = False
    blur: float = 0.0                   # standard deviation, pixels
    solarize: bool = False

class View(NamedTuple):
    """One view of every image of the batch, and what made it."""
    images: list[Tensor]          # [b1 (B1, 3, S, S), b2 (B2, 3, h, w)] or one alone; normalised
    crop: Crop                    # rows: b1, then b2
    jitter: Jitter                # rows: b1, then b2
    geometry: Geometry | None     # of b2; None without b2

class Batch(NamedTuple):
    """What a model is called with."""
    views: list[View]

class Key(NamedTuple):
    """Asks the data set for an image's views."""
    epoch: int
    index: int       # of the image in the data set
    partner: int     # the image at the even place of its pair 2i, 2i + 1 of the rank's batch (STL)
    in_b2: bool

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)     # of ImageNet, for images in [0, 1]
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

def normalise(x: Tensor) -> Tensor:
    """Images in [0, 1] -> what the encoder takes."""
    # Not on a Mac's GPU, which may read what was copied "non-blocking" after it was freed.
    return (x - MEAN.to(x, non_blocking=x.is_cuda)) / STD.to(x, non_blocking=x.is_cuda)

def seed_of(*key: Any) -> int:
    """A seed that depends on the whole key: Python hashes its text with SHA-512."""
    return random.Random(repr(key)).getrandbits(63)

def rng(*key: Any) -> torch.Generator:
    """A CPU generator seeded by the key."""
    return torch.Generator().manual_seed(seed_of(*key))

def seed_draws(*key: Any) -> None:
    """Seed the global CPU generators: Python's, and torch's, as torchvision takes no other."""
    random.seed(seed_of(*key))
    torch.default_generator.manual_seed(seed_of(*key))     # torch.manual_seed is slow

def sample_crop(image: Tensor, area: tuple[float, float] | None) -> Crop:
    """torchvision's RandomResizedCrop of (3, h, w) and a flip; for area None the plain centre."""
    h, w = image.shape[-2:]
    if area is None:
        side = min(h, w) * 224 / 256     # as if the shorter side became 256 and 224 were cut out
        return Crop((1 - side / h) / 2, (1 - side / w) / 2, side / h, side / w)
    top, left, height, width = RandomResizedCrop.get_params(image, list(area), [3 / 4, 4 / 3])
    return Crop(top / h, left / w, height / h, width / w, flip=random.random() < 0.5)

def sample_jitter(policy: Policy) -> Jitter:
    """MoCo-v3's draws for one image: colour jitter (.4, .4, .2, .1), in random order, with
    probability .8, grayscale with .2, blur and solarization with the policy's. A plain centre crop
    gets no jitter."""
    jitter = Jitter()
    if policy.area is None:
        return jitter
    if random.random() < 0.8:
        jitter = Jitter(brightness=random.uniform(0.6, 1.4), contrast=random.uniform(0.6, 1.4),
                        saturation=random.uniform(0.8, 1.2), hue=random.uniform(-0.1, 0.1),
                        order=torch.randperm(4))
    gray = random.random() < 0.2
    blur = random.uniform(0.1, policy.blur_max) if random.random() < policy.blur else 0.0
    solarize = random.random() < policy.solarize
    return jitter._replace(gray=gray, blur=blur, solarize=solarize)

def cut(image: Tensor, crop: Crop, size: int) -> Tensor:
    """(3, h, w) -> (3, size, size): the crop, resized, then flipped."""
    h, w = image.shape[-2:]
    top = round(crop.top * h)
    left = round(crop.left * w)
    bottom = top + max(1, round(crop.height * h))
    right = left + max(1, round(crop.width * w))
    part = resize(image[None, :, top:bottom, left:right], (size, size))[0]
    return part.flip(-1) if crop.flip else part

class Dataset(torch.utils.data.Dataset):
    """Key -> ([(pixels (3, S, S) uint8, Crop, Jitter) of each view], name of a broken file or "").
    source: paths, or the images (n, 3, h, w) uint8 themselves."""
    def __init__(self, source: Sequence[str] | Tensor, policies: Sequence[Policy], seed: int):
        self.source = source
        self.policies = policies
        self.seed = seed

    def draw(self, key: Key, image: Tensor) -> list[tuple[Crop, Jitter]]:
        """What makes the views of an image. The data set of another method may override it."""
        seed_draws(self.seed, "image", key.epoch, key.index)
        draws = []
        for policy in self.policies:
            # Paper: 3.2. T_eq keeps the jitter of T but not its crop: g acts on whole images.
            # Choice: `cut` makes whole images square first, S x S.
            crop = Crop() if key.in_b2 else sample_crop(image, policy.area)
            draws.append((crop, sample_jitter(policy)))
        return draws

    def __getitem__(self, key: Key) -> tuple[list[tuple[Tensor, Crop, Jitter]], str]:
        broken = ""
        image = torch.zeros(3, 8, 8, dtype=torch.uint8)     # black, if no file can be read
        for place in range(key.index, key.index + 8):       # the image, then those after it
            item = self.source[place % len(self.source)]
            try:
                image = item if isinstance(item, Tensor) else read_image(item)
                break
            except Exception as error:     # decoders raise what they like
                broken = broken or f"{item} ({error})"
        views = [(cut(image, crop, policy.size), crop, jitter)
                 for policy, (crop, jitter) in zip(self.policies, self.draw(key, image))]
        return views, broken

def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of (n, 3, h, w) by `shift` (n, 1, 1, 1) of a full circle (hexcone model)."""
    r, g, b = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    c = torch.where(chroma == 0, 1, chroma)     # what divides: gray has hue 0
    hue = torch.where(value == g, 2 + (b - r) / c, 4 + (r - g) / c)
    hue = torch.where(value == r, (g - b) / c, hue)     # in sextants: red 0, green 2, blue 4
    # Back to RGB: a channel is value - chroma * max(0, min(k, 4 - k, 1)), k = (i + hue) mod 6.
    k = torch.cat([(i + hue + 6 * shift) % 6 for i in (5, 3, 1)], dim=1)     # red, green, blue
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur (n, 3, h, w) by sigma (n, 1, 1, 1), in pixels; the borders are mirrored."""
    n, _, h, w = x.shape
    radius = min(6, h - 1, w - 1)     # 6: three times the largest sigma
    offsets = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.softmax(-offsets ** 2 / (2 * sigma.view(n, 1) ** 2), dim=1)     # adds up to 1
    kernel = kernel.repeat_interleave(3, dim=0)     # (3 n, 2 radius + 1), a row for each channel
    x = F.pad(x, [radius] * 4, mode="reflect").flatten(0, 1)[None]
    x = F.conv2d(x, kernel[:, None, :, None], groups=3 * n)
    return F.conv2d(x, kernel[:, None, None, :], groups=3 * n).view(n, 3, h, w)

# torchvision's operations, with a parameter (n, 1, 1, 1) of its own for each of n images in [0, 1].
# other.lerp(x, f) is x for f = 1, `other` for 0, and beyond x for more than 1.
OPERATIONS = {
    "brightness": lambda x, f: (f * x).clamp(0, 1),
    "contrast": lambda x, f: rgb_to_grayscale(x).mean((2, 3), keepdim=True).lerp(x, f).clamp(0, 1),
    "saturation": lambda x, f: rgb_to_grayscale(x).lerp(x, f).clamp(0, 1),
    "hue": shift_hue,
    "gray": lambda x, _: rgb_to_grayscale(x, num_output_channels=3),
    "blur": gaussian_blur,
    "solarize": lambda x, _: torch.where(x >= 128 / 255, 1 - x, x),
}

def photometric(x: Tensor, jitter: Jitter) -> Tensor:
    """Images (B, 3, h, w) in [0, 1], each jittered by its own row of `jitter`, and normalised."""
    x = x.clone()     # do not change the caller's tensor
    last = torch.tensor([4, 5, 6]).expand(len(x), 3)
    order = torch.cat([jitter.order, last], dim=1)     # (B, 7), numbers in OPERATIONS
    for place in range(7):     # each image's place-th operation, equal ones together
        for number, name in enumerate(OPERATIONS):
            value = getattr(jitter, name)
            drawn = value != getattr(Jitter(), name)     # who drew nothing has the default
            rows = (drawn & (order[:, place] == number)).nonzero().flatten()
            if len(rows) > 0:     # rows are on the CPU, so that nothing waits for a GPU
                value = value[rows].view(-1, 1, 1, 1).to(x, non_blocking=x.is_cuda)
                rows = rows.to(x.device, non_blocking=x.is_cuda)
                x[rows] = OPERATIONS[name](x[rows], value)
    return normalise(x)

def partition(indices: list[int], epoch: int, n_b2: int, rank: int, ranks: int) -> list[Key]:
    """A rank's keys for a step. indices: the step's images, the b1 of all ranks, then the b2 of all
    ranks; the rank takes its slice of each. n_b2: |b2| of one rank."""
    n_b1 = len(indices) // ranks - n_b2
    b1 = indices[:n_b1 * ranks]
    b2 = indices[n_b1 * ranks:]
    own = b1[rank * n_b1:(rank + 1) * n_b1] + b2[rank * n_b2:(rank + 1) * n_b2]
    return [Key(epoch, index, own[i // 2 * 2], i >= n_b1) for i, index in enumerate(own)]

def make_views(loaded: list[tuple[Tensor, Crop, Jitter]], cfg: Common, step: int, rank: int = 0,
               ranks: int = 1) -> Batch:
    """Finish the views on the device: the geometry of b2, then the jitter of all. loaded: for each
    view, pixels (B, 3, S, S) uint8 on the device, rows b1 then b2, and their draws on the CPU.
    cfg: the settings (section 7)."""
    n_b2 = cfg.b2_images(ranks)     # |b2| of this rank
    views = []
    for v, (pixels, crop, jitter) in enumerate(loaded):
        sizes = [len(pixels) - n_b2, n_b2]     # of b1 and b2
        parts = list((pixels.float() / 255).split(sizes))
        columns = [column.split(sizes) for column in jitter]
        jitters = [Jitter(*rows) for rows in zip(*columns)]
        geometry = None
        if n_b2 > 0:
            # Every rank draws for the whole b2 of this step and view, and keeps its own rows: all
            # share the grid, and none repeats the draws of another.
            generator = rng(cfg.seed, "geometry", step, v)
            g = sample_geometry(ranks * n_b2, grid=pixels.shape[-1] // cfg.patch_size,
                                elements=cfg.group, generator=generator)
            own = slice(rank * n_b2, (rank + 1) * n_b2)
            geometry = Geometry(g.flip[own], g.turns[own], g.grid)
            parts[1] = rho(geometry, parts[1], cfg.patch_size)
        images = [photometric(x, drawn) for x, drawn in zip(parts, jitters) if len(x) > 0]
        views.append(View(images, crop, jitter, geometry))
    return Batch(views)

# ==== 3. Encoder: a ViT into which [CLS] enters late (paper 3.1) ==================================
# f1 is the blocks up to the layer of L_equiv, whose tokens are a map of the image; f2 is the rest.
# By default [CLS] is inserted right between them; the ablations insert it elsewhere, and a map
# never holds it. b1 and b2 differ in size, yet pass through together: b2 is 1% of the images, too
# few to fill a GPU with a pass of their own.

def pack(parts: Sequence[Tensor]) -> Tensor:
    """The tokens of all parts (B_i, N_i, D) end to end: (sum of B_i * N_i, D)."""
    return torch.cat([tokens.flatten(0, 1) for tokens in parts])

def unpack(x: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Undo `pack`: (sum of B_i * N_i, C) -> (B_i, N_i, C) of each part, for any width C. Of parts
    only the shapes are read."""
    sizes = [tokens.shape[:2] for tokens in parts]
    pieces = x.split([B * N for B, N in sizes])
    return [piece.view(B, N, -1) for piece, (B, N) in zip(pieces, sizes)]

class Block(nn.Module):
    """A pre-norm transformer block with timm's parameter names, on the parts of a batch, (B_i, N_i,
    D) each. Attention works on one part at a time, all else on all tokens in one piece."""
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        x = pack(parts)
        x = x + self.attention(x, parts)
        x = x + self.feed_forward(x)
        return unpack(x, parts)

    def attention(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        attended = []
        qkv = self.attn["qkv"](self.norm1(x))
        for part in unpack(qkv, parts):
            part = part.unflatten(2, (3, self.heads, -1))             # (B, N, 3, heads, D / heads)
            q, k, v = part.permute(2, 0, 3, 1, 4)                     # (B, heads, N, D / heads)
            out = F.scaled_dot_product_attention(q, k, v)
            attended.append(out.transpose(1, 2).flatten(2))                  # (B, N, D)
        return self.attn["proj"](pack(attended))

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.mlp["fc1"](self.norm2(x)))
        return self.mlp["fc2"](hidden)

def sincos_codes(grid: int, dim: int) -> Tensor:
    """MoCo-v3's fixed codes, (1, dim, grid, grid): sin and cos of the row, then of the column."""
    omega = 10000 ** -(torch.arange(dim // 4) / (dim // 4))
    angles = omega[:, None] * torch.arange(grid)                             # (dim / 4, grid)
    codes = torch.cat([angles.sin(), angles.cos()])                          # (dim / 2, grid)
    rows = codes[:, :, None].expand(-1, grid, grid)          # the same along a row
    return torch.cat([rows, rows.mT])[None]                  # rows.mT: the same along a column

class Encoded(NamedTuple):
    """What the encoder makes of one part of a batch."""
    cls: Tensor                  # (B, D), LayerNorm of the final [CLS]
    maps: dict[int, Tensor]      # layer -> (B, D, H, W), patch tokens after that block, no norm
    early: dict[int, Tensor]     # layer -> (B, D), [CLS] after that block where it is in, no norm

class ViT(nn.Module):
    """f = f2 . f1: a vision transformer whose [CLS] token enters after block `cls_layer`. With
    cls_layer 0 it computes what timm's ViT does. Raises ValueError for a bad shape."""
    def __init__(self, image_size: int = 224, patch_size: int = 16, dim: int = 384, depth: int = 12,
                 heads: int = 6, cls_layer: int = 3, position: str = "learned"):
        super().__init__()
        fit = math.ceil(image_size / patch_size) * patch_size
        require(image_size == fit,
                f"--image-size {image_size}: no multiple of --patch-size {patch_size}, try {fit}")
        require(dim % heads == 0 and dim % 4 == 0,
                f"--dim {dim}: must be a multiple of 4 and of --heads {heads}")
        require(0 <= cls_layer < depth, f"--cls-layer {cls_layer}: must lie in 0..{depth - 1}")
        require(position in ("learned", "sincos"), f"--position {position}: learned or sincos")
        self.shape = dict(image_size=image_size, patch_size=patch_size, dim=dim, depth=depth,
                          heads=heads, cls_layer=cls_layer, position=position)
        self.grid = image_size // patch_size
        self.patch_size = patch_size
        self.dim = dim
        self.depth = depth
        self.cls_layer = cls_layer
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch_size, patch_size)})
        self.pos_embed = nn.Parameter(torch.empty(1, dim, self.grid, self.grid))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 1e-6)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        # MoCo-v3: Xavier-uniform matrices, zero biases, a random frozen patch embedding. qkv is
        # three D x D matrices in one: a gain of sqrt(2) turns the bound of the whole,
        # sqrt(6 / (4 D)), into that of each, sqrt(6 / (2 D)).
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                gain = math.sqrt(2) if name.endswith("qkv") else 1.0
                nn.init.xavier_uniform_(module.weight.flatten(1), gain)
                nn.init.zeros_(module.bias)
        self.patch_embed.requires_grad_(False)
        # Choice: learned codes, as in the release and in Table 1 (42.9 M parameters; fixed codes
        # would make it 42.8 M), resampled to the grids of b2. [CLS] has none.
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if position == "sincos":
            self.pos_embed.requires_grad_(False).copy_(sincos_codes(self.grid, dim))

    def embed(self, x: Tensor) -> Tensor:
        """Patch tokens with position codes: (B, 3, h, w) -> (B, N, D)."""
        h, w = x.shape[-2:]
        require(h % self.patch_size == 0 and w % self.patch_size == 0,
                f"{h} x {w} pixels are off the grid of patch size {self.patch_size}")
        tokens = self.patch_embed["proj"](x)                                 # (B, D, H, W)
        codes = resize(self.pos_embed, tuple(tokens.shape[-2:]))             # (1, D, H, W)
        return (tokens + codes).flatten(2).mT

    def forward(self, images: Sequence[Tensor], map_layers: Sequence[int] = ()) -> list[Encoded]:
        """Encode parts (B_i, 3, h_i, w_i) of any sizes in one pass. map_layers: the blocks to fill
        Encoded.maps and .early for; 0 is the embedding, in front of the first block."""
        if isinstance(images, Tensor):
            raise TypeError("the encoder takes a list of image tensors: encoder([x])")
        encoded = [Encoded(None, {}, {}) for _ in images]     # cls follows at the end
        tokens = [self.embed(x) for x in images]
        for layer in range(self.depth + 1):
            if layer > 0:
                tokens = self.blocks[layer - 1](tokens)
            if layer in map_layers:
                for x, t, found in zip(images, tokens, encoded):
                    if layer > self.cls_layer:     # then [CLS] is token 0
                        found.early[layer] = t[:, 0]
                        t = t[:, 1:]
                    rows = x.shape[-2] // self.patch_size
                    found.maps[layer] = t.mT.unflatten(2, (rows, -1))
            if layer == self.cls_layer:     # (B, N, D) -> (B, 1 + N, D)
                cls = self.cls_token
                tokens = [torch.cat([cls.expand(len(t), -1, -1), t], dim=1) for t in tokens]
        return [found._replace(cls=self.norm(t[:, 0])) for found, t in zip(encoded, tokens)]

    def last_cls(self, x: Tensor, n: int = 4) -> Tensor:
        """(B, n * D), the input of the linear probe (paper 4.1): LayerNorm of [CLS] after each of
        the last n blocks. Raises ValueError if one of them has none."""
        require(1 <= n <= self.depth - self.cls_layer,
                f"last_cls: n = {n}, but [CLS] enters after block {self.cls_layer} of {self.depth}")
        last = range(self.depth - n + 1, self.depth + 1)
        early = self([x], last)[0].early
        return torch.cat([self.norm(early[layer]) for layer in last], dim=1)

# ==== 4. Equivariance loss: NT-Xent over patches (paper 3.3) ======================================
# An anchor is one token of rho_g(f1(x1)). Its positive is the token of f1(x2) at the same place;
# its negatives are all tokens, of both views, of the *other* images of b2, over all ranks. Nothing
# is detached: anchors, positives and negatives all carry gradient.
# Paper: the formula of 3.3; the comment in Algorithm 1, "other images/tokens", is looser.

class AllGather(torch.autograd.Function):
    """(B, ...) of every rank -> (R * B, ...), in the order of the ranks, with the gradient.

    A rank's rows enter the loss of every rank, so their gradient is the sum over ranks; with the
    mean that DDP then takes, R ranks equal one process. If shapes differ, all raise ValueError."""
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        shapes = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(shapes, tuple(x.shape))
        if len(set(shapes)) > 1:
            raise ValueError(f"the batches of the ranks differ in shape: {shapes}")
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in shapes]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)   # reduced in place
        torch.distributed.all_reduce(gradient)
        ranks = torch.distributed.get_world_size()
        return gradient.chunk(ranks)[torch.distributed.get_rank()]

def patch_ntxent(z: torch.Tensor, z_prime: torch.Tensor, temperature: float = 0.3,
                 chunk: int | None = None) -> torch.Tensor:
    """L_equiv (paper 3.3 and Eq. 3), the mean over images i and places j of

        -log  exp s(z_ij, z'_ij)
              / (exp s(z_ij, z'_ij) + sum_{m != i, n} (exp s(z_ij, z_mn) + exp s(z_ij, z'_mn)))

    where s is the cosine divided by the temperature. z: (B, N, K), the projected tokens of
    rho_g(f1(x1)); z_prime: (B, N, K), those of f1(x2); floats, computed in fp32. Returns a scalar.
    With several ranks, anchors are local and keys come from all ranks; the mean over ranks is the
    loss of the whole batch. chunk: the number of anchors whose logits are held at a time (None: 32
    MB of logits); they are computed again in the backward pass, so that memory does not grow with
    the square of B * N, at equal value and gradient. Raises ValueError for unequal shapes, a
    temperature or chunk that is not positive, or a single image."""
    B, N, K = z.shape
    if z_prime.shape != z.shape or temperature <= 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"shapes {tuple(z.shape)} and {tuple(z_prime.shape)} must be equal, "
                         f"temperature {temperature} and chunk {chunk} positive")
    with torch.autocast(z.device.type, enabled=False):
        z = torch.nn.functional.normalize(z.float(), dim=-1)
        z_prime = torch.nn.functional.normalize(z_prime.float(), dim=-1)
        keys = torch.stack([z, z_prime], dim=1)                  # (B, 2, N, K)
        offset = 0                                               # index of this rank's first image
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            keys = AllGather.apply(keys)                         # (R * B, 2, N, K)
            offset = B * torch.distributed.get_rank()
        n_images = len(keys)
        if n_images < 2:
            raise ValueError("negatives are tokens of other images, and there is only one image")
        keys = keys.flatten(0, 2)                                # 2N of each image, side by side
        anchors = z.flatten(0, 1) / temperature                  # (B * N, K)
        positive = (anchors * z_prime.flatten(0, 1)).sum(1)      # (B * N,), s(z_ij, z'_ij)
        owner = torch.arange(offset, offset + B, device=z.device)
        owner = owner.repeat_interleave(N)                       # (B * N,), i of each anchor

        def loss_of(anchors, positive, owner, keys):     # the sum over a block of the anchors
            logits = (anchors @ keys.T).unflatten(1, (n_images, 2 * N))
            # own[a, m]: key image m is anchor a's own image i; its 2N tokens are no negatives. On
            # the second of two ranks with two images each (offset = 2), every row standing for N
            # anchors:
            #               m = 0 1 2 3
            #     i = 2         . . T .
            #     i = 3         . . . T
            own = owner[:, None] == torch.arange(n_images, device=owner.device)
            negatives = logits.masked_fill(own[:, :, None], -torch.inf).flatten(1)
            return (torch.logaddexp(positive, negatives.logsumexp(1)) - positive).sum()

        if chunk is None:
            chunk = max(1, 2 ** 23 // len(keys))     # 2^23 logits of 4 bytes
        if chunk >= B * N:     # one block: computing it twice would save nothing
            return loss_of(anchors, positive, owner, keys) / (B * N)
        from torch.utils.checkpoint import checkpoint     # here, so that the function can be copied
        total = 0.0
        for block in zip(anchors.split(chunk), positive.split(chunk), owner.split(chunk)):
            total = total + checkpoint(loss_of, *block, keys, use_reentrant=False,
                                       preserve_rng_state=False)
        return total / (B * N)

# ==== 5. Base method: MoCo-v3 (paper 4.1) =========================================================
# SER does not ask what the invariance loss is. A base method is a module with
#     base.encoder         the online ViT; SER runs it, once per step, on the parts of all views
#     base(views, cls)     L_inv; views: list[View], cls: the final [CLS] of each, (B, D)
#     base.update(p)       called by `train` before every forward pass, with p = step / steps
#     base.diagnostics     name -> scalar, what the last step measured, for the log

def ranks_and_rank() -> tuple[int, int]:
    """(R, this rank); (1, 0) in a single process."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0

def mlp(*widths: int) -> nn.Sequential:
    """MoCo-v3's head: no biases; BatchNorm and ReLU between the layers, BatchNorm without affine
    parameters at the end."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        layers += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU(True)]
    layers[-2:] = [nn.BatchNorm1d(widths[-1], affine=False)]     # in place of the last two
    return nn.Sequential(*layers)

def info_nce(q: Tensor, k: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Contrast each query, q (B, K), with the keys, k (B, K), of all images of all ranks; row i of
    k is the key of row i of q. Returns 2 * temperature (MoCo-v3's factor) times the cross-entropy,
    which is ln(R B) at chance, and the share of the queries that are nearest to their own key."""
    ranks, rank = ranks_and_rank()
    with torch.autocast(q.device.type, enabled=False):
        q = F.normalize(q.float(), dim=1)
        k = F.normalize(k.float(), dim=1)
        if ranks > 1:
            k = AllGather.apply(k)     # MoCo-v3's keys carry no gradient, so none flows back
        logits = q @ k.T / temperature                                            # (B, R * B)
        labels = torch.arange(len(q), device=q.device) + rank * len(q)
        top1 = (logits.argmax(1) == labels).float().mean()
        return 2 * temperature * F.cross_entropy(logits, labels), top1

@torch.no_grad()
def move_towards(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """slow <- momentum * slow + (1 - momentum) * fast, parameter by parameter."""
    for p, q in zip(slow.parameters(), fast.parameters()):
        p.lerp_(q, 1 - momentum)

class MoCoV3(nn.Module):
    """MoCo-v3 (Chen et al. 2021): the query of one view of an image is to find, among the keys of
    the batch, that of its other view. Keys are made by a momentum copy of the network."""
    def __init__(self, encoder: ViT, out_dim: int = 256, hidden: int = 4096,
                 temperature: float = 0.2, momentum: float = 0.99):
        super().__init__()
        self.temperature = temperature
        self.momentum = momentum
        self.encoder = encoder
        self.projector = mlp(encoder.dim, hidden, hidden, out_dim)
        self.predictor = mlp(out_dim, hidden, out_dim)
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.diagnostics: dict[str, Tensor | float] = {}

    def update(self, progress: float) -> None:
        """Move the momentum branch, before the keys are made; m rises to 1 on half a cosine."""
        m = 1 - (1 - self.momentum) * 0.5 * (1 + math.cos(math.pi * progress))
        move_towards(self.momentum_encoder, self.encoder, m)
        move_towards(self.momentum_projector, self.projector, m)
        self.diagnostics["momentum"] = m

    @torch.no_grad()
    def key(self, view: View) -> Tensor:
        """(B, K), by the momentum branch, without gradient."""
        parts = self.momentum_encoder(view.images)
        return self.momentum_projector(torch.cat([part.cls for part in parts]))

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """contrast(q1, k2) + contrast(q2, k1), as in the pseudo-code of MoCo-v3's paper."""
        q1 = self.predictor(self.projector(cls[0]))
        q2 = self.predictor(self.projector(cls[1]))
        k1 = self.key(views[0])
        k2 = self.key(views[1])
        loss12, top1 = info_nce(q1, k2, self.temperature)
        loss21, _ = info_nce(q2, k1, self.temperature)
        chance = 4 * self.temperature * math.log(len(q1) * ranks_and_rank()[0])
        self.diagnostics |= {"inv_top1": top1, "inv_chance": chance}
        return loss12 + loss21

# ==== 6. SER: Algorithm 1 around any base method ==================================================
# One pass of the encoder serves both losses: the final [CLS] of b1 and b2 goes to the base method,
# the token maps of b2 go to L_equiv.

def encode_views(encoder: ViT, views: list[View], layers: Sequence[int]) -> list[list[Encoded]]:
    """Encode the parts of all views, b1 and b2, in one pass; result[view][part]."""
    images = [part for view in views for part in view.images]
    encoded = encoder(images, layers)
    parts = len(views[0].images)
    return [encoded[i:i + parts] for i in range(0, len(encoded), parts)]

class SER(nn.Module):
    """The loss of a base method plus weight * L_equiv, which is summed over `pairs` and averaged
    over `layers`, each with a projector of its own. Raises ValueError for a wrong layer."""
    pairs: Sequence[tuple[int, int]] = ((0, 1),)     # of views; multicrop.py has more (A.1)

    def __init__(self, base: nn.Module, layers: Sequence[int] = (3,), weight: float = 0.5,
                 temperature: float = 0.3, out_dim: int = 512):
        super().__init__()
        self.base = base
        self.layers = layers
        self.weight = weight
        self.temperature = temperature
        dim = base.encoder.dim
        depth = base.encoder.depth
        self.heads = nn.ModuleDict()     # of L_equiv: layer -> projector
        for layer in layers:
            require(1 <= layer <= depth, f"--equiv-layers {layer}: must lie in 1..{depth}")
            # Paper: 3.3, two layers, GELU, 512. Choice: LayerNorm, no biases, as in the release.
            self.heads[str(layer)] = nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, out_dim, bias=False), nn.GELU(),
                nn.Linear(out_dim, out_dim, bias=False))

    def forward(self, batch: Batch, diagnose: bool = False) -> dict[str, Tensor | float]:
        """`loss`, which carries the gradient, its parts `inv` and `equiv`, and diagnostics."""
        views = batch.views
        encoded = encode_views(self.base.encoder, views, self.layers)

        # L_inv. Choice: one loss over b1 and b2, which are each other's negatives, as in the
        # release. With 3 of a rank's 256 images in b2, Eq. 3 read literally, a mean for each, would
        # weigh an image of b2 253 / 3 = 84 times one of b1.
        cls = []
        for parts in encoded:
            cls.append(torch.cat([part.cls for part in parts]))
        inv = self.base(views, cls)
        losses = {"loss": inv, "inv": inv.detach(), **self.base.diagnostics}
        if diagnose:     # 1: spread over the sphere, 0: collapsed to a point
            losses["feature_std"] = F.normalize(cls[0].detach().float(), dim=1).std(0).norm()
        if views[0].geometry is None:     # no b2: the base method alone
            return losses

        # L_equiv, on the token maps of b2, which is the last part of a view.
        equiv = 0.0
        equiv_chance = 0.0
        for layer in self.layers:
            project = self.heads[str(layer)]
            for first, second in self.pairs:
                g = relative(views[second].geometry, views[first].geometry)
                # In fp32, so that rho does not resample in bfloat16.
                h1 = encoded[first][-1].maps[layer].float()      # f1(x1), (B2, D, H1, W1)
                h2 = encoded[second][-1].maps[layer].float()     # f1(x2), (B2, D, H2, W2)
                aligned = rho(g, h1)                             # (B2, D, H2, W2)
                # Paper: 3.3, align first, then project.
                z = project(aligned.flatten(2).mT)               # (B2, N, K)
                z_prime = project(h2.flatten(2).mT)              # (B2, N, K)
                equiv = equiv + patch_ntxent(z, z_prime, self.temperature) / len(self.layers)
                negatives = 2 * z.shape[1] * (len(z) * ranks_and_rank()[0] - 1)
                equiv_chance += math.log(1 + negatives) / len(self.layers)
        if diagnose:     # patch_top1: of the last layer and pair
            losses |= {"equiv_chance": equiv_chance, "patch_top1": retrieval(z, z_prime)}
        # Paper: Eq. 3. L_equiv is computed with weight 0 too: the control differs in nothing else.
        return losses | {"loss": inv + self.weight * equiv, "equiv": equiv.detach()}

@torch.no_grad()
def retrieval(z: Tensor, z_prime: Tensor) -> Tensor:
    """Share of the tokens of z (B, N, K) whose most similar one in all of z_prime (B, N, K) is
    their counterpart; 1 / (B N) at chance."""
    with torch.autocast(z.device.type, enabled=False):     # in bfloat16 the nearest would tie
        z = F.normalize(z.flatten(0, 1).float(), dim=1)
        z_prime = F.normalize(z_prime.flatten(0, 1).float(), dim=1)
        blocks = [(rows @ z_prime.T).argmax(1) for rows in z.split(1024)]
    own = torch.arange(len(z), device=z.device)
    return (torch.cat(blocks) == own).float().mean()

# ==== 7. Config: every setting with its unit, the paper's value and its source ====================
# Every field is a flag: --batch-size sets batch_size. The defaults are the paper's main setting.

TINY = 1e-9     # the least value of a setting that must be positive
INF = math.inf
SMALL = dict(image_size=32, patch_size=4, dim=64, depth=4, heads=2, cls_layer=2, equiv_layers=(2,),
             ratio=0.125, crop_min=0.3, batch_size=128, epochs=8.0, warmup_epochs=1.0, base_lr=3e-3,
             workers=0)     # the method at a size for drawn images and two CPU cores

@dataclasses.dataclass(frozen=True)
class Common:
    """The settings of every base method. A subclass adds `program`, its name in messages, and
    `drawn`, what replaces the defaults without --data, where `draw_images` makes the images."""
    data: str = setting("", 0, 0, "folder of images, any depth, with or without train/")
    out: str = setting("runs/ser", 0, 0, "folder of the run; an existing run is continued")
    init: str = setting("", 0, 0, "checkpoint whose encoder the run begins with")
    image_size: int = setting(224, 16, INF, "side of a view, pixels (ViT-S/16: 224)")
    patch_size: int = setting(16, 1, INF, "side of a patch, pixels (ViT-S/16: 16)")
    dim: int = setting(384, 4, INF, "width of the tokens (ViT-S: 384)")
    depth: int = setting(12, 1, INF, "transformer blocks (ViT-S: 12)")
    # Choice: 6 heads as in DINO, DeiT and timm. MoCo-v3's ViT-S has 12, and the paper does not say.
    heads: int = setting(6, 1, INF, "attention heads")
    position: str = setting("learned", 0, 0, "position codes: learned, or sincos as in MoCo-v3")
    cls_layer: int = setting(3, 0, INF, "[CLS] enters after this block; 0: a plain ViT (paper: 3)")
    ratio: float = setting(0.01, 0, 1, "r, share of b2; 0: the base method alone (paper: 0.01)")
    weight: float = setting(0.5, 0, INF, "lambda of L_equiv; 0: the control (paper: 0.5)")
    temperature: float = setting(0.3, TINY, INF, "tau of L_equiv (paper: 0.3; DINO 0.5)")
    equiv_layers: tuple[int, ...] = setting((3,), 1, INF, "blocks with L_equiv (paper: 3)")
    group: tuple[str, ...] = setting(("rot90", "hflip", "scale"), 0, 0, "elements of G")
    crop_min: float = setting(0.08, TINY, 1, "least area of a crop, share of the image (MoCo-v3)")
    blur_max: float = setting(2.0, 0.1, 2, "largest blur, pixels (MoCo-v3: 2, on views of 224)")
    batch_size: int = setting(2048, 1, INF, "images per step, over all ranks (paper: 2048)")
    epochs: float = setting(100.0, TINY, INF, "passes over the data, also fractions (paper: 100)")
    warmup_epochs: float = setting(10.0, 0, INF, "epochs of linear warmup (paper: 10)")
    # Choice: 3e-4, as the release; the paper names none, MoCo-v3 has 1.5e-4 for 300 epochs.
    base_lr: float = setting(3e-4, TINY, INF, "learning rate, scaled by batch_size / 256")
    weight_decay: float = setting(0.1, 0, INF, "of AdamW, on all parameters (MoCo-v3: 0.1)")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of every random draw")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the training process loads")
    log_every: int = setting(20, 1, INF, "steps between log records")
    save_every: int = setting(0, 0, INF, "steps between checkpoints; 0: one per epoch")
    compile: bool = setting(False, 0, 1, "compile the transformer blocks")
    bf16: bool = setting(False, 0, 1, "bfloat16 on a CPU too: faster if it has AVX512_BF16")

    @property
    def lr(self) -> float:
        """Peak learning rate, linear in the total batch."""
        return self.base_lr * self.batch_size / 256

    @property
    def warmup(self) -> float:
        """Epochs of warmup: warmup_epochs, or a tenth of a run that is no longer than that."""
        return self.warmup_epochs if self.warmup_epochs < self.epochs else self.epochs / 10

    @property
    def policies(self) -> tuple[Policy, ...]:
        """T of every view of an image; here MoCo-v3's two."""
        area = (self.crop_min, 1.0)
        return (Policy(self.image_size, area, 1.0, 0.0, self.blur_max),
                Policy(self.image_size, area, 0.1, 0.2, self.blur_max))

    def dataset(self, source: Sequence[str] | Tensor) -> Dataset:
        """What draws and cuts the views."""
        return Dataset(source, self.policies, self.seed)

    def b2_images(self, ranks: int) -> int:
        """|b2| of a rank: r B / R, rounded, as all ranks have equally many: for r = .01 of 2048, 3
        on each of 8 ranks, 24 in all, but 20 on one rank."""
        return math.floor(self.ratio * self.batch_size / ranks + 0.5)

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """AdamW on all that is trained."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.lr, weight_decay=self.weight_decay, **options)

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """Called between backward pass and step, at a fractional epoch: sets the learning rate."""
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(epoch, self.warmup, self.epochs, self.lr)

@dataclasses.dataclass(frozen=True)
class Config(Common):
    """MoCo-v3 + SER, the paper's main setting."""
    moco_temperature: float = setting(0.2, TINY, INF, "temperature of InfoNCE (MoCo-v3: 0.2)")
    moco_momentum: float = setting(0.99, 0, 1, "first momentum, rising to 1 (MoCo-v3: 0.99)")
    moco_hidden: int = setting(4096, 1, INF, "hidden width of the heads (MoCo-v3: 4096)")
    drawn: ClassVar[dict[str, Any]] = SMALL | dict(moco_hidden=512)
    program: ClassVar[str] = "ser.py"     # in messages

def warmup_cosine(epoch: float, warmup: float, epochs: float, peak: float,
                  end: float = 0.0) -> float:
    """Linear from 0 to `peak` over the warmup, then half a cosine to `end`."""
    if epoch < warmup:
        return peak * epoch / warmup
    progress = min((epoch - warmup) / (epochs - warmup), 1)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))

def check_ranges(cfg: Any) -> None:
    """Raise UserError for a number outside the range of its setting."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        least, most = field.metadata["range"]
        for number in value if isinstance(value, tuple) else (value,):
            require(isinstance(number, str) or (least <= number <= most and number < INF),
                    f"--{field.name.replace('_', '-')} {number}: must lie in {least:g}..{most:g}")

def check(cfg: Common, ranks: int) -> None:
    """Raise UserError for settings out of range, or a batch that ranks, b1 and b2 cannot share."""
    check_ranges(cfg)
    fit = max(2, math.ceil(cfg.batch_size / ranks)) * ranks     # BatchNorm needs two images
    require(cfg.batch_size == fit, f"--batch-size {cfg.batch_size}: each of {ranks} ranks takes as "
            f"many images, and at least two: try {fit}")
    b2 = cfg.b2_images(ranks) * ranks
    least = max(2, ranks) / cfg.batch_size
    require(cfg.ratio == 0 or b2 >= 2, f"--ratio {cfg.ratio} of --batch-size {cfg.batch_size} is "
            f"{b2} images on {ranks} ranks, L_equiv needs 2: try --ratio {least:.3g}, or --ratio 0")
    require(set(cfg.group) <= {"rot90", "hflip", "scale"},
            f"--group {' '.join(cfg.group)}: choose among rot90 hflip scale")

# ==== 8. Data: image files, drawn images, and the order of a run ==================================
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".tif", ".tiff", ".webp")

def list_images(folder: str) -> list[str]:
    """Sorted paths of the images below folder/train, or below folder if it has none; labels play no
    part. A folder to which several links lead is visited once. Raises UserError."""
    def fail(error: OSError) -> None:
        raise UserError(f"--data {folder}: cannot read {error.filename}: {error.strerror}")

    root = os.path.join(folder, "train")
    if not os.path.isdir(root):
        root = folder
    visited: set[str] = set()
    paths = []
    for where, folders, names in os.walk(root, onerror=fail, followlinks=True):
        folders.sort()     # of several links to a folder, all machines follow the same one
        if os.path.realpath(where) in visited:
            folders.clear()     # os.walk goes no deeper here
            continue
        visited.add(os.path.realpath(where))
        paths += [os.path.join(where, n) for n in names if n.lower().endswith(EXTENSIONS)]
    require(len(paths) > 0, f"--data {folder}: no image below it ({' '.join(EXTENSIONS)})")
    return sorted(paths)

# torchvision 0.29 announces at every call that its decoders will leave it.
warnings.filterwarnings("ignore", "The image decoding and encoding")

def read_image(path: str) -> Tensor:
    """An image file as (3, h, w) uint8 RGB, upright. torchvision decodes faster, to about the same
    pixels and by signature (ImageNet has a PNG named .JPEG); Pillow reads the rest, and everything
    where torchvision has no decoders. Raises what Pillow raises, and ValueError for a gray image of
    more than 8 bits."""
    require(os.path.isfile(path), "no regular file")     # opening a pipe would wait
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):
        require(not path.lower().endswith(".webp"), "torchvision would not turn it upright")
        image = torchvision.io.decode_image(path, "RGB", apply_exif_orientation=True)
        if image.dtype == torch.uint8 and image.dim() == 3:
            return image
    with Image.open(path) as image:
        require(image.mode[0] not in "IF", f"mode {image.mode} has more than 8 bits: convert it")
        return pil_to_tensor(ImageOps.exif_transpose(image).convert("RGB"))

def draw_images(n: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """n images of six textures, (n, 3, size, size) uint8, and their labels (n,), the same for the
    same arguments. They are gray but for noise, so that colour is no shortcut, and lit from above,
    so that a turn shows; place, direction, scale and contrast vary within a class."""
    g = rng("drawn", n, size, seed)
    left, top, direction, scale, contrast = torch.rand(5, n, 1, 1, generator=g)
    axis = torch.linspace(-1, 1, size)
    x = axis + left - 0.5
    y = axis[:, None] + top - 0.5
    angle = 2 * math.pi * direction
    frequency = 7 + 7 * scale
    u = frequency * (x * angle.cos() + y * angle.sin())
    v = frequency * (y * angle.cos() - x * angle.sin())
    stripes = u.sin()
    checks = 3 * u.sin() * v.sin()
    dots = u.cos() + v.cos() - 1
    rings = (1.5 * u.hypot(v)).sin()
    waves = (u + 1.5 * v.sin()).sin()
    nets = 4 * torch.maximum(u.cos(), v.cos()) - 3
    textures = torch.stack([stripes, checks, dots, rings, waves, nets])      # (6, n, size, size)
    labels = torch.arange(n) % len(textures)
    ink = (3 * textures[labels, torch.arange(n)]).sigmoid()                  # (n, size, size)
    light = 0.2 * (1 - axis[:, None]) + (0.2 + 0.4 * contrast) * ink
    noise = 0.04 * torch.randn(n, 3, size, size, generator=g)
    images = (light[:, None] + noise).clamp(0, 1)
    return (255 * images).to(torch.uint8), labels

def batch_keys(images: int, cfg: Common, start: int, total: int, rank: int = 0,
               ranks: int = 1) -> Iterator[list[Key]]:
    """The keys of this rank's batches from step `start` on. Every epoch permutes the images by
    (seed, epoch); its last, incomplete batch is dropped."""
    per_epoch = images // cfg.batch_size
    for step in range(start, total):
        epoch, k = divmod(step, per_epoch)
        if step == start or k == 0:
            order = torch.randperm(images, generator=rng(cfg.seed, "order", epoch))
        indices = order[k * cfg.batch_size:(k + 1) * cfg.batch_size].tolist()
        yield partition(indices, epoch, cfg.b2_images(ranks), rank, ranks)

# ==== 9. Training =================================================================================
# Rank 0 writes last.pt every epoch or --save-every steps, at the end and on a signal; log.jsonl at
# the first step, every --log-every steps and whenever it saves; views.png once. No generator is
# saved, as every draw has a seed of its own.

def setup() -> tuple[torch.device, int, int]:
    """(device, rank, ranks): under torchrun a GPU, or a CPU process, per rank; else one process."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif hasattr(ctypes.CDLL(None), "mallopt"):     # glibc: keep freed memory, for faster steps
        ctypes.CDLL(None).mallopt(-4, 0)                # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, 2 ** 31 - 1)      # M_TRIM_THRESHOLD
    if "RANK" in os.environ and not dist.is_initialized():
        # gloo beside NCCL: stop signals and shapes are exchanged without waiting for GPUs.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks, rank = ranks_and_rank()
    mps = torch.backends.mps.is_available() and ranks == 1
    return torch.device("cuda" if cuda else "mps" if mps else "cpu"), rank, ranks

def build(cfg: Common, method: Callable[[ViT, Any], nn.Module] | None = None) -> SER:
    """The model of a run, on the CPU, from the seed and `init` alone. method: (encoder, cfg) -> the
    base method; None: MoCo-v3."""
    given = load_encoder(cfg.init) if cfg.init else None
    torch.manual_seed(cfg.seed)
    encoder = ViT(cfg.image_size, cfg.patch_size, cfg.dim, cfg.depth, cfg.heads, cfg.cls_layer,
                  cfg.position)
    if given is not None:
        require(given.shape == encoder.shape,
                f"--init {cfg.init} holds {given.shape}, not {encoder.shape}")
        encoder.load_state_dict(given.state_dict())
    if method is None:
        base = MoCoV3(encoder, 256, cfg.moco_hidden, cfg.moco_temperature, cfg.moco_momentum)
    else:
        base = method(encoder, cfg)
    return SER(base, cfg.equiv_layers if cfg.ratio > 0 else (), cfg.weight, cfg.temperature)

def save_whole(path: Path, state: dict[str, Any]) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves a whole file, old or new."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)

def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint, tensors on the CPU. Raises UserError if it is missing or damaged."""
    kinds = dict(step=int, program=str, shape=dict, config=dict, images=str, model=dict)
    try:
        with zipfile.ZipFile(path) as archive:
            require(archive.testzip() is None, "wrong checksum")     # torch.load does not check
        state = torch.load(path, map_location="cpu", weights_only=True)
        wrong = [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]
        require(not wrong, f"without {' '.join(wrong)}")
    except Exception as error:     # pickle, zip, torch and the system raise their own
        raise UserError(f"{path} is missing, damaged or from another program ({error}): "
                        "put a whole one there, or remove it to start again") from None
    return state

def load_encoder(path: str | Path) -> ViT:
    """The encoder of a checkpoint, in eval mode; every weight must be there."""
    state = load_checkpoint(path)
    own = [name for name in state["model"] if name.startswith("base.encoder.")]
    try:
        encoder = ViT(**state["shape"])
        encoder.load_state_dict({n.removeprefix("base.encoder."): state["model"][n] for n in own})
    except Exception as error:
        raise UserError(f"{path} holds no ViT of {state['shape']}: {error}") from None
    return encoder.eval()

# What may change when a run is continued; so may the number of ranks, and |b2| by its rounding.
FREE = {"data", "out", "init", "workers", "log_every", "save_every", "compile", "bf16"}

def restore(path: Path, identity: dict[str, Any], model: SER,
            optimizer: torch.optim.Optimizer) -> int:
    """Load `path` and return its step. identity: program, config and images of this run. Raises
    UserError if those of the checkpoint differ."""
    state = load_checkpoint(path)
    saved = state["config"] | {"program": state["program"], "images": state["images"]}
    now = identity["config"] | {"program": identity["program"], "images": identity["images"]}
    differ = [f"{name} {saved.get(name)} there, {now.get(name)} here" for name in saved | now
              if name not in FREE and saved.get(name) != now.get(name)]
    require(not differ, f"{path} is of another run ({'; '.join(differ)}): use a new --out")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:
        raise UserError(f"{path} does not fit this model ({error}): use a new --out") from None
    for group in optimizer.param_groups:     # of this device, not of the checkpoint's
        group["fused"] = optimizer.defaults["fused"]
    return state["step"]

def resume(path: Path, identity: dict[str, Any], model: SER,
           optimizer: torch.optim.Optimizer) -> int:
    """`restore` if there is a checkpoint, else 0. Raises UserError also, on all ranks, where they
    begin at other steps or have other images."""
    start = restore(path, identity, model, optimizer) if path.exists() else 0
    found = [(start, identity["images"])] * ranks_and_rank()[0]
    if len(found) > 1:
        dist.all_gather_object(found, found[0])
    require(len(set(found)) == 1, "the ranks do not see the same --out or --data: their steps and "
            f"images are {sorted(set(found))}")
    return start

def save_views(path: Path, batch: Batch, x: Tensor, cell: int) -> None:
    """A picture of up to six images of b2, a row each: x, x1, rho_g(x1) and x2; the last two must
    agree up to colours. x: the images before the geometry, (B2, 3, S, S) uint8."""
    x1, x2 = (view.images[-1].float().cpu() * STD + MEAN for view in batch.views[:2])
    g = relative(batch.views[1].geometry, batch.views[0].geometry)
    columns = {"x": x.cpu() / 255, "x1": x1, "rho(g2 g1^-1) x1": rho(g, x1, cell), "x2": x2}
    picture = Image.new("RGB", (4 * 160, 16 + 160 * min(6, len(x1))), "white")
    for i, (title, images) in enumerate(columns.items()):
        ImageDraw.Draw(picture).text((160 * i, 2), title, "black")
        for j, image in enumerate(images[:6].clamp(0, 1)):
            shown = ImageOps.contain(to_pil_image(image), (152, 152))
            picture.paste(shown, (160 * i, 16 + 160 * j))
    picture.save(path)

class Log:
    """log.jsonl and the bar, both of rank 0, and counts for them: time waited, broken files."""
    def __init__(self, cfg: Common, model: SER, images: str, start: int, steps: int):
        self.batch = cfg.batch_size
        self.ranks, self.rank = ranks_and_rank()
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        self.file = open(os.devnull if self.rank else Path(cfg.out, "log.jsonl"), "a", buffering=1)
        try:
            if self.rank == 0:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {cfg.out}: another run is at work there, use another") from None
        except OSError:     # a file system without locks
            pass
        self.bar = tqdm(total=steps, initial=start, disable=self.rank > 0, mininterval=1)
        b2 = cfg.b2_images(self.ranks) * self.ranks
        facts = dict(images=images, start=start, steps=steps, ranks=self.ranks, b2=b2,
                     ratio=b2 / cfg.batch_size, lr=cfg.lr, warmup=cfg.warmup,
                     trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
                     device=next(model.parameters()).device.type, torch=torch.__version__)
        self.say(", ".join(f"{name} {value}" for name, value in facts.items()))
        if abs(facts["ratio"] - cfg.ratio) > 0.1 * cfg.ratio:
            self.say(f"r is {facts['ratio']:.3g} in place of --ratio {cfg.ratio}: each of "
                     f"{self.ranks} ranks takes a whole number of images into b2")
        facts |= {"command": " ".join(sys.argv), "config": vars(cfg)}
        print(json.dumps(facts), file=self.file)
        self.broken: set[str] = set()
        self.since = (start, time.perf_counter())     # step and time of the last record
        self.waited = 0.0     # for the loader, since then

    def say(self, text: str) -> None:
        """A line on the screen, once for all ranks."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stderr)

    def fetch(self, loader: Iterator[Any]) -> list[Any]:
        """The next batch of the loader, whose broken files are named once."""
        asked = time.perf_counter()
        loaded, broken = next(loader)
        self.waited += time.perf_counter() - asked
        for name in set(broken) - self.broken - {""}:
            tqdm.write(f"cannot read {name}: another image takes its place", file=sys.stderr)
            self.broken.add(name)
        return loaded

    def record(self, step: int, losses: dict[str, Tensor | float]) -> None:
        """Write a step's values, means over ranks, and rates since the last record. Between
        checkpoints, only this waits for the device. Raises UserError if one is not finite: a
        gradient that is not has spoilt the weights, which must not replace a good checkpoint."""
        last, clock = self.since
        seconds = time.perf_counter() - clock
        losses |= {"images_per_s": (step - last) * self.batch / seconds,
                   "waiting": self.waited / seconds,
                   "broken": len(self.broken),
                   "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30}
        values = torch.tensor([torch.as_tensor(value).item() for value in losses.values()])
        if self.ranks > 1:
            dist.all_reduce(values)
        means = dict(zip(losses, (values / self.ranks).tolist()))
        print(json.dumps({"step": step, **means}), file=self.file)
        shown = ("loss", "inv", "inv_chance", "equiv", "equiv_chance", "patch_top1")
        self.bar.set_postfix({name: f"{means[name]:.3f}" for name in shown if name in means})
        self.since = (step, time.perf_counter())
        self.waited = 0.0
        wrong = [f"{name} is {value}" for name, value in means.items() if not math.isfinite(value)]
        require(not wrong, f"step {step}: the {', '.join(wrong)}; log.jsonl shows how it came to "
                "that; try a lower --base-lr with a new --out")

    def agree(self, signals: int, images: int) -> bool:
        """Whether any rank has got a signal; asked by CPUs, so that no GPU is waited for. Raises
        UserError, on all ranks, once one found more than 1 in 1000 of the `images` broken."""
        found = torch.tensor([signals, len(self.broken)])
        if self.ranks > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        signals, broken = found.tolist()
        require(broken <= max(3, images / 1000),
                f"{broken} images cannot be read, more than 1 in 1000: repair or remove them")
        return signals > 0

def digest(source: Sequence[str] | Tensor) -> str:
    """The number of the images and a hash of their names, which tell one data set from another."""
    names = [] if isinstance(source, Tensor) else [os.path.basename(path) for path in source]
    return f"{len(source)}, {hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"

def load(cfg: Common, source: Sequence[str] | Tensor, keys: Iterator[list[Key]]) -> Iterator[Any]:
    """What the data set makes of each batch of keys, by processes of the loader."""
    return iter(torch.utils.data.DataLoader(
        cfg.dataset(source), batch_sampler=keys, worker_init_fn=leave_signals,
        num_workers=min(cfg.workers, os.cpu_count() or 1), pin_memory=torch.cuda.is_available()))

def leave_signals(worker: int) -> None:
    """Loader processes ignore stop signals: training needs their batches until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def gradient_norms(model: SER) -> dict[str, Tensor]:
    """The norm of all gradients of the encoder, and of SER's projectors."""
    norms = {}
    for name, part in (("grad_encoder", model.base.encoder), ("grad_equiv", model.heads)):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        norms[name] = nn.utils.get_total_norm(gradients)
    return norms

def placed(model: SER, cfg: Common, device: torch.device, ranks: int) -> SER:
    """The model on its device, ready to be trained there."""
    if device.type == "cuda" and ranks > 1:     # on CPUs there is none: each rank has its own mean
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if cfg.compile:     # with dynamic shapes: a few compilations, not one for every grid of b2
        for block in (module for module in model.modules() if isinstance(module, Block)):
            block.compile(dynamic=True)
    # This switch holds for CPUs, too; their flash attention is slow backwards in bfloat16.
    torch.backends.cuda.enable_flash_sdp(device.type == "cuda" or not cfg.bf16)
    return model.to(device)

def train(cfg: Common, build: Callable[[Any], SER] = build, stop: Sequence[int] = ()) -> Path:
    """Run, or continue, the training of cfg in cfg.out; returns the path of its checkpoint. stop: a
    list that a signal handler fills (see `main`); once a signal came, the run saves and exits with
    128 + its number. Raises UserError."""
    device, rank, ranks = setup()
    check(cfg, ranks)
    source = list_images(cfg.data) if cfg.data else draw_images(4096, cfg.image_size, seed=0)[0]
    per_epoch = len(source) // cfg.batch_size
    require(per_epoch > 0, f"{len(source)} images are less than --batch-size {cfg.batch_size}: try "
            f"{len(source) // ranks * ranks}")
    steps = max(1, round(cfg.epochs * per_epoch))
    path = Path(cfg.out, "last.pt")
    # A run that is continued does not read --init, which may be gone.
    given = dataclasses.replace(cfg, init="") if path.exists() else cfg
    model = placed(build(given), cfg, device, ranks)
    optimizer = cfg.optimizer(model, fused=device.type == "cuda")
    identity = dict(program=cfg.program, images=digest(source), config=vars(cfg))
    start = resume(path, identity, model, optimizer)
    log = Log(cfg, model, identity["images"], start, steps)
    # Without device_ids, which would move Geometry to the GPU. A parameter left unused is an error.
    parallel = model if ranks == 1 else nn.parallel.DistributedDataParallel(model)
    loader = load(cfg, source, batch_keys(len(source), cfg, start, steps, rank, ranks))
    try:
        for step in range(start, steps):
            done = step + 1
            saves = done == steps or done % (cfg.save_every or per_epoch) == 0
            logs = saves or step == start or done % cfg.log_every == 0
            # Load what the loader's processes have decoded and cut, and make the views of it.
            loaded = log.fetch(loader)
            loaded = [(pixels.to(device, non_blocking=pixels.is_pinned()), *draws)
                      for pixels, *draws in loaded]
            batch = make_views(loaded, cfg, step, rank, ranks)
            if step == 0 and rank == 0 and batch.views[0].geometry is not None:
                pixels = loaded[0][0][-cfg.b2_images(ranks):]
                save_views(path.with_name("views.png"), batch, pixels, cfg.patch_size)
            # Forward. What a method draws here has a seed of its own, so a resumed run repeats it.
            torch.manual_seed(seed_of(cfg.seed, "step", step, rank))
            model.base.update(step / steps)
            with torch.autocast(device.type, torch.bfloat16, device.type == "cuda" or cfg.bf16):
                losses = parallel(batch, diagnose=logs)
            # Backward.
            optimizer.zero_grad()
            losses["loss"].backward()
            norms = gradient_norms(model) if logs else {}
            # Step, with the schedules.
            cfg.before_step(optimizer, step / per_epoch)
            optimizer.step()
            # Log, save and stop, where due.
            log.bar.update()
            stopping = log.agree(len(stop), len(source))
            if logs or stopping:
                log.record(done, losses | norms | {"lr": optimizer.param_groups[0]["lr"]})
            if rank == 0 and (saves or stopping):
                save_whole(path, identity | dict(
                    step=done, shape=model.base.encoder.shape, model=model.state_dict(),
                    optimizer=optimizer.state_dict()))
            if stopping and done < steps:
                log.say(f"saved at step {done} of {steps}; the same command continues")
                raise SystemExit(128 + (stop[0] if stop else signal.SIGTERM))
    finally:     # otherwise the loader's processes stay alive after an error
        if cfg.workers:
            loader._shutdown_workers()
    return path

# ==== 10. Command line ============================================================================
def parse(argv: Sequence[str] | None, kind: type = Config, repeatable: Sequence[str] = ()) -> Any:
    """Flags -> a settings class `kind`, a flag for each field, on top of kind.drawn without --data.
    Raises UserError. repeatable: flags that may be given several times (none here)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    require(all(word and word[-1] != "=" for word in argv),
            "an empty argument: an unset shell variable?")
    parser = argparse.ArgumentParser(description=sys.modules[kind.__module__].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; see --help")
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        times = [word.split("=")[0] for word in argv].count(flag)
        require(times < 2 or flag in repeatable, f"{flag} is given {times} times")
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        how = dict(type=type(values[0]))
        if field.default is False:
            how = dict(action="store_true")
        elif isinstance(field.default, tuple):
            how |= dict(nargs="+", action="extend")
        text = f"{field.metadata['help']} [{' '.join(map(str, values))}]"
        parser.add_argument(flag, help=text, **how)
    given = vars(parser.parse_args(argv))
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return kind(**(given if given.get("data") else kind.drawn | given))

def guard(program: str, work: Callable[[], Any]) -> int:
    """Do the work and return the exit code: 0, that of a SystemExit, 130 after Ctrl-C, or 2 after
    one line on stderr about the error, whose traceback goes to a file unless it is a UserError."""
    # What all ranks of a machine find, one says.
    speaks = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
    try:
        work()
        return 0
    except SystemExit as stopped:
        return stopped.code
    except KeyboardInterrupt:     # `train` saves instead; evaluations end at once
        if speaks:
            tqdm.write(f"{program}: stopped; the same command goes on from what it has saved",
                       file=sys.stderr)
        return 128 + signal.SIGINT
    except UserError as error:
        if speaks:
            tqdm.write(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
    except BaseException as error:
        path = Path(tempfile.gettempdir(), f"ser-{os.getpid()}.txt")
        report = traceback.format_exc()
        path.write_text(report)
        text = f"{type(error).__name__}: {error}".strip()
        if isinstance(error, (ConnectionError, EOFError)) or "DataLoader" in report:
            last = text.splitlines()[-1]     # a process sends its whole traceback
            text = f"a loader process failed, try fewer --workers, or 0: {last}"
        text = " ".join(text.split())[:300]
        tqdm.write(f"{program}: {text} (traceback: {path})", file=sys.stderr)
    return 2

def main(argv: Sequence[str] | None = None, kind: type = Config,
         build: Callable[[Any], SER] = build) -> int:
    """Train as the command line says; returns the exit code. The third stop signal ends at once."""
    stop: list[int] = []

    def remember(number: int, frame: Any) -> None:
        stop.append(number)
        if len(stop) == 3:
            os._exit(128 + number)

    def work() -> None:
        cfg = parse(argv, kind)
        path = train(cfg, build, stop)
        if os.environ.get("RANK", "0") == "0":
            data = f" --data {cfg.data}" if cfg.data else ""
            print(f"{path} is done. Next: python eval_linear.py --checkpoint {path}{data}")

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return guard(kind.program, work)

def leave(code: int) -> None:
    """End the process at once: threads of gloo and loader processes can hold up a normal exit."""
    if code != 2 and dist.is_initialized():     # NCCL would wait for ranks that had no error
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)

if __name__ == "__main__":
    leave(main())
