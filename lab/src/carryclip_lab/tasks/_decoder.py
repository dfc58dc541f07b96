"""A small decoder-only transformer: pre-norm, causal, learned places."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """Attention to what came before, then a dense layer; each added to what it got."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same."""
        batch, time, width = x.shape
        parts = self.attend(self.before(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.think(self.after(x))


class Decoder(nn.Module):
    """Logits of the next token at every place."""

    def __init__(
        self,
        tokens: int,
        context: int,
        width: int,
        *,
        heads: int,
        layers: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        _initialise(self, layers, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) -> (batch, time, tokens)."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@torch.no_grad()
def _initialise(net: Decoder, layers: int, generator: torch.Generator | None) -> None:
    """Normal with deviation 0.02, biases 0; what is added to the stream is smaller, by the number of additions."""
    for layer in net.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=0.02, generator=generator)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)
    for block in net.blocks:
        for last in (block.mix, block.think[2]):  # type: ignore[index]
            last.weight.div_(math.sqrt(2 * layers))  # type: ignore[union-attr]
