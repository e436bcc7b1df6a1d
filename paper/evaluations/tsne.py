"""t-SNE of 20 random classes (the paper's A.5 figures), with numbers beside the pictures.

The paper shows the features of 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur, for
MoCo-v3 and MoCo-v3 + SER, and sees "clearer qualitative separation for several classes". It prints
no number, and layouts of t-SNE cannot be compared by eye; so this measures the features themselves,
over ten draws of classes: the silhouette (cosine; 1: classes far apart, 0: they overlap), and the
20-NN purity, the share of the 20 nearest images that are of an image's class (1 / 20 at chance).

    python -m paper.evaluations.tsne --data /imagenet/val \\
        --checkpoint runs/moco/last.pt runs/ser/last.pt --label MoCo-v3 "MoCo-v3 + SER"
    python -m paper.evaluations.tsne --data /imagenet-c/blur/defocus_blur/3 --ready --checkpoint A B
    torchrun --nproc_per_node=8 -m paper.evaluations.tsne ...        ranks share the encoding

Writes tsne.png, of the first draw, and tsne.json beside the first checkpoint. The same classes and
images for all checkpoints. Axes: n images of a draw, D width of the encoder.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, ClassVar, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import eval_linear
import ser
from eval_linear import Frozen, Split
from ser import INF, TINY, ViT, require, rng, setting

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a comparison."""
    data: str = setting("", 0, 0, "folder of CLASS/..., as val, or a severity of a corruption")
    checkpoint: tuple[str, ...] = setting(("runs/ser/last.pt",), 0, 0, "two or more last.pt")
    label: tuple[str, ...] = setting(("",), 0, 0, "their names; none: the names of their folders")
    random_init: bool = setting(False, 0, 1, "the untrained encoder of the first one beside them")
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

def draw_classes(split: Split, cfg: Settings, number: int) -> Split:
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

def measure(encoder: ViT, draws: dict[str, Split],
            cfg: Settings) -> tuple[dict[str, Any], Any, Any]:
    """The numbers of an encoder over the draws; and of the first draw t-SNE's points (n, 2) and the
    labels (n,), as arrays."""
    frozen = Frozen(encoder, 1, cfg, draws)
    tables = []
    for name in draws:
        features, labels = (column.cpu() for column in frozen.table(name))
        readable = labels >= 0
        tables.append((features[readable], labels[readable]))
    values = {"silhouette": [silhouette(*table) for table in tables],
              "purity": [purity(*table, cfg.neighbors) for table in tables]}
    numbers = {name: {"mean": mean(each), "std": pstdev(each), "values": each}
               for name, each in values.items()}
    features, labels = tables[0]
    broken = sorted(set().union(*frozen.broken.values()))
    return numbers | {"broken": broken}, embed(features, cfg), labels.numpy()

def draw(path: Path, panels: dict[str, tuple[Any, Any]]) -> None:
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

def load_encoders(checkpoints: Sequence[str], labels: Sequence[str],
                  untrained: bool) -> tuple[dict[str, ViT], dict[str, str]]:
    """The encoders on the device, by label, and the digests of the checkpoints; with `untrained`,
    the encoder that the first run began with in front. Raises UserError for unfit labels."""
    device = ser.setup()[0]
    if labels == ("",):
        labels = [Path(path).resolve().parent.name for path in checkpoints]
    names = " ".join(labels)
    require(len(labels) == len(checkpoints),
            f"--label {names}: {len(checkpoints)} checkpoints need as many names")
    require(len({"untrained", *labels}) == len(labels) + 1,
            f"--label {names}: names must differ from each other and from 'untrained'")
    encoders = {}
    digests = {}
    if untrained:
        first = eval_linear.Settings(checkpoint=checkpoints[0], random_init=True)
        encoders["untrained"] = eval_linear.frozen_encoder(first)[0].to(device)
    for label, path in zip(labels, checkpoints):
        encoder, _, digests[label] = eval_linear.frozen_encoder(
            eval_linear.Settings(checkpoint=path))
        encoders[label] = encoder.to(device)
    return encoders, digests

def compare(cfg: Settings) -> dict[str, Any]:
    """Encode, measure, draw; returns what rank 0 writes. Raises UserError, on all ranks."""
    ser.check_ranges(cfg)
    require(cfg.data != "", "--data: which class folders? give val of ImageNet, or a corruption's")
    require(len(cfg.checkpoint) + cfg.random_init > 1,
            "--checkpoint: a comparison takes two; or add --random-init")
    picture = Path(cfg.out or Path(cfg.checkpoint[0]).with_name("tsne.png"))
    require(os.access(picture.parent, os.W_OK), f"--out {picture}: cannot write there")
    for package in ("matplotlib", "sklearn"):
        require(importlib.util.find_spec(package) is not None,
                f"t-SNE needs {package}: pip install -r paper/requirements.txt")
    encoders, digests = load_encoders(cfg.checkpoint, cfg.label, cfg.random_init)
    inside = os.path.join(cfg.data, "val")
    folder = inside if os.path.isdir(inside) else cfg.data
    classes, split = eval_linear.labelled("--data", folder)
    require(len(classes) >= cfg.classes,
            f"--classes {cfg.classes}: {folder} has {len(classes)}: try --classes {len(classes)}")
    draws = {f"draw {k}": draw_classes(split, cfg, k) for k in range(cfg.draws)}

    fewest = min(len(split.labels) for split in draws.values())
    for flag, value in (("neighbors", cfg.neighbors), ("perplexity", cfg.perplexity)):
        require(value < fewest - 3, f"--{flag} {value:g}: a draw has {fewest} images: take fewer")

    found = {}
    panels = {}
    for label, encoder in encoders.items():
        numbers, points, labels = measure(encoder, draws, cfg)
        found[label] = {"sha256": digests.get(label, ""), **numbers}
        title = (f"{label}, silhouette {numbers['silhouette']['mean']:.3f}, "
                 f"purity {numbers['purity']['mean']:.3f}")
        panels[title] = (points, labels)
    result = {"data": folder, "settings": vars(cfg), "encoders": found, "picture": str(picture)}
    if ser.ranks_and_rank()[1] == 0:
        draw(picture, panels)
        eval_linear.write_json(picture.with_suffix(".json"), result)
    return result

def table(result: dict[str, Any]) -> str:
    """The numbers for the screen: a row per encoder."""
    cfg = result["settings"]
    lines = [f"{result['data']}, {cfg['draws']} draws of {cfg['classes']} classes, up to "
             f"{cfg['per_class']} images of each: mean ± standard deviation over draws",
             f"{'':24}{'silhouette':>18}{str(cfg['neighbors']) + '-NN purity':>18}"]
    for label, scores in result["encoders"].items():
        line = f"{label:24}"
        for measure in ("silhouette", "purity"):
            cell = f"{scores[measure]['mean']:.4f} ± {scores[measure]['std']:.4f}"
            line += f"{cell:>18}"
        lines.append(line)
        broken = scores["broken"]
        if broken:
            lines.append(f"  {len(broken)} broken images, as {broken[0]}: left out")
    lines.append(f"{'chance':24}{'-':>18}{1 / cfg['classes']:18.4f}")
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
