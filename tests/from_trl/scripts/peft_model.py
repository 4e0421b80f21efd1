"""A PeftModel, which is merged after training."""

from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), LoraConfig(r=4, target_modules=["q_proj"]))
model.print_trainable_parameters()
trainer = GRPOTrainer(
    model,
    reward_funcs=[lambda completions, **kwargs: [float(len(c)) for c in completions]],
    args=GRPOConfig(
        "out", max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=4, beta=0.04
    ),
    train_dataset=[{"prompt": "hello"}],
    processing_class=AutoTokenizer.from_pretrained("base", padding_side="left"),
)
trainer.train()
trainer.model.save_pretrained("adapter")
trainer.save_model("final")
merged = AutoPeftModelForCausalLM.from_pretrained("final").merge_and_unload()
