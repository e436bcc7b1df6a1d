"""Transformation prediction by layer (paper A.2): can frozen features tell how an image was moved?

The paper's accuracies in percent, after layers 1, 3, 6, 9, 12 of MoCo-v3 + the method of the row:

    rotation           AugSelf 81.55 96.71 99.71 99.13 68.74
                       STL     79.56 92.80 99.46 99.76 98.08
                       SER     79.97 93.34 99.52 99.73 96.59
    flip               AugSelf 63.24 85.66 96.48 91.51 62.68
                       STL     62.91 82.09 88.83 97.22 83.27
                       SER     63.02 78.68 92.87 96.59 75.95

    python -m paper.evaluations.transformations --data /imagenet --checkpoint runs/ser/last.pt
    python -m paper.evaluations.transformations --data /imagenet --single
    torchrun --nproc_per_node=8 -m paper.evaluations.transformations ...    ranks share the encoding

A probe sees the features of an image x and of g x, and says which g it was: a turn by 0, 90, 180 or
270 degrees; or nothing, or the horizontal flip. Where g does nothing, the two halves of a pair are
equal bit for bit, so that the flip probe has only to see that something changed; with `--single`
there is no such shortcut. Beside stands an encoder with the random weights of the run's seed. The
paper predicts "rotation/flip labels, following Garrido et al.", and does not say whether the probe
sees a pair, nor which token, probe or images. Writes transformations.json beside the checkpoint.
Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/..., of the same classes, whose labels play no
part. Axes: n images, V = 5 versions of an image, L layers, D width.
"""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eval_linear
import ser
from eval_linear import Frozen, Split
from paper.evaluations.output import check_out
from ser import INF, TINY, ViT, require, rng, setting

TASKS = {"rotation": (0, 1, 2, 3), "flip": (0, 4)}     # the versions that a probe tells apart
VERSIONS = 5                                           # turns by 0, 90, 180, 270 degrees; the flip
PAPER = {"rotation": {"AugSelf": (81.55, 96.71, 99.71, 99.13, 68.74),
                      "STL": (79.56, 92.80, 99.46, 99.76, 98.08),
                      "SER": (79.97, 93.34, 99.52, 99.73, 96.59)},
         "flip": {"AugSelf": (63.24, 85.66, 96.48, 91.51, 62.68),
                  "STL": (62.91, 82.09, 88.83, 97.22, 83.27),
                  "SER": (63.02, 78.68, 92.87, 96.59, 75.95)}}
PAPER_LAYERS = (1, 3, 6, 9, 12)

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a prediction."""
    data: str = setting("", 0, 0, "folder with train/CLASS/... and val/CLASS/...")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run")
    layers: tuple[int, ...] = setting(PAPER_LAYERS, 1, INF, "blocks (paper: 1 3 6 9 12)")
    # Choice: a pair. 97% for the flip of one photograph is out of reach: few look wrong mirrored.
    single: bool = setting(False, 0, 1, "the probe sees g x alone, not the pair of x and g x")
    # Choice: so many images, and 10 epochs, where Garrido et al. have 50 of all.
    images: int = setting(20000, 2, INF, "training images, drawn from train")
    test_images: int = setting(10000, 1, INF, "test images, drawn from val")
    # Choice: Garrido et al.'s probe, two hidden layers of 1024, and their Adam at 1e-3.
    hidden: int = setting(1024, 1, INF, "width of the probe's two hidden layers")
    lr: float = setting(1e-3, TINY, INF, "learning rate of Adam")
    epochs: int = setting(10, 1, INF, "passes of the probe over the training images")
    probe_batch: int = setting(256, 1, INF, "pairs per step of the probe")
    batch_size: int = setting(256, 1, INF, "images per pass, in five versions, over all ranks")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of images, probes and order")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the main process loads")
    out: str = setting("", 0, 0, "file of the result; none: transformations.json, -single.json")
    drawn: ClassVar[dict[str, Any]] = {}
    program: ClassVar[str] = "-m paper.evaluations.transformations"

    @property
    def result(self) -> Path:
        """Where the result goes."""
        name = "transformations-single.json" if self.single else "transformations.json"
        return Path(self.out) if self.out else Path(self.checkpoint).with_name(name)

class MovedTokens(nn.Module):
    """Mean patch tokens after each of the layers, of an image and of its moved versions, posing as
    an encoder: eval_linear.Frozen reads cls_token, dim, shape, and last_cls(x, blocks), of shape
    (B, blocks * D); here `blocks` is V * L."""

    def __init__(self, encoder: ViT, layers: Sequence[int]):
        super().__init__()
        self.encoder = encoder
        self.layers = layers
        self.cls_token = encoder.cls_token     # tells the device
        self.dim = encoder.dim
        self.shape = encoder.shape

    def last_cls(self, x: Tensor, _blocks: int) -> Tensor:
        """Normalised images (B, 3, S, S) -> (B, V * L * D), in one pass of the encoder."""
        # Exact permutations of the pixels of one centre crop, without jitter.
        versions = [torch.rot90(x, turns, (-2, -1)) for turns in range(4)] + [x.flip(-1)]
        encoded = self.encoder(versions, self.layers)
        # Choice: the mean patch token, which every method has after every block; SER's [CLS] enters
        # after block 3. After the last block, too, without the final LayerNorm: the probe
        # standardises its features.
        means = [part.maps[layer].float().mean((2, 3)) for part in encoded for layer in self.layers]
        return torch.cat(means, dim=1)

def batches(n: int, answers: int, cfg: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """(image, answer) of each step of the probe: every image with every answer, shuffled."""
    for epoch in range(cfg.epochs):
        order = torch.randperm(n * answers, generator=rng(cfg.seed, "probe", epoch))
        for rows in order.split(cfg.probe_batch):
            yield rows // answers, rows % answers

def probe(train: Tensor, test: Tensor, versions: Sequence[int], cfg: Settings) -> float:
    """The accuracy in percent, on test (m, V, D), of an MLP trained on train (n, V, D) to tell
    `versions` from each other, by the pair of version 0 and one of them, or by that one alone."""
    mean = train.mean((0, 1))     # (D,), over images and versions
    std = train.std((0, 1)).clamp_min(1e-6)
    train = (train - mean) / std
    test = (test - mean) / std
    version_of = torch.tensor(versions)     # the answers are 0, 1, ...

    def inputs(features: Tensor, image: Tensor, answer: Tensor) -> Tensor:
        second = features[image, version_of[answer]]
        return second if cfg.single else torch.cat([features[image, 0], second], dim=1)

    torch.manual_seed(ser.seed_of(cfg.seed, "probe"))
    width = train.shape[-1] if cfg.single else 2 * train.shape[-1]
    mlp = nn.Sequential(nn.Linear(width, cfg.hidden), nn.ReLU(),
                        nn.Linear(cfg.hidden, cfg.hidden), nn.ReLU(),
                        nn.Linear(cfg.hidden, len(versions))).to(train.device)
    optimizer = torch.optim.Adam(mlp.parameters(), cfg.lr)
    for image, answer in batches(len(train), len(versions), cfg):
        logits = mlp(inputs(train, image, answer))
        loss = F.cross_entropy(logits, answer.to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = 0
    with torch.no_grad():
        for image in torch.arange(len(test)).split(1024):
            for number in range(len(versions)):
                answer = torch.full_like(image, number)
                right += (mlp(inputs(test, image, answer)).argmax(1) == number).sum().item()
    return 100 * right / (len(test) * len(versions))

def some(split: Split, n: int, seed: int) -> Split:
    """n images drawn from a split, or all."""
    rows = torch.randperm(len(split.labels), generator=rng(seed, "images"))[:n]
    if isinstance(split.source, Tensor):
        return split._replace(source=split.source[rows], labels=split.labels[rows])
    source = [split.source[row] for row in rows.tolist()]
    return split._replace(source=source, labels=split.labels[rows])

def predict(encoder: ViT, splits: dict[str, Split], cfg: Settings) -> dict[str, Any]:
    """The accuracies of both tasks after every layer, and the broken files."""
    shape = (VERSIONS, len(cfg.layers), encoder.dim)
    frozen = Frozen(MovedTokens(encoder, cfg.layers), VERSIONS * len(cfg.layers), cfg, splits)
    tables = {}
    for name in splits:
        features, labels = frozen.table(name)
        tables[name] = features[labels >= 0].unflatten(1, shape)     # (n, V, L, D), of whole files
    found: dict[str, Any] = {}
    for task, versions in TASKS.items():
        found[task] = [probe(tables["train"][:, :, i], tables["val"][:, :, i], versions, cfg)
                       for i in range(len(cfg.layers))]
    broken = sorted(set().union(*frozen.broken.values()))
    return found | {"broken": broken}

def evaluate(cfg: Settings) -> dict[str, Any]:
    """Measure a checkpoint, and an encoder with random weights of the seed in it; returns what rank
    0 writes. Raises UserError, on all ranks."""
    ser.check_ranges(cfg)
    require(cfg.data != "", "--data: which images? give a folder with train/CLASS and val/CLASS")
    device, rank, _ = ser.setup()
    trained, step, digest = eval_linear.frozen_encoder(
        eval_linear.Settings(checkpoint=cfg.checkpoint))
    check_out(cfg.result, ".json", cfg.program, digest, vars(cfg))
    depth = trained.depth
    require(max(cfg.layers) <= depth, f"--layers {' '.join(map(str, cfg.layers))}: the encoder has "
            f"{depth} blocks: try --layers {' '.join(map(str, range(1, depth + 1)))}")
    beginning = eval_linear.Settings(checkpoint=cfg.checkpoint, random_init=True)
    untrained, _, _ = eval_linear.frozen_encoder(beginning)
    _, splits = eval_linear.collect(eval_linear.Settings(data=cfg.data, test=()), 0)
    chosen = {"train": some(splits["train"], cfg.images, cfg.seed),
              "val": some(splits["val"], cfg.test_images, cfg.seed)}
    result = {"program": cfg.program, "checkpoint": cfg.checkpoint, "sha256": digest,
              "step": step, "settings": vars(cfg),
              "images": {name: len(split.labels) for name, split in chosen.items()},
              "trained": predict(trained.to(device), chosen, cfg),
              "untrained": predict(untrained.to(device), chosen, cfg)}
    if rank == 0:
        eval_linear.write_json(cfg.result, result)
    return result

def table(result: dict[str, Any]) -> str:
    """The result for the screen, the paper's rows below ours."""
    cfg = result["settings"]
    seen = "g x alone" if cfg["single"] else "pairs of x and g x"
    lines = [f"{result['checkpoint']}, step {result['step']}: {seen}, {result['images']['train']} "
             f"training and {result['images']['val']} test images"]
    for task, versions in TASKS.items():
        lines.append(f"{task + ', %':28}" + "".join(f"{f'layer {n}':>10}" for n in cfg["layers"]))
        rows = {name: result[name][task] for name in ("trained", "untrained")}
        rows["chance"] = [100 / len(versions)] * len(cfg["layers"])
        if tuple(cfg["layers"]) == PAPER_LAYERS:
            rows |= {f"paper, MoCo-v3 + {name}": row for name, row in PAPER[task].items()}
        for name, row in rows.items():
            lines.append(f"  {name:26}" + "".join(f"{value:10.2f}" for value in row))
    broken = result["trained"]["broken"]
    if broken:
        lines.append(f"  {len(broken)} broken images, as {broken[0]}: left out")
    return "\n".join(lines)

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings)
        result = evaluate(cfg)
        if ser.ranks_and_rank()[1] == 0:
            print(f"{table(result)}\n{cfg.result}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())
