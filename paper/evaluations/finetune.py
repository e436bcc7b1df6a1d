"""Full fine-tuning on ImageNet-1k: the last columns of the paper's table of nonlinear evaluations.

    torchrun --nproc_per_node=8 -m paper.evaluations.finetune --data /imagenet     Table 3, SER
    python -m paper.evaluations.finetune --epochs 9 --batch-size 64 --workers 0    drawn images

Writes finetune.json beside the checkpoint, and finetune.pt, whose encoder other scripts evaluate.
Paper: "full fine-tuning", nothing else. Its 73.8 for MoCo-v3, far below the 81.4 of 300 epochs of
pre-training and 150 of strong augmentation, speaks for a short, plain recipe. Hence AdamW with a
layer-wise decay of the learning rate, warmup and cosine, stochastic depth and label smoothing, and
the random crops and flips of the linear probe. Axes: B images, C classes, S side of an image.
"""
from __future__ import annotations

import json
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import stochastic_depth
from tqdm import tqdm

import ser
from eval_linear import Seeded, accuracy, extract, load_sets

PAPER = {     # top-1 and top-5, percent (nonlinear table, fine-tuning)
    "MoCo-v3": (73.83, 91.91), "MoCo-v3 + AugSelf": (73.50, 91.67),
    "MoCo-v3 + STL": (73.90, 91.49), "MoCo-v3 + SER": (74.33, 91.79),
    "MoCo-v3 + EquiMod (3 views)": (74.08, 91.75), "MoCo-v3 + E-SSL (2+4 views)": (75.00, 92.36),
    "MoCo-v3 + SER (2+4 views)": (75.02, 92.12)}

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS and val/CLASS; none: drawn images")
    add("--checkpoint", default="runs/ser/last.pt", help="last.pt of a run of any method")
    add("--random-init", action="store_true", help="begin with the weights that the run began with")
    # Choice: 50 epochs with 5 of warmup. MAE fine-tunes for 100, MoCo-v3 for 150, with mixup.
    add("--epochs", type=int, default=50, help="passes over the training images")
    add("--warmup-epochs", type=float, default=5, help="epochs of linear warmup")
    add("--batch-size", type=int, default=1024, help="images per step, over all ranks (MAE: 1024)")
    # Choice: MAE's values for its base model, with the layer decay of its larger ones.
    add("--base-lr", type=float, default=5e-4, help="of the head, scaled by batch size / 256")
    add("--weight-decay", type=float, default=0.05, help="of AdamW, on matrices")
    add("--layer-decay", type=float, default=0.75, help="factor of the rate from block to block")
    add("--drop-path", type=float, default=0.1, help="stochastic depth of the last block; first: 0")
    add("--label-smoothing", type=float, default=0.1, help="share of the target, over all classes")
    add("--seed", type=int, default=0, help="seed of the head, the order and every random draw")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser.parse_args(argv)

class Classifier(nn.Module):
    """An encoder, all of it trained, and a linear layer on its last [CLS]: images (B, 3, S, S)
    uint8 -> logits (B, C) fp32."""
    def __init__(self, encoder: ser.ViT, classes: int, drop_path: float):
        super().__init__()
        self.encoder = encoder.requires_grad_(True).train()     # also the frozen patch embedding
        for i, block in enumerate(encoder.blocks):
            p = drop_path * i / max(encoder.depth - 1, 1)     # for an image to skip a branch
            for layer in (block.attn["proj"], block.mlp["fc2"]):
                layer.register_forward_hook(
                    lambda layer, _, x, p=p: stochastic_depth(x, p, "row", layer.training))
        # Choice: the last [CLS] alone; the probe's four blocks are for features that cannot adapt.
        self.head = nn.Linear(encoder.dim, classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, images.is_cuda):
            cls = self.encoder(ser.normalise(images / 255)).cls
        return self.head(cls.float())     # in bfloat16, classes would tie

def groups(model: Classifier, args: Namespace) -> list[dict]:
    """AdamW's groups, one for each parameter. `scale` multiplies the learning rate: layer_decay to
    the power of the number of layers above, the head's own being 0."""
    encoder = model.encoder
    # Choice: [CLS] is before the first block, as in a plain ViT, wherever it enters.
    first = [encoder.pos_embed, encoder.cls_token, *encoder.patch_embed.parameters()]
    blocks = [list(block.parameters()) for block in encoder.blocks]
    last = [*encoder.norm.parameters(), *model.head.parameters()]
    found = []
    for above, layer in enumerate([last, *reversed(blocks), first]):
        scale = args.layer_decay ** above
        for p in layer:
            matrix = p.dim() > 1 and len(p) > 1     # not codes (1, D, H, W), nor [CLS] (1, 1, D)
            decay = args.weight_decay if matrix else 0.0
            found.append(dict(params=[p], scale=scale, weight_decay=decay))
    return found

def train(model: Classifier, data: Dataset, args: Namespace) -> None:
    """Train on pairs of an image (3, S, S) uint8 and its label."""
    ranks, rank = ser.ranks_and_rank()
    device = model.head.weight.device
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    loss_of = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.AdamW(groups(model, args))
    for epoch in tqdm(range(args.epochs), "epochs", disable=rank > 0):
        order = torch.randperm(len(data), generator=ser.rng(args.seed, "finetune", epoch))
        used = len(data) // args.batch_size * args.batch_size     # in whole batches
        own = order[rank:used:ranks].tolist()
        loader = DataLoader(Seeded(data, args.seed, epoch), args.batch_size // ranks,
                            sampler=own, num_workers=args.workers)
        for step, (images, labels) in enumerate(loader):
            torch.manual_seed(ser.rng(args.seed, "drop", epoch, step, rank).initial_seed())
            optimizer.zero_grad()
            loss_of(parallel(images.to(device)), labels.to(device)).backward()
            lr = ser.learning_rate(args, epoch + step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            optimizer.step()

def finetune(args: Namespace) -> None:
    """Fine-tune and evaluate; write and print the result."""
    device = ser.setup()
    path = Path(args.checkpoint)
    run = torch.load(path, map_location="cpu", weights_only=True)["settings"]
    encoder = ser.new_encoder(Namespace(**run)) if args.random_init else ser.load_encoder(path)
    classes, sets = load_sets(Namespace(data=args.data, val="", test=[]), run["image_size"])
    data = sets["crops"] if args.data else sets["train"]
    args.batch_size = min(args.batch_size, len(data))
    torch.manual_seed(args.seed)
    model = Classifier(encoder, len(classes), args.drop_path).to(device)
    train(model, data, args)

    features, labels = extract(encoder.eval(), sets["val"], 1, args)
    top = accuracy(model.head(features), labels, torch.arange(len(classes), device=device))
    if ser.ranks_and_rank()[1] == 0:
        ser.save(path.with_name("finetune.pt"), step=args.epochs, settings=run,
                 encoder=encoder.state_dict(), head=model.head.state_dict(), classes=list(classes))
        result = dict(top1=top[0], top5=top[1], images=len(data), settings=vars(args))
        path.with_name("finetune.json").write_text(json.dumps(result, indent=1))
        for method, row in ({"here": top} | PAPER).items():
            print(f"{method:32} top-1 {row[0]:6.2f}  top-5 {row[1]:6.2f}")
        if len(classes) != 1000:
            print(f"The paper's rows are of 1000 classes, not of these {len(classes)}.")

if __name__ == "__main__":
    finetune(settings())
