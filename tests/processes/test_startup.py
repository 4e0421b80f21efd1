"""How commands exit."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize("hangs", [False, True])
def test_a_pool_that_user_code_has_left_open_does_not_keep_the_command_from_exiting(hangs: bool):
    program = f"""
        import multiprocessing, time
        from concurrent.futures import ProcessPoolExecutor
        from cohort.processes import this_process as startup
        startup._POOLS_TIMEOUT_S = 60 * (not {hangs}) + 0.2
        def main():
            global pool
            pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
            assert list(pool.map(len, ["ab", "c"])) == [2, 1]
            if {hangs}:
                pool.submit(time.sleep, 3600)
            print(*multiprocessing.active_children(), flush=True)
            raise SystemExit(3)
        startup.run_and_exit(main)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 3 and "ForkProcess-1" in done.stdout, done.stderr
