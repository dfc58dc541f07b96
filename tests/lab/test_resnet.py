"""The network of the ImageNet study: its size, its blocks against a formula of their own, its averages."""

from collections import Counter

import numpy as np
import pytest
import torch

from carryclip_lab.imagenet.resnet import EPSILON, NETS, Block, ResNet, Statistics


def test_resnet50_has_the_layers_it_should():
    net = ResNet(NETS["resnet50"], classes=1000)
    sizes = Counter()
    for layer in net.modules():
        sizes[type(layer).__name__] += sum(p.numel() for p in layer.parameters(recurse=False))
    assert +sizes == {"Convolution": 23_454_912, "BatchNorm2d": 45_440, "Linear": 2_049_000}
    assert sizes.total() == 25_549_352
    # What other counts differ by: a batch norm after each convolution (v1), or a bias in each.
    outputs = sum(layer.out_channels for layer in net.modules() if isinstance(layer, torch.nn.Conv2d))
    assert sizes.total() - 45_440 + 2 * outputs == 25_557_032
    assert sizes.total() + outputs == 25_575_912
    kinds = Counter(type(layer).__name__ for layer in net.modules())
    assert (kinds["Convolution"], kinds["BatchNorm2d"], kinds["Linear"]) == (1 + 3 * 16 + 4, 3 * 16 + 1, 1)
    assert net.stem.weight.shape == (64, 3, 7, 7)
    firsts = [net.groups[k] for k in (0, 3, 7, 13)]
    shapes = [[tuple(c.weight.shape) for c in [*block.convolutions, block.shortcut]] for block in firsts]
    assert shapes == [
        [(64, 64, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1), (256, 64, 1, 1)],
        [(128, 256, 1, 1), (128, 128, 3, 3), (512, 128, 1, 1), (512, 256, 1, 1)],
        [(256, 512, 1, 1), (256, 256, 3, 3), (1024, 256, 1, 1), (1024, 512, 1, 1)],
        [(512, 1024, 1, 1), (512, 512, 3, 3), (2048, 512, 1, 1), (2048, 1024, 1, 1)],
    ]
    assert all(block.shortcut is None for k, block in enumerate(net.groups) if k not in (0, 3, 7, 13))
    assert net.logits.weight.shape == (1000, 2048)
    sizes = []
    for block in net.groups:
        block.register_forward_hook(lambda _, given, out: sizes.append(tuple(out.shape[1:])))
    assert net.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    assert list(dict.fromkeys(sizes)) == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]


def test_weights_start_as_they_should():
    net = ResNet(NETS["resnet18"], classes=10, generator=torch.Generator().manual_seed(0))
    again = ResNet(NETS["resnet18"], classes=10, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))
    assert not net.logits.weight.any()
    weight = net.groups[-1].convolutions[1].weight
    scaled = weight * (512 * 9) ** 0.5
    assert scaled.abs().max() <= 2.0
    assert scaled.std().item() == pytest.approx(0.8796, rel=0.01)  # of a normal that is cut off at 2
    assert net.groups[0].shortcut is None  # without a bottleneck the first group changes nothing


# ---------------------------------------------------------------------- a block by a formula of its own


def normalised(x, scale, shift):
    mean = x.mean((0, 2, 3), keepdims=True)
    variance = ((x - mean) ** 2).mean((0, 2, 3), keepdims=True)
    return (x - mean) / np.sqrt(variance + EPSILON) * scale[:, None, None] + shift[:, None, None]


def convolved(x, weight, stride):
    """Sums over every window; the picture is as large as the input divided by the stride, rounded up."""
    count, _, height, width = x.shape
    size = weight.shape[-1]
    rows, columns = -(-height // stride), -(-width // stride)
    before = [max(0, (n - 1) * stride + size - old) // 2 for n, old in ((rows, height), (columns, width))]
    out = np.zeros((count, len(weight), rows, columns))
    for i in range(rows):
        for j in range(columns):
            for a in range(size):
                for b in range(size):
                    y, z = i * stride + a - before[0], j * stride + b - before[1]
                    if 0 <= y < height and 0 <= z < width:
                        out[:, :, i, j] += x[:, :, y, z] @ weight[:, :, a, b].T
    return out


def by_formula(x, values, strides, shortcut_stride):
    """Of a block whose convolutions have these strides; without a stride for it the shortcut is the identity."""
    out, shortcut = x, x
    for k, stride in enumerate(strides):
        out = np.maximum(normalised(out, values[f"norms.{k}.weight"], values[f"norms.{k}.bias"]), 0)
        if k == 0 and shortcut_stride:
            shortcut = convolved(out, values["shortcut.weight"], shortcut_stride)
        out = convolved(out, values[f"convolutions.{k}.weight"], stride)
    return out + shortcut


@pytest.mark.parametrize(
    ("channels", "out", "stride", "bottleneck", "strides", "shortcut"),
    [
        (4, 8, 2, True, (1, 2, 1), 2),
        (4, 8, 1, True, (1, 1, 1), 1),
        (8, 8, 1, True, (1, 1, 1), None),
        (3, 4, 2, False, (2, 1), 2),
        (4, 4, 1, False, (1, 1), None),
    ],
)
def test_a_block_is_its_formula_and_so_is_its_gradient(channels, out, stride, bottleneck, strides, shortcut):
    torch.manual_seed(0)
    block = Block(channels, out, stride, bottleneck=bottleneck).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    x = torch.randn(3, channels, 6, 5, dtype=torch.float64, requires_grad=True)
    leaves = {"": x, **dict(block.named_parameters())}
    values = {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()}
    wanted = by_formula(values[""], values, strides, shortcut)
    found = block(x)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-10, atol=1e-10)
    direction = np.random.default_rng(0).normal(size=wanted.shape)
    (found * torch.from_numpy(direction)).sum().backward()
    generator = np.random.default_rng(1)
    for name, leaf in leaves.items():
        change, ends = generator.normal(size=leaf.shape), []
        for h in (1e-6, -1e-6):
            moved = {**values, name: values[name] + h * change}
            ends.append((by_formula(moved[""], moved, strides, shortcut) * direction).sum())
        slope = (ends[0] - ends[1]) / 2e-6
        assert float((leaf.grad.numpy() * change).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-5), name


def pooled(x):
    """The largest of every three by three, every second; beyond the edge, and more so at the far one, is nothing."""
    rows, columns = (-(-length // 2) for length in x.shape[2:])
    before = [((n - 1) * 2 + 3 - length) // 2 for n, length in zip((rows, columns), x.shape[2:], strict=True)]
    out = np.full((*x.shape[:2], rows, columns), np.nan)
    for i in range(rows):
        for j in range(columns):
            top, left = 2 * i - before[0], 2 * j - before[1]
            out[:, :, i, j] = x[:, :, max(0, top) : top + 3, max(0, left) : left + 3].max((2, 3))
    return out


def test_what_comes_before_the_blocks_is_its_formula():
    """On values that are all negative, so that a zero from beyond the edge would be the largest."""
    net = ResNet(NETS["resnet10"], classes=3).double()
    torch.nn.init.uniform_(net.stem.weight, 0.1, 1.0)
    seen = []
    net.groups[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().numpy()))
    x = -torch.rand(2, 3, 23, 26, dtype=torch.float64)
    net(x)
    wanted = pooled(convolved(x.numpy(), net.stem.weight.detach().numpy(), 2))
    assert wanted.max() < 0
    np.testing.assert_allclose(seen[0], wanted, rtol=1e-10)


# ---------------------------------------------------------------------- averages for evaluation


def test_averages_do_not_depend_on_how_a_batch_is_cut():
    torch.manual_seed(0)
    net = ResNet(NETS["resnet10"], classes=3)
    averages = Statistics(net, 0.9)
    kept = torch.zeros_like(averages.average)
    for _ in range(3):
        seen = []
        for part in torch.randn(3, 4, 3, 16, 16):
            averages.before(0)
            net.train()(part)
            seen.append(averages.seen().clone())
        averages.take(torch.stack(seen).mean(0))
        kept = 0.9 * kept + 0.1 * torch.stack(seen).mean(0)
    torch.testing.assert_close(averages.average, kept)
    averages.show()
    first = net.groups[0].norms[0]
    torch.testing.assert_close(first.running_mean, (kept / (1 - 0.9**3))[: len(first.running_mean)])


def test_passes_of_a_step_are_averaged_by_batch_norm_itself():
    torch.manual_seed(0)
    net = ResNet(NETS["resnet10"], classes=3).train()
    averages = Statistics(net, 0.9)
    parts = torch.randn(3, 4, 3, 16, 16)
    seen = []
    for part in parts:
        averages.before(0)
        net(part)
        seen.append(averages.seen().clone())
    for number, part in enumerate(parts):
        averages.before(number)
        net(part)
    torch.testing.assert_close(averages.seen(), torch.stack(seen).mean(0))
