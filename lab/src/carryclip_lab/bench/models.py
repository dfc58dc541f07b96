"""The shapes that are clipped: models as lists of parameter shapes, so that nothing need be downloaded or trained."""

Shape = tuple[int, ...]


def conv_net() -> list[Shape]:
    """The paper's CIFAR-10 net: two convolutions, three dense layers."""
    shapes: list[Shape] = [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,)]
    for inputs, outputs in ((64 * 8 * 8, 250), (250, 250), (250, 10)):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def resnet50() -> list[Shape]:
    """ResNet50 for 1000 classes: convolutions, and two vectors for each batch norm."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, inputs, 1, 1)] if block == 0 else []
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> list[Shape]:
    """GPT-2 small with tied embeddings: 124 million parameters."""
    width = 768
    shapes: list[Shape] = [(50257, width), (1024, width)]
    for _ in range(12):
        for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            shapes += [(outputs, inputs), (outputs,)]
        shapes += [(width,)] * 4
    return [*shapes, (width,), (width,)]


def tiny_tensors() -> list[Shape]:
    """600 tensors so small that only the number of operations counts."""
    return [(4, 16), (16,), (8,)] * 200


def of_size(entries: int) -> list[Shape]:
    """A model of about so many parameters: square matrices of at most a million, and a vector for each."""
    side = min(1024, round((entries / 4) ** 0.5))
    layers = max(1, round(entries / (side * side + side)))
    return [(side, side), (side,)] * layers


MODELS = {
    "conv-net": conv_net,
    "ResNet50": resnet50,
    "GPT-2 small": gpt2_small,
    "600 tiny tensors": tiny_tensors,
}
