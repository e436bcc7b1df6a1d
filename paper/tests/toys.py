"""What the tests of paper/evaluations share: toy checkpoints, heads, and folders of images."""
import functools
import hashlib
import io
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image

import ser
from test_ser import seeded, shake

SHAPE = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1, equiv_layers=(1,),
             batch_size=8)
CLASSES = [f"n{label:02}" for label in range(6)]

def toy_checkpoint(folder, build=ser.build, kind=ser.Config, shaken=0, **settings):
    """A checkpoint such as a run of ser.py, or of another method, writes; random weights, drawn
    with the seed `shaken` (None: those that a run begins with)."""
    path = Path(folder, "last.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint_bytes(build, kind, shaken, **settings))
    return str(path)

@functools.cache
def checkpoint_bytes(build, kind, shaken, **settings):
    cfg = kind(**SHAPE | settings)
    model = build(cfg)
    if shaken is not None:
        shake(model, shaken)
    file = io.BytesIO()
    torch.save(dict(step=7, program=cfg.program, shape=model.base.encoder.shape, config=vars(cfg),
                    images="8", model=model.state_dict(), optimizer={}), file)
    return file.getvalue()

def toy_head(checkpoint, name="eval-head.pt", suffix="", classes=CLASSES, blocks=2, seed=3):
    """A head such as eval_linear.py leaves beside a checkpoint."""
    digest = hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()[:16] + suffix
    weight = torch.randn(len(classes), blocks * SHAPE["dim"], generator=seeded(seed))
    ser.save_whole(Path(checkpoint).with_name(name), dict(
        weight=weight, bias=torch.zeros(len(classes)), classes=list(classes), blocks=blocks,
        digest=digest))

def class_folders(root, per_class=2, size=20, seed=5, classes=CLASSES, ending="png"):
    """root/CLASS/*.png of 4 x 4 random colours, which tell an encoder the place; returns root."""
    n = len(classes) * per_class
    colours = torch.randint(256, (n, 3, 4, 4), generator=seeded(seed), dtype=torch.uint8)
    images = torch.nn.functional.interpolate(colours, (size, size))
    for n, image in enumerate(images):
        folder = Path(root, classes[n % len(classes)])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{n:03}.{ending}")
    return str(root)

def meet(rank, ranks, folder):
    """Join the other gloo ranks of a test."""
    where = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
