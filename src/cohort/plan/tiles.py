"""Sizes of the logit tiles in which the LM head is computed, for the model and the plan."""

TILE_ELEMENTS = 1 << 24  # logits per tile: 64 MiB in float32
# Smaller tiles are as fast on CPU and take less memory.
CPU_TILE_ELEMENTS = 1 << 22
# Measured on CPU (docs/log.md): more tokens per tile write the weight's gradient less often, fewer the hidden states'.
TILE_TOKENS = 2048
# Tokens per full-vocabulary tile on a GPU. Each tile reads the weight and its gradient once, which takes as long as
# multiplying a few hundred tokens: smaller tiles are memory-bound.
LOSS_TILE_TOKENS = 1024


def tile_shape(num_tokens: int, num_ids: int, tile_elements: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of at most `tile_elements` logits."""
    t = num_tokens if num_tokens * num_ids <= tile_elements else min(num_tokens, TILE_TOKENS, tile_elements)
    t = max(1, t)
    return t, min(num_ids, max(1, tile_elements // t))


def loss_tile_elements(num_ids: int, *, on_gpu: bool) -> int:
    """Logits per full-vocabulary tile with `gradients_in_forward`."""
    return max(TILE_ELEMENTS, LOSS_TILE_TOKENS * num_ids) if on_gpu else TILE_ELEMENTS


def loss_tile_tokens(num_tokens: int, num_ids: int, tile_elements: int) -> int:
    """Tokens per full-vocabulary tile."""
    return max(1, min(num_tokens, tile_elements // num_ids))


def copied_weight_rows(num_ids: int, width: int, tile_elements: int) -> int:
    """Rows of the head weight [num_ids, width] that are cast at a time: at most a tile's size."""
    return max(1, min(num_ids, tile_elements // width))
