"""t-SNE of 20 random classes: the paper's A.6 figures.

    python -m paper.evaluations.tsne --data /imagenet/val --checkpoint runs/{moco,main}/last.pt

The paper shows 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur, for MoCo-v3 and
MoCo-v3 + SER, without a number. It names neither classes, split nor severity. Images of ImageNet-C
are cropped already: use --ready. Another --seed has other classes.
"""
import sys
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from torchvision.datasets import DatasetFolder
from torchvision.transforms import v2

import eval_linear
import ser
from paper.evaluations import arguments, load_several, main, save_picture


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of CLASS/..., as val, or a severity of a corruption", several=True)
    add = parser.add_argument
    add("--ready", action="store_true", help="the images are cropped already, as ImageNet-C's")
    add("--classes", type=ser.count, default=20,
        help="of a sample, with all images (paper: 20); above 20, colours repeat")
    add("--batch-size", type=ser.count, default=256, help="images per pass of the encoder")
    return parser.parse_args(argv)


def sample_classes(data: DatasetFolder, classes: int, seed: int) -> Subset:
    """The images of random classes. A folder that lacks other classes gives the same ones."""
    if len(data.classes) < classes:
        sys.exit(f"--classes {classes}: there are {len(data.classes)} in --data")
    order = sorted(data.classes, key=lambda name: ser.seed_of("t-SNE", seed, name))
    chosen = [data.class_to_idx[name] for name in order[:classes]]
    return Subset(data, [i for i, label in enumerate(data.targets) if label in chosen])


def plot(panel: Any, features: Tensor, labels: Tensor, seed: int) -> None:
    """Draw t-SNE of features (n, D), a colour for each label."""
    from sklearn.manifold import TSNE

    # Choice: the paper names neither perplexity nor metric: scikit-learn's 30, and the cosine.
    method = TSNE(init="pca", metric="cosine", random_state=seed)
    x, y = method.fit_transform(features).T
    colours = labels.unique(return_inverse=True)[1]
    panel.set(xticks=[], yticks=[])
    panel.scatter(x, y, s=6, c=colours, cmap="tab20")


def evaluate(args: Namespace, device: torch.device) -> None:
    """Draw the picture."""
    from matplotlib.figure import Figure
    runs = load_several(args)
    figure = Figure(figsize=(5 * len(runs) + 1, 5.4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False)

    for panel, label, checkpoint in zip(panels[0], args.label, runs, strict=True):
        encoder = checkpoint.encoder.to(device)
        size = encoder.image_size
        transform = v2.Resize((size, size)) if args.ready else eval_linear.eval_transform(size)
        folder = eval_linear.ClassFolder(args.data, transform)
        data = sample_classes(folder, args.classes, args.seed)

        # Choice: features are the final LayerNorm of the last [CLS]; the paper does not say.
        features, labels = [x.cpu() for x in eval_linear.extract(encoder, data, args)]
        plot(panel, features[:, -encoder.dim:], labels, args.seed)
        panel.set_title(label)

    save_picture(figure, "tsne", args, runs)


if __name__ == "__main__":
    main(settings, evaluate)
