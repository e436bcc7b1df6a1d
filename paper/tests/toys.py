"""What the tests of paper/ share: toy checkpoints, heads, and folders of images."""
import json
from pathlib import Path

import torch
from PIL import Image

import eval_linear
import ser
from test_ser import TOY, seeded, shake, toy

CLASSES = [f"n{label:02}" for label in range(6)]


def toy_checkpoint(folder, seed=0, shaken=True, **settings):
    """The path of folder/last.pt, as ser.train writes it. shaken: with random weights, else with
    those that a run begins with. settings replace those of TOY; the model is ser.build's for all
    methods. Blocks 2 and 3 have a [CLS] to read: features of both are 2 * 16 wide."""
    args = toy(seed=seed, **settings)
    model = ser.build(args)
    if shaken:
        shake(model, seed)
    path = Path(folder, "last.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    ser.save(path, step=7, settings=vars(args), encoder=model.base.encoder.state_dict(),
             model=model.state_dict(), optimizer={})
    return str(path)


def toy_head(checkpoint, name="head-toy.pt"):
    """A linear head of two blocks, as eval_linear.py leaves one beside a checkpoint; its path."""
    path = Path(checkpoint).with_name(name)
    weight = torch.randn(len(CLASSES), 2 * TOY["dim"], generator=seeded(3))
    settings = dict(data="D", epochs=9, lr=[0.1, 1.0], batch_size=8, cache=True, seed=4)
    weights = eval_linear.fingerprint(ser.load_encoder(checkpoint))
    ser.save(path, weight=weight, bias=torch.zeros(len(CLASSES)), classes=CLASSES, blocks=2,
             lr=0.1, weights=weights, settings=settings)
    return str(path)


def call(module, *words):
    """Run an evaluation as by its command line."""
    module.main(module.settings, module.evaluate, [str(word) for word in words])


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
