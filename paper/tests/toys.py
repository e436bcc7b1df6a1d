"""What the tests of paper/ share: toy checkpoints, heads, and folders of images."""
import json
from pathlib import Path

import torch
from PIL import Image

import eval_linear
import ser

# Blocks 2 and 3 have a [CLS] to read: features of the last two blocks are 2 * 16 wide.
TOY = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1, equiv_layers=[1],
           ratio=0.5, moco_hidden=16, batch_size=8, workers=0)
CLASSES = [f"n{label:02}" for label in range(6)]

def seeded(seed=0):
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)

def toy_checkpoint(folder, seed=0, shaken=True, **settings):
    """The path of folder/last.pt, as ser.train writes it. shaken: weights are N(0, .3), so that no
    [CLS] is 1e-6 and no bias is zero, which would hide mistakes; else those that a run begins with.
    settings replace those of TOY; the model is ser.build's for all methods."""
    args = ser.parse([], small=TOY | settings | dict(seed=seed))
    model = ser.build(args)
    generator = seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            if shaken:
                p.normal_(0, 0.3, generator=generator)
    path = Path(folder, "last.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    ser.save(path, step=7, settings=vars(args), encoder=model.base.encoder.state_dict(),
             model=model.state_dict(), optimizer={})
    return str(path)

def toy_head(checkpoint):
    """The linear head of two blocks that eval_linear.py leaves beside a checkpoint; its path."""
    path = Path(checkpoint).with_name("head.pt")
    weight = torch.randn(len(CLASSES), 2 * TOY["dim"], generator=seeded(3))
    ser.save(path, weight=weight, bias=torch.zeros(len(CLASSES)), classes=CLASSES, blocks=2,
             encoder=eval_linear.fingerprint(ser.load_encoder(checkpoint)))
    return str(path)

def become_rank(monkeypatch, rank):
    """This process takes itself for one of two ranks, without the other: sums are its own."""
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, rank))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: None)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda model: model)

def values(path, **keys):
    """measure -> value, of the rows of a results file with these keys."""
    rows = json.loads(Path(path).read_text())["rows"]
    return {row["measure"]: row["value"] for row in rows if keys.items() <= row.items()}

def class_folders(root, per_class=2, size=20, seed=5, classes=CLASSES, ending="png"):
    """root/CLASS/NUMBER.png of 4 x 4 random colours, which tell an encoder the place; returns
    root. Of six classes, 000, 006, ... are of the first, 001, 007, ... of the second."""
    images = len(classes) * per_class
    colours = torch.randint(256, (images, 3, 4, 4), generator=seeded(seed), dtype=torch.uint8)
    pixels = torch.nn.functional.interpolate(colours, (size, size)).permute(0, 2, 3, 1)
    for number, image in enumerate(pixels.numpy()):
        folder = Path(root, classes[number % len(classes)])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03}.{ending}")
    return str(root)
