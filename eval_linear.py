"""What a checkpoint of ser.py has learned: linear evaluation (paper 4.1), k-NN, and the equivariance score.

The encoder is frozen. A linear layer learns the classes from the [CLS] of its last four blocks, or a vote of
the nearest training images tells them, from the last [CLS] alone, without any training.

    python eval_linear.py                                     runs/ser/last.pt on drawn images, 2 CPU cores
    python eval_linear.py --data /imagenet --knn              k-NN alone: minutes
    python eval_linear.py --data /imagenet --cache            k-NN, and heads on features of one crop: minutes
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/ser/last.pt \\
        --test v2=/imagenet-v2 r=/imagenet-r                  the paper's protocol, and two shifted test sets

Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/...; a test set: DIR/CLASS/..., with names of those classes.
A whole learning-rate sweep costs one training: the features of a batch feed all heads in one product.
The table on screen is also written as JSON beside the checkpoint; an interrupted linear run resumes.
1 Settings, 2 Images, 3 Features, 4 Linear heads, 5 k-NN and equivariance, 6 Evaluation and command line.
Axes: B images, R learning rates, C classes, F feature width, D encoder width.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Callable, ClassVar, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from tqdm import tqdm

import ser
from ser import (INF, MEAN, STD, TINY, Common, UserError, ViT, draw_images, leave_signals, list_images,
                 load_encoder, ranks_and_rank, read_image, require, resize, retrieval, rho, rng,
                 sample_geometry, setting)

# ==== 1. Settings: the protocol of 4.1, and what the release adds to it =====================================
@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an evaluation. Without --data, those of `drawn` take the place of the defaults."""
    data: str = setting("", 0, 0, "folder with train/CLASS/... and val/CLASS/...; none: drawn images")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run of ser.py")
    test: tuple[str, ...] = setting(("",), 0, 0, "NAME=DIR ..., further test sets DIR/CLASS/...; repeatable")
    knn: bool = setting(False, 0, 1, "k-NN alone, no training (with --cache: both)")
    cache: bool = setting(False, 0, 1, "no augmentation: features of the centre crops, extracted once")
    random_init: bool = setting(False, 0, 1, "the untrained encoder the run began with, not the trained one")
    # Choice: the release tries 1, 3, 10 per 256 images; the smaller ones cost next to nothing in one product,
    # and are what weak features and few classes need.
    lr: tuple[float, ...] = setting((0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), TINY, INF,
                                    "learning rates per 256 images, scaled by batch / 256, all at once")
    select_split: float = setting(0.0, 0, 0.9, "share of train to choose the rate on; 0: on val")
    epochs: int = setting(50, 1, INF, "passes over the training images (paper: 50)")
    batch_size: int = setting(1024, 1, INF, "images per step, over all ranks")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of heads, order, crops and split")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the evaluating process loads")
    out: str = setting("", 0, 0, "file of the result; none: eval.json beside the checkpoint, -knn.json, ...")

    drawn: ClassVar[dict[str, Any]] = dict(epochs=10, batch_size=64, workers=0)   # for two CPU cores

    @property
    def result(self) -> Path:
        """Where the result goes; every protocol has a file of its own."""
        name = f"eval{'-cache' * self.cache or '-knn' * self.knn}{'-random-init' * self.random_init}.json"
        return Path(self.out) if self.out else Path(self.checkpoint).with_name(name)

# ==== 2. Images: class folders, crops, and the order of training ============================================
class Split(NamedTuple):
    """Labelled images."""
    source: Sequence[str] | Tensor   # n paths, or the images (n, 3, h, w) uint8 themselves
    labels: Tensor                   # (n,) int64, the place of the class in the sorted training classes
    among: list[int]                 # the classes it is scored among

DRAWN_SETS = (("train", 2048, 101), ("val", 1000, 102))   # number of images, and a seed ser.py does not use

def labelled(name: str, root: str, classes: Sequence[str] = ()) -> tuple[list[str], Split]:
    """The class folders of root, and their images, labelled by the places of their names in `classes` (by
    default, those of the folders). Raises UserError for no class folder, an empty one, or a strange one."""
    found = [item.name for item in os.scandir(root) if item.is_dir()] if os.path.isdir(root) else []
    own = sorted(item for item in found if not item.startswith("."))
    require(len(own) > 0, f"{name} {root}: no such folder, or no class folders in it")
    place = {c: i for i, c in enumerate(classes or own)}
    strange = [c for c in own if c not in place]
    # ImageNet-V2 numbers its folders in the order of the sorted class names; guessing would be silent.
    require(not strange, f"{name} {root}: {len(strange)} folders match no training class: "
            f"{' '.join(strange[:5])}; give them the names of training classes")
    paths, labels = zip(*((path, place[c]) for c in own for path in list_images(os.path.join(root, c))))
    return own, Split(paths, torch.tensor(labels), [place[c] for c in own])

def collect(cfg: Settings, size: int) -> tuple[list[str], dict[str, Split]]:
    """The training classes, and the splits train, held-out (with select_split), val and each test set. size:
    side of drawn images. Raises UserError for a layout that cannot be evaluated."""
    tests = [test.partition("=")[::2] for test in filter(None, cfg.test)]
    if cfg.data:
        classes, train = labelled("--data", os.path.join(cfg.data, "train"))
        splits, tests = {"train": train}, [("val", os.path.join(cfg.data, "val")), *tests]
        require(len(classes) > 1, f"--data {cfg.data}: only one class, {classes[0]}; a choice takes two")
    else:
        classes = [f"texture {i}" for i in range(8)]
        splits = {name: Split(*draw_images(n, size, seed), list(range(8))) for name, n, seed in DRAWN_SETS}
    if cfg.select_split:
        source, labels, among = splits["train"]
        order = torch.randperm(len(labels), generator=rng(cfg.seed, "split"))
        held = order < round(cfg.select_split * len(labels))
        for name, mask in (("held-out", held), ("train", ~held)):
            own = source[mask] if isinstance(source, Tensor) else [*itertools.compress(source, mask.tolist())]
            splits[name] = Split(own, labels[mask], among)
        require(held.any() and len(labels[~held].unique()) == len(classes), f"--select-split "
                f"{cfg.select_split} leaves none to choose on, or none of a class to learn from: change it")
    for name, folder in tests:
        require(name != "" and folder != "", f"--test {name or '=' + folder} must be NAME=DIR")
        require(name not in (*splits, "held-out"), f"--test {name}={folder}: {name} is taken, rename it")
        own, splits[name] = labelled(f"--test {name}" if name != "val" else "--data", folder, classes)
        lacks = set(classes) - set(own) if name == "val" else ()
        require(not lacks, f"--data {cfg.data}: val lacks classes of train: {' '.join(sorted(lacks)[:5])}")
    return classes, splits

def centre_crop(image: Tensor, size: int) -> Tensor:
    """(3, h, w) uint8 -> (3, size, size): the shorter side to size * 256 / 224, bicubic, then the centre."""
    (h, w), short = image.shape[-2:], round(size * 256 / 224)
    scaled = (max(short, short * h // w), max(short, short * w // h))
    image = F.interpolate(image[None], scaled, mode="bicubic", antialias=True)[0]
    top, left = ((side - size) // 2 for side in scaled)
    return image[:, top:top + size, left:left + size]

class Crops(torch.utils.data.Dataset):
    """Key (epoch, index) -> (3, S, S) uint8 and label. Epoch None: the centre crop; else RandomResizedCrop
    and flip, with all draws from (seed, epoch, index). A file that cannot be read: black, label -1."""
    def __init__(self, split: Split, size: int, seed: int):
        self.split, self.size, self.seed = split, size, seed

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        epoch, index = key
        item, label = self.split.source[index], int(self.split.labels[index])
        try:
            image = item if isinstance(item, Tensor) else read_image(item)
        except Exception:   # decoders raise what they like; Frozen names and counts the files
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), -1
        if epoch is None:
            return centre_crop(image, self.size), label
        with torch.random.fork_rng(devices=[]):   # torchvision's crop takes no generator but the global one
            torch.default_generator.set_state(rng(self.seed, "eval", epoch, index).get_state())
            top, left, h, w = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = torch.rand(()) < 0.5
        crop = resize(image[None, :, top:top + h, left:left + w], (self.size, self.size))[0]
        return crop.flip(-1) if flip else crop, label

# ==== 3. Features: the frozen encoder, behind one way to read images or a cache of their features ===========
@torch.no_grad()
def encode(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """uint8 images (B, 3, S, S) -> (B, blocks * D) fp32, the [CLS] of the last `blocks` blocks."""
    x = images.to(encoder.cls_token.device, non_blocking=True).float() / 255
    x = (x - MEAN.to(x, non_blocking=True)) / STD.to(x, non_blocking=True)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return encoder.last_cls(x, blocks).float()

class Frozen:
    """The features of all splits: read(name, keys) encodes images as they are needed, or takes what
    table(name) extracted. The encoder is nearly all of the work, and the ranks share it: of every batch each
    encodes its own part, and then all have all features. What follows is done alike everywhere, so that W
    ranks give what one gives, and no image counts twice."""
    def __init__(self, encoder: ViT, blocks: int, cfg: Settings, splits: dict[str, Split]):
        self.encoder, self.blocks, self.cfg, self.splits = encoder, blocks, cfg, splits
        self.device, self.width = encoder.cls_token.device, blocks * encoder.dim
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        self.broken: dict[str, set[str]] = {name: set() for name in splits}

    def read(self, name: str, keys: Iterable[list[tuple]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, F) and labels (B,) of each batch of keys, on the device of every rank. Raises
        UserError, on all ranks, when more than 1 in 1000 images cannot be read."""
        if name in self.tables:
            for batch in keys:
                rows = torch.tensor([index for _, index in batch], device=self.device)
                yield tuple(column[rows] for column in self.tables[name])
            return
        (ranks, rank), (keys, whole), split = ranks_and_rank(), itertools.tee(keys), self.splits[name]
        own = (batch[rank::ranks] or batch[:1] for batch in keys)   # a loader cannot make an empty batch
        loader = torch.utils.data.DataLoader(
            Crops(split, self.encoder.shape["image_size"], self.cfg.seed), batch_sampler=own,
            num_workers=self.cfg.workers, worker_init_fn=leave_signals, pin_memory=torch.cuda.is_available())
        for (images, y), batch in zip(loader, whole):
            features = torch.zeros(len(batch), self.width, device=self.device)
            labels = torch.zeros(len(batch), dtype=torch.int64, device=self.device)
            mine = len(labels[rank::ranks])
            features[rank::ranks] = encode(self.encoder, images, self.blocks)[:mine]
            labels[rank::ranks] = y[:mine].to(self.device, non_blocking=True)
            if ranks > 1:   # a row is zero on all ranks but one: the sum is exact
                dist.all_reduce(features)
                dist.all_reduce(labels)
            # Choice: an unreadable image has label -1, teaches no head, is nobody's neighbour, and counts as
            # wrong, so that all encoders are measured on the same number of images.
            broken, n = self.broken[name], len(split.labels)
            broken |= {split.source[index] for (_, index), y in zip(batch, labels.tolist()) if y < 0}
            require(len(broken) <= max(3, n / 1000), f"{len(broken)} of the {n} images of {name} cannot be "
                    f"read, as {min(broken, default='')}: mend or remove them")
            yield features, labels

    def table(self, name: str) -> tuple[Tensor, Tensor]:
        """Features (n, F) and labels (n,) of the centre crops of a split, in order, extracted once."""
        if name not in self.tables:
            rows = torch.arange(len(self.splits[name].labels)).split(self.cfg.batch_size)
            keys = [[(None, index) for index in part.tolist()] for part in rows]
            parts = list(tqdm(self.read(name, keys), name, len(keys), disable=ranks_and_rank()[1] > 0))
            self.tables[name] = tuple(torch.cat(column) for column in zip(*parts))
        return self.tables[name]

# ==== 4. Linear heads: every learning rate in one training (paper 4.1) ======================================
class Heads(nn.Module):
    """A linear layer for each learning rate, all from the same weights N(0, .01) and biases 0."""
    def __init__(self, lrs: Sequence[float], classes: int, width: int, seed: int):
        super().__init__()
        first = 0.01 * torch.randn(classes, width, generator=rng(seed, "heads"))
        self.weight = nn.Parameter(first.repeat(len(lrs), 1, 1))        # (R, C, F)
        self.bias = nn.Parameter(torch.zeros(len(lrs), classes))        # (R, C)
        self.register_buffer("lrs", torch.tensor(lrs))                  # (R,)

    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> logits (B, R, C), in one product."""
        return F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(1, self.bias.shape)

def fit(heads: Heads, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]],
        start: int, total: int) -> Iterator[int]:
    """Train on the batches of the steps `start` to `total`; yields the number of steps done after each.
    SGD without weight decay adds up gradients, so that a learning rate and a factor of the loss are the same:
    one optimizer with the cosine from 1 to 0 (no warmup), and every head's loss times its own rate, train
    each head as if it were alone. Nothing else joins them: no clipping, no shared parameter."""
    bar = tqdm(batches, "linear heads", total, initial=start, disable=ranks_and_rank()[1] > 0, mininterval=1)
    for step, (x, y) in enumerate(bar, start):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / total))   # Paper: 4.1
        logits, each = heads(x).mT, y[:, None].expand(-1, len(heads.lrs))                  # (B, C, R), (B, R)
        losses = F.cross_entropy(logits, each, ignore_index=-1, reduction="none").mean(0)   # -1 adds nothing
        optimizer.zero_grad()
        (losses * heads.lrs).sum().backward()
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{losses.min().item():.3f}")
        yield step + 1

@torch.no_grad()
def accuracy(heads: Heads, x: Tensor, y: Tensor, among: Sequence[int]) -> list[dict[str, float]]:
    """Top-1 and top-5 of each head on (n, F), (n,), in percent, scored among the classes `among` only;
    label -1 is wrong."""
    others = torch.ones(heads.bias.shape[1], dtype=torch.bool, device=x.device)
    others[list(among)], counts = False, 0
    for part, labels in zip(x.split(1024), y.split(1024)):
        top = heads(part).masked_fill(others, -INF).topk(min(5, len(others))).indices
        right = top == labels[:, None, None]                                                # (B, R, 5)
        counts = counts + torch.stack([right[..., 0].sum(0), right.any(-1).sum(0)])
    return [{"top1": a, "top5": b} for a, b in (100 * counts.cpu().double() / len(x)).T.tolist()]

def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves the old file or the new one, whole."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        write(file)
    os.replace(path.with_suffix(".tmp"), path)

def linear(frozen: Frozen, classes: int, cfg: Settings, identity: dict[str, Any]) -> dict[str, Any]:
    """Train the heads, or continue; every rate's accuracy on every split but train, and the best rate.
    identity: the settings that an unfinished run must share. Raises UserError where it does not."""
    path, n = cfg.result.with_suffix(".pt"), len(frozen.splits["train"].labels)
    batch = min(cfg.batch_size, n)
    lrs, per_epoch = [rate * batch / 256 for rate in cfg.lr], n // batch
    heads = Heads(lrs, classes, frozen.width, cfg.seed).to(frozen.device)
    optimizer = torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9)
    there = argparse.Namespace(program="eval_linear.py", **identity)
    start = 0 if cfg.cache else ser.resume(path, there, heads, optimizer)

    # An epoch permutes the data by (seed, epoch) alone; what its last whole batch leaves is not used.
    keys = ([(epoch, index) for index in rows.tolist()] for epoch in range(start // per_epoch, cfg.epochs)
            for rows in torch.randperm(n, generator=rng(cfg.seed, "eval", epoch)).split(batch)[:per_epoch])
    for done in fit(heads, optimizer, frozen.read("train", keys), start, cfg.epochs * per_epoch):
        if done % per_epoch == 0 and not cfg.cache and ranks_and_rank()[1] == 0:
            write_whole(path, lambda file: torch.save(
                dict(format="ser-1", step=done, program="eval_linear.py", config=identity,
                     model=heads.state_dict(), optimizer=optimizer.state_dict()), file))
    found = {name: accuracy(heads, *frozen.table(name), split.among)
             for name, split in frozen.splits.items() if name != "train"}
    rows = [{"rate": rate, "lr": lr, **{name: found[name][r] for name in found}}
            for r, (rate, lr) in enumerate(zip(cfg.lr, lrs))]
    chosen_on = "held-out" if cfg.select_split else "val"
    return {"batch": batch, "rates": rows, "chosen_on": chosen_on,
            "best": max(rows, key=lambda row: row[chosen_on]["top1"])}

# ==== 5. k-NN and the equivariance score ====================================================================
@torch.no_grad()
def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: int = 20) -> float:
    """Share of the test features (n, D), labels (n,), whose class the k nearest in train (m, D), (m,), tell
    by a vote: cosine similarity s, weight exp(s / .07), as DINO's; blocks of similarities of at most 1 GB."""
    train, size, right = F.normalize(train, dim=1), max(1, 2 ** 28 // len(train)), 0
    for x, y in zip(F.normalize(test, dim=1).split(size), test_labels.split(size)):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)
        votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp())
        right += (votes.argmax(1) == y).sum().item()
    return right / len(test)

def knn_splits(frozen: Frozen) -> dict[str, dict[str, float]]:
    """k-NN of val and the test sets by the last [CLS]; the neighbours are the training images, held out or
    not, of the classes that a set is scored among."""
    tables = {n: (x[:, -frozen.encoder.dim:], y) for n in frozen.splits for x, y in [frozen.table(n)]}
    train = [tables.pop(name) for name in ("train", "held-out") if name in tables]
    bank, labels = (torch.cat(column) for column in zip(*train))
    near = {name: torch.isin(labels, torch.tensor(frozen.splits[name].among).to(labels)) for name in tables}
    return {name: {"top1": 100 * knn(bank[near[name]], labels[near[name]], *tables[name])} for name in tables}

@torch.no_grad()
def equivariance(encoder: ViT, images: Tensor, layer: int, element: str) -> tuple[float, float]:
    """The equivariance score of the tokens after block `layer`: mean cos(rho_g f(x), f(rho_g x)) (paper A.2),
    and the share of the tokens of rho_g f(x) whose most similar one among f(rho_g x) is their counterpart.
    images: (n, 3, S, S) normalised; element: "rot90" (90, 180 and 270 degrees in turn), "hflip" or "scale",
    never the identity. Retrieval is among the tokens of 32 images, so that its chance is 1 / (32 H W)."""
    sums = torch.zeros(2, dtype=torch.float64)
    for n, x in enumerate(images.split(32)):
        g = sample_geometry(len(x), encoder.grid, elements=(element,), generator=rng(element, n))
        g = g._replace(flip=torch.full_like(g.flip, element == "hflip"),
                       turns=(1 + torch.arange(len(x)) % 3) * (element == "rot90"))
        still, moved = (e.maps[layer] for e in encoder([x, rho(g, x, encoder.patch_size)], (layer,)))
        z, z_prime = (m.flatten(2).transpose(1, 2) for m in (rho(g, still), moved))
        cosine = F.cosine_similarity(z, z_prime, dim=-1).mean()
        sums += len(x) * torch.stack([cosine, retrieval(z, z_prime)]).double().cpu()
    return tuple((sums / len(images)).tolist())

def untrained(seed: int, shape: dict[str, int]) -> ViT:
    """The encoder that a run with this seed began with, as in ser.build."""
    torch.manual_seed(seed)
    return ViT(**shape).eval()

def report(cfg: Common, path: Path) -> None:
    """Print what a run on drawn images taught its encoder: before and after, on images it has not seen."""
    sets, layer = [draw_images(n, cfg.image_size, seed) for _, n, seed in DRAWN_SETS], cfg.equiv_layers[0]
    images, rows = (sets[1][0][:512].float() / 255 - MEAN) / STD, {}
    for encoder in (untrained(cfg.seed, load_encoder(path).shape), load_encoder(path)):
        for element in ("rot90", "hflip", "scale"):
            cosine, top1 = equivariance(encoder, images, layer, element)
            rows.setdefault(f"{element}: cosine of rho f(x) and f(rho x)", []).append(cosine)
            rows.setdefault(f"{element}: patch retrieval, top-1", []).append(top1)
        train, test = (torch.cat([encode(encoder, x, 1) for x in part.split(256)]) for part, _ in sets)
        rows.setdefault("20-NN accuracy, 8 classes", []).append(knn(train, sets[0][1], test, sets[1][1]))
    chance = {"retrieval": 1 / (32 * encoder.grid ** 2), "accuracy": 1 / 8}
    print(f"\n{f'Held-out drawn images, tokens after block {layer}':47} untrained   trained    chance")
    for name, values in rows.items():
        guess = "".join(f"{value:10.4f}" for word, value in chance.items() if word in name) or "         -"
        print(f"  {name:45}" + "".join(f"{value:10.3f}" for value in values) + guess)
    print(f"\nNext, the control: python {cfg.program} --weight 0 --out {cfg.out}-control"
          f"\nor your own images: python {cfg.program} --data FOLDER --batch-size 256 --out runs/mine")

# ==== 6. Evaluation: a checkpoint in, a table and a JSON file out; and the command line =====================
def frozen_encoder(cfg: Settings) -> tuple[ViT, int, str]:
    """The encoder, the step of its checkpoint, and the checkpoint's digest. With random_init it has the
    weights that the run began with: those of the run's seed, as in ser.build. Raises UserError."""
    state = ser.load_checkpoint(cfg.checkpoint)
    lacks = sorted({"step", "shape", "config", "model"} - set(state))
    require(not lacks, f"{cfg.checkpoint} lacks {' '.join(lacks)}: it is no checkpoint of ser.py")
    digest = hashlib.sha256(Path(cfg.checkpoint).read_bytes()).hexdigest()[:16]
    if cfg.random_init:
        return untrained(state["config"]["seed"], state["shape"]), 0, digest
    return load_encoder(cfg.checkpoint), state["step"], digest

def evaluate(cfg: Settings) -> dict[str, Any]:
    """Evaluate a checkpoint; returns what rank 0 writes to cfg.result. Raises UserError, on all ranks."""
    ser.check_ranges(cfg)
    (device, rank, ranks), begun = ser.setup(), time.perf_counter()
    encoder, step, digest = frozen_encoder(cfg)
    classes, splits = collect(cfg, encoder.shape["image_size"])
    require(os.access(cfg.result.parent, os.W_OK), f"--out {cfg.result}: cannot write there")   # not in hours
    trains, votes = cfg.cache or not cfg.knn, cfg.cache or cfg.knn   # with a cache, k-NN is free
    blocks = min(4, encoder.depth - encoder.cls_layer) if trains else 1
    # The release reads a patch token in place of a [CLS] that a block does not have.
    late = f" (of 4: [CLS] enters after block {encoder.cls_layer} of {encoder.depth})" if blocks < 4 else ""
    seen = "ONE CENTRE CROP, first look, not the paper's protocol" if cfg.cache else "random crops and flips"
    heads = f"linear on the [CLS] of the last {blocks} blocks{late}, {cfg.epochs} epochs, {seen}"
    frozen = Frozen(encoder.to(device), blocks, cfg, splits)
    result = {
        "command": " ".join(sys.argv), "checkpoint": cfg.checkpoint, "sha256": digest, "step": step,
        "encoder": "untrained, from the seed of the run" if cfg.random_init else "trained",
        "shape": encoder.shape, "data": cfg.data or "drawn images", "settings": vars(cfg),
        "protocol": "\n".join([heads] * trains + ["20-NN on the last [CLS]"] * votes),
        "classes": len(classes), "images": {name: len(split.labels) for name, split in splits.items()},
        "chance": {name: {f"top{k}": 100 * min(1, k / len(split.among)) for k in (1, 5)}
                   for name, split in splits.items() if name != "train"}}
    if cfg.cache:
        frozen.table("train")
    if trains:
        free = ("data", "checkpoint", "test", "knn", "workers", "out")   # may change meanwhile
        identity = {k: v for k, v in vars(cfg).items() if k not in free}
        identity |= {"sha256": digest, "images": len(splits["train"].labels)}
        result["linear"] = linear(frozen, len(classes), cfg, identity)
    if votes:
        result["knn"] = {"k": 20, **knn_splits(frozen)}
    result |= {"broken": {name: sorted(broken) for name, broken in frozen.broken.items() if broken},
               "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
               "ranks": ranks, "torch": torch.__version__, "torchvision": torchvision.__version__,
               "minutes": (time.perf_counter() - begun) / 60}
    if rank == 0:
        write_whole(cfg.result, lambda file: file.write((json.dumps(result, indent=1) + "\n").encode()))
        if trains and not cfg.cache:
            cfg.result.with_suffix(".pt").unlink(missing_ok=True)
    return result

def table(result: dict[str, Any]) -> str:
    """The result for the screen: a row per learning rate, a column per set, chance below."""
    columns = [(name, top) for name, chance in result["chance"].items() for top in chance]
    def row(title: str, values: dict[str, Any]) -> str:
        cells = (f"{values[n][k]:.2f}" if k in values.get(n, ()) else "-" for n, k in columns)
        return f"  {title:25}" + "".join(f"{cell:>{len(n) + 7}}" for cell, (n, _) in zip(cells, columns))
    images = ", ".join(f"{n} {name}" for name, n in result["images"].items())
    lines = [f"{result['checkpoint']}, step {result['step']}, {result['encoder']}", result["protocol"],
             f"{result['data']}: {result['classes']} classes, {images}", "",
             f"  {'accuracy, %':25}" + "".join(f"  {n} {top}" for n, top in columns)]
    notes = [f"  {len(broken)} broken images in {name}, as {broken[0]}: they teach nothing, are wrong"
             for name, broken in result["broken"].items()]
    if "linear" in result:
        rates, best, on = (result["linear"][key] for key in ("rates", "best", "chosen_on"))
        lines += [row(f"linear, rate {r['rate']:<7g}" + " best" * (r is best), r) for r in rates]
        flatters = "val itself, which flatters it: --select-split 0.1 chooses on training images"
        notes.append(f"  the best rate was chosen on {flatters if on == 'val' else on + ' training images'}")
        if len(rates) > 1 and best in (rates[0], rates[-1]):
            notes.append("  it lies at the end of the sweep: try rates beyond with --lr")
    knn = [row("20-NN", result["knn"])] if "knn" in result else []
    return "\n".join([*lines, *knn, row("chance", result["chance"]), *notes])

def parse(argv: Sequence[str] | None = None) -> Settings:
    """Flags -> Settings, one flag per field. Raises UserError where argparse would print its usage."""
    repeated = argparse.ArgumentParser(add_help=False, allow_abbrev=False)   # ser.parse would keep the last
    repeated.add_argument("--test", nargs="*", action="extend", default=[])
    found, rest = repeated.parse_known_args(argv)
    return dataclasses.replace(ser.parse(rest, Settings), test=tuple(found.test))

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print; returns the exit code: 0, or 2 after one line about a mistake."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        cfg = parse(argv)
        result = evaluate(cfg)
    except (UserError, KeyboardInterrupt) as error:
        stopped = "stopped; the same command continues after its last whole epoch"
        print(f"eval_linear.py: {str(error) or stopped}\n" * first, end="", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 128 + signal.SIGINT
    if first:
        print(f"\n{table(result)}\n  {result['minutes']:.1f} minutes, written to {cfg.result}")
    return 0

if __name__ == "__main__":
    ser.leave(main())
