"""LoRA adapters: in a model, as peft's folders, and merged into their base."""
