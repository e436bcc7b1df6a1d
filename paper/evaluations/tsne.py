"""t-SNE of 20 random classes (the paper's A.6 figures), with numbers beside the pictures.

The paper shows the features of 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur, for
MoCo-v3 and MoCo-v3 + SER, and sees "clearer qualitative separation for several classes". It prints
no number, and layouts of t-SNE cannot be compared by eye; so this measures the features themselves,
over ten draws of classes: the silhouette (cosine; 1: classes far apart, 0: they overlap), and the
20-NN purity, the share of an image's 20 nearest that are of its class (at chance about 1 / the
number of classes, for classes of one size).

    python -m paper.evaluations.tsne --data /imagenet/val \\
        --checkpoint runs/moco/last.pt runs/ser/last.pt --label MoCo-v3 "MoCo-v3 + SER"
    ... --data /imagenet-c/blur/defocus_blur/3 --ready --out runs/tsne-blur.png
    torchrun --nproc_per_node=8 -m paper.evaluations.tsne ...        ranks share the encoding

Writes tsne.png, of the first draw, and tsne.json beside the first checkpoint. The same classes and
images for all checkpoints. Axes: n images of a draw, D width of the encoder.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, ClassVar, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import eval_linear
import ser
from eval_linear import Frozen, Split
from paper.evaluations.output import check_out
from ser import INF, TINY, ViT, require, rng, setting

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a comparison."""
    data: str = setting("", 0, 0, "folder of CLASS/..., as val, or a severity of a corruption")
    checkpoint: tuple[str, ...] = setting(("runs/ser/last.pt",), 0, 0, "two or more last.pt")
    label: tuple[str, ...] = setting(("",), 0, 0, "their names; none: the names of their folders")
    random_init: bool = setting(False, 0, 1, "an encoder with random weights beside them")
    ready: bool = setting(False, 0, 1, "the images are cropped already, as ImageNet-C's")
    classes: int = setting(20, 2, INF, "classes of a draw (paper: 20)")
    # Choice: the paper does not say how many images; 50 are all that val has of a class.
    per_class: int = setting(50, 2, INF, "images of a class, at most")
    draws: int = setting(10, 1, INF, "draws of classes and images for the numbers")
    neighbors: int = setting(20, 1, INF, "neighbours of the purity")
    # Choice: the paper names neither perplexity nor metric: scikit-learn's 30, and the cosine.
    perplexity: float = setting(30.0, TINY, INF, "of t-SNE")
    batch_size: int = setting(256, 1, INF, "images per pass of the encoder, over all ranks")
    seed: int = setting(0, 0, 2 ** 32 - 1, "seed of the draws and of t-SNE")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the main process loads")
    out: str = setting("", 0, 0, "the PNG; none: tsne.png beside the first checkpoint")
    drawn: ClassVar[dict[str, Any]] = {}
    program: ClassVar[str] = "-m paper.evaluations.tsne"

def sample_classes(split: Split, cfg: Settings, number: int) -> Split:
    """The images of draw `number`: cfg.classes classes, and up to cfg.per_class images of each."""
    generator = rng(cfg.seed, "t-SNE", number)
    present = split.labels.unique()
    classes = present[torch.randperm(len(present), generator=generator)[:cfg.classes]]
    rows = []
    for label in classes.sort().values:
        own = (split.labels == label).nonzero().flatten()
        rows.append(own[torch.randperm(len(own), generator=generator)[:cfg.per_class]])
    chosen = torch.cat(rows)
    source = [split.source[i] for i in chosen.tolist()]
    return Split(source, split.labels[chosen], classes.tolist(), ready=cfg.ready)

def purity(features: Tensor, labels: Tensor, k: int) -> float:
    """The share of the k nearest others (cosine) of features (n, D) that have the same label, the
    mean over images."""
    z = F.normalize(features, dim=1)
    similarity = z @ z.T
    similarity.fill_diagonal_(-INF)     # nobody is a neighbour of oneself
    nearest = similarity.topk(k).indices                                          # (n, k)
    return (labels[nearest] == labels[:, None]).float().mean().item()

def silhouette(features: Tensor, labels: Tensor) -> float:
    """The mean silhouette of features (n, D), by the cosine distance."""
    from sklearn.metrics import silhouette_score
    return float(silhouette_score(features.numpy(), labels.numpy(), metric="cosine"))

def embed(features: Tensor, cfg: Settings) -> Any:
    """(n, D) -> an array (n, 2), by t-SNE."""
    from sklearn.manifold import TSNE
    method = TSNE(n_components=2, init="pca", metric="cosine", perplexity=cfg.perplexity,
                  random_state=cfg.seed)
    return method.fit_transform(features.numpy())

class Measured(NamedTuple):
    """What is measured of an encoder."""
    numbers: dict[str, Any]     # over the samples
    points: Any                 # array (n, 2), t-SNE of the first sample
    labels: Any                 # array (n,), its classes

def measure(encoder: ViT, samples: dict[str, Split], cfg: Settings) -> Measured:
    """Encode the samples of classes and compare their features."""
    # Choice: features are the final LayerNorm of the last [CLS]; the paper does not say.
    frozen = Frozen(encoder, 1, cfg, samples)
    tables = []
    for name in samples:
        features, labels = (column.cpu() for column in frozen.table(name))
        readable = labels >= 0
        tables.append((features[readable], labels[readable]))
    values = {"silhouette": [silhouette(*pair) for pair in tables],
              "purity": [purity(*pair, cfg.neighbors) for pair in tables]}
    numbers = {name: {"mean": mean(each), "std": pstdev(each), "values": each}
               for name, each in values.items()}
    features, labels = tables[0]
    broken = sorted(set().union(*frozen.broken.values()))
    return Measured(numbers | {"broken": broken}, embed(features, cfg), labels.numpy())

def save_picture(path: Path, panels: dict[str, tuple[Any, Any]]) -> None:
    """The picture: a panel per title, with points (n, 2) and labels (n,), a colour per class."""
    import numpy
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4 * len(panels), 4.4), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (title, (points, labels)) in zip(every, panels.items()):
        numbers = numpy.unique(labels, return_inverse=True)[1]
        panel.scatter(points[:, 0], points[:, 1], c=colormaps["tab20"](numbers % 20), s=6,
                      linewidths=0)
        panel.set_title(title, fontsize=9)
        panel.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=100)

def load_encoders(checkpoints: Sequence[str], names: Sequence[str],
                  untrained: bool) -> tuple[dict[str, ViT], dict[str, str]]:
    """The encoders on the device, by name, and the digests of the checkpoints; with `untrained`,
    one with the random weights of the first run's seed in front. Raises UserError."""
    device = ser.setup()[0]
    if names == ("",):
        names = [Path(path).resolve().parent.name for path in checkpoints]
    given = " ".join(names)
    require(len(names) == len(checkpoints),
            f"--label {given}: {len(checkpoints)} checkpoints need as many names")
    require(len({"untrained", *names}) == len(names) + 1,
            f"--label {given}: names must differ from each other and from 'untrained'")
    encoders = {}
    digests = {}
    if untrained:
        first = eval_linear.Settings(checkpoint=checkpoints[0], random_init=True)
        encoders["untrained"] = eval_linear.frozen_encoder(first)[0].to(device)
    for name, path in zip(names, checkpoints):
        encoder, _, digests[name] = eval_linear.frozen_encoder(
            eval_linear.Settings(checkpoint=path))
        encoders[name] = encoder.to(device)
    return encoders, digests

def check_ready(cfg: Settings, split: Split) -> None:
    """Raise UserError where the first image that can be read is ImageNet-C's and --ready is not
    given: enlarged and cropped once more, it would be another image."""
    size = None
    for path in split.source:
        with contextlib.suppress(Exception):     # decoders raise what they like
            size = tuple(ser.read_image(path).shape[1:])
            break
    require(cfg.ready or size != (224, 224),
            f"--data {cfg.data}: images of 224 x 224, as ImageNet-C's: add --ready")

def compare(cfg: Settings) -> dict[str, Any]:
    """Encode, measure, draw; returns what rank 0 writes. Raises UserError, on all ranks."""
    ser.check_ranges(cfg)
    require(cfg.data != "", "--data: which class folders? give val of ImageNet, or a corruption's")
    require(len(cfg.checkpoint) + cfg.random_init > 1,
            "--checkpoint: a comparison takes two; or add --random-init")
    picture = Path(cfg.out or Path(cfg.checkpoint[0]).with_name("tsne.png"))
    for package in ("matplotlib", "sklearn"):
        require(importlib.util.find_spec(package) is not None,
                f"t-SNE needs {package}: pip install -r paper/requirements.txt")
    encoders, digests = load_encoders(cfg.checkpoint, cfg.label, cfg.random_init)
    check_out(picture, ".png", cfg.program)
    check_out(picture.with_suffix(".json"), ".json", cfg.program, list(digests.values()), vars(cfg))
    inside = os.path.join(cfg.data, "val")
    folder = inside if os.path.isdir(inside) else cfg.data
    classes, split = eval_linear.labelled("--data", folder)
    require(len(classes) >= cfg.classes,
            f"--classes {cfg.classes}: {folder} has {len(classes)}: try --classes {len(classes)}")
    check_ready(cfg, split)
    samples = {f"draw {k}": sample_classes(split, cfg, k) for k in range(cfg.draws)}

    smallest = min(split.labels.bincount()[split.labels.unique()].tolist())
    require(cfg.neighbors < min(smallest, cfg.per_class), f"--neighbors {cfg.neighbors}: a class "
            f"has {min(smallest, cfg.per_class)} images, one of them itself: take fewer")
    fewest = min(len(sample.labels) for sample in samples.values())
    require(cfg.perplexity < fewest - 3,     # a few of them may be broken
            f"--perplexity {cfg.perplexity:g}: a draw has {fewest} images: take less")

    found = {}
    panels = {}
    for name, encoder in encoders.items():
        measured = measure(encoder, samples, cfg)
        numbers = measured.numbers
        found[name] = {"sha256": digests.get(name, ""), **numbers}
        title = (f"{name}, mean of {cfg.draws} draws: silhouette "
                 f"{numbers['silhouette']['mean']:.3f}, "
                 f"purity {numbers['purity']['mean']:.3f}")
        panels[title] = (measured.points, measured.labels)
    result = {"program": cfg.program, "sha256": list(digests.values()), "data": folder,
              "settings": vars(cfg), "encoders": found,
              "picture": str(picture)}
    if ser.ranks_and_rank()[1] == 0:
        save_picture(picture, panels)
        eval_linear.write_json(picture.with_suffix(".json"), result)
    return result

def table(result: dict[str, Any]) -> str:
    """The numbers for the screen: a row per encoder."""
    cfg = result["settings"]
    lines = [f"{result['data']}, {cfg['draws']} draws of {cfg['classes']} classes, up to "
             f"{cfg['per_class']} images of each, {'whole' if cfg['ready'] else 'centre crops'}: "
             "mean ± standard deviation over draws",
             f"{'':24}{'silhouette':>18}{str(cfg['neighbors']) + '-NN purity':>18}"]
    for name, scores in result["encoders"].items():
        line = f"{name:24}"
        for quantity in ("silhouette", "purity"):
            cell = f"{scores[quantity]['mean']:.4f} ± {scores[quantity]['std']:.4f}"
            line += f"{cell:>18}"
        lines.append(line)
        broken = scores["broken"]
        if broken:
            lines.append(f"  {len(broken)} broken images, as {broken[0]}: left out")
    lines.append(f"{'chance, about':24}{'-':>18}{1 / cfg['classes']:18.4f}")
    lines.append("The paper has no number: it compares MoCo-v3 and MoCo-v3 + SER by eye.")
    return "\n".join([*lines, result["picture"]])

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    def work() -> None:
        result = compare(ser.parse(argv, Settings))
        if ser.ranks_and_rank()[1] == 0:
            print(table(result))

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())
