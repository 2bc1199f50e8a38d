"""Log-uniform (Zipfian) sampling of negatives for a sampled softmax."""

import math

import torch
from torch import Tensor


def log_uniform_probability(ids: Tensor, vocab_size: int) -> Tensor:
    """Probability that one draw gives each id.

    ``P(k) = log((k + 2) / (k + 1)) / log(V + 1)``: close to Zipf's law for ids that are sorted by frequency.

    Args:
        ids: Word ids, any shape.
        vocab_size: Number of words V.

    Returns:
        The probabilities in fp64; over all V ids they sum to one.
    """
    return torch.log1p(1.0 / (ids.double() + 1.0)) / math.log(vocab_size + 1)


def log_inclusion(ids: Tensor, vocab_size: int, draws: int) -> Tensor:
    """Logarithm of the probability that an id is among the distinct ids of ``draws`` draws.

    ``Q(k) = 1 - (1 - P(k)) ** draws``. Subtracting ``log Q`` from the logits makes the softmax over the candidates
    learn the logits of the full softmax.

    Args:
        ids: Word ids, any shape.
        vocab_size: Number of words.
        draws: Number of draws, with replacement.

    Returns:
        ``log Q`` in fp32.
    """
    p = log_uniform_probability(ids, vocab_size)
    return torch.log(-torch.expm1(draws * torch.log1p(-p))).float()


def draw_negatives(vocab_size: int, draws: int, generator: torch.Generator) -> Tensor:
    """Draw negatives and keep each one once.

    A log-uniform sample repeats the frequent words many times. A repeated candidate adds nothing but arithmetic, so
    the distinct ones are kept and :func:`log_inclusion` says how likely each was to be among them.

    Args:
        vocab_size: Number of words.
        draws: Number of draws, with replacement.
        generator: Source of randomness.

    Returns:
        The distinct ids in increasing order, at most ``draws`` of them.
    """
    u = torch.rand(draws, dtype=torch.float64, generator=generator)
    ids = torch.exp(u * math.log(vocab_size + 1)).long() - 1
    # u close to 1 can round up to V.
    distinct: Tensor = torch.unique(ids.clamp_(0, vocab_size - 1))
    return distinct
