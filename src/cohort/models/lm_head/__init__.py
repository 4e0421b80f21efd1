"""The language-model head: logprobs and losses without the logits of a whole batch."""
