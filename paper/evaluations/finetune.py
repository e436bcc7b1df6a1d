"""Full fine-tuning on ImageNet-1k: the last columns of the paper's Table 3.

    python -m paper.evaluations.finetune --data /imagenet --checkpoint runs/main/last.pt
    python -m paper.evaluations.finetune --epochs 9 --batch-size 64 --workers 0  # synthetic images

With several GPUs, `torchrun --nproc_per_node=8` takes the place of `python`. Results are added to
finetune.json beside the checkpoint, or in --out. Each epoch adds the loss of its last batch to
finetune.jsonl and saves finetune.pt, from which the same command resumes. Evaluations take it, too.

Paper: "full fine-tuning", nothing else. Its 73.8 for MoCo-v3 is far below the 81.4 of MoCo-v3's
authors, who pre-train for 300 epochs and fine-tune with DeiT's schedule and strong augmentation. So
we take a short, plain recipe: AdamW with a layer-wise decay of the learning rate, warmup and
cosine, stochastic depth, label smoothing, and the random crops and flips of the linear probe.
"""
import os
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import stochastic_depth
from tqdm import tqdm

import eval_linear
import ser
from paper.evaluations import write

PAPER = {     # top-1 and top-5, percent (Table 3, fine-tuning)
    "MoCo-v3": (73.83, 91.91), "MoCo-v3 + AugSelf": (73.50, 91.67),
    "MoCo-v3 + STL": (73.90, 91.49), "MoCo-v3 + SER": (74.33, 91.79),
    "MoCo-v3 + EquiMod (3 views)": (74.08, 91.75), "MoCo-v3 + E-SSL (2+4 views)": (75.00, 92.36),
    "MoCo-v3 + SER (2+4 views)": (75.02, 92.12)}

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS, val/CLASS; none: synthetic images")
    add("--checkpoint", default="", help="last.pt of a run; without --data: runs/ser/last.pt")
    add("--out", default="", help="folder of the results; none: that of the checkpoint")
    add("--random-init", action="store_true", help="begin with the weights that the run began with")
    # Choice: fewer than MAE (100) and MoCo-v3's ViT-B (150), which train with mixup.
    add("--epochs", type=int, default=50, help="passes over the training images")
    add("--batch-size", type=int, default=1024, help="images per step, over all ranks (MAE: 1024)")
    # Choice: MAE's values for its base model, with the layer decay of its larger ones.
    add("--base-lr", type=float, default=5e-4, help="learning rate of the head for 256 images")
    add("--weight-decay", type=float, default=0.05, help="of AdamW, on matrices")
    add("--layer-decay", type=float, default=0.75, help="factor of the rate from block to block")
    add("--drop-path", type=float, default=0.1, help="stochastic depth of the last block; first: 0")
    add("--label-smoothing", type=float, default=0.1, help="share of the target, over all classes")
    add("--seed", type=int, default=0, help="seed of the head, the order, crops and depth")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    parser.set_defaults(val="", test=[])     # eval_linear.load_sets asks for them
    args = parser.parse_args(argv)
    args.warmup_epochs = args.epochs / 10     # Choice: 5 of 50, where MAE has 5 of 100
    return args

class Classifier(nn.Module):
    """An encoder, all of it trained, and a linear layer on its last [CLS]: images (B, 3, S, S)
    uint8 -> logits (B, C) fp32."""
    def __init__(self, encoder: ser.ViT, classes: int, drop_path: float):
        super().__init__()
        self.encoder = encoder.requires_grad_(True).train()     # also the frozen patch embedding
        for i, block in enumerate(encoder.blocks):
            p = drop_path * i / max(encoder.depth - 1, 1)     # that an image skips a branch
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
    the power of the number of layers above; the head and the last norm have none."""
    encoder = model.encoder
    # Choice: [CLS] is before the first block, as in a plain ViT, wherever it enters.
    first = [encoder.pos_embed, encoder.cls_token, *encoder.patch_embed.parameters()]
    blocks = [list(block.parameters()) for block in encoder.blocks]
    last = [*encoder.norm.parameters(), *model.head.parameters()]
    members = []
    for above, layer in enumerate([last, *reversed(blocks), first]):
        scale = args.layer_decay ** above
        for p in layer:
            # Position embeddings (1, D, H, W) and [CLS] (1, 1, D) are no matrices.
            decay = args.weight_decay if p.dim() > 1 and len(p) > 1 else 0.0
            members.append(dict(params=[p], scale=scale, weight_decay=decay))
    return members

def train(model: Classifier, data: Dataset, args: Namespace, run: dict, path: Path) -> None:
    """Train on pairs of an image (3, S, S) uint8 and its label. If there is a checkpoint at `path`,
    training goes on from it; it must have the settings `run`."""
    ranks, rank = ser.ranks_and_rank()
    device = model.head.weight.device
    optimizer = torch.optim.AdamW(groups(model, args))
    start = ser.resume(path, run, model, optimizer) if path.exists() else 0
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    loss_of = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    per_epoch = len(data) // args.batch_size
    log = open(os.devnull if rank > 0 else path.with_suffix(".jsonl"), "a", buffering=1)
    bar = tqdm(total=args.epochs * per_epoch * args.batch_size, initial=start * args.batch_size,
               unit=" images", disable=rank > 0)
    for epoch in range(start // per_epoch, args.epochs):
        order = torch.randperm(len(data), generator=ser.rng(args.seed, "finetune", epoch))
        own = order[rank:per_epoch * args.batch_size:ranks].tolist()     # of whole batches
        loader = DataLoader(eval_linear.Seeded(data, args.seed, epoch), args.batch_size // ranks,
                            sampler=own, num_workers=args.workers)
        for step, (images, labels) in enumerate(loader, epoch * per_epoch):
            lr = ser.learning_rate(args, step / per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            # Stochastic depth samples from this seed.
            torch.manual_seed(ser.rng(args.seed, "finetune", step, rank).initial_seed())
            loss = loss_of(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update(args.batch_size)
        ser.record(log, bar, step + 1, {"loss": loss}, lr)
        if rank == 0:
            ser.save(path, step=step + 1, settings=run, model=model.state_dict(),
                     encoder=model.encoder.state_dict(), optimizer=optimizer.state_dict())

def finetune(args: Namespace) -> None:
    """Fine-tune an encoder, or go on with it; evaluate it, print and write the result."""
    device = ser.setup()
    ranks, rank = ser.ranks_and_rank()
    state, encoder, path = eval_linear.load(args, "finetune.json")
    run = state["settings"]
    kept = path.with_name("finetune.pt")
    if args.random_init:
        encoder = ser.new_encoder(Namespace(**run))
        kept = path.with_name("finetune-random.pt")
    classes, sets = eval_linear.load_sets(args, run["image_size"])
    data = sets["crops"] if args.data else sets["train"]
    args.batch_size = min(args.batch_size, len(data)) // ranks * ranks
    # What must be the same when a run goes on; folders and the checkpoint may be renamed.
    own = vars(args) | {"data": f"{len(data)} images", "ranks": ranks,
                        "checkpoint": eval_linear.fingerprint(encoder)}
    run |= {f"finetune_{name}": own[name] for name in own if name not in ("out", "workers")}
    torch.manual_seed(args.seed)
    model = Classifier(encoder, len(classes), args.drop_path).to(device)
    train(model, data, args, run, kept)

    features, labels = eval_linear.extract(encoder.eval(), sets["val"], 1, args)
    all_classes = torch.arange(len(classes), device=device)
    top1, top5 = eval_linear.accuracy(model.head(features), labels, all_classes)
    if rank == 0:
        print(f"{len(classes)} classes (the paper's rows: 1000 classes)")
        for method, row in {"here": (top1, top5), **PAPER}.items():
            print(f"{method:32} top-1 {row[0]:6.2f}  top-5 {row[1]:6.2f}")
        values = {"fine-tuned top-1 %": top1, "fine-tuned top-5 %": top5}
        rows = eval_linear.make_rows(values, "val", len(classes), encoder.depth)
        write(path, rows, args, state["step"], "untrained" if args.random_init else "trained")

if __name__ == "__main__":
    finetune(settings())
