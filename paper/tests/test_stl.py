import torch

import ser
from paper.methods import stl
from paper.tests.test_methods import check_gradients, layers, random_features, settings, toy
from test_ser import pixels, same, sentence, slow_info_nce


def test_images_of_a_pair_share_crop_jitter_and_gray_alone():
    """Of squeezed images. Flip, blur and solarization are an image's own, as T samples them."""
    source = [pixels(3, 30, 20), pixels(3, 18, 40)] * 3
    keys = [(3, index, False) for index in (4, 1, 5, 2)]     # of epoch 3
    data = stl.dataset(source, settings("stl", "--solarize 0.5 0.5 --blur 1 1"))
    found = data.__getitems__(keys)
    for place, (_, index, _) in enumerate(keys):
        square = ser.resize(source[index][None], (16, 16))[0]
        alone = data.sample_views(square, keys[place])
        with_first = data.sample_views(square, keys[place // 2 * 2])
        for view, (image, aug), (_, own) in zip(found[place], with_first, alone):
            image = image.flip(-1) if own.flip != aug.flip else image
            wanted = aug._replace(flip=own.flip, blur=own.blur, solarize=own.solarize)
            assert same(view, (image, wanted)), place


def test_a_transformation_is_read_from_the_partner_and_applied():
    model = toy("stl", "--temperature 0.4")
    heads = model.heads
    f1, f2 = random_features(2, 4)

    for name in ("read", "embed", "embed_code"):
        assert layers(heads[name]) == "Linear:1 BatchNorm1d:2 ReLU:0 Linear:1", name

    def moved(f, codes):
        matrices = heads["hyper"](codes[[1, 0, 3, 2]]).view(4, 16, 16)     # of the partners
        return (matrices @ f[:, :, None])[:, :, 0]

    def both_ways(a, b):
        return slow_info_nce(a, b.detach(), 0.4) + slow_info_nce(b, a.detach(), 0.4)

    t12 = heads["read"](torch.cat([f1, f2], dim=1))
    t21 = heads["read"](torch.cat([f2, f1], dim=1))
    z = torch.cat([heads["embed"](f1), heads["embed"](f2)])
    z_moved = torch.cat([heads["embed"](moved(f2, t21)), heads["embed"](moved(f1, t12))])

    codes = torch.cat([t12, t21])
    u = [heads["embed_code"](codes[first::2]) for first in (0, 1)]     # of even and odd images
    wanted = both_ways(z, z_moved) + 0.1 * both_ways(*u)
    check_gradients(model.equivariance_loss([f1, f2], []), wanted, [f1, f2])


def test_an_odd_number_of_images_on_a_rank_is_one_sentence(monkeypatch):
    for ranks, flag in ((2, "--batch-size 10"), (1, "--batch-size 9")):
        monkeypatch.setattr(ser, "ranks_and_rank", lambda: (ranks, 0))
        assert flag in sentence(toy, "stl", flag)
