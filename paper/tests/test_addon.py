"""What AugSelf, EquiMod, STL and E-SSL share, at toy size."""
import json
import os
import re
import runpy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import ser
from paper.methods import addon, augself, equimod, essl, stl

METHODS = dict(augself=augself, equimod=equimod, stl=stl, essl=essl)
SIZE = dict.fromkeys(METHODS, "--image-size 16 --dim 16 --moco-hidden 32 --batch-size 8 ")
SIZE["essl"] += "--local-size 8 "

def toy(name, flags=""):
    """(settings, model with random weights) of a method; depth 4, a plain ViT."""
    args = METHODS[name].settings((SIZE[name] + flags).split())
    model = METHODS[name].build(args)
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=g)
    return args, model

def load(data, args):
    """The first batch of a data set."""
    keys = ser.batch_keys(len(data.source), args, 0, 1)
    return next(iter(torch.utils.data.DataLoader(data, batch_sampler=keys)))

def views_of(name, args):
    """The views of a batch of noise, through the data set of a method and a DataLoader."""
    g = torch.Generator().manual_seed(2)
    source = torch.randint(256, (12, 3, 24, 18), generator=g, dtype=torch.uint8)
    return ser.make_views(load(METHODS[name].dataset(source, args), args), args, 0)

def slow_info_nce(a, b, temperature):
    """Row by row: 2 T times the mean of -log softmax of the own row among all of b."""
    total = 0.0
    for i in range(len(a)):
        s = F.cosine_similarity(a[i][None], b) / temperature
        total = total - 2 * temperature * s.log_softmax(0)[i] / len(a)
    return total

@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_moco_v3s_plus_weight_times_the_methods_own(name):
    """On MoCo-v3's T; every parameter gets a gradient, as DDP demands."""
    args, model = toy(name, "--weight 0.7")
    assert addon.view_settings(args) == list(ser.two_views([], args).view_settings)
    views = views_of(name, args)
    losses = model(views)
    plain = ser.SER(model.base, [])(views[:2])
    seen = essl.turned(views) if name == "essl" else views
    cls = [model.base.encoder(view.b1).cls for view in seen]
    equiv = model.equivariance_loss(cls, views)
    assert_close(losses, {**plain, "loss": plain["loss"] + 0.7 * equiv, "equiv": equiv.detach()})
    losses["loss"].backward()
    for key, p in model.named_parameters():
        assert not p.requires_grad or p.grad.abs().sum() > 0, key

@pytest.mark.parametrize("name", METHODS)
def test_an_earlier_layer_is_read_under_a_norm_of_its_own(name):
    """f is the [CLS] after block 2; at the last layer there is no other norm."""
    args, model = toy(name, "--layer 2")
    view = views_of(name, args)[0]
    tokens = []
    model.base.encoder.blocks[1].register_forward_hook(lambda *call: tokens.append(call[2]))
    read = []
    model.equivariance_loss = lambda features, views: read.extend(features) or torch.ones(1)
    model([view, view, view])
    norm = model.norm
    assert_close(read[0], F.layer_norm(tokens[0][:, 0], (16,), norm.weight, norm.bias, 1e-6))
    assert toy(name)[1].norm is None

@pytest.mark.parametrize("name, count, weight", [
    ("augself", 44_209_288, 0.5), ("equimod", 43_271_296, 1.0),
    ("stl", 62_175_872, 1.0), ("essl", 43_287_684, 1.0)])
def test_parameter_counts_are_the_papers_and_weights_the_methods_own(name, count, weight):
    """Table 1, momentum branch aside; AugSelf's 43.7 M there are with another head."""
    with torch.device("meta"):
        model = METHODS[name].build(METHODS[name].settings(["--data", "x"]))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
    assert model.weight == weight
    assert model.temperature == 0.2 or name in ("augself", "essl")

@pytest.mark.parametrize("name", METHODS)
def test_a_command_trains(name, tmp_path, monkeypatch):
    """Two steps on synthetic images; the checkpoint has the encoder."""
    images = ser.synthetic_images(16, 16, 0)
    monkeypatch.setattr(ser, "synthetic_images", lambda *_: images)
    words = SIZE[name] + f"--epochs 1 --log-every 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [name] + words.split())
    runpy.run_path(METHODS[name].__file__, run_name="__main__")
    lines = [json.loads(line) for line in open(tmp_path / "log.jsonl")]
    assert (lines[0]["steps"], lines[0]["layer"], lines[0]["ratio"]) == (2, 4, 0)
    assert lines[2]["equiv"] != lines[1]["equiv"]
    assert ser.load_encoder(tmp_path / "last.pt")(torch.zeros(1, 3, 16, 16)).cls.shape == (1, 16)

@pytest.mark.parametrize("name", METHODS)
def test_settings_without_l_eq_are_refused_and_the_help_has_no_idle_flags(name, capsys):
    """There is no b2, and [CLS] must be there after block --layer, one of four."""
    for flags in ("--ratio 0.25", "--layer 5", "--layer 0", "--cls-layer 2 --layer 2"):
        with pytest.raises(SystemExit, match=flags.split()[-2]):
            toy(name, flags)
    with pytest.raises(SystemExit):
        toy(name, "--help")
    flags = re.findall("--[a-z-]+", capsys.readouterr().out)
    assert not {"--ratio", "--equiv-layers", "--group"} & set(flags)
    assert ("--temperature" in flags) == (name in ("equimod", "stl"))     # of InfoNCE

def rank_result(name):
    """(losses, gradients under DDP) of the images that this rank's loader gives it."""
    args, model = toy(name)
    views = views_of(name, args)
    model.eval()     # on gloo each rank has a BatchNorm mean of its own
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    losses = parallel(views)
    losses["loss"].backward()
    values = torch.stack(list(losses.values())).detach()
    return values, [p.grad for p in model.parameters() if p.requires_grad]

def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save([rank_result(name) for name in METHODS], folder / f"{rank}.pt")
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def test_two_ranks_equal_one_process_in_value_and_gradient(tmp_path):
    torch.multiprocessing.start_processes(rank_main, (tmp_path,), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, (values, gradients), (others, _) in zip(METHODS, first, second):
        wanted, wanted_gradients = rank_result(name)
        assert_close((values + others) / 2, wanted)
        for gradient, right in zip(gradients, wanted_gradients, strict=True):
            assert (gradient - right).norm() < 1e-3 * right.norm() + 1e-5
