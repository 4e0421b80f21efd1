"""Callbacks: a class, an instance, one that is added, and early stopping."""

from transformers import EarlyStoppingCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Printer(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.events.append(("begin", state.max_steps, sum(p.numel() for p in model.parameters()) > 0))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_evaluate = control.should_save = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "reward" in logs:
            self.events.append(("log", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))


class Stopper(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= 3:
            control.should_training_stop = True
        return control


printer = Printer()
rows = [{"prompt": f"say {n}"} for n in range(6)]
trainer = GRPOTrainer(
    model="base",
    reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
    args=GRPOConfig(
        "out",
        max_steps=5,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=50,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    ),
    train_dataset=rows,
    eval_dataset=rows[:2],
    callbacks=[printer, EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.add_callback(Stopper)
trainer.train()
