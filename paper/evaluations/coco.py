"""Detection on COCO with a frozen encoder: the COCO table of the paper's appendix (A.3).

    torchrun --nproc_per_node=8 -m paper.evaluations.coco --data /coco --checkpoint runs/ser/last.pt
    python -m paper.evaluations.coco --data /coco --checkpoint runs/ser/last.pt --batch-size 8

`/coco` is COCO 2017 as it is downloaded: annotations/instances_{train,val}2017.json, train2017/ and
val2017/. It needs `pip install -r paper/requirements.txt`. The result goes to coco.json beside
the checkpoint; an interrupted run continues with the same command.

Paper: the encoder is frozen, "the detection head" is trained for 45k iterations of 32 images of
train2017, and AP is reported on val2017. It leaves open the detector, its neck, the features, the
size of the images, the optimizer and the augmentation. Each is a flag or has a `# Choice:` below:
torchvision's Faster R-CNN, on the simple feature pyramid of ViTDet (Li et al. 2022) over the map of
the last block. Numbers of another detector do not compare; those of two encoders on this one do.

Sections: 1 Settings, 2 Data, 3 Training and average precision, 4 Command line. The detector is in
detector.py. Axes: n boxes of an image.
"""
from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from typing import Any, ClassVar, NamedTuple, Sequence

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

import ser
from eval_linear import frozen_encoder
from paper.evaluations import training
from paper.evaluations.detector import detector
from paper.evaluations.output import check_out
from ser import INF, Key, UserError, require, rng, setting

PAPER = {     # AP, AP50, AP75 (appendix A.3)
    "MoCo-v3": (0.225, 0.404, 0.222),
    "MoCo-v3 + AugSelf": (0.197, 0.359, 0.192),
    "MoCo-v3 + STL": (0.221, 0.400, 0.218),
    "MoCo-v3 + SER": (0.242, 0.428, 0.244),
}

# ==== 1. Settings =================================================================================
@dataclasses.dataclass(frozen=True)
class Settings(training.Settings):
    """The settings of a run. Choice: what the paper does not name is ViTDet's AdamW, with the usual
    warmup, steps and sizes of Detectron2."""
    data: str = setting("", 0, 0, "folder of COCO 2017: annotations, train2017, val2017")
    iterations: int = setting(45000, 1, INF, "training steps (paper: 45k)")
    batch_size: int = setting(32, 1, INF, "images per step, over all ranks (paper: 32)")
    lr: float = setting(1e-4, 0, INF, "of AdamW, not scaled (ViTDet: 1e-4, for 64 images)")
    weight_decay: float = setting(0.1, 0, INF, "of AdamW (ViTDet: 0.1)")
    warmup: int = setting(1000, 0, INF, "steps of linear warmup (Detectron2: 1000)")
    min_size: int = setting(800, 16, INF, "shorter side of an image, pixels (usually 800)")
    max_size: int = setting(1333, 16, INF, "longest side of an image, pixels (usually 1333)")
    anchors: tuple[int, ...] = setting((32, 64, 128, 256, 512), 1, INF,
                                       "side of the anchors of each of the five levels, pixels")
    save_every: int = setting(1000, 1, INF, "steps between checkpoints")

    name: ClassVar[str] = "coco"
    may_change: ClassVar[tuple[str, ...]] = (*training.Settings.may_change, "save_every")
    program: ClassVar[str] = "-m paper.evaluations.coco"

    def steps(self, n: int) -> int:
        """Steps of the whole run, on any number n of images."""
        return self.iterations

    def save_steps(self, n: int) -> int:
        """Steps between checkpoints."""
        return self.save_every

    def lr_at(self, step: int, n: int) -> float:
        """Linear warmup, then a tenth from 2/3 of the steps on and a hundredth from 8/9 on."""
        # Choice: 30k and 40k of 45k, as the usual schedule of 90k steps has 60k and 80k.
        rate = self.lr * min(1.0, (step + 1) / max(1, self.warmup))
        for share in (2 / 3, 8 / 9):
            if step >= round(share * self.iterations):
                rate = rate / 10
        return rate

# ==== 2. Data: COCO as it is downloaded ===========================================================
class Photo(NamedTuple):
    """An image file and what is in it."""
    image_id: int      # COCO's
    path: str
    # Lists: two tensors for each image would be too many files where loaders are not forked.
    boxes: list[list[float]]     # n of left, top, right, bottom in pixels of the stored image
    labels: list[int]            # n of COCO's category ids, 1..90 with gaps

def annotations(root: str, name: str) -> Any:
    """pycocotools' index of the annotations of `name`. Raises UserError where they or it lack."""
    path = os.path.join(root, "annotations", f"instances_{name}.json")
    require(os.path.isfile(path), f"--data {root}: no {path}; give the folder that holds "
            "annotations/, train2017/ and val2017/")
    try:
        from pycocotools.coco import COCO
    except ImportError:
        raise UserError("COCO's annotations need pycocotools: pip install -r "
                        "paper/requirements.txt") from None
    with contextlib.redirect_stdout(io.StringIO()):     # it reports how long it took
        return COCO(path)

def photos(coco: Any, folder: str) -> list[Photo]:
    """All images of an index, in the order of their ids, with the boxes that a detector learns
    from: neither crowds nor boxes without an area."""
    found = []
    for image_id in sorted(coco.imgs):
        entry = coco.imgs[image_id]
        boxes = []
        labels = []
        for item in coco.imgToAnns[image_id]:
            left, top, width, height = item["bbox"]
            right = min(left + width, entry["width"])
            bottom = min(top + height, entry["height"])
            if not item.get("iscrowd", 0) and right > left and bottom > top:
                boxes.append([left, top, right, bottom])
                labels.append(item["category_id"])
        path = os.path.join(folder, entry["file_name"])
        found.append(Photo(image_id, path, boxes, labels))
    return found

class Loaded(torch.utils.data.Dataset):
    """ser.Key -> (image (3, h, w) uint8, boxes, labels, image_id, name of a broken file or "").
    Mirrored or not by (seed, epoch, index); with epoch None, as it is stored."""
    collate = staticmethod(list)     # images differ in size

    def __init__(self, source: Sequence[Photo], seed: int):
        self.source = source
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, Tensor, int, str]:
        photo = self.source[key.index]
        boxes = torch.tensor(photo.boxes, dtype=torch.float32).view(-1, 4)
        labels = torch.tensor(photo.labels, dtype=torch.int64)
        try:
            # The boxes are those of the stored pixels: unlike ser.read_image, no turn by EXIF.
            with Image.open(photo.path) as file:
                image = pil_to_tensor(file.convert("RGB"))
        except Exception as error:     # Pillow raises what it likes
            nothing = torch.zeros(3, 64, 64, dtype=torch.uint8)
            return nothing, boxes[:0], labels[:0], photo.image_id, f"{photo.path} ({error})"
        if key.epoch is not None:
            # Choice: flips are the only augmentation.
            draw = torch.rand((), generator=rng(self.seed, "flip", key.epoch, key.index))
            if draw < 0.5:
                left, top, right, bottom = boxes.unbind(1)
                width = image.shape[-1]
                image = image.flip(-1)
                boxes = torch.stack([width - right, top, width - left, bottom], 1)
        return image, boxes, labels, photo.image_id, ""

# ==== 3. Training and average precision ===========================================================
def inputs(batch: list[Any], device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What Faster R-CNN takes: images in [0, 1], and their boxes and labels."""
    images = []
    targets = []
    for image, boxes, labels, *_ in batch:
        images.append(image.to(device).float() / 255)
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device)})
    return images, targets

@torch.no_grad()
def detect(model: FasterRCNN, images: Loaded, cfg: Settings, device: torch.device, rank: int,
           ranks: int) -> tuple[list[dict[str, Any]], set[str]]:
    """What the detector finds in this rank's share of the images, in COCO's format of results, and
    the broken files."""
    model.eval()
    # One image at a time: torchvision pads a batch to its largest image, tokens attend to the
    # padding too, and the result would depend on an image's neighbours.
    loader = training.loader_of_val(images, 1, cfg, rank, ranks)
    found = []
    broken = set()
    for batch in tqdm(loader, "val2017", disable=rank > 0):
        for output, (*_, image_id, name) in zip(model(inputs(batch, device)[0]), batch):
            if name:     # what is seen in its place is no detection
                broken.add(name)
                continue
            rows = zip(*(output[key].tolist() for key in ("boxes", "labels", "scores")))
            for (left, top, right, bottom), label, score in rows:
                found.append(dict(image_id=image_id, category_id=label, score=score,
                                  bbox=[left, top, right - left, bottom - top]))
    return found, broken

def precision(coco: Any, detections: list[dict[str, Any]]) -> dict[str, float]:
    """AP (mean over IoU .5 to .95), AP50 and AP75 at up to 100 detections an image, as COCO's own
    code computes them."""
    if not detections:     # which loadRes refuses
        return {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
    from pycocotools.cocoeval import COCOeval
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(("AP", "AP50", "AP75"), evaluation.stats.tolist()))

# ==== 4. Command line =============================================================================
def evaluate(cfg: Settings) -> dict[str, Any]:
    """Train the detector, or continue, and measure its AP; returns the result. Raises UserError."""
    ser.check_ranges(cfg)
    begun = time.perf_counter()
    require(cfg.data != "", "--data: the folder of COCO 2017 is needed")
    device, rank, ranks = ser.setup()
    encoder, _, digest = frozen_encoder(cfg)
    check_out(cfg.result, ".json", cfg.program, digest)
    truth = annotations(cfg.data, "val2017")
    val = Loaded(photos(truth, os.path.join(cfg.data, "val2017")), cfg.seed)
    learned = photos(annotations(cfg.data, "train2017"), os.path.join(cfg.data, "train2017"))
    # Without the 1,021 images of train2017 that have no box to learn from.
    train = Loaded([photo for photo in learned if len(photo.boxes) > 0], cfg.seed)
    model = detector(encoder, max(truth.cats) + 1, cfg).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Choice: norms and biases decay, too.
    optimizer = torch.optim.AdamW(trained, cfg.lr, weight_decay=cfg.weight_decay)

    def loss_of(parallel: nn.Module, batch: list[Any]) -> training.LossAndBroken:
        losses = parallel(*inputs(batch, device))     # of the RPN and of the boxes, four in all
        return sum(losses.values()), {name for *_, name in batch} - {""}

    origin = {"sha256": digest, "images": ser.digest([photo.path for photo in train.source])}
    losses, broken = training.train(model, encoder.shape, optimizer, train, loss_of, cfg, origin)
    detections, broken_val = detect(model, val, cfg, device, rank, ranks)
    everything = [detections] * ranks
    if ranks > 1:
        dist.all_gather_object(everything, detections)
    broken_val = training.union(broken_val)
    training.check_broken(broken_val, len(val))
    found = precision(truth, sum(everything, []))
    found |= {"losses": losses}
    images = {"train": len(train), "val": len(val)}
    return training.finish(cfg, digest, images, found, broken | broken_val, begun)

def main(argv: list[str] | None = None) -> int:
    """Train and measure as the command line says; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings)
        result = evaluate(cfg)
        if ser.ranks_and_rank()[1] > 0:
            return
        title = f"{result['encoder']} encoder, {cfg.iterations} steps of {cfg.batch_size}"
        note = "black and without objects in training, and in val nothing is found in it"
        print(training.table(result, title, ("AP", "AP50", "AP75"), 3, PAPER, note))
        print(f"  {result['minutes']:.1f} minutes, written to {cfg.result}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())
