"""What a checkpoint of ser.py has learned: linear evaluation (paper 4.1), k-NN, and the equivariance score.

The encoder is frozen. A linear layer learns the classes from the [CLS] of its last four blocks, or a vote of
the nearest training images tells them, from the last [CLS] alone, without any training.

    python eval_linear.py                                     runs/ser/last.pt on drawn images, 2 CPU cores
    python eval_linear.py --data /imagenet --knn              k-NN alone: minutes
    python eval_linear.py --data /imagenet --cache            k-NN, and heads on features of one crop: minutes
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/ser/last.pt \\
        --test v2=/imagenet-v2 --test r=/imagenet-r           the paper's protocol, and two shifted test sets

Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/...; a test set: DIR/CLASS/..., with names of those classes.
A whole learning-rate sweep costs one training: the features of a batch feed all heads in one product.
The table on screen is also written as JSON beside the checkpoint; an interrupted linear run resumes.

1 Settings, 2 Images, 3 Features, 4 Linear heads, 5 k-NN and equivariance, 6 Evaluation, 7 Command line.
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
from typing import Any, BinaryIO, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from tqdm import tqdm

from ser import (INF, MEAN, STD, TINY, Config, UserError, ViT, build, draw_images, leave_signals, list_images,
                 load_checkpoint, load_encoder, ranks_and_rank, read_image, require, resize, retrieval, rho,
                 rng, sample_geometry, setting, setup)


# ------------------------------------------------------------------------------------------------------------
# 1. Settings: the protocol of 4.1, and what the release adds to it
@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an evaluation. Without --data, those of DRAWN take the place of the defaults."""

    data: str = setting("", 0, 0, "folder with train/CLASS/... and val/CLASS/...; none: drawn images")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run of ser.py")
    test: tuple[str, ...] = setting((), 0, 0, "NAME=DIR, a further test set DIR/CLASS/...; repeatable")
    all_classes: bool = setting(False, 0, 1, "score test sets with fewer classes among all training classes")
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
    seed: int = setting(0, 0, INF, "seed of heads, order, crops and split")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the evaluating process loads")
    out: str = setting("", 0, 0, "file of the result; none: eval.json beside the checkpoint, -knn.json, ...")

    @property
    def trains(self) -> bool:
        """Linear heads: unless only k-NN is asked for."""
        return self.cache or not self.knn

    @property
    def votes(self) -> bool:
        """k-NN: when asked for, and with a cache, where it is free."""
        return self.cache or self.knn

    @property
    def result(self) -> Path:
        """Where the result goes; every protocol has a file of its own."""
        kind = "-cache" if self.cache else "-knn" if self.knn else ""
        name = f"eval{kind}{'-random-init' * self.random_init}.json"
        return Path(self.out) if self.out else Path(self.checkpoint).with_name(name)

# The same protocol at a size for drawn images and two CPU cores.
DRAWN = dict(epochs=10, batch_size=64, workers=0)

def check(cfg: Settings) -> None:
    """Raise UserError for a number outside its range, or a test set that is not NAME=DIR."""
    for f in dataclasses.fields(cfg):
        least, most, value = f.metadata["least"], f.metadata["most"], getattr(cfg, f.name)
        for number in value if isinstance(value, tuple) else (value,):
            require(not isinstance(number, (int, float)) or (least <= number <= most and number < INF),
                    f"--{f.name.replace('_', '-')} {number} must lie between {least:g} and {most:g}")
    names = [test.partition("=")[0] for test in cfg.test]
    for test, name in zip(cfg.test, names):
        require(name != "" and test.partition("=")[2] != "", f"--test {test} must be NAME=DIR")
        require(names.count(name) == 1 and name not in ("train", "held-out", "val"),
                f"--test {test}: the name {name} is taken, choose another")

def everywhere(call: Callable[[], Any]) -> Any:
    """The result of `call` on rank 0, for all ranks. What goes wrong there is a UserError on every rank, so
    that all stop together."""
    shared = [None, ""]
    if ranks_and_rank()[1] == 0:
        try:
            shared[0] = call()
        except (OSError, UserError) as e:
            shared[1] = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else str(e)
    if dist.is_initialized():
        dist.broadcast_object_list(shared)
    require(not shared[1], shared[1])
    return shared[0]


# ------------------------------------------------------------------------------------------------------------
# 2. Images: class folders, crops, and the order of training
class Split(NamedTuple):
    """Labelled images."""
    source: Sequence[str] | Tensor   # n paths, or the images (n, 3, h, w) uint8 themselves
    labels: Tensor                   # (n,) int64, the place of the class in the sorted training classes
    among: list[int]                 # the classes it is scored among

DRAWN_SETS = ((2048, 101), (1000, 102))   # number and seed of train and val: not those a run of ser.py draws
Key = tuple[int | None, int]         # (epoch, index); epoch None: the centre crop
TEXTURES = ("stripes", "checks", "dots", "rings", "rays", "waves", "nets", "blobs")   # of draw_images

def class_folders(root: str, flag: str) -> dict[str, list[str]]:
    """Class name -> its images, sorted. Raises UserError if there is no class folder, or one is empty."""
    require(os.path.isdir(root), f"{flag} {root}: no such folder")
    names = sorted(item.name for item in os.scandir(root) if item.is_dir() and not item.name.startswith("."))
    require(len(names) > 0, f"{flag} {root}: no class folders in it; images lie in {root}/CLASS/")
    return {name: list_images(os.path.join(root, name)) for name in names}

def labelled(folders: dict[str, list[str]], classes: list[str], among: list[int]) -> Split:
    """The images of the class folders, with the labels of the training classes of the same names."""
    pairs = [(path, classes.index(name)) for name, paths in folders.items() for path in paths]
    return Split([path for path, _ in pairs], torch.tensor([label for _, label in pairs]), among)

def some(names: Iterable[str]) -> str:
    """At most five names, for a sentence."""
    names = sorted(names)
    return " ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

def collect(cfg: Settings, size: int) -> tuple[list[str], dict[str, Split]]:
    """The training classes, and the splits train, held-out (with select_split), val and each test set.

    Raises UserError for a layout that cannot be evaluated.
    """
    if cfg.data:
        train, val = (class_folders(os.path.join(cfg.data, part), "--data") for part in ("train", "val"))
        classes, every = list(train), list(range(len(train)))
        require(len(classes) > 1, f"--data {cfg.data}: only one class, {classes[0]}; a choice takes two")
        for lacks, more in (("train lacks", val.keys() - train), ("val lacks", train.keys() - val)):
            require(not more, f"--data {cfg.data}: {lacks} classes of the other: {some(more)}")
        splits = {"train": labelled(train, classes, every), "val": labelled(val, classes, every)}
    else:
        classes, every = list(TEXTURES), list(range(8))
        splits = {name: Split(*draw_images(n, size, seed), every)
                  for name, (n, seed) in zip(("train", "val"), DRAWN_SETS)}
    if cfg.select_split:
        source, labels, _ = splits["train"]
        order = torch.randperm(len(labels), generator=rng(cfg.seed, "split"))
        cut = round(cfg.select_split * len(labels))
        for name, rows in (("held-out", order[:cut].sort().values), ("train", order[cut:].sort().values)):
            own = source[rows] if isinstance(source, Tensor) else [source[i] for i in rows.tolist()]
            splits[name] = Split(own, labels[rows], every)
        require(cut > 0 and len(splits["train"].labels.unique()) == len(classes),
                f"--select-split {cfg.select_split} of {len(labels)} images leaves none to choose on, or a "
                "class without any to learn from: change it")
    for name, _, folder in (test.partition("=") for test in cfg.test):
        folders = class_folders(folder, f"--test {name}")
        strange = set(folders) - set(classes)
        # ImageNet-V2 numbers its folders in the order of the sorted class names; guessing would be silent.
        hint = "; rename numbers to class names" if all(map(str.isdigit, strange)) else ""
        require(not strange, f"--test {name}={folder}: folders that match no training class: "
                f"{some(strange)}{hint}")
        own = every if cfg.all_classes else [classes.index(c) for c in folders]
        splits[name] = labelled(folders, classes, own)
    return classes, splits

def centre_crop(image: Tensor, size: int) -> Tensor:
    """(3, h, w) uint8 -> (3, size, size): the shorter side to size * 256 / 224, bicubic, then the centre."""
    h, w = image.shape[-2:]
    short = round(size * 256 / 224)
    scaled = (max(short, short * h // w), max(short, short * w // h))
    image = F.interpolate(image[None], scaled, mode="bicubic", antialias=True)[0]
    top, left = ((side - size) // 2 for side in scaled)
    return image[:, top:top + size, left:left + size]

class Crops(torch.utils.data.Dataset):
    """Key (epoch, index) -> (3, S, S) uint8, label, name of a broken file or "". Epoch None: the centre crop;
    else RandomResizedCrop and flip, with all draws from (seed, epoch, index).

    # Choice: a broken image is black and has label -1: it teaches no head, is nobody's neighbour, and counts
    as wrong where accuracy is measured, so that all encoders are measured on the same number of images.
    """

    def __init__(self, split: Split, size: int, seed: int):
        self.split, self.size, self.seed = split, size, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int, str]:
        epoch, index = key
        item, label = self.split.source[index], int(self.split.labels[index])
        try:
            image = item if isinstance(item, Tensor) else read_image(item)
        except Exception as error:   # decoders raise what they like; Frozen counts them
            black = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
            return black, -1, f"{item} ({type(error).__name__})"
        if epoch is None:
            return centre_crop(image, self.size), label, ""
        with torch.random.fork_rng(devices=[]):   # torchvision's crop takes no generator but the global one
            torch.default_generator.set_state(rng(self.seed, "eval", epoch, index).get_state())
            top, left, h, w = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = torch.rand(()) < 0.5
        crop = resize(image[None, :, top:top + h, left:left + w], (self.size, self.size))[0]
        return crop.flip(-1) if flip else crop, label, ""

def training_keys(n: int, batch: int, seed: int, start: int, epochs: int) -> Iterator[list[Key]]:
    """The keys of all batches from epoch `start` on. An epoch permutes the data by (seed, epoch) alone; what
    it leaves after its last whole batch is not used."""
    for epoch in range(start, epochs):
        order = torch.randperm(n, generator=rng(seed, "eval order", epoch)).tolist()
        for first in range(0, n - batch + 1, batch):
            yield [(epoch, index) for index in order[first:first + batch]]


# ------------------------------------------------------------------------------------------------------------
# 3. Features: the frozen encoder, behind one way to read images or a cache of their features
@torch.no_grad()
def encode(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """uint8 images (B, 3, S, S) -> (B, blocks * D) fp32, the [CLS] of the last `blocks` blocks."""
    device = encoder.cls_token.device
    x = images.to(device, non_blocking=True).float() / 255
    x = (x - MEAN.to(device, non_blocking=True)) / STD.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return encoder.last_cls(x, blocks).float()

def progress(items: Iterable, total: int, text: str, done: int = 0) -> tqdm:
    """The bar of rank 0 around `items`."""
    return tqdm(items, text, total, initial=done, disable=ranks_and_rank()[1] > 0, mininterval=1)

class Frozen:
    """The features of all splits. read(name, keys) encodes images as they are needed; after fill(name) it
    takes what was extracted once. It counts the images that cannot be read.

    The encoder is nearly all of the work, and the ranks share it: of every batch each encodes its own part,
    and then all have all features. What follows is done alike everywhere: W ranks give what one gives.
    """

    def __init__(self, encoder: ViT, blocks: int, cfg: Settings, splits: dict[str, Split]):
        self.encoder, self.blocks, self.cfg, self.splits = encoder, blocks, cfg, splits
        self.device, self.width = encoder.cls_token.device, blocks * encoder.dim
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        self.broken: dict[str, set[str]] = {name: set() for name in splits}

    def read(self, name: str, keys: Iterable[list[Key]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, F) and labels (B,) of each batch of keys, on the device of every rank."""
        if name in self.tables:
            for batch in keys:
                rows = torch.tensor([index for _, index in batch], device=self.device)
                yield tuple(column[rows] for column in self.tables[name])
            return
        (ranks, rank), (keys, whole) = ranks_and_rank(), itertools.tee(keys)
        own = (batch[rank::ranks] or batch[:1] for batch in keys)   # a loader cannot make an empty batch
        loader = torch.utils.data.DataLoader(
            Crops(self.splits[name], self.encoder.shape["image_size"], self.cfg.seed), batch_sampler=own,
            num_workers=self.cfg.workers, pin_memory=self.device.type == "cuda", worker_init_fn=leave_signals)
        for (images, y, files), batch in zip(loader, whole):
            for file in set(filter(None, files)) - self.broken[name]:
                tqdm.write(f"cannot read {file}: it teaches nothing, and counts as wrong", file=sys.stderr)
                self.broken[name].add(file)
            features = torch.zeros(len(batch), self.width, device=self.device)
            labels = torch.zeros(len(batch), dtype=torch.int64, device=self.device)
            mine = len(labels[rank::ranks])
            features[rank::ranks] = encode(self.encoder, images, self.blocks)[:mine]
            labels[rank::ranks] = y[:mine].to(self.device, non_blocking=True)
            if ranks > 1:   # a row is zero on all ranks but one: the sum is exact
                dist.all_reduce(features)
                dist.all_reduce(labels)
            yield features, labels

    def once(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The centre crops of a split, in order, each once; the last batch may be smaller."""
        keys = [[(None, index) for index in rows.tolist()] for rows in
                torch.arange(len(self.splits[name].labels)).split(self.cfg.batch_size)]
        yield from progress(self.read(name, keys), len(keys), name)
        self.settle(name)

    def fill(self, name: str) -> None:
        """Extract the features of a split and keep them."""
        self.tables[name] = tuple(torch.cat(column) for column in zip(*self.once(name)))

    def settle(self, name: str) -> None:
        """Share the names of broken images. Raises UserError, on all ranks, for more than 1 in 1000."""
        found, n = [self.broken[name]] * ranks_and_rank()[0], len(self.splits[name].labels)
        if dist.is_initialized():
            dist.all_gather_object(found, self.broken[name])
        self.broken[name] = broken = set().union(*found)
        require(len(broken) <= max(3, n / 1000), f"{len(broken)} of the {n} images of {name} cannot be read, "
                f"as {min(broken, default='')}: mend or remove them")


# ------------------------------------------------------------------------------------------------------------
# 4. Linear heads: every learning rate in one training (paper 4.1)
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

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, F), (B,) -> cross-entropy of each head, (R,), a mean over the batch; label -1 adds nothing."""
        logits = self(x)
        every = F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]), ignore_index=-1,
                                reduction="none")
        return every.view(logits.shape[:2]).mean(0)

def fit(heads: Heads, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]],
        start: int, total: int, after: Callable[[int], None]) -> None:
    """Train on the batches of the steps `start` to `total`; after(steps done) is called behind each.

    SGD without weight decay adds up gradients, so that a learning rate and a factor of the loss are the same:
    one optimizer with the cosine from 1 to 0, and the loss of every head times its own rate, train each head
    as if it were alone. Nothing else joins them: no clipping, no shared parameter.
    """
    bar = progress(batches, total, "linear heads", start)
    for step, (x, y) in enumerate(bar, start):
        # Paper: 4.1, cosine without warmup.
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / total))
        losses = heads.losses(x, y)
        optimizer.zero_grad()
        (losses * heads.lrs).sum().backward()
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{losses.min().item():.3f}")
        after(step + 1)

def percent(among: Sequence[int], top1: float, top5: float) -> dict[str, float]:
    """Accuracies among these classes, in percent; top5 only where there are five."""
    return {"top1": 100 * top1} | ({"top5": 100 * top5} if len(among) >= 5 else {})

@torch.no_grad()
def accuracy(heads: Heads, batches: Iterable[tuple[Tensor, Tensor]], among: Sequence[int]) -> list[dict]:
    """Top-1 and top-5 of each head, scored among the classes `among`; label -1 is always wrong."""
    others = torch.ones(heads.bias.shape[1], dtype=torch.bool, device=heads.bias.device)
    others[list(among)], counts, images = False, 0, 0
    for x, y in batches:
        top = heads(x).masked_fill(others, -INF).topk(min(5, len(others))).indices
        right = top == y[:, None, None]                                                     # (B, R, 5)
        counts, images = counts + torch.stack([right[..., 0].sum(0), right.any(-1).sum(0)]), images + len(y)
    return [percent(among, *shares) for shares in (counts.cpu().double() / images).T.tolist()]

def atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves the old file or the new one, whole."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)

def restore(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The unfinished run in `path`, if there is one. Raises UserError if it is of another evaluation."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        there = state["identity"]
    except Exception as error:   # pickle, zip, torch and the system raise their own
        raise UserError(f"{path} is no unfinished evaluation ({type(error).__name__}): remove it") from None
    differ = [f"{key} {there.get(key)} there, {value} here" for key, value in identity.items()
              if there.get(key) != value]
    require(not differ, f"{path} is an unfinished evaluation with other settings ({'; '.join(differ)}): "
            "finish it with those, remove it, or name another --out")
    return state

def linear(frozen: Frozen, classes: int, cfg: Settings, identity: dict[str, Any]) -> dict[str, Any]:
    """Train the heads, or continue; every rate's accuracy on every split but train, and the best rate."""
    path, n = cfg.result.with_suffix(".pt"), len(frozen.splits["train"].labels)
    batch = min(cfg.batch_size, n)
    lrs, per_epoch = [rate * batch / 256 for rate in cfg.lr], n // batch
    heads = Heads(lrs, classes, frozen.width, cfg.seed).to(frozen.device)
    optimizer, start = torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9), 0
    state = None if cfg.cache else everywhere(lambda: restore(path, identity))
    if state:
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]

    def after(step: int) -> None:
        if step % per_epoch == 0 and not cfg.cache:   # cached heads train faster than they could be saved
            frozen.settle("train")
            if ranks_and_rank()[1] == 0:
                atomically(path, lambda file: torch.save(
                    {"identity": identity, "epoch": step // per_epoch, "heads": heads.state_dict(),
                     "optimizer": optimizer.state_dict()}, file))

    keys = training_keys(n, batch, cfg.seed, start, cfg.epochs)
    fit(heads, optimizer, frozen.read("train", keys), start * per_epoch, cfg.epochs * per_epoch, after)
    found = {name: accuracy(heads, frozen.once(name), split.among)
             for name, split in frozen.splits.items() if name != "train"}
    rows = [{"rate": rate, "lr": lr} | {name: found[name][r] for name in found}
            for r, (rate, lr) in enumerate(zip(cfg.lr, lrs))]
    chosen_on = "held-out" if cfg.select_split else "val"
    return {"batch": batch, "rates": rows, "chosen_on": chosen_on,
            "best": max(rows, key=lambda row: row[chosen_on]["top1"])}


# ------------------------------------------------------------------------------------------------------------
# 5. k-NN and the equivariance score
@torch.no_grad()
def neighbours(train: Tensor, train_labels: Tensor, test: Tensor, k: int = 20) -> Tensor:
    """The class of each test feature, (n,), by a vote of its k nearest in train: cosine similarity s, weight
    exp(s / .07), as DINO's. In blocks, whose similarities take 1 GB at most."""
    train, test, found = F.normalize(train, dim=1), F.normalize(test, dim=1), []
    for x in test.split(max(1, 2 ** 28 // len(train))):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)
        found.append(votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp()).argmax(1))
    return torch.cat(found)

def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: int = 20) -> float:
    """Share of the test features (n, D) whose label the vote of k neighbours in train (m, D) gives."""
    return (neighbours(train, train_labels, test, k) == test_labels).double().mean().item()

def knn_splits(frozen: Frozen) -> dict[str, dict[str, float]]:
    """k-NN of val and the test sets by the last [CLS]; the neighbours are the training images, held out or
    not, of the classes that a set is scored among."""
    tables = {}
    for name in frozen.splits:   # in the same order on all ranks, which share the work
        if name not in frozen.tables:
            frozen.fill(name)
        features, labels = frozen.tables[name]
        tables[name] = features[:, -frozen.encoder.dim:], labels
    parts = [tables.pop(name) for name in ("train", "held-out") if name in tables]
    bank, labels = (torch.cat(column) for column in zip(*parts))
    near = {name: torch.isin(labels, torch.tensor(frozen.splits[name].among).to(labels)) for name in tables}
    return {name: {"top1": 100 * knn(bank[near[name]], labels[near[name]], *test)}
            for name, test in tables.items()}

@torch.no_grad()
def equivariance(encoder: ViT, images: Tensor, layer: int, element: str) -> tuple[float, float]:
    """The equivariance score of the tokens after block `layer`: mean cos(rho_g f(x), f(rho_g x)) (paper A.2),
    and the share of the tokens of rho_g f(x) whose most similar one among f(rho_g x) is their counterpart.

    images: (n, 3, S, S) normalised; element: "rot90" (90, 180 and 270 degrees in turn), "hflip" or "scale",
    never the identity. Retrieval is among the tokens of 32 images, so that its chance is 1 / (32 H W).
    """
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

def report(cfg: Config, path: Path) -> None:
    """Print what a run on drawn images taught its encoder: before and after, on images it has not seen."""
    sets, layer = [draw_images(n, cfg.image_size, seed) for n, seed in DRAWN_SETS], cfg.equiv_layers[0]
    images, rows = (sets[1][0][:512].float() / 255 - MEAN) / STD, {}
    for encoder in (build(cfg).base.encoder.eval(), load_encoder(path)):
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
    print(f"\nNext, the control: python ser.py --weight 0 --out {cfg.out}-control"
          "\nor your own images: python ser.py --data FOLDER --batch-size 256 --out runs/mine")


# ------------------------------------------------------------------------------------------------------------
# 6. Evaluation: a checkpoint in, a table and a JSON file out
def frozen_encoder(cfg: Settings) -> tuple[ViT, int, str]:
    """The encoder, the step of its checkpoint, and the checkpoint's digest. Raises UserError.

    With random_init it has the weights that the run began with: those of the run's seed, as in ser.build.
    """
    state = load_checkpoint(cfg.checkpoint)
    lacks = sorted({"step", "shape", "config", "model"} - set(state))
    require(not lacks, f"{cfg.checkpoint} lacks {' '.join(lacks)}: it is no checkpoint of ser.py")
    digest = hashlib.sha256(Path(cfg.checkpoint).read_bytes()).hexdigest()[:16]
    if not cfg.random_init:
        return load_encoder(cfg.checkpoint), state["step"], digest
    torch.manual_seed(state["config"]["seed"])
    return ViT(**state["shape"]).eval(), 0, digest

def describe(cfg: Settings, encoder: ViT, blocks: int) -> str:
    """The protocol in a sentence."""
    heads = f"linear on the [CLS] of the last {blocks} blocks"
    if blocks < 4:   # the release then reads a patch token in place of a missing [CLS]
        heads += f" (of 4: [CLS] enters after block {encoder.cls_layer} of {encoder.depth})"
    heads += f", {cfg.epochs} epochs, " + (
        "ON ONE CENTRE CROP OF EACH IMAGE, without augmentation: a first look, not the paper's protocol"
        if cfg.cache else "random crops and flips")
    return "\n".join([heads] * cfg.trains + ["20-NN on the last [CLS]"] * cfg.votes)

def evaluate(cfg: Settings) -> dict[str, Any]:
    """Evaluate a checkpoint; returns what rank 0 writes to cfg.result. Raises UserError, on all ranks."""
    check(cfg)
    (device, rank, ranks), begun = setup(), time.perf_counter()
    encoder, step, digest = frozen_encoder(cfg)
    classes, splits = everywhere(lambda: collect(cfg, encoder.shape["image_size"]))
    trial = cfg.result.with_suffix(".tmp")   # what cannot be written is better found now than in hours
    everywhere(lambda: (trial.touch(), trial.unlink()))
    blocks, train = min(4, encoder.depth - encoder.cls_layer), splits["train"]
    files = [os.path.basename(item) for item in train.source] if cfg.data else ["drawn"]
    content = hashlib.sha256(repr((classes, files, train.labels.tolist())).encode()).hexdigest()[:16]
    free = ("data", "checkpoint", "test", "all_classes", "knn", "workers", "out")   # may change along the way
    identity = {**{k: v for k, v in vars(cfg).items() if k not in free}, "weights": digest, "images": content}
    frozen = Frozen(encoder.to(device), blocks if cfg.trains else 1, cfg, splits)
    result = {
        "command": " ".join(sys.argv), "checkpoint": cfg.checkpoint, "sha256": digest, "step": step,
        "encoder": "untrained, from the seed of the run" if cfg.random_init else "trained",
        "shape": encoder.shape, "data": cfg.data or "drawn images", "settings": vars(cfg),
        "protocol": describe(cfg, encoder, blocks), "classes": len(classes),
        "images": {name: len(split.labels) for name, split in splits.items()},
        "chance": {name: percent(split.among, 1 / len(split.among), 5 / len(split.among))
                   for name, split in splits.items() if name != "train"}}
    for name in splits if cfg.cache else ():
        frozen.fill(name)
    if cfg.trains:
        result["linear"] = linear(frozen, len(classes), cfg, identity)
    if cfg.votes:
        result["knn"] = {"k": 20, **knn_splits(frozen)}
    result |= {"broken": {name: sorted(broken) for name, broken in frozen.broken.items() if broken},
               "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
               "ranks": ranks, "threads": torch.get_num_threads(), "torch": torch.__version__,
               "torchvision": torchvision.__version__, "seed": cfg.seed,
               "minutes": (time.perf_counter() - begun) / 60}
    if rank == 0:
        atomically(cfg.result, lambda file: file.write((json.dumps(result, indent=1) + "\n").encode()))
        if cfg.trains and not cfg.cache:
            cfg.result.with_suffix(".pt").unlink(missing_ok=True)
    return result

def table(result: dict[str, Any]) -> str:
    """The result for the screen: a row per learning rate, a column per set, chance below."""
    columns = [(name, top) for name, chance in result["chance"].items() for top in chance]
    images = ", ".join(f"{n} {name}" for name, n in result["images"].items())

    def line(title: str, cells: Iterable[str]) -> str:
        return f"  {title:25}" + "".join(f"{cell:>{len(n) + 7}}" for cell, (n, _) in zip(cells, columns))

    def row(title: str, values: dict[str, Any]) -> str:
        return line(title, [f"{values[n][k]:.2f}" if k in values.get(n, ()) else "-" for n, k in columns])

    lines = [f"{result['checkpoint']}, step {result['step']}, {result['encoder']}", result["protocol"],
             f"{result['data']}: {result['classes']} classes, {images}", "",
             line("accuracy, %", map(" ".join, columns))]
    if "linear" in result:
        rates, best, on = (result["linear"][key] for key in ("rates", "best", "chosen_on"))
        lines += [row(f"linear, rate {r['rate']:<7g}" + " best" * (r is best), r) for r in rates]
    if "knn" in result:
        lines.append(row("20-NN", result["knn"]))
    lines.append(row("chance", result["chance"]))
    if "linear" in result:
        lines.append("  the best rate was chosen on " + (
            "held-out training images" if on == "held-out" else
            "the validation set itself, which flatters it: --select-split 0.1 chooses on training images"))
        if len(rates) > 1 and best in (rates[0], rates[-1]):
            lines.append("  it lies at the end of the sweep: try rates beyond with --lr")
    lines += [f"  {len(broken)} broken images in {name}: they taught nothing, or count as wrong"
              for name, broken in result["broken"].items()]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# 7. Command line
def parse(argv: Sequence[str] | None) -> Settings:
    """Flags -> Settings, one flag per field. Raises UserError where argparse would print its usage."""
    parser = argparse.ArgumentParser("eval_linear.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Settings):
        how: dict[str, Any] = {"type": type(f.default), "default": f.default}
        if f.default is False:
            how = {"action": "store_true"}
        elif isinstance(f.default, tuple):   # a repeated flag adds up, a list flag replaces the default
            how = {"nargs": "+", "action": "extend", "default": []} if not f.default else {
                "nargs": "+", "type": type(f.default[0]), "default": f.default}
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(flag, help=f"{f.metadata['help']} [{f.default}]", **how)

    def fail(message: str) -> None:
        raise UserError(f"{message}; see --help")
    parser.error = fail
    if not parser.parse_args(argv).data:
        parser.set_defaults(**DRAWN)
    values = vars(parser.parse_args(argv))
    return Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print; returns the exit code: 0, or 2 after one line about a mistake."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        cfg = parse(argv)
        result = evaluate(cfg)
    except UserError as error:
        print(f"eval_linear.py: {error}" if first else "", end="\n" * first, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eval_linear.py: stopped; the same command continues after its last whole epoch" * first,
              end="\n" * first, file=sys.stderr)
        return 128 + signal.SIGINT
    if first:
        print(f"\n{table(result)}\n  {result['minutes']:.1f} minutes, written to {cfg.result}")
    return 0

if __name__ == "__main__":
    code = main()
    if dist.is_initialized():   # gloo's threads can abort an interpreter that ends normally, all work done
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
