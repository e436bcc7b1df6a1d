"""Soft Equivariance Regularization (SER) for self-supervised vision transformers, in one file.

Self-supervised learning makes the final embedding of an image invariant to augmentations, which
may erase geometric structure. SER keeps that objective, and adds a second one at an intermediate
layer, where the patch tokens still form a map of the image:
    f = f2 . f1    f1: the first 3 blocks, which give a map of patch tokens; [CLS] enters with f2
    b1, b2         the two parts of a batch; b2 has a share r = .01. Views of b1: crops, flips and
                   jitter (T). Views of b2: invertible geometry from a group G, and jitter (T_eq)
    L_inv          the base method's loss, here MoCo-v3's, on the final [CLS] of b1 and b2 together:
                   in one mean (Eq. 3: a sum of two means)
    L_equiv        patch-wise NT-Xent on b2, temperature tau = .3, between rho_g(f1(x1)) and f1(x2),
                   where x1 = rho_g1(x) and x2 = rho_g2(x) are the two views and g = g2 g1^-1
    loss           L_inv + lambda L_equiv, lambda = .5
Usage:
    python ser.py                                                   a small ViT, synthetic images
    python ser.py --data /imagenet --batch-size 256 --ratio 0.06    one GPU; at .01 b2 has 3 images
    torchrun --nproc_per_node=8 ser.py --data /imagenet             the paper's main setting
`Paper:` marks what the paper prescribes, `Choice:` ours; the release: the authors' code, dbe5e93.
Axes:
    B        images of a tensor, on one rank: B1 in b1, B2 in b2; R ranks, one for each GPU
    C h w    channels (3 of pixels), rows and columns of images or maps; S x S: a square view
    N H W    tokens of a map, its rows and its columns: N = H W
    D K      width of the encoder, width of a projection
"""
import copy
import glob
import json
import math
import os
import random
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP     # no device_ids: see Geometry
from torchvision.io import decode_image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import rgb_to_grayscale
from torchvision.utils import save_image
from tqdm import tqdm

# ==== 1. Group: one operator moves pixels and tokens (paper 3.1) ==================================
# Sections 1 and 4 can be copied: they need math, torch and typing.NamedTuple alone. Their use, for
# two maps of b2, h1 = f1(x1) and h2 = f1(x2), and project = projector(D) of section 4:
#     aligned = rho(relative(g2, g1), h1)
#     z, z_prime = project(aligned.flatten(2).mT), project(h2.flatten(2).mT)
#     loss = patch_ntxent(z, z_prime)
ELEMENTS = ("rot90", "hflip", "scale")

class Geometry(NamedTuple):
    """An element of G for each image, on the CPU (DDP's device_ids would move it to the GPU).
    Scaling is given by the grid that it leads to."""
    flip: torch.Tensor       # (B,) bool, horizontal flip, applied first
    turns: torch.Tensor      # (B,) int64 in 0..3, counter-clockwise quarter turns, applied second
    grid: tuple[int, int]    # (H, W) of moved maps, in tokens. Choice: one for all, as the release

def sample_geometry(batch: int, grid: int = 14, elements: tuple[str, ...] = ELEMENTS,
                    generator: torch.Generator | None = None,
                    shared: torch.Generator | None = None) -> Geometry:
    """Sample flips and turns, and one grid for all images. grid: side of the map before scaling.
    What `elements` leaves out is the identity; the other random numbers do not change.
    shared: the generator of the new grid, for other training code: its ranks must agree on it."""
    if not set(elements) <= set(ELEMENTS):
        raise ValueError(f"elements {elements} are not among {ELEMENTS}")
    flip = (torch.rand(batch, generator=generator) < 0.5) & ("hflip" in elements)
    turns = torch.randint(4, (batch,), generator=generator) * ("rot90" in elements)
    # Choice: the [0.7, 1.3] of 4.1 bounds the area, and the release's [3/4, 4/3] the aspect W / H.
    u, v = torch.rand(2, generator=shared or generator).tolist()
    area = 0.7 + 0.6 * u                    # uniform
    aspect = 3 / 4 * (16 / 9) ** v          # log-uniform, 3/4 to 4/3
    height = round(grid * math.sqrt(area / aspect))     # Paper: 3.2, whole tokens
    width = round(grid * math.sqrt(area * aspect))
    if "scale" not in elements:
        height = width = grid
    return Geometry(flip, turns, (height, width))

def relative(g2: Geometry, g1: Geometry) -> Geometry:
    """The element g = g2 g1^-1 that takes view 1 to view 2 (paper 3.1), on the grid of g2.
    Let Q be a quarter turn and M the flip, so that an element is Q^t M^m, t turns after m flips. A
    mirror image turns the other way round, M Q = Q^-1 M, hence
        Q^t2 M^m2 (Q^t1 M^m1)^-1 = Q^(t2 - s t1) M^(m1 xor m2),   s = -1 if m1 != m2, else 1.
    Scaling needs no inverse: turns and flips commute with resizing (odd turns swap H and W), so
    resizing x1 once more, to the grid of g2, gives x2 = rho_g(x1) up to resampling."""
    flip = g1.flip ^ g2.flip
    s = torch.where(flip, -1, 1)
    return Geometry(flip, (g2.turns - s * g1.turns) % 4, g2.grid)

def resize(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(B, C, h, w) -> (B, C, *size), uint8 or any float. Paper: 3.2, crops and rho share it."""
    if x.shape[-2:] == size:
        return x
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x     # CPUs lack a kernel
    return torch.nn.functional.interpolate(wide, size, mode="bilinear", antialias=True).to(x.dtype)

def rho(g: Geometry, x: torch.Tensor, cell: int = 1) -> torch.Tensor:
    """The action rho_g (paper 3.1): (B, C, h, w) -> (B, C, H * cell, W * cell), (H, W) = g.grid.
    cell=1 moves token maps, cell=patch_size moves pixels. Flips and turns permute, bit for bit;
    only a change of size resamples. Gradients flow through. Raises ValueError if B differs."""
    if len(g.flip) != len(x):
        raise ValueError(f"a Geometry of {len(g.flip)} images for {len(x)}")
    size = (g.grid[0] * cell, g.grid[1] * cell)
    moved = x.new_empty(x.shape[:2] + size)
    for flip in (False, True):
        for turns in range(4):
            chosen = (g.flip == flip) & (g.turns == turns)     # (B,) bool, images of this element
            rows = chosen.nonzero().flatten().to(x.device, non_blocking=True)
            if len(rows) > 0:
                part = x[rows].flip(-1) if flip else x[rows]
                part = torch.rot90(part, turns, (-2, -1))
                moved[rows] = resize(part, size)
    return moved

# ==== 2. Views: T for b1, T_eq for b2 (paper 3.2) =================================================
# The loader decodes and crops images; the device applies rho to b2 and jitters all images. Seeds
# depend on the image and epoch, or on the step, never on the worker: a run can be repeated.
class ViewSettings(NamedTuple):
    """What a view is sampled from; views 1 and 2 of MoCo-v3 differ in blur and solarization."""
    size: int                       # side of the view, pixels
    area: tuple[float, float]       # of the crop, share of the image
    blur: float                     # probability
    solarize: float                 # probability

class Augmentation(NamedTuple):
    """What was sampled for a view of an image; the defaults do nothing. From top to width: the
    crop, in shares of the image, for AugSelf. Collated, each field is (B,), and order (B, 4)."""
    top: float = 0.0
    left: float = 0.0
    height: float = 1.0
    width: float = 1.0
    flip: bool = False                  # mirrored after the crop
    brightness: float = 1.0             # factors
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0                    # shift, share of the colour circle
    order: Tensor = torch.arange(4)     # of these four: make_views sets one for all images
    gray: bool = False
    blur: float = 0.0                   # standard deviation, pixels
    solarize: bool = False

class View(NamedTuple):
    """One view of every image of a batch."""
    b1: Tensor                     # (B1, 3, S, S), normalised
    b2: Tensor | None              # (B2, 3, h, w), normalised; None where r is 0
    geometry: Geometry | None      # of b2
    augmentation: Augmentation     # rows b1, then b2; for AugSelf and others

def ranks_and_rank() -> tuple[int, int]:
    """(R, this rank); (1, 0) in a single process."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

def rng(*key: Any) -> torch.Generator:
    """A CPU generator seeded by the key: the same in every process, unlike Python's hash."""
    return torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(63))

def sample_view(image: Tensor, settings: ViewSettings, crop: bool) -> tuple[Tensor, Augmentation]:
    """Make a view (3, S, S) of (3, h, w), and sample MoCo-v3's jitter, for `photometric`."""
    aug = Augmentation()
    if crop:     # of b1; b2 is flipped by rho
        h, w = image.shape[-2:]
        top, left, height, width = RandomResizedCrop.get_params(image, settings.area, (3/4, 4/3))
        image = image[:, top:top + height, left:left + width]
        flip = random.random() < 0.5
        aug = Augmentation(top / h, left / w, height / h, width / w, flip)
    # Choice: a whole image becomes a square, as a crop does; rho scales it later.
    pixels = resize(image[None], (settings.size, settings.size))[0]
    if aug.flip:
        pixels = pixels.flip(-1)
    if random.random() < 0.8:
        aug = aug._replace(
            brightness=random.uniform(0.6, 1.4), contrast=random.uniform(0.6, 1.4),
            saturation=random.uniform(0.8, 1.2), hue=random.uniform(-0.1, 0.1))
    if random.random() < settings.blur:
        # Choice: MoCo-v3's 0.1 to 2 pixels of 224, scaled to the side of the view.
        aug = aug._replace(blur=random.uniform(0.1, 2.0) * settings.size / 224)
    aug = aug._replace(gray=random.random() < 0.2, solarize=random.random() < settings.solarize)
    return pixels, aug

class Dataset(torch.utils.data.Dataset):
    """Key (epoch, index, in_b2) of `batch_keys` -> for each view, pixels (3, S, S) uint8 and
    Augmentation. source: paths, or the images (n, 3, h, w) uint8 themselves."""
    def __init__(self, source: Sequence[str] | Tensor, view_settings: Sequence, seed: int):
        self.source = source
        self.view_settings = view_settings
        self.seed = seed

    def __getitem__(self, key: tuple[int, int, bool]) -> list:
        epoch, index, in_b2 = key
        image = self.source[index]
        if isinstance(image, str):
            image = read_image(image)
        seed = rng(self.seed, "image", epoch, index).initial_seed()
        random.seed(seed)
        torch.manual_seed(seed)     # get_params samples from it
        # Paper: 3.2, T_eq has no crop: g will act on the whole image.
        return [sample_view(image, settings, crop=not in_b2) for settings in self.view_settings]

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)     # of ImageNet, for images in [0, 1]
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

def normalise(x: Tensor) -> Tensor:
    """Images in [0, 1] -> what the encoder takes."""
    return (x - MEAN.to(x, non_blocking=True)) / STD.to(x, non_blocking=True)

def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of (B, 3, h, w) by `shift` (B, 1, 1, 1) of a full circle (hexcone model)."""
    r, g, b = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    c = torch.where(chroma == 0, 1, chroma)     # gray has hue 0
    hue = torch.where(value == g, 2 + (b - r) / c, 4 + (r - g) / c)     # red 0, green 2, blue 4
    hue = torch.where(value == r, (g - b) / c, hue)
    offsets = torch.arange(5, 0, -2, device=x.device)     # of red, green, blue: 5, 3, 1
    k = (hue + 6 * shift + offsets.view(3, 1, 1)) % 6
    # Back to RGB: a channel is value - chroma * max(0, min(k, 4 - k, 1)).
    shifted = value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)
    return torch.where(shift == 0, x, shifted)

def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur (B, 3, h, w) by sigma (B, 1, 1, 1) pixels; the borders are mirrored."""
    B, _, h, w = x.shape
    radius = min(math.ceil(6 * max(h, w) / 224), h - 1, w - 1)     # about 3 times the largest sigma
    offsets = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.softmax(-offsets ** 2 / (2 * sigma.view(B, 1) ** 2), dim=1)     # Gaussian
    kernel = kernel.repeat_interleave(3, dim=0)     # (3 B, 2 radius + 1), a row for each channel
    x = F.pad(x, [radius] * 4, mode="reflect").flatten(0, 1)[None]
    x = F.conv2d(x, kernel[:, None, :, None], groups=3 * B)
    return F.conv2d(x, kernel[:, None, None, :], groups=3 * B).view(B, 3, h, w)

# torchvision's colour jitter of images in [0, 1] by factors (B, 1, 1, 1), in the order of
# Augmentation. A factor of 1, and a hue of 0, leave an image as it is, bit for bit.
JITTER = (
    ("brightness", lambda x, f: (f * x).clamp(0, 1)),
    ("contrast", lambda x, f: rgb_to_grayscale(x).mean((2, 3), True).lerp(x, f).clamp(0, 1)),
    ("saturation", lambda x, f: rgb_to_grayscale(x).lerp(x, f).clamp(0, 1)),
    ("hue", shift_hue))

def photometric(x: Tensor, aug: Augmentation) -> Tensor:
    """Images (B, 3, h, w) in [0, 1], each jittered by its own row of `aug`, and normalised."""
    def column(name: str) -> Tensor:     # flags become 0 and 1
        return getattr(aug, name).view(-1, 1, 1, 1).to(x, non_blocking=True)

    # Choice: one order for all images, as in the release; torchvision samples one for each.
    for number in aug.order[0].tolist():
        name, operation = JITTER[number]
        x = operation(x, column(name))
    x = torch.where(column("gray") > 0, rgb_to_grayscale(x, num_output_channels=3), x)
    rows = aug.blur.nonzero().flatten().to(x.device, non_blocking=True)
    if len(rows) > 0:
        x[rows] = gaussian_blur(x[rows], column("blur")[rows])
    x = torch.where((column("solarize") > 0) & (x >= 128 / 255), 1 - x, x)
    return normalise(x)

def b2_per_rank(args: Namespace, ranks: int) -> int:
    """|b2| of a rank. Choice: rounded, so that r = .01 of 2048 is 24 images on 8 ranks, 20 on 1."""
    return math.floor(args.ratio * args.batch_size / ranks + 0.5)

def make_views(loaded: Sequence, args: Namespace, step: int) -> list[View]:
    """Apply rho to b2, then jitter all images. loaded: for each view, pixels (B, 3, S, S) uint8 on
    the device, rows b1 then b2, and their Augmentation on the CPU."""
    ranks, rank = ranks_and_rank()
    n_b2 = b2_per_rank(args, ranks)
    views = []
    for v, (pixels, aug) in enumerate(loaded):
        x = pixels / 255
        n_b1 = len(x) - n_b2
        order = torch.randperm(4, generator=rng(args.seed, "jitter", step, v))
        aug = aug._replace(order=order.expand(len(x), 4))
        b1 = photometric(x[:n_b1], Augmentation(*[field[:n_b1] for field in aug]))
        b2 = g = None
        if n_b2 > 0:
            # Every rank samples g for all ranks, so that all share a grid, and keeps its own rows.
            g = sample_geometry(ranks * n_b2, pixels.shape[-1] // args.patch_size, args.group,
                                rng(args.seed, "geometry", step, v))
            own = slice(rank * n_b2, (rank + 1) * n_b2)
            g = Geometry(g.flip[own], g.turns[own], g.grid)
            moved = rho(g, x[n_b1:], args.patch_size)
            b2 = photometric(moved, Augmentation(*[field[n_b1:] for field in aug]))
        views.append(View(b1, b2, g, aug))
    return views

# ==== 3. Encoder: a ViT into which [CLS] enters late (paper 3.1) ==================================
class Block(nn.Module):
    """A pre-norm transformer block with timm's parameter names: (B, N, D) -> (B, N, D)."""
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, dim=2)        # (B, N, D) each
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)             # (B, heads, N, D / heads)
        k = k.unflatten(2, (self.heads, -1)).transpose(1, 2)
        v = v.unflatten(2, (self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.attn["proj"](attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.mlp["fc1"](self.norm2(x)))
        return x + self.mlp["fc2"](hidden)

class Encoded(NamedTuple):
    """What the encoder makes of images."""
    cls: Tensor                  # (B, D), LayerNorm of the final [CLS]
    maps: dict[int, Tensor]      # layer -> (B, D, H, W), patch tokens after that block, no norm
    cls_at: dict[int, Tensor]    # layer > cls_layer -> (B, D), [CLS] after it, no norm: for probes

class ViT(nn.Module):
    """f = f2 . f1: a vision transformer whose [CLS] token enters after block `cls_layer` < depth;
    0: a plain ViT. Maps never hold [CLS]."""
    def __init__(self, image_size: int = 224, patch_size: int = 16, dim: int = 384, depth: int = 12,
                 heads: int = 6, cls_layer: int = 3):
        super().__init__()
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
        # As MoCo-v3: Xavier-uniform matrices, zero biases, a random frozen patch embedding. qkv is
        # three D x D matrices in one: the gain gives each its own bound, sqrt(6 / (2 D)).
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                gain = math.sqrt(2) if name.endswith("qkv") else 1.0
                nn.init.xavier_uniform_(module.weight.flatten(1), gain)     # in place
                nn.init.zeros_(module.bias)
        self.patch_embed.requires_grad_(False)
        # Choice: learned position embeddings, as in the release, resized to the grids of b2; [CLS]
        # has none. MoCo-v3 then trains 42.9 M parameters, as in Table 1; with fixed ones, 42.8 M.
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor, layers: Sequence[int] = ()) -> Encoded:
        """Encode (B, 3, h, w), h and w multiples of the patch size; return maps after `layers`."""
        x = self.patch_embed["proj"](images)                        # (B, D, H, W)
        H, W = x.shape[-2:]
        x = (x + resize(self.pos_embed, (H, W))).flatten(2).mT      # (B, N, D)
        maps = {}
        cls_at = {}
        for layer in range(self.depth + 1):                         # 0: before the blocks
            if layer > 0:
                x = self.blocks[layer - 1](x)
            if layer in layers:
                maps[layer] = x[:, -H * W:].mT.unflatten(2, (H, W))     # all but [CLS]
                if layer > self.cls_layer:
                    cls_at[layer] = x[:, 0]
            if layer == self.cls_layer:                             # (B, N, D) -> (B, 1 + N, D)
                cls = self.cls_token.expand(x.shape[0], -1, -1)
                x = torch.cat([cls, x], dim=1)
        return Encoded(self.norm(x[:, 0]), maps, cls_at)

# ==== 4. Equivariance loss: NT-Xent over patches (paper 3.3) ======================================
# An anchor is one token of rho_g(f1(x1)). Its positive is the token of f1(x2) at the same place,
# its negatives all tokens, of both views, of the *other* images of b2, over all ranks, as in the
# formula of 3.3. Anchors, positives and negatives carry gradient.
def projector(dim: int, width: int = 512) -> torch.nn.Sequential:
    """Tokens (B, N, dim) -> (B, N, width). Paper: 3.3, two layers, GELU, 512."""
    linear1 = torch.nn.Linear(dim, width, bias=False)     # Choice: LayerNorm, no biases (release)
    linear2 = torch.nn.Linear(width, width, bias=False)
    return torch.nn.Sequential(torch.nn.LayerNorm(dim), linear1, torch.nn.GELU(), linear2)

class AllGather(torch.autograd.Function):
    """(B, ...) of each rank -> (R * B, ...), in rank order. Backward sums a rank's gradient over
    the losses of all ranks, so that DDP's mean makes it the gradient of the mean loss."""
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)   # reduced in place
        torch.distributed.all_reduce(gradient)
        ranks = torch.distributed.get_world_size()
        return gradient.chunk(ranks)[torch.distributed.get_rank()]

def patch_ntxent(z: torch.Tensor, z_prime: torch.Tensor, temperature: float = 0.3) -> torch.Tensor:
    """L_equiv (paper 3.3 and Eq. 3), the mean over images i and places j of
        -log  exp s(z_ij, z'_ij)
              / (exp s(z_ij, z'_ij) + sum_{m != i, n} (exp s(z_ij, z_mn) + exp s(z_ij, z'_mn)))
    where s is the cosine divided by the temperature. z, z_prime: (B, N, K), the projected tokens of
    rho_g(f1(x1)) and of f1(x2), of any float dtype; computed in fp32. Anchors are local, keys come
    from all ranks: the mean over ranks is the loss of the whole batch. All ranks must have the same
    B and the same grid. Raises ValueError if there is but one image over all ranks."""
    with torch.autocast(z.device.type, enabled=False):
        z = torch.nn.functional.normalize(z.float(), dim=-1)
        z_prime = torch.nn.functional.normalize(z_prime.float(), dim=-1)
        keys = torch.cat([z, z_prime], dim=1)                        # (B, 2N, K)
        own = torch.arange(len(z), device=z.device)                  # (B,)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            keys = AllGather.apply(keys)                             # (R * B, 2N, K)
            own = own + len(z) * torch.distributed.get_rank()        # where image i is in keys
        if len(keys) < 2:
            raise ValueError("one image has no negatives: b2 must have two or more, over all ranks")
        positive = (z * z_prime).sum(-1) / temperature               # (B, N), s(z_ij, z'_ij)
        logits = torch.einsum("ijk,mnk->ijmn", z / temperature, keys)     # (B, N, R * B, 2N)
        # same[i, m]: key image m is anchor image i itself; its 2N tokens are no negatives. On the
        # second of two ranks with two images each:
        #               m = 0 1 2 3
        #     own = 2       . . T .
        #     own = 3       . . . T
        same = own[:, None] == torch.arange(len(keys), device=z.device)
        negatives = logits.masked_fill(same[:, None, :, None], -torch.inf).flatten(2)
        return (torch.logaddexp(positive, negatives.logsumexp(2)) - positive).mean()

# ==== 5. Base method: MoCo-v3 (paper 4.1) =========================================================
# SER does not ask what the invariance loss is. A base method is a module with
#     base.encoder         the online ViT, which SER runs
#     base(views, cls)     L_inv, a scalar; cls: the final [CLS] of each view, (B, D), rows b1, b2
#     base.update(p)       called by `train` before every step, with p = step / steps
#     base.chance(batch)   L_inv if all embeddings are equal, printed when a run begins
def encode_view(encoder: ViT, view: View, layers: Sequence[int] = ()) -> tuple[Tensor, dict]:
    """The final [CLS] of a view, (B, D), rows b1 then b2, and layer -> map, of b2 alone."""
    b1 = encoder(view.b1)
    if view.b2 is None:
        return b1.cls, {}
    b2 = encoder(view.b2, layers)     # a pass of its own, as its size differs
    return torch.cat([b1.cls, b2.cls]), b2.maps

def mlp(*widths: int) -> nn.Sequential:
    """MoCo-v3's: no biases, BatchNorm and ReLU between layers, BatchNorm without affine last."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        layers += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU(True)]
    layers[-2:] = [nn.BatchNorm1d(widths[-1], affine=False)]     # replaces the last two
    return nn.Sequential(*layers)

def info_nce(q: Tensor, k: Tensor, temperature: float) -> Tensor:
    """Row i of q (B, K) is to find row i of k (B, K) among the rows of all ranks: the cross-entropy
    (ln(R B) at chance) times MoCo-v3's factor, 2 * temperature."""
    ranks, rank = ranks_and_rank()
    with torch.autocast(q.device.type, enabled=False):
        q = F.normalize(q.float(), dim=1)
        k = F.normalize(k.float(), dim=1)
        if ranks > 1:
            k = AllGather.apply(k)
        logits = q @ k.T / temperature                                            # (B, R * B)
        labels = torch.arange(len(q), device=q.device) + rank * len(q)
        return 2 * temperature * F.cross_entropy(logits, labels)

class MoCoV3(nn.Module):
    """MoCo-v3 (Chen et al. 2021). Keys are made by a momentum copy of encoder and projector."""
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

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the momentum branch, before the keys are made; m rises to 1 on half a cosine."""
        m = 1 - (1 - self.momentum) * 0.5 * (1 + math.cos(math.pi * progress))
        for slow, fast in ((self.momentum_encoder, self.encoder),
                           (self.momentum_projector, self.projector)):
            for s, f in zip(slow.parameters(), fast.parameters()):
                s.lerp_(f, 1 - m)     # s <- m s + (1 - m) f

    @torch.no_grad()
    def key(self, view: View) -> Tensor:
        """(B, K), by the momentum branch, without gradient."""
        cls, _ = encode_view(self.momentum_encoder, view)
        return self.momentum_projector(cls)

    def forward(self, views: Sequence[View], cls: Sequence[Tensor]) -> Tensor:
        """L_inv of two views, symmetric as in the pseudo-code of MoCo-v3's paper."""
        q1 = self.predictor(self.projector(cls[0]))
        q2 = self.predictor(self.projector(cls[1]))
        k1 = self.key(views[0])
        k2 = self.key(views[1])
        return info_nce(q1, k2, self.temperature) + info_nce(q2, k1, self.temperature)

    def chance(self, batch: int) -> float:
        """L_inv if all embeddings are equal; batch: images over all ranks."""
        return 4 * self.temperature * math.log(batch)

# ==== 6. SER: Algorithm 1 around any base method ==================================================
# We follow the paper in six points, and the release does not. There,
#     one random crop, not the whole image, becomes both views of b2      builder/moco.py:42-43
#     flips and half turns of view 2 are the complement of view 1's       builder/moco.py:921-922
#     the tokens that are moved come from the momentum encoder            builder/moco.py:498-503
#     tokens are projected before they are moved, not after               builder/moco.py:502, 949
#     both views are anchors; no gradient passes the gathered tokens      builder/moco.py:956, 1067
#     token maps are resized bicubically, without antialiasing            builder/utils.py:934, 942
class SER(nn.Module):
    """The loss of a base method plus weight * L_equiv."""
    def __init__(self, base: nn.Module, layers: Sequence[int] = (3,), weight: float = 0.5,
                 temperature: float = 0.3):
        super().__init__()
        self.base = base
        self.layers = sorted({*layers})
        self.weight = weight
        self.temperature = temperature
        dim = base.encoder.dim
        self.projectors = nn.ModuleDict({str(layer): projector(dim) for layer in self.layers})

    def forward(self, views: Sequence[View]) -> dict:
        """Algorithm 1 on views 1 and 2 (3 and 4, ...). Returns `loss` and its detached parts."""
        encoded = [encode_view(self.base.encoder, view, self.layers) for view in views]
        cls = [view_cls for view_cls, _ in encoded]         # of each view: (B, D), b1, then b2
        maps = [view_maps for _, view_maps in encoded]      # of each view: layer -> map of b2
        # Choice: b1 and b2 share a mean and all keys, as in the release. With Eq. 3's two means, an
        # image of b2 would weigh as much as 84 of b1 (a rank has 3 and 253).
        inv = self.base(views, cls)
        if views[0].b2 is None:
            return {"loss": inv, "inv": inv.detach()}
        # Choice: the mean over layers, the sum over pairs of views; mostly there is one of each.
        equiv = 0.0
        for layer, project in zip(self.layers, self.projectors.values()):
            for i in range(0, len(views), 2):
                g = relative(views[i + 1].geometry, views[i].geometry)
                h1 = maps[i][layer]                     # f1(x1), (B2, D, H1, W1)
                h2 = maps[i + 1][layer]                 # f1(x2), (B2, D, H2, W2)
                aligned = rho(g, h1)                    # (B2, D, H2, W2)
                z = project(aligned.flatten(2).mT)      # (B2, N, K); Paper: 3.3, after aligning
                z_prime = project(h2.flatten(2).mT)     # (B2, N, K)
                equiv = equiv + patch_ntxent(z, z_prime, self.temperature)
        equiv = equiv / len(self.layers)
        # Computed also for weight 0, so that the control differs in nothing else.
        loss = inv + self.weight * equiv
        return {"loss": loss, "inv": inv.detach(), "equiv": equiv.detach()}

# ==== 7. Settings: the paper's main setting (3.3, 4.1, A.2); without --data: SMALL ================
SMALL = dict(image_size=32, patch_size=4, dim=64, depth=4, heads=2, ratio=0.25, crop_min=0.3,
             batch_size=64, epochs=3.0, warmup_epochs=0.5, base_lr=8e-3, moco_hidden=512, workers=0)

def arguments() -> ArgumentParser:
    """The flags of ser.py; another method adds its own, or changes defaults by set_defaults."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder of images, any depth; none: synthetic images")
    add("--out", default="runs/ser", help="folder of the run; an existing run is continued")
    add("--image-size", type=int, default=224, help="side of a view, pixels")
    add("--patch-size", type=int, default=16, help="side of a patch, pixels")
    add("--dim", type=int, default=384, help="width of the tokens (ViT-S: 384)")
    add("--depth", type=int, default=12, help="transformer blocks (ViT-S: 12)")
    add("--heads", type=int, default=6, help="attention heads (Choice: the release's; MoCo-v3: 12)")
    add("--cls-layer", type=int, default=3, help="[CLS] enters after this block; 0: a plain ViT")
    add("--ratio", type=float, default=0.01, help="r, share of b2 (0 and --cls-layer 0: MoCo-v3)")
    add("--weight", type=float, default=0.5, help="lambda of L_equiv; 0: the control")
    add("--temperature", type=float, default=0.3, help="tau of L_equiv (paper: 0.3; DINO 0.5)")
    add("--equiv-layers", type=int, nargs="+", default=[3], help="blocks with L_equiv")
    add("--group", nargs="+", default=list(ELEMENTS), choices=ELEMENTS, help="elements of G")
    add("--moco-hidden", type=int, default=4096, help="hidden width of projector and predictor")
    add("--crop-min", type=float, default=0.08, help="least area of a crop, share of the image")
    add("--batch-size", type=int, default=2048, help="images per step, over all ranks")
    add("--epochs", type=float, default=100.0, help="passes over the data, also fractions")
    add("--warmup-epochs", type=float, default=10.0, help="epochs of linear warmup")
    add("--base-lr", type=float, default=3e-4, help="rate for 256 images (Choice: the release's)")
    add("--weight-decay", type=float, default=0.1, help="of AdamW, on all parameters (MoCo-v3)")
    add("--seed", type=int, default=0, help="seed of the run")
    add("--bf16", action="store_true", help="bfloat16 also on a CPU; a GPU always uses it")
    add("--workers", type=int, default=8, help="loader processes of a rank; 0: it loads itself")
    add("--log-every", type=int, default=20, help="steps between lines of the log")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: one per epoch")
    return parser

def parse(argv: Sequence[str] | None = None, parser: ArgumentParser | None = None,
          small: dict = SMALL) -> Namespace:
    """The settings of a command line; without --data, `small` replaces the defaults."""
    parser = parser or arguments()
    if not parser.parse_args(argv).data:
        parser.set_defaults(**small)
    args = parser.parse_args(argv)
    if args.ratio == 0:
        args.equiv_layers = []     # without b2, projectors would get no gradient
    if args.warmup_epochs >= args.epochs:     # Choice: a short run warms up for a tenth
        args.warmup_epochs = args.epochs / 10
    return args

def check_settings(args: Namespace, images: int, ranks: int) -> None:
    """Exit with one sentence if a setting is wrong, or does not fit the images or the ranks."""
    size = args.batch_size
    b2_total = ranks * b2_per_rank(args, ranks)
    least_b2 = max(2, ranks)     # two images for L_equiv, and one on each rank
    fitting = min(size, images) // ranks * ranks     # the batch, or the next smaller that fits
    for flag, holds, wanted in (
            ("image_size", args.image_size % args.patch_size == 0, "a multiple of --patch-size"),
            ("dim", args.dim % args.heads == 0, "a multiple of --heads"),
            ("cls_layer", 0 <= args.cls_layer < args.depth, "0 or more, and below --depth"),
            ("equiv_layers", {*args.equiv_layers} <= {*range(1, args.depth + 1)}, "1 to --depth"),
            ("weight", args.weight >= 0, "0 or more"),
            ("temperature", args.temperature > 0, "above 0"),
            ("epochs", args.epochs > 0, "above 0"),
            ("batch_size", size > least_b2, f"above {least_b2}"),
            ("batch_size", size == fitting, f"{fitting}, for {images} images and {ranks} ranks"),
            ("ratio", args.ratio == 0 or least_b2 <= b2_total < size,
             f"{least_b2 / max(1, size):.3g} to below 1, or 0: now b2 has {b2_total} of {size}")):
        if not holds:
            sys.exit(f"--{flag.replace('_', '-')} {getattr(args, flag)}: should be {wanted}")

# ==== 8. Data: image files, synthetic images, and the order of a run ==============================
def list_images(folder: str) -> list[str]:
    """Sorted paths of the images below folder/train, or below folder if it has none."""
    train = os.path.join(folder, "train")
    root = train if os.path.isdir(train) else folder
    names = glob.glob("**", root_dir=root, recursive=True)     # leaves out hidden files
    images = [name for name in names if name.lower().endswith((".jpg", ".jpeg", ".png", ".webp"))]
    if not images:
        sys.exit(f"--data {folder}: no image (.jpg, .jpeg, .png, .webp) below {root}")
    return [os.path.join(root, name) for name in sorted(images)]

def read_image(path: str) -> Tensor:
    """An image file as (3, h, w) uint8 RGB. Raises OSError, which names the path."""
    try:
        image = decode_image(path, "RGB")     # Choice: torchvision decodes faster than Pillow
    except RuntimeError as error:
        raise OSError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    if image.dim() != 3 or image.dtype != torch.uint8:
        raise OSError(f"cannot read {path}: it is an animation, or has 16 bits a channel")
    return image

def synthetic_images(n: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """n images of six textures, (n, 3, size, size) uint8, and their labels (n,). Light from above
    and a smooth random tint make every place of an image distinct, whatever its class."""
    generator = rng("drawn", n, size, seed)
    left, top, direction, scale, contrast = torch.rand(5, n, 1, 1, generator=generator)
    axis = torch.linspace(-1, 1, size)
    x = axis + left - 0.5
    y = axis[:, None] + top - 0.5
    angle = 2 * math.pi * direction
    u = (7 + 7 * scale) * (x * angle.cos() + y * angle.sin())
    v = (7 + 7 * scale) * (y * angle.cos() - x * angle.sin())
    textures = torch.stack([                                                 # (6, n, size, size)
        u.sin(), 3 * u.sin() * v.sin(), u.cos() + v.cos() - 1,               # stripes, checks, dots
        (1.5 * u.hypot(v)).sin(), (u + 1.5 * v.sin()).sin(),                 # rings, waves
        4 * torch.maximum(u.cos(), v.cos()) - 3])                            # nets
    labels = torch.arange(n) % len(textures)
    ink = (3 * textures[labels, torch.arange(n)]).sigmoid()                  # (n, size, size)
    light = 0.2 * (1 - axis[:, None]) + (0.3 + 0.3 * contrast) * ink
    tint = torch.randn(n, 3, 7, 7, generator=generator)
    tint = tint - tint.mean(1, keepdim=True)     # colour without brightness
    tint = F.interpolate(tint, (size, size), mode="bicubic")
    images = light[:, None] + 0.1 * tint + 0.08 * torch.randn(n, 3, size, size, generator=generator)
    return (255 * images.clamp(0, 1)).to(torch.uint8), labels

def batch_keys(images: int, args: Namespace, start: int, steps: int) -> Iterator[list]:
    """The keys (epoch, index, in_b2) of this rank's batches up to the end of a run: its part of b1,
    then of b2. Every epoch has its own order; its last, incomplete batch is dropped."""
    ranks, rank = ranks_and_rank()
    size = args.batch_size
    b1_total = size - ranks * b2_per_rank(args, ranks)
    per_epoch = images // size
    for step in range(start, steps):
        epoch, place = divmod(step, per_epoch)
        if step == start or place == 0:
            order = torch.randperm(images, generator=rng(args.seed, "order", epoch))
        batch = order[place * size:][:size]
        b1 = batch[:b1_total].view(ranks, -1)[rank].tolist()
        b2 = batch[b1_total:].view(ranks, -1)[rank].tolist()
        yield [(epoch, index, False) for index in b1] + [(epoch, index, True) for index in b2]

# ==== 9. Training =================================================================================
def setup() -> torch.device:
    """This process's device: a GPU, or the CPU. Under torchrun, also joins the other ranks."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda" if cuda else "cpu")

def new_encoder(args: Namespace) -> ViT:
    """The untrained encoder of a run. Seeds its weights, and those of what is built after it."""
    torch.default_generator.manual_seed(args.seed)     # not CUDA's: see load_encoder
    return ViT(args.image_size, args.patch_size, args.dim, args.depth, args.heads, args.cls_layer)

def build(args: Namespace) -> SER:
    """The model of a run, on the CPU: MoCo-v3 + SER."""
    base = MoCoV3(new_encoder(args), hidden=args.moco_hidden)
    return SER(base, args.equiv_layers, args.weight, args.temperature)

def two_views(source: Sequence[str] | Tensor, args: Namespace) -> Dataset:
    """MoCo-v3's T: two views of an image, which differ in blur and solarization."""
    first = ViewSettings(args.image_size, (args.crop_min, 1.0), blur=1.0, solarize=0.0)
    second = first._replace(blur=0.1, solarize=0.2)
    return Dataset(source, (first, second), args.seed)

def adamw(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """The optimizer of all that is trained; `train` sets its learning rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, weight_decay=args.weight_decay, fused=True)

def learning_rate(args: Namespace, epoch: float) -> float:
    """A linear warmup, then half a cosine to 0; epoch: with its fraction."""
    peak = args.base_lr * args.batch_size / 256
    if epoch < args.warmup_epochs:
        return peak * epoch / args.warmup_epochs
    progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))

def save(path: Path, **state) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves a whole file, old or new."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)

def load_encoder(path: str | Path) -> ViT:
    """The encoder of a checkpoint, in eval mode. To and from timm: paper/experiments/convert.py."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    with torch.random.fork_rng(devices=[]):     # the caller's random numbers go on as before
        encoder = new_encoder(Namespace(**state["settings"]))
    encoder.load_state_dict(state["encoder"])
    return encoder.eval()

def resume(path, settings, model, optimizer) -> int:
    """Load a checkpoint and return its step. Exits with one sentence if it is of another run."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    saved = state["settings"]
    harmless = ("data", "out", "workers", "log_every", "save_every")
    differ = [f"{name} {saved.get(name)} (now {settings.get(name)})" for name in saved | settings
              if name not in harmless and saved.get(name) != settings.get(name)]
    if differ:
        sys.exit(f"{path} was trained with {', '.join(differ)}: use that, or a new --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]

def save_views(path, views, cell) -> None:
    """Up to eight rows of rho_g(x1) and x2 of b2, which are to agree up to colours and blur."""
    moved = rho(relative(views[1].geometry, views[0].geometry), views[0].b2, cell)
    pairs = torch.stack([moved, views[1].b2], dim=1)[:8]
    save_image(pairs.flatten(0, 1).cpu() * STD + MEAN, path, nrow=2)

def record(log, bar, step, losses, lr) -> None:
    """Log means over ranks. Exits with one sentence if the loss is not finite."""
    ranks, _ = ranks_and_rank()
    values = torch.stack(list(losses.values())).detach()
    if ranks > 1:
        dist.all_reduce(values)
    means = dict(zip(losses, (values / ranks).tolist())) | {"lr": lr}
    bar.set_postfix({name: f"{mean:.3g}" for name, mean in means.items() if name != "loss"})
    print(json.dumps({"step": step, **means, "images_per_s": bar.format_dict["rate"]}), file=log)
    if not math.isfinite(means["loss"]):
        sys.exit(f"step {step}: the loss is {means['loss']}: try a lower --base-lr and a new --out")

def announce(args, source, model, dataset, b2_total, progress) -> None:
    """Print the data, the plan, and what both losses are if all embeddings are equal."""
    where = "synthetic images"
    if args.data:
        folders = {os.path.dirname(path) for path in source}
        where = f"images in {len(folders):,} folders below {os.path.commonpath(folders)}"
    print(f"{len(source):,} {where}; a batch has {args.batch_size}, {b2_total} of them in b2; "
          f"{progress} steps are done; warmup: {args.warmup_epochs:g} of {args.epochs:g} epochs")
    chance = f"at chance, L_inv is {model.base.chance(args.batch_size):.3f}"
    if b2_total > 0:
        tokens = [(one.size // args.patch_size) ** 2 for one in dataset.view_settings[::2]]
        equiv = sum(math.log(1 + 2 * n * (b2_total - 1)) for n in tokens)     # over pairs of views
        chance += f", L_equiv about {equiv:.1f}"
    print(chance)

def train(args: Namespace, make_model: Callable = build, make_dataset: Callable = two_views,
          make_optimizer: Callable = adamw) -> Path:
    """Run or continue a training, of MoCo-v3 + SER by default; returns the checkpoint's path."""
    device = setup()
    ranks, rank = ranks_and_rank()
    source = list_images(args.data) if args.data else synthetic_images(4096, args.image_size, 0)[0]
    check_settings(args, len(source), ranks)
    per_epoch = len(source) // args.batch_size
    steps = max(1, round(args.epochs * per_epoch))
    path = Path(args.out, "last.pt")
    os.makedirs(args.out, exist_ok=True)
    model = make_model(args).to(device)
    method = f"{type(model).__name__} on {type(model.base).__name__}"
    settings = vars(args) | {"method": method, "images": len(source), "ranks": ranks}
    if device.type == "cuda" and ranks > 1:     # on CPUs, each rank has statistics of its own
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = make_optimizer(model, args)
    start = resume(path, settings, model, optimizer) if path.exists() else 0
    parallel = DDP(model, gradient_as_bucket_view=True) if ranks > 1 else model
    dataset = make_dataset(source, args)
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=batch_keys(len(source), args, start, steps),
        num_workers=args.workers, pin_memory=device.type == "cuda")
    log = open(os.devnull if rank > 0 else path.with_name("log.jsonl"), "a", buffering=1)
    b2_total = ranks * b2_per_rank(args, ranks)
    print(json.dumps(settings | {"steps": steps, "b2": b2_total}), file=log)
    if rank == 0:
        announce(args, source, model, dataset, b2_total, f"{start} of {steps}")
    bar = tqdm(total=steps * args.batch_size, initial=start * args.batch_size, disable=rank > 0,
               unit=" images", unit_scale=True)
    for step, loaded in enumerate(loader, start):
        # Schedules.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step / per_epoch)
        model.base.update(step / steps)
        # Views.
        loaded = [(pixels.to(device, non_blocking=True), aug) for pixels, aug in loaded]
        views = make_views(loaded, args, step)
        if step == 0 and rank == 0 and args.ratio > 0:
            save_views(path.with_name("views.png"), views, args.patch_size)
        # Forward. The seed is for methods that sample here, as DINO's stochastic depth.
        torch.manual_seed(rng(args.seed, "step", step, rank).initial_seed())
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda" or args.bf16):
            losses = parallel(views)
        # Backward and step.
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        bar.update(args.batch_size)
        # Log and save.
        done = step + 1
        saves = done == steps or done % (args.save_every or per_epoch) == 0
        if saves or step == start or done % args.log_every == 0:
            record(log, bar, done, losses, optimizer.param_groups[0]["lr"])
        if saves and rank == 0:
            save(path, step=done, settings=settings, model=model.state_dict(),
                 encoder=model.base.encoder.state_dict(), optimizer=optimizer.state_dict())
    if ranks > 1:
        dist.destroy_process_group()
    return path

if __name__ == "__main__":
    train(parse())
