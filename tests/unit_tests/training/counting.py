"""Token sequences that count through the vocabulary, the same in every run and every process."""

import torch
from torch.utils.data import Dataset


class Counting(Dataset):
    """Sequences that step through the vocabulary: each sample has its own start and stride."""

    def __init__(self, samples: int, length: int, vocabulary: int, seed: int) -> None:
        """Take the sizes and the seed of starts and strides."""
        self.samples, self.length, self.vocabulary, self.seed = samples, length, vocabulary, seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index``, the same in every run."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        start, stride = torch.randint(1, self.vocabulary, (2,), generator=generator).tolist()
        text = (start + stride * torch.arange(self.length + 1)) % self.vocabulary
        return {'tokens': text[:-1], 'labels': text[1:]}

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of ``size`` samples from ``first`` on."""
        samples = [self[index] for index in range(first, first + size)]
        tokens = torch.stack([sample['tokens'] for sample in samples])
        return tokens, torch.stack([sample['labels'] for sample in samples])
