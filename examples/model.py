"""A byte-level Llama: RMSNorm, rotary positions, SwiGLU, causal attention, no biases.

The tokens are the 256 byte values, so there is no tokenizer and the model is almost all blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a `Llama`.

    dim: width of the residual stream; layers: blocks; heads: attention heads, each of
    dim / heads features; hidden: width of the SwiGLU; tied: one matrix for embedding and head.

    Raises ValueError when the sizes do not fit together.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    tied: bool = False
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim must be a multiple of 2 * heads, since rotary positions turn pairs of "
                f"features; got dim={self.dim}, heads={self.heads}"
            )


# Parameters, embedding and head included: tiny 0.23 M, 15m 14.95 M, 125m 125.2 M, 350m 349.2 M,
# 1b 1005 M. Deeper than models of these names usually are, because bytes need no big vocabulary.
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(dim=64, layers=4, heads=2, hidden=176),
    "15m": LlamaConfig(dim=384, layers=8, heads=6, hidden=1088),
    "125m": LlamaConfig(dim=768, layers=18, heads=12, hidden=1984),
    "350m": LlamaConfig(dim=1024, layers=28, heads=16, hidden=2688),
    "1b": LlamaConfig(dim=2048, layers=20, heads=16, hidden=5440),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions. [B, T, dim] -> [B, T, dim]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, dim / heads]
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class SwiGLU(nn.Module):
    """The gated feed-forward: down(silu(gate(x)) * up(x)). [B, T, dim] -> [B, T, dim]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, 256]; with `targets` [B, T], the mean loss in nats."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02; what adds to the residual stream, 0.02/sqrt(2L)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                scale = 1 / math.sqrt(2 * self.config.layers) if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        rotation = rotations(tokens.shape[1], self.config, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotations(time: int, config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 [T, dim / heads / 2] each.

    Computed at each call, since kept as a buffer they would be rounded by ``model.to(bfloat16)``.
    """
    half = config.dim // config.heads // 2
    step = torch.arange(half, dtype=torch.float32, device=device) / half
    angles = torch.outer(
        torch.arange(time, dtype=torch.float32, device=device), config.rope_base**-step
    )
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the feature pairs (i, i + half) of x [..., T, 2 * half] by their position's angle."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model, a shared one counted once."""
    return sum(p.numel() for p in model.parameters())
