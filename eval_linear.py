"""What a checkpoint has learned: linear evaluation (paper 4.1), k-NN, and equivariance (paper A.2).

The encoder is frozen. A linear layer learns the classes from the [CLS] of its last four blocks; or
the nearest training images vote, by the last [CLS] alone and without any training; or its token maps
are asked whether they move as the image moves.

    python eval_linear.py                                     runs/ser/last.pt on drawn images
    python eval_linear.py --data /imagenet --knn              k-NN alone: minutes
    python eval_linear.py --data /imagenet --cache            k-NN, and heads on one crop: minutes
    python eval_linear.py --data /imagenet --equivariance     after every block, beside untrained
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/ser/last.pt \\
        --test v2=/imagenet-v2 r=/imagenet-r                  the paper's protocol, two shifted sets

Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/...; a test set: DIR/CLASS/..., with names of those
classes, or numbered as ImageNet-V2 is. The result is written beside the checkpoint, as are the head
that was chosen and, until it is finished, an interrupted run, which the same command continues.
1 Settings, 2 Images, 3 Features, 4 Heads, 5 k-NN, 6 Equivariance, 7 Evaluation, 8 Command line.
Axes: B images, N tokens, R learning rates, C classes, F feature width, D encoder width.
"""
from __future__ import annotations

import contextlib
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
from typing import Any, Callable, ClassVar, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from tqdm import tqdm

import ser
from ser import INF, TINY, UserError, ViT, ranks_and_rank, require, rng, setting

# ==== 1. Settings: the protocol of 4.1, and what the release adds to it ===========================
@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an evaluation. Without --data, those of `drawn` replace the defaults."""
    data: str = setting("", 0, 0, "folder with train/CLASS/... and val/CLASS/...")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run")
    test: tuple[str, ...] = setting(("",), 0, 0, "NAME=DIR ..., further test sets; repeatable")
    knn: bool = setting(False, 0, 1, "k-NN, without training heads")
    cache: bool = setting(False, 0, 1, "k-NN, and heads on features of the centre crops, a first look")
    mlp: bool = setting(False, 0, 1, "MLP heads, 1024-1024, in place of linear ones")
    equivariance: bool = setting(False, 0, 1, "equivariance after every block, without training heads")
    random_init: bool = setting(False, 0, 1, "the untrained encoder of the run's seed")
    # Choice: the release tries 1, 3, 10 per 256 images. The smaller ones are what weak features and
    # few classes need, and cost next to nothing, as one training serves all rates.
    lr: tuple[float, ...] = setting((0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), TINY, INF,
                                    "learning rates per 256 images, all trained at once")
    select_split: float = setting(0.0, 0, 0.9, "share of train to choose the rate on; 0: on val")
    epochs: int = setting(50, 1, INF, "passes over the training images (paper: 50)")
    batch_size: int = setting(1024, 1, INF, "images per step, over all ranks")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of heads, order, crops and split")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the evaluating process loads")
    out: str = setting("", 0, 0, "the result, a .json; none: eval.json beside the checkpoint, ...")

    drawn: ClassVar[dict[str, Any]] = dict(epochs=10, batch_size=64, workers=0)   # two CPU cores

    @property
    def measures(self) -> list[str]:
        """What is measured: what was asked for, or all on drawn images, or the heads on others."""
        asked = {"heads": self.cache or self.mlp, "knn": self.cache or self.knn,
                 "equivariance": self.equivariance}
        if any(asked.values()):
            return [name for name, yes in asked.items() if yes]
        return ["heads"] if self.data else list(asked)

    @property
    def result(self) -> Path:
        """Where the result goes; every protocol has a file of its own."""
        if self.out:
            return Path(self.out)
        kinds = ("cache", "knn", "mlp", "equivariance", "random_init")
        chosen = [kind.replace("_", "-") for kind in kinds if getattr(self, kind)]
        return Path(self.checkpoint).with_name("-".join(["eval", *chosen]) + ".json")

    def beside(self, what: str) -> Path:
        """A file beside the result: "head" or "state"."""
        return self.result.with_name(f"{self.result.stem}-{what}.pt")

def check_out(cfg: Settings) -> None:
    """Raise UserError, before hours of work, where the result cannot be written or would overwrite
    what is no result."""
    path = cfg.result
    require(path.suffix == ".json", f"--out {path} must end in .json")
    require(os.access(path.parent, os.W_OK | os.X_OK), f"--out {path}: cannot write in that folder")
    require(not path.is_dir(), f"--out {path} is a folder: name a file in it")
    checkpoint = Path(cfg.checkpoint).resolve()
    for file in (cfg.beside("head"), cfg.beside("state")):
        require(file.resolve() != checkpoint, f"--out {path} would overwrite {file}: rename it")
    if path.exists():
        try:
            json.loads(path.read_text())
        except ValueError:
            raise UserError(f"--out {path} exists and holds no JSON: choose another name") from None

# ==== 2. Images: class folders, crops, and the order of training ==================================
class Split(NamedTuple):
    """Labelled images."""
    source: Sequence[str] | Tensor   # n paths, or the images (n, 3, h, w) uint8 themselves
    labels: Tensor                   # (n,) int64, place of the class in the sorted training classes
    among: list[int]                 # the classes it is scored among
    ready: bool = False              # already cropped: only resized to (S, S), if need be
    note: str = ""                   # for the person who reads the table

DRAWN_SETS = {"train": (2048, 101), "val": (1000, 102)}     # images, and a seed ser.py does not use

def labelled(name: str, root: str, classes: Sequence[str] = ()) -> tuple[list[str], Split]:
    """The class folders of `root`, sorted, and their images, labelled by the places of their names in
    `classes` (by default, among themselves). name: the flag, for messages. Raises UserError for no
    class folder, an empty one, or one that is no class."""
    require(os.path.isdir(root), f"{name} {root}: no such folder")
    folders = [entry.name for entry in os.scandir(root) if entry.is_dir()]
    own = sorted(folder for folder in folders if not folder.startswith("."))
    require(len(own) > 0, f"{name} {root}: no class folders in it")
    place = {c: i for i, c in enumerate(classes or own)}
    strange = [c for c in own if c not in place]
    note = ""
    numbers = {str(i): i for i in range(len(classes))}
    if strange and set(own) == set(numbers):     # ImageNet-V2, exactly: places, not sorted as text
        place = numbers
        strange = []
        note = f"its folders 0..{len(numbers) - 1} are places among the sorted training classes"
    require(not strange, f"{name} {root}: {len(strange)} folders match no training class: "
            f"{' '.join(strange[:5])}; give them the names of training classes")
    paths: list[str] = []
    labels: list[int] = []
    for c in own:
        images = ser.list_images(os.path.join(root, c))
        paths += images
        labels += [place[c]] * len(images)
    return own, Split(paths, torch.tensor(labels), [place[c] for c in own], note=note)

def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """(the rest, a share of the images that is drawn by the seed)."""
    order = torch.randperm(len(split.labels), generator=rng(seed, "split"))
    held = order < round(share * len(split.labels))
    parts = []
    for mask in (~held, held):
        rows = mask.nonzero().flatten().tolist()
        source = split.source
        own = source[rows] if isinstance(source, Tensor) else [source[row] for row in rows]
        parts.append(split._replace(source=own, labels=split.labels[rows]))
    rest, held_out = parts
    require(len(held_out.labels) > 0 and len(rest.labels.unique()) == len(split.among),
            f"--select-split {share} leaves none to choose on, or none of a class to learn from")
    return rest, held_out

def collect(cfg: Settings, size: int) -> tuple[list[str], dict[str, Split]]:
    """The training classes, and the splits train, held-out (with select_split), val and each test
    set. size: side of drawn images. Raises UserError for a layout that cannot be evaluated."""
    if cfg.data:
        classes, train = labelled("--data", os.path.join(cfg.data, "train"))
        require(len(classes) > 1, f"--data {cfg.data}: only one class, {classes[0]}")
        _, val = labelled("--data", os.path.join(cfg.data, "val"), classes)
        lacks = [c for place, c in enumerate(classes) if place not in val.among]
        require(not lacks, f"--data {cfg.data}: val lacks classes of train: {' '.join(lacks[:5])}")
    else:
        train, val = (Split(*ser.draw_images(n, size, seed), []) for n, seed in DRAWN_SETS.values())
        classes = [f"texture {label}" for label in train.labels.unique().tolist()]
        train = train._replace(among=list(range(len(classes))))
        val = val._replace(among=train.among)
    splits = {"train": train}
    if cfg.select_split:
        splits["train"], splits["held-out"] = hold_out(train, cfg.select_split, cfg.seed)
    splits["val"] = val
    for test in filter(None, cfg.test):
        name, _, folder = test.partition("=")
        require(name != "" and folder != "", f"--test {test} must be NAME=DIR")
        require(name not in (*splits, "held-out"), f"--test {test}: {name} is taken, rename it")
        _, splits[name] = labelled(f"--test {name}", folder, classes)
    return classes, splits

def centre_crop(image: Tensor, size: int) -> Tensor:
    """(3, h, w) uint8 -> (3, size, size), to the pixel where torchvision's Resize and CenterCrop put
    it: the shorter side to size * 256 / 224, bicubic, then the centre."""
    h, w = image.shape[-2:]
    short = round(size * 256 / 224)
    height = int(short * h / min(h, w))
    width = int(short * w / min(h, w))
    image = F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0]
    top = round((height - size) / 2)
    left = round((width - size) / 2)
    return image[:, top:top + size, left:left + size]

class Crops(torch.utils.data.Dataset):
    """Key (epoch, index) -> (3, S, S) uint8 and label. Epoch None: the centre crop; else a random
    crop and flip, drawn from (seed, epoch, index). A file that cannot be read: black, label -1."""

    def __init__(self, split: Split, size: int, seed: int):
        self.split = split
        self.size = size
        self.seed = seed

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        epoch, index = key
        item = self.split.source[index]
        label = int(self.split.labels[index])
        try:
            image = item if isinstance(item, Tensor) else ser.read_image(item)
        except Exception:     # decoders raise what they like; Frozen names and counts the files
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), -1
        if self.split.ready:
            return ser.resize(image[None], (self.size, self.size))[0], label
        if epoch is None:
            return centre_crop(image, self.size), label
        torch.manual_seed(ser.seed_of(self.seed, "eval", epoch, index))
        crop = ser.sample_crop(image, (0.08, 1.0))
        return ser.cut(image, crop, self.size), label

def training_keys(images: int, batch: int, first_epoch: int, cfg: Settings) -> Iterator[list]:
    """The keys of the training batches. An epoch permutes the images by (seed, epoch) alone; what its
    last whole batch leaves is not used."""
    for epoch in range(first_epoch, cfg.epochs):
        order = torch.randperm(images, generator=rng(cfg.seed, "eval", epoch))
        for rows in order.split(batch)[:images // batch]:
            yield [(epoch, index) for index in rows.tolist()]

# ==== 3. Features: the frozen encoder, and who computes what on which rank ========================
@torch.no_grad()
def encode(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """uint8 images (B, 3, S, S) -> (B, blocks * D) fp32, the [CLS] of the last `blocks` blocks, on the
    encoder's device."""
    x = images.to(encoder.cls_token.device, non_blocking=True).float() / 255
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return encoder.last_cls(ser.normalise(x), blocks).float()

class Frozen:
    """The features of all splits. The encoder is nearly all of the work, and the ranks share it: of
    every batch each rank encodes a part, then all have all features. What follows is done alike
    everywhere, so that R ranks give what one gives, and no image counts twice."""

    def __init__(self, encoder: ViT, blocks: int, cfg: Settings, splits: dict[str, Split],
                 crops: type[Crops] = Crops):
        self.encoder = encoder
        self.blocks = blocks
        self.cfg = cfg
        self.splits = splits
        self.crops = crops
        self.device = encoder.cls_token.device
        self.width = blocks * encoder.dim
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        self.broken: dict[str, set[str]] = {name: set() for name in splits}

    def read(self, name: str, keys: Iterable[list]) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, F) and labels (B,) of each batch of keys, on every rank, from the table of
        centre crops if there is one. Raises UserError for too many broken images."""
        if name in self.tables:
            features, labels = self.tables[name]
            for batch in keys:
                rows = torch.tensor([index for _, index in batch], device=self.device)
                yield features[rows], labels[rows]
            return
        ranks, rank = ranks_and_rank()
        batches, for_loader = itertools.tee(keys)
        own = (batch[rank::ranks] or batch[:1] for batch in for_loader)     # a loader needs one
        loader = iter(torch.utils.data.DataLoader(
            self.crops(self.splits[name], self.encoder.shape["image_size"], self.cfg.seed),
            batch_sampler=own, num_workers=min(self.cfg.workers, os.cpu_count() or 1),
            worker_init_fn=ser.leave_signals, pin_memory=torch.cuda.is_available()))
        try:
            for batch in batches:
                images, labels = next(loader)
                features, labels = self.share(images, labels, len(batch))
                self.count_broken(name, batch, labels)
                yield features, labels
        finally:     # its processes outlive an exception whose traceback holds the loader
            if hasattr(loader, "_shutdown_workers"):
                loader._shutdown_workers()

    def share(self, images: Tensor, own_labels: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """This rank's images of a batch -> features and labels of the whole batch. A row is zero on
        all ranks but one, so that the sum over ranks is exact."""
        ranks, rank = ranks_and_rank()
        features = torch.zeros(total, self.width, device=self.device)
        labels = torch.zeros(total, dtype=torch.int64, device=self.device)
        own = len(labels[rank::ranks])
        features[rank::ranks] = encode(self.encoder, images, self.blocks)[:own]
        labels[rank::ranks] = own_labels[:own].to(self.device, non_blocking=True)
        if ranks > 1:
            dist.all_reduce(features)
            dist.all_reduce(labels)
        return features, labels

    def count_broken(self, name: str, batch: list, labels: Tensor) -> None:
        """Remember the files that could not be read."""
        # Choice: an unreadable image has label -1, teaches no head, is nobody's neighbour, and counts
        # as wrong, so that all encoders are measured on the same number of images.
        split = self.splits[name]
        broken = self.broken[name]
        for (_, index), label in zip(batch, labels.tolist()):
            if label < 0:
                broken.add(split.source[index])
        n = len(split.labels)
        require(len(broken) <= max(3, n / 1000), f"{len(broken)} of the {n} images of {name} cannot "
                f"be read, as {min(broken, default='')}: mend or remove them")

    def table(self, name: str) -> tuple[Tensor, Tensor]:
        """Features (n, F) and labels (n,) of the centre crops of a split, extracted once."""
        if name not in self.tables:
            rows = torch.arange(len(self.splits[name].labels)).split(self.cfg.batch_size)
            keys = ([(None, index) for index in part.tolist()] for part in rows)
            bar = tqdm(self.read(name, keys), name, len(rows), disable=ranks_and_rank()[1] > 0)
            features, labels = zip(*bar)
            self.tables[name] = torch.cat(features), torch.cat(labels)
        return self.tables[name]

# ==== 4. Heads: every learning rate in one training (paper 4.1) ===================================
# SGD without weight decay adds up gradients, so that a learning rate and a factor of the loss are the
# same: one optimizer, and every head's loss times its own rate, train each head as if it were alone.
# Nothing else joins the heads: no clipping, no shared parameter.

class Heads(nn.Module):
    """A linear layer for each learning rate, all from the same first weights."""
    hidden: ClassVar[tuple[int, ...]] = ()     # widths of hidden layers

    def __init__(self, lrs: Sequence[float], classes: int, width: int, seed: int):
        super().__init__()
        self.weights = nn.ParameterList()     # of each layer, (R, out, in)
        self.biases = nn.ParameterList()      # of each layer, (R, 1, out)
        self.register_buffer("lrs", torch.tensor(lrs))
        widths = (width, *self.hidden, classes)
        generator = rng(seed, "heads")
        for fan_in, fan_out in zip(widths, widths[1:]):
            # Paper: 4.1 is silent; N(0, .01) and biases 0 are the release's. Choice: He's for ReLU.
            last = len(self.weights) == len(self.hidden)
            std = 0.01 if last else math.sqrt(2 / fan_in)
            first = std * torch.randn(fan_out, fan_in, generator=generator)
            self.weights.append(first.repeat(len(lrs), 1, 1))
            self.biases.append(torch.zeros(len(lrs), 1, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> logits (B, R, C), in one product of all heads."""
        x = x.expand(len(self.lrs), *x.shape)                                     # (R, B, F)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if layer > 0:
                x = F.relu(x)
            x = torch.baddbmm(bias, x, weight.mT)
        return x.transpose(0, 1)

class MLPHeads(Heads):
    """A 3-layer MLP for each learning rate: the nonlinear probe."""
    # Choice: the paper has "a 3-layer MLP" and no widths; these are of SIE, which it follows.
    hidden = (1024, 1024)

def fit(heads: Heads, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]],
        start: int, total: int) -> Iterator[int]:
    """Train on the batches of the steps `start` to `total`; yields the steps done after each."""
    bar = tqdm(batches, "heads", total, initial=start, disable=ranks_and_rank()[1] > 0, mininterval=1)
    for step, (x, y) in enumerate(bar, start):
        # Paper: 4.1, a cosine to zero. It is per step here, the rate itself is in the loss.
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / total))
        logits = heads(x).mT                                                      # (B, C, R)
        labels = y[:, None].expand(-1, len(heads.lrs))                            # (B, R)
        losses = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").mean(0)
        optimizer.zero_grad()
        (losses * heads.lrs).sum().backward()
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{losses.nan_to_num(INF).min().item():.3f}")
        yield step + 1

@torch.no_grad()
def accuracy(heads: Heads, x: Tensor, y: Tensor, among: Sequence[int]) -> list[dict[str, float]]:
    """Top-1 and top-5 of each head on features (n, F) and labels (n,), in percent, scored among the
    classes `among` only; label -1 is wrong."""
    classes = heads.biases[-1].shape[-1]
    others = torch.ones(classes, dtype=torch.bool, device=x.device)
    others[list(among)] = False
    top1 = torch.zeros(len(heads.lrs))
    top5 = torch.zeros(len(heads.lrs))
    for part, labels in zip(x.split(1024), y.split(1024)):
        logits = heads(part).masked_fill(others, -INF)                            # (B, R, C)
        best = logits.topk(min(5, classes)).indices
        right = (best == labels[:, None, None]).cpu()
        top1 += right[:, :, 0].sum(0)
        top5 += right.any(2).sum(0)
    return [{"top1": 100 * a / len(x), "top5": 100 * b / len(x)}
            for a, b in zip(top1.tolist(), top5.tolist())]

def resume(path: Path, identity: dict[str, Any], heads: Heads,
           optimizer: torch.optim.Optimizer) -> int:
    """Load an interrupted training, if there is one, and return its step. Raises UserError where it
    is damaged, or its identity, all that shapes the heads, is not this one's."""
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        there = state["identity"]
        differ = [f"{name} {there.get(name)} there, {value} here" for name, value in identity.items()
                  if there.get(name) != value]
        if not differ:
            heads.load_state_dict(state["heads"])
            optimizer.load_state_dict(state["optimizer"])
    except Exception as error:     # pickle, zip, torch and the system raise their own
        raise UserError(f"{path} is damaged ({error}): remove it to begin anew") from None
    require(not differ, f"{path} is of another evaluation that was interrupted ({'; '.join(differ)}): "
            "remove it to begin anew, or use another --out")
    return state["step"]

class Column(NamedTuple):
    """A column of the result."""
    split: str
    among: list[int]     # classes

def scored(splits: dict[str, Split], classes: int) -> dict[str, Column]:
    """The columns by name: all splits but train; a set with fewer classes, as ImageNet-R, is scored
    among its own, as its authors do, and among all of them."""
    columns = {}
    for name, split in splits.items():
        if name != "train":
            columns[name] = Column(name, split.among)
            if len(split.among) < classes:
                columns[f"{name}, of {classes}"] = Column(name, list(range(classes)))
    return columns

def linear(frozen: Frozen, columns: dict[str, Column], classes: list[str], identity: dict[str, Any],
           make: type[Heads] = Heads) -> dict[str, Any]:
    """Train the heads, or continue; returns every rate's accuracy in every column, and the best
    rate, whose head is written beside the result."""
    cfg = frozen.cfg
    rank = ranks_and_rank()[1]
    n = len(frozen.splits["train"].labels)
    batch = min(cfg.batch_size, n)
    per_epoch = n // batch
    lrs = [rate * batch / 256 for rate in cfg.lr]
    heads = make(lrs, len(classes), frozen.width, cfg.seed).to(frozen.device)
    optimizer = torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9)
    start = 0 if cfg.cache else resume(cfg.beside("state"), identity, heads, optimizer)
    batches = frozen.read("train", training_keys(n, batch, start // per_epoch, cfg))
    with contextlib.closing(batches):
        for done in fit(heads, optimizer, batches, start, cfg.epochs * per_epoch):
            if done % per_epoch == 0 and rank == 0 and not cfg.cache:
                ser.save_whole(cfg.beside("state"), dict(
                    step=done, identity=identity, heads=heads.state_dict(),
                    optimizer=optimizer.state_dict()))
    rows = [{"rate": rate, "lr": lr} for rate, lr in zip(cfg.lr, lrs)]
    for name, column in columns.items():
        found = accuracy(heads, *frozen.table(column.split), column.among)
        for row, values in zip(rows, found):
            row[name] = values
    chosen_on = "held-out" if cfg.select_split else "val"
    best = max(rows, key=lambda row: row[chosen_on]["top1"])
    if rank == 0 and not heads.hidden:
        place = rows.index(best)
        ser.save_whole(cfg.beside("head"), dict(
            weight=heads.weights[0][place].detach().cpu().clone(),
            bias=heads.biases[0][place, 0].detach().cpu().clone(),
            classes=classes, blocks=frozen.blocks, digest=identity["sha256"]))
    return {"batch": batch, "rates": rows, "chosen_on": chosen_on, "best": best}

class Head(NamedTuple):
    """The chosen linear head: logits = features @ weight.T + bias, features by `encode`."""
    weight: Tensor         # (C, F)
    bias: Tensor           # (C,)
    classes: list[str]
    blocks: int            # whose [CLS] it reads

def load_head(path: str | Path, digest: str) -> Head:
    """The head that an evaluation wrote, on the CPU. digest: of the encoder it is to be used with, by
    frozen_encoder. Raises UserError where there is none, or it is another checkpoint's."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        head = Head(*(state[field] for field in Head._fields))
        trained_on = state["digest"]
    except Exception as error:
        raise UserError(f"{path} is missing, damaged or no head ({error}): run eval_linear.py first, "
                        "without --knn, --mlp") from None
    require(trained_on == digest, f"{path} is the head of checkpoint {trained_on}, not of {digest}: "
            "evaluate that one first")
    return head

# ==== 5. k-NN =====================================================================================
@torch.no_grad()
def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: int = 20) -> float:
    """Share of the test features (n, D), labels (n,), whose class the k nearest in train (m, D), (m,)
    tell by a vote: cosine similarity s, weight exp(s / .07), as DINO's."""
    train = F.normalize(train, dim=1)
    test = F.normalize(test, dim=1)
    size = max(1, 2 ** 28 // len(train))     # blocks of similarities of at most 1 GB
    right = 0
    for x, y in zip(test.split(size), test_labels.split(size)):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)
        votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp())
        right += (votes.argmax(1) == y).sum().item()
    return right / len(test)

def knn_columns(frozen: Frozen, columns: dict[str, Column]) -> dict[str, dict[str, float]]:
    """k-NN of every column by the last [CLS]; the neighbours are the training images, held out or
    not, of the classes that the column is scored among."""
    sources = [frozen.table(name) for name in ("train", "held-out") if name in frozen.splits]
    bank = torch.cat([features[:, -frozen.encoder.dim:] for features, _ in sources])
    labels = torch.cat([labels for _, labels in sources])
    found = {}
    for name, column in columns.items():
        near = torch.isin(labels, torch.tensor(column.among).to(labels))
        features, truth = frozen.table(column.split)
        share = knn(bank[near], labels[near], features[:, -frozen.encoder.dim:], truth)
        found[name] = {"top1": 100 * share}
    return found

# ==== 6. Equivariance: does the token map move as the image moves? (paper A.2) ====================
# The paper's score, a mean cosine, misleads alone: it rises for every map when all tokens grow alike,
# and is 1 for an encoder that has forgotten where anything is. Hence two more measures, which the
# identity cannot flatter either: retrieval, and the cosine without the mean token.
ELEMENTS = ("rot90", "hflip", "scale")

def tokens(z: Tensor) -> Tensor:
    """(B, D, H, W) -> (B, N, D)."""
    return z.flatten(2).mT

@torch.no_grad()
def equivariances(encoder: ViT, images: Tensor, layers: Sequence[int],
                  element: str) -> dict[int, dict[str, float]]:
    """Of the token maps f(x) after each of the blocks `layers`, with the final LayerNorm after the
    last block; images (n, 3, S, S) normalised, on the encoder's device; element: of ELEMENTS.

    score      mean cos(rho_g f(x), f(rho_g x)) over tokens, where g = g2 g1^-1 and g1, g2 are drawn
               from the element's group, the identity among them (paper A.2)
    centred    the same after subtracting the mean token, and for h in place of g, which always moves:
               90, 180, 270 degrees in turn, or a flip; 0 for unrelated tokens
    retrieval  share of the tokens of rho_h f(x) whose most similar one among all those of f(rho_h x),
               of 32 images, is their counterpart; 1 / (32 N) at chance
    """
    sums = {layer: dict.fromkeys(("retrieval", "score", "centred"), 0.0) for layer in layers}
    for part, x in enumerate(images.split(32)):
        g1, g2 = (ser.sample_geometry(len(x), encoder.grid, elements=(element,),
                                      generator=rng(element, part, side)) for side in (1, 2))
        g = ser.relative(g2, g1)
        h = g
        if element == "hflip":
            h = g._replace(flip=torch.ones_like(g.flip))
        if element == "rot90":
            h = g._replace(turns=1 + torch.arange(len(x)) % 3)
        batches = [x, ser.rho(g, x, encoder.patch_size), ser.rho(h, x, encoder.patch_size)]
        encoded = encoder(batches, layers)
        for layer in layers:
            still, by_g, by_h = (out.maps[layer].float() for out in encoded)
            if layer == encoder.depth:
                still, by_g, by_h = (encoder.norm(z.movedim(1, -1)).movedim(-1, 1)
                                     for z in (still, by_g, by_h))
            score = F.cosine_similarity(tokens(ser.rho(g, still)), tokens(by_g), dim=-1).mean()
            z = tokens(ser.rho(h, still))
            z_prime = tokens(by_h)
            retrieval = ser.retrieval(z, z_prime)
            z = z - z.mean((0, 1))
            z_prime = z_prime - z_prime.mean((0, 1))
            centred = F.cosine_similarity(z, z_prime, dim=-1).mean()
            for name, value in (("retrieval", retrieval), ("score", score), ("centred", centred)):
                sums[layer][name] += value.item() * len(x) / len(images)
    return sums

def equivariance(encoder: ViT, images: Tensor, layer: int, element: str) -> dict[str, float]:
    """`equivariances` after one block."""
    return equivariances(encoder, images, [layer], element)[layer]

def compare(encoders: dict[str, ViT], split: Split, layers: Sequence[int], seed: int,
            most: int = 512) -> dict[str, Any]:
    """The equivariance of several encoders of one shape on `most` images, spread over the split."""
    first = next(iter(encoders.values()))
    crops = Crops(split, first.shape["image_size"], seed)
    n = len(split.labels)
    items = [crops[None, place] for place in torch.linspace(0, n - 1, min(n, most)).long().tolist()]
    images = torch.stack([image for image, label in items if label >= 0])
    x = ser.normalise(images.to(first.cls_token.device).float() / 255)
    rows = []
    for element in ELEMENTS:
        found = {name: equivariances(encoder, x, layers, element) for name, encoder in encoders.items()}
        for layer in layers:
            row = {name: values[layer] for name, values in found.items()}
            rows.append({"element": element, "block": layer, **row})
    return {"images": len(x), "chance": 1 / (min(32, len(x)) * first.grid ** 2), "rows": rows}

# ==== 7. Evaluation: a checkpoint in, a result out ================================================
def untrained(seed: int, shape: dict[str, Any]) -> ViT:
    """The encoder with the random weights of this seed, as ser.build draws them."""
    torch.manual_seed(seed)
    return ViT(**shape).eval()

def frozen_encoder(cfg: Settings) -> tuple[ViT, int, str]:
    """The encoder, the step of its checkpoint, and a digest of it. With random_init it has the random
    weights of the run's seed. Raises UserError for what is no checkpoint."""
    encoder = ser.load_encoder(cfg.checkpoint)
    state = ser.load_checkpoint(cfg.checkpoint)
    digest = hashlib.sha256(Path(cfg.checkpoint).read_bytes()).hexdigest()[:16]
    if cfg.random_init:
        return untrained(state["config"]["seed"], encoder.shape), 0, digest + "-random-init"
    return encoder, state["step"], digest

def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write beside `path`, then rename: a kill at any moment leaves the old file or the new, whole."""
    beside = path.with_suffix(".tmp")
    with open(beside, "w") as file:
        file.write(json.dumps(found, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)

def identity_of(cfg: Settings, train: Split, digest: str) -> dict[str, Any]:
    """All that shapes the heads, which an interrupted training must share to be continued."""
    free = ("data", "checkpoint", "test", "knn", "equivariance", "workers", "out")
    identity = {name: value for name, value in vars(cfg).items() if name not in free}
    names = [] if isinstance(train.source, Tensor) else [os.path.basename(p) for p in train.source]
    images = hashlib.sha256(repr((names, train.labels.tolist())).encode()).hexdigest()[:16]
    return identity | {"sha256": digest, "images": f"{len(train.labels)}, {images}"}

def protocol(cfg: Settings, encoder: ViT, blocks: int) -> str:
    """What is measured, in a line each, for the table."""
    lines = []
    if "heads" in cfg.measures:
        # The release reads a patch token in place of a [CLS] that a block does not have.
        late = f" (of 4: [CLS] enters after block {encoder.cls_layer} of {encoder.depth})"
        seen = "random crops and flips"
        if cfg.cache:
            seen = "ONE CENTRE CROP, a first look, not the paper's protocol"
        lines.append(f"{'MLP' if cfg.mlp else 'linear'} on the [CLS] of the last {blocks} blocks"
                     f"{late if blocks < 4 else ''}, {cfg.epochs} epochs, {seen}")
    if "knn" in cfg.measures:
        lines.append("20-NN on the last [CLS]")
    return "\n".join(lines)

def evaluate(cfg: Settings, collect: Callable = collect, heads: type[Heads] | None = None,
             crops: type[Crops] = Crops) -> dict[str, Any]:
    """Evaluate a checkpoint; returns what rank 0 writes to cfg.result. collect, heads, crops: for
    other data and other heads; None: those of cfg.mlp. Raises UserError, on all ranks."""
    begun = time.perf_counter()
    ser.check_ranges(cfg)
    device, rank, ranks = ser.setup()
    encoder, step, digest = frozen_encoder(cfg)
    check_out(cfg)
    classes, splits = collect(cfg, encoder.shape["image_size"])
    columns = scored(splits, len(classes))
    blocks = min(4, encoder.depth - encoder.cls_layer) if "heads" in cfg.measures else 1
    frozen = Frozen(encoder.to(device), blocks, cfg, splits, crops)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "checkpoint": cfg.checkpoint, "sha256": digest, "step": step,
        "encoder": "untrained, from the seed of the run" if cfg.random_init else "trained",
        "shape": encoder.shape, "data": cfg.data or "drawn images", "settings": vars(cfg),
        "protocol": protocol(cfg, encoder, blocks), "classes": len(classes),
        "images": {name: len(split.labels) for name, split in splits.items()},
        "notes": {name: split.note for name, split in splits.items() if split.note}}
    result["chance"] = {name: {f"top{k}": 100 * min(1, k / len(column.among)) for k in (1, 5)}
                        for name, column in columns.items()}
    if cfg.cache:
        frozen.table("train")     # from which `linear` will read
    if "heads" in cfg.measures:
        identity = identity_of(cfg, splits["train"], digest)
        make = heads or (MLPHeads if cfg.mlp else Heads)
        result["linear"] = linear(frozen, columns, classes, identity, make)
    if "knn" in cfg.measures:
        result["knn"] = {"k": 20, **knn_columns(frozen, columns)}
    if "equivariance" in cfg.measures:
        config = ser.load_checkpoint(cfg.checkpoint)["config"]
        began = untrained(config["seed"], encoder.shape).to(device)
        encoders = {"untrained": began} if cfg.random_init else {"untrained": began, "trained": encoder}
        every = list(range(1, encoder.depth + 1))
        layers = every if cfg.equivariance else sorted({*config["equiv_layers"], encoder.depth})
        result["equivariance"] = compare(encoders, splits["val"], layers, cfg.seed)
        if not cfg.data and "knn" in cfg.measures:
            result["knn_untrained"] = knn_columns(Frozen(began, 1, cfg, splits), columns)
    result |= {"broken": {name: sorted(broken) for name, broken in frozen.broken.items() if broken},
               "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
               "ranks": ranks, "torch": torch.__version__, "torchvision": torchvision.__version__,
               "minutes": (time.perf_counter() - begun) / 60}
    if rank == 0:
        write_json(cfg.result, result)
        cfg.beside("state").unlink(missing_ok=True)
    return result

# ==== 8. Command line: the result as a person reads it ============================================
def report(result: dict[str, Any]) -> str:
    """Equivariance for the screen: a row per element and block, untrained -> trained, chance below."""
    found = result["equivariance"]
    encoders = [name for name in ("untrained", "trained") if name in found["rows"][0]]
    title = f"equivariance, {found['images']} images of val"
    lines = [f"{' -> '.join(encoders)}", f"  {title:36}{'patch retrieval':22}{'cosine (A.2)':22}"
             "cosine without the mean token"]
    for row in found["rows"]:
        cells = []
        for measure in ("retrieval", "score", "centred"):
            cells.append(" -> ".join(f"{row[name][measure]:.3f}" for name in encoders))
        name = f"{row['element']}, after block {row['block']}"
        lines.append(f"  {name:36}" + "".join(f"{cell:22}" for cell in cells).rstrip())
    chance = f"{found['chance']:.4f}"
    lines.append(f"  {'chance':36}{chance:22}{'-':22}0")
    if "knn_untrained" in result:
        pair = f"{result['knn_untrained']['val']['top1']:.2f} -> {result['knn']['val']['top1']:.2f}"
        lines.append(f"  {'20-NN accuracy, %':36}{pair:22}chance {result['chance']['val']['top1']:.2f}")
    lines.append("  The cosine alone misleads: it is 1 where all tokens are alike, and nothing is left "
                 "of the map.")
    return "\n".join(lines)

def table(result: dict[str, Any]) -> str:
    """Accuracy for the screen: a row per learning rate, a column per set, chance and notes below."""
    columns = [(name, top) for name, chance in result["chance"].items() for top in chance]

    def row(title: str, values: dict[str, Any]) -> str:
        line = f"  {title:25}"
        for name, top in columns:
            cell = f"{values[name][top]:.2f}" if top in values.get(name, ()) else "-"
            line += f"{cell:>{len(name) + 7}}"
        return line

    lines = ["  " + f"{'accuracy, %':25}" + "".join(f"  {name} {top}" for name, top in columns)]
    notes = [f"{name}: {note}" for name, note in result["notes"].items()]
    if "linear" in result:
        best = result["linear"]["best"]
        rates = result["linear"]["rates"]
        for rate in rates:
            chosen = " best" if rate == best else ""
            lines.append(row(f"heads, rate {rate['rate']:<7g}{chosen}", rate))
        notes.append("the best rate was chosen on held-out training images")
        if result["linear"]["chosen_on"] == "val":
            notes[-1] = ("the best rate was chosen on val itself, which flatters it: --select-split 0.1 "
                         "chooses on training images")
        if len(rates) > 1 and best in (rates[0], rates[-1]):
            notes.append("it lies at the end of the sweep: try rates beyond with --lr")
    if "knn" in result:
        lines.append(row("20-NN", result["knn"]))
    lines.append(row("chance", result["chance"]))
    for name in result["chance"]:
        if ", of " in name:
            notes.append(f"{name.partition(',')[0]} is scored among its own classes, as its authors do, "
                         f"and among all; the paper's numbers look like the latter")
    for name, broken in result["broken"].items():
        notes.append(f"{len(broken)} broken images in {name}, as {broken[0]}: they teach nothing and "
                     "count as wrong")
    return "\n".join([*lines, *(f"  {note}" for note in notes)])

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings, repeatable=("--test",))
        try:
            result = evaluate(cfg)
        except KeyboardInterrupt:
            tqdm.write("eval_linear.py: stopped; the same command continues after its last whole epoch",
                       file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        if ranks_and_rank()[1] > 0:
            return
        images = ", ".join(f"{n} {name}" for name, n in result["images"].items())
        print(f"\n{result['checkpoint']}, step {result['step']}, {result['encoder']}\n"
              f"{result['data']}: {result['classes']} classes, {images}")
        if "equivariance" in result:
            print(f"\n{report(result)}")
        if result["protocol"]:
            print(f"\n{result['protocol']}\n{table(result)}")
        print(f"  {result['minutes']:.1f} minutes, written to {cfg.result}")

    return ser.guard("eval_linear.py", work)

if __name__ == "__main__":
    ser.leave(main())
