"""What the evaluations share: flags, how they begin and end, checkpoints, names of pictures."""
import hashlib
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Callable, Sequence

import torch.distributed as dist

import eval_linear
import ser
from eval_linear import Checkpoint


def arguments(data: str = "", required: bool = False, several: bool = False) -> ArgumentParser:
    """The flags of all evaluations. data: the help of --data, "" for none; several: checkpoints."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    if data:
        add("--data", default="", required=required, help=data)
    if several:
        add("--checkpoint", nargs="+", required=True, help="last.pt of one or more runs")
        add("--label", nargs="+", help="their names; none: their paths")
    else:
        add("--checkpoint", default="", help="last.pt of a run of any method")
    add("--out", default="", help="folder of the results; none: that of the first checkpoint")
    add("--seed", type=int, default=0, help="seed of all that is sampled")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser


def main(settings: Callable, evaluate: Callable, argv: Sequence[str] | None = None,
         one_process: bool = False) -> None:
    """Run evaluate(args, device) with args = settings(argv), then end the group of processes.
    one_process: exit with one sentence under torchrun with several ranks."""
    args = settings(argv)
    if one_process and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("this evaluation takes one process: start it with python, not with torchrun")

    evaluate(args, ser.setup())
    if dist.is_initialized():
        dist.destroy_process_group()


def load_encoders(args: Namespace, results: str) -> tuple[list[tuple[str, Checkpoint]], Path]:
    """The checkpoints of a comparison with their labels, led by "untrained", the weights that the
    first run began with; and the path of the file `results`."""
    args.out = args.out or str(Path(args.checkpoint[0]).parent)
    checkpoints = [eval_linear.load(Namespace(checkpoint=path, data=args.data))
                   for path in args.checkpoint]
    trained = zip(args.label or args.checkpoint, checkpoints, strict=True)

    run = checkpoints[0].settings
    encoder = ser.seeded_encoder(Namespace(**run)).eval()
    untrained = Checkpoint(encoder, eval_linear.fingerprint(encoder), 0, run)
    return [("untrained", untrained), *trained], eval_linear.results_path(args, results)


def training_settings(name: str, args: Namespace, checkpoint: Checkpoint,
                      images: Sequence[str]) -> dict:
    """What must be the same when a training goes on from a file, for ser.resume: the settings of
    the encoder's own training and, as NAME_..., those of this one, its encoder and the names of
    its images below their folder. Folders may be renamed. Exits with one sentence if the ranks
    cannot share a batch."""
    ranks, _ = ser.ranks_and_rank()
    if args.batch_size % ranks > 0:
        sys.exit(f"--batch-size {args.batch_size}: should be a multiple of the {ranks} ranks")
    own = vars(args) | {"checkpoint": checkpoint.weights, "ranks": ranks, "images": len(images),
                        "checksum_of_names": ser.checksum(sorted(images))}
    for harmless in ("data", "out", "workers", "save_every"):
        own.pop(harmless, None)
    return checkpoint.settings | {f"{name}_{key}": value for key, value in own.items()}


def picture(path: Path, args: Namespace) -> Path:
    """The path of a picture beside results, with a name that other settings do not have."""
    digest = hashlib.sha256(repr(vars(args)).encode()).hexdigest()
    return path.with_name(f"{path.stem}-{digest[:8]}.png")
