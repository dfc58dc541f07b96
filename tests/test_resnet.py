"""The network of the ImageNet study: its size, its blocks against a formula of their own, its averages."""

from collections import Counter

import numpy as np
import pytest
import torch

from carryclip.experiments.imagenet.resnet import EPSILON, Block, ResNet, Statistics
from carryclip.experiments.recipes import NETS


def test_resnet50_has_the_layers_it_should():
    net = ResNet(NETS["resnet50"], classes=1000)
    assert sum(p.numel() for p in net.parameters()) == 25_549_352  # 25.5 million
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


def by_formula(block, x, values):
    stride = max(c.stride[0] for c in block.convolutions)
    out, shortcut = x, x
    for k, convolution in enumerate(block.convolutions):
        out = np.maximum(normalised(out, values[f"norms.{k}.weight"], values[f"norms.{k}.bias"]), 0)
        if k == 0 and block.shortcut is not None:
            shortcut = convolved(out, values["shortcut.weight"], stride)
        out = convolved(out, values[f"convolutions.{k}.weight"], convolution.stride[0])
    return out + shortcut


@pytest.mark.parametrize(
    ("channels", "out", "stride", "bottleneck"), [(4, 8, 2, True), (8, 8, 1, True), (3, 4, 2, False)]
)
def test_a_block_is_its_formula_and_so_is_its_gradient(channels, out, stride, bottleneck):
    torch.manual_seed(0)
    block = Block(channels, out, stride, bottleneck=bottleneck).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    x = torch.randn(3, channels, 6, 5, dtype=torch.float64)
    values = {name: parameter.detach().numpy().copy() for name, parameter in block.named_parameters()}
    wanted = by_formula(block, x.numpy(), values)
    found = block(x)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-10, atol=1e-10)
    direction = np.random.default_rng(0).normal(size=wanted.shape)
    (found * torch.from_numpy(direction)).sum().backward()
    generator = np.random.default_rng(1)
    for name, parameter in block.named_parameters():
        change = generator.normal(size=parameter.shape)
        ends = [
            (by_formula(block, x.numpy(), {**values, name: values[name] + h * change}) * direction).sum()
            for h in (1e-6, -1e-6)
        ]
        slope = (ends[0] - ends[1]) / 2e-6
        assert float((parameter.grad.numpy() * change).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-5), name


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
