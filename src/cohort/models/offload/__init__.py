"""Keep weights, master weights and activations in host memory."""
