r"""t-SNE of 20 random classes (the paper's A.6 figures), with numbers beside the pictures.

    python -m paper.evaluations.tsne --data /imagenet/val --checkpoint runs/{moco,main}/last.pt
    python -m paper.evaluations.tsne --data /imagenet-c/blur/defocus_blur/3 --ready \
        --checkpoint runs/{moco,main}/last.pt

The paper shows the features of 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur (of
which severity?), for MoCo-v3 and MoCo-v3 + SER, and sees "clearer qualitative separation for
several classes", without a number. We draw one sample of 20 classes, and measure the features of
ten: the silhouette (cosine; 1: classes far apart, 0: they overlap), and the 20-NN purity, the share
of an image's 20 nearest that are of its class (chance: 1 / 20).
"""
from argparse import Namespace
from statistics import mean, pstdev
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

import eval_linear
import ser
from paper.evaluations import arguments, load_encoders, main, picture


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of CLASS/..., as val, or a severity of a corruption",
                       required=True, several=True)
    add = parser.add_argument
    add("--ready", action="store_true", help="the images are cropped already, as ImageNet-C's")
    add("--classes", type=ser.count, default=20, help="of a sample, with all images (paper: 20)")
    add("--batch-size", type=ser.count, default=256, help="images per pass of the encoder")
    return parser.parse_args(argv)


def sample_classes(labels: Tensor, classes: int, *seed: object) -> Tensor:
    """The rows of all images of so many random classes."""
    present = labels.unique()
    order = torch.randperm(len(present), generator=ser.rng("t-SNE", *seed))
    return torch.isin(labels, present[order[:classes]]).nonzero().flatten()


def separation(features: Tensor, labels: Tensor, k: int = 20) -> tuple[float, float]:
    """The silhouette and the k-NN purity of features (n, D), both of cosines, means over images."""
    from sklearn.metrics import silhouette_score
    silhouette = silhouette_score(features, labels, metric="cosine")
    z = torch.nn.functional.normalize(features, dim=1)
    similarity = (z @ z.T).fill_diagonal_(-torch.inf)     # nobody is a neighbour of oneself
    nearest = similarity.topk(k).indices                                          # (n, k)
    purity = (labels[nearest] == labels[:, None]).float().mean()
    return float(silhouette), purity.item()


def plot(panel: Any, features: Tensor, labels: Tensor, seed: int) -> Any:
    """Draw t-SNE of features (n, D), a colour for each label; returns the dots."""
    from sklearn.manifold import TSNE
    # Choice: the paper names neither perplexity nor metric: scikit-learn's 30, and the cosine.
    method = TSNE(init="pca", metric="cosine", random_state=seed)
    x, y = method.fit_transform(features).T
    colours = labels.unique(return_inverse=True)[1]
    panel.set(xticks=[], yticks=[])
    return panel.scatter(x, y, s=6, c=colours, cmap="tab20")


def evaluate(args: Namespace, device: torch.device) -> None:
    """Encode, measure and plot; write the results and print them."""
    from matplotlib.figure import Figure
    encoders, path = load_encoders(args, "tsne.json")
    figure = Figure(figsize=(5 * len(encoders) + 1, 5.4), layout="constrained")
    panels = figure.subplots(1, len(encoders))
    lines = []
    for panel, (label, checkpoint) in zip(panels, encoders):
        encoder = checkpoint.encoder.to(device)
        size = encoder.grid * encoder.patch_size
        transform = v2.Resize((size, size)) if args.ready else eval_linear.eval_transform(size)
        data = eval_linear.class_folder(args.data, transform)
        args.classes = min(args.classes, len(data.classes))
        # Choice: features are the final LayerNorm of the last [CLS]; the paper does not say.
        features, labels = [x.cpu() for x in eval_linear.extract(encoder, data, 1, args)]

        measured = []
        for number in range(10):
            sample = sample_classes(labels, args.classes, args.seed, number)
            measured.append(separation(features[sample], labels[sample]))
            if number == 0:
                dots = plot(panel, features[sample], labels[sample], args.seed)
                shown = labels[sample].unique()

        silhouettes, purities = zip(*measured)
        values = {"silhouette": silhouettes, "20-NN purity": purities}
        rows = eval_linear.make_rows(values, args.data, args.classes, encoder.depth)
        eval_linear.write(path, [row | {"encoder": label} for row in rows], args, checkpoint)
        title = (f"silhouette {mean(silhouettes):.3f} ± {pstdev(silhouettes):.3f}, "
                 f"purity {mean(purities):.3f} ± {pstdev(purities):.3f}")
        panel.set_title(f"{label}\n{title}")
        lines.append(f"{label:32}{title}")

    handles, _ = dots.legend_elements(num=None)     # the same in all panels
    names = [data.classes[place] for place in shown]
    figure.legend(handles, names, loc="outside right")
    figure.savefig(picture(path, args))
    print(*lines, sep="\n")
    print(f"mean ± standard deviation of ten samples; {path} and {picture(path, args)}")


if __name__ == "__main__":
    main(settings, evaluate, one_process=True)
