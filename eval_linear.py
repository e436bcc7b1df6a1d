"""What a checkpoint has learned: linear evaluation (paper 4.1), k-NN, and equivariance (paper A.2).

The encoder is frozen. Can a linear layer tell the classes from the [CLS] of its last four blocks?
Can a vote of the nearest training images, by the last [CLS]? Do its token maps move as the image
moves?

    python eval_linear.py                                    runs/ser/last.pt on drawn images
    python eval_linear.py --data /imagenet --knn             k-NN alone: minutes
    python eval_linear.py --data /imagenet --cache           k-NN, and heads on one crop: minutes
    python eval_linear.py --data /imagenet --equivariance    after every block, beside untrained
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --test v2=/imagenet-v2 r=/imagenet-r
                                                             the paper's protocol, two shifted sets

    flags             heads are trained on               k-NN       equivariance
    none              random crops                       -          -
    --mlp             random crops, by MLPs              -          -
    --cache           one centre crop of each image      yes        -
    --knn             -                                  yes        -
    --equivariance    -                                  -          after every block
Flags add up; --knn and --equivariance leave out the heads unless --cache or --mlp asks for them.
Without --data, k-NN and the equivariance of the map that [CLS] has not entered yet (after block
--cls-layer of ser.py, or 1) are always measured. Where both are measured, k-NN is also that of the
untrained encoder; --random-init evaluates that one alone.

Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/...; a test set: DIR/CLASS/..., named as those
classes, or numbered as ImageNet-V2 is; name all of them at once. ImageNet-C, ImageNet-P and
3DIEBench: paper/evaluations. The result, the chosen head, and the state of an unfinished training
of heads, which the same command continues after its last whole epoch, are written beside the
checkpoint; other --epochs, --lr or --batch-size replace them, unless --out names another file.
`# Choice:` marks what the paper leaves open; the release is its authors' code.

1 Settings, 2 Images, 3 Features, 4 Heads, 5 k-NN, 6 Equivariance, 7 Evaluation, 8 Command line.
Axes: n images of a split, m training images, B images of a batch, S side of an image in pixels,
R learning rates, C classes, D encoder width, K feature width, N = H W tokens.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import ser
from ser import INF, TINY, UserError, ViT, ranks_and_rank, require, rng, setting

# ==== 1. Settings: the protocol of 4.1, and what the release adds to it ===========================
PROTOCOL = ("cache", "knn", "mlp", "equivariance", "random_init")     # each has a result of its own

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an evaluation. Without --data, those of `drawn` replace the defaults."""
    data: str = setting("", 0, 0, "folder with train/CLASS and val/CLASS; none: drawn images")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run")
    # ("",): no test set; ser.parse reads the type of the flag off the first default.
    test: tuple[str, ...] = setting(("",), 0, 0, "NAME=DIR ..., test sets to score; repeatable")
    knn: bool = setting(False, 0, 1, "k-NN; no heads, unless --cache or --mlp asks for them")
    cache: bool = setting(False, 0, 1, "heads on one centre crop of each image, and k-NN")
    mlp: bool = setting(False, 0, 1, "heads of three layers in place of linear ones")
    equivariance: bool = setting(False, 0, 1, "equivariance after every block; no heads, likewise")
    random_init: bool = setting(False, 0, 1, "an encoder with the random weights of the run's seed")
    # Choice: the release tries 1, 3, 10 per 256 images and keeps what is best on val. The smaller
    # ones are what weak features and few classes need, and cost next to nothing, as one training
    # serves all rates. Its batches have 2048 images.
    lr: tuple[float, ...] = setting((0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), TINY, INF,
                                    "learning rates per 256 images; each trains a head")
    select_split: float = setting(0.0, 0, 0.9, "share of train to choose the rate on; 0: use val")
    epochs: int = setting(50, 1, INF, "passes over the training images (paper: 50)")
    batch_size: int = setting(1024, 1, INF, "images per step, over all ranks")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of heads, order, crops and held-out images")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the evaluating process loads")
    out: str = setting("", 0, 0, "the result, a .json; none: eval[-FLAG].json by the checkpoint")

    # For two CPU cores. Heads learn on after 5 epochs: on what `python ser.py` trains, 75.5 %
    # become 85.5 with `python eval_linear.py --epochs 50`.
    drawn: ClassVar[dict[str, Any]] = dict(epochs=5, batch_size=64, workers=0)

    @property
    def result(self) -> Path:
        """Where the result goes; every protocol has a file of its own."""
        name = "-".join(["eval", *(flag for flag in PROTOCOL if getattr(self, flag))])
        default = Path(self.checkpoint).with_name(name.replace("_", "-") + ".json")
        return Path(self.out) if self.out else default

    def beside(self, what: str) -> Path:
        """The file of the "head" or of the "state" of its training, beside the result."""
        return self.result.with_name(f"{self.result.stem}-{what}.pt")

def check_out(cfg: Settings, digest: str) -> None:
    """Raise UserError where the result could not be written, or would overwrite the checkpoint, a
    file that is no result, or the result of another encoder, other images or other settings."""
    path = cfg.result
    folder = path.resolve().parent
    require(path.suffix == ".json", f"--out {path} must end in .json")
    require(os.access(folder, os.W_OK | os.X_OK), f"--out {path}: cannot write in {folder}")
    overwritten = [cfg.beside(what).resolve() for what in ("head", "state")]
    require(Path(cfg.checkpoint).resolve() not in overwritten,
            f"--out {path}: a file of that name beside it is the checkpoint, choose another")
    if not path.exists():
        return
    here = vars(cfg) | {"checkpoint": digest}     # known by its digest, not by its path
    try:
        found = json.loads(path.read_text())
        there = found["settings"] | {"checkpoint": found["sha256"]}
        there["test"] = tuple(there["test"])     # JSON has lists
        for asked in (here, there):
            asked["data"] = asked["data"] and os.path.normpath(asked["data"])
    except (ValueError, OSError, KeyError, TypeError):
        raise UserError(f"--out {path} is there and is no result: choose another name") from None
    # What was asked, of what. How heads are trained may change: a repetition replaces the result.
    free = ("lr", "epochs", "batch_size", "workers", "out")
    for name in [name for name in here if name not in free]:
        require(there.get(name) == here[name], f"--out {path} holds a result of another {name} "
                f"({there.get(name)}, now {here[name]}): remove it or choose another --out")

# ==== 2. Images: class folders, crops, and the order of training ==================================
class Split(NamedTuple):
    """Labelled images."""
    source: Sequence[Any] | Tensor   # n paths, or the images (n, 3, h, w) uint8 themselves
    labels: Tensor                   # (n,) int64, place of the class in the sorted training classes
    among: list[int]                 # the classes it is scored among
    ready: bool = False              # whole in training, too: only resized to (S, S), if need be
    note: str = ""                   # for the person who reads the table

def labelled(name: str, root: str, classes: Sequence[str] = ()) -> tuple[list[str], Split]:
    """The class folders of `root`, sorted, and their images. A label is the place of the folder's
    name in `classes` (none: among the folders). Raises UserError, which names the flag `name`, for
    folders of no such class."""
    entries = list(os.scandir(root)) if os.path.isdir(root) else []
    own = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    require(len(own) > 0, f"{name} {root}: no such folder, or no class folders in it")
    place = {c: i for i, c in enumerate(classes or own)}
    numbers = {str(i): i for i in range(len(classes))}
    note = ""
    if set(own) == set(numbers) != set(place):     # numbers, where the classes have names
        place = numbers
        note = "folders 0, 1, ... are places in the sorted training classes, as in ImageNet-V2"
    strange = [c for c in own if c not in place]
    require(not strange, f"{name} {root}: {len(strange)} folders match no training class: "
            f"{' '.join(strange[:5])}; give them the names of training classes")
    paths: list[str] = []
    labels: list[int] = []
    for c in own:
        try:
            images = ser.list_images(os.path.join(root, c))
        except UserError as error:     # which names --data, whatever the flag
            raise UserError(str(error).replace("--data", name, 1)) from None
        paths += images
        labels += [place[c]] * len(images)
    return own, Split(paths, torch.tensor(labels), [place[c] for c in own], note=note)

def hold_out(split: Split, cfg: Settings) -> dict[str, Split]:
    """Divide the training images at random into "train" and "held-out"."""
    order = torch.randperm(len(split.labels), generator=rng(cfg.seed, "split"))
    held = order < round(cfg.select_split * len(order))
    parts = {}
    for name, chosen in (("train", ~held), ("held-out", held)):
        rows = chosen.nonzero().flatten().tolist()
        source = [split.source[row] for row in rows]
        parts[name] = split._replace(source=source, labels=split.labels[rows])
    classes = parts["train"].labels.unique()
    require(held.any() and len(classes) == len(split.among), f"--select-split {cfg.select_split} "
            "holds out no image, or all images of a class: change it")
    return parts

def collect(cfg: Settings, size: int) -> tuple[list[str], dict[str, Split]]:
    """The training classes, and the splits train, held-out (with select_split), val and each test
    set. size: side of drawn images. Raises UserError for a layout that cannot be evaluated."""
    if cfg.data:
        classes, train = labelled("--data", os.path.join(cfg.data, "train"))
        require(len(classes) > 1, f"--data {cfg.data}: only one class, {classes[0]}")
        _, val = labelled("--data", os.path.join(cfg.data, "val"), classes)
        lacks = [c for i, c in enumerate(classes) if i not in val.among]
        require(not lacks, f"--data {cfg.data}: val lacks classes of train: {' '.join(lacks[:5])}")
    else:     # with seeds that ser.py does not use
        classes = [f"texture {i}" for i in range(6)]
        train = Split(*ser.draw_images(2048, size, seed=101), list(range(6)))
        val = Split(*ser.draw_images(1000, size, seed=102), list(range(6)))
    splits = hold_out(train, cfg) if cfg.select_split else {"train": train}
    splits["val"] = val
    for test in filter(None, cfg.test):
        name, _, folder = test.partition("=")
        require(name != "" and folder != "", f"--test {test} must be NAME=DIR")
        taken = (*splits, "held-out", "rate", "lr", "k")     # keys of the result
        require(name not in taken, f"--test {test}: {name} is taken, rename it")
        _, found = labelled(f"--test {name}", folder, classes)
        splits[name] = found
        if len(found.among) < len(classes):     # as ImageNet-R, whose authors mask the others
            title = f"{name}, of {len(classes)}"
            note = (f"{name}: scored among its {len(found.among)} classes, as its authors do; "
                    f"'{title}' is what the paper's numbers compare with, as far as one can tell")
            splits[title] = found._replace(among=list(range(len(classes))), note=note)
    return classes, splits

def centre_crop(image: Tensor, size: int) -> Tensor:
    """(3, h, w) uint8 -> (3, size, size): the shorter side to size * 256 / 224, then the centre,
    both rounded as torchvision's Resize and CenterCrop do."""
    # Choice: bicubic here and bilinear in training, as in DINO's eval_linear.
    h, w = image.shape[-2:]
    short = round(size * 256 / 224)
    height = short * h // min(h, w)
    width = short * w // min(h, w)
    image = F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0]
    top = round((height - size) / 2)
    left = round((width - size) / 2)
    return image[:, top:top + size, left:left + size]

@dataclasses.dataclass
class Crops(torch.utils.data.Dataset):
    """Key (epoch, index) -> (3, S, S) uint8 and label. Epoch None: the centre crop; else a random
    crop (area .08 to 1, sides 3:4 to 4:3) and flip, drawn from (seed, epoch, index), as in the
    release. A file that cannot be read: black, label -1."""
    split: Split
    size: int     # S
    seed: int

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
        ser.seed_draws(self.seed, "eval", epoch, index)
        return ser.cut(image, ser.sample_crop(image, (0.08, 1.0)), self.size), label

def training_keys(images: int, batch: int, begin: int, cfg: Settings) -> Iterator[list]:
    """The keys of the batches from epoch `begin` on. An epoch permutes the images by (seed, epoch)
    alone; images that do not fill its last batch are not used."""
    for epoch in range(begin, cfg.epochs):
        order = torch.randperm(images, generator=rng(cfg.seed, "eval", epoch)).tolist()
        for first in range(0, images - batch + 1, batch):
            yield [(epoch, index) for index in order[first:first + batch]]

# ==== 3. Features: the frozen encoder, and who computes what on which rank ========================
@torch.no_grad()
def encode(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """The final LayerNorm of [CLS] after each of the last `blocks` blocks, of uint8 images
    (B, 3, S, S): (B, K) fp32 on the encoder's device, K = blocks * D."""
    pinned = images.is_pinned()
    x = ser.normalise(images.to(encoder.cls_token.device, non_blocking=pinned) / 255)
    # Choice: bf16 on a GPU, as in training.
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return encoder.last_cls(x, blocks).float()

@dataclasses.dataclass
class Frozen:
    """The features of all splits, by the frozen encoder. Encoding is nearly all of the work, and
    the ranks share it: each encodes a part of every batch, and then all have all features. Heads
    and k-NN run alike on every rank, so that several ranks give what one gives, and no image counts
    twice."""
    encoder: ViT
    blocks: int                   # whose [CLS] are the features
    cfg: Settings
    splits: dict[str, Split]
    crops: type[Crops] = Crops

    def __post_init__(self) -> None:
        self.device = self.encoder.cls_token.device
        self.width = self.blocks * self.encoder.dim     # K
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.broken: dict[str, set[str]] = {name: set() for name in self.splits}

    def read(self, name: str, keys: Iterable[list]) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, K) and labels (B,) of each batch of keys, on every rank. Raises UserError
        for too many broken images."""
        source = self.splits[name].source
        broken = self.broken[name]
        ranks, rank = ranks_and_rank()
        batches, ahead = itertools.tee(keys)     # the loader runs some batches ahead of the loop
        # A rank that has no image in a short batch reads the first one, which is not used below.
        own = (batch[rank::ranks] or batch[:1] for batch in ahead)
        data = self.crops(self.splits[name], self.encoder.shape["image_size"], self.cfg.seed)
        loader = iter(torch.utils.data.DataLoader(
            data, batch_sampler=own, num_workers=min(self.cfg.workers, os.cpu_count() or 1),
            worker_init_fn=ser.leave_signals, pin_memory=torch.cuda.is_available()))
        try:
            for batch in batches:
                images, own_labels = next(loader)
                features = torch.zeros(len(batch), self.width, device=self.device)
                labels = torch.zeros(len(batch), dtype=torch.int64, device=self.device)
                part = len(labels[rank::ranks])
                features[rank::ranks] = encode(self.encoder, images, self.blocks)[:part]
                labels[rank::ranks] = own_labels[:part].to(self.device)
                if ranks > 1:     # a row is zero on all ranks but one: the sum is exact
                    dist.all_reduce(features)
                    dist.all_reduce(labels)
                # Choice: an unreadable image has label -1. Heads and k-NN learn nothing from it,
                # and in val it counts as wrong: all encoders are measured on as many images.
                unread = (labels < 0).nonzero().flatten().tolist()
                broken.update(source[batch[row][1]] for row in unread)
                n = len(source)
                if len(broken) > max(3, n / 1000):
                    raise UserError(f"{len(broken)} of the {n} images of {name} cannot be read, as "
                                    f"{min(broken)}: repair or remove it")
                yield features, labels
        finally:     # its processes outlive an exception whose traceback holds the loader
            if hasattr(loader, "_shutdown_workers"):
                loader._shutdown_workers()

    def table(self, name: str) -> tuple[Tensor, Tensor]:
        """Features (n, K) and labels (n,) of the centre crops of a split, extracted once."""
        split = self.splits[name]
        images = (id(split.source), id(split.labels))     # two names of one set share its table
        if images not in self.tables:
            every = [(None, index) for index in range(len(split.labels))]
            size = self.cfg.batch_size
            keys = [every[first:first + size] for first in range(0, len(every), size)]
            quiet = ranks_and_rank()[1] > 0
            features, labels = zip(*tqdm(self.read(name, keys), name, len(keys), disable=quiet))
            self.tables[images] = (torch.cat(features), torch.cat(labels))
        return self.tables[images]

    def look_up(self, name: str, keys: Iterable[list]) -> Iterator[tuple[Tensor, Tensor]]:
        """What `read` yields, but of centre crops, from the table, whatever the epoch of a key."""
        features, labels = self.table(name)
        for batch in keys:
            rows = [index for _, index in batch]
            yield features[rows], labels[rows]

# ==== 4. Heads: every learning rate in one training (paper 4.1) ===================================
# SGD without weight decay adds up gradients, so that a learning rate and a factor of the loss are
# the same: one optimizer, and every head's loss times its own rate, train each head as if it were
# alone. Nothing else joins the heads: no clipping, no shared parameter.

class Heads(nn.Module):
    """A linear layer for each learning rate, all from the same first weights."""
    name: ClassVar[str] = "linear"
    hidden: ClassVar[tuple[int, ...]] = ()     # widths of layers in between

    def __init__(self, lrs: Sequence[float], classes: int, width: int, seed: int):
        super().__init__()
        self.register_buffer("lrs", torch.tensor(lrs))
        self.weights = nn.ParameterList()     # of each layer, (R, out, in)
        self.biases = nn.ParameterList()      # of each layer, (R, 1, out)
        generator = rng(seed, "heads")
        for fan_in, fan_out in zip((width, *self.hidden), (*self.hidden, classes)):
            # Choice: N(0, .01) and biases 0, as the release; He's before a ReLU.
            last = len(self.weights) == len(self.hidden)
            std = 0.01 if last else math.sqrt(2 / fan_in)
            first = std * torch.randn(fan_out, fan_in, generator=generator)
            self.weights.append(first.repeat(len(lrs), 1, 1))
            self.biases.append(torch.zeros(len(lrs), 1, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, K) -> logits (B, R, C), all heads in one product."""
        x = x.expand(len(self.lrs), -1, -1)                                       # (R, B, K)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if layer > 0:
                x = F.relu(x)
            x = torch.baddbmm(bias, x, weight.mT)
        return x.transpose(0, 1)

class MLPHeads(Heads):
    """A 3-layer MLP for each learning rate: the nonlinear probe."""
    name = "MLP"
    # Choice: the paper names no widths; these are those of Garrido et al. 2023, whom it follows.
    hidden = (1024, 1024)

def fit(heads: Heads, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]],
        start: int, total: int) -> Iterator[int]:
    """Train on the batches of the steps `start` to `total`; yields the steps done after each."""
    quiet = ranks_and_rank()[1] > 0
    bar = tqdm(batches, "heads", total, initial=start, disable=quiet, mininterval=1)
    for step, (x, y) in enumerate(bar, start):
        # Paper: 4.1, a cosine without warmup; here from 1 (the rates are in the loss) to 0.
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / total))
        logits = heads(x).mT                                                      # (B, C, R)
        labels = y[:, None].expand(-1, len(heads.lrs))                            # (B, R)
        losses = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").mean(0)
        optimizer.zero_grad()
        (losses * heads.lrs).sum().backward()
        optimizer.step()
        yield step + 1

@torch.no_grad()
def accuracy(heads: Heads, x: Tensor, y: Tensor, among: Sequence[int]) -> list[dict[str, float]]:
    """Top-1 and top-5 in percent, of each head, on features (n, K) and labels (n,); only the
    classes `among` can be answered, and label -1 is wrong."""
    classes = heads.biases[-1].shape[-1]
    others = torch.ones(classes, dtype=torch.bool, device=x.device)
    others[list(among)] = False
    top1 = 0
    top5 = 0
    for part, labels in zip(x.split(1024), y.split(1024)):
        logits = heads(part).masked_fill(others, -INF)
        best = logits.topk(min(5, classes)).indices                               # (B, R, 5)
        hits = best == labels[:, None, None]
        top1 = top1 + hits[:, :, 0].sum(0)                                        # (R,)
        top5 = top5 + hits.any(2).sum(0)
    return [{"top1": 100 * a / len(x), "top5": 100 * b / len(x)}
            for a, b in zip(top1.tolist(), top5.tolist())]

class Head(NamedTuple):
    """The chosen linear head: encode(encoder, images, blocks) @ weight.T + bias are its logits."""
    weight: Tensor         # (C, K)
    bias: Tensor           # (C,)
    classes: list[str]
    blocks: int
    digest: str            # identifies the encoder, see frozen_encoder

def load_head(path: str | Path, digest: str) -> Head:
    """The head that an evaluation kept. Raises UserError where there is none, or where it was
    trained on another encoder than that of `digest`."""
    try:
        head = Head(**torch.load(path, map_location="cpu", weights_only=True))
        require(head.digest == digest, f"it is of the encoder {head.digest}, not {digest}")
    except Exception as error:     # pickle, zip, torch and the system raise their own
        raise UserError(f"{path} is missing, damaged or no head of this encoder ({error}): run "
                        "eval_linear.py with the same --checkpoint, with --random-init if this has "
                        "it, without --knn, --mlp, --equivariance") from None
    return head

def linear(frozen: Frozen, classes: list[str], digest: str,
           make: type[Heads] = Heads) -> dict[str, Any]:
    """Train the heads, or continue; returns every rate's accuracy on every split but train, and the
    best rate, whose head is kept. Raises UserError where the state of an unfinished training is
    that of other settings."""
    cfg = frozen.cfg
    rank = ranks_and_rank()[1]
    n = len(frozen.splits["train"].labels)
    batch = min(cfg.batch_size, n)
    per_epoch = n // batch
    lrs = [rate * batch / 256 for rate in cfg.lr]
    heads = make(lrs, len(classes), frozen.width, cfg.seed).to(frozen.device)
    # Choice: momentum .9, no weight decay, as the release.
    optimizer = torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9)

    # Continue where an interrupted training with the same settings stopped; folders may move.
    free = ("data", "checkpoint", "test", "knn", "equivariance", "workers", "out")
    identity = {name: value for name, value in vars(cfg).items() if name not in free}
    identity |= {"heads": heads.name, "encoder": digest, "classes": classes, "images": n}
    start = 0
    path = cfg.beside("state")
    if path.exists() and not cfg.cache:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            there = state["identity"]
            broken = state["broken"]
        except Exception as error:     # pickle, zip, torch and the system raise their own
            raise UserError(f"{path} is damaged ({error}): remove it") from None
        differ = [name for name in identity if there.get(name) != identity[name]]
        require(not differ, f"{path} is of an interrupted evaluation with another "
                f"{' and '.join(differ)}: repeat that, remove the file, or use another --out")
        frozen.broken["train"].update(broken)
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    read = frozen.look_up if cfg.cache else frozen.read
    batches = read("train", training_keys(n, batch, start // per_epoch, cfg))
    with contextlib.closing(batches):     # after an error, too, its loader processes end at once
        for done in fit(heads, optimizer, batches, start, cfg.epochs * per_epoch):
            if done % per_epoch == 0 and rank == 0 and not cfg.cache:
                ser.save_whole(path, dict(step=done, identity=identity, heads=heads.state_dict(),
                                          optimizer=optimizer.state_dict(),
                                          broken=sorted(frozen.broken["train"])))

    rows: list[dict[str, Any]] = [{"rate": rate, "lr": lr} for rate, lr in zip(cfg.lr, lrs)]
    for name, split in frozen.splits.items():
        if name != "train":
            found = accuracy(heads, *frozen.table(name), split.among)
            rows = [row | {name: shares} for row, shares in zip(rows, found)]
    chosen_on = "held-out" if cfg.select_split else "val"
    best = max(rows, key=lambda row: row[chosen_on]["top1"])
    if rank == 0 and not heads.hidden:
        place = rows.index(best)
        weight = heads.weights[0][place].detach().cpu().clone()
        bias = heads.biases[0][place, 0].detach().cpu().clone()
        head = Head(weight, bias, classes, frozen.blocks, digest)
        ser.save_whole(cfg.beside("head"), head._asdict())
    return {"batch": batch, "rates": rows, "chosen_on": chosen_on, "best": best}

# ==== 5. k-NN =====================================================================================
@torch.no_grad()
def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor,
        k: int = 20) -> float:
    """The share of the test features (n, D) that are classified rightly by their k nearest training
    features (m, D), each of which votes for its class with weight exp(s / .07), s the cosine
    similarity. Training features with label -1 are left out."""
    # Choice: 4.1 says 20-NN; features, similarity and weights are those of DINO's eval_knn.
    known = train_labels >= 0
    require(bool(known.any()), "k-NN: no training image of these classes can be read")
    train = F.normalize(train[known], dim=1)
    train_labels = train_labels[known]
    test = F.normalize(test, dim=1)
    size = max(1, 2 ** 28 // len(train))     # blocks of similarities of at most 1 GB
    right = 0
    for x, y in zip(test.split(size), test_labels.split(size)):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))              # (B, k)
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)     # (B, labels)
        votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp())
        right += (votes.argmax(1) == y).sum().item()
    return right / len(test)

def knn_splits(frozen: Frozen) -> dict[str, dict[str, float]]:
    """k-NN of val and the test sets by the last [CLS]; the neighbours are the training images, held
    out or not, of the classes that a set is scored among."""
    width = frozen.encoder.dim
    sources = [frozen.table(name) for name in ("train", "held-out") if name in frozen.splits]
    bank = torch.cat([features[:, -width:] for features, _ in sources])
    labels = torch.cat([column for _, column in sources])
    found = {}
    for name, split in frozen.splits.items():
        if name not in ("train", "held-out"):
            near = torch.isin(labels, torch.tensor(split.among).to(labels))
            features, truth = frozen.table(name)
            share = knn(bank[near], labels[near], features[:, -width:], truth)
            found[name] = {"top1": 100 * share}
    return found

# ==== 6. Equivariance: do the tokens move as the image moves? (paper A.2) =========================
# The paper's score is a mean cosine. It rises for any map when all tokens grow alike, and it is 1
# where they are equal and nothing is left of the map. Hence two more measures.
# Choice: its "final representation" is here the patch tokens under the final LayerNorm, compared
# token by token; it is measured for one element at a time, and after every block.

@torch.no_grad()
def equivariances(encoder: ViT, images: Tensor, layers: Sequence[int],
                  element: str) -> dict[int, dict[str, float]]:
    """For each of the blocks `layers`, how its token maps f(x) move; the last with the final
    LayerNorm. images: (n, 3, S, S) normalised; element of G: "rot90", "hflip" or "scale".

    score      mean cos(rho_g f(x), f(rho_g x)) for g = g2 g1^-1, where g1, g2 are drawn (paper A.2)
    retrieval  share of the tokens of rho_h f(x) whose most similar token, among all of f(rho_h x)
               of 32 images, is their counterpart
    chance     of retrieval: 1 / (32 H W)
    centred    mean cos(rho_h f(x), f(rho_h x)) after subtracting each side's mean token; chance: 0

    g may be the identity, as in the paper; h is not: it turns by 90, 180 and 270 degrees in turn,
    or flips. For "scale" h is g, and both resize the image to the grid of g2, one for each 32. That
    grid may be the image's own, where nothing moves and all measures are 1: never at 14 x 14, but
    at 8 x 8 for one 32 of 512."""
    measures = ("score", "retrieval", "chance", "centred")
    sums = {layer: dict.fromkeys(measures, 0.0) for layer in layers}
    for part, x in enumerate(images.split(32)):
        g1, g2 = [ser.sample_geometry(len(x), encoder.grid, elements=(element,),
                                      generator=rng(element, part, view)) for view in (1, 2)]
        g = ser.relative(g2, g1)
        h = g
        if element == "hflip":
            h = g._replace(flip=torch.ones_like(g.flip))
        elif element == "rot90":
            h = g._replace(turns=1 + torch.arange(len(x)) % 3)
        gx = ser.rho(g, x, encoder.patch_size)
        hx = ser.rho(h, x, encoder.patch_size)
        encoded = encoder([x, gx, hx], layers)
        for layer in layers:
            maps = [out.maps[layer] for out in encoded]
            if layer == encoder.depth:
                maps = [encoder.norm(z.movedim(1, -1)).movedim(-1, 1) for z in maps]
            f_x, f_gx, f_hx = maps                                                # (B, D, H, W)
            score = F.cosine_similarity(ser.rho(g, f_x), f_gx).mean()
            z = ser.rho(h, f_x).flatten(2).mT                                     # (B, N, D)
            z_prime = f_hx.flatten(2).mT
            retrieval = ser.retrieval(z, z_prime)
            chance = 1 / (z.shape[0] * z.shape[1])
            z = z - z.mean((0, 1))
            z_prime = z_prime - z_prime.mean((0, 1))
            centred = F.cosine_similarity(z, z_prime, dim=-1).mean()
            for name, value in zip(measures, (score, retrieval, chance, centred)):
                sums[layer][name] += float(value) * len(x) / len(images)
    return sums

def equivariance(encoder: ViT, images: Tensor, layer: int, element: str) -> dict[str, float]:
    """`equivariances` after one block."""
    return equivariances(encoder, images, [layer], element)[layer]

def compare(encoders: dict[str, ViT], crops: Crops, layers: Sequence[int]) -> dict[str, Any]:
    """The equivariance of the encoders, by name, on the same 512 images (Choice), spread over
    `crops`; those that cannot be read are left out and counted. Every rank measures it alike.
    Raises UserError where no image is left."""
    n = len(crops.split.labels)
    read = [crops[None, place] for place in torch.linspace(0, n - 1, min(512, n)).long().tolist()]
    pixels = [image for image, label in read if label >= 0]
    require(len(pixels) > 0, f"none of {len(read)} images of val can be read: repair them")
    device = next(iter(encoders.values())).cls_token.device
    images = ser.normalise(torch.stack(pixels).to(device) / 255)
    rows = []
    for element in ("rot90", "hflip", "scale"):
        found = {name: equivariances(encoder, images, layers, element)
                 for name, encoder in encoders.items()}
        for layer in layers:
            measured = {name: found[name][layer] for name in encoders}
            rows.append({"element": element, "block": layer, **measured})
    return {"images": len(pixels), "unreadable": len(read) - len(pixels), "rows": rows}

# ==== 7. Evaluation: a checkpoint in, a result out ================================================
def untrained(seed: int, shape: dict[str, Any]) -> ViT:
    """The encoder with the random weights of this seed, as ser.build draws them."""
    torch.manual_seed(seed)
    return ViT(**shape).eval()

def frozen_encoder(cfg: Settings) -> tuple[ViT, int, str]:
    """The encoder, the step of its checkpoint, and a digest that identifies it, on all ranks. With
    random_init it has the random weights of the run's seed. Raises UserError for what is no
    checkpoint, and where a training has replaced it meanwhile."""
    path = Path(cfg.checkpoint)
    digests = [file_digest(path)]
    state = ser.load_checkpoint(path)
    if cfg.random_init:
        encoder = untrained(state["config"]["seed"], state["shape"])
    else:
        encoder = ser.load_encoder(path)
    digests.append(file_digest(path))
    ranks, _ = ranks_and_rank()
    found = [digests] * ranks
    if ranks > 1:
        dist.all_gather_object(found, digests)
    require(all(one == [digests[0]] * 2 for one in found),
            f"{path} was replaced while it was read: try again, or evaluate a copy")
    if cfg.random_init:
        return encoder, 0, digests[0] + "-random-init"
    return encoder, state["step"], digests[0]

def file_digest(path: Path) -> str:
    """The beginning of the SHA-256 of a file; of nothing, where there is none."""
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(content).hexdigest()[:16]

def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write beside `path`, then rename: a kill leaves the old file or the new one, whole."""
    path.with_suffix(".tmp").write_text(json.dumps(found, indent=1) + "\n")
    os.replace(path.with_suffix(".tmp"), path)

def evaluate(cfg: Settings, collect: Callable = collect, heads: type[Heads] = Heads,
             crops: type[Crops] = Crops) -> dict[str, Any]:
    """Evaluate a checkpoint; returns what rank 0 writes to cfg.result. collect, heads, crops: those
    of another protocol. Raises UserError, on all ranks."""
    begun = time.perf_counter()
    ser.check_ranges(cfg)
    device, rank, ranks = ser.setup()
    encoder, step, digest = frozen_encoder(cfg)
    check_out(cfg, digest)
    size = encoder.shape["image_size"]
    classes, splits = collect(cfg, size)

    # As the table at the top says. With a cache, or drawn images, k-NN costs next to nothing.
    trains = cfg.cache or cfg.mlp or not (cfg.knn or cfg.equivariance)
    votes = cfg.cache or cfg.knn or not cfg.data
    heads = MLPHeads if cfg.mlp else heads
    # The last blocks after which there is a [CLS]; k-NN reads the last alone.
    blocks = min(4, encoder.depth - encoder.cls_layer) if trains else 1
    protocol = f"{heads.name} heads on the [CLS] of the last {blocks} blocks, {cfg.epochs} epochs"
    if blocks < 4:     # the release reads a patch token in place of a [CLS] that is not there
        protocol += f" (of 4: [CLS] enters after block {encoder.cls_layer} of {encoder.depth})"
    if cfg.cache:
        protocol += ", ONE CENTRE CROP, a first look, not the paper's protocol"
    result: dict[str, Any] = {
        "checkpoint": cfg.checkpoint, "sha256": digest, "step": step,
        "encoder": "untrained" if cfg.random_init else "trained",
        "data": cfg.data or "drawn images", "settings": vars(cfg), "classes": len(classes),
        "images": {name: len(split.labels) for name, split in splits.items()},
        "notes": [split.note for split in splits.values() if split.note],
        "protocol": protocol if trains else "no heads trained",
        "chance": {name: {"top1": 100 / len(split.among), "top5": min(100, 500 / len(split.among))}
                   for name, split in splits.items() if name != "train"}}

    frozen = Frozen(encoder.to(device), blocks, cfg, splits, crops)
    if trains:
        result["linear"] = linear(frozen, classes, digest, heads)
    if votes:
        result["knn"] = {"k": 20, **knn_splits(frozen)}
    if cfg.equivariance or not cfg.data:
        encoders = {"untrained": encoder}     # so it is with random_init
        if not cfg.random_init:
            before, _, _ = frozen_encoder(dataclasses.replace(cfg, random_init=True))
            encoders = {"untrained": before.to(device), "trained": encoder}
            if votes:
                result["knn_untrained"] = knn_splits(Frozen(before, 1, cfg, splits, crops))
        layers = range(1, encoder.depth + 1) if cfg.equivariance else [max(1, encoder.cls_layer)]
        result["equivariance"] = compare(encoders, crops(splits["val"], size, cfg.seed), layers)
    result |= {"broken": {name: sorted(found) for name, found in frozen.broken.items() if found},
               "ranks": ranks, "minutes": (time.perf_counter() - begun) / 60}
    if rank == 0:
        write_json(cfg.result, result)
        if trains and not cfg.cache:     # with --cache there is none, or an earlier run's
            cfg.beside("state").unlink(missing_ok=True)
    return result

# ==== 8. Command line: the result as a person reads it ============================================
def aligned(rows: dict[str, Sequence[str]]) -> list[str]:
    """A line for each row, given as its title and its cells."""
    lines = []
    for title, cells in rows.items():
        lines.append(f"  {title:28}" + "".join(f" {cell:>17}" for cell in cells))
    return lines

def report(found: dict[str, Any]) -> str:
    """The equivariance for the screen: a row per element and block, untrained -> trained."""
    encoders = [name for name in ("untrained", "trained") if name in found["rows"][0]]
    rows = {"token maps": ["retrieval", "cosine (A.2)", "cosine, centred", "chance: retrieval"]}
    for row in found["rows"]:
        cells = []
        for measure in ("retrieval", "score", "centred"):
            cells.append(" -> ".join(f"{row[name][measure]:.3f}" for name in encoders))
        cells.append(f"{row[encoders[0]]['chance']:.5f}")
        rows[f"{row['element']}, after block {row['block']}"] = cells
    lines = [f"{' -> '.join(encoders)}, {found['images']} images of val", *aligned(rows),
             "  The cosine alone proves nothing: it is also 1 where all tokens are equal."]
    if found["unreadable"]:
        lines.append(f"  {found['unreadable']} images cannot be read and are left out.")
    return "\n".join(lines)

def table(result: dict[str, Any]) -> str:
    """Accuracy for the screen: a row per learning rate, a column per set, chance below, notes."""
    found = {}
    notes = list(result["notes"])
    if "linear" in result:
        rows, best, on = (result["linear"][key] for key in ("rates", "best", "chosen_on"))
        for row in rows:
            found[f"rate {row['rate']:g}{'  (best)' if row == best else ''}"] = row
        where = "held-out images, which the heads did not learn from"
        if on == "val":
            where = "val itself, which flatters it: --select-split 0.1 chooses on training images"
        tried = [row["rate"] for row in rows]
        if len(tried) > 1:
            notes.append(f"the best rate was chosen on {where}")
        if len(tried) > 1 and best["rate"] in (min(tried), max(tried)):
            notes.append("it lies at the end of the sweep: try rates beyond with --lr")
    titles = {"knn": "20-NN", "knn_untrained": "20-NN, untrained", "chance": "chance"}
    found |= {title: result[key] for key, title in titles.items() if key in result}
    sets = list(result["chance"])     # what is scored
    rows = {"top-1 / top-5, %": sets}
    for title, row in found.items():     # k-NN has no top-5, and nothing on held-out images
        shares = [row.get(name, {}).values() for name in sets]
        rows[title] = [" / ".join(map("{:.2f}".format, share)) for share in shares]
    for name, broken in result["broken"].items():
        so = "teach nothing" if name == "train" else "count as wrong"
        notes.append(f"{len(broken)} broken images in {name}, for example {broken[0]}: they {so}")
    return "\n".join([result["protocol"], *aligned(rows), *(f"  {note}" for note in notes)])

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings, repeatable=("--test",))
        result = evaluate(cfg)
        if ranks_and_rank()[1] > 0:
            return
        images = ", ".join(f"{n} {name}" for name, n in result["images"].items())
        print(f"\n{result['checkpoint']}, step {result['step']}, {result['encoder']}\n"
              f"{result['data']}: {result['classes']} classes, {images}")
        if "equivariance" in result:
            print(f"\n{report(result['equivariance'])}")
        if "linear" in result or "knn" in result:
            print(f"\n{table(result)}")
        print(f"  {result['minutes']:.1f} minutes, written to {cfg.result}")

    return ser.guard("eval_linear.py", work)

if __name__ == "__main__":
    ser.leave(main())
