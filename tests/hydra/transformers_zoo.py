"""Models of the transformers library as they are, with few and small layers and random weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it

from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.hydra.zoo import Base, sgd

WORDS = 19
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class FromTransformers(Base):
    """A model that is given tokens and labels, and makes its loss."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, use_cache: bool = False) -> None:
        super().__init__(optimizer)
        self.model: Any = self.build(use_cache)

    def build(self, use_cache: bool) -> Any:
        raise NotImplementedError

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(input_ids=x, labels=y).loss


class GPT2(FromTransformers):
    """Learned positions, one matrix for embedding and head, dropout."""

    def build(self, use_cache: bool) -> Any:
        config = GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=32, n_layer=5, n_head=2, use_cache=use_cache, **_SPECIAL
        )
        return GPT2LMHeadModel(config)


class Llama(FromTransformers):
    """Rotary positions that all blocks are given, fewer heads for keys than for queries."""

    def build(self, use_cache: bool) -> Any:
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8, use_cache=use_cache, **_SPECIAL,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class CheckpointedGPT2(GPT2):
    """With the library's own activation checkpointing around each block."""

    def build(self, use_cache: bool) -> Any:
        model = super().build(use_cache)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


class DistilledLlama(Llama):
    """Its loss depends on what comes out of a block in the middle, which a hook of the library's hands out."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.model(input_ids=x, labels=y, output_hidden_states=True)
        assert len(made.hidden_states) == 6
        return made.loss + 0.1 * made.hidden_states[2].pow(2).mean()


class T5(FromTransformers):
    """Two lists of blocks; the first block of each makes a bias for all that follow."""

    def build(self, use_cache: bool) -> Any:
        config = T5Config(
            vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=4, num_heads=2, use_cache=use_cache,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)
