"""t-SNE of 20 random classes (the paper's A.6 figures), with numbers beside the pictures.

The paper shows the features of 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur, for
MoCo-v3 and MoCo-v3 + SER, and sees "clearer qualitative separation for several classes". It prints
no number, and layouts of t-SNE cannot be compared by eye; so this measures the features themselves,
over ten draws of classes: the silhouette (cosine; 1: classes far apart, 0: they overlap), and the
20-NN purity, the share of an image's 20 nearest that are of its class (chance: 1 / classes).

    python -m paper.evaluations.tsne --data /imagenet/val --checkpoint runs/{moco,ser}/last.pt
    ... --data /imagenet-c/blur/defocus_blur/3 --ready

Writes tsne.png, of the first draw, and tsne.json beside the first checkpoint. n images, width D.
"""
from __future__ import annotations

import json
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import v2

import ser
from eval_linear import class_folder, eval_transform, extract

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder of CLASS/..., as val, or a severity of a corruption")
    add("--checkpoint", nargs="+", default=["runs/ser/last.pt"], help="last.pt of one or more runs")
    add("--label", nargs="+", help="their names; none: their paths")
    add("--ready", action="store_true", help="the images are cropped already, as ImageNet-C's")
    add("--classes", type=int, default=20, help="classes of a draw (paper: 20), all their images")
    add("--batch-size", type=int, default=256, help="images per pass of the encoder")
    add("--seed", type=int, default=0, help="of the draws and of t-SNE")
    add("--workers", type=int, default=8, help="loader processes")
    return parser.parse_args(argv)

def load_encoders(args: Namespace) -> dict[str, ser.ViT]:
    """The encoders by name, in front one with the random weights that the first run began with."""
    run = torch.load(args.checkpoint[0], map_location="cpu", weights_only=True)["settings"]
    encoders = {"untrained": ser.new_encoder(Namespace(**run)).eval()}
    for name, path in zip(args.label or args.checkpoint, args.checkpoint, strict=True):
        encoders[name] = ser.load_encoder(path)
    return encoders

def draw_classes(labels: Tensor, classes: int, *seed: object) -> Tensor:
    """The rows of all images of so many classes, which the seed draws."""
    present = labels.unique()
    order = torch.randperm(len(present), generator=ser.rng("t-SNE", *seed))
    return torch.isin(labels, present[order[:classes]]).nonzero().flatten()

def separation(features: Tensor, labels: Tensor, k: int = 20) -> tuple[float, float]:
    """The silhouette and the k-NN purity of features (n, D), both of cosines, means over images."""
    from sklearn.metrics import silhouette_score
    silhouette = silhouette_score(features.numpy(), labels.numpy(), metric="cosine")
    z = torch.nn.functional.normalize(features, dim=1)
    similarity = (z @ z.T).fill_diagonal_(-torch.inf)     # nobody is a neighbour of oneself
    nearest = similarity.topk(k).indices                                          # (n, k)
    purity = (labels[nearest] == labels[:, None]).float().mean()
    return float(silhouette), purity.item()

def compare(args: Namespace) -> None:
    """Encode, measure and draw; write and print the result."""
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    encoders = load_encoders(args)
    figure = Figure(figsize=(5 * len(encoders) + 1, 5.4), layout="constrained")
    found = {}
    for panel, (name, encoder) in zip(figure.subplots(1, len(encoders)), encoders.items()):
        size = encoder.grid * encoder.patch_size
        transform = v2.Resize((size, size)) if args.ready else eval_transform(size)
        data = class_folder(args.data, transform)
        # Choice: features are the final LayerNorm of the last [CLS]; the paper does not say.
        encoder.to(ser.setup())
        features, labels = [table.cpu() for table in extract(encoder, data, 1, args)]
        draws = [draw_classes(labels, args.classes, args.seed, number) for number in range(10)]
        measured = torch.tensor([separation(features[rows], labels[rows]) for rows in draws])
        found[name] = dict(zip(("silhouette", "purity"), measured.T.tolist()))
        std, mean = torch.std_mean(measured, 0, correction=0)
        title = f"silhouette {mean[0]:.3f} ± {std[0]:.3f}, purity {mean[1]:.3f} ± {std[1]:.3f}"
        print(f"{name:32}{title}")
        # Choice: the paper names neither perplexity nor metric: scikit-learn's 30, and the cosine.
        method = TSNE(init="pca", metric="cosine", random_state=args.seed)
        x, y = method.fit_transform(features[draws[0]].numpy()).T
        shown, colours = labels[draws[0]].unique(return_inverse=True)
        dots = panel.scatter(x, y, s=6, c=colours, cmap="tab20")
        panel.set(xticks=[], yticks=[], title=f"{name}\n{title}")
    print("(mean ± standard deviation of ten draws; the paper has no number)")
    handles, _ = dots.legend_elements(num=None)
    names = [data.classes[label] for label in shown]
    figure.legend(handles, names, loc="outside right")
    path = Path(args.checkpoint[0])
    figure.savefig(path.with_name("tsne.png"))
    path.with_name("tsne.json").write_text(json.dumps(found | dict(settings=vars(args))))

if __name__ == "__main__":
    compare(settings())
