"""Does L_equiv reach the weights? The authors' code and ours, on the same images, on a CPU.

    git clone https://github.com/aitrics-chris/SER release && git -C release checkout dbe5e93
    python -m paper.experiments.release --release release

The model is an untrained MoCo-v3 + SER with a ViT-S. The release's own classes compute its loss, in
one process with gloo and without DDP, on eight synthetic images, half of them b2. Settings are
those of run_pretrain.sh but for lambda, and for the mode `erl_inv`, as the release refuses its
`erl`. `device=rank` and `.cuda()` become the CPU, in fp32. An empty kornia jitters no image.
"""
import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ser


class OnCPU(TorchFunctionMode):
    """Within it, a device that is a number is the CPU, and `.cuda()` does nothing."""
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), int):
            kwargs = kwargs | {"device": "cpu"}
        return function(*args, **kwargs)


def gradient(module: nn.Module) -> Tensor:
    """The gradient of all parameters, as one vector, which is empty if none has a gradient."""
    gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat([torch.empty(0), *gradients])


def theirs(b1: Tensor, b2: Tensor, weight: float) -> dict[str, Tensor]:
    """Gradients of the release's model."""
    for name in ("kornia", "kornia.augmentation", "kornia.augmentation.container"):
        sys.modules.setdefault(name, MagicMock())
    from builder import moco, utils
    from vision_transformer import vit_small

    args = Namespace(arch="vit_small", equiv_mode="erl_inv", equiv_layer=3, stride=16,
                     equiv_scale=(0.7, 1.3), equiv_aspect_ratio=(3 / 4, 4 / 3),
                     equiv_lambda=weight, temperature_equiv=0.5)
    torch.manual_seed(0)
    with redirect_stdout(sys.stderr):     # it prints a line when it is made
        model = moco.MoCo_ViT(args, vit_small, 256, 4096, 0.2)
    moves = utils.Aug_equi(0, args)
    with OnCPU():
        loss, _, _ = model.equiv(b1, b1.flip(3), b2, b2, moves, 0.99, weight)
        loss.backward()

    del model.base_encoder.head     # MoCo-v3's, which is no part of the encoder
    return {"encoder": gradient(model.base_encoder), "projector": gradient(model.projector_equiv)}


def ours(b1: Tensor, b2: Tensor, weight: float) -> dict[str, Tensor]:
    """Gradients of our model, with the defaults of ser.py but for the weight."""
    model = ser.build(ser.parse(["--data=none", f"--weight={weight}"]))
    generator = torch.Generator().manual_seed(0)
    views = []
    for images in (b1, b1.flip(3)):
        g = ser.sample_geometry(len(b2), generator=generator)
        views.append(ser.View(images, ser.rho(g, b2, 16), g, augmentation=None))
    model(views)["loss"].backward()
    return {"encoder": gradient(model.base.encoder), "projector": gradient(model.projectors)}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser()
    parser.add_argument("--release", required=True, help="clone of their code at dbe5e93")
    return parser.parse_args(argv)


def main(args: Namespace) -> None:
    """Print norms of the gradients by lambda = 0 and 10,000, and whether the gradients agree."""
    sys.path.insert(0, args.release)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    images, _ = ser.synthetic_images(8, 224, seed=0)
    b1, b2 = ser.normalise(images / 255).chunk(2)

    print("norm of the gradient      lambda 0   lambda 10,000")
    for name, gradients in (("release", theirs), ("ours", ours)):
        of_both = [gradients(b1, b2, weight) for weight in (0, 10_000)]
        for part in ("encoder", "projector"):
            pair = [found[part] for found in of_both]
            norms = [f"{one.double().norm():.5g}" if len(one) > 0 else "none" for one in pair]
            verdict = "equal to the bit" if torch.equal(*pair) else "different"
            print(f"{name + ', ' + part:20}{norms[0]:>14}{norms[1]:>16}   {verdict}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(settings())
