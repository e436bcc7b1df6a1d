"""Detection on COCO with a frozen encoder: the COCO table of the paper's appendix (A.3).

    python -m paper.evaluations.coco --data /coco --checkpoint runs/main/last.pt

/coco is COCO 2017 as it is downloaded: annotations/instances_{train,val}2017.json, train2017/ and
val2017/. coco.jsonl gets the settings and, every 500 steps, the losses. Then coco.pt is saved, too,
from which the same command resumes.

Paper: the encoder is frozen, following DINOv2 (Oquab et al. 2023), which has no COCO
detection. "The detection head" is trained for 45k iterations of 32 images of train2017, and AP
is measured on val2017. The paper leaves open the detector, neck, features, image size,
optimizer and augmentation. Each is a flag or has a `# Choice:` below. We use torchvision's
Faster R-CNN, on ViTDet's simple pyramid (Li et al. 2022) over the last block's map.
"""
import sys
import zlib
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_convert
from torchvision.transforms import v2
from tqdm import tqdm

import eval_linear
import ser
from paper.evaluations import arguments, main, training_settings

PAPER = {     # AP, AP50, AP75 (appendix A.3)
    "MoCo-v3": (0.225, 0.404, 0.222), "MoCo-v3 + AugSelf": (0.197, 0.359, 0.192),
    "MoCo-v3 + STL": (0.221, 0.400, 0.218), "MoCo-v3 + SER": (0.242, 0.428, 0.244)}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of COCO 2017: annotations, train2017, val2017")
    parser.set_defaults(ratio=0)     # for ser.batch_items: there is no b2
    add = parser.add_argument
    add("--iterations", type=ser.count, default=45000, help="training steps (paper: 45k)")
    add("--batch-size", type=ser.count, default=32, help="images per step, over all ranks")
    add("--base-lr", type=ser.positive, default=1e-4, help="rate, for any batch (ViTDet: for 64)")
    add("--size", type=ser.count, default=800, help="shorter side of images, pixels")
    add("--save-every", type=ser.count, default=500, help="steps between checkpoints and log lines")
    return parser.parse_args(argv)


# ==== Detector ===========================================================================
# Choice: a plain ViT has one map, and objects come in all sizes. So the detector reads five
# maps. Trained layers make four of them.
class Pyramid(nn.Module):
    """ViTDet's simple feature pyramid on a frozen encoder: images (B, 3, h, w) -> five maps of C
    channels at 4, 2, 1, 1/2 and 1/4 of the resolution of the token grid."""
    out_channels = 256     # Faster R-CNN reads it

    def __init__(self, encoder: ser.ViT):
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        D = encoder.dim
        C = self.out_channels
        twice = nn.ConvTranspose2d(D, D // 2, 2, 2)
        four_times = nn.Sequential(
            nn.ConvTranspose2d(D, D // 2, 2, 2), LayerNorm2d(D // 2, 1e-6), nn.GELU(),
            nn.ConvTranspose2d(D // 2, D // 4, 2, 2))
        scales = ((four_times, D // 4), (twice, D // 2), (nn.Identity(), D), (nn.MaxPool2d(2), D))

        self.levels = nn.ModuleList()
        for scale, width in scales:
            to_channels = nn.Conv2d(width, C, 1, bias=False)
            smooth = nn.Conv2d(C, C, 3, padding=1, bias=False)
            norms = (LayerNorm2d(C, 1e-6), LayerNorm2d(C, 1e-6))
            level = nn.Sequential(scale, to_channels, norms[0], smooth, norms[1])
            self.levels.append(level)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        # Maps are made in bf16 and returned in fp32. torchvision computes boxes in the type of
        # the heads' outputs, and bf16 would place a box at 800 pixels in steps of 4.
        with eval_linear.autocast(images):
            # Choice: the map of the last block alone, after the encoder's last LayerNorm.
            # Images are padded to the size of the batch, and tokens attend to padding, too.
            x = eval_linear.map_after(self.encoder, self.encoder.depth, images)
            maps = {str(place): level(x).float() for place, level in enumerate(self.levels)}

        maps["pool"] = maps["3"][:, :, ::2, ::2]
        return maps


def detector(encoder: ser.ViT, classes: int, args: Namespace) -> FasterRCNN:
    """torchvision's Faster R-CNN for the labels below `classes`, 0 being the background. It takes
    images in [0, 1] of any size, and normalises them."""
    if encoder.patch_size not in (4, 8, 16, 32):     # torchvision rounds scales to powers of two
        sys.exit(f"the patch size is {encoder.patch_size}: should be 4, 8, 16 or 32")
    torch.manual_seed(args.seed)

    # Choice: as usual, anchors of 32 to 512 pixels, for patches of 16, and no side above 1333.
    sides = [(2 * encoder.patch_size * 2 ** level,) for level in range(5)]
    anchors = AnchorGenerator(sides, [(0.5, 1.0, 2.0)] * 5)
    longest = round(args.size * 5 / 3)

    # Choice: RPN and box head are torchvision's; ViTDet's have more convolutions. Sides are
    # padded to multiples of 4 patches, the side of the coarsest cells. Otherwise anchors would
    # lie beside their cells, as torchvision rounds the spacing of anchors down.
    coarsest = 4 * encoder.patch_size
    model = FasterRCNN(Pyramid(encoder), classes, args.size, longest,
                       rpn_anchor_generator=anchors, size_divisible=coarsest)

    # torchvision takes the scales of the maps from the first images, without their padding. Very
    # wide ones, which get much padding, would give wrong scales. So the first one is a square.
    maps = model.backbone(torch.zeros(1, 3, coarsest, coarsest))
    model.roi_heads.box_roi_pool(maps, [torch.zeros(1, 4)], [(coarsest, coarsest)])
    return model


# ==== Data: COCO as it is downloaded =====================================================
def index_of(args: Namespace, name: str) -> Path:
    """The file of the boxes of "train2017" or "val2017"."""
    return Path(args.data, "annotations", f"instances_{name}.json")


def photos(args: Namespace, name: str, train: bool) -> Dataset:
    """The images of "train2017" or "val2017", ordered by id: index -> (3, h, w) in [0, 1], and its
    "image_id". Those to train on have "boxes", (n, 4) of left, top, right and bottom in pixels of
    the stored image (no turn by EXIF), and "labels", (n,) of COCO's ids, 1..90 with gaps."""
    to_float = v2.ToDtype(torch.float32, scale=True)
    transforms = v2.Compose([v2.ToImage(), to_float, v2.ClampBoundingBoxes()])
    data = CocoDetection(Path(args.data, name), index_of(args, name), transforms=transforms)
    for annotation in data.coco.anns.values():
        annotation.pop("segmentation", None)     # gigabytes, of which each worker has its copy

    if train:
        # A detector learns neither from crowds nor from boxes without an area.
        annotations = data.coco.imgToAnns
        for items in annotations.values():
            items[:] = [x for x in items if not x["iscrowd"] and min(x["bbox"][2:]) > 0]
        data.ids = [image_id for image_id in data.ids if annotations[image_id]]

    return wrap_dataset_for_transforms_v2(data)


# ==== Training and average precision =====================================================
def lr_at(step: int, args: Namespace) -> float:
    """Linear warmup, then a tenth from 2/3 of the steps on and a hundredth from 8/9 on."""
    # Choice: 1k, 30k and 40k of 45k; Detectron2's usual schedule of 90k steps has 1k, 60k and 80k.
    warmup = args.iterations / 45
    rate = args.base_lr * min(1.0, (step + 1) / warmup)
    for share in (2 / 3, 8 / 9):
        if step >= round(share * args.iterations):
            rate = rate / 10
    return rate


def train(model: FasterRCNN, data: Dataset, args: Namespace, run: dict, path: Path) -> None:
    """Train all but the encoder. If there is a checkpoint at `path`, training goes on from it; it
    must have the settings `run`."""
    ranks, rank = ser.ranks_and_rank()
    device = next(model.parameters()).device
    # Choice: AdamW with ViTDet's rate and decay; here norms decay, too.
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    start = ser.resume(path, run, model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model

    # Choice: the last, incomplete batch of an epoch is not used.
    items = ser.batch_items(len(data), args, start, args.iterations)
    own = [[index for _, index, _ in batch] for batch in items]
    loader = DataLoader(data, batch_sampler=own, collate_fn=list, num_workers=args.workers)

    flip = v2.RandomHorizontalFlip()     # Choice: flips are the only augmentation
    plan = {"steps": args.iterations, "batch_size": args.batch_size}
    log, bar = ser.open_log(path.with_suffix(".jsonl"), Namespace(**run | plan), start)
    for step, batch in enumerate(loader, start):
        # Flips, and the proposals that torchvision trains on, are sampled from this seed.
        torch.manual_seed(ser.seed_of(args.seed, "coco", step, rank))
        images = []
        targets = []
        for image, target in batch:
            image, target = flip(image, target)
            images.append(image.to(device))
            boxes = target["boxes"].float()
            targets.append({"boxes": boxes.to(device), "labels": target["labels"].to(device)})

        lr = lr_at(step, args)
        optimizer.param_groups[0]["lr"] = lr
        losses = parallel(images, targets)     # of the RPN and of the boxes, four
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update(args.batch_size)

        done = step + 1
        if done % args.save_every == 0 or done == args.iterations:
            ser.log_and_check(log, bar, done, {"loss": loss, **losses}, lr)
            if rank == 0:
                encoder = model.backbone.encoder.state_dict()     # as in all checkpoints
                ser.save(path, step=done, settings=run,
                         model=model.state_dict(), encoder=encoder,
                         optimizer=optimizer.state_dict())


@torch.no_grad()
def precision(model: FasterRCNN, data: Dataset, device: torch.device, args: Namespace) -> dict:
    """AP (mean over IoU .5 to .95), AP50 and AP75 at up to 100 detections an image, as COCO's own
    code computes them. Ranks share the images."""
    from pycocotools.cocoeval import COCOeval

    ranks, rank = ser.ranks_and_rank()
    own = Subset(data, range(rank, len(data), ranks))
    # One image at a time: torchvision pads a batch to its largest image, tokens attend to the
    # padding too, and the result would depend on an image's neighbours.
    loader = DataLoader(own, batch_size=None, num_workers=args.workers)

    results = []
    for image, truth in tqdm(loader, disable=rank > 0):
        output = model([image.to(device)])[0]
        boxes = box_convert(output["boxes"], "xyxy", "xywh")     # left, top, width and height
        labels = output["labels"].tolist()
        scores = output["scores"].tolist()
        for label, box, score in zip(labels, boxes.tolist(), scores):
            results.append({"image_id": truth["image_id"], "category_id": label,
                            "bbox": box, "score": score})

    if ranks > 1:
        parts = [results] * ranks     # replaced by those of all ranks
        torch.distributed.all_gather_object(parts, results)
        results = sum(parts, [])
    if rank > 0 or not results:     # rank 0 reports, and loadRes refuses an empty list
        return {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}

    with redirect_stdout(sys.stderr):     # results are written first, then printed
        evaluation = COCOeval(data.coco, data.coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(("AP", "AP50", "AP75"), evaluation.stats.tolist()))


def evaluate(args: Namespace, device: torch.device) -> None:
    """Train the detector, or go on with it; measure its AP, write and print it."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "coco.json")
    train_set = photos(args, "train2017", train=True)
    val = photos(args, "val2017", train=False)
    if 0 in val.coco.cats or val.coco.cats != train_set.coco.cats:     # 0 is the background
        sys.exit("the categories of train2017 and val2017 should be the same, numbered from 1 on")
    names = [train_set.coco.imgs[number]["file_name"] for number in train_set.ids]
    run = training_settings("coco", args, checkpoint, names)
    # Images of the same names may have other boxes.
    boxes = [zlib.crc32(index_of(args, name).read_bytes()) for name in ("train2017", "val2017")]
    run["coco_boxes"] = boxes[0]

    classes = max(val.coco.cats) + 1
    model = detector(checkpoint.encoder, classes, args).to(device)
    train(model.train(), train_set, args, run, path.with_suffix(".pt"))
    results = precision(model.eval(), val, device, args)
    ranks, rank = ser.ranks_and_rank()
    if rank > 0:
        return

    rows = eval_linear.make_rows(results, "val2017", len(val.coco.cats), run["depth"])
    rows = [row | {"ranks": ranks} for row in rows]     # with which random numbers differ
    images = eval_linear.describe_sets({"train2017": train_set, "val2017": val})
    images += f", boxes {boxes[0]:08x} {boxes[1]:08x}"
    eval_linear.add_rows(path, rows, args, checkpoint, images)
    for name, values in {"here": results.values(), **PAPER}.items():
        print(f"{name:40}" + "".join(f"{value:8.3f}" for value in values))
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)
