"""No secret gets into a file or onto a page."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config.schema import Config, sections_in
from cohort.run.provenance import HIDDEN, hide, hide_in_text, is_secret_key
from selection import examples

SECRET_KEYS = (
    *("password", "api_key", "apiKey", "apikey", "OPENAI_API_KEY", "rewards.0.args.api_key", "HF_TOKEN", "hub-token"),
    *("client_secret", "Authorization", "headers", "X-Amz-Signature", "Set-Cookie", "sslpassphrase.passphrase"),
    *("environment.args.headers.X-Own", "SENTRY_DSN", "PGPASSWORD", "mysqlpasswd", "passcode", "AWS_ACCESS_KEY_ID"),
)
OTHER_KEYS = (
    *("api_key_env", "rollout.secret_file", "max_prompt_tokens", "completion_token_ids", "keys and values", ""),
    *("answer_key", "author", "eos_token", "eos_token_id", "monkey", "sampling_correction"),
)


@pytest.mark.parametrize(
    ("key", "is_secret"),
    [*((key, True) for key in SECRET_KEYS), *((key, False) for key in OTHER_KEYS)],
)
def test_keys_of_secrets(key: str, is_secret: bool):
    assert is_secret_key(key) == is_secret


def test_no_key_of_the_configuration_names_a_secret():
    def keys(annotation: object, place: str) -> Iterator[str]:
        for section in sections_in(annotation):
            for key, field in section.model_fields.items():
                yield f"{place}{key}"
                yield from keys(field.annotation, f"{place}{key}.")

    found = [key for name, field in Config.model_fields.items() for key in keys(field.annotation, f"{name}.")]
    assert [key for key in found if is_secret_key(key)] == []
    assert len(found) > 100


def test_arguments():
    given = ["cohort", "train", "a.yaml", "rewards.0.args.api_key=sk-1", "--token", "t0", "--password=p", "x.token="]
    shown = ["cohort", "train", "a.yaml", "rewards.0.args.api_key=***", "--token", "***", "--password=***", "x.token="]
    given += ["run.dir=b", "rewards=[{use: judge, api_key: abc}]"]
    shown += ["run.dir=b", "rewards=[{use: judge, api_key: ***"]
    assert hide(given) == shown
    assert hide(["judge.url=http://me:pw@host:1/v1"]) == ["judge.url=http://***@host:1/v1"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://host/a@b", "GET https://host/a@b"),
        ("https://host:8000/a@b", "https://host:8000/a@b"),
        ("https://host/?api_key=1&q=2 and http://a:b@c", "https://host/?api_key=*** and http://***@c"),
        ("mail me@host", "mail me@host"),
        ("train.micro_batch_tokens=2560, rollout.secret_file: not set", None),
        ("16 of 32 tokens: 0.5; key figures", None),
        ("commit 0123456789abcdef0123456789abcdef01234567", None),
    ],
)
def test_texts_with_and_without_secrets(text: str, shown: str | None):
    assert hide_in_text(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:S3CR3T@host/path",
        "https://S3CR3T@host/path",
        "postgres://u:p@S3CR3T@host/db",
        "redis://:S3CR3T@[::1]:6379/0",
        "HTTPS://U:S3CR3T@HOST",
        "see http://a:S3CR3T@b and http://c:S3CR3T@d",
        "https://h/x?token=S3CR3T",
        "https://h/x?a=1&access_token=S3CR3T#f",
        "https://h/#access_token=S3CR3T&x=1",
        "https://s3/x?X-Amz-Credential=S3CR3T&X-Amz-Signature=S3CR3T",
        "https://blob/x?sv=2&sig=S3CR3T%3D",
        "--api-key S3CR3T",
        "--api-key=S3CR3T",
        "--api-key 'a S3CR3T b' --steps 3",
        "HF_TOKEN=S3CR3T cohort train a.yaml",
        "rewards.0.args.api_key=S3CR3T",
        "rewards.0.args={api_key: S3CR3T, url: x}",
        'judge={"headers": {"X-Own": "S3CR3T"}}',
        '{"api_key": "a\\"S3CR3T"}',
        '"{\\"api_key\\": \\"S3CR3T\\"}"',
        "password : S3CR3T",
        "password=a,S3CR3T",
        "password=a&S3CR3T",
        "Authorization: Bearer S3CR3T",
        "authorization: basic S3CR3T==",
        "-H 'Authorization: Bearer S3CR3T'",
        "-H 'X-Api-Key: S3CR3T'",
        "--header 'X-Own: S3CR3T'",
        "curl -H Bearer\tS3CR3T-long-enough",
        "sk-S3CR3Tabcdefghijklmnop",
        "key is hf_S3CR3Tabcdefghijklmnop",
        "ghp_S3CR3Tabcdefghijklmnopqrst",
        "eyJhbGciOiJI.eyJzdWIiOiIx.S3CR3T",
    ],
)
def test_texts_with_secrets(text: str):
    assert "S3CR3T" not in hide_in_text(text)
    assert "S3CR3T" not in json.dumps(hide({"command": text, "list": [text], "nested": {"args": {"x": text}}}))


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": "S3CR3T"},
        {"api_key": ["S3CR3T", {"x": "S3CR3T"}]},
        {"headers": {"X-Own": "S3CR3T", "Accept": "S3CR3T"}},
        {"server_args": ["--api-key", "S3CR3T", "--port", "1"]},
        {"https://u:S3CR3T@host": 1},
        ["--password", "S3CR3T"],
    ],
)
def test_values_with_secrets(value):
    assert "S3CR3T" not in json.dumps(hide(value))


def test_what_is_no_secret_stays():
    value = {
        "rollout": {"urls": ["http://host:8000"], "secret_file": "/run/s", "max_prompt_tokens": 64, "token": None},
        "rewards": [{"use": "judge", "args": {"api_key_env": "JUDGE_KEY", "headers": False}}],
        "where": {"source": ["math", 1, 2.5, True]},
    }
    assert hide(value) == value


@examples(500, quick=50)
@given(st.text(max_size=200))
def test_any_text_is_taken(text: str):
    assert hide_in_text(hide_in_text(text)) == hide_in_text(text)
    assert hide({"password": text}) == {"password": HIDDEN if text else ""}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("part", ["a", "a-", "://", "a:", "--token ", "key=", "'", '"', "\\", "@", "bearer "])
def test_long_texts_take_no_quadratic_time(part: str):
    assert len(hide_in_text(part * (20_000 // len(part)))) <= 20_000


def test_values_of_environment_variables(monkeypatch: pytest.MonkeyPatch):
    """Wherever they stand, without a name beside them."""
    monkeypatch.setenv("JUDGE_API_KEY", "correct horse battery")
    monkeypatch.setenv("RUN_NAME", "monday run")
    text = "the server of monday run answered: correct horse battery is no key"
    assert hide_in_text(text) == f"the server of monday run answered: {HIDDEN} is no key"


def test_the_working_directory_is_no_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/me/experiments")
    monkeypatch.setenv("OLDPWD", "/home/me/models")
    monkeypatch.setenv("MYSQL_PWD", "hunter2hunter2")
    text = "/home/me/experiments/run /home/me/models/base hunter2hunter2"
    assert hide_in_text(text) == f"/home/me/experiments/run /home/me/models/base {HIDDEN}"
