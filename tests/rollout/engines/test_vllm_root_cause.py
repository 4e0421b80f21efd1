"""What a server's log says of its end. The logs are vLLM's own, shortened."""

import pytest

from cohort.rollout.engines.vllm.server import root_cause

CORE = "(EngineCore pid=277) ERROR 11-22 11:24:58 [core.py:1512] "
API = "(APIServer pid=200) ERROR 11-22 11:24:58 [async_llm.py:906] "
DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the cause."
)
TRACEBACK = "Traceback (most recent call last):\n"

ENGINE = f"""\
(APIServer pid=200) WARNING 11-22 11:24:37 [system_utils.py:255] such as `OSError: [Errno 24] Too many open files`
{CORE}EngineCore encountered a fatal error.
{CORE}{TRACEBACK}\
(APIServer pid=200) INFO 11-22 11:24:58 [launcher.py:61] Route: /health
{CORE}  File "vllm/v1/engine/core.py", line 1503, in run_engine_core
{CORE}    engine_core.run_busy_loop()
{CORE}           ^^^^^^^^^^^^^^^^^^^^^^^^^
{CORE}RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0
{API}AsyncLLM output_handler failed.
{API}{TRACEBACK}\
{API}  File "vllm/v1/engine/core_client.py", line 1235, in get_output_async
{API}    raise self._format_exception(outputs) from None
{API}{DEAD}
(APIServer pid=200) INFO 11-22 11:24:58 [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore
"""
START = f"""\
(EngineCore pid=277) Process EngineCore:
(EngineCore pid=277) {TRACEBACK}\
(EngineCore pid=277)   File "vllm/v1/engine/core.py", line 1, in run_engine_core
(EngineCore pid=277) ValueError: No available memory for the cache blocks.
(APIServer pid=200) {TRACEBACK}\
(APIServer pid=200)   File "vllm/v1/engine/utils.py", line 1, in wait_for_engine_startup
(APIServer pid=200) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
CHAIN = f"""\
{TRACEBACK}  File "a.py", line 1, in f
KeyError: 'lm_head.weight'

The above exception was the direct cause of the following exception:

{TRACEBACK}  File "b.py", line 1, in g
ValueError: the weights cannot be loaded
ERROR:    Application startup failed. Exiting.
"""
PYDANTIC = f"""\
(APIServer pid=200) {TRACEBACK}\
(APIServer pid=200)   File "a.py", line 1, in f
(APIServer pid=200) pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=200)   Value error, max_model_len is too large [type=value_error]
(APIServer pid=200)     For further information visit the documentation
"""
WHILE_HANDLED = f"""\
{TRACEBACK}  File "a.py", line 1, in f
KeyError: 'foo'

During handling of the above exception, another exception occurred:

{TRACEBACK}  File "b.py", line 1, in g
ValueError: the checkpoint has model type foo, which is not known
"""
WORKERS = """\
(EngineCore pid=1) (Worker_TP0 pid=2) ERROR 11-22 11:24:58 [w.py:1] Traceback (most recent call last):
(EngineCore pid=1) (Worker_TP0 pid=2) INFO 11-22 11:24:58 [l.py:1] Loading shards
(EngineCore pid=1) (Worker_TP0 pid=2) ERROR 11-22 11:24:58 [w.py:1]   File "a.py", line 1, in f
(EngineCore pid=1) (Worker_TP0 pid=2) ERROR 11-22 11:24:58 [w.py:1] torch.OutOfMemoryError: CUDA out of memory.
"""
IN_A_DESTRUCTOR = f"""\
{CHAIN}
Exception ignored in: <function Engine.__del__ at 0x7f>
{TRACEBACK}  File "c.py", line 1, in __del__
AttributeError: 'NoneType' object has no attribute 'close'
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (ENGINE, "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"),
        (START, "ValueError: No available memory for the cache blocks."),
        (CHAIN, "KeyError: 'lm_head.weight'"),
        (WHILE_HANDLED, "ValueError: the checkpoint has model type foo, which is not known"),
        (WORKERS, "torch.OutOfMemoryError: CUDA out of memory."),
        (IN_A_DESTRUCTOR, "KeyError: 'lm_head.weight'"),
        (
            PYDANTIC,
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len is too large [type=value_error]\n"
            "    For further information visit the documentation",
        ),
        (f"{API}{TRACEBACK}{API}  File\n{API}{DEAD}\n", None),  # its engine was killed and said nothing
        ("usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice\n", None),
        ("", None),
    ],
)
def test_the_cause_is_the_first_exception_and_not_what_follows_from_it(log: str, cause: str | None):
    assert root_cause(log) == cause


def test_a_long_message_is_cut():
    log = f"{CORE}{TRACEBACK}{CORE}  File\n{CORE}ValueError: many\n" + "".join(f"{CORE}line {n}\n" for n in range(100))
    found = root_cause(log)
    assert found is not None and found.splitlines() == ["ValueError: many", *(f"line {n}" for n in range(11))]
