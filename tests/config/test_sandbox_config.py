"""The section `sandbox`."""

import pytest

from cohort.config import config_from_dict
from cohort.errors import UserError

BASE = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


@pytest.mark.parametrize(
    ("rewards", "sandbox", "match"),
    [
        ([{"use": "math"}], {"memory": "1GB"}, "1GB has no effect with rewards and tools that run no code"),
        ([{"use": "code"}], {"memory": "1"}, "memory"),
        ([{"use": "code"}], {"backend": "sandbox_fusion"}, "needs url"),
        ([{"use": "code"}], {"url": "http://x"}, "url: http://x has no effect with backend: auto"),
        ([{"use": "code"}], {"backend": "sandlock", "image": "x"}, "image: x has no effect with backend: sandlock"),
        (
            [{"use": "code"}],
            {"backend": "container", "packages": ["numpy"]},
            r"packages: \('numpy',\) has no effect with backend: container; remove it, and install them in the image",
        ),
        (
            [{"use": "code"}],
            {"backend": "sandbox_fusion", "url": "http://x", "packages": ["numpy"]},
            r"packages: .* has no effect with backend: sandbox_fusion; remove it, and install them in the server",
        ),
        (
            [{"use": "code"}],
            {"backend": "sandbox_fusion", "url": "http://x", "confinement": "none"},
            "confinement: none has no effect with backend: sandbox_fusion",
        ),
        ([{"use": "code"}], {"max_concurrent": 0}, "at least 1, or auto"),
        ([{"use": "code"}], {"max_open_files": 3}, "16"),
    ],
)
def test_messages(rewards, sandbox, match):
    with pytest.raises(UserError, match=match):
        config_from_dict({**BASE, "rewards": rewards, "sandbox": sandbox})


def test_defaults_and_values():
    plain = config_from_dict({**BASE, "rewards": [{"use": "math"}]})
    assert (plain.sandbox.backend, plain.sandbox.max_concurrent, plain.sandbox.wall_s) == ("auto", "auto", 30.0)
    config = config_from_dict({**BASE, "rewards": [{"use": "code"}], "sandbox": {"packages": ["numpy"], "cpu_s": 5}})
    assert (config.sandbox.packages, config.sandbox.cpu_s) == (("numpy",), 5)


@pytest.mark.parametrize(("former", "level"), [(True, "none"), (False, "full")])
def test_the_former_key_of_the_confinement_is_read(former, level):
    config = config_from_dict({**BASE, "rewards": [{"use": "code"}], "sandbox": {"unsafe_no_sandbox": former}})
    assert config.sandbox.confinement == level


@pytest.mark.parametrize(
    "sections",
    [
        {"rewards": [{"use": "reasoning_gym"}]},
        {"rewards": [{"use": "math"}], "rollout": {"environment": "reasoning_gym:countdown"}},
    ],
)
def test_scorers_of_reasoning_gym_run_in_the_sandbox(sections):
    config = config_from_dict({**BASE, **sections, "sandbox": {"packages": ["reasoning-gym"]}})
    assert config.sandbox.packages == ("reasoning-gym",)
