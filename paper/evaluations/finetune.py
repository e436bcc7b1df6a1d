"""Full fine-tuning on ImageNet-1k: the last columns of the paper's table of nonlinear evaluations.

    torchrun --nproc_per_node=8 -m paper.evaluations.finetune --data /imagenet \\
        --checkpoint runs/ser/last.pt                                         the paper's column
    python -m paper.evaluations.finetune --data /imagenet --fraction 0.1      10% of the labels
    python -m paper.evaluations.finetune                                      drawn images

Data: FOLDER/train/CLASS/... and FOLDER/val/CLASS/... The result goes to finetune.json beside the
checkpoint; an interrupted run continues after its last epoch with the same command. The weights
stay in finetune.pt, which is a checkpoint of its own: every other script evaluates its encoder.

Paper: "full fine-tuning", nothing else. Its 73.8 for MoCo-v3, far below the 81.4 of 300 epochs of
pre-training and 150 of a recipe with strong augmentation, speaks for a short, plain recipe. Hence
AdamW with a layer-wise decay of the learning rate, warmup and cosine, stochastic depth and label
smoothing, with flags for their numbers, and the random crops and flips of the linear probe. The
paper does not report 1% or 10% of the labels (`--fraction`); an epoch is then 1% or 10% of the
steps, so give it more of them.

Sections: 1 Settings, 2 Data, 3 Model and optimizer, 4 Evaluation, 5 Command line.
Axes: B images, C classes, D width of the encoder.
"""
from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm import tqdm

import eval_linear
import ser
from eval_linear import Crops, Split
from paper.evaluations import training
from paper.evaluations.output import check_out
from paper.methods.dino import StochasticBlock
from ser import INF, Key, ViT, normalise, rng, setting

PAPER = {     # top-1 and top-5, percent (nonlinear table, fine-tuning)
    "MoCo-v3": (73.83, 91.91),
    "MoCo-v3 + AugSelf": (73.50, 91.67),
    "MoCo-v3 + STL": (73.90, 91.49),
    "MoCo-v3 + SER": (74.33, 91.79),
    "MoCo-v3 + EquiMod (3 views)": (74.08, 91.75),
    "MoCo-v3 + E-SSL (2+4 views)": (75.00, 92.36),
    "MoCo-v3 + SER (2+4 views)": (75.02, 92.12),
}

# ==== 1. Settings =================================================================================
@dataclasses.dataclass(frozen=True)
class Settings(training.Settings):
    """The settings of a run. Without --data, it learns eval_linear's drawn images."""
    data: str = setting("", 0, 0, "folder with train/CLASS/... and val/CLASS/...; none: drawn")
    fraction: float = setting(1.0, 1e-9, 1, "share of the training images of each class")
    # Choice: 50 epochs with 5 of warmup. MAE fine-tunes for 100, MoCo-v3 for 150, with mixup.
    epochs: int = setting(50, 1, INF, "passes over the training images")
    warmup_epochs: int = setting(5, 0, INF, "epochs of linear warmup")
    batch_size: int = setting(1024, 1, INF, "images per step, over all ranks (MAE: 1024)")
    # Choice: MAE's values for its base model, with the layer decay of its larger ones.
    base_lr: float = setting(5e-4, 0, INF, "learning rate of the head, scaled by batch_size / 256")
    weight_decay: float = setting(0.05, 0, INF, "of AdamW, on matrices")
    layer_decay: float = setting(0.75, 1e-9, 1, "factor of the learning rate from block to block")
    drop_path: float = setting(0.1, 0, 0.99, "stochastic depth of the last block; 0 at the first")
    label_smoothing: float = setting(0.1, 0, 0.99, "share of the target spread over all classes")

    drawn: ClassVar[dict[str, Any]] = dict(epochs=5, warmup_epochs=1, batch_size=64, workers=0)
    program: ClassVar[str] = "-m paper.evaluations.finetune"

    @property
    def name(self) -> str:
        """The name of the result's file."""
        return "finetune" if self.fraction == 1 else f"finetune-{self.fraction:g}"

    def steps(self, n: int) -> int:
        """Steps of the whole run, on n images."""
        return self.epochs * self.save_steps(n)

    def save_steps(self, n: int) -> int:
        """Steps between checkpoints: an epoch."""
        return n // self.batch_size

    def lr_at(self, step: int, n: int) -> float:
        """Learning rate of the head at a step: linear warmup, then half a cosine to 0."""
        peak = self.base_lr * self.batch_size / 256
        warmup = self.warmup_epochs if self.warmup_epochs < self.epochs else self.epochs / 10
        return ser.warmup_cosine(step / self.save_steps(n), warmup, self.epochs, peak)

# ==== 2. Data =====================================================================================
def fraction_of(split: Split, share: float, seed: int) -> Split:
    """That share of the images of each class, at least one. With one seed, a smaller share is a
    part of a larger one."""
    # Choice: drawn by the seed. SimCLR's lists of 1% and 10% are also balanced, but fixed.
    kept = []
    for label in split.labels.unique().tolist():
        rows = (split.labels == label).nonzero().flatten()
        order = torch.randperm(len(rows), generator=rng(seed, "fraction", label))
        kept.append(rows[order[:max(1, round(share * len(rows)))]])
    rows = torch.cat(kept).sort().values
    if isinstance(split.source, Tensor):
        source = split.source[rows]
    else:
        source = [split.source[row] for row in rows.tolist()]
    return split._replace(source=source, labels=split.labels[rows])

class Labelled(torch.utils.data.Dataset):
    """ser.Key -> image (3, S, S) uint8, label, and the name of a broken file or ""."""
    collate = staticmethod(default_collate)

    def __init__(self, split: Split, size: int, seed: int):
        self.split = split
        self.crops = Crops(split, size, seed)

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, str]:
        image, label = self.crops[key.epoch, key.index]
        return image, label, str(self.split.source[key.index]) if label < 0 else ""

# ==== 3. Model and optimizer ======================================================================
class Classifier(nn.Module):
    """An encoder, all of it trained, and a linear layer on its last [CLS]: images (B, 3, S, S)
    uint8 -> logits (B, C) fp32. The encoder's name is base.encoder, as ser.load_encoder expects."""

    def __init__(self, encoder: ViT, classes: int, cfg: Settings):
        super().__init__()
        encoder.requires_grad_(True)     # also the patch embedding, which pre-training may freeze
        encoder.pos_embed.requires_grad_(encoder.shape["position"] == "learned")
        for i, block in enumerate(encoder.blocks):
            drop = cfg.drop_path * i / max(encoder.depth - 1, 1)
            encoder.blocks[i] = StochasticBlock(block, encoder.dim, drop)
        self.base = nn.ModuleDict({"encoder": encoder})
        # Choice: the last [CLS] alone; the probe's four blocks are for features that cannot adapt.
        self.head = nn.Linear(encoder.dim, classes)
        nn.init.normal_(self.head.weight, std=0.01, generator=rng(cfg.seed, "head"))
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            encoded, = self.base["encoder"]([normalise(images.float() / 255)])
        return self.head(encoded.cls.float())     # in bfloat16, classes would tie

def layer_of(name: str, depth: int) -> int:
    """Where a parameter of the classifier is: 0 in front of the blocks, 1..depth in one of them,
    depth + 1 behind them."""
    # Choice: [CLS] is in front of the first block, as in a plain ViT, wherever it enters.
    place = name.removeprefix("base.encoder.").split(".")
    if place[0] in ("patch_embed", "pos_embed", "cls_token"):
        return 0
    return int(place[1]) + 1 if place[0] == "blocks" else depth + 1

def groups(model: Classifier, cfg: Settings) -> list[dict[str, Any]]:
    """AdamW's parameter groups: by layer, which gives the `scale` of the learning rate, and by
    whether weights decay: matrices do; biases, norms, position codes and [CLS] do not."""
    depth = model.base["encoder"].depth
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            layer = layer_of(name, depth)
            decays = p.dim() > 1 and not name.endswith(("pos_embed", "cls_token"))
            if (layer, decays) not in found:
                found[layer, decays] = dict(params=[],
                                            scale=cfg.layer_decay ** (depth + 1 - layer),
                                            weight_decay=cfg.weight_decay if decays else 0.0)
            found[layer, decays]["params"].append(p)
    return list(found.values())

# ==== 4. Evaluation ===============================================================================
@torch.no_grad()
def accuracy(model: Classifier, images: Labelled, cfg: Settings,
             device: torch.device) -> tuple[dict[str, float], set[str]]:
    """Top-1 and top-5 of the centre crops, in percent, and the broken files, which are wrong. The
    ranks share the images, and none counts twice."""
    model.eval()
    ranks, rank = ser.ranks_and_rank()
    loader = training.loader_of_val(images, cfg.batch_size // ranks, cfg, rank, ranks)
    right = torch.zeros(2, dtype=torch.float64)
    broken: set[str] = set()
    for pixels, labels, names in tqdm(loader, "val", disable=rank > 0):
        top = model(pixels.to(device)).topk(min(5, model.head.out_features)).indices.cpu()
        hits = top == labels[:, None]
        right += torch.stack([hits[:, 0].sum(), hits.sum()])
        broken |= set(names)
    if ranks > 1:
        dist.all_reduce(right)
    broken = training.union(broken) - {""}
    training.check_broken(broken, len(images))
    top1, top5 = (100 * right / len(images)).tolist()
    return {"top1": top1, "top5": top5}, broken

# ==== 5. Command line =============================================================================
def finetune(cfg: Settings) -> dict[str, Any]:
    """Fine-tune, or continue, and evaluate; returns the result. Raises UserError, on all ranks."""
    ser.check_ranges(cfg)
    begun = time.perf_counter()
    device, _, _ = ser.setup()
    encoder, _, digest = eval_linear.frozen_encoder(cfg)
    check_out(cfg.result, ".json", cfg.program, digest)
    size = encoder.shape["image_size"]
    where = eval_linear.Settings(data=cfg.data, seed=cfg.seed)
    classes, splits = eval_linear.collect(where, size)
    train = Labelled(fraction_of(splits["train"], cfg.fraction, cfg.seed), size, cfg.seed)
    val = Labelled(splits["val"], size, cfg.seed)
    model = Classifier(encoder, len(classes), cfg).to(device)
    optimizer = torch.optim.AdamW(groups(model, cfg), lr=0.0)

    def loss_of(parallel: nn.Module, batch: list[Any]) -> training.LossAndBroken:
        pixels, labels, names = batch
        logits = parallel(pixels.to(device))
        # A broken image, label -1, adds nothing. DDP takes the mean over ranks, so that each
        # divides by its number of images, broken ones included.
        total = F.cross_entropy(logits, labels.to(device), ignore_index=-1, reduction="sum",
                                label_smoothing=cfg.label_smoothing)
        return total / len(labels), set(names) - {""}

    origin = {"sha256": digest, "images": ser.digest(train.split.source),
              "classes": ser.digest(classes)}
    losses, broken = training.train(model, encoder.shape, optimizer, train, loss_of, cfg, origin)
    found, broken_val = accuracy(model, val, cfg, device)
    found |= {"classes": len(classes), "losses": losses}
    images = {"train": len(train), "val": len(val)}
    return training.finish(cfg, digest, images, found, broken | broken_val, begun)

def main(argv: list[str] | None = None) -> int:
    """Fine-tune as the command line says; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings)
        result = finetune(cfg)
        if ser.ranks_and_rank()[1] > 0:
            return
        print(f"{result['data']}: {result['classes']} classes, {result['images']['train']} images")
        title = f"{result['encoder']} encoder, {100 * cfg.fraction:g}% of the labels"
        note = "it teaches nothing, and is wrong in val"
        print(training.table(result, title, ("top1", "top5"), 2, PAPER, note))
        print(f"  {result['minutes']:.1f} minutes, written to {cfg.result}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())
