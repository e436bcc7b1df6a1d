import contextlib
import importlib
import inspect
import runpy
from unittest.mock import create_autospec

import torch
from torch.utils.data import DataLoader

import ser
from test_ser import PAPER, close, log_of, noise, parametrize, pixels, run_ranks, same, sentence
from test_ser import shake, slow_info_nce, trained

ADDONS = ["augself", "equimod", "stl", "essl"]
NAMES = ["dino", "barlow_twins", "multicrop", "simclr", "turned", *ADDONS]
SCRIPTS = {name: importlib.import_module(f"paper.methods.{name}") for name in NAMES}

FLAGS = dict.fromkeys(SCRIPTS, "--image-size 16 --dim 16 --moco-hidden 32 --batch-size 12 ")
for base in SCRIPTS.keys() - ADDONS:
    FLAGS[base] += "--depth 3 --cls-layer 1 --equiv-layers 1 --ratio 0.33 "
FLAGS["dino"] += "--hidden 24 --outputs 20 --drop-path 0 --freeze-epochs 0.5 "
FLAGS["barlow_twins"] += "--hidden 24 "
FLAGS["multicrop"] += "--local-size 8 "
FLAGS["essl"] += "--local-size 8 "


def recipe(name):
    """What ser.train is given: build, data set, optimizer, schedule; of a script, or ser.py's."""
    own = vars(SCRIPTS[name])
    return [own.get("build", ser.build), own.get("dataset", ser.two_view_dataset),
            own.get("optimizer", ser.adamw), own.get("schedule", ser.set_learning_rate)]


def settings(name, flags=""):
    return SCRIPTS[name].settings((FLAGS[name] + flags).split())


def toy(name, flags=""):
    return shake(recipe(name)[0](settings(name, flags)))


def toy_on_views(name, flags="", device="cpu"):
    args = settings(name, flags)
    data = recipe(name)[1](pixels(99, 3, 24, 18), args)
    loaded, = DataLoader(data, batch_sampler=ser.batch_items(99, args, 0, 1))
    loaded = [(images.to(device), aug) for images, aug in loaded]
    return toy(name, flags).to(device), ser.make_views(loaded, args, step=0)


def random_features(views, images=12):
    return list(noise(views, images, 16).requires_grad_())


def layers(network):
    return " ".join(f"{type(layer).__name__}:{len([*layer.parameters()])}" for layer in network)


def both_ways(a, b, tau):
    return slow_info_nce(a, b, tau) + slow_info_nce(b, a, tau)


def check_gradients(fast, slow, features):
    close({"loss": fast}, {"loss": slow})
    wanted = torch.autograd.grad(slow, features, retain_graph=True)
    close(torch.autograd.grad(fast, features), wanted, 1e-4)
    assert all(gradient.abs().max() > 1e-5 for gradient in wanted), "a view has no gradient"


@parametrize("name", SCRIPTS)
def test_a_step_keeps_to_the_device_of_the_images(name, monkeypatch):
    # Tensors on "meta" have no values. Like those of a GPU, they do not mix with a CPU's.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    model, views = toy_on_views(name, device="meta")
    model.base.update(0.5)
    loss = model(views)["loss"]
    if name != "dino":     # torch 2.6 has no gradient of weight norm on "meta"
        loss.backward()


@parametrize("name", SCRIPTS)
def test_a_command_trains_by_the_methods_own_recipe(name, tmp_path, monkeypatch):
    monkeypatch.setattr(ser, "synthetic_images", lambda *_, **__: (pixels(31, 3, 16, 16), None))
    train = create_autospec(ser.train, side_effect=ser.train)
    monkeypatch.setattr(ser, "train", train)
    words = f"{FLAGS[name]} --ratio 0 --cls-layer 0 --epochs 1 --log-every 1 --out {tmp_path}"
    monkeypatch.setattr("sys.argv", [name, *words.split()])
    runpy.run_path(SCRIPTS[name].__file__, run_name="__main__")

    call = inspect.signature(train).bind(*train.call_args.args, **train.call_args.kwargs)
    call.apply_defaults()
    assert [line["step"] for line in log_of(tmp_path)[1:]] == [1, 2]
    assert [f.__code__ for f in call.args[1:]] == [f.__code__ for f in recipe(name)]


@parametrize("name", SCRIPTS)
def test_settings_reach_the_model_and_the_images(name):
    args = settings(name, "--weight 0.7 --temperature 0.4 --equiv-layers 2 --seed 5")
    model = recipe(name)[0](args)
    assert recipe(name)[1]([], args).seed == 5
    assert same(model.base.encoder.state_dict(), ser.seed_and_make_encoder(args).state_dict())
    assert (model.weight, model.temperature) == (0.7, 0.4)
    assert model.base.projector[0].out_features == 32 if name in ADDONS else model.layers == [2]


@parametrize("name, crops, blur", [("multicrop", 4, 0.5), ("essl", 1, 0.1)])
def test_the_views_are_two_global_ones_and_then_local_crops(name, crops, blur):
    parse = SCRIPTS[name].settings
    args = parse("--local-size 24 --local-area 0.1 0.3".split())
    first, second, *others = recipe(name)[1]([], args).policies
    assert [first, second] == ser.two_view_dataset([], args).policies
    assert others == crops * [ser.Policy(24, [0.1, 0.3], p_blur=blur, p_solarize=0.0)]
    for size in ("9", "36"):     # of images of 32, in patches of 4
        assert f"--local-size {size}: " in sentence(parse, ["--local-size", size])


@parametrize("name, flags", [
    *[(name, "") for name in SCRIPTS], *[(name, "--layer 2") for name in ADDONS]])
def test_the_second_loss_reaches_the_encoder_and_both_all_that_is_trained(name, flags):
    """And nothing else, as DDP demands. MoCo-v3's patch embedding stays random."""
    model, views = toy_on_views(name, flags)
    model.base.update(0.5)
    weight = model.base.encoder.blocks[0].attn.qkv.weight
    found = []
    for model.weight in (0.0, 0.7):
        found += torch.autograd.grad(model(views)["loss"], weight)
    assert (found[0] - found[1]).norm() > 1e-4 * found[0].norm()

    model(views)["loss"].backward()
    own_base = name in ("dino", "barlow_twins", "simclr")
    frozen = ["teacher", "momentum"] if own_base else ["teacher", "momentum", "patch_embed"]
    for key, p in model.named_parameters():
        rests = any(word in key for word in frozen)
        assert (p.grad is None) == rests, key
        assert rests or p.grad.ne(0).any(), key


@parametrize("name", ADDONS)
@parametrize("layer", [2, 4])
def test_an_addons_loss_is_moco_v3s_plus_weight_times_its_own(name, layer):
    model, views = toy_on_views(name, f"--weight 0.7 --layer {layer}")
    features = []
    for view in SCRIPTS["essl"].turned(views) if name == "essl" else views:
        f, _, cls_at = model.base.encoder(view.b1, [2])
        if layer == 2:
            f = torch.layer_norm(cls_at[2], (16,), model.norm.weight, model.norm.bias, 1e-6)
            assert model.norm is not model.base.encoder.norm
        features.append(f)
    inv = ser.SER(model.base, [])(views[:2])["loss"]
    equiv = model.equivariance_loss(features, views)
    close(model(views), {"loss": inv + 0.7 * equiv, "inv": inv.detach(), "equiv": equiv.detach()})
    check_gradients(model(views)["loss"], inv + 0.7 * equiv, [model.base.encoder.pos_embed])


@parametrize("name", ADDONS)
def test_views_1_and_2_of_an_addon_are_moco_v3s_but_for_blur_and_solarization(name):
    words = " --image-size 32 --crop-min 0.2 --blur 0.3 0.4 --solarize 0.5 0.6"
    two = recipe(name)[1]([], settings(name, words)).policies[:2]
    assert two == [ser.Policy(32, (0.2, 1.0), *p) for p in ((0.3, 0.5), (0.4, 0.6))]


@parametrize("name, parameters", [
    ("augself", 44_209_288), ("equimod", 43_271_296), ("stl", 62_175_872), ("essl", 43_287_684)])
def test_addons_are_as_large_as_the_papers(name, parameters):
    with torch.device("meta"):
        model = recipe(name)[0](SCRIPTS[name].settings(["--data", "given"]))
    assert sum(p.numel() for p in trained(model).values()) == parameters


@parametrize("flags", ["--ratio 0.25", "--layer 5", "--layer 2 --cls-layer 2"])
def test_settings_without_l_eq_are_refused(flags):
    assert flags.startswith(sentence(toy, "augself", flags).split()[0])


OF_ADDONS = "--ratio 0 --cls-layer 0 --layer 12 --blur 1 .1 --solarize 0 .2"
DEFAULTS = {     # what departs from ser.py in a run on ImageNet
    "dino": "--weight .3 --temperature .5 --weight-decay .04 --base-lr 1e-4 --crop-min .25 "
            "--final-lr 1e-5 --final-weight-decay .4 --clip .3 --drop-path .1 --hidden 2048 "
            "--outputs 65536 --momentum .982 --first-teacher-temp .04 --teacher-temp .07 "
            "--teacher-temp-epochs 10 --freeze-epochs 1",
    "barlow_twins": "--out runs/barlow --base-lr 1e-4 --hidden 8192 --off-diagonal .0051",
    "multicrop": "--local-size 96 --local-area .05 .25", "turned": "--ratio 0 --cls-layer 0",
    "augself": f"{OF_ADDONS} --weight .5", "equimod": f"{OF_ADDONS} --weight 1 --temperature .2",
    "stl": f"{OF_ADDONS} --weight 1 --temperature .2",
    "essl": f"{OF_ADDONS} --weight 1 --local-size 96 --local-area .05 .14"}
SMALL = dict(dino=dict(hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0),
             barlow_twins=dict(hidden=512, base_lr=1e-3, off_diagonal=0.02),
             augself=dict(layer=4), essl=dict(local_size=16, local_area=[0.1, 0.3]),
             turned=dict(ratio=0.0), multicrop=dict(local_area=[0.1, 0.4], epochs=4.0))


@parametrize("name", SCRIPTS)
def test_the_defaults_are_those_of_the_paper_the_release_and_the_method(name):
    parse = SCRIPTS[name].settings
    own = parse(["--data", "imagenet"])
    wanted = f"--data imagenet {PAPER} --out runs/{name} {DEFAULTS.get(name, '')}"
    assert own == parse(wanted.split())
    small = vars(parse([]))     # of synthetic images
    assert name != "turned" or own.turns_in_t and small["turns_in_t"]     # of no flag
    assert name == "simclr" or small["out"] == own.out + "-small"
    assert small.items() >= SMALL.get(name, {}).items()


def rank_main(rank, ranks, out):
    ser.setup()
    found = {}
    for name in SCRIPTS:
        _, _, make_optimizer, schedule = recipe(name)
        args = settings(name)
        model, views = toy_on_views(name)
        optimizer = make_optimizer(model, args)
        schedule(optimizer, args, 1.0)
        model.base.update(0.5)

        model.eval()     # on gloo each rank has a BatchNorm mean of its own
        parallel = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        parallel(views)["loss"].backward()
        optimizer.step()

        found |= {f"{name}: {key}": buffer for key, buffer in model.named_buffers()}
        found |= {f"{name}: {key}": p.grad for key, p in trained(model).items()}
    return found


def test_two_ranks_equal_one_process(tmp_path):
    one = rank_main(0, 1, tmp_path)
    for found in run_ranks(rank_main, 2, tmp_path):
        for key, wanted in one.items():
            gap = (found[key] - wanted).float().norm()
            assert gap < 1e-4 * wanted.float().norm() + 1e-6, key
