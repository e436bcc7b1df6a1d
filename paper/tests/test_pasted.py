import json
from functools import partial
from unittest.mock import Mock

import pytest
import torch

timm = pytest.importorskip("timm")

import eval_linear
import ser
from paper.experiments import pasted, sweep
from paper.tests.toys import CLASSES, class_folders, having, readme_table, train_and_val
from test_ser import close, noise, paste, pixels, run_ranks, same, seeded, sentence, slow_info_nce


def train(root, weight, *flags, batch=5):
    words = f"--data {root} --out {root}/out-{weight} --workers 0 --weight {weight}"
    args = pasted.settings([*words.split(), *map(str, flags)])
    vars(args).update(epochs=2, warmup_epochs=1, batch_size=batch, base_lr=0.1)
    return args, pasted.train(args)


def test_the_loss_is_trained_and_what_was_trained_is_evaluated(tmp_path):
    class_folders(tmp_path / "train")
    class_folders(tmp_path / "val", per_class=3, seed=6, classes=CLASSES[:5])
    args, model = train(tmp_path, 0.1)

    pasted.evaluate(model, args)
    row = json.loads(ser.Path(args.out, "row.json").read_text())
    found = json.loads(ser.Path(args.out, "eval.json").read_text())["rows"]
    heads = [one["value"] for one in having(found, measure="linear top-1 %", classes=6)]
    assert len(set(heads)) > 1 and row["linear top-1 %"] == pytest.approx(sum(heads) / 3)
    upright = pasted.v2.Compose([pasted.RESIZE, pasted.v2.PILToTensor()])
    val = torch.stack([image for image, _ in pasted.ImageFolder(tmp_path / "val", upright)])[::8]
    turns = eval_linear.retrieval(model.f1, ser.normalise(val / 255), patch=8)
    assert row["rot90 retrieval"] == pytest.approx(turns) and 0 < turns < 1
    recolour = partial(eval_linear.recolour_and_normalise, generator=ser.rng("jitter", "rot90"))
    turns = eval_linear.retrieval(lambda x: model.f1(recolour(x)), val / 255, patch=8)
    assert row["rot90 retrieval with jitter"] == pytest.approx(turns) and ": 15 " in row["val"]
    assert (row["weight"], row["epochs"], found[0]["settings"]["workers"]) == (0.1, 2, 0)
    encoder = ser.load_encoder(ser.Path(args.out, "encoder.pt"))
    assert row["weights"] == eval_linear.fingerprint(encoder) and encoder.depth == 6
    torch.testing.assert_close(encoder(val / 255).cls, model.vit(val / 255))


class OneWeightEach(torch.nn.Linear):
    """SimCLR's loss is its weight, and L_equiv its bias. It knows the images of the last step."""
    def forward(self, x1, *more):
        self.seen = x1.mean((1, 2, 3)).tolist()
        return self.weight.sum(), self.bias.sum()


def test_a_seed_has_its_start_and_order_and_the_weight_is_that_of_l_equiv(tmp_path, monkeypatch):
    monkeypatch.setattr(pasted, "Model", partial(OneWeightEach, 1, 1))
    monkeypatch.setattr(pasted, "CROP", pasted.v2.Compose([pasted.RESIZE, pasted.v2.PILToTensor()]))
    train_and_val(tmp_path, 6, 2)
    (_, one), (_, two) = [train(tmp_path, 0.3, "--seed", n, "--out", tmp_path / n) for n in "12"]
    assert one.seen != two.seen and one.weight != two.weight     # which all steps change alike
    assert one.weight.grad == 1 and one.bias.grad == pytest.approx(0.3)


def test_a_killed_training_goes_on(tmp_path, monkeypatch):
    class_folders(tmp_path / "train")
    assert "--val" in sentence(train, tmp_path, 0.1)     # before the work
    class_folders(tmp_path / "val")
    seen = []     # epoch and weight decay of each step
    monkeypatch.setattr(ser, "set_learning_rate", lambda adamw, _, epoch: seen.append(
        (epoch, adamw.param_groups[0]["weight_decay"])))
    _, whole = train(tmp_path, 0.1, "--out", f"{tmp_path}/whole")
    with monkeypatch.context() as stop, pytest.raises(ZeroDivisionError):     # in epoch 1
        stop.setattr(pasted.DistributedSampler, "set_epoch", lambda _, epoch: 1 // (1 - epoch))
        train(tmp_path, 0.1)
    _, killed = train(tmp_path, 0.1)
    assert same(killed.state_dict(), whole.state_dict())
    assert seen == 2 * [(0, 0.1), (0.5, 0.1), (1, 0.1), (1.5, 0.1)]
    assert "loaders" in sentence(train, tmp_path, 0.1, "--workers", "1")
    next(tmp_path.glob("train/*/*")).unlink()
    assert "names_checksum" in sentence(train, tmp_path, 0.1)


def test_views_are_four_with_colours_of_their_own_and_crops_imagenettes(monkeypatch):
    torch.manual_seed(0)
    photo = pasted.v2.ToPILImage()(pixels(3, 70, 90))
    assert len({view.sum().item() for view in pasted.four_views(photo)}) == 4
    monkeypatch.setattr(pasted, "JITTER", pasted.v2.PILToTensor())
    whole = pasted.JITTER(pasted.RESIZE(photo))     # uncropped
    assert same(pasted.four_views(photo)[2:], (whole, whole))
    crop, flip, jitter = pasted.CROP.transforms
    assert crop.scale == (0.2, 1.0) and flip.p == 0.5
    assert [change.p for change in jitter.transforms[:2]] == [0.8, 0.2]
    assert str(jitter.transforms[0].transforms[0]) == str(pasted.v2.ColorJitter(.4, .4, .4, .1))
    image = pixels(3, 128, 128)
    assert pasted.RESIZE(image).equal(pasted.v2.functional.resize(image, (64, 64)))


def pasted_rank(rank, ranks, root):
    """What tells apart the images of a step, the seeds, the draws of transforms, the weights."""
    ser.setup()
    forward = pasted.Model.forward
    seen = []

    def look(model, x1, x2, images1, *more):
        assert min(x1.min(), x2.min(), images1.min()) < 0     # normalised
        assert torch.is_autocast_enabled("cpu") and len(images1) == 8 and not images1.equal(more[0])
        shared = more[1].initial_seed(), more[1].get_state().sum().item()
        seen.append((x1.flatten(1).sum(1).tolist(), torch.initial_seed(), *shared))
        return forward(model, x1, x2, images1, *more)

    pasted.Model.forward = look
    pasted.CROP = pasted.v2.Compose([pasted.v2.Resize((64, 64)), pasted.v2.PILToTensor()])
    _, model = train(root, 0.1, "--seed", "2", batch=18)
    return seen, model.state_dict()


def test_two_ranks_share_the_images_and_train_one_model(tmp_path):
    train_and_val(tmp_path, 6, 2)
    (seen1, weights1), (seen2, weights2) = run_ranks(pasted_rank, 2, tmp_path)
    for (x1, *own1, _), (x2, *own2, _), epoch in zip(seen1, seen2, (0, 0, 1, 1), strict=True):
        seed = 2_000_000 + 1000 * epoch
        assert (own1, own2) == ([seed, 2000 + epoch], [seed + 1, 2000 + epoch])
        assert len({*x1, *x2}) == 18
    assert seen1[0][0] != seen1[2][0] and len({draws for *_, draws in seen1}) == 4
    shared = seeded(2000)
    for _ in range(2):     # the first step samples the transforms of both ranks
        ser.sample_geometry(16, 8, generator=shared)
    assert seen1[1][-1] == shared.get_state().sum().item()
    assert same(weights1, weights2)
    assert "ranks 2 (now 1)" in sentence(train, tmp_path, 0.1, "--seed", "2")


def test_the_losses_are_simclrs_both_ways_and_that_of_two_copies():
    model = pasted.Model()
    x1, x2, *copies = noise(4, 5, 3, 64, 64)
    first, _, last = model.head
    z1, z2 = [last(first(model.vit(x)).relu()) for x in (x1, x2)]
    inv = slow_info_nce(z1, z2, 0.2) + slow_info_nce(z2, z1, 0.2)
    g1, g2 = [ser.sample_geometry(5, 8, generator=shared) for shared in 2 * [seeded()]]
    h1, h2 = [model.f1(ser.rho(g, x, 8)) for g, x in zip((g1, g2), copies)]
    equiv = ser.equiv_of_maps(model.project, ser.relative(g2, g1), h1, h2)
    close(model(x1, x2, *copies, seeded()), (inv, equiv))


def test_f1_is_two_blocks_of_a_timm_model_without_cls():
    model = pasted.Model()
    size = dict(patch_size=8, embed_dim=128, depth=2, num_heads=4, dynamic_img_size=True)
    plain = timm.models.VisionTransformer(64, class_token=False, global_pool="avg", **size)
    places = model.vit.pos_embed[:, 1:]
    plain.load_state_dict(model.vit.state_dict() | {"pos_embed": places}, strict=False)
    torch.nn.init.ones_(model.vit.cls_token)
    for width in (64, 40):
        images = torch.rand(2, 3, 64, width)
        expected = plain.forward_intermediates(images, indices=[1], intermediates_only=True)
        torch.testing.assert_close(model.f1(images), expected[0])


def test_the_copied_loss_trains_a_vit_of_timm(capsys):
    images = torch.randint(256, (4, 3, 224, 224), generator=seeded()).to(torch.uint8)
    loader = [(([torch.zeros(1)], images), "labels")]
    own = torch.nn.Linear(1, 1)
    own.forward = lambda vit, views: own.weight.sum() + own.bias.sum()
    names = paste("import torch\\n", loader=loader, your_views=lambda image: "views", your_loss=own)
    names |= paste("import timm", **names)
    names["copies"] = Mock(wraps=names["copies"])
    unused = names["vit"].norm.weight     # by these losses
    unused.grad = torch.ones_like(unused)
    names = paste("whole", **names)
    assert unused.grad is None     # a gradient of before does not stay
    assert names["copies"].call_count == 2     # a colouring for each view
    views, image = names["transform"](ser.Image.new("RGB", (50, 40), "red"))
    assert views == "views" and image.shape == (3, 224, 224) and image.max() == 255
    assert names["copies"](torch.full((8, 3, 8, 8), 0.5)).std(dim=0).mean() > 0.01     # own colours

    learned = [p for group in names["optimizer"].param_groups for p in group["params"]]
    assert {id(p) for p in names["your_loss"].parameters()} <= {id(p) for p in learned}
    gradients = [p.grad for p in learned if p.grad is not None]
    assert len(gradients) > 30     # three blocks of twelve tensors, and more
    assert all(gradient.ne(0).any() for gradient in gradients)

    photos = torch.nn.functional.interpolate(torch.rand(4, 3, 14, 14), (224, 224))
    names |= dict(images=photos, photos=photos, copies=lambda x: x)     # with jitter, few match
    paste("from eval_linear", **names)
    assert 0.9 < float(capsys.readouterr().out) <= 1
    assert paste("def f2", **names)["embedding"].shape == (4, 384)


def test_readmes_table_is_what_the_rows_say():
    rows = json.loads(ser.Path(pasted.__file__).with_suffix(".json").read_text())
    args = vars(pasted.settings(["--data", "D"]))
    own = {key: args[key] for key in ("epochs", "warmup_epochs", "batch_size", "base_lr")}
    assert args["weight"] == 0.5 and having(rows, **own) == rows
    assert len({row["weights"] for row in rows}) == len(rows)

    measures = ["linear top-1 %", "20-NN top-1 %", "turned, linear top-1 %", "rot90 retrieval",
                "rot90 retrieval with jitter",
                *[f"rot90 retrieval with jitter, ordinary pass, block {b}" for b in (2, 6)]]
    for title, cells in readme_table("paper/README.md", "| pasted").items():
        for measure, cell in zip(measures, cells.values(), strict=True):
            values = [row[measure] for row in rows if title == f"weight {row['weight']:g}"]
            assert cell == sweep.spread(values, measure), (title, measure)
