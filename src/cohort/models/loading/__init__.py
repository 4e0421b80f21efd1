"""Load a model: its folder, its files, and its weights from them."""
