"""What AugSelf, EquiMod, STL and E-SSL share, at toy size."""
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import ser
from paper.methods import addon, augself, equimod, essl, stl
from test_ser import close, log_of, run_ranks, seeded, sentence, trained

METHODS = dict(augself=augself, equimod=equimod, stl=stl, essl=essl)
SIZE = dict.fromkeys(METHODS, "--image-size 16 --dim 16 --moco-hidden 32 --batch-size 12 ")
SIZE["essl"] += "--local-size 8 "


def toy(name, flags=""):
    """(settings, model with random weights) of a method; depth 4, a plain ViT."""
    args = METHODS[name].settings((SIZE[name] + flags).split())
    model = METHODS[name].build(args)
    generator = seeded(1)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    return args, model


def check_defaults(script, wanted):
    """What a run on ImageNet has, wherever it departs from ser.py's."""
    plain = vars(ser.parse(["--data", "imagenet"]))
    found = {}
    for name, value in vars(script.settings(["--data", "imagenet"])).items():
        if name in wanted or value != plain.get(name):
            found[name] = value
    assert found == wanted


def load(data, args):
    """The first batch of a data set, by a DataLoader."""
    keys = ser.batch_keys(len(data.source), args, 0, 1)
    return next(iter(DataLoader(data, batch_sampler=keys)))


def views_of(name, args):
    """The views of a batch of noise, through the data set of a method."""
    source = torch.randint(256, (31, 3, 24, 18), generator=seeded(2), dtype=torch.uint8)
    return ser.make_views(load(METHODS[name].dataset(source, args), args), args, 0)


def slow_info_nce(a, b, temperature):
    """Row by row: 2 T times the mean of -log softmax of the own row among all of b."""
    total = 0.0
    for i in range(len(a)):
        s = F.cosine_similarity(a[i][None], b) / temperature
        total = total - 2 * temperature * s.log_softmax(0)[i] / len(a)
    return total


def slow_norm(x, norm=None):
    """BatchNorm in training mode."""
    x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    return x if norm is None else x * norm.weight + norm.bias


def slow_mlp(head, x):
    """Linear, BatchNorm and ReLU in turns; linear, and perhaps a bias, at the end."""
    *hidden, out = head
    for i in range(0, len(hidden), 3):
        assert hidden[i].bias is None
        x = slow_norm(x @ hidden[i].weight.T, hidden[i + 1]).clamp(min=0)
    x = x @ out.weight.T
    return x if out.bias is None else x + out.bias


def check_gradients(fast, slow, features):
    """Of a loss and its oracle: the values, and the gradients of the features of each view."""
    close({"loss": fast}, {"loss": slow})
    pairs = zip(torch.autograd.grad(fast, features), torch.autograd.grad(slow, features))
    for number, (gradient, wanted) in enumerate(pairs):
        assert wanted.abs().max() > 1e-5, f"features {number} have no gradient"
        close({f"features {number}": gradient}, {f"features {number}": wanted}, 1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_moco_v3s_plus_weight_times_the_methods_own(name):
    """On MoCo-v3's T; every parameter gets a gradient, as DDP demands."""
    args, model = toy(name, "--weight 0.7")
    views = views_of(name, args)
    losses = model(views)
    plain = ser.SER(model.base, [])(views[:2])
    seen = essl.turned(views) if name == "essl" else views
    cls = [model.base.encoder(view.b1).cls for view in seen]
    equiv = model.equivariance_loss(cls, views)
    loss = plain["loss"] + 0.7 * equiv
    close(losses, {"loss": loss, "inv": plain["inv"], "equiv": equiv.detach()})
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
    close(read[0], F.layer_norm(tokens[0][:, 0], (16,), norm.weight, norm.bias, 1e-6))
    assert toy(name)[1].norm is None


@pytest.mark.parametrize("name, count, own", [
    ("augself", 44_209_288, dict(weight=0.5)),
    ("equimod", 43_271_296, dict(weight=1.0, temperature=0.2)),
    ("stl", 62_175_872, dict(weight=1.0, temperature=0.2)),
    ("essl", 43_287_684, dict(weight=1.0, local_size=96, local_area=[0.05, 0.14]))])
def test_parameter_counts_are_the_papers_and_the_defaults_the_methods_own(name, count, own):
    """Table 1, momentum branch aside; AugSelf's 43.7 M there are with another head."""
    args = METHODS[name].settings(["--data", "x"])
    with torch.device("meta"):
        model = METHODS[name].build(args)
    assert sum(p.numel() for p in trained(model).values()) == count
    shared = dict(out=f"runs/{name}", ratio=0.0, equiv_layers=[], cls_layer=0, layer=12,
                  blur=[1.0, 0.1], solarize=[0.0, 0.2])
    check_defaults(METHODS[name], shared | own)
    assert (model.weight, model.temperature) == (args.weight, args.temperature)
    assert addon.view_settings(args) == list(ser.two_views([], args).view_settings)


def test_views_1_and_2_have_their_own_blur_and_solarization():
    words = "--data x --image-size 32 --crop-min 0.2 --blur 0.3 0.4 --solarize 0.5 0.6"
    first, second = addon.view_settings(augself.settings(words.split()))
    assert first == ser.ViewSettings(32, (0.2, 1.0), 0.3, 0.5)
    assert second == ser.ViewSettings(32, (0.2, 1.0), 0.4, 0.6)


@pytest.mark.parametrize("name", METHODS)
def test_a_command_trains(name, tmp_path, monkeypatch):
    """Two steps on 31 synthetic images; the checkpoint has the encoder."""
    images = ser.synthetic_images(31, 16, 0)
    monkeypatch.setattr(ser, "synthetic_images", lambda n, size, seed: images)
    words = SIZE[name] + f"--epochs 1 --log-every 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [name] + words.split())
    runpy.run_path(METHODS[name].__file__, run_name="__main__")
    first, *steps = log_of(tmp_path)
    assert (first["steps"], first["layer"], first["ratio"]) == (2, 4, 0)
    assert steps[0]["equiv"] != steps[1]["equiv"]
    assert ser.load_encoder(tmp_path / "last.pt")(torch.zeros(1, 3, 16, 16)).cls.shape == (1, 16)


def test_settings_without_l_eq_are_refused():
    """There is no b2, and [CLS] must be there after block --layer, one of four."""
    for flags in ("--ratio 0.25", "--layer 5", "--cls-layer 2 --layer 2"):
        flag = flags.split()[-2]
        assert sentence(toy, "augself", flags).startswith(flag), flags


def rank_main(rank, ranks, out):
    """Losses, and gradients under DDP, of the images that this rank's loader gives it."""
    if ranks > 1:
        ser.setup()
    found = {}
    for name in METHODS:
        args, model = toy(name)
        views = views_of(name, args)
        model.eval()     # on gloo each rank has a BatchNorm mean of its own
        parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        losses = parallel(views)
        losses["loss"].backward()
        gradients = {key: p.grad for key, p in trained(model).items()}
        found[name] = [{key: value.detach() for key, value in losses.items()}, gradients]
    return found


def test_two_ranks_equal_one_process_in_value_and_gradient(tmp_path):
    one = rank_main(0, 1, tmp_path)
    first, second = run_ranks(rank_main, 2, tmp_path)
    for name, (losses, gradients) in one.items():
        for key, value in losses.items():
            mean = (first[name][0][key] + second[name][0][key]) / 2
            close({f"{name} {key}": mean}, {f"{name} {key}": value})
        for key, wanted in gradients.items():
            gap = first[name][1][key] - wanted
            assert gap.norm() < 1e-3 * wanted.norm() + 1e-5, f"{name}: gradient of {key}"
