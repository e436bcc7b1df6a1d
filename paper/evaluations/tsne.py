r"""t-SNE of 20 random classes (the paper's A.6 figures), with numbers beside the pictures.

    python -m paper.evaluations.tsne --data /imagenet/val --checkpoint runs/{moco,main}/last.pt
    python -m paper.evaluations.tsne --data /imagenet-c/blur/defocus_blur/3 --ready \
        --checkpoint runs/{moco,main}/last.pt

The paper shows the features of 20 classes of ImageNet-1k, and of ImageNet-C's defocus blur (of
which severity?), for MoCo-v3 and MoCo-v3 + SER, and sees "clearer qualitative separation for
several classes", without a number. We measure the features themselves, over ten samples of 20
classes: the silhouette (cosine; 1: classes far apart, 0: they overlap), and the 20-NN purity, the
share of an image's 20 nearest that are of its class (chance: 1 / 20). A picture of the first sample
is written, too.
"""
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import v2

import eval_linear
import ser
from paper.evaluations import one_process, picture, write

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder of CLASS/..., as val, or a severity of a corruption")
    add("--checkpoint", nargs="+", required=True, help="last.pt of one or more runs")
    add("--label", nargs="+", help="their names; none: their paths")
    add("--out", default="", help="folder of the results; none: that of the first checkpoint")
    add("--ready", action="store_true", help="the images are cropped already, as ImageNet-C's")
    add("--classes", type=int, default=20, help="classes of a sample, with all images (paper: 20)")
    add("--batch-size", type=int, default=256, help="images per pass of the encoder")
    add("--seed", type=int, default=0, help="of the samples and of t-SNE")
    add("--workers", type=int, default=8, help="loader processes")
    return parser.parse_args(argv)

def load_encoders(args: Namespace, results: str) -> tuple:
    """Load the checkpoints, in one process: (label, step, encoder) of each, led by the first run's
    untrained encoder; the settings of the runs; and the path of the file `results`."""
    one_process()
    args.out = args.out or str(Path(args.checkpoint[0]).parent)
    encoders = []
    runs = []
    for label, checkpoint in zip(args.label or args.checkpoint, args.checkpoint, strict=True):
        given = Namespace(checkpoint=checkpoint, data=args.data, out=args.out)
        state, encoder, path = eval_linear.load(given, results)
        encoders.append((label, state["step"], encoder))
        runs.append(state["settings"])
    untrained = ser.new_encoder(Namespace(**runs[0])).eval()
    return [("untrained", 0, untrained), *encoders], runs, path

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

def compare(args: Namespace) -> None:
    """Encode, measure and plot; print and write the result."""
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    encoders, _, path = load_encoders(args, "tsne.json")
    figure = Figure(figsize=(5 * len(encoders) + 1, 5.4), layout="constrained")
    for panel, (label, step, encoder) in zip(figure.subplots(1, len(encoders)), encoders):
        size = encoder.grid * encoder.patch_size
        transform = v2.Resize((size, size)) if args.ready else eval_linear.eval_transform(size)
        data = eval_linear.class_folder(args.data, transform)
        args.classes = min(args.classes, len(data.classes))
        # Choice: features are the final LayerNorm of the last [CLS]; the paper does not say.
        encoder.to(ser.setup())
        features, classes = [one.cpu() for one in eval_linear.extract(encoder, data, 1, args)]
        samples = [sample_classes(classes, args.classes, args.seed, number) for number in range(10)]
        measured = torch.tensor([separation(features[i], classes[i]) for i in samples])   # (10, 2)
        std, mean = torch.std_mean(measured, 0, correction=0)
        title = f"silhouette {mean[0]:.3f} ± {std[0]:.3f}, purity {mean[1]:.3f} ± {std[1]:.3f}"
        print(f"{label:32}{title}")
        values = dict(zip(("silhouette", "20-NN purity"), measured.T.tolist()))
        rows = eval_linear.make_rows(values, args.data, args.classes, encoder.depth)
        write(path, rows, args, step, label)
        # Choice: the paper names neither perplexity nor metric: scikit-learn's 30, and the cosine.
        method = TSNE(init="pca", metric="cosine", random_state=args.seed)
        x, y = method.fit_transform(features[samples[0]]).T
        shown, colours = classes[samples[0]].unique(return_inverse=True)
        dots = panel.scatter(x, y, s=6, c=colours, cmap="tab20")
        panel.set(xticks=[], yticks=[], title=f"{label}\n{title}")
    handles, _ = dots.legend_elements(num=None)     # the same in all panels
    figure.legend(handles, [data.classes[one] for one in shown], loc="outside right")
    figure.savefig(picture(path, args))
    print(f"mean ± standard deviation of ten samples; {picture(path, args)}")

if __name__ == "__main__":
    compare(settings())
