"""The tiles of logits in which a head is computed: the policy takes these, and a plan counts them."""

TILE_ELEMENTS = 1 << 24  # of one logits tile: 64 MiB in float32
# Smaller ones are as fast on CPUs, and hold less.
CPU_TILE_ELEMENTS = 1 << 22
# Measured on CPU (docs/log.md): wider tiles write the weight's gradient less often, narrower ones the hidden states'.
TILE_TOKENS = 2048
# Of a tile of the whole vocabulary on a GPU. Each goes through the weight and its gradient once, which takes as long as
# multiplying some hundred tokens: in fewer of them the GPU waits for its memory.
LOSS_TILE_TOKENS = 1024


def tile_shape(num_tokens: int, num_ids: int, tile_elements: int) -> tuple[int, int]:
    """Tokens and token ids of a tile of at most `tile_elements` logits."""
    t = num_tokens if num_tokens * num_ids <= tile_elements else min(num_tokens, TILE_TOKENS, tile_elements)
    t = max(1, t)
    return t, min(num_ids, max(1, tile_elements // t))


def loss_tile_elements(num_ids: int, *, on_gpu: bool) -> int:
    """Logits of a tile that has the whole vocabulary, where a loss is differentiated in forward."""
    return max(TILE_ELEMENTS, LOSS_TILE_TOKENS * num_ids) if on_gpu else TILE_ELEMENTS


def loss_tile_tokens(num_tokens: int, num_ids: int, tile_elements: int) -> int:
    """Tokens of such a tile."""
    return max(1, min(num_tokens, tile_elements // num_ids))


def rows_of_copies(num_ids: int, width: int, tile_elements: int) -> int:
    """How many token ids' weights of `width` numbers are copied at a time, to another dtype: as many as a tile's."""
    return max(1, min(num_ids, tile_elements // width))
