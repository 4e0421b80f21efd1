"""vLLM in the processes that train."""

from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="out",
    max_steps=1,
    num_generations=2,
    max_completion_length=4,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    vllm_max_model_len=512,
)
trainer = GRPOTrainer("base", lambda completions, **_: [0.0 for _ in completions], args, [{"prompt": "hello"}])
trainer.train()
