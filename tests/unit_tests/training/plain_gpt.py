"""The GPT that the tests train, in plain PyTorch on one process: a reference to compare with.

It shares no code with Megatron. The weights come from the stock model, one file per
tensor-parallel rank, and are put together here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

SPLIT_ALONG_ROWS = ('word_embeddings.weight', 'linear_qkv.weight', 'linear_qkv.bias', 'linear_fc1.')
SPLIT_ALONG_COLUMNS = ('linear_proj.weight', 'linear_fc2.weight')
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that the weights do not tell."""

    layers: int
    heads: int


def merge_tensor_parallel(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole model's weights from the files ``rank0.pt``, ``rank1.pt``, ..."""
    files = sorted(folder.glob('rank*.pt'))
    shards = [torch.load(file, weights_only=True) for file in files]
    return {name: _merge(name, [shard[name] for shard in shards]) for name in shards[0]}


def merge_pipeline(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole model's weights from pipeline stages of one layer each."""
    whole: dict[str, torch.Tensor] = {}
    for stage, file in enumerate(sorted(folder.glob('rank*.pt'))):
        for name, weight in torch.load(file, weights_only=True).items():
            whole.setdefault(name.replace('layers.0.', f'layers.{stage}.'), weight)
    return whole


def _merge(name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one weight from its pieces in rank order."""
    if any(part in name for part in SPLIT_ALONG_ROWS):
        return torch.cat(list(pieces), dim=0)
    if any(part in name for part in SPLIT_ALONG_COLUMNS):
        return torch.cat(list(pieces), dim=1)
    assert all(torch.equal(pieces[0], piece) for piece in pieces), f'{name} differs between ranks'
    return pieces[0]


class PlainGPT:
    """A decoder with learned positions, pre-norm, tanh-GELU and tied embeddings."""

    def __init__(self, weights: dict[str, torch.Tensor], shape: Shape) -> None:
        """Take copies of the weights."""
        self.weights = {k: v.clone().requires_grad_() for k, v in weights.items()}
        self.shape = shape

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed cross-entropy of ``[batch, length]`` tokens."""
        w = self.weights
        x = w['embedding.word_embeddings.weight'][tokens]
        x = x + w['embedding.position_embeddings.weight'][: tokens.shape[1]]
        for layer in range(self.shape.layers):
            prefix = f'decoder.layers.{layer}.'
            attended = self._attention(
                prefix + 'self_attention.', self._norm(x, prefix + 'input_layernorm')
            )
            x = x + attended
            hidden = self._linear(
                self._norm(x, prefix + 'pre_mlp_layernorm'), prefix + 'mlp.linear_fc1'
            )
            x = x + self._linear(F.gelu(hidden, approximate='tanh'), prefix + 'mlp.linear_fc2')
        x = self._norm(x, 'decoder.final_layernorm')
        logits = x @ w['embedding.word_embeddings.weight'].T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the layer norm called ``name`` of ``x``."""
        w = self.weights
        return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the linear map called ``name`` of ``x``."""
        return F.linear(x, self.weights[f'{name}.weight'], self.weights[f'{name}.bias'])

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Return causal self-attention; the rows of QKV are grouped by head."""
        batch, length, width = x.shape
        size = width // self.shape.heads
        mixed = self._linear(x, prefix + 'linear_qkv')
        mixed = mixed.view(batch, length, self.shape.heads, 3 * size).transpose(1, 2)
        query, key, value = mixed.split(size, dim=-1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(future, float('-inf')).softmax(-1) @ value
        return self._linear(attended.transpose(1, 2).reshape(x.shape), prefix + 'linear_proj')


def train(
    model: PlainGPT, steps: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], lr: float
) -> list[float]:
    """Train with AdamW and clipping; return each micro-batch's mean loss, in order.

    Args:
        model: Trained in place.
        steps: For each step its micro-batches of tokens and labels.
        lr: The constant learning rate.
    """
    decayed = [w for w in model.weights.values() if w.dim() > 1]
    others = [w for w in model.weights.values() if w.dim() == 1]
    groups = [{'params': decayed, 'weight_decay': 0.01}, {'params': others, 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for micro_batches in steps:
        optimizer.zero_grad()
        count = sum(labels.numel() for _, labels in micro_batches)
        for tokens, labels in micro_batches:
            loss = model.loss(tokens, labels)
            (loss / count).backward()
            losses.append(loss.item() / labels.numel())
        torch.nn.utils.clip_grad_norm_(decayed + others, CLIP_NORM)
        optimizer.step()
    return losses
