"""Soft Equivariance Regularization (SER) for self-supervised vision transformers, in one file.

Self-supervised learning makes the final embedding invariant to augmentations, and so erases geometric
structure. SER keeps that objective and adds one at an intermediate layer, where tokens still form a map:

    f = f2 . f1    f1: the first blocks, giving a map of patch tokens; f2: the rest, where [CLS] enters
    b1, b2         two parts of each batch: b1 gets the usual crops, b2 (1%) invertible geometry G instead
    z = rho_g(f1(x1)), z' = f1(x2), g = g2 g1^-1    for the views x1 = rho_g1(x), x2 = rho_g2(x) of b2
    loss = L_inv([CLS] of b1 and b2) + lam * L_equiv(z, z')    L_equiv: NT-Xent over patches
rho_g is known, not learned: quarter turns and flips permute tokens, scaling resizes the map.

    python ser.py                                          a small ViT on drawn images, on 2 CPU cores
    python ser.py --data /imagenet --batch-size 256        one GPU; a CPU or a Mac by the same path
    torchrun --nproc_per_node=8 ser.py --data /imagenet    the paper's main setting

    paper                          here                 paper                        here
    3.1  rho_g, g = g2 g1^-1       rho, relative        4.1  base method, settings   MoCoV3, Config
    3.1  f = f2 . f1, [CLS]        ViT(cls_layer=)      r, lambda (sensitivity)      --ratio, --weight
    3.2  T, T_eq, b1 and b2        Views, make_views    group elements (ablation)    --group
    3.3  L_equiv                   patch_ntxent         layers (figure, Table 3)     --equiv-layers
    Eq. 3, Algorithm 1             SER.forward          A.2  equivariance score      eval_linear.equivariance
Unlike the release (see README): L_equiv has a gradient, g1 and g2 are independent, tokens are aligned, then
projected. `# Paper:` marks a line of the paper, `# Choice:` one where it is silent or the release differs.
1 Config, 2 The group G, 3 Views, 4 Encoder, 5 Equivariance loss, 6 Base method, 7 SER, 8 Data, 9 Training,
10 Command line. Axes: B images, N tokens, H x W token grid (rows first), D width, K projection, W ranks.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterator, NamedTuple, Sequence

os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")   # a Mac's GPU lacks a kernel of `resize`
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor, rgb_to_grayscale
from tqdm import tqdm

# ==== 1. Config: every setting, its unit, the paper's value, and where the paper is silent, its source ======
class UserError(ValueError):
    """A mistake that a person can mend: one line on stderr and exit code 2, no traceback."""

def require(ok: bool, message: str) -> None:
    """Raise UserError(message), which says the value and the way out, unless `ok`."""
    if not ok:
        raise UserError(message)

def setting(default: Any, least: float, most: float, text: str) -> Any:
    """A field of Config with its range; `parse` makes it a flag, so that help and default cannot drift."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most, "help": text})

TINY, INF = 1e-9, math.inf
class View(NamedTuple):
    """What T does to make one view, beside a flip, colour jitter and grayscale, alike for all (paper 3.2)."""
    size: int                     # side, pixels
    area: tuple[float, float]     # of the crop, share of the image
    blur: float                   # probability
    solarize: float               # probability

# The method at a size for drawn images, two CPU cores and three minutes.
SMALL = dict(image_size=32, patch_size=4, dim=64, depth=4, heads=2, cls_layer=2, equiv_layers=(2,), workers=0,
             ratio=0.125, crop_min=0.3, batch_size=128, epochs=8.0, warmup_epochs=1.0, base_lr=3e-3)

@dataclasses.dataclass(frozen=True)
class Common:
    """The settings that every base method shares. The defaults are the paper's on ImageNet (4.1); without
    --data, those of `drawn` take their place. A subclass may override the members below the fields."""
    data: str = setting("", 0, 0, "folder of images, any depth, with or without train/; none: drawn images")
    out: str = setting("runs/ser", 0, 0, "folder of last.pt, log.jsonl, views.png; a run there is resumed")
    image_size: int = setting(224, 16, INF, "side of a view, pixels (paper: 224)")
    patch_size: int = setting(16, 1, INF, "side of a patch, pixels (paper: 16)")
    dim: int = setting(384, 4, INF, "width of the tokens (ViT-S: 384)")
    depth: int = setting(12, 1, INF, "transformer blocks (ViT-S: 12)")
    # Choice: 6 heads as in DINO, DeiT and timm. MoCo-v3's ViT-S has 12, and the paper does not say.
    heads: int = setting(6, 1, INF, "attention heads")
    cls_layer: int = setting(3, 0, INF, "[CLS] enters after this block; 0: a plain ViT (paper: 3)")
    ratio: float = setting(0.01, 0, 1, "r, share of b2 in a batch; 0: the base method alone (paper: 0.01)")
    weight: float = setting(0.5, 0, INF, "lambda of the equivariance loss; 0: the control (paper: 0.5)")
    temperature: float = setting(0.3, TINY, INF, "tau of the equivariance loss (paper: 0.3; DINO 0.5)")
    equiv_layers: tuple[int, ...] = setting((3,), 1, INF, "blocks whose token map is regularised (paper: 3)")
    group: tuple[str, ...] = setting(("rot90", "hflip", "scale"), 0, 0, "elements of G, any of these three")
    crop_min: float = setting(0.08, TINY, 1, "least area of a crop, share of the image (MoCo-v3: 0.08)")
    batch_size: int = setting(2048, 1, INF, "images per step, over all ranks (paper: 2048)")
    epochs: float = setting(100.0, TINY, INF, "passes over the data; fractions are fine (paper: 100)")
    warmup_epochs: float = setting(10.0, 0, INF, "epochs of linear warmup (paper: 10)")
    # Choice: 3e-4 as the release trains MoCo-v3 + SER; the paper names none, MoCo-v3 uses 1.5e-4.
    base_lr: float = setting(3e-4, TINY, INF, "learning rate per 256 images, scaled by batch / 256")
    weight_decay: float = setting(0.1, 0, INF, "AdamW's weight decay, on all parameters (MoCo-v3: 0.1)")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of every random draw")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the training process loads")
    log_every: int = setting(20, 1, INF, "steps between log records and looks at stop signals")
    save_every: int = setting(0, 0, INF, "steps between checkpoints; 0: one per epoch")
    compile: bool = setting(False, 0, 1, "compile the transformer blocks")

    @property
    def lr(self) -> float:
        """Peak learning rate, linear in the total batch."""
        return self.base_lr * self.batch_size / 256

    @property
    def views(self) -> tuple[View, ...]:
        """T of every view of an image, in pairs between which L_equiv is taken; here as in MoCo-v3."""
        area = (self.crop_min, 1.0)
        return View(self.image_size, area, 1.0, 0.0), View(self.image_size, area, 0.1, 0.2)

    def b2_images(self, ranks: int) -> int:
        """|b2| of a rank: r B / W to the nearest integer, so that all ranks gather the same shapes."""
        return math.floor(self.ratio * self.batch_size / ranks + 0.5)

    def optimizer(self, model: nn.Module, **how: Any) -> torch.optim.Optimizer:
        """AdamW on all that is trained."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.lr, weight_decay=self.weight_decay, **how)

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """What changes between the backward pass and the step, at a fractional epoch: the schedules."""
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(epoch, self.warmup_epochs, self.epochs, self.lr)

def warmup_cosine(epoch: float, warmup: float, epochs: float, peak: float, end: float = 0.0) -> float:
    """Linear from 0 to `peak` over the warmup, then half a cosine to `end`."""
    if epoch < warmup:
        return peak * epoch / warmup
    rest = min((epoch - warmup) / max(epochs - warmup, TINY), 1)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * rest))

@dataclasses.dataclass(frozen=True)
class Config(Common):
    """MoCo-v3 + SER, the paper's main setting."""
    moco_temperature: float = setting(0.2, TINY, INF, "temperature of InfoNCE (MoCo-v3: 0.2)")
    moco_momentum: float = setting(0.99, 0, 1, "first momentum of the keys, rising to 1 (MoCo-v3: 0.99)")
    moco_hidden: int = setting(4096, 1, INF, "hidden width of projector and predictor (MoCo-v3: 4096)")
    drawn: ClassVar[dict[str, Any]] = SMALL | dict(moco_hidden=512)
    program: ClassVar[str] = "ser.py"   # in messages

# ==== 2. The group G: one operator for pixels and for tokens (paper 3.1) ====================================
class Geometry(NamedTuple):
    """One element of G per image: a flip, then quarter turns, then resampling to a grid, which is that of the
    *result*, and shared, so that views stack. flip and turns stay on the CPU: reading them stalls no GPU."""
    flip: torch.Tensor       # (B,) bool, horizontal flip, applied first
    turns: torch.Tensor      # (B,) int64 in 0..3, counter-clockwise quarter turns, applied second
    grid: tuple[int, int]    # (H, W) in tokens, rows first

def sample_geometry(batch: int, grid: int = 14, area: Sequence[float] = (0.7, 1.3),
                    aspect: Sequence[float] = (3 / 4, 4 / 3),
                    elements: Sequence[str] = ("rot90", "hflip", "scale"),
                    generator: torch.Generator | None = None) -> Geometry:
    """A flip and turns for every image, and one grid for all: area uniform, relative to grid^2; aspect W / H
    log-uniform; sides rounded (10..18 tokens for grid 14). What `elements` leaves out stays the identity, and
    the draws of the others do not change. Raises ValueError for an unknown element."""
    require(set(elements) <= {"rot90", "hflip", "scale"}, f"group {elements}: choose from rot90 hflip scale")
    flip = torch.rand(batch, generator=generator) < 0.5
    turns = torch.randint(4, (batch,), generator=generator)
    u, v = torch.rand(2, generator=generator).tolist()
    # Choice: the paper's [0.7, 1.3] (4.1) bounds the area, the aspect lies in [3/4, 4/3]: as in the release.
    tokens = grid ** 2 * (area[0] + u * (area[1] - area[0]))
    ratio = aspect[0] * (aspect[1] / aspect[0]) ** v
    scaled = (max(1, round(math.sqrt(tokens / ratio))), max(1, round(math.sqrt(tokens * ratio))))
    return Geometry(flip & ("hflip" in elements), turns * ("rot90" in elements),
                    scaled if "scale" in elements else (grid, grid))

def relative(g2: Geometry, g1: Geometry) -> Geometry:
    """g2 g1^-1, which takes view 1 to view 2 (paper 3.1). The turn R and the flip F have F R = R^-1 F, so
    R^t2 F^f2 (R^t1 F^f1)^-1 = R^(t2 - s t1) F^(f1 xor f2), s = -1 if only one flips, else 1; on g2's grid."""
    flip = g1.flip ^ g2.flip
    return Geometry(flip, (g2.turns - torch.where(flip, -1, 1) * g1.turns) % 4, g2.grid)

def resize(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resample (B, C, h, w), float or uint8, to (B, C, *size); crops, views and tokens share it (paper 3.2).
    antialias=True does to a tensor what Pillow does to an image; without it, the two differ visibly."""
    if x.shape[-2:] == size:
        return x
    return torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)

def rho(g: "Geometry", x: torch.Tensor, cell: int = 1) -> torch.Tensor:
    """The action rho_g (paper 3.1): (B, C, h, w) -> (B, C, H * cell, W * cell), (H, W) = g.grid.
    cell=1 acts on token maps, cell=patch_size on pixels: the same code, so that an image and its map move
    alike. Flips and turns are permutations, bit for bit; a size that is not the wanted one is resampled."""
    size = (g.grid[0] * cell, g.grid[1] * cell)
    element = 4 * g.flip + g.turns        # (B,) which of the eight permutations, 0..7
    order = element.argsort()             # puts the images that share one side by side
    counts = torch.bincount(element, minlength=8).tolist()
    groups = x[order.to(x.device, non_blocking=x.is_cuda)].split(counts)
    moved = [resize(torch.rot90(part.flip(-1) if e >= 4 else part, e % 4, (-2, -1)), size)
             for e, part in enumerate(groups) if len(part)]
    return torch.cat(moved)[order.argsort().to(x.device, non_blocking=x.is_cuda)]

# ==== 3. Views: T for b1, T_eq for b2, and the photometric jitter of both (paper 3.2) =======================
class Batch(NamedTuple):
    """What SER takes, on the device."""
    views: list[list[Tensor]]          # views[v]: the image batches (B_i, 3, h, w) of view v, b1 before b2
    geometry: list[Geometry] | None    # geometry[v]: the elements that made b2 of view v; None without b2

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)   # of ImageNet
def rng(*key: Any) -> torch.Generator:
    """A CPU generator for this key alone: a resumed run draws the same, and no two keys share their draws."""
    return torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(63))   # SHA-512 of the text

def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` (n, 1, 1, 1) of a full circle, at the same value and chroma (hexcone model)."""
    r, g, b = x.split(1, dim=1)
    value, chroma = x.amax(1, keepdim=True), x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    c = torch.where(chroma == 0, 1, chroma)
    hue = torch.where(value == r, (g - b) / c, torch.where(value == g, 2 + (b - r) / c, 4 + (r - g) / c))
    # hue in sextants: a channel has `value` within one of its own hue, no chroma beyond two, linear between.
    away = torch.cat([(n + hue + 6 * shift) % 6 for n in (5, 3, 1)], dim=1)
    return value - chroma * torch.minimum(away, 4 - away).clamp(0, 1)

def gaussian_blur(x: Tensor, sigma: Tensor, radius: int = 6) -> Tensor:
    """Separable blur with reflected borders; sigma (n, 1, 1, 1) in pixels, radius three times the largest. A
    pass is one matrix product: row i of the matrix is the kernel around pixel i, reflection folded in."""
    passes = []
    for size, r in ((n, min(radius, n - 1)) for n in x.shape[-2:]):   # a small image bounds the radius
        offsets, eye = torch.arange(-r, r + 1, device=x.device), torch.eye(size, device=x.device)[None]
        kernel = torch.softmax(-offsets ** 2 / (2 * sigma.view(-1, 1) ** 2), dim=1)  # (n, 2 r + 1)
        window = F.pad(eye, (r, r), mode="reflect")[0].unfold(1, 2 * r + 1, 1)       # (size, size, 2 r + 1)
        passes.append(torch.einsum("iok,nk->noi", window, kernel)[:, None])
    return passes[0] @ x @ passes[1].mT

OPERATIONS = {   # images (n, 3, h, w) in [0, 1], a parameter for each (n, 1, 1, 1); else as torchvision's
    "brightness": lambda x, factor: (factor * x).clamp(0, 1),
    "contrast": lambda x, factor: rgb_to_grayscale(x).mean((2, 3), keepdim=True).lerp(x, factor).clamp(0, 1),
    "saturation": lambda x, factor: rgb_to_grayscale(x).lerp(x, factor).clamp(0, 1),
    "hue": shift_hue,
    "grayscale": lambda x, _: rgb_to_grayscale(x, num_output_channels=3),
    "blur": gaussian_blur,
    "solarize": lambda x, threshold: torch.where(x >= threshold, 1 - x, x),
}

def photometric(x: Tensor, draws: Tensor, blur: float, solarize: float) -> Tensor:
    """MoCo-v3's photometric augmentation with draws for every image (torchvision: one for all), normalised.
    x: (B, 3, h, w) in [0, 1]; draws: (B, 13) uniform in [0, 1), on the CPU. Colour jitter (.4, .4, .2, .1) in
    random order with probability .8, grayscale .2; blur (sigma .1..2) and solarization with those given."""
    u = draws.unbind(1)
    jitter = {"brightness": 0.6 + 0.8 * u[1], "contrast": 0.6 + 0.8 * u[2], "saturation": 0.8 + 0.4 * u[3],
              "hue": 0.2 * u[4] - 0.1}
    order = draws[:, 5:9].argsort(1)   # sorting four uniform numbers gives a uniform permutation
    steps = [(name, value, (u[0] < 0.8) & (order[:, slot] == k))
             for slot in range(4) for k, (name, value) in enumerate(jitter.items())]
    steps += [("grayscale", u[9], u[9] < 0.2),
              ("blur", 0.1 + 1.9 * u[10], u[11] < blur),
              ("solarize", torch.full_like(u[12], 128 / 255), u[12] < solarize)]
    x = x.clone()   # the caller's stays
    for name, value, taken in steps:
        rows = taken.nonzero().flatten()   # known on the CPU, so that nothing waits for a GPU
        if len(rows):
            value = value[rows].view(-1, 1, 1, 1).to(x, non_blocking=x.is_cuda)
            rows = rows.to(x.device, non_blocking=x.is_cuda)
            x[rows] = OPERATIONS[name](x[rows], value)
    return (x - MEAN.to(x, non_blocking=x.is_cuda)) / STD.to(x, non_blocking=x.is_cuda)

def make_views(images: list[Tensor], draws: Tensor, cfg: Common, step: int, rank: int, ranks: int) -> Batch:
    """Geometry, then jitter, independent between the views. images: of each view, (B, 3, S_v, S_v) uint8 on
    the device, first b1: crops, then b2: the whole image; draws: (B, V, 13) on the CPU. Every rank draws the
    geometry of all b2 images and keeps its rows: the ranks agree on the grid, and none repeats draws."""
    b2 = cfg.b2_images(ranks)
    b1, own = len(draws) - b2, slice(rank * b2, (rank + 1) * b2)
    views, geometry = [], []
    for v, (view, x, u) in enumerate(zip(cfg.views, images, draws.unbind(1))):
        x, jitter = x.float() / 255, (view.blur, view.solarize)
        views.append([photometric(x[:b1], u[:b1], *jitter)] if b1 else [])
        if b2:
            g = sample_geometry(ranks * b2, view.size // cfg.patch_size, elements=cfg.group,
                                generator=rng(cfg.seed, "geometry", step, v))
            geometry.append(Geometry(g.flip[own], g.turns[own], g.grid))
            views[v].append(photometric(rho(geometry[v], x[b1:], cfg.patch_size), u[b1:], *jitter))
    return Batch(views, geometry or None)

# ==== 4. Encoder: a ViT that takes image batches of any sizes in one pass (paper 3.1) =======================
class Block(nn.Module):
    """Pre-norm transformer block on packed tokens, with timm's parameter names."""
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.drop_path = heads, 0.0
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def survive(self, branch: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
        """Stochastic depth: in training, an image loses the branch with probability `drop_path`."""
        if not (self.training and self.drop_path):
            return branch
        keep = [torch.rand(B, 1, device=branch.device).ge(self.drop_path).expand(B, N) for B, N in shapes]
        return branch * torch.cat([k.flatten() for k in keep])[:, None] / (1 - self.drop_path)

    def forward(self, x: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
        """x: (T, D), the tokens of all images end to end; shapes: (B_i, N_i) of the batches among them. Only
        the products of queries and keys need to know the images."""
        qkv, attended = self.attn["qkv"](self.norm1(x)), []
        for part, (B, N) in zip(qkv.split([B * N for B, N in shapes]), shapes):
            q, k, v = part.view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)    # (B, heads, N, D / heads)
            attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * N, -1))
        x = x + self.survive(self.attn["proj"](torch.cat(attended)), shapes)
        # On a CPU in parts: glibc maps memory above 32 MB anew each time, and that costs a fifth of a step.
        parts = self.norm2(x).split(len(x) if x.is_cuda else 2 ** 22 // self.mlp["fc1"].out_features)
        mlp = torch.cat([self.mlp["fc2"](F.gelu(self.mlp["fc1"](part))) for part in parts])
        return x + self.survive(mlp, shapes)

def position_codes(H: int, W: int, dim: int, base: int, device: torch.device | None = None) -> Tensor:
    """MoCo-v3's fixed 2-D sin-cos codes, (H * W, dim): half of the width for rows, half for columns.
    Evaluated at the patch centres in the coordinates of a base x base grid, (i + 0.5) * base / H - 0.5: a
    scaled view shows the same content on another grid, and content keeps its code. MoCo-v3's own at H = W."""
    omega = 10000 ** -(torch.arange(dim // 4, device=device) / (dim // 4))
    angles = [((torch.arange(n, device=device) + 0.5) * base / n - 0.5)[:, None] * omega for n in (H, W)]
    rows, columns = (torch.cat([a.sin(), a.cos()], dim=1) for a in angles)
    return torch.cat([rows[:, None].expand(H, W, -1), columns.expand(H, W, -1)], dim=2).flatten(0, 1)

class Encoded(NamedTuple):
    """The encoder's result for one image batch."""
    cls: Tensor              # (B, D), LayerNorm of the final [CLS]
    maps: dict[int, Tensor]  # layer -> (B, D, H, W), the patch tokens after that block, without LayerNorm

class ViT(nn.Module):
    """f = f2 . f1, a vision transformer whose [CLS] token enters after block `cls_layer` (paper 3.1).
    With cls_layer=0 it is timm's ViT, from the same weights. Position codes are fixed, [CLS] has none. The
    patch embedding is random and frozen, MoCo-v3's trick. Raises ValueError for sizes that do not fit."""
    def __init__(self, image_size: int = 224, patch_size: int = 16, dim: int = 384, depth: int = 12,
                 heads: int = 6, cls_layer: int = 3):
        super().__init__()
        fit = -(-image_size // patch_size) * patch_size
        require(fit == image_size, f"image size {image_size} is no multiple of patch {patch_size}: try {fit}")
        require(dim % heads == 0 and dim % 4 == 0, f"dim {dim} must be a multiple of 4 and of heads {heads}")
        require(0 <= cls_layer < depth, f"cls layer {cls_layer} must lie in 0..{depth - 1}, before a block")
        self.shape = dict(image_size=image_size, patch_size=patch_size, dim=dim, depth=depth, heads=heads,
                          cls_layer=cls_layer)   # what a checkpoint needs to build it again
        self.patch_size, self.grid, self.dim = patch_size, image_size // patch_size, dim
        self.depth, self.cls_layer = depth, cls_layer
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 1e-6)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        # MoCo-v3: Xavier-uniform, zero biases; qkv is three matrices: bound sqrt(6 / 2D), not sqrt(6 / 4D).
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.xavier_uniform_(module.weight.flatten(1), 2 ** 0.5 if name.endswith("qkv") else 1.0)
                nn.init.zeros_(module.bias)
        self.patch_embed.requires_grad_(False)

    def embed(self, x: Tensor) -> Tensor:
        """Patch tokens with position codes: (B, 3, h, w) -> (B, N, D)."""
        on_grid = x.shape[-2] % self.patch_size == 0 == x.shape[-1] % self.patch_size
        require(on_grid, f"{tuple(x.shape[-2:])} pixels are off the grid of patch size {self.patch_size}")
        tokens = self.patch_embed["proj"](x)
        return tokens.flatten(2).mT + position_codes(*tokens.shape[-2:], self.dim, self.grid, x.device)

    def layers(self, images: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Run all image batches at once; yield (l, tokens after block l) for l = 0..depth, the tokens as one
        (B_i, N_i, D) per batch, with [CLS] in front where l > cls_layer. All but attention sees all tokens in
        one piece: b2 is 1% of the images, and a pass of its own would cost far more than 1% of the time."""
        tokens = [self.embed(x) for x in images]
        for layer in range(self.depth + 1):
            if layer == self.cls_layer + 1:
                tokens = [torch.cat([self.cls_token.expand(len(t), -1, -1), t], dim=1) for t in tokens]
            if layer in (0, self.cls_layer + 1):
                shapes = [(t.shape[0], t.shape[1]) for t in tokens]
                x = torch.cat([t.flatten(0, 1) for t in tokens])                        # (T, D)
            if layer > 0:
                x = self.blocks[layer - 1](x, shapes)
            tokens = [t.view(B, N, -1) for t, (B, N) in zip(x.split([B * N for B, N in shapes]), shapes)]
            yield layer, tokens

    def forward(self, images: Sequence[Tensor], map_layers: Sequence[int] = ()) -> list[Encoded]:
        """Embeddings, and token maps after blocks `map_layers`, of image batches (B_i, 3, h_i, w_i)."""
        maps: list[dict[int, Tensor]] = [{} for _ in images]
        for layer, tokens in self.layers(images):
            for x, t, found in zip(images, tokens, maps if layer in map_layers else ()):
                patches = t[:, 1:] if layer > self.cls_layer else t
                found[layer] = patches.transpose(1, 2).unflatten(2, (x.shape[-2] // self.patch_size, -1))
        return [Encoded(self.norm(t[:, 0]), found) for t, found in zip(tokens, maps)]

    def last_cls(self, x: Tensor, n: int = 4) -> Tensor:
        """(B, n * D): LayerNorm of [CLS] after the last n blocks (paper 4.1). ValueError if one has none."""
        require(1 <= n <= self.depth - self.cls_layer, f"n = {n}: [CLS] enters after block {self.cls_layer}")
        return torch.cat([self.norm(tokens[0][:, 0]) for layer, tokens in self.layers([x])
                          if layer > self.depth - n], dim=1)

# ==== 5. Equivariance loss: NT-Xent over patches (paper 3.3) ================================================
class AllGather(torch.autograd.Function):
    """(B, ...) of every rank -> (W * B, ...), with the gradient; B must be the same everywhere. A rank's rows
    enter the loss of every rank, so their gradient is the sum over ranks; DDP's mean makes W equal one."""
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient)
        return gradient.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]

def patch_ntxent(z: torch.Tensor, z_prime: torch.Tensor, temperature: float = 0.3,
                 chunk: int | None = None) -> torch.Tensor:
    """L_equiv (paper 3.3 and Eq. 3), the mean over images i and positions j of
      -log  exp s(z_ij, z'_ij) / (exp s(z_ij, z'_ij) + sum_{m != i, n} exp s(z_ij, z_mn) + exp s(z_ij, z'_mn))
    with s the cosine over tau: the negatives are all tokens of *other* images, of both views.
    z: (B, N, K), the projections of rho_g(f1(x1)); z_prime: (B, N, K), those of f1(x2); floats, computed in
    fp32. Returns a scalar. With several ranks, anchors are local and keys come from all ranks, with their
    gradient; the mean over ranks is the loss of the whole batch. chunk: anchors per block of logits; blocks
    are computed again in the backward pass, so that memory does not grow with the anchors, at equal value and
    gradient; None: 32 MB. Raises ValueError for unequal shapes, tau <= 0, chunk < 1, or a single image."""
    B, N, K = z.shape
    if z_prime.shape != z.shape or temperature <= 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"patch_ntxent: shapes {tuple(z.shape)} and {tuple(z_prime.shape)} must be equal, "
                         f"temperature {temperature} greater than 0, chunk {chunk} at least 1")
    with torch.autocast(z.device.type, enabled=False):
        anchors, targets = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (z, z_prime))
        keys, first = torch.stack([anchors, targets], dim=1), 0                             # (B, 2, N, K)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            keys, first = AllGather.apply(keys), B * torch.distributed.get_rank()           # (W * B, 2, N, K)
        if (images := len(keys)) < 2:
            raise ValueError("patch_ntxent: negatives come from other images, and there is only one")
        keys = keys.reshape(images * 2 * N, K)
        positive = (anchors * targets).sum(-1).flatten() / temperature                      # (B * N)
        anchors = anchors.reshape(B * N, K) / temperature
        owner = torch.arange(first, first + B, device=z.device).repeat_interleave(N)    # image of an anchor
        def block(anchors, positive, owner, keys):
            # own[a, m]: key image m is the anchor's own i; its 2N keys are no negatives.     m=0 1 2
            # Choice: z anchors, z and z' give negatives, as in the paper; in the         i=0   T . .
            # release both anchor, and only the other view gives negatives.               i=1   . T .
            own = owner[:, None] == torch.arange(images, device=owner.device)
            logits = (anchors @ keys.T).view(-1, images, 2 * N).masked_fill_(own[..., None], -torch.inf)
            # -log(e^p / (e^p + sum e^l)) = softplus(logsumexp(l) - p), which cannot overflow.
            return torch.nn.functional.softplus(logits.flatten(1).logsumexp(1) - positive).sum()
        chunk = chunk or max(1, 2 ** 23 // len(keys))
        if chunk >= B * N:   # a single block: nothing to save by computing it twice
            return block(anchors, positive, owner, keys) / (B * N)
        blocks = zip(anchors.split(chunk), positive.split(chunk), owner.split(chunk))
        from torch.utils.checkpoint import checkpoint   # older versions do not load it with torch
        return sum(checkpoint(block, *part, keys, use_reentrant=False, preserve_rng_state=False)
                   for part in blocks) / (B * N)

# ==== 6. Base method: MoCo-v3 (paper 4.1) ===================================================================
def ranks_and_rank() -> tuple[int, int]:
    """(W, own rank); (1, 0) in a single process."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

def mlp(*widths: int) -> nn.Sequential:
    """MoCo-v3's head: no biases, BatchNorm and ReLU between layers, BatchNorm without affine at the end."""
    parts: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        parts += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts[:-2], nn.BatchNorm1d(widths[-1], affine=False))

class MoCoV3(nn.Module):
    """MoCo-v3 (Chen et al. 2021), and the interface of every base method:
        base.encoder        the online ViT; SER runs it once per step, on all image batches
        base(views, cls)    the invariance loss; views as in Batch, cls the final embeddings, (B, D) per view
        base.update(p)      called before every step, at progress p in [0, 1)
        base.diagnostics    optional: name -> scalar, what the last forward pass measured, for the log
    """
    pairs: Sequence[tuple[int, int]] = ((0, 1), (1, 0))   # (query view, key view)
    def __init__(self, encoder: ViT, out_dim: int = 256, hidden: int = 4096, temperature: float = 0.2,
                 momentum: float = 0.99):
        super().__init__()
        self.encoder, self.temperature, self.momentum = encoder, temperature, momentum
        self.projector = mlp(encoder.dim, hidden, hidden, out_dim)
        self.predictor = mlp(out_dim, hidden, out_dim)
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.diagnostics: dict[str, Tensor | float] = {}

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the momentum branch towards the online one; m rises from `momentum` to 1 on half a cosine."""
        m = 1 - (1 - self.momentum) * 0.5 * (1 + math.cos(math.pi * progress))
        move = torch.optim.swa_utils.get_ema_multi_avg_fn(m)   # a few kernels in place of one per parameter
        for slow, fast in ((self.momentum_encoder, self.encoder), (self.momentum_projector, self.projector)):
            move(list(slow.parameters()), list(fast.parameters()), None)
        self.diagnostics["momentum"] = m

    def forward(self, views: list[list[Tensor]], cls: list[Tensor]) -> Tensor:
        """InfoNCE of one view's queries against another view's keys, added over `pairs`."""
        queries = [self.predictor(self.projector(c)) for c in cls]
        with torch.no_grad():
            keys = {k: self.momentum_projector(torch.cat([e.cls for e in self.momentum_encoder(views[k])]))
                    for k in {k for _, k in self.pairs}}
        return sum(self.contrast(queries[q], keys[k]) for q, k in self.pairs)

    def contrast(self, q: Tensor, k: Tensor) -> Tensor:
        """2T times the cross-entropy of q (B, K) over the keys of all ranks; 2T ln(W B) at chance."""
        ranks, rank = ranks_and_rank()
        with torch.autocast(q.device.type, enabled=False):
            q, k = F.normalize(q.float(), dim=1), F.normalize(k.float(), dim=1)
            logits = q @ (AllGather.apply(k) if ranks > 1 else k).T / self.temperature      # (B, W * B)
            labels = torch.arange(len(q), device=q.device) + rank * len(q)
            scale = 2 * self.temperature
            self.diagnostics |= {"inv_top1": (logits.argmax(1) == labels).float().mean(),
                                 "inv_chance": scale * len(self.pairs) * math.log(logits.shape[1])}
            return F.cross_entropy(logits, labels) * scale

# ==== 7. SER: Algorithm 1 around any base method ============================================================
def retrieval(z: Tensor, z_prime: Tensor) -> Tensor:
    """Share of the tokens in z (B, N, K) whose most similar one of all in z_prime is their counterpart."""
    z, z_prime = (F.normalize(x.detach().flatten(0, 1).float(), dim=1) for x in (z, z_prime))
    nearest = torch.cat([(rows @ z_prime.T).argmax(1) for rows in z.split(1024)])
    return (nearest == torch.arange(len(z), device=z.device)).float().mean()

class SER(nn.Module):
    """The loss of `base`, plus weight * L_equiv, averaged over `layers`, each of which has a LayerNorm and a
    projector of its own, and added over the pairs of views. Raises ValueError for a layer not in 1..depth."""
    def __init__(self, base: nn.Module, layers: Sequence[int] = (3,), weight: float = 0.5,
                 temperature: float = 0.3, out_dim: int = 512):
        super().__init__()
        self.base, self.layers, self.weight, self.temperature = base, layers, weight, temperature
        dim, depth = base.encoder.dim, base.encoder.depth
        require(all(1 <= i <= depth for i in layers), f"equivariance layers {layers}: not in 1..{depth}")
        # Choice: LayerNorm in front and no biases, as the release; the paper: two layers, GELU, 512 (3.3).
        self.heads = nn.ModuleDict({str(layer): nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, out_dim, bias=False), nn.GELU(),
            nn.Linear(out_dim, out_dim, bias=False)) for layer in layers})

    def forward(self, batch: Batch, diagnose: bool = False) -> dict[str, Tensor | float]:
        """`loss`, with the gradient, its parts `inv` and `equiv`, and what can be measured on the way."""
        views, geometry = batch
        rest = iter(self.base.encoder([x for view in views for x in view], self.layers if geometry else ()))
        encoded = [[next(rest) for _ in view] for view in views]
        cls = [torch.cat([e.cls for e in view]) for view in encoded]
        # Choice: one invariance loss over b1 and b2, every anchor weighing 1 / |B|, as the release: r -> 0 is
        # the baseline. Eq. 3 read literally would weigh a b2 image 84 times a b1 image at 3 of 256.
        inv = self.base(views, cls)
        losses = {"loss": inv, "inv": inv.detach(), **getattr(self.base, "diagnostics", {})}
        if diagnose:   # 1: spread over the sphere, 0: collapsed to a point
            losses["feature_std"] = F.normalize(cls[0].detach().float(), dim=1).std(0).norm()
        if not geometry:
            return losses
        equiv, chance, ranks = 0.0, 0.0, ranks_and_rank()[0]
        for layer, v in itertools.product(self.layers, range(0, len(views) - 1, 2)[::-1]):
            h1, h2 = (view[-1].maps[layer].float() for view in encoded[v:v + 2])   # of b2, (B2, D, H_v, W_v)
            # Paper: 3.3, align f1(x1), then project; not the other way round.
            h, h_prime = (m.flatten(2).mT for m in (rho(relative(geometry[v + 1], geometry[v]), h1), h2))
            z, z_prime = (self.heads[str(layer)](tokens) for tokens in (h, h_prime))   # (B2, N, K)
            equiv = equiv + patch_ntxent(z, z_prime, self.temperature) / len(self.layers)
            chance += math.log(1 + 2 * z.shape[1] * (ranks * len(z) - 1)) / len(self.layers)
        if diagnose:   # of the last layer, and the first two views
            losses |= {"equiv_chance": chance, "patch_top1": retrieval(z, z_prime),
                       "aligned_cos": F.cosine_similarity(h, h_prime, dim=-1).mean().detach()}
        # Paper: Eq. 3. With weight 0 the term is still computed: the control differs in nothing else.
        return losses | {"loss": inv + self.weight * equiv, "equiv": equiv.detach()}

# ==== 8. Data: image files, drawn images, and the order of a run ============================================
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".tif", ".tiff", ".webp")
def list_images(folder: str) -> list[str]:
    """Sorted paths of the images below folder/train, or below folder if it has none; labels play no part."""
    root = os.path.join(folder, "train") if os.path.isdir(os.path.join(folder, "train")) else folder
    require(os.path.isdir(folder), f"--data {folder} is not a folder: name one that holds images")
    paths = sorted(os.path.join(where, name) for where, _, names in os.walk(root, followlinks=True)
                   for name in names if name.lower().endswith(EXTENSIONS))
    require(len(paths) > 0, f"--data {folder}: no image below {root} ({' '.join(EXTENSIONS)})")
    return paths

def read_image(path: str) -> Tensor:
    """An image file as (3, h, w) uint8 RGB, upright; raises what Pillow raises. torchvision is faster, for
    the same pixels, and goes by signature (ImageNet has a PNG named .JPEG); Pillow reads what it cannot."""
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):   # the last: no decoders there
        image = torchvision.io.decode_image(path, "RGB", apply_exif_orientation=True)
        if image.dtype == torch.uint8 and image.dim() == 3:
            return image
    with Image.open(path) as image:
        return pil_to_tensor(ImageOps.exif_transpose(image).convert("RGB"))

def draw_images(n: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """n images of eight textures, (n, 3, size, size) uint8, and labels (n,); equal for equal arguments. They
    are gray, so that colour is no shortcut; scale, direction, place and contrast vary within a class."""
    g = rng("drawn", n, size, seed)
    a = torch.rand(7, n, 1, 1, generator=g)
    angle, phase, frequency = 2 * math.pi * a[0], 2 * math.pi * a[1], 7 + 7 * a[2]
    axis = torch.linspace(-1, 1, size)
    x, y = axis + a[3] - 0.5, axis[:, None] + a[4] - 0.5
    u, v = frequency * (x * angle.cos() + y * angle.sin()), frequency * (y * angle.cos() - x * angle.sin())
    stripes, checks, dots = (u + phase).sin(), 3 * u.sin() * v.sin(), u.cos() + v.cos() - 1
    rings, rays = (1.5 * u.hypot(v)).sin(), (torch.atan2(v, u) * (frequency / 2).round() + phase).sin()
    waves, nets = (u + 1.5 * v.sin()).sin(), 4 * torch.maximum(u.cos(), v.cos()) - 3
    blobs = 2 * F.interpolate(torch.randn(n, 1, 9, 9, generator=g), (size, size), mode="bicubic")[:, 0]
    textures = torch.stack([stripes, checks, dots, rings, rays, waves, nets, blobs])   # (8, n, size, size)
    labels = torch.arange(n) % 8
    mask = (3 * textures[labels, torch.arange(n)]).sigmoid()                               # (n, size, size)
    dark, bright = 0.3 * a[5], 0.7 + 0.3 * a[6]
    images = (dark + (bright - dark) * mask)[:, None] + 0.04 * torch.randn(n, 3, size, size, generator=g)
    return (images.clamp(0, 1) * 255).to(torch.uint8), labels

class Views(torch.utils.data.Dataset):
    """Key (epoch, index, in_b2) -> [(3, S_v, S_v) uint8 of each view], (V, 13) draws, name of a broken file
    or "": crops for b1, the whole image for b2, from one decode, with all draws from (seed, epoch, index).
    source: paths, or the images themselves. The next readable image takes the place of a broken one."""
    def __init__(self, source: Sequence[str] | Tensor, cfg: Common):
        self.source, self.cfg = source, cfg

    def __getitem__(self, key: tuple[int, int, bool]) -> tuple[list[Tensor], Tensor, str]:
        (epoch, index, in_b2), views, broken = key, self.cfg.views, ""
        for neighbour in range(index, index + 8):
            item = self.source[neighbour % len(self.source)]
            try:
                image = item if isinstance(item, Tensor) else read_image(item)
                break
            except Exception as error:   # decoders raise what they like; the training loop counts them
                broken = broken or f"{item} ({type(error).__name__})"
                image = torch.zeros(3, 8, 8, dtype=torch.uint8)   # unless a neighbour is whole
        with torch.random.fork_rng(devices=[]):   # torchvision's crop takes no generator but the global one
            torch.default_generator.set_state(rng(self.cfg.seed, "image", epoch, index).get_state())
            draws, flips = torch.rand(len(views), 13), (torch.rand(len(views)) < 0.5).tolist()
            if in_b2:   # Paper: 3.2, crop disabled: g can be undone only on the whole image
                return [resize(image[None], (view.size, view.size))[0] for view in views], draws, broken
            boxes = [RandomResizedCrop.get_params(image, view.area, (3 / 4, 4 / 3)) for view in views]
        cuts = [image[None, :, top:top + h, left:left + w] for top, left, h, w in boxes]
        crops = [resize(cut, (view.size, view.size))[0] for cut, view in zip(cuts, views)]
        return [crop.flip(-1) if flip else crop for crop, flip in zip(crops, flips)], draws, broken

def batch_keys(images: int, cfg: Common, start: int, total: int, rank: int, ranks: int) -> Iterator[list]:
    """The keys of this rank's batches from step `start` on. An epoch permutes the data by (seed, epoch); step
    k takes images k B to (k + 1) B, each rank its own part, b2 last. A rest below B is left out."""
    own, per_epoch = cfg.batch_size // ranks, images // cfg.batch_size
    b1, permutation = own - cfg.b2_images(ranks), None
    for step in range(start, total):
        epoch, k = divmod(step, per_epoch)
        if permutation is None or k == 0:
            permutation = torch.randperm(images, generator=rng(cfg.seed, "order", epoch))
        first = k * cfg.batch_size + rank * own
        yield [(epoch, index, i >= b1) for i, index in enumerate(permutation[first:first + own].tolist())]

# ==== 9. Training ===========================================================================================
def setup() -> tuple[torch.device, int, int]:
    """(device, rank, ranks): under torchrun a rank per GPU, or gloo ranks on a CPU; else a single process."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    ranks, rank = ranks_and_rank()
    mps = torch.backends.mps.is_available() and ranks == 1
    return torch.device("cuda" if cuda else "mps" if mps else "cpu"), rank, ranks

def check_ranges(cfg: Any) -> None:
    """Raise UserError for a number, or one of several, outside the range of its setting."""
    for f in dataclasses.fields(cfg):
        least, most, value = f.metadata["least"], f.metadata["most"], getattr(cfg, f.name)
        for number in value if isinstance(value, tuple) else (value,):
            require(isinstance(number, str) or least <= number <= most and number < INF,
                    f"--{f.name.replace('_', '-')} {number} must lie between {least:g} and {most:g}")

def check(cfg: Common, ranks: int) -> None:
    """Raise UserError for settings that no part of the model checks itself."""
    check_ranges(cfg)
    sample_geometry(0, elements=cfg.group)
    batch, b2, least = cfg.batch_size, cfg.b2_images(ranks), 1 if ranks > 1 else 2
    fit, enough = max(2, -(-batch // ranks)) * ranks, math.ceil(least / max(cfg.ratio, TINY)) * ranks
    require(fit == batch, f"--batch-size {batch} must be 2 or more for each of the {ranks} ranks: try {fit}")
    require(cfg.ratio == 0 or b2 >= least,
            f"--ratio {cfg.ratio} of --batch-size {batch} is {b2 * ranks} images, L_equiv needs at least 2: "
            f"try --ratio {min(least * ranks / batch, 1):.3g}, --batch-size {enough}, or --ratio 0")

def prepare(cfg: Common) -> list[str]:
    """Make the output folder and list the images, on rank 0 for all; raises UserError on all of them."""
    shared: list[Any] = [[], ""]   # paths, error; a million files on network storage are slow to list
    if ranks_and_rank()[1] == 0:
        try:
            shared[0] = list_images(cfg.data) if cfg.data else []
            Path(cfg.out).mkdir(parents=True, exist_ok=True)
            open(Path(cfg.out, "log.jsonl"), "a").close()
        except (OSError, UserError) as e:
            shared[1] = str(e) if isinstance(e, UserError) else f"--out {cfg.out}: cannot write, {e.strerror}"
    if dist.is_initialized():
        dist.broadcast_object_list(shared)
    require(not shared[1], shared[1])
    return shared[0]

def build(cfg: Common, method: Callable[[ViT, Any], nn.Module] | None = None) -> SER:
    """The model of a run, on the CPU, initialised from the seed alone, the encoder first. method: makes the
    base method of (encoder, cfg); None: MoCo-v3."""
    torch.manual_seed(cfg.seed)
    encoder = ViT(cfg.image_size, cfg.patch_size, cfg.dim, cfg.depth, cfg.heads, cfg.cls_layer)
    base = method(encoder, cfg) if method else MoCoV3(encoder, 256, cfg.moco_hidden, cfg.moco_temperature,
                                                      cfg.moco_momentum)
    return SER(base, cfg.equiv_layers if cfg.ratio > 0 else (), cfg.weight, cfg.temperature)

def save_checkpoint(path: Path, cfg: Common, model: SER, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves the old checkpoint or the new, whole."""
    new = path.with_suffix(".tmp")
    torch.save({"format": "ser-1", "step": step, "program": cfg.program, "shape": model.base.encoder.shape,
                "config": vars(cfg), "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    os.replace(new, path)

def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint, tensors on the CPU. Raises UserError if it is missing, damaged or not ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:   # pickle, zip, torch and the system raise their own
        raise UserError(f"{path} is missing, cut short or no checkpoint ({type(error).__name__})") from None
    require(isinstance(state, dict) and state.get("format") == "ser-1", f"{path} is no checkpoint of ser.py")
    return state

def load_encoder(path: str | Path) -> ViT:
    """The encoder of a checkpoint in eval mode, shaped as the checkpoint says; every weight must be there."""
    state, prefix = load_checkpoint(path), "base.encoder."
    encoder = ViT(**state["shape"])
    try:
        encoder.load_state_dict({name.removeprefix(prefix): weight for name, weight in state["model"].items()
                                 if name.startswith(prefix)})
    except RuntimeError as error:
        raise UserError(f"{path} holds no ViT {state['shape']}: {' '.join(str(error).split())}") from None
    return encoder.eval()

def resume(path: Path, cfg: Common, model: SER, optimizer: torch.optim.Optimizer) -> int:
    """Load `path` if it is there and return its step, else 0. Raises UserError if it is of another run."""
    if not path.exists():
        return 0
    state = load_checkpoint(path)
    free = {"data", "out", "workers", "log_every", "save_every", "compile"}   # what may change along the way
    there, here = state["config"] | {"program": state.get("program")}, vars(cfg) | {"program": cfg.program}
    differ = [f"{name} {there.get(name)} there, {here.get(name)} here" for name in there | here
              if name not in free and there.get(name) != here.get(name)]
    require(not differ, f"{path} is of another run ({'; '.join(differ)}): use its settings or a new --out")
    shapes = [{k: x.shape for k, x in weights.items()} for weights in (state["model"], model.state_dict())]
    require(shapes[0] == shapes[1], f"{path} holds another model than this code builds: use a new --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]

def save_views(path: Path, batch: Batch, base: Tensor, cell: int) -> None:
    """A row for each of six b2 images: base, x1, rho(g2 g1^-1) x1, and x2, which moved as the third did."""
    x1, x2 = (view[-1][:6].float().cpu() * STD + MEAN for view in batch.views[:2])
    g1, g2 = (Geometry(g.flip[:6], g.turns[:6], g.grid) for g in batch.geometry[:2])
    columns = [base[:6].float().cpu() / 255, x1, rho(relative(g2, g1), x1, cell), x2]
    height, width = (max(x.shape[d] for x in columns) for d in (-2, -1))
    cells = [F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]), value=1.0) for x in columns]
    torchvision.utils.save_image(torch.stack(cells, 1).flatten(0, 1).clamp(0, 1), path, nrow=4, pad_value=1.0)

class Log:
    """log.jsonl and the bar of rank 0. A metric is its mean over ranks, a rate that since the last record."""
    def __init__(self, cfg: Common, model: SER, images: int, start: int, total: int, device: torch.device):
        self.batch, self.device, (self.ranks, rank) = cfg.batch_size, device, ranks_and_rank()
        self.file = open(os.devnull if rank else Path(cfg.out, "log.jsonl"), "a", buffering=1)
        self.bar = tqdm(total=total, initial=start, disable=rank > 0, mininterval=1)
        self.start, self.last, self.waiting, self.broken = start, start, 0.0, {}
        self.since = time.perf_counter()
        print(json.dumps({
            "command": " ".join(sys.argv), "config": vars(cfg), "images": images, "start": start,
            "steps": total, "ranks": self.ranks, "b2": self.ranks * cfg.b2_images(self.ranks), "lr": cfg.lr,
            "torch": torch.__version__, "torchvision": torchvision.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad)}), file=self.file)
        self.bar.set_description(f"{images} images, batch {cfg.batch_size}, peak lr {cfg.lr:g}")

    def count(self, names: Sequence[str], waited: float) -> None:
        """Count a step and the wait for its images; `names` has a broken file, or "", for every image."""
        for name in filter(None, names):
            if name not in self.broken:
                tqdm.write(f"cannot read {name}: another image takes its place", file=sys.stderr)
            self.broken[name] = self.broken.get(name, 0) + 1
        self.waiting += waited
        self.bar.update()

    def record(self, step: int, metrics: dict[str, Tensor | float], stop: bool) -> bool:
        """Write a step's record; True if any rank was told to stop. Of a step, only this waits for the
        device. Raises UserError, on all ranks, if the loss is not finite or many images are broken."""
        seconds, images = time.perf_counter() - self.since, (step - self.last) * self.batch
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else resource.getrusage(
            resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        metrics |= {"images_per_s": images / seconds, "waiting": self.waiting / seconds, "stop": stop,
                    "memory_gib": memory / 2 ** 30, "broken": sum(self.broken.values()) * self.ranks}
        values = torch.tensor([torch.as_tensor(v).item() for v in metrics.values()], device=self.device)
        if self.ranks > 1:
            dist.all_reduce(values)
        mean, seen = dict(zip(metrics, (values / self.ranks).tolist())), (step - self.start) * self.batch
        print(json.dumps({"step": step, **mean}), file=self.file)
        self.bar.set_postfix({k: f"{mean[k]:.3f}" for k in ("loss", "equiv", "patch_top1") if k in mean})
        self.last, self.since, self.waiting = step, time.perf_counter(), 0.0
        require(math.isfinite(mean["loss"] + mean["grad_encoder"]),
                f"step {step}: loss {mean['loss']}, gradient norm {mean['grad_encoder']}; a last.pt is from "
                "before: see log.jsonl for the cause, or lower --base-lr with a new --out")
        require(mean["broken"] <= max(3, seen / 1000), f"{mean['broken']:.0f} of {seen} images cannot be "
                f"read: mend or remove them, {min(self.broken, default='as another rank named')} first")
        return mean["stop"] > 0

def leave_signals(worker: int) -> None:
    """Loader processes ignore stop signals: the training process needs their batches until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def train(cfg: Common, build: Callable[[Any], SER] = build, stop: Sequence[int] = ()) -> Path:
    """Run, or continue, the training of cfg in cfg.out; returns the path of its checkpoint. Once `stop` holds
    the number of a signal, it saves and exits with 128 + that. Raises UserError for what one can mend."""
    device, rank, ranks = setup()
    check(cfg, ranks)
    model, path = build(cfg).to(device), Path(cfg.out, "last.pt")
    source = prepare(cfg) or draw_images(4096, cfg.image_size, seed=0)[0]
    per_epoch = len(source) // cfg.batch_size
    require(per_epoch > 0, f"{len(source)} images are less than --batch-size {cfg.batch_size}: "
                           f"try {len(source) // ranks * ranks}")
    if device.type == "cuda" and ranks > 1:   # it has no CPU version: gloo ranks normalise their own images
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if cfg.compile:   # with dynamic shapes: a few compilations, not one for each of the 51 grids of views
        for block in (module for module in model.modules() if isinstance(module, Block)):
            block.compile(dynamic=True)
    optimizer = cfg.optimizer(model, fused=device.type == "cuda")
    start, total = resume(path, cfg, model, optimizer), max(1, round(cfg.epochs * per_epoch))
    # No device_ids: they would move Geometry to the GPU. DDP raises for a parameter that no loss reaches.
    parallel = model if ranks == 1 else nn.parallel.DistributedDataParallel(model)
    batches = iter(torch.utils.data.DataLoader(
        Views(source, cfg), batch_sampler=batch_keys(len(source), cfg, start, total, rank, ranks),
        num_workers=min(cfg.workers, os.cpu_count() or 1), pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals))
    log = Log(cfg, model, len(source), start, total, device)
    for step in range(start, total):
        asked, done, stopping = time.perf_counter(), step + 1, False
        images, draws, broken = next(batches)
        log.count(broken, time.perf_counter() - asked)
        saving = done == total or done % (cfg.save_every or per_epoch) == 0
        logging = saving or step == start or done % cfg.log_every == 0 or (ranks == 1 and len(stop) > 0)
        torch.manual_seed(rng(cfg.seed, "step", step, rank).initial_seed())   # for methods that draw
        model.base.update(step / total)
        images = [x.to(device, non_blocking=x.is_pinned()) for x in images]
        batch = make_views(images, draws, cfg, step, rank, ranks)
        if step == rank == 0 and batch.geometry:
            save_views(path.with_name("views.png"), batch, images[0][-cfg.b2_images(ranks):], cfg.patch_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = parallel(batch, diagnose=logging)
        optimizer.zero_grad()
        losses["loss"].backward()
        if logging:
            for name, part in (("grad_encoder", model.base.encoder), ("grad_equiv", model.heads)):
                losses[name] = nn.utils.get_total_norm([p.grad for p in part.parameters() if p.requires_grad])
        cfg.before_step(optimizer, step / per_epoch)
        if logging:
            losses["lr"] = optimizer.param_groups[0]["lr"]
            stopping = log.record(done, losses, len(stop) > 0) and done < total
        optimizer.step()
        if rank == 0 and (saving or stopping):
            save_checkpoint(path, cfg, model, optimizer, done)
        if stopping:
            raise SystemExit(128 + (stop[0] if stop else signal.SIGTERM))   # no signal: another rank had one
    return path

# ==== 10. Command line ======================================================================================
def parse(argv: Sequence[str] | None, kind: type = Config) -> Any:
    """Flags -> a `kind`, a flag per field; without --data, with kind.drawn. A wrong one raises UserError."""
    parser = argparse.ArgumentParser(description=sys.modules[kind.__module__].__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(kind):
        several = isinstance(f.default, tuple)
        how = {"action": "store_true"} if f.default is False else {
            "type": type(f.default[0] if several else f.default), "nargs": "+" if several else None}
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **how,
                            help=f"{f.metadata['help']} [{f.default}]")
    parser.error = lambda message: require(False, f"{message}; see --help")
    require("" not in (sys.argv[1:] if argv is None else argv), "an empty argument: an unset shell variable?")
    if not parser.parse_args(argv).data:
        parser.set_defaults(**kind.drawn)
    values = vars(parser.parse_args(argv)).items()
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})

def main(argv: Sequence[str] | None = None, kind: type = Config, build: Callable[[Any], SER] = build) -> int:
    """Train, and on drawn images report; returns the exit code: 0, or 2 after one line about a mistake."""
    first, stop = os.environ.get("RANK", "0") == "0", []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n) or len(stop) > 2 and os._exit(128 + n))
    try:
        cfg = parse(argv, kind)
        path = train(cfg, build, stop)
    except UserError as error:
        if first:
            tqdm.write(f"{kind.program}: {error}", file=sys.stderr)   # below a bar, if there is one
        return 2
    except SystemExit as stopped:
        return stopped.code
    if first and not cfg.data:
        from eval_linear import report   # evaluation is the other file's matter, and it imports this one
        report(cfg, path)
    return 0

def leave(code: int) -> None:
    """End the process. gloo's threads can abort an interpreter that ends normally, all work done."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)

if __name__ == "__main__":
    leave(main())
