"""Full fine-tuning on ImageNet-1k: the last columns of the paper's Table 3.

    python -m paper.evaluations.finetune --data /imagenet --checkpoint runs/main/last.pt

finetune.jsonl beside the results gets the settings and, after each epoch, the loss of its last
batch. finetune.pt is saved after each epoch, too. The same command resumes from it, and
evaluations take it as they take last.pt.

Paper: "full fine-tuning", following Garrido et al. 2023, without settings. Its 73.8 for MoCo-v3 is
far below the 81.4 of MoCo-v3's authors, who pre-train for 300 epochs and fine-tune with DeiT's
schedule and strong augmentation. So we take a short, plain recipe: AdamW with a layer-wise decay of
the learning rate, warmup and cosine, stochastic depth, label smoothing, and the random crops and
flips of the linear probe.
"""
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import eval_linear
import ser
from paper.evaluations import arguments, main, training_settings
from paper.methods.dino import add_stochastic_depth

PAPER = {     # top-1 and top-5, percent (Table 3, fine-tuning)
    "MoCo-v3": (73.83, 91.91), "MoCo-v3 + AugSelf": (73.50, 91.67),
    "MoCo-v3 + STL": (73.90, 91.49), "MoCo-v3 + SER": (74.33, 91.79),
    "MoCo-v3 + EquiMod (3 views)": (74.08, 91.75), "MoCo-v3 + E-SSL (2+4 views)": (75.00, 92.36),
    "MoCo-v3 + SER (2+4 views)": (75.02, 92.12)}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder with train/CLASS, val/CLASS")
    add = parser.add_argument
    # Choice: fewer than MAE's ViT-B (100) and MoCo-v3's (150), which train with mixup.
    add("--epochs", type=ser.count, default=50, help="passes over the training images")
    # Choice: MAE's values for its base model, with the layer decay of its larger ones.
    add("--batch-size", type=ser.count, default=1024, help="images per step, over all ranks")
    add("--base-lr", type=ser.positive, default=5e-4, help="rate of the head for 256 images")
    add("--weight-decay", type=ser.nonnegative, default=0.05, help="of AdamW, on matrices")
    add("--layer-decay", type=ser.positive, default=0.75, help="of the rate from block to block")
    add("--drop-path", type=ser.share, default=0.1, help="stochastic depth of the last block")
    add("--label-smoothing", type=ser.share, default=0.1, help="of the target, over all classes")
    parser.set_defaults(val="", test=[])     # eval_linear.load_sets asks for them
    args = parser.parse_args(argv)
    args.warmup_epochs = args.epochs / 10     # Choice: 5 of 50, where MAE has 5 of 100
    return args


class Classifier(nn.Module):
    """An encoder, all of it trained, and a linear layer on its last [CLS]: images (B, 3, S, S)
    uint8 -> logits (B, C) fp32."""
    def __init__(self, encoder: ser.ViT, classes: int, drop_path: float):
        super().__init__()
        self.encoder = encoder.train()
        add_stochastic_depth(encoder, drop_path)

        # Choice: the last [CLS] alone; the probe's four blocks are for features that cannot adapt.
        self.head = eval_linear.make_head(encoder.dim, classes)[0]

    def forward(self, images: Tensor) -> Tensor:
        with eval_linear.autocast(images):
            x = ser.normalise(images / 255)
            cls = self.encoder(x).cls
        return self.head(cls.float())     # in bfloat16, classes would tie


def groups(model: Classifier, args: Namespace) -> list[dict]:
    """AdamW's groups, of parameters with equal rate and decay. `scale` multiplies the learning
    rate: layer_decay to the power of the number of layers above."""
    encoder = model.encoder
    layers = [[*encoder.norm.parameters(), *model.head.parameters()]]
    layers += [list(block.parameters()) for block in reversed(encoder.blocks)]
    # Choice: [CLS] is before the first block, as in a plain ViT, wherever it enters.
    layers.append([encoder.pos_embed, encoder.cls_token, *encoder.patch_embed.parameters()])

    members = []
    for above, layer in enumerate(layers):
        scale = args.layer_decay ** above
        # Position embeddings (1, D, H, W) and [CLS] (1, 1, D) are no matrices.
        matrices = [p for p in layer if p.dim() > 1 and len(p) > 1]
        others = [p for p in layer if p.dim() == 1 or len(p) == 1]
        members.append({"params": matrices, "scale": scale, "weight_decay": args.weight_decay})
        members.append({"params": others, "scale": scale, "weight_decay": 0.0})
    return members


def train(model: Classifier, data: Dataset, args: Namespace, run: dict, path: Path) -> None:
    """Train on pairs of an image (3, S, S) uint8 and its label. If there is a checkpoint at `path`,
    training goes on from it; it must have the settings `run`."""
    ranks, rank = ser.ranks_and_rank()
    device = model.head.weight.device
    optimizer = torch.optim.AdamW(groups(model, args))
    start = ser.resume(path, run, model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model

    loss_of = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    per_epoch = len(data) // args.batch_size     # the last, incomplete batch is not used
    plan = {"steps": args.epochs * per_epoch, "batch_size": args.batch_size}
    log, bar = ser.open_log(path.with_suffix(".jsonl"), Namespace(**run | plan), start)

    for epoch in range(start // per_epoch, args.epochs):
        order = torch.randperm(len(data), generator=ser.rng(args.seed, "finetune", epoch))
        own = order[rank:per_epoch * args.batch_size:ranks].tolist()
        crops = eval_linear.Seeded(data, args.seed, epoch)
        loader = DataLoader(crops, args.batch_size // ranks, sampler=own, num_workers=args.workers,
                            pin_memory=device.type == "cuda")

        for step, (images, labels) in enumerate(loader, epoch * per_epoch):
            lr = ser.learning_rate(args, step / per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]

            # Stochastic depth samples from this seed.
            torch.manual_seed(ser.seed_of(args.seed, "finetune", step, rank))
            logits = parallel(images.to(device, non_blocking=True))
            loss = loss_of(logits, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update(args.batch_size)

        done = step + 1
        ser.log_and_check(log, bar, done, {"loss": loss}, lr)
        if rank == 0:
            ser.save(path, step=done, settings=run,
                     model=model.state_dict(), encoder=model.encoder.state_dict(),
                     optimizer=optimizer.state_dict())


def evaluate(args: Namespace, device: torch.device) -> None:
    """Fine-tune an encoder, or go on with it; score it, write the result and print it."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "finetune.json")

    sets = eval_linear.load_sets(args, checkpoint.settings["image_size"])
    classes = len(sets.classes)
    data = sets.train_random
    names = [image.removeprefix(str(data.root)) for image, _ in data.samples]

    run = training_settings("finetune", args, checkpoint, names)
    torch.manual_seed(args.seed)
    encoder = checkpoint.encoder
    model = Classifier(encoder, classes, args.drop_path).to(device)
    train(model, data, args, run, path.with_suffix(".pt"))

    features, labels = eval_linear.extract(encoder.eval(), sets.tests["val"], args)
    logits = model.head(features[:, -encoder.dim:])
    top1, top5 = eval_linear.accuracy(logits, labels, torch.arange(classes, device=device))
    ranks, rank = ser.ranks_and_rank()
    if rank > 0:
        return

    values = {"fine-tuned top-1 %": top1, "fine-tuned top-5 %": top5}
    rows = eval_linear.make_rows(values, "val", classes, encoder.depth)
    rows = [row | {"ranks": ranks} for row in rows]     # with which random numbers differ
    images = eval_linear.describe_sets({"train": data, **sets.tests})
    eval_linear.add_rows(path, rows, args, checkpoint, images)
    print(f"{classes} classes (the paper's rows: 1000 classes)")
    for method, row in {"here": (top1, top5), **PAPER}.items():
        print(f"{method:32} top-1 {row[0]:6.2f}  top-5 {row[1]:6.2f}")
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)
