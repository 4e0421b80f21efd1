"""A small network as a reward, made at import."""

import torch
from torch import nn


class CharacterScorer(nn.Module):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(128, hidden)
        self.head = nn.Linear(hidden, 1)
        weights = torch.linspace(-1, 1, 128 * hidden).reshape(128, hidden)
        with torch.no_grad():
            self.embedding.weight.copy_(weights.sin())
            self.head.weight.copy_(torch.linspace(0.1, 0.8, hidden)[None])
            self.head.bias.zero_()

    def forward(self, text: str) -> torch.Tensor:
        ids = torch.tensor([min(127, ord(c)) for c in text] or [0])
        return self.head(self.embedding(ids).mean(dim=0))


device = "cuda" if torch.cuda.is_available() else "cpu"
scorer = CharacterScorer().to(device).eval()


@torch.no_grad()
def scorer_reward(completions, **kwargs):
    return torch.stack([scorer(completion) for completion in completions])  # of shape (N, 1)


def scorer_reward_with_grad(completions, **kwargs):
    return [torch.sigmoid(scorer(completion)).squeeze() for completion in completions]
