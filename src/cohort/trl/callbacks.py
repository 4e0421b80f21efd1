"""States of callbacks, which checkpoints keep."""

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl, TrainerState


def note_states(state: TrainerState, handler: CallbackHandler, control: TrainerControl) -> None:
    """Put the states of callbacks into `state`."""
    callbacks = [c for c in (*handler.callbacks, control) if isinstance(c, ExportableState)]
    state.stateful_callbacks = TrainerState(stateful_callbacks=callbacks).stateful_callbacks


def restore_states(state: TrainerState, handler: CallbackHandler) -> None:
    """Replace callbacks by new ones with the states of a checkpoint, as transformers does."""
    saved = {
        name: iter(states if isinstance(states, list) else [states])
        for name, states in dict(state.stateful_callbacks or {}).items()
    }
    for place, callback in enumerate(handler.callbacks):
        if isinstance(callback, ExportableState) and (
            found := next(saved.get(type(callback).__name__, iter(())), None)
        ):
            handler.callbacks[place] = type(callback).from_state({"args": {}, "attributes": {}, **found})
