"""The loss in a training that is not ours: timm's ViT, SimCLR, and `equiv_of_maps` of ser.py.

    python -m paper.experiments.pasted --data imagenette-128

The images are the square copies that paper/README.md makes. L_equiv is on the first 16 of each
batch, uncropped, with two colour jitters. Unlike in ser.py, these views do not enter the other
loss. Sizes, crops and rate are imagenette.py's, for 20 epochs. A stopped run goes on with the
same command. torchrun splits its batches over ranks. OUT/row.json gets means over three heads.
"""
import json
from argparse import ArgumentParser, Namespace

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import eval_linear
import ser
from paper.experiments import convert

# Choice: SimCLR's jitter at half strength and no blur, as SimCLR has them for small images.
JITTER = v2.Compose([
    v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
    v2.RandomGrayscale(0.2),
    v2.PILToTensor()])
CROP = v2.Compose([v2.RandomResizedCrop(64, (0.2, 1.0)), v2.RandomHorizontalFlip(), JITTER])
RESIZE = v2.Compose([v2.Resize(64), v2.CenterCrop(64)])


def four_views(image):
    """Two views for SimCLR, and two of the whole image for L_equiv, (3, 64, 64) uint8 each."""
    whole = RESIZE(image)
    return CROP(image), CROP(image), JITTER(whole), JITTER(whole)


class Model(nn.Module):
    """Both losses are in `forward`, which DDP wraps. SimCLR's negatives are of the other view."""
    def __init__(self):
        import timm
        super().__init__()
        timm.layers.set_fused_attn(torch.cuda.is_available())     # slow in bfloat16 on CPUs
        self.resample = timm.layers.resample_abs_pos_embed
        self.vit = timm.models.VisionTransformer(
            64, 8, embed_dim=128, depth=6, num_heads=4, num_classes=0, dynamic_img_size=True)
        self.head = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
        self.project = ser.projector(128)

    def f1(self, images):
        """Images (B, 3, h, w) -> the map (B, D, H, W) after two blocks, without [CLS]."""
        x = self.vit.patch_embed(images)     # (B, H, W, D)
        grid = list(x.shape[1:3])
        places = self.resample(self.vit.pos_embed[:, 1:], grid, num_prefix_tokens=0)
        tokens = self.vit.blocks[:2](x.flatten(1, 2) + places)
        return tokens.mT.unflatten(2, grid)

    def forward(self, x1, x2, images1, images2, shared):
        """SimCLR's loss of the views x1 and x2, and L_equiv of images1 and images2."""
        z1 = self.head(self.vit(x1))
        z2 = self.head(self.vit(x2))
        inv = ser.info_nce(z1, z2, 0.2) + ser.info_nce(z2, z1, 0.2)     # Choice: tau is .2

        g1 = ser.sample_rank_geometry(len(images1), 8, shared)
        g2 = ser.sample_rank_geometry(len(images2), 8, shared)
        h1 = self.f1(ser.rho(g1, images1, 8))
        h2 = self.f1(ser.rho(g2, images2, 8))
        equiv = ser.equiv_of_maps(self.project, ser.relative(g2, g1), h1, h2)
        return inv, equiv


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--data", required=True, help="folder with train/CLASS and val/CLASS")
    add("--out", default="runs/pasted")
    add("--weight", type=float, default=0.5, help="of L_equiv")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=4)
    parser.set_defaults(epochs=20, warmup_epochs=1, batch_size=128, base_lr=2e-3)
    return parser.parse_args(argv)


def train(args: Namespace) -> Model:
    """Train, or go on with a training, and return the model."""
    device = ser.setup()
    ranks, rank = ser.ranks_and_rank()
    torch.manual_seed(args.seed)
    model = Model().to(device)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    assert 16 % ranks == 0, "the ranks share the 16 images of L_equiv"
    eval_linear.load_sets(eval_linear.parse(["--data", args.data]), size=1)     # or exit now
    data = ImageFolder(f"{args.data}/train", four_views)
    sampler = DistributedSampler(data, ranks, rank, seed=1000 * args.seed, drop_last=True)
    loader = DataLoader(
        data, args.batch_size // ranks, sampler=sampler, drop_last=True, num_workers=args.workers)

    # Crops depend on `workers`, which `resume` does not compare, so `loaders` has it as well.
    vars(args).update(ranks=ranks, loaders=args.workers, names_checksum=ser.find_images(args)[1])
    last = eval_linear.results_path(args, "training.pt")     # not for evaluations
    start = ser.resume(last, vars(args), model, optimizer)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        shared = torch.Generator().manual_seed(1000 * args.seed + epoch)
        torch.manual_seed(1000 * (1000 * args.seed + epoch) + rank)     # workers' crops follow it
        for step, (views, _) in enumerate(loader):
            x1, x2, *whole = [ser.normalise(view.to(device) / 255) for view in views]
            images1, images2 = [view[:16 // ranks] for view in whole]
            ser.set_learning_rate(optimizer, args, epoch + step / len(loader))
            with torch.autocast(device.type, torch.bfloat16):
                inv, equiv = parallel(x1, x2, images1, images2, shared)
            optimizer.zero_grad()
            (inv + args.weight * equiv).backward()
            optimizer.step()

        if rank == 0:
            print(f"epoch {epoch + 1}: SimCLR {inv:.3f}, L_equiv {equiv:.3f}", flush=True)
            ser.save(last, step=epoch + 1, settings=vars(args), model=model.state_dict(),
                     optimizer=optimizer.state_dict())
    return model.eval()


def evaluate(model: Model, args: Namespace) -> None:
    """Write and print accuracies by eval_linear.py, and retrieval after f1, as it was trained."""
    val = ImageFolder(f"{args.data}/val", v2.Compose([RESIZE, v2.PILToTensor()]))
    images = torch.stack([image for image, _ in val])[::8].to(model.vit.cls_token.device)
    generator = ser.rng("jitter", "rot90")

    def f1_with_jitter(x):
        return model.f1(eval_linear.recolour_and_normalise(x, generator))

    row = vars(args) | {
        "val": eval_linear.describe_sets({"every eighth of val": val}),
        "rot90 retrieval": eval_linear.retrieval(model.f1, ser.normalise(images / 255), patch=8),
        "rot90 retrieval with jitter":
            eval_linear.retrieval(f1_with_jitter, images / 255, patch=8)}

    encoder = eval_linear.results_path(args, "encoder.pt")
    if ser.ranks_and_rank()[1] == 0:
        ser.save(encoder, **convert.from_timm(model.vit.state_dict(), heads=4))
    words = [f"--data={args.data}", f"--checkpoint={encoder}", f"--workers={args.workers}"]
    for seed in "012":     # of the heads, with which linear accuracy scatters
        rows = eval_linear.evaluate(eval_linear.parse([*words, "--cache", f"--seed={seed}"]))
        for found in rows:
            if found["classes"] == rows[0]["classes"]:     # among all, not those of val alone
                measure = found["measure"]
                row[measure] = row.get(measure, 0) + found["value"] / 3

    if ser.ranks_and_rank()[1] == 0:
        row["weights"] = eval_linear.fingerprint(ser.load_encoder(encoder))
        eval_linear.results_path(args, "row.json").write_text(json.dumps(row))
        print(json.dumps(row))


if __name__ == "__main__":
    args = settings()
    evaluate(train(args), args)
    ser.leave_group()
